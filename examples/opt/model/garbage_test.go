package model

import (
	"runtime/debug"
	"testing"
)

// TestLimitGarbage: beside much memory in use the collector begins at 256 MB of garbage, beside little where it did; nothing
// changes where it is off, or where GOGC says something, and what was there comes back.
func TestLimitGarbage(t *testing.T) {
	for _, c := range []struct {
		inUse         int64
		percent, want int
	}{{0, 100, 100}, {1 << 20, 100, 100}, {256 << 20, 100, 100}, {1 << 30, 100, 25}, {1 << 30, 10, 10}, {4 << 30, 100, 6}, {1 << 40, 100, 1}, {1 << 40, -1, -1}} {
		if p := garbagePercent(c.inUse, c.percent); p != c.want {
			t.Errorf("%d MB in use, %d%%: %d%%, want %d%%", c.inUse>>20, c.percent, p, c.want)
		}
	}
	percent := func() int {
		p := debug.SetGCPercent(100)
		debug.SetGCPercent(p)
		return p
	}
	defer debug.SetGCPercent(debug.SetGCPercent(1 << 20))
	t.Setenv("GOGC", "")
	restore := LimitGarbage()
	if p := percent(); p >= 1<<20 {
		t.Errorf("with some MB in use the collector begins at %d%%", p)
	}
	restore()
	if p := percent(); p != 1<<20 {
		t.Errorf("then it begins at %d%%", p)
	}
	t.Setenv("GOGC", "100")
	defer LimitGarbage()()
	if p := percent(); p != 1<<20 {
		t.Errorf("GOGC is set, and the collector begins at %d%%", p)
	}
}
