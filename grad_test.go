package leanattention_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// gradients is the graph of a problem with the cost
//
//	sum(wO * out) + sum(wLSE * lse)
//
// and what it must give. Of wO and wLSE one may be missing.
type gradients struct {
	*problem
	*graph
	wO, wLSE   *G.Node
	dO, dLSE   []float64 // in the reference's layout
	wrt        G.Nodes
	dq, dk, dv G.Value
	dbias      G.Value
}

// cost says what the cost of a test is made of.
type cost struct{ out, lse bool }

var costs = []cost{{out: true}, {lse: true}, {out: true, lse: true}}

func (c cost) String() string { return fmt.Sprintf("cost of out %t lse %t", c.out, c.lse) }

// draw gives the problem new gradients of its output.
func (g *gradients) draw(t testing.TB, rng *rand.Rand) {
	noise := func(n int) []float64 {
		x := make([]float64, n)
		for i := range x {
			x[i] = format(g.query).Round(rng.NormFloat64())
		}
		return x
	}
	rows := func(x []float64, dim int, shape ...int) *tensor.Dense { // (tokens, heads) to (heads, tokens)
		c := *g.Case
		c.Q, c.Dim = x, dim
		return tensorOf(g.query, c.DenseQ(g.Queries[0]), g.dims(shape...)...)
	}
	bind := func(n **G.Node, name string, v *tensor.Dense) {
		if *n == nil {
			*n = input(g.g, name, v)
			return
		}
		let(t, *n, v)
	}
	n := g.QueryRows() * g.Heads
	if g.dO != nil {
		g.dO = noise(n * g.ValueDim)
		bind(&g.wO, "wO", rows(g.dO, g.ValueDim, g.Heads, g.Queries[0], g.ValueDim))
	}
	if g.dLSE != nil {
		g.dLSE = noise(n)
		bind(&g.wLSE, "wLSE", rows(g.dLSE, 1, g.Heads, g.Queries[0]))
	}
}

// sum adds the cost to the graph.
func (g *gradients) sum(t testing.TB, rng *rand.Rand, of cost) *G.Node {
	t.Helper()
	if of.out {
		g.dO = []float64{}
	}
	if of.lse {
		g.dLSE = []float64{}
	}
	g.draw(t, rng)
	var sum *G.Node
	for _, x := range [][2]*G.Node{{g.out, g.wO}, {g.lse, g.wLSE}} {
		if x[1] == nil {
			continue
		}
		s := G.Must(G.Sum(G.Must(G.HadamardProd(x[0], x[1]))))
		if sum != nil {
			s = G.Must(G.Add(sum, s))
		}
		sum = s
	}
	return sum
}

// differentiate makes the graph of p, and of its gradients by Gorgonia's Grad.
func (p *problem) differentiate(t testing.TB, rng *rand.Rand, of cost, opts ...la.Option) *gradients {
	t.Helper()
	g := &gradients{problem: p, graph: p.build(t, opts...)}
	sum := g.sum(t, rng, of)
	g.wrt = G.Nodes{g.graph.q, g.graph.k}
	to := []*G.Value{&g.dq, &g.dk}
	if of.out {
		g.wrt, to = append(g.wrt, g.graph.v), append(to, &g.dv)
	}
	if g.graph.bias != nil {
		g.wrt, to = append(g.wrt, g.graph.bias), append(to, &g.dbias)
	}
	grads, err := G.Grad(sum, g.wrt...)
	if err != nil {
		t.Fatal(err)
	}
	for i, n := range grads {
		G.Read(n, to[i])
	}
	if err := la.CheckGraph(g.g); err != nil {
		t.Fatal(err)
	}
	return g
}

// again gives the inputs of the graph the numbers of another problem of its
// shapes.
func (g *gradients) again(t testing.TB, rng *rand.Rand, p *problem) {
	t.Helper()
	g.problem = p
	let(t, g.graph.q, p.q)
	let(t, g.graph.k, p.k)
	let(t, g.graph.v, p.v)
	if p.bias != nil {
		let(t, g.graph.bias, p.bias)
	}
	if g.lengths != nil {
		let(t, g.lengths, lengthsOf(tensor.Int, p.Keys))
	}
	g.draw(t, rng)
}

// want computes the gradients in float64.
func (g *gradients) want() *reftest.Gradients {
	p := g.precision(0)
	return g.Backward(p, g.Reference(p), g.dO, g.dLSE)
}

// compareGrads checks what a run left.
func (g *gradients) compareGrads(t testing.TB, want *reftest.Gradients) error {
	t.Helper()
	nq := g.Queries[0]
	for i, x := range []struct {
		name             string
		got              G.Value
		want, bound      []float64
		heads, rows, dim int
		live             []int
	}{
		{"dq", g.dq, want.DQ, want.DQBound, g.Heads, nq, g.Dim, g.Queries},
		{"dk", g.dk, want.DK, want.DKBound, g.KVHeads, g.capacity, g.Dim, g.Keys},
		{"dv", g.dv, want.DV, want.DVBound, g.KVHeads, g.capacity, g.ValueDim, g.Keys},
	} {
		if i == 2 && g.dO == nil {
			break
		}
		if shape := tensor.Shape(g.dims(x.heads, x.rows, x.dim)); x.got == nil || !x.got.Shape().Eq(shape) || x.got.Dtype() != g.query {
			return fmt.Errorf("%s is %v, want %v %v", x.name, x.got, g.query, shape)
		}
		all := floats(t, x.got)
		var got []float64
		for seq, live := range x.live {
			for pos := range x.rows {
				for h := range x.heads {
					at := ((seq*x.heads+h)*x.rows + pos) * x.dim
					row := all[at : at+x.dim]
					if pos < live {
						got = append(got, row...)
					} else if slices.ContainsFunc(row, func(f float64) bool { return f != 0 }) {
						return fmt.Errorf("%s of sequence %d at %d, beyond its length, is %v", x.name, seq, pos, row)
					}
				}
			}
		}
		if err := reftest.Compare(got, x.want, x.bound, len(got)/x.heads/x.dim, x.heads, x.dim); err != nil {
			return fmt.Errorf("%s: %w", x.name, err)
		}
	}
	if b := g.Bias; b.X != nil {
		if g.dbias == nil || !g.dbias.Shape().Eq(g.problem.bias.Shape()) || g.dbias.Dtype() != g.query {
			return fmt.Errorf("dbias is %v, want %v %v", g.dbias, g.query, g.problem.bias.Shape())
		}
		if err := reftest.Compare(floats(t, g.dbias), want.DBias, want.DBiasBound, b.Sequences, b.Heads, b.Queries, b.Keys); err != nil {
			return fmt.Errorf("dbias: %w", err)
		}
	}
	return nil
}

// randomGradProblem draws a problem with as many queries in every sequence.
func randomGradProblem(rng *rand.Rand) *problem {
	s := reftest.RandomShape(rng)
	s.Queries = repeated(len(s.Keys), max(s.Queries[0], 1))
	x := spec{inputs: reftest.AllInputs[rng.IntN(4)], query: []tensor.Dtype{tensor.Float32, tensor.Float64}[rng.IntN(2)]}
	x.capacity = max(slices.Max(s.Keys)+rng.IntN(3), 1)
	if len(s.Keys) == 1 && rng.IntN(2) == 0 {
		x.rank = 3
	}
	return newProblem(rng, s, x)
}

// randomBentProblem is randomGradProblem with a window, a soft cap, slopes or a bias.
func randomBentProblem(rng *rand.Rand) *problem {
	p := randomGradProblem(rng)
	s := p.Shape
	if rng.IntN(2) == 0 {
		s = reftest.RandomBias(rng, s, p.capacity)
	}
	if s.Bias.X == nil || rng.IntN(2) == 0 {
		s = reftest.RandomScoreMods(rng, s)
	}
	return newProblem(rng, s, p.spec)
}

// another draws a problem of p's shapes, with other numbers and other lengths.
func (p *problem) another(rng *rand.Rand) *problem {
	s := p.Shape
	if p.ragged() {
		s.Keys = slices.Clone(s.Keys)
		for i := range s.Keys {
			s.Keys[i] = rng.IntN(p.capacity + 1)
		}
	}
	return newProblem(rng, s, p.spec)
}

// TestGradRandom compares the gradients with the reference, in graphs that are
// run again with other numbers and other lengths.
func TestGradRandom(t *testing.T) { testGradRandom(t, randomGradProblem) }

// TestGradBends is TestGradRandom with windows, soft caps, slopes and biases.
func TestGradBends(t *testing.T) { testGradRandom(t, randomBentProblem) }

func testGradRandom(t *testing.T, problem func(*rand.Rand) *problem) {
	rng := reftest.Rand(t)
	n := 120
	if raceEnabled {
		n = 12
	}
	for i := range n {
		p := problem(rng)
		of := costs[i%3]
		tile, workers, schedule := rng.IntN(100), rng.IntN(5), schedules[rng.IntN(3)]
		g := p.differentiate(t, rng, of, la.WithTileTokens(tile), la.WithWorkers(workers), la.WithSchedule(schedule))
		vm := G.NewTapeMachine(g.g)
		for turn := range 2 {
			again(t, vm)
			if err := g.compareGrads(t, g.want()); err != nil {
				t.Fatalf("run %d: %v %v %v, %v, capacity %d, tiles of %d, %d workers, %v: %v",
					turn, g.Shape, g.inputs, g.query, of, g.capacity, tile, workers, schedule, err)
			}
			g.again(t, rng, p.another(rng))
		}
		vm.Close()
	}
}

// TestGradShapes meets what decoders and encoders are made of.
func TestGradShapes(t *testing.T) {
	rng := reftest.Rand(t)
	for i, s := range []reftest.Shape{
		dense(1, 1, 1, 1, 1, 1),
		dense(2, 2, 64, 64, 1, 300),
		causal(dense(2, 1, 59, 59, 130, 130)),
		causal(dense(4, 2, 32, 16, 70, 200, 3, 0)),
		causal(dense(8, 1, 16, 24, 33, 33, 33)),
		dense(3, 3, 40, 40, 65, 129, 1, 77),
		dense(6, 2, 8, 8, 3, 0, 0),
		causal(dense(2, 2, 16, 16, 235, 2)),
	} {
		for _, query := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
			for _, in := range reftest.AllInputs {
				if raceEnabled && (in != reftest.Peaked || i > 5) {
					continue
				}
				p := newProblem(rng, s, spec{inputs: in, query: query})
				if i%2 == 0 && p.Scale > 0 {
					p.Scale = -p.Scale
				}
				g := p.differentiate(t, rng, costs[i%3])
				g.run(t)
				if err := g.compareGrads(t, g.want()); err != nil {
					t.Errorf("%v %v %v, %v: %v", s, in, query, costs[i%3], err)
				}
			}
		}
	}
}

// TestGradLisp is TestGradRandom on the lisp machine.
func TestGradLisp(t *testing.T) {
	rng := reftest.Rand(t)
	n := 80
	if raceEnabled {
		n = 8
	}
	for i := range n {
		p := randomGradProblem(rng)
		if i%2 == 0 {
			p = randomBentProblem(rng)
		}
		of := costs[i%3]
		g := &gradients{problem: p, graph: p.graph()}
		opts := g.graph.options(p)
		if p.ragged() {
			g.lengths = input(g.g, "lengths", lengthsOf(tensor.Int, p.Keys))
			opts = append(opts, la.WithLengths(g.lengths))
		}
		if of.lse {
			opts = append(opts, la.WithLSE(&g.lse))
		}
		var err error
		if g.out, err = la.Attention(g.graph.q, g.graph.k, g.graph.v, opts...); err != nil {
			t.Fatal(err)
		}
		if !of.out {
			G.Must(G.Sum(g.out)) // the machine differentiates all roots
		}
		g.sum(t, rng, of)
		if !of.out {
			g.dO = make([]float64, p.QueryRows()*p.Heads*p.ValueDim)
			for i := range g.dO {
				g.dO[i] = 1
			}
		}
		vm := G.NewLispMachine(g.g)
		if err := vm.RunAll(); err != nil {
			t.Fatalf("%v %v, %v: %v", p.Shape, p.query, of, err)
		}
		for i, n := range []*G.Node{g.graph.q, g.graph.k, g.graph.v} {
			if *[]*G.Value{&g.dq, &g.dk, &g.dv}[i], err = n.Grad(); err != nil {
				t.Fatal(err)
			}
		}
		if g.graph.bias != nil {
			if g.dbias, err = g.graph.bias.Grad(); err != nil {
				t.Fatal(err)
			}
		}
		if err := g.compareGrads(t, g.want()); err != nil {
			t.Fatalf("%v %v %v, %v: %v", p.Shape, p.inputs, p.query, of, err)
		}
		vm.Close()
	}
}

// work is the number of elements of the output.
func (p *problem) work() int { return p.QueryRows() * p.Heads * p.ValueDim }

// TestGradOnce: however many of the gradients a graph uses, they are computed by
// one node.
func TestGradOnce(t *testing.T) {
	rng := reftest.Rand(t)
	p := newProblem(rng, dense(4, 2, 8, 8, 3, 20, 9), spec{capacity: 24})
	g := p.differentiate(t, rng, cost{out: true})
	n := 0
	for _, node := range g.g.AllNodes() {
		if node.Op() != nil && strings.HasPrefix(node.Op().String(), "LeanAttentionGradient") {
			n++
		}
	}
	if n != 1 {
		t.Errorf("%d nodes compute gradients", n)
	}
}

// TestGradConstantBias: a mask that is a constant costs no gradient.
func TestGradConstantBias(t *testing.T) {
	rng := reftest.Rand(t)
	p := newProblem(rng, biased(rng, dense(4, 2, 8, 8, 3, 20), 1, 1, 3), spec{query: tensor.Float64})
	g := &gradients{problem: p, graph: p.graph(), dO: []float64{}}
	bias := g.g.AddNode(G.NewConstant(p.bias, G.WithName("mask")))
	var err error
	if g.out, err = la.Attention(g.graph.q, g.graph.k, g.graph.v, append(p.options(), la.WithBias(bias))...); err != nil {
		t.Fatal(err)
	}
	if wrt := g.out.Op().(G.SDOp).DiffWRT(4); !slices.Equal(wrt, []bool{true, true, true, false}) {
		t.Errorf("gradients in %v", wrt)
	}
	grads, err := G.Grad(g.sum(t, rng, cost{out: true}), g.graph.q, g.graph.k, g.graph.v)
	if err != nil {
		t.Fatal(err)
	}
	for i, n := range grads {
		G.Read(n, []*G.Value{&g.dq, &g.dk, &g.dv}[i])
	}
	g.run(t)
	want := g.want()
	g.problem.Bias = reftest.Bias{} // whose gradient there is not
	if err := g.compareGrads(t, want); err != nil {
		t.Error(err)
	}
	for _, n := range g.g.AllNodes() {
		if n.Op() != nil && strings.Contains(n.Op().String(), "dbias") {
			t.Errorf("%v", n)
		}
	}
}

// TestGradWorkers: where the forward pass gives the same bits, so does the
// backward pass.
func TestGradWorkers(t *testing.T) {
	rng := reftest.Rand(t)
	p := newProblem(rng, causal(dense(4, 2, 24, 16, 90, 200, 33)), spec{capacity: 200})
	var first [3][]uint64
	var weights *tensor.Dense
	for _, workers := range []int{1, 2, 3, 7, 0} {
		g := p.differentiate(t, rng, cost{out: true}, la.WithWorkers(workers), la.WithSchedule(la.PerHead))
		if weights == nil {
			weights = g.wO.Value().(*tensor.Dense)
		}
		let(t, g.wO, weights)
		vm := G.NewTapeMachine(g.g)
		for range 2 {
			again(t, vm)
			for i, v := range []G.Value{g.dq, g.dk, g.dv} {
				if b := bits(t, v); first[i] == nil {
					first[i] = b
				} else if !slices.Equal(b, first[i]) {
					t.Errorf("%d workers: d%c has other bits", workers, "qkv"[i])
				}
			}
		}
		vm.Close()
	}
}

// TestGradUnsupported: what has no gradient is an error and not a panic.
func TestGradUnsupported(t *testing.T) {
	rng := reftest.Rand(t)
	for _, types := range elementTypes {
		if types[0] == types[1] {
			continue
		}
		for _, lse := range []bool{false, true} {
			p := newProblem(rng, dense(2, 1, 8, 8, 2, 20, 30), spec{query: types[0], kv: types[1]})
			g := p.build(t)
			from := g.out
			if lse {
				from = g.lse
			}
			_, err := G.Grad(G.Must(G.Sum(from)), g.q)
			checkGradError(t, fmt.Sprint(types), err)
		}
	}

	cache := newCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 4, Pages: 1})
	step, err := cache.NewStep(2)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 6 {
		g := G.NewGraph()
		var in G.Nodes
		for _, name := range []string{"q", "k", "v"} {
			in = append(in, G.NewMatrix(g, tensor.Float32, G.WithName(name), G.WithShape(2, 4)))
		}
		var lse *G.Node
		out, err := la.CachedAttention(in[0], in[1], in[2], step.Layer(0), la.WithLSE(&lse))
		if err != nil {
			t.Fatal(err)
		}
		if i >= 3 {
			out = lse
		}
		_, err = G.Grad(G.Must(G.Sum(out)), in[i%3])
		checkGradError(t, "cache", err)
		if err := out.Op().(G.ADOp).DoDiff(G.ExecutionContext{}, nil, nil); !errors.Is(err, la.ErrUnsupported) {
			t.Errorf("cache: DoDiff gives %v", err)
		}
	}

	p := newProblem(rng, dense(2, 1, 4, 4, 2, 5), spec{query: tensor.Float64})
	for i := range 3 {
		g := p.build(t)
		d, err := G.Grad(G.Must(G.Sum(G.Must(G.Square(g.out)))), G.Nodes{g.q, g.k, g.v}[i])
		if err != nil {
			t.Fatal(err)
		}
		_, err = G.Grad(G.Must(G.Sum(d[0])), g.q)
		checkGradError(t, "second derivative", err)
	}
}

// checkGradError looks at the text: Gorgonia's own error around ours does not unwrap.
func checkGradError(t *testing.T, name string, err error) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), la.ErrUnsupported.Error()) ||
		!strings.Contains(err.Error(), "gradient") && !strings.Contains(err.Error(), "derivative") {
		t.Errorf("%s: Grad gives %v", name, err)
	}
}

// TestGradBeside: beside the path of a gradient an attention does not matter,
// not even one that has none.
func TestGradBeside(t *testing.T) {
	rng := reftest.Rand(t)
	p := newProblem(rng, dense(2, 1, 4, 4, 1, 5), spec{query: tensor.Float64, kv: la.Float16})
	d := p.attention(t)
	w := input(d.g, "w", tensorOf(tensor.Float64, []float64{1, 2, 3}, 3))
	grads, err := G.Grad(G.Must(G.Sum(G.Must(G.Square(w)))), w)
	if err != nil {
		t.Fatal(err)
	}
	var gradV G.Value
	G.Read(grads[0], &gradV)
	d.run(t)
	p.check(t, p.Reference(p.precision(0)), d.outV, d.lseV)
	if got := floats(t, gradV); got[0] != 2 || got[1] != 4 || got[2] != 6 {
		t.Errorf("gradient of w is %v", got)
	}
}
