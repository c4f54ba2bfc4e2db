package decoder

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	la "gorgonia.org/leanattention"
)

// swap keeps the keys and values of texts that wait in files. The methods of a nil swap do nothing.
type swap struct {
	dir         string
	limit, used int64 // bytes
}

// swapped is the keys and values of the first tokens of a text, in a file.
type swapped struct {
	file   *os.File
	tokens int
	bytes  int64
}

// swapPattern is the names of files.
const swapPattern = "leanattention-*.swap"

// openSwap returns a swap in a folder; nil for "".
func openSwap(dir string, limit int64) (*swap, error) {
	if dir == "" {
		return nil, nil
	}
	s := &swap{dir: dir, limit: limit}
	err := os.MkdirAll(dir, 0o700)
	if err == nil {
		err = s.clean()
	}
	if err == nil { // an error now, not when the cache is full
		var f *os.File
		if f, err = s.create(); err == nil {
			err = s.remove(f)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("decoder: Options.Swap: %w", err)
	}
	return s, nil
}

// clean removes the files of processes that have ended. A file of a process that runs has no name, or on Windows cannot be removed.
func (s *swap) clean() error {
	files, err := os.ReadDir(s.dir)
	for _, f := range files {
		if ok, _ := filepath.Match(swapPattern, f.Name()); ok && f.Type().IsRegular() {
			_ = os.Remove(filepath.Join(s.dir, f.Name()))
		}
	}
	return err
}

// create makes a file. Where open files may be removed, the file has no name: it is gone when the process ends.
func (s *swap) create() (*os.File, error) {
	f, err := os.CreateTemp(s.dir, swapPattern)
	if err == nil {
		_ = os.Remove(f.Name())
	}
	return f, err
}

func (s *swap) remove(f *os.File) error {
	err := f.Close()
	if e := os.Remove(f.Name()); !errors.Is(e, os.ErrNotExist) {
		err = errors.Join(err, e)
	}
	return err
}

// bounded is a writer with a limit.
type bounded struct {
	to      io.Writer
	n, most int64
}

var errSwapFull = errors.New("the files have as many bytes as they may have")

func (b *bounded) Write(p []byte) (int, error) {
	if b.n+int64(len(p)) > b.most {
		return 0, errSwapFull
	}
	n, err := b.to.Write(p)
	b.n += int64(n)
	return n, err
}

// write writes the keys and values of a live text to a file, if that is possible.
func (s *swap) write(t *Text) {
	if s == nil || t.seq.Len() < fewestShared {
		return
	}
	f, err := s.create()
	if err != nil {
		return
	}
	b := &bounded{to: f, most: s.limit - s.used}
	w := bufio.NewWriterSize(b, 1<<20)
	if _, err = t.seq.WriteTo(w); err == nil {
		err = w.Flush()
	}
	if err != nil {
		_ = s.remove(f) // has no name, or clean removes it
		return
	}
	t.swapped = &swapped{f, t.seq.Len(), b.n}
	s.used += b.n
}

// read reads the keys and values of a text; nil: the file does not have them any more.
func (s *swap) read(t *Text, read func(io.Reader) (*la.Sequence, error)) *la.Sequence {
	if _, err := t.swapped.file.Seek(0, io.SeekStart); err != nil {
		return nil
	}
	seq, err := read(bufio.NewReaderSize(t.swapped.file, 1<<20))
	if err != nil {
		return nil
	}
	if seq.Len() != t.swapped.tokens {
		_ = seq.Release()
		return nil
	}
	return seq
}

// drop removes the file of a text.
func (s *swap) drop(t *Text) {
	if s == nil || t.swapped == nil {
		return
	}
	_ = s.remove(t.swapped.file) // has no name, or clean removes it
	s.used -= t.swapped.bytes
	t.swapped = nil
}
