package hf

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"testing"
)

func TestConfigDefaults(t *testing.T) {
	want := Config{
		ModelType: "opt", VocabSize: 50272, HiddenSize: 768, WordEmbedProjDim: 768, FFNDim: 3072, Layers: 12, Heads: 12, MaxPositions: 2048,
		DoLayerNormBefore: true, EnableBias: true, LayerNormElementwiseAffine: true, TieWordEmbeddings: true,
		Activation: "relu", BOS: 2, EOS: 2, Pad: 1,
	}
	got, err := parseConfig("config.json", []byte(`{}`))
	if err != nil || got != want {
		t.Errorf("%+v, %v, want %+v", got, err, want)
	}
	if got.HeadDim() != 64 || got.HasProjections() || !got.HasFinalLayerNorm() {
		t.Errorf("head dim %d, projections %v, final layer norm %v", got.HeadDim(), got.HasProjections(), got.HasFinalLayerNorm())
	}
}

func TestConfig(t *testing.T) {
	// OPT-350m's, as published.
	got, err := parseConfig("config.json", []byte(`{
		"_name_or_path": "opt-350m", "activation_dropout": 0.0, "activation_function": "relu",
		"architectures": ["OPTForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 2,
		"hidden_size": 1024, "do_layer_norm_before": false, "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 4096,
		"init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048, "model_type": "opt",
		"num_attention_heads": 16, "num_hidden_layers": 24, "pad_token_id": 1, "torch_dtype": "float16",
		"transformers_version": "4.20.0.dev0", "use_cache": true, "vocab_size": 50272, "word_embed_proj_dim": 512,
		"prefix": "</s>"}`))
	want := Config{
		ModelType: "opt", VocabSize: 50272, HiddenSize: 1024, WordEmbedProjDim: 512, FFNDim: 4096, Layers: 24, Heads: 16, MaxPositions: 2048,
		EnableBias: true, LayerNormElementwiseAffine: true, TieWordEmbeddings: true, Activation: "relu", BOS: 2, EOS: 2, Pad: 1,
	}
	if err != nil || got != want {
		t.Errorf("%+v, %v, want %+v", got, err, want)
	}
	if !got.HasProjections() || got.HasFinalLayerNorm() {
		t.Errorf("projections %v, final layer norm %v", got.HasProjections(), got.HasFinalLayerNorm())
	}

	// Every other value of every field.
	got, err = parseConfig("config.json", []byte(`{"vocab_size": 7, "hidden_size": 6, "word_embed_proj_dim": null, "ffn_dim": 5,
		"num_hidden_layers": 4, "num_attention_heads": 3, "max_position_embeddings": 9, "_remove_final_layer_norm": true,
		"enable_bias": false, "layer_norm_elementwise_affine": false, "tie_word_embeddings": false, "quantization_config": null,
		"bos_token_id": null, "eos_token_id": [6], "pad_token_id": 0}`))
	want = Config{
		ModelType: "opt", VocabSize: 7, HiddenSize: 6, WordEmbedProjDim: 6, FFNDim: 5, Layers: 4, Heads: 3, MaxPositions: 9,
		DoLayerNormBefore: true, RemoveFinalLayerNorm: true, Activation: "relu", BOS: -1, EOS: 6, Pad: 0,
	}
	if err != nil || got != want {
		t.Errorf("%+v, %v, want %+v", got, err, want)
	}
}

func TestBadConfig(t *testing.T) {
	for _, c := range []struct {
		json  string
		kind  error
		words []string
	}{
		{``, ErrFormat, []string{"not a JSON object"}},
		{`null`, ErrFormat, []string{"not a JSON object"}},
		{`[]`, ErrFormat, []string{"not a JSON object"}},
		{`{"vocab_size": 1`, ErrFormat, []string{"not a JSON object"}},
		{`{"model_type": "gpt2"}`, ErrUnsupported, []string{`model_type "gpt2" is not "opt"`}},
		{`{"model_type": "llama", "vocab_size": "many"}`, ErrUnsupported, []string{`model_type "llama"`}},
		{`{"model_type": 3}`, ErrFormat, []string{"model_type is", "3", "not a string"}},
		{`{"activation_function": "gelu_new"}`, ErrUnsupported, []string{`activation_function "gelu_new" is none of ["relu" "gelu"]`}},
		{`{"activation_function": "gelu_fast"}`, ErrUnsupported, []string{`activation_function "gelu_fast" is`}},
		{`{"activation_function": "silu"}`, ErrUnsupported, []string{`activation_function "silu" is`}},
		{`{"activation_function": "GELU"}`, ErrUnsupported, []string{`activation_function "GELU" is`}},
		{`{"activation_function": ""}`, ErrUnsupported, []string{`activation_function "" is`}},
		{`{"activation_function": null}`, ErrFormat, []string{"activation_function", "null"}},
		{`{"quantization_config": {"bits": 4}}`, ErrUnsupported, []string{"quantized"}},
		{`{"hidden_size": 0}`, ErrFormat, []string{"hidden_size is 0"}},
		{`{"hidden_size": -768}`, ErrFormat, []string{"hidden_size is -768"}},
		{`{"hidden_size": 1152921504606846976}`, ErrFormat, []string{"hidden_size is 1152921504606846976"}},
		{`{"hidden_size": 1e30}`, ErrFormat, []string{"hidden_size", "1e30"}},
		{`{"hidden_size": 768.5}`, ErrFormat, []string{"hidden_size", "768.5"}},
		{`{"hidden_size": "768"}`, ErrFormat, []string{"hidden_size", "not an integer"}},
		{`{"hidden_size": null}`, ErrFormat, []string{"hidden_size", "null"}},
		{`{"hidden_size": 770}`, ErrFormat, []string{"770", "num_attention_heads 12"}},
		{`{"word_embed_proj_dim": 0}`, ErrFormat, []string{"word_embed_proj_dim is 0"}},
		{`{"num_hidden_layers": 0}`, ErrFormat, []string{"num_hidden_layers is 0"}},
		{`{"num_attention_heads": 0}`, ErrFormat, []string{"num_attention_heads is 0"}},
		{`{"max_position_embeddings": 2147483646}`, ErrFormat, []string{"max_position_embeddings is 2147483646"}},
		{`{"do_layer_norm_before": 1}`, ErrFormat, []string{"do_layer_norm_before", "true or false"}},
		{`{"bos_token_id": 50272}`, ErrFormat, []string{"bos_token_id is 50272, not in [0, 50272)"}},
		{`{"eos_token_id": -1}`, ErrFormat, []string{"eos_token_id is -1"}},
		{`{"eos_token_id": [2, 50272]}`, ErrFormat, []string{"eos_token_id is 50272"}},
		{`{"eos_token_id": [null]}`, ErrFormat, []string{"eos_token_id", "null", "not a token id"}},
		{`{"eos_token_id": [2, null]}`, ErrFormat, []string{"eos_token_id", "null", "not a token id"}},
		{`{"model_type": null}`, ErrFormat, []string{"model_type", "null"}},
		{`{"enable_bias": null}`, ErrFormat, []string{"enable_bias", "null"}},
		{`{"eos_token_id": [[2]]}`, ErrFormat, []string{"eos_token_id", "not a token id"}},
		{`{"pad_token_id": "<pad>"}`, ErrFormat, []string{"pad_token_id", "not a token id"}},
		{`{"vocab_size": 2}`, ErrFormat, []string{"bos_token_id is 2, not in [0, 2)"}},
	} {
		got, err := parseConfig("dir/config.json", []byte(c.json))
		refused(t, c.json, err, c.kind, append(c.words, "dir/config.json")...)
		if got != (Config{}) {
			t.Errorf("%s: a configuration and an error", c.json)
		}
	}
}

// TestWeights compares with the parameters of transformers' decoders.
func TestWeights(t *testing.T) {
	var golden []struct {
		Config  json.RawMessage
		Weights map[string][]int
	}
	if err := json.Unmarshal(readTestdata(t, "weights.json"), &golden); err != nil {
		t.Fatal(err)
	}
	if len(golden) < 7 {
		t.Fatalf("%d configurations", len(golden))
	}
	for _, g := range golden {
		c, err := parseConfig("config.json", g.Config)
		if err != nil {
			t.Fatal(err)
		}
		got, want := map[string][]int{}, map[string][]int{}
		for w := range c.Weights() {
			got[w.Name] = w.Shape
		}
		for name, shape := range g.Weights {
			want[canonical(name)] = shape
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: weights %v, want %v", g.Config, got, want)
		}
	}
}

func TestWeightsStops(t *testing.T) {
	c, err := parseConfig("config.json", []byte(`{"num_hidden_layers": 2147483645}`))
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for range c.Weights() {
		if n++; n == 100 {
			break
		}
	}
	if n != 100 {
		t.Errorf("%d weights", n)
	}
}

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

func TestCanonical(t *testing.T) {
	for name, want := range map[string]string{
		"model.decoder.layers.0.fc1.weight": "decoder.layers.0.fc1.weight", "decoder.layers.0.fc1.weight": "decoder.layers.0.fc1.weight",
		"layers.0.fc1.weight": "decoder.layers.0.fc1.weight", "embed_tokens.weight": "decoder.embed_tokens.weight",
		"lm_head.weight": "lm_head.weight", "model.lm_head.weight": "lm_head.weight", "": "decoder.",
	} {
		if got := canonical(name); got != want {
			t.Errorf("%q: %q, want %q", name, got, want)
		}
	}
}
