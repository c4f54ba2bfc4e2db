package e2e

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	lean "gorgonia.org/leanattention/decoder"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// shape is the shape of a model that is measured with random weights: its name in tables, and the fields of its config.json
// in transformers' format.
type shape struct {
	name   string
	fields map[string]any
}

func (s shape) String() string { return s.name }

// json returns the config.json.
func (s shape) json() []byte {
	data, err := json.Marshal(s.fields)
	if err != nil {
		panic(err) // of strings and numbers
	}
	return data
}

// network returns the network of package decoder.
func (s shape) network() (lean.Network, error) { return lean.ReadNetwork(s.json(), 0) }

// bytes returns the size of the weights that a step reads, with matrices in element type t, and the size of a token's keys
// and values. A step reads a negligible part of the table of positions, and of the token embedding unless the head is the
// same matrix.
func (s shape) bytes(t measure.Storage) (weights, token int64) {
	n, err := s.network()
	if err != nil {
		panic(err) // a test covers all shapes
	}
	for w := range n.Weights() {
		size := t.Size
		switch {
		case len(w.Shape) == 1:
			size = 4
		case strings.Contains(w.Name, "embed_"):
			continue
		}
		weights += int64(elements(w.Shape) * size)
	}
	sizes := n.Sizes()
	return weights, int64(2 * sizes.Layers * sizes.KVHeads * sizes.HeadDim * t.Size)
}

// withPositions returns the shape for texts of at least the given number of tokens.
func (s shape) withPositions(n int) shape {
	s.fields = maps.Clone(s.fields)
	s.fields["max_position_embeddings"] = max(s.fields["max_position_embeddings"].(int), n)
	return s
}

// positions returns the most tokens of a text.
func (s shape) positions() int { return s.fields["max_position_embeddings"].(int) }

// shapeNamed returns the shape with a name from -shapes, for texts of at least the given number of tokens.
func shapeNamed(name string, positions int) (shape, error) {
	for _, shapes := range []map[string]shape{optShapes, llamaShapes} {
		if s, ok := shapes[name]; ok {
			return s.withPositions(positions), nil
		}
	}
	return shape{}, fmt.Errorf("-shapes: %q is none of %s", name, strings.Join(shapeNames(), ", "))
}

func shapeNames() []string {
	return slices.Concat(slices.Sorted(maps.Keys(optShapes)), slices.Sorted(maps.Keys(llamaShapes)))
}

// makeTheirs makes a worker create a model of a shape with random weights. dtype is a type of PyTorch.
func makeTheirs(w *measure.Worker, s shape, dtype string) error {
	_, err := w.Ask("model %s %s", dtype, s.json())
	return err
}

// optShapes are the published sizes of OPT.
var optShapes = map[string]shape{
	"125m": newOPT("125m", 12, 768, 12),
	"350m": func() shape {
		s := newOPT("350m", 24, 1024, 16)
		s.fields["word_embed_proj_dim"], s.fields["do_layer_norm_before"] = 512, false
		return s
	}(),
	"1.3b": newOPT("1.3b", 24, 2048, 32),
	"2.7b": newOPT("2.7b", 32, 2560, 32),
	"6.7b": newOPT("6.7b", 32, 4096, 32),
}

func newOPT(name string, layers, hidden, heads int) shape {
	return shape{"OPT-" + name, map[string]any{
		"model_type": "opt", "architectures": []string{"OPTForCausalLM"}, "activation_function": "relu",
		"vocab_size": 50272, "hidden_size": hidden, "word_embed_proj_dim": hidden, "ffn_dim": 4 * hidden,
		"num_hidden_layers": layers, "num_attention_heads": heads, "max_position_embeddings": 2048,
		"do_layer_norm_before": true, "_remove_final_layer_norm": false, "enable_bias": true, "layer_norm_elementwise_affine": true, "tie_word_embeddings": true,
		"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
		"dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0, "init_std": weightScale, "dtype": "float16",
	}}
}

// llamaShapes are models of Meta and Microsoft's Phi-3-medium. Phi-3-medium has Llama's graph. Its fused
// matrices are measured as Llama's separate matrices.
var llamaShapes = map[string]shape{
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

func newLlama(name string, s llamaSizes, rope map[string]any) shape {
	s.heads, s.kvHeads, s.vocab = cmp.Or(s.heads, 32), cmp.Or(s.kvHeads, 8), cmp.Or(s.vocab, 128256)
	return shape{name, map[string]any{
		"architectures": []string{"LlamaForCausalLM"}, "model_type": "llama", "hidden_act": "silu", "vocab_size": s.vocab,
		"hidden_size": s.hidden, "intermediate_size": s.inner, "num_hidden_layers": s.layers,
		"num_attention_heads": s.heads, "num_key_value_heads": s.kvHeads, "head_dim": s.headDim,
		"rms_norm_eps": 1e-5, "tie_word_embeddings": s.tied, "rope_parameters": rope, "max_position_embeddings": 131072,
		"attention_bias": false, "mlp_bias": false, "bos_token_id": 1, "eos_token_id": 2,
	}}
}
