package hf

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
)

// Every error of this package is one sentence with the file and the values, and wraps one of the errors below.
var (
	// ErrFormat is returned for a file whose bytes contradict themselves or its format.
	ErrFormat = errors.New("malformed file")
	// ErrUnsupported is returned for a valid file with content that this package does not support.
	ErrUnsupported = errors.New("unsupported")
	// ErrMissing is returned for a missing file or weight.
	ErrMissing = errors.New("missing")
	// ErrShape is returned for a weight whose shape is not the requested one.
	ErrShape = errors.New("shape mismatch")
	// ErrClosed is returned for any use of a folder after Close.
	ErrClosed = errors.New("folder is closed")
)

// ones finds a plural after the number one.
var ones = regexp.MustCompile(`(^|[ (])1 (byte|dimension|element|length|tensor|value)s\b`)

// fail returns an error of this package: "decoder: file: what is wrong: kind".
func fail(kind error, file, format string, args ...any) error {
	return fmt.Errorf("decoder: %s: %s: %w", file, ones.ReplaceAllString(fmt.Sprintf(format, args...), "${1}1 $2"), kind)
}

// quote formats a string from a file like %q, and truncates a long one.
func quote(s string) string {
	const most = 120
	if len(s) <= most {
		return strconv.Quote(s)
	}
	return fmt.Sprintf("%q... (%d bytes)", s[:most], len(s))
}

// dims formats a shape from a file, and truncates a long one.
func dims(shape []uint64) string {
	const most = 16
	if len(shape) <= most {
		return fmt.Sprint(shape)
	}
	return fmt.Sprintf("%v... (%d dimensions)", shape[:most], len(shape))
}
