package leanattention_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// denseRows returns numbers of rows (tokens, heads, dim) as a tensor for p, with NaN where p has no query.
func denseRows(p *graphtest.Problem, t tensor.Dtype, x []float64, dim int, shape ...int) *tensor.Dense {
	other := *p.Case
	other.Q, other.Dim = x, dim
	return graphtest.TensorOf(t, other.DenseQ(p.Rows), p.Dims(shape...)...)
}

// gradientsThere is the graph of the gradients of a problem on a GPU: those of the output, or of the log-sum-exp.
type gradientsThere struct {
	*graphtest.Graph
	d     *G.Node
	grads []G.Value
}

func newGradientsThere(t testing.TB, p *graphtest.Problem, ofLSE bool) *gradientsThere {
	t.Helper()
	g := &gradientsThere{Graph: p.Build(t)}
	of, shape, dtype, wrt := g.Out, p.Dims(p.Heads, p.Rows, p.ValueDim), p.QueryType, G.Nodes{g.Q, g.K, g.V}
	if ofLSE {
		of, shape, dtype, wrt = g.LSE, p.Dims(p.Heads, p.Rows), tensor.Float32, wrt[:2]
	}
	for _, n := range []*G.Node{g.BiasNode, g.SinksNode} {
		if n != nil {
			wrt = append(wrt, n)
		}
	}
	g.d = G.NewTensor(g.G, dtype, len(shape), G.WithShape(shape...), G.WithName("d"))
	nodes, err := G.Backpropagate(G.Nodes{of}, G.Nodes{g.d}, wrt)
	if err != nil {
		t.Fatal(err)
	}
	g.grads = make([]G.Value, len(wrt))
	for i, n := range nodes {
		G.Read(n, &g.grads[i])
	}
	return g
}

// The gradients of nodes on a GPU, against the reference: several runs with other numbers and lengths, and one run again,
// with the same bits.
func TestGPUGradients(t *testing.T) {
	gpu := devicetest.Open(t)
	rng := reftest.Rand(t)
	sinkTokens := graphtest.WithScoreMods(causal(dense(2, 1, 64, 64, 60, 200)), 9, 4, .5, .1)
	sinkTokens.SinkTokens = 3
	dropped := withSinks(graphtest.Biased(rng, causal(dense(4, 2, 72, 72, 40, 150, 77)), 2, 1, 40), 1, 0, -1, 2)
	dropped.Dropout, dropped.Seed = .3, rng.Int64()|1
	for i, c := range []struct {
		shape reftest.Shape
		x     graphtest.Spec
		ofLSE bool
	}{
		{shape: causal(dense(4, 2, 64, 64, 70, 70, 41)), x: graphtest.Spec{QueryType: la.BFloat16}},
		{shape: dense(2, 1, 128, 128, 33, 140), x: graphtest.Spec{QueryType: la.Float16, Rank: 3}},
		{shape: reftest.Shape{Heads: 2, KVHeads: 1, Dim: 96, ValueDim: 96, Queries: []int{20, 7}, Keys: []int{20, 7}, Mask: attn.Mask{Causal: true}}, x: graphtest.Spec{QueryType: la.Float16, Inputs: reftest.Peaked}},
		{shape: causal(dense(2, 2, 64, 64, 9, 20)), x: graphtest.Spec{QueryType: la.BFloat16}, ofLSE: true},
		{shape: withSinks(graphtest.WithScoreMods(causal(dense(4, 2, 80, 80, 40, 150)), 20, 0), 1, 3, -2, .5), x: graphtest.Spec{QueryType: la.Float16}},
		{shape: sinkTokens, x: graphtest.Spec{QueryType: la.BFloat16}},
		{shape: withSinks(graphtest.Biased(rng, dense(2, 1, 64, 64, 21, 37, 30), 1, 2, 21), 0, 1), x: graphtest.Spec{QueryType: la.BFloat16}},
		{shape: graphtest.Biased(rng, causal(dense(3, 1, 128, 128, 5, 5)), 1, 1, 1), x: graphtest.Spec{QueryType: la.Float16}, ofLSE: true},
		{shape: dropped, x: graphtest.Spec{QueryType: la.BFloat16}},
		{shape: withSinks(graphtest.Biased(rng, graphtest.WithScoreMods(causal(dense(4, 2, 96, 96, 33, 90, 140)), 30, 5, .5, .2, 0, .1), 1, 4, 33), 1, 0, 2, -1)},
	} {
		p := graphtest.NewProblem(rng, c.shape, c.x)
		g := newGradientsThere(t, p, c.ofLSE)
		G.Read(g.Out, &g.OutValue)
		vm := G.NewTapeMachine(g.G)
		for run := range 2 {
			if run > 0 {
				p = p.Another(rng)
			}
			format := graphtest.Format(p.QueryType)
			precision := reftest.Precision{Acc: reftest.Float32, P: format, Out: format}
			forward := p.Reference(precision)
			var dO, dLSE []float64
			draw := func(n int, f reftest.Format) []float64 {
				x := make([]float64, n)
				for i := range x {
					x[i] = f.Round(rng.NormFloat64())
				}
				return x
			}
			var d *tensor.Dense
			if c.ofLSE {
				dLSE = draw(len(forward.LSE), reftest.Float32)
				d = denseRows(p, tensor.Float32, dLSE, 1, p.Heads, p.Rows)
			} else {
				dO = draw(len(forward.O), format)
				d = denseRows(p, p.QueryType, dO, p.Dim, p.Heads, p.Rows, p.Dim)
			}
			want := p.Backward(precision, forward, dO, dLSE)
			for _, x := range []struct {
				n *G.Node
				x *tensor.Dense
			}{{g.Q, p.InQ}, {g.K, p.InK}, {g.V, p.InV}, {g.d, d}, {g.BiasNode, p.InBias}, {g.SinksNode, p.InSinks}} {
				if x.n == nil {
					continue
				}
				graphtest.Let(t, x.n, graphtest.Upload(t, gpu, x.x))
			}
			if g.Lengths != nil {
				graphtest.Let(t, g.Lengths, graphtest.LengthsOf(tensor.Int, p.Keys))
			}
			if g.QueryLengths != nil {
				graphtest.Let(t, g.QueryLengths, graphtest.LengthsOf(tensor.Int32, p.Queries))
			}
			if g.Seed != nil {
				if err := G.Let(g.Seed, p.Shape.Seed); err != nil {
					t.Fatal(err)
				}
			}
			var bits [][]uint64
			for again := range 2 {
				graphtest.Again(t, vm)
				for j, x := range g.grads {
					if got := graphtest.Bits(t, graphtest.Download(t, x)); again == 0 {
						bits = append(bits, got)
					} else if !slices.Equal(got, bits[j]) {
						t.Fatalf("case %d: other bits in the second run", i)
					}
				}
			}
			p.Check(t, forward, graphtest.Download(t, g.OutValue), nil)
			j := -1
			for _, x := range []struct {
				of          *tensor.Dense
				want, bound []float64
				heads, rows int
				live        []int
			}{{p.InQ, want.DQ, want.DQBound, p.Heads, p.Rows, p.Queries}, {p.InK, want.DK, want.DKBound, p.KVHeads, p.Capacity, p.Keys}, {p.InV, want.DV, want.DVBound, p.KVHeads, p.Capacity, p.Keys}, {p.InBias, want.DBias, want.DBiasBound, 1, 1, nil}, {p.InSinks, want.DSinks, want.DSinksBound, 1, 1, nil}} {
				if x.of == nil || x.of == p.InV && c.ofLSE {
					continue
				}
				j++
				there := graphtest.Download(t, g.grads[j])
				if there.Dtype() != x.of.Dtype() || !slices.Equal(there.Shape(), x.of.Shape()) {
					t.Fatalf("case %d: gradient %d is %v %v", i, j, there.Dtype(), there.Shape())
				}
				all := graphtest.Floats(t, there)
				if x.live == nil {
					if err := reftest.Compare(all, x.want, x.bound, 1, 1, len(all)); err != nil {
						t.Errorf("case %d, %v: gradient %d: %v", i, p.Shape, j, err)
					}
					continue
				}
				var got []float64
				for seq, live := range x.live {
					for pos := range x.rows {
						for h := range x.heads {
							row := all[((seq*x.heads+h)*x.rows+pos)*p.Dim:][:p.Dim]
							if pos < live {
								got = append(got, row...)
							} else if slices.ContainsFunc(row, func(f float64) bool { return f != 0 }) {
								t.Fatalf("case %d: gradient %d of padding is %v", i, j, row)
							}
						}
					}
				}
				if err := reftest.Compare(got, x.want, x.bound, len(got)/x.heads/p.Dim, x.heads, p.Dim); err != nil {
					t.Errorf("case %d, %v: gradient %d: %v", i, p.Shape, j, err)
				}
			}
		}
		if err := vm.Close(); err != nil {
			t.Fatal(err)
		}
	}
	testGradientsThereRefused(t, gpu)
}

// An option without gradients on a GPU is an error that names the option.
func testGradientsThereRefused(t *testing.T, gpu *device.GPU) {
	rng := reftest.Rand(t)
	run := func(p *graphtest.Problem, change func(g *gradientsThere)) error {
		g := newGradientsThere(t, p, false)
		for _, x := range []struct {
			n *G.Node
			x *tensor.Dense
		}{{g.Q, p.InQ}, {g.K, p.InK}, {g.V, p.InV}, {g.d, graphtest.TensorOf(p.QueryType, make([]float64, p.Heads*p.Rows*p.ValueDim), g.d.Shape()...)}} {
			graphtest.Let(t, x.n, graphtest.Upload(t, gpu, x.x))
		}
		if change != nil {
			change(g)
		}
		vm := G.NewTapeMachine(g.G)
		defer vm.Close()
		return vm.RunAll()
	}
	shape := dense(2, 1, 64, 64, 3, 9)
	dropped := shape
	dropped.Dropout, dropped.Seed = .2, 1
	for _, c := range []struct {
		text   string
		p      *graphtest.Problem
		change func(g *gradientsThere)
	}{
		{"gradients of float32 on GPUs: a dropout of 0.2", graphtest.NewProblem(rng, dropped, graphtest.Spec{}), nil},
		{"values of 32 elements and keys of 64", graphtest.NewProblem(rng, dense(2, 1, 64, 32, 3, 9), graphtest.Spec{QueryType: la.Float16}), nil},
		{"head dim 256", graphtest.NewProblem(rng, dense(1, 1, 256, 256, 3, 9), graphtest.Spec{QueryType: la.Float16}), nil},
		{"they must be in one place", graphtest.NewProblem(rng, shape, graphtest.Spec{QueryType: la.Float16}), func(g *gradientsThere) {
			graphtest.Let(t, g.d, graphtest.TensorOf(la.Float16, make([]float64, 2*3*64), 1, 2, 3, 64))
		}},
	} {
		if err := la.Cause(run(c.p, c.change)); !errors.Is(err, la.ErrUnsupported) || !strings.Contains(fmt.Sprint(err), c.text) {
			t.Errorf("%s: %v", c.text, err)
		}
	}
}

// What attention with dropout on a GPU does not have is an error that names the option.
func TestGPUDropoutRefused(t *testing.T) {
	gpu := devicetest.Open(t)
	rng := reftest.Rand(t)
	shape := causal(dense(2, 1, 64, 64, 3, 9, 2))
	shape.Dropout, shape.Seed = .5, 3
	for _, c := range []struct {
		text   string
		is     error
		dtype  tensor.Dtype
		option la.Option
	}{
		{"a dropout of 0.5", la.ErrUnsupported, tensor.Float32, la.WithQueriesAtEnd()},
		{"unfused attention", la.ErrUnsupported, la.Float16, la.WithSchedule(la.Unfused)},
		{"LeanTiles of 64 tokens", la.ErrUnsupported, la.Float16, la.WithTileTokens(64)},
		{"aligned to the end of the keys", la.ErrLength, la.Float16, la.WithScale(1)},
	} {
		p := graphtest.NewProblem(rng, shape, graphtest.Spec{QueryType: c.dtype})
		g := p.Graph()
		lengths := graphtest.Input(g.G, "lengths", graphtest.LengthsOf(tensor.Int, p.Keys))
		out, err := la.Attention(g.Q, g.K, g.V, la.WithCausal(), la.WithDropout(.5, g.Seed), la.WithLengths(lengths), c.option)
		if err != nil {
			t.Fatal(err)
		}
		for n, x := range map[*G.Node]*tensor.Dense{g.Q: p.InQ, g.K: p.InK, g.V: p.InV} {
			graphtest.Let(t, n, graphtest.Upload(t, gpu, x))
		}
		vm := G.NewTapeMachine(g.G)
		if err := la.Cause(vm.RunAll()); !errors.Is(err, c.is) || !strings.Contains(fmt.Sprint(err), c.text) {
			t.Errorf("%s: %v, of %v", c.text, err, out)
		}
		if err := vm.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// A q of 16 bits is for GPUs alone.
func TestSixteenBitQueriesInHostMemory(t *testing.T) {
	p := graphtest.NewProblem(reftest.Rand(t), dense(2, 1, 64, 64, 3, 9), graphtest.Spec{QueryType: la.BFloat16})
	g := p.Build(t)
	vm := G.NewTapeMachine(g.G)
	defer vm.Close()
	if err := la.Cause(vm.RunAll()); !errors.Is(err, la.ErrDType) || !strings.Contains(fmt.Sprint(err), "q is BFloat16; in host memory it must be float32 or float64") {
		t.Error(err)
	}
}
