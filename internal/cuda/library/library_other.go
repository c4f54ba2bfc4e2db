//go:build nogpu || (!(linux && !android && !faketime && (amd64 || arm64)) && !(windows && (amd64 || arm64)))

package library

import (
	"errors"
	"runtime"
)

// Open fails: NVIDIA has no libraries for this platform, or none that can
// be called without cgo, or the build left them out.
func Open(string) (uintptr, error) {
	return 0, errors.New("not in this build for " + runtime.GOOS + "/" + runtime.GOARCH)
}

// Close gives it back.
func Close(uintptr) {}

// Symbol is the address of a function, 0 here.
func Symbol(uintptr, string) uintptr { return 0 }

// Call is never reached, since there is no library; it is here for the
// compiler.
//
//go:uintptrescapes
func Call(uintptr, ...uintptr) uintptr { return 0 }
