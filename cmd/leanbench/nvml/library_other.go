//go:build nogpu || !(linux && !android && !faketime && (amd64 || arm64))

package nvml

import (
	"errors"
	"runtime"
)

const libraryName = ""

// openLibrary fails: this build has no way to NVML.
func openLibrary(string) (uintptr, error) {
	return 0, errors.New("not in this build for " + runtime.GOOS + "/" + runtime.GOARCH)
}

func closeLibrary(uintptr) {}

func symbol(uintptr, string) uintptr { return 0 }

// The calls are never made, since there is no library.

//go:uintptrescapes
func (f *function) address(...uintptr) uintptr { return 0 }

//go:uintptrescapes
func (f *function) call(...uintptr) int32 { return -1 }
