//go:build !linux || android || faketime || (!amd64 && !arm64) || nogpu

package fakedriver

import "errors"

const works = false

func openLibrary(string) (uintptr, error) { return 0, errors.ErrUnsupported }

func callLibrary(uintptr, string, ...uintptr) uintptr { panic(errors.ErrUnsupported) }

func symbol(uintptr, string) uintptr { panic(errors.ErrUnsupported) }

func newCallback(any) uintptr { panic(errors.ErrUnsupported) }
