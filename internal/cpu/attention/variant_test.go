package attention

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/variant"
)

// TestVariants: each variant of the gallery, with random shapes, layouts, schedules, and other masks and changes of scores.
func TestVariants(t *testing.T) {
	rng := reftest.Rand(t)
	for i, entry := range reftest.Gallery {
		for range cputest.Cases(t, 4, 12) {
			s := reftest.RandomShape(rng)
			if rng.IntN(3) == 0 {
				s = cputest.Long(t, rng, s, 200, 300)
			}
			if rng.IntN(3) == 0 {
				s.Causal, s.SoftCap = rng.IntN(2) == 0, []float64{0, 30}[rng.IntN(2)]
				s.Window = []int{0, 1, 17, 100}[rng.IntN(4)]
			}
			verifySomehow(t, rng, s.Varied(rng, i), 0, 5, 16, 64, 100)
			if t.Failed() {
				t.Fatal(entry.Name)
			}
		}
	}
}

// TestRandomVariants: random expressions in whole attention. Scores are such that their products are finite.
func TestRandomVariants(t *testing.T) {
	rng := reftest.Rand(t)
	for range cputest.Cases(t, 12, 200) {
		p, err := variant.New(reftest.RandomVariant(rng, false, 1+rng.IntN(2)))
		if err != nil {
			continue // too many operations
		}
		s := reftest.RandomShape(rng)
		s.Variant, s.Tensors = p, reftest.RandomTensors(rng, p)
		for _, check := range []func(*rand.Rand, reftest.Shape, reftest.Inputs, layout, lean.Policy, int, int) error{verify[float32], verify[float64]} {
			if err := check(rng, s, reftest.Normal, randomLayout(rng), randomPolicy(rng), 1+rng.IntN(8), []int{0, 5, 16, 64}[rng.IntN(4)]); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestVariantBuiltIns: built-in masks and changes of scores, and the same as variants, give the same results but for rounding.
func TestVariantBuiltIns(t *testing.T) {
	rng := reftest.Rand(t)
	for i, b := range reftest.BuiltIns {
		for range cputest.Cases(t, 2, 10) {
			s := reftest.Shape{KVHeads: 1 + rng.IntN(2), Dim: 8 + rng.IntN(60), ValueDim: 8 + rng.IntN(60), Queries: []int{1 + rng.IntN(60)}}
			s.Heads, s.Keys = s.KVHeads*(1+rng.IntN(3)), []int{s.Queries[0] + rng.IntN(200)}
			p := place[float32](rng, reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32), layout{dtype: attn.Float32, page: 16}) // keys that are hidden are finite
			builtIn, varied := p.c.BuiltIn(rng, i)
			p.c.Shape = builtIn
			want := p.c.Reference(reftest.Precision{Acc: reftest.Float32})
			plain := p.g
			p.g.Mask, p.g.Score = b.Mask, attn.Score{Cap: b.SoftCap, Slopes: attn.NewSlopes(builtIn.Slopes)}
			for range 2 {
				if err := p.run(cpu.Default(), randomPolicy(rng), 1+rng.IntN(4), 64); err != nil {
					t.Fatal(err)
				}
				if err := p.check(want); err != nil {
					t.Fatalf("%s, %v: %v", b.Name, p.g.Variant, err)
				}
				p.g, p.g.Variant, p.ops.Tensors = plain, varied.Variant, cputest.TensorsOf[float32](varied.Tensors)
			}
		}
	}
}

// TestVariantTiles: the schedule has the LeanTiles that some query sees, hidden ones may hold NaN, and those that tensors
// alone hide are skipped in the run.
func TestVariantTiles(t *testing.T) {
	rng := reftest.Rand(t)
	s := reftest.Shape{Heads: 4, KVHeads: 2, Dim: 16, ValueDim: 16, Queries: []int{1, 70}, Keys: []int{1600, 320}}
	for _, visible := range []string{
		"div(key, 64) % 10 == 3", "key < 64 || key == 200", "abs(query-key) < 64", "head < 2 && key < 64", "false", "doc[key] == 7",
	} {
		source := variant.Source{Visible: visible}
		doc := variant.Tensor{Shape: []int{1600}, I32: make([]int32, 1600)}
		s.Tensors = nil
		if strings.Contains(visible, "doc") {
			for i := 320; i < 384; i++ {
				doc.I32[i] = 7
			}
			source.Tensors, s.Tensors = []variant.Declared{{Name: "doc", Rank: 1, Int: true}}, []variant.Tensor{doc}
		}
		p, err := variant.New(source)
		if err != nil {
			t.Fatal(err)
		}
		s.Variant = p
		c := reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32)
		want := c.Reference(reftest.Precision{Acc: reftest.Float32})
		sees := func(seq, from, to, j int) bool { // some of the query positions [from, to) sees one of 64 keys
			for h := range s.Heads {
				for q := from; q < to; q++ {
					for k := j; k < j+64; k++ {
						if p.SeesAt(&variant.At{Query: s.Keys[seq] - s.Queries[seq] + q, Key: k, Head: h, Sequence: seq, Tensors: s.Tensors}) {
							return true
						}
					}
				}
			}
			return false
		}
		for seq, n := range s.Keys { // hidden LeanTiles are not read
			for from := 0; from < n; from += 64 {
				if sees(seq, 0, s.Queries[seq], from) {
					continue
				}
				for j := from; j < from+64; j++ {
					for h := range s.KVHeads {
						for i := range 16 {
							c.Key(seq, j, h)[i], c.Value(seq, j, h)[i] = math.NaN(), math.NaN()
						}
					}
				}
			}
		}
		placed := place[float32](rng, c, layout{dtype: attn.Float32, page: 16})
		if err := placed.run(cpu.Default(), lean.Policy{}, 3, 64); err != nil {
			t.Fatal(err)
		}
		if err := placed.check(want); err != nil {
			t.Errorf("%s: %v", visible, err)
		}
		var plan Plan
		placed.g.TileTokens = 64
		if err := plan.Build(placed.g, placed.seqs); err != nil {
			t.Fatal(err)
		}
		tiles := int64(0)
		for seq := range plan.seqs {
			of := &plan.seqs[seq]
			for block := 0; block*of.positions < of.queries; block++ {
				from, to := of.block(block)
				for j := 0; j < of.keys; j += 64 {
					if s.Tensors != nil || sees(seq, from, to, j) {
						tiles += int64(s.KVHeads)
					}
				}
			}
		}
		if got := plan.Tiles(); got != tiles {
			t.Errorf("%s: %d LeanTiles, want %d", visible, got, tiles)
		}
	}
}

// TestVariantInvariant: with batch invariance the bits depend on neither schedule nor workers.
func TestVariantInvariant(t *testing.T) {
	rng := reftest.Rand(t)
	for i, entry := range reftest.Gallery {
		s := reftest.Shape{Heads: 4, KVHeads: 2, Dim: 32, ValueDim: 16, Queries: []int{1, 40, 3}, Keys: []int{700, 90, 300}}.Varied(rng, i)
		p := place[float32](rng, reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32), layout{dtype: attn.Float32, page: 16})
		p.g.Invariant = true
		var want []uint64
		for range 4 {
			if err := p.run(cpu.Default(), randomPolicy(rng), 1+rng.IntN(7), 64); err != nil {
				t.Fatal(err)
			}
			got := p.bits()
			if want != nil && !slices.Equal(got, want) {
				t.Errorf("%s: the bits depend on the schedule", entry.Name)
			}
			want = slices.Clone(got)
		}
		if err := p.check(p.c.Reference(reftest.Precision{Acc: reftest.Float32})); err != nil {
			t.Errorf("%s: %v", entry.Name, err)
		}
	}
}

// TestVariantTensorsChecked: an index that may be out of range is an error before anything is written.
func TestVariantTensorsChecked(t *testing.T) {
	rng := reftest.Rand(t)
	s := reftest.Shape{Heads: 2, KVHeads: 1, Dim: 8, ValueDim: 8, Queries: []int{1}, Keys: []int{50}}.Varied(rng, 1)
	p := place[float32](rng, reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32), layout{dtype: attn.Float32, page: 16})
	p.ops.Tensors[0].Shape, p.ops.Tensors[0].F32 = []int{1}, p.ops.Tensors[0].F32[:1]
	if err := p.run(cpu.Default(), lean.Policy{}, 1, 0); !errors.Is(err, attn.ErrShape) || !strings.Contains(err.Error(), "slope[head]: the index head is between 0 and 1") {
		t.Error(err)
	}
	p.ops.Tensors = nil
	if err := p.run(cpu.Default(), lean.Policy{}, 1, 0); !errors.Is(err, attn.ErrShape) {
		t.Error(err)
	}
}
