package main

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var errFault = errors.New("a fault of the disk")

// faulty is a disk of which one operation fails, or that and all after it.
type faulty struct {
	disk
	at   int // the operation that fails
	ever bool
	done []string
	open int // files
}

func (d *faulty) fails(operation string) error {
	d.done = append(d.done, operation)
	if n := len(d.done) - 1; n == d.at || d.ever && n > d.at {
		return errFault
	}
	return nil
}

func (d *faulty) Stat(name string) (fs.FileInfo, error) {
	if err := d.fails("stat"); err != nil {
		return nil, err
	}
	return d.disk.Stat(name)
}

func (d *faulty) Lstat(name string) (fs.FileInfo, error) {
	if err := d.fails("lstat"); err != nil {
		return nil, err
	}
	return d.disk.Lstat(name)
}

func (d *faulty) Readlink(name string) (string, error) {
	if err := d.fails("readlink"); err != nil {
		return "", err
	}
	return d.disk.Readlink(name)
}

func (d *faulty) Open(name string) (file, error) {
	if err := d.fails("open"); err != nil {
		return nil, err
	}
	return d.opened(d.disk.Open(name))
}

func (d *faulty) CreateTemp(folder, pattern string) (file, error) {
	if err := d.fails("create"); err != nil {
		return nil, err
	}
	return d.opened(d.disk.CreateTemp(folder, pattern))
}

func (d *faulty) Rename(from, to string) error {
	if err := d.fails("rename"); err != nil {
		return err
	}
	return d.disk.Rename(from, to)
}

func (d *faulty) Remove(name string) error {
	if err := d.fails("remove"); err != nil {
		return err
	}
	return d.disk.Remove(name)
}

func (d *faulty) opened(f file, err error) (file, error) {
	if err != nil {
		return nil, err
	}
	d.open++
	return &faultyFile{f, d}, nil
}

type faultyFile struct {
	file
	disk *faulty
}

func (f *faultyFile) Read(p []byte) (int, error) {
	if err := f.disk.fails("read"); err != nil {
		return 0, err
	}
	return f.file.Read(p[:min(len(p), 1<<16)]) // so that there are several
}

func (f *faultyFile) Write(p []byte) (int, error) {
	if err := f.disk.fails("write"); err != nil {
		n, _ := f.file.Write(p[:len(p)/2])
		return n, err
	}
	return f.file.Write(p)
}

func (f *faultyFile) Sync() error { return errors.Join(f.disk.fails("sync"), f.file.Sync()) }

func (f *faultyFile) Close() error {
	f.disk.open--
	return errors.Join(f.disk.fails("close"), f.file.Close())
}

// TestPromptCacheFaults: whichever operation on a file of a prompt cache fails, the error is told, no file is left beside the
// cache, and the cache has its earlier content; if the new content has taken its place already, all of that.
func TestPromptCacheFaults(t *testing.T) {
	const story, longer = "once upon a time", "once upon a time a king"
	dir, model := t.TempDir(), writeModel(t, nil)
	name := filepath.Join(dir, "cache")
	write := func(file, prompt string) (int, string) {
		status, _, errs := leanlm(t, "", "generate", "-m", model, "-p", prompt, "-n", "2", "-prompt-cache", file)
		return status, errs
	}
	content := func(prompt string) []byte {
		if status, errs := write(name, prompt); status != 0 {
			t.Fatal(errs)
		}
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	fresh := content(longer)
	os.Remove(name)
	old, grown := content(story), content(longer) // the last bits of keys that are computed in other steps may differ
	link := filepath.Join(dir, "link")
	links := os.Symlink("cache", link) == nil
	defer func() { drive = osDisk{} }()
	for _, c := range []struct {
		name, file   string
		before, want []byte
	}{{"a file", name, old, grown}, {"none", name, nil, fresh}, {"a link", link, old, grown}, {"a link to none", link, nil, fresh}} {
		if c.file == link && !links {
			continue
		}
		for at := 0; ; at++ {
			if err := errors.Join(os.RemoveAll(name), func() error {
				if c.before == nil {
					return nil
				}
				return os.WriteFile(name, c.before, 0o600)
			}()); err != nil {
				t.Fatal(err)
			}
			d := &faulty{disk: osDisk{}, at: at}
			drive = d
			status, errs := write(c.file, longer)
			drive = osDisk{}
			after, err := os.ReadFile(name)
			if d.open != 0 {
				t.Errorf("%s: %d files are open after %v", c.name, d.open, d.done)
			}
			if beside, err := filepath.Glob(filepath.Join(dir, ".leanlm-*")); err != nil || len(beside) != 0 {
				t.Errorf("%s: after %v there are %v, %v", c.name, d.done, beside, err)
			}
			if len(d.done) <= at { // nothing failed
				if renamed := slices.Index(d.done, "rename"); status != 0 || !bytes.Equal(after, c.want) || renamed < 0 || !slices.Contains(d.done[:renamed], "sync") {
					t.Errorf("%s: status %d, %v, %s", c.name, status, d.done, errs)
				} else if folder := d.done[renamed+1:]; folderSyncs && !slices.Equal(folder, []string{"sync", "close"}) {
					t.Errorf("%s: the folder is not written to the disk: %v", c.name, d.done)
				}
				break
			}
			expected := c.before
			if slices.Contains(d.done[:at], "rename") {
				expected = c.want
			}
			if status != 1 || !strings.Contains(errs, errFault.Error()) {
				t.Errorf("%s: status %d after %v: %s", c.name, status, d.done, errs)
			}
			if !bytes.Equal(after, expected) || (err != nil) != (expected == nil) {
				t.Errorf("%s: after %v the file has %d bytes of %d, %v", c.name, d.done, len(after), len(expected), err)
			}
		}
	}
}
