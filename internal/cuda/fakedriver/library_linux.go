//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package fakedriver

import "github.com/ebitengine/purego"

const works = true

func openLibrary(path string) (uintptr, error) {
	return purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
}

//go:uintptrescapes
func callLibrary(lib uintptr, name string, args ...uintptr) uintptr {
	addr, err := purego.Dlsym(lib, name)
	if err != nil {
		panic(err) // the source lacks it
	}
	r, _, _ := purego.SyscallN(addr, args...)
	return r
}

func newCallback(f any) uintptr { return purego.NewCallback(f) }
