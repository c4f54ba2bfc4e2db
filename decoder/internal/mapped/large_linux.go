package mapped

import (
	"syscall"
	"unsafe"
)

// largePages asks the system for pages of 2 MiB, which file systems in memory can give.
func largePages(b []byte) {
	const page = 2 << 20
	if len(b) < page {
		return
	}
	at := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	first := at / page * page
	size := (at+uintptr(len(b))+page-1)/page*page - first
	// The call is a hint, and a failure changes nothing.
	_, _, _ = syscall.Syscall(syscall.SYS_MADVISE, first, size, syscall.MADV_HUGEPAGE)
}
