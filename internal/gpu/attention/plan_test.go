//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
)

// paged returns a geometry of a cache with pages of 16 tokens.
func paged(heads, kvHeads, dim int) attn.Problem {
	g := attn.Problem{Heads: heads, KVHeads: kvHeads, Dim: dim, ValueDim: dim, Pages: attn.Separate(attn.Float16, dim, dim, attn.PageStrides{Page: kvHeads * 16 * dim, Head: 16 * dim, Row: dim}, attn.PageStrides{}), PageTokens: 16, Scale: 0.125,
		Query: attn.Strides{Row: heads * dim, Head: dim}, Out: attn.Strides{Row: heads * dim, Head: dim}, LSE: attn.Strides{Row: heads, Head: 1},
	}
	g.Pages.Planes[1].At = g.Pages.Planes[0].At
	return g
}

// sequenceOf returns a sequence with consecutive pages from first on.
func sequenceOf(row, queries, keys, first int) attn.Sequence {
	s := attn.Sequence{Row: row, Queries: queries, Keys: keys}
	for i := range attn.Ceil(keys, 16) {
		s.Pages = append(s.Pages, int32(first+i))
	}
	return s
}

// Every configuration fits into shared memory and satisfies the kernels.
func TestConfigure(t *testing.T) {
	for _, f := range enginetest.Fakes {
		e := &Engine{info: cuda.Info{Capability: f.Capability, SharedPerBlockMost: f.Shared}}
		for _, el := range gpu.Types {
			for _, dim := range headDims {
				for rows := 1; rows <= 16; rows++ {
					s := e.shape(el, dim)
					c, ok := e.configure(s, rows)
					if !ok || c.shared > f.Shared || c.slots%c.warps != 0 || c.warps < 1 || c.warps > ConsumerWarps || e.hasEpilogue() && c.warps < ConsumerWarps { // the epilogue reads the states of all consumers
						t.Errorf("%s, %s, head dim %d, %d rows: %+v, %v", f.Name, gpu.Name(el), dim, rows, c, ok)
					}
				}
			}
		}
	}
	// Sizes measured on an H200.
	e := &Engine{info: cuda.Info{Capability: 90, SharedPerBlockMost: 232448}}
	for _, c := range []struct {
		element    attn.DType
		dim, slots int
	}{{attn.Float16, 64, 8}, {attn.Float16, 128, 12}, {attn.BFloat16, 128, 12}, {attn.Float32, 64, 24}, {attn.Float16, 256, 8}} {
		if got, _ := e.configure(e.shape(c.element, c.dim), 4); got.warps != 4 || got.buffers != 2 || got.slots != c.slots {
			t.Errorf("%s, head dim %d: %+v", gpu.Name(c.element), c.dim, got)
		}
	}
}

// A producer warp that will fill a slot with chunk c waits until chunk c-pace has come (Ring::produce). The wait is for a parity, so the next
// chunk of that slot, c-pace+slots, must not come before the wait is over: filling that chunk must depend on filling c. A chunk depends on
// the chunk `pace` in front, and on the last chunk of the same warp.
func TestPace(t *testing.T) {
	even := func(n int) int { return n + n%2 }
	e := &Engine{info: cuda.Info{Capability: 90, SharedPerBlockMost: 232448}}
	for i := range table {
		k := &table[i]
		if k.family != &decodeFamily && k.family != &narrowFamily {
			continue
		}
		for _, dim := range k.dims {
			for rows := 1; rows <= BlockRows; rows++ {
				s := e.shapeOf(k, dim)
				c, ok := e.configure(s, rows)
				if !ok {
					continue
				}
				chunks, warps := 64<<10/s.slot, 2 // warps fill slots in turn
				paces := []int{even(chunks), even(chunks * 3 / 2), 2 * even(chunks)}
				if k.family == &narrowFamily {
					if c.slots%4 == 0 {
						warps = 4
					}
					if k.kv == attn.Q4 {
						chunks = attn.Ceil(chunks, 4) * 4
					}
					paces = []int{chunks, 2 * chunks}
				}
				for _, pace := range paces {
					pace = min(pace, c.slots)
					between, depends := c.slots-pace, false
					for n := 0; n <= between; n += pace {
						depends = depends || (between-n)%warps == 0
					}
					if !depends {
						t.Errorf("%s, head dim %d, %d rows: %d slots, %d producer warps, a pace of %d", k.entries[0], dim, rows, c.slots, warps, pace)
					}
				}
			}
		}
	}
}

func TestSupports(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 13, 232448)
	for _, d := range []attn.DType{attn.Float16, attn.BFloat16, attn.Float32} {
		for _, dim := range headDims {
			g := paged(40, 2, dim)
			g.Pages = g.Pages.As(d)
			noError(t, m.engine.Supports(&g))
		}
	}
	g := paged(4, 2, 64)
	g.Pages = g.Pages.As(attn.Float64)
	wantError(t, "float64", m.engine.Supports(&g), attn.ErrDType, "float64")
	for _, c := range badGeometries {
		g := paged(4, 2, 64)
		c.spoil(&g)
		wantError(t, "supports", m.engine.Supports(&g), c.want, c.text)
		plan := m.engine.NewPlan()
		wantError(t, "build", plan.Build(g, nil, 0), c.want, c.text)
	}
	small := &Engine{info: cuda.Info{Capability: 90, SharedPerBlockMost: 1000}, kernels: kernelsOf(90)}
	g = paged(4, 2, 64)
	wantError(t, "little memory", small.Supports(&g), attn.ErrShape, "more than the GPU's 1000 bytes of shared memory")
	m.engine.info.SharedPerBlockMost = 60000
	g = paged(2, 2, 256)
	g.Pages = g.Pages.As(attn.Float32)
	noError(t, m.engine.Supports(&g))
	wantError(t, "few rows fit", m.engine.NewPlan().Build(g, []attn.Sequence{sequenceOf(0, 16, 20, 0)}, 16), attn.ErrShape, "16 rows of head dim 256")
}

// setDims changes the dims of keys and values.
func setDims(g *attn.Problem, dim, valueDim int) {
	g.Dim, g.ValueDim = dim, valueDim
	g.Pages.Planes[0].Dim, g.Pages.Planes[1].Dim, g.Pages.Value.Dim = dim, valueDim, valueDim
}

var badGeometries = []struct {
	spoil func(*attn.Problem)
	want  error
	text  string
}{
	{func(g *attn.Problem) { g.Window, g.Unfused = 5, true }, attn.ErrUnsupported, "none for all"},
	{func(g *attn.Problem) { g.Slopes = attn.NewSlopes(make([]float64, 3)) }, attn.ErrShape, "3 slopes for 4 query heads"},
	{func(g *attn.Problem) { g.Bias = attn.Bias{Sequences: 1, Heads: 3, Queries: 1, Keys: 9} }, attn.ErrShape, "a bias of 1 sequences, 3 heads"},
	{func(g *attn.Problem) { g.Heads = 5 }, attn.ErrShape, "5 query heads for 2"},
	{func(g *attn.Problem) { g.KVHeads = 0 }, attn.ErrShape, "for 0 KV heads"},
	{func(g *attn.Problem) { g.Dim, g.ValueDim = 72, 72 }, attn.ErrShape, "pages with keys of 64"},
	{func(g *attn.Problem) { setDims(g, 264, 264) }, attn.ErrUnsupported, "head dim 264 with values of 264"},
	{func(g *attn.Problem) { setDims(g, 260, 64) }, attn.ErrUnsupported, "head dim 260 with values of 64"},
	{func(g *attn.Problem) { setDims(g, 64, 128) }, attn.ErrUnsupported, "values must lie as keys do"},
	{func(g *attn.Problem) {
		setDims(g, 600, 600)
		g.Pages.Value.Plane, g.Pages.Planes[1] = 0, attn.Plane{}
	}, attn.ErrUnsupported, "keys of 600 elements with values of 600 in them"},
	{func(g *attn.Problem) { g.Pages.Planes[1].Scales = attn.ScalesByToken }, attn.ErrUnsupported, "float16 with a scale for each token and head"},
	{func(g *attn.Problem) { g.Pages.Planes[1].DType = attn.BFloat16 }, attn.ErrUnsupported, "keys and values of different types"},
	{func(g *attn.Problem) { g.PageTokens = 0 }, attn.ErrShape, "pages of 0"},
	{func(g *attn.Problem) { g.TileTokens = -1 }, attn.ErrShape, "LeanTiles of -1"},
	{func(g *attn.Problem) { g.Workers = -1 }, attn.ErrShape, "-1 workers"},
	{func(g *attn.Problem) { g.Scale = math.NaN() }, attn.ErrShape, "scale NaN"},
	{func(g *attn.Problem) { g.Scale = math.Inf(1) }, attn.ErrShape, "scale +Inf"},
	{func(g *attn.Problem) { g.Policy.Kind = 9 }, attn.ErrShape, "schedule 9"},
	{func(g *attn.Problem) { g.Policy.Kind = lean.FixedSplit }, attn.ErrShape, "split into 0"},
	{func(g *attn.Problem) { g.Pages.Planes[1].At.Page++ }, attn.ErrUnsupported, "values must lie as keys do"},
	{func(g *attn.Problem) { g.Pages.Planes[0].At.Row, g.Pages.Planes[1].At.Row = 128, 128 }, attn.ErrUnsupported, "128 elements apart"},
	{func(g *attn.Problem) { g.Pages.Planes[0].At.Head++; g.Pages.Planes[1].At = g.Pages.Planes[0].At }, attn.ErrUnsupported, "no multiples"},
	{func(g *attn.Problem) { g.Pages.Planes[0].At.Page = -64; g.Pages.Planes[1].At = g.Pages.Planes[0].At }, attn.ErrShape, "key strides"},
	{func(g *attn.Problem) {
		g.Pages.Planes[0].At.Page = 64 << 31
		g.Pages.Planes[1].At = g.Pages.Planes[0].At
	}, attn.ErrUnsupported, "rows of keys"},
	{func(g *attn.Problem) { g.LSE.Row = -1 }, attn.ErrShape, "log-sum-exp strides"},
	{func(g *attn.Problem) { g.Query.Row = 66 }, attn.ErrUnsupported, "query strides"},
	{func(g *attn.Problem) { g.Out.Head = -64 }, attn.ErrShape, "output strides"},
}

// A refused Build leaves the plan unchanged.
func TestBuildRefuses(t *testing.T) {
	m := emulatedGPU(t, 5)
	shape := reftest.Shape{Heads: 8, KVHeads: 2, Dim: 64, ValueDim: 64, Queries: []int{1, 1}, Keys: []int{33, 20}}
	p := m.newProblem(t, reftest.Rand(t), reftest.Normal, options{shape: &shape, kv: attn.Float16, page: 16})
	plan := m.engine.NewPlan()
	noError(t, plan.Build(p.geometry, p.seqs, p.rows))
	noError(t, plan.Upload(m.Stream))
	good := sequenceOf(0, 1, 40, 0)
	for _, c := range []struct {
		rows int
		s    attn.Sequence
		err  error
		text string
	}{
		{-1, good, attn.ErrShape, "-1 rows"},
		{1 << 31, good, attn.ErrShape, "2147483648 rows"},
		{3, sequenceOf(-1, 1, 1, 0), attn.ErrShape, "row -1"},
		{3, attn.Sequence{Queries: -1}, attn.ErrShape, "-1 queries"},
		{3, attn.Sequence{Queries: 1, Keys: -1}, attn.ErrShape, "-1 keys"},
		{3, attn.Sequence{Queries: 1, Keys: mostKeyRows + 1}, attn.ErrShape, "keys"},
		{0, attn.Sequence{Row: math.MaxInt32, Queries: 1}, attn.ErrShape, "row 2147483647"},
		{0, attn.Sequence{Queries: mostPackedRows}, attn.ErrShape, "together more than"},
		{3, sequenceOf(2, 2, 5, 0), attn.ErrShape, "rows [2,4) of 3"},
		{3, attn.Sequence{Queries: 1, Keys: 17, Pages: []int32{1}}, attn.ErrPage, "1 pages of 16 tokens for 17 keys"},
		{3, attn.Sequence{Queries: 1, Keys: 17, Pages: []int32{1, -7}}, attn.ErrPage, "page -7 at 1"},
	} {
		wantError(t, fmt.Sprintf("%+v", c.s), plan.Build(paged(8, 2, 64), []attn.Sequence{good, c.s}, c.rows), c.err, c.text)
	}
	// Sequences without queries are not checked.
	noError(t, m.engine.NewPlan().Build(paged(8, 2, 64), []attn.Sequence{{Keys: 99, Pages: []int32{-1}}}, 0))
	m.queue(t, plan, p)
	m.Settle(t)
	p.check(t)
	p.close(t)
}

func TestRunRefuses(t *testing.T) {
	m, lib, _ := fakeGPU(t, 90, 13, 232448)
	p := decodeStep(t, m)
	plan := m.engine.NewPlan()
	wantError(t, "upload before build", plan.Upload(m.Stream), gpu.ErrState, "not built")
	wantError(t, "run before build", plan.Run(m.Stream, p.operands()), gpu.ErrState, "not uploaded")
	noError(t, plan.Build(p.geometry, p.seqs, p.rows))
	wantError(t, "run before upload", plan.Run(m.Stream, p.operands()), gpu.ErrState, "not uploaded")
	wantError(t, "append before upload", plan.Append(m.Stream, attn.InPlanes(p.k, p.v), p.newK, p.newV), gpu.ErrState, "not uploaded")
	noError(t, plan.Upload(m.Stream))
	m.Settle(t)
	for _, c := range []struct {
		spoil func(o *Operands)
		err   error
		text  string
	}{
		{func(o *Operands) { o.Q.Buffer = nil }, attn.ErrShape, "q has no buffer"},
		{func(o *Operands) { o.Q.Len-- }, attn.ErrShape, "q has 819199 elements of 819200"},
		{func(o *Operands) { o.Out.Len-- }, attn.ErrShape, "out has"},
		{func(o *Operands) { o.LSE.Len-- }, attn.ErrShape, "lse has"},
		{func(o *Operands) { o.LSE.DType = attn.Float16 }, attn.ErrDType, "lse is float16"},
		{func(o *Operands) { o.Q.DType = attn.Float64 }, attn.ErrDType, "q is float64"},
		{func(o *Operands) { o.Pages[0].Data.DType = attn.BFloat16 }, attn.ErrDType, "k is bfloat16, v is float16"},
		{func(o *Operands) { o.Pages[1].Data.DType = 77 }, attn.ErrDType, "v is DType(77)"},
		{func(o *Operands) { o.Pages[0].Data.Len = 100 }, attn.ErrShape, "k has 100 elements of"},
		{func(o *Operands) { o.Pages[1].Data.Len = 128 << 31 }, attn.ErrShape, "2147483648 rows of keys"},
		{func(o *Operands) { o.Pages[1].Data.Len *= 2 }, attn.ErrShape, "of a buffer of"},
		{func(o *Operands) { o.Out.Offset = 8 }, attn.ErrShape, "a multiple of 16"},
		{func(o *Operands) { o.Out.Offset = -16 }, attn.ErrShape, "at byte -16"},
		{func(o *Operands) { o.Out.Offset = 1 << 40 }, attn.ErrShape, "of a buffer of"},
	} {
		o := p.operands()
		c.spoil(o)
		wantError(t, c.text, plan.Run(m.Stream, o), c.err, c.text)
	}
	short := p.newK
	short.Len--
	other := p.newV
	other.DType = attn.BFloat16
	wantError(t, "few new rows", plan.Append(m.Stream, attn.InPlanes(p.k, p.v), short, p.newV), attn.ErrShape, "the new k has")
	wantError(t, "few new rows", plan.Append(m.Stream, attn.InPlanes(p.k, p.v), p.newK, short), attn.ErrShape, "the new v has")
	wantError(t, "two types", plan.Append(m.Stream, attn.InPlanes(p.k, p.v), p.newK, other), attn.ErrDType, "the new v bfloat16")
	wantError(t, "no pages", plan.Append(m.Stream, attn.InPlanes(short, p.v), p.newK, other), attn.ErrShape, "k has")
	for _, heads := range []int{p.KVHeads - 1, -1, math.MaxInt} {
		if heads != 0 {
			wantError(t, "rows of other heads", plan.AppendRows(m.Stream, attn.InPlanes(p.k, p.v), p.newK, p.newV, heads), attn.ErrShape, "KV heads in a row")
		}
	}
	wantError(t, "few longer rows", plan.AppendRows(m.Stream, attn.InPlanes(p.k, p.v), p.newK, p.newV, p.KVHeads+1), attn.ErrShape, "the new k has")
	if strings.Contains(lib.Log(), "kernel") {
		t.Error("a kernel was launched")
	}
	// Without token rows, or with fewer keys than queries, there is no append.
	noError(t, plan.Build(p.geometry, p.seqs, 0))
	noError(t, plan.Upload(m.Stream))
	wantError(t, "no rows", plan.Append(m.Stream, attn.InPlanes(p.k, p.v), p.newK, p.newV), attn.ErrShape, "0 token rows")
	noError(t, plan.Build(p.geometry, []attn.Sequence{sequenceOf(0, 3, 2, 0)}, p.rows))
	noError(t, plan.Upload(m.Stream))
	wantError(t, "more queries than keys", plan.Append(m.Stream, attn.InPlanes(p.k, p.v), p.newK, p.newV), attn.ErrShape, "fewer keys than queries")
	// An empty step is no error, and launches nothing.
	noError(t, plan.Build(p.geometry, nil, 0))
	noError(t, plan.Upload(m.Stream))
	noError(t, plan.Run(m.Stream, &Operands{}))
	noError(t, plan.Append(m.Stream, attn.InPlanes(gpu.Memory{}, gpu.Memory{}), gpu.Memory{}, gpu.Memory{}))
	if strings.Contains(lib.Log(), "kernel") {
		t.Error("a kernel was launched")
	}
}

func TestClosed(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 13, 232448)
	p := decodeStep(t, m)
	plan := m.engine.NewPlan()
	m.run(t, plan, p)
	o := p.operands()
	noError(t, o.Q.Buffer.Close())
	wantError(t, "q closed", plan.Run(m.Stream, o), cuda.ErrClosed, "buffer argument")
	all := func(what string) {
		t.Helper()
		wantError(t, what, plan.Build(p.geometry, p.seqs, p.rows), cuda.ErrClosed, "")
		wantError(t, what, plan.Upload(m.Stream), cuda.ErrClosed, "")
		wantError(t, what, plan.Run(m.Stream, o), cuda.ErrClosed, "")
		wantError(t, what, plan.Append(m.Stream, attn.InPlanes(p.k, p.v), p.newK, p.newV), cuda.ErrClosed, "")
		wantError(t, what, plan.Reserve(Capacity{}), cuda.ErrClosed, "")
	}
	noError(t, plan.Close())
	all("plan closed")
	wantError(t, "second close", plan.Close(), cuda.ErrClosed, "the plan")
	plan = m.engine.NewPlan()
	noError(t, plan.Build(p.geometry, p.seqs, p.rows))
	noError(t, m.engine.Close())
	all("engine closed")
	wantError(t, "second close", m.engine.Close(), cuda.ErrClosed, "the engine")
	noError(t, plan.Close())

	e, err := New(m.Dev)
	noError(t, err)
	plan = e.NewPlan()
	noError(t, plan.Build(p.geometry, p.seqs, p.rows))
	noError(t, m.Dev.Close())
	wantError(t, "device closed", plan.Upload(m.Stream), cuda.ErrClosed, "")
	noError(t, plan.Close()) // the device has freed its memory
	if _, err := New(m.Dev); !errors.Is(err, cuda.ErrClosed) {
		t.Errorf("an engine of a closed device: %v", err)
	}
}

// Generation changes exactly when launches change.
func TestGeneration(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 13, 232448)
	plan := m.engine.NewPlan()
	g := paged(8, 2, 64)
	last := plan.Generation()
	build := func(changes bool, what string, g attn.Problem, rows int, seqs ...attn.Sequence) {
		t.Helper()
		noError(t, plan.Build(g, seqs, rows))
		if now := plan.Generation(); (now != last) != changes {
			t.Errorf("%s: generation %d after %d", what, now, last)
		} else {
			last = now
		}
	}
	build(true, "the first", g, 4, sequenceOf(0, 1, 5, 0))
	build(false, "another length", g, 4, sequenceOf(2, 1, 16, 3))
	build(false, "two sequences", g, 4, sequenceOf(2, 1, 16, 3), sequenceOf(0, 1, 0, 0))
	build(true, "a block table", g, 4, sequenceOf(2, 1, 17, 3))
	build(false, "a longer one", g, 4, sequenceOf(2, 1, 64*16, 3))
	build(true, "no room", g, 4, sequenceOf(2, 1, 64*16+1, 3))
	build(true, "larger output tiles", g, 4, sequenceOf(2, 2, 170, 3))
	build(true, "other rows", g, 5, sequenceOf(2, 2, 170, 3))
	other := g
	other.Scale = 1
	build(true, "another scale", other, 5, sequenceOf(2, 2, 170, 3))
	build(true, "idle", other, 0)

	plan = m.engine.NewPlan()
	last = 0
	noError(t, plan.Reserve(Capacity{Sequences: 100, Rows: 100, Queries: 3, Pages: 1000}))
	build(true, "the first", g, 100, sequenceOf(0, 1, 5, 0))
	build(false, "pages", g, 100, sequenceOf(0, 1, 900*16, 0))
	build(false, "queries", g, 100, sequenceOf(7, 3, 999*16, 0), sequenceOf(0, 2, 16, 999)) // these share no page
	build(true, "more queries", g, 100, sequenceOf(0, 4, 5, 0))
	for _, c := range []Capacity{{Sequences: -1}, {Rows: -1}, {Queries: -1}, {Pages: -1}, {Rows: 1 << 31}} {
		wantError(t, "reserve", plan.Reserve(c), attn.ErrShape, "")
	}
}

// Staging memory of an unfinished copy is not written.
func TestUploadWaits(t *testing.T) {
	m, lib, _ := fakeGPU(t, 90, 13, 232448)
	plan := m.engine.NewPlan()
	noError(t, plan.Build(paged(8, 2, 64), []attn.Sequence{sequenceOf(0, 1, 5, 0)}, 4))
	const wait = "cuEventSynchronize"
	for i := range 5 {
		lib.Forget()
		noError(t, plan.Upload(m.Stream))
		log := lib.Log()
		if i < stagings && strings.Contains(log, wait) || i >= stagings && !(strings.Index(log, wait) >= 0 && strings.Index(log, wait) < strings.Index(log, "cuMemcpyHtoDAsync")) {
			t.Errorf("upload %d:\n%s", i, log)
		}
		if strings.Count(log, "cuMemcpy") != 1 {
			t.Errorf("upload %d is more than one copy:\n%s", i, log)
		}
	}
	waits := func(what string) {
		t.Helper()
		if log := lib.Log(); strings.Index(log, wait) < 0 || strings.Index(log, wait) > strings.Index(log, "cuMemFreeHost") {
			t.Errorf("%s:\n%s", what, log)
		}
	}
	lib.Forget()
	noError(t, plan.Build(paged(8, 2, 64), []attn.Sequence{sequenceOf(0, 1, 16*1000, 0)}, 4))
	waits("growing")
	for range 2 {
		noError(t, plan.Upload(m.Stream))
	}
	lib.Forget()
	noError(t, plan.Close())
	waits("close")
}

// Reserve takes memory for the scores of unfused attention, up to a limit.
func TestScores(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 5, 232448)
	g := paged(8, 2, 64)
	g.Unfused = true
	plan := m.engine.NewPlan()
	noError(t, plan.Reserve(Capacity{Sequences: 2, Rows: 6, Queries: 3, Pages: 10}))
	noError(t, plan.Build(g, []attn.Sequence{sequenceOf(0, 1, 5, 0)}, 6))
	if n := plan.memory.scores.Len(); n != 3*10*16*8*4 {
		t.Errorf("%d bytes of scores", n)
	}
	before := plan.Generation()
	noError(t, plan.Build(g, []attn.Sequence{sequenceOf(0, 3, 80, 0), sequenceOf(3, 3, 80, 5)}, 6))
	if plan.Generation() != before {
		t.Error("other memory for a step that was announced")
	}
	noError(t, plan.Build(g, []attn.Sequence{sequenceOf(0, 6, 100, 0)}, 6))
	if n := plan.memory.scores.Len(); n != 6*100*8*4 {
		t.Errorf("%d bytes of scores", n)
	}
	lean := g
	lean.Unfused = false
	noError(t, plan.Build(lean, []attn.Sequence{sequenceOf(0, 6, 100, 0)}, 6))
	if plan.memory.scores != nil || plan.Generation() == before {
		t.Error("scores where there are none")
	}
	noError(t, plan.Reserve(Capacity{Queries: 1 << 20, Pages: 1 << 20}))
	if err := plan.Build(g, []attn.Sequence{sequenceOf(0, 1, 5, 0)}, 6); !errors.Is(err, attn.ErrShape) {
		t.Errorf("2^40 pages of queries: %v", err)
	}
	noError(t, plan.Reserve(Capacity{}))
	if err := plan.Build(g, []attn.Sequence{sequenceOf(0, 1<<17, 1<<17, 0)}, 1<<17); !errors.Is(err, attn.ErrShape) {
		t.Errorf("2^37 scores: %v", err)
	}
	noError(t, plan.Close())
}

// Steps within Reserve's prompts take no memory, with any kernels.
func TestReservePrompts(t *testing.T) {
	for _, queries := range []int{0, 300} { // 0: any number
		t.Run(fmt.Sprint(queries), func(t *testing.T) { testReservePrompts(t, queries) }) // each has its own driver
	}
}

func testReservePrompts(t *testing.T, queries int) {
	m, _, _ := fakeGPU(t, 90, 13, 232448)
	m.engine.Eager = false
	g := paged(8, 2, 64)
	plan := m.engine.NewPlan()
	noError(t, plan.Reserve(Capacity{Sequences: 200, Rows: 400, Queries: queries, Pages: 1000}))
	noError(t, plan.Build(g, []attn.Sequence{sequenceOf(0, 1, 5, 0)}, 400))
	memory := plan.memory.generation
	parts, both := false, false
	for _, take := range []choice{takeFastest, takePrefill, takeBoth} {
		m.engine.choice = take
		for _, chunk := range []int{20, 100, 300} {
			seqs := []attn.Sequence{sequenceOf(0, chunk, 2000, 0)}
			for i := range min(100, 400-chunk) {
				seqs = append(seqs, sequenceOf(chunk+i, 1, 100, 200+7*i))
			}
			noError(t, plan.Build(g, seqs, 400))
			parts = parts || slices.ContainsFunc(plan.prefilling.data, func(t prefillTile) bool { return t.parts > 1 })
			both = both || plan.form.both
		}
	}
	if plan.memory.generation != memory {
		t.Error("other memory")
	}
	if !parts || !both {
		t.Errorf("parts of output tiles: %v, both kinds of kernels: %v", parts, both)
	}
	noError(t, plan.Close())
}

// Steps within Reserve take no memory, for any number of steps: the sequences of a decoder, a token longer each step.
func TestPlanMemoryIsFlat(t *testing.T) {
	for name, unfused := range map[string]bool{"lean": false, "unfused": true} {
		t.Run(name, func(t *testing.T) { // each has its own driver
			m, lib, _ := fakeGPU(t, 90, 132, 232448)
			g := paged(8, 2, 64)
			g.Unfused = unfused
			const sequences, pages, steps = 3, 70, 1000
			type state struct {
				generation uint64
				objects    int
				used       int64
			}
			var first state
			plan := m.engine.NewPlan()
			noError(t, plan.Reserve(Capacity{Sequences: sequences, Rows: sequences, Queries: 1, Pages: sequences * pages}))
			for step := range steps {
				var seqs []attn.Sequence
				for i := range sequences {
					seqs = append(seqs, sequenceOf(i, 1, 1+step+i*10, i*pages))
				}
				noError(t, plan.Build(g, seqs, sequences))
				noError(t, plan.Upload(m.Stream))
				info, err := m.Dev.Memory()
				noError(t, err)
				now := state{plan.Generation(), int(lib.Live()), info.Used}
				if step == 0 {
					first = now
				}
				if now != first {
					t.Fatalf("step %d: %+v, at first %+v", step, now, first)
				}
			}
			noError(t, plan.Close())
		})
	}
}

// Pages to bring into the L2 cache are full pages of the step, spread evenly, and at most a third of the cache or of
// the weights of a projection.
func TestAheadPages(t *testing.T) {
	rng := reftest.Rand(t)
	some := 0
	for i := range 500 {
		p := Plan{engine: &Engine{info: cuda.Info{L2Bytes: rng.IntN(1 << 22)}}}
		g := attn.Problem{KVHeads: 1 + rng.IntN(4), Dim: 64, Pages: attn.Separate(attn.Float16, 64, 64, attn.PageStrides{}, attn.PageStrides{}), PageTokens: enginetest.Pick(rng, 16, 64)}
		g.Heads = g.KVHeads * enginetest.Pick(rng, 1, 2, 8)
		g.Pages.Planes[0].At.Page = g.PageTokens * g.KVHeads * g.Dim
		if i%50 == 0 {
			g.Pages.Planes[0].At.Page += g.Dim // pages have other data between them
		}
		place := map[int32]int{} // index of full pages among all full pages
		for range rng.IntN(9) {
			s := sequence{queries: 1, keys: int32(rng.IntN(40 * g.PageTokens)), pages: int32(len(p.pages.data))}
			for j := range attn.Ceil(int(s.keys), g.PageTokens) {
				page := int32(1000 + len(p.pages.data))
				if (j+1)*g.PageTokens <= int(s.keys) {
					place[page] = len(place)
				}
				p.pages.data = append(p.pages.data, page)
			}
			p.seqs.data = append(p.seqs.data, s)
		}
		p.aheadPages(&g, i%50 != 1)
		n := int(p.ahead.data[0])
		weights := 2 * 64 * 64 * g.Heads * (g.Heads + 2*g.KVHeads)
		want := min(len(place)/4, p.engine.info.L2Bytes/3/(4*g.PageTokens*g.KVHeads*g.Dim), weights/3/(4*g.PageTokens*g.KVHeads*g.Dim), mostAhead)
		if i%50 < 2 {
			want = 0
		}
		if n != want || len(p.ahead.data) != 1+n {
			t.Fatalf("case %d: %d pages of %d full ones, want %d: %v", i, n, len(place), want, p.ahead.data)
		}
		last := -4
		for _, page := range p.ahead.data[1:] {
			at, full := place[page]
			if !full || at < last+4 {
				t.Fatalf("case %d: page %d, full: %v, is number %d behind %d", i, page, full, at, last)
			}
			last = at
			some++
		}
	}
	if some == 0 {
		t.Error("no pages at all")
	}
}

// A growing plan frees its old buffers, for any combination of growing buffers.
func TestPlanGrows(t *testing.T) {
	m, lib, _ := fakeGPU(t, 90, 8, 232448)
	objects := lib.Live()
	plan := m.engine.NewPlan()
	for _, dim := range []int{64, 256, 128, 256} {
		memory := &plan.memory
		for _, parts := range []int64{0, int64(dim) << 10} {
			plan.size(&Capacity{Sequences: dim, Rows: dim, Pages: dim}, &Capacity{})
			noError(t, memory.reserve(m.engine, plan.lists(), workspaceSize{tileRows: BlockRows, dim: dim, scores: int64(dim) << 8, parts: parts}))
		}
		live := 0
		for _, b := range memory.buffers() {
			if *b != nil {
				live++
			}
		}
		for i := range memory.staging {
			if memory.staging[i].host != nil {
				live += 2 // and its event
			}
		}
		if n := lib.Live() - objects; n != live {
			t.Errorf("heads of %d: %d objects in the driver, %d of the plan", dim, n, live)
		}
	}
	noError(t, plan.Close())
	if n := lib.Live(); n != objects {
		t.Errorf("%d objects after Close, %d before", n, objects)
	}
}
