package hf

import (
	"errors"
	"io/fs"

	"gorgonia.org/leanattention/decoder/internal/mapped"
)

// file is one weight file. Its data is mapped if the system supports mappings.
type file struct {
	path  string
	data  []byte
	unmap func() error
}

func openFile(path string) (*file, error) {
	f, err := mapped.Open(path)
	switch {
	case errors.Is(err, mapped.ErrIrregular):
		return nil, fail(ErrFormat, path, "%v", err)
	case errors.Is(err, mapped.ErrTooLong):
		return nil, fail(ErrUnsupported, path, "%v", err)
	case err != nil:
		return nil, fail(ErrMissing, path, "%v", err)
	}
	return &file{path, f.Bytes(), f.Close}, nil
}

// cause removes the path from an error of package os, since fail adds the path.
func cause(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}
