package attention

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"

	"pgregory.net/rapid"
)

// mixedShape draws a step of chunks and single tokens, or of one kind only.
func mixedShape(rng *rand.Rand, longest int) reftest.Shape {
	s := reftest.Shape{KVHeads: 1 + rng.IntN(2), Dim: enginetest.Pick(rng, headDims...), Mask: attn.Mask{Causal: rng.IntN(3) > 0}}
	s.ValueDim = s.Dim
	group := enginetest.Pick(rng, 1, 1, 2, 4, 8)
	s.Heads = s.KVHeads * group
	chunks, singles := rng.IntN(3), rng.IntN(7)
	if chunks+singles == 0 {
		chunks, singles = 1, 1
	}
	for range chunks {
		s.Queries = append(s.Queries, attn.Ceil(enginetest.Pick(rng, 17, 64, 65, 128, 129, 193, 200), group))
	}
	for range singles {
		s.Queries = append(s.Queries, enginetest.Pick(rng, 1, 1, 1, 1, 2, 5))
	}
	for range rng.IntN(3) {
		s.Queries = append(s.Queries, 0)
	}
	rng.Shuffle(len(s.Queries), func(i, j int) { s.Queries[i], s.Queries[j] = s.Queries[j], s.Queries[i] })
	for _, q := range s.Queries {
		s.Keys = append(s.Keys, enginetest.Pick(rng, q, q, q+rng.IntN(longest), q+rng.IntN(longest), rng.IntN(longest), 0))
	}
	return s
}

// testMixed: a step of decode and prefill sequences uses decode and prefill kernels, with the same bits every time.
func testMixed(t *testing.T, m *machine, n, longest int) {
	m.engine.choice = takeBoth
	rng := reftest.Rand(t)
	plan, beside := m.engine.NewPlan(), m.runsBeside()
	kinds := map[bool]int{}
	for i := range reftest.AtLeast(n, func() bool { return !beside || kinds[false] > 0 && kinds[true] > 0 }) {
		m.engine.Eager = i%4 > 0
		shape := mixedShape(rng, longest)
		in := enginetest.Pick(rng, reftest.AllInputs...)
		p := m.newProblem(t, rng, in, options{shape: &shape, kv: enginetest.Pick(rng, attn.Float16, attn.BFloat16), dense: rng.IntN(2) == 0, mixed: rng.IntN(3) == 0})
		p.geometry.QueryType = enginetest.Pick(rng, attn.Float32, p.query)
		m.run(t, plan, p)
		queries := slices.DeleteFunc(slices.Clone(shape.Queries), func(q int) bool { return q == 0 })
		slices.Sort(queries)
		few, most := queries[0], queries[len(queries)-1]
		if both := beside && most*p.geometry.Group() >= prefillRows && few < most; p.Scale > 0 && plan.form.both != both {
			t.Errorf("both kinds of kernels: %v", !both)
		}
		kinds[plan.form.both]++
		p.check(t)
		out, lse := enginetest.Read(t, &p.o), enginetest.Read(t, &p.lse)
		plan.spoil(t)
		m.Poison(t, &p.o)
		m.Poison(t, &p.lse)
		noError(t, plan.Run(m.Stream, p.operands()))
		m.Settle(t)
		if !bytes.Equal(enginetest.Read(t, &p.o), out) || !bytes.Equal(enginetest.Read(t, &p.lse), lse) {
			t.Error("the second run has other bits")
		}
		if t.Failed() {
			t.Fatalf("case %d, %v inputs: %v", i, in, p)
		}
		p.close(t)
	}
	if beside && min(kinds[false], kinds[true]) == 0 {
		t.Errorf("steps with both kinds of kernels, and others: %v", kinds)
	}
	noError(t, plan.Close())
	testGraph(t, m, reftest.Cases(t, 2, 3), 70, longest, reftest.Cases(t, 2, 4))
}

// shares balances both kinds of kernels by cost, and gives each at least one block.
func TestShares(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		blocks := rapid.IntRange(2, 150).Draw(t, "blocks")
		few, many := rapid.Int64Range(0, 1<<40).Draw(t, "few"), rapid.Int64Range(0, 1<<40).Draw(t, "many")
		m := shares(few, many, blocks)
		if m < 1 || m >= blocks {
			t.Fatalf("%d of %d blocks", m, blocks)
		}
		time := func(m int) int64 { return max((many+int64(m)-1)/int64(m), fewTime(few, blocks-m, blocks)) }
		for other := 1; other < blocks; other++ {
			if time(other) < time(m) {
				t.Fatalf("%d and %d: %d of %d blocks for prefill, and %d would be done at %d instead of %d", few, many, m, blocks, other, time(other), time(m))
			}
		}
		if n := int64(blocks); time(m) < many/n || time(m) < few/n {
			t.Fatalf("%d and %d by %d blocks: done at %d", few, many, blocks, time(m))
		}
	})
	if m := shares(1, 1, 1); m != 0 {
		t.Errorf("%d of one block", m)
	}
}

// TestMixedChoice: which steps use both kinds of kernels.
func TestMixedChoice(t *testing.T) {
	// The fastest choices on an H100, to within 2%, by BenchmarkGPUMixed, for float16 and float32.
	for _, c := range []struct {
		heads, kv, dim int
		half, whole    [2]int // blocks of prefill kernels, with queries of 16 and of 32 bits
		or             bool   // with queries of 16 bits the prefill kernel may have all sequences: it takes 0.5% and 0.8% longer
	}{
		{32, 8, 128, [2]int{28, 40}, [2]int{44, 60}, true},
		{32, 32, 128, [2]int{6, 12}, [2]int{12, 20}, true},
		{32, 32, 64, [2]int{8, 14}, [2]int{16, 28}, false},
	} {
		g := &attn.Problem{Heads: c.heads, KVHeads: c.kv, Dim: c.dim, ValueDim: c.dim, Pages: attn.Separate(attn.Float16, c.dim, c.dim, attn.PageStrides{}, attn.PageStrides{}), Mask: attn.Mask{Causal: true}}
		seqs := []attn.Sequence{{Queries: 512, Keys: 4096}}
		for i := range 63 {
			seqs = append(seqs, attn.Sequence{Row: 512 + i, Queries: 1, Keys: 4096})
		}
		for i, q := range []attn.DType{attn.Float16, attn.Float32} {
			g.QueryType = q
			p := &Plan{engine: &Engine{blocks: 132}}
			who := p.divide(g, seqs, prefillOfTable(c.dim, hopper))
			of := [...][2]int{c.half, c.whole}[i]
			if c.or && i == 0 && who.few == 0 && who.first() != nil {
				continue
			}
			if who.few != 63 || who.blocks < of[0] || who.blocks > of[1] {
				t.Errorf("%+v, queries of %v: %d decode sequences, %d prefill blocks", c, q, who.few, who.blocks)
			}
		}
	}
	type group struct{ sequences, queries, keys int }
	for _, c := range []struct {
		heads, kv, dim int
		groups         []group
		both           bool
	}{
		{32, 8, 128, []group{{4, 512, 512}, {60, 1, 2048}}, true},
		{32, 8, 128, []group{{64, 1, 4096}}, false},              // no prefill sequence
		{32, 8, 128, []group{{1, 512, 4096}}, false},             // no decode sequence
		{32, 8, 128, []group{{1, 512, 4096}, {1, 1, 16}}, false}, // hardly any decode work
		{32, 8, 128, []group{{1, 8, 16}, {63, 1, 4096}}, false},
		{32, 32, 64, []group{{1, 64, 64}, {3, 1, 64}}, false}, // two launches take longer
		{32, 8, 128, []group{{4, 8192, 8192}, {2, 1, 100}}, false},
	} {
		g := &attn.Problem{Heads: c.heads, KVHeads: c.kv, Dim: c.dim, ValueDim: c.dim, Pages: attn.Separate(attn.Float16, c.dim, c.dim, attn.PageStrides{}, attn.PageStrides{}), Mask: attn.Mask{Causal: true}}
		var seqs []attn.Sequence
		row, mostGEMVRows := 0, 0
		for _, x := range c.groups {
			for range x.sequences {
				seqs = append(seqs, attn.Sequence{Row: row, Queries: x.queries, Keys: x.keys})
				row += x.queries
			}
			if x.queries == 1 {
				mostGEMVRows += x.sequences
			}
		}
		for _, rows := range []attn.DType{attn.Float16, attn.Float32} {
			g.QueryType = rows
			p := &Plan{engine: &Engine{blocks: 132}}
			of := prefillOfTable(c.dim, hopper)
			if !slices.ContainsFunc(c.groups, func(x group) bool { return x.queries*g.Group() >= prefillRows }) {
				of = prefillKernels{}
			}
			who := p.divide(g, seqs, of)
			if both := who.few > 0; both != c.both || both && (who.few != mostGEMVRows || who.queries != 1 || who.blocks < 1 || who.blocks > 131 || who.first() == nil) {
				t.Errorf("%+v, queries of %v: %d sequences of %d queries, and %d blocks for the others", c, rows, who.few, who.queries, who.blocks)
			}
			t.Logf("%+v, queries of %v: %d of 132 blocks for prefill, done at %d", c.groups, rows, who.blocks, who.time)
			p.fused = true
			if who = p.divide(g, seqs, of); who.few > 0 {
				t.Errorf("%+v: both kinds of kernels, and attention is a part of a launch that does more", c)
			}
			for _, gpus := range []versions{largeShared, smallShared} {
				for _, take := range []choice{takeFastest, takePrefill, takeBoth} {
					p := &Plan{engine: &Engine{blocks: 132, choice: take}}
					of := prefillOfTable(c.dim, gpus)
					switch who = p.divide(g, seqs, of); {
					case who.few > 0:
						t.Errorf("%+v, kernels of %v: both kinds, and they don't run beside each other", c, gpus)
					case take != takeFastest && (who.first() == nil || who.blocks != 132*who.first().tile.blocks || p.prefillGrid != who.blocks):
						t.Errorf("%+v, kernels of %v: %d of %d blocks", c, gpus, who.blocks, p.prefillGrid)
					}
				}
			}
		}
	}
}

// prefillOfTable returns the prefill kernels over keys of float16 for some GPUs.
func prefillOfTable(dim int, gpus versions) (of prefillKernels) {
	for i := range table {
		switch k := &table[i]; {
		case k.kv != attn.Float16 || k.capability != gpus || !slices.Contains(k.dims, dim):
		case k.parts == 0 || k.scored:
		case k.same() && of.same != nil: // it rounds, for problems with Mixed
		case k.same():
			of.same = k
		default:
			of.precise = k
		}
	}
	return of
}
