package cuda

import (
	"errors"
	"fmt"
	"unsafe"
)

var (
	// ErrNoDevice is returned on a machine without a usable GPU. The text has the reason: no driver, a driver older
	// than CUDA 12.0 (release 525), no GPU of this ordinal, or a GPU below compute capability 8.0.
	ErrNoDevice = errors.New("no usable GPU")

	// ErrOutOfMemory is returned when the GPU, or the host for pinned memory, has too little memory. Nothing has
	// changed.
	ErrOutOfMemory = errors.New("out of memory")

	// ErrClosed is returned for a use of a closed object, a second Close included.
	ErrClosed = errors.New("closed")

	// ErrRange is returned for a size or offset outside its object.
	ErrRange = errors.New("out of range")

	// ErrOtherDevice is returned for a call on objects of two devices.
	ErrOtherDevice = errors.New("objects of two devices")

	// ErrNoPeerAccess is returned for two GPUs of which one can't reach the other's memory.
	ErrNoPeerAccess = errors.New("no peer access")
)

// result is a CUresult.
type result int32

const (
	resultOutOfMemory        result = 2
	resultNotInitialized     result = 3
	resultStubLibrary        result = 34
	resultInsufficientDriver result = 35
	resultNoDevice           result = 100
	resultInvalidDevice      result = 101
	resultNotReady           result = 600
	resultInvalidClusterSize result = 912

	resultPeerAccessAlreadyEnabled result = 704
)

// Error is a driver call that failed.
type Error struct {
	Code      int    // CUresult
	Name      string // CUDA_ERROR_...
	Text      string // the driver's description
	Call      string // the function
	Arguments string // the informative arguments; may be empty
}

func (e *Error) Error() string {
	if e.Arguments == "" {
		return fmt.Sprintf("%s: %s (%s)", e.Name, e.Text, e.Call)
	}
	return fmt.Sprintf("%s: %s (%s, %s)", e.Name, e.Text, e.Call, e.Arguments)
}

// Is reports whether target is the sentinel of the driver's code.
func (e *Error) Is(target error) bool {
	switch result(e.Code) {
	case resultOutOfMemory:
		return target == ErrOutOfMemory
	case resultNoDevice, resultInvalidDevice, resultInsufficientDriver,
		resultStubLibrary: // the toolkit's stub for linking, not a driver
		return target == ErrNoDevice
	}
	return false
}

// failed returns the error of a call that returned r.
func (d *Driver) failed(r result, f *function, format string, args ...any) error {
	e := &Error{Code: int(r), Call: f.name, Arguments: fmt.Sprintf(format, args...)}
	e.Name = d.errorText(&d.fn.getErrorName, r, fmt.Sprintf("CUDA_ERROR_%d", r))
	e.Text = d.errorText(&d.fn.getErrorString, r, "unknown to this driver")
	return e
}

func (d *Driver) errorText(f *function, r result, otherwise string) string {
	var text unsafe.Pointer
	if f.call(uintptr(r), uintptr(unsafe.Pointer(&text))) != 0 || text == nil {
		return otherwise
	}
	return goString(text)
}

// goString copies a C string.
func goString(p unsafe.Pointer) string {
	n := 0
	for *(*byte)(unsafe.Add(p, n)) != 0 {
		n++
	}
	return string(unsafe.Slice((*byte)(p), n))
}
