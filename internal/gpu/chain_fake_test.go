//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package gpu

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/reftest"
)

func fakeStack(t *testing.T, sh stackShape) (*stack, func() string) {
	m, lib, d := fakeDecoder(t, 90, 13, 232448)
	lib.State().Argument("chain_", int(unsafe.Sizeof(chainParams{})))
	d.withoutBatches()
	s := newStack(t, m, d, nil, sh)
	lib.Forget()
	return s, lib.Log
}

// Rows that there are kernels of a batch for are no chain's.
func TestChainLeavesBatches(t *testing.T) {
	m, _, d := fakeDecoder(t, 90, 13, 232448)
	for rows, want := range map[int]bool{1: true, leastBatch - 1: true, leastBatch: false, chainRows: false} {
		o := Linear{Rows: rows, In: 128, X: m.memory(t, cpu.Float32, rows*128), Parts: []LinearPart{{W: m.memory(t, cpu.Float16, 128*8), Y: m.memory(t, cpu.Float32, rows*8), Out: 8}}}
		if got := d.NewChain().Linear(&o); got != want {
			t.Errorf("%d rows: %v", rows, got)
		}
		for _, x := range []Memory{o.X, o.Parts[0].W, o.Parts[0].Y} {
			noError(t, x.Buffer.Close())
		}
	}
}

// What a launch of a chain is told is what its layers are: every tile of every
// layer has one thread block, every word one writer, and readers find what was made.
func TestChainLaunch(t *testing.T) {
	rng := reftest.Rand(t)
	for i := range 12 {
		// Each has a driver of its own.
		t.Run("", func(t *testing.T) { testChainLaunch(t, rng, i) })
	}
}

func testChainLaunch(t *testing.T, rng *rand.Rand, i int) {
	sh := stackShape{
		rows: 1 + i%chainRows, blocks: 1 + rng.IntN(3), heads: 4, kvHeads: 2, dim: []int{64, 128}[i%2], inner: 128 * (1 + rng.IntN(9)),
		vocabulary: pick(rng, 0, 777), pageTokens: 16, kv: []cpu.DType{cpu.Float16, cpu.BFloat16}[i/2%2],
	}
	for range sh.rows {
		sh.keys = append(sh.keys, rng.IntN(200))
	}
	s, log := fakeStack(t, sh)
	c := s.chain(t)
	if _, err := s.m.stream.Capture(func() error { return c.Queue(s.m.stream) }); err != nil {
		t.Fatal(err)
	}
	noError(t, c.Upload())
	var found *launch
	for _, l := range launches(strings.ReplaceAll(log(), "cooperative 1\n", "")) {
		if strings.HasPrefix(l.kernel, "chain_") && found == nil {
			found = &l
		} else {
			t.Fatalf("another launch: %s", l.kernel)
		}
	}
	if found == nil || !strings.Contains(log(), "cooperative 1\n") {
		t.Fatal("no cooperative launch of a chain")
	}
	const blocks = 13
	if found.blocks != blocks || found.threads != 256 || found.shared > 232448 {
		t.Errorf("%+v", *found)
	}
	p := (*chainParams)(unsafe.Pointer(&found.arg[0]))
	if int(p.count) != len(s.ops) || int(p.rows) != sh.rows || p.stages < 2 || p.apart%1024 != 0 {
		t.Fatalf("%+v for %d layers of %d rows", *p, len(s.ops), sh.rows)
	}
	text := make([]byte, c.text.Len())
	noError(t, c.text.Download(text, 0))
	layers := unsafe.Slice((*chainLayer)(unsafe.Pointer(&text[0])), p.count)
	feeds := unsafe.Slice((*chainFeed)(unsafe.Pointer(&text[p.feeds-p.layers])), p.feedCount)
	words := c.words.Address()
	made := map[uint64]uint64{} // of words, where their floats go
	writes := func(at, to uint64, n int) {
		if at%16 != 0 || at < words || at+8*uint64(n) > words+uint64(c.words.Len()) {
			t.Fatalf("%d words at %d of %d", n, int64(at-words), c.words.Len())
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
	used := func(j int, y Memory) bool { // by a layer behind j
		for _, op := range s.ops[j+1:] {
			if op.linear == nil && (op.operands.Q == y || op.newK == y || op.newV == y) || op.linear != nil && (op.linear.X == y || op.linear.Residual == y) {
				return true
			}
		}
		return false
	}
	feed := 0
	for j := range layers {
		op := &s.ops[j]
		if op.linear == nil {
			a := (*chainAttention)(unsafe.Pointer(&layers[j].body))
			reads("attention's q", a.links.query, op.operands.Q.address())
			reads("attention's k", a.links.newKeys, op.newK.address())
			reads("attention's v", a.links.newValues, op.newV.address())
			writes(a.links.out, op.operands.Out.address(), op.operands.Out.Len)
			next := -1
			for k := len(s.ops) - 1; k > j; k-- {
				if s.ops[k].linear == nil {
					next = k
				}
			}
			if int(a.links.next) != next || a.p.slots != p.slots {
				t.Errorf("layer %d, and attention behind it is %d: %+v", j, next, *a)
			}
			if layers[j].kind != chainAttentionKind || a.p.slots < mostWarps || a.p.slots%mostWarps != 0 || int(a.links.layer) != j || a.links.layers != p.count || a.p.work != p.work {
				t.Errorf("layer %d: %+v", j, *a)
			}
			continue
		}
		l := (*chainLinear)(unsafe.Pointer(&layers[j].body))
		if j == 0 {
			if l.tagged != 0 || l.x != op.linear.X.address() {
				t.Errorf("layer 0: %+v", *l)
			}
		} else {
			reads("x", l.tagged, op.linear.X.address())
		}
		if r := op.linear.Residual; r.Buffer != nil && l.residual == 0 {
			reads("the residual", l.residualTagged, r.address())
		}
		tiles := 0
		for k := range op.linear.Parts {
			part := &op.linear.Parts[k]
			if used(j, part.Y) {
				writes(l.made[k], part.Y.address(), sh.rows*part.Out)
			} else if l.made[k] != 0 {
				t.Errorf("layer %d, part %d: words that nobody reads", j, k)
			}
			tiles += ceil(part.Out, chainTile)
			if int(l.tiles[k]) != tiles || l.y[k] != part.Y.address() || l.b[k] != part.B.address() || int(l.out[k]) != part.Out {
				t.Errorf("layer %d, part %d: %+v", j, k, *l)
			}
		}
		if l.shift < 0 || l.shift >= blocks || layers[j].kind != chainLinearKind {
			t.Errorf("layer %d: %d tiles: %+v", j, tiles, *l)
		}
		f := feeds[feed]
		feed++
		if int(f.tiles) != tiles || f.shift != l.shift || int(f.boxes) != op.linear.In/128 || int(f.most)*linearWarps < int(f.boxes) || f.most != l.most || f.second != l.tiles[0] || f.third != l.tiles[1] || f.maps != p.layers+uint64(j)*uint64(unsafe.Sizeof(chainLayer{})) {
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

// What a chain can't do it refuses, and is as it was.
func TestChainRefuses(t *testing.T) {
	sh := stackShape{rows: 2, blocks: 1, heads: 4, kvHeads: 4, dim: 64, inner: 512, pageTokens: 16, keys: []int{5, 9}, kv: cpu.Float16}
	s, _ := fakeStack(t, sh)
	defer s.close(t)
	at := func(i int) Linear { return *s.ops[i].linear }
	half := func(m Memory) Memory { // the second half of it
		m.Offset += int64(m.Len / 2 * m.DType.Size())
		m.Len /= 2
		return m
	}
	for name, c := range map[string]struct {
		behind int // so many layers
		change func(o *Linear)
	}{
		"many rows":  {0, func(o *Linear) { o.Rows = chainRows + 1 }},
		"other rows": {1, func(o *Linear) { *o = at(2); o.Rows = 1 }},
		"columns":    {0, func(o *Linear) { o.In = 64 }},
		"float32": {0, func(o *Linear) {
			w := s.m.memory(t, cpu.Float32, o.In*o.In)
			o.Parts = []LinearPart{{W: w, Y: o.Parts[0].Y, Out: o.In}}
			s.all = append(s.all, w.Buffer)
		}},
		"other weights":     {1, func(o *Linear) { *o = at(2); o.Parts = []LinearPart{o.Parts[0]}; o.Parts[0].W.DType = cpu.BFloat16 }},
		"a part of a layer": {1, func(o *Linear) { *o = at(2); o.Rows, o.X = 2, half(at(0).Parts[0].Y) }},
		"its own input":     {0, func(o *Linear) { o.Parts = []LinearPart{o.Parts[0]}; o.Parts[0].Y = o.X }},
		"what was read":     {1, func(o *Linear) { *o = at(2); o.Parts = []LinearPart{o.Parts[0]}; o.Parts[0].Y = s.x }},
		"what was written":  {1, func(o *Linear) { *o = at(2); o.Parts = []LinearPart{o.Parts[0]}; o.Parts[0].Y = at(0).Parts[1].Y }},
		"a written weight":  {1, func(o *Linear) { *o = at(2); o.Parts = []LinearPart{o.Parts[0]}; o.Parts[0].B = half(at(0).Parts[2].Y) }},
		"no operands":       {0, func(o *Linear) { o.X = Memory{} }},
	} {
		ch := s.d.NewChain()
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
		if len(ch.layers) != c.behind || ch.floats != before.floats || ch.area != before.area || ch.rows != before.rows || ch.element != before.element || len(ch.writes) != len(before.writes) {
			t.Errorf("%s: the chain has changed", name)
		}
	}

	attend := func(name string, change func(p **Plan, o *Operands, k, v *Memory)) {
		ch := s.d.NewChain()
		first := at(0)
		if !ch.Linear(&first) {
			t.Fatal("layer 0 was not taken")
		}
		p, o, k, v := s.plan, s.ops[1].operands, s.ops[1].newK, s.ops[1].newV
		change(&p, &o, &k, &v)
		if ch.Attend(p, &o, k, v) {
			t.Errorf("attention, %s: was taken", name)
		}
		if len(ch.layers) != 1 || ch.dim != 0 {
			t.Errorf("attention, %s: the chain has changed", name)
		}
	}
	other := s.m.memory(t, cpu.Float32, 2*256)
	s.all = append(s.all, other.Buffer)
	attend("q from elsewhere", func(p **Plan, o *Operands, k, v *Memory) { o.Q = other })
	attend("k from elsewhere", func(p **Plan, o *Operands, k, v *Memory) { *k = other })
	attend("a log-sum-exp", func(p **Plan, o *Operands, k, v *Memory) { o.LSE = other })
	attend("another type", func(p **Plan, o *Operands, k, v *Memory) { o.K.DType, o.V.DType = cpu.BFloat16, cpu.BFloat16 })
	attend("an output that was read", func(p **Plan, o *Operands, k, v *Memory) { o.Out = s.x })
	attend("a plan that is not there", func(p **Plan, o *Operands, k, v *Memory) { *p = s.m.engine.NewPlan() })
	attend("two tokens of a sequence", func(p **Plan, o *Operands, k, v *Memory) {
		two := s.m.engine.NewPlan()
		t.Cleanup(func() { noError(t, two.Close()) })
		noError(t, two.Build((*p).look.geometry, []cpu.Sequence{{Row: 0, Queries: 2, Keys: 5, Pages: []int32{0}}}, 2))
		noError(t, two.Upload(s.m.stream))
		*p = two
	})
	attend("no operands", func(p **Plan, o *Operands, k, v *Memory) { *o = Operands{} })
}

// A chain of one layer is that layer's launch, and takes no memory.
func TestChainOfOne(t *testing.T) {
	s, log := fakeStack(t, stackShape{rows: 1, blocks: 1, heads: 2, kvHeads: 2, dim: 64, inner: 128, pageTokens: 16, keys: []int{5}, kv: cpu.Float16, linear: true})
	defer s.close(t)
	s.ops = s.ops[:1]
	c := s.chain(t)
	noError(t, c.Queue(s.m.stream))
	noError(t, c.Upload())
	noError(t, c.Close())
	if l := launches(log()); len(l) != 1 || l[0].kernel != "linear_f16" || strings.Contains(log(), "cuMemAlloc") {
		t.Errorf("%d launches: %s", len(l), log())
	}
	none := s.d.NewChain()
	noError(t, none.Queue(s.m.stream))
	noError(t, none.Close())
}

// Layers of a large x, or of one that shared memory has no room for, are launches of
// their own, in their order.
func TestChainOfWideLayers(t *testing.T) {
	for name, sh := range map[string]stackShape{
		"large":   {rows: 2, heads: 2, kvHeads: 2, inner: mostChainX, keys: []int{5, 6}},
		"no room": {rows: chainRows, heads: 128, kvHeads: 128, inner: 128, keys: []int{5, 6, 7, 8}},
	} {
		t.Run(name, func(t *testing.T) { // each has a driver of its own
			sh.blocks, sh.dim, sh.vocabulary, sh.pageTokens, sh.kv = 1, 64, 50, 16, cpu.Float16
			s, log := fakeStack(t, sh)
			c := s.chain(t)
			noError(t, c.Queue(s.m.stream))
			noError(t, c.Upload())
			noError(t, c.Close())
			var got []string
			for _, l := range launches(log()) {
				if l.kernel != "decoder_norm" {
					got = append(got, l.kernel)
				}
			}
			const linear = "linear_f16"
			if s, want := strings.Join(got, " "), linear+" lean_append lean_f16_64"+strings.Repeat(" "+linear, 4); s != want {
				t.Errorf("%s; want %s", s, want)
			}
			s.close(t)
		})
	}
}

// The copying warps of a chain, as kernels/ring.cuh has them: whatever the number of
// chunks, each is asked for once in each layer, and a slot is always the same
// warp's. So nobody waits for a slot whose chunk before has not been asked for: a
// barrier's parity tells rounds apart only if they are one apart.
func TestChainRing(t *testing.T) {
	type chunk struct{ layer, i int }
	rng := reftest.Rand(t)
	for range 2000 {
		n, slots, layers, apart := 1+rng.IntN(70), mostWarps*(1+rng.IntN(4)), 1+rng.IntN(5), rng.IntN(2) == 0
		owner := make(map[int]int)
		last := make(map[int]int) // of each slot, the chunk of all layers' that went through it
		seen := make(map[chunk]bool)
		before, asked := 0, 0
		for layer := range layers {
			next := apart && layer < layers-1
			for first := range 2 {
				at, skip, most := before, asked+(first^before)&1, math.MaxInt
				for k := range 1 + count(next) {
					for i := skip; i < n && most > 0; i, most = i+2, most-1 {
						c, all := chunk{layer + k, i}, at+i
						slot := all % slots
						if seen[c] {
							t.Fatalf("%d chunks, %d slots: %+v is asked for twice", n, slots, c)
						}
						seen[c] = true
						if o, ok := owner[slot]; ok && o != first {
							t.Fatalf("%d chunks, %d slots: slot %d is that of two warps", n, slots, slot)
						}
						owner[slot] = first
						if l, ok := last[slot]; ok && all != l+slots {
							t.Fatalf("%d chunks, %d slots: in slot %d chunk %d comes behind %d", n, slots, slot, all, l)
						}
						last[slot] = all
					}
					at += n
					skip, most = (first^at)&1, slots/2
				}
			}
			before += n
			asked = slots * count(apart)
		}
		if len(seen) != n*layers {
			t.Fatalf("%d chunks, %d slots: %d of %d were asked for", n, slots, len(seen), n*layers)
		}
	}
}

func count(b bool) int {
	if b {
		return 1
	}
	return 0
}

// GPUs without a copy engine have no chains.
func TestNoChains(t *testing.T) {
	_, _, d := fakeDecoder(t, 80, 7, 166912)
	if d.NewChain() != nil {
		t.Error("a chain before 9.0")
	}
}

// Whatever call of the driver fails, the chain has no memory after Close.
func TestChainFaults(t *testing.T) {
	m, lib, d := fakeDecoder(t, 90, 13, 232448)
	lib.State().Argument("chain_", int(unsafe.Sizeof(chainParams{})))
	s := newStack(t, m, d, rand.New(rand.NewPCG(1, 2)), stackShape{rows: 1, blocks: 1, heads: 2, kvHeads: 2, dim: 64, inner: 128, pageTokens: 16, keys: []int{50}, kv: cpu.Float16})
	live, failures := lib.Live(), 0
	for n := 1; ; n++ {
		c := s.chain(t)
		lib.State().Calls, lib.State().FailAt, lib.State().FailWith = 0, int64(n), 2
		var g *cuda.Graph
		err := func() (err error) {
			if g, err = m.stream.Capture(func() error { return c.Queue(m.stream) }); err != nil {
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
