package gguf

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// without has the fields of config.json that GGUF files cannot express. Each field has no effect on the logits, or has
// the same value in all models here.
var without = []string{
	"attention_dropout", "initializer_range", "transformers_version", "use_cache", "pretraining_tp", "embd_pdrop", "resid_pdrop",
	"max_window_layers", "use_sliding_window", "use_bidirectional_attention", "_sliding_window_pattern",
}

// plainConfig returns a config.json in one normal form, so that equal configurations compare equal. The object
// rope_parameters becomes the fields of earlier configurations. Fields with a default are filled in or dropped.
func plainConfig(t *testing.T, config any) map[string]any {
	t.Helper()
	data, ok := config.([]byte)
	if !ok {
		var err error
		if data, err = json.Marshal(config); err != nil {
			t.Fatal(err)
		}
	}
	var c map[string]any
	if err := json.Unmarshal(data, &c); err != nil {
		t.Fatal(err)
	}
	if p, ok := c["rope_parameters"].(map[string]any); ok {
		delete(c, "rope_parameters")
		if full, ok := p["full_attention"].(map[string]any); ok {
			c["rope_local_base_freq"] = p["sliding_attention"].(map[string]any)["rope_theta"]
			p = full
		}
		c["rope_theta"] = p["rope_theta"]
		if x, ok := p["partial_rotary_factor"]; ok && x != 1.0 {
			c["partial_rotary_factor"] = x
		}
		delete(p, "rope_theta")
		delete(p, "partial_rotary_factor")
		if p["rope_type"] == "longrope" {
			delete(p, "original_max_position_embeddings") // a copy outside of the object
			if p["factor"] == 1.0 {                       // as the numbers of positions say
				delete(p, "factor")
			}
		}
		if p["rope_type"] != "default" {
			c["rope_scaling"] = p
		}
	}
	if c["model_type"] == "gemma" {
		c["hidden_activation"] = "gelu_pytorch_tanh"
		delete(c, "hidden_act")
	}
	if id, ok := c["eos_token_id"].(float64); ok {
		c["eos_token_id"] = []any{id}
	}
	if c["original_max_position_embeddings"] == c["max_position_embeddings"] {
		delete(c, "original_max_position_embeddings")
	}
	if c["head_dim"] == nil {
		c["head_dim"] = c["hidden_size"].(float64) / c["num_attention_heads"].(float64)
	}
	for _, name := range without {
		delete(c, name)
	}
	if types, ok := c["layer_types"].([]any); ok && !slices.Contains(types, any("sliding_attention")) {
		delete(c, "layer_types")
	}
	maps.DeleteFunc(c, func(_ string, x any) bool { return x == nil || x == false })
	return c
}

// testdata/families has a tiny model of each family, written by llama.cpp's converter with testdata/families.py.
func TestFamilies(t *testing.T) {
	paths, err := filepath.Glob("testdata/families/*.gguf")
	if err != nil || len(paths) < 13 {
		t.Fatal(paths, err)
	}
	met := map[string]bool{}
	for _, path := range paths {
		base := strings.TrimSuffix(path, ".gguf")
		t.Run(filepath.Base(base), func(t *testing.T) {
			f, err := Open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			data, err := os.ReadFile(base + ".json")
			if err != nil {
				t.Fatal(err)
			}
			want := plainConfig(t, data)
			if want["model_type"] == "mistral" { // the converter writes the architecture llama
				want["model_type"], want["architectures"] = "llama", []any{"LlamaForCausalLM"}
			}
			config, err := f.Config()
			if err != nil {
				t.Fatal(err)
			}
			if got := plainConfig(t, config); !reflect.DeepEqual(got, want) {
				t.Errorf("config\n%v, want\n%v", got, want)
			}
			met[want["model_type"].(string)] = true

			weights, err := f.Weights()
			if err != nil {
				t.Fatal(err)
			}
			factors := 0
			for _, x := range f.Tensors() {
				if strings.HasPrefix(x.Name(), "rope_") {
					factors++
				}
			}
			if len(weights) != len(f.Tensors())-factors {
				t.Errorf("%d weights of %d tensors", len(weights), len(f.Tensors()))
			}
			for name, w := range weights {
				for i, got := range all(t, w) {
					if want := float32((int64(crc32.ChecksumIEEE([]byte(name)))+40503*int64(i))%2048)/2048 - 0.5; got != want {
						t.Errorf("%s: element %d is %g, want %g", name, i, got, want)
						break
					}
				}
			}
		})
	}
	for _, family := range families {
		if !met[family.modelType] {
			t.Errorf("no model of %s", family.modelType)
		}
	}
}

// model returns a tiny model of an architecture, which tests modify.
func model(architecture string, other ...pair) contents {
	keys := []pair{{"general.architecture", architecture}}
	for _, p := range []pair{
		{"block_count", uint32(1)}, {"context_length", uint32(64)}, {"embedding_length", uint32(16)}, {"feed_forward_length", uint32(8)},
		{"attention.head_count", uint32(4)}, {"attention.head_count_kv", uint32(2)}, {"attention.layer_norm_rms_epsilon", float32(1e-5)},
	} {
		keys = append(keys, pair{architecture + "." + p.key, p.value})
	}
	for _, p := range other {
		i := slices.IndexFunc(keys, func(q pair) bool { return p.key == q.key })
		if i >= 0 {
			keys[i] = p
		} else {
			keys = append(keys, p)
		}
	}
	return contents{version: 3, keys: keys, tensors: []written{{name: "token_embd.weight", shape: []uint64{6, 16}, typ: F32, data: make([]byte, 6*16*4)}}}
}

func (c contents) with(t ...written) contents {
	c.tensors = append(slices.Clone(c.tensors), t...)
	return c
}

// llama3Factors returns the tensor that the converter writes for Llama 3.1's rope_scaling.
func llama3Factors(factor, base float64, dim int, context float64) []byte {
	var s []float32
	for i := range dim / 2 {
		wavelength := 2 * math.Pi * math.Pow(base, 2*float64(i)/float64(dim))
		x := 1.0
		switch smooth := (context/wavelength - 1) / 3; {
		case wavelength > context:
			x = factor
		case wavelength > context/4:
			x = 1 / ((1-smooth)/factor + smooth)
		}
		s = append(s, float32(x))
	}
	return floats(s...)
}

func TestConfig(t *testing.T) {
	vector := func(name string, data []byte) written {
		return written{name: name, shape: []uint64{uint64(len(data) / 4)}, typ: F32, data: data}
	}
	layers := func(n int) pair { return pair{"gemma3.block_count", uint32(n)} }
	kv := func(x ...int32) pair { return pair{"llama.attention.head_count_kv", x} }
	for name, c := range map[string]struct {
		file  contents
		field string
		want  any
	}{
		"no KV heads":      {contents{version: 3, keys: slices.DeleteFunc(model("llama").keys, func(p pair) bool { return strings.HasSuffix(p.key, "_kv") }), tensors: model("llama").tensors}, "num_key_value_heads", 4},
		"KV heads a layer": {model("llama", kv(2, 2)), "num_key_value_heads", 2},
		"decimal":          {model("llama"), "rms_norm_eps", 1e-5},
		"float64":          {model("llama", pair{"llama.rope.freq_base", 1e6}), "rope_theta", 1e6},
		"head_dim":         {model("llama"), "head_dim", 4},
		"ends":             {model("llama", pair{"tokenizer.ggml.eos_token_id", uint32(2)}, pair{"tokenizer.ggml.eot_token_id", uint32(5)}, pair{"tokenizer.ggml.eom_token_id", uint32(2)}), "eos_token_id", []int{2, 5}},
		"untied":           {model("qwen2").with(written{name: "output.weight", shape: []uint64{6, 16}, typ: F32, data: make([]byte, 384)}), "tie_word_embeddings", false},
		"tied":             {model("qwen2"), "tie_word_embeddings", true},
		"no experts":       {model("llama", pair{"llama.expert_count", uint32(0)}), "rope_scaling", nil},
		"Meta's layout":    {model("llama", pair{"llama.tensor_data_layout", "Meta AI original pth"}), "rope_scaling", nil},
		"scale_linear":     {model("llama", pair{"llama.rope.scale_linear", float32(4)}), "rope_scaling", map[string]any{"rope_type": "linear", "factor": 4.0}},
		"linear, untyped":  {model("llama", pair{"llama.rope.scaling.factor", float32(4)}), "rope_scaling", map[string]any{"rope_type": "linear", "factor": 4.0}},
		"none":             {model("llama", pair{"llama.rope.scaling.type", "none"}, pair{"llama.rope.scaling.factor", float32(4)}), "rope_scaling", nil},
		"yarn": {model("qwen3", pair{"qwen3.rope.scaling.type", "yarn"}, pair{"qwen3.rope.scaling.factor", float32(4)}, pair{"qwen3.rope.scaling.original_context_length", uint32(16)},
			pair{"qwen3.rope.scaling.yarn_beta_fast", float32(16)}, pair{"qwen3.rope.scaling.yarn_beta_slow", float32(2)}, pair{"qwen3.rope.scaling.yarn_attn_factor", float32(0.5)}, pair{"qwen3.rope.scaling.yarn_ext_factor", float32(1)}),
			"rope_scaling", map[string]any{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 0.5}},
		"llama3": {model("llama", pair{"llama.attention.key_length", uint32(128)}, pair{"llama.attention.value_length", uint32(128)}, pair{"llama.rope.freq_base", float32(500000)}).
			with(vector("rope_freqs.weight", llama3Factors(32, 500000, 128, 8192))),
			"rope_scaling", map[string]any{"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
		"factors of 1": {model("llama").with(vector("rope_freqs.weight", floats(1, 1))), "rope_scaling", nil},
		"attention factor": {model("phi3", pair{"phi3.rope.scaling.original_context_length", uint32(16)}, pair{"phi3.rope.scaling.attn_factor", float32(1.5)}).
			with(vector("rope_factors_long.weight", floats(2, 3)), vector("rope_factors_short.weight", floats(1, 1.5))),
			"rope_scaling", map[string]any{"rope_type": "longrope", "long_factor": []float64{2, 3}, "short_factor": []float64{1, 1.5}, "attention_factor": 1.5}},
		"Gemma 3 of 27 billion": {model("gemma3", layers(62), pair{"gemma3.embedding_length", uint32(24)}, pair{"gemma3.attention.key_length", uint32(4)}, pair{"gemma3.attention.value_length", uint32(4)}), "query_pre_attn_scalar", 6},
		"Gemma 3's local base":  {model("gemma3"), "rope_local_base_freq", 10000.0},
		"Gemma 3, no windows":   {model("gemma3", layers(7)), "sliding_window", nil},
		"pattern by period":     {model("gemma3", layers(3), pair{"gemma3.attention.sliding_window", uint32(8)}, pair{"gemma3.attention.sliding_window_pattern", uint32(2)}), "layer_types", []string{"sliding_attention", "full_attention", "sliding_attention"}},
		"pattern by layer":      {model("gemma3", layers(2), pair{"gemma3.attention.sliding_window", uint32(8)}, pair{"gemma3.attention.sliding_window_pattern", []bool{false, true}}), "layer_types", []string{"full_attention", "sliding_attention"}},
		"Gemma 2's defaults":    {model("gemma2"), "attn_logit_softcapping", 50.0},
		"Gemma 2's window":      {model("gemma2"), "sliding_window", 4096},
		"Granite's scores":      {model("granite", pair{"granite.logit_scale", float32(8)}), "attention_multiplier", 0.5},
	} {
		config, err := mustParse(t, c.file.encode()).Config()
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got := config[c.field]; !reflect.DeepEqual(got, c.want) && fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("%s: %s is %#v, want %#v", name, c.field, got, c.want)
		}
	}
}

func TestConfigErrors(t *testing.T) {
	vector := func(name string, x ...float32) written {
		return written{name: name, shape: []uint64{uint64(len(x))}, typ: F32, data: floats(x...)}
	}
	yarn := pair{"llama.rope.scaling.type", "yarn"}
	without := func(architecture, key string) contents {
		c := model(architecture)
		c.keys = slices.DeleteFunc(c.keys, func(p pair) bool { return p.key == key })
		return c
	}
	for name, c := range map[string]struct {
		file contents
		kind error
		text string
	}{
		"architecture":     {model("opt"), ErrUnsupported, `architecture "opt"; gemma, gemma2`},
		"none":             {without("llama", "general.architecture"), ErrMissing, `"general.architecture"`},
		"type":             {model("llama", pair{"general.type", "adapter"}), ErrUnsupported, `"general.type" is "adapter"; "model" is read`},
		"version":          {model("llama", pair{"general.quantization_version", uint32(1)}), ErrUnsupported, "is 1; 2 is read"},
		"unknown key":      {model("llama", pair{"llama.attention.sliding_window", uint32(4)}), ErrUnsupported, `metadata key "llama.attention.sliding_window" is not known`},
		"missing key":      {without("llama", "llama.block_count"), ErrMissing, `metadata key "llama.block_count"`},
		"type of a key":    {model("llama", pair{"llama.block_count", "1"}), ErrType, "is string; an integer is wanted"},
		"type of a token":  {model("llama", pair{"tokenizer.ggml.eos_token_id", "2"}), ErrType, `"tokenizer.ggml.eos_token_id" is string`},
		"no layers":        {model("llama", pair{"llama.block_count", uint32(0)}), ErrRange, `"llama.block_count" is 0`},
		"many":             {model("llama", pair{"llama.embedding_length", uint64(1 << 40)}), ErrRange, `"llama.embedding_length"`},
		"heads by layer":   {model("llama", pair{"llama.attention.head_count_kv", []uint32{2, 4}}), ErrUnsupported, "is 2 for layer 0 and 4 for layer 1"},
		"no heads":         {model("llama", pair{"llama.attention.head_count_kv", []uint32{}}), ErrRange, "is 0"},
		"NaN":              {model("llama", pair{"llama.rope.freq_base", float32(math.NaN())}), ErrRange, `"llama.rope.freq_base" is NaN`},
		"vocabulary":       {model("llama", pair{"llama.vocab_size", uint32(7)}), ErrFormat, `is 7, and tensor "token_embd.weight" has 6 rows`},
		"no embedding":     {contents{version: 3, keys: model("llama").keys}, ErrMissing, `tensor "token_embd.weight"`},
		"head dims":        {model("llama", pair{"llama.attention.key_length", uint32(8)}), ErrUnsupported, "heads of keys have 8 elements, and of values 4"},
		"experts":          {model("llama", pair{"llama.expert_count", uint32(8)}), ErrUnsupported, "the model has 8 experts"},
		"layout":           {model("qwen2", pair{"qwen2.tensor_data_layout", "Meta AI original pth"}), ErrUnsupported, `is "Meta AI original pth"`},
		"part of a head":   {model("llama", pair{"llama.rope.dimension_count", uint32(2)}), ErrUnsupported, "2 of 4 elements of a head are rotated"},
		"scaling":          {model("llama", pair{"llama.rope.scaling.type", "x"}), ErrUnsupported, `"llama.rope.scaling.type" is "x"`},
		"yarn":             {model("llama", yarn), ErrMissing, `"llama.rope.scaling.factor" is 0`},
		"yarn's extension": {model("llama", yarn, pair{"llama.rope.scaling.factor", float32(2)}, pair{"llama.rope.scaling.original_context_length", uint32(16)}, pair{"llama.rope.scaling.yarn_ext_factor", float32(0.5)}), ErrUnsupported, "is 0.5; 1 is read"},
		"yarn's logarithm": {model("llama", pair{"llama.rope.scaling.yarn_log_multiplier", float32(0.1)}), ErrUnsupported, "yarn_log_multiplier"},
		"not Llama 3's":    {model("llama").with(vector("rope_freqs.weight", 1, 3)), ErrUnsupported, `tensor "rope_freqs.weight" has 3 at 1`},
		"NaN factor":       {model("llama").with(vector("rope_freqs.weight", 1, float32(math.NaN()))), ErrUnsupported, "has NaN at"},
		"few factors":      {model("llama").with(vector("rope_freqs.weight", 1)), ErrFormat, "has 1 factors, and heads have 4 elements"},
		"matrix":           {model("llama").with(written{name: "rope_freqs.weight", shape: []uint64{1, 2}, typ: F32, data: floats(1, 1)}), ErrFormat, "a short vector is wanted"},
		"longrope":         {model("phi3", pair{"phi3.rope.scaling.type", "longrope"}), ErrMissing, `tensor "rope_factors_long.weight"`},
		"longrope's start": {model("phi3").with(vector("rope_factors_long.weight", 1, 1), vector("rope_factors_short.weight", 1, 1)), ErrMissing, "original_context_length"},
		"pattern":          {model("gemma3", pair{"gemma3.attention.sliding_window", uint32(8)}, pair{"gemma3.attention.sliding_window_pattern", []bool{true, true}}), ErrFormat, "has 2 of 1 layers"},
		"window":           {model("gemma3", pair{"gemma3.attention.sliding_window", int32(-1)}), ErrRange, "is -1"},
		"layers":           {model("gemma3", pair{"gemma3.block_count", uint32(1 << 20)}, pair{"gemma3.attention.sliding_window", uint32(8)}), ErrUnsupported, "1048576 layers"},
		"not rotated":      {model("granite", pair{"granite.logit_scale", float32(8)}, pair{"granite.rope.scaling.finetuned", false}), ErrUnsupported, "the heads are not rotated"},
		"Granite's logits": {model("granite"), ErrMissing, `"granite.logit_scale"`},
	} {
		config, err := mustParse(t, c.file.encode()).Config()
		if config != nil || !errors.Is(err, c.kind) || !strings.Contains(fmt.Sprint(err), c.text) {
			t.Errorf("%s: %v, want %q and %q", name, err, c.text, c.kind)
		}
	}
}

func TestWeightErrors(t *testing.T) {
	tensor := func(name string, shape []uint64, typ Type, size int) written {
		return written{name: name, shape: shape, typ: typ, data: make([]byte, size)}
	}
	for name, c := range map[string]struct {
		file contents
		kind error
		text string
	}{
		"unknown":           {model("llama").with(tensor("blk.0.attn_q_norm.weight", []uint64{4}, F32, 16)), ErrUnsupported, `tensor "blk.0.attn_q_norm.weight" is none of architecture "llama"`},
		"of another family": {model("phi3").with(tensor("blk.0.attn_q.weight", []uint64{4}, F32, 16)), ErrUnsupported, `"blk.0.attn_q.weight" is none`},
		"no norm before":    {model("olmo2").with(tensor("blk.0.attn_norm.weight", []uint64{4}, F32, 16)), ErrUnsupported, `"blk.0.attn_norm.weight" is none`},
		"bias of a norm":    {model("llama").with(tensor("blk.0.attn_norm.bias", []uint64{4}, F32, 16)), ErrUnsupported, "attn_norm.bias"},
		"bias of the head":  {model("llama").with(tensor("output.bias", []uint64{4}, F32, 16)), ErrUnsupported, "output.bias"},
		"neither":           {model("llama").with(tensor("blk.0.attn_q.scale", []uint64{4}, F32, 16)), ErrUnsupported, "attn_q.scale"},
		"layer -1":          {model("llama").with(tensor("blk.-1.attn_q.weight", []uint64{4}, F32, 16)), ErrUnsupported, "blk.-1"},
		"layer 00":          {model("llama").with(tensor("blk.00.attn_q.weight", []uint64{4}, F32, 16)), ErrUnsupported, "blk.00"},
		"no layer":          {model("llama").with(tensor("blk.attn_q", []uint64{4}, F32, 16)), ErrUnsupported, "blk.attn_q"},
		"odd heads":         {model("llama").with(tensor("blk.0.attn_q.weight", []uint64{12, 1}, F32, 48)), ErrFormat, "has 12 rows, which are not 4 heads of an even number"},
		"many heads":        {model("llama", pair{"llama.attention.head_count", uint32(math.MaxInt32)}).with(tensor("blk.0.attn_q.weight", []uint64{4, 1}, F32, 16)), ErrFormat, "which are not 2147483647 heads"},
		"vector of blocks":  {model("llama").with(tensor("blk.0.attn_q.bias", []uint64{32}, Q8_0, 34)), ErrUnsupported, "is a vector of type Q8_0"},
		"heads":             {model("llama", pair{"llama.attention.head_count", "4"}), ErrType, `"llama.attention.head_count"`},
		"architecture":      {model("mamba"), ErrUnsupported, `architecture "mamba"`},
	} {
		weights, err := mustParse(t, c.file.encode()).Weights()
		if weights != nil || !errors.Is(err, c.kind) || !strings.Contains(fmt.Sprint(err), c.text) {
			t.Errorf("%s: %v, want %q and %q", name, err, c.text, c.kind)
		}
	}
}

// Tensors whose rows or values are changed are right in all three types, and do not alias the file.
func TestChangedTensors(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	for _, typ := range []Type{F32, F16, BF16, Q8_0, Q4_1, Q4_K} {
		const heads, size, columns = 6, 64, 512
		x := rowsOf(t, r, typ, heads*size, columns)
		plain := all(t, x)
		h, err := x.halves(heads)
		if err != nil {
			t.Fatal(err)
		}
		// The converter's permutation: (heads, 2, size/2) to (heads, size/2, 2).
		want := make([]float32, len(plain))
		for head := range heads {
			for half := range 2 {
				for i := range size / 2 {
					to, from := head*size+half*size/2+i, head*size+2*i+half
					copy(want[to*columns:(to+1)*columns], plain[from*columns:])
				}
			}
		}
		compare(t, h, want)
		p, err := x.plus(-1)
		if err != nil {
			t.Fatal(err)
		}
		less := slices.Clone(plain)
		for i := range less {
			less[i]--
		}
		compare(t, p, less)
		for name, y := range map[string]struct {
			x    *Tensor
			want []float32
		}{"halves": {h, want}, "plus": {p, less}} {
			const from, to = 3, 130
			got, rounded := make([]uint16, (to-from)*columns), make([]uint16, (to-from)*columns)
			bad := bfloat16.round(rounded, y.want[from*columns:to*columns])
			if err := y.x.BFloat16(got, from, to); (err != nil) != (bad >= 0) || bad < 0 && !slices.EqualFunc(got, rounded, same16(0x7f80)) {
				t.Errorf("%s of %v as bfloat16: %v", name, typ, err)
			}
		}
	}
}
