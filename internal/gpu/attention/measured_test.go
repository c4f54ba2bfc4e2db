//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"math"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda/nvrtc"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/variant"
)

func TestGPUMeasured(t *testing.T) {
	testMeasured(t, realGPU(t), enginetest.OrShort(200, 40), enginetest.OrShort(20000, 3000), variant.Source{})
}

// The same with a variant, whose kernel is compiled for each type and head dim.
func TestGPUWrittenMeasured(t *testing.T) {
	nvrtc.ForTest(t)
	testMeasured(t, realGPU(t), enginetest.OrShort(60, 12), 3000, measuredVariant)
}

var measuredVariant = variant.Source{Score: "score*0.5 - 0.01*abs(query-key)", Visible: "key % 3 != 1 || head == 0 || key > 200"}

func TestEmulatedMeasured(t *testing.T) {
	testMeasured(t, emulatedGPU(t, 5), reftest.Cases(t, 3, 40), 300, variant.Source{})
}

func TestEmulatedWrittenMeasured(t *testing.T) {
	nvrtc.ForTest(t)
	testMeasured(t, emulatedGPU(t, 5), reftest.Cases(t, 1, 10), 300, measuredVariant)
}

// testMeasured runs attention that measures its weights, with random shapes, layouts, masks and changes of scores: entropies, masses, and
// the results beside them. A second run has the same bits.
func testMeasured(t *testing.T, m *machine, n, longest int, source variant.Source) {
	rng := reftest.Rand(t)
	plan, dims := m.engine.NewPlan(), []int{64, 128}
	varied := source.Score != ""
	if m.engine.hasCopyEngine() && !varied {
		dims = append(dims, 40, 104) // spread over 64 and 128 elements
	}
	for i := range n {
		s := reftest.Shape{KVHeads: enginetest.Pick(rng, 1, 2), Dim: enginetest.Pick(rng, dims...), Mask: attn.Mask{Causal: rng.IntN(3) > 0}}
		s.Heads, s.ValueDim = s.KVHeads*enginetest.Pick(rng, 1, 1, 2, 4, 5, 8, 17), s.Dim
		for range enginetest.Pick(rng, 1, 2, 5) {
			keys := enginetest.Pick(rng, 0, 1, 63, 64, 65, 200, rng.IntN(longest))
			s.Queries, s.Keys = append(s.Queries, enginetest.Pick(rng, 0, 1, 1, 2, 5, min(keys, 33))), append(s.Keys, keys)
		}
		tile, kv := 64*enginetest.Pick(rng, 1, 1, 3, 4), enginetest.Pick(rng, gpu.Types...)
		if rng.IntN(2) == 0 {
			s = reftest.RandomSinks(rng, s)
		}
		switch rng.IntN(4) {
		case 0:
			s.SoftCap = 3
		case 1:
			s.Causal, s.Window = true, enginetest.Pick(rng, 1, 40, 64, 100)
		}
		if varied {
			v, err := variant.New(source)
			noError(t, err)
			s.Variant = v
		}
		p := m.newProblem(t, rng, enginetest.Pick(rng, reftest.Normal, reftest.Peaked, reftest.Constant, reftest.Huge), options{shape: &s, kv: kv, dense: rng.IntN(2) == 0})
		p.geometry.Measures, p.geometry.TileTokens = true, tile
		p.geometry.Workers = enginetest.Pick(rng, 0, 0, 1, 3)
		want, bound, tiles := p.Mass(p.precision(), source, tile)
		entropy, entropyBound := p.Entropy(p.precision())
		places := tiles + rng.IntN(2)
		if places == 0 {
			places = 1
		}
		o := p.operands()
		o.Entropy, o.Mass, o.Places = gpu.Memory{DType: attn.Float32, Len: p.lse.Len}, gpu.Memory{DType: attn.Float32, Len: p.lse.Len * places}, places
		m.Poison(t, &o.Entropy)
		m.Poison(t, &o.Mass)
		noError(t, plan.Build(p.geometry, p.seqs, p.rows))
		plan.spoil(t)
		noError(t, plan.Upload(m.Stream))
		run := func() (all []byte) {
			if p.append {
				noError(t, plan.Append(m.Stream, o.Pages, p.newK, p.newV))
			}
			noError(t, plan.Run(m.Stream, o))
			m.Settle(t)
			return append(append(all, enginetest.Read(t, &o.Entropy)...), enginetest.Read(t, &o.Mass)...)
		}
		first := run()
		p.check(t)
		if again := run(); string(again) != string(first) {
			t.Errorf("%v: a second run has other bits", p)
		}
		g, mine, row := &p.geometry, make([]bool, p.lse.Len), 0
		for q, seq := range p.seqs {
			for pos := range s.Queries[q] {
				for h := range s.Heads {
					at := (seq.Row+pos)*g.LSE.Row + h*g.LSE.Head
					mine[at] = true
					if x := enginetest.Get(first, at, attn.Float32); !(math.Abs(x-entropy[row]) <= entropyBound[row]) {
						t.Errorf("%v: entropy of sequence %d, query %d, head %d is %v, want %v within %v", p, q, pos, h, x, entropy[row], entropyBound[row])
					}
					for k := range places {
						y, off := 0., 0.
						if k < tiles {
							y, off = want[row*tiles+k], bound[row*tiles+k]
						}
						if x := enginetest.Get(first, p.lse.Len+at*places+k, attn.Float32); !(math.Abs(x-y) <= off) {
							t.Errorf("%v: mass of sequence %d, query %d, head %d, LeanTile %d of %d keys is %v, want %v within %v", p, q, pos, h, k, tile, x, y, off)
						}
					}
					row++
				}
			}
		}
		for at, is := range mine {
			for k := range places + 1 {
				i := at
				if k > 0 {
					i = p.lse.Len + at*places + k - 1
				}
				if x := enginetest.Get(first, i, attn.Float32); !is && (p.rows > 0 && x != 0 || p.rows == 0 && !math.IsNaN(x)) {
					t.Fatalf("%v: number %d of no sequence is %v", p, i, x)
				}
			}
		}
		for _, x := range []*gpu.Memory{&o.Entropy, &o.Mass} {
			noError(t, x.Buffer.Close())
		}
		p.close(t)
		if t.Failed() {
			t.Fatalf("case %d: %v", i, p)
		}
	}
	noError(t, plan.Close())
}

// BenchmarkGPUMeasured compares decode that measures its weights with plain decode, and with masks that hide nothing, alternating.
func BenchmarkGPUMeasured(b *testing.B) {
	m := realGPU(b)
	measures := func(tile int) func(g *attn.Problem) {
		return func(g *attn.Problem) { g.Measures, g.TileTokens = true, tile }
	}
	for _, c := range []benchStep{
		{1, 1, 32, 8, 8192, 128, 0}, {16, 1, 32, 8, 8192, 128, 16}, {16, 1, 32, 32, 4096, 128, 64}, {64, 1, 64, 8, 4096, 128, 64}, {16, 1, 32, 8, 1024, 64, 16}, {8, 1, 32, 8, 65536, 64, 16},
		{1, 16, 32, 8, 8192, 128, 0}, {1, 1024, 32, 8, 1024, 128, 64},
	} {
		m.benchmarkVariants(b, c, []benchVariant{
			{name: "plain", keys: c.keys, spoil: func(*attn.Problem) {}},
			{name: "window of all", keys: c.keys, spoil: func(g *attn.Problem) { g.Window = c.keys }},
			{name: "entropy", keys: c.keys, spoil: measures(0)},
			{name: "entropy and mass of 64", keys: c.keys, spoil: measures(64)},
		})
	}
}

// What a plan does not measure, or has no memory for, is an error.
func TestRunRefusesMeasured(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 13, 232448)
	p := decodeStep(t, m)
	p.geometry.TileTokens = 64
	results := m.Put(t, enginetest.Poisoned(p.rows*p.Heads*8, attn.Float32), attn.Float32)
	for _, c := range []struct {
		spoil func(g *attn.Problem, o *Operands)
		err   error
		text  string
	}{
		{func(g *attn.Problem, _ *Operands) { g.Measures = false }, attn.ErrUnsupported, "measures no weights"},
		{func(g *attn.Problem, _ *Operands) { g.TileTokens = 96 }, attn.ErrUnsupported, "LeanTiles of 96 keys: on a GPU they have a multiple of 64"},
		{func(_ *attn.Problem, o *Operands) { o.Places = 0 }, attn.ErrShape, "0 places"},
		{func(_ *attn.Problem, o *Operands) { o.Mass.Len = 3 }, attn.ErrShape, "attention mass has"},
		{func(_ *attn.Problem, o *Operands) { o.Entropy.DType = attn.Float16 }, attn.ErrDType, "entropies of float16"},
	} {
		g, o := p.geometry, p.operands()
		g.Measures = true
		o.Entropy, o.Mass, o.Places = results, results, 8
		c.spoil(&g, o)
		plan := m.engine.NewPlan()
		noError(t, plan.Build(g, p.seqs, p.rows))
		noError(t, plan.Upload(m.Stream))
		wantError(t, c.text, plan.Run(m.Stream, o), c.err, c.text)
		noError(t, plan.Close())
	}
	for text, spoil := range map[string]func(g *attn.Problem){
		"head dim 80 is not supported: kernels have head dims [64 128]": func(g *attn.Problem) { g.Dim, g.ValueDim = 80, 80 },
		"that measures weights: a tree":                                 func(g *attn.Problem) { g.Causal, g.Tree = true, true },
		"that measures weights: batch invariance":                       func(g *attn.Problem) { g.Invariant = true },
	} {
		g := p.geometry
		g.Measures = true
		spoil(&g)
		g.Pages = attn.Separate(attn.Float16, g.Dim, g.Dim, attn.PageStrides{}, attn.PageStrides{}).Packed(g.KVHeads, g.PageTokens)
		wantError(t, text, HasKernel(&g), attn.ErrUnsupported, text)
	}
}
