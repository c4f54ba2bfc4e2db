package hf

import (
	"errors"
	"io/fs"
	"os"
	"slices"
	"testing"
	"testing/fstest"
)

// TestOpenFS checks that a file system and a folder with the same files have the same weights.
func TestOpenFS(t *testing.T) {
	config, weights, values := tiny(t)
	shards := map[string][]byte{"config.json": config}
	for _, name := range []string{"pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"} {
		shards[name] = readTestdata(t, name)
	}
	for form, files := range map[string]map[string][]byte{
		"f32":    {"config.json": config, "model.safetensors": tinySafetensors(t, f32, "model.", 1)},
		"f16":    {"config.json": config, "model.safetensors": tinySafetensors(t, f16, "", 0)},
		"shards": shards,
	} {
		memory := fstest.MapFS{}
		for name, data := range files {
			memory[name] = &fstest.MapFile{Data: slices.Clone(data)}
		}
		for kind, fsys := range map[string]fs.FS{"memory": memory, "folder": os.DirFS(folder(t, files))} {
			f, err := openModelFS("embedded", fsys)
			if err != nil {
				t.Errorf("%s, %s: %v", form, kind, err)
				continue
			}
			for _, w := range weights {
				got, err := f.Float32(w.Name, w.Shape...)
				if err != nil || !slices.Equal(got.Float32s(), values[w.Name]) {
					t.Errorf("%s, %s: weight %s differs (error %v)", form, kind, w.Name, err)
				}
			}
			if err := f.Close(); err != nil {
				t.Error(err)
			}
			if _, err := f.Float32(weights[0].Name, weights[0].Shape...); !errors.Is(err, ErrClosed) {
				t.Errorf("%s, %s: after Close: %v", form, kind, err)
			}
		}
	}
}

func TestOpenFSRefuses(t *testing.T) {
	config, _, _ := tiny(t)
	file := func(data []byte) *fstest.MapFile { return &fstest.MapFile{Data: data} }
	for _, c := range []struct {
		what  string
		files fstest.MapFS
		kind  error
		word  string
	}{
		{"no weights", fstest.MapFS{"config.json": file(config)}, ErrMissing, "embedded"},
		{"half a file", fstest.MapFS{"config.json": file(config), "model.safetensors": file(tinySafetensors(t, f32, "", 0)[:99])}, ErrFormat, "embedded/model.safetensors"},
		{"a folder of weights", fstest.MapFS{"config.json": file(config), "model.safetensors/x": file(nil)}, ErrFormat, "embedded/model.safetensors"},
		{"a long config", fstest.MapFS{"config.json": file(make([]byte, maxConfig+1))}, ErrFormat, "embedded/config.json"},
		{"no shard", fstest.MapFS{"config.json": file(config), "model.safetensors.index.json": file([]byte(`{"weight_map": {"a": "b.safetensors"}}`))}, ErrMissing, "embedded/b.safetensors"},
	} {
		_, err := openModelFS("embedded", c.files)
		refused(t, c.what, err, c.kind, c.word)
	}
}
