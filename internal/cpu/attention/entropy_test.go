package attention

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/reftest"
)

// TestEntropy: entropies of weights, with random shapes, layouts, schedules, masks, variants and other changes of scores. Outputs beside them
// have the bits that they have without.
func TestEntropy(t *testing.T) {
	rng := reftest.Rand(t)
	for i := range cputest.Cases(t, 8, 80) {
		s := reftest.Shape{KVHeads: 1 + rng.IntN(2), Dim: 1 + rng.IntN(40), ValueDim: 16 * (1 + rng.IntN(3)), Mask: attn.Mask{Causal: rng.IntN(2) == 0}}
		s.Heads = s.KVHeads * (1 + rng.IntN(3))
		for range 2 {
			s.Queries, s.Keys = append(s.Queries, rng.IntN(4)), append(s.Keys, rng.IntN(250))
		}
		if i%3 == 0 { // prompts have kernels of their own
			s.Queries[0], s.Heads, s.Dim = 30+rng.IntN(60), s.KVHeads, 16*(1+rng.IntN(4))
		}
		switch rng.IntN(5) {
		case 0:
			if s = s.Varied(rng, rng.IntN(len(reftest.Gallery))); s.Variant.Unnormalised {
				s.Variant, s.Tensors = nil, nil
			}
		case 1:
			s = reftest.RandomSinks(rng, s)
		case 2:
			s.SoftCap = 3
		case 3:
			s.Window = 1 + rng.IntN(100)
			s.SinkTokens = rng.IntN(5)
		}
		in := []reftest.Inputs{reftest.Normal, reftest.Peaked, reftest.Huge, reftest.Constant}[rng.IntN(4)]
		check := testEntropy[float32]
		if i%2 == 0 {
			check = testEntropy[float64]
		}
		if err := check(rng, s, in); err != nil {
			t.Fatalf("%v, %v: %v", s, in, err)
		}
	}
}

func testEntropy[F cpu.Real](rng *rand.Rand, s reftest.Shape, in reftest.Inputs) error {
	own, l := cputest.AccOf[F](), randomLayout(rng)
	c := reftest.New(rng, s, in, own, cputest.FormatOf[F](l.dtype))
	p := place[F](rng, c, l)
	policy, workers, tile := randomPolicy(rng), 1+rng.IntN(8), 20+rng.IntN(100)
	if err := p.run(cpu.Default(), policy, workers, tile); err != nil {
		return err
	}
	before := append([]F(nil), p.ops.Out...)
	if p.ops.Entropy = cputest.Filled[F](len(p.ops.LSE)); len(p.ops.Entropy) == 0 {
		return nil
	}
	if err := p.run(cpu.Default(), policy, workers, tile); err != nil {
		return err
	}
	for i, x := range p.ops.Out {
		if x != before[i] && (x == x || before[i] == before[i]) {
			return fmt.Errorf("output %d is %v, and %v without entropies", i, x, before[i])
		}
	}
	return p.checkEntropy()
}

// checkEntropy compares entropies with the reference.
func (p *problem[F]) checkEntropy() error {
	want, bound := p.c.Entropy(reftest.Precision{Acc: cputest.AccOf[F]()})
	row := 0
	for q, seq := range p.seqs {
		for i := range seq.Queries {
			for h := range p.c.Heads {
				x := float64(p.ops.Entropy[(seq.Row+i)*p.g.LSE.Row+h*p.g.LSE.Head])
				if y, off := want[row*p.c.Heads+h], bound[row*p.c.Heads+h]; !(math.Abs(x-y) <= off) {
					return fmt.Errorf("sequence %d, query %d, head %d: %v, want %v within %v", q, i, h, x, y, off)
				}
			}
			row++
		}
	}
	return nil
}
