package cpu

import "errors"

// Errors that this package's errors wrap.
var (
	// ErrShape: sizes, strides, lengths or buffers do not fit each other.
	ErrShape = errors.New("shape mismatch")
	// ErrDType: an element type is unknown, or does not go with another.
	ErrDType = errors.New("unsupported dtype")
	// ErrPage: a page table is too short or names a page outside the buffer.
	ErrPage = errors.New("page out of range")
	// ErrPanic: a worker panicked; the outputs of the run are undefined.
	ErrPanic = errors.New("panic in a worker")
)
