package gpu

import (
	"errors"
	"fmt"
)

// ErrState is a call out of order: a Run before Upload, say. Other errors wrap
// those of package attn ([attn.ErrShape], [attn.ErrDType], [attn.ErrPage]), of
// package cuda, and [kernels.ErrNoImage].
var ErrState = errors.New("call out of order")

// Errorf makes errors of this package and those above it: "gpu: op: argument and values: sentinel".
func Errorf(op string, sentinel error, format string, args ...any) error {
	return fmt.Errorf("gpu: %s: %s: %w", op, fmt.Sprintf(format, args...), sentinel)
}
