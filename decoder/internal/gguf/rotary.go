package gguf

import "math"

// rotary sets rope_theta, partial_rotary_factor and rope_scaling.
func (w *words) rotary(dim int) {
	f := w.fields
	f["rope_theta"] = orElse(w, w.number, "rope.freq_base", 10000)
	if n := orElse(w, w.size, "rope.dimension_count", dim); n != dim {
		if w.architecture == "llama" || w.architecture == "granite" {
			w.fail(ErrUnsupported, "%d of %d elements of a head are rotated", n, dim)
		}
		f["partial_rotary_factor"] = float64(n) / float64(dim)
	}
	kind := orElse(w, w.meta.String, "rope.scaling.type", "")
	factor := orElse(w, w.number, "rope.scaling.factor", 0)
	if old := "rope.scale_linear"; w.has(old) {
		if x := read(w, w.number, old); factor == 0 {
			factor = x
		}
	}
	context := 0
	if w.architecture == latentArchitecture { // the converter leaves the key out
		context, _ = f["max_position_embeddings"].(int)
	}
	context = orElse(w, w.size, "rope.scaling.original_context_length", context)
	// The key tells how the model was trained. For Granite, false turns rotary embedding off.
	if !orElse(w, w.meta.Bool, "rope.scaling.finetuned", true) && w.architecture == "granite" {
		w.fail(ErrUnsupported, "the heads are not rotated")
	}
	if w.err != nil {
		return
	}
	switch kind {
	case "":
		if w.file.byName["rope_factors_long.weight"] != nil {
			w.longRope(context)
		} else if factor != 0 && factor != 1 {
			f["rope_scaling"] = map[string]any{"rope_type": "linear", "factor": factor}
		}
	case "none":
	case "linear":
		if factor != 0 && factor != 1 {
			f["rope_scaling"] = map[string]any{"rope_type": "linear", "factor": factor}
		}
	case "yarn":
		w.yarn(factor, context)
	case "longrope":
		w.longRope(context)
	default:
		w.fail(ErrUnsupported, "metadata key %q is %s; none, linear, yarn and longrope are read", w.architecture+".rope.scaling.type", quote(kind))
	}
	if t := w.file.byName["rope_freqs.weight"]; t != nil && w.err == nil {
		w.llama3(t)
	}
}

func (w *words) yarn(factor float64, context int) {
	if factor == 0 || context == 0 {
		w.fail(ErrMissing, "metadata keys of yarn: %q is %v, and %q is %d", w.architecture+".rope.scaling.factor", factor, w.architecture+".rope.scaling.original_context_length", context)
		return
	}
	scaling := map[string]any{"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context}
	for key, field := range map[string]string{
		"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow", "rope.scaling.yarn_attn_factor": "attention_factor",
	} {
		if w.has(key) {
			scaling[field] = read(w, w.number, key)
		}
	}
	if key := "rope.scaling.yarn_ext_factor"; w.has(key) {
		if x := read(w, w.number, key); x != 1 {
			w.fail(ErrUnsupported, "metadata key %q is %v; 1 is read", w.architecture+"."+key, x)
		}
	}
	w.fields["rope_scaling"] = scaling
}

// longRope sets the factors of longrope: one tensor for short contexts, and one for long contexts.
func (w *words) longRope(context int) {
	long, short := w.vector("rope_factors_long.weight"), w.vector("rope_factors_short.weight")
	positions, ok := w.fields["max_position_embeddings"].(int)
	switch {
	case w.err != nil || !ok:
		return
	case context == 0:
		w.fail(ErrMissing, "metadata key %q, which longrope needs", w.architecture+".rope.scaling.original_context_length")
		return
	}
	scaling := map[string]any{"rope_type": "longrope", "long_factor": long, "short_factor": short}
	if key := "rope.scaling.attn_factor"; w.has(key) {
		usual := 1.0
		if scale := float64(positions) / float64(context); scale > 1 {
			usual = math.Sqrt(1 + math.Log(scale)/math.Log(float64(context)))
		}
		if x := read(w, w.number, key); math.Abs(x-usual) > 1e-6 {
			scaling["attention_factor"] = x
		}
	}
	w.fields["rope_scaling"], w.fields["original_max_position_embeddings"] = scaling, context
}

// llama3 derives the rope_scaling of Llama 3.1 and later from its factors. Files have the factors in place of
// rope_scaling.
func (w *words) llama3(t *Tensor) {
	factors := w.vector(t.name)
	if w.err != nil {
		return
	}
	base, dim := w.fields["rope_theta"].(float64), w.fields["head_dim"].(int)
	if len(factors) != dim/2 {
		w.fail(ErrFormat, "tensor %s has %d factors, and heads have %d elements", quote(t.name), len(factors), dim)
		return
	}
	const low, high, context = 1, 4, 8192
	factor := 1.0
	for _, x := range factors {
		factor = math.Max(factor, x)
	}
	for i, got := range factors {
		frequency := math.Pow(base, -2*float64(i)/float64(dim))
		turns := context * frequency / (2 * math.Pi)
		want := 1.0
		switch {
		case turns > high:
		case turns < low:
			want = factor
		default:
			smooth := (turns - low) / (high - low)
			want = 1 / ((1-smooth)/factor + smooth)
		}
		if !(math.Abs(got-want) <= 1e-4*want) {
			w.fail(ErrUnsupported, "tensor %s has %v at %d, and %v would be Llama 3's", quote(t.name), got, i, want)
			return
		}
	}
	if factor == 1 {
		return
	}
	if w.fields["rope_scaling"] != nil {
		w.fail(ErrUnsupported, "tensor %s and metadata scale the rotary embedding", quote(t.name))
	}
	w.fields["rope_scaling"] = map[string]any{
		"rope_type": "llama3", "factor": factor, "low_freq_factor": float64(low), "high_freq_factor": float64(high), "original_max_position_embeddings": context,
	}
}

// vector returns the elements of a small tensor.
func (w *words) vector(name string) []float64 {
	t, err := w.file.Tensor(name)
	if err == nil && (len(t.shape) != 1 || t.columns > 1<<16) {
		err = fail(ErrFormat, t.file, "tensor %s has the shape %v; a short vector is wanted", quote(name), t.shape)
	}
	var s []float32
	if err == nil {
		s = make([]float32, t.columns)
		err = t.Float32(s, 0, 1)
	}
	if err != nil {
		if w.err == nil {
			w.err = err
		}
		return nil
	}
	x := make([]float64, len(s))
	for i := range s {
		x[i] = float64(s[i])
	}
	return x
}
