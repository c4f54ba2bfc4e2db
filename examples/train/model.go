package main

import (
	_ "embed"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	G "gorgonia.org/gorgonia"
	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/rewrite"
	"gorgonia.org/tensor"
)

//go:embed text.txt
var text string

// letters are the characters of the text, and vocabulary has each of them once: a token is an index of it.
var letters, vocabulary = []rune(text), slices.Compact(slices.Sorted(slices.Values([]rune(text))))

// kind is how a model is computed.
type kind struct {
	attend func(q, k, v *G.Node, opts ...la.Option) (*G.Node, error) // la.Attention, or la.Default
	half   bool                                                      // attention in float16, and products of layers in bfloat16
	gpu    *device.GPU                                               // nil: in host memory
	from   []byte                                                    // the end of an earlier course; nil: none
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
	rows    [3][]int32 // of each row of a batch: its character, the next one, and its position in its sequence
	scale   []float32  // of each row's loss
	loss    *G.Node    // of each row, in host memory
	machine G.VM
	solver  *nn.AdamW
	source  *rand.PCG
}

func newModel(k kind, s size, seed uint64) (m *model, err error) {
	defer func() {
		if r := recover(); r != nil { // from G.Must
			err = fmt.Errorf("the graph cannot be built: %v", r)
		}
	}()
	rows := s.batch * s.context
	m = &model{kind: k, size: s, graph: G.NewGraph(), scale: make([]float32, rows), source: rand.NewPCG(seed, 0)}
	m.rows = [3][]int32{make([]int32, rows), make([]int32, rows), make([]int32, rows)}
	// The gradient is that of Scale times the sum over rows, since 16 bits have no numbers as small as those of the mean.
	m.solver = &nn.AdamW{Rate: 0.003, Beta1: 0.9, Beta2: 0.999, Epsilon: 1e-8, Rows: rows, Scale: 256, Grow: 1000}
	x := G.Must(nn.Embedding(m.random("positions", 0.1, s.context, s.dim), m.data("places", m.rows[2]), nil))
	x = G.Must(nn.Embedding(m.random("characters", 1/math.Sqrt(float64(len(vocabulary))), len(vocabulary), s.dim), m.data("seen", m.rows[0]), x))
	mixed := map[bool][]nn.Option{true: {nn.WithMixedPrecision(la.BFloat16)}}[k.half]
	gamma, beta := m.norm("norm1")
	qkv, err := nn.Linears(x, G.Nodes{m.matrix("query", s.dim, s.dim), m.matrix("key", s.dim, s.dim), m.matrix("value", s.dim, s.dim)}, nil, append(mixed, nn.WithNorm(gamma, beta, 1e-5))...)
	if err != nil {
		return nil, err
	}
	for i, y := range qkv { // (batch*context, dim) becomes (batch, heads, context, dim/heads)
		qkv[i] = G.Must(nn.SplitHeads(G.Must(nn.Reshape(y, s.batch, s.context, s.dim)), s.heads))
		if k.half {
			qkv[i] = G.Must(nn.Convert(qkv[i], la.Float16))
		}
	}
	y := G.Must(k.attend(qkv[0], qkv[1], qkv[2], la.WithCausal()))
	if k.half {
		y = G.Must(nn.Convert(y, tensor.Float32))
	}
	y = G.Must(nn.Reshape(G.Must(nn.MergeHeads(y)), rows, s.dim))
	x = G.Must(nn.Linear(y, m.matrix("output", s.dim, s.dim), nil, append(mixed, nn.WithResidual(x))...))

	gamma, beta = m.norm("norm2")
	y = G.Must(nn.Linear(x, m.matrix("up", s.dim, s.hidden), nil, append(mixed, nn.WithNorm(gamma, beta, 1e-5), nn.WithActivation(nn.GELU))...))
	x = G.Must(nn.Linear(y, m.matrix("down", s.hidden, s.dim), nil, append(mixed, nn.WithResidual(x))...))
	gamma, beta = m.norm("norm3")
	m.loss = G.Must(nn.CrossEntropy(G.Must(nn.LayerNorm(x, gamma, beta, 1e-5)), m.matrix("letters", s.dim, len(vocabulary)), nil, m.data("next", m.rows[1]), mixed...))
	_, err = nn.Backpropagate(G.Nodes{m.loss}, G.Nodes{m.data("scale", m.scale)}, m.weights)
	opts := []G.VMOpt{G.BindDualValues(m.weights...)}
	if k.gpu != nil { // a gradient stays until the graph runs again
		opts, m.loss = nil, G.Must(device.ToHost(m.loss))
	}
	m.machine = G.NewTapeMachine(m.graph, opts...)
	return m, errors.Join(err, rewrite.Check(m.graph))
}

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
		x[i] = float32(rand.New(m.source).NormFloat64() * deviation)
	}
	return m.weight(name, x, shape...)
}

// weight is an input that is trained, where the model is computed.
func (m *model) weight(name string, x []float32, shape ...int) *G.Node {
	t := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))
	var value G.Value = t
	if m.gpu != nil {
		there, err := m.gpu.Upload(t)
		if err != nil {
			panic(err)
		}
		value = there
	}
	n := G.NewTensor(m.graph, t.Dtype(), t.Dims(), G.WithShape(shape...), G.WithName(name), G.WithValue(value))
	m.weights = append(m.weights, n)
	return n
}

// data is an input with the numbers of a slice, which each run reads anew.
func (m *model) data(name string, x any) *G.Node {
	t := tensor.New(tensor.WithBacking(x))
	n := G.NewTensor(m.graph, t.Dtype(), 1, G.WithShape(t.Shape()...), G.WithName(name), G.WithValue(t))
	if m.gpu != nil {
		n = G.Must(device.ToGPU(n, m.gpu))
	}
	return n
}

// step trains the model on random pieces of the text, and returns the loss before.
func (m *model) step() (float64, error) {
	from, rng := 0, rand.New(m.source)
	for row := range m.scale {
		at := row % m.context
		if at == 0 {
			from = rng.IntN(len(letters))
		}
		for i := range 2 {
			m.rows[i][row] = int32(slices.Index(vocabulary, letters[(from+at+i)%len(letters)]))
		}
		m.rows[2][row], m.scale[row] = int32(at), float32(m.solver.Scale)
	}
	m.machine.Reset()
	if err := la.Cause(m.machine.RunAll()); err != nil {
		return 0, err
	}
	sum := 0.0
	for _, x := range m.loss.Value().Data().([]float32) {
		sum += float64(x)
	}
	return sum / float64(len(m.rows[0])), m.solver.Step(G.NodesToValueGrads(m.weights))
}
