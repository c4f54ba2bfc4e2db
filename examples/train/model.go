package main

import (
	_ "embed"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"

	"gorgonia.org/leanattention/rewrite"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/nn"

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

// size is the size of a model and of its batches.
type size struct{ batch, context, heads, dim, hidden int }

// trained is the size of the trained model. contexts are the contexts whose memory is measured, with the same model
// and one sequence.
var (
	trained  = size{batch: 8, context: 64, heads: 4, dim: 64, hidden: 128}
	contexts = []int{128, 256, 512, 1024}
)

// model is one decoder layer that predicts each next character, in a graph that computes the loss and its gradients:
//
//	x = characters + positions
//	x = x + attention(norm(x))
//	x = x + relu(norm(x) W1) W2
//	loss = mean of -log softmax(norm(x) W)[next character]
type model struct {
	size
	vm      G.VM
	solver  G.Solver
	weights G.Nodes
	seen    *tensor.Dense // (batch*context, vocabulary): a 1 in each row
	next    *tensor.Dense // the same, one character on
	loss    G.Value
	rng     *rand.Rand
}

func newModel(attend func(q, k, v *G.Node, opts ...la.Option) (*G.Node, error), s size, seed uint64) (m *model, err error) {
	defer func() { // from G.Must
		if r := recover(); r != nil {
			err = fmt.Errorf("the model cannot be built: %v", r)
		}
	}()
	m = &model{size: s, rng: rand.New(rand.NewPCG(seed, 0)), solver: G.NewAdamSolver(G.WithLearnRate(0.003))}
	g := G.NewGraph()
	rows, letters := s.batch*s.context, len(vocabulary)
	m.seen = tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(rows, letters))
	m.next = m.seen.Clone().(*tensor.Dense)
	seen := G.NewMatrix(g, G.Float32, G.WithName("seen"), G.WithShape(rows, letters), G.WithValue(m.seen))
	next := G.NewMatrix(g, G.Float32, G.WithName("next"), G.WithShape(rows, letters), G.WithValue(m.next))

	norm := func(x *G.Node, name string) *G.Node {
		gamma, beta := m.vector(g, name+".gamma", 1), m.vector(g, name+".beta", 0)
		return G.Must(nn.LayerNorm(x, gamma, beta, 1e-5))
	}
	times := func(x *G.Node, name string, in, out int) *G.Node {
		return G.Must(G.Mul(x, m.weight(g, name, math.Sqrt(1/float64(in)), in, out)))
	}
	shaped := func(x *G.Node, shape ...int) *G.Node { return G.Must(G.Reshape(x, shape)) }

	x := shaped(times(seen, "characters", letters, s.dim), s.batch, s.context, s.dim)
	x = G.Must(G.BroadcastAdd(x, m.weight(g, "positions", 0.1, 1, s.context, s.dim), nil, []byte{0}))
	x = shaped(x, rows, s.dim)

	y := norm(x, "norm1")
	heads := func(name string) *G.Node { // (batch, heads, context, dim/heads)
		y := shaped(times(y, name, s.dim, s.dim), s.batch, s.context, s.heads, s.dim/s.heads)
		return G.Must(G.Transpose(y, 0, 2, 1, 3))
	}
	y = G.Must(attend(heads("query"), heads("key"), heads("value"), la.WithCausal()))
	y = shaped(G.Must(G.Transpose(y, 0, 2, 1, 3)), rows, s.dim)
	x = G.Must(G.Add(x, times(y, "output", s.dim, s.dim)))

	y = G.Must(G.Rectify(times(norm(x, "norm2"), "up", s.dim, s.hidden)))
	x = G.Must(G.Add(x, times(y, "down", s.hidden, s.dim)))

	logits := times(norm(x, "norm3"), "letters", s.dim, letters)
	chosen := G.Must(G.HadamardProd(G.Must(G.LogSoftMax(logits, 1)), next))
	loss := G.Must(G.Neg(G.Must(G.Div(G.Must(G.Sum(chosen)), G.NewConstant(float32(rows))))))
	G.Read(loss, &m.loss)
	if _, err := G.Grad(loss, m.weights...); err != nil {
		return nil, err
	}
	if err := rewrite.Check(g); err != nil {
		return nil, err
	}
	m.vm = G.NewTapeMachine(g, G.BindDualValues(m.weights...))
	return m, nil
}

// weight adds a weight of N(0, scale) to the model.
func (m *model) weight(g *G.ExprGraph, name string, scale float64, shape ...int) *G.Node {
	x := make([]float32, tensor.Shape(shape).TotalSize())
	for i := range x {
		x[i] = float32(m.rng.NormFloat64() * scale)
	}
	v := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))
	n := G.NewTensor(g, G.Float32, len(shape), G.WithName(name), G.WithShape(shape...), G.WithValue(v))
	m.weights = append(m.weights, n)
	return n
}

// vector adds a weight for each element of a row, all with one value.
func (m *model) vector(g *G.ExprGraph, name string, value float32) *G.Node {
	n := m.weight(g, name, 0, m.dim)
	for i := range n.Value().Data().([]float32) {
		n.Value().Data().([]float32)[i] = value
	}
	return n
}

// step trains the model on a batch of pieces of the text, and returns the loss before.
func (m *model) step() (float64, error) {
	m.draw()
	if err := la.Cause(m.vm.RunAll()); err != nil {
		return 0, err
	}
	m.vm.Reset()
	loss, ok := m.loss.Data().(float32)
	if !ok {
		return 0, fmt.Errorf("the loss is a %T", m.loss.Data())
	}
	return float64(loss), m.solver.Step(G.NodesToValueGrads(m.weights))
}

// draw fills the batch.
func (m *model) draw() {
	seen, next := m.seen.Data().([]float32), m.next.Data().([]float32)
	clear(seen)
	clear(next)
	letters := len(vocabulary)
	for b := range m.batch {
		from := m.rng.IntN(len(tokens))
		for i := range m.context {
			row := (b*m.context + i) * letters
			seen[row+tokens[(from+i)%len(tokens)]] = 1
			next[row+tokens[(from+i+1)%len(tokens)]] = 1
		}
	}
}

func (m *model) close() { m.vm.Close() }

// measure measures the bytes that a step allocates at each of contexts.
func (r *result) measure(seed uint64) error {
	for _, n := range contexts {
		s := trained
		s.batch, s.context = 1, n
		m, err := newModel(r.apply, s, seed)
		if err != nil {
			return err
		}
		bytes, err := m.allocates()
		m.close()
		if err != nil {
			return err
		}
		r.memory = append(r.memory, bytes)
	}
	return nil
}

// allocates returns the bytes that a step allocates, after a first step.
func (m *model) allocates() (float64, error) {
	var before, after runtime.MemStats
	for i := range 2 {
		if i == 1 {
			runtime.ReadMemStats(&before)
		}
		if _, err := m.step(); err != nil {
			return 0, err
		}
	}
	runtime.ReadMemStats(&after)
	return float64(after.TotalAlloc - before.TotalAlloc), nil
}
