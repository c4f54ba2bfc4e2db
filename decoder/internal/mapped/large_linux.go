package mapped

import (
	"os"
	"syscall"
	"unsafe"
)

// dropPages releases the memory of the whole pages of a part of a file's mapping.
func dropPages(b []byte) {
	page := uintptr(os.Getpagesize())
	at := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	first, end := (at+page-1)/page*page, (at+uintptr(len(b)))/page*page
	if first < end {
		// The call is a hint, so an error is ignored.
		_, _, _ = syscall.Syscall(syscall.SYS_MADVISE, first, end-first, syscall.MADV_DONTNEED)
	}
}

// LargePages asks the system for 2 MiB pages for some memory, and for what shares its pages. In-memory file systems can provide
// such pages, too. Small memory is left as it is.
func LargePages(b []byte) {
	const page = 2 << 20
	if len(b) < page/4 {
		return
	}
	at := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	first := at / page * page
	size := (at+uintptr(len(b))+page-1)/page*page - first
	// The call is a hint, so an error is ignored.
	_, _, _ = syscall.Syscall(syscall.SYS_MADVISE, first, size, syscall.MADV_HUGEPAGE)
}
