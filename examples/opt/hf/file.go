package hf

import (
	"errors"
	"io/fs"
	"math"
	"os"
)

// file is the bytes of one file of weights, mapped where the system can.
type file struct {
	path  string
	data  []byte
	unmap func() error
}

func openFile(path string) (*file, error) {
	size, err := regular(path)
	if err != nil {
		return nil, err
	}
	if size > math.MaxInt {
		return nil, fail(ErrUnsupported, path, "%d bytes do not fit this machine's addresses", size)
	}
	if size == 0 {
		return &file{path: path, unmap: func() error { return nil }}, nil // an empty mapping is an error
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fail(ErrMissing, path, "%v", cause(err))
	}
	defer f.Close()
	data, unmap, err := mapping(f, int(size))
	if err != nil {
		return nil, fail(ErrMissing, path, "cannot map %d bytes: %v", size, err)
	}
	return &file{path, data, unmap}, nil
}

// readText reads a whole file of at most most bytes.
func readText(path string, most int64) ([]byte, error) {
	size, err := regular(path)
	if err != nil {
		return nil, err
	}
	if size > most {
		return nil, fail(ErrFormat, path, "%d bytes, more than the %d that such a file can need", size, most)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fail(ErrMissing, path, "%v", cause(err))
	}
	return data, nil
}

// regular returns the size of an ordinary file: opening a pipe would block, and
// a folder or device has no size.
func regular(path string) (int64, error) {
	info, err := os.Stat(path)
	if err != nil {
		return 0, fail(ErrMissing, path, "%v", cause(err))
	}
	if !info.Mode().IsRegular() {
		return 0, fail(ErrFormat, path, "not a regular file (%v)", info.Mode().Type())
	}
	return info.Size(), nil
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// cause drops the path from an error of package os: the sentence has it already.
func cause(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}
