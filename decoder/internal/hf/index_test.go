package hf

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
)

// TestIndex checks the index of a folder with several files of weights. A file is a name in the folder, and no path.
func TestIndex(t *testing.T) {
	got, err := parseIndex("x", []byte(`{"metadata": {"total_size": 3}, "weight_map": {"a": "m-1.bin", "b": "..m", "c": "m-1.bin"}}`))
	if want := map[string]string{"a": "m-1.bin", "b": "..m", "c": "m-1.bin"}; err != nil || !maps.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	for _, shard := range []string{
		"../../x", "..", ".", "", "/etc/passwd", "a/b", "./a", `..\x`, `a\b`, `C:x`, "c:/x", "file:x", "a/..", "/",
	} {
		data, err := json.Marshal(map[string]any{"weight_map": map[string]string{"w": shard}})
		if err != nil {
			t.Fatal(err)
		}
		_, err = parseIndex("dir/x.index.json", data)
		refused(t, fmt.Sprintf("shard %q", shard), err, ErrFormat, `weight "w" lies in `, "not the name of a file", "dir/x.index.json")
	}
	for _, c := range []struct{ json, word string }{
		{``, "JSON"}, {`[]`, "cannot unmarshal"}, {`{}`, "no weight_map"}, {`{"weight_map": {}}`, "no weight_map"}, {`{"weight_map": null}`, "null"}, {`null`, "null"},
		{`{"weight_map": {"a": null}}`, "null"}, {`{"WEIGHT_MAP": {"a": "b"}}`, "no weight_map"}, {`{"weight_map": {"a": {"b": "c"}}}`, "nested"},
		{`{"weight_map": ["a"]}`, "cannot unmarshal"}, {`{"weight_map": {"a": 1}}`, "cannot unmarshal"}, {`{"weight_map": {"a": "b"}`, "JSON"},
	} {
		_, err := parseIndex("dir/x.index.json", []byte(c.json))
		refused(t, c.json, err, ErrFormat, c.word, "dir/x.index.json")
	}
}

// TestCanonical checks that names of weights lose the prefix of transformers' classes, and nothing else. Names of OPT's oldest
// files have neither "model." nor "decoder.": entry finds them.
func TestCanonical(t *testing.T) {
	for name, want := range map[string]string{
		"model.decoder.layers.0.fc1.weight": "decoder.layers.0.fc1.weight", "decoder.layers.0.fc1.weight": "decoder.layers.0.fc1.weight",
		"layers.0.fc1.weight": "layers.0.fc1.weight", "lm_head.weight": "lm_head.weight", "model.lm_head.weight": "lm_head.weight", "": "",
	} {
		if got := canonical(name); got != want {
			t.Errorf("%q: %q, want %q", name, got, want)
		}
	}
	f := &Folder{weights: map[string]entry{"layers.0.fc1.weight": {name: "layers.0.fc1.weight"}}}
	for name, want := range map[string]bool{"decoder.layers.0.fc1.weight": true, "layers.0.fc1.weight": true, "decoder.layers.1.fc1.weight": false} {
		if _, ok := f.entry(name); ok != want {
			t.Errorf("%s: found %v", name, ok)
		}
	}
}

// TestPointer checks that the error of a Git LFS pointer says so, for each file of a folder.
func TestPointer(t *testing.T) {
	pointer := []byte("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 250540281\n")
	config, _, _ := tiny(t)
	for _, name := range []string{"model.safetensors", "pytorch_model.bin", "config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json"} {
		files := map[string][]byte{"config.json": config}
		files[name] = pointer
		dir := folder(t, files)
		for _, open := range []func() (*model, error){
			func() (*model, error) { return openModel(dir) },
			func() (*model, error) { return openModelFS("here", os.DirFS(dir)) },
		} {
			_, err := open()
			refused(t, name, err, ErrMissing, "Git LFS pointer", "git lfs pull", name)
		}
	}
}

// TestSharedViews checks that many weights that are transposed views of one storage take no memory before the limit of their total
// size is found to be exceeded.
func TestSharedViews(t *testing.T) {
	const width = 64
	for _, c := range []struct {
		weights int
		stride  string
	}{{5, tupleOf(1, width)}, {600, tupleOf(1, width)}, {600, tupleOf(width, 1)}} { // the last ones are in place, but would be copied in another type
		pickle := "\x80\x02}"
		var weights []Weight
		for i := range c.weights {
			w := Weight{Name: fmt.Sprintf("layers.%d.weight", i), Shape: []int{width, width}}
			weights = append(weights, w)
			pickle += op(text(w.Name), tensorOf(storageID("FloatStorage", "0", width*width), 0, tupleOf(width, width), c.stride), "s")
		}
		dir := folder(t, map[string][]byte{"pytorch_model.bin": archive(t, record{"a/data.pkl", pickle + "."}, record{"a/data/0", strings.Repeat("\x00\x00\x80\x3f", width*width)})})
		f, err := Open(dir)
		if err == nil {
			err = f.OpenWeights()
		}
		if err != nil {
			t.Fatal(err)
		}
		bytes := allocated(func() { err = f.Check(slices.Values(weights)) })
		switch {
		case c.weights < maxViews:
			if err != nil {
				t.Error(err)
			}
		case bytes > 1<<20:
			t.Errorf("%d bytes allocated", bytes)
		default:
			refused(t, fmt.Sprint(c.weights, " weights"), err, ErrUnsupported, "views of one another", "pytorch_model.bin")
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
}
