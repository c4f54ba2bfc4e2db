package attention

import (
	"bytes"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
)

// testRandom runs random problems: types, head dims, groups, pages, ragged lengths, new tokens, schedules.
func testRandom(t *testing.T, m *machine, n int, o options) {
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	types := []attn.DType{attn.Float16, attn.BFloat16, attn.Float32}
	for i := range n {
		o.kv, o.dense, o.shape = types[i%3], rng.IntN(3) == 0, nil
		in := enginetest.Pick(rng, reftest.AllInputs...)
		p := m.newProblem(t, rng, in, o)
		p.randomSchedule()
		p.geometry.Unfused = p.geometry.Unfused && !o.scored
		m.run(t, plan, p)
		if k := plan.form.kernel; o.scored != (k.scored && k.needs == 0) {
			t.Fatalf("%v goes to %v", p, plan.form.kernel.entries)
		}
		p.check(t)
		if t.Failed() {
			t.Fatalf("case %d, %v inputs: %v, schedule %+v", i, in, p, p.geometry)
		}
		p.close(t)
	}
	noError(t, plan.Close())
}

func (p *problem) randomSchedule() {
	g := &p.geometry
	g.Policy = lean.Policy{Kind: lean.Kind(p.rng.IntN(3)), Splits: 1 + p.rng.IntN(7)}
	g.TileTokens = enginetest.Pick(p.rng, 0, 0, 1, 32, 33, 64, 100, 128, 512)
	g.Workers = enginetest.Pick(p.rng, 0, 0, 0, 1, 2, 7, 1000)
	g.Unfused = p.rng.IntN(6) == 0
}

// testSchedules: every schedule of one problem is correct.
func testSchedules(t *testing.T, m *machine, longest int) {
	rng := reftest.Rand(t)
	shape := reftest.Shape{Heads: 8, KVHeads: 2, Dim: 64, ValueDim: 64, Queries: []int{1, 0, 3, 1, 9}, Keys: []int{longest, 30, 129, 0, longest / 2}, Mask: attn.Mask{Causal: true}}
	plan := m.engine.NewPlan()
	turn := rng.IntN(2)
	for _, dense := range []bool{true, false} {
		p := m.newProblem(t, rng, reftest.Peaked, options{shape: &shape, kv: attn.Float16, dense: dense})
		for _, policy := range []lean.Policy{{}, {Kind: lean.PerHead}, {Kind: lean.FixedSplit, Splits: 1}, {Kind: lean.FixedSplit, Splits: 3}, {Kind: lean.FixedSplit, Splits: 100}} {
			turn++
			for i, workers := range []int{0, 1, 3, -1} {
				if m.Few(t) && (turn+i)%2 == 0 { // five policies: half of the numbers with dense operands, the others with pages
					continue
				}
				p.geometry.Policy, p.geometry.Workers, p.geometry.Unfused = policy, max(workers, 0), workers < 0
				m.Poison(t, &p.o)
				m.Poison(t, &p.lse)
				m.run(t, plan, p)
				p.check(t)
			}
		}
		p.close(t)
	}
	noError(t, plan.Close())
}

// testPages runs all sizes of pages that divide chunks, that are multiples of chunks, and others. Powers of two of
// tokens have kernels of their own.
func testPages(t *testing.T, m *machine, longest int) {
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	for i, page := range []int{1, 2, 3, 4, 8, 16, 16, 16, 16, 32, 48, 64, 64, 64, 64, 128, 512} {
		dim, heads := enginetest.Pick(rng, 64, 128), enginetest.Pick(rng, 4, 8, 12)
		if page == 16 || page == 64 { // once with the kernels for pages
			dim, heads = []int{64, 128}[i/2%2], enginetest.Pick(rng, 4, 8)
		}
		shape := reftest.Shape{Heads: heads, KVHeads: 2, Dim: dim, ValueDim: dim, Queries: []int{1, 1, 2}, Keys: []int{longest + rng.IntN(100), 60 + rng.IntN(9), longest/2 + rng.IntN(100)}, Mask: attn.Mask{Causal: true}}
		p := m.newProblem(t, rng, enginetest.Pick(rng, reftest.Normal, reftest.Peaked), options{shape: &shape, kv: []attn.DType{attn.Float16, attn.BFloat16}[i%2], page: page})
		all := []int{0, 1, 3}
		if m.Few(t) {
			all = []int{enginetest.Pick(rng, all...)}
		}
		for _, workers := range all {
			p.geometry.Workers = workers
			m.Poison(t, &p.o)
			m.Poison(t, &p.lse)
			m.run(t, plan, p)
			p.check(t)
			if t.Failed() {
				t.Fatalf("%v, %d workers", p, workers)
			}
		}
		p.close(t)
	}
	noError(t, plan.Close())
}

// testScores runs random problems with masks other than causal and score modifications, and windows in pages of all
// sizes.
func testScores(t *testing.T, m *machine, n int, o options) {
	o.scored = true
	testRandom(t, m, n, o)
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	for i, page := range []int{1, 3, 16, 16, 16, 16, 48, 64, 128} {
		dim, window := []int{64, 128}[i%2], enginetest.Pick(rng, 1, 16, 63, 64, 65, 200)
		shape := reftest.Shape{Heads: enginetest.Pick(rng, 2, 8, 12), KVHeads: 2, Dim: dim, ValueDim: dim, Queries: []int{1, 1, 5, 30}, Keys: []int{o.longest + rng.IntN(100), 60 + rng.IntN(9), o.longest/2 + rng.IntN(100), 40}, Mask: attn.Mask{Causal: i%3 != 0, Window: window}}
		if rng.IntN(3) > 0 {
			shape = reftest.RandomSinks(rng, shape)
		}
		if i%2 == 1 {
			shape.SinkTokens = enginetest.Pick(rng, 1, 4, 16, 17, 63, 64, 65, 130)
		}
		p := m.newProblem(t, rng, enginetest.Pick(rng, reftest.Normal, reftest.Peaked), options{shape: &shape, kv: []attn.DType{attn.Float16, attn.BFloat16}[i/2%2], page: page})
		p.geometry.Workers = enginetest.Pick(rng, 0, 1, 3)
		p.geometry.Policy = enginetest.Pick(rng, lean.Policy{}, lean.Policy{}, lean.Policy{Kind: lean.FixedSplit, Splits: 3}, lean.Policy{Kind: lean.PerHead})
		m.run(t, plan, p)
		p.check(t)
		if t.Failed() {
			t.Fatalf("%v, %d workers", p, p.geometry.Workers)
		}
		p.close(t)
	}
	noError(t, plan.Close())
}

// testTrees runs random trees, with and without score modifications, beside sequences without trees. It also runs
// chains, which equal no tree.
func testTrees(t *testing.T, m *machine, n int, o options) {
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	for i := range n {
		s := reftest.Shape{KVHeads: enginetest.Pick(rng, 1, 2), Dim: enginetest.Pick(rng, headDims...)}
		s.Heads, s.ValueDim = s.KVHeads*enginetest.Pick(rng, 1, 2, 4, 5, 8, 17), s.Dim
		for range enginetest.Pick(rng, 1, 2, 3) {
			queries := enginetest.Pick(rng, 1, 2, 3, 7, 16, 1+rng.IntN(attn.MaxTree), attn.MaxTree)
			if s.Heads*s.Dim*queries > o.work {
				queries = 1 + rng.IntN(3)
			}
			s.Queries, s.Keys = append(s.Queries, queries), append(s.Keys, queries+enginetest.Pick(rng, 0, 1, 15, 62, 64, rng.IntN(o.longest)))
		}
		if s = reftest.RandomTrees(rng, s); rng.IntN(4) == 0 {
			s.SoftCap = 2
		}
		if rng.IntN(4) == 0 {
			s = reftest.RandomBias(rng, s, slices.Max(s.Keys)+1)
		}
		o.shape, o.kv, o.dense = &s, gpu.Types[i%len(gpu.Types)], rng.IntN(3) == 0
		p := m.newProblem(t, rng, enginetest.Pick(rng, reftest.AllInputs...), o)
		p.randomSchedule()
		p.geometry.Unfused = false
		m.run(t, plan, p)
		if !plan.form.kernel.scored || plan.kernelOf(p.operands(), false).features&attn.Trees == 0 {
			t.Fatalf("%v goes to %v", p, plan.Kernels())
		}
		if p.check(t); t.Failed() {
			t.Fatalf("case %d: %v, schedule %+v", i, p, p.geometry)
		}

		// Once memory suffices for all trees, launches are the same with and without trees. A chain gives the result
		// without a tree.
		var generation uint64
		var bits [2][]byte
		for j := 1; j >= 0; j-- {
			for k := range p.seqs {
				if p.seqs[k].Tree = nil; j == 1 {
					p.seqs[k].Tree = chain(p.seqs[k].Queries)
				}
			}
			m.run(t, plan, p)
			bits[j] = append(enginetest.Read(t, &p.o), enginetest.Read(t, &p.lse)...)
			if j == 1 {
				generation = plan.Generation()
			}
		}
		if !bytes.Equal(bits[0], bits[1]) {
			t.Fatalf("%v: a chain is something else", p)
		}
		if g := plan.Generation(); g != generation {
			t.Errorf("%v: generation %d with trees, %d without them", p, generation, g)
		}
		p.close(t)
	}
	noError(t, plan.Close())
}

func chain(n int) attn.Tree {
	parents := make([]int, n)
	for i := range parents {
		parents[i] = i - 1
	}
	t, _ := attn.TreeOf(parents)
	return t
}

// testRepeats: every run has the same bits, also with another plan.
func testRepeats(t *testing.T, m *machine, n, work, longest int) {
	rng := reftest.Rand(t)
	for _, kv := range []attn.DType{attn.Float16, attn.BFloat16, attn.Float32} {
		p := m.newProblem(t, rng, reftest.Normal, options{kv: kv, work: work, longest: longest})
		plan := m.engine.NewPlan()
		var out, lse []byte
		for i := range n {
			m.Poison(t, &p.o)
			m.Poison(t, &p.lse)
			if i == n/2 {
				noError(t, plan.Close())
				plan = m.engine.NewPlan()
			}
			m.run(t, plan, p)
			if i == 0 {
				out, lse = enginetest.Read(t, &p.o), enginetest.Read(t, &p.lse)
				p.check(t)
			} else if !bytes.Equal(out, enginetest.Read(t, &p.o)) || !bytes.Equal(lse, enginetest.Read(t, &p.lse)) {
				t.Fatalf("%v: run %d differs", p, i)
			}
		}
		noError(t, plan.Close())
		p.close(t)
	}
}

// testAppend: new rows are rounded to the cache's type, and nothing else is written. New rows may have more KV heads
// than the plan.
func testAppend(t *testing.T, m *machine) {
	rng := reftest.Rand(t)
	types := []attn.DType{attn.Float16, attn.BFloat16, attn.Float32}
	plan := m.engine.NewPlan()
	for i := range 27 {
		kv, newType := types[i%3], types[i/3%3]
		shape := reftest.Shape{Heads: 3, KVHeads: 3, Dim: headDims[i%len(headDims)], Queries: []int{1, 0, 4, 33}, Keys: []int{1 + rng.IntN(50), 3, 4 + rng.IntN(20), 40}}
		shape.ValueDim = shape.Dim
		p := m.newProblem(t, rng, reftest.Normal, options{shape: &shape, kv: kv})
		g := &p.geometry
		// Numbers have more bits than any 16-bit type.
		heads := g.KVHeads + i%4
		width := heads * g.Dim
		var new [2][]byte
		for j := range new {
			new[j] = enginetest.Poisoned(p.rows*width, newType)
			for _, s := range p.seqs {
				for r := s.Row * width; r < (s.Row+s.Queries)*width; r++ {
					enginetest.Put(new[j], r, newType, rng.NormFloat64())
				}
			}
		}
		newK, newV := m.Put(t, new[0], newType), m.Put(t, new[1], newType)
		noError(t, p.k.Buffer.Upload(p.k.Offset, p.pool[0]))
		noError(t, p.v.Buffer.Upload(p.v.Offset, p.pool[1]))
		noError(t, plan.Build(p.geometry, p.seqs, p.rows))
		noError(t, plan.Upload(m.Stream))
		// There is no memory after the last row.
		newK.Len, newV.Len = newK.Len-(heads-g.KVHeads)*g.Dim, newV.Len-(heads-g.KVHeads)*g.Dim
		if heads == g.KVHeads {
			noError(t, plan.Append(m.Stream, attn.InPlanes(p.k, p.v), newK, newV))
		} else {
			noError(t, plan.AppendRows(m.Stream, attn.InPlanes(p.k, p.v), newK, newV, heads))
		}
		m.Settle(t)
		for j, got := range [][]byte{enginetest.Read(t, &p.k), enginetest.Read(t, &p.v)} {
			want := p.pool[j]
			for _, s := range p.seqs {
				for token := range s.Queries {
					key := s.Keys - s.Queries + token
					for h := range g.KVHeads {
						for c := range g.Dim {
							to := int(s.Pages[key/g.PageTokens])*g.Pages.Planes[0].At.Page + h*g.Pages.Planes[0].At.Head + key%g.PageTokens*g.Dim + c
							enginetest.Put(want, to, kv, enginetest.Get(new[j], (s.Row+token)*width+h*g.Dim+c, newType))
						}
					}
				}
			}
			if !bytes.Equal(got, want) {
				t.Fatalf("%v to %v: %v: not what rounding gives", newType, kv, p)
			}
		}
		for _, x := range []gpu.Memory{newK, newV} {
			noError(t, x.Buffer.Close())
		}
		p.close(t)
	}
	noError(t, plan.Close())
}

// testManyTiles runs more than Ring::MANY LeanTiles. From that number on a thread block has more chunks in flight, as
// many as pages and the head dim allow.
func testManyTiles(t *testing.T, m *machine) {
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	for i, dim := range []int{64, 128} { // dims with kernels for pages
		for j, o := range []options{{dense: true}, {page: 16}, {page: 48}, {page: 64}} {
			heads := []int{1, 6}[(i+j)%2]
			o.shape = &reftest.Shape{Heads: heads, KVHeads: 1, Dim: dim, ValueDim: dim, Queries: []int{1}, Keys: []int{161*defaultTile + rng.IntN(100)}}
			o.kv = attn.Float16
			p := m.newProblem(t, rng, reftest.Normal, o)
			p.geometry.Workers = 1
			m.run(t, plan, p)
			if n := plan.works.data[0].tiles; n <= 160 {
				t.Errorf("%d LeanTiles", n)
			}
			p.check(t)
			p.close(t)
		}
	}
	noError(t, plan.Close())
}

var manyRows = []int{16, 8, 12, 20, 9, 5} // query heads of a group; with 20, every second output tile has 4 rows

// testManyRows: several thread blocks share output tiles of up to 16 rows, with one or several parts each.
func testManyRows(t *testing.T, m *machine, keys int, groups ...int) {
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	for _, group := range groups {
		for _, kv := range []attn.DType{attn.Float16, attn.BFloat16, attn.Float32} {
			shape := reftest.Shape{Heads: 2 * group, KVHeads: 2, Dim: 128, ValueDim: 128, Queries: []int{1, 1}, Keys: []int{keys, keys - rng.IntN(min(keys, 128))}}
			p := m.newProblem(t, rng, reftest.Peaked, options{shape: &shape, kv: kv})
			merged := false
			for _, policy := range []lean.Policy{{}, {Kind: lean.FixedSplit, Splits: 2}, {Kind: lean.FixedSplit, Splits: 3}} {
				for _, workers := range []int{0, 3} {
					p.geometry.Policy, p.geometry.Workers = policy, workers
					var first []byte
					runs := 2 // whose results have the same bits
					if m.Few(t) && rng.IntN(4) > 0 {
						runs = 1
					}
					for range runs {
						m.Poison(t, &p.o)
						m.Poison(t, &p.lse)
						m.run(t, plan, p)
						p.check(t)
						out := enginetest.Read(t, &p.o)
						if t.Failed() || first != nil && !bytes.Equal(first, out) {
							t.Fatalf("%v: %+v, %d workers", p, policy, workers)
						}
						first = out
					}
					merged = merged || plan.works.data[0].wholeSeq == together
				}
			}
			if m.engine.hasEpilogue() && !merged {
				t.Errorf("%v: no blocks merge together", p)
			}
			p.close(t)
		}
	}
	noError(t, plan.Close())
}

// testRow: output tiles of one row by the kernels for long launches, with any lengths and with one or several parts of
// an output tile.
func testRow(t *testing.T, m *machine, cases, longest int) {
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	m.engine.anyRow = true
	seen := map[string]int{}
	for range reftest.AtLeast(cases, func() bool { return seen["in pages"] > 0 && seen["together"] > 0 && seen["whole"] > 0 }) {
		shape := reftest.Shape{KVHeads: 1 + rng.IntN(4), Dim: 64, ValueDim: 64, Mask: attn.Mask{Causal: rng.IntN(2) == 0}}
		shape.Heads = shape.KVHeads
		for range 1 + rng.IntN(4) {
			shape.Queries = append(shape.Queries, enginetest.Pick(rng, 0, 1, 1, 1))
			shape.Keys = append(shape.Keys, enginetest.Pick(rng, 0, 1, 63, 64, 65, 255, 256, 257, 319, 513, 1025, rng.IntN(longest)))
		}
		shape.Queries[0] = 1
		long := rng.IntN(4) == 0 // one of many sequences: its output tiles are smaller than an even share and stay whole
		if long {
			short := func() int { return 1 + rng.IntN(64) }
			shape.Heads, shape.KVHeads, shape.Queries, shape.Keys = 4, 4, []int{1, 1, 1, 1}, []int{500 + rng.IntN(1000), short(), short(), short()}
		}
		o := options{shape: &shape, kv: enginetest.Pick(rng, gpu.Halves...), dense: rng.IntN(4) == 0, page: enginetest.Pick(rng, 0, 16, 48, 64, 512)}
		p := m.newProblem(t, rng, enginetest.Pick(rng, reftest.Normal, reftest.Peaked), o)
		p.geometry.Workers = enginetest.Pick(rng, 0, 0, 1, 2, 3)
		if long {
			p.geometry.Workers = 2 + rng.IntN(2)
		}
		var first []byte
		for range 2 {
			m.Poison(t, &p.o)
			m.Poison(t, &p.lse)
			m.run(t, plan, p)
			p.check(t)
			out := enginetest.Read(t, &p.o)
			if k := plan.form.kernel; t.Failed() || !k.row || first != nil && !bytes.Equal(first, out) {
				t.Fatalf("%v by %v", p, k.entries)
			}
			first = out
		}
		for _, w := range plan.works.data {
			switch {
			case w.tiles == 0:
			case w.wholeSeq == together:
				seen["together"]++
			case w.wholeTiles > 0:
				seen["whole"]++
			}
		}
		if plan.form.kernel.paged {
			seen["in pages"]++
		}
		p.close(t)
	}
	for _, what := range []string{"in pages", "together", "whole"} {
		if seen[what] == 0 {
			t.Errorf("none of %d cases and more is %s", cases, what)
		}
	}
	// Shorter launches, more rows, and requested schedules use the other kernels.
	m.engine.anyRow = false
	shape := reftest.Shape{Heads: 2, KVHeads: 2, Dim: 64, ValueDim: 64, Queries: []int{1}, Keys: []int{300}}
	p := m.newProblem(t, rng, reftest.Normal, options{shape: &shape, kv: attn.Float16})
	for _, change := range []func(){func() {}, func() { m.engine.anyRow = true; p.geometry.Policy = lean.Policy{Kind: lean.PerHead} }, func() { p.geometry.Policy = lean.Policy{}; p.geometry.KVHeads = 1 }} {
		change()
		noError(t, plan.Build(p.geometry, p.seqs, p.rows))
		if k := plan.form.kernel; k.row {
			t.Errorf("%+v: %v", p.geometry, k.entries)
		}
	}
	m.engine.anyRow = false
	p.close(t)
	noError(t, plan.Close())
}

// testLargeQueries: float32 queries exceed the exponents of 16-bit keys, and the scale gives them common scores.
func testLargeQueries(t *testing.T, m *machine) {
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	const most = 0x1p116
	for _, kv := range []attn.DType{attn.Float16, attn.BFloat16} {
		for _, by := range []float64{most, 1 / most} {
			shape := reftest.Shape{Heads: 3, KVHeads: 1, Dim: 64, ValueDim: 64, Queries: []int{1, 7}, Keys: []int{300, 90}}
			var p *problem
			for p = nil; p == nil || p.query != attn.Float32; {
				if p != nil {
					p.close(t)
				}
				p = m.newProblem(t, rng, reftest.Normal, options{shape: &shape, kv: kv})
			}
			q := enginetest.Read(t, &p.q)
			for i := range p.q.Len {
				enginetest.Put(q, i, attn.Float32, enginetest.Get(q, i, attn.Float32)*by)
			}
			noError(t, p.q.Buffer.Upload(p.q.Offset, q))
			p.geometry.Scale /= by
			m.run(t, plan, p)
			p.check(t)
			p.close(t)
		}
	}
	noError(t, plan.Close())
}

// testNeighbours: with one thread block a head, a sequence's bits do not depend on the rest of its batch.
func testNeighbours(t *testing.T, m *machine) {
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	for _, kv := range []attn.DType{attn.Float16, attn.BFloat16, attn.Float32} {
		shape := reftest.Shape{Heads: 6, KVHeads: 3, Dim: 64, ValueDim: 64, Queries: []int{1, 2, 1, 5, 1}, Keys: []int{700, 33, 1500, 260, 95}}
		p := m.newProblem(t, rng, reftest.Normal, options{shape: &shape, kv: kv})
		p.geometry.Policy = lean.Policy{Kind: lean.PerHead}
		p.geometry.Workers = 2 // a thread block has several heads of several sequences
		m.run(t, plan, p)
		p.check(t)
		together := enginetest.Read(t, &p.o)
		all := p.seqs
		for _, s := range all {
			p.seqs = []attn.Sequence{s}
			m.run(t, plan, p)
			width := p.Heads * p.Dim * p.out.Size()
			rows := func(x []byte) []byte { return x[s.Row*width : (s.Row+s.Queries)*width] }
			if !bytes.Equal(rows(enginetest.Read(t, &p.o)), rows(together)) {
				t.Errorf("%v: the sequence at row %d has other bits alone", p, s.Row)
			}
		}
		p.close(t)
	}
	noError(t, plan.Close())
}
