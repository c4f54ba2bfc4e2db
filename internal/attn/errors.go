package attn

import (
	"errors"
	"fmt"
)

// Errors that the engines' errors wrap.
var (
	// ErrShape: sizes, strides, lengths or buffers do not fit each other.
	ErrShape = errors.New("shape mismatch")
	// ErrDType: an element type is unknown, or does not go with another.
	ErrDType = errors.New("unsupported dtype")
	// ErrPage: a page table is too short or names a page outside the buffer.
	ErrPage = errors.New("page out of range")
	// ErrUnsupported: the problem makes sense, but this engine, or this entry of it, does not support the problem.
	ErrUnsupported = errors.New("not supported")
	// ErrTier: the user asked for CPU kernels that are missing.
	ErrTier = errors.New("no such kernels")
)

// Errorf makes the engines' errors: "leanattention: Op: argument and values: sentinel".
func Errorf(op string, sentinel error, format string, args ...any) error {
	return fmt.Errorf("leanattention: %s: %s: %w", op, fmt.Sprintf(format, args...), sentinel)
}
