package leanattention_test

import (
	"fmt"
	"math"
	"slices"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// both makes a graph with the default attention, and ours on the same inputs.
func (p *problem) both(t testing.TB) (g *graph, ours *G.Node) {
	t.Helper()
	g = p.graph()
	var err error
	if g.out, err = la.Default(g.q, g.k, g.v, g.options(p)...); err != nil {
		t.Fatal(err)
	}
	if ours, err = la.Attention(g.q, g.k, g.v, g.options(p)...); err != nil {
		t.Fatal(err)
	}
	g.read(t)
	return g, ours
}

// TestDefault checks the baseline against the reference, and ours against the
// baseline: within the sum of both bounds they are the same. Inputs are those
// that Gorgonia's SoftMax can do.
func TestDefault(t *testing.T) {
	rng := reftest.Rand(t)
	for i, s := range []reftest.Shape{
		bent(dense(4, 2, 16, 8, 3, 40, 40), 7, 0),
		bent(causal(dense(4, 2, 16, 8, 9, 40, 40)), 1, 0),
		bent(dense(2, 1, 16, 8, 9, 5, 5), 2, 0),
		bent(causal(dense(4, 1, 16, 8, 3, 40)), 0, 1.5),
		bent(causal(dense(4, 2, 16, 8, 9, 40, 40)), 0, 0, 0.5, 0.25, -0.1, 0.125),
		bent(causal(dense(4, 2, 16, 8, 3, 33, 33, 33)), 16, 2, 0.5, 0.25, 0, 0.125),
		biased(rng, dense(4, 2, 16, 8, 3, 40), 1, 4, 3),
		biased(rng, dense(4, 2, 16, 8, 3, 40, 40), 1, 4, 3),
		biased(rng, bent(causal(dense(4, 2, 16, 8, 3, 40, 40)), 20, 3), 2, 1, 1),
		biased(rng, dense(4, 1, 16, 8, 3, 40), 1, 1, 3),
		dense(1, 1, 1, 1, 1, 2),
		dense(2, 2, 3, 3, 1, 5, 5),
		dense(12, 12, 64, 64, 1, 256),
		dense(4, 2, 16, 8, 3, 40, 40),
		dense(4, 1, 59, 7, 2, 33, 33, 33),
		dense(5, 1, 80, 80, 1, 17, 17),
		causal(dense(4, 4, 16, 16, 9, 9, 9)),
		causal(dense(6, 2, 16, 24, 5, 40, 40)),
		causal(dense(3, 1, 8, 8, 1, 12)),
		causal(dense(2, 2, 8, 8, 2, 2)),
		causal(dense(8, 2, 32, 32, 20, 100)),
	} {
		for _, query := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
			for _, rank := range []int{3, 4} {
				if rank == 3 && len(s.Keys) > 1 {
					continue
				}
				t.Run(fmt.Sprintf("%v %v rank %d", s, query, rank), func(t *testing.T) {
					in := reftest.Normal
					if i%3 == 2 {
						in = reftest.Constant
					}
					p := newProblem(rng, s, spec{inputs: in, query: query, rank: rank})
					p.show()
					want := p.Reference(p.precision(s.Keys[0]))
					g, ours := p.both(t)
					var oursV G.Value
					G.Read(ours, &oursV)
					vm := G.NewTapeMachine(g.g)
					defer vm.Close()
					for range 2 {
						again(t, vm)
						p.check(t, want, g.outV, nil)
						p.check(t, want, oursV, nil)
						p.checkClose(t, want, oursV, g.outV)
					}
				})
			}
		}
	}
}

// checkClose checks that two outputs differ by no more than their two bounds.
func (p *problem) checkClose(t testing.TB, want *reftest.Result, a, b G.Value) {
	t.Helper()
	nq := p.Queries[0]
	other := *want
	other.O, other.OBound = nil, slices.Clone(want.OBound)
	o := floats(t, b)
	for s := range p.Keys {
		for pos := range nq {
			for h := range p.Heads {
				at := ((s*p.Heads+h)*nq + pos) * p.ValueDim
				other.O = append(other.O, o[at:at+p.ValueDim]...)
			}
		}
	}
	for i := range other.OBound {
		other.OBound[i] *= 2
	}
	if err := p.compare(t, &other, a, nil); err != nil {
		t.Errorf("ours against the default: %v", err)
	}
}

// TestDefaultNodes: the inputs that Default makes, for the scale and the mask,
// are shared by the layers that have the same, and by no others.
func TestDefaultNodes(t *testing.T) {
	rng := reftest.Rand(t)
	p := newProblem(rng, dense(4, 2, 8, 8, 3, 6), spec{})
	g := p.graph()
	build := func(opts ...la.Option) *G.Node {
		t.Helper()
		n, err := la.Default(g.q, g.k, g.v, opts...)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	if build() != build() || build(la.WithCausal()) != build(la.WithCausal()) {
		t.Error("equal default attentions are two nodes")
	}
	nodes := []*G.Node{build(), build(la.WithCausal()), build(la.WithScale(1)), build(la.WithScale(2)),
		build(la.WithWindow(2)), build(la.WithWindow(3)), build(la.WithWindow(3), la.WithCausal()), build(la.WithSoftCap(1)), build(la.WithSoftCap(2)),
		build(la.WithBias(input(g.g, "one", tensorOf(tensor.Float32, make([]float64, 6), 1, 1, 1, 6)))),
		build(la.WithBias(input(g.g, "each", tensorOf(tensor.Float32, make([]float64, 72), 1, 4, 3, 6)))),
		build(la.WithALiBi([]float64{1, 2, 3, 4})), build(la.WithALiBi([]float64{1, 2, 4, 3}))}
	for i, a := range nodes {
		for _, b := range nodes[:i] {
			if a == b {
				t.Errorf("attention %d and another one are one node", i)
			}
		}
	}
	if err := la.CheckGraph(g.g); err != nil {
		t.Error(err)
	}
}

// TestDefaultSoftMax shows the limit that Default's documentation tells of,
// where ours is right: a row far below the tensor's first element.
func TestDefaultSoftMax(t *testing.T) {
	rng := reftest.Rand(t)
	p := newProblem(rng, dense(2, 2, 4, 4, 1, 3), spec{})
	for h, x := range []float64{1000, -1000} {
		for i := range p.Dim {
			p.Query(0, 0, h)[i] = x
			for j := range p.Keys[0] {
				p.Key(0, j, h)[i] = 1
			}
		}
	}
	p.q, p.k = tensorOf(tensor.Float32, p.DenseQ(1), 1, 2, 1, 4), tensorOf(tensor.Float32, p.DenseK(3), 1, 2, 3, 4)
	g, ours := p.both(t)
	var oursV G.Value
	G.Read(ours, &oursV)
	g.run(t)
	p.check(t, p.Reference(p.precision(0)), oursV, nil)
	if !slices.ContainsFunc(floats(t, g.outV), math.IsNaN) {
		t.Error("Gorgonia's SoftMax copes with rows far below the first element: Default's documentation is out of date")
	}
}
