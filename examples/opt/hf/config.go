package hf

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"math"
	"slices"

	"gorgonia.org/leanattention/examples/opt/files"
)

// Config is the part of config.json that an OPT decoder needs. It covers every
// published size: those that normalise before attention and feed-forward
// (pre-LN), and OPT-350m, which normalises after them (post-LN) and whose
// embeddings are narrower than its layers.
//
// What config.json leaves out has the value that transformers' OPTConfig gives
// it.
type Config struct {
	ModelType string // "opt"

	VocabSize        int // V: rows of the token embedding, and logits a position
	HiddenSize       int // D: width of the layers, a multiple of Heads
	WordEmbedProjDim int // E: width of the token embedding; D but for OPT-350m
	FFNDim           int // F: width inside the feed-forward network
	Layers           int
	Heads            int
	MaxPositions     int // longest sequence; the position table has PositionOffset rows more

	DoLayerNormBefore          bool // pre-LN; false is OPT-350m's post-LN
	RemoveFinalLayerNorm       bool // a pre-LN decoder without decoder.final_layer_norm
	EnableBias                 bool // biases in the attention and feed-forward projections
	LayerNormElementwiseAffine bool // weights and biases in the layer norms
	TieWordEmbeddings          bool // the head is the token embedding

	Activation string // of the feed-forward network: "relu", or "gelu", the exact one by erf

	BOS, EOS, Pad int // token ids; -1 where config.json says null
}

// PositionOffset is the row of decoder.embed_positions.weight that belongs to
// position 0 of a sequence.
const PositionOffset = 2

// HeadDim returns D / Heads.
func (c Config) HeadDim() int { return c.HiddenSize / c.Heads }

// HasProjections reports whether the token embedding is narrower (or wider)
// than the layers, so that decoder.project_in and decoder.project_out exist.
func (c Config) HasProjections() bool { return c.WordEmbedProjDim != c.HiddenSize }

// HasFinalLayerNorm reports whether decoder.final_layer_norm exists.
func (c Config) HasFinalLayerNorm() bool { return c.DoLayerNormBefore && !c.RemoveFinalLayerNorm }

// Weight is the name and shape of one of a decoder's weights.
type Weight struct {
	Name  string
	Shape []int
}

// Weights yields every weight that a decoder of this configuration has, the
// head included where it is not tied. Matrices of projections are (out, in).
func (c Config) Weights() iter.Seq[Weight] {
	return func(yield func(Weight) bool) {
		more := true
		weight := func(name string, shape ...int) {
			if more {
				more = yield(Weight{name, shape})
			}
		}
		linear := func(name string, out, in int, bias bool) {
			weight(name+".weight", out, in)
			if bias {
				weight(name+".bias", out)
			}
		}
		norm := func(name string) {
			if c.LayerNormElementwiseAffine {
				weight(name+".weight", c.HiddenSize)
				weight(name+".bias", c.HiddenSize)
			}
		}
		weight("decoder.embed_tokens.weight", c.VocabSize, c.WordEmbedProjDim)
		weight("decoder.embed_positions.weight", c.MaxPositions+PositionOffset, c.HiddenSize)
		if c.HasProjections() {
			linear("decoder.project_in", c.HiddenSize, c.WordEmbedProjDim, false)
			linear("decoder.project_out", c.WordEmbedProjDim, c.HiddenSize, false)
		}
		for i := 0; i < c.Layers && more; i++ {
			layer := fmt.Sprintf("decoder.layers.%d.", i)
			for _, p := range []string{"q_proj", "k_proj", "v_proj", "out_proj"} {
				linear(layer+"self_attn."+p, c.HiddenSize, c.HiddenSize, c.EnableBias)
			}
			norm(layer + "self_attn_layer_norm")
			linear(layer+"fc1", c.FFNDim, c.HiddenSize, c.EnableBias)
			linear(layer+"fc2", c.HiddenSize, c.FFNDim, c.EnableBias)
			norm(layer + "final_layer_norm")
		}
		if c.HasFinalLayerNorm() {
			norm("decoder.final_layer_norm")
		}
		if !c.TieWordEmbeddings {
			weight("lm_head.weight", c.VocabSize, c.WordEmbedProjDim)
		}
	}
}

// activations are the values of activation_function that models can be run with.
// transformers knows others ("gelu_new", "gelu_fast", "silu" ...); models trained as
// OPT, and those of its architecture, have these.
var activations = [...]string{"relu", "gelu"}

// parseConfig reads config.json. file is its name for errors.
func parseConfig(file string, data []byte) (Config, error) {
	p, err := newParser(file, data)
	if err != nil {
		return Config{}, err
	}
	c := Config{
		ModelType:                  p.str("model_type", "opt"),
		VocabSize:                  p.size("vocab_size", 50272),
		HiddenSize:                 p.size("hidden_size", 768),
		FFNDim:                     p.size("ffn_dim", 3072),
		Layers:                     p.size("num_hidden_layers", 12),
		Heads:                      p.size("num_attention_heads", 12),
		MaxPositions:               p.size("max_position_embeddings", 2048),
		DoLayerNormBefore:          p.flag("do_layer_norm_before", true),
		RemoveFinalLayerNorm:       p.flag("_remove_final_layer_norm", false),
		EnableBias:                 p.flag("enable_bias", true),
		LayerNormElementwiseAffine: p.flag("layer_norm_elementwise_affine", true),
		TieWordEmbeddings:          p.flag("tie_word_embeddings", true),
		Activation:                 p.str("activation_function", "relu"),
	}
	c.WordEmbedProjDim = c.HiddenSize
	if !p.null("word_embed_proj_dim") {
		c.WordEmbedProjDim = p.size("word_embed_proj_dim", c.HiddenSize)
	}
	c.BOS = p.token("bos_token_id", 2, c.VocabSize)
	c.EOS = p.token("eos_token_id", 2, c.VocabSize)
	c.Pad = p.token("pad_token_id", 1, c.VocabSize)

	switch {
	// The model's type first: of another model's file every other complaint
	// would be beside the point.
	case p.err != nil && c.ModelType == "opt":
		return Config{}, p.err
	case c.ModelType != "opt":
		return Config{}, fail(ErrUnsupported, file, "model_type %s is not \"opt\"", quote(c.ModelType))
	case !slices.Contains(activations[:], c.Activation):
		return Config{}, fail(ErrUnsupported, file, "activation_function %s is none of %q", quote(c.Activation), activations)
	case c.HiddenSize%c.Heads != 0:
		return Config{}, fail(ErrFormat, file, "hidden_size %d is not a multiple of num_attention_heads %d", c.HiddenSize, c.Heads)
	case !p.null("quantization_config"):
		return Config{}, fail(ErrUnsupported, file, "the weights are quantized (quantization_config)")
	}
	return c, nil
}

// configParser reads fields one by one and keeps the first error.
type configParser struct {
	file   string
	fields map[string]json.RawMessage
	err    error
}

// objectLimits are those of config.json and its like, and of an index but for its
// weight_map.
var objectLimits = files.Limits{Values: 2 << 20, Depth: 64, Nulls: true}

// object reads a JSON object.
func object(file string, data []byte) (fields map[string]json.RawMessage, err error) {
	if err := cmp.Or(objectLimits.Check(data), json.Unmarshal(data, &fields)); err != nil || fields == nil {
		return nil, fail(ErrFormat, file, "not a JSON object: %v", cmp.Or(err, errors.New("null")))
	}
	return fields, nil
}

func newParser(file string, data []byte) (configParser, error) {
	fields, err := object(file, data)
	return configParser{file: file, fields: fields}, err
}

func (p *configParser) null(name string) bool {
	raw, ok := p.fields[name]
	return !ok || string(raw) == "null"
}

// decode reports whether the field is there and was read into dst. null is not
// a value of any field that comes here.
func (p *configParser) decode(name, kind string, dst any) bool {
	raw, ok := p.fields[name]
	if ok && (string(raw) == "null" || json.Unmarshal(raw, dst) != nil) {
		p.fail("%s is %s, not %s", name, quote(string(raw)), kind)
		return false
	}
	return ok
}

func (p *configParser) fail(format string, args ...any) {
	if p.err == nil {
		p.err = fail(ErrFormat, p.file, format, args...)
	}
}

func (p *configParser) str(name, missing string) string {
	var s string
	if p.decode(name, "a string", &s) {
		return s
	}
	return missing
}

func (p *configParser) flag(name string, missing bool) bool {
	var b bool
	if p.decode(name, "true or false", &b) {
		return b
	}
	return missing
}

// size is a positive integer. It stays below 2^31 so that sums and products of
// two sizes fit 64 bits.
func (p *configParser) size(name string, missing int) int {
	var n int64
	if !p.decode(name, "an integer", &n) {
		return missing
	}
	if n < 1 || n > math.MaxInt32-PositionOffset {
		p.fail("%s is %d, not in [1, %d]", name, n, math.MaxInt32-PositionOffset)
		return missing
	}
	return int(n)
}

// token is a token id below the size of the vocabulary, or null (-1), or a list
// whose first is meant.
func (p *configParser) token(name string, missing, vocab int) int {
	ids := p.tokens(name, vocab)
	switch {
	case ids == nil && p.fields[name] == nil:
		if missing >= vocab {
			p.fail("%s is %d, not in [0, %d) of the vocabulary", name, missing, vocab)
		}
		return missing
	case len(ids) == 0:
		return -1
	}
	return ids[0]
}

// tokens is a list of token ids below the size of the vocabulary, or one; nil if
// the field is not there or null.
func (p *configParser) tokens(name string, vocab int) []int {
	raw, ok := p.fields[name]
	if !ok || string(raw) == "null" {
		return nil
	}
	var ids []*int64
	if json.Unmarshal(raw, &ids) != nil {
		ids = make([]*int64, 1)
		if json.Unmarshal(raw, &ids[0]) != nil {
			p.fail("%s is %s, not a token id or a list of them", name, quote(string(raw)))
			return nil
		}
	}
	list := make([]int, 0, len(ids))
	for _, id := range ids {
		switch {
		case id == nil:
			p.fail("%s is %s, not a token id or a list of them", name, quote(string(raw)))
			return nil
		case *id < 0 || *id >= int64(vocab):
			p.fail("%s is %d, not in [0, %d) of the vocabulary", name, *id, vocab)
			return nil
		}
		list = append(list, int(*id))
	}
	return list
}
