//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package cuda

import "github.com/ebitengine/purego"

const libraryName = "libcuda.so.1"

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

// invoke makes the C call.
//
//go:uintptrescapes
func invoke(addr uintptr, args ...uintptr) result {
	r, _, _ := purego.SyscallN(addr, args...)
	return result(r)
}
