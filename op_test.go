package leanattention_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/leanattention/rope"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// acceptanceCase is an attention on tensors that another project's tests, or
// their gaps, brought up. The number in its name is that of its row in the list
// of acceptance cases; sizes of huge ones are scaled down in batch and heads.
type acceptanceCase struct {
	name     string
	shape    reftest.Shape
	capacity int // Nk; 0: the longest of the sequences
	opts     []la.Option
}

// dense is a shape whose sequences all have nq queries.
func dense(heads, kvHeads, dim, valueDim, nq int, keys ...int) reftest.Shape {
	return reftest.Shape{
		Heads: heads, KVHeads: kvHeads, Dim: dim, ValueDim: valueDim,
		Queries: graphtest.Repeated(len(keys), nq), Keys: keys,
	}
}

func withSinks(s reftest.Shape, sinks ...float64) reftest.Shape {
	s.Sinks = sinks
	return s
}

func causal(s reftest.Shape) reftest.Shape {
	s.Causal = true
	return s
}

func acceptanceCases() []acceptanceCase {
	var cases []acceptanceCase
	add := func(row string, s reftest.Shape, capacity int, opts ...la.Option) {
		cases = append(cases, acceptanceCase{fmt.Sprintf("%s %v", row, s), s, capacity, opts})
	}

	// 1: short decodes.
	for _, n := range []int{1, 2, 15, 16, 255, 256, 257, 512} {
		add("1 short", dense(4, 4, 64, 64, 1, n, n), 0)
	}
	// 3: long decodes.
	add("3 long", dense(2, 2, 32, 32, 1, 131072), 0)
	add("3 long", dense(1, 1, 16, 16, 1, 262144), 0)
	// 5: fewer LeanTiles than workers.
	for _, n := range []int{64, 192, 512} {
		add("5 few tiles", dense(n/64%4+1, 1, 64, 64, 1, n), 0, la.WithWorkers(16), la.WithTileTokens(64))
	}
	// 6: ragged and long.
	add("6 ragged", dense(2, 2, 16, 16, 1, 4096, 32768, 65536), 0)
	// 9, 10, 48: the decode grids.
	for i, n := range []int{54, 97, 128, 512, 999, 2048} {
		add("9 grid", dense([]int{4, 8, 32}[i%3], 4, 128, 128, 1, n, n-1, n-53), 0)
		add("10 single", dense(2*[]int{1, 4, 8}[i%3], 2, []int{64, 128, 256}[i%3], []int{64, 128, 256}[i%3], 1, n), 0)
	}
	add("10 single", dense(4, 1, 32, 32, 1, 32789), 0)
	add("48 decode", dense(8, 2, 128, 128, 1, 512, 511, 3, 512), 512)
	// 12: sequences without keys, beside others and alone.
	add("12 empty", dense(32, 32, 128, 128, 1, 0, 144), 0)
	add("12 empty", dense(4, 2, 16, 16, 3, 0, 9, 0, 0, 300, 0), 0)
	add("12 empty", dense(4, 2, 16, 16, 2, 0), 7)
	add("12 empty", causal(dense(3, 1, 8, 8, 5, 0, 0, 0)), 40)
	// 21: (queries, keys) of a decode with a cache, causal.
	for i, qk := range [][2]int{{1, 128}, {1, 339}, {3, 1024}, {64, 800}, {64, 256}, {3, 799}, {128, 128}} {
		dim := []int{32, 59, 64, 80, 128, 256, 32}[i]
		if qk[0] > 3 {
			dim = []int{16, 59, 16, 40, 16, 16, 16}[i]
		}
		add("21 corner", causal(dense(6, []int{6, 3, 1}[i%3], dim, dim, qk[0], qk[1])), 0)
	}
	add("21 corner", causal(dense(1, 1, 16, 16, 64, 2048)), 0)
	add("21 corner", causal(dense(2, 1, 8, 8, 16, 20000)), 0)
	add("21 corner", causal(dense(2, 1, 8, 8, 4, 131072)), 0)
	// 26: a prompt's last chunk.
	add("26 chunk", causal(dense(7, 1, 16, 16, 264, 515)), 0)
	// 29: more queries than keys, so that early rows see nothing.
	add("29 blind rows", causal(dense(4, 2, 24, 24, 235, 2)), 0)
	add("29 blind rows", causal(dense(2, 2, 24, 24, 33, 2, 33, 0, 1, 32, 34, 500)), 0)
	// 31: ragged prefill and decode lengths, odd group.
	add("31 ragged", causal(dense(5, 1, 40, 40, 5, 1328, 18, 463, 5)), 1400)
	add("31 ragged", causal(dense(8, 2, 72, 72, 1, 523, 37, 2011)), 0)
	// 41, 42: latent attention as one KV head, 512 + 64 wide.
	add("41 latent", causal(dense(16, 1, 576, 512, 3, 0, 17, 514)), 0)
	add("42 latent", dense(9, 3, 576, 512, 2, 20, 140, 0), 0)
	// 44: head sizes of ggml, unequal ones included.
	for i, d := range [][2]int{{40, 40}, {64, 64}, {72, 72}, {80, 80}, {96, 96}, {128, 128}, {192, 128}, {256, 256}, {576, 512}} {
		add("44 sizes", dense([]int{1, 4, 8, 16, 20}[i%5], 1, d[0], d[1], []int{1, 3}[i%2], []int{113, 512, 1024}[i%3]), 0)
	}
	// 46: groups that nobody builds.
	for _, group := range []int{3, 5, 6, 7, 10, 12, 16, 24, 32, 64} {
		add("46 group", dense(2*group, 2, 32, 32, 1, 999), 0)
		add("46 group", causal(dense(2*group, 2, 16, 16, 3, 65)), 0)
	}
	// 47: several queries a step.
	for _, x := range [][4]int{{4, 4, 4, 2}, {2, 3, 2, 6}, {4, 1, 2, 5}, {2, 4, 2, 16}, {20, 1, 4, 6}} {
		s := causal(dense(x[2]*x[3], x[2], 64, 64, x[1], graphtest.Repeated(x[0], 110)...))
		for i := range s.Keys {
			s.Keys[i] -= i % 5 * 17
		}
		add("47 several", s, 0)
	}
	// Head dims and value dims of every residue that a kernel's loops could get wrong.
	for i, d := range []int{1, 3, 32, 40, 59, 64, 72, 80, 96, 112, 128, 192, 256} {
		dims := []int{d, 5, 64, 33, 7, 128, 17}
		add("head dim", causal(dense(4, 2, d, dims[i%len(dims)], 2, 67, 300)), 0)
	}
	return cases
}

// elementTypes are all pairs of a query's and a key's element type.
var elementTypes = [][2]tensor.Dtype{
	{tensor.Float32, tensor.Float32}, {tensor.Float32, la.Float16}, {tensor.Float32, la.BFloat16}, {tensor.Float32, tensor.Float64},
	{tensor.Float64, tensor.Float64}, {tensor.Float64, tensor.Float32}, {tensor.Float64, la.Float16}, {tensor.Float64, la.BFloat16},
}

// work is about the number of multiplications that the reference needs.
func work(s reftest.Shape) int {
	n := 0
	for i, keys := range s.Keys {
		n += s.Heads * s.Queries[i] * keys * (s.Dim + s.ValueDim)
	}
	return n
}

// TestAttention executes the graph of every acceptance case on the tape
// machine. All cases meet all kinds of inputs, but for large ones, which meet
// the one that shows a lost key; element types, ranks, schedules and numbers of
// workers take turns.
func TestAttention(t *testing.T) {
	rng := reftest.Rand(t)
	turn := 0
	for _, c := range acceptanceCases() {
		inputs := reftest.AllInputs
		large, most := reftest.Cases(t, 250_000, 2_000_000), reftest.Cases(t, 5_000_000, 20_000_000)
		if reftest.RaceEnabled {
			large, most = 100_000, 1_000_000
		}
		if w := work(c.shape); w > most {
			continue
		} else if w > large {
			inputs = []reftest.Inputs{reftest.Peaked}
		}
		for i, in := range inputs {
			if turn++; !reftest.Every(t) && i != turn%len(inputs) {
				continue
			}
			x := graphtest.Spec{Inputs: in, QueryType: elementTypes[turn%8][0], KVType: elementTypes[turn%8][1], Capacity: c.capacity}
			if len(c.shape.Keys) == 1 && turn%3 != 0 {
				x.Rank = 3
			}
			opts := append([]la.Option{la.WithSchedule(graphtest.Schedules[turn%3])}, c.opts...)
			if c.opts == nil { // the case leaves the workers open
				opts = append(opts, la.WithWorkers(turn%5))
			}
			name := fmt.Sprintf("%s %v %v %v %v workers %d", c.name, in, x.QueryType, x.KVType, graphtest.Schedules[turn%3], turn%5)
			t.Run(name, func(t *testing.T) {
				p := graphtest.NewProblem(rng, c.shape, x)
				g := p.Attention(t, opts...)
				g.Run(t)
				p.Check(t, p.Reference(p.Precision(0)), g.OutValue, g.LSEValue)
			})
		}
	}
}

// TestAttentionRandomShapes meets what no list has.
func TestAttentionRandomShapes(t *testing.T) {
	rng := reftest.Rand(t)
	n := 150
	if reftest.RaceEnabled {
		n = 30
	}
	for range n {
		attendSomehow(t, rng, reftest.RandomShape(rng), false)
	}
}

// attendSomehow runs a shape as a node, with as many queries in each sequence as the
// first has, at least one, with random numbers, types and schedules and, if told, a
// random bias.
func attendSomehow(t *testing.T, rng *rand.Rand, s reftest.Shape, biased bool) (p *graphtest.Problem, g *graphtest.Graph, workers int, opts []la.Option) {
	t.Helper()
	s.Queries = graphtest.Repeated(len(s.Keys), max(s.Queries[0], 1))
	types := elementTypes[rng.IntN(8)]
	x := graphtest.Spec{
		Inputs: reftest.AllInputs[rng.IntN(4)], QueryType: types[0], KVType: types[1],
		Capacity: max(slices.Max(s.Keys)+rng.IntN(3), 1),
	}
	tile, workers, schedule := rng.IntN(100), rng.IntN(9), graphtest.Schedules[rng.IntN(3)]
	if biased {
		s = reftest.RandomBias(rng, s, x.Capacity)
	}
	if rng.IntN(3) == 0 {
		graphtest.PadQueries(rng, &s, &x)
	}
	p = graphtest.NewProblem(rng, s, x)
	opts = []la.Option{la.WithTileTokens(tile), la.WithWorkers(workers), la.WithSchedule(schedule)}
	g = p.Attention(t, opts...)
	g.Run(t)
	if err := p.Compare(t, p.Reference(p.Precision(slices.Max(s.Keys)+1)), g.OutValue, g.LSEValue); err != nil {
		t.Fatalf("%v %v %+v, tiles of %d, %d workers, %v: %v", s, x.Inputs, types, tile, workers, schedule, err)
	}
	return p, g, workers, opts
}

// TestAttentionScoreMods: windows, sink tokens, soft caps, slopes and biases, in all their mixtures, as a
// node and without a graph.
func TestAttentionScoreMods(t *testing.T) {
	rng := reftest.Rand(t)
	n := 150
	if reftest.RaceEnabled {
		n = 30
	}
	for range n {
		s := reftest.RandomScoreMods(rng, reftest.RandomShape(rng))
		if rng.IntN(3) == 0 {
			s = reftest.RandomSinkTokens(rng, s)
		}
		p, g, workers, opts := attendSomehow(t, rng, s, rng.IntN(2) == 0)
		a := p.Args()
		if err := la.Attend(a, append(p.AttendOptions(), opts...)...); err != nil {
			t.Fatal(err)
		}
		if workers > 0 && !(slices.Equal(graphtest.Bits(t, a.Out), graphtest.Bits(t, g.OutValue)) && slices.Equal(graphtest.Bits(t, a.LSE), graphtest.Bits(t, g.LSEValue))) {
			t.Errorf("%v: Attend has other bits", p.Shape)
		}
	}
}

// TestWithALiBiCopies: an option is what it was when it was made.
func TestWithALiBiCopies(t *testing.T) {
	rng := reftest.Rand(t)
	s := dense(2, 1, 4, 4, 2, 30)
	s.Slopes = []float64{0.5, 0.25}
	p := graphtest.NewProblem(rng, s, graphtest.Spec{})
	given := slices.Clone(s.Slopes)
	opt := la.WithALiBi(given)
	clear(given)
	a := p.Args()
	if err := la.Attend(a, la.WithScale(p.Scale), opt); err != nil {
		t.Fatal(err)
	}
	p.Check(t, p.Reference(p.Precision(0)), a.Out, a.LSE)
}

// TestAttentionBiasLowest: what masks of transformers hide keys by, the lowest finite
// number, hides them from a query that sees others; one that sees nothing else
// takes them all alike, as in float32 it does by the formula.
func TestAttentionBiasLowest(t *testing.T) {
	for _, query := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		lowest := -math.MaxFloat64
		if query == tensor.Float32 {
			lowest = -math.MaxFloat32
		}
		bias := []float64{0, lowest, 0, lowest, lowest, lowest, lowest, lowest}
		a := la.Args{
			Q: graphtest.TensorOf(query, []float64{1, 1}, 1, 2, 1), K: graphtest.TensorOf(query, []float64{1, -1, 1, 2}, 1, 4, 1),
			V: graphtest.TensorOf(query, []float64{1, 2, 3, 6}, 1, 4, 1), Out: graphtest.TensorOf(query, make([]float64, 2), 1, 2, 1),
			LSE: graphtest.TensorOf(query, make([]float64, 2), 1, 2), Bias: graphtest.TensorOf(query, bias, 1, 2, 4),
		}
		if err := la.Attend(a, la.WithScale(0.5)); err != nil {
			t.Fatal(err)
		}
		if got := graphtest.Floats(t, a.Out); got[0] != 2 || got[1] != 3 {
			t.Errorf("%v: %v, want [2 3]", query, got)
		}
		if got := graphtest.Floats(t, a.LSE); math.Abs(got[0]-(0.5+math.Ln2)) > 1e-6 || !(got[1] < 0.69*lowest) {
			t.Errorf("%v: log-sum-exp %v", query, got)
		}
	}
}

// TestAttentionBiasViews: a bias that does not lie row by row in memory.
func TestAttentionBiasViews(t *testing.T) {
	rng := reftest.Rand(t)
	p := graphtest.NewProblem(rng, graphtest.Biased(rng, dense(4, 2, 8, 8, 5, 9), 1, 4, 5), graphtest.Spec{Rank: 3})
	a := p.Args()
	turned := graphtest.TensorOf(p.QueryType, make([]float64, 4*5*9), 4, 9, 5)
	for i, x := range p.Bias.X {
		turned.Data().([]float32)[i/45*45+i%9*5+i/9%5] = float32(x)
	}
	if err := turned.T(0, 2, 1); err != nil {
		t.Fatal(err)
	}
	a.Bias = turned
	if err := la.Attend(a, p.AttendOptions()...); err != nil {
		t.Fatal(err)
	}
	p.Check(t, p.Reference(p.Precision(0)), a.Out, a.LSE)
}

// TestAttentionBiasNaN: a bias that is not a number, or +Inf, shows in the rows that
// it is for and in no others.
func TestAttentionBiasNaN(t *testing.T) {
	rng := reftest.Rand(t)
	for _, bad := range []float64{math.NaN(), math.Inf(1)} {
		s := graphtest.Biased(rng, dense(4, 2, 8, 8, 70, 90), 1, 4, 1)
		s.Bias.X[2*90+17] = bad
		p := graphtest.NewProblem(rng, s, graphtest.Spec{})
		a := p.Args()
		if err := la.Attend(a, p.AttendOptions()...); err != nil {
			t.Fatal(err)
		}
		for i, x := range graphtest.Floats(t, a.Out) {
			if got, want := math.IsNaN(x), i/(70*8) == 2; got != want {
				t.Fatalf("%v: element %d is %v", bad, i, x)
			}
		}
	}
}

// TestAttentionScale checks factors on the scores that are not 1/sqrt(d).
func TestAttentionScale(t *testing.T) {
	rng := reftest.Rand(t)
	for _, scale := range []float64{0, -1, 1, 1e-30, 40} {
		for _, query := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
			p := graphtest.NewProblem(rng, dense(4, 2, 16, 8, 2, 300, 7), graphtest.Spec{QueryType: query})
			p.Scale = scale // 0 too: New takes it for the usual one
			g := p.Attention(t)
			g.Run(t)
			if err := p.Compare(t, p.Reference(p.Precision(0)), g.OutValue, g.LSEValue); err != nil {
				t.Errorf("scale %v, %v: %v", scale, query, err)
			}
		}
	}
	// Without the option it is 1/sqrt(d).
	p := graphtest.NewProblem(rng, dense(2, 2, 59, 59, 1, 100), graphtest.Spec{})
	g := p.Graph()
	var err error
	if g.Out, err = la.Attention(g.Q, g.K, g.V); err != nil {
		t.Fatal(err)
	}
	g.Read(t)
	g.Run(t)
	p.Check(t, p.Reference(p.Precision(0)), g.OutValue, nil)
}

// TestAttentionExtremeLogits: scores of thousands, where one key takes all,
// and where the largest comes first, last, or in every tile anew.
func TestAttentionExtremeLogits(t *testing.T) {
	rng := reftest.Rand(t)
	for _, query := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		for _, slope := range []float64{-5000, -1, 1, 5000} {
			p := graphtest.NewProblem(rng, dense(2, 1, 4, 4, 1, 700), graphtest.Spec{QueryType: query})
			for j := range p.Keys[0] { // scores rise or fall by slope from key to key
				for i := range p.Dim {
					p.Key(0, j, 0)[i] = slope * float64(j) / float64(p.Dim)
				}
			}
			for h := range p.Heads {
				for i := range p.Dim {
					p.Query(0, 0, h)[i] = 1
				}
			}
			p.Scale = 1
			p.InQ, p.InK = graphtest.TensorOf(query, p.DenseQ(1), p.Dims(2, 1, 4)...), graphtest.TensorOf(query, p.DenseK(700), p.Dims(1, 700, 4)...)
			g := p.Attention(t)
			g.Run(t)
			if err := p.Compare(t, p.Reference(p.Precision(0)), g.OutValue, g.LSEValue); err != nil {
				t.Errorf("slope %v, %v: %v", slope, query, err)
			}
		}
	}
}

// fuzzed reads small decisions from a fuzzer's bytes, and 0 behind their end.
type fuzzed []byte

func (f *fuzzed) next() int {
	if len(*f) == 0 {
		return 0
	}
	b := (*f)[0]
	*f = (*f)[1:]
	return int(b)
}

// fuzzSizes are sizes of axes: good, none, and such that no product of two fits.
var fuzzSizes = []int{1, 2, 3, 4, 6, 8, 16, 59, 64, 256, 1 << 20, min(1<<33, math.MaxInt/2), 0, -1}

func (f *fuzzed) size() int      { return fuzzSizes[f.next()%len(fuzzSizes)] }
func (f *fuzzed) smallSize() int { return fuzzSizes[f.next()%9] }

var fuzzTypes = []tensor.Dtype{tensor.Float32, tensor.Float64, la.Float16, la.BFloat16, tensor.Int, tensor.Bool}

func isFloat(t tensor.Dtype) bool { return t == tensor.Float32 || t == tensor.Float64 }

// mutate changes some axes, the ranks and the element types of operands.
func (f *fuzzed) mutate(x []input3) {
	for n := f.next() % 4; n > 0; n-- {
		o := &x[f.next()%len(x)]
		o.shape = slices.Clone(o.shape)
		switch kind := f.next() % 8; {
		case kind < 5 && len(o.shape) > 0:
			o.shape[f.next()%len(o.shape)] = f.size()
		case kind == 5 && len(o.shape) > 0:
			o.shape = o.shape[1:]
		case kind == 6 && len(o.shape) < 6:
			o.shape = append(o.shape, f.size())
		default:
			o.of = fuzzTypes[f.next()%len(fuzzTypes)]
		}
	}
}

// nodes makes the inputs q, k and v; false if Gorgonia has no such nodes.
func fuzzNodes(g *G.ExprGraph, x []input3) (n [3]*G.Node, ok bool) {
	defer func() { ok = recover() == nil }()
	for i, o := range x {
		name := string("qkv"[i])
		if len(o.shape) == 0 {
			n[i] = G.NewScalar(g, o.of, G.WithName(name))
		} else {
			n[i] = o.node(g, name)
		}
	}
	return n, true
}

// denseResult says, apart from the code under test, what attention on dense
// operands gives: the shape of the output, or nil.
func denseResult(x []input3, isDefault, causal bool) tensor.Shape {
	q, k, v := x[0], x[1], x[2]
	short := !isDefault && (q.of == la.Float16 || q.of == la.BFloat16) && q.of == k.of // on a GPU
	if !isFloat(q.of) && !short || k.of != v.of || k.of == tensor.Int || k.of == tensor.Bool || isDefault && k.of != q.of {
		return nil
	}
	if len(q.shape) < 3 || len(q.shape) > 4 || len(k.shape) != len(q.shape) || len(v.shape) != len(q.shape) {
		return nil
	}
	if slices.Min(slices.Concat(q.shape, k.shape, v.shape)) < 1 {
		return nil
	}
	at := func(o input3, fromEnd int) int { return o.shape[len(o.shape)-fromEnd] }
	if len(q.shape) == 4 && (at(k, 4) != at(q, 4) || at(v, 4) != at(q, 4)) {
		return nil
	}
	if at(k, 3) != at(v, 3) || at(q, 3)%at(k, 3) != 0 || at(q, 1) != at(k, 1) || at(k, 2) != at(v, 2) {
		return nil
	}
	if isDefault && causal && at(q, 2) > at(k, 2) {
		return nil
	}
	out := slices.Clone(q.shape)
	out[len(out)-1] = at(v, 1)
	return out
}

// FuzzShapes gives the builders operands of all shapes and types: they accept
// what fits together and nothing else, infer the right shape, and never panic.
func FuzzShapes(f *testing.F) {
	f.Add([]byte{0})
	f.Add([]byte{0, 1, 2, 2, 1, 1, 5, 8, 8})
	f.Add([]byte{1, 1, 2, 2, 1, 1, 5, 8, 8, 0, 1, 2, 0, 11})
	f.Add([]byte{2, 3, 1, 1, 2, 4, 6, 7, 3, 1, 1, 0, 3, 12, 2, 5})
	f.Add([]byte{3, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 10, 1, 1, 1, 11, 2, 7, 1})
	f.Add([]byte("0'''''''''''''o\x98\x83\xfb\x17")) // Default of float16
	f.Add([]byte{0, 0, 9, 9, 9, 9, 9, 9, 9, 2, 0, 1, 10, 10, 1, 2, 11})
	f.Fuzz(func(t *testing.T, data []byte) {
		b := fuzzed(data)
		if b.next()%2 == 0 {
			fuzzDense(t, &b)
		} else {
			fuzzCached(t, &b)
		}
	})
}

func fuzzDense(t *testing.T, b *fuzzed) {
	flags := b.next()
	isDefault, causal, flat := flags&1 != 0, flags&2 != 0, flags&4 != 0
	batch, kv, group, nq, nk, d, dv := b.smallSize(), b.smallSize(), 1+b.next()%8, b.smallSize(), b.smallSize(), b.smallSize(), b.smallSize()
	query, storage := fuzzTypes[flags>>3&1], fuzzTypes[flags>>4&3]
	good := []input3{{query, []int{batch, kv * group, nq, d}}, {storage, []int{batch, kv, nk, d}}, {storage, []int{batch, kv, nk, dv}}}
	if flat {
		for i := range good {
			good[i].shape = good[i].shape[1:]
		}
	}
	x := slices.Clone(good)
	b.mutate(x)
	if want := denseResult(x, isDefault, causal); isDefault && causal && want != nil {
		if rows, keys := want[len(want)-2]*want[len(want)-3], x[1].shape[len(want)-2]; rows > 1<<16 || keys > 1<<12 || rows*keys > 1<<20 {
			return // the mask would be too large a tensor
		}
	}
	var opts []la.Option
	if causal {
		opts = append(opts, la.WithCausal())
	}
	build, name := la.Attention, "Attention"
	if isDefault {
		build, name = la.Default, "Default"
	}
	n := checkFuzzed(t, name, x, denseResult(x, isDefault, causal), func(q, k, v *G.Node) (*G.Node, error) { return build(q, k, v, opts...) })
	if n == nil || isDefault {
		return
	}
	// Shape inference by itself, with other shapes for the same element types.
	b.mutate(x)
	shapes := make([]G.DimSizer, 0, 4)
	for i := range x {
		x[i].of = []tensor.Dtype{query, storage, storage}[i]
		shapes = append(shapes, tensor.Shape(x[i].shape))
	}
	switch b.next() % 8 {
	case 0:
		shapes = shapes[1:]
	case 1:
		shapes = append(shapes, tensor.Shape{batch})
	case 2:
		shapes[b.next()%3] = nil
	}
	out, err := n.Op().InferShape(shapes...)
	want := denseResult(x, false, causal)
	if len(shapes) != 3 || slices.Contains(shapes, nil) {
		want = nil
	}
	// The types of the first mutation stay those of the op.
	checkInferred(t, fmt.Sprint(x), out, err, want)
}

// checkFuzzed builds on operands x and checks the result against the wanted
// shape; nil for none.
func checkFuzzed(t *testing.T, name string, x []input3, want tensor.Shape, build func(q, k, v *G.Node) (*G.Node, error)) *G.Node {
	t.Helper()
	g := G.NewGraph()
	in, ok := fuzzNodes(g, x)
	if !ok {
		return nil
	}
	before := len(g.AllNodes())
	n, err := build(in[0], in[1], in[2])
	var out tensor.Shape
	if n != nil {
		out = n.Shape()
		if n.Dtype() != x[0].of {
			t.Errorf("%s of %v is of %v", name, x, n.Dtype())
		}
	}
	if err != nil && len(g.AllNodes()) != before {
		t.Errorf("%s of %v: nodes were added before the error %q", name, x, err)
	}
	checkInferred(t, fmt.Sprint(name, x), out, err, want)
	return n
}

func checkInferred(t *testing.T, what string, out tensor.Shape, err error, want tensor.Shape) {
	t.Helper()
	switch {
	case want != nil && err != nil:
		t.Errorf("%s: %v, want shape %v", what, err, want)
	case want != nil && !slices.Equal(out, want):
		t.Errorf("%s has shape %v, want %v", what, out, want)
	case want == nil && (err == nil || out != nil):
		t.Errorf("%s: accepted, with shape %v and error %v", what, out, err)
	case want == nil && !errors.Is(err, la.ErrShape) && !errors.Is(err, la.ErrDType) && !errors.Is(err, la.ErrUnsupported):
		t.Errorf("%s: %v", what, err)
	}
}

func fuzzCached(t *testing.T, b *fuzzed) {
	cfg := la.CacheConfig{Layers: 1 + b.next()%3, KVHeads: 1 + b.next()%4, HeadDim: 1 + b.next()%65, ValueDim: 1 + b.next()%33, PageSize: 1 + b.next()%3, Pages: 1}
	cache, err := la.NewCache(cfg)
	if err != nil {
		t.Fatal(err)
	}
	tokens, group, query := 1+b.next()%5, 1+b.next()%4, fuzzTypes[b.next()%2]
	step, err := cache.NewStep(tokens)
	if err != nil {
		t.Fatal(err)
	}
	x := []input3{
		{query, []int{tokens, group * cfg.KVHeads * cfg.HeadDim}},
		{query, []int{tokens, cfg.KVHeads * cfg.HeadDim}},
		{query, []int{tokens, cfg.KVHeads * cfg.ValueDim}},
	}
	b.mutate(x)
	result := func() tensor.Shape {
		q, k, v := x[0], x[1], x[2]
		if !isFloat(q.of) || k.of != q.of || v.of != q.of || len(q.shape) != 2 || len(k.shape) != 2 || len(v.shape) != 2 {
			return nil
		}
		if q.shape[0] != tokens || k.shape[0] != tokens || v.shape[0] != tokens || q.shape[1] < 1 || q.shape[1]%(cfg.KVHeads*cfg.HeadDim) != 0 {
			return nil
		}
		if k.shape[1] != cfg.KVHeads*cfg.HeadDim || v.shape[1] != cfg.KVHeads*cfg.ValueDim {
			return nil
		}
		return tensor.Shape{tokens, q.shape[1] / cfg.HeadDim * cfg.ValueDim}
	}
	n := checkFuzzed(t, "CachedAttention", x, result(), func(q, k, v *G.Node) (*G.Node, error) {
		return la.CachedAttention(q, k, v, step.Layer(cfg.Layers-1))
	})
	if n == nil {
		return
	}
	b.mutate(x)
	shapes := make([]G.DimSizer, 0, 3)
	for i := range x {
		x[i].of = query
		shapes = append(shapes, tensor.Shape(x[i].shape))
	}
	out, err := n.Op().InferShape(shapes...)
	checkInferred(t, fmt.Sprint("CachedAttention ", x), out, err, result())
}

// YaRN's factor of cosines and sines is Attention, or else a quotient where both of DeepSeek's scales are given, or else follows from
// the factor alone, as in transformers. One of the two scales alone changes nothing.
func TestYaRNAttention(t *testing.T) {
	const factor = 4
	m := func(scale float64) float64 { return 0.1*scale*math.Log(factor) + 1 }
	for _, c := range []struct{ attention, scale, allDim, want float64 }{
		{0, 0, 0, m(1)},
		{0, 0.7, 0, m(1)},
		{0, 0, 0.7, m(1)},
		{0, 0.7, 1.3, m(0.7) / m(1.3)},
		{0, 1.3, 0.7, m(1.3) / m(0.7)},
		{0, 1, 1, 1},
		{1.5, 0, 0, 1.5},
		{1.5, 0.7, 1.3, 1.5},
	} {
		s := rope.YaRN{Factor: factor, Context: 2048, Attention: c.attention, MScale: c.scale, MScaleAllDim: c.allDim}
		_, got, err := rope.Config{HeadDim: 64, Scaling: s}.Frequencies()
		if err != nil || !(math.Abs(got-c.want) <= 1e-15*c.want) {
			t.Errorf("%+v: m is %v, want %v: %v", s, got, c.want, err)
		}
	}
}
