//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package gpu

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
)

func fakeBatchStack(t *testing.T, sh stackShape) (*stack, func() []launch) {
	m, lib, d := fakeDecoder(t, 90, 132, 232448)
	s := newStack(t, m, d, nil, sh)
	lib.Forget()
	return s, func() []launch { return launches(strings.ReplaceAll(lib.Log(), "cooperative 1\n", "")) }
}

func batchShape(rows int) stackShape {
	sh := stackShape{rows: rows, blocks: 2, heads: 4, kvHeads: 4, dim: 64, inner: 512, vocabulary: 777, pageTokens: 16, kv: cpu.Float16}
	for i := range rows {
		sh.keys = append(sh.keys, 3*i)
	}
	return sh
}

// What launches are told: a layer needs the counters of the part that makes its x, the
// x of every layer and the ring have room, and new keys and values go into the cache.
func TestBatchChainLaunches(t *testing.T) {
	for _, rows := range []int{5, 8, 9, 16} { // each has a driver of its own
		t.Run(fmt.Sprint(rows), func(t *testing.T) { testBatchChainLaunches(t, rows) })
	}
}

func testBatchChainLaunches(t *testing.T, rows int) {
	s, log := fakeBatchStack(t, batchShape(rows))
	chains := s.batchChains(t)
	if _, err := s.m.stream.Capture(func() error {
		for _, c := range chains {
			noError(t, c.Queue(s.m.stream))
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	name := map[bool]string{false: "batch_f16_16", true: "batch_f16_8"}[rows <= 8]
	chained := strings.Replace(name, "batch", "batch_chain", 1)
	// The first q, k and v; what follows attention, up to the next; and up to the end.
	want := []string{name, "lean_append", "lean_f16_64", chained, "lean_f16_64", chained}
	all := log()
	if len(all) != len(want) {
		t.Fatalf("%d launches, want %d", len(all), len(want))
	}
	for i, l := range all {
		if l.kernel != want[i] {
			t.Fatalf("launch %d is %s, want %s", i, l.kernel, want[i])
		}
		if l.kernel != chained {
			continue
		}
		p := (*batchChainParams)(unsafe.Pointer(&l.arg[0]))
		kind := batchRows[count(rows > 8)]
		if p.count != 4 || l.cluster != int(p.layers[0].split) || l.blocks%l.cluster != 0 || l.blocks > 132 || l.shared > 232448 || p.end%1024 != 0 || !l.overlap {
			t.Errorf("%d rows: %d layers, %d blocks in clusters of %d, %d bytes, x up to %d", rows, p.count, l.blocks, l.cluster, l.shared, p.end)
		}
		for j := range p.layers[:p.count] {
			q := &p.layers[j]
			blocks := ceil(ceil(int(q.in), batchBlock), l.cluster)
			if room := int(p.end) - blocks*kind*batchX - int(q.stages)*batchStage; q.stages < 3 || room < 0 || q.stages < mostChainedRing && room >= batchStage {
				t.Errorf("%d rows, layer %d: %d stages leave %d bytes", rows, j, q.stages, room)
			}
			if q.norm != 0 && int(p.affine) < blocks*batchBlock {
				t.Errorf("%d rows, layer %d: gamma has %d columns, a block %d", rows, j, p.affine, blocks*batchBlock)
			}
			if (p.need[j] == 0) != (j == 0) || j > 0 && (p.need[j] != p.ready[j-1] || q.linearParams.x != p.layers[j-1].y[0]) {
				t.Errorf("%d rows, layer %d: needs %#x, the one before has %#x", rows, j, p.need[j], p.ready)
			}
		}
		last := p.layers[3].linearParams
		if kv := p.keep.slots != 0; kv != (i == 3) || kv && (p.keep.cache[0] != 0 || p.keep.cache[1] != s.cache[2].address() || p.keep.cache[2] != s.cache[3].address() || p.keep.headRows != 16 || p.keep.dim != 64 || last.out[1] != 256) {
			t.Errorf("%d rows: a cache at %#x, slots at %#x, %d rows a head", rows, p.keep.cache, p.keep.slots, p.keep.headRows)
		}
	}
	for _, c := range chains {
		noError(t, c.Close())
	}
	s.close(t)
}

// Layers that do not read what the one before makes, or have norms next to each other,
// are in launches of their own.
func TestBatchChainApart(t *testing.T) {
	s, log := fakeBatchStack(t, batchShape(6))
	defer s.close(t)
	c := s.d.NewBatchChain()
	// o, fc1 and fc2; another layer that reads o's output; then a norm behind a norm.
	o, up, down := *s.ops[2].linear, *s.ops[3].linear, *s.ops[4].linear
	aside, normed := *s.ops[5].linear, *s.ops[8].linear
	aside.X = o.Parts[0].Y
	normed.X, normed.In, normed.Norm = aside.Parts[0].Y, 256, aside.Norm
	for i, l := range []*Linear{&o, &up, &down, &aside, &normed} {
		if !c.Linear(l) {
			t.Fatalf("layer %d was not taken", i)
		}
	}
	noError(t, c.Queue(s.m.stream))
	var got []string
	for _, l := range log() {
		got = append(got, l.kernel)
	}
	if s, want := strings.Join(got, " "), "batch_chain_f16_8 batch_f16_8 batch_f16_8"; s != want {
		t.Errorf("%s, want %s", s, want)
	}
	noError(t, c.Upload())
	noError(t, c.Close())
}

// What a chain can't do it refuses, and is as it was.
func TestBatchChainRefuses(t *testing.T) {
	s, _ := fakeBatchStack(t, batchShape(6))
	defer s.close(t)
	at := func(i int) Linear { return *s.ops[i].linear }
	half := func(m Memory) Memory { // the second half of it
		m.Offset += int64(m.Len / 2 * m.DType.Size())
		m.Len /= 2
		return m
	}
	one := func(o *Linear) *LinearPart { // leaves a part
		o.Parts = []LinearPart{o.Parts[0]}
		return &o.Parts[0]
	}
	for name, change := range map[string]func(o *Linear){
		"many rows":               func(o *Linear) { o.Rows = 17 },
		"other rows":              func(o *Linear) { o.Rows = 5 },
		"other weights":           func(o *Linear) { one(o).W.DType = cpu.BFloat16 },
		"a part of a layer":       func(o *Linear) { o.Rows, o.X = 3, half(at(0).Parts[0].Y) },
		"its own input":           func(o *Linear) { one(o).Y = o.X },
		"what was read":           func(o *Linear) { one(o).Y = s.x },
		"what was written":        func(o *Linear) { one(o).Y = at(0).Parts[1].Y },
		"a written bias":          func(o *Linear) { one(o).B = half(at(0).Parts[2].Y) },
		"a part that it adds":     func(o *Linear) { o.Residual = at(0).Parts[1].Y },
		"half of what it adds to": func(o *Linear) { o.Residual = half(s.x) },
		"no operands":             func(o *Linear) { o.X = Memory{} },
	} {
		c := s.d.NewBatchChain()
		first, o := at(0), at(2)
		if !c.Linear(&first) {
			t.Fatalf("%s: layer 0 was not taken", name)
		}
		reads, writes := len(c.reads), len(c.writes)
		change(&o)
		if c.Linear(&o) {
			t.Errorf("%s: was taken", name)
		}
		if len(c.layers) != 1 || len(c.reads) != reads || len(c.writes) != writes {
			t.Errorf("%s: the chain has changed", name)
		}
	}
	other := s.m.memory(t, cpu.Float32, 6*256)
	s.all = append(s.all, other.Buffer)
	for name, change := range map[string]func(c *BatchChain, p **Plan, k, v, newK, newV *Memory){
		"k from elsewhere":         func(_ *BatchChain, _ **Plan, _, _, newK, _ *Memory) { *newK = other },
		"v from elsewhere":         func(_ *BatchChain, _ **Plan, _, _, _, newV *Memory) { *newV = other },
		"another type":             func(_ *BatchChain, _ **Plan, k, v, _, _ *Memory) { k.DType, v.DType = cpu.BFloat16, cpu.BFloat16 },
		"a plan that is not there": func(_ *BatchChain, p **Plan, _, _, _, _ *Memory) { *p = s.m.engine.NewPlan() },
		"a layer behind": func(c *BatchChain, _ **Plan, _, _, _, _ *Memory) {
			if o := at(2); !c.Linear(&o) {
				t.Error("layer 2 was not taken")
			}
		},
		"no operands": func(_ *BatchChain, _ **Plan, _, _, newK, newV *Memory) { *newK, *newV = Memory{}, Memory{} },
	} {
		c := s.d.NewBatchChain()
		if first := at(0); !c.Linear(&first) {
			t.Fatalf("append, %s: layer 0 was not taken", name)
		}
		p, o := s.plan, &s.ops[1]
		k, v, newK, newV := o.operands.K, o.operands.V, o.newK, o.newV
		change(c, &p, &k, &v, &newK, &newV)
		if c.Append(p, k, v, newK, newV) || c.append != nil {
			t.Errorf("append, %s: was taken", name)
		}
	}
	c := s.d.NewBatchChain()
	if first := at(0); !c.Linear(&first) || !c.Append(s.plan, s.ops[1].operands.K, s.ops[1].operands.V, s.ops[1].newK, s.ops[1].newV) {
		t.Error("layer 0 and its append were not taken")
	}
	if o := at(2); c.Linear(&o) {
		t.Error("a layer behind an append was taken")
	}
}

// The kernels are of 9.0 alone.
func TestNoBatchChains(t *testing.T) {
	if _, _, d := fakeDecoder(t, 120, 7, 101376); d.NewBatchChain() != nil {
		t.Error("a chain of a batch's layers after 9.0")
	}
}

// A GPU that is closed has taken the chain's memory with it.
func TestBatchChainOfClosedGPU(t *testing.T) {
	s, _ := fakeBatchStack(t, batchShape(6))
	c := s.batchChains(t)[2]
	noError(t, c.Queue(s.m.stream))
	noError(t, s.m.dev.Close())
	noError(t, c.Close())
	noError(t, c.Close())
}

// Whatever call of the driver fails, the chain has no memory after Close.
func TestBatchChainFaults(t *testing.T) {
	m, lib, d := fakeDecoder(t, 90, 13, 232448)
	sh := batchShape(9)
	sh.linear = true
	s := newStack(t, m, d, rand.New(rand.NewPCG(1, 2)), sh)
	testLateFaults(t, m, lib, func() late { return s.batchChains(t)[0] })
	s.close(t)
}
