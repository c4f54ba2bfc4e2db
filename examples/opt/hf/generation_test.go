package hf

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// withConfig is the decoder of testdata with keys added to its config.json, and a
// generation_config.json unless that is empty.
func withConfig(t *testing.T, keys, generation string) string {
	t.Helper()
	config, _, _ := tiny(t)
	config = append(bytes.TrimRight(config, " \n}"), (keys + "}")...)
	files := map[string][]byte{"config.json": config, "model.safetensors": tinySafetensors(t, f32, "", 0)}
	if generation != "" {
		files["generation_config.json"] = []byte(generation)
	}
	return folder(t, files)
}

// TestEOS: every token that ends a text, from the file that transformers takes it
// from.
func TestEOS(t *testing.T) {
	for _, c := range []struct {
		config, generation string
		want               []int
	}{
		{``, ``, []int{2}},
		{``, `{}`, []int{2}},
		{`, "eos_token_id": 5`, ``, []int{5}},
		{`, "eos_token_id": [5, 3]`, ``, []int{5, 3}},
		{`, "eos_token_id": 5`, `{"eos_token_id": null}`, []int{5}},
		{`, "eos_token_id": 5`, `{"eos_token_id": 7}`, []int{7}},
		{`, "eos_token_id": 5`, `{"eos_token_id": [2, 10]}`, []int{2, 10}},
		{`, "eos_token_id": null`, `{"bos_token_id": 2}`, nil},
		{`, "eos_token_id": null`, `{"eos_token_id": [4]}`, []int{4}},
		{`, "eos_token_id": 5`, `{"eos_token_id": []}`, []int{}},
	} {
		f, err := Open(withConfig(t, c.config, c.generation))
		if err != nil {
			t.Errorf("%s and %s: %v", c.config, c.generation, err)
			continue
		}
		if got := f.EOS(); !slices.Equal(got, c.want) {
			t.Errorf("%s and %s: %v, want %v", c.config, c.generation, got, c.want)
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestSteered: what would make another text is refused by name, and what would not
// is no error.
func TestSteered(t *testing.T) {
	for _, bad := range []string{
		`"repetition_penalty": 1.2`, `"no_repeat_ngram_size": 3`, `"bad_words_ids": [[5]]`, `"suppress_tokens": [5]`, `"forced_eos_token_id": 2`,
		`"num_beams": 4`, `"min_length": 10`, `"begin_suppress_tokens": [1]`, `"sequence_bias": {"1": 2}`, `"guidance_scale": 1.5`, `"forced_bos_token_id": 0`,
	} {
		key := strings.Split(bad, `"`)[1]
		_, err := Open(withConfig(t, "", "{"+bad+"}"))
		refused(t, bad, err, ErrUnsupported, key, "generation_config.json")
		_, err = Open(withConfig(t, ", "+bad, ""))
		refused(t, bad+" in config.json", err, ErrUnsupported, key, "config.json")
	}
	for _, c := range []struct{ config, generation, word string }{
		{`, "quantization_config": {"bits": 4}`, ``, "quantized"},
		{`, "pruned_heads": {"0": [1]}`, ``, "pruned_heads"},
		{`, "is_encoder_decoder": true`, ``, "is_encoder_decoder"},
		{``, `{"wondrous": 1}`, "wondrous"},
	} {
		_, err := Open(withConfig(t, c.config, c.generation))
		refused(t, c.config+c.generation, err, ErrUnsupported, c.word)
	}
	for _, c := range []struct{ generation, word string }{
		{`[]`, "JSON"}, {`null`, "JSON"}, {`{`, "JSON"}, {`{"eos_token_id": 11}`, "eos_token_id is 11"}, {`{"eos_token_id": [2, -1]}`, "eos_token_id is -1"}, {`{"eos_token_id": "x"}`, "eos_token_id"},
		{`{"eos_token_id": [null]}`, "eos_token_id"},
	} {
		_, err := Open(withConfig(t, "", c.generation))
		refused(t, c.generation, err, ErrFormat, c.word, "generation_config.json")
	}
	// All that transformers 4.57 and 5.24 write when nothing is set, and more.
	for _, good := range []string{
		`"repetition_penalty": 1.0`, `"no_repeat_ngram_size": 0`, `"bad_words_ids": null`, `"num_beams": 1`, `"pruned_heads": {}`, `"min_length": 0`,
		`"do_sample": true, "temperature": 0.6, "top_p": 0.9, "top_k": 10, "max_length": 4096`, `"diversity_penalty": 0.0`, `"suppress_tokens": [ ]`,
		`"transformers_version": "5.24.0", "_from_model_config": true, "use_cache": true, "output_scores": false`,
	} {
		f, err := Open(withConfig(t, ", "+good, "{"+strings.Replace(good, `"pruned_heads": {}`, `"top_k": 1`, 1)+"}"))
		if err != nil {
			t.Errorf("%s: %v", good, err)
			continue
		}
		f.Close()
	}
	f, err := Open(withConfig(t, `, "prefix": "</s>", "rope_theta": 10000, "anything": {"else": 1}`, ""))
	if err != nil {
		t.Errorf("keys that OPT does not look at: %v", err)
	} else {
		f.Close()
	}
}

// TestPointer: a Git LFS pointer is called what it is, whatever file it stands for.
func TestPointer(t *testing.T) {
	pointer := []byte("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 250540281\n")
	config, _, _ := tiny(t)
	for _, name := range []string{"model.safetensors", "pytorch_model.bin", "config.json", "generation_config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json"} {
		files := map[string][]byte{"config.json": config}
		if name == "generation_config.json" {
			files["model.safetensors"] = tinySafetensors(t, f32, "", 0)
		}
		files[name] = pointer
		dir := folder(t, files)
		for _, open := range []func() (*Folder, error){
			func() (*Folder, error) { return Open(dir) },
			func() (*Folder, error) { return OpenFS("here", os.DirFS(dir)) },
		} {
			_, err := open()
			refused(t, name, err, ErrMissing, "Git LFS pointer", "git lfs pull", name)
		}
	}
}

// TestSharedViews: many weights that are transposed views of one storage take no
// memory before it is found that they would take too much.
func TestSharedViews(t *testing.T) {
	const width = 64
	config := func(layers int) []byte {
		data, err := json.Marshal(map[string]any{"model_type": "opt", "vocab_size": width, "hidden_size": width, "ffn_dim": width, "num_hidden_layers": layers,
			"num_attention_heads": 1, "max_position_embeddings": width - PositionOffset, "enable_bias": false, "layer_norm_elementwise_affine": false})
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	for i, layers := range []int{1, 100, 100} {
		stride := tupleOf(1, width)
		if i == 2 {
			stride = tupleOf(width, 1) // in place, but other types would be copies
		}
		c, err := parseConfig("x", config(layers))
		if err != nil {
			t.Fatal(err)
		}
		pickle := "\x80\x02}"
		for w := range c.Weights() {
			pickle += op(text(w.Name), tensorOf(storageID("FloatStorage", "0", width*width), 0, tupleOf(width, width), stride), "s")
		}
		dir := folder(t, map[string][]byte{"config.json": config(layers),
			"pytorch_model.bin": archive(t, record{"a/data.pkl", pickle + "."}, record{"a/data/0", strings.Repeat("\x00\x00\x80\x3f", width*width)})})
		f, err := Open(dir)
		if layers == 1 {
			if err != nil {
				t.Fatal(err)
			}
			f.Close()
			continue
		}
		refused(t, fmt.Sprint(layers, " layers"), err, ErrUnsupported, "views of one another", filepath.Base("pytorch_model.bin"))
	}
}
