//go:build !linux

package decoder

import "time"

func sleep(d time.Duration) { time.Sleep(d) }
