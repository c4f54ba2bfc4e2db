package llama

import (
	"fmt"
	"math"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Weights returns the value of a parameter by its name in a checkpoint of transformers: a *tensor.Dense of float32,
// Float16 or BFloat16 for a decoder on the CPU, and a [device.Tensor] for one on a GPU. Norms and biases are of
// float32.
type Weights func(name string, shape ...int) (G.Value, error)

// builder adds the nodes of a graph until the first error.
type builder struct {
	c        Config
	weights  Weights
	g        *G.ExprGraph
	step     *la.Step
	mixed    bool
	schedule la.Schedule
	err      error
}

// logits builds the decoder: tokens is a vector, and the result is (rows, Vocab), without a soft cap.
func (b *builder) logits(tokens *G.Node) (*G.Node, error) {
	embedding := b.weight("model.embed_tokens.weight", b.c.Vocab, b.c.Hidden)
	h := b.do(func() (*G.Node, error) { return nn.Embedding(embedding, tokens, nil) })
	if b.c.ScaleEmbedding {
		h = b.do(func() (*G.Node, error) { return nn.Scale(h, math.Sqrt(float64(b.c.Hidden))) })
	}
	for i := range b.c.Layers {
		h = b.layer(i, h)
	}
	head := embedding
	if !b.c.Tied {
		head = b.weight("lm_head.weight", b.c.Vocab, b.c.Hidden)
	}
	norm := b.norm("model.norm")
	return b.do(func() (*G.Node, error) { return nn.Linear(h, head, nil, b.options(norm)...) }), b.err
}

func (b *builder) layer(i int, h *G.Node) *G.Node {
	name := fmt.Sprintf("model.layers.%d.", i)
	before, after := "post_attention_layernorm", "" // norms of the gated layers
	if b.c.PostNorms {
		before, after = "pre_feedforward_layernorm", "post_feedforward_layernorm"
	}
	a := b.attention(i, name+"self_attn.", b.norm(name+"input_layernorm"), h)
	h = b.add(h, a, name+"self_attn.o_proj", b.c.Heads*b.c.Rotary.HeadDim, name+"post_attention_layernorm")

	x := b.gated(h, b.norm(name+before), layer{name + "mlp.gate_proj", b.c.Inner}, layer{name + "mlp.up_proj", b.c.Inner})
	return b.add(h, x, name+"mlp.down_proj", b.c.Inner, name+after)
}

// add returns h plus a projection of x. Models with such norms normalise the projection first.
func (b *builder) add(h, x *G.Node, projection string, in int, norm string) *G.Node {
	if !b.c.PostNorms {
		return b.linear(x, projection, b.c.Hidden, in, nn.WithResidual(h))
	}
	y := b.linear(x, projection, b.c.Hidden, in)
	gamma := b.weight(norm+".weight", b.c.Hidden)
	return b.do(func() (*G.Node, error) { return nn.RMSNorm(y, gamma, h, b.c.Eps, b.normOptions()...) })
}

// attention returns the attention of the norm of h to the layer's keys and values in the cache.
func (b *builder) attention(i int, name string, norm nn.Option, h *G.Node) *G.Node {
	d := b.c.Rotary.HeadDim
	qkv := b.linears(h, b.c.Bias, norm,
		layer{name + "q_proj", b.c.Heads * d}, layer{name + "k_proj", b.c.KVHeads * d}, layer{name + "v_proj", b.c.KVHeads * d})
	if b.c.QKNorm {
		for j, norm := range []string{"q_norm", "k_norm"} {
			gamma := b.weight(name+norm+".weight", d)
			qkv[j] = b.do(func() (*G.Node, error) { return nn.QKNorm(qkv[j], gamma, b.c.Eps) })
		}
	}
	opts := b.attentionOptions(i, name)
	return b.do(func() (*G.Node, error) {
		return la.CachedAttention(qkv[0], qkv[1], qkv[2], b.step.Layer(i), opts...)
	})
}

// attentionOptions returns the options of a layer's keys and scores. Further score modifications belong here, too.
func (b *builder) attentionOptions(i int, name string) []la.Option {
	opts := []la.Option{la.WithCausal(), la.WithRotary(b.c.Rotary), la.WithSchedule(b.schedule)}
	if b.c.Windows != nil && b.c.Windows[i] > 0 {
		opts = append(opts, la.WithWindow(b.c.Windows[i]))
	}
	if b.c.QueryScalar > 0 {
		opts = append(opts, la.WithScale(1/math.Sqrt(b.c.QueryScalar)))
	}
	if b.c.ScoreCap > 0 {
		opts = append(opts, la.WithSoftCap(b.c.ScoreCap))
	}
	if b.c.Sinks {
		opts = append(opts, la.WithSinks(b.weight(name+"sinks", b.c.Heads)))
	}
	if b.mixed {
		opts = append(opts, la.WithMixedPrecision())
	}
	return opts
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

// input makes an input node with its own name and the value v.
func input(g *G.ExprGraph, name string, v interface {
	G.Value
	Dtype() tensor.Dtype
}) *G.Node {
	return G.NewTensor(g, v.Dtype(), len(v.Shape()), G.WithShape(v.Shape()...), G.WithName(name), G.WithValue(v))
}

// norm returns the option of a layer that reads the norm of its input.
func (b *builder) norm(name string) nn.Option {
	return nn.WithRMSNorm(b.weight(name+".weight", b.c.Hidden), b.c.Eps, b.normOptions()...)
}

func (b *builder) normOptions() []nn.Option {
	if b.c.UnitOffset {
		return []nn.Option{nn.WithUnitOffset()}
	}
	return nil
}

// options returns the options of a linear layer.
func (b *builder) options(opts ...nn.Option) []nn.Option {
	if b.mixed {
		opts = append(opts, nn.WithMixedPrecision())
	}
	return opts
}

func (b *builder) linear(x *G.Node, name string, out, in int, opts ...nn.Option) *G.Node {
	w := b.weight(name+".weight", out, in)
	return b.do(func() (*G.Node, error) { return nn.Linear(x, w, nil, b.options(opts...)...) })
}

type layer struct {
	name string
	out  int
}

// gated returns a gated unit of h.
func (b *builder) gated(h *G.Node, norm nn.Option, gate, up layer) *G.Node {
	ws := []*G.Node{b.weight(gate.name+".weight", gate.out, b.c.Hidden), b.weight(up.name+".weight", up.out, b.c.Hidden)}
	return b.do(func() (*G.Node, error) { return nn.GatedLinear(h, ws, nil, b.c.Gate, b.options(norm)...) })
}

// linears returns layers of h, as one node and a node for each output: on a GPU they are one launch.
func (b *builder) linears(h *G.Node, bias bool, norm nn.Option, layers ...layer) []*G.Node {
	ys := make([]*G.Node, len(layers))
	var ws, bs []*G.Node
	for _, l := range layers {
		ws = append(ws, b.weight(l.name+".weight", l.out, b.c.Hidden))
		if bias {
			bs = append(bs, b.weight(l.name+".bias", l.out))
		}
	}
	b.do(func() (*G.Node, error) {
		all, err := nn.Linears(h, ws, bs, b.options(norm)...)
		copy(ys, all)
		return nil, err
	})
	return ys
}
