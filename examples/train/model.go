package main

import (
	_ "embed"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/rewrite"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

//go:embed text.txt
var text string

// vocabulary is the characters of the text. tokens is the text as indices of vocabulary.
var vocabulary, tokens = func() (v []rune, t []int) {
	for _, c := range text {
		if !slices.Contains(v, c) {
			v = append(v, c)
		}
	}
	slices.Sort(v)
	for _, c := range text {
		t = append(t, slices.Index(v, c))
	}
	return v, t
}()

// attention is the attention of a layer: la.Attention or la.Default.
type attention func(q, k, v *G.Node, opts ...la.Option) (*G.Node, error)

// size is the size of a model and of its batches.
type size struct{ batch, context, heads, dim, hidden int }

// model is one decoder layer that predicts each next character, in a graph that computes the loss and its gradients:
//
//	x = characters[seen] + positions
//	x = x + attention(norm(x) query, norm(x) key, norm(x) value) output
//	x = x + gelu(norm(x) up) down
//	loss = mean of -log softmax(norm(x) letters)[next character]
type model struct {
	size
	graph   *G.ExprGraph
	weights G.Nodes
	seen    []int     // of each row: its character
	next    []float32 // (batch*context, vocabulary): in each row a 1 for the next character
	loss    G.Value
	machine G.VM
	solver  G.Solver
	rng     *rand.Rand
}

func newModel(attend attention, s size, seed uint64) (m *model, err error) {
	defer func() {
		if r := recover(); r != nil { // from G.Must
			err = fmt.Errorf("the graph cannot be built: %v", r)
		}
	}()
	rows, letters := s.batch*s.context, len(vocabulary)
	m = &model{
		size: s, graph: G.NewGraph(), seen: make([]int, rows), next: make([]float32, rows*letters),
		solver: G.NewAdamSolver(G.WithLearnRate(0.003)), rng: rand.New(rand.NewPCG(seed, 0)),
	}
	places := make([]int, rows) // of each row: its position in its sequence
	for i := range places {
		places[i] = i % s.context
	}
	x := G.Must(nn.Embedding(m.random("positions", 0.1, s.context, s.dim), m.input("places", places, rows), nil))
	x = G.Must(nn.Embedding(m.random("characters", 1/math.Sqrt(float64(letters)), letters, s.dim), m.input("seen", m.seen, rows), x))

	wq, wk, wv := m.matrix("query", s.dim, s.dim), m.matrix("key", s.dim, s.dim), m.matrix("value", s.dim, s.dim)
	qkv, err := nn.Linears(x, []*G.Node{wq, wk, wv}, nil, m.norm("norm1"))
	if err != nil {
		return nil, err
	}
	for i, y := range qkv { // (batch*context, dim) becomes (batch, heads, context, dim/heads)
		qkv[i] = G.Must(nn.SplitHeads(G.Must(nn.Reshape(y, s.batch, s.context, s.dim)), s.heads))
	}
	y := G.Must(attend(qkv[0], qkv[1], qkv[2], la.WithCausal()))
	y = G.Must(nn.Reshape(G.Must(nn.MergeHeads(y)), rows, s.dim))
	x = G.Must(nn.Linear(y, m.matrix("output", s.dim, s.dim), nil, nn.WithResidual(x)))

	y = G.Must(nn.Linear(x, m.matrix("up", s.dim, s.hidden), nil, m.norm("norm2"), nn.WithActivation(nn.GELU)))
	x = G.Must(nn.Linear(y, m.matrix("down", s.hidden, s.dim), nil, nn.WithResidual(x)))

	logits := G.Must(nn.Linear(x, m.matrix("letters", s.dim, letters), nil, m.norm("norm3")))
	chosen := G.Must(G.HadamardProd(G.Must(G.LogSoftMax(logits, 1)), m.input("next", m.next, rows, letters)))
	loss := G.Must(G.Neg(G.Must(G.Div(G.Must(G.Sum(chosen)), G.NewConstant(float32(rows))))))
	G.Read(loss, &m.loss)
	if _, err := G.Grad(loss, m.weights...); err != nil {
		return nil, err
	}
	if err := rewrite.Check(m.graph); err != nil {
		return nil, err
	}
	m.machine = G.NewTapeMachine(m.graph, G.BindDualValues(m.weights...))
	return m, nil
}

// matrix is the weight (out, in) of a linear layer.
func (m *model) matrix(name string, in, out int) *G.Node {
	return m.random(name, 1/math.Sqrt(float64(in)), out, in)
}

// norm has a linear layer read its input normalised.
func (m *model) norm(name string) nn.Option {
	gamma, beta := slices.Repeat([]float32{1}, m.dim), make([]float32, m.dim)
	return nn.WithNorm(m.weight(name+".gamma", gamma, m.dim), m.weight(name+".beta", beta, m.dim), 1e-5)
}

// random is a weight of normally distributed numbers.
func (m *model) random(name string, deviation float64, shape ...int) *G.Node {
	x := make([]float32, tensor.Shape(shape).TotalSize())
	for i := range x {
		x[i] = float32(m.rng.NormFloat64() * deviation)
	}
	return m.weight(name, x, shape...)
}

// weight is an input that is trained.
func (m *model) weight(name string, x []float32, shape ...int) *G.Node {
	n := m.input(name, x, shape...)
	m.weights = append(m.weights, n)
	return n
}

// input is an input that reads the slice x anew in each run. Its name is its own: Gorgonia takes inputs of the same name, type and
// shape for one.
func (m *model) input(name string, x any, shape ...int) *G.Node {
	t := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))
	return G.NewTensor(m.graph, t.Dtype(), t.Dims(), G.WithShape(shape...), G.WithName(name), G.WithValue(t))
}

// step trains the model on a batch of pieces of the text, and returns the loss before.
func (m *model) step() (float64, error) {
	m.draw()
	m.machine.Reset()
	if err := la.Cause(m.machine.RunAll()); err != nil {
		return 0, err
	}
	loss, ok := m.loss.Data().(float32)
	if !ok {
		return 0, fmt.Errorf("the loss is a %T, want a float32", m.loss.Data())
	}
	return float64(loss), m.solver.Step(G.NodesToValueGrads(m.weights))
}

// draw fills the batch with random pieces of the text.
func (m *model) draw() {
	clear(m.next)
	for b := range m.batch {
		from := m.rng.IntN(len(tokens))
		for i := range m.context {
			row := b*m.context + i
			m.seen[row] = tokens[(from+i)%len(tokens)]
			m.next[row*len(vocabulary)+tokens[(from+i+1)%len(tokens)]] = 1
		}
	}
}

func (m *model) close() error { return m.machine.Close() }
