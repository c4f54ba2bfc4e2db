package decoder

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"

	"gorgonia.org/leanattention/examples/opt/tiny"
)

// TestCut: if another program cuts the files of a model, engines go on, and a new engine is an error. A weight in a mapping would
// end the process here.
func TestCut(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("only Linux cuts a mapped file")
	}
	folder := t.TempDir()
	if err := os.CopyFS(folder, tiny.Files); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile("internal/gguf/testdata/families/llama.gguf")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "llama.gguf")
	if err := os.WriteFile(file, data, 0o666); err != nil {
		t.Fatal(err)
	}
	openFile := func(path string) (*Model, error) {
		f, config, err := openGGUF(path)
		if err != nil {
			return nil, err
		}
		m := &Model{files: f}
		_, err = m.read(path, config)
		return m, err
	}
	for _, c := range []struct {
		path, weights string
		open          func(string) (*Model, error)
	}{
		{folder, filepath.Join(folder, "model.safetensors"), Open},
		{file, file, openFile},
	} {
		m, err := c.open(c.path)
		if err != nil {
			t.Fatal(err)
		}
		o := Options{Context: 40}
		e, err := m.Engine(o)
		if err != nil {
			t.Fatal(err)
		}
		text := func() (ids []int) {
			text, err := e.Start(context.Background(), Request{Prompt: []int{5, 3, 8}, Tokens: 20, Ends: []int{}})
			if err != nil {
				t.Fatal(err)
			}
			for token, err := range text.Tokens() {
				if err != nil {
					t.Fatal(err)
				}
				ids = append(ids, token.ID)
			}
			return ids
		}
		want := text()
		if err := os.Truncate(c.weights, 0); err != nil {
			t.Fatal(err)
		}
		if got := text(); !slices.Equal(got, want) {
			t.Errorf("%s: %v after the cut, %v before", c.path, got, want)
		}
		if _, err := m.Engine(o); !errors.Is(err, ErrMissing) {
			t.Errorf("%s: an engine of a cut file: %v", c.path, err)
		}
		if err := errors.Join(e.Close(), m.Close()); err != nil {
			t.Error(err)
		}
	}
}
