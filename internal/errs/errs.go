package errs

import (
	"errors"
	"fmt"
	"strings"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"

	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/memory"
	"gorgonia.org/leanattention/internal/nocopy"
	"gorgonia.org/leanattention/internal/plural"
)

// Errorf makes "leanattention: op: text: sentinel".
func Errorf(op string, sentinel error, format string, args ...any) error {
	return fmt.Errorf(prefix+"%s: %s: %w", op, Singular(fmt.Sprintf(format, dense.Printable(args)...)), sentinel)
}

// RecoverTo turns a panic into an error. It stands at every place where
// Gorgonia calls into this package or this package calls into Gorgonia,
// because a panic inside an Op's Do ends the process: the tape machine runs it
// on a goroutine of its own, where no caller can recover.
func RecoverTo(op string, err *error) {
	if r := recover(); r != nil {
		*err = Errorf(op, ErrInternal, "%v", r)
		if short, ok := r.(*memory.Shortage); ok {
			*err = ShortageError(op, short)
		}
	}
}

// ShortageError is an error of values that the host has no memory for.
func ShortageError(op string, s *memory.Shortage) error {
	return Errorf(op, cuda.ErrOutOfMemory, "%d bytes in %s: %v", s.Bytes, Host, s)
}

// Singular makes "1 page" of "1 pages".
func Singular(text string) string { return plural.Mend(text) }

// Unmade is the error of a nil pointer, or of a struct that no function in by has made.
func Unmade(op, what, by string) error {
	return Errorf(op, ErrState, "%s", nocopy.Unmade(what, by))
}

// Original checks that a struct is where the function in by has made it.
func Original(op string, m *nocopy.Mark, what, by string) error {
	if problem := m.Problem(what, by); problem != "" {
		return Errorf(op, ErrState, "%s", problem)
	}
	return nil
}

// ByteCount is a number of bytes as people read it.
func ByteCount(n int64) string {
	const units = "KMGTPE"
	if n < 1<<10 {
		return Singular(fmt.Sprintf("%d bytes", n))
	}
	x, unit := float64(n)/(1<<10), 0
	for ; x >= 1<<10; unit++ {
		x /= 1 << 10
	}
	return fmt.Sprintf("%.1f %ciB", x, units[unit])
}

// Host is where tensors are that are not on a GPU.
const Host = "host memory"

// Within is an error of a part of op: its text names op first.
func Within(op string, err error) error { return &within{op, err} }

type within struct {
	op  string
	err error
}

func (w *within) Error() string {
	return prefix + w.op + ": " + strings.TrimPrefix(w.err.Error(), prefix)
}
func (w *within) Unwrap() error { return w.err }

const prefix = "leanattention: "

// Engine is an error of the CPU engine. Operands have been checked before, so
// but for kernels that the user asked for and that are not there, it is a defect.
func Engine(op, what string, err error) error {
	var short *memory.Shortage
	switch {
	case errors.Is(err, attn.ErrTier):
		return Errorf(op, ErrOption, "%v", err)
	case errors.As(err, &short):
		return ShortageError(op, short)
	}
	return Errorf(op, ErrInternal, "%s: %v", what, err)
}

// Unfused is the refusal of a schedule that only graphs have.
func Unfused(op string) error {
	return Errorf(op, ErrUnsupported, "WithSchedule(Unfused) in %s: Gorgonia's nodes do that", Host)
}
