package leanattention_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	la "gorgonia.org/leanattention"
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
		p := newProblem(rng, causal(dense(4, 2, 8, 8, 9, 30, 30)), spec{query: tensor.Float64}) // every query sees a key: no -Inf
		g := p.differentiate(t, rng, cost{out: true, lse: true})
		vm := G.NewTapeMachine(g.g, opts...)
		for range 3 {
			again(t, vm)
			if err := g.compareGrads(t, g.want()); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			g.again(t, rng, p.another(rng))
		}
		vm.Close()
	}
}

// TestGradDual: gradients bound to their nodes, for a solver. They add up over
// runs until the solver takes them.
func TestGradDual(t *testing.T) {
	rng := reftest.Rand(t)
	p := newProblem(rng, dense(4, 2, 8, 6, 9, 30), spec{query: tensor.Float64})
	g := p.differentiate(t, rng, cost{out: true})
	vm := G.NewTapeMachine(g.g, G.BindDualValues(g.wrt...))
	defer vm.Close()
	for runs := range 2 {
		again(t, vm)
		if err := g.compareGrads(t, g.want()); err != nil {
			t.Fatal(err)
		}
		for i, n := range g.wrt {
			grad, err := n.Grad()
			if err != nil {
				t.Fatal(err)
			}
			for j, x := range floats(t, []G.Value{g.dq, g.dk, g.dv}[i]) {
				if got := floats(t, grad)[j]; math.Abs(got-float64(runs+1)*x) > 1e-12 {
					t.Fatalf("after %d runs d%c[%d] is %v, %v in each", runs+1, "qkv"[i], j, got, x)
				}
			}
		}
	}
	before := slices.Clone(floats(t, g.graph.k.Value()))
	if err := G.NewVanillaSolver(G.WithLearnRate(0.5)).Step(G.NodesToValueGrads(g.wrt)); err != nil {
		t.Fatal(err)
	}
	for j, x := range floats(t, g.dk) {
		if got := floats(t, g.graph.k.Value())[j]; math.Abs(got-(before[j]-0.5*2*x)) > 1e-12 {
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
		in := input(g, "x", x)
		out := in
		for range 2 {
			var err error
			if out, err = attention(out, G.Must(G.Tanh(out)), out, la.WithCausal()); err != nil {
				t.Fatal(err)
			}
			out = G.Must(G.Add(G.Must(G.Square(out)), in))
		}
		turned := G.Must(G.Transpose(out, 1, 0, 2))
		w := input(g, "w", tensorOf(tensor.Float64, noise(rand.New(rand.NewPCG(1, 2)), n*heads*dim), n, heads, dim))
		d, err := G.Grad(G.Must(G.Sum(G.Must(G.HadamardProd(turned, w)))), in)
		if err != nil {
			t.Fatal(err)
		}
		var dx G.Value
		G.Read(d[0], &dx)
		vm := G.NewTapeMachine(g)
		defer vm.Close()
		again(t, vm)
		first := slices.Clone(floats(t, dx))
		again(t, vm)
		if !slices.Equal(floats(t, dx), first) {
			t.Error("the second run has another gradient")
		}
		return first
	}
	x := tensorOf(tensor.Float64, noise(rng, heads*n*dim), heads, n, dim)
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
			q, v := input(g, "q", tensorOf(query, []float64{2}, shape...)), input(g, "v", tensorOf(query, []float64{3}, shape...))
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
			again(t, vm)
			if a, b := floats(t, dq)[0], floats(t, dv)[0]; a != 0 || b != 6 {
				t.Errorf("%v, rank %d: gradients are %v and %v", query, rank, a, b)
			}
			vm.Close()
		}
	}
}

// TestGradClones: clones of a graph share their ops, and may run at once.
func TestGradClones(t *testing.T) {
	rng := reftest.Rand(t)
	p := newProblem(rng, dense(2, 1, 8, 8, 20, 50), spec{query: tensor.Float64})
	g := &gradients{problem: p, graph: p.graph()} // no reads, which clones share
	var err error
	if g.out, err = la.Attention(g.graph.q, g.graph.k, g.graph.v, p.options()...); err != nil {
		t.Fatal(err)
	}
	grads, err := G.Grad(g.sum(t, rng, cost{out: true}), g.graph.q, g.graph.k, g.graph.v)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	results := make([]gradients, 4)
	for i := range results {
		clone := g.g.Clone().(*G.ExprGraph)
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
	p := newProblem(rng, dense(2, 1, 4, 6, 3, 5, 7), spec{capacity: 7})
	g := p.differentiate(t, rng, cost{out: true})
	var grad, part G.Op
	for _, n := range g.g.AllNodes() {
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
	lengths := lengthsOf(tensor.Int, p.Keys)
	out, lse := f32(2, 2, 3, 6), f32(2, 2, 3)
	good := []G.Value{p.q, p.k, p.v, lengths, out, lse, out}
	if _, err := grad.Do(good...); err != nil {
		t.Fatal(err)
	}
	for i, bad := range []struct {
		v    G.Value
		want error
	}{
		{f32(2, 2, 3, 5), la.ErrShape}, {nil, la.ErrShape}, {f32(2, 1, 7, 7), la.ErrShape},
		{lengthsOf(tensor.Int, []int{1, 8}), la.ErrLength}, {f32(6), la.ErrShape},
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
