package model

import (
	"os"
	"runtime"
	"runtime/debug"
)

// garbageBytes is some layers of a prompt's values.
const garbageBytes = 256 << 20

// LimitGarbage has Go's collector begin when there are 256 MB of garbage, if it would wait for more: it waits for as much
// as is in use, which is the weights, where these are not mapped from a file. Values of a prompt then lie in memory that
// others had before. New memory takes longer to come by than many a node to compute.
//
// It is a setting of the process, so it is for programs, behind loading. One that GOGC sets stays. The function that it
// returns puts back what was there.
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

// garbagePercent is how much garbage there may be of so many bytes in use, in percent; negative: any.
func garbagePercent(inUse int64, percent int) int {
	return int(min(max(100*garbageBytes/max(inUse, 1), 1), int64(percent)))
}
