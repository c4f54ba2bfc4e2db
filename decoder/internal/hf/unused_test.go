package hf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestLeftOut checks that a tensor that is not a weight of the model is an error that names the tensor, in each form
// that a folder can have. Known buffers and copies of weights are allowed.
func TestLeftOut(t *testing.T) {
	config, weights, values := tiny(t)
	const fc1 = "decoder.layers.0.fc1.weight"
	values["other head"] = slices.Clone(values[embedding])
	values["other head"][0]++
	for _, c := range []struct {
		extra  string // name of a tensor beside the weights
		values string // weight whose values the tensor has
		kind   error  // nil: no error
		words  []string
	}{
		{"model.decoder.layers.0.self_attn.q_proj.lora_A.weight", fc1, ErrUnsupported, []string{"lora_A", "adapter", "merged"}},
		{"base_model.model.model.decoder.layers.0.fc1.lora_B.default.weight", fc1, ErrUnsupported, []string{"lora_B", "adapter"}},
		{"decoder.layers.1.fc1.weight", fc1, ErrUnsupported, []string{"1 tensor that", "decoder.layers.1.fc1.weight"}}, // config.json has one layer
		{"decoder.layers.0.fc1.scale", fc1, ErrUnsupported, []string{"decoder.layers.0.fc1.scale"}},
		{"decoder.project_in.weight.bias", fc1, ErrUnsupported, []string{"project_in.weight.bias"}},
		{"unrelated", fc1, ErrUnsupported, []string{`"unrelated"`, "left out"}},
		{"decoder.layers.0.self_attn.bias", fc1, ErrUnsupported, []string{"self_attn.bias"}},
		{"decoder.rotary_emb.inv_freq.weight", fc1, ErrUnsupported, []string{"inv_freq.weight"}},
		{"lm_head.bias", fc1, ErrUnsupported, []string{"lm_head.bias"}},
		{"lm_head.weight", "other head", ErrFormat, []string{"lm_head.weight", embedding, "differs", "tie_word_embeddings"}},
		{"lm_head.weight", fc1, ErrFormat, []string{"lm_head.weight", "differs"}},

		{"lm_head.weight", embedding, nil, nil},
		{"decoder.layers.0.self_attn.rotary_emb.inv_freq", fc1, nil, nil},
		{"model.decoder.rotary_emb.inv_freq", fc1, nil, nil},
		{"decoder.layers.0.attn.bias", fc1, nil, nil},
		{"h.0.attn.masked_bias", fc1, nil, nil},
		{"decoder.version", fc1, nil, nil},
	} {
		shape := []int{12, 8}
		if len(values[c.values]) == 44 {
			shape = []int{11, 4}
		}
		values[c.extra] = values[c.values]
		all := append(slices.Clone(weights), Weight{Name: c.extra, Shape: shape})
		for _, suffix := range []string{"safetensors", "bin"} {
			write := func(weights []Weight) []byte {
				if suffix == "bin" {
					return torchFile(t, weights, values)
				}
				var f tensorFile
				for _, w := range weights {
					f.add(w.Name, f32, w.Shape, values[w.Name])
				}
				return f.bytes(0)
			}
			whole := map[string]string{"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}[suffix]
			forms := map[string]map[string][]byte{"one file": {whole: write(all)}}
			for form, listed := range map[string][]Weight{"shards": all, "shards, the tensor not in the index": weights} {
				const most = 7
				index, files := `{"weight_map": {"`, map[string][]byte{}
				for i, w := range listed {
					index += fmt.Sprintf(`%s": "%d.%s", "`, w.Name, i/most, suffix)
				}
				files[whole+".index.json"] = []byte(strings.TrimSuffix(index, `, "`) + "}}")
				for i := 0; i < len(weights); i += most {
					end := i + most
					if end > len(weights) {
						end = len(all) // the last file also has the extra tensor
					}
					files[fmt.Sprintf("%d.%s", i/most, suffix)] = write(all[i:end])
				}
				forms[form] = files
			}
			for form, files := range forms {
				what := c.extra + " in " + form + " of " + suffix
				files["config.json"] = config
				f, err := openModel(folder(t, files))
				switch {
				case c.kind != nil:
					refused(t, what, err, c.kind, c.words...)
				case err != nil:
					t.Errorf("%s: %v", what, err)
				default:
					if !f.tied {
						t.Errorf("%s: the head is not tied", what)
					}
					if err := f.Close(); err != nil {
						t.Error(err)
					}
				}
			}
		}
	}
}

// TestCopies checks that a copy of a weight, in a shard other than the index says, must equal the weight.
func TestCopies(t *testing.T) {
	config, weights, values := tiny(t)
	for _, same := range []bool{true, false} {
		var a, b tensorFile
		index := `{"weight_map": {"`
		for _, w := range weights {
			a.add(w.Name, f32, w.Shape, values[w.Name])
			index += w.Name + `": "a.safetensors", "`
		}
		other := slices.Clone(values[embedding])
		if !same {
			other[43]++
		}
		b.add("1.attn.bias", f32, []int{1}, []float32{1})
		b.add(embedding, f32, []int{11, 4}, other)
		f, err := openModel(folder(t, map[string][]byte{"config.json": config, "a.safetensors": a.bytes(0), "b.safetensors": b.bytes(0),
			"model.safetensors.index.json": []byte(index + `1.attn.bias": "b.safetensors"}}`)}))
		if !same {
			refused(t, "another copy", err, ErrUnsupported, embedding, "b.safetensors")
		} else if err != nil || f.Close() != nil {
			t.Errorf("the same copy: %v", err)
		}
	}
}

// TestSame checks that tensors with equal elements are the same for any strides.
func TestSame(t *testing.T) {
	entries, err := parseTorch("x", readTestdata(t, "views.bin"))
	if err != nil {
		t.Fatal(err)
	}
	same := func(a, b *entry) bool {
		t.Helper()
		same, err := a.same(b)
		if err != nil {
			t.Error(err)
		}
		return same
	}
	for _, e := range entries {
		packed := entry{dtype: f32, shape: e.shape}
		if e.dtype == f32 {
			for _, v := range e.float32s() {
				packed.data = binary.LittleEndian.AppendUint32(packed.data, math.Float32bits(v))
			}
			if !same(&e, &packed) || !same(&packed, &e) {
				t.Errorf("%s differs from its own copy", e.name)
			}
		}
		for _, o := range entries {
			if got, want := same(&e, &o), e.name == o.name; got != want && (e.dtype.widens() || !want) {
				t.Errorf("%s is the same as %s: %v", e.name, o.name, got)
			}
		}
	}
}

// TestUnusedList checks that the list names the first eight tensors, and counts the others.
func TestUnusedList(t *testing.T) {
	for n, want := range map[int]string{1: `1 tensors that the model of config.json does not use: "0"`, 8: `"6", "7"`, 9: `"7" and 1 more`, 30: `"9"`} {
		f := Folder{dir: "x", weights: map[string]entry{}}
		for i := range n {
			f.weights[fmt.Sprint(i)] = entry{name: fmt.Sprint(i), file: "y"}
		}
		list, where, err := f.unused(nil)
		if err != nil || n < 30 && !strings.HasSuffix(list, want) || n == 30 && !strings.HasSuffix(list, " and 22 more") || where != "y" {
			t.Errorf("%d: %s in %s, want %s", n, list, where, want)
		}
	}
	data := []byte{0, 1, 2, 3}
	a, b := entry{dtype: f16, shape: []int{2}, data: data}, entry{dtype: bf16, shape: []int{2}, data: data}
	if same, err := a.same(&b); same || err != nil {
		t.Errorf("tensors of two types are the same: %v, %v", same, err)
	}
	if same, err := a.same(&a); !same || err != nil {
		t.Errorf("a tensor differs from itself: %v, %v", same, err)
	}
}

// TestFilesBeside checks that a file that would change the model is an error that names the file. Other files are
// ignored.
func TestFilesBeside(t *testing.T) {
	config, weights, _ := tiny(t)
	index := `{"weight_map": {"`
	for _, w := range weights {
		index += w.Name + `": "model-00001-of-00001.safetensors", "`
	}
	model := tinySafetensors(t, f32, "", 0)
	one := map[string][]byte{"model.safetensors": model}
	sharded := map[string][]byte{"model.safetensors.index.json": []byte(strings.TrimSuffix(index, `, "`) + "}}"), "model-00001-of-00001.safetensors": model}
	torch2 := map[string][]byte{}
	for _, name := range []string{"pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"} {
		torch2[name] = readTestdata(t, name)
	}
	for _, c := range []struct {
		form    string
		files   map[string][]byte
		beside  string
		refused bool
	}{
		{"shards", sharded, "model-00002-of-00002.safetensors", true},
		{"shards", sharded, "model-00001-of-00002.safetensors", true},
		{"shards of torch", torch2, "pytorch_model-00003-of-00003.bin", true},

		{"one file", one, "README.md", false},
		{"one file", one, "optimizer.pt", false},
		{"one file", one, "tf_model.h5", false},
		{"one file", one, "flax_model.msgpack", false},
		{"one file", one, "model.onnx", false},
		{"one file", one, "pytorch_model.bin", false},
		{"one file", one, "model-00001-of-00002.safetensors", false}, // transformers also prefers model.safetensors
		{"one file", one, "my_adapter_config.json", false},
		{"shards", sharded, "pytorch_model-00001-of-00002.bin", false},
		{"shards", sharded, "model.fp16-00001-of-00002.safetensors", false},
		{"shards", sharded, "consolidated.safetensors", false},
		{"shards", sharded, "model-00002-of-00002.safetensors.md", false},
		{"shards of torch", torch2, "optimizer.bin", false},
		{"shards of torch", torch2, "model-00001-of-00001.gguf", false},
	} {
		files := maps.Clone(c.files)
		files["config.json"], files[c.beside] = config, []byte("not looked at")
		dir := folder(t, files)
		memory, err := openModelFS("embedded", os.DirFS(dir))
		f, err2 := openModel(dir)
		if c.refused {
			refused(t, c.beside+" beside "+c.form, err, ErrUnsupported, "embedded/"+c.beside, "left out")
			refused(t, c.beside+" beside "+c.form, err2, ErrUnsupported, filepath.Join(dir, c.beside), "left out")
			continue
		}
		if err := errors.Join(err, err2); err != nil {
			t.Errorf("%s beside %s: %v", c.beside, c.form, err)
			continue
		}
		if err := errors.Join(f.Close(), memory.Close()); err != nil {
			t.Error(err)
		}
	}
}
