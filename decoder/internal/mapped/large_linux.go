package mapped

import (
	"syscall"
	"unsafe"
)

// largePages asks the system for 2 MiB pages. In-memory file systems can provide such pages.
func largePages(b []byte) {
	const page = 2 << 20
	if len(b) < page {
		return
	}
	at := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	first := at / page * page
	size := (at+uintptr(len(b))+page-1)/page*page - first
	// The call is a hint, so an error is ignored.
	_, _, _ = syscall.Syscall(syscall.SYS_MADVISE, first, size, syscall.MADV_HUGEPAGE)
}
