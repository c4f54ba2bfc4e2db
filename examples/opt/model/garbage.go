package model

import (
	"os"
	"runtime"
	"runtime/debug"
)

// garbageBytes is the size of some layers of a prompt's values.
const garbageBytes = 256 << 20

// LimitGarbage makes Go's collector begin at 256 MB of garbage, if it would wait for more: by default it waits for as
// much garbage as memory in use, weights included if these are not mapped from a file. Values of a prompt then reuse
// memory. Fresh memory takes longer to get than many a node to compute.
//
// LimitGarbage changes a setting of the process, so it is for programs, after loading. A setting of GOGC stays.
// restore resets the setting.
func LimitGarbage() (restore func()) {
	if os.Getenv("GOGC") != "" {
		return func() {}
	}
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	before := debug.SetGCPercent(100)
	debug.SetGCPercent(garbagePercent(int64(m.HeapAlloc), before))
	return func() { debug.SetGCPercent(before) }
}

// garbagePercent returns the limit of garbage for the bytes in use, in percent; negative: none.
func garbagePercent(inUse int64, percent int) int {
	return int(min(max(100*garbageBytes/max(inUse, 1), 1), int64(percent)))
}
