// Package memory tells how much memory of the host a process may still take.
package memory

import (
	"errors"
	"fmt"
	"runtime/debug"
)

// Free is memory that can be taken.
type Free struct {
	Bytes int64  // that can be taken before the system refuses, or ends the process
	Total int64  // that there is in all
	Of    string // whose: "the machine", or a cgroup
}

func (f Free) String() string {
	return fmt.Sprintf("%d of %d bytes of %s are free", f.Bytes, f.Total, f.Of)
}

// Now is what is free at present: the least of what the machine has and what the
// limits of the process leave. known is false on systems that do not tell.
var Now = now

// Check returns an error if bytes are more than what is free. Memory of Go's heap that
// is garbage counts as free.
func Check(bytes int64) error {
	f, known := Now()
	if !known || bytes <= f.Bytes {
		return nil
	}
	debug.FreeOSMemory()
	if f, known = Now(); !known || bytes <= f.Bytes {
		return nil
	}
	return errors.New(f.String())
}
