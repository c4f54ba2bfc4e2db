package main

import (
	_ "embed"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/rewrite"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

//go:embed text.txt
var text string

// vocabulary is the characters of the text. tokens is the text as indices of vocabulary.
var vocabulary, tokens = func() (v []rune, t []int32) {
	for _, c := range text {
		if !slices.Contains(v, c) {
			v = append(v, c)
		}
	}
	slices.Sort(v)
	for _, c := range text {
		t = append(t, int32(slices.Index(v, c)))
	}
	return v, t
}()

// attention is the attention of a layer: la.Attention, la.Default or half.
type attention func(q, k, v *G.Node, opts ...la.Option) (*G.Node, error)

// half is la.Attention of float16: on a GPU, gradients of attention have 16 bits.
func half(q, k, v *G.Node, opts ...la.Option) (*G.Node, error) {
	in := [...]*G.Node{q, k, v}
	for i, x := range in {
		var err error
		if in[i], err = nn.Convert(x, la.Float16); err != nil {
			return nil, err
		}
	}
	y, err := la.Attention(in[0], in[1], in[2], opts...)
	if err != nil {
		return nil, err
	}
	return nn.Convert(y, tensor.Float32)
}

// kind is how a model is computed: in host memory, or on a GPU.
type kind struct {
	attend attention
	gpu    *device.GPU // nil: in host memory
}

// size is the size of a model and of its batches.
type size struct{ batch, context, heads, dim, hidden int }

// model is one decoder layer that predicts each next character, in a graph that computes the loss and its gradients:
//
//	x = characters[seen] + positions
//	x = x + attention(norm(x) query, norm(x) key, norm(x) value) output
//	x = x + gelu(norm(x) up) down
//	loss = -log softmax(norm(x) letters)[next character]
type model struct {
	kind
	size
	graph   *G.ExprGraph
	weights G.Nodes
	rows    [2]input // of each row of a batch: its character, and the next one
	loss    *G.Node  // of each row
	machine G.VM
	solver  G.Solver
	rng     *rand.Rand
}

// input is an input of the graph, and numbers in host memory.
type input struct {
	node *G.Node
	here []int32
}

func newModel(k kind, s size, seed uint64) (m *model, err error) {
	defer func() {
		if r := recover(); r != nil { // from G.Must
			err = fmt.Errorf("the graph cannot be built: %v", r)
		}
	}()
	rows, letters := s.batch*s.context, len(vocabulary)
	m = &model{kind: k, size: s, graph: G.NewGraph(), rng: rand.New(rand.NewPCG(seed, 0))}
	// The gradient is that of the sum over rows, since 16 bits have no numbers as small as those of the mean. AdamW divides by the
	// gradient's size. So Epsilon is rows times as large, and the steps are the same.
	m.solver = &nn.AdamW{Rate: 0.003, Beta1: 0.9, Beta2: 0.999, Epsilon: 1e-8 * float64(rows)}
	places := make([]int32, rows) // of each row: its position in its sequence
	for i := range places {
		places[i] = int32(i % s.context)
	}
	for i, name := range []string{"seen", "next"} {
		here := make([]int32, rows)
		m.rows[i] = input{m.input(name, here, rows), here}
	}
	x := G.Must(nn.Embedding(m.random("positions", 0.1, s.context, s.dim), m.input("places", places, rows), nil))
	x = G.Must(nn.Embedding(m.random("characters", 1/math.Sqrt(float64(letters)), letters, s.dim), m.rows[0].node, x))

	wq, wk, wv := m.matrix("query", s.dim, s.dim), m.matrix("key", s.dim, s.dim), m.matrix("value", s.dim, s.dim)
	gamma, beta := m.norm("norm1")
	qkv, err := nn.Linears(x, []*G.Node{wq, wk, wv}, nil, nn.WithNorm(gamma, beta, eps))
	if err != nil {
		return nil, err
	}
	for i, y := range qkv { // (batch*context, dim) becomes (batch, heads, context, dim/heads)
		qkv[i] = G.Must(nn.SplitHeads(G.Must(nn.Reshape(y, s.batch, s.context, s.dim)), s.heads))
	}
	y := G.Must(k.attend(qkv[0], qkv[1], qkv[2], la.WithCausal()))
	y = G.Must(nn.Reshape(G.Must(nn.MergeHeads(y)), rows, s.dim))
	x = G.Must(nn.Linear(y, m.matrix("output", s.dim, s.dim), nil, nn.WithResidual(x)))

	gamma, beta = m.norm("norm2")
	y = G.Must(nn.Linear(x, m.matrix("up", s.dim, s.hidden), nil, nn.WithNorm(gamma, beta, eps), nn.WithActivation(nn.GELU)))
	x = G.Must(nn.Linear(y, m.matrix("down", s.hidden, s.dim), nil, nn.WithResidual(x)))

	gamma, beta = m.norm("norm3")
	x = G.Must(nn.LayerNorm(x, gamma, beta, eps))
	m.loss = G.Must(nn.CrossEntropy(x, m.matrix("letters", s.dim, letters), nil, m.rows[1].node))
	ones := m.input("ones", slices.Repeat([]float32{1}, rows), rows)
	if _, err := nn.Backpropagate(G.Nodes{m.loss}, G.Nodes{ones}, m.weights); err != nil {
		return nil, err
	}
	if err := rewrite.Check(m.graph); err != nil {
		return nil, err
	}
	if k.gpu != nil { // a gradient there stays until the graph runs again
		m.machine = G.NewTapeMachine(m.graph)
	} else {
		m.machine = G.NewTapeMachine(m.graph, G.BindDualValues(m.weights...))
	}
	return m, nil
}

const eps = 1e-5 // of norms

// matrix is the weight (out, in) of a linear layer.
func (m *model) matrix(name string, in, out int) *G.Node {
	return m.random(name, 1/math.Sqrt(float64(in)), out, in)
}

// norm is the weights of a norm.
func (m *model) norm(name string) (gamma, beta *G.Node) {
	return m.weight(name+".gamma", slices.Repeat([]float32{1}, m.dim), m.dim), m.weight(name+".beta", make([]float32, m.dim), m.dim)
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

// input is an input with the numbers of the slice x, which is read anew in each run in host memory. Its name is its own: Gorgonia takes
// inputs of the same name, type and shape for one.
func (m *model) input(name string, x any, shape ...int) *G.Node {
	t := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))
	var value G.Value = t
	if m.gpu != nil {
		there, err := m.gpu.Upload(t)
		if err != nil {
			panic(err)
		}
		value = there
	}
	return G.NewTensor(m.graph, t.Dtype(), t.Dims(), G.WithShape(shape...), G.WithName(name), G.WithValue(value))
}

// step trains the model on a batch of pieces of the text, and returns the loss before.
func (m *model) step() (float64, error) {
	if err := m.draw(); err != nil {
		return 0, err
	}
	m.machine.Reset()
	if err := la.Cause(m.machine.RunAll()); err != nil {
		return 0, err
	}
	loss := m.loss.Value()
	if there, ok := loss.(*device.Tensor); ok {
		var err error
		if loss, err = there.Download(); err != nil {
			return 0, err
		}
	}
	sum := 0.0
	for _, x := range loss.Data().([]float32) {
		sum += float64(x)
	}
	return sum / float64(m.batch*m.context), m.solver.Step(G.NodesToValueGrads(m.weights))
}

// draw fills the batch with random pieces of the text.
func (m *model) draw() error {
	for b := range m.batch {
		from := m.rng.IntN(len(tokens))
		for i := range m.context {
			row := b*m.context + i
			m.rows[0].here[row] = tokens[(from+i)%len(tokens)]
			m.rows[1].here[row] = tokens[(from+i+1)%len(tokens)]
		}
	}
	for _, in := range m.rows {
		if there, ok := in.node.Value().(*device.Tensor); ok {
			if err := there.CopyFrom(tensor.New(tensor.WithShape(len(in.here)), tensor.WithBacking(in.here))); err != nil {
				return err
			}
		}
	}
	return nil
}

func (m *model) close() error { return m.machine.Close() }
