//go:build amd64 && gc && !noasm

package cpu

import "syscall"

// allowTiles asks the kernel for the tile registers of AMX for all threads of the process, and reports whether they
// are allowed.
func allowTiles() bool {
	const (
		requestPermission = 0x1023 // ARCH_REQ_XCOMP_PERM
		tileData          = 18     // XFEATURE_XTILE_DATA
	)
	_, _, err := syscall.RawSyscall(syscall.SYS_ARCH_PRCTL, requestPermission, tileData, 0)
	return err == 0
}
