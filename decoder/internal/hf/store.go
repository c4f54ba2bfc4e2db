package hf

import (
	"errors"
	"io/fs"

	"gorgonia.org/leanattention/decoder/internal/files"
)

// store is a folder's files, by name. A name has no slash.
type store interface {
	path(name string) string // for errors
	exists(name string) bool
	names() ([]string, error)                     // of all files
	text(name string, most int64) ([]byte, error) // contents of a file of at most most bytes
	open(name string) (*file, error)
}

// textStore is the part that both stores have in common.
type textStore struct{ files.Folder }

func (s textStore) path(name string) string { return s.Path(name) }

func (s textStore) exists(name string) bool { return s.Exists(name) }

func (s textStore) names() ([]string, error) {
	names, err := s.Names()
	if err != nil {
		return nil, unread(s.Path(""), err)
	}
	return names, nil
}

func (s textStore) text(name string, most int64) ([]byte, error) {
	data, err := s.Read(name, most)
	if err != nil {
		return nil, unread(s.Path(name), err)
	}
	return data, nil
}

// unread converts an error of package files to an error of this package.
func unread(path string, err error) error {
	switch {
	case errors.Is(err, files.ErrPointer):
		return fail(ErrMissing, path, "%v", err)
	case errors.Is(err, files.ErrIrregular), errors.Is(err, files.ErrTooLong):
		return fail(ErrFormat, path, "%v", err)
	}
	return fail(ErrMissing, path, "%v", cause(err))
}

// osStore is the store of a folder of the operating system.
type osStore struct{ textStore }

func (s osStore) open(name string) (*file, error) { return openFile(s.path(name)) }

// fsStore is the store of a file system's root.
type fsStore struct {
	textStore
	fsys fs.FS
}

func (s fsStore) open(name string) (*file, error) {
	_, err := s.Size(name)
	var data []byte
	if err == nil {
		data, err = fs.ReadFile(s.fsys, name)
	}
	if err != nil {
		return nil, unread(s.path(name), err)
	}
	return &file{path: s.path(name), data: data, unmap: func() error { return nil }}, nil
}
