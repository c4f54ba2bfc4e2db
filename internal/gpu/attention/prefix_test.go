package attention

import (
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
)

// forkShape draws sequences that may be forks. scored: with all features that prefixes allow.
func forkShape(rng *rand.Rand, longest int, scored bool) reftest.Shape {
	s := reftest.Shape{KVHeads: enginetest.Pick(rng, 1, 2), Dim: enginetest.Pick(rng, headDims...), Mask: attn.Mask{Causal: rng.IntN(4) > 0}}
	s.Heads, s.ValueDim = s.KVHeads*enginetest.Pick(rng, 1, 2, 4, 5, 8, 17), s.Dim
	if rng.IntN(4) == 0 { // of no kernel's width
		s.Dim, s.ValueDim = enginetest.Pick(rng, 40, 48, 72, 112, 160, 248), enginetest.Pick(rng, 24, 48, 72, 112, 160, 192)
		if rng.IntN(2) == 0 {
			s.ValueDim = s.Dim
		}
	}
	for range enginetest.Pick(rng, 2, 3, 5, 9) {
		queries := enginetest.Pick(rng, 0, 1, 1, 1, 1, 1, 3, 20)
		s.Queries, s.Keys = append(s.Queries, queries), append(s.Keys, queries+rng.IntN(longest))
	}
	if !scored {
		return s
	}
	switch rng.IntN(8) {
	case 6, 7:
		s = reftest.RandomPrefixMods(rng, s)
	case 0:
		s.SoftCap = 1 + rng.Float64()
	case 1:
		s = reftest.RandomSinks(rng, s)
	case 2:
		s = reftest.RandomTrees(rng, s)
	}
	return s
}

// testPrefixes: sequences with common pages attend to them once, with the results of separate attention. Pages in no
// table are NaN. scored: also with trees, soft caps and sinks.
func testPrefixes(t *testing.T, m *machine, n, longest int, scored bool) {
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	shared, many, beside, sloped, windowed, spread := 0, 0, 0, 0, 0, 0
	all := func() bool {
		return shared > n/8 && (spread > 0 || m.engine.info.Capability < 90 || n < 40) && (many > 0 && beside > 0 || !m.runsBeside()) && (!scored || n < 40 || sloped > 0 && windowed > 0)
	}
	for i := range reftest.AtLeast(n, all) {
		shape := forkShape(rng, longest, scored)
		in := enginetest.Pick(rng, reftest.AllInputs...)
		kv := enginetest.Pick(rng, attn.Float16, attn.BFloat16, attn.Float32)
		p := m.newProblem(t, rng, in, options{shape: &shape, kv: kv, forks: true, page: enginetest.Pick(rng, 1, 3, 16, 16, 33), mixed: rng.IntN(4) == 0, apart: shape.Dim != shape.ValueDim})
		if p.geometry.Tree = attn.HasTrees(p.seqs); rng.IntN(3) == 0 {
			p.geometry.QueryType = p.query // as in graphs
		}
		m.run(t, plan, p)
		if plan.form.sharing.on() {
			if plan.form.spread.on() || plan.form.kernel.packed {
				spread++
			}
			if shared++; plan.prefixes.plan.form.prefill.first() != nil {
				many++
			}
			if shape.Slopes != nil {
				sloped++
			}
			if shape.Window > 0 {
				windowed++
			}
			if plan.prefixes.plan.form.beside {
				beside++
			}
		} else if slices.ContainsFunc(p.forks, func(f reftest.Fork) bool { return f.Pages > 0 }) && plan.prefixes.saved > 0 {
			t.Errorf("%v: %d keys are read again", p, plan.prefixes.saved)
		}
		p.check(t)
		if t.Failed() {
			t.Fatalf("case %d, %v inputs: %v, forks %v", i, in, p, p.forks)
		}
		if plan.form.sharing.on() && i%3 == 0 { // a second Build: the lists for prefixes are kept
			noError(t, plan.Build(p.geometry, p.seqs, p.rows))
			if plan.prefixes.plan.state != uploaded {
				t.Errorf("%v: the plan of prefixes was built again", p)
			}
			m.Poison(t, &p.o)
			m.Poison(t, &p.lse)
			m.run(t, plan, p)
			p.check(t)
		}
		p.close(t)
	}
	if !all() {
		t.Errorf("%d problems with prefixes, %d by prefill kernels, %d of these beside decode kernels, %d with slopes, %d with windows, %d of spread heads", shared, many, beside, sloped, windowed, spread)
	}
	noError(t, plan.Close())
}

// testCutPrefixes: with slopes, the pieces of a prefix for prefill kernels keep their distances from rows.
func testCutPrefixes(t *testing.T, m *machine, n int) {
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	cut := 0
	for range reftest.AtLeast(n, func() bool { return cut > n/2 }) {
		shape := reftest.Shape{Heads: 8, KVHeads: 2, Dim: enginetest.Pick(rng, 64, 128), Mask: attn.Mask{Causal: true}}
		shape.ValueDim = shape.Dim
		for h := range shape.Heads {
			shape.Slopes = append(shape.Slopes, 0.3/float64(1+h))
		}
		for range 6 {
			shape.Queries, shape.Keys = append(shape.Queries, 1+rng.IntN(2)), append(shape.Keys, 700+rng.IntN(40))
		}
		p := m.newProblem(t, rng, reftest.Normal, options{shape: &shape, kv: enginetest.Pick(rng, attn.Float16, attn.BFloat16), forks: true, page: 16})
		m.run(t, plan, p)
		if x := &plan.prefixes; plan.form.sharing.on() && len(x.of) > len(slices.Compact(slices.Clone(x.of))) {
			cut++
		}
		if p.check(t); t.Failed() {
			t.Fatalf("%v, forks %v, pieces of %v", p, p.forks, plan.prefixes.of)
		}
		p.close(t)
	}
	if cut <= n/2 {
		t.Errorf("%d of %d problems have prefixes that are cut", cut, n)
	}
	noError(t, plan.Close())
}

// testPrefixWindows: forks of any depth, with a window that hides keys, attend together to the prefix keys that are
// visible to all. Keys that are visible to no sequence are NaN. Some problems use prefill kernels.
func testPrefixWindows(t *testing.T, m *machine, n, longest int) {
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	few, many, sinks := 0, 0, 0 // problems with cut sequences
	enough := func() bool { return few >= n && many >= n-1 && sinks >= n/2 }
	for i := range reftest.AtLeast(n, enough) {
		queries := []int{1, 1, 3}
		if n > 1 {
			queries, m.engine.choice = append(queries, 20), enginetest.Pick(rng, takeFastest, takePrefill, takeBoth)
		}
		shape := reftest.Shape{KVHeads: enginetest.Pick(rng, 1, 2), Dim: enginetest.Pick(rng, headDims...), Mask: attn.Mask{Causal: rng.IntN(4) > 0, Window: longest/4 + rng.IntN(longest*3/4)}}
		shape.Heads, shape.ValueDim = shape.KVHeads*enginetest.Pick(rng, 1, 4, 8), shape.Dim
		for range enginetest.Pick(rng, 3, 5) {
			n := enginetest.Pick(rng, queries...)
			shape.Queries, shape.Keys = append(shape.Queries, n), append(shape.Keys, n+longest*3/4+rng.IntN(longest/4))
		}
		if rng.IntN(2) == 0 {
			shape.SinkTokens = 1 + rng.IntN(40)
		}
		if rng.IntN(3) == 0 {
			shape.SoftCap = 1 + rng.Float64()
		}
		if rng.IntN(3) == 0 {
			shape = reftest.RandomSinks(rng, shape)
		}
		in := enginetest.Pick(rng, reftest.AllInputs...)
		kv := enginetest.Pick(rng, attn.Float16, attn.BFloat16, attn.Float32)
		p := m.newProblem(t, rng, in, options{shape: &shape, kv: kv, forks: true, page: enginetest.Pick(rng, 1, 3, 16)})
		m.run(t, plan, p)
		if plan.form.sharing.on() && slices.ContainsFunc(plan.cuts.data, func(cut int32) bool { return cut > 0 }) {
			if plan.form.prefill.first() != nil {
				many++
			} else {
				few++
			}
			if shape.SinkTokens > 0 {
				sinks++
			}
		}
		if p.check(t); t.Failed() {
			t.Fatalf("case %d, %v inputs: %v, forks %v, cuts %v", i, in, p, p.forks, plan.cuts.data)
		}
		p.close(t)
	}
	if m.engine.choice = takeFastest; !enough() {
		t.Errorf("%d problems with cuts by decode kernels, %d for many, %d with sink tokens", few, many, sinks)
	}
	noError(t, plan.Close())
}

// testPrefixesRecorded: launches that were captured once serve every later step, with any shared prefixes. scored: some
// steps also have slopes or a window, which hides keys of later steps.
func testPrefixesRecorded(t *testing.T, m *machine, n, longest int, scored bool) {
	rng := reftest.Rand(t)
	for i, kv := range []attn.DType{attn.Float16, attn.BFloat16, attn.Float32} {
		for _, shares := range []bool{true, false} {
			cut, hides := 0, false
			for range reftest.AtLeast(1, func() bool { return cut > 0 || !hides }) {
				const sequences = 6
				mods := reftest.Shape{Heads: 16, Keys: []int{longest}}
				if scored && i == 0 {
					mods.Window, mods.SinkTokens = 1, rng.IntN(20)
				} else if scored && rng.IntN(2) == 0 {
					mods = reftest.RandomPrefixMods(rng, mods)
				}
				hides = shares && mods.Window > 0 && mods.Slopes == nil
				s := m.forkSteps(t, rng, n, sequences, longest, kv, shares, []int{16, 3, 1}[i], mods)
				first := s.all[0]
				plan := m.engine.NewPlan()
				noError(t, plan.Reserve(Capacity{Sequences: sequences, Rows: first.rows, Pages: len(first.pool[0]) / kv.Size() / first.geometry.Pages.Planes[0].At.Page}))
				s.load(t, 0)
				m.run(t, plan, first)
				if plan.form.sharing.on() != shares {
					t.Fatalf("%v shares prefixes: %v", first, !shares)
				}
				plan.Recorded()
				m.replay(t, plan, s, func(int, *problem) {
					if len(plan.cuts.data) > 0 && slices.Max(plan.cuts.data) > 0 {
						cut++
					}
				})
				first.close(t)
				noError(t, plan.Close())
			}
			if hides && cut == 0 {
				t.Errorf("keys of %v: a window hides keys of no step", kv)
			}
		}
	}
}

// forkSteps returns steps of a decoding graph whose sequences are forks. If shares is true, the first step has the
// longest prefixes. The last step has none. mods has slopes for as many heads as there may be, and a window. In steps
// that share, the window hides keys of a prefix in all but the first and the last step.
func (m *machine) forkSteps(t testing.TB, rng *rand.Rand, n, sequences, longest int, kv attn.DType, shares bool, page int, mods reftest.Shape) *steps {
	same := &decode{pageTokens: page, rows: 3*sequences + 2, pages: sequences*attn.Ceil(longest+1, page) + 3}
	heads, dim := enginetest.Pick(rng, 2, 8), enginetest.Pick(rng, 64, 128)
	begin, least := longest, 1
	if len(mods.Slopes) > 0 {
		mods.Slopes = mods.Slopes[:2*heads]
	}
	hides := shares && mods.Window > 0
	if hides {
		begin = longest * 3 / 4
		mods.Window, least = begin, attn.Ceil(longest-begin, page)+1
	}
	return m.stepsOf(t, n, func(i int) *problem {
		shape := reftest.Shape{Heads: 2 * heads, KVHeads: 2, Dim: dim, ValueDim: dim, Mask: attn.Mask{Causal: true, Window: mods.Window, SinkTokens: mods.SinkTokens}, Slopes: mods.Slopes}
		for range sequences {
			keys := 1 + rng.IntN(longest)
			if i == 0 {
				keys = begin - rng.IntN(20)
			} else if hides {
				keys = longest - rng.IntN(20)
			}
			shape.Queries, shape.Keys = append(shape.Queries, 1), append(shape.Keys, keys)
		}
		o := options{shape: &shape, kv: kv, decode: same, forks: i < n-1 && (i > 0 || shares), page: page}
		for {
			p := m.newProblem(t, rng, reftest.Normal, o)
			if !o.forks || !hides && (i > 0 || !shares) || slices.ContainsFunc(p.forks, func(f reftest.Fork) bool { return f.Pages >= least }) {
				return p
			}
			p.close(t) // no sequence is a fork by chance
		}
	})
}
