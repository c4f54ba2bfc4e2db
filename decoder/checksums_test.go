package decoder

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/decoder/tokenizer"
	"gorgonia.org/leanattention/examples/opt/tiny"

	"gorgonia.org/tensor"
)

// changedWeight has namedWeights, except that large tensors are 0, and that an element of a weight is another one.
type changedWeight struct {
	name string
	at   int // from the end if negative
}

func (c changedWeight) Tensor(name string, shape ...int) (*tensor.Dense, error) {
	t, err := tensor.New(tensor.WithShape(shape...), tensor.Of(tensor.Float32)), error(nil)
	if t.Shape().TotalSize() < 1<<20 {
		t, err = namedWeights{}.Tensor(name, shape...)
	}
	if data := t.Data().([]float32); name == c.name {
		data[(c.at+len(data))%len(data)] += 1e-5
	}
	return t, err
}

// TestChecksums: checksums tell which weight differs: any element in a small model, and the first and last rows in a large one.
func TestChecksums(t *testing.T) {
	small, large := smallNetwork(), smallNetwork()
	large.sizes.Vocab = wholeChecksums/8 + 1000
	const table = "embed_tokens.weight"
	for what, c := range map[string]struct {
		network Network
		at      []int
		seen    bool
	}{
		"small": {small, []int{0, 1, 50, -1}, true},
		"large": {large, []int{0, 7, -1, -8}, true}, "large, between": {large, []int{8, -9}, false},
	} {
		want, err := checksums(c.network, changedWeight{})
		if err != nil || len(want) < 8 || !strings.HasPrefix(want[0], "weight "+table+": ") {
			t.Fatalf("%s: %q, %v", what, want, err)
		}
		for _, at := range c.at {
			got, err := checksums(c.network, changedWeight{name: table, at: at})
			if err != nil {
				t.Fatal(err)
			}
			if slices.Equal(got, want) == c.seen || !slices.Equal(got[1:], want[1:]) {
				t.Errorf("%s: element %d: %q, want %q", what, at, got[0], want[0])
			}
		}
	}
	all, err := checksums(small, namedWeights{})
	if err != nil {
		t.Fatal(err)
	}
	i := 0
	for w := range tensors(small) {
		got, err := checksums(small, changedWeight{name: w.Name, at: -1})
		if err != nil || got[i] == all[i] || !strings.HasPrefix(got[i], "weight "+w.Name+": ") {
			t.Errorf("%s: %q, %v", w.Name, got[i], err)
		}
		i++
	}
}

// TestModelChecksums: checksums of a model tell a difference of the configuration and of the tokenizer.
func TestModelChecksums(t *testing.T) {
	of := func(files fs.FS) []string {
		t.Helper()
		m, err := OpenFS("embedded", files)
		if err != nil {
			t.Fatal(err)
		}
		lines, err := m.Checksums()
		if err := errors.Join(err, m.Close()); err != nil {
			t.Fatal(err)
		}
		return lines
	}
	want := of(tiny.Files)
	if !slices.Equal(of(shippedFiles(t)), want) {
		t.Error("a copy differs")
	}
	for name, c := range map[string]struct{ old, new, line string }{
		"config.json": {`"relu"`, `"gelu"`, "configuration: "},
		"vocab.json":  {`"!"`, `"\u0021"`, "tokenizer: "},
	} {
		files := shippedFiles(t)
		text := string(files[name].Data)
		if strings.Count(text, c.old) == 0 {
			t.Fatalf("no %s in %s", c.old, name)
		}
		if name == "vocab.json" { // another id for two tokens
			var ids map[string]int
			if err := json.Unmarshal(files[name].Data, &ids); err != nil {
				t.Fatal(err)
			}
			ids["!"], ids["#"] = ids["#"], ids["!"]
			data, err := json.Marshal(ids)
			if err != nil {
				t.Fatal(err)
			}
			text = string(data)
		} else {
			text = strings.Replace(text, c.old, c.new, 1)
		}
		files[name].Data = []byte(text)
		var differ []string
		for i, line := range of(files) {
			if line != want[i] {
				differ = append(differ, line)
			}
		}
		if len(differ) != 1 || !strings.HasPrefix(differ[0], c.line) {
			t.Errorf("%s: %q differ", name, differ)
		}
	}
}

// TestOPTWeights: the names and shapes of an OPT network are those of transformers' parameters.
func TestOPTWeights(t *testing.T) {
	data, err := os.ReadFile("internal/hf/testdata/weights.json")
	var golden []struct {
		Config  map[string]any
		Weights map[string][]int
	}
	if err == nil {
		err = json.Unmarshal(data, &golden)
	}
	if err != nil || len(golden) < 7 {
		t.Fatal(len(golden), err)
	}
	for _, g := range golden {
		g.Config["model_type"] = "opt"
		config, err := json.Marshal(g.Config)
		if err != nil {
			t.Fatal(err)
		}
		n, err := ReadNetwork(config, 0)
		if err != nil {
			t.Fatal(err)
		}
		got, want := map[string][]int{}, map[string][]int{}
		for w := range n.Weights() {
			got[w.Name] = w.Shape
		}
		for name, shape := range g.Weights {
			want[strings.TrimPrefix(name, "model.")] = shape
		}
		if n.(*transformer).tied {
			delete(got, "lm_head.weight")
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: weights %v, want %v", config, got, want)
		}
	}
}

// faultyFiles are the files of a folder on a disk of which an operation, and all later ones, fail.
type faultyFiles struct {
	fs.FS
	at   int
	done []string
	open int // files
}

func (f *faultyFiles) fails(operation string) error {
	if f.done = append(f.done, operation); len(f.done) > f.at {
		return errFault
	}
	return nil
}

func (f *faultyFiles) Open(name string) (fs.File, error) {
	if err := f.fails("open"); err != nil {
		return nil, err
	}
	file, err := f.FS.Open(name)
	if err != nil {
		return nil, err
	}
	f.open++
	return faultyFile{file, f}, nil
}

type faultyFile struct {
	fs.File
	disk *faultyFiles
}

func (f faultyFile) Stat() (fs.FileInfo, error) {
	if err := f.disk.fails("stat"); err != nil {
		return nil, err
	}
	return f.File.Stat()
}

func (f faultyFile) Read(p []byte) (int, error) {
	if err := f.disk.fails("read"); err != nil {
		return 0, err
	}
	return f.File.Read(p)
}

func (f faultyFile) ReadDir(n int) ([]fs.DirEntry, error) {
	if err := f.disk.fails("readdir"); err != nil {
		return nil, err
	}
	return f.File.(fs.ReadDirFile).ReadDir(n)
}

func (f faultyFile) Close() error {
	f.disk.open--
	return f.File.Close() // of a file that was read, whose error means nothing
}

// TestOpenFaults: from whichever operation on a folder all fail, the model does not open, and no file stays open.
func TestOpenFaults(t *testing.T) {
	for what, open := range map[string]func(fs.FS) (io.Closer, error){
		"the model":     func(in fs.FS) (io.Closer, error) { return OpenFS("x", in) },
		"the tokenizer": func(in fs.FS) (io.Closer, error) { _, err := tokenizer.LoadFS("x", in); return io.NopCloser(nil), err },
	} {
		for at := 0; ; at++ {
			d := &faultyFiles{FS: tiny.Files, at: at}
			opened, err := open(d)
			if len(d.done) <= at {
				if err != nil || at < 10 {
					t.Errorf("%s: %v after %v", what, err, d.done)
				} else if err := opened.Close(); err != nil {
					t.Error(err)
				}
				if d.open != 0 {
					t.Errorf("%s: %d files are open", what, d.open)
				}
				break
			}
			if d.open != 0 {
				t.Errorf("%s: %d files are open after %v", what, d.open, d.done)
			}
			if !errors.Is(err, errFault) && (err == nil || !strings.Contains(err.Error(), errFault.Error())) {
				t.Errorf("%s: %v, where %s %d failed", what, err, d.done[at], at)
			}
		}
	}
}
