//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"math"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/testgpu"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
)

// gather does what prefix_gather does.
func (k *twin) gather(l *testgpu.Launch) {
	p := (*prefixGatherParams)(unsafe.Pointer(&l.Arg[0]))
	if l.Threads != prefixThreads || p.width%8 != 0 || p.queryRow%8 != 0 || p.queryHead%8 != 0 || (p.query|p.to)%8 != 0 {
		k.t.Errorf("gather by %d threads: %+v", l.Threads, p)
	}
	for i := range int(*testgpu.At[int32](p.rows, 0)) {
		row := int64(*testgpu.At[int32](p.rows, 1+i))
		for head := range int64(p.heads) {
			from := p.query + uint64(row*p.queryRow+head*p.queryHead)
			to := p.to + uint64((int64(i)*int64(p.heads)+head)*int64(p.width))
			for b := range int(p.width) {
				*testgpu.At[byte](to, b) = *testgpu.At[byte](from, b)
			}
		}
	}
}

// merge does what prefix_merge does.
func (k *twin) merge(l *testgpu.Launch) {
	p := (*prefixMergeParams)(unsafe.Pointer(&l.Arg[0]))
	if l.Threads != prefixThreads || (p.outRow|p.outHead|int64(p.dim))%4 != 0 {
		k.t.Errorf("merge by %d threads: %+v", l.Threads, p)
	}
	heads, dim := int(p.heads), int(p.dim)
	state := func(o, lse uint64, at int) lean.Normalized[float64] {
		s := lean.Normalized[float64]{O: make([]float64, dim), LSE: testgpu.Load(lse, at, attn.Float32)}
		testgpu.LoadRow(s.O, o, at*dim, attn.Float32)
		return s
	}
	out := make([]float64, dim)
	for row := range int(p.rows) {
		begin, end := int(*testgpu.At[int32](p.starts, row)), int(*testgpu.At[int32](p.starts, row+1))
		for head := range heads {
			var states []lean.Normalized[float64]
			for i := begin; i < end; i++ {
				slot := int(*testgpu.At[int32](p.slots, i))
				s := state(p.prefix, p.prefixLse, slot*heads+head)
				if p.slopes != 0 {
					s.LSE += testgpu.Load(p.slopes, head, attn.Float32) / lean.Log4E * float64(*testgpu.At[int32](p.shifts, slot))
				}
				states = append(states, s)
			}
			states = append(states, state(p.own, p.ownLse, row*heads+head))
			lse := lean.MergeNormalized(out, states)
			for c, x := range out {
				testgpu.Store(p.out, row*int(p.outRow)+head*int(p.outHead)+c, testgpu.TypeOf(p.outType), x)
			}
			if p.lse != 0 {
				testgpu.Store(p.lse, row*int(p.lseRow)+head*int(p.lseHead), attn.Float32, lse)
			}
		}
	}
}

func TestFakePrefixes(t *testing.T) {
	onFakes(t, reftest.Cases(t, 15, 60), func(t *testing.T, m *machine, n int) {
		testPrefixes(t, m, n, shorter(reftest.Cases(t, 200, 400)), false)
	})
}

func TestFakePrefixesRecorded(t *testing.T) {
	onFakes(t, reftest.Cases(t, 3, 9), func(t *testing.T, m *machine, n int) {
		testPrefixesRecorded(t, m, max(n, 3), shorter(reftest.Cases(t, 150, 300)), false)
	})
}

// What is too little, what a window hides keys of, and what is asked for by its schedule is for each sequence by
// itself.
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
		"a narrow window": {func(g *attn.Problem) { g.Window = 99 }, p.rows, false},
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
		if plan.look.sharing.on() != x.takes {
			t.Errorf("%s: shares prefixes: %v", name, !x.takes)
		}
		noError(t, plan.Close())
	}
	m.engine.Eager = false
	plan := m.engine.NewPlan()
	noError(t, plan.Build(p.geometry, p.seqs, p.rows))
	if plan.look.sharing.on() {
		t.Error("a prefix of 96 keys is worth it")
	}
	long := []attn.Sequence{{Row: 0, Queries: 1}, {Row: 1, Queries: 1}, {Row: 2, Queries: 1}}
	key := p.geometry.KVHeads * tokenBytes(&p.geometry)
	// Of three sequences with 16n keys in common and one of their own a third is read, in cachedMore/cachedOf times the
	// time for each.
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
		if plan.look.sharing.on() != takes {
			t.Errorf("%d pages: shares prefixes: %v", n, !takes)
		}
	}
	noError(t, plan.Close())
	p.close(t)
}

// Where there is no memory for prefixes, the plan is as it was.
func TestFakePrefixesMemory(t *testing.T) {
	m, lib, _ := fakeGPU(t, 90, 4, 227<<10)
	rng := reftest.Rand(t)
	alone := reftest.Shape{Heads: 4, KVHeads: 2, Dim: 64, ValueDim: 64, Queries: []int{1, 1, 1}, Keys: []int{70, 90, 100}, Mask: attn.Mask{Causal: true}}
	p := m.newProblem(t, rng, reftest.Normal, options{shape: &alone, kv: attn.Float16, page: 16})
	forked := p.seqs[2]
	forked.Pages = append(append([]int32(nil), p.seqs[1].Pages[:4]...), p.seqs[2].Pages[4:]...)
	forks := []attn.Sequence{p.seqs[0], p.seqs[1], forked}
	s := lib.State()
	for _, first := range []bool{true, false} { // the plan's own memory is what there is none of; that of its prefixes
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
		if !plan.look.sharing.on() {
			t.Error("nobody shares prefixes")
		}
		noError(t, plan.Close())
	}
	p.close(t)
}

// A step of a tree is planned again without an allocation, whatever its sequences share then.
func TestFakePrefixPlanAllocations(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 132, 227<<10)
	p := m.newProblem(t, reftest.Rand(t), reftest.Normal, options{shape: &reftest.Shape{Heads: 32, KVHeads: 8, Dim: 128, ValueDim: 128, Queries: []int{1}, Keys: []int{1}, Mask: attn.Mask{Causal: true}}, kv: attn.Float16, page: 16})
	for name, g := range map[string]attn.Problem{"plain": p.geometry, "slopes": func(g attn.Problem) attn.Problem { g.Slopes = attn.NewSlopes(make([]float64, 32)); return g }(p.geometry)} {
		seqs, pages := forkTree{{1, 4096}, {8, 1024}, {8, 320}}.sequences(16)
		plan := m.engine.NewPlan()
		noError(t, plan.Reserve(Capacity{Sequences: len(seqs), Rows: len(seqs), Pages: pages + 64*len(seqs)}))
		step := func() {
			for i := range seqs {
				seqs[i].Keys -= 1 + i%3
			}
			noError(t, plan.Build(g, seqs, len(seqs)))
			if !plan.look.sharing.on() {
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

// BenchmarkFakePrefixPlan plans a step of 256 sequences: a system prompt, 16 conversations, 16 samples of each.
func BenchmarkFakePrefixPlan(b *testing.B) {
	m, _, _ := fakeGPU(b, 90, 132, 227<<10)
	m.engine.Eager = false
	of := forkTree{{1, 4096}, {16, 1024}, {16, 320}}
	seqs, pages := of.sequences(16)
	for i := range seqs {
		seqs[i].Keys -= i * 37 % 256
	}
	p := m.newProblem(b, reftest.Rand(b), reftest.Normal, options{shape: &reftest.Shape{Heads: 32, KVHeads: 8, Dim: 128, ValueDim: 128, Queries: []int{1}, Keys: []int{1}, Mask: attn.Mask{Causal: true}}, kv: attn.Float16, page: 16})
	for name, g := range map[string]attn.Problem{"shared": p.geometry, "alone": func(g attn.Problem) attn.Problem { g.TileTokens = 64; return g }(p.geometry)} {
		b.Run(name, func(b *testing.B) {
			plan := m.engine.NewPlan()
			noError(b, plan.Reserve(Capacity{Sequences: len(seqs), Rows: len(seqs), Pages: pages}))
			noError(b, plan.Build(g, seqs, len(seqs))) // takes memory
			b.ReportAllocs()
			for b.Loop() {
				noError(b, plan.Build(g, seqs, len(seqs)))
			}
			if plan.look.sharing.on() != (name == "shared") {
				b.Errorf("shares prefixes: %v", plan.look.sharing.on())
			}
			noError(b, plan.Close())
		})
	}
	p.close(b)
}

func TestFakeParts(t *testing.T) { onFakes(t, reftest.Cases(t, 30, 300), testParts) }

// What does not fit is refused, and nothing is queued.
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
		if len(testgpu.Launches(lib.Log())) > 0 {
			t.Errorf("%s: %s", name, lib.Log())
		}
	}
	noError(t, m.engine.Merge(m.Stream, &p, b, &fine))

	// New tokens go where BuildPart is told, which has to be there.
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
	wantError(t, "a page that is not there", plan.Append(m.Stream, c.k, c.v, fresh, fresh), attn.ErrShape, "k has")
	noError(t, plan.Close())
	c.close(t)
}
