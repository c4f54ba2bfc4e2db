package leanattention_test

import (
	"fmt"
	"math"
	"runtime"
	"slices"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// TestGradDefault compares the gradients with those that Gorgonia's own ops have.
func TestGradDefault(t *testing.T) {
	rng := reftest.Rand(t)
	for _, s := range []reftest.Shape{
		dense(1, 1, 3, 2, 2, 4),
		dense(4, 2, 16, 8, 3, 40, 40),
		dense(6, 1, 24, 24, 7, 33, 33, 33),
		causal(dense(4, 4, 16, 16, 9, 9, 9)),
		causal(dense(6, 2, 16, 24, 70, 150)),
		bent(causal(dense(4, 2, 16, 8, 70, 90, 90)), 20, 0),
		bent(dense(2, 1, 8, 8, 9, 12), 1, 0),
		bent(causal(dense(4, 2, 16, 8, 20, 33)), 0, 1.5),
		bent(dense(4, 1, 16, 8, 7, 33, 33), 0, 0, 0.5, 0.25, -0.1, 0.125),
		bent(causal(dense(4, 2, 16, 8, 20, 40, 40)), 9, 0.8, 0.5, 0.25, 0.1, 0.125),
		biased(rng, dense(4, 2, 16, 8, 9, 40, 40), 2, 4, 9),
		biased(rng, bent(causal(dense(4, 1, 16, 8, 70, 150)), 0, 2), 1, 4, 70),
	} {
		for _, query := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
			p := newProblem(rng, s, spec{query: query})
			p.show()
			ours := p.differentiate(t, rng, cost{out: true})
			ours.run(t)
			want := ours.want()
			if err := ours.compareGrads(t, want); err != nil {
				t.Errorf("%v %v: %v", s, query, err)
			}

			// The reference's bounds hold for ours; what the two differ by is as
			// much again for the other.
			stock := &gradients{problem: p, graph: p.graph(), dO: ours.dO}
			var err error
			if stock.out, err = la.Default(stock.graph.q, stock.graph.k, stock.graph.v, stock.graph.options(p)...); err != nil {
				t.Fatal(err)
			}
			w := input(stock.g, "wO", ours.wO.Value().(*tensor.Dense))
			grads, err := G.Grad(G.Must(G.Sum(G.Must(G.HadamardProd(stock.out, w)))), stock.wrtOf(ours)...)
			if err != nil {
				t.Fatal(err)
			}
			for i, n := range grads {
				G.Read(n, []*G.Value{&stock.dq, &stock.dk, &stock.dv, &stock.dbias}[i])
			}
			stock.run(t)
			for i := range grads {
				got, other := floats(t, []G.Value{ours.dq, ours.dk, ours.dv, ours.dbias}[i]), floats(t, []G.Value{stock.dq, stock.dk, stock.dv, stock.dbias}[i])
				most := slices.Max([][]float64{want.DQBound, want.DKBound, want.DVBound, want.DBiasBound}[i])
				for j := range got {
					if !(math.Abs(got[j]-other[j]) <= 2*most) {
						t.Fatalf("%v %v: d%s[%d] is %v, by the default %v, which may differ by %g", s, query, operands[i], j, got[j], other[j], 2*most)
					}
				}
			}
		}
	}
}

// operands are what there are gradients of.
var operands = []string{"q", "k", "v", "bias"}

// wrtOf is the nodes of g that others are differentiated by.
func (g *gradients) wrtOf(other *gradients) G.Nodes {
	return G.Nodes{g.graph.q, g.graph.k, g.graph.v, g.graph.bias}[:len(other.wrt)]
}

// TestGradDifferences compares the gradients with central differences of the
// cost, which Attend computes.
func TestGradDifferences(t *testing.T) {
	rng := reftest.Rand(t)
	for i, s := range []reftest.Shape{
		dense(2, 1, 3, 2, 2, 4, 1),
		causal(dense(4, 2, 2, 3, 3, 5, 2, 0)),
		causal(dense(1, 1, 5, 5, 6, 6)),
		bent(causal(dense(4, 2, 3, 3, 5, 7, 4, 1)), 3, 0),
		bent(dense(2, 1, 3, 2, 4, 6), 2, 0.7),
		bent(causal(dense(4, 2, 3, 2, 4, 7, 3)), 0, 1.2, 0.5, 1, -0.25, 2),
		bent(causal(dense(2, 2, 3, 2, 4, 6)), 3, 0.5, 0.5, 0.25),
		bent(causal(dense(2, 2, 3, 2, 4, 6)), 1, 0.5, 0.5, 0.25),
		biased(rng, dense(4, 2, 3, 2, 4, 7, 3), 2, 4, 4),
		biased(rng, bent(causal(dense(4, 2, 3, 2, 4, 7, 3)), 5, 1.2, 0.5, 1, -0.25, 2), 1, 4, 1),
		biased(rng, causal(dense(4, 4, 3, 2, 4, 7)), 1, 1, 4),
	} {
		of := costs[(i+2)%3]
		p := newProblem(rng, s, spec{query: tensor.Float64})
		p.show()
		g := p.differentiate(t, rng, of)
		g.run(t)
		out, lse := tensor.New(tensor.Of(tensor.Float64), tensor.WithShape(g.out.Shape()...)), tensor.New(tensor.Of(tensor.Float64), tensor.WithShape(g.lse.Shape()...))
		value := func() (sum float64) {
			a := la.Args{Q: p.q, K: p.k, V: p.v, Out: out, LSE: lse, Lengths: p.Keys}
			if p.bias != nil {
				a.Bias = p.bias
			}
			if err := la.Attend(a, p.options()...); err != nil {
				t.Fatal(err)
			}
			for _, x := range []struct {
				w *G.Node
				y *tensor.Dense
			}{{g.wO, out}, {g.wLSE, lse}} {
				if x.w == nil {
					continue
				}
				for i, w := range floats(t, x.w.Value()) {
					if y := floats(t, x.y)[i]; !math.IsInf(y, -1) {
						sum += w * y
					}
				}
			}
			return sum
		}
		for i, x := range []*tensor.Dense{p.q, p.k, p.v, p.bias} {
			v := []G.Value{g.dq, g.dk, g.dv, g.dbias}[i]
			if v == nil {
				continue
			}
			got, data := floats(t, v), floats(t, x)
			for j, old := range data {
				const h = 1e-5
				data[j] = old + h
				up := value()
				data[j] = old - h
				down := value()
				data[j] = old
				if want := (up - down) / (2 * h); math.Abs(got[j]-want) > 1e-7*(1+math.Abs(want)) {
					t.Fatalf("%v, %v: d%s[%d] is %v, by differences %v", s, of, operands[i], j, got[j], want)
				}
			}
		}
	}
}

// TestGradMemory: what a run with gradients allocates grows with the context, and
// not with its square.
func TestGradMemory(t *testing.T) {
	rng := reftest.Rand(t)
	run := func(n int) float64 {
		p := newProblem(rng, causal(dense(2, 2, 16, 16, n, n)), spec{})
		g := p.differentiate(t, rng, cost{out: true})
		vm := G.NewTapeMachine(g.g)
		defer vm.Close()
		again(t, vm) // the engine's memory grows once
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		const runs = 3
		for range runs {
			again(t, vm)
		}
		runtime.ReadMemStats(&after)
		return float64(after.TotalAlloc-before.TotalAlloc) / runs
	}
	const n = 512
	small, large := run(n), run(4*n)
	t.Logf("%.0f and %.0f bytes a run with contexts of %d and %d", small, large, n, 4*n)
	if large > 4.5*small {
		t.Errorf("%.0f bytes a run with a context of %d, %.0f with one of %d", small, n, large, 4*n)
	}
	if scores := float64(2 * 4 * n * 4 * n * 4); large > scores/4 { // of two heads, in float32
		t.Errorf("%.0f bytes a run with a context of %d, whose scores have %.0f", large, 4*n, scores)
	}
}

// BenchmarkGrad is a training step of attention alone, on the tape machine: the
// output and its gradients in q, k and v, of 12 heads of 64.
//
//	default  Gorgonia's own ops
//	lean     Attention
func BenchmarkGrad(b *testing.B) {
	const heads, dim = 12, 64
	for _, of := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		for _, mask := range []bool{false, true} {
			for _, n := range []int{128, 256, 512, 1024, 2048} {
				for _, name := range []string{"default", "lean"} {
					b.Run(fmt.Sprintf("%v/causal=%t/n%d/%s", of, mask, n, name), func(b *testing.B) {
						var opts []la.Option
						if mask {
							opts = append(opts, la.WithCausal())
						}
						benchmarkGrad(b, of, name == "lean", heads, n, dim, nil, opts)
					})
				}
			}
		}
	}
}

// BenchmarkGradBias is lean of BenchmarkGrad at 1024 keys without a bias, with one
// that the queries share, and with one for each score; gradients in it too.
func BenchmarkGradBias(b *testing.B) {
	const heads, n, dim = 12, 1024, 64
	for name, bias := range map[string][]int{"none": nil, "shared": {1, heads, 1, n}, "full": {1, heads, n, n}} {
		b.Run(name, func(b *testing.B) { benchmarkGrad(b, tensor.Float32, true, heads, n, dim, bias, nil) })
	}
}

// benchmarkGrad has a bias of a shape, unless that is nil.
func benchmarkGrad(b *testing.B, of tensor.Dtype, lean bool, heads, n, dim int, bias []int, opts []la.Option) {
	attention := la.Default
	if lean {
		attention = la.Attention
	}
	g := G.NewGraph()
	numbers := func(name string) *G.Node {
		return input(g, name, tensorOf(of, floats(b, random(tensor.Float32, 1, heads, n, dim)), 1, heads, n, dim))
	}
	in := G.Nodes{numbers("q"), numbers("k"), numbers("v")}
	if bias != nil {
		in = append(in, input(g, "bias", random(of, bias...)))
		opts = append(opts, la.WithBias(in[3]))
	}
	out, err := attention(in[0], in[1], in[2], opts...)
	if err != nil {
		b.Fatal(err)
	}
	if _, err = G.Grad(G.Must(G.Sum(G.Must(G.HadamardProd(out, numbers("w"))))), in...); err != nil {
		b.Fatal(err)
	}
	vm := G.NewTapeMachine(g)
	defer vm.Close()
	b.ReportAllocs()
	for b.Loop() {
		if err := vm.RunAll(); err != nil {
			b.Fatal(err)
		}
		vm.Reset()
	}
}
