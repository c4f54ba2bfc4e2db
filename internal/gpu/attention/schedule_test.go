//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
)

// The packed records of random batches equal package lean's work.
func TestPackWorks(t *testing.T) {
	rng := reftest.Rand(t)
	var p lean.Plan
	for range 3000 {
		p.Reset(1 + rng.IntN(3))
		seqs := make([]sequence, 1+rng.IntN(6))
		for i := range seqs {
			seqs[i].row = int32(i)
			tiles := make([]int64, 1+rng.IntN(4))
			for j := range tiles {
				tiles[j] = int64(max(rng.IntN(9)-2, 0))
			}
			p.Add(tiles)
		}
		works := make([]work, 1+rng.IntN(40))
		for i := range works {
			works[i].tiles = -1
		}
		p.Cut(lean.Policy{Kind: lean.Kind(rng.IntN(3)), Splits: 1 + rng.IntN(5), Hybrid: rng.IntN(2) == 0}, 1+rng.IntN(len(works)))
		packWorks(&p, seqs, works)
		for b := range works {
			w := works[b]
			if b >= p.Workers() {
				if w != (work{}) {
					t.Fatalf("block %d has no work: %+v", b, w)
				}
				continue
			}
			it := p.Work(b)
			left, wholes := w.tiles, w.wholeTiles
			for first := true; ; first = false {
				k, ok := it.Next()
				if !ok {
					break
				}
				if left == 0 {
					if wholes == w.wholeTiles && (int(w.wholeSeq) != k.Seq || int(w.wholeHead) != k.Head || int(w.wholeBlock) != k.Block || w.firstWhole != seqs[k.Seq]) {
						t.Fatalf("block %d goes on at %+v: %+v", b, k, w)
					}
					if wholes -= int32(k.Tiles); !k.Whole() {
						t.Fatalf("block %d has part %+v among whole output tiles: %+v", b, k, w)
					}
					continue
				}
				left -= int32(k.End - k.Begin)
				host, _, sharers := p.Sharers(k)
				if first && (int(w.seq) != k.Seq || int(w.head) != k.Head || int(w.block) != k.Block || int64(w.tile) != k.Begin || w.first != seqs[k.Seq]) {
					t.Fatalf("block %d begins at %+v: %+v", b, k, w)
				}
				if !k.Whole() && !k.Host() && (int(w.host) != host || int(w.sharers) != sharers) {
					t.Fatalf("block %d, %d sharers from %d: %+v", b, sharers, host, w)
				}
				if !k.Whole() && k.Host() && (host != b || int(w.guests) != sharers) {
					t.Fatalf("block %d hosts %d sharers: %+v", b, sharers, w)
				}
				slot := 2 * b
				if k.Begin == 0 {
					slot++
				}
				if slot != p.Slot(b, k) {
					t.Fatalf("block %d: slot %d is %d", b, p.Slot(b, k), slot)
				}
			}
			if left != 0 || wholes != 0 {
				t.Fatalf("block %d: %d LeanTiles and %d of whole output tiles are left of %+v", b, left, wholes, w)
			}
		}
	}
}

// TestSlack: how many of an H200's thread blocks have work. By measurement they are fewer than all, if whole output
// tiles then cost little. With more output tiles than blocks, the bytes above an even share decide.
func TestSlack(t *testing.T) {
	for _, c := range []struct{ batch, heads, group, keys, dim, blocks int }{
		{16, 12, 1, 1024, 64, 132}, // after parts
		{64, 32, 1, 1024, 64, 132},
		{16, 32, 1, 1024, 128, 128},
		{64, 8, 6, 1024, 64, 128},
		{16, 8, 4, 1024, 128, 128},
		{6, 40, 1, 1024, 128, 132}, // two each are 93 KB above an even share
		{6, 40, 1, 1024, 64, 120},  // 48 KB
		{12, 16, 1, 256, 128, 96},  // too short for that
		{6, 64, 1, 1024, 128, 128}, // 46 KB
		{16, 48, 1, 1024, 64, 128},
		{64, 8, 7, 1024, 128, 128}, // 62 KB
		{4, 64, 1, 2048, 128, 128},
		{16, 64, 1, 1024, 64, 128},
		{16, 40, 1, 1024, 128, 132}, // 78 KB
		{80, 8, 4, 1024, 128, 132},
		{80, 8, 8, 1024, 128, 132},
		{16, 48, 1, 1024, 128, 132}, // 93 KB
		{8, 48, 1, 2048, 128, 132},
		{96, 8, 4, 1024, 128, 132},
		{48, 8, 8, 2048, 128, 132},
		{16, 56, 1, 1024, 128, 132}, // 109 KB
		{112, 8, 8, 1024, 128, 132},
		{128, 8, 8, 1024, 128, 132}, // 124 KB
		{64, 8, 8, 4096, 64, 132},
		{64, 8, 16, 4096, 64, 132},
		{6, 8, 6, 1024, 64, 48},
		{16, 8, 1, 4096, 128, 128},
		{16, 8, 4, 8192, 128, 128}, // 537 MB
		{16, 8, 1, 16384, 64, 132}, // 537 MB, and one row to merge
		{16, 8, 8, 16384, 64, 128}, // eight rows to merge
		{16, 8, 5, 16384, 128, 132},
		{1, 64, 1, 16384, 128, 132},
		{16, 8, 1, 16384, 128, 132},
		{64, 8, 8, 4096, 128, 132}, // 1074 MB
		{64, 8, 1, 16384, 64, 132},
		{1, 32, 1, 262144, 64, 132},
		{16, 48, 1, 16384, 64, 132},
		{4, 8, 6, 262144, 128, 132},
	} {
		p := Plan{engine: &Engine{blocks: 132, info: cuda.Info{Capability: 90}}}
		for i := range c.batch {
			p.seqs.data = append(p.seqs.data, sequence{row: int32(i), queries: 1, keys: int32(c.keys)})
		}
		p.schedule(&attn.Problem{Heads: c.heads * c.group, KVHeads: c.heads, Dim: c.dim, ValueDim: c.dim, Pages: attn.Separate(attn.Float16, c.dim, c.dim, attn.PageStrides{}, attn.PageStrides{})}, p.seqs.data, p.engine.blocks, false, BlockRows)
		if n := p.sched.Workers(); n != c.blocks {
			t.Errorf("%+v: %d blocks", c, n)
		}
	}
	// In a launch with other work, fewer blocks with one part each are faster up to longer reads.
	p := Plan{engine: &Engine{blocks: 132, info: cuda.Info{Capability: 90}}, fused: true}
	p.seqs.data = []sequence{{queries: 1, keys: 32768}}
	for _, want := range []int{128, 132} {
		p.schedule(&attn.Problem{Heads: 32, KVHeads: 32, Dim: 128, ValueDim: 128, Pages: attn.Separate(attn.Float16, 128, 128, attn.PageStrides{}, attn.PageStrides{})}, p.seqs.data, p.engine.blocks, false, BlockRows)
		if n := p.sched.Workers(); n != want {
			t.Errorf("fused, %v: %d blocks, want %d", p.fused, n, want)
		}
		p.fused = false
	}
}

// TestWorth: how many thread blocks are used if output tiles are few or small, and whether blocks that share output
// tiles merge together.
func TestWorth(t *testing.T) {
	h200, h100 := cuda.Info{MemoryClockKHz: 3201000, MemoryBusBits: 6144}, cuda.Info{MemoryClockKHz: 2619000, MemoryBusBits: 5120}
	for _, c := range []struct {
		batch, heads, keys, dim, page, blocks int
		together                              bool
		memory                                cuda.Info
	}{
		{1, 32, 512, 64, 0, 32, false, h200}, // 131 KB each: nothing to merge
		{1, 1, 512, 64, 0, 1, false, h200},
		{1, 1, 1024, 64, 0, 6, true, h200}, // a little over 44 KB for each block
		{1, 8, 1024, 128, 0, 64, true, h200},
		{1, 8, 4096, 64, 0, 128, true, h200},
		{1, 32, 1024, 64, 0, 128, true, h200},
		{1, 48, 1024, 64, 0, 48, false, h200},
		{1, 48, 1024, 64, 0, 48, false, h100},
		{1, 40, 1024, 64, 0, 120, true, h200},
		{1, 40, 768, 64, 0, 40, false, h200},
		{1, 64, 1024, 64, 16, 128, true, h200}, // blocks request small pages more slowly
		{1, 64, 1024, 64, 16, 128, true, cuda.Info{}},
		{1, 64, 1024, 64, 48, 128, true, h200}, // copied as three copies of 16
		{1, 56, 1024, 64, 32, 56, false, h200},
		{1, 56, 512, 128, 16, 56, false, h200},
		{1, 64, 512, 128, 8, 128, true, h200},
		{1, 48, 1024, 64, 16, 96, true, h100},
		{1, 52, 1024, 64, 16, 52, false, h100}, // a memory that fewer blocks saturate
		{1, 64, 1024, 64, 8, 128, true, h100},
		{1, 32, 512, 64, 16, 96, true, h200},
		{1, 32, 256, 64, 16, 32, false, h200},
		{1, 48, 2048, 64, 0, 96, true, h200},
		{1, 48, 4096, 64, 0, 132, true, h200},
		{1, 40, 2048, 64, 0, 120, true, h200},
		{1, 80, 1024, 64, 0, 132, true, h200}, // more output tiles than pairs of multiprocessors
		{1, 32, 65536, 128, 0, 132, true, h200},
		{16, 12, 1024, 64, 0, 132, false, h200}, // whole output tiles after parts
		{0, 1, 0, 64, 0, 0, false, h200},
		{-1, 32, 1024, 128, 0, 132, false, h200}, // after a long one: not all blocks have whole output tiles
	} {
		for _, policy := range []lean.Policy{{}, {Kind: lean.FixedSplit, Splits: 4}} {
			for _, capability := range []int{80, 90, 100} {
				info := c.memory
				info.Capability = capability
				p := Plan{engine: &Engine{blocks: 132, info: info}}
				batch := c.batch
				if batch < 0 {
					batch = 31
					p.seqs.data = append(p.seqs.data, sequence{queries: 1, keys: 131072})
				}
				for range batch {
					p.seqs.data = append(p.seqs.data, sequence{row: int32(len(p.seqs.data)), queries: 1, keys: int32(c.keys)})
				}
				g := attn.Problem{Heads: c.heads, KVHeads: c.heads, Dim: c.dim, ValueDim: c.dim, Pages: attn.Separate(attn.Float16, c.dim, c.dim, attn.PageStrides{}, attn.PageStrides{}), PageTokens: max(c.page, 1), Policy: policy}
				// As if fused, with all blocks in use.
				all := Plan{engine: &Engine{blocks: 132, info: p.engine.info, Eager: true}}
				all.seqs = p.seqs
				all.schedule(&g, all.seqs.data, all.engine.blocks, c.page > 0, BlockRows)
				p.fused = true
				p.schedule(&g, p.seqs.data, p.engine.blocks, c.page > 0, BlockRows)
				if !slices.Equal(p.works.data, all.works.data) {
					t.Errorf("%+v, %v, capability %d: fused %d blocks", c, policy.Kind, capability, p.sched.Workers())
				}
				p.fused = false
				p.schedule(&g, p.seqs.data, p.engine.blocks, c.page > 0, BlockRows)
				shares := slices.ContainsFunc(p.works.data, func(w work) bool { return w.guests > 0 })
				merge := shares && capability == 90 && !slices.ContainsFunc(p.works.data, func(w work) bool { return w.wholeTiles > 0 })
				if policy.Kind == lean.StreamK && capability == 90 && (p.sched.Workers() != c.blocks || merge != c.together) {
					t.Errorf("%+v: %d blocks, together: %v", c, p.sched.Workers(), merge)
				}
				for b, w := range p.works.data {
					if (w.wholeSeq == together) != merge {
						t.Fatalf("%+v, %v, capability %d: block %d: %+v", c, policy.Kind, capability, b, w)
					}
				}
			}
		}
	}
}

// LeanTiles have a power of two of keys, and at least a chunk; without a size the default, which batch invariance changes.
func TestTileTokens(t *testing.T) {
	for _, c := range []struct {
		tokens    int
		invariant bool
		want      int
	}{{0, false, 64}, {0, true, 1024}, {1, false, 64}, {64, true, 64}, {65, false, 128}, {100, true, 128}, {128, false, 128}, {1<<30 + 1, false, 1 << 30}} {
		if got := tileTokens(&attn.Problem{TileTokens: c.tokens, Invariant: c.invariant}); got != c.want {
			t.Errorf("%+v: %d keys", c, got)
		}
	}
}

// The states of an output tile that several blocks share are contiguous, and each such block knows where they begin.
func TestPlaceStates(t *testing.T) {
	rng := reftest.Rand(t)
	var p lean.Plan
	several := 0 // plans with more than one shared output tile
	for range 2000 {
		p.Reset(1 + rng.IntN(3))
		seqs := make([]sequence, 1+rng.IntN(6))
		for i := range seqs {
			seqs[i].row = int32(i)
			tiles := make([]int64, 1+rng.IntN(4))
			for j := range tiles {
				tiles[j] = int64(max(rng.IntN(9)-2, 0))
			}
			p.Add(tiles)
		}
		works := make([]work, 1+rng.IntN(40))
		p.Cut(lean.Policy{Kind: lean.Kind(rng.IntN(3)), Splits: 1 + rng.IntN(5)}, 1+rng.IntN(len(works)))
		packWorks(&p, seqs, works)
		got := placeStates(&p, works)
		states, shared, last := 0, 0, -1
		for b := range p.Workers() {
			it := p.Work(b)
			k, ok := it.Next()
			if !ok || k.Host() {
				continue // the block begins its first output tile
			}
			host, _, _ := p.Sharers(k)
			if host != last {
				if last = host; works[host].wholeBlock != int32(states) {
					t.Fatalf("the host, block %d, has states from %d on, want %d", host, works[host].wholeBlock, states)
				}
				states += int(k.Tiles)
				shared++
			}
			if want := int32(states) - int32(k.Tiles); works[b].wholeHead != want {
				t.Fatalf("block %d of host %d has states from %d on, want %d", b, host, works[b].wholeHead, want)
			}
		}
		if got != states {
			t.Fatalf("%d states, want %d", got, states)
		}
		if shared > 1 {
			several++
		}
	}
	if several < 100 {
		t.Errorf("only %d plans share more than one output tile", several)
	}
}
