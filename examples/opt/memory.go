package main

import (
	"math"
	"runtime"
	"runtime/debug"

	"gorgonia.org/leanattention/internal/memory"
)

// limitMemory limits the heap to the machine's memory, so that less garbage gathers beside a large cache than Go's
// collector would allow without a limit. A limit of GOMEMLIMIT stays. restore resets the limit.
func limitMemory() (restore func()) {
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
