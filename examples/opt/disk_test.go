package main

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/decoder/tokenizer"
	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/examples/opt/tiny"
	"gorgonia.org/leanattention/internal/memory"
)

// obeyed reports what a terminal would obey in a message.
func obeyed(t *testing.T, message string) {
	t.Helper()
	for _, r := range message {
		if unicode.IsControl(r) && !strings.ContainsRune("\n\r\t", r) || r == 0x202e {
			t.Errorf("%U in %q", r, message)
			return
		}
	}
}

func TestPrintable(t *testing.T) {
	for message, want := range map[string]string{
		"plain é \u00a0 世界 🙂\n\tnext": "plain é \u00a0 世界 🙂\n\tnext",
		"\x1b[31m\x07\x7f\r\x00":      `\x1b[31m\a\x7f\r\x00`,
		"\u009b2J \u202e \u200b":      `\u009b2J \u202e \u200b`,
		"\xff\x9b \ufffd":             "\\xff\\x9b \ufffd",
		`"quoted" \ '`:                `"quoted" \ '`,
	} {
		if got := printable(message); got != want {
			t.Errorf("%q: %q, want %q", message, got, want)
		}
	}
}

// What a file says reaches the terminal in quotes, wherever it is from.
func TestQuoted(t *testing.T) {
	const escape = `\u001b[2J\u009b31m`
	for name, text := range map[string]string{
		"model.safetensors.index.json": `{"weight_map": {"x": "` + escape + `.safetensors"}}`,
		"config.json":                  `{"model_type": "` + escape + `"}`,
		"generation_config.json":       `{"` + escape + `": true}`,
		"tokenizer.json":               `{"model": {"type": "` + escape + `"}}`,
		"tokenizer_config.json":        `{"tokenizer_class": "` + escape + `"}`,
		"added_tokens.json":            `{"` + escape + `": 9999}`,
		"special_tokens_map.json":      `{"` + escape + `": "x"}`,
	} {
		dir := writeModel(t, nil)
		if name == "model.safetensors.index.json" {
			os.Remove(filepath.Join(dir, "model.safetensors"))
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
		status, _, log := command(t, "-model", dir, "-prompt", "a", "-n", "1")
		if status != 1 || !strings.Contains(log, name) {
			t.Errorf("%s: status %d, %s", name, status, log)
		}
		obeyed(t, log)
	}
}

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
	return f.file.Read(p[:min(len(p), 1000)]) // so that there are several
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

// Whichever operation on a file of a prompt cache fails, it is told, no file is left beside the cache, and the cache has
// what it had; if the new one has taken its place already, all of that.
func TestPromptCacheFaults(t *testing.T) {
	dir, model := t.TempDir(), writeModel(t, nil)
	name := filepath.Join(dir, "cache")
	cached := func(file, prompt string) (int, string) {
		status, _, log := command(t, "-model", model, "-prompt", prompt, "-n", "2", "-prompt-cache", file)
		return status, log
	}
	content := func(prompt string) []byte {
		if status, log := cached(name, prompt); status != 0 {
			t.Fatal(log)
		}
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	fresh := content("abcdef")
	os.Remove(name)
	old, longer := content("abc"), content("abcdef") // of keys that are computed in other steps the last bits may be others
	link := filepath.Join(dir, "link")
	links := os.Symlink("cache", link) == nil
	defer func() { drive = osDisk{} }()
	for _, c := range []struct {
		name, file   string
		before, want []byte
	}{{"a file", name, old, longer}, {"none", name, nil, fresh}, {"a link", link, old, longer}, {"a link to none", link, nil, fresh}} {
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
			status, log := cached(c.file, "abcdef")
			drive = osDisk{}
			after, err := os.ReadFile(name)
			if d.open != 0 {
				t.Errorf("%s: %d files are open after %v", c.name, d.open, d.done)
			}
			if beside, err := filepath.Glob(filepath.Join(dir, ".opt-*")); err != nil || len(beside) != 0 {
				t.Errorf("%s: after %v there are %v, %v", c.name, d.done, beside, err)
			}
			if len(d.done) <= at { // nothing failed
				if renamed := slices.Index(d.done, "rename"); status != 0 || !bytes.Equal(after, c.want) || renamed < 0 || !slices.Contains(d.done[:renamed], "sync") {
					t.Errorf("%s: status %d, %v, %s", c.name, status, d.done, log)
				} else if folder := d.done[renamed+1:]; folderSyncs && !slices.Equal(folder, []string{"sync", "close"}) {
					t.Errorf("%s: the folder is not written to the disk: %v", c.name, d.done)
				}
				break
			}
			expected := c.before
			if slices.Contains(d.done[:at], "rename") {
				expected = c.want
			}
			if status != 1 || !strings.Contains(log, errFault.Error()) {
				t.Errorf("%s: status %d after %v: %s", c.name, status, d.done, log)
			}
			if !bytes.Equal(after, expected) || (err != nil) != (expected == nil) {
				t.Errorf("%s: after %v the file has %d bytes of %d, %v", c.name, d.done, len(after), len(expected), err)
			}
		}
	}
}

// Whichever check of memory fails, it is told before anything is written.
func TestMemoryFaults(t *testing.T) {
	model, name := writeModel(t, nil), filepath.Join(t.TempDir(), "cache")
	args := []string{"-model", model, "-n", "2", "-prompt-cache", name, "-prompt"}
	if status, _, log := command(t, append(args, "abc")...); status != 0 {
		t.Fatal(log)
	}
	old, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	now := memory.Now
	defer func() { memory.Now = now }()
	for at := 0; ; at++ {
		calls := 0
		memory.Now = func() (memory.Free, bool) {
			if calls++; calls > at+1 { // the first one is for the limit of the heap, and no check
				return memory.Free{Of: "a test"}, true
			}
			return now()
		}
		status, out, log := command(t, append(args, "abcdef")...)
		if calls <= at+1 {
			if status != 0 || at < 2 { // of the weights with the cache, and of the cache
				t.Errorf("status %d with %d checks: %s", status, calls, log)
			}
			break
		}
		if status != 1 || out != "" || !strings.Contains(log, la.ErrOutOfMemory.Error()) || !strings.Contains(log, "of a test") {
			t.Errorf("check %d: status %d, %q, %s", at, status, out, log)
		}
		files, _ := os.ReadDir(filepath.Dir(name))
		if after, err := os.ReadFile(name); err != nil || !bytes.Equal(after, old) || len(files) != 1 {
			t.Errorf("check %d: %v, %v", at, files, err)
		}
	}
}

// faultyFS is a file system on such a disk.
type faultyFS struct {
	fs.FS
	disk *faulty
}

func (f faultyFS) Open(name string) (fs.File, error) {
	if err := f.disk.fails("open"); err != nil {
		return nil, err
	}
	file, err := f.FS.Open(name)
	if err != nil {
		return nil, err
	}
	f.disk.open++
	return faultyFSFile{file, f.disk}, nil
}

type faultyFSFile struct {
	fs.File
	disk *faulty
}

func (f faultyFSFile) Stat() (fs.FileInfo, error) {
	if err := f.disk.fails("stat"); err != nil {
		return nil, err
	}
	return f.File.Stat()
}

func (f faultyFSFile) Read(p []byte) (int, error) {
	if err := f.disk.fails("read"); err != nil {
		return 0, err
	}
	return f.File.Read(p)
}

func (f faultyFSFile) ReadDir(n int) ([]fs.DirEntry, error) {
	if err := f.disk.fails("readdir"); err != nil {
		return nil, err
	}
	return f.File.(fs.ReadDirFile).ReadDir(n)
}

func (f faultyFSFile) Close() error {
	f.disk.open--
	return f.File.Close() // of a file that was read, whose errors mean nothing
}

// From whichever operation on on a model's folder all fail, the model is not loaded, and no file stays open.
func TestLoadFaults(t *testing.T) {
	for what, load := range map[string]func(fs.FS) (io.Closer, error){
		"the folder":    func(in fs.FS) (io.Closer, error) { return hf.OpenFS("x", in) },
		"the tokenizer": func(in fs.FS) (io.Closer, error) { _, err := tokenizer.LoadFS("x", in); return io.NopCloser(nil), err },
	} {
		for at := 0; ; at++ {
			d := &faulty{at: at, ever: true}
			loaded, err := load(faultyFS{tiny.Files, d})
			if d.open != 0 {
				t.Errorf("%s: %d files are open after %v", what, d.open, d.done)
			}
			if len(d.done) <= at {
				if err != nil || at < 10 {
					t.Errorf("%s: %v after %v", what, err, d.done)
				} else if err := loaded.Close(); err != nil {
					t.Error(err)
				}
				break
			}
			if err == nil || !strings.Contains(err.Error(), errFault.Error()) {
				t.Errorf("%s: %v, where %s %d failed", what, err, d.done[at], at)
			}
		}
	}
}
