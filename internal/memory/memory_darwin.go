package memory

import "golang.org/x/sys/unix"

// now is all of the machine's memory: the system does not say simply what is free.
func now() (Free, bool) {
	n, err := unix.SysctlUint64("hw.memsize")
	return Free{Bytes: int64(n), Total: int64(n), Of: "the machine"}, err == nil
}
