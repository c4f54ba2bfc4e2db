package attention

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/cpu/matmul"
	"gorgonia.org/leanattention/internal/reftest"
)

// eachPrompt tests prompts in tiles with the current tier's kernels, if it has any, and with the Go kernels.
func eachPrompt(t *testing.T, test func(t *testing.T, seen func() int)) {
	counted := func(t *testing.T, ways *promptWays) {
		var calls int
		was := promptTiers[cpu.InUse()]
		defer func() { promptTiers[cpu.InUse()] = was }()
		watched := *ways
		for _, of := range []*[attn.DTypes]*promptKernels{&watched.exact, &watched.rounded} {
			for d, k := range of {
				if k == nil {
					continue
				}
				c := *k
				c.weigh = func(s, o, m, l *float32, rows, n, stride, dim int, ahead **byte, aheadAt, aheadStep int) int {
					calls++
					return k.weigh(s, o, m, l, rows, n, stride, dim, ahead, aheadAt, aheadStep)
				}
				of[d] = &c
			}
		}
		promptTiers[cpu.InUse()] = &watched
		test(t, func() int { return calls })
	}
	if ways := promptTiers[cpu.InUse()]; ways != nil {
		t.Run(cpu.InUse().String(), func(t *testing.T) { counted(t, ways) })
	}
	if cpu.InUse() == cpu.TierGo {
		t.Run("go", func(t *testing.T) { counted(t, promptsOf(matmul.GoParts(), weighGo)) })
	}
}

// weighGo computes what the assembly's weigh computes.
func weighGo(s, o, m, l *float32, rows, n, stride, dim int, _ **byte, _, _ int) (empty int) {
	a := attention[float32]{
		tile: &tile{Rows: rows, Count: n, ValueDim: dim}, stride: stride,
		scores: unsafe.Slice(s, rows*stride), o: unsafe.Slice(o, rows*dim), m: unsafe.Slice(m, rows), l: unsafe.Slice(l, rows),
	}
	a.weigh()
	for _, m := range a.m {
		if m == float32(math.Inf(-1)) {
			empty++
		}
	}
	return empty
}

// promptShape draws a shape whose blocks have many rows.
func promptShape(rng *rand.Rand) reftest.Shape {
	s := reftest.RandomShape(rng)
	s.KVHeads = 1 + rng.IntN(2)
	s.Heads = s.KVHeads * []int{1, 1, 2, 3, 8, 40}[rng.IntN(6)]
	s.Dim, s.ValueDim = []int{32, 33, 64, 80, 128}[rng.IntN(5)], []int{32, 64, 96}[rng.IntN(3)]
	s.Queries, s.Keys = nil, nil
	for range 1 + rng.IntN(2) {
		queries := 24 + rng.IntN(80)
		s.Queries, s.Keys = append(s.Queries, queries), append(s.Keys, max(0, queries-5+rng.IntN(280)))
	}
	return s
}

// Prompts in tiles have the usual precision: with peaked logits, masks and score modifications, NaN in invisible keys,
// and pages of all sizes.
func TestPromptTiles(t *testing.T) {
	rng := reftest.Rand(t)
	eachPrompt(t, func(t *testing.T, seen func() int) {
		for i := range reftest.AtLeast(cputest.Cases(t, 8, 80), func() bool { return seen() > 0 }) {
			s := promptShape(rng)
			switch i % 4 {
			case 1:
				s = reftest.RandomScoreMods(rng, s)
			case 2:
				s = reftest.RandomSinkTokens(rng, reftest.RandomScoreMods(rng, s))
			case 3:
				s = reftest.RandomBias(rng, s, slices.Max(s.Keys)+1+rng.IntN(3))
			}
			verifySomehow(t, rng, s, 0, 16, 64, 100, math.MaxInt)
		}
		if seen() == 0 {
			t.Error("no keys went to tiles")
		}
	})
}

// TestPromptTilesMixed: with mixed precision the error is within that of rounding queries and weights to the keys'
// type.
func TestPromptTilesMixed(t *testing.T) {
	rng := reftest.Rand(t)
	eachPrompt(t, func(t *testing.T, seen func() int) {
		for range reftest.AtLeast(cputest.Cases(t, 4, 30), func() bool { return seen() > 0 }) {
			s, l := promptShape(rng), randomLayout(rng)
			l.dtype = []attn.DType{attn.Float16, attn.BFloat16}[rng.IntN(2)]
			in := reftest.AllInputs[rng.IntN(len(reftest.AllInputs))]
			c := reftest.New(rng, s, in, reftest.Float32, cputest.FormatOf[float32](l.dtype))
			p := place[float32](rng, c, l)
			p.g.Mixed = true
			if err := p.run(cpu.Default(), randomPolicy(rng), 1+rng.IntN(4), 0); err != nil {
				t.Fatal(err)
			}
			precision := reftest.Precision{Acc: reftest.Float32, P: reftest.BFloat16, Query: 0x1p-8}
			if l.dtype == attn.Float16 {
				precision.P, precision.Query = reftest.Float16, 0x1p-13
			}
			if err := p.check(c.Reference(precision)); err != nil {
				t.Fatal(fmt.Errorf("%v, %v, %v: %w", s, in, l, err))
			}
		}
		if seen() == 0 {
			t.Error("no keys went to tiles")
		}
	})
}

// TestPromptTilesOdd: infinities, NaN and large numbers in queries, keys and values reach exactly the rows to which
// they are visible, as without tiles.
func TestPromptTilesOdd(t *testing.T) {
	rng := reftest.Rand(t)
	eachPrompt(t, func(t *testing.T, seen func() int) {
		for _, odd := range []float32{float32(math.Inf(1)), float32(math.Inf(-1)), float32(math.NaN()), 0x1p100} {
			for what := range 3 {
				s := reftest.Shape{Heads: 2, KVHeads: 1, Dim: 32, ValueDim: 32, Queries: []int{70}, Keys: []int{330}, Mask: attn.Mask{Causal: true}}
				c := reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.BFloat16)
				p := place[float32](rng, c, layout{dtype: attn.BFloat16, page: 1000})
				if what == 0 {
					p.ops.Q[rng.IntN(70)*p.g.Query.Row] = odd
				} else {
					of := []*cpu.Buffer{&p.ops.Pages[0].Data, &p.ops.Pages[1].Data}[what-1]
					at := []attn.PageStrides{p.g.Pages.Planes[0].At, p.g.Pages.Planes[1].At}[what-1]
					cputest.Store(of.Ptr, of.DType, int(p.seqs[0].Pages[0])*at.Page+rng.IntN(330)*at.Row, []float32{odd})
				}
				run := func() []float32 {
					if err := p.run(cpu.Default(), randomPolicy(rng), 2, 0); err != nil {
						t.Fatal(err)
					}
					return slices.Clone(p.ops.Out)
				}
				got, ways := run(), promptTiers[cpu.InUse()]
				promptTiers[cpu.InUse()] = nil
				want := run()
				promptTiers[cpu.InUse()] = ways
				for i := range want {
					a, b := float64(got[i]), float64(want[i])
					if a != b && !(a != a && b != b) && !(math.Abs(a-b) <= 1e-4*(1+math.Abs(b))) {
						t.Fatalf("%v in operand %d: element %d is %v, and %v without tiles", odd, what, i, a, b)
					}
				}
			}
		}
		if seen() == 0 {
			t.Error("no keys went to tiles")
		}
	})
}
