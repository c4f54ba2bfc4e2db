package attention

import (
	"errors"
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

// treeShape draws a shape in which some sequences have trees.
func treeShape(rng *rand.Rand) reftest.Shape {
	s := reftest.RandomShape(rng)
	for i := range s.Queries {
		if rng.IntN(2) == 0 {
			s.Queries[i] = 1 + rng.IntN(attn.MaxTree)
		}
	}
	if rng.IntN(4) == 0 {
		s.SoftCap = 2
	}
	s = reftest.RandomTrees(rng, s)
	if rng.IntN(3) == 0 {
		s = reftest.RandomBias(rng, s, slices.Max(s.Keys)+1)
	}
	return s
}

func TestRunTrees(t *testing.T) {
	rng := reftest.Rand(t)
	n := cputest.Cases(t, 26, 100)
	if reftest.RaceEnabled {
		n = 20
	}
	for range n {
		verifySomehow(t, rng, treeShape(rng), 0, 1, 5, 16, 64, 100, math.MaxInt)
	}
}

// Rows of a tree get keys one after another, just before the sums of all rows continue in another state.
func TestRunTreesNearStateKeys(t *testing.T) {
	rng := reftest.Rand(t)
	for _, fresh := range []int{stateKeys - 40, stateKeys - 1, stateKeys} {
		const n = 20
		s := reftest.Shape{Heads: 4, KVHeads: 2, Dim: 16, ValueDim: 16, Queries: []int{n}, Keys: []int{fresh + n}, Mask: attn.Mask{Causal: true, Tree: true}}
		s.Trees = []attn.Tree{reftest.RandomTree(rng, n)}
		if err := verify[float32](rng, s, reftest.Normal, layout{dtype: attn.Float32, page: 16}, lean.Policy{}, 1, math.MaxInt); err != nil {
			t.Errorf("%d keys before the tree: %v", fresh, err)
		}
	}
}

// Every schedule agrees with the reference, and has the same bits on every run.
func TestRunTreeSchedules(t *testing.T) {
	testRunSchedules(t, func(s reftest.Shape) reftest.Shape {
		s.Keys = []int{200, 3, 35, 1, 130}
		s = reftest.RandomTrees(rand.New(rand.NewPCG(1, 2)), s)
		s.Trees[2] = reftest.RandomTree(rand.New(rand.NewPCG(3, 4)), 20)
		return s
	})
}

// A tree that is a chain has the bits of a causal mask.
func TestRunChain(t *testing.T) {
	rng := reftest.Rand(t)
	for range 20 {
		s := treeShape(rng)
		s.Trees = nil
		c := reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float16)
		l := randomLayout(rng)
		l.dtype = attn.Float16
		p := place[float32](rng, c, l)
		policy, workers, tile := randomPolicy(rng), 1+rng.IntN(4), []int{0, 1, 16}[rng.IntN(3)]
		p.g.Tree = false
		if err := p.run(cpu.Default(), policy, workers, tile); err != nil {
			t.Fatal(err)
		}
		want := p.bits()
		p.g.Tree = true
		for i := range p.seqs {
			if n := p.seqs[i].Queries; n <= min(attn.MaxTree, s.Keys[i]) {
				p.seqs[i].Tree = chain(n)
			}
		}
		if err := p.run(cpu.Default(), policy, workers, tile); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(p.bits(), want) {
			t.Fatalf("%v: other bits", s)
		}
	}
}

func chain(n int) attn.Tree {
	t := make(attn.Tree, n)
	for i := range t {
		t[i] = math.MaxUint64 >> (63 - i)
	}
	return t
}

// NaN and infinities in a new token reach exactly the rows to which it is visible, and change no other bit.
func TestRunNaNInTrees(t *testing.T) {
	rng := reftest.Rand(t)
	hidden := 0
	for range reftest.AtLeast(30, func() bool { return hidden > 20 }) {
		n := 2 + rng.IntN(attn.MaxTree-1)
		s := reftest.Shape{Heads: 4, KVHeads: 2, Dim: 16, ValueDim: 16, Queries: []int{n, 3}, Keys: []int{n + rng.IntN(200), 40}, Mask: attn.Mask{Causal: true, Tree: true}}
		s.Trees = []attn.Tree{reftest.RandomTree(rng, n)}
		c := reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32)
		l := layout{dtype: attn.Float32, page: []int{1, 3, 16, 64}[rng.IntN(4)]}
		seed := rng.Uint64()
		run := func() *problem[float32] {
			p := place[float32](rand.New(rand.NewPCG(seed, 1)), c, l)
			if err := p.run(cpu.Default(), lean.Policy{}, 3, 16); err != nil {
				t.Fatal(err)
			}
			return p
		}
		before, bad := run(), rng.IntN(n)
		for h := range s.KVHeads {
			if rng.IntN(2) == 0 {
				c.Key(0, s.Keys[0]-n+bad, h)[3] = math.NaN()
			} else {
				for i := range s.ValueDim {
					c.Value(0, s.Keys[0]-n+bad, h)[i] = math.NaN()
				}
			}
		}
		after := run()
		for seq, queries := range s.Queries {
			for i := range queries {
				for h := range s.Heads {
					at := (after.seqs[seq].Row+i)*after.g.Out.Row + h*after.g.Out.Head
					a, b := before.ops.Out[at:][:s.ValueDim], after.ops.Out[at:][:s.ValueDim]
					if seq == 0 && s.Trees[0].Sees(i, bad) {
						if b[0] == b[0] {
							t.Fatalf("%v: token %d does not reach token %d", s, bad, i)
						}
					} else if hidden++; !slices.Equal(a, b) {
						t.Fatalf("%v: token %d reaches token %d of sequence %d", s, bad, i, seq)
					}
				}
			}
		}
	}
}

func TestBadTrees(t *testing.T) {
	rng := reftest.Rand(t)
	s := reftest.Shape{Heads: 2, KVHeads: 1, Dim: 4, ValueDim: 4, Queries: []int{3, 1}, Keys: []int{9, 5}, Mask: attn.Mask{Causal: true, Tree: true}, Trees: []attn.Tree{{1, 3, 5}}}
	good := place[float32](rng, reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32), layout{dtype: attn.Float32, page: 4})
	for name, c := range map[string]struct {
		bad  func(p *problem[float32])
		want error
	}{
		"too short":             {func(p *problem[float32]) { p.seqs[0].Tree = attn.Tree{1, 3} }, attn.ErrShape},
		"not itself":            {func(p *problem[float32]) { p.seqs[0].Tree = attn.Tree{1, 1, 5} }, attn.ErrShape},
		"a later token":         {func(p *problem[float32]) { p.seqs[0].Tree = attn.Tree{1, 7, 5} }, attn.ErrShape},
		"no token":              {func(p *problem[float32]) { p.seqs[0].Tree = attn.Tree{1, 3, 5 + 1<<40} }, attn.ErrShape},
		"fewer keys":            {func(p *problem[float32]) { p.seqs[0].Keys = 2 }, attn.ErrShape},
		"not in the problem":    {func(p *problem[float32]) { p.g.Tree = false }, attn.ErrShape},
		"not causal":            {func(p *problem[float32]) { p.g.Causal = false }, attn.ErrUnsupported},
		"a window":              {func(p *problem[float32]) { p.g.Window = 3 }, attn.ErrUnsupported},
		"slopes":                {func(p *problem[float32]) { p.g.Slopes = attn.NewSlopes([]float64{1, 2}) }, attn.ErrUnsupported},
		"an empty tree, 3 rows": {func(p *problem[float32]) { p.seqs[0].Tree = attn.Tree{} }, attn.ErrShape},
	} {
		p := *good
		p.seqs = slices.Clone(good.seqs)
		c.bad(&p)
		p.forget()
		if err := p.run(cpu.Default(), lean.Policy{}, 2, 0); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
		if slices.ContainsFunc(p.ops.Out, func(x float32) bool { return !cputest.IsUntouched(x) }) {
			t.Errorf("%s: the output was written", name)
		}
	}
	long := make(attn.Tree, 65)
	if err := long.Check(65); err == nil {
		t.Error("a tree of 65 tokens")
	}
}

// A plan of trees and its run allocate nothing once their memory has grown.
func TestTreeAllocations(t *testing.T) {
	rng := reftest.Rand(t)
	s := reftest.RandomTrees(rng, reftest.Shape{Heads: 4, KVHeads: 2, Dim: 16, ValueDim: 16, Queries: []int{20, 7}, Keys: []int{300, 90}})
	s.Trees[0] = reftest.RandomTree(rng, 20)
	p := place[float32](rng, reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float16), layout{dtype: attn.Float16, page: 16})
	p.g.Workers = 2
	var plan Plan
	if n := testing.AllocsPerRun(20, func() {
		if err := errors.Join(plan.Build(p.g, p.seqs), Run(cpu.Default(), &plan, &p.ops)); err != nil {
			t.Fatal(err)
		}
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}
