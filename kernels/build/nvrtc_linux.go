//go:build linux && (amd64 || arm64)

package main

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"

	"github.com/ebitengine/purego"
)

// nvrtc is NVIDIA's run-time compiler.
type nvrtc struct {
	version string

	errorString    func(result int32) string
	getVersion     func(major, minor *int32) int32
	createProgram  func(program *uintptr, source, name string, headers int32, sources, names **byte) int32
	destroyProgram func(program *uintptr) int32
	compileProgram func(program uintptr, n int32, options **byte) int32
	log, cubin     text
	ptx            text
}

// text is something a program has, by a pair of functions: its size, and itself.
type text struct {
	size func(program uintptr, size *uint) int32
	get  func(program uintptr, data *byte) int32
}

// openNVRTC loads the compiler. Its built-in functions come from a library that
// it looks up by name, and so finds when that has been loaded by its path.
func openNVRTC(dir string) (*nvrtc, error) {
	var lib uintptr
	for _, pattern := range []string{"libnvrtc-builtins.so.*", "libnvrtc.so.*"} {
		found, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil {
			return nil, err
		}
		if len(found) != 1 {
			return nil, fmt.Errorf("%s has %d files %s, want one", dir, len(found), pattern)
		}
		if lib, err = purego.Dlopen(found[0], purego.RTLD_NOW|purego.RTLD_GLOBAL); err != nil {
			return nil, err
		}
	}
	c := &nvrtc{}
	for _, f := range []struct {
		fn   any
		name string
	}{
		{&c.errorString, "nvrtcGetErrorString"},
		{&c.getVersion, "nvrtcVersion"},
		{&c.createProgram, "nvrtcCreateProgram"},
		{&c.destroyProgram, "nvrtcDestroyProgram"},
		{&c.compileProgram, "nvrtcCompileProgram"},
		{&c.log.size, "nvrtcGetProgramLogSize"},
		{&c.log.get, "nvrtcGetProgramLog"},
		{&c.cubin.size, "nvrtcGetCUBINSize"},
		{&c.cubin.get, "nvrtcGetCUBIN"},
		{&c.ptx.size, "nvrtcGetPTXSize"},
		{&c.ptx.get, "nvrtcGetPTX"},
	} {
		addr, err := purego.Dlsym(lib, f.name)
		if err != nil {
			return nil, err
		}
		purego.RegisterFunc(f.fn, addr)
	}
	var major, minor int32
	if err := c.check(c.getVersion(&major, &minor), "nvrtcVersion"); err != nil {
		return nil, err
	}
	c.version = fmt.Sprintf("%d.%d", major, minor)
	return c, nil
}

// compile makes an image, which is a cubin or, if the architecture is a virtual one
// (compute_90), PTX, and the PTX that it was made of. The files are all that quoted includes can find: no path of
// this machine gets into the image.
func (c *nvrtc) compile(name string, files map[string][]byte, headers, arch string, options []string) (image, ptx []byte, log string, err error) {
	options = append([]string{"--gpu-architecture=" + arch, "--include-path=" + headers}, options...)
	var names, sources []string
	for file, data := range files {
		if file != name {
			names, sources = append(names, file), append(sources, string(data))
		}
	}
	cNames, cSources, cOptions := cStrings(names), cStrings(sources), cStrings(options)
	defer runtime.KeepAlive([][]*byte{cNames, cSources, cOptions})

	var program uintptr
	if err := c.check(c.createProgram(&program, string(files[name]), name, int32(len(names)), first(cSources), first(cNames)), "nvrtcCreateProgram"); err != nil {
		return nil, nil, "", err
	}
	defer c.destroyProgram(&program)

	failed := c.check(c.compileProgram(program, int32(len(options)), first(cOptions)), "nvrtcCompileProgram")
	text, err := c.read(program, c.log, "log")
	log = string(bytes.TrimRight(text, "\x00\n"))
	if failed != nil || err != nil {
		return nil, nil, log, errors.Join(failed, err)
	}
	if ptx, err = c.read(program, c.ptx, "PTX"); err != nil {
		return nil, nil, log, err
	}
	ptx = bytes.TrimRight(ptx, "\x00")
	if virtual(arch) {
		return ptx, ptx, log, nil
	}
	image, err = c.read(program, c.cubin, "cubin")
	return image, ptx, log, err
}

func (c *nvrtc) read(program uintptr, t text, what string) ([]byte, error) {
	var size uint
	if err := c.check(t.size(program, &size), "size of the "+what); err != nil {
		return nil, err
	}
	if size == 0 {
		return nil, nil
	}
	data := make([]byte, size)
	return data, c.check(t.get(program, &data[0]), what)
}

func (c *nvrtc) check(result int32, what string) error {
	if result == 0 {
		return nil
	}
	return fmt.Errorf("%s: %s", what, c.errorString(result))
}

func cStrings(texts []string) []*byte {
	pointers := make([]*byte, len(texts))
	for i, s := range texts {
		pointers[i] = &append([]byte(s), 0)[0]
	}
	return pointers
}

func first(pointers []*byte) **byte {
	if len(pointers) == 0 {
		return nil
	}
	return &pointers[0]
}
