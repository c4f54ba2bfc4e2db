package main

import (
	"fmt"
	"math"
	"os"
	"runtime"
	"runtime/debug"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/internal/memory"

	"gorgonia.org/tensor"
)

// checkMemory returns ErrOutOfMemory with both numbers if the machine, or the process, has too little memory for the weights of a
// network on the CPU. Go would end the process. Weights of a type that is not known yet count as 16 bits.
func (m *modelFlags) checkMemory(n decoder.Network) error {
	if m.options.Device != nil { // one weight after the other goes to the GPU
		return nil
	}
	var all, largest int64
	seen := map[decoder.Rows]bool{}
	for w := range n.Weights() {
		from := w.From
		if from.Name == "" {
			from = decoder.Rows{Name: w.Name, Rows: w.Shape[0]}
		}
		if seen[from] {
			continue
		}
		seen[from] = true
		bytes := int64(2)
		if len(w.Shape) == 1 || m.options.Weights == tensor.Float32 {
			bytes = 4
		}
		for _, d := range w.Shape {
			if bytes > math.MaxInt64/int64(max(d, 1)) {
				return fmt.Errorf("weight %s of shape %v: %w", w.Name, w.Shape, la.ErrOutOfMemory)
			}
			bytes *= int64(d)
		}
		if all > math.MaxInt64-bytes {
			return fmt.Errorf("the weights: %w", la.ErrOutOfMemory)
		}
		all, largest = all+bytes, max(largest, bytes)
	}
	if err := memory.Check(all, largest); err != nil {
		return fmt.Errorf("the weights take at least %d bytes, and %w: %w", all, err, la.ErrOutOfMemory)
	}
	return nil
}

// garbageBytes is the size of some layers of a prompt's values.
const garbageBytes = 256 << 20

// limitGarbage makes Go's collector begin at 256 MB of garbage, if it would wait for more: by default it waits for as much garbage
// as memory in use, which includes the weights. Values of a prompt then reuse memory. Fresh memory takes longer to get than many a
// node to compute. Settings of GOGC and GOMEMLIMIT stay. restore resets the settings of the process.
func limitGarbage() (restore func()) {
	restore = limitHeap()
	if os.Getenv("GOGC") != "" {
		return restore
	}
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	before := debug.SetGCPercent(100)
	debug.SetGCPercent(garbagePercent(int64(m.HeapAlloc), before))
	heap := restore
	return func() {
		debug.SetGCPercent(before)
		heap()
	}
}

// garbagePercent returns the limit of garbage for the bytes in use, in percent; negative: none.
func garbagePercent(inUse int64, percent int) int {
	return int(min(max(100*garbageBytes/max(inUse, 1), 1), int64(percent)))
}

// limitHeap limits the heap to the machine's memory, so that less garbage gathers beside a large cache than Go's collector would
// allow without a limit.
func limitHeap() (restore func()) {
	before := debug.SetMemoryLimit(-1)
	free, known := memory.Now()
	if before != math.MaxInt64 || !known {
		return func() {}
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	debug.SetMemoryLimit(int64(m.Sys) + free.Bytes/10*9)
	return func() { debug.SetMemoryLimit(before) }
}
