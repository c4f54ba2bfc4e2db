package attention

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/variant"
)

// TestMass: sums of weights by LeanTiles, with random shapes, layouts, schedules, variants and other changes of scores. Outputs and
// log-sum-exps beside them are right, too.
func TestMass(t *testing.T) {
	rng := reftest.Rand(t)
	for i := range cputest.Cases(t, 8, 80) {
		s := reftest.Shape{KVHeads: 1 + rng.IntN(2), Dim: 1 + rng.IntN(40), ValueDim: 16 * (1 + rng.IntN(3)), Mask: attn.Mask{Causal: rng.IntN(2) == 0}}
		s.Heads = s.KVHeads * (1 + rng.IntN(3))
		for range 2 {
			s.Queries, s.Keys = append(s.Queries, rng.IntN(4)), append(s.Keys, rng.IntN(250))
		}
		if i%3 == 0 { // prompts have kernels of their own
			s.Queries[0], s.Heads = 30+rng.IntN(60), s.KVHeads
		}
		var source variant.Source
		switch rng.IntN(4) {
		case 0:
			source = variant.Source{Score: "score*0.5 - 0.01*abs(query-key)", Visible: "key % 3 != 1 || head == 0"}
			v, err := variant.New(source)
			if err != nil {
				t.Fatal(err)
			}
			s.Variant = v
		case 1:
			s = reftest.RandomSinks(rng, s)
		case 2:
			s.SoftCap = 3
		}
		in := []reftest.Inputs{reftest.Normal, reftest.Peaked, reftest.Huge}[rng.IntN(3)]
		check := testMass[float32]
		if i%2 == 0 {
			check = testMass[float64]
		}
		if err := check(rng, s, in, source, 20+rng.IntN(100)); err != nil {
			t.Fatalf("%v, %v: %v", s, in, err)
		}
	}
}

func testMass[F cpu.Real](rng *rand.Rand, s reftest.Shape, in reftest.Inputs, source variant.Source, tile int) error {
	own, l := cputest.AccOf[F](), randomLayout(rng)
	c := reftest.New(rng, s, in, own, cputest.FormatOf[F](l.dtype))
	p := place[F](rng, c, l)
	precision := reftest.Precision{Acc: own}
	want, bound, tiles := c.Mass(precision, source, tile)
	p.ops.Tiles = tiles + rng.IntN(2)
	p.ops.Mass = cputest.Filled[F](len(p.ops.LSE) * p.ops.Tiles)
	if len(p.ops.Mass) == 0 {
		p.ops.Mass = nil
	}
	if err := p.run(cpu.Default(), randomPolicy(rng), 1+rng.IntN(8), tile); err != nil {
		return err
	}
	if err := p.check(c.Reference(precision)); err != nil {
		return err
	}
	mine := map[int]bool{}
	row := 0
	for q, seq := range p.seqs {
		for i := range seq.Queries {
			for h := range s.Heads {
				at := ((seq.Row+i)*p.g.LSE.Row + h*p.g.LSE.Head) * p.ops.Tiles
				for k := range p.ops.Tiles {
					x, y, off := float64(0), 0., 0.
					if mine[at+k] = true; p.ops.Mass != nil {
						x = float64(p.ops.Mass[at+k])
					}
					if k < tiles {
						y, off = want[(row*s.Heads+h)*tiles+k], bound[(row*s.Heads+h)*tiles+k]
					}
					if !(math.Abs(x-y) <= off) {
						return fmt.Errorf("tile %d of %d keys, sequence %d, query %d, head %d: %v, want %v within %v", k, tile, q, i, h, x, y, off)
					}
				}
			}
			row++
		}
	}
	filled := cputest.Filled[F](1)[0]
	for i, x := range p.ops.Mass {
		if !mine[i] && x != filled && (x == x || filled == filled) {
			return fmt.Errorf("element %d of no row is %v", i, x)
		}
	}
	return nil
}

// TestMassRefused: what attention mass does not go with is an error before anything is written.
func TestMassRefused(t *testing.T) {
	rng := reftest.Rand(t)
	for name, change := range map[string]func(p *problem[float32]){
		"Window":           func(p *problem[float32]) { p.g.Causal, p.g.Window = true, 5 },
		"Dropout":          func(p *problem[float32]) { p.g.Dropout = 0.5 },
		"batch invariance": func(p *problem[float32]) { p.g.Invariant = true },
		"Unnormalised": func(p *problem[float32]) {
			p.g.Variant, _ = variant.New(variant.Source{Score: "score", Unnormalised: true})
		},
		"places":   func(p *problem[float32]) { p.ops.Tiles = 1 },
		"elements": func(p *problem[float32]) { p.ops.Mass = p.ops.Mass[:3] },
	} {
		s := reftest.Shape{Heads: 2, KVHeads: 1, Dim: 8, ValueDim: 8, Queries: []int{3}, Keys: []int{50}}
		p := place[float32](rng, reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32), layout{dtype: attn.Float32, page: 16})
		p.ops.Tiles = 4
		p.ops.Mass = make([]float32, len(p.ops.LSE)*4)
		change(p)
		if err := p.run(cpu.Default(), lean.Policy{}, 1, 16); err == nil || p.ops.Mass[0] != 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
}
