package gguf

import (
	"math"
	"strconv"
	"strings"
)

// Config returns the fields of the config.json that the language model had before its conversion to GGUF. encoding/json
// accepts all values. Some fields have no metadata key: Config gives those the value that all models of the
// architecture have.
//
// ErrUnsupported is returned for an unknown architecture, and for an unknown key of the architecture, since the logits
// may depend on the key. Keys of the tokenizer, and general keys about the file, are not read.
func (f *File) Config() (map[string]any, error) {
	w, err := f.words()
	if err != nil {
		return nil, err
	}
	w.common()
	w.family.config(w)
	for _, key := range f.meta.Unread() {
		if strings.HasPrefix(key, w.architecture+".") {
			w.fail(ErrUnsupported, "metadata key %s is not known", quote(key))
		}
	}
	if w.err != nil {
		return nil, w.err
	}
	return w.fields, nil
}

// words turns metadata into fields of config.json. It keeps the first error.
type words struct {
	file         *File
	meta         *Metadata
	path         string
	architecture string
	family       family
	fields       map[string]any
	err          error
}

func (f *File) words() (*words, error) {
	w := &words{file: f, meta: f.meta, path: f.parts[0].path, fields: map[string]any{}}
	for key, want := range map[string]string{"general.type": "model"} {
		if got, err := Or(w.meta.String, key, want); err != nil {
			return nil, err
		} else if got != want {
			return nil, fail(ErrUnsupported, w.path, "metadata key %q is %s; %q is read", key, quote(got), want)
		}
	}
	const version = 2 // version of the block layouts that all GGUF files have
	if got, err := Or(w.meta.Int, "general.quantization_version", version); err != nil {
		return nil, err
	} else if got != version {
		return nil, fail(ErrUnsupported, w.path, "metadata key \"general.quantization_version\" is %d; %d is read", got, version)
	}
	var err error
	if w.architecture, err = w.meta.String("general.architecture"); err != nil {
		return nil, err
	}
	known := false
	if w.family, known = families[w.architecture]; !known {
		return nil, fail(ErrUnsupported, w.path, "architecture %s; gemma, gemma2, gemma3, granite, llama (Mistral's, too), minicpm3, olmo2, phi3, qwen2 and qwen3 are read", quote(w.architecture))
	}
	return w, nil
}

func (w *words) fail(kind error, format string, args ...any) {
	if w.err == nil {
		w.err = fail(kind, w.path, format, args...)
	}
}

// read returns the value of a key of the model's architecture, and keeps the first error. key is without the
// architecture.
func read[T any](w *words, get func(string) (T, error), key string) (x T) {
	x, err := get(w.architecture + "." + key)
	if err != nil && w.err == nil {
		w.err = err
	}
	return x
}

// orElse is like read, and returns missing if the file does not have the key.
func orElse[T any](w *words, get func(string) (T, error), key string, missing T) T {
	if !w.has(key) {
		return missing
	}
	return read(w, get, key)
}

func (w *words) has(key string) bool { return w.meta.Has(w.architecture + "." + key) }

// number returns the value of key. A float32 becomes the float64 with the same shortest decimal digits, which is
// usually the number that config.json had.
func (w *words) number(key string) (float64, error) {
	x, err := w.meta.Float64(key)
	if kind, _, _, _ := w.meta.Kind(key); err == nil && kind == Float32 {
		x, err = strconv.ParseFloat(strconv.FormatFloat(x, 'g', -1, 32), 64)
	}
	if err == nil && (math.IsNaN(x) || math.IsInf(x, 0)) {
		err = fail(ErrRange, w.path, "metadata key %s is %v", quote(key), x)
	}
	return x, err
}

// size returns a positive number. The value may be an array with one number for each layer, all of them equal.
func (w *words) size(key string) (int, error) {
	n, err := 0, error(nil)
	if kind, _, _, _ := w.meta.Kind(key); kind == Array {
		var all []int
		if all, err = w.meta.Ints(key); err == nil && len(all) > 0 {
			n = all[0]
			for layer, other := range all {
				if other != n {
					return 0, fail(ErrUnsupported, w.path, "metadata key %s is %d for layer 0 and %d for layer %d", quote(key), n, other, layer)
				}
			}
		}
	} else {
		n, err = w.meta.Int(key)
	}
	if err == nil && (n <= 0 || n > math.MaxInt32) {
		err = fail(ErrRange, w.path, "metadata key %s is %d", quote(key), n)
	}
	return n, err
}

func (w *words) heads() (heads, kvHeads int) {
	heads = read(w, w.size, "attention.head_count")
	return heads, orElse(w, w.size, "attention.head_count_kv", heads)
}

// biased reports whether layer 0 has a bias.
func (w *words) biased(name string) bool { return w.file.byName["blk.0."+name+".bias"] != nil }

// common sets the fields that models of all architectures have.
func (w *words) common() {
	f := w.fields
	f["model_type"], f["architectures"] = w.family.modelType, []string{w.family.class + "ForCausalLM"}
	if embedding := w.file.byName["token_embd.weight"]; embedding == nil {
		w.fail(ErrMissing, "tensor \"token_embd.weight\"")
	} else {
		f["vocab_size"] = embedding.rows
		if n := orElse(w, w.size, "vocab_size", embedding.rows); n != embedding.rows {
			w.fail(ErrFormat, "metadata key %q is %d, and tensor \"token_embd.weight\" has %d rows", w.architecture+".vocab_size", n, embedding.rows)
		}
	}
	width := read(w, w.size, "embedding_length")
	heads, kvHeads := w.heads()
	f["hidden_size"], f["num_attention_heads"], f["num_key_value_heads"] = width, heads, kvHeads
	f["num_hidden_layers"] = read(w, w.size, "block_count")
	f["intermediate_size"] = read(w, w.size, "feed_forward_length")
	f["max_position_embeddings"] = read(w, w.size, "context_length")
	f["rms_norm_eps"] = read(w, w.number, "attention.layer_norm_rms_epsilon")
	f["tie_word_embeddings"] = w.file.byName["output.weight"] == nil
	if w.err != nil {
		return
	}
	dim, value := orElse(w, w.size, "attention.key_length", width/heads), orElse(w, w.size, "attention.value_length", width/heads)
	switch {
	case w.architecture == latentArchitecture:
		dim = w.latent(dim, value)
	case value != dim:
		w.fail(ErrUnsupported, "heads of keys have %d elements, and of values %d", dim, value)
	}
	f["head_dim"] = dim
	if n := orElse(w, w.meta.Int, "expert_count", 0); n != 0 {
		w.fail(ErrUnsupported, "the model has %d experts", n)
	}
	orElse(w, w.meta.Int, "expert_used_count", 0)
	// Both layouts rotate pairs of adjacent elements. The second layout is that of Meta's own files.
	if s := orElse(w, w.meta.String, "tensor_data_layout", "reference"); s != "reference" && (s != "Meta AI original pth" || w.architecture != "llama") {
		w.fail(ErrUnsupported, "metadata key %q is %s", w.architecture+".tensor_data_layout", quote(s))
	}
	w.tokens()
	w.rotary(dim)
}

// tokens sets the ids of special tokens. The end of a text, the end of a turn and the end of a message all end
// generation.
func (w *words) tokens() {
	id := func(name string) (int, bool) {
		key := "tokenizer.ggml." + name + "_token_id"
		if !w.meta.Has(key) {
			return 0, false
		}
		n, err := w.meta.Int(key)
		if err != nil && w.err == nil {
			w.err = err
		}
		return n, true
	}
	var ends []int
	seen := map[int]bool{}
	for _, name := range []string{"eos", "eot", "eom"} {
		if n, ok := id(name); ok && !seen[n] {
			ends, seen[n] = append(ends, n), true
		}
	}
	if ends != nil {
		w.fields["eos_token_id"] = ends
	}
	for field, name := range map[string]string{"bos_token_id": "bos", "pad_token_id": "padding"} {
		if n, ok := id(name); ok {
			w.fields[field] = n
		}
	}
}

func (w *words) llama() {
	w.fields["hidden_act"] = "silu"
	w.fields["attention_bias"], w.fields["mlp_bias"] = w.biased("attn_q"), w.biased("ffn_gate")
}

func (w *words) qwen2() { w.fields["hidden_act"] = "silu" }

func (w *words) qwen3() {
	w.fields["hidden_act"], w.fields["attention_bias"] = "silu", w.biased("attn_q")
}

func (w *words) gemma() { w.fields["hidden_activation"] = "gelu_pytorch_tanh" }

func (w *words) gemma2() {
	w.gemma()
	const billions27 = 46 // layers of the 27B model
	w.queryScalar(billions27)
	w.windows(4096, 2)
	w.fields["attn_logit_softcapping"] = orElse(w, w.number, "attn_logit_softcapping", 50)
	w.fields["final_logit_softcapping"] = orElse(w, w.number, "final_logit_softcapping", 30)
}

func (w *words) gemma3() {
	w.gemma()
	const billions27 = 62 // layers of the 27B model
	w.queryScalar(billions27)
	w.windows(0, 6)
	w.fields["rope_local_base_freq"] = orElse(w, w.number, "rope.freq_base_swa", 10000)
	if x := orElse(w, w.number, "final_logit_softcapping", 0); x != 0 {
		w.fields["final_logit_softcapping"] = x
	}
}

// queryScalar sets query_pre_attn_scalar, which GGUF files do not have. The value is the head size, except for the 27B
// model. layers is the number of layers by which queryScalar recognises the 27B model.
func (w *words) queryScalar(layers int) {
	f := w.fields
	f["query_pre_attn_scalar"] = f["head_dim"]
	if w.err == nil && f["num_hidden_layers"] == layers {
		f["query_pre_attn_scalar"] = f["hidden_size"].(int) / f["num_attention_heads"].(int)
	}
}

// windows sets sliding_window and layer_types. The last layer of each period has full attention.
func (w *words) windows(window, period int) {
	const key = "attention.sliding_window"
	window = orElse(w, w.meta.Int, key, window)
	if window < 0 || window > math.MaxInt32 {
		w.fail(ErrRange, "metadata key %q is %d", w.architecture+"."+key, window)
	}
	if w.err != nil {
		return
	}
	layers := w.fields["num_hidden_layers"].(int)
	if layers > maxTensors {
		w.fail(ErrUnsupported, "%d layers", layers)
		return
	}
	sliding := func(i int) bool { return i%period < period-1 }
	const pattern = "attention.sliding_window_pattern"
	if kind, _, _, ok := w.meta.Kind(w.architecture + "." + pattern); ok && kind == Array {
		of := read(w, w.meta.Bools, pattern)
		if len(of) != layers {
			w.fail(ErrFormat, "metadata key %q has %d of %d layers", w.architecture+"."+pattern, len(of), layers)
			return
		}
		sliding = func(i int) bool { return of[i] }
	} else if ok {
		if period = read(w, w.size, pattern); w.err != nil {
			return
		}
	}
	types := make([]string, layers)
	for i := range types {
		types[i] = "full_attention"
		if window > 0 && sliding(i) {
			types[i] = "sliding_attention"
		}
	}
	w.fields["layer_types"], w.fields["sliding_window"] = types, nil
	if window > 0 {
		w.fields["sliding_window"] = window
	}
}

func (w *words) phi3() {
	w.fields["hidden_act"] = "silu"
	w.fields["sliding_window"] = nil
	if n := orElse(w, w.meta.Int, "attention.sliding_window", 0); n != 0 {
		w.fields["sliding_window"] = n
	}
}

// latent sets the sizes of latent attention, and returns the number of elements of a head that are rotated. key and value are the
// numbers of elements of heads.
func (w *words) latent(key, value int) int {
	f := w.fields
	rotated := read(w, w.size, "rope.dimension_count")
	if rotated >= key && w.err == nil {
		w.fail(ErrFormat, "%d elements of a head are rotated, and heads of keys have %d", rotated, key)
	}
	f["q_lora_rank"], f["kv_lora_rank"] = read(w, w.size, "attention.q_lora_rank"), read(w, w.size, "attention.kv_lora_rank")
	f["qk_nope_head_dim"], f["qk_rope_head_dim"], f["qk_head_dim"], f["v_head_dim"] = key-rotated, rotated, key, value
	return rotated
}

// minicpm3 sets factors that files do not have, and that llama.cpp's MiniCPM 3 has.
func (w *words) minicpm3() {
	f := w.fields
	f["hidden_act"], f["attention_bias"], f["mlp_bias"] = "silu", w.biased("attn_q_a"), w.biased("ffn_gate")
	f["scale_emb"], f["scale_depth"], f["dim_model_base"] = 12, 1.4, 256
}

func (w *words) olmo2() {
	w.fields["hidden_act"], w.fields["attention_bias"] = "silu", w.biased("attn_q")
}

func (w *words) granite() {
	w.llama()
	f := w.fields
	f["logits_scaling"] = read(w, w.number, "logit_scale")
	f["residual_multiplier"] = orElse(w, w.number, "residual_scale", 1)
	f["embedding_multiplier"] = orElse(w, w.number, "embedding_scale", 1)
	f["attention_multiplier"] = orElse(w, w.number, "attention.scale", 0)
	if w.err == nil && f["attention_multiplier"] == 0.0 {
		f["attention_multiplier"] = 1 / math.Sqrt(float64(f["head_dim"].(int)))
	}
}
