package decoder

import (
	"maps"
	"math"
	"slices"
	"strings"
	"sync"

	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/rope"
)

// Register adds a family of models. name is the model_type of config.json. read reads the fields of config.json, and
// returns the network. A second registration of a name replaces the first.
//
// The families of this package are registered: deepseek_v2, deepseek_v3, gemma, gemma2, gemma3_text, granite, kimi_k2, llama,
// minicpm3, mistral, olmo2, opt, phi3, qwen2, qwen3 and youtu.
func Register(name string, read func(*Config) (Network, error)) {
	registry.Lock()
	defer registry.Unlock()
	registry.families[name] = read
}

var registry = struct {
	sync.Mutex
	families map[string]func(*Config) (Network, error)
}{families: map[string]func(*Config) (Network, error){}}

func init() {
	for name, read := range map[string]func(c *Config) *transformer{
		"opt": readOPT, "llama": readLlama, "mistral": readMistral, "qwen2": readQwen2, "qwen3": readQwen3, "phi3": readPhi3,
		"gemma": readGemma, "gemma2": readGemma2, "gemma3_text": readGemma3, "olmo2": readOLMo2, "granite": readGranite,
		"deepseek_v2": readDeepSeekV2, "deepseek_v3": readDeepSeekV3, "kimi_k2": readDeepSeekV3, "minicpm3": readMiniCPM3, "youtu": readYoutu,
	} {
		Register(name, func(c *Config) (Network, error) { return read(c), nil })
	}
}

// ReadNetwork returns the network that a config.json describes, for texts of at most context tokens; 0: any number. Weights
// that come with the file need no network: see [Open].
func ReadNetwork(config []byte, context int) (Network, error) {
	n, _, err := readNetwork("config.json", config, context)
	return n, err
}

// readNetwork returns the network of a config.json, for texts of at most context tokens. 0: not known yet.
func readNetwork(file string, data []byte, context int) (Network, *Config, error) {
	c := parseConfig(file, "", data)
	c.context = context
	var name string
	c.Need("model_type", &name)
	if c.err != nil {
		return nil, nil, c.err
	}
	registry.Lock()
	read := registry.families[name]
	known := slices.Sorted(maps.Keys(registry.families))
	registry.Unlock()
	if read == nil {
		c.refuse("model_type", name, known)
		return nil, nil, c.err
	}
	var architectures []string
	if c.Read("architectures", &architectures) && (len(architectures) != 1 || !strings.HasSuffix(architectures[0], "ForCausalLM")) {
		c.fail(ErrUnsupported, "architectures is %q; known is one whose name ends with ForCausalLM", short(c.read["architectures"]))
	}
	c.is("is_encoder_decoder", false)
	c.is("add_cross_attention", false)
	if c.Has("pruned_heads") {
		var heads map[string]any
		if c.Read("pruned_heads", &heads); len(heads) > 0 {
			c.fail(ErrUnsupported, "pruned_heads has heads that are left out")
		}
	}
	c.ignore(withoutEffect...)
	n, err := read(c)
	if c.err == nil {
		c.err = err
	}
	if c.Has("compression_config") {
		c.fail(ErrUnsupported, "compression_config: the weights are quantized: %s", wayOut)
	}
	c.packing = c.quantization()
	c.ignore(withoutEffect...)
	c.end()
	if c.err != nil {
		return nil, nil, c.err
	}
	sizes := n.Sizes()
	return n, c, sizes.check()
}

// withoutEffect has fields of training, of generation, and of how weights are stored. They do not affect logits.
var withoutEffect = strings.Fields(`
	_attn_implementation _attn_implementation_autoset _name_or_path _commit_hash attn_implementation dtype torch_dtype transformers_version use_cache cache_implementation
	attention_dropout attention_probs_dropout_prob hidden_dropout dropout embd_pdrop resid_pdrop activation_dropout layerdrop classifier_dropout
	initializer_range init_std pretraining_tp auto_map id2label label2id problem_type finetuning_task task_specific_params
	bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id unk_token_id
	output_attentions output_hidden_states return_dict output_scores return_dict_in_generate gradient_checkpointing chunk_size_feed_forward
	do_sample temperature top_k top_p num_beams num_beam_groups max_length min_length num_return_sequences early_stopping length_penalty
	typical_p diversity_penalty repetition_penalty encoder_no_repeat_ngram_size no_repeat_ngram_size bad_words_ids exponential_decay_length_penalty
	forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens begin_suppress_tokens prefix
	architectures model_type tokenizer_class`)

// activations are the functions of MLPs by their names in config.json.
var activations = map[string]nn.Activation{
	"silu": nn.SiLU, "swish": nn.SiLU, "gelu": nn.GELU, "relu": nn.ReLU,
	"gelu_pytorch_tanh": nn.GELUTanh, "gelu_new": nn.GELUTanh,
}

// activation reads the name of a function.
func (c *Config) activation(name, otherwise string) nn.Activation {
	return activations[c.Choice(name, otherwise, slices.Sorted(maps.Keys(activations))...)]
}

// readOPT reads the fields of OPT. Fields that config.json leaves out have the values of transformers' OPTConfig.
func readOPT(c *Config) *transformer {
	width, heads, context := c.Size("hidden_size", 768), c.Size("num_attention_heads", 12), c.Size("max_position_embeddings", 2048)
	const offset = 2 // rows of the table before the first position
	t := &transformer{
		sizes: Sizes{
			Vocab: c.Size("vocab_size", 50272), Context: context, Layers: c.Size("num_hidden_layers", 12), KVHeads: heads, HeadDim: width / heads,
		},
		names: names{
			embedding: "decoder.embed_tokens", positions: "decoder.embed_positions", in: "decoder.project_in", out: "decoder.project_out", head: "lm_head",
			layer: "decoder.layers.%d.", q: "self_attn.q_proj", k: "self_attn.k_proj", v: "self_attn.v_proj", o: "self_attn.out_proj", up: "fc1", down: "fc2",
			attention: "self_attn_layer_norm", mlp: "final_layer_norm",
		},
		width: width, heads: heads, inner: c.Size("ffn_dim", 3072), embedding: c.Size("word_embed_proj_dim", width),
		eps: 1e-5, positions: context + offset, offset: offset, norm: layerNorm,
		activation: c.activation("activation_function", "relu"),
	}
	t.preNorms = c.Flag("do_layer_norm_before", true)
	t.sumNorms = !t.preNorms
	if t.preNorms && !c.Flag("_remove_final_layer_norm", false) {
		t.names.last = "decoder.final_layer_norm"
	}
	c.ignore("_remove_final_layer_norm")
	if !c.Flag("layer_norm_elementwise_affine", true) {
		t.norm = plainNorm
	}
	bias := c.Flag("enable_bias", true)
	t.qkvBias, t.outBias, t.mlpBias = bias, bias, bias
	t.tied = c.Flag("tie_word_embeddings", true)
	if width%heads != 0 {
		c.Errorf("hidden_size is %d, no multiple of num_attention_heads, %d", width, heads)
	}
	return t
}

// readGated reads the fields that Llama and the families that follow it share. headDim is the default of head_dim; 0:
// hidden_size / num_attention_heads.
func readGated(c *Config, headDim int, eps float64, activation string) *transformer {
	t := &transformer{
		sizes: Sizes{Vocab: c.Size("vocab_size"), Layers: c.Size("num_hidden_layers")},
		names: llamaNames,
		width: c.Size("hidden_size"), inner: c.Size("intermediate_size"), heads: c.Size("num_attention_heads"),
		eps: c.Positive("rms_norm_eps", eps), preNorms: true, gated: true,
		tied: c.Flag("tie_word_embeddings", false),
	}
	t.embedding = t.width
	if c.Has("max_position_embeddings") {
		t.sizes.Context = c.Size("max_position_embeddings")
	}
	if activation != "" {
		t.activation = c.activation(activation, "silu")
	}
	t.sizes.KVHeads = c.Size("num_key_value_heads", t.heads)
	if headDim == 0 {
		if headDim = max(1, t.width/t.heads); !c.Has("head_dim") && t.width%t.heads != 0 {
			c.Errorf("hidden_size is %d, no multiple of num_attention_heads, %d, and head_dim is missing", t.width, t.heads)
		}
	}
	t.sizes.HeadDim = c.Size("head_dim", headDim)
	if t.heads%t.sizes.KVHeads != 0 {
		c.Errorf("num_attention_heads is %d, no multiple of num_key_value_heads, %d", t.heads, t.sizes.KVHeads)
	}
	if t.sizes.Layers > maxLayers {
		c.Errorf("num_hidden_layers is %d, more than %d", t.sizes.Layers, maxLayers)
		t.sizes.Layers = 1
	}
	return t
}

// rotate gives all layers one rotary embedding.
func (t *transformer) rotate(c rope.Config) {
	t.rotary = slices.Repeat([]rope.Config{c}, t.sizes.Layers)
}

func readLlama(c *Config) *transformer {
	t := readGated(c, 0, 1e-6, "hidden_act")
	t.rotate(c.rotary(t.sizes.HeadDim))
	bias := c.Flag("attention_bias", false)
	t.qkvBias, t.outBias, t.mlpBias = bias, bias, c.Flag("mlp_bias", false)
	return t
}

func readMistral(c *Config) *transformer {
	t := readGated(c, 0, 1e-6, "hidden_act")
	t.rotate(c.rotary(t.sizes.HeadDim))
	t.windowAll(c.window(4096))
	return t
}

func readQwen2(c *Config) *transformer {
	t := readGated(c, 0, 1e-6, "hidden_act")
	t.rotate(c.rotary(t.sizes.HeadDim))
	t.qkvBias = true
	t.qwenWindows(c)
	return t
}

func readQwen3(c *Config) *transformer {
	t := readGated(c, 128, 1e-6, "hidden_act")
	t.rotate(c.rotary(t.sizes.HeadDim))
	bias := c.Flag("attention_bias", false)
	t.qkvBias, t.outBias, t.headNorms = bias, bias, true
	t.qwenWindows(c)
	return t
}

// qwenWindows reads the windows of Qwen: without use_sliding_window there are none.
func (t *transformer) qwenWindows(c *Config) {
	window := 0
	first := t.sizes.Layers
	if c.Flag("use_sliding_window", false) {
		window = c.window(4096)
		c.Read("max_window_layers", &first)
	}
	c.ignore("sliding_window", "max_window_layers")
	t.layerTypes(c, window, func(i int) bool { return window > 0 && i >= first })
}

func readPhi3(c *Config) *transformer {
	t := readGated(c, 0, 1e-5, "hidden_act")
	t.rotate(c.rotary(t.sizes.HeadDim))
	c.ignore("original_max_position_embeddings") // a scaling has read it
	t.fusedQKV, t.fusedGate = true, true
	t.windowAll(c.window(0))
	return t
}

// gemma sets the properties of all Gemma models.
func (t *transformer) gemma() {
	t.norm = unitRMSNorm
	t.embeddingScale = math.Sqrt(float64(t.width))
}

func readGemma(c *Config) *transformer {
	t := readGated(c, 256, 1e-6, "")
	t.gemma()
	t.tied = c.Flag("tie_word_embeddings", true)
	// The first models were published with hidden_act "gelu", and were trained with the approximation by tanh.
	t.activation = nn.GELUTanh
	if c.Has("hidden_activation") {
		t.activation = c.activation("hidden_activation", "gelu_pytorch_tanh")
		c.ignore("hidden_act")
	} else if name := c.Choice("hidden_act", "gelu_pytorch_tanh", slices.Sorted(maps.Keys(activations))...); name != "gelu" {
		t.activation = activations[name]
	}
	c.is("use_bidirectional_attention", false)
	bias := c.Flag("attention_bias", false)
	t.qkvBias, t.outBias = bias, bias
	t.rotate(c.rotary(t.sizes.HeadDim))
	return t
}

// readGemmaPost reads the fields that Gemma 2 and 3 share.
func readGemmaPost(c *Config) *transformer {
	t := readGated(c, 256, 1e-6, "")
	t.gemma()
	t.tied = c.Flag("tie_word_embeddings", true)
	t.activation = c.activation("hidden_activation", "gelu_pytorch_tanh")
	if c.Has("hidden_act") {
		if c.activation("hidden_act", "gelu_pytorch_tanh") != t.activation {
			c.Errorf("hidden_act and hidden_activation are two functions")
		}
	}
	t.postNorms = true
	t.names.afterAttention, t.names.mlp, t.names.afterMLP = "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
	t.scale = 1 / math.Sqrt(c.Positive("query_pre_attn_scalar", 256))
	bias := c.Flag("attention_bias", false)
	t.qkvBias, t.outBias = bias, bias
	c.is("use_bidirectional_attention", false)
	return t
}

func readGemma2(c *Config) *transformer {
	t := readGemmaPost(c)
	t.rotate(c.rotary(t.sizes.HeadDim))
	window := c.window(4096)
	if n := 0; c.Read("sliding_window_size", &n) && n != window { // some files have the number twice
		c.Errorf("sliding_window_size is %d, and sliding_window %d", n, window)
	}
	t.layerTypes(c, window, func(i int) bool { return i%2 == 0 })
	t.scoreCap, t.sizes.LogitCap = c.cap("attn_logit_softcapping", 50), c.cap("final_logit_softcapping", 30)
	return t
}

// cap reads a bound that null turns off.
func (c *Config) cap(name string, otherwise float64) float64 {
	if _, ok := c.raw(name); ok {
		return c.Optional(name)
	}
	return otherwise
}

func readGemma3(c *Config) *transformer {
	t := readGemmaPost(c)
	t.headNorms = true
	window, pattern := c.window(4096), c.Size("sliding_window_pattern", 6)
	c.ignore("_sliding_window_pattern")
	t.layerTypes(c, window, func(i int) bool { return (i+1)%pattern != 0 })
	t.scoreCap, t.sizes.LogitCap = c.Optional("attn_logit_softcapping"), c.Optional("final_logit_softcapping")
	local, global := c.rotaryByType(t.sizes.HeadDim)
	for i := range t.sizes.Layers {
		if t.sizes.Windows != nil && i < len(t.sizes.Windows) && t.sizes.Windows[i] > 0 {
			t.rotary = append(t.rotary, local)
		} else {
			t.rotary = append(t.rotary, global)
		}
	}
	return t
}

func readOLMo2(c *Config) *transformer {
	t := readGated(c, 0, 1e-5, "hidden_act")
	t.rotate(c.rotary(t.sizes.HeadDim))
	t.preNorms, t.postNorms, t.fullNorms = false, true, true
	t.names.attention, t.names.mlp = "", ""
	t.names.afterAttention, t.names.afterMLP = "post_attention_layernorm", "post_feedforward_layernorm"
	bias := c.Flag("attention_bias", false)
	t.qkvBias, t.outBias = bias, bias
	return t
}

func readGranite(c *Config) *transformer {
	t := readLlama(c)
	t.embeddingScale, t.residualScale = c.Positive("embedding_multiplier", 1), c.Positive("residual_multiplier", 1)
	t.logitScale = 1 / c.Positive("logits_scaling", 1)
	t.scale = c.Positive("attention_multiplier", 1)
	return t
}

// window reads sliding_window; 0: none. null means none. otherwise is the value of an absent field.
func (c *Config) window(otherwise int) int {
	const name = "sliding_window"
	raw, ok := c.raw(name)
	if !ok {
		return otherwise
	}
	if string(raw) == "null" || string(raw) == "0" {
		c.ignore(name)
		return 0
	}
	return c.Size(name)
}

// windowAll gives all layers a window; 0: none.
func (t *transformer) windowAll(window int) {
	if window > 0 {
		t.sizes.Windows = slices.Repeat([]int{window}, t.sizes.Layers)
	}
}

// layerTypes sets the windows of the layers that layer_types lists as sliding. Without layer_types, sliding tells them.
func (t *transformer) layerTypes(c *Config, window int, sliding func(layer int) bool) {
	const name, full, slides = "layer_types", "full_attention", "sliding_attention"
	var types []string
	if !c.Read(name, &types) {
		for i := range t.sizes.Layers {
			types = append(types, full)
			if sliding(i) {
				types[i] = slides
			}
		}
	}
	if len(types) != t.sizes.Layers {
		c.Errorf("%s has %d of %d layers", name, len(types), t.sizes.Layers)
		return
	}
	windows := make([]int, len(types))
	for i, kind := range types {
		switch {
		case kind == slides && window > 0:
			windows[i] = window
		case kind != full:
			c.fail(ErrUnsupported, "%s[%d] is %+.80q", name, i, kind)
		}
	}
	if slices.Max(windows) > 0 {
		t.sizes.Windows = windows
	}
}
