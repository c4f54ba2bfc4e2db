package hf

import (
	"errors"
	"io"
	"io/fs"
	"math"
	"os"

	"gorgonia.org/leanattention/decoder/internal/files"
)

// file is the bytes of one file of weights, mapped where the system can.
type file struct {
	path  string
	data  []byte
	at    io.ReaderAt // the same bytes, read without the mapping, which would read more around them; nil: there are none
	unmap func() error
}

func openFile(path string) (*file, error) {
	size, err := files.Size(path)
	if err != nil {
		return nil, unread(path, err)
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
	data, unmap, err := mapping(f, int(size))
	if err != nil {
		_ = f.Close()
		return nil, fail(ErrMissing, path, "cannot map %d bytes: %v", size, err)
	}
	return &file{path, data, f, func() error { return errors.Join(unmap(), f.Close()) }}, nil
}

// cause drops the path from an error of package os: the sentence has it already.
func cause(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}
