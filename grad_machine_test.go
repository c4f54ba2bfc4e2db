package leanattention_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// TestGradMachines: what the tape machine can be asked to do beside running.
func TestGradMachines(t *testing.T) {
	rng := reftest.Rand(t)
	for name, opts := range map[string][]G.VMOpt{
		"trace":    {G.TraceExec()},
		"NaN":      {G.WithNaNWatch()},
		"infinity": {G.WithInfWatch()},
	} {
		p := graphtest.NewProblem(rng, causal(dense(4, 2, 8, 8, 9, 30, 30)), graphtest.Spec{QueryType: tensor.Float64}) // every query sees a key: no -Inf
		g := differentiate(t, p, rng, cost{out: true, lse: true})
		vm := G.NewTapeMachine(g.G, opts...)
		for range 3 {
			graphtest.Again(t, vm)
			if err := g.compareGrads(t, g.want()); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			g.again(t, rng, p.Another(rng))
		}
		vm.Close()
	}
}

// TestGradDual: gradients bound to their nodes, for a solver. They add up over
// runs until the solver takes them.
func TestGradDual(t *testing.T) {
	rng := reftest.Rand(t)
	p := graphtest.NewProblem(rng, dense(4, 2, 8, 6, 9, 30), graphtest.Spec{QueryType: tensor.Float64})
	g := differentiate(t, p, rng, cost{out: true})
	vm := G.NewTapeMachine(g.G, G.BindDualValues(g.wrt...))
	defer vm.Close()
	for runs := range 2 {
		graphtest.Again(t, vm)
		if err := g.compareGrads(t, g.want()); err != nil {
			t.Fatal(err)
		}
		for i, n := range g.wrt {
			grad, err := n.Grad()
			if err != nil {
				t.Fatal(err)
			}
			for j, x := range graphtest.Floats(t, []G.Value{g.dq, g.dk, g.dv}[i]) {
				if got := graphtest.Floats(t, grad)[j]; math.Abs(got-float64(runs+1)*x) > 1e-12 {
					t.Fatalf("after %d runs d%c[%d] is %v, %v in each", runs+1, "qkv"[i], j, got, x)
				}
			}
		}
	}
	before := slices.Clone(graphtest.Floats(t, g.Graph.K.Value()))
	if err := G.NewVanillaSolver(G.WithLearnRate(0.5)).Step(G.NodesToValueGrads(g.wrt)); err != nil {
		t.Fatal(err)
	}
	for j, x := range graphtest.Floats(t, g.dk) {
		if got := graphtest.Floats(t, g.Graph.K.Value())[j]; math.Abs(got-(before[j]-0.5*2*x)) > 1e-12 {
			t.Fatalf("the solver makes k[%d] %v of %v, whose gradient is %v", j, got, before[j], 2*x)
		}
	}
}

// TestGradChain: the attention in the middle of a graph, whose q, k and v follow
// from one input, whose output goes through ops that Gorgonia runs in place and
// whose gradient comes transposed; twice, one behind the other.
func TestGradChain(t *testing.T) {
	rng := reftest.Rand(t)
	const heads, n, dim = 3, 5, 4
	build := func(attention func(q, k, v *G.Node, opts ...la.Option) (*G.Node, error), x *tensor.Dense) []float64 {
		g := G.NewGraph()
		in := graphtest.Input(g, "x", x)
		out := in
		for range 2 {
			var err error
			if out, err = attention(out, G.Must(G.Tanh(out)), out, la.WithCausal()); err != nil {
				t.Fatal(err)
			}
			out = G.Must(G.Add(G.Must(G.Square(out)), in))
		}
		turned := G.Must(G.Transpose(out, 1, 0, 2))
		w := graphtest.Input(g, "w", graphtest.TensorOf(tensor.Float64, noise(rand.New(rand.NewPCG(1, 2)), n*heads*dim), n, heads, dim))
		d, err := G.Grad(G.Must(G.Sum(G.Must(G.HadamardProd(turned, w)))), in)
		if err != nil {
			t.Fatal(err)
		}
		var dx G.Value
		G.Read(d[0], &dx)
		vm := G.NewTapeMachine(g)
		defer vm.Close()
		graphtest.Again(t, vm)
		first := slices.Clone(graphtest.Floats(t, dx))
		graphtest.Again(t, vm)
		if !slices.Equal(graphtest.Floats(t, dx), first) {
			t.Error("the second run has another gradient")
		}
		return first
	}
	x := graphtest.TensorOf(tensor.Float64, noise(rng, heads*n*dim), heads, n, dim)
	ours, stock := build(la.Attention, x), build(la.Default, x)
	for i, want := range stock {
		if math.Abs(ours[i]-want) > 1e-10*(1+math.Abs(want)) {
			t.Fatalf("dx[%d] is %v, by the default %v", i, ours[i], want)
		}
	}
}

func noise(rng *rand.Rand, n int) []float64 {
	x := make([]float64, n)
	for i := range x {
		x[i] = rng.NormFloat64()
	}
	return x
}

// TestGradOneElement: Gorgonia makes scalars of tensors of one element.
func TestGradOneElement(t *testing.T) {
	for _, query := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		for _, rank := range []int{3, 4} {
			g := G.NewGraph()
			shape := []int{1, 1, 1, 1}[:rank]
			q, v := graphtest.Input(g, "q", graphtest.TensorOf(query, []float64{2}, shape...)), graphtest.Input(g, "v", graphtest.TensorOf(query, []float64{3}, shape...))
			out, err := la.Attention(q, q, v)
			if err != nil {
				t.Fatal(err)
			}
			d, err := G.Grad(G.Must(G.Sum(G.Must(G.Square(out)))), q, v)
			if err != nil {
				t.Fatal(err)
			}
			var dq, dv G.Value
			G.Read(d[0], &dq)
			G.Read(d[1], &dv)
			vm := G.NewTapeMachine(g)
			graphtest.Again(t, vm)
			if a, b := graphtest.Floats(t, dq)[0], graphtest.Floats(t, dv)[0]; a != 0 || b != 6 {
				t.Errorf("%v, rank %d: gradients are %v and %v", query, rank, a, b)
			}
			vm.Close()
		}
	}
}

// TestGradClones: clones of a graph share their ops, and may run at once.
func TestGradClones(t *testing.T) {
	rng := reftest.Rand(t)
	p := graphtest.NewProblem(rng, dense(2, 1, 8, 8, 20, 50), graphtest.Spec{QueryType: tensor.Float64})
	g := &gradients{Problem: p, Graph: p.Graph()} // no reads, which clones share
	var err error
	if g.Out, err = la.Attention(g.Graph.Q, g.Graph.K, g.Graph.V, p.Options()...); err != nil {
		t.Fatal(err)
	}
	grads, err := G.Grad(g.sum(t, rng, cost{out: true}), g.Graph.Q, g.Graph.K, g.Graph.V)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	results := make([]gradients, 4)
	for i := range results {
		clone := g.G.Clone().(*G.ExprGraph)
		results[i] = *g
		wg.Go(func() {
			vm := G.NewTapeMachine(clone)
			defer vm.Close()
			for range 5 {
				if err := vm.RunAll(); err != nil {
					t.Error(err)
				}
				vm.Reset()
			}
			for j, n := range grads {
				*[]*G.Value{&results[i].dq, &results[i].dk, &results[i].dv}[j] = clone.Node(n.ID()).(*G.Node).Value()
			}
		})
	}
	wg.Wait()
	for i := range results {
		if err := results[i].compareGrads(t, g.want()); err != nil {
			t.Error(err)
		}
	}
}

// TestGradBadValues: what a run gives the gradient's ops is checked.
func TestGradBadValues(t *testing.T) {
	rng := reftest.Rand(t)
	p := graphtest.NewProblem(rng, dense(2, 1, 4, 6, 3, 5, 7), graphtest.Spec{Capacity: 7})
	g := differentiate(t, p, rng, cost{out: true})
	var grad, part G.Op
	for _, n := range g.G.AllNodes() {
		if n.Op() == nil {
			continue
		}
		switch n.Op().String() {
		case "LeanAttentionGradient":
			grad = n.Op()
		case "LeanAttention dk":
			part = n.Op()
		}
	}
	f32 := func(shape ...int) G.Value { return tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(shape...)) }
	lengths := graphtest.LengthsOf(tensor.Int, p.Keys)
	out, lse := f32(2, 2, 3, 6), f32(2, 2, 3)
	good := []G.Value{p.InQ, p.InK, p.InV, lengths, out, lse, out}
	if _, err := grad.Do(good...); err != nil {
		t.Fatal(err)
	}
	for i, bad := range []struct {
		v    G.Value
		want error
	}{
		{f32(2, 2, 3, 5), la.ErrShape}, {nil, la.ErrShape}, {f32(2, 1, 7, 7), la.ErrShape},
		{graphtest.LengthsOf(tensor.Int, []int{1, 8}), la.ErrLength}, {f32(6), la.ErrShape},
		{G.NewF32(1), la.ErrUnsupported}, {tensor.New(tensor.Of(tensor.Float64), tensor.WithShape(2, 2, 3, 6)), la.ErrShape},
	} {
		in := slices.Clone(good)
		in[i] = bad.v
		v, err := grad.Do(in...)
		wantError(t, err, bad.want, "Attention gradient")
		if v != nil {
			t.Errorf("input %d: a value beside the error", i)
		}
	}
	_, err := grad.Do(good[1:]...)
	wantError(t, err, la.ErrShape, "Attention gradient", "6 inputs")
	for _, in := range [][]G.Value{nil, {f32(3)}, {G.NewF32(1)}, {out, out}} {
		if v, err := part.Do(in...); err == nil || v != nil {
			t.Errorf("a part of %v is %v", in, v)
		}
	}
}

// TestGradDefault compares the gradients with those that Gorgonia's own ops have.
func TestGradDefault(t *testing.T) {
	rng := reftest.Rand(t)
	for _, s := range []reftest.Shape{
		dense(1, 1, 3, 2, 2, 4),
		dense(4, 2, 16, 8, 3, 40, 40),
		dense(6, 1, 24, 24, 7, 33, 33, 33),
		causal(dense(4, 4, 16, 16, 9, 9, 9)),
		causal(dense(6, 2, 16, 24, 70, 150)),
		graphtest.WithScoreMods(causal(dense(4, 2, 16, 8, 70, 90, 90)), 20, 0),
		graphtest.WithScoreMods(dense(2, 1, 8, 8, 9, 12), 1, 0),
		graphtest.WithScoreMods(causal(dense(4, 2, 16, 8, 20, 33)), 0, 1.5),
		graphtest.WithScoreMods(dense(4, 1, 16, 8, 7, 33, 33), 0, 0, 0.5, 0.25, -0.1, 0.125),
		graphtest.WithScoreMods(causal(dense(4, 2, 16, 8, 20, 40, 40)), 9, 0.8, 0.5, 0.25, 0.1, 0.125),
		graphtest.Biased(rng, dense(4, 2, 16, 8, 9, 40, 40), 2, 4, 9),
		graphtest.Biased(rng, graphtest.WithScoreMods(causal(dense(4, 1, 16, 8, 70, 150)), 0, 2), 1, 4, 70),
	} {
		for _, query := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
			p := graphtest.NewProblem(rng, s, graphtest.Spec{QueryType: query})
			p.Show()
			ours := differentiate(t, p, rng, cost{out: true})
			ours.Run(t)
			want := ours.want()
			if err := ours.compareGrads(t, want); err != nil {
				t.Errorf("%v %v: %v", s, query, err)
			}

			// The reference's bounds hold for ours; what the two differ by is as
			// much again for the other.
			stock := &gradients{Problem: p, Graph: p.Graph(), dO: ours.dO}
			var err error
			if stock.Out, err = la.Default(stock.Graph.Q, stock.Graph.K, stock.Graph.V, stock.Graph.Options(p)...); err != nil {
				t.Fatal(err)
			}
			w := graphtest.Input(stock.G, "wO", ours.wO.Value().(*tensor.Dense))
			grads, err := G.Grad(G.Must(G.Sum(G.Must(G.HadamardProd(stock.Out, w)))), stock.wrtOf(ours)...)
			if err != nil {
				t.Fatal(err)
			}
			for i, n := range grads {
				G.Read(n, []*G.Value{&stock.dq, &stock.dk, &stock.dv, &stock.dbias}[i])
			}
			stock.Run(t)
			for i := range grads {
				got, other := graphtest.Floats(t, []G.Value{ours.dq, ours.dk, ours.dv, ours.dbias}[i]), graphtest.Floats(t, []G.Value{stock.dq, stock.dk, stock.dv, stock.dbias}[i])
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
var operands = []string{"q", "k", "v", "bias", "sinks"}

// wrtOf is the nodes of g that others are differentiated by.
func (g *gradients) wrtOf(other *gradients) G.Nodes {
	return G.Nodes{g.Graph.Q, g.Graph.K, g.Graph.V, g.Graph.BiasNode}[:len(other.wrt)]
}

// padded is s with so many queries of each sequence, the most of which are the rows.
func padded(s reftest.Shape, queries ...int) reftest.Shape {
	s.Queries = queries
	return s
}

// TestGradDifferences compares the gradients with central differences of the
// cost, which Attend computes.
func TestGradDifferences(t *testing.T) {
	rng := reftest.Rand(t)
	for i, s := range []reftest.Shape{
		dense(2, 1, 3, 2, 2, 4, 1),
		causal(dense(4, 2, 2, 3, 3, 5, 2, 0)),
		causal(dense(1, 1, 5, 5, 6, 6)),
		graphtest.WithScoreMods(causal(dense(4, 2, 3, 3, 5, 7, 4, 1)), 3, 0),
		graphtest.WithScoreMods(dense(2, 1, 3, 2, 4, 6), 2, 0.7),
		graphtest.WithScoreMods(causal(dense(4, 2, 3, 2, 4, 7, 3)), 0, 1.2, 0.5, 1, -0.25, 2),
		graphtest.WithScoreMods(causal(dense(2, 2, 3, 2, 4, 6)), 3, 0.5, 0.5, 0.25),
		graphtest.WithScoreMods(causal(dense(2, 2, 3, 2, 4, 6)), 1, 0.5, 0.5, 0.25),
		graphtest.Biased(rng, dense(4, 2, 3, 2, 4, 7, 3), 2, 4, 4),
		graphtest.Biased(rng, graphtest.WithScoreMods(causal(dense(4, 2, 3, 2, 4, 7, 3)), 5, 1.2, 0.5, 1, -0.25, 2), 1, 4, 1),
		graphtest.Biased(rng, causal(dense(4, 4, 3, 2, 4, 7)), 1, 1, 4),
		withSinks(causal(dense(2, 1, 3, 2, 5, 4)), 0.5, -1), // a query that sees no key
		withSinks(graphtest.Biased(rng, graphtest.WithScoreMods(causal(dense(2, 1, 3, 2, 4, 7, 3)), 3, 1.2), 1, 2, 4), 1, 2),
		withSinks(dense(1, 1, 3, 2, 4, 7, 3), 0),
		padded(causal(dense(2, 1, 3, 2, 5, 5, 3, 4)), 5, 3, 4),
		padded(dense(4, 2, 3, 2, 4, 7, 3), 0, 4),
		padded(graphtest.Biased(rng, graphtest.WithScoreMods(causal(dense(2, 1, 3, 2, 5, 7, 3, 4)), 3, 1.2, 0.5, -0.25), 3, 2, 5), 5, 3, 2),
		padded(withSinks(causal(dense(2, 1, 3, 2, 5, 5, 3)), 0.5, -1), 5, 4), // a query that sees no key
	} {
		of := costs[(i+2)%3]
		p := graphtest.NewProblem(rng, s, graphtest.Spec{QueryType: tensor.Float64})
		p.Show()
		g := differentiate(t, p, rng, of)
		g.Run(t)
		out, lse := tensor.New(tensor.Of(tensor.Float64), tensor.WithShape(g.Out.Shape()...)), tensor.New(tensor.Of(tensor.Float64), tensor.WithShape(g.LSE.Shape()...))
		value := func() (sum float64) {
			a := la.Args{Q: p.InQ, K: p.InK, V: p.InV, Out: out, LSE: lse, Lengths: p.Keys, QueryLengths: p.Queries}
			if p.InBias != nil {
				a.Bias = p.InBias
			}
			if p.InSinks != nil {
				a.Sinks = p.InSinks
			}
			if err := la.Attend(a, p.AttendOptions()...); err != nil {
				t.Fatal(err)
			}
			for _, x := range []struct {
				w *G.Node
				y *tensor.Dense
			}{{g.wO, out}, {g.wLSE, lse}} {
				if x.w == nil {
					continue
				}
				for i, w := range graphtest.Floats(t, x.w.Value()) {
					if y := graphtest.Floats(t, x.y)[i]; !math.IsInf(y, -1) && !math.IsNaN(w) { // which is that of padding
						sum += w * y
					}
				}
			}
			return sum
		}
		for i, x := range []*tensor.Dense{p.InQ, p.InK, p.InV, p.InBias, p.InSinks} {
			v := []G.Value{g.dq, g.dk, g.dv, g.dbias, g.dsinks}[i]
			if v == nil {
				continue
			}
			got, data := graphtest.Floats(t, v), graphtest.Floats(t, x)
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
		p := graphtest.NewProblem(rng, causal(dense(2, 2, 16, 16, n, n)), graphtest.Spec{})
		g := differentiate(t, p, rng, cost{out: true})
		vm := G.NewTapeMachine(g.G)
		defer vm.Close()
		graphtest.Again(t, vm) // the engine's memory grows once
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		const runs = 3
		for range runs {
			graphtest.Again(t, vm)
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
		return graphtest.Input(g, name, graphtest.TensorOf(of, graphtest.Floats(b, random(tensor.Float32, 1, heads, n, dim)), 1, heads, n, dim))
	}
	in := G.Nodes{numbers("q"), numbers("k"), numbers("v")}
	if bias != nil {
		in = append(in, graphtest.Input(g, "bias", random(of, bias...)))
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
