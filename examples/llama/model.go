package llama

import (
	"fmt"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Config is the shape of a model, as its config.json has it.
type Config struct {
	Vocab   int // vocab_size
	Hidden  int // hidden_size
	Inner   int // intermediate_size
	Layers  int // num_hidden_layers
	Heads   int // num_attention_heads
	KVHeads int // num_key_value_heads

	Eps    float64         // rms_norm_eps
	Rotary la.RotaryConfig // head_dim (or Hidden/Heads), rope_theta and rope_scaling

	Bias   bool // queries, keys and values have biases, as in Qwen 2
	QKNorm bool // heads of queries and keys are normalised, as in Qwen 3
	Tied   bool // tie_word_embeddings
}

// Weights is the value of a parameter, by its name in a checkpoint of transformers: a
// *tensor.Dense of float32, Float16 or BFloat16 for a decoder on the CPU, and a [la.DeviceTensor]
// for one on a GPU. Norms and biases are of float32.
type Weights func(name string, shape ...int) (G.Value, error)

// builder makes the nodes of a graph, one on the other, until the first error.
type builder struct {
	c       Config
	weights Weights
	g       *G.ExprGraph
	step    *la.Step
	err     error
}

// logits builds the decoder: tokens and positions are vectors, and the result is (rows, Vocab).
func (b *builder) logits(tokens, positions *G.Node) (*G.Node, error) {
	embedding := b.weight("model.embed_tokens.weight", b.c.Vocab, b.c.Hidden)
	h := b.do(func() (*G.Node, error) { return nn.Embedding(embedding, tokens, nil) })
	for i := range b.c.Layers {
		h = b.layer(i, h, positions)
	}
	head := embedding
	if !b.c.Tied {
		head = b.weight("lm_head.weight", b.c.Vocab, b.c.Hidden)
	}
	norm := b.norm("model.norm")
	return b.do(func() (*G.Node, error) { return nn.Linear(h, head, nil, norm) }), b.err
}

func (b *builder) layer(i int, h, positions *G.Node) *G.Node {
	name := fmt.Sprintf("model.layers.%d.", i)
	a := b.attention(i, name+"self_attn.", b.norm(name+"input_layernorm"), h, positions)
	h = b.linear(a, name+"self_attn.o_proj", b.c.Hidden, b.c.Heads*b.c.Rotary.HeadDim, nn.WithResidual(h))

	gateUp := b.linears(h, false, b.norm(name+"post_attention_layernorm"),
		layer{name + "mlp.gate_proj", b.c.Inner}, layer{name + "mlp.up_proj", b.c.Inner})
	x := b.do(func() (*G.Node, error) { return nn.GLU(gateUp[0], gateUp[1], nn.SwiGLU) })
	return b.linear(x, name+"mlp.down_proj", b.c.Hidden, b.c.Inner, nn.WithResidual(h))
}

// attention is that of the norm of h to what the cache has of the layer.
func (b *builder) attention(i int, name string, norm nn.LinearOption, h, positions *G.Node) *G.Node {
	d := b.c.Rotary.HeadDim
	qkv := b.linears(h, b.c.Bias, norm,
		layer{name + "q_proj", b.c.Heads * d}, layer{name + "k_proj", b.c.KVHeads * d}, layer{name + "v_proj", b.c.KVHeads * d})
	for j, norm := range []string{"q_norm", "k_norm"} {
		if b.c.QKNorm {
			gamma := b.weight(name+norm+".weight", d)
			qkv[j] = b.do(func() (*G.Node, error) { return nn.QKNorm(qkv[j], gamma, b.c.Eps) })
		}
		qkv[j] = b.do(func() (*G.Node, error) { return nn.Rotary(qkv[j], positions, b.c.Rotary) })
	}
	return b.do(func() (*G.Node, error) {
		return la.CachedAttention(qkv[0], qkv[1], qkv[2], b.step.Layer(i), la.WithCausal())
	})
}

// do adds nodes unless there was an error.
func (b *builder) do(f func() (*G.Node, error)) *G.Node {
	if b.err != nil {
		return nil
	}
	n, err := f()
	b.err = err
	return n
}

func (b *builder) weight(name string, shape ...int) *G.Node {
	return b.do(func() (*G.Node, error) {
		v, err := b.weights(name, shape...)
		if err != nil {
			return nil, fmt.Errorf("llama: weight %s: %w", name, err)
		}
		return input(b.g, name, v), nil
	})
}

// input makes an input node of a name of its own that holds v.
func input(g *G.ExprGraph, name string, v interface {
	G.Value
	Dtype() tensor.Dtype
}) *G.Node {
	return G.NewTensor(g, v.Dtype(), len(v.Shape()), G.WithShape(v.Shape()...), G.WithName(name), G.WithValue(v))
}

// norm has a layer read the norm of its input.
func (b *builder) norm(name string) nn.LinearOption {
	return nn.WithRMSNorm(b.weight(name+".weight", b.c.Hidden), b.c.Eps)
}

func (b *builder) linear(x *G.Node, name string, out, in int, opts ...nn.LinearOption) *G.Node {
	w := b.weight(name+".weight", out, in)
	return b.do(func() (*G.Node, error) { return nn.Linear(x, w, nil, opts...) })
}

type layer struct {
	name string
	out  int
}

// linears is layers of h, as one node and a node for each output: on a GPU they are one launch.
func (b *builder) linears(h *G.Node, bias bool, norm nn.LinearOption, layers ...layer) []*G.Node {
	ys := make([]*G.Node, len(layers))
	var ws, bs []*G.Node
	for _, l := range layers {
		ws = append(ws, b.weight(l.name+".weight", l.out, b.c.Hidden))
		if bias {
			bs = append(bs, b.weight(l.name+".bias", l.out))
		}
	}
	b.do(func() (*G.Node, error) {
		all, err := nn.Linears(h, ws, bs, norm)
		copy(ys, all)
		return nil, err
	})
	return ys
}
