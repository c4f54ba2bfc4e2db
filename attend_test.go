package leanattention_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"

	"gorgonia.org/leanattention/rewrite"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// TestAttend: the same as Attention, bit for bit, and every element of the
// results is written.
func TestAttend(t *testing.T) {
	rng := reftest.Rand(t)
	for i, types := range elementTypes {
		for j, s := range []reftest.Shape{
			dense(4, 2, 64, 64, 1, 300),
			causal(dense(6, 2, 40, 24, 3, 0, 1, 2, 100)),
			causal(dense(3, 1, 8, 8, 70, 33)),
		} {
			x := graphtest.Spec{Inputs: reftest.AllInputs[(i+j)%4], QueryType: types[0], KVType: types[1]}
			if len(s.Keys) == 1 {
				x.Rank = 3
			}
			p := graphtest.NewProblem(rng, s, x)
			own := []la.Option{la.WithSchedule(graphtest.Schedules[(i+j)%3]), la.WithWorkers(i), la.WithTileTokens(32)}
			opts := append(p.Options(), own...)
			a := p.Args()
			if err := la.Attend(a, opts...); err != nil {
				t.Fatal(err)
			}
			p.Check(t, p.Reference(p.Precision(0)), a.Out, a.LSE)

			g := p.Attention(t, own...)
			g.Run(t)
			if !slices.Equal(graphtest.Bits(t, a.Out), graphtest.Bits(t, g.OutValue)) || !slices.Equal(graphtest.Bits(t, a.LSE), graphtest.Bits(t, g.LSEValue)) {
				t.Errorf("%v %v: other bits than Attention", types, s)
			}
			if !p.Ragged() {
				b := p.Args()
				b.LSE, b.Lengths = nil, nil
				if err := la.Attend(b, opts...); err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(graphtest.Bits(t, a.Out), graphtest.Bits(t, b.Out)) {
					t.Errorf("%v %v: other bits without lengths and log-sum-exp", types, s)
				}
			}
		}
	}
}

// TestAttendTrees: batches of sequences with trees and without, with a bias and without; a chain has the bits
// that are there without a tree, and nothing is allocated in steady state.
func TestAttendTrees(t *testing.T) {
	rng := reftest.Rand(t)
	for i := range 3 * len(elementTypes) {
		types := elementTypes[i%len(elementTypes)]
		n := []int{1, 2, 9, 20, attn.MaxTree}[i%5]
		s, x := dense(4, 2, 24, 16, n, n+rng.IntN(200), n, n+rng.IntN(9)), graphtest.Spec{Inputs: reftest.AllInputs[i%4], QueryType: types[0], KVType: types[1]}
		if i%2 == 0 {
			graphtest.PadQueries(rng, &s, &x)
		}
		s = reftest.RandomTrees(rng, s)
		s.Trees[0] = reftest.RandomTree(rng, s.Queries[0])
		if i%3 == 0 {
			s = reftest.RandomBias(rng, s, slices.Max(s.Keys))
		}
		p := graphtest.NewProblem(rng, s, x)
		opts := append(p.Options(), la.WithSchedule(graphtest.Schedules[i%3]), la.WithWorkers(3), la.WithTileTokens(16))
		a := p.Args()
		if err := la.Attend(a, opts...); err != nil {
			t.Fatal(err)
		}
		p.Check(t, p.Reference(p.Precision(0)), a.Out, a.LSE)
		if n := testing.AllocsPerRun(20, func() {
			if err := la.Attend(a, opts...); err != nil {
				t.Fatal(err)
			}
		}); n != 0 && !reftest.RaceEnabled {
			t.Errorf("%v %v: %v allocations a call", types, s, n)
		}

		if s.Bias.X != nil {
			continue // it is NaN for what a tree hides
		}
		b, c := p.Args(), p.Args()
		b.Parents = nil
		for i := range c.Parents {
			c.Parents[i] = nil
			for j := range s.Queries[i] {
				c.Parents[i] = append(c.Parents[i], j-1)
			}
		}
		if err := errors.Join(la.Attend(b, opts...), la.Attend(c, opts...)); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(graphtest.Bits(t, b.Out), graphtest.Bits(t, c.Out)) {
			t.Errorf("%v %v: a chain has other bits", types, s)
		}
	}
}

// What is no tree is refused by name, before anything is written.
func TestBadAttendTrees(t *testing.T) {
	p := graphtest.NewProblem(reftest.Rand(t), causal(dense(2, 1, 4, 4, 3, 9, 5)), graphtest.Spec{})
	for name, c := range map[string]struct {
		trees [][]int
		opts  []la.Option
		want  error
		text  string
	}{
		"one tree":    {[][]int{{-1, 0, 0}}, nil, la.ErrShape, "1 trees for a batch of 2"},
		"too short":   {[][]int{nil, {-1, 0}}, nil, la.ErrShape, "sequence 1: 2 parents of 3 tokens"},
		"itself":      {[][]int{{-1, 0, 2}, nil}, nil, la.ErrShape, "sequence 0: the parent of token 2 is 2, outside [-1, 2)"},
		"later token": {[][]int{{1, 0, 0}, nil}, nil, la.ErrShape, "sequence 0: the parent of token 0 is 1, outside [-1, 0)"},
		"few keys":    {[][]int{nil, {-1, 0, 0}}, nil, la.ErrLength, "sequence 1 has 2 keys and a tree of 3"},
		"not causal":  {[][]int{{-1, 0, 0}, nil}, []la.Option{}, la.ErrUnsupported, "a tree without a causal mask"},
		"a window":    {[][]int{{-1, 0, 0}, nil}, []la.Option{la.WithCausal(), la.WithWindow(4)}, la.ErrUnsupported, "a tree and a window of 4 keys"},
		"slopes":      {[][]int{{-1, 0, 0}, nil}, []la.Option{la.WithCausal(), la.WithALiBi([]float64{1, 2})}, la.ErrUnsupported, "a tree and slopes"},
	} {
		a := p.Args()
		a.Parents, a.Lengths = c.trees, []int{9, 2}
		if c.opts == nil {
			c.opts = []la.Option{la.WithCausal()}
		}
		t.Run(name, func(t *testing.T) { wantError(t, la.Attend(a, c.opts...), c.want, "Attend", c.text) })
		if !graphtest.AllNaN(t, a.Out) || !graphtest.AllNaN(t, a.LSE) {
			t.Errorf("%s: a result was written", name)
		}
	}
	a := p.Args()
	a.Parents = make([][]int, 2) // none
	if err := la.Attend(a, la.WithWindow(4)); err != nil {
		t.Error(err)
	}
}

// TestAttendSegments: attention with segments is that to the keys of all segments of a sequence, and its own behind them.
func TestAttendSegments(t *testing.T) {
	for i := range reftest.Cases(t, 16, 200) {
		testAttendSegments(t, nil, []tensor.Dtype{tensor.Float32, tensor.Float64}[i%2], cacheTypes, 1+i%100, 1+i%64)
	}
	la.SharePrefixes(t) // where they are read once, however little that saves
	for i := range reftest.Cases(t, 16, 200) {
		testAttendSegments(t, nil, []tensor.Dtype{tensor.Float32, tensor.Float64}[i%2], cacheTypes, 1+i%100, 1+i%64)
	}
}

// TestGPUAttendSegments is that of a GPU.
func TestGPUAttendSegments(t *testing.T) {
	gpu := devicetest.Open(t)
	for i := range reftest.Cases(t, 3, 60) {
		testAttendSegments(t, gpu, []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16}[i%3], []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16}, 150, 64)
	}
}

func testAttendSegments(t *testing.T, gpu *device.GPU, query tensor.Dtype, storages []tensor.Dtype, longest, dim int) {
	rng := reftest.Rand(t)
	storage := storages[rng.IntN(len(storages))]
	batch, kvHeads, queries := 1+rng.IntN(4), 1+rng.IntN(2), 1+rng.IntN(5)
	heads := kvHeads * (1 + rng.IntN(3))
	draw := func(n int) []float64 {
		x := make([]float64, n)
		for i := range x {
			x[i] = float64(half.FromFloat64(rng.NormFloat64()).Float32())
			if storage == la.BFloat16 || query == la.BFloat16 {
				x[i] = math.Trunc(x[i]*16) / 16
			}
		}
		return x
	}
	// keys of each sequence: those of its segments, and its own behind them.
	k, v := make([][][]float64, batch*kvHeads), make([][][]float64, batch*kvHeads) // of each head its rows
	place := func(x *tensor.Dense) G.Value {
		if gpu == nil {
			return x
		}
		d, err := gpu.Upload(x)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	a := la.Args{Q: place(graphtest.TensorOf(query, draw(batch*heads*queries*dim), batch, heads, queries, dim))}
	for range 1 + rng.IntN(3) {
		n := 1 + rng.IntN(longest)
		shape := []int{kvHeads, n, dim}
		if rng.IntN(2) == 0 {
			shape = append([]int{1}, shape...)
		}
		keys, values := draw(kvHeads*n*dim), draw(kvHeads*n*dim)
		s := la.Segment{K: place(graphtest.TensorOf(storage, keys, shape...)), V: place(graphtest.TensorOf(storage, values, shape...))}
		members := rng.Perm(batch)
		if rng.IntN(3) > 0 {
			members = members[:rng.IntN(batch+1)]
			s.Sequences = append([]int{}, members...)
		}
		a.Segments = append(a.Segments, s)
		for _, b := range members {
			for h := range kvHeads {
				for i := range n {
					k[b*kvHeads+h] = append(k[b*kvHeads+h], keys[(h*n+i)*dim:][:dim])
					v[b*kvHeads+h] = append(v[b*kvHeads+h], values[(h*n+i)*dim:][:dim])
				}
			}
		}
	}
	n := queries + rng.IntN(40)
	keys, values := draw(batch*kvHeads*n*dim), draw(batch*kvHeads*n*dim)
	a.K, a.V = place(graphtest.TensorOf(storage, keys, batch, kvHeads, n, dim)), place(graphtest.TensorOf(storage, values, batch, kvHeads, n, dim))
	lengths := make([]int, batch)
	for b := range lengths {
		lengths[b] = queries + rng.IntN(n-queries+1)
		for h := range kvHeads {
			for i := range lengths[b] {
				k[b*kvHeads+h] = append(k[b*kvHeads+h], keys[((b*kvHeads+h)*n+i)*dim:][:dim])
				v[b*kvHeads+h] = append(v[b*kvHeads+h], values[((b*kvHeads+h)*n+i)*dim:][:dim])
			}
		}
	}
	a.Lengths = lengths
	live := graphtest.Repeated(batch, queries)
	if rng.IntN(2) == 0 {
		for b := range live {
			live[b] = rng.IntN(queries + 1)
		}
		a.QueryLengths = live
	}
	var opts []la.Option
	if rng.IntN(3) > 0 {
		opts = append(opts, la.WithCausal())
	}
	if rng.IntN(3) == 0 {
		opts = append(opts, la.WithSoftCap(3))
	}
	logs := query
	if gpu != nil {
		logs = tensor.Float32
	}
	if rng.IntN(3) == 0 {
		sinks := query
		if sinks != tensor.Float64 {
			sinks = tensor.Float32
		}
		a.Sinks = place(graphtest.TensorOf(sinks, draw(heads), heads))
	}
	nan := func(of tensor.Dtype, shape ...int) G.Value {
		x := make([]float64, tensor.Shape(shape).TotalSize())
		reftest.Poison(x)
		return place(graphtest.TensorOf(of, x, shape...))
	}
	a.Out = nan(query, batch, heads, queries, dim)
	if rng.IntN(3) > 0 {
		a.LSE = nan(logs, batch, heads, queries)
	}
	if err := la.Attend(a, opts...); err != nil {
		t.Fatal(err)
	}
	floats := func(x G.Value) []float64 {
		if d, ok := x.(*device.Tensor); ok {
			x = graphtest.Download(t, d)
		}
		return graphtest.Floats(t, x)
	}
	out, q := floats(a.Out), floats(a.Q)
	off := 3e-6
	if gpu != nil && storage == la.BFloat16 { // weights are two parts of bfloat16, which lose 2^-18 of a weight
		off = 1.2e-5
	}
	switch query {
	case la.Float16:
		off = 2e-3
	case la.BFloat16:
		off = 2e-2
	}
	for b := range batch { // by itself, in float64
		all := len(k[b*kvHeads])
		flat := func(x [][][]float64) *tensor.Dense {
			var y []float64
			for h := range kvHeads {
				y = append(y, slices.Concat(x[b*kvHeads+h]...)...)
			}
			return graphtest.TensorOf(tensor.Float64, y, kvHeads, all, dim)
		}
		part, n := heads*queries, live[b]
		rows := func(x []float64, width int, padding float64) (of []float64) { // of the queries; the others are padding
			for i := range part {
				row := x[(b*part+i)*width:][:width]
				if i%queries < n {
					of = append(of, row...)
				} else if slices.ContainsFunc(row, func(y float64) bool { return y != padding }) {
					t.Fatalf("row %d of sequence %d behind its %d queries is %v, want %v", i%queries, b, n, row, padding)
				}
			}
			return of
		}
		if n == 0 {
			rows(out, dim, 0)
			continue
		}
		var mine []float64
		for i := range part {
			if i%queries < n {
				mine = append(mine, q[(b*part+i)*dim:][:dim]...)
			}
		}
		one := la.Args{
			Q: graphtest.TensorOf(tensor.Float64, mine, heads, n, dim), K: flat(k), V: flat(v),
			Out: graphtest.TensorOf(tensor.Float64, make([]float64, len(mine)), heads, n, dim), LSE: graphtest.TensorOf(tensor.Float64, make([]float64, heads*n), heads, n),
		}
		if a.Sinks != nil {
			one.Sinks = graphtest.TensorOf(tensor.Float64, floats(a.Sinks), heads)
		}
		if err := la.Attend(one, opts...); err != nil {
			t.Fatal(err)
		}
		near := func(what string, got, want []float64) {
			t.Helper()
			for i, x := range want {
				if !(math.Abs(got[i]-x) <= off*(1+math.Abs(x))) {
					t.Fatalf("%v in %v, %d/%d heads, %d queries, sequence %d of %d with %d keys, %d segments: %s %d is %v, want %v",
						query, storage, heads, kvHeads, queries, b, batch, all, len(a.Segments), what, i, got[i], x)
				}
			}
		}
		near("output", rows(out, dim, 0), one.Out.Data().([]float64))
		if a.LSE != nil && a.Sinks == nil {
			near("log-sum-exp", rows(floats(a.LSE), 1, math.Inf(-1)), one.LSE.Data().([]float64))
		} else if a.LSE != nil && n == queries {
			near("log-sum-exp", floats(a.LSE)[b*part:][:part], one.LSE.Data().([]float64))
		}
	}
}

// Segments that do not fit, and what segments do not go with, are refused, before anything is written.
func TestBadAttendSegments(t *testing.T) {
	of := func(shape ...int) *tensor.Dense {
		return tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(shape...))
	}
	good := func() la.Args {
		a := la.Args{Q: of(2, 4, 1, 8), K: of(2, 2, 5, 8), V: of(2, 2, 5, 8), Out: of(2, 4, 1, 8), LSE: of(2, 4, 1), Segments: []la.Segment{{K: of(2, 7, 8), V: of(2, 7, 8)}}}
		a.Out.(*tensor.Dense).Set(3, float32(7))
		return a
	}
	in := func(x G.Value, shape ...int) *tensor.Dense { // a tensor that begins with the last element of x
		memory := make([]float32, 1000)
		data := x.Data().([]float32)
		t := x.(*tensor.Dense)
		*t = *tensor.New(tensor.WithShape(t.Shape().Clone()...), tensor.WithBacking(memory[:len(data)]))
		copy(memory, data)
		return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(memory[len(data)-1:][:tensor.Shape(shape).TotalSize()]))
	}
	for name, c := range map[string]struct {
		change func(*la.Args)
		opts   []la.Option
		want   error
		text   string
	}{
		"out in keys":    {func(a *la.Args) { a.Segments[0].K = in(a.Out, 2, 7, 8) }, nil, la.ErrUnsupported, "out shares memory with segment 0"},
		"out in values":  {func(a *la.Args) { a.Segments[0].V = in(a.Out, 2, 7, 8) }, nil, la.ErrUnsupported, "out shares memory with segment 0"},
		"lse in keys":    {func(a *la.Args) { a.Segments[0].K = in(a.LSE, 2, 7, 8) }, nil, la.ErrUnsupported, "lse shares memory with segment 0"},
		"lse in values":  {func(a *la.Args) { a.Segments[0].V = in(a.LSE, 2, 7, 8) }, nil, la.ErrUnsupported, "lse shares memory with segment 0"},
		"no keys":        {func(a *la.Args) { a.Segments[0].K = nil }, nil, la.ErrShape, "segment 0's k"},
		"other heads":    {func(a *la.Args) { a.Segments[0] = la.Segment{K: of(1, 7, 8), V: of(1, 7, 8)} }, nil, la.ErrShape, "segment 0 has 1 head and"},
		"another width":  {func(a *la.Args) { a.Segments[0].K = of(2, 7, 9) }, nil, la.ErrShape, "segment 0's k"},
		"other values":   {func(a *la.Args) { a.Segments[0].V = of(2, 7, 9) }, nil, la.ErrShape, "segment 0"},
		"a batch":        {func(a *la.Args) { a.Segments[0] = la.Segment{K: of(2, 2, 7, 8), V: of(2, 2, 7, 8)} }, nil, la.ErrShape, "batch"},
		"two lengths":    {func(a *la.Args) { a.Segments[0].V = of(2, 6, 8) }, nil, la.ErrShape, "segment 0"},
		"no sequence":    {func(a *la.Args) { a.Segments[0].Sequences = []int{2} }, nil, la.ErrShape, "sequence 2 of a batch of 2"},
		"twice":          {func(a *la.Args) { a.Segments[0].Sequences = []int{1, 1} }, nil, la.ErrShape, "twice of sequence 1"},
		"a window":       {func(*la.Args) {}, []la.Option{la.WithCausal(), la.WithWindow(3)}, la.ErrUnsupported, "segments: a window of 3 keys"},
		"slopes":         {func(*la.Args) {}, []la.Option{la.WithALiBi([]float64{1, 1, 1, 1})}, la.ErrUnsupported, "segments: slopes"},
		"a bias":         {func(a *la.Args) { a.Bias = of(1, 1, 1, 5) }, nil, la.ErrUnsupported, "segments: a bias"},
		"dropout":        {func(*la.Args) {}, []la.Option{la.WithDropout(0.5, nil)}, la.ErrUnsupported, "segments: a dropout"},
		"invariance":     {func(*la.Args) {}, []la.Option{la.WithBatchInvariance()}, la.ErrUnsupported, "segments: batch invariance"},
		"unfused":        {func(*la.Args) {}, []la.Option{la.WithSchedule(la.Unfused)}, la.ErrUnsupported, "nfused"},
		"float64 values": {func(a *la.Args) { a.Segments[0].V = tensor.New(tensor.Of(tensor.Float64), tensor.WithShape(2, 7, 8)) }, nil, la.ErrDType, "segment 0"},
	} {
		a := good()
		c.change(&a)
		wantError(t, la.Attend(a, c.opts...), c.want, "Attend", c.text)
		if x, ok := a.Out.(*tensor.Dense); !ok || x.Data().([]float32)[3] != 7 {
			t.Errorf("%s: something was written", name)
		}
	}
}

// TestAttendNonContiguous: operands that are views of other tensors.
func TestAttendNonContiguous(t *testing.T) {
	rng := reftest.Rand(t)
	for _, types := range elementTypes {
		p := graphtest.NewProblem(rng, dense(4, 2, 12, 8, 5, 20, 33), graphtest.Spec{QueryType: types[0], KVType: types[1], Capacity: 33})
		a := p.Args()
		a.Q, a.K, a.V = transposed(t, p.InQ), sliced(t, p.InK, 2), transposed(t, sliced(t, p.InV, 1).Materialize().(*tensor.Dense))
		if err := la.Attend(a, p.AttendOptions()...); err != nil {
			t.Fatal(err)
		}
		p.Check(t, p.Reference(p.Precision(0)), a.Out, a.LSE)
	}
}

// TestAttendAllocations: none in steady state.
func TestAttendAllocations(t *testing.T) {
	if reftest.RaceEnabled {
		t.Skip("the race detector makes sync.Pool forget at random")
	}
	rng := reftest.Rand(t)
	for i, types := range elementTypes {
		s := causal(dense(8, 2, 32, 16, 2, 700, 0, 100))
		if i%2 == 1 {
			s = graphtest.Biased(rng, graphtest.WithScoreMods(s, 90, 20, 1, 2, 3, 4, 5, 6, 7, 8), 1, 8, 2)
			s.Sinks = []float64{1, 2, 3, 4, 5, 6, 7, 8}
		}
		if i%3 == 1 {
			s.Dropout, s.Seed = 0.3, 5
		}
		p := graphtest.NewProblem(rng, s, graphtest.Spec{QueryType: types[0], KVType: types[1]})
		for _, schedule := range graphtest.Schedules {
			a := p.Args()
			opts := append(p.AttendOptions(), la.WithSchedule(schedule), la.WithWorkers(3), la.WithTileTokens(64))
			var err error
			if n := testing.AllocsPerRun(100, func() {
				if e := la.Attend(a, opts...); e != nil {
					err = e
				}
			}); n != 0 {
				t.Errorf("%v %v: %v allocations a call", types, schedule, n)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestAttendConcurrent: calls at the same time, on shared inputs and on other
// ones, give what they give alone.
func TestAttendConcurrent(t *testing.T) {
	rng := reftest.Rand(t)
	var problems []*graphtest.Problem
	var wants [][]uint64
	for i, types := range elementTypes {
		p := graphtest.NewProblem(rng, causal(dense(6, 2, 24, 24, 2, 150, 0, 400)), graphtest.Spec{QueryType: types[0], KVType: types[1]})
		a := p.Args()
		if err := la.Attend(a, append(p.AttendOptions(), la.WithWorkers(i))...); err != nil {
			t.Fatal(err)
		}
		p.Check(t, p.Reference(p.Precision(0)), a.Out, a.LSE)
		problems = append(problems, p)
		wants = append(wants, append(graphtest.Bits(t, a.Out), graphtest.Bits(t, a.LSE)...))
	}
	var wg sync.WaitGroup
	for range 2 {
		for i, p := range problems {
			a := p.Args()
			wg.Go(func() {
				for range 20 {
					if err := la.Attend(a, append(p.AttendOptions(), la.WithWorkers(i))...); err != nil {
						t.Error(err)
						return
					}
					if got := append(graphtest.Bits(t, a.Out), graphtest.Bits(t, a.LSE)...); !slices.Equal(got, wants[i]) {
						t.Errorf("%v: other bits than alone", elementTypes[i])
						return
					}
				}
			})
		}
	}
	wg.Wait()
}

// TestDefault checks the baseline against the reference, and ours against the
// baseline: within the sum of both bounds they are the same. Inputs are those
// that Gorgonia's SoftMax can do.
func TestDefault(t *testing.T) {
	rng := reftest.Rand(t)
	for i, s := range []reftest.Shape{
		graphtest.WithScoreMods(dense(4, 2, 16, 8, 3, 40, 40), 7, 0),
		graphtest.WithScoreMods(causal(dense(4, 2, 16, 8, 9, 40, 40)), 1, 0),
		graphtest.WithScoreMods(dense(2, 1, 16, 8, 9, 5, 5), 2, 0),
		withSinkTokens(graphtest.WithScoreMods(causal(dense(4, 2, 16, 8, 9, 40, 40)), 6, 0), 4),
		graphtest.WithScoreMods(causal(dense(4, 1, 16, 8, 3, 40)), 0, 1.5),
		graphtest.WithScoreMods(causal(dense(4, 2, 16, 8, 9, 40, 40)), 0, 0, 0.5, 0.25, -0.1, 0.125),
		graphtest.WithScoreMods(causal(dense(4, 2, 16, 8, 3, 33, 33, 33)), 16, 2, 0.5, 0.25, 0, 0.125),
		graphtest.Biased(rng, dense(4, 2, 16, 8, 3, 40), 1, 4, 3),
		graphtest.Biased(rng, dense(4, 2, 16, 8, 3, 40, 40), 1, 4, 3),
		graphtest.Biased(rng, graphtest.WithScoreMods(causal(dense(4, 2, 16, 8, 3, 40, 40)), 20, 3), 2, 1, 1),
		graphtest.Biased(rng, dense(4, 1, 16, 8, 3, 40), 1, 1, 3),
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
					p := graphtest.NewProblem(rng, s, graphtest.Spec{Inputs: in, QueryType: query, Rank: rank})
					p.Show()
					want := p.Reference(p.Precision(s.Keys[0]))
					g, ours := p.Both(t)
					var oursV G.Value
					G.Read(ours, &oursV)
					vm := G.NewTapeMachine(g.G)
					defer vm.Close()
					for range 2 {
						graphtest.Again(t, vm)
						p.Check(t, want, g.OutValue, nil)
						p.Check(t, want, oursV, nil)
						p.CheckClose(t, want, oursV, g.OutValue)
					}
				})
			}
		}
	}
}

func withSinkTokens(s reftest.Shape, n int) reftest.Shape {
	s.SinkTokens = n
	return s
}

// TestDefaultNodes: the inputs that Default makes, for the scale and the mask,
// are shared by the layers that have the same, and by no others.
func TestDefaultNodes(t *testing.T) {
	rng := reftest.Rand(t)
	p := graphtest.NewProblem(rng, dense(4, 2, 8, 8, 3, 6), graphtest.Spec{})
	g := p.Graph()
	build := func(opts ...la.Option) *G.Node {
		t.Helper()
		n, err := la.Default(g.Q, g.K, g.V, opts...)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	if build() != build() || build(la.WithCausal()) != build(la.WithCausal()) {
		t.Error("equal default attentions are two nodes")
	}
	nodes := []*G.Node{build(), build(la.WithCausal()), build(la.WithScale(1)), build(la.WithScale(2)),
		build(la.WithWindow(2)), build(la.WithWindow(3)), build(la.WithWindow(3), la.WithCausal()), build(la.WithWindow(3), la.WithSinkTokens(1)), build(la.WithSoftCap(1)), build(la.WithSoftCap(2)),
		build(la.WithBias(graphtest.Input(g.G, "one", graphtest.TensorOf(tensor.Float32, make([]float64, 6), 1, 1, 1, 6)))),
		build(la.WithBias(graphtest.Input(g.G, "each", graphtest.TensorOf(tensor.Float32, make([]float64, 72), 1, 4, 3, 6)))),
		build(la.WithALiBi([]float64{1, 2, 3, 4})), build(la.WithALiBi([]float64{1, 2, 4, 3}))}
	for i, a := range nodes {
		for _, b := range nodes[:i] {
			if a == b {
				t.Errorf("attention %d and another one are one node", i)
			}
		}
	}
	if err := rewrite.Check(g.G); err != nil {
		t.Error(err)
	}
}

// TestDefaultSoftMax shows the limit that Default's documentation tells of,
// where ours is right: a row far below the tensor's first element.
func TestDefaultSoftMax(t *testing.T) {
	rng := reftest.Rand(t)
	p := graphtest.NewProblem(rng, dense(2, 2, 4, 4, 1, 3), graphtest.Spec{})
	for h, x := range []float64{1000, -1000} {
		for i := range p.Dim {
			p.Query(0, 0, h)[i] = x
			for j := range p.Keys[0] {
				p.Key(0, j, h)[i] = 1
			}
		}
	}
	p.InQ, p.InK = graphtest.TensorOf(tensor.Float32, p.DenseQ(1), 1, 2, 1, 4), graphtest.TensorOf(tensor.Float32, p.DenseK(3), 1, 2, 3, 4)
	g, ours := p.Both(t)
	var oursV G.Value
	G.Read(ours, &oursV)
	g.Run(t)
	p.Check(t, p.Reference(p.Precision(0)), oursV, nil)
	if !slices.ContainsFunc(graphtest.Floats(t, g.OutValue), math.IsNaN) {
		t.Error("Gorgonia's SoftMax copes with rows far below the first element: Default's documentation is out of date")
	}
}

// TestUnfusedOnHost: Gorgonia's nodes do that, so nothing here does, nor writes
// anything.
func TestUnfusedOnHost(t *testing.T) {
	p := graphtest.NewProblem(reftest.Rand(t), dense(4, 2, 64, 64, 1, 300), graphtest.Spec{QueryType: tensor.Float32, KVType: tensor.Float32})
	a := p.Args()
	if err := la.Attend(a, append(p.AttendOptions(), la.WithSchedule(la.Unfused))...); !errors.Is(err, la.ErrUnsupported) {
		t.Errorf("Attend: %v", err)
	}
	for _, x := range a.Out.(*tensor.Dense).Float32s() {
		if x == x {
			t.Fatal("Attend wrote, and refused")
		}
	}
	cache, err := la.NewCache(la.CacheConfig{Layers: 1, KVHeads: 2, HeadDim: 64, DType: tensor.Float32, PageSize: 16, Pages: 4})
	if err != nil {
		t.Fatal(err)
	}
	step, err := cache.NewStep(1)
	if err != nil {
		t.Fatal(err)
	}
	g := G.NewGraph()
	row := func(name string, width int) *G.Node {
		return G.NewTensor(g, tensor.Float32, 2, G.WithShape(1, width), G.WithName(name))
	}
	if _, err := la.CachedAttention(row("q", 4*64), row("k", 2*64), row("v", 2*64), step.Layer(0), la.WithSchedule(la.Unfused)); !errors.Is(err, la.ErrUnsupported) {
		t.Errorf("CachedAttention: %v", err)
	}
	if err := cache.Close(); err != nil {
		t.Error(err)
	}
	if s := la.Unfused.String(); s != "Unfused" {
		t.Errorf("its name is %s", s)
	}
}
