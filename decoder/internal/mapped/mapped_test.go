package mapped

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"testing"
)

func write(t *testing.T, data []byte) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(name, data, 0o666); err != nil {
		t.Fatal(err)
	}
	return name
}

func TestOpen(t *testing.T) {
	for _, n := range []int{0, 1, 4096, 3<<20 + 7} {
		want := make([]byte, n)
		for i := range want {
			want[i] = byte(i * i >> 3)
		}
		f, err := Open(write(t, want))
		if err != nil {
			t.Fatal(n, err)
		}
		if !bytes.Equal(f.Bytes(), want) {
			t.Errorf("%d bytes are not the file's", n)
		}
		if n > 2 {
			got := make([]byte, 2)
			if _, err := f.ReadAt(got, int64(n-2)); err != nil || !bytes.Equal(got, want[n-2:]) {
				t.Errorf("ReadAt: %v, %v, want %v", got, err, want[n-2:])
			}
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestOpenErrors(t *testing.T) {
	dir := t.TempDir()
	if _, err := Open(dir); !errors.Is(err, ErrIrregular) {
		t.Errorf("a folder: %v", err)
	}
	if _, err := Open(filepath.Join(dir, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
}

// Reading a file that was truncated while mapped returns an error, and does not end the process.
func TestCatch(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("only Linux cuts a mapped file")
	}
	name := write(t, make([]byte, 1<<20))
	f, err := Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := os.Truncate(name, 4096); err != nil {
		t.Fatal(err)
	}
	var sum byte
	err = Catch(func() error {
		for _, b := range f.Bytes() {
			sum += b
		}
		return nil
	})
	if !errors.Is(err, ErrGone) {
		t.Errorf("a cut file: %v", err)
	}
	own := errors.New("own")
	if err := Catch(func() error { return own }); err != own {
		t.Errorf("f's error: %v", err)
	}
	defer func() {
		if p := recover(); p != "other" {
			t.Errorf("another panic became %v", p)
		}
	}()
	_ = Catch(func() error { panic("other") })
}

// TestDrop: the bytes are the same after Drop, and Drop does not touch memory of others.
func TestDrop(t *testing.T) {
	want := make([]byte, 1<<20)
	for i := range want {
		want[i] = byte(i * i >> 5)
	}
	f, err := Open(write(t, want))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	other := bytes.Clone(want)
	for _, part := range [][]byte{f.Bytes(), f.Bytes()[5:], f.Bytes()[100:8000], f.Bytes()[len(want):], nil, other} {
		f.Drop(part)
		if !bytes.Equal(f.Bytes(), want) || !bytes.Equal(other, want) {
			t.Fatalf("after Drop of %d bytes: other bytes", len(part))
		}
	}
}
