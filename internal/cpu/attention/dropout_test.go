package attention

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/dropout"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
)

// Every tier draws the random numbers of package dropout.
func TestDropped(t *testing.T) {
	rng := reftest.Rand(t)
	for i := range 2000 {
		r := dropout.Rule{Seed: rng.Uint64(), Below: []uint16{0, 1, 1 << 15, math.MaxUint16, uint16(rng.Uint32())}[i%5]}
		at := dropout.Row{Sequence: rng.Uint32(), Head: rng.Uint32() >> (i % 32), Query: rng.Uint32()}
		key := rng.IntN(1 << (1 + i%34))
		if i%8 > 0 {
			key &^= 7
			if got, want := droppedOf(r, at, key), r.Block(at, uint32(key/8)); got != want {
				t.Fatalf("%+v %+v, from key %d: %b, want %b", r, at, key, got, want)
			}
			continue
		}
		got := DroppedFrom(r, at, key)
		for i := range dropout.BlockKeys {
			if r.Drops(at, key+i) != (got>>i&1 == 1) {
				t.Fatalf("%+v %+v, from key %d: %b is wrong at %d", r, at, key, got, i)
			}
		}
	}
}

func TestRunDropout(t *testing.T) {
	rng := reftest.Rand(t)
	n := cputest.Cases(t, 12, 50)
	if reftest.RaceEnabled {
		n = 30
	}
	for i := range n {
		s := reftest.RandomDropout(rng, reftest.RandomShape(rng))
		switch i % 4 {
		case 0: // several blocks; edges overlap or not
			s = cputest.Long(t, rng, s, 200, 300)
		case 1:
			s.Keys[0] = 4000 + rng.IntN(3000) // several states
			s.Queries[0] = min(s.Queries[0], 5)
		case 2:
			s = reftest.RandomScoreMods(rng, s)
		}
		if i%8 < 2 {
			s = reftest.RandomBias(rng, s, slices.Max(s.Keys)+1+rng.IntN(3))
		}
		verifySomehow(t, rng, s, 0, 1, 5, 16, 64, 100, math.MaxInt)
	}
}

func TestRunSchedulesDropout(t *testing.T) {
	testRunSchedules(t, func(s reftest.Shape) reftest.Shape { return reftest.RandomDropout(reftest.Rand(t), s) })
}

// Without a seed, or with a probability of 0, the bits are those of attention without dropout, for any schedule.
func TestRunDropoutOff(t *testing.T) {
	rng := reftest.Rand(t)
	for range 20 {
		p := place[float32](rng, reftest.New(rng, reftest.RandomShape(rng), reftest.Normal, reftest.Float32, reftest.Float32), layout{dtype: attn.Float32, page: 16})
		policy := randomPolicy(rng)
		run := func(probability float64, seed int64) []uint64 {
			p.g.Dropout, p.ops.Seed = probability, seed
			if err := p.run(cpu.Default(), policy, 3, 16); err != nil {
				t.Fatal(err)
			}
			return p.bits()
		}
		want := run(0, 0)
		if !slices.Equal(run(0.5, 0), want) || !slices.Equal(run(0, 5), want) || !slices.Equal(run(0x1p-40, 5), want) {
			t.Errorf("%v: other bits", p.c.Shape)
		}
	}
}

// revealing returns a case whose outputs are its masks: all scores are 0, and value j is 1 at j and 0 elsewhere.
func revealing(rng *rand.Rand, s reftest.Shape) *reftest.Case {
	c := reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32)
	clear(c.Q)
	clear(c.V)
	at := 0
	for _, keys := range s.Keys {
		for j := range keys {
			for h := range s.KVHeads {
				c.V[(at+j)*s.KVHeads*s.ValueDim+h*s.ValueDim+j] = 1
			}
		}
		at += keys
	}
	return c
}

// The masks are exact, and do not depend on tiles, schedules, workers or other sequences.
func TestRunDropoutMasks(t *testing.T) {
	t.Run("float32", testDropoutMasks[float32])
	t.Run("float64", testDropoutMasks[float64])
}

func testDropoutMasks[F cpu.Real](t *testing.T) {
	rng := reftest.Rand(t)
	const most = 150
	for i := range cputest.Cases(t, 8, 24) {
		s := reftest.Shape{
			Heads: 4, KVHeads: []int{1, 2, 4}[i%3], Dim: 8, ValueDim: most, Mask: attn.Mask{Causal: i%2 == 0},
			Queries: []int{1 + rng.IntN(90), 1 + rng.IntN(3)}, Keys: []int{1 + rng.IntN(most), 100},
		}
		if i%4 > 1 {
			s.Window = 1 + rng.IntN(most)
		}
		s = reftest.RandomDropout(rng, s)
		rule := dropout.Of(s.Dropout, s.Seed)
		for _, d := range []attn.DType{attn.Float32, attn.Float64, attn.Float16, attn.BFloat16} {
			p := place[F](rng, revealing(rng, s), layout{dtype: d, page: []int{1, 3, 16, most}[rng.IntN(4)]})
			if err := p.run(cpu.Default(), randomPolicy(rng), 1+rng.IntN(6), []int{0, 1, 7, 64}[rng.IntN(4)]); err != nil {
				t.Fatal(err)
			}
			for seq := range s.Queries {
				for pos := range s.Queries[seq] {
					first, end := s.First(seq, pos), s.Visible(seq, pos)
					for h := range s.Heads {
						for j := range most {
							x := float64(p.ops.Out[(p.seqs[seq].Row+pos)*p.g.Out.Row+h*p.g.Out.Head+j])
							want := 0.0
							if first <= j && j < end && !rule.Drops(dropout.RowOf(seq, h, pos), j) {
								want = 1 / rule.Keep() / float64(end-first)
							}
							if (x == 0) != (want == 0) || math.Abs(x-want) > 1e-5*want {
								t.Fatalf("%v, %v: the weight of key %d for query %d of head %d of sequence %d is %v, want %v", s, d, j, pos, h, seq, x, want)
							}
						}
					}
				}
			}
		}
	}
}

func TestDropoutErrors(t *testing.T) {
	rng := reftest.Rand(t)
	s := reftest.Shape{Heads: 2, KVHeads: 1, Dim: 4, ValueDim: 4, Queries: []int{1}, Keys: []int{5}}
	for _, p := range []float64{-0.1, 1, 1.5, math.NaN(), math.Inf(1)} {
		c := place[float32](rng, reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32), layout{dtype: attn.Float32, page: 16})
		c.g.Dropout, c.ops.Seed = p, 1
		want := fmt.Sprintf("a dropout of %v", p)
		if err := c.run(cpu.Default(), lean.Policy{}, 1, 0); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v", p, err)
		}
	}
}
