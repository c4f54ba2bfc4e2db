package decoder

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/tensor"
)

// familyModel opens a model of the GGUF reader's test data.
func familyModel(t testing.TB, name string) *Model {
	t.Helper()
	return withoutTokenizer(t, filepath.Join("internal/gguf/testdata/families", name+".gguf"))
}

// withoutTokenizer opens a GGUF file that may have no vocabulary.
func withoutTokenizer(t testing.TB, path string) *Model {
	t.Helper()
	f, config, err := openGGUF(path)
	if err != nil {
		t.Fatal(err)
	}
	m := &Model{files: f}
	if _, err := m.read(path, config); err != nil {
		t.Fatal(err)
	}
	return m
}

// TestLoRAGGUF: adapters by llama.cpp's converter make the weights that the adapters of peft make: see testdata/lora_gguf.py.
func TestLoRAGGUF(t *testing.T) {
	files, err := filepath.Glob("testdata/lora/*.gguf")
	if err != nil || len(files) < 6 {
		t.Fatal(files, err)
	}
	for _, path := range files {
		name := strings.TrimSuffix(filepath.Base(path), ".gguf")
		m, want, plain := familyModel(t, name), familyModel(t, name), familyModel(t, name)
		if err := m.Adapt(path); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		a := goldenAdapter{Config: []byte(`{"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": "all-linear"}`)}
		for w := range tensors(want.network) {
			module, ok := strings.CutSuffix(w.Name, ".weight")
			if !ok || len(w.Shape) != 2 || !strings.Contains(module, "layers.") {
				continue
			}
			for i, shape := range [][]int{{2, w.Shape[1]}, {w.Shape[0], 2}} {
				x := fileTensor{name: "base_model.model.model." + module + []string{".lora_A.weight", ".lora_B.weight"}[i], shape: shape}
				x.data = goldenValues(x.name, shape[0]*shape[1])
				for j := range x.data {
					x.data[j] /= 4
				}
				a.Tensors = append(a.Tensors, x)
			}
		}
		adaptFS(t, want, a.files())
		changed := 0
		for w := range m.network.Weights() {
			var x [3]*tensor.Dense
			for i, from := range []*Model{m, want, plain} {
				if x[i], err = part(from.weights(), &w, tensor.Float32, 0, w.Shape[0]); err != nil {
					t.Fatal(err)
				}
			}
			if !slices.Equal(x[0].Float32s(), x[1].Float32s()) {
				t.Errorf("%s: weight %s differs from peft's", name, w.Name)
			}
			if !slices.Equal(x[0].Float32s(), x[2].Float32s()) {
				changed++
			}
		}
		if changed != len(a.Tensors)/2 && name != "phi3" || changed == 0 {
			t.Errorf("%s: %d weights changed by %d tensors", name, changed, len(a.Tensors))
		}
		if err := errors.Join(m.Close(), want.Close(), plain.Close()); err != nil {
			t.Error(err)
		}
	}
}

// TestLoRAGGUFRefused: a file that is no adapter of the model is an error that names the file.
func TestLoRAGGUFRefused(t *testing.T) {
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("no adapter"), 0o666); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		model, path string
		kind        error
		word        string
	}{
		{"llama", "internal/gguf/testdata/families/llama.gguf", ErrUnsupported, "general.type"},
		{"llama", text, ErrFormat, "GGUF"},
		{"llama", text + "2", ErrMissing, "text2"},
		{"llama", t.TempDir(), ErrMissing, adapterFile},
		{"llama", "testdata/lora/qwen3.gguf", ErrFormat, `model_type "qwen3"`},
		{"gemma", "testdata/lora/gemma2.gguf", ErrFormat, `model_type "gemma2"`},
		{"mistral", "testdata/lora/llama.gguf", ErrUnsupported, "blk.1."},
	} {
		m := familyModel(t, c.model)
		if err := m.Adapt(c.path); !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.word) || !strings.Contains(err.Error(), c.path) || m.deltas != nil {
			t.Errorf("%s: %v, want %v with %q", c.path, err, c.kind, c.word)
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
	// A GGUF adapter of a folder, and a folder's adapter of a GGUF file.
	m := goldenModelOf(t, "llama3")
	if err := m.Adapt("testdata/lora/mistral.gguf"); !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), "shapes") {
		t.Errorf("another llama's: %v", err)
	}
}
