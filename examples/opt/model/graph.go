package model

import (
	"errors"
	"fmt"

	"gorgonia.org/leanattention/rewrite"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/ranks"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// layerNormEps is the same in all published sizes; config.json lacks it.
const layerNormEps = 1e-5

// graph is the decoder for a fixed number of token rows. Its inputs are filled in place before a run.
type graph struct {
	tokens    []int // token id of each row
	positions []int // row of the position table, for each row
	selected  []int // rows with logits; nil: all rows

	vm     G.VM
	logits *G.Node   // (selected or all rows, vocabulary)
	gpu    *gpuGraph // nil: in host memory
}

// builder adds the nodes of a graph until the first error.
type builder struct {
	w     *Weights
	g     *G.ExprGraph
	mixed bool        // linear layers may round their inputs
	stock bool        // linear layers are Gorgonia's own nodes
	fuse  bool        // the graph will be rewritten
	gpu   *gpuGraph   // values are in a GPU's memory; nil: in host memory
	there *gpuWeights // weights on that GPU
	ranks *ranks.Comm // processes of the model; nil: this process alone
	err   error
}

// attend makes a layer's attention node: q, k, v and the result are (rows, D), and q is not scaled yet. After an
// error the nodes are nil.
type attend func(b *builder, layer int, q, k, v *G.Node) *G.Node

// usedRows returns the rows of x, of the graph's rows, that a run computes.
type usedRows func(b *builder, x *G.Node) *G.Node

// newGraph builds the decoder for a number of rows, with logits for a number of selected rows (0: for all). A graph
// that runs often is recorded on a GPU; the values of other graphs share memory there. Weights keep their names in
// every graph, and inputs are named, since Gorgonia merges unnamed inputs of equal shape. Sums with the residual are
// a part of the node before them if possible: every node costs some microseconds and an output of its own.
//
// Gorgonia distinguishes nodes by hashes of 32 bits, so in one of some thousand graphs of this size two nodes are
// merged. newGraph detects the merge, and another name for the first input gives all nodes other hashes.
func (w *Weights) newGraph(rows, selected int, often bool, o *Options, there *gpuWeights, attention attend, usedRows usedRows) (gr *graph, err error) {
	for _, tokens := range []string{"tokens", "tokens'", "tokens\""} {
		gr, err = w.buildGraph(tokens, rows, selected, often, o, there, attention, usedRows)
		if !errors.Is(err, la.ErrGraph) {
			return gr, err
		}
	}
	return nil, err
}

func (w *Weights) buildGraph(name string, rows, selected int, often bool, o *Options, there *gpuWeights, attention attend, usedRows usedRows) (*graph, error) {
	b, c := &builder{w: w, g: G.NewGraph(), mixed: o.Mixed, stock: o.Linear == StockLinear, there: there, ranks: o.Ranks}, w.config
	gr := &graph{}
	if there != nil {
		b.gpu = &gpuGraph{gpu: o.Device}
		gr.gpu = b.gpu
	}

	var tokens, positions *G.Node
	tokens, gr.tokens = b.indices(name, rows)
	positions, gr.positions = b.indices("positions", rows)
	// Unassigned rows are not computed, unless the number of rows is fixed: in recordings, in Gorgonia's own nodes,
	// and if each row has a choice.
	if !b.stock && (gr.gpu == nil || !often && (selected > 0 || !o.chooses())) {
		tokens, positions = usedRows(b, tokens), usedRows(b, positions)
	}
	embedding := b.weight(tokenTable)

	h := b.rows(b.weight("decoder.embed_positions.weight"), positions, nil)
	if c.HasProjections() {
		h = b.linear(b.rows(embedding, tokens, nil), "", "decoder.project_in", false, h)
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
	last := "" // the norm before the next layer
	if c.HasFinalLayerNorm() {
		last = "decoder.final_layer_norm"
	}
	if c.HasProjections() {
		h, last = b.linear(h, last, "decoder.project_out", false, nil), ""
	}
	head := embedding
	if !c.TieWordEmbeddings || there != nil && there.tensors[headWeight] != nil {
		head = b.weight(headWeight)
	}
	if b.stock {
		gr.logits = b.multiply(b.norm(h, last), head)
	} else {
		gr.logits = b.do(func() (*G.Node, error) { return nn.Linear(h, head, nil, b.normed(last)...) })
	}

	if b.gpu != nil && o.chooses() {
		b.gpu.choose(b, gr.logits, !o.Greedy)
		b.gpu.chosen = b.fromFirst(b.gpu.chosen)
	} else {
		gr.logits = b.fromFirst(gr.logits)
	}
	if b.err != nil {
		return nil, b.err
	}
	if err := rewrite.Check(b.g); err != nil {
		return nil, err
	}
	g := b.g
	if b.fuse {
		var err error
		if g, gr.logits, err = b.fused(gr.logits); err != nil {
			return nil, err
		}
	}
	if b.gpu != nil {
		b.gpu.often = often
	}
	if b.gpu == nil || !often { // a recording's values keep their memory
		if err := rewrite.ShareMemory(g); err != nil {
			return nil, err
		}
	}
	gr.vm = G.NewTapeMachine(g)
	return gr, nil
}

// machine runs the graph's machine, and returns the op's error without the machine's text.
func (gr *graph) machine() error { return la.Cause(gr.vm.RunAll()) }

// run computes the logits or, on a GPU if chooses is set, the tokens chosen from them: only they are downloaded then.
// No one else holds the results.
func (gr *graph) run(chooses bool) (logits []float32, chosen []int, err error) {
	if gr.gpu != nil {
		return gr.runGPU(chooses)
	}
	if err := gr.machine(); err != nil {
		return nil, nil, err
	}
	// No node reads the logits, so none has overwritten them, and G.Read would only copy them.
	v := gr.logits.Value()
	logits, ok := v.Data().([]float32)
	if !ok {
		return nil, nil, fmt.Errorf("model: logits are %T", v.Data())
	}
	return logits, nil, nil
}

func (b *builder) layer(h *G.Node, i int, attention attend) *G.Node {
	name := fmt.Sprintf("decoder.layers.%d.", i)
	// The norm of h is first in a branch, or the norm of its sum with h is last.
	first, last := name+"self_attn_layer_norm", ""
	if !b.w.config.DoLayerNormBefore {
		first, last = last, first
	}
	qkv := b.linears(h, first, name+"self_attn.q_proj", name+"self_attn.k_proj", name+"self_attn.v_proj")
	h = b.norm(b.partial(attention(b, i, qkv[0], qkv[1], qkv[2]), name+"self_attn.out_proj", h), last)

	first, last = name+"final_layer_norm", ""
	if !b.w.config.DoLayerNormBefore {
		first, last = last, first
	}
	x := b.linear(h, first, name+"fc1", true, nil)
	return b.norm(b.partial(x, name+"fc2", h), last)
}

// do adds nodes unless there was an error. Gorgonia's builders panic on some mistakes, so do turns panics into
// errors.
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

// input makes an input node with the value t.
func (b *builder) input(name string, t *tensor.Dense) *G.Node {
	return b.do(func() (*G.Node, error) {
		s := t.Shape()
		return G.NewTensor(b.g, t.Dtype(), len(s), G.WithShape(s...), G.WithName(name), G.WithValue(t)), nil
	})
}

// indices makes an input of n ints and returns its memory.
func (b *builder) indices(name string, n int) (*G.Node, []int) {
	data := make([]int, n)
	if b.gpu != nil {
		return b.gpu.indices(b, name, data), data
	}
	return b.input(name, tensor.New(tensor.WithShape(n), tensor.WithBacking(data))), data
}

func (b *builder) weight(name string) *G.Node {
	return b.do(func() (*G.Node, error) {
		if b.there != nil {
			return b.there.input(b, name)
		}
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

// linear is a linear layer of the norm of x (of x itself if norm is ""), with its bias if the model has one, then the
// activation if activated is set, then the residual if it is not nil.
func (b *builder) linear(x *G.Node, norm, name string, activated bool, residual *G.Node) *G.Node {
	w := b.weight(name + ".weight")
	t, biased := b.w.tensors[name+".bias"]
	if b.stock {
		return b.stockLinear(b.norm(x, norm), w, name+".bias", t, activated, residual)
	}
	var bias *G.Node
	if biased {
		bias = b.weight(name + ".bias")
	}
	options := b.normed(norm)
	if activated {
		options = append(options, b.activation().fused)
	}
	if residual != nil {
		options = append(options, nn.WithResidual(residual))
	}
	return b.do(func() (*G.Node, error) { return nn.Linear(x, w, bias, options...) })
}

// activation is the function in the feed-forward network: as a part of the linear layer before it, and as a node.
type activation struct {
	fused nn.Option
	node  func(*G.Node) (*G.Node, error)
}

// activations are the supported functions by their names in config.json.
var activations = map[string]activation{
	"relu": {nn.WithActivation(nn.ReLU), G.Rectify},
	"gelu": {nn.WithActivation(nn.GELU), func(x *G.Node) (*G.Node, error) { return nn.Activate(x, nn.GELU) }},
}

func (b *builder) activation() activation { return activations[b.w.config.Activation] }

// linears returns three linear layers of the norm of x.
func (b *builder) linears(x *G.Node, norm string, names ...string) (ys [3]*G.Node) {
	if b.stock {
		x = b.norm(x, norm)
		for i, name := range names {
			ys[i] = b.linear(x, "", name, false, nil)
		}
		return ys
	}
	var ws, bs []*G.Node
	for _, name := range names {
		ws = append(ws, b.weight(name+".weight"))
		if _, biased := b.w.tensors[name+".bias"]; biased {
			bs = append(bs, b.weight(name+".bias"))
		}
	}
	options := b.normed(norm)
	b.do(func() (*G.Node, error) {
		all, err := nn.Linears(x, ws, bs, options...)
		copy(ys[:], all)
		return nil, err
	})
	return ys
}

// norm returns the layer norm of x, or x if the name is "".
func (b *builder) norm(x *G.Node, name string) *G.Node {
	if name == "" {
		return x
	}
	gamma, beta := b.affine(name)
	return b.do(func() (*G.Node, error) { return nn.LayerNorm(x, gamma, beta, layerNormEps) })
}

// normed returns the options of a layer that reads the norm of its input, or its input.
func (b *builder) normed(name string) (opts []nn.Option) {
	if b.mixed {
		opts = append(opts, nn.WithMixedPrecision())
	}
	if name == "" {
		return opts
	}
	gamma, beta := b.affine(name)
	return append(opts, nn.WithNorm(gamma, beta, layerNormEps))
}

func (b *builder) affine(norm string) (gamma, beta *G.Node) {
	if b.w.config.LayerNormElementwiseAffine {
		gamma, beta = b.weight(norm+".weight"), b.weight(norm+".bias")
	}
	return gamma, beta
}

var _ Source = (*hf.Folder)(nil)
