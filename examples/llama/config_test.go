package llama

import (
	"encoding/json"
	"errors"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"

	"gorgonia.org/leanattention/rope"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/nn"
)

// Files as they were published, those of before rope_parameters and layer_types among them.
func TestReadConfig(t *testing.T) {
	for _, c := range []struct {
		file string
		want Config
	}{
		{`{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
			"eos_token_id": [128001, 128008], "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02,
			"intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
			"num_attention_heads": 24, "num_hidden_layers": 28, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
			"rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
				"original_max_position_embeddings": 8192, "rope_type": "llama3"},
			"rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 128256}`,
			Config{Vocab: 128256, Hidden: 3072, Inner: 8192, Layers: 28, Heads: 24, KVHeads: 8, Eps: 1e-5, Tied: true, Gate: nn.SiLU,
				Rotary: rope.Config{HeadDim: 128, Base: 500000, Scaling: rope.Llama3{Factor: 32, LowFrequency: 1, HighFrequency: 4, Context: 8192}}}},
		{`{"architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 256, "intermediate_size": 512,
			"max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
			"rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 32000}`,
			Config{Vocab: 32000, Hidden: 256, Inner: 512, Layers: 2, Heads: 4, KVHeads: 2, Eps: 1e-5, Gate: nn.SiLU,
				Rotary: rope.Config{HeadDim: 64, Base: 10000}, Windows: []int{4096, 4096}}},
		{`{"architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 256, "intermediate_size": 512,
			"num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": null,
			"rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": null, "vocab_size": 32000}`,
			Config{Vocab: 32000, Hidden: 256, Inner: 512, Layers: 2, Heads: 4, KVHeads: 2, Eps: 1e-5, Gate: nn.SiLU,
				Rotary: rope.Config{HeadDim: 64, Base: 1000000}}},
		{`{"architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 256, "intermediate_size": 512,
			"max_position_embeddings": 32768, "max_window_layers": 21, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
			"rms_norm_eps": 1e-06, "rope_scaling": {"factor": 4.0, "type": "yarn"}, "rope_theta": 1000000.0, "sliding_window": 32768,
			"tie_word_embeddings": true, "use_sliding_window": false, "vocab_size": 151936}`,
			Config{Vocab: 151936, Hidden: 256, Inner: 512, Layers: 2, Heads: 4, KVHeads: 2, Eps: 1e-6, Tied: true, Gate: nn.SiLU, Bias: true, Windows: []int{0, 0},
				Rotary: rope.Config{HeadDim: 64, Base: 1000000, Scaling: rope.YaRN{Factor: 4, Context: 32768}}}},
		{`{"architectures": ["Gemma2ForCausalLM"], "attention_bias": false, "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid",
			"final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
			"hidden_size": 2304, "intermediate_size": 9216, "max_position_embeddings": 8192, "num_attention_heads": 8,
			"num_hidden_layers": 3, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
			"rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096, "vocab_size": 256000}`,
			Config{Vocab: 256000, Hidden: 2304, Inner: 9216, Layers: 3, Heads: 8, KVHeads: 4, Eps: 1e-6, Tied: true, Gate: nn.GELUTanh,
				Rotary: rope.Config{HeadDim: 256, Base: 10000}, Windows: []int{4096, 0, 4096}, QueryScalar: 256, ScoreCap: 50, LogitCap: 30,
				UnitOffset: true, ScaleEmbedding: true, PostNorms: true}},
	} {
		got, err := ReadConfig([]byte(c.file))
		if err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s:\n%+v, want\n%+v: %v", c.file, got, c.want, err)
		}
	}
}

// What is not known is refused by field and value, in files of every architecture.
func TestReadConfigRefuses(t *testing.T) {
	type change struct {
		field, value string // "": the field is left out
		kind         error
		words        []string
	}
	everywhere := []change{
		{"architectures", `["GptOssForCausalLM"]`, la.ErrUnsupported, []string{"GptOssForCausalLM", "Gemma2ForCausalLM"}},
		{"architectures", `[]`, la.ErrUnsupported, nil},
		{"architectures", `[null]`, la.ErrUnsupported, nil},
		{"vocab_size", `null`, la.ErrOption, []string{"missing"}},
		{"rms_norm_eps", `[null]`, la.ErrOption, []string{"null"}},
		{"architectures", ``, la.ErrOption, []string{"missing"}},
		{"vocab_size", ``, la.ErrOption, []string{"missing"}},
		{"hidden_size", `-64`, la.ErrOption, []string{"-64"}},
		{"num_hidden_layers", `2.5`, la.ErrOption, []string{"2.5"}},
		{"num_attention_heads", `1099511627776`, la.ErrOption, []string{"1099511627776"}},
		{"num_key_value_heads", `5`, la.ErrOption, []string{"multiple", "num_attention_heads"}},
		{"num_hidden_layers", `2147483647`, la.ErrOption, []string{"2147483647"}},
		{"num_key_value_heads", `0`, la.ErrOption, []string{"is 0"}},
		{"rms_norm_eps", `"small"`, la.ErrOption, []string{"small"}},
		{"tie_word_embeddings", `1`, la.ErrOption, []string{"1"}},
		{"rope_parameters", `{"rope_type": "longrope", "rope_theta": 10000.0}`, la.ErrUnsupported, []string{"rope_type", "longrope", "llama3"}},
		{"rope_parameters", `{"rope_type": "default", "partial_rotary_factor": 0.5}`, la.ErrUnsupported, []string{"partial_rotary_factor", "0.5"}},
		{"rope_parameters", `{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}`, la.ErrOption, []string{"high_freq_factor", "missing"}},
		{"rope_parameters", `{"rope_type": "linear", "factor": 0}`, la.ErrOption, []string{"factor is 0"}},
		{"rope_parameters", `5`, la.ErrOption, nil},
		{"rope_scaling", `{"type": "linear", "factor": 2.0}`, la.ErrUnsupported, []string{"linear"}}, // beside rope_parameters
		{"head_dim", `0`, la.ErrOption, []string{"is 0"}},
		{"quantization_config", `{"quant_method": "fp8"}`, la.ErrUnsupported, []string{"fp8"}},
		{"attention_bias", `true`, la.ErrUnsupported, []string{"true"}},
		{"num_local_experts", `8`, la.ErrUnsupported, []string{"8"}},
	}
	gated := change{"hidden_act", `"gelu_fast"`, la.ErrUnsupported, []string{"gelu_fast", "silu"}}
	own := map[string][]change{
		"llama3":  {gated, {"sliding_window", `4096`, la.ErrUnsupported, []string{"4096"}}, {"mlp_bias", `true`, la.ErrUnsupported, []string{"true"}}},
		"yarn":    {gated},
		"mistral": {gated, {"sliding_window", ``, la.ErrOption, []string{"missing"}}, {"sliding_window", `0`, la.ErrOption, []string{"is 0"}}, {"layer_types", `["full_attention"]`, la.ErrUnsupported, []string{"full_attention"}}},
		"qwen2":   {gated, {"use_sliding_window", `true`, la.ErrUnsupported, []string{"true"}}, {"layer_types", `["sliding_attention", "full_attention"]`, la.ErrUnsupported, []string{"sliding_attention"}}},
		"qwen3":   {gated, {"head_dim", ``, la.ErrOption, []string{"missing"}}, {"layer_types", `["full_attention"]`, la.ErrOption, []string{"1 of 2"}}},
		"gemma2": {
			{"hidden_activation", `"quick_gelu"`, la.ErrUnsupported, []string{"quick_gelu", "gelu_pytorch_tanh"}},
			{"layer_types", `["full_attention", "chunked_attention", "full_attention"]`, la.ErrUnsupported, []string{"layer_types[1]", "chunked_attention"}},
			{"attn_logit_softcapping", `-50`, la.ErrOption, []string{"-50"}}, {"final_logit_softcapping", ``, la.ErrOption, []string{"missing"}},
			{"query_pre_attn_scalar", `0`, la.ErrOption, []string{"is 0"}}, {"use_bidirectional_attention", `true`, la.ErrUnsupported, []string{"true"}},
			{"layer_types", `["full_attention", null, "full_attention"]`, la.ErrUnsupported, []string{"layer_types[1]"}},
			{"head_dim", `null`, la.ErrOption, []string{"missing"}},
			{"sliding_window_size", `8`, la.ErrOption, []string{"is 8", "7"}}, {"hidden_act", `"silu"`, la.ErrOption, []string{"silu", "GELUTanh"}},
		},
	}
	for _, m := range readGolden(t).Models {
		for _, c := range slices.Concat(everywhere, own[m.Name]) {
			var file map[string]json.RawMessage
			if err := json.Unmarshal(m.Config, &file); err != nil {
				t.Fatal(err)
			}
			if file[c.field] = json.RawMessage(c.value); c.value == "" {
				delete(file, c.field)
			}
			data, err := json.Marshal(file)
			if err != nil {
				t.Fatal(err)
			}
			_, err = ReadConfig(data)
			if !errors.Is(err, c.kind) {
				t.Errorf("%s with %s %s: %v, want %v", m.Name, c.field, c.value, err, c.kind)
				continue
			}
			for _, word := range append(c.words, c.field) {
				if !strings.Contains(err.Error(), word) {
					t.Errorf("%s with %s %s: %q does not say %q", m.Name, c.field, c.value, err, word)
				}
			}
		}
	}
	for _, file := range []string{``, `[]`, `null`, `{`} {
		if _, err := ReadConfig([]byte(file)); !errors.Is(err, la.ErrOption) {
			t.Errorf("%q: %v", file, err)
		}
	}
}

func TestWindowsOfOtherLayers(t *testing.T) {
	if _, err := New(Config{Layers: 2, Windows: []int{4}}, nil, Options{}); !errors.Is(err, la.ErrOption) {
		t.Error(err)
	}
}

// What a file says is quoted and cut in errors, and takes memory and time in proportion
// to it.
func TestReadConfigBounds(t *testing.T) {
	config := string(readGolden(t).Models[0].Config)
	long := strings.Repeat("x", 1<<20)
	for what, file := range map[string]string{
		"a long value":             strings.Replace(config, "{", `{"x": "`+long+`",`, 1),
		"a long key":               strings.Replace(config, "{", `{"`+long+`": 1,`, 1),
		"a value with escapes":     strings.Replace(config, "{", "{\"x\": \"\u009b31m\",", 1),
		"a value of lines":         strings.Replace(config, "{", "{\"x\": [1,\n2],", 1),
		"a key with escapes":       strings.Replace(config, "{", `{"\u001b[31m": 1,`, 1),
		"a long architecture":      `{"architectures": ["` + long + `"]}`,
		"many architectures":       `{"architectures": [` + strings.Repeat(`"x",`, 1<<18) + `"x"]}`,
		"a deep value":             strings.Replace(config, "{", `{"x": `+strings.Repeat("[", 1<<20), 1),
		"many keys":                `{` + strings.Repeat(`"x": 1,`, 1<<17) + `"x": 1}`,
		"a rope of ropes":          strings.Repeat(`{"rope_parameters":`, 1<<16),
		"a long type of a rope":    strings.Replace(config, "{", `{"rope_scaling": {"type": "`+long+`"},`, 1),
		"many types of its layers": strings.Replace(config, "{", `{"layer_types": [`+strings.Repeat(`"x",`, 1<<18)+`"x"],`, 1),
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		began := time.Now()
		_, err := ReadConfig([]byte(file))
		took := time.Since(began)
		runtime.ReadMemStats(&after)
		if err == nil || len(err.Error()) > 1000 || strings.ContainsFunc(err.Error(), unicode.IsControl) {
			t.Errorf("%s: %.1000q", what, err)
		}
		if bytes := after.TotalAlloc - before.TotalAlloc; bytes > uint64(40*len(file))+1<<20 || took > 10*time.Second {
			t.Errorf("%s, of %d bytes, took %d bytes and %v", what, len(file), bytes, took)
		}
	}
}

func FuzzReadConfig(f *testing.F) {
	for _, m := range readGolden(f).Models {
		f.Add([]byte(m.Config))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := ReadConfig(data)
		if err == nil && (c.Layers < 1 || c.Heads%c.KVHeads != 0 || c.Rotary.HeadDim < 1 || c.Windows != nil && len(c.Windows) != c.Layers) {
			t.Errorf("%+v", c)
		}
	})
}
