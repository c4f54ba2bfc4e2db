package leanattention_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/rewrite"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/graphtest"
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
	*graphtest.Problem
	*graphtest.Graph
	wO, wLSE   *G.Node
	dO, dLSE   []float64 // in the reference's layout
	wrt        G.Nodes
	dq, dk, dv G.Value
	dbias      G.Value
	dsinks     G.Value
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
			x[i] = graphtest.Format(g.QueryType).Round(rng.NormFloat64())
		}
		return x
	}
	rows := func(x []float64, dim int, shape ...int) *tensor.Dense { // (tokens, heads) to (heads, tokens)
		c := *g.Case
		c.Q, c.Dim = x, dim
		return graphtest.TensorOf(g.QueryType, c.DenseQ(g.Rows), g.Dims(shape...)...)
	}
	bind := func(n **G.Node, name string, v *tensor.Dense) {
		if *n == nil {
			*n = graphtest.Input(g.G, name, v)
			return
		}
		graphtest.Let(t, *n, v)
	}
	n := g.QueryRows() * g.Heads
	if g.dO != nil {
		g.dO = noise(n * g.ValueDim)
		bind(&g.wO, "wO", rows(g.dO, g.ValueDim, g.Heads, g.Rows, g.ValueDim))
	}
	if g.dLSE != nil {
		g.dLSE = noise(n)
		bind(&g.wLSE, "wLSE", rows(g.dLSE, 1, g.Heads, g.Rows))
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
	for _, x := range [][2]*G.Node{{g.Out, g.wO}, {g.LSE, g.wLSE}} {
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
func differentiate(t testing.TB, p *graphtest.Problem, rng *rand.Rand, of cost, opts ...la.Option) *gradients {
	t.Helper()
	g := &gradients{Problem: p, Graph: p.Build(t, opts...)}
	sum := g.sum(t, rng, of)
	g.wrt = G.Nodes{g.Graph.Q, g.Graph.K}
	to := []*G.Value{&g.dq, &g.dk}
	if of.out {
		g.wrt, to = append(g.wrt, g.Graph.V), append(to, &g.dv)
	}
	if g.Graph.BiasNode != nil {
		g.wrt, to = append(g.wrt, g.Graph.BiasNode), append(to, &g.dbias)
	}
	if g.Graph.SinksNode != nil {
		g.wrt, to = append(g.wrt, g.Graph.SinksNode), append(to, &g.dsinks)
	}
	grads, err := G.Grad(sum, g.wrt...)
	if err != nil {
		t.Fatal(err)
	}
	for i, n := range grads {
		G.Read(n, to[i])
	}
	if err := rewrite.Check(g.G); err != nil {
		t.Fatal(err)
	}
	return g
}

// again gives the inputs of the graph the numbers of another problem of its
// shapes.
func (g *gradients) again(t testing.TB, rng *rand.Rand, p *graphtest.Problem) {
	t.Helper()
	g.Problem = p
	graphtest.Let(t, g.Graph.Q, p.InQ)
	graphtest.Let(t, g.Graph.K, p.InK)
	graphtest.Let(t, g.Graph.V, p.InV)
	if p.InBias != nil {
		graphtest.Let(t, g.Graph.BiasNode, p.InBias)
	}
	if g.Graph.Seed != nil {
		if err := G.Let(g.Graph.Seed, p.Shape.Seed); err != nil {
			t.Fatal(err)
		}
	}
	if p.InSinks != nil {
		graphtest.Let(t, g.Graph.SinksNode, p.InSinks)
	}
	if g.Lengths != nil {
		graphtest.Let(t, g.Lengths, graphtest.LengthsOf(tensor.Int, p.Keys))
	}
	if g.QueryLengths != nil {
		graphtest.Let(t, g.QueryLengths, graphtest.LengthsOf(tensor.Int32, p.Queries))
	}
	g.draw(t, rng)
}

// want computes the gradients in float64.
func (g *gradients) want() *reftest.Gradients {
	p := g.Precision(0)
	return g.Backward(p, g.Reference(p), g.dO, g.dLSE)
}

// compareGrads checks what a run left.
func (g *gradients) compareGrads(t testing.TB, want *reftest.Gradients) error {
	t.Helper()
	nq := g.Rows
	for i, x := range []struct {
		name             string
		got              G.Value
		want, bound      []float64
		heads, rows, dim int
		live             []int
	}{
		{"dq", g.dq, want.DQ, want.DQBound, g.Heads, nq, g.Dim, g.Queries},
		{"dk", g.dk, want.DK, want.DKBound, g.KVHeads, g.Capacity, g.Dim, g.Keys},
		{"dv", g.dv, want.DV, want.DVBound, g.KVHeads, g.Capacity, g.ValueDim, g.Keys},
	} {
		if i == 2 && g.dO == nil {
			break
		}
		if shape := tensor.Shape(g.Dims(x.heads, x.rows, x.dim)); x.got == nil || !x.got.Shape().Eq(shape) || x.got.Dtype() != g.QueryType {
			return fmt.Errorf("%s is %v, want %v %v", x.name, x.got, g.QueryType, shape)
		}
		all := graphtest.Floats(t, x.got)
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
		if g.dbias == nil || !g.dbias.Shape().Eq(g.Problem.InBias.Shape()) || g.dbias.Dtype() != g.QueryType {
			return fmt.Errorf("dbias is %v, want %v %v", g.dbias, g.QueryType, g.Problem.InBias.Shape())
		}
		if err := reftest.Compare(graphtest.Floats(t, g.dbias), want.DBias, want.DBiasBound, b.Sequences, b.Heads, b.Queries, b.Keys); err != nil {
			return fmt.Errorf("dbias: %w", err)
		}
	}
	if s := g.Sinks; s != nil {
		if g.dsinks == nil || !g.dsinks.Shape().Eq(g.Problem.InSinks.Shape()) || g.dsinks.Dtype() != g.QueryType {
			return fmt.Errorf("dsinks is %v, want %v %v", g.dsinks, g.QueryType, g.Problem.InSinks.Shape())
		}
		if err := reftest.Compare(graphtest.Floats(t, g.dsinks), want.DSinks, want.DSinksBound, len(s)); err != nil {
			return fmt.Errorf("dsinks: %w", err)
		}
	}
	return nil
}

// randomGradProblem draws a problem with as many queries in every sequence.
func randomGradProblem(rng *rand.Rand) *graphtest.Problem {
	s := reftest.RandomShape(rng)
	s.Queries = graphtest.Repeated(len(s.Keys), max(s.Queries[0], 1))
	x := graphtest.Spec{Inputs: reftest.AllInputs[rng.IntN(4)], QueryType: []tensor.Dtype{tensor.Float32, tensor.Float64}[rng.IntN(2)]}
	x.Capacity = max(slices.Max(s.Keys)+rng.IntN(3), 1)
	if len(s.Keys) == 1 && rng.IntN(2) == 0 {
		x.Rank = 3
	}
	if rng.IntN(3) == 0 {
		graphtest.PadQueries(rng, &s, &x)
	}
	return graphtest.NewProblem(rng, s, x)
}

// randomScoreModProblem is randomGradProblem with a window, a soft cap, slopes, sinks or a bias.
func randomScoreModProblem(rng *rand.Rand) *graphtest.Problem {
	p := randomGradProblem(rng)
	s := p.Shape
	if rng.IntN(2) == 0 {
		s = reftest.RandomBias(rng, s, p.Capacity)
	}
	if s.Bias.X == nil || rng.IntN(2) == 0 {
		s = reftest.RandomScoreMods(rng, s)
	}
	return graphtest.NewProblem(rng, s, p.Spec)
}

// TestGradRandom compares the gradients with the reference, in graphs that are
// run again with other numbers and other lengths.
func TestGradRandom(t *testing.T) { testGradRandom(t, randomGradProblem) }

// TestGradScoreMods is TestGradRandom with windows, soft caps, slopes, sinks and biases.
func TestGradScoreMods(t *testing.T) { testGradRandom(t, randomScoreModProblem) }

func testGradRandom(t *testing.T, problem func(*rand.Rand) *graphtest.Problem) {
	rng := reftest.Rand(t)
	n := reftest.Cases(t, 20, 120)
	if reftest.RaceEnabled {
		n = 12
	}
	for i := range n {
		p := problem(rng)
		of := costs[i%3]
		tile, workers, schedule := rng.IntN(100), rng.IntN(5), graphtest.Schedules[rng.IntN(3)]
		g := differentiate(t, p, rng, of, la.WithTileTokens(tile), la.WithWorkers(workers), la.WithSchedule(schedule))
		vm := G.NewTapeMachine(g.G)
		for turn := range 2 {
			graphtest.Again(t, vm)
			if err := g.compareGrads(t, g.want()); err != nil {
				t.Fatalf("run %d: %v %v %v, %v, capacity %d, tiles of %d, %d workers, %v: %v",
					turn, g.Shape, g.Inputs, g.QueryType, of, g.Capacity, tile, workers, schedule, err)
			}
			g.again(t, rng, p.Another(rng))
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
				if reftest.RaceEnabled && (in != reftest.Peaked || i > 5) || !reftest.Every(t) && rng.IntN(2) == 0 {
					continue
				}
				p := graphtest.NewProblem(rng, s, graphtest.Spec{Inputs: in, QueryType: query})
				if i%2 == 0 && p.Scale > 0 {
					p.Scale = -p.Scale
				}
				g := differentiate(t, p, rng, costs[i%3])
				g.Run(t)
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
	if reftest.RaceEnabled {
		n = 8
	}
	for i := range n {
		p := randomGradProblem(rng)
		switch {
		case i%4 == 1:
			p = randomDropoutProblem(rng)
		case i%2 == 0:
			p = randomScoreModProblem(rng)
		}
		of := costs[i%3]
		g := &gradients{Problem: p, Graph: p.Graph()}
		opts := g.Graph.Options(p)
		opts = append(opts, g.LengthOptions(p)...)
		var err error
		if g.Out, err = la.Attention(g.Graph.Q, g.Graph.K, g.Graph.V, opts...); err != nil {
			t.Fatal(err)
		}
		if of.lse {
			g.LSE = graphtest.LogSumExp(t, g.Out)
		}
		if !of.out {
			G.Must(G.Sum(g.Out)) // the machine differentiates all roots
		}
		g.sum(t, rng, of)
		if !of.out {
			g.dO = make([]float64, p.QueryRows()*p.Heads*p.ValueDim)
			for i := range g.dO {
				g.dO[i] = 1
			}
		}
		vm := G.NewLispMachine(g.G)
		if err := vm.RunAll(); err != nil {
			t.Fatalf("%v %v, %v: %v", p.Shape, p.QueryType, of, err)
		}
		for i, n := range []*G.Node{g.Graph.Q, g.Graph.K, g.Graph.V} {
			if *[]*G.Value{&g.dq, &g.dk, &g.dv}[i], err = n.Grad(); err != nil {
				t.Fatal(err)
			}
		}
		if g.Graph.BiasNode != nil {
			if g.dbias, err = g.Graph.BiasNode.Grad(); err != nil {
				t.Fatal(err)
			}
		}
		if g.Graph.SinksNode != nil {
			if g.dsinks, err = g.Graph.SinksNode.Grad(); err != nil {
				t.Fatal(err)
			}
		}
		if err := g.compareGrads(t, g.want()); err != nil {
			t.Fatalf("%v %v %v, %v: %v", p.Shape, p.Inputs, p.QueryType, of, err)
		}
		vm.Close()
	}
}

// TestGradOnce: however many of the gradients a graph uses, they are computed by
// one node.
func TestGradOnce(t *testing.T) {
	rng := reftest.Rand(t)
	p := graphtest.NewProblem(rng, dense(4, 2, 8, 8, 3, 20, 9), graphtest.Spec{Capacity: 24})
	g := differentiate(t, p, rng, cost{out: true})
	n := 0
	for _, node := range g.G.AllNodes() {
		if node.Op() != nil && strings.HasPrefix(node.Op().String(), "LeanAttentionGradient") {
			n++
		}
	}
	if n != 1 {
		t.Errorf("%d nodes compute gradients", n)
	}
}

// TestGradConstantBias: a mask that is a constant costs no gradient, nor do sinks that are.
func TestGradConstantBias(t *testing.T) {
	rng := reftest.Rand(t)
	p := graphtest.NewProblem(rng, reftest.RandomSinks(rng, graphtest.Biased(rng, dense(4, 2, 8, 8, 3, 20), 1, 1, 3)), graphtest.Spec{QueryType: tensor.Float64})
	g := &gradients{Problem: p, Graph: p.Graph(), dO: []float64{}}
	bias := g.G.AddNode(G.NewConstant(p.InBias, G.WithName("mask")))
	sinks := g.G.AddNode(G.NewConstant(p.InSinks, G.WithName("fixed")))
	var err error
	if g.Out, err = la.Attention(g.Graph.Q, g.Graph.K, g.Graph.V, append(p.Options(), la.WithBias(bias), la.WithSinks(sinks))...); err != nil {
		t.Fatal(err)
	}
	if wrt := g.Out.Op().(G.SDOp).DiffWRT(5); !slices.Equal(wrt, []bool{true, true, true, false, false}) {
		t.Errorf("gradients in %v", wrt)
	}
	grads, err := G.Grad(g.sum(t, rng, cost{out: true}), g.Graph.Q, g.Graph.K, g.Graph.V)
	if err != nil {
		t.Fatal(err)
	}
	for i, n := range grads {
		G.Read(n, []*G.Value{&g.dq, &g.dk, &g.dv}[i])
	}
	g.Run(t)
	want := g.want()
	g.Problem.Bias, g.Problem.Sinks = reftest.Bias{}, nil // whose gradients there are not
	if err := g.compareGrads(t, want); err != nil {
		t.Error(err)
	}
	for _, n := range g.G.AllNodes() {
		if n.Op() != nil && (strings.Contains(n.Op().String(), "dbias") || strings.Contains(n.Op().String(), "dsinks")) {
			t.Errorf("%v", n)
		}
	}
}

// TestGradWorkers: where the forward pass gives the same bits, so does the
// backward pass.
func TestGradWorkers(t *testing.T) {
	rng := reftest.Rand(t)
	p := graphtest.NewProblem(rng, causal(dense(4, 2, 24, 16, 90, 200, 33)), graphtest.Spec{Capacity: 200})
	var first [3][]uint64
	var weights *tensor.Dense
	for _, workers := range []int{1, 2, 3, 7, 0} {
		g := differentiate(t, p, rng, cost{out: true}, la.WithWorkers(workers), la.WithSchedule(la.PerHead))
		if weights == nil {
			weights = g.wO.Value().(*tensor.Dense)
		}
		graphtest.Let(t, g.wO, weights)
		vm := G.NewTapeMachine(g.G)
		for range 2 {
			graphtest.Again(t, vm)
			for i, v := range []G.Value{g.dq, g.dk, g.dv} {
				if b := graphtest.Bits(t, v); first[i] == nil {
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
			p := graphtest.NewProblem(rng, dense(2, 1, 8, 8, 2, 20, 30), graphtest.Spec{QueryType: types[0], KVType: types[1]})
			g := p.Build(t)
			from := g.Out
			if lse {
				from = g.LSE
			}
			_, err := G.Grad(G.Must(G.Sum(from)), g.Q)
			checkGradError(t, fmt.Sprint(types), err)
		}
	}

	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 4, Pages: 1})
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
		out, err := la.CachedAttention(in[0], in[1], in[2], step.Layer(0))
		if err != nil {
			t.Fatal(err)
		}
		if i >= 3 {
			out = graphtest.LogSumExp(t, out)
		}
		_, err = G.Grad(G.Must(G.Sum(out)), in[i%3])
		checkGradError(t, "cache", err)
		if err := out.Op().(G.ADOp).DoDiff(G.ExecutionContext{}, nil, nil); !errors.Is(err, la.ErrUnsupported) {
			t.Errorf("cache: DoDiff gives %v", err)
		}
	}

	p := graphtest.NewProblem(rng, dense(2, 1, 4, 4, 2, 5), graphtest.Spec{QueryType: tensor.Float64})
	for i := range 3 {
		g := p.Build(t)
		d, err := G.Grad(G.Must(G.Sum(G.Must(G.Square(g.Out)))), G.Nodes{g.Q, g.K, g.V}[i])
		if err != nil {
			t.Fatal(err)
		}
		_, err = G.Grad(G.Must(G.Sum(d[0])), g.Q)
		checkGradError(t, "second derivative", err)
	}
}

// TestGradSinkTokens: they have no gradient, and say so when the graph is built.
func TestGradSinkTokens(t *testing.T) {
	s := withSinkTokens(graphtest.WithScoreMods(dense(2, 1, 4, 4, 2, 9), 3, 0), 2)
	p := graphtest.NewProblem(reftest.Rand(t), s, graphtest.Spec{QueryType: tensor.Float64})
	g := p.Build(t)
	_, err := G.Grad(G.Must(G.Sum(g.Out)), g.Q)
	checkGradError(t, "sink tokens", err)
	if !strings.Contains(fmt.Sprint(err), "2 sink tokens") {
		t.Error(err)
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
	p := graphtest.NewProblem(rng, dense(2, 1, 4, 4, 1, 5), graphtest.Spec{QueryType: tensor.Float64, KVType: la.Float16})
	d := p.Attention(t)
	w := graphtest.Input(d.G, "w", graphtest.TensorOf(tensor.Float64, []float64{1, 2, 3}, 3))
	grads, err := G.Grad(G.Must(G.Sum(G.Must(G.Square(w)))), w)
	if err != nil {
		t.Fatal(err)
	}
	var gradV G.Value
	G.Read(grads[0], &gradV)
	d.Run(t)
	p.Check(t, p.Reference(p.Precision(0)), d.OutValue, d.LSEValue)
	if got := graphtest.Floats(t, gradV); got[0] != 2 || got[1] != 4 || got[2] != 6 {
		t.Errorf("gradient of w is %v", got)
	}
}

// TestGradDevice: on a GPU there are no gradients, which a run says, with or
// without a log-sum-exp; what is not differentiated runs there.
func TestGradDevice(t *testing.T) {
	gpu, _ := la.FakeGPU(t)
	rng := reftest.Rand(t)
	for _, name := range []string{"lse", "no lse"} {
		p := graphtest.NewProblem(rng, dense(2, 1, 64, 64, 3, 9), graphtest.Spec{})
		for _, differentiated := range []bool{false, true} {
			g := p.Graph()
			out, err := la.Attention(g.Q, g.K, g.V)
			if err != nil {
				t.Fatal(err)
			}
			if name == "lse" {
				graphtest.LogSumExp(t, out)
			}
			if differentiated {
				if _, err := G.Grad(G.Must(G.Sum(out)), g.Q, g.K, g.V); err != nil {
					t.Fatal(err)
				}
			}
			var there []G.Value
			for _, x := range []*tensor.Dense{p.InQ, p.InK, p.InV} {
				d, err := gpu.Upload(x)
				if err != nil {
					t.Fatal(err)
				}
				there = append(there, d)
			}
			v, err := out.Op().Do(there...)
			if !differentiated {
				if err != nil || v == nil {
					t.Errorf("%s: %v, %v", name, v, err)
				}
				continue
			}
			if name == "lse" && err == nil { // the output is right: the gradient's own node refuses
				for _, n := range g.G.AllNodes() {
					if n.Op() != nil && n.Op().String() == "LeanAttentionGradient" {
						_, err = n.Op().Do(append(there, v, v, v)...)
					}
				}
			}
			if !errors.Is(err, la.ErrUnsupported) || !strings.Contains(err.Error(), "radient") {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}
