package hf

import (
	"errors"
	"fmt"
	"strconv"

	"gorgonia.org/leanattention/internal/plural"
)

// Every error of this package is one sentence with the file and the values in
// it, and wraps one of these.
var (
	// ErrFormat: a file's bytes contradict themselves or its format.
	ErrFormat = errors.New("malformed file")
	// ErrUnsupported: a sound file holds something that this package, or an
	// OPT decoder, has no use for.
	ErrUnsupported = errors.New("unsupported")
	// ErrMissing: a file or a weight is not there.
	ErrMissing = errors.New("missing")
	// ErrShape: a weight has another shape than the one asked for.
	ErrShape = errors.New("shape mismatch")
	// ErrClosed: the folder was used after Close.
	ErrClosed = errors.New("folder is closed")
)

// fail makes this package's errors: "hf: file: what is wrong: kind".
func fail(kind error, file, format string, args ...any) error {
	return fmt.Errorf("hf: %s: %s: %w", file, plural.Mend(fmt.Sprintf(format, args...)), kind)
}

// quote is %q for strings out of a file, cut so that a sentence stays one.
func quote(s string) string {
	const most = 120
	if len(s) <= most {
		return strconv.Quote(s)
	}
	return fmt.Sprintf("%q... (%d bytes)", s[:most], len(s))
}

// dims prints a shape out of a file, cut like quote.
func dims(shape []uint64) string {
	const most = 16
	if len(shape) <= most {
		return fmt.Sprint(shape)
	}
	return fmt.Sprintf("%v... (%d dimensions)", shape[:most], len(shape))
}
