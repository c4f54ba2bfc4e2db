//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package layers

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/weight"
)

// fakeStack is a stack on a GPU of so many multiprocessors: its megakernels are pairs where
// that is possible.
func fakeStack(t *testing.T, sms int, sh stackShape) (*stack, func() string) {
	m, lib, d := fakeDecoder(t, 90, sms, 232448)
	lib.State().Argument("append_", 8)
	d.leastPairs = 0
	d.withoutSkinny()
	s := newStack(t, m, d, nil, sh)
	lib.Forget()
	return s, lib.Log
}

// Rows that there are kernels of a batch for are no megakernel's.
func TestMegakernelLeavesBatches(t *testing.T) {
	m, _, d := fakeDecoder(t, 90, 13, 232448)
	for rows, want := range map[int]bool{1: true, leastSkinny - 1: true, leastSkinny: false, decodeRows: false} {
		o := Linear{Rows: rows, In: 128, X: m.memory(t, attn.Float32, rows*128), Parts: []LinearPart{{W: m.memory(t, attn.Float16, 128*8), Y: m.memory(t, attn.Float32, rows*8), Out: 8}}}
		if got := d.NewMegakernel().Linear(&o); got != want {
			t.Errorf("%d rows: %v", rows, got)
		}
		for _, x := range []gpu.Memory{o.X, o.Parts[0].W, o.Parts[0].Y} {
			noError(t, x.Buffer.Close())
		}
	}
}

// What a launch of a megakernel is told is what its layers are: every tile of every
// layer has one thread block, every word one writer, and readers find what was made.
func TestMegakernelLaunch(t *testing.T) {
	rng := reftest.Rand(t)
	for i := range 24 {
		// Each has a driver of its own.
		t.Run("", func(t *testing.T) { testMegakernelLaunch(t, rng, i/2, 13+i%2) })
	}
}

func testMegakernelLaunch(t *testing.T, rng *rand.Rand, i, blocks int) {
	sh := stackShape{
		rows: 1 + i%decodeRows, blocks: 1 + rng.IntN(3), heads: 4, kvHeads: 2, dim: []int{64, 128}[i%2], inner: 128 * (1 + rng.IntN(18)),
		vocabulary: enginetest.Pick(rng, 0, 777), pageTokens: 16, kv: []attn.DType{attn.Float16, attn.BFloat16}[i/2%2],
	}
	for range sh.rows {
		sh.keys = append(sh.keys, rng.IntN(200))
	}
	sh.tables, sh.choose, sh.llama = i%3, sh.vocabulary > 0 && rng.IntN(2) == 0, rng.IntN(2) == 0
	s, log := fakeStack(t, blocks, sh)
	split, kernel, turns := 1, fmt.Sprintf("megakernel_%s_%d", gpu.Name(sh.kv), sh.dim), decodeTurns{}
	if sh.llama {
		kernel = fmt.Sprintf("megakernel_llama_%s_%d", gpu.Name(sh.kv), sh.dim)
	}
	if blocks%2 == 0 && sh.dim == pairsDim {
		split, kernel = 2, kernel+"_pairs"
	}
	c := s.megakernel(t)
	if _, err := s.m.Stream.Capture(func() error { return c.Queue(s.m.Stream) }); err != nil {
		t.Fatal(err)
	}
	noError(t, c.Upload())
	var found *enginetest.Launch
	clusters := strings.Count(log(), "cluster 2 1 1\n")
	for _, l := range enginetest.Launches(strings.NewReplacer("cooperative 1\n", "", "cluster 2 1 1\n", "").Replace(log())) {
		if l.Kernel == kernel && found == nil {
			found = &l
		} else {
			t.Fatalf("another launch: %s", l.Kernel)
		}
	}
	if found == nil || !strings.Contains(log(), "cooperative 1\n") {
		t.Fatal("no cooperative launch of a megakernel")
	}
	if clusters != split-1 || found.Blocks != blocks || found.Threads != 256 || found.Shared > 232448 {
		t.Errorf("%+v", *found)
	}
	p, ends := &(*decodeLaunch)(unsafe.Pointer(&found.Arg[0])).p, &(*decodeLaunch)(unsafe.Pointer(&found.Arg[0])).ends
	if got := (*decodeLaunch)(unsafe.Pointer(&found.Arg[0])).turns; sh.llama {
		for i := range sh.dim / 2 {
			turns.turns[i] = s.problem.Rotary.Turns.Of(i)
		}
		if turns.positions, turns.factor = got.positions, 1.25; got != turns || got.positions == 0 {
			t.Errorf("turns by %+v, want %+v", got, turns)
		}
	} else if got != turns {
		t.Errorf("turns by %+v", got)
	}
	if int(p.count) != len(s.ops) || int(p.rows) != sh.rows || p.stages < leastDecodeStages {
		t.Fatalf("%+v for %d layers of %d rows", *p, len(s.ops), sh.rows)
	}
	text := make([]byte, c.program.Len())
	noError(t, c.program.Download(text, 0))
	layers := unsafe.Slice((*decodeLayer)(unsafe.Pointer(&text[0])), p.count)
	feeds := unsafe.Slice((*decodeFeed)(unsafe.Pointer(&text[p.feeds-p.layers])), p.feedCount)
	words := c.tagged.Address()
	made := map[uint64]uint64{} // of words, where their floats go
	writes := func(at, to uint64, n int) {
		if at%16 != 0 || at < words || at+8*uint64(n) > words+uint64(c.tagged.Len()) {
			t.Fatalf("%d words at %d of %d", n, int64(at-words), c.tagged.Len())
		}
		for j := range n {
			w := at + 8*uint64(j)
			if made[w] != 0 || w < p.run+8 {
				t.Fatal("two layers make a word")
			}
			made[w] = to + 4*uint64(j)
		}
	}
	reads := func(what string, at, from uint64) {
		if made[at] != from {
			t.Fatalf("%s reads what goes to %x, and wants %x", what, made[at], from)
		}
	}
	used := func(j int, y gpu.Memory) bool { // by a layer behind j
		for _, op := range s.ops[j+1:] {
			if op.linear == nil && (op.operands.Q == y || op.newK == y || op.newV == y) || op.linear != nil && (op.linear.X == y || op.linear.Residual == y) {
				return true
			}
		}
		return false
	}
	gather := gatherParams{}
	if sh.tables > 0 {
		var then *Gather
		if sh.tables > 1 {
			then = s.front[1]
		}
		gather = s.front[0].params(then)
		writes(ends.gathered, s.x.Address(), sh.rows*sh.heads*sh.dim)
	}
	if ends.gather != gather {
		t.Errorf("begins with %+v, not %+v", ends.gather, gather)
	}
	end := decodeEnds{gather: ends.gather, gathered: ends.gathered}
	if sh.choose {
		last := (*decodeLinear)(unsafe.Pointer(&layers[len(layers)-1].body))
		end.logits, end.ids, end.vocabulary = s.back.Logits.Address(), s.back.IDs.Address(), int32(sh.vocabulary)
		end.shift, end.each, end.rest = last.shift, last.each, last.rest
	}
	if *ends != end {
		t.Errorf("ends with %+v, not %+v", *ends, end)
	}
	feed, first := 0, 0
	for j := range layers {
		op := &s.ops[j]
		if op.linear == nil {
			a := (*decodeAttention)(unsafe.Pointer(&layers[j].body))
			reads("attention's q", a.links.query, op.operands.Q.Address())
			reads("attention's k", a.links.newKeys, op.newK.Address())
			reads("attention's v", a.links.newValues, op.newV.Address())
			writes(a.links.out, op.operands.Out.Address(), op.operands.Out.Len)
			if a.p.Slots != p.slots || layers[j].kind != attentionKind || a.p.Slots < attention.ConsumerWarps || a.p.Slots%attention.ConsumerWarps != 0 || int(a.links.layer) != j || a.links.layers != p.count || a.p.Work != p.work {
				t.Errorf("layer %d: %+v", j, *a)
			}
			continue
		}
		l := (*decodeLinear)(unsafe.Pointer(&layers[j].body))
		if j == 0 && sh.tables == 0 {
			if l.tagged != 0 || l.x != op.linear.X.Address() {
				t.Errorf("layer 0: %+v", *l)
			}
		} else {
			reads("x", l.tagged, op.linear.X.Address())
		}
		if r := op.linear.Residual; r.Buffer != nil && l.residual == 0 {
			reads("the residual", l.residualTagged, r.Address())
		}
		if first %= blocks / split; int(l.shift) != first {
			t.Errorf("layer %d has its first tile at %d, and the one ahead ends before %d", j, l.shift, first)
		}
		tiles := 0
		own := op.linear.Parts
		if op.linear.Gate {
			own = own[:1] // a tile is of both
		}
		for k := range own {
			part := &own[k]
			if used(j, part.Y) {
				writes(l.made[k], part.Y.Address(), sh.rows*part.Out)
			} else if l.made[k] != 0 {
				t.Errorf("layer %d, part %d: words that nobody reads", j, k)
			}
			tiles += attn.Ceil(part.Out, decodeTile)
			if int(l.tiles[k]) != tiles || l.y[k] != part.Y.Address() || l.b[k] != part.B.AddressOr0() || int(l.out[k]) != part.Out {
				t.Errorf("layer %d, part %d: %+v", j, k, *l)
			}
		}
		if int(l.each)*(blocks/split)+int(l.rest) != tiles || l.rest < 0 || int(l.rest) >= blocks/split {
			t.Errorf("layer %d: %d tiles of %d blocks or pairs: %d each, and %d", j, tiles, blocks/split, l.each, l.rest)
		}
		// Tiles are made in the order of their readers' boxes, where each warp has as many.
		woven := 0
		for k := range s.ops {
			if o := s.ops[k].linear; o != nil && len(own) == 1 && o.X.Address() == op.linear.Parts[0].Y.Address() && o.In%(split*gemvWarps*decodeColumns) == 0 && o.In > split*gemvWarps*decodeColumns {
				woven = o.In / (split * gemvWarps * decodeColumns)
			}
		}
		if int(l.woven) != woven {
			t.Errorf("layer %d: woven by %d, want %d", j, l.woven, woven)
		}
		first += tiles
		// Each box of a tile is one warp's.
		boxes := op.linear.In / decodeColumns
		// Two layers' x are side by side where one asks for gamma and beta of the next.
		area := func(l *decodeLinear) [2]int {
			return [2]int{int(l.place), int(l.place) + areaOf(sh.rows, int(l.most), l.norm)}
		}
		if mine := area(l); mine[0] < 0 || mine[0]%16 != 0 || mine[1] > int(p.area) {
			t.Errorf("layer %d has x at %v of %d", j, mine, p.area)
		}
		if j > 0 && s.ops[j-1].linear != nil {
			before, next := (*decodeLinear)(unsafe.Pointer(&layers[j-1].body)), decodeAffine{}
			if l.ready != 0 {
				next = decodeAffine{l.gamma, l.beta, l.place, int32(boxes), l.most}
			}
			a, b := area(before), area(l)
			if before.next != next || l.ready != 0 && (l.norm == 0 || a[0] < b[1] && b[0] < a[1]) {
				t.Errorf("layer %d at %v, the next one at %v: %+v, want %+v", j-1, a, b, before.next, next)
			}
			if room := a[1] - a[0] + b[1] - b[0]; (l.ready != 0) != (l.norm != 0 && room <= int(p.area)) {
				t.Errorf("layer %d: ready %d, %d bytes for two of %d", j, l.ready, room, p.area)
			}
		} else if l.ready != 0 {
			t.Errorf("nobody asks for gamma and beta of layer %d", j)
		}
		for rank := range split {
			mine := boxes / split
			if rank < boxes%split {
				mine++
			}
			if workers := int(l.workers >> (8 * rank) & 255); workers > gemvWarps || workers*int(l.most) < mine || (workers-1)*int(l.most) >= mine && workers > 0 {
				t.Errorf("layer %d: %d boxes of block %d: %+v", j, mine, rank, *l)
			}
		}
		if layers[j].kind != linearKind || l.workers>>(8*split) != 0 {
			t.Errorf("layer %d: %d tiles: %+v", j, tiles, *l)
		}
		f, third := feeds[feed], l.tiles[1]
		feed++
		if op.linear.Gate {
			third = 0
		}
		if n := op.linear.Norm; n != nil && (l.norm != n.kind() || l.offset != n.offset() || l.gamma != n.Gamma.Address()) || l.activation != op.linear.activation() {
			t.Errorf("layer %d: %+v", j, *l)
		}
		if int(f.tiles) != tiles || f.shift != l.shift || int(f.boxes) != boxes || int32(f.most) != l.most || f.woven != l.woven || f.second != l.tiles[0] || f.third != third || f.maps != p.layers+uint64(j)*uint64(unsafe.Sizeof(decodeLayer{})) {
			t.Errorf("layer %d: %+v, and asks for %+v", j, *l, f)
		}
	}
	if feed != len(feeds) {
		t.Errorf("%d of %d feeds", feed, len(feeds))
	}
	noError(t, c.Close())
	noError(t, c.Close())
	s.close(t)
}

// What a megakernel can't do it refuses, and is as it was.
func TestMegakernelRefuses(t *testing.T) {
	sh := stackShape{rows: 2, blocks: 1, heads: 4, kvHeads: 4, dim: 64, inner: 512, pageTokens: 16, keys: []int{5, 9}, kv: attn.Float16}
	s, _ := fakeStack(t, 13, sh)
	defer s.close(t)
	at := func(i int) Linear { return *s.ops[i].linear }
	half := func(m gpu.Memory) gpu.Memory { // the second half of it
		m.Offset += int64(m.Len / 2 * m.DType.Size())
		m.Len /= 2
		return m
	}
	for name, c := range map[string]struct {
		behind int // so many layers
		change func(o *Linear)
	}{
		"many rows":  {0, func(o *Linear) { o.Rows = decodeRows + 1 }},
		"other rows": {1, func(o *Linear) { *o = at(2); o.Rows = 1 }},
		"columns":    {0, func(o *Linear) { o.In = 64 }},
		"float32": {0, func(o *Linear) {
			w := s.m.memory(t, attn.Float32, o.In*o.In)
			o.Parts = []LinearPart{{W: w, Y: o.Parts[0].Y, Out: o.In}}
			s.all = append(s.all, w.Buffer)
		}},
		"other weights":     {1, func(o *Linear) { *o = at(2); o.Parts = []LinearPart{o.Parts[0]}; o.Parts[0].W.DType = attn.BFloat16 }},
		"a part of a layer": {1, func(o *Linear) { *o = at(2); o.Rows, o.X = 2, half(at(0).Parts[0].Y) }},
		"its own input":     {0, func(o *Linear) { o.Parts = []LinearPart{o.Parts[0]}; o.Parts[0].Y = o.X }},
		"what was read":     {1, func(o *Linear) { *o = at(2); o.Parts = []LinearPart{o.Parts[0]}; o.Parts[0].Y = s.x }},
		"what was written":  {1, func(o *Linear) { *o = at(2); o.Parts = []LinearPart{o.Parts[0]}; o.Parts[0].Y = at(0).Parts[1].Y }},
		"a written weight":  {1, func(o *Linear) { *o = at(2); o.Parts = []LinearPart{o.Parts[0]}; o.Parts[0].B = half(at(0).Parts[2].Y) }},
		"no operands":       {0, func(o *Linear) { o.X = gpu.Memory{} }},
	} {
		ch := s.d.NewMegakernel()
		for i := range c.behind {
			o := at(i)
			if !ch.Linear(&o) {
				t.Fatalf("%s: layer %d was not taken", name, i)
			}
		}
		o := at(0)
		c.change(&o)
		before := *ch
		if ch.Linear(&o) {
			t.Errorf("%s: was taken", name)
		}
		if len(ch.layers) != c.behind || ch.floats != before.floats || ch.needs != before.needs || ch.rows != before.rows || ch.format != before.format || len(ch.writes) != len(before.writes) {
			t.Errorf("%s: the megakernel has changed", name)
		}
	}

	// What it can't begin or end with.
	front := &Gather{Rows: 2, N: 256, TableRows: 3, Table: s.m.memory(t, attn.Float16, 3*256), IDs: s.m.memory(t, attn.Float32, 8), Y: s.m.memory(t, attn.Float32, 2*256)}
	ids, logits := s.m.memory(t, attn.Float32, 4), s.ops[len(s.ops)-1].linear.Parts[0]
	s.all = append(s.all, front.Table.Buffer, front.IDs.Buffer, front.Y.Buffer, ids.Buffer)
	for name, change := range map[string]func(g *Gather, c *Megakernel){
		"behind layers":  func(g *Gather, c *Megakernel) { o := at(0); c.Linear(&o) },
		"many rows":      func(g *Gather, c *Megakernel) { g.Rows, g.N = 2*g.Rows+1, 102 },
		"an odd width":   func(g *Gather, c *Megakernel) { g.N = 255 },
		"a residual":     func(g *Gather, c *Megakernel) { g.Residual = s.x },
		"its own table":  func(g *Gather, c *Megakernel) { g.Rows, g.Table = 1, g.Y; g.TableRows = 2 },
		"a second begin": func(g *Gather, c *Megakernel) { other := *g; other.Y = s.x; c.Gather(s.d.NewGathers(&other)) },
	} {
		ch, g := s.d.NewMegakernel(), *front
		change(&g, ch)
		gathers, layers, floats := s.d.NewGathers(&g), len(ch.layers), ch.floats
		if gathers == nil {
			t.Fatalf("rows of tables, %s: they are none", name)
		}
		if ch.Gather(gathers) || ch.front == gathers || len(ch.layers) != layers || ch.floats != floats {
			t.Errorf("rows of tables, %s: were taken", name)
		}
	}
	for name, change := range map[string]func(o *Samples, c *Megakernel){
		"other logits":  func(o *Samples, c *Megakernel) { o.Logits = s.x },
		"fewer rows":    func(o *Samples, c *Megakernel) { o.Rows = 1 },
		"fewer tokens":  func(o *Samples, c *Megakernel) { o.Vocab-- },
		"settings":      func(o *Samples, c *Megakernel) { o.Settings, o.Random = o.IDs, o.IDs; o.Settings.Buffer = s.x.Buffer },
		"into its x":    func(o *Samples, c *Megakernel) { o.IDs = gpu.Bytes{Buffer: s.x.Buffer, Offset: s.x.Offset} },
		"a second time": func(o *Samples, c *Megakernel) { c.Choose(o) },
	} {
		ch := s.d.NewMegakernel()
		for i := range s.ops {
			if op := &s.ops[i]; op.linear != nil && i != 1 {
				o := *op.linear
				if i == 2 { // attention is left out
					o.X = s.ops[0].linear.Parts[0].Y
				}
				if !ch.Linear(&o) {
					t.Fatalf("layer %d was not taken", i)
				}
			}
		}
		o := Samples{Logits: logits.Y, Rows: sh.rows, Vocab: logits.Out, Stride: logits.Out, IDs: gpu.Bytes{Buffer: ids.Buffer, Offset: ids.Offset}}
		change(&o, ch)
		before := ch.back
		if ch.Choose(&o) || ch.back != before {
			t.Errorf("a choice, %s: was taken", name)
		}
		if o := at(0); before != nil && ch.Linear(&o) {
			t.Error("a layer behind the choice was taken")
		}
	}

	attend := func(name string, change func(p **attention.Plan, o *attention.Operands, k, v *gpu.Memory)) {
		ch := s.d.NewMegakernel()
		first := at(0)
		if !ch.Linear(&first) {
			t.Fatal("layer 0 was not taken")
		}
		p, o, k, v := s.plan, s.ops[1].operands, s.ops[1].newK, s.ops[1].newV
		change(&p, &o, &k, &v)
		if ch.Attend(p, &o, k, v, gpu.Memory{}) {
			t.Errorf("attention, %s: was taken", name)
		}
		if len(ch.layers) != 1 || ch.dim != 0 {
			t.Errorf("attention, %s: the megakernel has changed", name)
		}
	}
	other := s.m.memory(t, attn.Float32, 2*256)
	s.all = append(s.all, other.Buffer)
	attend("q from elsewhere", func(p **attention.Plan, o *attention.Operands, k, v *gpu.Memory) { o.Q = other })
	attend("k from elsewhere", func(p **attention.Plan, o *attention.Operands, k, v *gpu.Memory) { *k = other })
	attend("a log-sum-exp", func(p **attention.Plan, o *attention.Operands, k, v *gpu.Memory) { o.LSE = other })
	attend("another type", func(p **attention.Plan, o *attention.Operands, k, v *gpu.Memory) {
		o.Pages[0].Data.DType, o.Pages[1].Data.DType = attn.BFloat16, attn.BFloat16
	})
	attend("an output that was read", func(p **attention.Plan, o *attention.Operands, k, v *gpu.Memory) { o.Out = s.x })
	attend("a plan that is not there", func(p **attention.Plan, o *attention.Operands, k, v *gpu.Memory) { *p = s.m.engine.NewPlan() })
	attend("two tokens of a sequence", func(p **attention.Plan, o *attention.Operands, k, v *gpu.Memory) {
		two := s.m.engine.NewPlan()
		t.Cleanup(func() { noError(t, two.Close()) })
		noError(t, two.Build(s.problem, []attn.Sequence{{Row: 0, Queries: 2, Keys: 5, Pages: []int32{0}}}, 2))
		noError(t, two.Upload(s.m.Stream))
		*p = two
	})
	attend("no operands", func(p **attention.Plan, o *attention.Operands, k, v *gpu.Memory) { *o = attention.Operands{} })
}

// A megakernel of one layer is that layer's launch, and takes no memory.
func TestMegakernelOfOne(t *testing.T) {
	s, log := fakeStack(t, 13, stackShape{rows: 1, blocks: 1, heads: 2, kvHeads: 2, dim: 64, inner: 128, pageTokens: 16, keys: []int{5}, kv: attn.Float16, linear: true})
	defer s.close(t)
	s.ops = s.ops[:1]
	c := s.megakernel(t)
	noError(t, c.Queue(s.m.Stream))
	noError(t, c.Upload())
	noError(t, c.Close())
	if l := enginetest.Launches(log()); len(l) != 1 || l[0].Kernel != "linear_f16" || strings.Contains(log(), "cuMemAlloc") {
		t.Errorf("%d launches: %s", len(l), log())
	}
	none := s.d.NewMegakernel()
	noError(t, none.Queue(s.m.Stream))
	noError(t, none.Close())
}

// Layers of a large x, or of one that shared memory has no room for, are launches of
// their own, in their order.
func TestMegakernelOfWideLayers(t *testing.T) {
	for name, sh := range map[string]stackShape{
		"large":            {rows: 2, heads: 2, kvHeads: 2, dim: 64, inner: mostDecodeX, keys: []int{5, 6}},
		"too much":         {rows: decodeRows, heads: 128, kvHeads: 128, dim: 64, inner: 128, keys: []int{5, 6, 7, 8}},
		"large for a pair": {rows: 1, heads: 1, kvHeads: 1, dim: 128, inner: 2*mostDecodeX + 128, keys: []int{5}},
	} {
		t.Run(name, func(t *testing.T) { // each has a driver of its own
			sh.blocks, sh.vocabulary, sh.pageTokens, sh.kv = 1, 50, 16, attn.Float16
			s, log := fakeStack(t, 14, sh)
			c := s.megakernel(t)
			noError(t, c.Queue(s.m.Stream))
			noError(t, c.Upload())
			noError(t, c.Close())
			var got []string
			for _, l := range enginetest.Launches(log()) {
				if l.Kernel != "decoder_norm" {
					got = append(got, l.Kernel)
				}
			}
			const linear = "linear_f16"
			if s, want := strings.Join(got, " "), fmt.Sprintf("%s append_rows lean_f16_%d", linear, sh.dim)+strings.Repeat(" "+linear, 4); s != want {
				t.Errorf("%s; want %s", s, want)
			}
			s.close(t)
		})
	}
}

// How megakernels of OPT's layers are launched on an H200, and elsewhere.
func TestMegakernelLayouts(t *testing.T) {
	const wide = 0 // a split: launches of their own
	type layout struct{ split, stages, slots int }
	type shape struct {
		name                      string
		blocks, heads, dim, inner int
	}
	layOut := func(m *machine, d *Engine, s shape, rows int) layout {
		c := d.NewMegakernel()
		c.format, c.dim, c.rows, c.chunk = weight.Float16, s.dim, rows, m.engine.FusedChunk(attn.Float16, s.dim)
		linear := func(in int, norm *Norm) {
			c.needs = c.needsWith(optShape, &c.packing, &Linear{Rows: rows, In: in, Norm: norm})
			c.layers = append(c.layers, megakernelLayer{linear: &decodeLinear{}})
		}
		hidden := s.heads * s.dim
		for range s.blocks {
			linear(hidden, &Norm{})
			c.layers = append(c.layers, megakernelLayer{attend: &decodeAttention{p: attention.Params{Rows: 1}}})
			linear(hidden, nil)
			linear(hidden, &Norm{})
			linear(s.inner, nil)
		}
		linear(hidden, &Norm{})
		l := c.layOut()
		if c.needs[l.split-1].wide {
			return layout{split: wide}
		}
		if !c.fits(c.shape, c.format, &c.packing, c.dim, &c.needs, 0) || l.shared > d.info.SharedPerBlockMost || l.shared+gemvWarps*(decodeBox+8) <= d.info.SharedPerBlockMost && l.stages < mostDecodeStages {
			t.Errorf("%s, %d rows: %+v", s.name, rows, l)
		}
		return layout{l.split, l.stages, l.slots}
	}
	shapes := []shape{
		{"125m", 12, 12, 64, 3072}, {"350m", 24, 16, 64, 4096}, {"1.3b", 24, 32, 64, 8192}, {"2.7b", 32, 32, 80, 10240},
		{"2048 and 8192", 24, 16, 128, 8192}, {"6.7b", 32, 32, 128, 16384}, {"13b", 40, 40, 128, 20480}, {"30b", 48, 56, 128, 28672}, {"66b", 64, 72, 128, 36864},
	}
	blocks := map[string][2]layout{ // of one row, and of two
		"125m": {{1, 4, 8}, {1, 4, 8}}, "350m": {{1, 4, 8}, {1, 4, 8}}, "1.3b": {{1, 4, 8}, {1, 4, 8}}, "2.7b": {{1, 4, 8}, {1, 3, 8}},
		"2048 and 8192": {{1, 4, 8}, {1, 4, 8}}, "6.7b": {{1, 4, 8}, {1, 2, 16}}, "13b": {{1, 3, 8}, {split: wide}}, "30b": {{1, 2, 12}, {split: wide}}, "66b": {{split: wide}, {split: wide}},
	}
	pairs := map[string][2]layout{
		"2048 and 8192": {{1, 4, 8}, {2, 4, 8}}, "6.7b": {{2, 4, 8}, {2, 4, 8}}, "13b": {{2, 4, 8}, {2, 3, 8}}, "30b": {{2, 4, 8}, {2, 2, 12}}, "66b": {{2, 3, 8}, {split: wide}},
	}
	for name, c := range map[string]struct {
		sms  int
		full bool // the driver says that pairs don't fit
		want map[string][2]layout
	}{
		"even": {132, false, pairs},
		"odd":  {131, false, blocks},
		"full": {132, true, blocks},
	} {
		t.Run(name, func(t *testing.T) {
			m, lib := fakeGPU(t, 90, c.sms, 232448)
			if c.full {
				lib.State().FailIn("cuOccupancyMaxActiveClusters", 912) // CUDA_ERROR_INVALID_CLUSTER_SIZE
			}
			d := loadDecoder(t, m)
			for _, s := range shapes {
				want, ok := c.want[s.name]
				if !ok {
					want = blocks[s.name]
				}
				for i := range want {
					if got := layOut(m, d, s, i+1); got != want[i] {
						t.Errorf("%s, %d rows: %+v, not %+v", s.name, i+1, got, want[i])
					}
				}
			}
		})
	}
}

// A megakernel is one of pairs as soon as its x is large, and none any more with heads that
// there are no pairs for.
func TestMegakernelSplit(t *testing.T) {
	_, _, d := fakeDecoder(t, 90, 14, 232448)
	c := d.NewMegakernel()
	f16 := attn.Float16
	large := Linear{Rows: 1, In: 16384}
	for _, s := range []struct {
		o    Linear
		dim  int
		want int
	}{{Linear{Rows: 1, In: 8192}, 0, 1}, {large, 0, 2}, {large, 128, 2}, {large, 64, 1}, {large, 80, 1}} {
		needs := c.needsWith(optShape, &c.packing, &s.o)
		split := c.splitOf(optShape, weight.Float16, &c.packing, s.dim, &needs)
		kernel, want := d.megakernels[optShape].of(split, weight.Float16, s.dim), d.megakernels[optShape].blocks[f16][max(decodeDim(s.dim), 0)]
		if s.want == 2 {
			want = d.megakernels[optShape].pairs[f16]
		}
		if split != s.want || kernel != want || kernel == nil {
			t.Errorf("%d columns, heads of %d: %d blocks share a tile", s.o.In, s.dim, split)
		}
	}
	// What is too wide for a block is not for a pair.
	needs := c.needsWith(optShape, &c.packing, &Linear{Rows: 2, In: 20480})
	if !needs[0].wide || needs[1].wide {
		t.Errorf("%+v", needs)
	}
}

// Kernels have a quotient by the ring's slots of a product.
func TestInverse(t *testing.T) {
	rng := reftest.Rand(t)
	for n := 2; n <= 64; n++ {
		inverse, end := uint64(inverseOf(n)), uint64(1<<32)/uint64(n)
		check := func(i uint64) {
			if got := i * inverse >> 32; got != i/uint64(n) {
				t.Fatalf("%d/%d is %d by a product", i, n, got)
			}
		}
		check(0)
		check(end - 1)
		for range 1000 {
			i := rng.Uint64N(end-uint64(n)) / uint64(n) * uint64(n)
			check(i)
			check(i + uint64(n) - 1)
		}
	}
}

// GPUs without a copy engine have no megakernels.
func TestNoMegakernels(t *testing.T) {
	_, _, d := fakeDecoder(t, 80, 7, 166912)
	if d.NewMegakernel() != nil {
		t.Error("a megakernel before 9.0")
	}
}

// Whatever call of the driver fails, the megakernel has no memory after Close.
func TestMegakernelFaults(t *testing.T) {
	t.Run("blocks", func(t *testing.T) { testMegakernelFaults(t, 13) })
	t.Run("pairs", func(t *testing.T) { testMegakernelFaults(t, 14) })
}

func testMegakernelFaults(t *testing.T, sms int) {
	m, lib, d := fakeDecoder(t, 90, sms, 232448)
	d.leastPairs = 0
	s := newStack(t, m, d, rand.New(rand.NewPCG(1, 2)), stackShape{rows: 1, blocks: 1, heads: 2, kvHeads: 2, dim: 128, inner: 128, pageTokens: 16, keys: []int{50}, kv: attn.Float16})
	live, failures := lib.Live(), 0
	for n := 1; ; n++ {
		c := s.megakernel(t)
		lib.State().Calls, lib.State().FailAt, lib.State().FailWith = 0, int64(n), 2
		var g *cuda.Graph
		err := func() (err error) {
			if g, err = m.Stream.Capture(func() error { return c.Queue(m.Stream) }); err != nil {
				return err
			}
			return c.Upload()
		}()
		failed := lib.State().Failed() != "" && lib.State().Calls >= int64(n)
		lib.State().FailAt = 0
		noError(t, c.Close())
		if g != nil {
			noError(t, g.Close())
		}
		if lib.Live() != live {
			t.Fatalf("call %d, %s: %d objects, %d before", n, lib.State().Failed(), lib.Live(), live)
		}
		if !failed {
			break
		}
		if err != nil {
			failures++
		}
	}
	if failures < 5 {
		t.Errorf("%d failures", failures)
	}
	s.close(t)
}

// Weights of 8 and 4 bits that no kernel has stay launches.
func TestMegakernelPackedRefuses(t *testing.T) {
	m, _, d := fakeDecoder(t, 90, 13, 232448)
	const in, out = 1024, 512
	linear := func(f weight.Format, rows, parts int, change func(o *Linear)) Linear {
		p, err := weight.Packing(&weight.Matrix{Format: f, Len: in * out}, in)
		noError(t, err)
		o := Linear{Rows: rows, In: in, X: m.memory(t, attn.Float32, rows*in)}
		for range parts {
			own := p
			o.Parts = append(o.Parts, LinearPart{Packed: &own, W: m.memory(t, attn.Float32, p.Bytes/4), Y: m.memory(t, attn.Float32, rows*out), Out: out})
		}
		if change != nil {
			change(&o)
		}
		return o
	}
	for name, c := range map[string]struct {
		o    Linear
		want bool
	}{
		"INT8":                     {linear(weight.Int8, 1, 3, nil), true},
		"INT4 in groups of 128":    {linear(weight.Int4_128, 2, 1, nil), true},
		"Q4_1":                     {linear(weight.Q4_1, 1, 2, nil), true},
		"E4M3 in groups of 128":    {linear(weight.E4M3, 1, 1, func(o *Linear) { o.Parts[0].Packed.Group, o.Parts[0].Packed.Groups = 128, in/128 }), true},
		"three rows":               {linear(weight.Int8, 3, 1, nil), false},
		"super-blocks":             {linear(weight.Q4_K, 1, 1, nil), false},
		"another order of columns": {linear(weight.Int4_128, 1, 1, func(o *Linear) { o.Parts[0].Packed.Order = o.Parts[0].Packed.Bytes - 4*in }), false},
		"groups of 256":            {linear(weight.E4M3, 1, 1, func(o *Linear) { o.Parts[0].Packed.Group = 256 }), false},
		"several groups":           {linear(weight.E4M3, 1, 2, func(o *Linear) { o.Parts[1].Packed.Group = 128 }), false},
		"a part within 256 rows":   {linear(weight.Int8, 1, 1, func(o *Linear) { o.Parts[0].First, o.Parts[0].Out = 128, out-128 }), false},
		"a part behind 256 rows":   {linear(weight.Int8, 1, 1, func(o *Linear) { o.Parts[0].First, o.Parts[0].Out = 256, out-256 }), true},
		"beside weights of 16 bits": {linear(weight.Int8, 1, 2, func(o *Linear) {
			o.Parts[1] = LinearPart{W: m.memory(t, attn.Float16, in*out), Y: o.Parts[1].Y, Out: out}
		}), false},
	} {
		if c.o.check() != nil && name != "groups of 256" {
			t.Errorf("%s: %v", name, c.o.check())
		}
		if got := d.NewMegakernel().Linear(&c.o); got != c.want {
			t.Errorf("%s: taken %v", name, got)
		}
	}
}

// Weights in the place of others of as many elements, which had no minima, have maps of their own.
func TestPackedMaps(t *testing.T) {
	m, _, d := fakeDecoder(t, 90, 13, 232448)
	const in, out = 1024, 256
	memory := m.memory(t, attn.Float32, in*out)
	var maps []cuda.TensorMap
	for _, f := range []weight.Format{weight.Q4_0, weight.Q4_1} {
		p, err := weight.Packing(&weight.Matrix{Format: f, Len: in * out}, in)
		noError(t, err)
		o := &Linear{Rows: 1, In: in, Parts: []LinearPart{{Packed: &p, W: memory, Out: out}}}
		scales, err := d.packedMap(&o.Parts[0], newPackedLayer(o), 1, false)
		noError(t, err)
		maps = append(maps, scales)
	}
	if maps[0] == maps[1] {
		t.Error("the map of scales is that of scales and minima")
	}
}
