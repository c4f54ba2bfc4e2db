package leanattention_test

import (
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/rewrite"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// TestAttentionRerun builds a graph once and runs it with other values and
// other lengths, as decoding does.
func TestAttentionRerun(t *testing.T) {
	rng := reftest.Rand(t)
	const capacity, batch = 90, 3
	for _, lengthType := range []tensor.Dtype{tensor.Int, tensor.Int32, tensor.Int64} {
		for _, x := range []graphtest.Spec{
			{QueryType: tensor.Float32, Capacity: capacity},
			{QueryType: tensor.Float64, KVType: la.Float16, Capacity: capacity},
		} {
			draw := func() *graphtest.Problem {
				s := causal(dense(4, 2, 16, 24, 2, 0, 0, 0))
				for b := range s.Keys {
					s.Keys[b] = rng.IntN(capacity + 1)
				}
				x.Inputs = reftest.AllInputs[rng.IntN(4)]
				return graphtest.NewProblem(rng, s, x)
			}
			g := draw().Graph()
			g.Lengths = graphtest.Input(g.G, "lengths", graphtest.LengthsOf(lengthType, graphtest.Repeated(batch, 0)))
			var err error
			if g.Out, err = la.Attention(g.Q, g.K, g.V, la.WithCausal(), la.WithLengths(g.Lengths), la.WithQueriesAtEnd(), la.WithTileTokens(16)); err != nil {
				t.Fatal(err)
			}
			g.LSE = graphtest.LogSumExp(t, g.Out)
			g.Read(t)
			vm := G.NewTapeMachine(g.G)
			defer vm.Close()
			for run := range 12 {
				p := draw()
				graphtest.Let(t, g.Q, p.InQ)
				graphtest.Let(t, g.K, p.InK)
				graphtest.Let(t, g.V, p.InV)
				graphtest.Let(t, g.Lengths, graphtest.LengthsOf(lengthType, p.Keys))
				graphtest.Again(t, vm)
				if err := p.Compare(t, p.Reference(p.Precision(0)), g.OutValue, g.LSEValue); err != nil {
					t.Fatalf("%v %v run %d %v: %v", lengthType, x.QueryType, run, p.Shape, err)
				}
			}
		}
	}
}

// TestAttentionMachines runs one graph on the tape machine with and without
// traces, and once on the lisp machine, with all kinds of inputs.
func TestAttentionMachines(t *testing.T) {
	rng := reftest.Rand(t)
	for _, types := range elementTypes {
		p := graphtest.NewProblem(rng, causal(dense(6, 2, 16, 8, 2, 40, 0, 77)), graphtest.Spec{QueryType: types[0], KVType: types[1], Capacity: 80})
		want := p.Reference(p.Precision(0))
		g := p.Attention(t)
		g.Run(t)
		p.Check(t, want, g.OutValue, g.LSEValue)
		first := graphtest.Bits(t, g.OutValue)

		g = p.Attention(t)
		g.Run(t, G.TraceExec())
		p.Check(t, want, g.OutValue, g.LSEValue)

		g = p.Attention(t)
		vm := G.NewLispMachine(g.G, G.ExecuteFwdOnly())
		defer vm.Close()
		if err := vm.RunAll(); err != nil {
			t.Fatalf("lisp machine, %v: %v", types, err)
		}
		p.Check(t, want, g.OutValue, g.LSEValue)
		if !slices.Equal(graphtest.Bits(t, g.OutValue), first) {
			t.Errorf("%v: the lisp machine gives other bits than the tape machine", types)
		}
	}
}

// TestAttentionDeterministic: a given schedule and number of workers gives the
// same bits at every run, of the same and of another graph.
func TestAttentionDeterministic(t *testing.T) {
	rng := reftest.Rand(t)
	shape, tile := causal(dense(6, 2, 32, 32, 3, 700, 0, 33, 1200)), 64
	if reftest.RaceEnabled {
		shape, tile = causal(dense(6, 2, 8, 8, 3, 170, 0, 33, 300)), 16
	}
	p := graphtest.NewProblem(rng, shape, graphtest.Spec{Inputs: reftest.Peaked})
	want := p.Reference(p.Precision(0))
	for _, schedule := range []la.Schedule{la.StreamK, la.PerHead, la.FixedSplit(1), la.FixedSplit(2), la.FixedSplit(7), la.FixedSplit(1000)} {
		for workers := 1; workers <= 8; workers++ {
			var first, firstLSE []uint64
			for graphs := range 2 {
				g := p.Attention(t, la.WithSchedule(schedule), la.WithWorkers(workers), la.WithTileTokens(tile))
				vm := G.NewTapeMachine(g.G)
				for range 3 {
					graphtest.Again(t, vm)
					if first == nil {
						first, firstLSE = graphtest.Bits(t, g.OutValue), graphtest.Bits(t, g.LSEValue)
						p.Check(t, want, g.OutValue, g.LSEValue)
					}
					if !slices.Equal(graphtest.Bits(t, g.OutValue), first) || !slices.Equal(graphtest.Bits(t, g.LSEValue), firstLSE) {
						t.Fatalf("%v, %d workers: other bits at a repeat (graph %d)", schedule, workers, graphs)
					}
				}
				vm.Close()
			}
		}
	}
}

// TestAttentionBatchInvariance (row 39): an output tile that one worker computes
// whole has the same bits whatever else is in the batch and however many
// workers there are. With PerHead, FixedSplit(1) and a single worker that holds
// for all outputs. Under StreamK and FixedSplit the cuts move with the
// neighbours: there the outputs are equal within rounding.
func TestAttentionBatchInvariance(t *testing.T) {
	rng := reftest.Rand(t)
	const capacity = 1100
	shape := dense(8, 2, 32, 32, 1, 800, capacity, 5, 513)
	few := graphtest.NewProblem(rng, shape, graphtest.Spec{Capacity: capacity, Inputs: reftest.Peaked})
	want := few.Reference(few.Precision(0))

	// The same sequences with strangers behind them and one before.
	big := dense(8, 2, 32, 32, 1, append(append([]int{77}, shape.Keys...), 1000, 0, 1, 300)...)
	many := graphtest.NewProblem(rng, big, graphtest.Spec{Capacity: capacity})
	for _, x := range []struct{ to, from *tensor.Dense }{{many.InQ, few.InQ}, {many.InK, few.InK}, {many.InV, few.InV}} {
		to, from := x.to.Data().([]float32), x.from.Data().([]float32)
		copy(to[len(from)/4:], from)
	}

	var whole []uint64
	for _, schedule := range []la.Schedule{la.PerHead, la.FixedSplit(1), la.StreamK, la.FixedSplit(3)} {
		for _, workers := range []int{1, 2, 3, 8, 64} {
			opts := []la.Option{la.WithSchedule(schedule), la.WithWorkers(workers), la.WithTileTokens(128)}
			a, b := few.Attention(t, opts...), many.Attention(t, opts...)
			a.Run(t)
			b.Run(t)
			x, y := graphtest.Floats(t, a.OutValue), graphtest.Floats(t, b.OutValue)
			lx, ly := graphtest.Floats(t, a.LSEValue), graphtest.Floats(t, b.LSEValue)
			y, ly = y[len(x)/4:][:len(x)], ly[len(lx)/4:][:len(lx)]
			few.Check(t, want, a.OutValue, a.LSEValue)
			few.Check(t, want, graphtest.TensorOf(tensor.Float32, y, a.OutValue.Shape()...), graphtest.TensorOf(tensor.Float32, ly, a.LSEValue.Shape()...))
			if schedule == la.PerHead || schedule == la.FixedSplit(1) || workers == 1 {
				if whole == nil {
					whole = append(graphtest.Bits(t, a.OutValue), graphtest.Bits(t, a.LSEValue)...)
				}
				got := floatBits(append(slices.Clone(x), lx...))
				if !slices.Equal(got, whole) {
					t.Errorf("%v, %d workers: other bits than with one worker", schedule, workers)
				}
				if !slices.Equal(floatBits(append(slices.Clone(y), ly...)), whole) {
					t.Errorf("%v, %d workers: other bits beside strangers", schedule, workers)
				}
			}
		}
	}
}

func floatBits(x []float64) []uint64 {
	var y []uint64
	for _, f := range x {
		y = append(y, math.Float64bits(f))
	}
	return y
}

// TestAttentionUnusedSlots (row 33): what lies past the lengths does not change
// a bit, be it zeros, NaN, infinities or another run's numbers.
func TestAttentionUnusedSlots(t *testing.T) {
	rng := reftest.Rand(t)
	for _, types := range elementTypes {
		p := graphtest.NewProblem(rng, causal(dense(4, 2, 40, 24, 2, 100, 3, 0, 257, 300)), graphtest.Spec{QueryType: types[0], KVType: types[1], Capacity: 300})
		var clean []uint64
		for i, fill := range []float64{0, math.NaN(), math.Inf(1), math.Inf(-1), 65504} {
			for _, x := range []struct {
				t   **tensor.Dense
				all []float64
				dim int
			}{{&p.InK, p.DenseK(300), p.Dim}, {&p.InV, p.DenseV(300), p.ValueDim}} {
				for at := range x.all {
					seq, slot := at/(x.dim*300*p.KVHeads), at/x.dim%300
					if slot >= p.Keys[seq] {
						x.all[at] = fill
					}
				}
				*x.t = graphtest.TensorOf(types[1], x.all, p.Dims(p.KVHeads, 300, x.dim)...)
			}
			g := p.Attention(t)
			g.Run(t)
			got := append(graphtest.Bits(t, g.OutValue), graphtest.Bits(t, g.LSEValue)...)
			if i == 0 {
				clean = got
				p.Check(t, p.Reference(p.Precision(0)), g.OutValue, g.LSEValue)
			}
			if !slices.Equal(got, clean) {
				t.Errorf("%v: %v past the lengths changes the output", types, fill)
			}
		}
	}
}

// TestAttentionNonContiguous (row 49): inputs that are lazy transposes or
// slices of other tensors, as values, and Gorgonia's own Transpose and Slice
// before the node.
func TestAttentionNonContiguous(t *testing.T) {
	rng := reftest.Rand(t)
	for _, types := range elementTypes {
		p := graphtest.NewProblem(rng, causal(dense(4, 2, 12, 12, 5, 20, 33)), graphtest.Spec{QueryType: types[0], KVType: types[1], Capacity: 33})
		want := p.Reference(p.Precision(0))
		check := func(name string, q, k, v, lengths *tensor.Dense) {
			t.Helper()
			g := &graphtest.Graph{G: G.NewGraph()}
			g.Q, g.K, g.V, g.Lengths = graphtest.Input(g.G, "q", q), graphtest.Input(g.G, "k", k), graphtest.Input(g.G, "v", v), graphtest.Input(g.G, "lengths", lengths)
			var err error
			g.Out, err = la.Attention(g.Q, g.K, g.V, append(p.Options(), la.WithLengths(g.Lengths))...)
			if err != nil {
				t.Fatal(err)
			}
			g.LSE = graphtest.LogSumExp(t, g.Out)
			g.Read(t)
			vm := G.NewTapeMachine(g.G)
			defer vm.Close()
			for range 2 {
				graphtest.Again(t, vm)
				if err := p.Compare(t, want, g.OutValue, g.LSEValue); err != nil {
					t.Errorf("%v %s: %v", types, name, err)
				}
			}
		}
		lengths := graphtest.LengthsOf(tensor.Int, p.Keys)
		check("transposed", transposed(t, p.InQ), transposed(t, p.InK), transposed(t, p.InV), lengths)
		check("sliced", sliced(t, p.InQ, 1), sliced(t, p.InK, 1), sliced(t, p.InV, 2), lengths)
		check("sliced", sliced(t, p.InQ, 3), sliced(t, p.InK, 0), sliced(t, p.InV, 3), lengths)
		column, err := tensor.New(tensor.WithShape(2, 2), tensor.WithBacking([]int{p.Keys[0], -1, p.Keys[1], 99})).Slice(nil, G.S(0))
		if err != nil {
			t.Fatal(err)
		}
		check("column of lengths", p.InQ, p.InK, p.InV, column.(*tensor.Dense))
	}

	// Nodes of a packed projection: q, k and v are slices of it, transposed to
	// heads first.
	p := graphtest.NewProblem(rng, dense(3, 3, 8, 8, 6, 6, 6), graphtest.Spec{})
	g := &graphtest.Graph{G: G.NewGraph()}
	heads, err := p.InQ.Concat(1, p.InK, p.InV) // (B, 3H, N, d)
	if err != nil {
		t.Fatal(err)
	}
	x := G.Must(G.Transpose(graphtest.Input(g.G, "packed", heads), 0, 2, 1, 3)) // (B, N, 3H, d)
	part := func(from int) *G.Node {
		n := G.Must(G.Slice(x, nil, nil, G.S(from, from+3), nil))
		return G.Must(G.Transpose(n, 0, 2, 1, 3))
	}
	if g.Out, err = la.Attention(part(0), part(3), part(6), p.Options()...); err != nil {
		t.Fatal(err)
	}
	g.LSE = graphtest.LogSumExp(t, g.Out)
	g.Read(t)
	g.Run(t)
	p.Check(t, p.Reference(p.Precision(0)), g.OutValue, g.LSEValue)
}

// transposed is a tensor of x's shape and elements, that lie with axes 1 and 2
// exchanged.
func transposed(t testing.TB, x *tensor.Dense) *tensor.Dense {
	t.Helper()
	y := x.Clone().(*tensor.Dense)
	for range 2 { // the second exchange is lazy
		if err := y.T(0, 2, 1, 3); err != nil {
			t.Fatal(err)
		}
		if y.Shape().Eq(x.Shape()) {
			return y
		}
		if err := y.Transpose(); err != nil {
			t.Fatal(err)
		}
	}
	t.Fatalf("shape %v", y.Shape())
	return nil
}

// sliced is a tensor of x's shape and elements, cut along an axis out of one
// that is larger by a margin of NaN on both sides.
func sliced(t testing.TB, x *tensor.Dense, axis int) *tensor.Dense {
	t.Helper()
	shape := x.Shape().Clone()
	shape[axis] = 1
	margin := tensor.New(tensor.Of(x.Dtype()), tensor.WithShape(shape...))
	switch m := margin.Data().(type) {
	case []float32:
		reftest.Poison(m)
	case []float64:
		reftest.Poison(m)
	case []la.F16:
		reftest.Poison16(m)
	case []la.BF16:
		reftest.Poison16(m)
	}
	all, err := margin.Concat(axis, x, margin)
	if err != nil {
		t.Fatal(err)
	}
	cut := make([]tensor.Slice, len(shape))
	cut[axis] = G.S(1, 1+x.Shape()[axis])
	y, err := all.Slice(cut...)
	if err != nil {
		t.Fatal(err)
	}
	if !y.Shape().Eq(x.Shape()) {
		t.Fatalf("slice has shape %v, want %v", y.Shape(), x.Shape())
	}
	return y.(*tensor.Dense)
}

// TestAttentionNodes: what Gorgonia takes for one node must be one, and nothing
// else may be.
func TestAttentionNodes(t *testing.T) {
	rng := reftest.Rand(t)
	p := graphtest.NewProblem(rng, dense(2, 2, 8, 8, 3, 50), graphtest.Spec{})
	g := p.Graph()
	other := graphtest.Input(g.G, "k2", p.InK)
	lengths, lengths2 := graphtest.Input(g.G, "lengths", graphtest.LengthsOf(tensor.Int, []int{20})), graphtest.Input(g.G, "lengths2", graphtest.LengthsOf(tensor.Int, []int{30}))
	attend := func(k *G.Node, opts ...la.Option) *G.Node {
		t.Helper()
		n, err := la.Attention(g.Q, k, g.V, opts...)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	nodes := map[string]*G.Node{}
	queries := graphtest.Input(g.G, "query lengths", graphtest.LengthsOf(tensor.Int, graphtest.Repeated(len(p.Keys), 1)))
	seed := G.NewScalar(g.G, tensor.Int, G.WithName("seed"), G.WithValue(1))
	for name, opts := range map[string][]la.Option{
		"none": nil, "scale 1": {la.WithScale(1)}, "scale 1+": {la.WithScale(math.Nextafter(1, 2))}, "scale -0": {la.WithScale(math.Copysign(0, -1))},
		"causal": {la.WithCausal()}, "per head": {la.WithSchedule(la.PerHead)},
		"split 2": {la.WithSchedule(la.FixedSplit(2))}, "tile 1": {la.WithTileTokens(1)}, "tile 2": {la.WithTileTokens(2)},
		"workers 1": {la.WithWorkers(1)}, "workers 2": {la.WithWorkers(2)}, "lengths": {la.WithLengths(lengths)},
		"other lengths": {la.WithLengths(lengths2)}, "queries at the end": {la.WithQueriesAtEnd()},
		"query lengths": {la.WithQueryLengths(queries)}, "both lengths": {la.WithLengths(queries), la.WithQueryLengths(queries)}, "lengths of queries": {la.WithLengths(queries)},
		"window 1": {la.WithWindow(1)}, "window 2": {la.WithWindow(2)}, "window 2, sink tokens": {la.WithWindow(2), la.WithSinkTokens(1)}, "cap 1": {la.WithSoftCap(1)}, "cap 1+": {la.WithSoftCap(math.Nextafter(1, 2))},
		"bias":      {la.WithBias(graphtest.Input(g.G, "bias", graphtest.TensorOf(p.QueryType, noise(rng, 2*p.Capacity), 1, 2, 1, p.Capacity)))},
		"bias 0":    {la.WithBias(graphtest.Input(g.G, "bias 0", graphtest.TensorOf(p.QueryType, make([]float64, p.Capacity), 1, 1, 1, p.Capacity)))},
		"sinks":     {la.WithSinks(graphtest.Input(g.G, "sinks", graphtest.SinksOf(p.QueryType, []float64{1, 2})))},
		"sinks 0":   {la.WithSinks(graphtest.Input(g.G, "sinks 0", graphtest.SinksOf(p.QueryType, []float64{0, 0})))},
		"dropout 0": {la.WithDropout(0, seed)}, "dropout": {la.WithDropout(0.5, seed)}, "dropout 0.5+": {la.WithDropout(math.Nextafter(0.5, 1), seed)},
		"another seed": {la.WithDropout(0.5, G.NewScalar(g.G, tensor.Int, G.WithName("another seed"), G.WithValue(2)))},
		"slopes 0":     {la.WithALiBi([]float64{0, 0})}, "slopes": {la.WithALiBi([]float64{1, 2})}, "slopes turned": {la.WithALiBi([]float64{2, 1})},
	} {
		nodes[name] = attend(g.K, opts...)
	}
	nodes["other keys"] = attend(other)
	byID := map[int64]string{}
	for name, n := range nodes {
		if same, ok := byID[n.ID()]; ok {
			t.Errorf("%q and %q are one node", name, same)
		}
		byID[n.ID()] = name
	}
	if err := rewrite.Check(g.G); err != nil {
		t.Error(err)
	}

	// Equal ones merge, and so do their log-sum-exps; both results are there.
	lse, again := graphtest.LogSumExp(t, nodes["none"]), attend(g.K)
	lse2 := graphtest.LogSumExp(t, again)
	if again != nodes["none"] || lse2 != lse {
		t.Errorf("equal attentions are nodes %v and %v, their log-sum-exps %v and %v", again, nodes["none"], lse, lse2)
	}
	twice := G.Must(G.Add(nodes["none"], again))
	var sum, lseV G.Value
	G.Read(twice, &sum)
	G.Read(lse2, &lseV)
	g.Run(t)
	want := p.Reference(p.Precision(0))
	half := slices.Clone(graphtest.Floats(t, sum))
	for i := range half {
		half[i] /= 2
	}
	p.Check(t, want, graphtest.TensorOf(tensor.Float32, half, sum.Shape()...), lseV)
}

// TestAttentionClones runs clones of a graph at the same time: they share the
// ops, and nothing else.
func TestAttentionClones(t *testing.T) {
	rng := reftest.Rand(t)
	shape := dense(2, 1, 16, 16, 2, 40, 60)
	g := graphtest.NewProblem(rng, shape, graphtest.Spec{Capacity: 60}).Build(t)
	var wg sync.WaitGroup
	for range 4 {
		p := graphtest.NewProblem(rng, shape, graphtest.Spec{Capacity: 60})
		want := p.Reference(p.Precision(0))
		c := g.G.Clone().(*G.ExprGraph)
		node := func(n *G.Node) *G.Node { return c.Node(n.ID()).(*G.Node) }
		graphtest.Let(t, node(g.Q), p.InQ)
		graphtest.Let(t, node(g.K), p.InK)
		graphtest.Let(t, node(g.V), p.InV)
		vm := G.NewTapeMachine(c)
		defer vm.Close()
		wg.Go(func() {
			for range 50 {
				if err := vm.RunAll(); err != nil {
					t.Error(err)
					return
				}
				vm.Reset()
				if err := p.Compare(t, want, node(g.Out).Value(), node(g.LSE).Value()); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// TestAttentionLSEOfTheRun interleaves two runs, as clones can: each gets the
// log-sum-exp that belongs to its output, and runs that nobody asks for theirs
// leave nothing behind.
func TestAttentionLSEOfTheRun(t *testing.T) {
	rng := reftest.Rand(t)
	var problems [2]*graphtest.Problem
	var outs [2]G.Value
	for i := range problems {
		problems[i] = graphtest.NewProblem(rng, dense(2, 1, 16, 16, 2, 40), graphtest.Spec{})
	}
	g := problems[0].Build(t)
	for i, p := range problems {
		var err error
		if outs[i], err = g.Out.Op().Do(p.InQ, p.InK, p.InV); err != nil {
			t.Fatal(err)
		}
	}
	for i, p := range problems {
		lse, err := g.LSE.Op().Do(outs[i])
		if err != nil {
			t.Fatal(err)
		}
		p.Check(t, p.Reference(p.Precision(0)), outs[i], lse)
		_, err = g.LSE.Op().Do(outs[i])
		wantError(t, err, la.ErrState, "Attention", "log-sum-exp") // the first may have been overwritten
	}

	p := problems[0]
	for i := range 200 {
		if _, err := g.Out.Op().Do(p.InQ, p.InK, p.InV); err != nil {
			t.Fatal(err)
		}
		if i%50 == 49 {
			runtime.GC()
		}
	}
	if n := la.PendingLSE(g.Out); n > 100 {
		t.Errorf("%d log-sum-exps are kept that nobody can ask for", n)
	}
}

// TestAttentionInPlaceConsumers puts ops behind the attention that overwrite
// their inputs where they can. The attention must make a new output at every
// run, or the second would start from the first one's sums.
func TestAttentionInPlaceConsumers(t *testing.T) {
	rng := reftest.Rand(t)
	p := graphtest.NewProblem(rng, dense(4, 2, 8, 8, 2, 30, 50), graphtest.Spec{Capacity: 50})
	want := p.Reference(p.Precision(0))
	before := [][]uint64{graphtest.Bits(t, p.InQ), graphtest.Bits(t, p.InK), graphtest.Bits(t, p.InV)}

	g := p.Graph()
	g.Lengths = graphtest.Input(g.G, "lengths", graphtest.LengthsOf(tensor.Int, p.Keys))
	var err error
	if g.Out, err = la.Attention(g.Q, g.K, g.V, la.WithLengths(g.Lengths)); err != nil {
		t.Fatal(err)
	}
	g.LSE = graphtest.LogSumExp(t, g.Out)
	x := make([]float64, 2*4*2*8)
	for i := range x {
		x[i] = 1000
	}
	residual := graphtest.Input(g.G, "residual", graphtest.TensorOf(tensor.Float32, x, 2, 4, 2, 8))
	sum := G.Must(G.Add(G.Must(G.Add(g.Out, residual)), residual))
	double := G.Must(G.Add(g.LSE, g.LSE))
	var sumV, doubleV G.Value
	G.Read(sum, &sumV)
	G.Read(double, &doubleV)
	vm := G.NewTapeMachine(g.G)
	defer vm.Close()
	var first []uint64
	for run := range 4 {
		graphtest.Again(t, vm)
		if run == 0 {
			first = append(graphtest.Bits(t, sumV), graphtest.Bits(t, doubleV)...)
			o := slices.Clone(graphtest.Floats(t, sumV))
			for i := range o {
				o[i] -= 2000
			}
			for i := range want.OBound {
				want.OBound[i] += 3 * 2000 * reftest.Float32.Unit()
			}
			l := slices.Clone(graphtest.Floats(t, doubleV))
			for i := range l {
				l[i] /= 2
			}
			p.Check(t, want, graphtest.TensorOf(tensor.Float32, o, sumV.Shape()...), graphtest.TensorOf(tensor.Float32, l, doubleV.Shape()...))
		}
		if got := append(graphtest.Bits(t, sumV), graphtest.Bits(t, doubleV)...); !slices.Equal(got, first) {
			t.Fatalf("run %d gives other sums than the first", run)
		}
	}
	for i, x := range []*tensor.Dense{p.InQ, p.InK, p.InV} {
		if !slices.Equal(graphtest.Bits(t, x), before[i]) {
			t.Errorf("%s was overwritten", []string{"q", "k", "v"}[i])
		}
	}

	// An output that the caller keeps stays as it is.
	kept := p.Attention(t)
	vm2 := G.NewTapeMachine(kept.G)
	defer vm2.Close()
	graphtest.Again(t, vm2)
	old := kept.Out.Value()
	oldBits := graphtest.Bits(t, old)
	graphtest.Let(t, kept.Q, graphtest.NewProblem(rng, p.Shape, p.Spec).InQ)
	graphtest.Again(t, vm2)
	if !slices.Equal(graphtest.Bits(t, old), oldBits) {
		t.Error("a run overwrote the output of the one before")
	}
	if slices.Equal(graphtest.Bits(t, kept.Out.Value()), oldBits) {
		t.Error("another query gave the same output")
	}
}

// TestAttentionConcurrentGraphs runs graphs of their own at the same time, on
// the one engine.
func TestAttentionConcurrentGraphs(t *testing.T) {
	rng := reftest.Rand(t)
	var wg sync.WaitGroup
	for i := range 6 {
		types := elementTypes[i]
		p := graphtest.NewProblem(rng, causal(dense(4, 2, 24, 24, 3, 100, 300)), graphtest.Spec{QueryType: types[0], KVType: types[1]})
		want := p.Reference(p.Precision(0))
		g := p.Attention(t, la.WithWorkers(i), la.WithTileTokens(32))
		wg.Go(func() {
			vm := G.NewTapeMachine(g.G)
			defer vm.Close()
			for range 20 {
				err := vm.RunAll()
				if err == nil {
					err = p.Compare(t, want, g.OutValue, g.LSEValue)
				}
				if err != nil {
					t.Error(fmt.Errorf("%v: %w", types, err))
					return
				}
				vm.Reset()
			}
		})
	}
	wg.Wait()
}

// reserve is a float16 tensor in address space that takes memory only where it
// is written.
func reserve(t *testing.T, shape ...int) *tensor.Dense {
	t.Helper()
	n := tensor.Shape(shape).TotalSize()
	m := reftest.Reserve(t, 2*n)
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(unsafe.Slice((*la.F16)(unsafe.Pointer(&m[0])), n)))
}

// TestAttentionHugeIndex (row 4): keys and values beyond element 2^31 and byte
// 2^32, of which the lengths leave only a few alive.
func TestAttentionHugeIndex(t *testing.T) {
	const heads, capacity, dim, live = 3, 1 << 25, 32, 600
	rng := reftest.Rand(t)
	p := &graphtest.Problem{
		Case: reftest.New(rng, dense(2*heads, heads, dim, dim, 1, live), reftest.Peaked, reftest.Float32, reftest.Float16),
		Spec: graphtest.Spec{QueryType: tensor.Float32, KVType: la.Float16, Rank: 4, Capacity: capacity, Rows: 1},
	}
	p.InQ = graphtest.TensorOf(tensor.Float32, p.DenseQ(1), 1, 2*heads, 1, dim)
	p.InK, p.InV = reserve(t, 1, heads, capacity, dim), reserve(t, 1, heads, capacity, dim)
	for h := range heads {
		for _, x := range []struct {
			to   []la.F16
			from func(seq, pos, head int) []float64
		}{{p.InK.Data().([]la.F16), p.Key}, {p.InV.Data().([]la.F16), p.Value}} {
			to := x.to[h*capacity*dim:]
			for pos := range live {
				for i, f := range x.from(0, pos, h) {
					to[pos*dim+i] = half.FromFloat64(f)
				}
			}
			for i := range 300 * dim { // past the end
				to[live*dim+i] = half.FromFloat64(math.NaN())
			}
		}
	}
	want := p.Reference(p.Precision(0))
	g := p.Attention(t, la.WithTileTokens(64), la.WithWorkers(5))
	vm := G.NewTapeMachine(g.G)
	defer vm.Close()
	graphtest.Again(t, vm)
	p.Check(t, want, g.OutValue, g.LSEValue)

	a := p.Args()
	if err := la.Attend(a, p.AttendOptions()...); err != nil {
		t.Fatal(err)
	}
	p.Check(t, want, a.Out, a.LSE)
}
