package kvstore

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/reftest"
)

// Heads and pages are dealt out in order and evenly: each page of each head is on one member, and no member is left without.
func TestShares(t *testing.T) {
	for members := 1; members <= 8; members++ {
		g := new(ongpu.GPU)
		g.Members = make([]*ongpu.GPU, members)
		for heads := 1; heads <= 20; heads++ {
			for shard := shardAuto; shard <= shardContext; shard++ {
				for _, window := range []int{0, 5} {
					const pages = 23
					c := Config{Device: g, KVHeads: heads, Pages: pages, Shard: shard, Window: window}
					name := fmt.Sprintf("%d heads, %d members, %v, window %d", heads, members, shard, window)
					all, shards, err := c.divide("test")
					byHeads := shard == shardHeads || shard == shardAuto && window > 0
					if members > 1 && (byHeads && heads < members || shard == shardContext && window > 0) {
						if !errors.Is(err, errs.ErrUnsupported) {
							t.Errorf("%s: %v", name, err)
						}
						continue
					}
					if err != nil {
						t.Fatal(err)
					}
					switch want := members; {
					case byHeads:
						want = 1
					case shard == shardAuto && heads%members == 0:
						want = 1
					case shard == shardAuto && members%heads == 0:
						want = members / heads
						fallthrough
					case shard == shardContext:
						if shards != want {
							t.Errorf("%s: %d places", name, shards)
						}
					}
					var of [pages][20]int
					for _, s := range all {
						if s.heads.N < 1 || s.heads.N > (heads*shards+members-1)/members || s.shard.Of != shards {
							t.Errorf("%s: %+v", name, s)
						}
						own := 0
						for page := range int32(pages) {
							if !s.shard.Has(page) {
								continue
							}
							if int(s.shard.Own(page)) != own {
								t.Errorf("%s: page %d is %d there, want %d", name, page, s.shard.Own(page), own)
							}
							own++
							for h := range s.heads.N {
								of[page][s.heads.First+h]++
							}
						}
						if own != s.shard.Count(pages) || own < pages/shards || own > pages/shards+1 {
							t.Errorf("%s: %d pages of %d", name, own, s.shard.Count(pages))
						}
					}
					for page := range pages {
						for h := range heads {
							if of[page][h] != 1 {
								t.Fatalf("%s: %d members have head %d of page %d", name, of[page][h], h, page)
							}
						}
					}
				}
			}
		}
	}
}

// TestRowsOfNobody: rows of an output that no sequence has become 0, and no others, however sequences lie.
func TestRowsOfNobody(t *testing.T) {
	for _, c := range []struct {
		seqs []attn.Sequence
		had  int // rows from the first on that are left alone
	}{
		{nil, 0},
		{[]attn.Sequence{{Row: 0, Queries: 2}, {Row: 2, Queries: 3}}, 5},
		{[]attn.Sequence{{Row: 0, Queries: 2}, {Row: 2}, {Row: 2, Queries: 5}}, 7},
		{[]attn.Sequence{{Row: 3, Queries: 2}}, 0}, // gaps: all are cleared, before attention writes
	} {
		p := &hostPlan{geometry: attn.Problem{Heads: 3, ValueDim: 2}, seqs: c.seqs}
		out := slices.Repeat([]float32{7}, 7*6)
		clearOthers(p, out)
		for i, v := range out {
			if want := float32(7); v != want && i < 6*c.had || v != 0 && i >= 6*c.had {
				t.Errorf("%v: element %d of row %d is %v", c.seqs, i%6, i/6, v)
			}
		}
	}
}

// TestHostSlabs copies pages and moves tokens of a format of several planes with scales: all that pages have of a token goes along.
func TestHostSlabs(t *testing.T) {
	c := Config{Layers: 2, KVHeads: 3, PageSize: 4, Pages: 5, Format: attn.Format{
		Planes:    [attn.MostPlanes]attn.Plane{{DType: attn.Float16, Dim: 5, Scales: attn.ScalesByGroup, Group: 2}, {DType: attn.Float32, Dim: 2}, {DType: attn.BFloat16, Dim: 3, Scales: attn.ScalesByToken}},
		KeyPlanes: 2, Value: attn.Columns{Plane: 2, Dim: 3},
	}}
	h := NewHost(&c)
	rng := reftest.Rand(t)
	all, largest := 0, 0
	h.eachSlab(func(s attn.Slab, bytes []byte) {
		for i := range bytes {
			bytes[i] = byte(rng.IntN(256))
		}
		all, largest = all+len(bytes), max(largest, len(bytes))
	})
	if a, l := c.Bytes(); a != all || l != largest {
		t.Errorf("%d bytes, the largest slab %d; want %d and %d", a, l, all, largest)
	}
	type token struct{ page, slot int }
	read := func(at token) (b []byte) { // by the strides of an engine
		h.eachSlab(func(s attn.Slab, bytes []byte) {
			n := s.Row * s.DType.Size()
			for head := range c.KVHeads {
				b = append(b, bytes[((at.page*c.KVHeads+head)*c.PageSize+at.slot)*n:][:n]...)
			}
		})
		return b
	}
	want := map[token]string{}
	for page := range c.Pages {
		for slot := range c.PageSize {
			want[token{page, slot}] = string(read(token{page, slot}))
		}
	}
	if err := h.CopyPages("test", []Copy{{To: 1, From: 4}, {To: 0, From: 1}}); err != nil {
		t.Fatal(err)
	}
	for slot := range c.PageSize {
		want[token{1, slot}], want[token{0, slot}] = want[token{4, slot}], want[token{4, slot}]
	}
	if err := h.MoveSlots("test", []Move{{To: Slot{2, 3}, From: Slot{3, 1}}, {To: Slot{3, 1}, From: Slot{3, 0}}}); err != nil {
		t.Fatal(err)
	}
	want[token{2, 3}], want[token{3, 1}] = want[token{3, 1}], want[token{3, 0}]
	for at, w := range want {
		if string(read(at)) != w {
			t.Errorf("page %d, slot %d is not what it should be", at.page, at.slot)
		}
	}
}
