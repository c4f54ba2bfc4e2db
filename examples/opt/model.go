package main

import (
	"errors"
	"fmt"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/rewrite"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

const positionOffset = 2 // OPT's table of positions begins with two unused rows

// model is the graph of a model, and what a run of it needs.
type model struct {
	sizes   decoder.Sizes
	shapes  map[string][]int // of the weights
	weights decoder.Weights
	graph   *G.ExprGraph
	cache   *la.Cache
	step    *la.Step
	machine G.VM
	// Inputs of the graph. They are filled before each run.
	tokens    []int         // of each row: its token
	positions []int         // of each row: its row in the table of positions
	last      []int         // of each sequence: the row that its next token comes from
	choices   *tensor.Dense // of each sequence: how that token is chosen
	randoms   *tensor.Dense // of each sequence: a random number in [0, 1)
	next      *G.Node       // of each sequence: its next token
}

// newModel builds the graph: each run takes up to rows tokens of up to sequences sequences. The cache holds
// contextTokens tokens for all of them.
func newModel(of *decoder.Model, rows, sequences, contextTokens int) (m *model, err error) {
	c := of.Network().Sizes()
	m = &model{
		sizes: c, shapes: map[string][]int{}, weights: of.Weights(), graph: G.NewGraph(),
		tokens: make([]int, rows), positions: make([]int, rows), last: make([]int, sequences),
		choices: nn.Choices(make([]nn.Choice, sequences)), randoms: nn.Randoms(make([]float64, sequences)),
	}
	defer func() {
		if r := recover(); r != nil { // from G.Must
			err = fmt.Errorf("the graph cannot be built: %v", r)
		}
	}()
	for w := range of.Network().Weights() {
		m.shapes[w.Name] = w.Shape
	}
	const pageSize = 16
	m.cache, err = la.NewCache(la.CacheConfig{
		Layers: c.Layers, KVHeads: c.KVHeads, HeadDim: c.HeadDim,
		PageSize: pageSize, Pages: sequences + contextTokens/pageSize,
	})
	if err != nil {
		return m, err
	}
	if m.step, err = m.cache.NewStep(rows); err != nil {
		return m, err
	}
	used := func(input *G.Node) *G.Node { return G.Must(m.step.Rows(input)) } // a run computes the rows of sequences alone
	tokens, positions, last := used(m.indices("tokens", m.tokens)), used(m.indices("positions", m.positions)), used(m.indices("last", m.last))
	choices, randoms := used(m.input("choices", m.choices)), used(m.input("randoms", m.randoms))
	table := m.weight("decoder.embed_tokens.weight")
	h := G.Must(nn.Embedding(m.weight("decoder.embed_positions.weight"), positions, nil))
	h = G.Must(nn.Embedding(table, tokens, h))
	for i := range c.Layers {
		h = m.layer(i, h)
	}
	h = G.Must(nn.Embedding(h, last, nil))
	logits := G.Must(nn.Linear(h, table, nil, m.norm("decoder.final_layer_norm")))
	m.next = G.Must(nn.Sample(logits, choices, randoms))
	if err := rewrite.Check(m.graph); err != nil {
		return m, err
	}
	m.machine = G.NewTapeMachine(m.graph)
	return m, nil
}

// layer is one layer of the model: attention, then two linear layers, each on a normalised input and added to what came in.
func (m *model) layer(i int, h *G.Node) *G.Node {
	name := fmt.Sprintf("decoder.layers.%d.", i)
	wq, bq := m.linear(name + "self_attn.q_proj")
	wk, bk := m.linear(name + "self_attn.k_proj")
	wv, bv := m.linear(name + "self_attn.v_proj")
	qkv, err := nn.Linears(h, []*G.Node{wq, wk, wv}, []*G.Node{bq, bk, bv}, m.norm(name+"self_attn_layer_norm"))
	if err != nil {
		panic(err)
	}
	x := G.Must(la.CachedAttention(qkv[0], qkv[1], qkv[2], m.step.Layer(i), la.WithCausal()))
	out, bias := m.linear(name + "self_attn.out_proj")
	h = G.Must(nn.Linear(x, out, bias, nn.WithResidual(h)))
	up, bias := m.linear(name + "fc1")
	x = G.Must(nn.Linear(h, up, bias, m.norm(name+"final_layer_norm"), nn.WithActivation(nn.ReLU)))
	down, bias := m.linear(name + "fc2")
	return G.Must(nn.Linear(x, down, bias, nn.WithResidual(h)))
}

// linear is the weights of a linear layer: the matrix (out, in) and the bias.
func (m *model) linear(name string) (matrix, bias *G.Node) {
	return m.weight(name + ".weight"), m.weight(name + ".bias")
}

// norm has a linear layer read its input normalised.
func (m *model) norm(name string) nn.Option {
	return nn.WithNorm(m.weight(name+".weight"), m.weight(name+".bias"), 1e-5)
}

// weight is an input with the value of a weight. Matrices may have 16 bits.
func (m *model) weight(name string) *G.Node {
	t, err := m.weights.Tensor(name, m.shapes[name]...)
	if err != nil {
		panic(err)
	}
	return m.input(name, t)
}

// indices is an input that reads x anew in each run.
func (m *model) indices(name string, x []int) *G.Node {
	return m.input(name, tensor.New(tensor.WithShape(len(x)), tensor.WithBacking(x)))
}

// input is an input with a value. Its name is its own: Gorgonia takes inputs of the same name, type and shape for one.
func (m *model) input(name string, t *tensor.Dense) *G.Node {
	return G.NewTensor(m.graph, t.Dtype(), t.Dims(), G.WithShape(t.Shape()...), G.WithName(name), G.WithValue(t))
}

func (m *model) close() (err error) {
	if m.machine != nil {
		err = m.machine.Close()
	}
	if m.cache != nil {
		err = errors.Join(err, m.cache.Close())
	}
	return err
}
