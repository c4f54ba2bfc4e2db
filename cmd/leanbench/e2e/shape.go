package e2e

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"gorgonia.org/leanattention/examples/llama"
	"gorgonia.org/leanattention/examples/opt/hf"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// shape is the shape of a model that is measured with random weights.
type shape interface {
	fmt.Stringer // the name in tables
	// json returns the config.json of the model in transformers' format.
	json() map[string]any
	// open returns leanattention's decoder. chunk is the number of rows of the graph for prompts. 0 selects
	// the decoder's default.
	open(chunk int) (decoder, error)
	// bytes returns the size of the weights that a step reads, with matrices in element type s, and the size
	// of a token's keys and values.
	bytes(s measure.Storage) (weights, token int64)
}

// shapeNamed returns the shape with a name from -shapes. The model has positions for the given number of
// tokens.
func shapeNamed(name string, positions int) (shape, error) {
	if s, ok := llamaShapes[name]; ok {
		return s, nil // positions have no weights
	}
	c, ok := optShapes[name]
	if !ok {
		return nil, fmt.Errorf("-shapes: %q is none of %s", name, strings.Join(shapeNames(), ", "))
	}
	c.MaxPositions = max(c.MaxPositions, positions)
	return optModel{"OPT-" + name, c}, nil
}

func shapeNames() []string {
	return slices.Concat(slices.Sorted(maps.Keys(optShapes)), slices.Sorted(maps.Keys(llamaShapes)))
}

// makeTheirs makes a worker create a model of a shape with random weights. dtype is a type of PyTorch.
func makeTheirs(w *measure.Worker, s shape, dtype string) error {
	config, err := json.Marshal(s.json())
	if err != nil {
		return err
	}
	_, err = w.Ask("model %s %s", dtype, config)
	return err
}

// optModel is an OPT model.
type optModel struct {
	name   string
	config hf.Config
}

func (m optModel) String() string                  { return m.name }
func (m optModel) json() map[string]any            { return configJSON(m.config, measure.StoreF16) }
func (m optModel) open(chunk int) (decoder, error) { return openOPT(m.config, chunk) }

func (m optModel) bytes(s measure.Storage) (weights, token int64) {
	rest := m.config
	rest.MaxPositions = -hf.PositionOffset // a step reads a negligible part of the position table
	return weightBytes(rest, s), int64(2 * m.config.Layers * m.config.HiddenSize * s.Size)
}

// llamaModel is a model of Llama's architecture.
type llamaModel struct {
	name   string
	fields map[string]any
	config llama.Config
}

// llamaShapes are models of Meta and Microsoft's Phi-3-medium. Phi-3-medium has Llama's graph. Its fused
// matrices are measured as Llama's separate matrices.
var llamaShapes = map[string]llamaModel{
	"llama-3.2-1b": newLlama("Llama-3.2-1B", llamaSizes{layers: 16, hidden: 2048, inner: 8192, headDim: 64, tied: true}, map[string]any{
		"rope_type": "llama3", "rope_theta": 5e5, "factor": 32, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192,
	}),
	"llama-3-8b": newLlama("Llama-3-8B", llamaSizes{layers: 32, hidden: 4096, inner: 14336, headDim: 128}, map[string]any{"rope_type": "default", "rope_theta": 5e5}),
	phiShape:     newLlama("Phi-3-medium", llamaSizes{layers: 40, hidden: 5120, inner: 17920, headDim: 128, heads: 40, kvHeads: 10, vocab: 32064}, map[string]any{"rope_type": "default", "rope_theta": 1e4}),
}

const phiShape = "phi-3-medium"

// llamaSizes are the sizes of a model. 0 selects the value that all Llama 3 models share.
type llamaSizes struct {
	layers, hidden, inner, headDim int
	heads, kvHeads, vocab          int
	tied                           bool
}

func newLlama(name string, s llamaSizes, rope map[string]any) llamaModel {
	s.heads, s.kvHeads, s.vocab = cmp.Or(s.heads, 32), cmp.Or(s.kvHeads, 8), cmp.Or(s.vocab, 128256)
	m := llamaModel{name: name, fields: map[string]any{
		"architectures": []string{"LlamaForCausalLM"}, "model_type": "llama", "hidden_act": "silu", "vocab_size": s.vocab,
		"hidden_size": s.hidden, "intermediate_size": s.inner, "num_hidden_layers": s.layers,
		"num_attention_heads": s.heads, "num_key_value_heads": s.kvHeads, "head_dim": s.headDim,
		"rms_norm_eps": 1e-5, "tie_word_embeddings": s.tied, "rope_parameters": rope, "max_position_embeddings": 131072,
		"attention_bias": false, "mlp_bias": false, "bos_token_id": 1, "eos_token_id": 2,
	}}
	data, err := json.Marshal(m.fields)
	if err == nil {
		m.config, err = llama.ReadConfig(data)
	}
	if err != nil {
		panic(err) // a test covers all shapes
	}
	return m
}

func (m llamaModel) String() string                  { return m.name }
func (m llamaModel) json() map[string]any            { return m.fields }
func (m llamaModel) open(chunk int) (decoder, error) { return openLlama(m.config, chunk) }

func (m llamaModel) bytes(s measure.Storage) (weights, token int64) {
	c := &m.config
	return llamaBytes(c, s.Size, false), int64(2 * c.Layers * c.KVHeads * c.Rotary.HeadDim * s.Size)
}
