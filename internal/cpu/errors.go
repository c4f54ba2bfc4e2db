package cpu

import "errors"

// ErrPanic is returned after a panic of a worker; the outputs of the run are undefined. The package's other errors
// wrap those of package attn.
var ErrPanic = errors.New("panic in a worker")
