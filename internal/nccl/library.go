package nccl

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"unsafe"

	"gorgonia.org/leanattention/internal/cuda/library"
)

var (
	// ErrNoNCCL is a machine where the library was not found.
	ErrNoNCCL = errors.New("no NCCL")
	// ErrTooOld is a library older than NCCL 2.23.
	ErrTooOld = errors.New("NCCL too old")
)

// oldest is the version from which on a communicator is made from a unique id that is given
// by its address: 2.23.0. Captures need 2.9.
const oldest = 22300

// function is an entry point of the library.
type function struct {
	addr uintptr
	name string
}

// call makes the C call. Pointers are converted to uintptr in its argument list: the
// directive keeps what they point to.
//
//go:uintptrescapes
func (f *function) call(args ...uintptr) result { return result(int32(library.Call(f.addr, args...))) }

// Library is the loaded library.
type Library struct {
	path    string
	version int
	fn      struct {
		getVersion, getErrorString, getLastError, getUniqueID function
		commInit, commDestroy, commAbort, commGetAsyncError   function
		allReduce, allGather, broadcast                       function
	}
}

func (l *Library) table() []struct {
	f    *function
	name string
} {
	fn := &l.fn
	return []struct {
		f    *function
		name string
	}{
		{&fn.getVersion, "ncclGetVersion"}, // first: an old library lacks some of the others
		{&fn.getErrorString, "ncclGetErrorString"},
		{&fn.getLastError, "ncclGetLastError"},
		{&fn.getUniqueID, "ncclGetUniqueId"},
		{&fn.commInit, "ncclCommInitRankScalable"},
		{&fn.commDestroy, "ncclCommDestroy"},
		{&fn.commAbort, "ncclCommAbort"},
		{&fn.commGetAsyncError, "ncclCommGetAsyncError"},
		{&fn.allReduce, "ncclAllReduce"},
		{&fn.allGather, "ncclAllGather"},
		{&fn.broadcast, "ncclBroadcast"},
	}
}

var machine struct {
	sync.Mutex
	library *Library // nil: not found yet
}

// Load opens the machine's NCCL: see [library.Search]. Later calls return the same; after an error
// they look again. Errors: [ErrNoNCCL] and [ErrTooOld], which say where it was looked for.
func Load() (*Library, error) {
	machine.Lock()
	defer machine.Unlock()
	if machine.library != nil {
		return machine.library, nil
	}
	l, err := find(search.Places(os.Getenv))
	machine.library = l
	return l, err
}

// LoadFrom opens a library by its name or path. It stays open if it will do.
func LoadFrom(path string) (*Library, error) {
	if _, set := os.LookupEnv("NCCL_NVLS_ENABLE"); !set { // NCCL reads it once
		if err := os.Setenv("NCCL_NVLS_ENABLE", "0"); err != nil {
			return nil, err
		}
	}
	lib, err := library.Open(path)
	if err != nil {
		return nil, fmt.Errorf("%v: %w", err, ErrNoNCCL)
	}
	l := &Library{path: path}
	if err := l.init(lib); err != nil {
		library.Close(lib)
		return nil, err
	}
	return l, nil
}

func (l *Library) init(lib uintptr) error {
	for _, e := range l.table() {
		e.f.name, e.f.addr = e.name, library.Symbol(lib, e.name)
		if e.f.addr == 0 {
			if e.f == &l.fn.getVersion {
				return fmt.Errorf("the library has no %s: %w", e.name, ErrNoNCCL)
			}
			return fmt.Errorf("NCCL %s has no %s: %w", l.Version(), e.name, ErrTooOld)
		}
		if e.f == &l.fn.getVersion {
			var v int32
			if r := e.f.call(uintptr(unsafe.Pointer(&v))); r != 0 {
				return fmt.Errorf("%s returned %d: %w", e.name, r, ErrNoNCCL)
			}
			if l.version = int(v); l.version < oldest {
				return fmt.Errorf("it is NCCL %s, 2.23 is the oldest that will do: %w", l.Version(), ErrTooOld)
			}
		}
	}
	return nil
}

// Version is the library's, as "2.28.9".
func (l *Library) Version() string {
	if l.version < 10000 { // until 2.8 the numbers had other places
		return fmt.Sprintf("%d.%d.%d", l.version/1000, l.version%1000/100, l.version%100)
	}
	return fmt.Sprintf("%d.%d.%d", l.version/10000, l.version%10000/100, l.version%100)
}

// Path is what the library was opened by.
func (l *Library) Path() string { return l.path }

// result is an ncclResult_t.
type result int32

// Error is a call of NCCL that failed.
type Error struct {
	Code int
	Call string
	Text string // NCCL's description of the code
	Last string // and of what happened; may be empty
}

func (e *Error) Error() string {
	if e.Last == "" {
		return fmt.Sprintf("NCCL: %s (%s)", e.Text, e.Call)
	}
	return fmt.Sprintf("NCCL: %s: %s (%s)", e.Text, e.Last, e.Call)
}

func (l *Library) failed(r result, f *function) error {
	return &Error{Code: int(r), Call: f.name, Text: text(l.fn.getErrorString.callText(uintptr(r))), Last: text(l.fn.getLastError.callText(0))}
}

// callText is call of what returns a C string.
func (f *function) callText(arg uintptr) uintptr { return library.Call(f.addr, arg) }

// text copies a C string, of at most so many bytes as an error may have.
func text(addr uintptr) string {
	const most = 1024
	if addr == 0 {
		return ""
	}
	p := *(*unsafe.Pointer)(unsafe.Pointer(&addr)) // no Go pointer
	n := 0
	for n < most && *(*byte)(unsafe.Add(p, n)) != 0 {
		n++
	}
	return string(unsafe.Slice((*byte)(p), n))
}
