package nn_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"gorgonia.org/leanattention/rope"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// What decodes can be trained: a decoder of Llama's shape learns a sequence by heart, with
// gradients through each kind of node.
func TestTrainDecoder(t *testing.T) {
	const vocab, hidden, inner, heads, kv, dim, rows = 11, 16, 24, 2, 1, 8, 10
	rng := reftest.Rand(t)
	g := G.NewGraph()
	var weights G.Nodes
	weight := func(name string, shape ...int) *G.Node {
		data := make([]float32, tensor.Shape(shape).TotalSize())
		for i := range data {
			data[i] = float32(rng.NormFloat64() * 0.3)
			if len(shape) == 1 {
				data[i] = 1
			}
		}
		v := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data))
		n := G.NewTensor(g, tensor.Float32, len(shape), G.WithName(name), G.WithShape(shape...), G.WithValue(v))
		weights = append(weights, n)
		return n
	}
	must := func(n *G.Node, err error) *G.Node {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	both := func(ns []*G.Node, err error) []*G.Node {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return ns
	}
	// The first token comes once: nothing could tell it from two of its kind, whose values are alike.
	tokens := make([]int, rows+1)
	for i := range tokens[1:] {
		tokens[1+i] = 1 + rng.IntN(vocab-1)
	}
	positions := make([]int, rows)
	targets := make([]float32, rows*vocab)
	for i := range positions {
		positions[i] = i
		targets[i*vocab+tokens[i+1]] = -1
	}
	at := ids(g, "positions", positions...)
	rotary := rope.Config{HeadDim: dim}

	h := must(nn.Embedding(weight("embedding", vocab, hidden), ids(g, "tokens", tokens[:rows]...), nil))
	for i := range 2 {
		name := fmt.Sprint("layer ", i, " ")
		qkv := both(nn.Linears(h, []*G.Node{weight(name+"q", heads*dim, hidden), weight(name+"k", kv*dim, hidden), weight(name+"v", kv*dim, hidden)},
			nil, nn.WithRMSNorm(weight(name+"norm", hidden), 1e-5)))
		for j, of := range []int{heads, kv, kv} {
			if j < 2 {
				qkv[j] = must(nn.QKNorm(qkv[j], weight(fmt.Sprint(name, "norm of heads ", j), dim), 1e-5))
				qkv[j] = must(nn.Rotary(qkv[j], at, rotary))
			}
			qkv[j] = must(nn.SplitHeads(must(nn.Reshape(qkv[j], 1, rows, of*dim)), of))
		}
		a := must(la.Attention(qkv[0], qkv[1], qkv[2], la.WithCausal()))
		a = must(nn.Reshape(must(nn.MergeHeads(a)), rows, heads*dim))
		h = must(nn.Linear(a, weight(name+"o", hidden, heads*dim), nil, nn.WithResidual(h)))
		x := must(nn.RMSNorm(h, weight(name+"second norm", hidden), nil, 1e-5))
		gateUp := must(nn.Linear(x, weight(name+"gate and up", 2*inner, hidden), nil))
		x = must(nn.GLU(must(nn.Slice(gateUp, 1, 0, inner)), must(nn.Slice(gateUp, 1, inner, 2*inner)), nn.SiLU))
		x = must(nn.Add(x, must(nn.GatedLinear(h, []*G.Node{weight(name+"another gate", inner, hidden), weight(name+"what it is for", inner, hidden)}, nil, nn.GELUTanh))))
		x = must(nn.Linear(x, weight(name+"down", hidden, inner), nil, nn.WithActivation(nn.SiLU)))
		h = must(nn.Add(h, must(nn.Scale(x, 0.5))))
	}
	logits := must(nn.Linear(h, weight("head", vocab, hidden), nil, nn.WithRMSNorm(weight("norm", hidden), 1e-5)))
	target := G.NewMatrix(g, tensor.Float32, G.WithName("targets"), G.WithShape(rows, vocab), G.WithValue(tensor.New(tensor.WithShape(rows, vocab), tensor.WithBacking(targets))))
	cost := must(G.Sum(must(G.HadamardProd(must(G.Log(must(G.SoftMax(logits)))), target))))
	var loss G.Value
	G.Read(cost, &loss)
	if _, err := G.Grad(cost, weights...); err != nil {
		t.Fatal(err)
	}
	machine := G.NewTapeMachine(g, G.BindDualValues(weights...))
	defer machine.Close()
	solver := G.NewAdamSolver(G.WithLearnRate(0.01))
	first := math.NaN()
	for i := range 400 {
		if err := la.Cause(machine.RunAll()); err != nil {
			t.Fatal(err)
		}
		now := float64(loss.Data().(float32)) / rows
		if i == 0 {
			first = now
		}
		if now < 0.1 {
			t.Logf("a loss of %.2f is %.3f after %d steps", first, now, i)
			return
		}
		if err := solver.Step(G.NodesToValueGrads(weights)); err != nil {
			t.Fatal(err)
		}
		machine.Reset()
	}
	t.Errorf("a loss of %.2f is %v after 400 steps", first, loss.Data().(float32)/rows)
}

// A batch that is padded at its right can be trained on: one layer of attention learns to copy the token three places back, in
// sequences of 4 to 10 tokens. With queries at the end of the live keys, short sequences are shifted, and their tokens do not
// see the keys that they are to copy.
func TestTrainPaddedBatch(t *testing.T) {
	for _, padded := range []bool{true, false} {
		loss := trainCopies(t, padded)
		t.Logf("lengths of queries %t: a loss of %.4f", padded, loss)
		if padded && !(loss < 0.01) || !padded && !(loss > 0.2) {
			t.Errorf("lengths of queries %t: a loss of %.4f", padded, loss)
		}
	}
}

// trainCopies returns the loss of a token after some steps, with the lengths of queries or with queries at the end of the keys.
func trainCopies(t *testing.T, padded bool) float64 {
	t.Helper()
	const vocab, hidden, longest, back, steps = 8, 24, 10, 3, 300
	lengths := []int{4, 10, 7, 5, 9, 6, 8, 10}
	batch, rows := len(lengths), len(lengths)*longest
	rng := rand.New(rand.NewPCG(1, 2))
	g := G.NewGraph()
	var weights G.Nodes
	weight := func(name string, shape ...int) *G.Node {
		data := make([]float32, tensor.Shape(shape).TotalSize())
		for i := range data {
			data[i] = float32(rng.NormFloat64() * 0.3)
		}
		n := G.NewTensor(g, tensor.Float32, len(shape), G.WithName(name), G.WithShape(shape...), G.WithValue(tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data))))
		weights = append(weights, n)
		return n
	}
	must := func(n *G.Node, err error) *G.Node {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	positions := make([]int, rows)
	for i := range positions {
		positions[i] = i % longest
	}
	tokens := ids(g, "tokens", make([]int, rows)...)
	n := ids(g, "lengths", lengths...)
	targets := G.NewMatrix(g, tensor.Float32, G.WithName("targets"), G.WithShape(rows, vocab))
	x := must(nn.Add(must(nn.Embedding(weight("embedding", vocab, hidden), tokens, nil)), must(nn.Embedding(weight("places", longest, hidden), ids(g, "positions", positions...), nil))))
	var qkv [3]*G.Node
	for i := range qkv {
		y := must(nn.Linear(x, weight("qkv"[i:i+1], hidden, hidden), nil))
		qkv[i] = must(nn.SplitHeads(must(nn.Reshape(y, batch, longest, hidden)), 1))
	}
	of := la.WithQueriesAtEnd()
	if padded {
		of = la.WithQueryLengths(n)
	}
	a := must(la.Attention(qkv[0], qkv[1], qkv[2], la.WithCausal(), la.WithLengths(n), of))
	logits := must(nn.Linear(must(nn.Reshape(must(nn.MergeHeads(a)), rows, hidden)), weight("head", vocab, hidden), nil))
	cost := must(G.Sum(must(G.HadamardProd(must(G.Log(must(G.SoftMax(logits)))), targets))))
	var loss G.Value
	G.Read(cost, &loss)
	if _, err := G.Grad(cost, weights...); err != nil {
		t.Fatal(err)
	}
	machine := G.NewTapeMachine(g, G.BindDualValues(weights...))
	defer machine.Close()
	solver := G.NewAdamSolver(G.WithLearnRate(0.01))
	last := math.NaN()
	for range steps {
		at, want, copies := make([]int, rows), make([]float32, rows*vocab), 0
		for b, n := range lengths {
			for i := range n {
				row := b*longest + i
				at[row] = rng.IntN(vocab)
				if i >= back {
					want[row*vocab+at[row-back]] = -1
					copies++
				}
			}
		}
		if err := errors.Join(G.Let(tokens, tensor.New(tensor.WithShape(rows), tensor.WithBacking(at))), G.Let(targets, tensor.New(tensor.WithShape(rows, vocab), tensor.WithBacking(want)))); err != nil {
			t.Fatal(err)
		}
		if err := la.Cause(machine.RunAll()); err != nil {
			t.Fatal(err)
		}
		last = float64(loss.Data().(float32)) / float64(copies)
		if err := solver.Step(G.NodesToValueGrads(weights)); err != nil {
			t.Fatal(err)
		}
		machine.Reset()
	}
	return last
}
