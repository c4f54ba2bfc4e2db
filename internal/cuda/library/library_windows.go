//go:build windows && (amd64 || arm64) && !nogpu

package library

import (
	"path/filepath"
	"syscall"

	"golang.org/x/sys/windows"
)

// Open opens a library by its name or path.
func Open(name string) (uintptr, error) {
	flags := uintptr(windows.LOAD_LIBRARY_SEARCH_SYSTEM32) // the driver's place; no other folder can slip one in
	if filepath.IsAbs(name) {
		flags = windows.LOAD_WITH_ALTERED_SEARCH_PATH
	}
	lib, err := windows.LoadLibraryEx(name, 0, flags)
	return uintptr(lib), err
}

// Close gives it back.
func Close(lib uintptr) { windows.FreeLibrary(windows.Handle(lib)) }

// Symbol is the address of a function, 0 if the library lacks it.
func Symbol(lib uintptr, name string) uintptr {
	addr, err := windows.GetProcAddress(windows.Handle(lib), name)
	if err != nil {
		return 0
	}
	return addr
}

// Call makes the C call of a function at an address.
//
//go:uintptrescapes
func Call(addr uintptr, args ...uintptr) uintptr {
	r, _, _ := syscall.SyscallN(addr, args...)
	return r
}
