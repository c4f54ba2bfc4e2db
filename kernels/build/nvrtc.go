package main

import (
	"fmt"
	"path/filepath"

	"gorgonia.org/leanattention/internal/cuda/nvrtc"
)

// openNVRTC loads the compiler in a folder.
func openNVRTC(dir string) (*nvrtc.Compiler, error) {
	found, err := filepath.Glob(filepath.Join(dir, "libnvrtc.so.*"))
	if err != nil {
		return nil, err
	}
	if len(found) != 1 {
		return nil, fmt.Errorf("%s has %d files libnvrtc.so.*, want one", dir, len(found))
	}
	return nvrtc.LoadFrom(found[0])
}
