package dense

import (
	"syscall"
	"unsafe"
)

// LargePages asks for pages of 2 MB under memory that has not been touched yet, as far as the system has them. Threads that write
// an output of many megabytes for the first time would otherwise wait for each other at each 4 KB. Decoding reads every weight
// for every token, a tenth faster so: 4 KB pages keep memory waiting for addresses. A page of which b has a part is asked for,
// too; the rest of it is its neighbours'.
func LargePages(b []byte) {
	const page = 2 << 20
	if len(b) < page {
		return
	}
	at := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	first := at / page * page
	bytes := (at+uintptr(len(b))+page-1)/page*page - first
	// A hint: that it can't be followed is no error.
	_, _, _ = syscall.Syscall(syscall.SYS_MADVISE, first, bytes, syscall.MADV_HUGEPAGE)
}
