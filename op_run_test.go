package leanattention_test

import (
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"testing"

	la "gorgonia.org/leanattention"
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
		for _, x := range []spec{
			{query: tensor.Float32, capacity: capacity},
			{query: tensor.Float64, kv: la.Float16, capacity: capacity},
		} {
			draw := func() *problem {
				s := causal(dense(4, 2, 16, 24, 2, 0, 0, 0))
				for b := range s.Keys {
					s.Keys[b] = rng.IntN(capacity + 1)
				}
				x.inputs = reftest.AllInputs[rng.IntN(4)]
				return newProblem(rng, s, x)
			}
			g := draw().graph()
			g.lengths = input(g.g, "lengths", lengthsOf(lengthType, repeated(batch, 0)))
			var err error
			if g.out, err = la.Attention(g.q, g.k, g.v, la.WithCausal(), la.WithLengths(g.lengths), la.WithLSE(&g.lse), la.WithTileTokens(16)); err != nil {
				t.Fatal(err)
			}
			g.read(t)
			vm := G.NewTapeMachine(g.g)
			defer vm.Close()
			for run := range 12 {
				p := draw()
				let(t, g.q, p.q)
				let(t, g.k, p.k)
				let(t, g.v, p.v)
				let(t, g.lengths, lengthsOf(lengthType, p.Keys))
				again(t, vm)
				if err := p.compare(t, p.Reference(p.precision(0)), g.outV, g.lseV); err != nil {
					t.Fatalf("%v %v run %d %v: %v", lengthType, x.query, run, p.Shape, err)
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
		p := newProblem(rng, causal(dense(6, 2, 16, 8, 2, 40, 0, 77)), spec{query: types[0], kv: types[1], capacity: 80})
		want := p.Reference(p.precision(0))
		g := p.attention(t)
		g.run(t)
		p.check(t, want, g.outV, g.lseV)
		first := bits(t, g.outV)

		g = p.attention(t)
		g.run(t, G.TraceExec())
		p.check(t, want, g.outV, g.lseV)

		g = p.attention(t)
		vm := G.NewLispMachine(g.g, G.ExecuteFwdOnly())
		defer vm.Close()
		if err := vm.RunAll(); err != nil {
			t.Fatalf("lisp machine, %v: %v", types, err)
		}
		p.check(t, want, g.outV, g.lseV)
		if !slices.Equal(bits(t, g.outV), first) {
			t.Errorf("%v: the lisp machine gives other bits than the tape machine", types)
		}
	}
}

// TestAttentionDeterministic: a given schedule and number of workers gives the
// same bits at every run, of the same and of another graph.
func TestAttentionDeterministic(t *testing.T) {
	rng := reftest.Rand(t)
	shape, tile := causal(dense(6, 2, 32, 32, 3, 700, 0, 33, 1200)), 64
	if raceEnabled {
		shape, tile = causal(dense(6, 2, 8, 8, 3, 170, 0, 33, 300)), 16
	}
	p := newProblem(rng, shape, spec{inputs: reftest.Peaked})
	want := p.Reference(p.precision(0))
	for _, schedule := range []la.Schedule{la.StreamK, la.PerHead, la.FixedSplit(1), la.FixedSplit(2), la.FixedSplit(7), la.FixedSplit(1000)} {
		for workers := 1; workers <= 8; workers++ {
			var first, firstLSE []uint64
			for graphs := range 2 {
				g := p.attention(t, la.WithSchedule(schedule), la.WithWorkers(workers), la.WithTileTokens(tile))
				vm := G.NewTapeMachine(g.g)
				for range 3 {
					again(t, vm)
					if first == nil {
						first, firstLSE = bits(t, g.outV), bits(t, g.lseV)
						p.check(t, want, g.outV, g.lseV)
					}
					if !slices.Equal(bits(t, g.outV), first) || !slices.Equal(bits(t, g.lseV), firstLSE) {
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
	few := newProblem(rng, shape, spec{capacity: capacity, inputs: reftest.Peaked})
	want := few.Reference(few.precision(0))

	// The same sequences with strangers behind them and one before.
	big := dense(8, 2, 32, 32, 1, append(append([]int{77}, shape.Keys...), 1000, 0, 1, 300)...)
	many := newProblem(rng, big, spec{capacity: capacity})
	for _, x := range []struct{ to, from *tensor.Dense }{{many.q, few.q}, {many.k, few.k}, {many.v, few.v}} {
		to, from := x.to.Data().([]float32), x.from.Data().([]float32)
		copy(to[len(from)/4:], from)
	}

	var whole []uint64
	for _, schedule := range []la.Schedule{la.PerHead, la.FixedSplit(1), la.StreamK, la.FixedSplit(3)} {
		for _, workers := range []int{1, 2, 3, 8, 64} {
			opts := []la.Option{la.WithSchedule(schedule), la.WithWorkers(workers), la.WithTileTokens(128)}
			a, b := few.attention(t, opts...), many.attention(t, opts...)
			a.run(t)
			b.run(t)
			x, y := floats(t, a.outV), floats(t, b.outV)
			lx, ly := floats(t, a.lseV), floats(t, b.lseV)
			y, ly = y[len(x)/4:][:len(x)], ly[len(lx)/4:][:len(lx)]
			few.check(t, want, a.outV, a.lseV)
			few.check(t, want, tensorOf(tensor.Float32, y, a.outV.Shape()...), tensorOf(tensor.Float32, ly, a.lseV.Shape()...))
			if schedule == la.PerHead || schedule == la.FixedSplit(1) || workers == 1 {
				if whole == nil {
					whole = append(bits(t, a.outV), bits(t, a.lseV)...)
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
		p := newProblem(rng, causal(dense(4, 2, 40, 24, 2, 100, 3, 0, 257, 300)), spec{query: types[0], kv: types[1], capacity: 300})
		var clean []uint64
		for i, fill := range []float64{0, math.NaN(), math.Inf(1), math.Inf(-1), 65504} {
			for _, x := range []struct {
				t   **tensor.Dense
				all []float64
				dim int
			}{{&p.k, p.DenseK(300), p.Dim}, {&p.v, p.DenseV(300), p.ValueDim}} {
				for at := range x.all {
					seq, slot := at/(x.dim*300*p.KVHeads), at/x.dim%300
					if slot >= p.Keys[seq] {
						x.all[at] = fill
					}
				}
				*x.t = tensorOf(types[1], x.all, p.dims(p.KVHeads, 300, x.dim)...)
			}
			g := p.attention(t)
			g.run(t)
			got := append(bits(t, g.outV), bits(t, g.lseV)...)
			if i == 0 {
				clean = got
				p.check(t, p.Reference(p.precision(0)), g.outV, g.lseV)
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
		p := newProblem(rng, causal(dense(4, 2, 12, 12, 5, 20, 33)), spec{query: types[0], kv: types[1], capacity: 33})
		want := p.Reference(p.precision(0))
		check := func(name string, q, k, v, lengths *tensor.Dense) {
			t.Helper()
			g := &graph{g: G.NewGraph()}
			g.q, g.k, g.v, g.lengths = input(g.g, "q", q), input(g.g, "k", k), input(g.g, "v", v), input(g.g, "lengths", lengths)
			var err error
			g.out, err = la.Attention(g.q, g.k, g.v, append(p.options(), la.WithLSE(&g.lse), la.WithLengths(g.lengths))...)
			if err != nil {
				t.Fatal(err)
			}
			g.read(t)
			vm := G.NewTapeMachine(g.g)
			defer vm.Close()
			for range 2 {
				again(t, vm)
				if err := p.compare(t, want, g.outV, g.lseV); err != nil {
					t.Errorf("%v %s: %v", types, name, err)
				}
			}
		}
		lengths := lengthsOf(tensor.Int, p.Keys)
		check("transposed", transposed(t, p.q), transposed(t, p.k), transposed(t, p.v), lengths)
		check("sliced", sliced(t, p.q, 1), sliced(t, p.k, 1), sliced(t, p.v, 2), lengths)
		check("sliced", sliced(t, p.q, 3), sliced(t, p.k, 0), sliced(t, p.v, 3), lengths)
		column, err := tensor.New(tensor.WithShape(2, 2), tensor.WithBacking([]int{p.Keys[0], -1, p.Keys[1], 99})).Slice(nil, G.S(0))
		if err != nil {
			t.Fatal(err)
		}
		check("column of lengths", p.q, p.k, p.v, column.(*tensor.Dense))
	}

	// Nodes of a packed projection: q, k and v are slices of it, transposed to
	// heads first.
	p := newProblem(rng, dense(3, 3, 8, 8, 6, 6, 6), spec{})
	g := &graph{g: G.NewGraph()}
	heads, err := p.q.Concat(1, p.k, p.v) // (B, 3H, N, d)
	if err != nil {
		t.Fatal(err)
	}
	x := G.Must(G.Transpose(input(g.g, "packed", heads), 0, 2, 1, 3)) // (B, N, 3H, d)
	part := func(from int) *G.Node {
		n := G.Must(G.Slice(x, nil, nil, G.S(from, from+3), nil))
		return G.Must(G.Transpose(n, 0, 2, 1, 3))
	}
	if g.out, err = la.Attention(part(0), part(3), part(6), append(p.options(), la.WithLSE(&g.lse))...); err != nil {
		t.Fatal(err)
	}
	g.read(t)
	g.run(t)
	p.check(t, p.Reference(p.precision(0)), g.outV, g.lseV)
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
	p := newProblem(rng, dense(2, 2, 8, 8, 3, 50), spec{})
	g := p.graph()
	other := input(g.g, "k2", p.k)
	lengths, lengths2 := input(g.g, "lengths", lengthsOf(tensor.Int, []int{20})), input(g.g, "lengths2", lengthsOf(tensor.Int, []int{30}))
	var lse *G.Node
	attend := func(k *G.Node, opts ...la.Option) *G.Node {
		t.Helper()
		n, err := la.Attention(g.q, k, g.v, opts...)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	nodes := map[string]*G.Node{}
	for name, opts := range map[string][]la.Option{
		"none": nil, "scale 1": {la.WithScale(1)}, "scale 1+": {la.WithScale(math.Nextafter(1, 2))}, "scale -0": {la.WithScale(math.Copysign(0, -1))},
		"causal": {la.WithCausal()}, "per head": {la.WithSchedule(la.PerHead)}, "split 1": {la.WithSchedule(la.FixedSplit(1))},
		"split 2": {la.WithSchedule(la.FixedSplit(2))}, "tile 1": {la.WithTileTokens(1)}, "tile 2": {la.WithTileTokens(2)},
		"workers 1": {la.WithWorkers(1)}, "workers 2": {la.WithWorkers(2)}, "lengths": {la.WithLengths(lengths)},
		"other lengths": {la.WithLengths(lengths2)}, "lse": {la.WithLSE(&lse)},
		"window 1": {la.WithWindow(1)}, "window 2": {la.WithWindow(2)}, "cap 1": {la.WithSoftCap(1)}, "cap 1+": {la.WithSoftCap(math.Nextafter(1, 2))},
		"bias":     {la.WithBias(input(g.g, "bias", tensorOf(p.query, noise(rng, 2*p.capacity), 1, 2, 1, p.capacity)))},
		"bias 0":   {la.WithBias(input(g.g, "bias 0", tensorOf(p.query, make([]float64, p.capacity), 1, 1, 1, p.capacity)))},
		"slopes 0": {la.WithALiBi([]float64{0, 0})}, "slopes": {la.WithALiBi([]float64{1, 2})}, "slopes turned": {la.WithALiBi([]float64{2, 1})},
	} {
		nodes[name] = attend(g.k, opts...)
	}
	nodes["other keys"] = attend(other)
	byID := map[int64]string{}
	for name, n := range nodes {
		if same, ok := byID[n.ID()]; ok {
			t.Errorf("%q and %q are one node", name, same)
		}
		byID[n.ID()] = name
	}
	if err := la.CheckGraph(g.g); err != nil {
		t.Error(err)
	}

	// Equal ones merge, and so do their log-sum-exps; both results are there.
	var lse2 *G.Node
	if n := attend(g.k, la.WithLSE(&lse2)); n != nodes["lse"] || lse2 != lse {
		t.Errorf("equal attentions are nodes %v and %v, their log-sum-exps %v and %v", n, nodes["lse"], lse, lse2)
	}
	twice := G.Must(G.Add(nodes["lse"], attend(g.k, la.WithLSE(&lse2))))
	var sum, lseV G.Value
	G.Read(twice, &sum)
	G.Read(lse2, &lseV)
	g.run(t)
	want := p.Reference(p.precision(0))
	half := slices.Clone(floats(t, sum))
	for i := range half {
		half[i] /= 2
	}
	p.check(t, want, tensorOf(tensor.Float32, half, sum.Shape()...), lseV)
}

// TestAttentionClones runs clones of a graph at the same time: they share the
// ops, and nothing else.
func TestAttentionClones(t *testing.T) {
	rng := reftest.Rand(t)
	shape := dense(2, 1, 16, 16, 2, 40, 60)
	g := newProblem(rng, shape, spec{capacity: 60}).build(t)
	var wg sync.WaitGroup
	for range 4 {
		p := newProblem(rng, shape, spec{capacity: 60})
		want := p.Reference(p.precision(0))
		c := g.g.Clone().(*G.ExprGraph)
		node := func(n *G.Node) *G.Node { return c.Node(n.ID()).(*G.Node) }
		let(t, node(g.q), p.q)
		let(t, node(g.k), p.k)
		let(t, node(g.v), p.v)
		vm := G.NewTapeMachine(c)
		defer vm.Close()
		wg.Go(func() {
			for range 50 {
				if err := vm.RunAll(); err != nil {
					t.Error(err)
					return
				}
				vm.Reset()
				if err := p.compare(t, want, node(g.out).Value(), node(g.lse).Value()); err != nil {
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
	var problems [2]*problem
	var outs [2]G.Value
	for i := range problems {
		problems[i] = newProblem(rng, dense(2, 1, 16, 16, 2, 40), spec{})
	}
	g := problems[0].build(t)
	for i, p := range problems {
		var err error
		if outs[i], err = g.out.Op().Do(p.q, p.k, p.v); err != nil {
			t.Fatal(err)
		}
	}
	for i, p := range problems {
		lse, err := g.lse.Op().Do(outs[i])
		if err != nil {
			t.Fatal(err)
		}
		p.check(t, p.Reference(p.precision(0)), outs[i], lse)
		_, err = g.lse.Op().Do(outs[i])
		wantError(t, err, la.ErrState, "Attention", "log-sum-exp") // the first may have been overwritten
	}

	p := problems[0]
	for i := range 200 {
		if _, err := g.out.Op().Do(p.q, p.k, p.v); err != nil {
			t.Fatal(err)
		}
		if i%50 == 49 {
			runtime.GC()
		}
	}
	if n := la.PendingLSE(g.out); n > 100 {
		t.Errorf("%d log-sum-exps are kept that nobody can ask for", n)
	}
}

// TestAttentionInPlaceConsumers puts ops behind the attention that overwrite
// their inputs where they can. The attention must make a new output at every
// run, or the second would start from the first one's sums.
func TestAttentionInPlaceConsumers(t *testing.T) {
	rng := reftest.Rand(t)
	p := newProblem(rng, dense(4, 2, 8, 8, 2, 30, 50), spec{capacity: 50})
	want := p.Reference(p.precision(0))
	before := [][]uint64{bits(t, p.q), bits(t, p.k), bits(t, p.v)}

	g := p.graph()
	g.lengths = input(g.g, "lengths", lengthsOf(tensor.Int, p.Keys))
	var err error
	if g.out, err = la.Attention(g.q, g.k, g.v, la.WithLengths(g.lengths), la.WithLSE(&g.lse)); err != nil {
		t.Fatal(err)
	}
	x := make([]float64, 2*4*2*8)
	for i := range x {
		x[i] = 1000
	}
	residual := input(g.g, "residual", tensorOf(tensor.Float32, x, 2, 4, 2, 8))
	sum := G.Must(G.Add(G.Must(G.Add(g.out, residual)), residual))
	double := G.Must(G.Add(g.lse, g.lse))
	var sumV, doubleV G.Value
	G.Read(sum, &sumV)
	G.Read(double, &doubleV)
	vm := G.NewTapeMachine(g.g)
	defer vm.Close()
	var first []uint64
	for run := range 4 {
		again(t, vm)
		if run == 0 {
			first = append(bits(t, sumV), bits(t, doubleV)...)
			o := slices.Clone(floats(t, sumV))
			for i := range o {
				o[i] -= 2000
			}
			for i := range want.OBound {
				want.OBound[i] += 3 * 2000 * reftest.Float32.Unit()
			}
			l := slices.Clone(floats(t, doubleV))
			for i := range l {
				l[i] /= 2
			}
			p.check(t, want, tensorOf(tensor.Float32, o, sumV.Shape()...), tensorOf(tensor.Float32, l, doubleV.Shape()...))
		}
		if got := append(bits(t, sumV), bits(t, doubleV)...); !slices.Equal(got, first) {
			t.Fatalf("run %d gives other sums than the first", run)
		}
	}
	for i, x := range []*tensor.Dense{p.q, p.k, p.v} {
		if !slices.Equal(bits(t, x), before[i]) {
			t.Errorf("%s was overwritten", []string{"q", "k", "v"}[i])
		}
	}

	// An output that the caller keeps stays as it is.
	kept := p.attention(t)
	vm2 := G.NewTapeMachine(kept.g)
	defer vm2.Close()
	again(t, vm2)
	old := kept.out.Value()
	oldBits := bits(t, old)
	let(t, kept.q, newProblem(rng, p.Shape, p.spec).q)
	again(t, vm2)
	if !slices.Equal(bits(t, old), oldBits) {
		t.Error("a run overwrote the output of the one before")
	}
	if slices.Equal(bits(t, kept.out.Value()), oldBits) {
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
		p := newProblem(rng, causal(dense(4, 2, 24, 24, 3, 100, 300)), spec{query: types[0], kv: types[1]})
		want := p.Reference(p.precision(0))
		g := p.attention(t, la.WithWorkers(i), la.WithTileTokens(32))
		wg.Go(func() {
			vm := G.NewTapeMachine(g.g)
			defer vm.Close()
			for range 20 {
				err := vm.RunAll()
				if err == nil {
					err = p.compare(t, want, g.outV, g.lseV)
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
