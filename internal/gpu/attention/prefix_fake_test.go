//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
)

// Prefixes are not shared if they are too short, if a window hides most of their keys, or if a schedule is requested.
func TestFakePrefixesNotTaken(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 4, 227<<10)
	shape := reftest.Shape{Heads: 2, KVHeads: 1, Dim: 64, ValueDim: 64, Queries: []int{1, 1}, Keys: []int{100, 100}, Mask: attn.Mask{Causal: true}}
	p := m.newProblem(t, reftest.Rand(t), reftest.Normal, options{shape: &shape, kv: attn.Float16, page: 16})
	p.seqs[1].Pages = append(append([]int32(nil), p.seqs[0].Pages[:6]...), p.seqs[1].Pages[6:]...)
	for name, x := range map[string]struct {
		change func(g *attn.Problem)
		rows   int
		takes  bool
	}{
		"plain":           {func(*attn.Problem) {}, p.rows, true},
		"a soft cap":      {func(g *attn.Problem) { g.Cap = 2 }, p.rows, true},
		"sinks":           {func(g *attn.Problem) { g.Sinks = true }, p.rows, true},
		"trees":           {func(g *attn.Problem) { g.Tree = true }, p.rows, true},
		"a window":        {func(g *attn.Problem) { g.Window = 100 }, p.rows, true},
		"a narrow window": {func(g *attn.Problem) { g.Window = 99 }, p.rows, true},
		"a small window":  {func(g *attn.Problem) { g.Window = 20 }, p.rows, true},
		"a tiny window":   {func(g *attn.Problem) { g.Window = 19 }, p.rows, false},
		"slopes":          {func(g *attn.Problem) { g.Slopes = attn.NewSlopes([]float64{1, 2}) }, p.rows, true},
		"a bias":          {func(g *attn.Problem) { g.Bias = attn.Bias{Sequences: 1, Heads: 1, Queries: 1, Keys: 100} }, p.rows, false},
		"a schedule":      {func(g *attn.Problem) { g.Policy.Kind = lean.PerHead }, p.rows, false},
		"LeanTiles":       {func(g *attn.Problem) { g.TileTokens = 64 }, p.rows, false},
		"workers":         {func(g *attn.Problem) { g.Workers = 2 }, p.rows, false},
		"unfused":         {func(g *attn.Problem) { g.Unfused = true }, p.rows, false},
		"no new rows":     {func(*attn.Problem) {}, 0, false},
	} {
		g, plan := p.geometry, m.engine.NewPlan()
		x.change(&g)
		noError(t, plan.Build(g, p.seqs, x.rows))
		if plan.form.sharing.on() != x.takes {
			t.Errorf("%s: shares prefixes: %v", name, !x.takes)
		}
		noError(t, plan.Close())
	}
	m.engine.Eager = false
	plan := m.engine.NewPlan()
	noError(t, plan.Build(p.geometry, p.seqs, p.rows))
	if plan.form.sharing.on() {
		t.Error("a prefix of 96 keys is worth it")
	}
	long := []attn.Sequence{{Row: 0, Queries: 1}, {Row: 1, Queries: 1}, {Row: 2, Queries: 1}}
	key := p.geometry.KVHeads * tokenBytes(&p.geometry)
	// Three sequences share 16n keys and have one key each of their own: sharing reads a third, at cachedMore/cachedOf
	// times the time for each key.
	enough := attn.Ceil(2*prefixBytes/key+9, 16)
	for n, takes := range map[int]bool{enough: true, enough - 1: false} {
		pages := make([]int32, n+1)
		for i := range pages {
			pages[i] = int32(i % math.MaxInt16)
		}
		for i := range long {
			long[i].Keys, long[i].Pages = 16*n+1, append(append([]int32(nil), pages[:n]...), int32(i))
		}
		noError(t, plan.Build(p.geometry, long, 3))
		if plan.form.sharing.on() != takes {
			t.Errorf("%d pages: shares prefixes: %v", n, !takes)
		}
	}
	noError(t, plan.Close())
	p.close(t)
}

// If memory for prefixes runs out, the plan is unchanged.
func TestEmulatedPrefixesMemory(t *testing.T) {
	m, lib := emulatedDriver(t, 4)
	rng := reftest.Rand(t)
	alone := reftest.Shape{Heads: 4, KVHeads: 2, Dim: 64, ValueDim: 64, Queries: []int{1, 1, 1}, Keys: []int{70, 90, 100}, Mask: attn.Mask{Causal: true}}
	p := m.newProblem(t, rng, reftest.Normal, options{shape: &alone, kv: attn.Float16, page: 16})
	forked := p.seqs[2]
	forked.Pages = append(append([]int32(nil), p.seqs[1].Pages[:4]...), p.seqs[2].Pages[4:]...)
	forks := []attn.Sequence{p.seqs[0], p.seqs[1], forked}
	s := lib.State()
	for _, first := range []bool{true, false} { // true: the plan's own memory runs out; false: the memory of its plan of prefixes
		plan := m.engine.NewPlan()
		if !first {
			noError(t, plan.Build(p.geometry, forks, p.rows))
			noError(t, plan.prefixes.plan.Close())
			plan.prefixes.plan = nil
		}
		noError(t, plan.Build(p.geometry, p.seqs, p.rows))
		noError(t, plan.Upload(m.Stream))
		before := plan.Generation()
		s.FailIn("cuMemAlloc_v2", 2)
		wantError(t, "no memory", plan.Build(p.geometry, forks, p.rows), cuda.ErrOutOfMemory, "")
		s.FailIn("", 0)
		if plan.Generation() == before && plan.state != uploaded {
			t.Error("the plan has to be uploaded, and looks as before")
		}
		noError(t, plan.Upload(m.Stream))
		m.queue(t, plan, p)
		m.Settle(t)
		p.check(t)
		noError(t, plan.Build(p.geometry, forks, p.rows))
		if !plan.form.sharing.on() {
			t.Error("no sequences share prefixes")
		}
		noError(t, plan.Close())
	}
	p.close(t)
}

// A new plan for a step of a tree allocates nothing, for any shared prefixes.
func TestFakePrefixPlanAllocations(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 132, 227<<10)
	p := m.newProblem(t, reftest.Rand(t), reftest.Normal, options{shape: &reftest.Shape{Heads: 32, KVHeads: 8, Dim: 128, ValueDim: 128, Queries: []int{1}, Keys: []int{1}, Mask: attn.Mask{Causal: true}}, kv: attn.Float16, page: 16})
	for name, change := range map[string]func(g *attn.Problem){
		"plain":    func(*attn.Problem) {},
		"slopes":   func(g *attn.Problem) { g.Slopes = attn.NewSlopes(make([]float64, 32)) },
		"a window": func(g *attn.Problem) { g.Window = 4000 }, // hides keys from all
	} {
		g := p.geometry
		change(&g)
		seqs, pages := forkTree{{1, 4096}, {8, 1024}, {8, 320}}.sequences(16)
		plan := m.engine.NewPlan()
		noError(t, plan.Reserve(Capacity{Sequences: len(seqs), Rows: len(seqs), Pages: pages + 64*len(seqs)}))
		step := func() {
			for i := range seqs {
				seqs[i].Keys -= 1 + i%3
			}
			noError(t, plan.Build(g, seqs, len(seqs)))
			if !plan.form.sharing.on() {
				t.Errorf("%s: nothing is shared", name)
			}
		}
		step()
		if n := testing.AllocsPerRun(20, step); n > 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
		noError(t, plan.Close())
	}
	p.close(t)
}

// A plan for a step is the same whether the Plan was built before or not.
func TestFakePlanAgain(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 32, 227<<10)
	rng := reftest.Rand(t)
	kept, shared, beside, cut, steps := 0, 0, 0, 0, 0
	enough := func() bool { return kept > 10 && shared > 20 && beside > 5 && cut > 5 }
	for range reftest.AtLeast(reftest.Cases(t, 8, 200), enough) {
		m.engine.Eager = rng.IntN(2) == 0
		of := forkTree{{1, 16 * (2 + rng.IntN(200))}, {1 + rng.IntN(4), 16 * rng.IntN(60)}, {2 + rng.IntN(8), 16 * (2 + rng.IntN(30))}}
		s := stepsOfTree(of, 8, 1+rng.IntN(20))
		if rng.IntN(2) == 0 {
			s = stepsOfForks(rng, 2+rng.IntN(30), 8)
		}
		g := attn.Problem{Heads: 8, KVHeads: enginetest.Pick(rng, 1, 2), Dim: 64, ValueDim: 64, Pages: attn.Separate(attn.Float16, 64, 64, attn.PageStrides{}, attn.PageStrides{}), PageTokens: 16, Scale: 0.1, Mask: attn.Mask{Causal: true}, QueryType: enginetest.Pick(rng, attn.Float16, attn.Float32)}
		g.Query, g.Out, g.LSE = attn.PackedRows(8, 64), attn.PackedRows(8, 64), attn.PackedRows(8, 1)
		g.Pages.Planes[0].At = attn.PageStrides{Page: g.KVHeads * 16 * 64, Head: 16 * 64, Row: 64}
		g.Pages.Planes[1].At = g.Pages.Planes[0].At
		if rng.IntN(4) == 0 {
			g.Slopes = attn.NewSlopes(make([]float64, 8))
		}
		if longest := slices.Max(s.first); rng.IntN(3) == 0 {
			g.Window = max(longest+8-rng.IntN(enginetest.Pick(rng, 20, longest)), 1)
		}
		capacity := Capacity{Sequences: len(s.seqs) + 1, Rows: 4 * len(s.seqs), Pages: s.pages + 64*len(s.seqs)}
		plan := m.engine.NewPlan()
		noError(t, plan.Reserve(capacity))
		for i := range 6 {
			seqs := slices.Clone(s.next(i))
			switch rng.IntN(14) {
			case 0: // one sequence is removed
				seqs = slices.Delete(seqs, len(seqs)/2, len(seqs)/2+1)
			case 1: // one sequence has more new tokens
				seqs[rng.IntN(len(seqs))].Queries = 3
			case 2: // sequences have few own keys
				for n, own := range plan.prefixes.found.Own {
					if n < len(seqs) && own > 0 {
						seqs[n].Keys = min(seqs[n].Keys, own+1+rng.IntN(15))
					}
				}
			case 3: // another order
				rng.Shuffle(len(seqs), func(i, j int) { seqs[i], seqs[j] = seqs[j], seqs[i] })
			}
			rows, backwards := 0, rng.IntN(10) == 0
			for n := range seqs {
				q := &seqs[n]
				if backwards {
					q = &seqs[len(seqs)-1-n]
				}
				q.Row, rows = rows, rows+q.Queries
			}
			fresh := m.engine.NewPlan()
			noError(t, fresh.Reserve(capacity))
			rows += rng.IntN(2) // a row may be without a sequence
			turn := plan.prefixes.turn
			noError(t, plan.Build(g, seqs, rows))
			noError(t, fresh.Build(g, seqs, rows))
			if steps++; plan.form.sharing.on() {
				shared++
				if turn == plan.prefixes.turn {
					kept++
				}
				if plan.prefixes.blocks > 0 {
					beside++
				}
				if len(plan.cuts.data) > 0 && slices.Max(plan.cuts.data) > 0 {
					cut++
				}
			}
			if a, b := plan.told(), fresh.told(); a != b {
				t.Fatalf("%+v, Eager %v, step %d of %+v: the plan is\n%s\nand one that was never built before\n%s", g, m.engine.Eager, i, seqs, a, b)
			}
			noError(t, fresh.Close())
		}
		noError(t, plan.Close())
	}
	if !enough() {
		t.Errorf("%d steps, of which %d share prefixes, %d beside, %d with windows that hide keys; %d had lists as before", steps, shared, beside, cut, kept)
	}
}

// told returns all parameters of a plan's launches, without addresses.
func (p *Plan) told() string {
	x := &p.prefixes
	own := fmt.Sprint(p.works.data, p.seqs.data, p.prefetches.data, p.masked.data, p.prefilling.data, p.prefillStarts.data, p.slopes.data, p.details.data, p.trees.data, p.cuts.data, p.positions.data, p.slots.data, p.pages.data, p.ahead.data,
		p.reach, p.lastPage, p.mostSlots, p.liveKeys, p.appends, p.form.geometry, p.form.rows, p.form.tileRows, p.form.both, p.form.beside, p.form.kernel.entries, p.sched.Workers(), p.sched.Tiles())
	if !p.form.sharing.on() {
		return own
	}
	return fmt.Sprintln(own) + fmt.Sprintln(x.gathered.data, x.starts.data, x.slots.data, x.shifts.data, x.blocks, x.direct, x.plan.state >= built) + x.plan.told()
}

// planSteps has the sequences of consecutive steps. Each step appends a token to each sequence.
type planSteps struct {
	seqs  []attn.Sequence
	first []int // keys of the first step
	pages int
	steps int
}

// stepsOfTree returns steps of a tree of forks with different lengths. Their page tables have capacity for `steps` more
// tokens.
func stepsOfTree(of forkTree, steps, apart int) *planSteps {
	seqs, pages := of.sequences(16)
	s := &planSteps{steps: steps}
	for i := range seqs {
		q := &seqs[i]
		q.Keys -= i * 37 % apart
		for len(q.Pages)*16 < q.Keys+steps {
			q.Pages, pages = append(q.Pages, int32(pages)), pages+1
		}
		s.first = append(s.first, q.Keys)
	}
	s.seqs, s.pages = seqs, pages
	return s
}

// stepsOfForks returns n sequences. Each, except the first, is forked from an earlier one, up to depth 4.
func stepsOfForks(rng *rand.Rand, n, steps int) *planSteps {
	s, depth := &planSteps{steps: steps}, make([]int, n)
	own := func(table []int32, tokens int) []int32 {
		for range tokens / 16 {
			table, s.pages = append(table, int32(s.pages)), s.pages+1
		}
		return table
	}
	for i := range n {
		var table []int32
		if i > 0 {
			from := rng.IntN(i)
			for depth[from] == 4 {
				from = rng.IntN(i)
			}
			depth[i] = depth[from] + 1
			table = slices.Clone(s.seqs[from].Pages[:len(s.seqs[from].Pages)-rng.IntN(16)])
		} else {
			table = own(nil, 4096)
		}
		table = own(table, 256+rng.IntN(256))
		q := attn.Sequence{Row: i, Queries: 1, Keys: len(table)*16 - rng.IntN(16), Pages: table}
		s.first, s.seqs = append(s.first, q.Keys), append(s.seqs, q)
	}
	for i := range s.seqs { // pages for later tokens, which no fork shares
		s.seqs[i].Pages = own(s.seqs[i].Pages, steps+16)
	}
	return s
}

// next returns step i in freshly allocated page tables, as a cache does.
func (s *planSteps) next(i int) []attn.Sequence {
	for n := range s.seqs {
		s.seqs[n].Keys = s.first[n] + i%s.steps
	}
	return s.seqs
}

// BenchmarkFakePrefixPlan plans consecutive steps of 256 sequences of 32/8 heads of 128, in pages of 16. min-us/op is
// the fastest group of 16 steps, since pages end every 16 tokens.
func BenchmarkFakePrefixPlan(b *testing.B) {
	m, _, _ := fakeGPU(b, 90, 132, 227<<10)
	m.engine.Eager = false
	p := m.newProblem(b, reftest.Rand(b), reftest.Normal, options{shape: &reftest.Shape{Heads: 32, KVHeads: 8, Dim: 128, ValueDim: 128, Queries: []int{1}, Keys: []int{1}, Mask: attn.Mask{Causal: true}}, kv: attn.Float16, page: 16})
	for _, c := range []struct {
		name   string
		steps  *planSteps
		alone  bool
		window int
	}{
		{"256x(2048+128)", stepsOfTree(forkTree{{1, 2048}, {256, 128}}, 64, 1), false, 0},
		{"4096,16x1024,16x320", stepsOfTree(forkTree{{1, 4096}, {16, 1024}, {16, 320}}, 64, 256), false, 0},
		{"forks", stepsOfForks(rand.New(rand.NewPCG(1, 2)), 256, 64), false, 0},
		{"apart", stepsOfTree(forkTree{{256, 1024}}, 64, 256), false, 0},
		{"4096,16x1024,16x320_alone", stepsOfTree(forkTree{{1, 4096}, {16, 1024}, {16, 320}}, 64, 256), true, 0},
		{"256x(8192+128)_window", stepsOfTree(forkTree{{1, 8192}, {256, 128}}, 64, 1), false, 4096},
		{"256x(8192+128)_window_alone", stepsOfTree(forkTree{{1, 8192}, {256, 128}}, 64, 1), true, 4096},
		{"4096,16x1024,16x320_window", stepsOfTree(forkTree{{1, 4096}, {16, 1024}, {16, 320}}, 64, 256), false, 4096},
	} {
		b.Run(c.name, func(b *testing.B) {
			g, s := p.geometry, c.steps
			if g.Window = c.window; c.alone {
				g.TileTokens = defaultTile // a requested tile size prevents sharing
			}
			plan := m.engine.NewPlan()
			n := len(s.seqs)
			noError(b, plan.Reserve(Capacity{Sequences: n, Rows: n, Pages: s.pages + 64*n*5}))
			noError(b, plan.Build(g, s.next(0), n)) // takes memory
			b.ReportAllocs()
			least, begin, steps := time.Duration(math.MaxInt64), time.Now(), 0
			for b.Loop() {
				noError(b, plan.Build(g, s.next(steps), n))
				if steps++; steps%16 == 0 {
					now := time.Now()
					least, begin = min(least, now.Sub(begin)), now
				}
			}
			b.ReportMetric(float64(least.Nanoseconds())/16e3, "min-us/op")
			if plan.form.sharing.on() == (c.alone || c.name == "apart") {
				b.Errorf("shares prefixes: %v", plan.form.sharing.on())
			}
			noError(b, plan.Close())
		})
	}
	p.close(b)
}

// Invalid parts are refused, and nothing is queued.
func TestFakePartsRefused(t *testing.T) {
	m, lib, _ := fakeGPU(t, 90, 4, 227<<10)
	p := Parts{Count: 2, Rows: 3, Heads: 2, Dim: 64}
	b, err := m.Dev.NewBuffer(p.Bytes())
	noError(t, err)
	noError(t, b.Upload(0, p.Table()))
	fine := Merged{Rows: 3, OutAt: attn.PackedRows(2, 64), LSEAt: attn.PackedRows(2, 1), Out: gpu.Memory{DType: attn.Float16, Len: 3 * 2 * 64}, LSE: gpu.Memory{DType: attn.Float32, Len: 6}}
	m.Poison(t, &fine.Out)
	m.Poison(t, &fine.LSE)
	for name, x := range map[string]struct {
		change func(p *Parts, to *Merged)
		want   error
		text   string
	}{
		"more rows":   {func(_ *Parts, to *Merged) { to.Rows = 4 }, attn.ErrShape, "4 rows of {Count:2 Rows:3"},
		"no parts":    {func(p *Parts, _ *Merged) { p.Count = 0 }, attn.ErrShape, "Count:0"},
		"a width":     {func(p *Parts, _ *Merged) { p.Dim = 63 }, attn.ErrShape, "Dim:63"},
		"more states": {func(p *Parts, _ *Merged) { p.Count = 9 }, attn.ErrShape, "bytes of"},
		"strides":     {func(_ *Parts, to *Merged) { to.OutAt.Head = 65 }, attn.ErrShape, "multiples of 4"},
		"an output":   {func(_ *Parts, to *Merged) { to.Out.Len-- }, attn.ErrShape, "out has 383 elements of 384"},
		"no output":   {func(_ *Parts, to *Merged) { to.Out.Buffer = nil }, attn.ErrShape, "out has no buffer"},
		"float64":     {func(_ *Parts, to *Merged) { to.Out.DType = attn.Float64 }, attn.ErrDType, "out is float64"},
		"an lse":      {func(_ *Parts, to *Merged) { to.LSE.Len-- }, attn.ErrShape, "lse has 5 elements of 6"},
		"half an lse": {func(_ *Parts, to *Merged) { to.LSE.DType = attn.Float16 }, attn.ErrDType, "lse is float16"},
	} {
		q, to := p, fine
		x.change(&q, &to)
		lib.Forget()
		wantError(t, name, m.engine.Merge(m.Stream, &q, b, &to), x.want, x.text)
		if len(enginetest.Launches(lib.Log())) > 0 {
			t.Errorf("%s: %s", name, lib.Log())
		}
	}
	noError(t, m.engine.Merge(m.Stream, &p, b, &fine))

	// BuildPart requires valid slots of new tokens.
	shape := reftest.Shape{Heads: 2, KVHeads: 1, Dim: 64, ValueDim: 64, Queries: []int{2, 1}, Keys: []int{0, 20}}
	c := m.newProblem(t, reftest.Rand(t), reftest.Normal, options{shape: &shape, kv: attn.Float16, page: 16})
	plan := m.engine.NewPlan()
	slots := make([]int, c.rows)
	for i, bad := range []int{-2, math.MaxInt32 + 1} {
		slots[1] = bad
		wantError(t, "a slot", plan.BuildPart(c.geometry, c.seqs, c.rows, slots), attn.ErrShape, "row 1 goes to slot "+[]string{"-2", "2147483648"}[i])
	}
	wantError(t, "slots", plan.BuildPart(c.geometry, c.seqs, c.rows, slots[1:]), attn.ErrShape, "slots for")
	slots[1] = 16 * 1000
	noError(t, plan.BuildPart(c.geometry, c.seqs, c.rows, slots))
	noError(t, plan.Upload(m.Stream))
	fresh := gpu.Memory{DType: attn.Float16, Len: c.rows * 64}
	m.Poison(t, &fresh)
	wantError(t, "a page that is not there", plan.Append(m.Stream, attn.InPlanes(c.k, c.v), fresh, fresh), attn.ErrShape, "k has")
	noError(t, plan.Close())
	c.close(t)
}
