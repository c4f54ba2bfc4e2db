package decoder

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"runtime"
	"strings"
	"testing"
	"testing/fstest"

	"gorgonia.org/leanattention/examples/opt/tiny"
)

// shippedFiles returns the files of the shipped model.
func shippedFiles(t testing.TB) fstest.MapFS {
	t.Helper()
	files := fstest.MapFS{}
	if err := fs.WalkDir(tiny.Files, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := fs.ReadFile(tiny.Files, name)
		files[name] = &fstest.MapFile{Data: data}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return files
}

// TestOpenFolder: a folder that is no whole model is an error that names the file. config.json is read before the weights.
func TestOpenFolder(t *testing.T) {
	shipped := shippedFiles(t)
	config := string(shipped["config.json"].Data)
	changed := func(from, to string) string {
		t.Helper()
		if strings.Count(config, from) != 1 {
			t.Fatalf("%q in %s", from, config)
		}
		return strings.Replace(config, from, to, 1)
	}
	layers := `"num_hidden_layers": `
	for _, c := range []struct {
		what   string
		config string // "": no config.json
		beside string // a further file
		kind   error  // nil: the model opens
		words  string
	}{
		{"no configuration", "", "", ErrMissing, "config.json"},
		{"half a configuration", "{", "", ErrFormat, "config.json: no JSON object"},
		{"a long configuration", strings.Repeat(" ", 16<<20+1), "", ErrFormat, "config.json: 16777217 bytes"},
		{"another family", `{"model_type": "bert"}`, "", ErrUnsupported, `model_type is "bert"`},
		{"another width", changed(`"ffn_dim": `, `"ffn_dim": 1`), "", ErrFormat, "fc1"},
		{"more layers", changed(layers, layers+"1"), "", ErrMissing, "decoder.layers."},
		{"adapter_config.json", config, "adapter_config.json", ErrFormat, "adapter_config.json: no JSON object"},
		{"adapter_model.safetensors", config, "adapter_model.safetensors", ErrMissing, "adapter_model.safetensors: the tensors of an adapter without its adapter_config.json"},
		{"adapter_model.bin", config, "adapter_model.bin", ErrMissing, "adapter_model.bin: the tensors of an adapter"},
		{"another file of an adapter", config, "adapter_model.gguf", ErrUnsupported, "adapter_model.gguf: a file of an adapter"},
		{"an adapter alone", "", "adapter_config.json", ErrMissing, "the folder has an adapter alone"},
		{"another name", config, "my_adapter_config.json", nil, ""},
	} {
		files := maps.Clone(shipped)
		delete(files, "config.json")
		if c.config != "" {
			files["config.json"] = &fstest.MapFile{Data: []byte(c.config)}
		}
		if c.beside != "" {
			files[c.beside] = &fstest.MapFile{Data: []byte("not looked at")}
		}
		m, err := OpenFS("embedded", files)
		switch {
		case c.kind == nil && err == nil:
			if err := m.Close(); err != nil {
				t.Error(err)
			}
		case !errors.Is(err, c.kind) || m != nil || !strings.Contains(err.Error(), c.words) || !strings.Contains(err.Error(), "embedded"):
			t.Errorf("%s: %v, want %v with %q", c.what, err, c.kind, c.words)
		}
	}
}

// TestOpenBounds: the memory for a hostile config.json or generation_config.json is in proportion to the file.
func TestOpenBounds(t *testing.T) {
	const size = 1 << 19
	shipped := shippedFiles(t)
	config := string(shipped["config.json"].Data)
	repeat := func(item string) string { return strings.TrimSuffix(strings.Repeat(item, size/len(item)), ",") }
	var keys strings.Builder
	for i := 0; keys.Len() < size; i++ {
		fmt.Fprintf(&keys, `"%d":0,`, i)
	}
	object := "{" + strings.TrimSuffix(keys.String(), ",") + "}"
	layers := `"num_hidden_layers": `
	for what, files := range map[string][2]string{
		"many keys":                  {object, ""},
		"a deep value":               {`{"x":` + repeat("["), ""},
		"many ends":                  {`{"model_type":"opt","eos_token_id":[` + repeat("2,") + "]}", ""},
		"many layers":                {strings.Replace(config, layers, layers+"409", 1), ""},
		"many keys of generation":    {config, object},
		"many ends of generation":    {config, `{"eos_token_id":[` + repeat("2,") + "]}"},
		"a deep value in generation": {config, `{"bad_words_ids":` + repeat("[")},
	} {
		all := maps.Clone(shipped)
		all["config.json"] = &fstest.MapFile{Data: []byte(files[0])}
		if files[1] != "" {
			all[generationFile] = &fstest.MapFile{Data: []byte(files[1])}
		}
		total := 0
		for _, f := range all {
			total += len(f.Data)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		m, err := OpenFS("embedded", all)
		runtime.ReadMemStats(&after)
		if n := after.TotalAlloc - before.TotalAlloc; n > uint64(80*total)+64<<20 || err != nil && len(err.Error()) > 3000 {
			t.Errorf("%s: %d KB allocated for %d KB: %.300v", what, n>>10, total>>10, err)
		}
		if m != nil {
			if err := m.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}
