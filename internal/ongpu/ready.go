package ongpu

import "errors"

// States on which a recording depends may not be ready for a replay.
var (
	ErrNotReady    = errors.New("the step is not what was recorded") // the step does not fit the recorded work
	ErrCacheClosed = errors.New("the cache is closed")
)
