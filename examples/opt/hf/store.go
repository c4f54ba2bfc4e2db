package hf

import (
	"errors"
	"io/fs"
	"path"
	"path/filepath"
)

// store is where the files of a folder are. Names have no slash in them.
type store interface {
	path(name string) string // for errors
	exists(name string) bool
	text(name string, most int64) ([]byte, error) // a whole file of at most most bytes
	open(name string) (*file, error)
}

// osStore is a folder of the operating system.
type osStore string

func (dir osStore) path(name string) string { return filepath.Join(string(dir), name) }
func (dir osStore) exists(name string) bool { return exists(dir.path(name)) }
func (dir osStore) text(name string, most int64) ([]byte, error) {
	return readText(dir.path(name), most)
}
func (dir osStore) open(name string) (*file, error) { return openFile(dir.path(name)) }

// fsStore is the root of a file system.
type fsStore struct {
	name string
	fsys fs.FS
}

func (s fsStore) path(name string) string { return path.Join(s.name, name) }

func (s fsStore) exists(name string) bool {
	_, err := fs.Stat(s.fsys, name)
	return !errors.Is(err, fs.ErrNotExist)
}

func (s fsStore) text(name string, most int64) ([]byte, error) {
	data, err := fs.ReadFile(s.fsys, name)
	if err != nil {
		return nil, fail(ErrMissing, s.path(name), "%v", cause(err))
	}
	if int64(len(data)) > most {
		return nil, fail(ErrFormat, s.path(name), "%d bytes, more than the %d that such a file can need", len(data), most)
	}
	return data, nil
}

func (s fsStore) open(name string) (*file, error) {
	data, err := fs.ReadFile(s.fsys, name)
	if err != nil {
		return nil, fail(ErrMissing, s.path(name), "%v", cause(err))
	}
	return &file{path: s.path(name), data: data, unmap: func() error { return nil }}, nil
}
