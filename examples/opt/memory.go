package main

import (
	"math"
	"runtime"
	"runtime/debug"

	"gorgonia.org/leanattention/internal/memory"
)

// limitMemory keeps the heap within what the machine has, so that a large cache does
// not let as much garbage gather beside it, which is what Go's collector does
// without a limit. One that GOMEMLIMIT sets stays. The function that it returns puts
// back what was there.
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
