// Package files reads whole files from untrusted sources. It reads regular files only, up to a length that the caller
// gives.
//
// A pipe without a writer would block, a device may have no end, and a sparse file may claim any size. Each of these
// files is an error before any byte is read.
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

// Every error of this package wraps one of the errors below, or an error of the system.
var (
	// ErrIrregular is returned if the path is a folder, pipe, socket or device, and not a regular file.
	ErrIrregular = errors.New("not a regular file")
	// ErrTooLong is returned for a file that has more bytes than the caller allows.
	ErrTooLong = errors.New("file too long")
	// ErrPointer is returned for a Git LFS pointer in place of the file.
	ErrPointer = errors.New("a Git LFS pointer and not the file itself, which git lfs pull gets")
)

// IsPointer reports whether data is a Git LFS pointer. A clone without Git LFS has pointers in place of large files.
func IsPointer(data []byte) bool {
	return len(data) < 1024 && bytes.HasPrefix(data, []byte("version https://git-lfs.github.com/spec/"))
}

// Folder is a folder of the operating system, or the root of a file system.
type Folder struct {
	name string
	fsys fs.FS                          // nil: the operating system's file system
	told func(name string, data []byte) // called for each file that Read has read; nil: none
}

// Dir returns a folder of the operating system.
func Dir(name string) Folder { return Folder{name: name} }

// FS returns the root of a file system, such as an embedded one. name stands for the folder in errors.
func FS(name string, fsys fs.FS) Folder { return Folder{name: name, fsys: fsys} }

// Telling returns a copy of the folder whose Read calls f for each file that it has read.
func (d Folder) Telling(f func(name string, data []byte)) Folder {
	d.told = f
	return d
}

// Path returns the path of a file of the folder, for errors.
func (d Folder) Path(name string) string {
	if d.fsys != nil {
		return path.Join(d.name, name)
	}
	return filepath.Join(d.name, name)
}

// Exists reports whether a file of the folder exists. A dangling link exists, too.
func (d Folder) Exists(name string) bool {
	var err error
	if d.fsys != nil {
		_, err = fs.Stat(d.fsys, name)
	} else {
		_, err = os.Lstat(d.Path(name))
	}
	return !errors.Is(err, fs.ErrNotExist)
}

// Names returns the names of the files in the folder. Subfolders are left out.
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

// Read returns the contents of a file of the folder. A file of more than most bytes is an error.
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
	if _, err := d.Size(name); err != nil { // fsys may be the operating system's, with pipes
		return nil, err
	}
	f, err := d.fsys.Open(name)
	if err != nil {
		return nil, err
	}
	return read(f, most)
}

// Size returns the size of a file of the folder, which must be a regular file.
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

// Read returns the contents of a file. A file of more than most bytes is an error. Links are followed.
func Read(name string, most int64) ([]byte, error) {
	if _, err := Size(name); err != nil { // before os.Open, which blocks on a pipe
		return nil, err
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	return read(f, most)
}

// Size returns the size of a file, which must be a regular file.
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

// read reads an open file, and closes it.
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

// Stream returns the contents of a file, pipe or device up to its end. More than most bytes are an error.
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

// AtMost reads r to its end. More than most bytes are an error.
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
