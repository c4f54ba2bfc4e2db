package hf

import "syscall"

// largePages asks for the file to be read into pages of 2 MB, as far as it is
// not in memory yet and its file system can. Decoding reads every weight for
// every token, a tenth faster so: 4 KB pages keep memory waiting for addresses.
func largePages(data []byte) {
	_ = syscall.Madvise(data, syscall.MADV_HUGEPAGE) // a hint: that it can't be followed is no error
}
