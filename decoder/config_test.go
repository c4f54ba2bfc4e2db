package decoder

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"encoding/json"

	"gorgonia.org/leanattention/rope"
)

// TestRefused: what a config.json says and no family knows is an error that names the field.
func TestRefused(t *testing.T) {
	const llama = `"model_type":"llama","vocab_size":64,"hidden_size":64,"intermediate_size":96,"num_hidden_layers":2,"num_attention_heads":2`
	if _, _, err := readNetwork("config.json", []byte("{"+llama+"}"), 0); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		config string
		kind   error
		text   string
	}{
		{"", ErrFormat, "no JSON object"},
		{"null", ErrFormat, "null"},
		{"[]", ErrFormat, "no JSON object"},
		{"{}", ErrMissing, "model_type"},
		{`{"model_type":"mamba"}`, ErrUnsupported, `model_type is "mamba", none of ["deepseek_v2" "deepseek_v3" "gemma" "gemma2"`},
		{`{"model_type":"llama"}`, ErrMissing, "vocab_size"},
		{"{" + llama + `,"head_dim":0}`, ErrFormat, "head_dim is 0"},
		{"{" + llama + `,"vocab_size":-1}`, ErrFormat, "vocab_size is -1"},
		{"{" + llama + `,"vocab_size":1e3}`, ErrFormat, "vocab_size"},
		{"{" + llama + `,"vocab_size":99999999999999999999}`, ErrFormat, "vocab_size"},
		{"{" + llama + `,"num_hidden_layers":5000}`, ErrFormat, "num_hidden_layers is 5000, more than 4096"},
		{"{" + llama + `,"num_key_value_heads":3}`, ErrFormat, "no multiple of num_key_value_heads, 3"},
		{"{" + llama + `,"hidden_size":63}`, ErrFormat, "hidden_size is 63, no multiple"},
		{"{" + llama + `,"hidden_act":"quick_gelu"}`, ErrUnsupported, `hidden_act is "quick_gelu"`},
		{"{" + llama + `,"rms_norm_eps":0}`, ErrFormat, "rms_norm_eps is 0"},
		{"{" + llama + `,"experts":8}`, ErrUnsupported, `"experts" is "8", which is not known`},
		{"{" + llama + `,"quantization_config":{"bits":4}}`, ErrMissing, "quantization_config.quant_method"},
		{"{" + llama + `,"architectures":["LlamaForSequenceClassification"]}`, ErrUnsupported, "LlamaForSequenceClassification"},
		{"{" + llama + `,"is_encoder_decoder":true}`, ErrUnsupported, "is_encoder_decoder"},
		{"{" + llama + `,"pruned_heads":{"0":[1]}}`, ErrUnsupported, "pruned_heads"},
		{"{" + llama + `,"rope_scaling":{"rope_type":"ntk","factor":2}}`, ErrUnsupported, `rope_scaling.rope_type is "ntk"`},
		{"{" + llama + `,"rope_scaling":{"rope_type":"linear","factor":2,"extra":1}}`, ErrUnsupported, `rope_scaling."extra"`},
		{"{" + llama + `,"rope_scaling":{"rope_type":"linear"}}`, ErrMissing, "rope_scaling.factor"},
		{"{" + llama + `,"partial_rotary_factor":0.1}`, ErrFormat, "partial_rotary_factor is 0.1"},
		{strings.Replace("{"+llama+`,"layer_types":["full_attention"]}`, "llama", "qwen2", 1), ErrFormat, "layer_types has 1 of 2 layers"},
		{strings.Replace("{"+llama+`,"layer_types":["full_attention","linear_attention"]}`, "llama", "qwen2", 1), ErrUnsupported, `layer_types[1] is "linear_attention"`},
		{strings.Replace("{"+llama+`,"use_bidirectional_attention":true}`, "llama", "gemma", 1), ErrUnsupported, "use_bidirectional_attention"},
	} {
		_, _, err := readNetwork("config.json", []byte(c.config), 0)
		if !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.text) || !strings.Contains(err.Error(), "config.json") {
			t.Errorf("%s: %v, want %v with %q", c.config, err, c.kind, c.text)
		}
	}
}

// TestWeightNames: no network has a name twice, and every weight that a graph asks for is listed. TestGolden builds the graphs.
func TestWeightNames(t *testing.T) {
	for _, m := range readGolden(t) {
		seen := map[string]bool{}
		for w := range m.network(t).Weights() {
			if seen[w.Name] || slices.Min(w.Shape) < 1 {
				t.Errorf("%s: %v", m.Name, w)
			}
			seen[w.Name] = true
		}
		for range m.network(t).Weights() { // may end early
			break
		}
	}
}

// TestGoldenFrequencies: rotary embeddings have transformers' frequencies, which are of float32.
func TestGoldenFrequencies(t *testing.T) {
	data, err := testdata.ReadFile("testdata/golden.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden struct {
		Frequencies []struct {
			Dim          int
			Context, Max int
			Rope         json.RawMessage
			W            []float64
			M            float64
		}
	}
	if err := json.Unmarshal(data, &golden); err != nil || len(golden.Frequencies) < 13 {
		t.Fatal(len(golden.Frequencies), err)
	}
	for _, c := range golden.Frequencies {
		config := rope.Config{HeadDim: c.Dim}
		f := parseConfig("config.json", "", []byte(fmt.Sprintf(`{"max_position_embeddings":%d,"rope_parameters":%s}`, max(c.Max, 1), c.Rope)))
		f.context = c.Context
		if config = f.rotary(c.Dim); f.err != nil {
			t.Fatal(f.err)
		}
		w, m, err := config.Frequencies()
		if err != nil || len(w) != len(c.W) || m-c.M > 1e-7 || c.M-m > 1e-7 {
			t.Fatalf("%s: %d frequencies, m %v, want %d and %v: %v", c.Rope, len(w), m, len(c.W), c.M, err)
		}
		for i := range w {
			if d := w[i] - c.W[i]; d > 1e-6*c.W[i] || -d > 1e-6*c.W[i] {
				t.Errorf("%s: pair %d has %v, want %v", c.Rope, i, w[i], c.W[i])
			}
		}
	}
}

// FuzzConfig: no config.json makes the reader panic, or accept sizes that are not allowed.
func FuzzConfig(f *testing.F) {
	for _, m := range readGolden(f) {
		f.Add([]byte(m.Config))
	}
	names := slices.Sorted(maps.Keys(registry.families))
	f.Fuzz(func(t *testing.T, data []byte) {
		n, _, err := readNetwork("config.json", data, 0)
		if err != nil {
			return
		}
		s := n.Sizes()
		if err := s.check(); err != nil {
			t.Fatalf("%v, of the families %q", err, names)
		}
		weights := 0
		for w := range n.Weights() {
			if slices.Min(w.Shape) < 1 {
				t.Fatalf("%v", w)
			}
			if weights++; weights > 1000 {
				break
			}
		}
	})
}
