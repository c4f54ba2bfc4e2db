//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"reflect"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
)

// ScheduleOf returns what a GPU's plan builds and reserves, and has every LeanTile once.
func TestScheduleOf(t *testing.T) {
	for _, f := range enginetest.Fakes {
		t.Run(f.Name, func(t *testing.T) {
			m, _, _ := fakeGPU(t, f.Capability, f.SMs, f.Shared)
			testScheduleOf(t, m)
		})
	}
}

func testScheduleOf(t *testing.T, m *machine) {
	rng := reftest.Rand(t)
	m.engine.Eager = false
	kinds := map[string]int{}
	for i := range reftest.AtLeast(reftest.Cases(t, 15, 100), func() bool {
		return kinds["cut"] > 0 && kinds["whole"] > 0 && kinds["many rows"] > 0 && (!m.runsBeside() || kinds["both"] > 0)
	}) {
		group := enginetest.Pick(rng, 1, 4, 16, 40)
		kv := 1 + rng.IntN(6)
		g := paged(kv*group, kv, enginetest.Pick(rng, 64, 128))
		g.Causal, g.QueryType, g.TileTokens = rng.IntN(2) == 0, enginetest.Pick(rng, attn.Float16, attn.Float32), enginetest.Pick(rng, 0, 128)
		longest := enginetest.Pick(rng, 50, 3000, 40000)
		var seqs []attn.Sequence
		row := 0
		for range 1 + rng.IntN(8) {
			queries := enginetest.Pick(rng, 0, 1, 1, 1, 2, 100)
			seqs = append(seqs, sequenceOf(row, queries, queries+rng.IntN(longest), 0))
			row += queries
		}
		got, err := ScheduleOf(m.engine.info, g, seqs)
		noError(t, err)
		p := m.engine.NewPlan()
		noError(t, p.Build(g, seqs, 0))

		var entries []string
		for _, l := range got.Launches {
			entries = append(entries, l.Entry)
		}
		want := p.Kernels()
		slices.Sort(want)
		if slices.Sort(entries); !slices.Equal(entries, want) {
			t.Fatalf("case %d: launches of %v, want %v", i, entries, want)
		}
		bytes := int64(0)
		for _, b := range p.memory.buffers() {
			if b != &p.memory.table && *b != nil {
				bytes += (*b).Len()
			}
		}
		if got.Workspace != bytes {
			t.Fatalf("case %d: a workspace of %d bytes, and the plan has %d", i, got.Workspace, bytes)
		}
		checkShares(t, &g, seqs, got)
		for _, l := range got.Launches {
			if l.Tokens != cutKeys || p.form.prefill.taken(&g, false) == nil {
				continue
			}
			kinds["many rows"]++
			for b, shares := range l.Blocks {
				if n := int(p.prefillStarts.data[b+1] - p.prefillStarts.data[b]); n != len(shares) {
					t.Fatalf("case %d: block %d has %d shares, and gets %d", i, b, len(shares), n)
				}
			}
		}
		if p.form.both {
			kinds["both"]++
		}
		if l := got.Launches[len(got.Launches)-1]; p.form.prefill.taken(&g, false) == nil || p.form.both {
			for b, w := range p.works.data {
				n := w.tiles + max(w.wholeTiles, 0)
				for _, s := range l.Blocks[b] {
					n -= int32(s.End - s.Begin)
					if s.End-s.Begin == s.Tiles {
						kinds["whole"]++
					} else {
						kinds["cut"]++
					}
				}
				if n != 0 || len(l.Blocks[b]) > 0 && (int(w.head) != l.Blocks[b][0].Head || int(w.seq) >= len(p.seqs.data) || int(p.seqs.data[w.seq].row) != seqs[l.Blocks[b][0].Sequence].Row) {
					t.Fatalf("case %d: block %d has %+v, and gets %+v", i, b, l.Blocks[b], w)
				}
			}
		}
		noError(t, p.Close())
	}
}

// Thread blocks have every LeanTile of latents once, also if first output tiles of all sequences come first.
func TestScheduleOfLatents(t *testing.T) {
	rng := reftest.Rand(t)
	for _, f := range enginetest.Fakes {
		info := cuda.Info{Capability: f.Capability, Multiprocessors: f.SMs, SharedPerBlockMost: f.Shared}
		for _, heads := range []int{16, 65, 100, 128, 200} {
			for _, most := range []int{1, 3} {
				const d, v, page = latentDim, latentValue, 64
				g := attn.Problem{
					Heads: heads, KVHeads: 1, Dim: d, ValueDim: v, PageTokens: page, Scale: 0.1, Mask: attn.Mask{Causal: true}, QueryType: attn.Float16,
					Pages: latentPages(attn.Float16, d, v).Packed(1, page), Query: attn.Strides{Row: heads * d, Head: d}, Out: attn.Strides{Row: heads * v, Head: v}, LSE: attn.Strides{Row: heads, Head: 1},
				}
				var seqs []attn.Sequence
				row := 0
				for range 1 + rng.IntN(5) {
					queries := 1 + rng.IntN(most)
					seqs = append(seqs, sequenceOf(row, queries, queries+rng.IntN(9000), 0))
					row += queries
				}
				got, err := ScheduleOf(info, g, seqs)
				noError(t, err)
				checkShares(t, &g, seqs, got)
			}
		}
	}
}

// checkShares checks that s has every LeanTile of every output tile once.
func checkShares(t *testing.T, g *attn.Problem, seqs []attn.Sequence, s Schedule) {
	t.Helper()
	type output struct{ sequence, head, block int }
	first := make([]int, len(seqs)) // rows of each sequence so far, times heads
	for _, l := range s.Launches {
		seen := map[output][]bool{}
		for _, shares := range l.Blocks {
			for _, x := range shares {
				o := output{x.Sequence, x.Head, x.Block}
				if seen[o] == nil {
					seen[o] = make([]bool, x.Tiles)
				}
				if x.Begin < 0 || x.End > x.Tiles || int(x.Tiles) != len(seen[o]) {
					t.Fatalf("%+v of %d LeanTiles", x, len(seen[o]))
				}
				for i := x.Begin; i < x.End; i++ {
					if seen[o][i] {
						t.Fatalf("LeanTile %d comes twice: %+v", i, x)
					}
					seen[o][i] = true
				}
			}
		}
		for o, tiles := range seen {
			if slices.Contains(tiles, false) {
				t.Fatalf("%+v: LeanTiles without a block: %v", o, tiles)
			}
			rows := seqs[o.sequence].Queries * g.Group()
			first[o.sequence] += min(rows-o.block*l.Rows, l.Rows)
		}
	}
	for i, rows := range first {
		if s := &seqs[i]; s.Keys > 0 && rows != s.Queries*g.Heads {
			t.Fatalf("%d rows of sequence %d, which has %d queries of %d heads", rows, i, s.Queries, g.Heads)
		}
	}
}

// ScheduleOf refuses unfused attention, and problems without a kernel as Build does.
func TestScheduleOfRefuses(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 13, 232448)
	for _, c := range badGeometries {
		g := paged(4, 2, 64)
		c.spoil(&g)
		s, err := ScheduleOf(m.engine.info, g, nil)
		if wantError(t, "schedule", err, c.want, c.text); !reflect.DeepEqual(s, Schedule{}) {
			t.Errorf("%v, and %+v", err, s)
		}
	}
	g := paged(4, 2, 64)
	g.Unfused = true
	_, err := ScheduleOf(m.engine.info, g, nil)
	wantError(t, "unfused", err, attn.ErrUnsupported, "no schedule")
}
