package attention

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
)

// rowBits returns the bits of a row's outputs and log-sum-exps in all heads.
func (p *problem[F]) rowBits(seq, pos int) (bits []uint64) {
	row := p.seqs[seq].Row + pos
	for h := range p.g.Heads {
		at := row*p.g.Out.Row + h*p.g.Out.Head
		for _, x := range p.ops.Out[at : at+p.g.ValueDim] {
			bits = append(bits, math.Float64bits(float64(x)))
		}
		bits = append(bits, math.Float64bits(float64(p.ops.LSE[row*p.g.LSE.Row+h*p.g.LSE.Head])))
	}
	return bits
}

// chunk is query positions [from, to) of a sequence.
type chunk struct{ seq, from, to int }

// runChunks runs a step with these chunks only. Keys after a chunk's last position are missing.
func (p *problem[F]) runChunks(g attn.Problem, chunks []chunk) error {
	var seqs []attn.Sequence
	for _, x := range chunks {
		q := p.seqs[x.seq]
		q.Row += x.from
		q.Keys -= q.Queries - x.to
		q.Queries = x.to - x.from
		seqs = append(seqs, q)
	}
	var plan Plan
	if err := plan.Build(g, seqs); err != nil {
		return err
	}
	p.forget()
	return Run(cpu.Default(), &plan, &p.ops)
}

func invariantShape(rng *rand.Rand) reftest.Shape {
	s := reftest.Shape{KVHeads: 1 + rng.IntN(2), Dim: 8 * (1 + rng.IntN(9)), Mask: attn.Mask{Causal: true}}
	if rng.IntN(4) == 0 {
		s.Dim += rng.IntN(8)
	}
	s.Heads = s.KVHeads * []int{1, 1, 2, 3, 4, 8}[rng.IntN(6)]
	s.ValueDim = []int{s.Dim, 8 * (1 + rng.IntN(9))}[rng.IntN(2)]
	for range 1 + rng.IntN(4) {
		q := []int{1, 2, 4, 9, 40, 100}[rng.IntN(6)]
		keys := q + []int{rng.IntN(40), rng.IntN(400), rng.IntN(2000)}[rng.IntN(3)]
		if rng.IntN(8) == 0 { // the first queries have no visible key
			keys = max(q-rng.IntN(5), 1)
		}
		s.Queries, s.Keys = append(s.Queries, q), append(s.Keys, keys)
	}
	if rng.IntN(3) == 0 {
		s.Window = 1 + rng.IntN(900)
		if rng.IntN(2) == 0 {
			s.SinkTokens = 1 + rng.IntN(300)
		}
	}
	if rng.IntN(4) == 0 {
		s.SoftCap = 1 + rng.Float64()
	}
	if rng.IntN(4) == 0 {
		for range s.Heads {
			s.Slopes = append(s.Slopes, rng.Float64()/50)
		}
	}
	if rng.IntN(4) == 0 {
		s = reftest.RandomSinks(rng, s)
	}
	if rng.IntN(4) == 0 {
		s.Bias = keyBias(rng, s)
	}
	return s
}

// keyBias draws a bias of heads and keys, which is the same for a key in any step.
func keyBias(rng *rand.Rand, s reftest.Shape) reftest.Bias {
	b := reftest.Bias{Sequences: 1, Heads: s.Heads, Queries: 1, Keys: slices.Max(s.Keys) + 1}
	for range b.Heads * b.Keys {
		x := float64(float32(rng.NormFloat64()))
		if rng.IntN(20) == 0 {
			x = math.Inf(-1)
		}
		b.X = append(b.X, x)
	}
	return b
}

// The bits of a row are the same in any step and batch, in chunks of any size, with any schedule, workers and pages.
func TestInvariant(t *testing.T) {
	rng := reftest.Rand(t)
	differ := 0 // rows that differ without batch invariance
	for range reftest.AtLeast(cputest.Cases(t, 8, 30), func() bool { return differ > 3 }) {
		s, l := invariantShape(rng), randomLayout(rng)
		in := reftest.AllInputs[rng.IntN(len(reftest.AllInputs))]
		test := testInvariant[float32]
		if rng.IntN(3) == 0 {
			test = testInvariant[float64]
		}
		same, err := test(rng, s, in, l)
		if err != nil {
			t.Fatalf("%v, %v, %v: %v", s, in, l, err)
		}
		if !same {
			differ++
		}
	}
}

// randomChunks cuts some of the sequences into chunks and distributes the chunks over steps.
func randomChunks(rng *rand.Rand, s reftest.Shape) (steps [][]chunk) {
	size := []int{1, 2, 3, 4, 7, 13, 64}[rng.IntN(7)]
	steps = make([][]chunk, 1+rng.IntN(4))
	for _, i := range rng.Perm(len(s.Queries)) {
		before := s.Keys[i] - s.Queries[i]
		for from := max(-before, 0); from < s.Queries[i]; from += size {
			if to := min(from+size, s.Queries[i]); rng.IntN(5) > 0 || size > 4 {
				n := rng.IntN(len(steps))
				steps[n] = append(steps[n], chunk{i, from, to})
			}
		}
	}
	return steps
}

func testInvariant[F cpu.Real](rng *rand.Rand, s reftest.Shape, in reftest.Inputs, l layout) (same bool, err error) {
	c := reftest.New(rng, s, in, cputest.AccOf[F](), cputest.FormatOf[F](l.dtype))
	tile := []int{0, 16, 100, 2048, 4096}[rng.IntN(5)]
	problems := []*problem[F]{place[F](rng, c, l)}
	other := randomLayout(rng)
	other.dtype, other.kind = l.dtype, l.kind
	problems = append(problems, place[F](rng, c, other))
	if l.dtype == attn.Q4 {
		mixQueries(c)
	}
	step := func(p *problem[F], invariant bool) attn.Problem {
		g := p.g
		g.Invariant, g.Policy, g.Workers, g.TileTokens = invariant, randomPolicy(rng), 1+rng.IntN(8), tile
		return g
	}
	var all []chunk
	for i, n := range s.Queries {
		all = append(all, chunk{i, 0, n})
	}
	for _, invariant := range []bool{true, false} {
		bits := map[[2]int][]uint64{}
		p := problems[0]
		if err := p.runChunks(step(p, invariant), all); err != nil {
			return false, err
		}
		if err := p.check(c.Reference(reftest.Precision{Acc: cputest.AccOf[F]()})); err != nil {
			return false, fmt.Errorf("invariant %v: %w", invariant, err)
		}
		for i, n := range s.Queries {
			for pos := range n {
				bits[[2]int{i, pos}] = p.rowBits(i, pos)
			}
		}
		for range 2 {
			for n, chunks := range append(randomChunks(rng, s), all) {
				p := problems[n%2]
				g := step(p, invariant)
				if err := p.runChunks(g, chunks); err != nil {
					return false, err
				}
				for _, x := range chunks {
					for pos := x.from; pos < x.to; pos++ {
						if slices.Equal(p.rowBits(x.seq, pos), bits[[2]int{x.seq, pos}]) {
							continue
						}
						if invariant {
							return false, fmt.Errorf("query %d of sequence %d has other bits in %v, by %v of %d workers, LeanTiles of %d, pages of %d", pos, x.seq, chunks, g.Policy, g.Workers, tile, g.PageTokens)
						}
						return false, nil
					}
				}
			}
		}
	}
	return true, nil
}

// Tokens of a tree have the bits of a sequence of their visible tokens.
func TestInvariantTrees(t *testing.T) {
	rng := reftest.Rand(t)
	for range 20 {
		s := reftest.Shape{KVHeads: 2, Heads: []int{2, 4, 6}[rng.IntN(3)], Dim: 16, ValueDim: 24, Mask: attn.Mask{Causal: true, Tree: true}}
		n := 2 + rng.IntN(30)
		s.Queries, s.Keys, s.Trees = []int{n}, []int{n + 400 + rng.IntN(200)}, []attn.Tree{reftest.RandomTree(rng, n)}
		if rng.IntN(2) == 0 {
			s.Bias = keyBias(rng, s)
		}
		l := randomLayout(rng)
		c := reftest.New(rng, s, reftest.Normal, reftest.Float32, cputest.FormatOf[float32](l.dtype))
		p := place[float32](rng, c, l)
		g := p.g
		g.Invariant, g.Workers, g.TileTokens = true, 1+rng.IntN(4), []int{0, 64}[rng.IntN(2)]
		if err := p.runChunks(g, []chunk{{0, 0, n}}); err != nil {
			t.Fatal(err)
		}
		if err := p.check(c.Reference(reftest.Precision{Acc: reftest.Float32})); err != nil {
			t.Fatal(err)
		}
		for i := range n {
			path := *c
			path.Tree, path.Trees, path.Queries, path.Q = false, nil, []int{1}, c.Q[i*c.Heads*c.Dim:][:c.Heads*c.Dim]
			var rows []int
			for key := range c.Keys[0] {
				if c.Sees(0, i, key) {
					rows = append(rows, key)
				}
			}
			path.Keys, path.K, path.V = []int{len(rows)}, nil, nil
			for _, key := range rows {
				for h := range c.KVHeads {
					path.K, path.V = append(path.K, c.Key(0, key, h)...), append(path.V, c.Value(0, key, h)...)
				}
			}
			if c.Bias.X != nil {
				path.Bias.Keys, path.Bias.X = len(rows), nil
				for h := range c.Heads {
					for _, key := range rows {
						path.Bias.X = append(path.Bias.X, c.Bias.X[h*c.Bias.Keys+key])
					}
				}
			}
			l := randomLayout(rng)
			l.dtype = p.g.Pages.Planes[0].DType
			alone := place[float32](rng, &path, l)
			h := alone.g
			h.Invariant, h.TileTokens = true, g.TileTokens
			if err := alone.runChunks(h, []chunk{{0, 0, 1}}); err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(alone.rowBits(0, 0), p.rowBits(0, i)) {
				t.Fatalf("%v: token %d of a tree has other bits than its path", s, i)
			}
		}
	}
}

// Features that cannot be invariant, and LeanTiles that are too large, are refused.
func TestInvariantRefusals(t *testing.T) {
	g := attn.Problem{Heads: 1, KVHeads: 1, Dim: 8, ValueDim: 8, Pages: attn.Separate(attn.Float32, 8, 8, attn.PageStrides{}, attn.PageStrides{}), PageTokens: 16, Scale: 1, Invariant: true}
	for _, change := range []func(g *attn.Problem){
		func(g *attn.Problem) { g.Dropout = 0.5 },
		func(g *attn.Problem) { g.Unfused = true },
		func(g *attn.Problem) { g.TileTokens = attn.MaxInvariantTile + 1 },
	} {
		g := g
		change(&g)
		var p Plan
		if err := p.Build(g, nil); !errors.Is(err, attn.ErrUnsupported) {
			t.Errorf("%+v: %v", g, err)
		}
	}
}

// With batch invariance forks do not share prefixes.
func TestInvariantForks(t *testing.T) {
	rng := reftest.Rand(t)
	s := reftest.Shape{Heads: 4, KVHeads: 2, Dim: 16, ValueDim: 16, Queries: []int{1, 2, 1, 3, 1}, Keys: []int{700, 650, 600, 690, 710}, Mask: attn.Mask{Causal: true}}
	shared := 0
	for range reftest.AtLeast(3, func() bool { return shared > 0 }) {
		p, pages := placeForks[float32](rng, reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32), layout{dtype: attn.Float32, page: 16})
		shared += pages
		g := p.g
		g.Invariant = true
		var want [][]uint64
		for i, n := range s.Queries {
			if err := p.runChunks(g, []chunk{{i, 0, n}}); err != nil {
				t.Fatal(err)
			}
			for pos := range n {
				want = append(want, p.rowBits(i, pos))
			}
		}
		plan := Plan{PrefixBytes: 1}
		if err := plan.Build(g, p.seqs); err != nil {
			t.Fatal(err)
		}
		p.forget()
		if err := Run(cpu.Default(), &plan, &p.ops); err != nil {
			t.Fatal(err)
		}
		for i, n := range s.Queries {
			for pos := range n {
				if !slices.Equal(p.rowBits(i, pos), want[0]) {
					t.Errorf("query %d of fork %d has other bits than alone", pos, i)
				}
				want = want[1:]
			}
		}
	}
}

func TestInvariantAllocations(t *testing.T) {
	rng := reftest.Rand(t)
	s := reftest.Shape{Heads: 4, KVHeads: 1, Dim: 16, ValueDim: 16, Queries: []int{3, 1}, Keys: []int{3000, 700}, Mask: attn.Mask{Causal: true}}
	p := place[float32](rng, reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32), layout{dtype: attn.Float32, page: 16})
	g := p.g
	g.Invariant, g.Workers, g.Policy = true, 3, lean.Policy{}
	var plan Plan
	run := func() {
		if err := plan.Build(g, p.seqs); err != nil {
			t.Fatal(err)
		}
		if err := Run(cpu.Default(), &plan, &p.ops); err != nil {
			t.Fatal(err)
		}
	}
	run()
	if n := testing.AllocsPerRun(20, run); n > 0 && !reftest.RaceEnabled {
		t.Errorf("%v allocations", n)
	}
}
