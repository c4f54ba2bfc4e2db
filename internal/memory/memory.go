// Package memory returns how much memory of the host a process may still take. Go ends a process that takes more, and
// no caller can recover. So callers check sizes that come from a user or a file before they allocate.
package memory

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"time"
)

// Free is memory that can be allocated.
type Free struct {
	Bytes int64  // bytes until the system refuses, or ends the process
	Idle  int64  // the part of Bytes between values of Go's heap; 0 if the heap's size has no limit
	Total int64  // total bytes
	Of    string // owner of the limit: "the machine", a cgroup, or a limit of the process
}

func (f Free) String() string {
	return fmt.Sprintf("%d of %d bytes of %s are free", f.Bytes, f.Total, f.Of)
}

// Shortage is the error of [Check].
type Shortage struct {
	Bytes int64 // requested bytes
	Free  Free
}

func (s *Shortage) Error() string {
	if s.Bytes <= s.Free.Bytes {
		return fmt.Sprintf("%v, but %d of them in pieces between other values", s.Free, s.Free.Idle)
	}
	return s.Free.String()
}

// Now returns the free memory: the least of the machine's memory and the limits of the process. known is false on
// systems without this information.
var Now = now

// Replace makes Now another function, for tests, until restore is called.
func Replace(by func() (Free, bool)) (restore func()) {
	was := Now
	set := func(f func() (Free, bool)) {
		Now = f
		allowance.Store(nil)
	}
	set(by)
	return func() { set(was) }
}

// has reports whether values of the given total bytes fit, the largest of which has largest bytes. Idle memory is
// fragmented: half of the idle bytes count as the largest piece.
func (f Free) has(bytes, largest int64) bool {
	return bytes <= f.Bytes && largest <= max(f.Bytes-f.Idle, f.Idle/2)
}

// Check returns a *[Shortage] if values of the given total bytes exceed the free memory. The largest value has
// largest bytes. Garbage of Go's heap counts as free. Check queries the system again after a quarter of the free bytes
// has been asked for, and after a tenth of a second.
func Check(bytes, largest int64) error {
	// Of a quarter of the free bytes, a largest value of any size fits: see has.
	if a := allowance.Load(); a != nil && bytes <= a.bytes.Load() && a.bytes.Add(-bytes) >= 0 && time.Now().Before(a.until) {
		return nil
	}
	f, err := check(bytes, largest)
	if err != nil {
		return err
	}
	a := &allowed{until: time.Now().Add(100 * time.Millisecond)}
	a.bytes.Store((f.Bytes - bytes) / 4) // negative on a system without this information, where a query costs nothing
	allowance.Store(a)
	return nil
}

func check(bytes, largest int64) (Free, error) {
	f, known := Now()
	if !known || f.has(bytes, largest) {
		return f, nil
	}
	runtime.GC() // a sync.Pool drops its values at the second collection
	debug.FreeOSMemory()
	if f, known = Now(); !known || f.has(bytes, largest) {
		return f, nil
	}
	return f, &Shortage{bytes, f}
}

// allowed is the number of bytes that checks may pass before the next query of the system.
type allowed struct {
	bytes atomic.Int64
	until time.Time
}

var allowance atomic.Pointer[allowed]
