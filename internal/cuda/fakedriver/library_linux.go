//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package fakedriver

import "github.com/ebitengine/purego"

const works = true

func openLibrary(path string) (uintptr, error) {
	return purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
}

//go:uintptrescapes
func callLibrary(lib uintptr, name string, args ...uintptr) uintptr {
	r, _, _ := purego.SyscallN(symbol(lib, name), args...)
	return r
}

func symbol(lib uintptr, name string) uintptr {
	addr, err := purego.Dlsym(lib, name)
	if err != nil {
		panic(err) // the source lacks it
	}
	return addr
}

func newCallback(f any) uintptr { return purego.NewCallback(f) }
