package decoder

import "errors"

// Errors of this package. Errors of the cache and of ops are those of package leanattention.
var (
	// ErrConfig: an option, a request or a use is outside of what the model and the options allow.
	ErrConfig = errors.New("out of range")
	// ErrFormat: a file contradicts itself or its format.
	ErrFormat = errors.New("bad file")
	// ErrUnsupported: a sound file has content that this package does not know.
	ErrUnsupported = errors.New("not supported")
	// ErrMissing: a file, a field or a weight is missing.
	ErrMissing = errors.New("missing")
	// ErrTooLong: a prompt or a saved text has more tokens than the engine's context.
	ErrTooLong = errors.New("too long")
	// ErrClosed: the model or the engine is closed.
	ErrClosed = errors.New("closed")
)
