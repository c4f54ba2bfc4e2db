//go:build windows && (amd64 || arm64) && !nogpu

package cuda

import (
	"path/filepath"
	"syscall"

	"golang.org/x/sys/windows"
)

const libraryName = "nvcuda.dll"

func openLibrary(name string) (uintptr, error) {
	flags := uintptr(windows.LOAD_LIBRARY_SEARCH_SYSTEM32) // the driver's place; no other folder can slip one in
	if filepath.IsAbs(name) {
		flags = windows.LOAD_WITH_ALTERED_SEARCH_PATH
	}
	lib, err := windows.LoadLibraryEx(name, 0, flags)
	return uintptr(lib), err
}

func closeLibrary(lib uintptr) { windows.FreeLibrary(windows.Handle(lib)) }

// symbol is the address of a function, 0 if the library lacks it.
func symbol(lib uintptr, name string) uintptr {
	addr, err := windows.GetProcAddress(windows.Handle(lib), name)
	if err != nil {
		return 0
	}
	return addr
}

// invoke makes the C call.
//
//go:uintptrescapes
func invoke(addr uintptr, args ...uintptr) result {
	r, _, _ := syscall.SyscallN(addr, args...)
	return result(r)
}
