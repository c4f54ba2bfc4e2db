//go:build !(darwin || dragonfly || freebsd || linux || netbsd || openbsd)

package hf

import (
	"io"
	"os"
)

// mapping reads the file's first size bytes, once: there is no mapping here.
func mapping(f *os.File, size int) (data []byte, unmap func() error, err error) {
	data = make([]byte, size)
	if _, err := io.ReadFull(f, data); err != nil {
		return nil, nil, err
	}
	return data, func() error { return nil }, nil
}
