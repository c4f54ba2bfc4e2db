package attention

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
)

// placeForks lays out c as a tree of forks: sequences have common pages. It returns the number of shared pages.
func placeForks[F cpu.Real](rng *rand.Rand, c *reftest.Case, l layout) (p *problem[F], shared int) {
	forks := c.RandomForks(rng, l.page, !c.Causal)
	p = place[F](rng, c, l)
	nan := []float64{math.NaN()}
	for i, f := range forks {
		for k, page := range p.seqs[i].Pages[:f.Pages] {
			for x := range p.g.Pages.Planes {
				b, n := &p.ops.Pages[x].Data, p.g.Pages.Planes[x].At.Page
				for at := range n {
					cputest.Store(b.Ptr, b.DType, int(page)*n+at, nan)
				}
			}
			p.seqs[i].Pages[k] = p.seqs[f.Of].Pages[k]
		}
		p.storeKeys(i, f.Pages*l.page) // a window of the other sequence may hide them
		shared += f.Pages
	}
	return p, shared
}

func forkShape(rng *rand.Rand) reftest.Shape {
	s := reftest.Shape{KVHeads: 1 + rng.IntN(3), Dim: 1 + rng.IntN(40), Mask: attn.Mask{Causal: rng.IntN(4) > 0}}
	s.Heads = s.KVHeads * []int{1, 1, 2, 3, 8}[rng.IntN(5)]
	s.ValueDim = []int{s.Dim, 1 + rng.IntN(40)}[rng.IntN(2)]
	for range 1 + rng.IntN(7) {
		q := []int{0, 1, 1, 1, 1, 3, 40}[rng.IntN(7)]
		s.Queries, s.Keys = append(s.Queries, q), append(s.Keys, q+rng.IntN(300))
	}
	if rng.IntN(3) == 0 {
		s.SoftCap = 1 + rng.Float64()
	}
	if rng.IntN(3) == 0 {
		s = reftest.RandomSinks(rng, s)
	}
	switch rng.IntN(4) {
	case 0:
		s = reftest.RandomTrees(rng, s)
	case 1:
		s = reftest.RandomPrefixMods(rng, s)
	}
	return s
}

// Sequences with common keys attend to them once, with the results of separate attention. Pages in no table are NaN.
func TestRunPrefixes(t *testing.T) {
	rng := reftest.Rand(t)
	shares, cuts := 0, 0
	for range reftest.AtLeast(cputest.Cases(t, 26, 120), func() bool { return shares > 15 && cuts > 3 }) {
		s, l := forkShape(rng), randomLayout(rng)
		l.page = []int{1, 2, 7, 16, 33}[rng.IntN(5)]
		if l.dtype != attn.Float16 { // scales may round small numbers of float16
			l.kind = formatKind(rng.IntN(int(formatKinds)))
		}
		if rng.IntN(3) == 0 && s.Trees == nil && s.Slopes == nil {
			s.Window = 1 + rng.IntN(slices.Max(s.Keys)+1)
		}
		in := reftest.AllInputs[rng.IntN(len(reftest.AllInputs))]
		test := testPrefixes[float32]
		if rng.IntN(3) == 0 {
			test = testPrefixes[float64]
		}
		shared, cut, err := test(rng, s, in, l)
		if err != nil {
			t.Fatalf("%v, %v, %v: %v", s, in, l, err)
		}
		if shared {
			shares++
		}
		if cut {
			cuts++
		}
	}
}

func testPrefixes[F cpu.Real](rng *rand.Rand, s reftest.Shape, in reftest.Inputs, l layout) (shared, cut bool, err error) {
	p, pages := placeForks[F](rng, reftest.New(rng, s, in, cputest.AccOf[F](), cputest.FormatOf[F](l.dtype)), l)
	g := p.g
	g.Policy, g.Workers, g.TileTokens = randomPolicy(rng), 1+rng.IntN(8), []int{0, 1, 5, 16, 64}[rng.IntN(5)]
	g.Tree = attn.HasTrees(p.seqs)
	plan := Plan{PrefixBytes: 1}
	if err := plan.Build(g, p.seqs); err != nil {
		return false, false, err
	}
	if plan.shares && pages == 0 {
		return false, false, fmt.Errorf("keys are shared, and no sequences have common keys")
	}
	if CanMeasure("run", &g) == nil {
		p.ops.Entropy = cputest.Filled[F](len(p.ops.LSE))
	}
	if rng.IntN(3) == 0 {
		p.ops.LSE = nil
	}
	if err := Run(cpu.Default(), &plan, &p.ops); err != nil {
		return false, false, err
	}
	if err := p.check(p.c.Reference(reftest.Precision{Acc: cputest.AccOf[F]()})); err != nil {
		return false, false, err
	}
	if len(p.ops.Entropy) > 0 {
		if err := p.checkEntropy(); err != nil {
			return false, false, err
		}
	}
	want := p.bits()
	p.forget()
	if err := Run(cpu.Default(), &plan, &p.ops); err != nil || !slices.Equal(p.bits(), want) {
		return false, false, fmt.Errorf("the second run has other bits: %v", err)
	}
	cut = plan.shares && slices.ContainsFunc(plan.prefix.own, func(q attn.Sequence) bool { return q.Cut > 0 })
	return plan.shares, cut, nil
}

// Prefixes are not shared if features depend on the key or the sequence, if a window hides their keys, or if they are
// short.
func TestPrefixesNotTaken(t *testing.T) {
	rng := reftest.Rand(t)
	s := reftest.Shape{Heads: 2, KVHeads: 1, Dim: 8, ValueDim: 8, Queries: []int{1, 1}, Keys: []int{100, 90}, Mask: attn.Mask{Causal: true}}
	c := reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32)
	p := place[float32](rng, c, layout{dtype: attn.Float32, page: 16})
	copy(p.seqs[1].Pages[:4], p.seqs[0].Pages)
	for name, x := range map[string]struct {
		change func(g *attn.Problem)
		bytes  int
		shares bool
	}{
		"plain":           {func(*attn.Problem) {}, 1, true},
		"a soft cap":      {func(g *attn.Problem) { g.Cap = 2 }, 1, true},
		"a window":        {func(g *attn.Problem) { g.Window = 100 }, 1, true},
		"a narrow window": {func(g *attn.Problem) { g.Window = 99 }, 1, true}, // it hides a key of one sequence
		"a short window":  {func(g *attn.Problem) { g.Window = 30 }, 1, false},
		"both":            {func(g *attn.Problem) { g.Window, g.Slopes = 99, attn.NewSlopes([]float64{1, 2}) }, 1, false},
		"most of it":      {func(g *attn.Problem) { g.Window = 99 }, 48 * 64, true},
		"more than that":  {func(g *attn.Problem) { g.Window = 99 }, 48*64 + 64, false},
		"sink tokens":     {func(g *attn.Problem) { g.Window, g.SinkTokens = 99, 1 }, 1, true},
		"slopes":          {func(g *attn.Problem) { g.Slopes = attn.NewSlopes([]float64{1, 2}) }, 1, true},
		"a bias":          {func(g *attn.Problem) { g.Bias = attn.Bias{Sequences: 1, Heads: 1, Queries: 1, Keys: 100} }, 1, false},
		"dropout":         {func(g *attn.Problem) { g.Dropout = 0.5 }, 1, false},
		"enough":          {func(*attn.Problem) {}, 64 * 64, true}, // 64 keys and values of 8 float32
		"too little":      {func(*attn.Problem) {}, 64*64 + 64, false},
		"much less":       {func(*attn.Problem) {}, 0, false},
	} {
		g, plan := p.g, Plan{PrefixBytes: x.bytes}
		x.change(&g)
		if err := plan.Build(g, p.seqs); err != nil {
			t.Fatal(err)
		}
		if plan.shares != x.shares {
			t.Errorf("%s: keys are shared: %v", name, plan.shares)
		}
	}
	bad := []attn.Sequence{p.seqs[0], p.seqs[1]} // an invalid common page leaves the plan unchanged
	for i := range bad {
		bad[i].Pages = slices.Clone(bad[i].Pages)
		bad[i].Pages[1] = -7
	}
	kept := Plan{PrefixBytes: 1}
	if err := kept.Build(p.g, p.seqs); err != nil {
		t.Fatal(err)
	}
	if err := kept.Build(p.g, bad); !errors.Is(err, attn.ErrPage) || !strings.Contains(err.Error(), "sequence 0 names page -7 at 1") || !kept.shares {
		t.Errorf("a negative page: %v", err)
	}
	if err := Run(cpu.Default(), &kept, &p.ops); err != nil {
		t.Error(err)
	}
	alone := Plan{PrefixBytes: 1}
	for range 2 { // a plan with shared keys is built again
		if err := alone.Build(p.g, p.seqs); err != nil || !alone.shares {
			t.Fatalf("%v, %v", alone.shares, err)
		}
		if err := alone.Build(p.g, p.seqs[:1]); err != nil || alone.shares {
			t.Fatalf("one sequence by itself: %v, %v", alone.shares, err)
		}
	}
}

// forkProblem returns n sequences of one token after a common prefix and own keys.
func forkProblem(rng *rand.Rand, n, prefix, own, heads, kvHeads, dim int, dtype attn.DType) *problem[float32] {
	s := reftest.Shape{Heads: heads, KVHeads: kvHeads, Dim: dim, ValueDim: dim, Mask: attn.Mask{Causal: true}}
	for range n {
		s.Queries, s.Keys = append(s.Queries, 1), append(s.Keys, prefix+own)
	}
	c := &reftest.Case{Shape: s, Q: make([]float64, n*heads*dim), K: make([]float64, n*(prefix+own)*kvHeads*dim), V: make([]float64, n*(prefix+own)*kvHeads*dim)}
	for _, x := range [][]float64{c.Q, c.K, c.V} {
		for i := range x {
			x[i] = float64(i%17) / 17
		}
	}
	p := place[float32](rng, c, layout{dtype: dtype, page: 16})
	p.g.Scale = 0.1
	for i := range p.seqs[1:] {
		copy(p.seqs[1+i].Pages[:prefix/16], p.seqs[0].Pages)
	}
	return p
}

func TestPrefixAllocations(t *testing.T) {
	p := forkProblem(reftest.Rand(t), 3, 64, 20, 4, 2, 16, attn.Float16)
	plan := Plan{PrefixBytes: 1}
	p.g.Policy = lean.Policy{}
	run := func() {
		if err := plan.Build(p.g, p.seqs); err != nil {
			t.Fatal(err)
		}
		if err := Run(cpu.Default(), &plan, &p.ops); err != nil {
			t.Fatal(err)
		}
	}
	if run(); !plan.shares {
		t.Fatal("nothing is shared")
	}
	if n := testing.AllocsPerRun(20, run); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

// BenchmarkPrefixes measures forks whose prefix is read once, and each fork alone.
func BenchmarkPrefixes(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, c := range []struct{ n, prefix, own, heads, kvHeads, dim int }{
		{16, 8192, 128, 8, 1, 128}, {16, 8192, 128, 8, 8, 64}, {2, 8192, 128, 8, 8, 64}, {2, 64, 64, 12, 12, 64}, {2, 128, 64, 12, 12, 64},
		{4, 64, 64, 12, 12, 64}, {4, 256, 64, 12, 12, 64}, {2, 1024, 64, 12, 12, 64}, {8, 32, 64, 12, 12, 64},
	} {
		for _, dtype := range []attn.DType{attn.Float32, attn.Float16} {
			p := forkProblem(rng, c.n, c.prefix, c.own, c.heads, c.kvHeads, c.dim, dtype)
			for name, bytes := range map[string]int{"once": 1, "each": math.MaxInt} {
				plan := Plan{PrefixBytes: bytes}
				b.Run(fmt.Sprintf("%dx%d+%d/%dx%d/%d/%v/%s", c.n, c.prefix, c.own, c.heads, c.kvHeads, c.dim, dtype, name), func(b *testing.B) {
					for b.Loop() {
						if err := plan.Build(p.g, p.seqs); err != nil {
							b.Fatal(err)
						}
						if err := Run(cpu.Default(), &plan, &p.ops); err != nil {
							b.Fatal(err)
						}
					}
				})
			}
		}
	}
}

// BenchmarkPrefixPlan plans a step of 256 sequences with a new token each: forks of one sequence, a tree of two levels,
// and sequences with nothing in common.
func BenchmarkPrefixPlan(b *testing.B) {
	g := attn.Problem{Heads: 32, KVHeads: 8, Dim: 128, ValueDim: 128, Pages: attn.Separate(attn.Float16, 128, 128, attn.PageStrides{}, attn.PageStrides{}), PageTokens: 16, Scale: 0.1, Mask: attn.Mask{Causal: true}}
	g.Query, g.Out, g.LSE = attn.PackedRows(32, 128), attn.PackedRows(32, 128), attn.PackedRows(32, 1)
	g.Pages.Planes[0].At = attn.PageStrides{Page: 8 * 16 * 128, Head: 16 * 128, Row: 128}
	g.Pages.Planes[1].At = g.Pages.Planes[0].At
	for _, c := range []struct {
		name            string
		all, group, own int
	}{{"256x(2048+128)", 128, 0, 8}, {"4096,16x1024,16x320", 256, 64, 20}, {"apart", 0, 0, 64}} {
		b.Run(c.name, func(b *testing.B) {
			fresh := int32(0)
			pages := func(n int) (p []int32) {
				for range n {
					p, fresh = append(p, fresh), fresh+1
				}
				return p
			}
			all, group := pages(c.all), []int32(nil)
			var seqs []attn.Sequence
			for i := range 256 {
				if i%16 == 0 {
					group = pages(c.group)
				}
				q := attn.Sequence{Row: i, Queries: 1, Pages: slices.Concat(all, group, pages(c.own+4))}
				q.Keys = 16*(len(q.Pages)-4) - i*37%(8*c.own)
				seqs = append(seqs, q)
			}
			var plan Plan
			least, begin, steps := time.Duration(math.MaxInt64), time.Now(), 0
			b.ReportAllocs()
			for b.Loop() {
				for i := range seqs {
					if seqs[i].Keys++; steps%64 == 63 {
						seqs[i].Keys -= 64
					}
				}
				if err := plan.Build(g, seqs); err != nil {
					b.Fatal(err)
				}
				if steps++; steps%16 == 0 {
					now := time.Now()
					least, begin = min(least, now.Sub(begin)), now
				}
			}
			b.ReportMetric(float64(least.Nanoseconds())/16e3, "min-us/op")
			if plan.shares != (c.all > 0) {
				b.Errorf("shares prefixes: %v", plan.shares)
			}
		})
	}
}
