// Package mapped opens files of weights: the bytes of a file as a slice, mapped where the system can.
//
// A mapping costs no memory of its own: the system reads pages when they are touched, and drops them when memory is
// short. A system without mappings gets the whole file in memory.
package mapped

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"runtime/debug"
)

var (
	// ErrIrregular is returned for a folder, pipe, socket or device in place of an ordinary file.
	ErrIrregular = errors.New("not a regular file")
	// ErrTooLong is returned for a file that does not fit the machine's addresses.
	ErrTooLong = errors.New("file too long for this machine")
	// ErrGone is returned by Catch when bytes of a mapping can no longer be read: the file was cut, or its disk failed.
	ErrGone = errors.New("the file's bytes are gone")
)

// File is an open file. Its methods may be called from several goroutines, Close after all others.
type File struct {
	data  []byte
	f     *os.File
	unmap func() error
}

// Open opens an ordinary file. Links are followed. An error of the system comes without the path, which the caller
// knows.
func Open(path string) (*File, error) {
	info, err := os.Stat(path) // before os.Open, which blocks at a pipe
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
	info, err := f.Stat() // again: the name may stand for another file by now
	if err != nil {
		return nil, cause(err)
	}
	size := info.Size()
	switch {
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("%v: %w", info.Mode(), ErrIrregular)
	case size > math.MaxInt:
		return nil, fmt.Errorf("%d bytes: %w", size, ErrTooLong)
	case size == 0: // an empty mapping is an error
		return &File{f: f, unmap: func() error { return nil }}, nil
	}
	data, unmap, err := mapping(f, int(size))
	if err != nil {
		return nil, fmt.Errorf("cannot map %d bytes: %w", size, err)
	}
	return &File{data, f, unmap}, nil
}

// Bytes returns the file's bytes. They must not be written, nor used after Close.
//
// A mapped file that another program cuts loses its last pages, and reading them ends the process unless the reader
// runs under Catch.
func (m *File) Bytes() []byte { return m.data }

// ReadAt reads from the file itself. A read of a few bytes through the mapping may bring in many pages around them.
func (m *File) ReadAt(p []byte, at int64) (int, error) { return m.f.ReadAt(p, at) }

var _ io.ReaderAt = (*File)(nil)

// Close releases the mapping and the file. Only the first call may.
func (m *File) Close() error {
	m.data = nil
	return errors.Join(m.unmap(), m.f.Close())
}

// Catch returns f's error, or ErrGone if f, in its own goroutine, reads bytes of a mapping that are gone.
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

// cause drops the path from an error of package os.
func cause(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}
