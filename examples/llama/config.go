package llama

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"

	"gorgonia.org/leanattention/rope"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/nn"
)

// Config is the shape of a model, from its config.json. Zero values are those of Llama 2.
type Config struct {
	Vocab   int // vocab_size
	Hidden  int // hidden_size
	Inner   int // intermediate_size
	Layers  int // num_hidden_layers
	Heads   int // num_attention_heads
	KVHeads int // num_key_value_heads

	Eps    float64       // rms_norm_eps
	Rotary rope.Config   // head_dim (or Hidden/Heads), rope_theta and rope_scaling, or rope_parameters
	Gate   nn.Activation // hidden_act, or hidden_activation
	Tied   bool          // tie_word_embeddings

	Windows     []int   // how many keys a layer sees: sliding_window, or 0 for all, by layer_types; nil: all layers see all
	QueryScalar float64 // query_pre_attn_scalar: scores are divided by its root; 0: head_dim
	ScoreCap    float64 // attn_logit_softcapping; 0: none
	LogitCap    float64 // final_logit_softcapping; 0: none

	// Properties of the architecture.

	Bias           bool // queries, keys and values have biases, as in Qwen 2
	Sinks          bool // query heads have attention sinks, as in gpt-oss
	QKNorm         bool // heads of queries and keys are normalised, as in Qwen 3
	UnitOffset     bool // norms multiply by 1+weight, as in Gemma
	ScaleEmbedding bool // embeddings are multiplied by the root of Hidden, as in Gemma
	PostNorms      bool // the results of attention and of the gated layers are normalised before they are added, as in Gemma 2
}

// architecture is what config.json does not say, and fields that only one architecture has.
type architecture struct {
	config     Config
	activation string // the field that names the gate's function
	headDim    bool   // head_dim is required: the default would not be Hidden/Heads
	fields     func(f *fields, c *Config)
}

var architectures = map[string]architecture{
	"LlamaForCausalLM":   {activation: "hidden_act"},
	"MistralForCausalLM": {activation: "hidden_act", fields: mistralFields},
	"Qwen2ForCausalLM":   {activation: "hidden_act", config: Config{Bias: true}, fields: qwenFields},
	"Qwen3ForCausalLM":   {activation: "hidden_act", config: Config{QKNorm: true}, headDim: true, fields: qwenFields},
	"Gemma2ForCausalLM": {
		activation: "hidden_activation", headDim: true, fields: gemma2Fields,
		config: Config{UnitOffset: true, ScaleEmbedding: true, PostNorms: true, Tied: true},
	},
}

// gates are the gates' functions by their names in config.json.
var gates = map[string]nn.Activation{
	"silu": nn.SiLU, "swish": nn.SiLU, "gelu": nn.GELU, "relu": nn.ReLU,
	"gelu_pytorch_tanh": nn.GELUTanh, "gelu_new": nn.GELUTanh,
}

// without has fields that do not affect logits: of training, of generation, and of how weights are stored.
var without = []string{
	"_attn_implementation", "_name_or_path", "attention_dropout", "attn_implementation", "bos_token_id", "cache_implementation",
	"dtype", "eos_token_id", "initializer_range", "model_type", "pad_token_id", "pretraining_tp",
	"torch_dtype", "transformers_version", "use_cache",
}

// maxLayers bounds the allocations that a file can cause.
const maxLayers = 1 << 12

// ReadConfig reads a config.json of LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM or
// Gemma2ForCausalLM. An unknown field is an error, unless it is null or false, since the logits may depend on it.
//
// Errors name field and value. They wrap la.ErrUnsupported for unknown features, and la.ErrOption for missing or
// invalid fields.
func ReadConfig(data []byte) (c Config, err error) {
	f := parse("", data)
	var names []string
	f.need("architectures", &names)
	var a architecture
	if f.err == nil {
		known := false
		if len(names) == 1 {
			a, known = architectures[names[0]]
		}
		if !known {
			f.refuse("architectures", names, slices.Sorted(maps.Keys(architectures)))
		}
	}
	c = a.config
	c.Vocab, c.Hidden, c.Inner = f.size("vocab_size"), f.size("hidden_size"), f.size("intermediate_size")
	c.Layers, c.Heads, c.KVHeads = f.size("num_hidden_layers"), f.size("num_attention_heads"), f.size("num_key_value_heads")
	c.Eps = f.positive("rms_norm_eps")
	f.read("tie_word_embeddings", &c.Tied)
	var activation string
	f.need(a.activation, &activation)
	var known bool
	if c.Gate, known = gates[activation]; !known {
		f.refuse(a.activation, activation, slices.Sorted(maps.Keys(gates)))
	}
	c.Rotary = f.rotary()
	if f.err == nil && !f.has("head_dim") && !a.headDim && c.Hidden%c.Heads == 0 {
		c.Rotary.HeadDim = c.Hidden / c.Heads
	} else {
		c.Rotary.HeadDim = f.size("head_dim")
	}
	if c.Layers > maxLayers {
		f.fail(la.ErrOption, "num_hidden_layers is %d, more than %d", c.Layers, maxLayers)
	}
	if f.err == nil && c.Heads%c.KVHeads != 0 {
		f.fail(la.ErrOption, "num_attention_heads is %d, no multiple of num_key_value_heads, %d", c.Heads, c.KVHeads)
	}
	if a.fields != nil && f.err == nil {
		a.fields(f, &c)
	}
	for _, name := range without {
		delete(f.left, name)
	}
	if f.end(); f.err != nil {
		return Config{}, f.err
	}
	return c, nil
}

func mistralFields(f *fields, c *Config) {
	if window := f.window(); window > 0 {
		c.Windows = slices.Repeat([]int{window}, c.Layers)
	}
}

// qwenFields reads the fields of Qwen 2 and 3, whose use_sliding_window is false, as in all published models: then
// the window is not used.
func qwenFields(f *fields, c *Config) {
	delete(f.left, "max_window_layers")
	delete(f.left, "sliding_window")
	f.layerTypes(c, 0, "full_attention")
}

func gemma2Fields(f *fields, c *Config) {
	window := f.window()
	f.layerTypes(c, window, "sliding_attention", "full_attention")
	c.QueryScalar = f.positive("query_pre_attn_scalar")
	c.ScoreCap, c.LogitCap = f.orNone("attn_logit_softcapping"), f.orNone("final_logit_softcapping")
	// Some files have a value twice. transformers ignores these fields.
	var size int
	if f.read("sliding_window_size", &size) && size != window {
		f.fail(la.ErrOption, "sliding_window_size is %d, and sliding_window %d", size, window)
	}
	var activation string
	if f.read("hidden_act", &activation) {
		if gate, known := gates[activation]; !known || gate != c.Gate {
			f.fail(la.ErrOption, "hidden_act is %q, and hidden_activation %v", activation, c.Gate)
		}
	}
}

// window returns sliding_window; 0: none.
func (f *fields) window() int {
	if f.none("sliding_window") {
		return 0
	}
	return f.size("sliding_window")
}

// orNone returns a number above 0; 0: none.
func (f *fields) orNone(name string) float64 {
	if f.none(name) {
		return 0
	}
	return f.positive(name)
}

// layerTypes sets the windows of the layers that layer_types lists as sliding. Without layer_types, otherwise is
// repeated.
func (f *fields) layerTypes(c *Config, window int, otherwise ...string) {
	var types []string
	if !f.read("layer_types", &types) {
		for i := range c.Layers {
			types = append(types, otherwise[i%len(otherwise)])
		}
	}
	if len(types) != c.Layers {
		f.fail(la.ErrOption, "layer_types has %d of %d layers", len(types), c.Layers)
		return
	}
	for i, t := range types {
		known := map[string]int{"full_attention": 0}
		if window > 0 {
			known["sliding_attention"] = window
		}
		w, ok := known[t]
		if !ok {
			f.refuse(fmt.Sprintf("layer_types[%d]", i), t, slices.Sorted(maps.Keys(known)))
		}
		c.Windows = append(c.Windows, w)
	}
}

// rotary reads rope_parameters, or rope_theta and rope_scaling, the fields until 2025.
func (f *fields) rotary() (c rope.Config) {
	context := 0
	if f.has("max_position_embeddings") {
		context = f.size("max_position_embeddings")
	}
	if f.has("rope_theta") {
		c.Base = f.positive("rope_theta")
	}
	name := "rope_parameters"
	if !f.has(name) {
		name = "rope_scaling"
	}
	var rope json.RawMessage
	if f.read(name, &rope) {
		r := parse(name+".", rope)
		r.rope(&c, context)
		if f.err == nil {
			f.err = r.err
		}
	}
	return c
}

// rope reads a rotary embedding. context is the number of tokens of the training, unless the object has another
// number.
func (f *fields) rope(c *rope.Config, context int) {
	if f.has("rope_theta") {
		c.Base = f.positive("rope_theta")
	}
	kind := "default"
	f.read("type", &kind) // the name until 2024
	f.read("rope_type", &kind)
	original := func() int {
		if context == 0 || f.has("original_max_position_embeddings") {
			return f.size("original_max_position_embeddings")
		}
		return context
	}
	optional := func(name string) (x float64) { // 0: the default of rope.Config
		f.read(name, &x)
		return x
	}
	switch kind {
	case "default":
	case "linear":
		c.Scaling = rope.Linear{Factor: f.positive("factor")}
	case "llama3":
		c.Scaling = rope.Llama3{
			Factor: f.positive("factor"), Context: original(),
			LowFrequency: f.positive("low_freq_factor"), HighFrequency: f.positive("high_freq_factor"),
		}
	case "yarn":
		truncate := true
		f.read("truncate", &truncate)
		c.Scaling = rope.YaRN{
			Factor: f.positive("factor"), Context: original(), BetaFast: optional("beta_fast"), BetaSlow: optional("beta_slow"),
			Attention: optional("attention_factor"), MScale: optional("mscale"), MScaleAllDim: optional("mscale_all_dim"),
			NoTruncate: !truncate,
		}
	default:
		f.refuse("rope_type", kind, []string{"default", "linear", "llama3", "yarn"})
	}
	f.end()
}

// fields are the fields of an object of a config.json, read one by one. err is the first error.
type fields struct {
	object string // name of the object with a dot, for errors
	left   map[string]json.RawMessage
	err    error
}

func parse(object string, data []byte) *fields {
	f := &fields{object: object}
	if err := json.Unmarshal(data, &f.left); err != nil {
		f.fail(la.ErrOption, "no JSON object: %v", err)
	} else if f.left == nil {
		f.fail(la.ErrOption, "no JSON object: null")
	}
	return f
}

func (f *fields) fail(kind error, format string, args ...any) {
	if f.err == nil {
		f.err = fmt.Errorf("llama: config.json: %s%s: %w", f.object, fmt.Sprintf(format, args...), kind)
	}
}

func (f *fields) refuse(name string, value any, known []string) {
	f.fail(la.ErrUnsupported, "%s is %s, none of %q", name, short(fmt.Appendf(nil, "%+q", value)), known)
}

// read reads a field into x, and reports whether the field is present. null counts as absent.
func (f *fields) read(name string, x any) bool {
	raw, ok := f.left[name]
	delete(f.left, name)
	if !ok || string(raw) == "null" {
		return false
	}
	if err := json.Unmarshal(raw, x); err != nil {
		f.fail(la.ErrOption, "%s is %q: %v", name, short(raw), err)
	}
	return true
}

// need reads a required field.
func (f *fields) need(name string, x any) {
	if !f.read(name, x) {
		f.fail(la.ErrOption, "%s is missing", name)
	}
}

// has reports whether a field is present and not null.
func (f *fields) has(name string) bool {
	raw, ok := f.left[name]
	return ok && string(raw) != "null"
}

// none reports whether a field is null. The field is required: without it, transformers has a default.
func (f *fields) none(name string) bool {
	_, ok := f.left[name]
	return ok && !f.has(name)
}

// size returns a number of things; a product of two such numbers fits an int.
func (f *fields) size(name string) (n int) {
	if f.need(name, &n); n < 1 || n > math.MaxInt32 {
		f.fail(la.ErrOption, "%s is %d, not in [1, %d]", name, n, math.MaxInt32)
	}
	return n
}

// positive returns a number above 0.
func (f *fields) positive(name string) (x float64) {
	if f.need(name, &x); !(x > 0) {
		f.fail(la.ErrOption, "%s is %v, not above 0", name, x)
	}
	return x
}

// end refuses fields that were not read.
func (f *fields) end() {
	for _, name := range slices.Sorted(maps.Keys(f.left)) {
		if raw := string(f.left[name]); raw != "null" && raw != "false" {
			f.fail(la.ErrUnsupported, "%q is %q, which is not known", short([]byte(name)), short(f.left[name]))
		}
	}
}

// short returns a value for errors.
func short(raw json.RawMessage) string {
	if len(raw) > 80 {
		return string(raw[:80]) + "..."
	}
	return string(raw)
}
