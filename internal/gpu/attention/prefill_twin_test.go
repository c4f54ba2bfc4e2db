//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/testgpu"
	"gorgonia.org/leanattention/internal/lean"
)

// prefill does what the kernels for many rows do. few is what the launch ahead was told, if it was one
// for few rows.
func (k *twin) prefill(l *testgpu.Launch, few *params) {
	p := (*prefillParams)(unsafe.Pointer(&l.Arg[0]))
	name := strings.Split(strings.Replace(l.Kernel, "_mma", "", 1), "_")
	kv := map[string]attn.DType{"f16": attn.Float16, "bf16": attn.BFloat16}[name[1]]
	dim := 0
	fmt.Sscan(name[2], &dim)
	entry, scored := strings.CutSuffix(l.Kernel, "_score")
	entry, masked := strings.CutSuffix(entry, "_mask")
	like, precise := attn.Problem{Dim: dim, ValueDim: dim, KV: kv, Scale: 1}, strings.HasSuffix(entry, "_precise")
	if scored {
		like.Scale = 0
	}
	if masked {
		like.Window = 1
	}
	kernel := prefillOf(k.e, &like, !precise)
	if kernel == nil || !slices.Contains(kernel.entries, l.Kernel) {
		k.t.Fatalf("%s is not in the table", l.Kernel)
	}
	if l.Blocks != kernel.tile.blocks*k.e.info.Multiprocessors || l.Threads != prefillThreads(kernel) || l.Shared != prefillShared(kernel) || l.Shared > k.e.info.SharedPerBlockMost {
		k.t.Errorf("%s: %d blocks of %d threads and %d bytes of shared memory", l.Kernel, l.Blocks, l.Threads, l.Shared)
	}
	maps := [2]cuda.TensorMap{p.keyMap, p.valueMap}
	if warps := kernel.tile.warps > 0; warps != (l.Kernel[:12] == "prefill_mma_") || warps != (p.keys != 0) || warps != (p.values != 0) || warps != (maps == [2]cuda.TensorMap{}) || l.Overlap != k.e.hasCopyEngine() {
		k.t.Errorf("%s: keys at %d and %v, overlaps %v", l.Kernel, p.keys, p.keyMap, l.Overlap)
	} else if warps {
		maps[0][0], maps[1][0] = p.keys, p.values
	} else if p.keyMap[8] != uint64(p.box) || p.keyMap[9] != 1 || p.keyMap[0]%16 != 0 || kernel.tile.keys%int(p.box) != 0 || p.pages != 0 && p.pageTokens%p.box != 0 {
		k.t.Errorf("map %v, boxes of %d, pages of %d", p.keyMap, p.box, p.pageTokens)
	}
	// What rows have in common with the other kernel's.
	a := &attention{twin: k, params: &params{keyMap: maps[0]}, dim: dim, kv: kv, grid: 1, rows: p.rows}
	a.keys, a.values, a.query, a.out, a.lse = maps[0][0], maps[1][0], p.query, p.out, p.lse
	a.pages, a.Masked, a.pageTokens, a.pageRows, a.headRows = p.pages, p.masked, p.pageTokens, p.pageRows, p.headRows
	a.queryRow, a.queryHead, a.outRow, a.outHead, a.lseRow, a.lseHead = p.queryRow, p.queryHead, p.outRow, p.outHead, p.lseRow, p.lseHead
	a.heads, a.group, a.Causal, a.scale, a.perGroup = p.heads, p.group, p.causal, float32(lean.Log4E*float64(p.natural)), 1/float32(p.group)
	a.queryType, a.outType = p.queryType, p.outType
	if scored || masked {
		if scored {
			a.scale = p.scale
		}
		if of := (*scoredPrefillParams)(unsafe.Pointer(p)).score; of != (scoreParams{}) || scored && p.natural != lean.Ln4 {
			k.t.Fatalf("%s: %+v", l.Kernel, of) // not done here
		}
	} else if other := p.queryType != gpu.Code(kv) || p.outType != gpu.Code(kv); other != (len(name) == 4) && !precise {
		k.t.Errorf("%s: queries of type %d, outputs of type %d", l.Kernel, p.queryType, p.outType)
	}
	switch {
	case p.beside == 0:
		a.writeMasked(0)
		k.stored = map[[2]int]int{}
	case few == nil || (few.seqs == p.seqs) != (few.out == p.out) || few.keys != p.keyMap[0]:
		k.t.Fatalf("beside the launch of %+v", few)
	default:
		if few.seqs != p.seqs { // of another plan, whose outputs are others
			k.stored = map[[2]int]int{}
		} // else its rows are stored
		free := l.Blocks
		for b := range l.Blocks {
			if testgpu.At[work](few.Work, b).tiles > 0 {
				free--
			}
		}
		for b := free; b < l.Blocks; b++ {
			if *testgpu.At[int32](p.starts, b) != *testgpu.At[int32](p.starts, b+1) {
				k.t.Fatalf("%d blocks beside others that leave %d", b+1, free)
			}
		}
	}
	outputs := map[[3]int32]prefillTile{} // by sequence, head and block: what there was of each
	for b := range l.Blocks {
		begin, end := int(*testgpu.At[int32](p.starts, b)), int(*testgpu.At[int32](p.starts, b+1))
		for i := begin; i < end; i++ {
			t := testgpu.At[prefillTile](p.tiles, i)
			at := [3]int32{t.seq, t.head, t.block}
			all, there := outputs[at]
			switch {
			case there != (t.part > 0), there && (t.part != all.part+1 || t.first != all.end || t.parts != all.parts || t.host != all.host), !there && t.first != 0, t.part >= t.parts:
				k.t.Fatalf("block %d has %+v, behind %+v", b, t, all)
			case t.parts == 1:
			case p.partials%16 != 0 || p.partials == 0 || p.counters == 0:
				k.t.Fatalf("parts, and nowhere to put them: %d, %d", p.partials, p.counters)
			case int(t.host+t.part) != b, t.part > 0 && i != begin, t.part == 0 && i != end-1, t.first%int32(kernel.tile.keys) != 0, t.end <= t.first:
				k.t.Fatalf("block %d has %+v as number %d of [%d,%d)", b, t, i, begin, end)
			}
			outputs[at] = *t
		}
	}
	for _, t := range outputs {
		if t.part != t.parts-1 {
			k.t.Fatalf("%+v is the last part", t)
		}
		w := place{s: *testgpu.At[sequence](p.seqs, int(t.seq)), head: int(t.head)}
		for r := range kernel.tile.rows {
			row := int(t.block)*kernel.tile.rows + r
			if row >= int(w.s.queries*p.group) {
				break
			}
			if end := int(t.end); end < int(w.s.keys) && (p.causal == 0 || end < int(w.s.keys-w.s.queries)+row/int(p.group)+1) {
				k.t.Fatalf("tile %+v of sequence %+v ends before what row %d sees", t, w.s, row)
			}
			w.block = row / BlockRows
			s := a.attendRow(&w, row, 0, math.MaxInt)
			a.resultOf(&w, row, &s)
		}
	}
	for at, n := range k.stored {
		if n != 1 {
			k.t.Fatalf("row %v (and head) was stored %d times", at, n)
		}
	}
}

// prefillOf is the kernel for a prompt, nil where there is none of its own.
func prefillOf(e *Engine, g *attn.Problem, same bool) *kernel {
	k := e.find(&want{problem: g, features: g.Features(), rows: 300, same: same})
	if k != nil && (k.way.parts == 0 || k.way.same != same) {
		return nil
	}
	return k
}

// Which plans have output tiles for the kernels for many rows.
func TestFakePrefillSupport(t *testing.T) {
	base := attn.Problem{Heads: 4, KVHeads: 2, Dim: 64, ValueDim: 64, KV: attn.Float16, Scale: 1, Mask: attn.Mask{Causal: true}, PageTokens: 16,
		Query: attn.Strides{Row: 256, Head: 64}, Out: attn.Strides{Row: 256, Head: 64}, LSE: attn.Strides{Row: 4, Head: 1},
		Key: attn.PageStrides{Page: 2048, Head: 1024, Row: 64}, Value: attn.PageStrides{Page: 2048, Head: 1024, Row: 64}}
	for _, f := range testgpu.Fakes {
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
		"a head dim":   func(g *attn.Problem) { g.Dim, g.ValueDim = 72, 72 },
		"float32":      func(g *attn.Problem) { g.KV = attn.Float32 },
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
	masked := &scoredPrefillWay // masks alone
	if m.runsBeside() {
		masked = &maskedPrefillWay
	}
	for what, change := range map[string]func(*attn.Problem){
		"a window": func(g *attn.Problem) { g.Window = 7 },
		"sinks":    func(g *attn.Problem) { g.Sinks = true },
		"a tree":   func(g *attn.Problem) { g.Tree = true },
	} {
		g := base
		change(&g)
		if k := prefillOf(m.engine, &g, true); k == nil || k.way != masked {
			t.Errorf("%s: no kernel for masks", what)
		}
		if k := prefillOf(m.engine, &g, false); k == nil || k.way != &preciseScoredPrefillWay {
			t.Errorf("%s, operands of several types: no kernel for masks and score modifications", what)
		}
		g.Scale = -1
		if k := prefillOf(m.engine, &g, true); k == nil || k.way != &scoredPrefillWay {
			t.Errorf("%s, scale below: no kernel for masks and score modifications", what)
		}
	}
	for what, change := range map[string]func(*attn.Problem){
		"a window and a soft cap": func(g *attn.Problem) { g.Window, g.Cap = 7, 30 },

		"a soft cap": func(g *attn.Problem) { g.Cap = 30 },
		"slopes":     func(g *attn.Problem) { g.Slopes = "slopes" },
		"a bias":     func(g *attn.Problem) { g.Bias.Keys = 1 },
		// Their products are scaled before the largest is looked for.
		"no scale":    func(g *attn.Problem) { g.Scale = 0 },
		"scale below": func(g *attn.Problem) { g.Scale = -1 },
	} {
		g := base
		change(&g)
		if k := prefillOf(m.engine, &g, true); k == nil || k.way != &scoredPrefillWay {
			t.Errorf("%s: no kernel for masks and score modifications", what)
		}
		if k := prefillOf(m.engine, &g, false); k == nil || k.way != &preciseScoredPrefillWay {
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
		for _, kernel := range []*kernel{plan.look.prefill.same, plan.look.prefill.precise} {
			if (kernel != nil) != want {
				t.Errorf("%d queries: output tiles: %v", queries, !want)
			}
		}
		noError(t, plan.Close())
	}
}
