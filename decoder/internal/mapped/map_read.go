//go:build !(darwin || dragonfly || freebsd || linux || netbsd || openbsd || windows)

package mapped

import (
	"io"
	"os"
)

// mapping reads the file's first size bytes, since this system has no mappings.
func mapping(f *os.File, size int) (data []byte, unmap func() error, err error) {
	data = make([]byte, size)
	if _, err := io.ReadFull(f, data); err != nil {
		return nil, nil, cause(err)
	}
	return data, func() error { return nil }, nil
}
