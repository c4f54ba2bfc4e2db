//go:build !unix

package tokenizer

import "time"

var started = time.Now()

func cpuTime() time.Duration { return time.Since(started) }
