package leanattention

import (
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/memory"
)

// CheckMemory returns [ErrOutOfMemory] if this process cannot take some more bytes of the host's memory. largest is the size of
// the largest value among these bytes. The text has the free bytes, and the owner of their limit: the machine, a cgroup, or the
// process. Go ends a process that takes more. On systems that do not tell, CheckMemory returns nil.
//
// [NewCache] and the nodes of this module check the memory for their own values.
func CheckMemory(bytes, largest int64) error {
	const op = "CheckMemory"
	if largest < 0 || largest > bytes {
		return errs.Errorf(op, ErrShape, "%d bytes, of which the largest value has %d", bytes, largest)
	}
	if err := memory.Check(bytes, largest); err != nil {
		return errs.Errorf(op, ErrOutOfMemory, "%d bytes in %s: %v", bytes, errs.Host, err)
	}
	return nil
}
