//go:build !(linux && !android && !faketime && (amd64 || arm64) && !nogpu)

package gputest

import "testing"

func emulate(t testing.TB) { t.Skip("no GPU is emulated here") }
