package model

import (
	"os"
	"syscall"
	"unsafe"
)

// largePages asks for pages of 2 MB under memory that has not been written yet.
func largePages(b []byte) {
	page := uintptr(os.Getpagesize())
	before := int(-uintptr(unsafe.Pointer(unsafe.SliceData(b))) % page)
	if whole := (len(b) - before) / int(page) * int(page); whole > 0 {
		_ = syscall.Madvise(b[before:before+whole], syscall.MADV_HUGEPAGE) // a hint: that it can't be followed is no error
	}
}
