package hf

import (
	"cmp"
	"errors"
	"io"
	"io/fs"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"gorgonia.org/leanattention/decoder/internal/mapped"
)

// file is one weight file. Its data is mapped if the system supports mappings.
type file struct {
	path  string
	data  []byte
	at    io.ReaderAt // reads the file, not its mapping; nil: data is no mapping
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
	return &file{path, f.Bytes(), f, f.Close}, nil
}

// reading calls f, which reads the data of a file. It returns an error if the file was cut. f must start no goroutines.
func reading(path string, f func() error) error {
	err := mapped.Catch(f)
	if errors.Is(err, mapped.ErrGone) {
		return fail(ErrMissing, path, "another program has cut the file, or its disk has failed: %v", err)
	}
	return err
}

// offset returns the place of a part of the data. It returns false if the part is not in the mapping of a file.
func (f *file) offset(part []byte) (int64, bool) {
	if f == nil || f.at == nil || len(part) == 0 {
		return 0, false
	}
	from := uintptr(unsafe.Pointer(unsafe.SliceData(f.data)))
	at := uintptr(unsafe.Pointer(unsafe.SliceData(part)))
	if at < from || at-from > uintptr(len(f.data)-len(part)) {
		return 0, false
	}
	return int64(at - from), true
}

// readAt reads len(dst) bytes at an offset from the file: reading them from the mapping would keep all of its pages in
// memory.
func (f *file) readAt(dst []byte, at int64) error {
	if n, err := f.at.ReadAt(dst, at); n < len(dst) {
		return fail(ErrMissing, f.path, "another program has cut the file, or its disk has failed: %d of %d bytes at %d: %v", n, len(dst), at, cause(err))
	}
	return nil
}

// share is the number of bytes that a goroutine reads at a time.
const share = 1 << 20

// shares divides size bytes among goroutines, which call do for parts [from, to), until no part is left or one has failed.
func shares(size int, do func(from, to int) error) error {
	parts := (size + share - 1) / share
	errs := make([]error, min(runtime.GOMAXPROCS(0), parts))
	var next atomic.Int64
	var wait sync.WaitGroup
	for i := range errs {
		wait.Go(func() {
			for errs[i] == nil {
				part := next.Add(1) - 1
				if part >= int64(parts) {
					return
				}
				from := int(part) * share
				if errs[i] = do(from, min(size-from, share)+from); errs[i] != nil {
					next.Store(int64(parts))
				}
			}
		})
	}
	wait.Wait()
	return cmp.Or(errs...)
}

// cause removes the path from an error of package os, since fail adds the path.
func cause(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}
