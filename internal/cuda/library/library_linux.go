//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package library

import "github.com/ebitengine/purego"

// Open opens a library by its name or path.
func Open(name string) (uintptr, error) {
	return purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_LOCAL)
}

// Close gives it back.
func Close(lib uintptr) { purego.Dlclose(lib) }

// Symbol is the address of a function, 0 if the library lacks it.
func Symbol(lib uintptr, name string) uintptr {
	addr, err := purego.Dlsym(lib, name)
	if err != nil {
		return 0
	}
	return addr
}

// Call makes the C call of a function at an address.
//
//go:uintptrescapes
func Call(addr uintptr, args ...uintptr) uintptr {
	r, _, _ := purego.SyscallN(addr, args...)
	return r
}
