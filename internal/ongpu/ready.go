package ongpu

import "errors"

// What a recording depends on may not be ready for a replay.
var (
	ErrNotReady    = errors.New("the step is not what was recorded") // a step that recorded work does not fit
	ErrCacheClosed = errors.New("the cache is closed")
)
