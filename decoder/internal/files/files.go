// Package files reads whole files from untrusted sources: ordinary files only, and none that is longer than its
// reader can use.
//
// A pipe without a writer would block, a device or a link to one may have no end, and a sparse file may claim any
// size. All of these are errors before anything is read.
package files

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
)

// Errors of this package wrap one of these errors, or the system's.
var (
	// ErrIrregular is returned for a folder, pipe, socket or device in place of an ordinary file.
	ErrIrregular = errors.New("not a regular file")
	// ErrTooLong is returned for more bytes than the reader accepts.
	ErrTooLong = errors.New("file too long")
	// ErrPointer is returned for a Git LFS pointer in place of a file.
	ErrPointer = errors.New("a Git LFS pointer and not the file itself, which git lfs pull gets")
)

// IsPointer reports whether data is a Git LFS pointer, which a clone without Git LFS has in place of large files.
func IsPointer(data []byte) bool {
	return len(data) < 1024 && bytes.HasPrefix(data, []byte("version https://git-lfs.github.com/spec/"))
}

// Folder is a folder of the operating system, or the root of a file system.
type Folder struct {
	name string
	fsys fs.FS                          // nil: the operating system's
	told func(name string, data []byte) // called for each file that Read has read; nil: none
}

// Dir returns a folder of the operating system.
func Dir(name string) Folder { return Folder{name: name} }

// FS returns the root of a file system, such as an embedded one. name stands for the folder in errors.
func FS(name string, fsys fs.FS) Folder { return Folder{name: name, fsys: fsys} }

// Telling returns the folder with a function that Read calls for each file that it has read.
func (d Folder) Telling(f func(name string, data []byte)) Folder {
	d.told = f
	return d
}

// Path returns the path of one of the folder's files, for errors.
func (d Folder) Path(name string) string {
	if d.fsys != nil {
		return path.Join(d.name, name)
	}
	return filepath.Join(d.name, name)
}

// Exists reports whether the name exists, also as a dangling link.
func (d Folder) Exists(name string) bool {
	var err error
	if d.fsys != nil {
		_, err = fs.Stat(d.fsys, name)
	} else {
		_, err = os.Lstat(d.Path(name))
	}
	return !errors.Is(err, fs.ErrNotExist)
}

// Names returns the names in the folder, without folders.
func (d Folder) Names() ([]string, error) {
	var all []fs.DirEntry
	var err error
	if d.fsys != nil {
		all, err = fs.ReadDir(d.fsys, ".")
	} else {
		all, err = os.ReadDir(d.name)
	}
	var names []string
	for _, e := range all {
		if !e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, err
}

// Read returns one of the folder's files, which may have up to most bytes.
func (d Folder) Read(name string, most int64) ([]byte, error) {
	data, err := d.read(name, most)
	if err == nil && d.told != nil {
		d.told(name, data)
	}
	return data, err
}

func (d Folder) read(name string, most int64) ([]byte, error) {
	if d.fsys == nil {
		return Read(d.Path(name), most)
	}
	if _, err := d.Size(name); err != nil { // the file system may be the operating system's
		return nil, err
	}
	f, err := d.fsys.Open(name)
	if err != nil {
		return nil, err
	}
	return read(f, most)
}

// Size returns the size of one of the folder's files, which must be an ordinary file.
func (d Folder) Size(name string) (int64, error) {
	if d.fsys == nil {
		return Size(d.Path(name))
	}
	info, err := fs.Stat(d.fsys, name)
	if err != nil {
		return 0, err
	}
	return regular(info)
}

// Read returns a file of up to most bytes. Links are followed.
func Read(name string, most int64) ([]byte, error) {
	if _, err := Size(name); err != nil { // opening a pipe would block
		return nil, err
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	return read(f, most)
}

// Size returns the size of an ordinary file.
func Size(name string) (int64, error) {
	info, err := os.Stat(name)
	if err != nil {
		return 0, err
	}
	return regular(info)
}

func regular(info fs.FileInfo) (int64, error) {
	if !info.Mode().IsRegular() {
		return 0, fmt.Errorf("%w (%v)", ErrIrregular, info.Mode().Type())
	}
	return info.Size(), nil
}

// read reads an open file and closes it.
func read(f fs.File, most int64) ([]byte, error) {
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	size, err := regular(info)
	if err != nil {
		return nil, err
	}
	if size > most {
		return nil, fmt.Errorf("%d bytes, more than the %d that such a file can need: %w", size, most, ErrTooLong)
	}
	data, err := AtMost(f, most) // the file may have grown
	if err == nil && IsPointer(data) {
		return nil, ErrPointer
	}
	return data, err
}

// Stream returns the contents of a file, pipe or device up to its end, at most `most` bytes.
func Stream(name string, most int64) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Mode().IsRegular() && info.Size() > most {
		return nil, fmt.Errorf("%d bytes, more than %d: %w", info.Size(), most, ErrTooLong)
	}
	return AtMost(f, most)
}

// AtMost reads to the end, at most `most` bytes.
func AtMost(r io.Reader, most int64) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, most+1))
	if err != nil {
		return nil, err
	}
	if int64(len(data)) > most {
		return nil, fmt.Errorf("more than %d bytes: %w", most, ErrTooLong)
	}
	return data, nil
}
