package model

import (
	"errors"
	"fmt"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// layerNormEps is the same in all published sizes; config.json does not have it.
const layerNormEps = 1e-5

// graph is the decoder over a fixed number of token rows. Before a run its
// inputs are filled in place.
type graph struct {
	tokens    []int // of each row, the token's id
	positions []int // of each row, the row of the position table
	selected  []int // the rows whose logits are computed; nil: all rows

	vm     G.VM
	logits *G.Node // (selected or all rows, vocabulary)
}

// builder makes the nodes of a graph, one on the other, until the first error.
type builder struct {
	w     *Weights
	g     *G.ExprGraph
	stock bool // linear layers are Gorgonia's own nodes
	fuse  bool // the graph is to be rewritten
	err   error
}

// attend makes a layer's attention node: q, k, v and the result are (rows, D),
// and q is not scaled yet. After an error the nodes are nil.
type attend func(b *builder, layer int, q, k, v *G.Node) *G.Node

// newGraph builds the decoder for a number of rows, with logits for a number of
// selected rows (0: for all). Weights keep their names in every graph, and
// inputs are named, since Gorgonia merges nameless ones of equal shape. Sums
// with the residual are part of the node before them where there is one: every
// node costs some microseconds and an output of its own.
//
// Gorgonia tells nodes apart by hashes of 32 bits, so once in some thousand
// graphs of this size two of them are taken for one. That is found out here,
// and another name for the first input gives all nodes other hashes.
func (w *Weights) newGraph(rows, selected int, linear Linear, attention attend) (gr *graph, err error) {
	for _, tokens := range []string{"tokens", "tokens'", "tokens\""} {
		gr, err = w.buildGraph(tokens, rows, selected, linear, attention)
		if !errors.Is(err, la.ErrGraph) {
			return gr, err
		}
	}
	return nil, err
}

func (w *Weights) buildGraph(name string, rows, selected int, linear Linear, attention attend) (*graph, error) {
	b, c := &builder{w: w, g: G.NewGraph(), stock: linear == StockLinear}, w.config
	gr := &graph{}

	var tokens, positions *G.Node
	tokens, gr.tokens = b.indices(name, rows)
	positions, gr.positions = b.indices("positions", rows)
	embedding := b.weight("decoder.embed_tokens.weight")

	h := b.rows(b.weight("decoder.embed_positions.weight"), positions, nil)
	if c.HasProjections() {
		h = b.linear(b.rows(embedding, tokens, nil), "decoder.project_in", false, h)
	} else {
		h = b.rows(embedding, tokens, h)
	}
	for i := range c.Layers {
		h = b.layer(h, i, attention)
	}
	if selected > 0 {
		var index *G.Node
		index, gr.selected = b.indices("selected", selected)
		h = b.rows(h, index, nil)
	}
	if c.HasFinalLayerNorm() {
		h = b.norm(h, "decoder.final_layer_norm")
	}
	if c.HasProjections() {
		h = b.linear(h, "decoder.project_out", false, nil)
	}
	head := embedding
	if !c.TieWordEmbeddings {
		head = b.weight("lm_head.weight")
	}
	if b.stock {
		gr.logits = b.multiply(h, head)
	} else {
		gr.logits = b.do(func() (*G.Node, error) { return nn.Linear(h, head, nil) })
	}

	if b.err != nil {
		return nil, b.err
	}
	if err := la.CheckGraph(b.g); err != nil {
		return nil, err
	}
	g := b.g
	if b.fuse {
		var err error
		if g, gr.logits, err = b.fused(gr.logits); err != nil {
			return nil, err
		}
	}
	gr.vm = G.NewTapeMachine(g)
	return gr, nil
}

// run computes the logits of the rows that the inputs describe. They are new
// memory in each run. Its caller resets the machine afterwards.
func (gr *graph) run() ([]float32, error) {
	if err := gr.vm.RunAll(); err != nil {
		return nil, err
	}
	// Nothing is computed of the logits, so nothing has overwritten them, and
	// what G.Read would do is a copy.
	v := gr.logits.Value()
	logits, ok := v.Data().([]float32)
	if !ok {
		return nil, fmt.Errorf("model: logits are %T", v.Data())
	}
	return logits, nil
}

func (b *builder) layer(h *G.Node, i int, attention attend) *G.Node {
	name := fmt.Sprintf("decoder.layers.%d.", i)
	before := b.w.config.DoLayerNormBefore
	// branch is f of the norm of h or the norm of f; f adds its residual.
	branch := func(h *G.Node, norm string, f func(x, residual *G.Node) *G.Node) *G.Node {
		if before {
			return f(b.norm(h, norm), h)
		}
		return b.norm(f(h, h), norm)
	}
	h = branch(h, name+"self_attn_layer_norm", func(x, residual *G.Node) *G.Node {
		q := b.linear(x, name+"self_attn.q_proj", false, nil)
		k := b.linear(x, name+"self_attn.k_proj", false, nil)
		v := b.linear(x, name+"self_attn.v_proj", false, nil)
		return b.linear(attention(b, i, q, k, v), name+"self_attn.out_proj", false, residual)
	})
	return branch(h, name+"final_layer_norm", func(x, residual *G.Node) *G.Node {
		x = b.linear(x, name+"fc1", true, nil)
		return b.linear(x, name+"fc2", false, residual)
	})
}

// do adds nodes unless there was an error. Gorgonia's builders panic for some
// mistakes, so panics become errors too.
func (b *builder) do(f func() (*G.Node, error)) (n *G.Node) {
	if b.err != nil {
		return nil
	}
	defer func() {
		if r := recover(); r != nil && b.err == nil {
			n, b.err = nil, fmt.Errorf("model: building the graph: %v", r)
		}
	}()
	n, err := f()
	if b.err == nil {
		b.err = err
	}
	return n
}

// input makes an input node that holds t.
func (b *builder) input(name string, t *tensor.Dense) *G.Node {
	return b.do(func() (*G.Node, error) {
		s := t.Shape()
		return G.NewTensor(b.g, t.Dtype(), len(s), G.WithShape(s...), G.WithName(name), G.WithValue(t)), nil
	})
}

// indices makes an input of n ints and returns the memory behind it.
func (b *builder) indices(name string, n int) (*G.Node, []int) {
	data := make([]int, n)
	return b.input(name, tensor.New(tensor.WithShape(n), tensor.WithBacking(data))), data
}

func (b *builder) weight(name string) *G.Node {
	return b.do(func() (*G.Node, error) {
		t, ok := b.w.tensors[name]
		if !ok {
			return nil, fmt.Errorf("model: no weight %q", name)
		}
		return b.input(name, t), b.err
	})
}

// rows gathers rows of a table, and adds the residual if it is not nil.
func (b *builder) rows(table, index, residual *G.Node) *G.Node {
	return b.do(func() (*G.Node, error) { return nn.Embedding(table, index, residual) })
}

func (b *builder) add(x, y *G.Node) *G.Node {
	return b.do(func() (*G.Node, error) { return G.Add(x, y) })
}

// linear is x wᵀ + bias, where the bias is there, or the positive part of that
// under relu, and the residual if it is not nil.
func (b *builder) linear(x *G.Node, name string, relu bool, residual *G.Node) *G.Node {
	w := b.weight(name + ".weight")
	t, biased := b.w.tensors[name+".bias"]
	if b.stock {
		return b.stockLinear(x, w, name+".bias", t, relu, residual)
	}
	var bias *G.Node
	if biased {
		bias = b.weight(name + ".bias")
	}
	var options []nn.LinearOption
	if relu {
		options = append(options, nn.WithReLU())
	}
	if residual != nil {
		options = append(options, nn.WithResidual(residual))
	}
	return b.do(func() (*G.Node, error) { return nn.Linear(x, w, bias, options...) })
}

// norm is the layer norm, with or without its own weight and bias.
func (b *builder) norm(x *G.Node, name string) *G.Node {
	var gamma, beta *G.Node
	if b.w.config.LayerNormElementwiseAffine {
		gamma, beta = b.weight(name+".weight"), b.weight(name+".bias")
	}
	return b.do(func() (*G.Node, error) { return nn.LayerNorm(x, gamma, beta, layerNormEps) })
}

var _ Source = (*hf.Folder)(nil)
