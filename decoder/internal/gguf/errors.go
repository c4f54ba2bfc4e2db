package gguf

import (
	"errors"
	"fmt"
	"strconv"
)

// Every error of this package is one sentence with the file and the values, and wraps one of the errors below.
var (
	// ErrFormat is returned for a file whose bytes contradict themselves or the format.
	ErrFormat = errors.New("malformed file")
	// ErrUnsupported is returned for a valid file with content that this package does not read.
	ErrUnsupported = errors.New("unsupported")
	// ErrMissing is returned for a missing file, part, key or tensor.
	ErrMissing = errors.New("missing")
	// ErrType is returned for a metadata value whose type is not the requested one.
	ErrType = errors.New("type mismatch")
	// ErrRange is returned for a number that does not fit the requested type.
	ErrRange = errors.New("out of range")
	// ErrShape is returned for rows outside the tensor, and for a destination whose length is not that of the rows.
	ErrShape = errors.New("shape mismatch")
	// ErrClosed is returned for any use of a file after Close.
	ErrClosed = errors.New("file is closed")
)

// fail returns an error of this package: "gguf: file: what is wrong: kind".
func fail(kind error, file, format string, args ...any) error {
	return fmt.Errorf("gguf: %s: %s: %w", file, fmt.Sprintf(format, args...), kind)
}

// quote formats a string from a file like %q, and truncates a long one.
func quote[S string | []byte](s S) string {
	const most = 120
	if len(s) <= most {
		return strconv.Quote(string(s))
	}
	return fmt.Sprintf("%q... (%d bytes)", string(s[:most]), len(s))
}
