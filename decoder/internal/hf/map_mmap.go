//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package hf

import (
	"os"
	"syscall"

	"gorgonia.org/leanattention/internal/dense"
)

// mapping maps the file's first size bytes, read-only. Pages come in when they
// are touched, so that opening a folder costs nothing.
func mapping(f *os.File, size int) (data []byte, unmap func() error, err error) {
	data, err = syscall.Mmap(int(f.Fd()), 0, size, syscall.PROT_READ, syscall.MAP_SHARED)
	if err != nil {
		return nil, nil, os.NewSyscallError("mmap", err)
	}
	dense.LargePages(data)
	return data, func() error { return os.NewSyscallError("munmap", syscall.Munmap(data)) }, nil
}
