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
	logits G.Value // (selected or all rows, vocabulary), after a run
}

// builder makes the nodes of a graph, one on the other, until the first error.
type builder struct {
	w     *Weights
	g     *G.ExprGraph
	stock bool // linear layers are Gorgonia's own nodes
	err   error
}

// attend makes a layer's attention node: q, k, v and the result are (rows, D),
// and q is not scaled yet. After an error the nodes are nil.
type attend func(b *builder, layer int, q, k, v *G.Node) *G.Node

// newGraph builds the decoder for a number of rows, with logits for a number of
// selected rows (0: for all). Weights keep their names in every graph, and
// inputs are named, since Gorgonia merges nameless ones of equal shape.
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

	h := b.rows(embedding, tokens)
	if c.HasProjections() {
		h = b.linear(h, "decoder.project_in")
	}
	h = b.add(h, b.rows(b.weight("decoder.embed_positions.weight"), positions))
	for i := range c.Layers {
		h = b.layer(h, i, attention)
	}
	if selected > 0 {
		var index *G.Node
		index, gr.selected = b.indices("selected", selected)
		h = b.rows(h, index)
	}
	if c.HasFinalLayerNorm() {
		h = b.norm(h, "decoder.final_layer_norm")
	}
	if c.HasProjections() {
		h = b.linear(h, "decoder.project_out")
	}
	head := embedding
	if !c.TieWordEmbeddings {
		head = b.weight("lm_head.weight")
	}
	logits := b.multiply(h, head)

	if b.err != nil {
		return nil, b.err
	}
	if err := la.CheckGraph(b.g); err != nil {
		return nil, err
	}
	G.Read(logits, &gr.logits)
	gr.vm = G.NewTapeMachine(b.g)
	return gr, nil
}

// run computes the logits of the rows that the inputs describe. Its caller
// resets the machine when it has read what it needs.
func (gr *graph) run() ([]float32, error) {
	if err := gr.vm.RunAll(); err != nil {
		return nil, err
	}
	logits, ok := gr.logits.Data().([]float32)
	if !ok {
		return nil, fmt.Errorf("model: logits are %T", gr.logits.Data())
	}
	return logits, nil
}

func (b *builder) layer(h *G.Node, i int, attention attend) *G.Node {
	name := fmt.Sprintf("decoder.layers.%d.", i)
	before := b.w.config.DoLayerNormBefore
	branch := func(h *G.Node, norm string, f func(x *G.Node) *G.Node) *G.Node {
		if before {
			return b.add(h, f(b.norm(h, norm)))
		}
		return b.norm(b.add(h, f(h)), norm)
	}
	h = branch(h, name+"self_attn_layer_norm", func(x *G.Node) *G.Node {
		q := b.linear(x, name+"self_attn.q_proj")
		k := b.linear(x, name+"self_attn.k_proj")
		v := b.linear(x, name+"self_attn.v_proj")
		return b.linear(attention(b, i, q, k, v), name+"self_attn.out_proj")
	})
	return branch(h, name+"final_layer_norm", func(x *G.Node) *G.Node {
		x = b.linear(x, name+"fc1", nn.WithReLU())
		return b.linear(x, name+"fc2")
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

// rows gathers rows of a table. (Gorgonia's ByIndices is right on axis 0.)
func (b *builder) rows(table, index *G.Node) *G.Node {
	return b.do(func() (*G.Node, error) { return G.ByIndices(table, index, 0) })
}

func (b *builder) add(x, y *G.Node) *G.Node {
	return b.do(func() (*G.Node, error) { return G.Add(x, y) })
}

// multiply is x wᵀ for w of shape (out, in), as checkpoints store it.
func (b *builder) multiply(x, w *G.Node) *G.Node {
	if b.stock {
		// With BatchedMatMul w is read in place, where Mul by a transposed w copies it.
		return b.do(func() (*G.Node, error) { return G.BatchedMatMul(x, w, false, true) })
	}
	return b.do(func() (*G.Node, error) { return nn.Linear(x, w, nil) })
}

// linear is x wᵀ + bias, where the bias is there, and with nn.WithReLU the
// positive part of it.
func (b *builder) linear(x *G.Node, name string, relu ...nn.LinearOption) *G.Node {
	w := b.weight(name + ".weight")
	t, biased := b.w.tensors[name+".bias"]
	if !b.stock {
		var bias *G.Node
		if biased {
			bias = b.weight(name + ".bias")
		}
		return b.do(func() (*G.Node, error) { return nn.Linear(x, w, bias, relu...) })
	}
	y := b.multiply(x, w)
	if biased && b.err == nil {
		// The same memory as a matrix of one row, to be repeated for each row of y.
		bias := b.input(name+".bias", tensor.New(tensor.WithShape(1, t.Shape()[0]), tensor.WithBacking(t.Data())))
		if y.Shape()[0] == 1 {
			y = b.add(y, bias)
		} else {
			sum := y
			y = b.do(func() (*G.Node, error) { return G.BroadcastAdd(sum, bias, nil, []byte{0}) })
		}
	}
	if len(relu) > 0 {
		sum := y
		y = b.do(func() (*G.Node, error) { return G.Rectify(sum) })
	}
	return y
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
