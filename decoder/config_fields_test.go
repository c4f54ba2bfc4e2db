package decoder

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"

	"gorgonia.org/leanattention/rope"
)

// TestPublishedConfigs: config.json as models were published with it, also of the time before rope_parameters and layer_types,
// gives the sizes, windows and rotary embeddings that it says.
func TestPublishedConfigs(t *testing.T) {
	for _, c := range []struct {
		file    string
		sizes   Sizes
		rotary  rope.Config
		tied    bool
		qkvBias bool
		scale   float64
		cap     float64
	}{
		{file: `{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
			"eos_token_id": [128001, 128008], "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02,
			"intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false,
			"num_attention_heads": 24, "num_hidden_layers": 28, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
			"rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
				"original_max_position_embeddings": 8192, "rope_type": "llama3"},
			"rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 128256}`,
			sizes:  Sizes{Vocab: 128256, Context: 131072, Layers: 28, KVHeads: 8, HeadDim: 128},
			rotary: rope.Config{HeadDim: 128, Base: 500000, Scaling: rope.Llama3{Factor: 32, LowFrequency: 1, HighFrequency: 4, Context: 8192}}, tied: true},
		{file: `{"model_type": "opt"}`, sizes: Sizes{Vocab: 50272, Context: 2048, Layers: 12, KVHeads: 12, HeadDim: 64}, tied: true, qkvBias: true}, // OPT-125m
		{file: `{"architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu", "hidden_size": 256, "intermediate_size": 512,
			"max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
			"rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 32000}`,
			sizes:  Sizes{Vocab: 32000, Context: 32768, Layers: 2, KVHeads: 2, HeadDim: 64, Windows: []int{4096, 4096}},
			rotary: rope.Config{HeadDim: 64, Base: 10000}},
		{file: `{"architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu", "hidden_size": 256, "intermediate_size": 512,
			"max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": null,
			"rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": null, "vocab_size": 32000}`,
			sizes:  Sizes{Vocab: 32000, Context: 32768, Layers: 2, KVHeads: 2, HeadDim: 64},
			rotary: rope.Config{HeadDim: 64, Base: 1000000}},
		{file: `{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 256, "intermediate_size": 512,
			"max_position_embeddings": 32768, "max_window_layers": 21, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
			"rms_norm_eps": 1e-06, "rope_scaling": {"factor": 4.0, "type": "yarn"}, "rope_theta": 1000000.0, "sliding_window": 32768,
			"tie_word_embeddings": true, "use_sliding_window": false, "vocab_size": 151936}`,
			sizes:  Sizes{Vocab: 151936, Context: 32768, Layers: 2, KVHeads: 2, HeadDim: 64},
			rotary: rope.Config{HeadDim: 64, Base: 1000000, Scaling: rope.YaRN{Factor: 4, Context: 32768}}, tied: true, qkvBias: true},
		{file: `{"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": false, "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid",
			"final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
			"hidden_size": 2304, "intermediate_size": 9216, "max_position_embeddings": 8192, "num_attention_heads": 8,
			"num_hidden_layers": 3, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
			"rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096, "vocab_size": 256000}`,
			sizes:  Sizes{Vocab: 256000, Context: 8192, Layers: 3, KVHeads: 4, HeadDim: 256, Windows: []int{4096, 0, 4096}, LogitCap: 30},
			rotary: rope.Config{HeadDim: 256, Base: 10000}, tied: true, scale: 1. / 16, cap: 50},
	} {
		n, _, err := readNetwork("config.json", []byte(c.file), 0)
		if err != nil {
			t.Errorf("%s: %v", c.file, err)
			continue
		}
		x := n.(*transformer)
		got := x.sizes
		if slices.Max(append([]int{0}, got.Windows...)) == 0 {
			got.Windows = nil // of no layer
		}
		if !reflect.DeepEqual(got, c.sizes) || x.tied != c.tied || x.qkvBias != c.qkvBias || x.scale != c.scale || x.scoreCap != c.cap {
			t.Errorf("%s:\n%+v, want\n%+v; %+v", c.file, got, c.sizes, x)
		}
		for _, r := range x.rotary {
			w, m, err := r.Frequencies()
			want, wantM, e := c.rotary.Frequencies()
			if err != nil || e != nil || !slices.Equal(w, want) || m != wantM {
				t.Errorf("%s: rotary %+v, want %+v", c.file, r, c.rotary)
			}
		}
	}
}

// TestFieldsRefused: a value that a family does not know is an error that names the field, in the files of every family.
func TestFieldsRefused(t *testing.T) {
	type change struct {
		field, value string // "": the field is left out
		kind         error
		words        []string
	}
	everywhere := []change{
		{"model_type", `"gpt_oss"`, ErrUnsupported, []string{"gpt_oss", "gemma2"}},
		{"model_type", `[]`, ErrFormat, nil},
		{"model_type", `null`, ErrMissing, nil},
		{"model_type", ``, ErrMissing, nil},
		{"hidden_size", `-64`, ErrFormat, []string{"-64"}},
		{"num_hidden_layers", `2.5`, ErrFormat, []string{"2.5"}},
		{"num_hidden_layers", `2147483647`, ErrFormat, []string{"2147483647"}},
		{"num_attention_heads", `1099511627776`, ErrFormat, []string{"1099511627776"}},
		{"tie_word_embeddings", `1`, ErrFormat, []string{"1"}},
		{"quantization_config", `{"quant_method": "exl2"}`, ErrUnsupported, []string{"quantized"}},
		{"num_local_experts", `8`, ErrUnsupported, []string{"8"}},
	}
	rotary := []change{
		{"vocab_size", `null`, ErrMissing, nil},
		{"vocab_size", ``, ErrMissing, nil},
		{"rms_norm_eps", `"small"`, ErrFormat, []string{"small"}},
		{"rms_norm_eps", `[null]`, ErrFormat, []string{"null"}},
		{"num_key_value_heads", `5`, ErrFormat, []string{"multiple", "num_attention_heads"}},
		{"num_key_value_heads", `0`, ErrFormat, []string{"is 0"}},
		{"head_dim", `0`, ErrFormat, []string{"is 0"}},
	}
	ropes := []change{
		{"rope_parameters", `{"rope_type": "ntk", "rope_theta": 10000.0}`, ErrUnsupported, []string{"rope_type", "ntk", "llama3"}},
		{"rope_parameters", `{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}`, ErrMissing, []string{"high_freq_factor"}},
		{"rope_parameters", `{"rope_type": "linear", "factor": 0}`, ErrFormat, []string{"factor is 0"}},
		{"rope_parameters", `5`, ErrFormat, nil},
		{"rope_scaling", `{"type": "linear", "factor": 2.0}`, ErrUnsupported, []string{"linear", "rope_parameters"}},
	}
	gated := change{"hidden_act", `"gelu_fast"`, ErrUnsupported, []string{"gelu_fast", "silu"}}
	own := map[string][]change{
		"llama3":  {gated, {"sliding_window", `4096`, ErrUnsupported, []string{"4096"}}},
		"mistral": {gated, {"sliding_window", `-1`, ErrFormat, []string{"is -1"}}},
		"qwen2":   {gated, {"layer_types", `["full_attention"]`, ErrFormat, []string{"1 of 2"}}},
		"qwen3":   {gated, {"layer_types", `["full_attention"]`, ErrFormat, []string{"1 of 2"}}},
		"gemma2": {
			{"hidden_activation", `"quick_gelu"`, ErrUnsupported, []string{"quick_gelu", "gelu_pytorch_tanh"}},
			{"layer_types", `["full_attention", "chunked_attention", "full_attention"]`, ErrUnsupported, []string{"layer_types[1]", "chunked_attention"}},
			{"layer_types", `["full_attention", null, "full_attention"]`, ErrUnsupported, []string{"layer_types[1]"}},
			{"attn_logit_softcapping", `-50`, ErrFormat, []string{"-50"}}, {"query_pre_attn_scalar", `0`, ErrFormat, []string{"is 0"}},
			{"use_bidirectional_attention", `true`, ErrUnsupported, []string{"true"}},
		},
		"opt": {
			{"activation_function", `"gelu_fast"`, ErrUnsupported, []string{"gelu_fast", "relu"}}, {"ffn_dim", `-1`, ErrFormat, []string{"-1"}},
			{"num_attention_heads", `3`, ErrFormat, []string{"3"}}, {"max_position_embeddings", `0`, ErrFormat, nil}, {"word_embed_proj_dim", `0`, ErrFormat, []string{"is 0"}},
			{"do_layer_norm_before", `"yes"`, ErrFormat, []string{"yes"}},
		},
	}
	for _, m := range readGolden(t) {
		changes := slices.Concat(everywhere, own[m.Name])
		if !strings.HasPrefix(m.Name, "opt") {
			changes = append(changes, rotary...)
			if m.Name != "gemma3" {
				changes = append(changes, ropes...)
			}
		}
		for _, c := range changes {
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
			_, _, err = readNetwork("config.json", data, 0)
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
}

// TestConfigBounds: content of a config.json is quoted and cut in errors, and takes memory and time in proportion to the file.
func TestConfigBounds(t *testing.T) {
	config := string(readGolden(t)[0].Config)
	long := strings.Repeat("x", 1<<20)
	for what, file := range map[string]string{
		"a long value":             strings.Replace(config, "{", `{"x": "`+long+`",`, 1),
		"a long key":               strings.Replace(config, "{", `{"`+long+`": 1,`, 1),
		"a value with escapes":     strings.Replace(config, "{", "{\"x\": \"\u009b31m\",", 1),
		"a value of lines":         strings.Replace(config, "{", "{\"x\": [1,\n2],", 1),
		"a key with escapes":       strings.Replace(config, "{", `{"\u001b[31m": 1,`, 1),
		"a family with escapes":    `{"model_type": "\u001b[31m\u009b"}`,
		"a long family":            `{"model_type": "` + long + `"}`,
		"a long architecture":      strings.Replace(config, `"LlamaForCausalLM"`, `"`+long+`"`, 1),
		"many architectures":       strings.Replace(config, `"LlamaForCausalLM"`, strings.Repeat(`"x",`, 1<<18)+`"x"`, 1),
		"a deep value":             strings.Replace(config, "{", `{"x": `+strings.Repeat("[", 1<<20), 1),
		"many keys":                `{` + strings.Repeat(`"x": 1,`, 1<<17) + `"x": 1}`,
		"a rope of ropes":          strings.Repeat(`{"rope_parameters":`, 1<<16),
		"a long type of a rope":    strings.Replace(config, "{", `{"rope_scaling": {"type": "`+long+`"},`, 1),
		"a long number":            strings.Replace(config, `"vocab_size": 64`, `"vocab_size": `+strings.Repeat("9", 1<<20), 1),
		"a long activation":        strings.Replace(config, `"silu"`, `"`+long+`"`, 1),
		"many types of its layers": strings.Replace(strings.Replace(config, "{", `{"layer_types": [`+strings.Repeat(`"x",`, 1<<18)+`"x"],`, 1), `"llama"`, `"qwen3"`, 1),
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		began := time.Now()
		_, _, err := readNetwork("config.json", []byte(file), 0)
		took := time.Since(began)
		runtime.ReadMemStats(&after)
		if err == nil || len(err.Error()) > 1000 || strings.ContainsFunc(err.Error(), unicode.IsControl) {
			t.Errorf("%s: %.1000q", what, fmt.Sprint(err))
		}
		if bytes := after.TotalAlloc - before.TotalAlloc; bytes > uint64(40*len(file))+1<<20 || took > 10*time.Second {
			t.Errorf("%s, of %d bytes, took %d bytes and %v", what, len(file), bytes, took)
		}
	}
}
