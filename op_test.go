package leanattention_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/reftest"

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
		Queries: repeated(len(keys), nq), Keys: keys,
	}
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
		s := causal(dense(x[2]*x[3], x[2], 64, 64, x[1], repeated(x[0], 110)...))
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

var schedules = []la.Schedule{la.StreamK, la.FixedSplit(3), la.PerHead}

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
		large, most := 2_000_000, 20_000_000
		if raceEnabled {
			large, most = 100_000, 1_000_000
		}
		if w := work(c.shape); w > most {
			continue
		} else if w > large {
			inputs = []reftest.Inputs{reftest.Peaked}
		}
		for _, in := range inputs {
			turn++
			x := spec{inputs: in, query: elementTypes[turn%8][0], kv: elementTypes[turn%8][1], capacity: c.capacity}
			if len(c.shape.Keys) == 1 && turn%3 != 0 {
				x.rank = 3
			}
			opts := append([]la.Option{la.WithSchedule(schedules[turn%3]), la.WithWorkers(turn % 5)}, c.opts...)
			name := fmt.Sprintf("%s %v %v %v %v workers %d", c.name, in, x.query, x.kv, schedules[turn%3], turn%5)
			t.Run(name, func(t *testing.T) {
				p := newProblem(rng, c.shape, x)
				g := p.attention(t, opts...)
				g.run(t)
				p.check(t, p.Reference(p.precision(0)), g.outV, g.lseV)
			})
		}
	}
}

// TestAttentionRandomShapes meets what no list has.
func TestAttentionRandomShapes(t *testing.T) {
	rng := reftest.Rand(t)
	n := 150
	if raceEnabled {
		n = 30
	}
	for range n {
		attendSomehow(t, rng, reftest.RandomShape(rng), false)
	}
}

// attendSomehow runs a shape as a node, with as many queries in each sequence as the
// first has, at least one, with random numbers, types and schedules and, if told, a
// random bias.
func attendSomehow(t *testing.T, rng *rand.Rand, s reftest.Shape, biased bool) (p *problem, g *graph, workers int, opts []la.Option) {
	t.Helper()
	s.Queries = repeated(len(s.Keys), max(s.Queries[0], 1))
	types := elementTypes[rng.IntN(8)]
	x := spec{
		inputs: reftest.AllInputs[rng.IntN(4)], query: types[0], kv: types[1],
		capacity: max(slices.Max(s.Keys)+rng.IntN(3), 1),
	}
	tile, workers, schedule := rng.IntN(100), rng.IntN(9), schedules[rng.IntN(3)]
	if biased {
		s = reftest.RandomBias(rng, s, x.capacity)
	}
	p = newProblem(rng, s, x)
	opts = []la.Option{la.WithTileTokens(tile), la.WithWorkers(workers), la.WithSchedule(schedule)}
	g = p.attention(t, opts...)
	g.run(t)
	if err := p.compare(t, p.Reference(p.precision(slices.Max(s.Keys)+1)), g.outV, g.lseV); err != nil {
		t.Fatalf("%v %v %+v, tiles of %d, %d workers, %v: %v", s, x.inputs, types, tile, workers, schedule, err)
	}
	return p, g, workers, opts
}

// TestAttentionBends: windows, soft caps, slopes and biases, in all their mixtures, as a
// node and without a graph.
func TestAttentionBends(t *testing.T) {
	rng := reftest.Rand(t)
	n := 150
	if raceEnabled {
		n = 30
	}
	for range n {
		p, g, workers, opts := attendSomehow(t, rng, reftest.RandomScoreMods(rng, reftest.RandomShape(rng)), rng.IntN(2) == 0)
		a := p.args()
		if err := la.Attend(a, append(p.options(), opts...)...); err != nil {
			t.Fatal(err)
		}
		if workers > 0 && !(slices.Equal(bits(t, a.Out), bits(t, g.outV)) && slices.Equal(bits(t, a.LSE), bits(t, g.lseV))) {
			t.Errorf("%v: Attend has other bits", p.Shape)
		}
	}
}

// TestWithALiBiCopies: an option is what it was when it was made.
func TestWithALiBiCopies(t *testing.T) {
	rng := reftest.Rand(t)
	s := dense(2, 1, 4, 4, 2, 30)
	s.Slopes = []float64{0.5, 0.25}
	p := newProblem(rng, s, spec{})
	given := slices.Clone(s.Slopes)
	opt := la.WithALiBi(given)
	clear(given)
	a := p.args()
	if err := la.Attend(a, la.WithScale(p.Scale), opt); err != nil {
		t.Fatal(err)
	}
	p.check(t, p.Reference(p.precision(0)), a.Out, a.LSE)
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
			Q: tensorOf(query, []float64{1, 1}, 1, 2, 1), K: tensorOf(query, []float64{1, -1, 1, 2}, 1, 4, 1),
			V: tensorOf(query, []float64{1, 2, 3, 6}, 1, 4, 1), Out: tensorOf(query, make([]float64, 2), 1, 2, 1),
			LSE: tensorOf(query, make([]float64, 2), 1, 2), Bias: tensorOf(query, bias, 1, 2, 4),
		}
		if err := la.Attend(a, la.WithScale(0.5)); err != nil {
			t.Fatal(err)
		}
		if got := floats(t, a.Out); got[0] != 2 || got[1] != 3 {
			t.Errorf("%v: %v, want [2 3]", query, got)
		}
		if got := floats(t, a.LSE); math.Abs(got[0]-(0.5+math.Ln2)) > 1e-6 || !(got[1] < 0.69*lowest) {
			t.Errorf("%v: log-sum-exp %v", query, got)
		}
	}
}

// TestAttentionBiasViews: a bias that does not lie row by row in memory.
func TestAttentionBiasViews(t *testing.T) {
	rng := reftest.Rand(t)
	p := newProblem(rng, biased(rng, dense(4, 2, 8, 8, 5, 9), 1, 4, 5), spec{rank: 3})
	a := p.args()
	turned := tensorOf(p.query, make([]float64, 4*5*9), 4, 9, 5)
	for i, x := range p.Bias.X {
		turned.Data().([]float32)[i/45*45+i%9*5+i/9%5] = float32(x)
	}
	if err := turned.T(0, 2, 1); err != nil {
		t.Fatal(err)
	}
	a.Bias = turned
	if err := la.Attend(a, p.options()...); err != nil {
		t.Fatal(err)
	}
	p.check(t, p.Reference(p.precision(0)), a.Out, a.LSE)
}

// TestAttentionBiasNaN: a bias that is not a number, or +Inf, shows in the rows that
// it is for and in no others.
func TestAttentionBiasNaN(t *testing.T) {
	rng := reftest.Rand(t)
	for _, bad := range []float64{math.NaN(), math.Inf(1)} {
		s := biased(rng, dense(4, 2, 8, 8, 70, 90), 1, 4, 1)
		s.Bias.X[2*90+17] = bad
		p := newProblem(rng, s, spec{})
		a := p.args()
		if err := la.Attend(a, p.options()...); err != nil {
			t.Fatal(err)
		}
		for i, x := range floats(t, a.Out) {
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
			p := newProblem(rng, dense(4, 2, 16, 8, 2, 300, 7), spec{query: query})
			p.Scale = scale // 0 too: New takes it for the usual one
			g := p.attention(t)
			g.run(t)
			if err := p.compare(t, p.Reference(p.precision(0)), g.outV, g.lseV); err != nil {
				t.Errorf("scale %v, %v: %v", scale, query, err)
			}
		}
	}
	// Without the option it is 1/sqrt(d).
	p := newProblem(rng, dense(2, 2, 59, 59, 1, 100), spec{})
	g := p.graph()
	var err error
	if g.out, err = la.Attention(g.q, g.k, g.v); err != nil {
		t.Fatal(err)
	}
	g.read(t)
	g.run(t)
	p.check(t, p.Reference(p.precision(0)), g.outV, nil)
}

// TestAttentionExtremeLogits: scores of thousands, where one key takes all,
// and where the largest comes first, last, or in every tile anew.
func TestAttentionExtremeLogits(t *testing.T) {
	rng := reftest.Rand(t)
	for _, query := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		for _, slope := range []float64{-5000, -1, 1, 5000} {
			p := newProblem(rng, dense(2, 1, 4, 4, 1, 700), spec{query: query})
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
			p.q, p.k = tensorOf(query, p.DenseQ(1), p.dims(2, 1, 4)...), tensorOf(query, p.DenseK(700), p.dims(1, 700, 4)...)
			g := p.attention(t)
			g.run(t)
			if err := p.compare(t, p.Reference(p.precision(0)), g.outV, g.lseV); err != nil {
				t.Errorf("slope %v, %v: %v", slope, query, err)
			}
		}
	}
}
