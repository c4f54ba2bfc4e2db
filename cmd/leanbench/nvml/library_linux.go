//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package nvml

import "github.com/ebitengine/purego"

const libraryName = "libnvidia-ml.so.1"

func openLibrary(name string) (uintptr, error) {
	return purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_LOCAL)
}

func closeLibrary(lib uintptr) { purego.Dlclose(lib) }

// symbol is the address of a function, 0 if the library lacks it.
func symbol(lib uintptr, name string) uintptr {
	addr, err := purego.Dlsym(lib, name)
	if err != nil {
		return 0
	}
	return addr
}

// address makes the C call of a function that returns an address.
//
//go:uintptrescapes
func (f *function) address(args ...uintptr) uintptr {
	r, _, _ := purego.SyscallN(f.addr, args...)
	return r
}

// call makes the C call of a function that returns an error.
//
//go:uintptrescapes
func (f *function) call(args ...uintptr) int32 {
	r, _, _ := purego.SyscallN(f.addr, args...)
	return int32(r)
}
