// Package errs has the kinds of errors that the public packages share, and the form of their texts.
package errs

import (
	"errors"
)

// The kinds of errors. Package leanattention exports and documents each.
var (
	ErrShape       = errors.New("shape mismatch")
	ErrDType       = errors.New("element type mismatch")
	ErrLength      = errors.New("length out of range")
	ErrOption      = errors.New("bad option value")
	ErrUnsupported = errors.New("not supported")
	ErrCacheFull   = errors.New("cache is full")
	ErrFormat      = errors.New("bad data")
	ErrState       = errors.New("call out of order")
	ErrClosed      = errors.New("closed")
	ErrGraph       = errors.New("bad graph")
	ErrInternal    = errors.New("internal error")
)
