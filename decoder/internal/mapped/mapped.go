// Package mapped opens weight files: the bytes of a file as a slice, mapped into memory if the system supports
// mappings.
//
// A mapping needs no memory of its own. The system reads a page at its first access, and drops pages when memory is
// short. On a system without mappings, the whole file is read into memory.
package mapped

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"runtime/debug"
	"unsafe"
)

var (
	// ErrIrregular is returned if the path is a folder, pipe, socket or device, and not a regular file.
	ErrIrregular = errors.New("not a regular file")
	// ErrTooLong is returned for a file that does not fit the address space.
	ErrTooLong = errors.New("file too long for this machine")
	// ErrGone is returned by Catch if bytes of a mapping cannot be read: the file was truncated, or the disk failed.
	ErrGone = errors.New("the file's bytes are gone")
)

// File is an open file. Its methods are safe for concurrent use, except Close, which must be called last.
type File struct {
	data  []byte
	f     *os.File
	unmap func() error
}

// Open opens a regular file. It follows links. Errors of the system do not contain the path, which the caller knows.
func Open(path string) (*File, error) {
	info, err := os.Stat(path) // before os.Open, which blocks on a pipe
	if err != nil {
		return nil, cause(err)
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%v: %w", info.Mode(), ErrIrregular)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, cause(err)
	}
	opened, err := open(f)
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return opened, nil
}

func open(f *os.File) (*File, error) {
	info, err := f.Stat() // again, since the path may name another file by now
	if err != nil {
		return nil, cause(err)
	}
	size := info.Size()
	switch {
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("%v: %w", info.Mode(), ErrIrregular)
	case size > math.MaxInt:
		return nil, fmt.Errorf("%d bytes: %w", size, ErrTooLong)
	case size == 0: // mapping an empty file would fail
		return &File{f: f, unmap: func() error { return nil }}, nil
	}
	data, unmap, err := mapping(f, int(size))
	if err != nil {
		return nil, fmt.Errorf("cannot map %d bytes: %w", size, err)
	}
	return &File{data, f, unmap}, nil
}

// Bytes returns the file's bytes. The bytes must not be written, and must not be used after Close.
//
// If another program truncates a mapped file, reading the lost pages ends the process, unless the read runs in Catch.
func (m *File) Bytes() []byte { return m.data }

// Drop releases the memory of a part of the bytes. The next access reads the part again.
func (m *File) Drop(part []byte) {
	if len(part) == 0 || len(m.data) == 0 {
		return
	}
	from, at := uintptr(unsafe.Pointer(unsafe.SliceData(m.data))), uintptr(unsafe.Pointer(unsafe.SliceData(part)))
	if at < from || at-from > uintptr(len(m.data)) || uintptr(len(part)) > uintptr(len(m.data))-(at-from) {
		return // not of this file
	}
	dropPages(part)
}

// ReadAt reads from the file, not from the mapping. A read of a few bytes through the mapping may load many pages
// around them.
func (m *File) ReadAt(p []byte, at int64) (int, error) { return m.f.ReadAt(p, at) }

var _ io.ReaderAt = (*File)(nil)

// Close releases the mapping and the file. Close must be called only once.
func (m *File) Close() error {
	m.data = nil
	return errors.Join(m.unmap(), m.f.Close())
}

// Catch calls f and returns its error. It returns ErrGone if f reads bytes of a mapping that are gone. Catch does not
// cover goroutines that f starts.
func Catch(f func() error) (err error) {
	before := debug.SetPanicOnFault(true)
	defer func() {
		debug.SetPanicOnFault(before)
		switch p := recover().(type) {
		case nil:
		case interface{ Addr() uintptr }:
			err = ErrGone
		default:
			panic(p)
		}
	}()
	return f()
}

// cause removes the path from an error of package os.
func cause(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}
