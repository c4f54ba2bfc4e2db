//go:build nogpu || (!(linux && !android && !faketime && (amd64 || arm64)) && !(windows && (amd64 || arm64)))

package cuda

import (
	"errors"
	"runtime"
)

const libraryName = ""

// openLibrary fails: NVIDIA has no driver for this platform, or none that can
// be called without cgo, or the build left it out.
func openLibrary(string) (uintptr, error) {
	return 0, errors.New("not in this build for " + runtime.GOOS + "/" + runtime.GOARCH)
}

func closeLibrary(uintptr) {}

func symbol(uintptr, string) uintptr { return 0 }

// invoke is never reached, since there is no library; it is here for the
// compiler.
//
//go:uintptrescapes
func invoke(uintptr, ...uintptr) result { return resultNotInitialized }
