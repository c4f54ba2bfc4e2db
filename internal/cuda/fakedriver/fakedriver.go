//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

// Package fakedriver builds a CUDA driver that needs no GPU, for tests: it
// records calls, can be told to fail the n-th, and counts what is not given
// back.
package fakedriver

import (
	_ "embed"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"
)

//go:embed testdata/driver.c
var source []byte

// State is what tests may set; the layout is that of struct fake.
type State struct {
	Version, Init, Devices, Major, Minor int32
	_                                    int32
	Total                                int64 // bytes of the device
	FailAt                               int64 // number of the call that fails; 0: none
	FailWith                             int32 // its CUresult
	_                                    int32
	Calls                                int64 // up to now
	Busy                                 int32
	failIn, failed                       [64]byte
	SMs, Shared                          int32 // multiprocessors, and dynamic shared memory of a block; 0: as any other attribute
	arguments                            [8]struct {
		kernel [32]byte
		bytes  int32
	}
}

// FailIn makes every call of a function fail, by its name in the library.
func (s *State) FailIn(function string, code int32) {
	s.failIn, s.FailWith = [64]byte{}, code
	copy(s.failIn[:len(s.failIn)-1], function)
}

// Argument says that kernels whose names begin with a prefix take one argument,
// of so many bytes. Of eight such prefixes the first that fits counts.
func (s *State) Argument(prefix string, bytes int) {
	for i := range s.arguments {
		if a := &s.arguments[i]; a.bytes == 0 {
			a.bytes = int32(bytes)
			copy(a.kernel[:len(a.kernel)-1], prefix)
			return
		}
	}
	panic("more than eight kinds of kernels")
}

// Failed is the call that was made to fail, "" if none was.
func (s *State) Failed() string {
	name, _, _ := strings.Cut(string(s.failed[:]), "\x00")
	return name
}

// Library is the built driver.
type Library struct {
	Path string // for cuda.LoadFrom
	lib  uintptr
}

// built is one library for the whole test binary: the C compiler runs once.
var built = sync.OnceValues(func() (*Library, error) {
	dir, err := os.MkdirTemp("", "fakedriver")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir) // an open library needs its file no more
	src, path := filepath.Join(dir, "driver.c"), filepath.Join(dir, "libfakecuda.so")
	if err := os.WriteFile(src, source, 0o600); err != nil {
		return nil, err
	}
	if out, err := exec.Command(compiler(), "-shared", "-fPIC", "-O1", "-pthread", "-o", path, src).CombinedOutput(); err != nil {
		return nil, &exec.Error{Name: compiler() + ": " + string(out), Err: err}
	}
	lib, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return nil, err
	}
	// Opened again by this name, whose file is gone, the loader returns the same library.
	return &Library{Path: path, lib: lib}, nil
})

func compiler() string {
	if cc := os.Getenv("CC"); cc != "" {
		return cc
	}
	return "cc"
}

// New is the library in its first state: CUDA 12.4, two GPUs of capability 9.0
// with 1 MiB each. Skips the test where there is no C compiler. Tests that use
// it must not run at once.
func New(t testing.TB) *Library {
	t.Helper()
	if _, err := exec.LookPath(compiler()); err != nil {
		t.Skip("no C compiler: the fake driver can't be built")
	}
	l, err := built()
	if err != nil {
		t.Fatal(err)
	}
	l.call("fake_reset")
	return l
}

func (l *Library) call(name string) uintptr {
	addr, err := purego.Dlsym(l.lib, name)
	if err != nil {
		panic(err) // the source above lacks it
	}
	r, _, _ := purego.SyscallN(addr)
	runtime.KeepAlive(l)
	return r
}

// State is the driver's own; read and write it while no call runs.
func (l *Library) State() *State { return (*State)(pointer(l.call("fake_state"))) }

// Log is what was called since New or Forget, a line each.
func (l *Library) Log() string {
	p, n := pointer(l.call("fake_log")), 0
	for *(*byte)(unsafe.Add(p, n)) != 0 {
		n++
	}
	return string(unsafe.Slice((*byte)(p), n))
}

// Forget empties the log, which holds 1 MiB.
func (l *Library) Forget() { l.call("fake_forget") }

// Live is the number of objects and contexts that were not given back.
func (l *Library) Live() int { return int(int32(l.call("fake_live"))) }

// Defects is the number of calls that could have crashed a real driver: on a
// dead handle, or without a context.
func (l *Library) Defects() int { return int(int32(l.call("fake_defects"))) }

// pointer takes an address of the C library, which no Go pointer is.
func pointer(addr uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&addr)) }
