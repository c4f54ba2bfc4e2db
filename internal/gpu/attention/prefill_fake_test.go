//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/lean"
)

// prefillOf returns the prefill kernel for a prompt, or nil.
func prefillOf(e *Engine, g *attn.Problem, same bool) *kernel {
	k := e.find(&want{problem: g, features: g.Features(), rows: 300, same: same})
	if k != nil && (k.parts == 0 || k.same() != same) {
		return nil
	}
	return k
}

// TestFakePrefillSupport: which plans have output tiles for the prefill kernels.
func TestFakePrefillSupport(t *testing.T) {
	base := attn.Problem{Heads: 4, KVHeads: 2, Dim: 64, ValueDim: 64, Pages: attn.Separate(attn.Float16, 64, 64, attn.PageStrides{Page: 2048, Head: 1024, Row: 64}, attn.PageStrides{Page: 2048, Head: 1024, Row: 64}), Scale: 1, Mask: attn.Mask{Causal: true}, PageTokens: 16,
		Query: attn.Strides{Row: 256, Head: 64}, Out: attn.Strides{Row: 256, Head: 64}, LSE: attn.Strides{Row: 4, Head: 1},
	}
	for _, f := range enginetest.Fakes {
		t.Run(f.Name, func(t *testing.T) {
			m, _, _ := fakeGPU(t, f.Capability, f.SMs, f.Shared)
			testPrefillSupport(t, m, base)
		})
	}
}

func testPrefillSupport(t *testing.T, m *machine, base attn.Problem) {
	for _, same := range []bool{true, false} {
		if prefillOf(m.engine, &base, same) == nil {
			t.Errorf("operands of one type %v: no kernel", same)
		}
	}
	for what, change := range map[string]func(*attn.Problem){
		"a head dim":   func(g *attn.Problem) { setDims(g, 72, 72) },
		"float32":      func(g *attn.Problem) { g.Pages = g.Pages.As(attn.Float32) },
		"invariance":   func(g *attn.Problem) { g.Invariant = true },
		"unfused":      func(g *attn.Problem) { g.Unfused = true },
		"a schedule":   func(g *attn.Problem) { g.Policy = lean.Policy{Kind: lean.PerHead} },
		"workers":      func(g *attn.Problem) { g.Workers = 3 },
		"LeanTiles":    func(g *attn.Problem) { g.TileTokens = 64 },
		"rows of q":    func(g *attn.Problem) { g.Query.Row = 262 },
		"heads of out": func(g *attn.Problem) { g.Out.Head = 66 },
	} {
		for _, same := range []bool{true, false} {
			g := base
			change(&g)
			if prefillOf(m.engine, &g, same) != nil {
				t.Errorf("%s, operands of one type %v: there is a kernel", what, same)
			}
		}
	}
	is := func(k *kernel, parts int, changes bool) bool {
		return k != nil && k.scored && k.parts == parts && k.changes == changes
	}
	for what, change := range map[string]func(*attn.Problem){
		"a window": func(g *attn.Problem) { g.Window = 7 },
		"sinks":    func(g *attn.Problem) { g.Sinks = true },
		"a tree":   func(g *attn.Problem) { g.Tree = true },
	} {
		g := base
		change(&g)
		if k := prefillOf(m.engine, &g, true); !is(k, 1, !m.runsBeside()) {
			t.Errorf("%s: no kernel for masks", what)
		}
		if k := prefillOf(m.engine, &g, false); !is(k, 2, true) {
			t.Errorf("%s, operands of several types: no kernel for masks and score modifications", what)
		}
		g.Scale = -1
		if k := prefillOf(m.engine, &g, true); !is(k, 1, true) {
			t.Errorf("%s, scale below: no kernel for masks and score modifications", what)
		}
	}
	for what, change := range map[string]func(*attn.Problem){
		"a window and a soft cap": func(g *attn.Problem) { g.Window, g.Cap = 7, 30 },

		"a soft cap": func(g *attn.Problem) { g.Cap = 30 },
		"slopes":     func(g *attn.Problem) { g.Slopes = "slopes" },
		"a bias":     func(g *attn.Problem) { g.Bias.Keys = 1 },
		// Kernels scale the products before they search the maximum.
		"no scale":    func(g *attn.Problem) { g.Scale = 0 },
		"scale below": func(g *attn.Problem) { g.Scale = -1 },
	} {
		g := base
		change(&g)
		if k := prefillOf(m.engine, &g, true); !is(k, 1, true) {
			t.Errorf("%s: no kernel for masks and score modifications", what)
		}
		if k := prefillOf(m.engine, &g, false); !is(k, 2, true) {
			t.Errorf("%s, operands of several types: no kernel for masks and score modifications", what)
		}
	}
	g := base
	g.Query.Row = 260 // a row of float16 begins at a multiple of 8 bytes
	if prefillOf(m.engine, &g, true) != nil || prefillOf(m.engine, &g, false) == nil {
		t.Error("the kernel that loads rows at once has them at multiples of 16 bytes, the other one need not")
	}
	// Prompts have output tiles, single tokens have none.
	for queries, want := range map[int]bool{1: false, 8: false, 1000: true} {
		plan := m.engine.NewPlan()
		pages := make([]int32, 63)
		for i := range pages {
			pages[i] = int32(i)
		}
		noError(t, plan.Build(base, []attn.Sequence{{Queries: queries, Keys: 1000, Pages: pages}}, queries))
		for _, kernel := range []*kernel{plan.form.prefill.same, plan.form.prefill.precise} {
			if (kernel != nil) != want {
				t.Errorf("%d queries: output tiles: %v", queries, !want)
			}
		}
		noError(t, plan.Close())
	}
}

// A step reserves output tiles for all rows, one more for each sequence that has rows, and a place for each thread block.
func TestReservePrefill(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 13, 232448)
	for _, c := range []struct {
		capacity Capacity
		tiles    int // of a head
	}{
		{Capacity{Sequences: 3, Rows: 1000, Pages: 100}, 1000*4/192 + 1 + 3},
		{Capacity{Sequences: 30, Rows: 20, Pages: 100}, 20*4/192 + 1 + 20},
		{Capacity{Sequences: 1, Rows: 192, Pages: 100}, 192*4/192 + 1 + 1},
	} {
		g := paged(8, 2, 64)
		g.Pages, g.QueryType, g.Causal = g.Pages.As(attn.Float16), attn.Float16, true
		k := m.engine.findPrefill(&g, c.capacity.queries()*4).first()
		if k == nil || k.tile.rows != 192 {
			t.Fatalf("%+v: kernel %+v", c, k)
		}
		if tiles, parts := m.engine.reservePrefill(&g, &c.capacity); tiles != c.tiles*2+m.engine.prefillBlocks(k) || parts != m.engine.partBytes(k) {
			t.Errorf("%+v: %d output tiles and %d bytes of parts, want %d and %d", c, tiles, parts, c.tiles*2+m.engine.prefillBlocks(k), m.engine.partBytes(k))
		}
	}
	g := paged(8, 2, 64)
	if tiles, parts := m.engine.reservePrefill(&g, &Capacity{Sequences: 3, Rows: 1, Pages: 10}); tiles != 0 || parts != 0 {
		t.Errorf("%d output tiles and %d bytes without a kernel", tiles, parts)
	}
}

// TestFakeStreamed: prefill kernels let the L2 cache evict keys first that one output tile alone reads, if they do not fit.
func TestFakeStreamed(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 132, 227<<10)
	m.engine.info.L2Bytes = 50 << 20
	m.engine.choice = takePrefill
	for _, c := range []struct {
		queries, keys    int
		single, streamed bool
	}{{1, 1 << 17, true, true}, {4, 1 << 17, true, true}, {5, 1 << 17, false, true}, {1, 1 << 12, true, false}} {
		g := paged(32, 1, 128)
		s := attn.Sequence{Queries: c.queries, Keys: c.keys, Pages: make([]int32, c.keys/g.PageTokens)}
		p := m.engine.NewPlan()
		noError(t, p.Build(g, []attn.Sequence{s}, c.queries))
		if p.form.prefill.first() == nil || p.single != c.single || p.streams(&g) != c.streamed {
			t.Errorf("%+v: %v, %v", c, p.single, p.streams(&g))
		}
		noError(t, p.Close())
	}
}
