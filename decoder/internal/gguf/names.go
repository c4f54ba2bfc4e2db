package gguf

import (
	"fmt"
	"strconv"
	"strings"
)

// The tables of this file undo the changes of llama.cpp's converters, which rename the weights of Hugging Face models
// and modify some of them.
//
// Sources: https://github.com/ggml-org/llama.cpp, gguf-py/gguf/tensor_mapping.py and constants.py (names), conversion/*.py
// (changes), src/models/*.cpp (what a missing key or tensor means).

// undo is the converter's change that is undone when a weight is read.
type undo int

const (
	asIs undo = iota
	// pairs: the rows of each query head were permuted. Rotary embedding rotates elements i and i+d/2 together before
	// the permutation, and elements 2*i and 2*i+1 after it.
	pairs
	// pairsKV is like pairs, for key heads.
	pairsKV
	// plusOne: 1 was added to the weight of a norm.
	plusOne
)

// renamed is a weight's name in Hugging Face models, and the change to undo.
type renamed struct {
	name string // without ".weight" or ".bias", and without the layer
	undo undo
}

// family is the conversion of the models of one architecture.
type family struct {
	modelType string // model_type in config.json
	class     string // in architectures of config.json, without ForCausalLM
	layer     map[string]renamed
	config    func(*words)
}

// globals are the weights outside of layers.
var globals = map[string]renamed{
	"token_embd":  {"model.embed_tokens", asIs},
	"output_norm": {"model.norm", asIs},
	"output":      {"lm_head", asIs},
}

// factors are the tensors that are fields of config.json in Hugging Face models.
var factors = map[string]bool{"rope_freqs.weight": true, "rope_factors_long.weight": true, "rope_factors_short.weight": true}

// inLayer returns the weights of a Llama layer, with the entries of other added or replaced. An entry without a name
// removes a weight.
func inLayer(other map[string]renamed) map[string]renamed {
	m := map[string]renamed{
		"attn_norm": {"input_layernorm", asIs}, "ffn_norm": {"post_attention_layernorm", asIs},
		"attn_q": {"self_attn.q_proj", asIs}, "attn_k": {"self_attn.k_proj", asIs},
		"attn_v": {"self_attn.v_proj", asIs}, "attn_output": {"self_attn.o_proj", asIs},
		"ffn_gate": {"mlp.gate_proj", asIs}, "ffn_up": {"mlp.up_proj", asIs}, "ffn_down": {"mlp.down_proj", asIs},
	}
	for name, w := range other {
		if m[name] = w; w.name == "" {
			delete(m, name)
		}
	}
	return m
}

var (
	headNorms = map[string]renamed{"attn_q_norm": {"self_attn.q_norm", asIs}, "attn_k_norm": {"self_attn.k_norm", asIs}}
	permuted  = inLayer(map[string]renamed{"attn_q": {"self_attn.q_proj", pairs}, "attn_k": {"self_attn.k_proj", pairsKV}})
	postNorms = map[string]renamed{
		"post_attention_norm": {"post_attention_layernorm", asIs}, "post_ffw_norm": {"post_feedforward_layernorm", asIs},
		"ffn_norm": {"pre_feedforward_layernorm", asIs},
	}
)

// with returns the union of two tables. The entries of b replace those of a.
func with(a, b map[string]renamed) map[string]renamed {
	m := map[string]renamed{}
	for _, t := range []map[string]renamed{a, b} {
		for name, w := range t {
			m[name] = w
		}
	}
	return m
}

// normsPlusOne returns a copy of layer in which all norms have the change plusOne.
func normsPlusOne(layer map[string]renamed) map[string]renamed {
	m := with(layer, nil)
	for name, w := range m {
		if strings.HasSuffix(name, "_norm") {
			m[name] = renamed{w.name, plusOne}
		}
	}
	return m
}

// families maps general.architecture to the architectures that package decoder supports. Mistral models have the
// architecture llama. OPT models have no GGUF architecture.
var families = map[string]family{
	"llama":   {"llama", "Llama", permuted, (*words).llama},
	"qwen2":   {"qwen2", "Qwen2", inLayer(nil), (*words).qwen2},
	"qwen3":   {"qwen3", "Qwen3", inLayer(headNorms), (*words).qwen3},
	"gemma":   {"gemma", "Gemma", normsPlusOne(inLayer(nil)), (*words).gemma},
	"gemma2":  {"gemma2", "Gemma2", normsPlusOne(inLayer(postNorms)), (*words).gemma2},
	"gemma3":  {"gemma3_text", "Gemma3", normsPlusOne(inLayer(with(headNorms, postNorms))), (*words).gemma3},
	"phi3":    {"phi3", "Phi3", inLayer(phi3), (*words).phi3},
	"olmo2":   {"olmo2", "Olmo2", inLayer(with(with(headNorms, postNorms), map[string]renamed{"attn_norm": {}, "ffn_norm": {}})), (*words).olmo2},
	"granite": {"granite", "Granite", permuted, (*words).granite},

	latentArchitecture: {"minicpm3", "MiniCPM3", inLayer(latent), (*words).minicpm3},
}

// latentArchitecture has multi-head latent attention.
const latentArchitecture = "minicpm3"

// latent has matrices that make queries, keys and values from vectors of a low rank.
var latent = map[string]renamed{
	"attn_q": {}, "attn_k": {}, "attn_v": {},
	"attn_q_a": {"self_attn.q_a_proj", asIs}, "attn_q_a_norm": {"self_attn.q_a_layernorm", asIs}, "attn_q_b": {"self_attn.q_b_proj", asIs},
	"attn_kv_a_mqa": {"self_attn.kv_a_proj_with_mqa", asIs}, "attn_kv_a_norm": {"self_attn.kv_a_layernorm", asIs}, "attn_kv_b": {"self_attn.kv_b_proj", asIs},
}

// phi3 has one matrix for queries, keys and values, and one for the gate and up projections. The Hugging Face models
// have the same matrices.
var phi3 = map[string]renamed{
	"attn_qkv": {"self_attn.qkv_proj", asIs}, "attn_q": {}, "attn_k": {}, "attn_v": {},
	"ffn_up": {"mlp.gate_up_proj", asIs}, "ffn_gate": {},
}

// rename returns the name of a tensor in Hugging Face models, and the change to undo. It returns false if the family
// has no such tensor.
func (f *family) rename(tensor string) (string, undo, bool) {
	table, prefix, name := globals, "", tensor
	if rest, ok := strings.CutPrefix(tensor, "blk."); ok {
		number, rest, ok := strings.Cut(rest, ".")
		layer, err := strconv.Atoi(number)
		if !ok || err != nil || layer < 0 || strconv.Itoa(layer) != number {
			return "", asIs, false
		}
		table, prefix, name = f.layer, fmt.Sprintf("model.layers.%d.", layer), rest
	}
	base, kind, ok := strings.Cut(name, ".")
	w := table[base]
	if !ok || w.name == "" || kind != "weight" && (kind != "bias" || prefix == "" || strings.HasSuffix(base, "_norm")) {
		return "", asIs, false
	}
	// The converter changes the final norm like the norms of the layers.
	if base == "output_norm" && f.layer["attn_norm"].undo == plusOne {
		w.undo = plusOne
	}
	return prefix + w.name + "." + kind, w.undo, true
}

// Weights returns the tensors of a language model by their names in Hugging Face models. The rows and values are those
// of the Hugging Face model, too.
//
// Tensors that are fields of config.json in Hugging Face models are left out: Config reads them. ErrUnsupported is
// returned for a tensor that the architecture does not have.
func (f *File) Weights() (map[string]*Tensor, error) {
	w, err := f.words()
	if err != nil {
		return nil, err
	}
	heads, kvHeads := w.heads()
	if w.err != nil {
		return nil, w.err
	}
	weights := make(map[string]*Tensor, len(f.tensors))
	for _, t := range f.tensors {
		if factors[t.name] {
			continue
		}
		name, undo, ok := w.family.rename(t.name)
		if !ok {
			return nil, fail(ErrUnsupported, t.file, "tensor %s is none of architecture %q", quote(t.name), w.architecture)
		}
		switch undo {
		case pairs:
			t, err = t.halves(heads)
		case pairsKV:
			t, err = t.halves(kvHeads)
		case plusOne:
			t, err = t.plus(-1)
		}
		if err != nil {
			return nil, err
		}
		weights[name] = t
	}
	return weights, nil
}

// halves returns t with the rows of each head permuted. Row i of the first half of a head is row 2*i of the head in t,
// and row i of the second half is row 2*i+1. The elements of a vector count as rows.
func (t *Tensor) halves(heads int) (*Tensor, error) {
	v := *t
	if len(t.shape) == 1 {
		if t.layout.elements != 1 {
			return nil, fail(ErrUnsupported, t.file, "tensor %s is a vector of type %v, whose elements are permuted", quote(t.name), t.typ)
		}
		v.rows, v.columns = t.columns, 1
	}
	if heads > v.rows/2 || v.rows%(2*heads) != 0 {
		return nil, fail(ErrFormat, t.file, "tensor %s has %d rows, which are not %d heads of an even number", quote(t.name), v.rows, heads)
	}
	size := v.rows / heads
	v.source = func(row int) int {
		head, i := row/size, row%size
		return head*size + i%(size/2)*2 + i/(size/2)
	}
	return &v, nil
}

// plus returns t with x added to each element.
func (t *Tensor) plus(x float32) (*Tensor, error) {
	v := *t
	v.add = x
	return &v, nil
}
