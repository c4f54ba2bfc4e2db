//go:build !(linux && (amd64 || arm64))

package main

import (
	"errors"
	"runtime"
)

type nvrtc struct{ version string }

func openNVRTC(string) (*nvrtc, error) {
	return nil, errors.New("GPU modules are built on Linux, this is " + runtime.GOOS + "/" + runtime.GOARCH)
}

func (*nvrtc) compile(string, map[string][]byte, string, string, []string) (image, ptx []byte, log string, err error) {
	return nil, nil, "", errors.ErrUnsupported
}
