package main

import (
	"math"
	"os"
	"runtime"
	"runtime/debug"

	"gorgonia.org/leanattention/internal/memory"
)

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
