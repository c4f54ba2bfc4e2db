package decoder

import (
	"syscall"
	"time"
)

// sleep is time.Sleep that ends in time: timers of Go's runtime may be a millisecond late. A signal may end it early.
func sleep(d time.Duration) {
	t := syscall.NsecToTimespec(int64(d))
	_ = syscall.Nanosleep(&t, nil)
}
