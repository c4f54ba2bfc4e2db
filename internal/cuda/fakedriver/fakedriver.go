// Package fakedriver builds a CUDA driver that needs no GPU, for tests: it records calls, fails the n-th call on
// demand, and counts leaks. It works on Linux on amd64 and arm64; elsewhere New and System skip the test.
package fakedriver

import (
	_ "embed"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"testing"
	"unsafe"
)

//go:embed testdata/driver.c
var source []byte

// State is the settings of tests; the layout is that of struct fake.
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
	arguments                            [14]struct {
		kernel [32]byte
		bytes  int32
	}
	execute uintptr
	failOn  int32    // the calls that FailIn makes fail are those for GPU failOn-1; 0: for any
	NoPeers int32    // 1: no GPU reaches the memory of another
	Totals  [8]int64 // bytes of each GPU; 0: Total
	Late    uint64   // not 0: work runs at any time that its order allows, by random numbers from this seed

	// Turns, with an Executor that is one of [Turns]: if not 0, kernels of GPUs that reach each other run at the same
	// time, in turns by random numbers from this seed, and work stays queued until a call waits for it. A kernel has
	// its GPU alone.
	Turns   uint64
	Clock   int64 // the time in nanoseconds, which advances fast if all kernels wait
	Buffers int64 // number of allocations and frees
}

// Call is a kernel's launch.
type Call struct {
	Image, Kernel                string
	Grid, Block, Cluster, Shared int
	Overlap                      bool    // it may start before the launch before it has ended
	GPU                          int     // that it runs on
	Queue                        uintptr // the stream, or branch of a graph, by the library's name
	Launch                       uintptr // the same for a launch with turns
	Over                         bool    // the last turn: the launch waits for what never comes
	argument                     unsafe.Pointer
}

// Argument returns the kernel's only argument, of n bytes.
func (c *Call) Argument(n int) []byte { return unsafe.Slice((*byte)(c.argument), n) }

// Executor runs kernels in place of a GPU.
type Executor interface {
	// ArgumentBytes returns the size of a kernel's only argument; negative if there is no such kernel.
	ArgumentBytes(image, kernel string) int
	// Execute runs a kernel to its end.
	Execute(c *Call) error
}

// Turns is an Executor whose kernels can run beside others. Turn begins a new launch or continues one, and returns
// whether the launch has ended, and whether it did anything but wait.
type Turns interface {
	Executor
	Turn(c *Call) (ended, progress bool, err error)
}

var (
	executor Executor
	images   map[uintptr]string // by their addresses in the library
)

// callback is one for all tests: callbacks are never freed.
var callback = sync.OnceValue(func() uintptr {
	return newCallback(func(image, kernel uintptr, grid, block, cluster, shared, overlap int, argument uintptr, gpu int, queue, launch uintptr, over int) int {
		if images[image] == "" {
			images[image] = text(image)
		}
		c := Call{images[image], text(kernel), grid, block, cluster, shared, overlap != 0, gpu, queue, launch, over != 0, pointer(argument)}
		if argument == 0 {
			return executor.ArgumentBytes(c.Image, c.Kernel)
		}
		const notReady, waits, failed = 600, 601, 719 // CUDA_ERROR_LAUNCH_FAILED
		if launch == 0 {
			if executor.Execute(&c) != nil {
				return failed
			}
			return 0
		}
		switch ended, progress, err := executor.(Turns).Turn(&c); {
		case err != nil:
			return failed
		case ended:
			return 0
		case progress:
			return notReady
		}
		return waits
	})
})

// Execute makes kernels run where they are launched, until New is called again. Images must then be PTX.
func (l *Library) Execute(e Executor) {
	executor, images = e, map[uintptr]string{}
	l.State().execute = callback()
}

// Buffer is memory in use that kernels can reach.
type Buffer struct {
	Address uint64
	Bytes   int64
	GPU     int64 // its GPU; negative: pinned memory of the host
}

// Buffers returns all buffers, for an Executor.
func (l *Library) Buffers() []Buffer {
	for n := 64; ; {
		list := make([]Buffer, n)
		got := int(l.call("fake_buffers", uintptr(unsafe.Pointer(&list[0])), uintptr(n)))
		if got <= n {
			return list[:got]
		}
		n = got
	}
}

// FailIn makes every call of a function fail, by its name in the library.
func (s *State) FailIn(function string, code int32) {
	s.failIn, s.FailWith = [64]byte{}, code
	copy(s.failIn[:len(s.failIn)-1], function)
	s.failOn = 0
}

// FailOn is FailIn for calls of one GPU.
func (s *State) FailOn(gpu int, function string, code int32) {
	s.FailIn(function, code)
	s.failOn = int32(gpu) + 1
}

// Argument sets the size of the only argument of kernels whose names begin with a prefix. The first fitting one of
// fourteen prefixes counts.
func (s *State) Argument(prefix string, bytes int) {
	for i := range s.arguments {
		if a := &s.arguments[i]; a.bytes == 0 {
			a.bytes = int32(bytes)
			copy(a.kernel[:len(a.kernel)-1], prefix)
			return
		}
	}
	panic("more than fourteen kinds of kernels")
}

// Failed returns the call that failed on demand, "" if none did.
func (s *State) Failed() string {
	name, _, _ := strings.Cut(string(s.failed[:]), "\x00")
	return name
}

// Library is the built driver.
type Library struct {
	Path string // for cuda.LoadFrom
	lib  uintptr
}

// built is one library for the whole test binary: the C compiler runs once. system is the library that the loader
// takes for the machine's driver.
var (
	built  = sync.OnceValues(func() (*Library, error) { return build("libfakecuda.so") })
	system = sync.OnceValues(func() (*Library, error) { return build(systemName) })
)

const systemName = "libcuda.so.1"

func build(name string) (*Library, error) {
	dir, err := os.MkdirTemp("", "fakedriver")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir) // an open library needs no file
	path := os.Getenv(builtVariable)
	if path == "" || name != systemName {
		if path, err = compile(dir, name); err != nil {
			return nil, err
		}
	}
	lib, err := openLibrary(path)
	if err != nil {
		return nil, err
	}
	// Opened again by this name, whose file is gone, the loader returns the same library.
	return &Library{Path: path, lib: lib}, nil
}

// builtVariable names a file that [BuildSystem] has made.
const builtVariable = "LEANATTENTION_TEST_DRIVER"

// BuildSystem makes the library of [System] in a folder for other processes: env is to be added to their environment.
func BuildSystem(t testing.TB, dir string) (env string) {
	t.Helper()
	path, err := compile(dir, systemName)
	if err != nil {
		t.Fatal(err)
	}
	return builtVariable + "=" + path
}

func compile(dir, name string) (path string, err error) {
	src := filepath.Join(dir, "driver.c")
	path = filepath.Join(dir, name)
	if err := os.WriteFile(src, source, 0o600); err != nil {
		return "", err
	}
	if out, err := exec.Command(compiler(), "-shared", "-fPIC", "-O0", "-pthread", "-Wl,-soname,"+name, "-o", path, src).CombinedOutput(); err != nil {
		return "", &exec.Error{Name: compiler() + ": " + string(out), Err: err}
	}
	return path, nil
}

func compiler() string {
	if cc := os.Getenv("CC"); cc != "" {
		return cc
	}
	return "cc"
}

// New returns the library in its first state: CUDA 12.4, two GPUs of capability 9.0 with 1 MiB each. New skips the
// test without a C compiler. Tests with the library must not run at the same time.
func New(t testing.TB) *Library { return open(t, built) }

// System is New for the whole process: the next open of the machine's driver gets this library.
func System(t testing.TB) *Library { return open(t, system) }

// OwnProcess runs a test with the given number of subtests, which uses [System], in a process of its own, and returns
// true in that process. In the first process the test is done when OwnProcess returns.
func OwnProcess(t *testing.T, subtests int) bool {
	t.Helper()
	const child = "LEANATTENTION_OWN_PROCESS"
	if os.Getenv(child) != "" {
		return true
	}
	test := exec.Command(os.Args[0], "-test.v", "-test.run", "^"+t.Name()+"$")
	test.Env = append(os.Environ(), child+"=1")
	switch out, err := test.CombinedOutput(); {
	case err != nil:
		t.Errorf("%v\n%s", err, out)
	case strings.Contains(string(out), "--- SKIP"):
		t.Skipf("%s", out)
	case strings.Count(string(out), "--- PASS: "+t.Name()+"/") != subtests:
		t.Errorf("not all have run: %s", out)
	}
	return false
}

// Kernels returns the names of a log's kernels, in the order of launch or capture.
func Kernels(log string) (names []string) {
	for _, m := range regexp.MustCompile(`kernel (\w+)`).FindAllStringSubmatch(log, -1) {
		names = append(names, m[1])
	}
	return names
}

func open(t testing.TB, made func() (*Library, error)) *Library {
	t.Helper()
	if !works {
		t.Skip("the fake driver does not work here")
	}
	if _, err := exec.LookPath(compiler()); err != nil {
		t.Skip("no C compiler: the fake driver can't be built")
	}
	l, err := made()
	if err != nil {
		t.Fatal(err)
	}
	l.call("fake_reset")
	return l
}

// call calls a function of the source above. Arguments that are addresses stay where
// they are until it returns.
//
//go:uintptrescapes
func (l *Library) call(name string, args ...uintptr) uintptr {
	r := callLibrary(l.lib, name, args...)
	runtime.KeepAlive(l)
	return r
}

// State returns the driver's state; read and write it while no call runs.
func (l *Library) State() *State { return (*State)(pointer(l.call("fake_state"))) }

// Log returns the calls since New or Forget, a line each.
func (l *Library) Log() string { return text(l.call("fake_log")) }

// Function returns the address of one of the library's functions.
func (l *Library) Function(name string) uintptr { return symbol(l.lib, name) }

// text is a C string's, copied.
func text(addr uintptr) string {
	p, n := pointer(addr), 0
	for *(*byte)(unsafe.Add(p, n)) != 0 {
		n++
	}
	return string(unsafe.Slice((*byte)(p), n))
}

// Forget empties the log, which holds 1 MiB.
func (l *Library) Forget() { l.call("fake_forget") }

// Live returns the number of objects and contexts that were not freed.
func (l *Library) Live() int { return int(int32(l.call("fake_live"))) }

// Defects returns the number of calls that could have crashed a real driver: on a dead handle, or without a context.
func (l *Library) Defects() int { return int(int32(l.call("fake_defects"))) }

// pointer converts an address of the C library, which is no Go pointer.
func pointer(addr uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&addr)) }
