package lean

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/script"

	"pgregory.net/rapid"
)

// batch is the input of a plan. Tests compute from it step by step what the plan computes in closed form.
type batch struct {
	heads   int
	seqs    [][]int64
	policy  Policy
	workers int
}

func (b batch) plan(p *Plan) *Plan {
	p.Reset(b.heads)
	for _, s := range b.seqs {
		p.Add(s)
	}
	p.Cut(b.policy, b.workers)
	return p
}

// outputs returns every output tile of the batch in linear order as a whole Work.
func (b batch) outputs() []Work {
	var all []Work
	for s, blocks := range b.seqs {
		for h := range b.heads {
			for q, n := range blocks {
				all = append(all, Work{Seq: s, Head: h, Block: q, Output: int64(len(all)), End: n, Tiles: n})
			}
		}
	}
	return all
}

func policies() *rapid.Generator[Policy] {
	return rapid.Custom(func(t *rapid.T) Policy {
		return Policy{
			Kind:   rapid.SampledFrom([]Kind{StreamK, FixedSplit, PerHead}).Draw(t, "kind"),
			Splits: rapid.IntRange(-1, 12).Draw(t, "splits"),
			Slack:  rapid.IntRange(-1, 50).Draw(t, "slack"),
			Whole:  rapid.Int64Range(0, 40).Draw(t, "whole"),
			Hybrid: rapid.Bool().Draw(t, "hybrid"),
		}
	})
}

func batches() *rapid.Generator[batch] {
	tiles := rapid.OneOf(rapid.Just(int64(0)), rapid.Int64Range(0, 9)) // consecutive empty output tiles, too
	return rapid.Custom(func(t *rapid.T) batch {
		return batch{
			heads:   rapid.IntRange(0, 4).Draw(t, "heads"),
			seqs:    rapid.SliceOfN(rapid.SliceOfN(tiles, 0, 4), 0, 6).Draw(t, "tiles"),
			policy:  policies().Draw(t, "policy"),
			workers: rapid.IntRange(-1, 40).Draw(t, "workers"),
		}
	})
}

// works returns the work of every worker.
func works(p *Plan) [][]Work {
	all := make([][]Work, p.Workers())
	for w := range all {
		it := p.Work(w)
		for k, ok := it.Next(); ok; k, ok = it.Next() {
			all[w] = append(all[w], k)
		}
		if _, ok := it.Next(); ok {
			panic("an iterator came back to life")
		}
	}
	return all
}

// checkGoTo checks that an iterator that goes to workers in any order returns the work of each.
func checkGoTo(t errorer, p *Plan, all [][]Work) {
	if len(all) == 0 {
		return
	}
	it := p.Work(0)
	for i := range 3 * len(all) { // in order; then forwards and backwards in strides
		w := i
		if i >= len(all) {
			w = i * 7 % len(all)
		}
		it.GoTo(w)
		for n, want := range all[w][:min(len(all[w]), 1+i%4)] {
			if k, ok := it.Next(); !ok || k != want {
				t.Fatalf("work %d of worker %d after GoTo: %+v (%t), want %+v", n, w, k, ok, want)
			}
		}
	}
}

// parts returns the number of parts of output tiles.
func parts(p *Plan) (n int) {
	for _, list := range works(p) {
		n += len(list)
	}
	return n
}

// errorer is implemented by *testing.T and *rapid.T.
type errorer interface{ Fatalf(string, ...any) }

// check checks all documented properties of Plan's ranges, work and slots against the plain list of output tiles.
func check(t errorer, b batch, p *Plan) {
	outputs := b.outputs()
	var tiles int64
	for _, o := range outputs {
		tiles += o.Tiles
	}
	if p.Tiles() != tiles || p.Outputs() != int64(len(outputs)) {
		t.Fatalf("plan of %d LeanTiles in %d output tiles, want %d in %d", p.Tiles(), p.Outputs(), tiles, len(outputs))
	}
	if g := p.Workers(); g > max(b.workers, 1) || (g == 0) != (tiles == 0) {
		t.Fatalf("%d workers of %d for %d LeanTiles", g, b.workers, tiles)
	}

	// Ranges are contiguous and cover all LeanTiles. Those of parts come before those of whole output tiles.
	var at, least, most int64
	loads := make([]int64, p.Workers())
	for w := range p.Workers() {
		begin, end := p.Range(w)
		if begin != at || end < begin {
			t.Fatalf("worker %d has [%d, %d), the one before it ended at %d", w, begin, end, at)
		}
		at = end
		loads[w] = end - begin
	}
	hybrid := at < tiles
	if hybrid && (b.policy.Kind != StreamK || !b.policy.Hybrid) {
		t.Fatalf("a plan of %+v has whole output tiles behind its ranges", b.policy)
	}
	for w := range p.Workers() {
		begin, end := p.Wholes(w)
		if !hybrid && end != begin || hybrid && (begin != at || end < begin || p.cuts[w] == p.cuts[w+1]) {
			t.Fatalf("worker %d has whole output tiles in [%d, %d), the one before it ended at %d", w, begin, end, at)
		}
		at += end - begin
		loads[w] += end - begin
	}
	if at != tiles {
		t.Fatalf("the last range ends at LeanTile %d of %d", at, tiles)
	}
	least = math.MaxInt64
	for _, n := range loads {
		least, most = min(least, n), max(most, n)
	}
	if b.policy.Kind == StreamK && p.Workers() > 0 && (most-least > 1 || least < 1) {
		even := (tiles-1)/min(int64(max(b.workers, 1)), tiles) + 1
		if b.policy.Slack <= 0 || most > max(even+max(1, even*int64(b.policy.Slack)/100), b.policy.Whole) {
			t.Fatalf("stream-K loads from %d to %d LeanTiles, where an even share is %d", least, most, even)
		}
		// Slack reduces the number of parts.
		strict := b
		strict.policy.Slack = 0
		if n, limit := parts(p), parts(strict.plan(new(Plan))); n > limit {
			t.Fatalf("%d parts, where even shares have %d", n, limit)
		}
	}

	// Work is the outputs' LeanTiles in order, each once, cut at the borders of ranges.
	type holder struct {
		w int
		k Work
	}
	held := make(map[int64][]holder)
	all := works(p)
	checkGoTo(t, p, all)
	for w, list := range all {
		begin, end := p.Range(w)
		var sum int64
		for _, k := range list {
			if sum >= end-begin && !k.Whole() {
				t.Fatalf("worker %d has part %+v among whole output tiles", w, k)
			}
			if k.Begin < 0 || k.Begin >= k.End || k.End > k.Tiles {
				t.Fatalf("worker %d: bad work %+v", w, k)
			}
			want := outputs[k.Output]
			want.Begin, want.End = k.Begin, k.End
			if k != want {
				t.Fatalf("worker %d: work %+v, want %+v", w, k, want)
			}
			held[k.Output] = append(held[k.Output], holder{w, k})
			sum += k.End - k.Begin
		}
		if sum != loads[w] {
			t.Fatalf("worker %d has work of %d LeanTiles, and ranges of %d", w, sum, loads[w])
		}
	}
	slots := make(map[int]bool)
	hosts := make(map[int]bool)
	for _, o := range outputs {
		parts := held[o.Output]
		var next int64
		for i, h := range parts {
			if h.k.Begin != next || i > 0 && h.w <= parts[i-1].w {
				t.Fatalf("output tile %d is not covered in worker order: %+v", o.Output, parts)
			}
			next = h.k.End
			if h.k.Host() != (i == 0) || h.k.Finishing() != (i == len(parts)-1) || h.k.Whole() != (len(parts) == 1) {
				t.Fatalf("output tile %d, part %d of %d: host %t, finishing %t, whole %t",
					o.Output, i, len(parts), h.k.Host(), h.k.Finishing(), h.k.Whole())
			}
			first, last, count := p.Sharers(h.k)
			if first != parts[0].w || last != parts[len(parts)-1].w || count != len(parts) {
				t.Fatalf("sharers of %+v: %d to %d, %d of them; parts %+v", h.k, first, last, count, parts)
			}
			if b.policy.Kind == PerHead && len(parts) > 1 {
				t.Fatalf("a per-head plan split %+v", h.k)
			}
			if h.k.Whole() {
				continue
			}
			slot := p.Slot(h.w, h.k)
			if slot < 0 || slot >= 2*p.Workers() || slots[slot] {
				t.Fatalf("worker %d: slot %d of %+v is out of range or taken", h.w, slot, h.k)
			}
			slots[slot] = true
			if h.k.Host() {
				if hosts[first] {
					t.Fatalf("worker %d is the host block of two shared output tiles", first)
				}
				hosts[first] = true
			}
		}
		if next != o.Tiles {
			t.Fatalf("output tile %d: %d LeanTiles of %d are covered", o.Output, next, o.Tiles)
		}
		// Workers between the first and the last sharer have no other work.
		for i := 1; i < len(parts); i++ {
			for w := parts[i-1].w + 1; w < parts[i].w; w++ {
				if len(all[w]) != 0 {
					t.Fatalf("worker %d lies between sharers of output tile %d and has work %+v", w, o.Output, all[w])
				}
			}
		}
	}
}

func TestPlanProperties(t *testing.T) {
	var p Plan // one plan for all batches, which must not keep data of an earlier batch
	rapid.Check(t, func(t *rapid.T) {
		b := batches().Draw(t, "batch")
		check(t, b, b.plan(&p))
	})
}

// TestScript compares schedules with a script file, which explains each:
//
//	plan [heads N] tiles T/T,T/... workers N [KIND N] [slack N] [whole N] [hybrid]
//
// plans these LeanTiles for the blocks of each sequence, in N heads (1 by default), and prints a summary; works prints
// all work. KIND is the policy's kind. The N after fixed-split is the number of splits.
func TestScript(t *testing.T) {
	kinds := map[string]Kind{StreamK.String(): StreamK, FixedSplit.String(): FixedSplit, PerHead.String(): PerHead}
	var p *Plan
	script.Run(t, "testdata/schedules.txt", func(words []string) (string, error) {
		if words[0] == "works" {
			text := ""
			for w, list := range works(p) {
				text += fmt.Sprintf("%d:", w)
				for _, k := range list {
					text += fmt.Sprintf(" sequence %d, head %d, block %d [%d, %d) of %d", k.Seq, k.Head, k.Block, k.Begin, k.End, k.Tiles)
					if first, last, count := p.Sharers(k); count > 1 {
						text += fmt.Sprintf(" by %d workers from %d to %d, slot %d", count, first, last, p.Slot(w, k))
					}
					text += ";"
				}
				text = strings.TrimSuffix(text, ";") + "\n"
			}
			return text, nil
		}
		b := batch{heads: 1}
		for i := 1; i < len(words); i++ {
			number := 0
			if i+1 < len(words) {
				number, _ = strconv.Atoi(words[i+1])
			}
			switch word := words[i]; word {
			case "heads":
				b.heads = number
			case "workers":
				b.workers = number
			case "slack":
				b.policy.Slack = number
			case "whole":
				b.policy.Whole = int64(number)
			case "hybrid":
				b.policy.Hybrid = true
				continue
			case "tiles":
				for seq := range strings.SplitSeq(words[i+1], "/") {
					var blocks []int64
					for n := range strings.SplitSeq(seq, ",") {
						tiles, err := strconv.ParseInt(n, 10, 64)
						if err != nil {
							return "", err
						}
						blocks = append(blocks, tiles)
					}
					b.seqs = append(b.seqs, blocks)
				}
			default:
				kind, ok := kinds[word]
				if !ok {
					return "", fmt.Errorf("there is no %q", word)
				}
				if b.policy.Kind, b.policy.Splits = kind, number; number == 0 {
					continue
				}
			}
			i++
		}
		p = b.plan(new(Plan))
		for _, blocks := range b.seqs { // a negative number of LeanTiles counts as none
			for i := range blocks {
				blocks[i] = max(blocks[i], 0)
			}
		}
		check(t, b, p)
		text := fmt.Sprintf("%d workers, %d parts", p.Workers(), parts(p))
		var most, mostWhole int64
		leastWhole := int64(math.MaxInt64)
		for w := range p.Workers() {
			begin, end := p.Range(w)
			first, last := p.Wholes(w)
			most, mostWhole, leastWhole = max(most, end-begin+last-first), max(mostWhole, last-first), min(leastWhole, last-first)
		}
		text += fmt.Sprintf(", at most %d LeanTiles", most)
		if mostWhole > 0 {
			text += fmt.Sprintf(", from %d to %d of whole output tiles", leastWhole, mostWhole)
		}
		return text, nil
	})
}

// TestCuts compares the cuts with the formulas in Plan's comment, evaluated on a list of all units.
func TestCuts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := batches().Draw(t, "batch")
		b.policy.Slack, b.policy.Hybrid = 0, false
		var units []int64 // first LeanTile of each unit
		var tile int64
		for _, o := range b.outputs() {
			switch b.policy.Kind {
			case StreamK:
				for i := range o.Tiles {
					units = append(units, tile+i)
				}
			case PerHead:
				units = append(units, tile)
			case FixedSplit:
				s := int64(max(b.policy.Splits, 1))
				for k := range s {
					units = append(units, tile+min(k*((o.Tiles+s-1)/s), o.Tiles))
				}
			}
			tile += o.Tiles
		}
		g := min(max(b.workers, 1), len(units))
		if tile == 0 {
			g = 0
		}
		p := b.plan(new(Plan))
		if p.Workers() != g {
			t.Fatalf("%d workers, want %d", p.Workers(), g)
		}
		for w := range g {
			if begin, _ := p.Range(w); begin != units[w*len(units)/g] {
				t.Fatalf("cut(%d) = %d, want %d", w, begin, units[w*len(units)/g])
			}
		}
	})
}

// TestDegenerate covers cases in which planners of other projects have failed: no workers, no LeanTiles, one more or
// one fewer than workers.
func TestDegenerate(t *testing.T) {
	var p Plan
	p.Cut(Policy{}, 4)
	if p.Workers() != 0 || p.Tiles() != 0 || p.Outputs() != 0 {
		t.Errorf("the zero Plan has %d workers, %d LeanTiles, %d output tiles", p.Workers(), p.Tiles(), p.Outputs())
	}
	for _, workers := range []int{-1, 0, 1, 2, 132} {
		for _, tiles := range []int64{0, 1, 2, int64(workers) - 1, int64(workers), int64(workers) + 1} {
			tiles = max(tiles, 0)
			ones := make([]int64, tiles)
			for i := range ones {
				ones[i] = 1
			}
			for _, policy := range []Policy{{}, {Kind: PerHead}, {Kind: FixedSplit}, {Kind: FixedSplit, Splits: 3},
				{Kind: FixedSplit, Splits: math.MaxInt}} {
				for name, seqs := range map[string][][]int64{
					"one output tile":  {{tiles}},
					"one tile each":    {ones},
					"empty neighbours": {{}, {0}, {0, 0}, {0, tiles, 0}, {0, 0}, {3}, {}, {0, 0, 1}, {}},
					"none":             {},
				} {
					t.Run(fmt.Sprintf("%v-%d/%d workers/%d tiles/%s", policy.Kind, policy.Splits, workers, tiles, name), func(t *testing.T) {
						for heads := range 3 {
							b := batch{heads: heads, seqs: seqs, policy: policy, workers: workers}
							check(t, b, b.plan(&p))
						}
					})
				}
			}
		}
	}
}

// TestHuge: 2^40 LeanTiles in one context and 2^54 in all, on up to 2^20 workers. w*T needs 74 bits.
func TestHuge(t *testing.T) {
	const long = 1 << 40
	for _, c := range []struct {
		heads int
		seqs  [][]int64
	}{
		{1, [][]int64{{long}}},
		{3, [][]int64{{long + 1}, {1, 0, long - 7}, {}, {5}}},
		{1 << 13, [][]int64{{long}, {long - 1}}},
	} {
		for _, workers := range []int{1, 132, 1<<20 - 1, 1 << 20} {
			for _, policy := range []Policy{{}, {Kind: PerHead}, {Kind: FixedSplit, Splits: 7}, {Kind: FixedSplit, Splits: math.MaxInt}} {
				var p Plan
				b := batch{heads: c.heads, seqs: c.seqs, policy: policy, workers: workers}
				b.plan(&p)
				t.Run(fmt.Sprintf("%v-%d/%d heads/%d workers", policy.Kind, policy.Splits, c.heads, workers), func(t *testing.T) {
					checkHuge(t, b, &p)
				})
			}
		}
	}
}

// checkHuge follows the linear order once with a cursor: there are too many LeanTiles and output tiles to list.
func checkHuge(t *testing.T, b batch, p *Plan) {
	cur := Work{}                     // the expected output tile
	left := int64(-1)                 // its remaining LeanTiles; -1 before the first
	var first, last, count, parts int // its sharers
	next := func() (Work, bool) {
		for ; cur.Seq < len(b.seqs); cur.Seq++ {
			for ; cur.Head < b.heads; cur.Head++ {
				for ; cur.Block < len(b.seqs[cur.Seq]); cur.Block++ {
					if cur.Tiles = b.seqs[cur.Seq][cur.Block]; cur.Tiles > 0 {
						return cur, true
					}
					cur.Output++
				}
				cur.Block = 0
			}
			cur.Head = 0
		}
		return cur, false
	}
	var least, most int64 = math.MaxInt64, 0
	for w := range p.Workers() {
		begin, end := p.Range(w)
		least, most = min(least, end-begin), max(most, end-begin)
		it := p.Work(w)
		for k, ok := it.Next(); ok; k, ok = it.Next() {
			if left <= 0 {
				if left == 0 {
					cur.Block++
					cur.Output++
				}
				if _, ok := next(); !ok {
					t.Fatalf("worker %d: work %+v after the last output tile", w, k)
				}
				left = cur.Tiles
				first, last, count = p.Sharers(k)
				parts = 0
				if first != w {
					t.Fatalf("worker %d hosts %+v, sharers say %d", w, k, first)
				}
			}
			want := cur
			want.Begin, want.End = cur.Tiles-left, k.End
			if k != want || k.End <= k.Begin || k.End > k.Tiles {
				t.Fatalf("worker %d: %+v, want %+v", w, k, want)
			}
			begin += k.End - k.Begin
			left -= k.End - k.Begin
			if parts++; left == 0 && (last != w || count != parts) {
				t.Fatalf("worker %d finishes %+v as part %d, sharers say %d to %d, %d of them", w, k, parts, first, last, count)
			}
		}
		if begin != end {
			t.Fatalf("worker %d: work up to %d in a range that ends at %d", w, begin, end)
		}
	}
	if left > 0 {
		t.Fatalf("%d LeanTiles of %+v have no worker", left, cur)
	}
	cur.Block++
	cur.Output++
	if k, ok := next(); ok {
		t.Fatalf("%+v has no worker", k)
	}
	if b.policy.Kind == StreamK && most-least > 1 {
		t.Fatalf("stream-K loads from %d to %d", least, most)
	}
}

// TestSteadyState: a plan that has grown is built and read without allocations.
func TestSteadyState(t *testing.T) {
	var p Plan
	blocks := []int64{3, 0, 17, 5}
	for _, policy := range []Policy{{}, {Slack: 50}, {Hybrid: true}, {Slack: 20, Hybrid: true}, {Kind: PerHead}, {Kind: FixedSplit, Splits: 3}} {
		var tiles, sharers int64
		step := func() {
			p.Reset(8)
			for range 5 {
				p.Add(blocks)
				p.Add(nil)
			}
			p.Cut(policy, 16)
			for w := range p.Workers() {
				it := p.Work(w)
				for k, ok := it.Next(); ok; k, ok = it.Next() {
					_, _, n := p.Sharers(k)
					sharers += int64(n)
					tiles += k.End - k.Begin
				}
			}
		}
		step()
		if n := testing.AllocsPerRun(20, step); n != 0 {
			t.Errorf("%v: %v allocations a step", policy.Kind, n)
		}
		// One step here, one that AllocsPerRun warms up with, and its 20.
		if want := int64(22 * 5 * 8 * 25); tiles != want {
			t.Errorf("%v: %d LeanTiles in 22 steps, want %d", policy.Kind, tiles, want)
		}
	}
}

func TestKindString(t *testing.T) {
	for kind, want := range map[Kind]string{StreamK: "stream-k", FixedSplit: "fixed-split", PerHead: "per-head", 9: "unknown"} {
		if kind.String() != want {
			t.Errorf("Kind(%d) is %q, want %q", uint8(kind), kind, want)
		}
	}
}

// Whole output tiles are assigned with the least limit of LeanTiles for which workers have all small output tiles.
func TestWholesLeast(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	apart, all := 0, 0
	for range 300 {
		var p, q Plan
		heads, workers, longest := 1+rng.IntN(8), 2+rng.IntN(40), 1+rng.IntN(60)
		p.Reset(heads)
		q.Reset(heads)
		for range 1 + rng.IntN(100) {
			blocks := make([]int64, 1+rng.IntN(6)/5)
			for i := range blocks {
				blocks[i] = int64(1 + rng.IntN(longest))
			}
			if rng.IntN(20) == 0 {
				blocks[0] *= 40
			}
			p.Add(blocks)
			q.Add(blocks)
		}
		most := p.Tiles()/int64(workers) - 1
		if p.setWholeTiles(workers); most < 1 {
			continue
		}
		m := int64(1)
		for m < most && !q.packLast(workers, m, most) {
			m++
		}
		if q.packLast(workers, m, most) {
			all++
		}
		if q.wholes[0] == q.Tiles() {
			q.wholes = q.wholes[:0]
		}
		if apart += len(q.wholes); !slices.Equal(p.wholes, q.wholes) {
			t.Fatalf("%d workers have %v, with %d LeanTiles at most %v", workers, p.wholes, m, q.wholes)
		}
	}
	if apart == 0 || all == 0 {
		t.Error("no worker has whole output tiles")
	}
}
