package files

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"testing/fstest"
	"time"
)

func TestRead(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(dir, "x")
	if err := os.WriteFile(name, []byte("12345"), 0o666); err != nil {
		t.Fatal(err)
	}
	for _, d := range []Folder{Dir(dir), FS("here", fstest.MapFS{"x": {Data: []byte("12345")}, "d/y": {}})} {
		if !d.Exists("x") || d.Exists("y") {
			t.Error("x is there, y is not")
		}
		if data, err := d.Read("x", 5); err != nil || string(data) != "12345" {
			t.Errorf("%q, %v", data, err)
		}
		if data, err := d.Read("x", 4); data != nil || !errors.Is(err, ErrTooLong) || !strings.Contains(err.Error(), "5 bytes, more than the 4") {
			t.Errorf("too long: %q, %v", data, err)
		}
		if data, err := d.Read("y", 4); data != nil || !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("not there: %q, %v", data, err)
		}
	}
	if data, err := FS("here", fstest.MapFS{"d/y": {}}).Read("d", 5); data != nil || !errors.Is(err, ErrIrregular) {
		t.Errorf("a folder: %q, %v", data, err)
	}
	if p := FS("here", nil); p.Path("x") != filepath.Join("here", "x") {
		t.Errorf("path %q", p.Path("x"))
	}
}

// TestHostile checks that no kind of file blocks, or uses memory for a size that the file only claims.
func TestHostile(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	sparse, err := os.Create(at("sparse"))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(sparse.Truncate(20<<30), sparse.Close(), os.Mkdir(at("dir"), 0o777)); err != nil {
		t.Skip(err)
	}
	names := map[string]error{"dir": ErrIrregular, "sparse": ErrTooLong}
	if runtime.GOOS == "linux" {
		if err := errors.Join(mkfifo(at("fifo")), os.Symlink("/dev/zero", at("zero")), os.Symlink("gone", at("nowhere"))); err != nil {
			t.Skip(err)
		}
		names["fifo"], names["zero"], names["nowhere"] = ErrIrregular, ErrIrregular, fs.ErrNotExist
		if _, err := Stream(at("zero"), 1<<20); !errors.Is(err, ErrTooLong) {
			t.Errorf("a stream without an end: %v", err)
		}
		if _, err := Stream(at("sparse"), 1<<20); !errors.Is(err, ErrTooLong) {
			t.Errorf("a stream of 20 GB: %v", err)
		}
		go os.WriteFile(at("fifo"), []byte("from a pipe"), 0)
		if data, err := Stream(at("fifo"), 11); err != nil || string(data) != "from a pipe" {
			t.Errorf("%q, %v", data, err)
		}
	}
	for name, want := range names {
		for _, folder := range []Folder{Dir(dir), FS("here", os.DirFS(dir))} {
			done := make(chan error, 1)
			go func() {
				_, err := folder.Read(name, 1<<20)
				done <- err
			}()
			select {
			case err := <-done:
				if !errors.Is(err, want) {
					t.Errorf("%s: %v, want %v", name, err, want)
				}
			case <-time.After(10 * time.Second):
				t.Errorf("%s: still reading", name)
			}
		}
	}
}
