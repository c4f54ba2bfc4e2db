package attention

import (
	"cmp"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"

	"pgregory.net/rapid"
)

// Output tiles of random lengths are assigned whole or in parts: every key once, in the order that the kernels need,
// and in nearly even shares.
func TestPrefillParts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		blocks := rapid.IntRange(1, 140).Draw(t, "blocks")
		p := &Plan{engine: &Engine{Eager: rapid.Bool().Draw(t, "eager")}, prefilled: prefilled{prefillGrid: blocks}}
		var all int64
		fixed := p.engine.fixedSteps()
		for i, n := range rapid.SliceOfN(rapid.SampledFrom([]int{0, 1, 127, 128, 129, 300, 1000, 5000, 40000}), 1, 300).Draw(t, "keys") {
			p.outputs = append(p.outputs, prefillTile{seq: int32(i), end: int32(n), parts: 1})
			all += p.engine.partCost(p.outputs[i].steps())
		}
		most := p.deal(blocks)
		p.dealPrefill()
		checkPrefill(t, p, most, func(steps int64) int64 { return steps + fixed })
		workers, steps := p.cutPrefill(blocks, most)
		if steps > most || workers > blocks || workers == 0 && steps != most {
			t.Fatalf("%d blocks have %d steps each, whole output tiles %d", workers, steps, most)
		}
		if workers == 0 {
			workers = rapid.IntRange(1, blocks).Draw(t, "workers")
		}
		p.partPrefill(workers)
		// A block may begin within the fixed cost of its first output tile, and end within a step.
		even := (all + int64(workers) - 1) / int64(workers)
		checkPrefill(t, p, even+2*snapped+2*fixed, p.engine.partCost)
		for b := workers; b < blocks; b++ {
			if p.prefillStarts.data[b] != p.prefillStarts.data[b+1] {
				t.Fatalf("block %d of %d that are to work has something", b, workers)
			}
		}
	})
}

// checkPrefill: no block has more than `most` steps.
func checkPrefill(t *rapid.T, p *Plan, most int64, cost func(steps int64) int64) {
	if len(p.prefillStarts.data) != p.prefillGrid+1 || int(p.prefillStarts.data[p.prefillGrid]) != len(p.prefilling.data) || len(p.prefilling.data) > len(p.outputs)+p.prefillGrid {
		t.Fatalf("%d blocks: %v, of %d", p.prefillGrid, p.prefillStarts.data, len(p.prefilling.data))
	}
	seen := make([]prefillTile, len(p.outputs))
	for b := range p.prefillGrid {
		begin, end := p.prefillStarts.data[b], p.prefillStarts.data[b+1]
		steps := int64(0)
		for i := begin; i < end; i++ {
			x := p.prefilling.data[i]
			steps += cost(x.steps())
			before := seen[x.seq]
			switch {
			case x.part > 0 && (x.part != before.part+1 || x.first != before.end || x.host != before.host || x.parts != before.parts || before.parts == 0),
				x.part == 0 && (before.parts > 0 || x.first != 0),
				x.parts > 1 && (int(x.host+x.part) != b || x.part > 0 && i != begin || x.part == 0 && i != end-1 || x.end <= x.first || x.first%cutKeys != 0):
				t.Fatalf("block %d: %+v behind %+v", b, x, before)
			}
			seen[x.seq] = x
		}
		if steps > most {
			t.Fatalf("block %d has %d steps, and should have no more than %d", b, steps, most)
		}
	}
	for i, x := range seen {
		if x.part != x.parts-1 || x.end != p.outputs[i].end {
			t.Fatalf("output tile %+v ends with %+v", p.outputs[i], x)
		}
	}
}

// An output tile has the steps with visible keys, and one more at most if a window begins after sink tokens. The kernel
// computes the same steps (KeySteps in kernels/attn_prefill_variant.cuh).
func TestPrefillSteps(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := func(least, most int, what string) int { return rapid.IntRange(least, most).Draw(t, what) }
		g := attn.Problem{KVHeads: 1, Dim: 64, Pages: attn.Separate(attn.Float16, 64, 64, attn.PageStrides{}, attn.PageStrides{}), Mask: attn.Mask{Causal: true, Window: draw(0, 700, "window")}}
		g.Heads = draw(1, 8, "group")
		if g.Window > 0 {
			g.SinkTokens = draw(0, 300, "sink tokens")
		}
		s := sequence{queries: int32(draw(1, 300, "queries"))}
		s.keys = s.queries + int32(draw(0, 1500, "keys before"))
		rows, p := 128, &Plan{engine: &Engine{}}
		p.prefillOutputs(&g, []sequence{s}, 0, 1, rows)
		slices.SortFunc(p.outputs, func(a, b prefillTile) int { return cmp.Or(int(a.seq-b.seq), int(a.block-b.block)) })
		next, covered := 0, true // row
		for _, tile := range p.outputs {
			begin, end := int(tile.block)*rows, min(int(tile.block+1)*rows, int(s.queries)*g.Heads)
			if front := frontRows(&g, &s, rows); tile.seq == 1 && isPlain(&g) {
				begin, end = begin+front, min(end+front, int(s.queries)*g.Heads)
			} else if front > 0 {
				end = front
			}
			covered, next = covered && begin == next, end
			first, last := begin/g.Heads, (end-1)/g.Heads
			seen := make([]bool, attn.Ceil(int(s.keys), cutKeys))
			for position := first; position <= last; position++ {
				from, to := g.Mask.Keys(int(s.queries), int(s.keys), position)
				for key := range to {
					if key >= from || key < g.SinkTokens {
						seen[key/cutKeys] = true
					}
				}
			}
			place := int(s.keys-s.queries) + first
			hidden := 0 // as in firstInWindow
			if g.Window > 0 && g.Window <= place {
				if hidden = place - g.Window + 1; hidden <= g.SinkTokens {
					hidden = 0
				}
			}
			front := attn.Ceil(min(g.SinkTokens, hidden), cutKeys)
			gap, more := max(hidden/cutKeys-front, 0), 0
			for c := range int(tile.steps()) {
				at := c
				if c >= front {
					at += gap
				}
				if !seen[at] {
					more++
				}
				seen[at] = false
			}
			if more > 0 && g.SinkTokens == 0 || more > 1 || slices.Contains(seen, true) {
				t.Fatalf("%+v of %+v, %+v: %d steps more than it sees, not among them %v", tile, s, g.Mask, more, seen)
			}
		}
		if !covered || next != int(s.queries)*g.Heads {
			t.Fatalf("%+v of %+v do not cover the rows in order", p.outputs, s)
		}
	})
}

// Few output tiles are cut, many are not.
func TestPrefillCuts(t *testing.T) {
	for _, c := range []struct{ outputs, keys, workers int }{
		{32, 8192, 132}, // a chunk of 128 tokens, 32 heads
		{1, 1 << 20, 132},
		{8, 1024, 16},     // four steps each
		{128, 33280, 0},   // 97% of all blocks
		{256, 8320, 0},    // twice all blocks
		{140, 16384, 132}, // uncut, eight blocks have twice as much as the others
		{1, 128, 0}, {4, 256, 0}, {0, 0, 0}, {1000, 4096, 0},
	} {
		p := &Plan{engine: &Engine{}, prefilled: prefilled{prefillGrid: 132}}
		for range c.outputs {
			p.outputs = append(p.outputs, prefillTile{end: int32(c.keys), parts: 1})
		}
		if workers, _ := p.cutPrefill(132, p.deal(132)); workers != c.workers {
			t.Errorf("%d output tiles of %d keys: parts for %d blocks, want %d", c.outputs, c.keys, workers, c.workers)
		}
	}
}

// Causal prompts of some sequences: shares of blocks are nearly even, and no output tile is cut.
func TestPrefillPrompts(t *testing.T) {
	for _, c := range []struct{ sequences, heads, dim, tokens int }{
		{1, 32, 128, 2048}, {1, 32, 128, 16384}, {16, 32, 128, 1024}, {1, 8, 128, 16384}, {4, 32, 128, 4096},
		{1, 32, 64, 4096}, {1, 32, 64, 16384}, {16, 32, 64, 1024}, {16, 32, 128, 512},
	} {
		rows := map[int]int{64: 192, 128: 128}[c.dim]
		p := &Plan{engine: &Engine{}, prefilled: prefilled{prefillGrid: 132}}
		g := &attn.Problem{Heads: c.heads, KVHeads: c.heads, Dim: c.dim, ValueDim: c.dim, Pages: attn.Separate(attn.Float16, c.dim, c.dim, attn.PageStrides{}, attn.PageStrides{}), Mask: attn.Mask{Causal: true}}
		var seqs []sequence
		for range c.sequences {
			seqs = append(seqs, sequence{queries: int32(c.tokens), keys: int32(c.tokens)})
		}
		p.prefillOutputs(g, seqs, 0, 132, rows)
		var all int64
		for i := range p.outputs {
			all += p.outputs[i].steps() + tileSteps
		}
		most, even := p.deal(132), all/132
		if most > even+even/12 {
			t.Errorf("%+v: a block has %d steps, and all have %d in the mean", c, most, even)
		}
		if workers, _ := p.cutPrefill(132, most); workers != 0 {
			t.Errorf("%+v: parts for %d blocks", c, workers)
		}
	}
}

// The choice is nearly the fastest, by the times in us that BenchmarkGPUPrefill measured on an H100.
func TestPrefillChoice(t *testing.T) {
	ways := [...]string{"few", "whole", "parts"}
	for _, c := range []struct {
		batch, queries, behind, heads, kv, dim int
		us                                     [2][3]float64 // with operands of float16 and of float32, by method
	}{
		{1, 512, 32768, 32, 8, 128, [2][3]float64{{3206, 609.1, 599.8}, {3226, 974.4, 965}}},
		{8, 128, 8192, 32, 8, 128, [2][3]float64{{2614, 317.2, 331.9}, {2738, 494.6, 488.2}}},
		{1, 128, 8192, 32, 32, 128, [2][3]float64{{253.9, 116.6, 69.7}, {254.4, 220.5, 91.77}}},
		{1, 128, 8192, 32, 8, 128, [2][3]float64{{215.5, 113.5, 57.91}, {212.2, 220.4, 82.93}}},
		{1, 128, 1024, 32, 32, 64, [2][3]float64{{23.88, 19.83, 17}, {24.8, 38.31, 29.26}}},
		{1, 128, 0, 32, 32, 64, [2][3]float64{{8.553, 7.95, 7.751}, {11.39, 13.43, 13.57}}},
		{1, 512, 1024, 32, 32, 128, [2][3]float64{{189, 36.79, 43.59}, {192.4, 60.29, 69.7}}},
		{1, 64, 32768, 32, 8, 128, [2][3]float64{{649.3, 400.8, 115.3}, {648.1, 800.4, 140.7}}},
		{1, 16, 32768, 32, 8, 128, [2][3]float64{{180.3, 403.2, 73.76}, {180.6, 797.7, 87.05}}},
		{1, 2048, 0, 32, 32, 128, [2][3]float64{{592.1, 110, 162.2}, {653.3, 178.2, 387.9}}},
		{1, 1024, 0, 8, 8, 128, [2][3]float64{{51.73, 20.9, 20.53}, {60.25, 39.65, 44.03}}},
		{4, 33, 4096, 32, 8, 128, [2][3]float64{{113.8, 65.21, 62.29}, {116.6, 120.2, 82.45}}},
	} {
		g := &attn.Problem{Heads: c.heads, KVHeads: c.kv, Dim: c.dim, ValueDim: c.dim, Pages: attn.Separate(attn.Float16, c.dim, c.dim, attn.PageStrides{}, attn.PageStrides{}), Mask: attn.Mask{Causal: true}}
		var seqs []attn.Sequence
		for i := range c.batch {
			seqs = append(seqs, attn.Sequence{Row: i * c.queries, Queries: c.queries, Keys: c.behind + c.queries})
		}
		of := prefillOfTable(c.dim, hopper)
		p := &Plan{engine: &Engine{blocks: 132}}
		for i, rows := range [...]attn.DType{attn.Float16, attn.Float32} {
			g.QueryType = rows
			chosen := p.divide(g, seqs, of)
			way := 0
			switch {
			case chosen.first() == nil:
			case chosen.workers == 0:
				way = 1
			default:
				way = 2
			}
			if us := c.us[i]; us[way] > 1.12*slices.Min(us[:]) {
				t.Errorf("%d x %d behind %d, %d/%d heads of %d, %d parts of queries: %s is chosen, of %v with %v us", c.batch, c.queries, c.behind, c.heads, c.kv, c.dim, i+1, ways[way], ways, us)
			}
		}
	}
}

// The shared memory of prefill kernels is what their units lay out: queries, factors of two parts, rings, barriers.
func TestPrefillShared(t *testing.T) {
	for _, c := range []struct {
		dim             int
		tile            tile
		parts           int
		threads, shared int
	}{
		{64, tile{rows: 192, keys: 128, stages: 4}, 1, 512, 180640},
		{64, tile{rows: 192, keys: 64, stages: 6}, 2, 512, 198624},
		{80, tile{rows: 128, keys: 128, stages: 2}, 1, 384, 196960},
		{128, tile{rows: 128, keys: 64, stages: 3}, 2, 384, 230784},
		{256, tile{rows: 128, keys: 64, stages: 2}, 1, 384, 196960},
		{256, tile{rows: 128, keys: 32, stages: 3}, 2, 384, 230272},
		{64, tile{rows: 128, keys: 64, stages: 4, warps: 4}, 1, 128, 49152},
		{80, tile{rows: 128, keys: 32, stages: 4, warps: 8}, 2, 256, 98816},
		{128, tile{rows: 128, keys: 64, stages: 3, warps: 4}, 1, 128, 81920},
		{256, tile{rows: 64, keys: 32, stages: 2, warps: 4}, 2, 128, 98560},
		{64, tile{rows: 128, keys: 64, stages: 6}, 2, 384, 165344},
	} {
		k := &kernel{dims: []int{c.dim}, tile: c.tile, parts: c.parts}
		if threads, shared := prefillThreads(k), prefillShared(k); threads != c.threads || shared != c.shared {
			t.Errorf("%+v: %d threads and %d bytes", c, threads, shared)
		}
	}
}
