package decoder

import (
	"errors"
	"hash/crc32"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"gorgonia.org/tensor"
)

// TestGGUFFamilies: a GGUF file that llama.cpp's converter made has the network of the model's config.json, and its weights.
func TestGGUFFamilies(t *testing.T) {
	files, err := filepath.Glob("internal/gguf/testdata/families/*.gguf")
	if err != nil || len(files) < 10 {
		t.Fatal(files, err)
	}
	for _, path := range files {
		name := strings.TrimSuffix(filepath.Base(path), ".gguf")
		config, err := os.ReadFile(strings.TrimSuffix(path, "gguf") + "json")
		if err != nil {
			t.Fatal(err)
		}
		want, _, err := readNetwork(name+".json", config, 0)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		f, data, err := openGGUF(path)
		if err != nil {
			t.Fatal(err)
		}
		m := Model{files: f}
		if _, err := m.read(path, data); err != nil {
			t.Errorf("%s: %v", name, err)
		} else if !reflect.DeepEqual(m.network, want) {
			t.Errorf("%s: %+v, want %+v", name, m.network, want)
		}
		prefix := func(name string) string {
			if strings.HasPrefix(name, "lm_head.") {
				return name
			}
			return "model." + name
		}
		for w := range m.network.Weights() {
			got, err := part(f, &w, tensor.Float32, 0, w.Shape[0])
			if err != nil {
				t.Fatal(err)
			}
			from, _ := w.tensor()
			h, columns := crc32.ChecksumIEEE([]byte(prefix(from))), 1
			for _, n := range w.Shape[1:] {
				columns *= n
			}
			for i, x := range got.Data().([]float32) {
				at := i + w.From.Row*columns // in the file's tensor
				if w.up != nil {
					rows, each := w.Shape[0]/w.up.heads, w.From.Rows/w.up.heads
					head, row, column := i/(rows*columns), i/columns%rows, i%columns
					if w.From.Row == 0 { // keys are transposed
						row, column = column, row
					}
					at = (head*each+w.From.Row+row)*w.up.latent + column
				}
				if want := float32((uint64(h)+40503*uint64(at))%2048)/2048 - 0.5; x-want > 1e-6 || want-x > 1e-6 {
					t.Fatalf("%s: weight %s: element %d is %v, want %v", name, w.Name, i, x, want)
				}
			}
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestOpenErrors: a path that is no model is an error that names it.
func TestOpenErrors(t *testing.T) {
	dir := t.TempDir()
	text := filepath.Join(dir, "text")
	if err := os.WriteFile(text, []byte("no model"), 0o666); err != nil {
		t.Fatal(err)
	}
	for path, kind := range map[string]error{filepath.Join(dir, "none"): ErrMissing, dir: ErrMissing, text: ErrFormat} {
		m, err := Open(path)
		if !errors.Is(err, kind) || !strings.Contains(err.Error(), path) || m != nil {
			t.Errorf("%s: %v, want %v", path, err, kind)
		}
	}
}
