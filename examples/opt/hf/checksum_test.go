package hf

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

// Checksums tell which weight differs: any element of those that are read wholly, and pages of the others, which are read
// from the file.
func TestChecksums(t *testing.T) {
	const columns = 1 << 14
	config := Config{ModelType: "opt", VocabSize: 40, HiddenSize: 4, WordEmbedProjDim: 4, FFNDim: columns, Layers: 1, Heads: 1, MaxPositions: 3, DoLayerNormBefore: true, TieWordEmbeddings: true}
	text := `{"model_type":"opt","vocab_size":40,"hidden_size":4,"ffn_dim":16384,"num_hidden_layers":1,"num_attention_heads":1,"max_position_embeddings":3,"enable_bias":false,"layer_norm_elementwise_affine":false,"activation_function":"relu"}`
	var f tensorFile
	n := 0
	for w := range config.Weights() {
		values := make([]float32, size(w.Shape))
		for i := range values {
			values[i] = element(n, i)
		}
		n++
		f.add(w.Name, f32, w.Shape, values)
	}
	data := f.bytes(0)
	first := len(data) - len(f.data) // byte of the data
	const large = "decoder.layers.0.fc1.weight"
	offsets := f.header[large].(map[string]any)["data_offsets"].([2]int)
	at, end := first+offsets[0], first+offsets[1]
	whole := func(name string) func(Weight) bool { return func(w Weight) bool { return w.Name == name } }
	sums := func(data []byte, w func(Weight) bool, all int64, embedded bool) []string {
		t.Helper()
		var folder *Folder
		var err error
		if embedded {
			folder, err = OpenFS("embedded", fstest.MapFS{"config.json": {Data: []byte(text)}, "model.safetensors": {Data: data}})
		} else {
			dir := t.TempDir()
			if err := errors.Join(os.WriteFile(filepath.Join(dir, "config.json"), []byte(text), 0o600), os.WriteFile(filepath.Join(dir, "model.safetensors"), data, 0o600)); err != nil {
				t.Fatal(err)
			}
			folder, err = Open(dir)
		}
		if err != nil {
			t.Fatal(err)
		}
		lines, err := folder.checksums(w, all)
		if err != nil {
			t.Fatal(err)
		}
		if err := folder.Close(); err != nil {
			t.Error(err)
		}
		if _, err := folder.Checksums(w); !errors.Is(err, ErrClosed) {
			t.Errorf("behind Close: %v", err)
		}
		return lines
	}
	none := whole("")
	for _, embedded := range []bool{false, true} {
		all, parts := sums(data, none, allOf, embedded), sums(data, none, 0, embedded)
		if len(all) != n || !strings.HasPrefix(all[0], "decoder.embed_tokens.weight [40 4] F32 ") {
			t.Fatalf("%q", all)
		}
		i := slices.IndexFunc(all, func(s string) bool { return strings.HasPrefix(s, large+" ") })
		if sums(data, whole(large), 0, embedded)[i] != all[i] || parts[i] == all[i] {
			t.Errorf("%s: a weight that is wanted wholly has the checksum of a small model's, and of parts %s", all[i], parts[i])
		}
		for i, b := range []int{at, at + 4095, at + 4096, (at + end) / 2, end - 4097, end - 4096, end - 1, first, len(data) - 1} {
			other := slices.Clone(data)
			other[b] ^= 1
			if differ := differing(all, sums(other, none, allOf, embedded)); len(differ) != 1 {
				t.Errorf("byte %d of all: %q differ", b, differ)
			}
			inPages := i != 2 && i != 3 && i != 4
			if differ := differing(parts, sums(other, none, 0, embedded)); (len(differ) == 1) != inPages {
				t.Errorf("byte %d of %d to %d, pages: %q differ", b, at, end, differ)
			}
		}
		// Another training changes nearly all numbers.
		other := slices.Clone(data)
		for i := at; i < end; i += 400 {
			other[i] ^= 1
		}
		if differ := differing(parts, sums(other, none, 0, embedded)); len(differ) != 1 || !strings.HasPrefix(differ[0], large) {
			t.Errorf("%q differ", differ)
		}
	}
}

func differing(a, b []string) (lines []string) {
	for i, line := range a {
		if b[i] != line {
			lines = append(lines, line)
		}
	}
	return lines
}
