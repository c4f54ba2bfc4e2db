// Package memory tells how much memory of the host a process may still take. Go ends a process that takes more: no caller can
// recover from that, so whatever takes memory as a user or a file says asks here first.
package memory

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"time"
)

// Free is memory that can be taken.
type Free struct {
	Bytes int64  // that can be taken before the system refuses, or ends the process
	Idle  int64  // of them, in pieces between values of Go's heap; 0 where the heap's size has no limit
	Total int64  // that there is in all
	Of    string // whose: "the machine", a cgroup, or a limit of the process
}

func (f Free) String() string {
	return fmt.Sprintf("%d of %d bytes of %s are free", f.Bytes, f.Total, f.Of)
}

// Shortage is the error of [Check] and [Claim].
type Shortage struct {
	Bytes int64 // that were asked for
	Free  Free
}

func (s *Shortage) Error() string {
	if s.Bytes <= s.Free.Bytes {
		return fmt.Sprintf("%v, but %d of them in pieces between other values", s.Free, s.Free.Idle)
	}
	return s.Free.String()
}

// Now is what is free at present: the least of what the machine has and what the
// limits of the process leave. known is false on systems that do not tell.
var Now = now

// has says whether there is room for values of so many bytes, the largest of which has so many. Idle memory lies in pieces: the
// largest piece is taken for half of it.
func (f Free) has(bytes, largest int64) bool {
	return bytes <= f.Bytes && largest <= max(f.Bytes-f.Idle, f.Idle/2)
}

// Check returns a *[Shortage] if values of so many bytes, the largest of which has so many, are more than what is free. Memory of
// Go's heap that is garbage counts as free.
func Check(bytes, largest int64) error {
	allowance.Store(nil)
	_, err := check(bytes, largest)
	return err
}

func check(bytes, largest int64) (Free, error) {
	f, known := Now()
	if !known || f.has(bytes, largest) {
		return f, nil
	}
	runtime.GC() // a sync.Pool gives up its values at the second collection
	debug.FreeOSMemory()
	if f, known = Now(); !known || f.has(bytes, largest) {
		return f, nil
	}
	return f, &Shortage{bytes, f}
}

// allowed is what claims may take before the system is asked again.
type allowed struct {
	bytes atomic.Int64
	until time.Time
}

var allowance atomic.Pointer[allowed]

// Claim is [Check] for one value of those that are made often, such as outputs of nodes. It asks the system again when a quarter of what
// was free has been claimed, and after a tenth of a second.
func Claim(bytes int64) error {
	if a := allowance.Load(); a != nil && a.bytes.Add(-bytes) >= 0 && time.Now().Before(a.until) {
		return nil
	}
	f, err := check(bytes, bytes)
	if err != nil {
		return err
	}
	a := &allowed{until: time.Now().Add(100 * time.Millisecond)}
	a.bytes.Store((f.Bytes - bytes) / 4) // of a system that does not tell it is negative, and asking costs nothing
	allowance.Store(a)
	return nil
}
