// Package nvrtc compiles CUDA C++ by NVIDIA's run-time compiler, without cgo. The compiler needs no GPU.
package nvrtc

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"gorgonia.org/leanattention/internal/cuda/library"
)

var (
	// ErrNone is a machine where the library was not found.
	ErrNone = errors.New("no NVRTC")
	// ErrVersion is a library that is older than NVRTC 12.4, or newer than 13.
	ErrVersion = errors.New("NVRTC's version")
)

// Versions that will do, 1000*major + 10*minor.
const (
	oldest = 12040
	newest = 13990
)

// Variable names the library in the environment: a file, or a folder that has it. If the variable is set, nothing else is
// tried.
const Variable = "LEANATTENTION_NVRTC"

// search is where the library is looked for.
var search = library.Search{
	Variable: Variable, Names: fileNames(),
	Folders: []string{filepath.Join("nvidia", "cu13", "lib"), filepath.Join("nvidia", "cuda_nvrtc", "lib")},
}

func fileNames() []string {
	if runtime.GOOS == "windows" {
		return []string{"nvrtc64_130_0.dll", "nvrtc64_120_0.dll"}
	}
	return []string{"libnvrtc.so.13", "libnvrtc.so.12"}
}

// function is an entry point of the library.
type function struct {
	addr uintptr
	name string
}

// call makes the C call. Callers convert pointers to uintptr in the argument list: the directive keeps the pointed-to memory alive.
//
//go:uintptrescapes
func (f *function) call(args ...uintptr) int32 { return int32(library.Call(f.addr, args...)) }

// text is a text of a program: functions for its size and its bytes.
type text struct{ size, get function }

// Compiler is the loaded library. Several goroutines may use a Compiler at once.
type Compiler struct {
	path    string
	version int32
	fn      struct {
		version, errorString, create, destroy, compile, archCount, archs function
		log, cubin, ptx                                                  text
	}
}

// table pairs every entry point with its name.
func (c *Compiler) table() []struct {
	f    *function
	name string
} {
	fn := &c.fn
	return []struct {
		f    *function
		name string
	}{
		{&fn.version, "nvrtcVersion"}, {&fn.errorString, "nvrtcGetErrorString"},
		{&fn.create, "nvrtcCreateProgram"}, {&fn.destroy, "nvrtcDestroyProgram"}, {&fn.compile, "nvrtcCompileProgram"},
		{&fn.archCount, "nvrtcGetNumSupportedArchs"}, {&fn.archs, "nvrtcGetSupportedArchs"},
		{&fn.log.size, "nvrtcGetProgramLogSize"}, {&fn.log.get, "nvrtcGetProgramLog"},
		{&fn.cubin.size, "nvrtcGetCUBINSize"}, {&fn.cubin.get, "nvrtcGetCUBIN"},
		{&fn.ptx.size, "nvrtcGetPTXSize"}, {&fn.ptx.get, "nvrtcGetPTX"},
	}
}

var machine struct {
	sync.Mutex
	compiler *Compiler // nil: not found yet
}

// Load opens the machine's NVRTC: see [library.Search]. Later calls return the same Compiler. After an error they look again.
// Errors: [ErrNone] and [ErrVersion], which say where the library was looked for.
func Load() (*Compiler, error) {
	machine.Lock()
	defer machine.Unlock()
	if machine.compiler != nil {
		return machine.compiler, nil
	}
	c, err := find(search.Places(os.Getenv))
	machine.compiler = c
	return c, err
}

// find opens the first library that will do.
func find(all []library.Place) (*Compiler, error) {
	var where []string // names of places, each once
	var wrong []string // reasons why files are not usable
	kind := ErrNone
	for _, p := range all {
		note := p.What
		if p.What == Variable {
			note = p.Path + " (" + p.What + ")"
		}
		if !slices.Contains(where, note) {
			where = append(where, note)
		}
		for _, file := range p.Files() {
			c, err := LoadFrom(file)
			if err == nil {
				return c, nil
			}
			if filepath.IsAbs(file) || errors.Is(err, ErrVersion) {
				wrong = append(wrong, err.Error())
			}
			if errors.Is(err, ErrVersion) {
				kind = ErrVersion
			}
		}
	}
	why := ""
	if len(wrong) > 0 {
		why = " (" + strings.Join(wrong, "; ") + ")"
	}
	return nil, fmt.Errorf("%w: %s looked for in %s%s; pip install nvidia-cuda-nvrtc-cu12 has it, and %s may name it",
		kind, strings.Join(search.Names, ", "), strings.Join(where, ", "), why, Variable)
}

// LoadFrom opens a library by its name or path.
func LoadFrom(path string) (*Compiler, error) {
	lib, err := library.Open(path)
	if err != nil {
		return nil, fmt.Errorf("%s: %v: %w", path, err, ErrNone)
	}
	c := &Compiler{path: path}
	if err := c.init(lib); err != nil {
		library.Close(lib)
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

func (c *Compiler) init(lib uintptr) error {
	for _, e := range c.table() {
		if e.f.name, e.f.addr = e.name, library.Symbol(lib, e.name); e.f.addr == 0 {
			return fmt.Errorf("it has no %s: %w", e.name, ErrNone)
		}
	}
	var major, minor int32
	if r := c.fn.version.call(uintptr(unsafe.Pointer(&major)), uintptr(unsafe.Pointer(&minor))); r != 0 {
		return c.failed(r, &c.fn.version)
	}
	if c.version = 1000*major + 10*minor; c.version < oldest || c.version > newest {
		return fmt.Errorf("it is NVRTC %s; those from 12.4 to 13 will do: %w", c.Version(), ErrVersion)
	}
	return nil
}

// Version returns the library's version, as "12.4".
func (c *Compiler) Version() string { return fmt.Sprintf("%d.%d", c.version/1000, c.version%1000/10) }

// Numbers returns the numbers before and behind the dot of the version.
func (c *Compiler) Numbers() (major, minor int) {
	return int(c.version / 1000), int(c.version % 1000 / 10)
}

// Path returns the name or path that the library was opened by.
func (c *Compiler) Path() string { return c.path }

// Capabilities returns the compute capabilities, 10*major + minor, that the library makes code for.
func (c *Compiler) Capabilities() ([]int, error) {
	var n int32
	if r := c.fn.archCount.call(uintptr(unsafe.Pointer(&n))); r != 0 {
		return nil, c.failed(r, &c.fn.archCount)
	}
	list := make([]int32, max(n, 1))
	if r := c.fn.archs.call(uintptr(unsafe.Pointer(&list[0]))); r != 0 {
		return nil, c.failed(r, &c.fn.archs)
	}
	all := make([]int, n)
	for i := range all {
		all[i] = int(list[i])
	}
	return all, nil
}

// Code is a compiled program.
type Code struct {
	Cubin []byte // empty for a virtual architecture (compute_90)
	PTX   []byte
	Log   string
}

// Compile compiles one of the files, whose quoted includes find the others. An error has the compiler's messages, and so has Code.Log.
func (c *Compiler) Compile(name string, files map[string][]byte, arch string, options ...string) (code Code, err error) {
	options = append([]string{"--gpu-architecture=" + arch}, options...)
	var names, sources []string
	for file, data := range files {
		if file != name {
			names, sources = append(names, file), append(sources, string(data))
		}
	}
	cNames, cSources, cOptions, own := cStrings(names...), cStrings(sources...), cStrings(options...), cStrings(string(files[name]), name)
	defer runtime.KeepAlive([][]*byte{cNames, cSources, cOptions, own})

	var program uintptr
	at := func(p []*byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(p))) }
	create := &c.fn.create
	if r := create.call(uintptr(unsafe.Pointer(&program)), uintptr(unsafe.Pointer(own[0])), uintptr(unsafe.Pointer(own[1])), uintptr(len(names)), at(cSources), at(cNames)); r != 0 {
		return code, c.failed(r, create)
	}
	defer c.fn.destroy.call(uintptr(unsafe.Pointer(&program)))

	compiled := c.fn.compile.call(program, uintptr(len(options)), at(cOptions))
	log, err := c.read(program, &c.fn.log)
	code.Log = string(bytes.TrimRight(log, "\x00\n"))
	if compiled != 0 {
		return code, fmt.Errorf("%w\n%s", c.failed(compiled, &c.fn.compile), code.Log)
	}
	if err != nil {
		return code, err
	}
	if code.PTX, err = c.read(program, &c.fn.ptx); err != nil {
		return code, err
	}
	code.PTX = bytes.TrimRight(code.PTX, "\x00")
	if !strings.HasPrefix(arch, "compute_") {
		code.Cubin, err = c.read(program, &c.fn.cubin)
	}
	return code, err
}

func (c *Compiler) read(program uintptr, t *text) ([]byte, error) {
	var size uint
	if r := t.size.call(program, uintptr(unsafe.Pointer(&size))); r != 0 {
		return nil, c.failed(r, &t.size)
	}
	if size == 0 {
		return nil, nil
	}
	data := make([]byte, size)
	if r := t.get.call(program, uintptr(unsafe.Pointer(&data[0]))); r != 0 {
		return nil, c.failed(r, &t.get)
	}
	return data, nil
}

// failed returns the error of a call.
func (c *Compiler) failed(result int32, f *function) error {
	what := fmt.Sprintf("error %d", result)
	if c.fn.errorString.addr != 0 {
		if p := library.Call(c.fn.errorString.addr, uintptr(result)); p != 0 {
			what = cText(p)
		}
	}
	return fmt.Errorf("NVRTC %s: %s: %s", c.Version(), f.name, what)
}

// cText returns a copy of the zero-terminated C string at p.
func cText(p uintptr) string {
	first := *(**byte)(unsafe.Pointer(&p)) // memory of C: vet can't know
	n := 0
	for n < 256 && *(*byte)(unsafe.Add(unsafe.Pointer(first), n)) != 0 {
		n++
	}
	return string(unsafe.Slice(first, n))
}

func cStrings(texts ...string) []*byte {
	pointers := make([]*byte, len(texts))
	for i, s := range texts {
		pointers[i] = &append([]byte(s), 0)[0]
	}
	return pointers
}
