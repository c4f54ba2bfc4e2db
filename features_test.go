package leanattention_test

import (
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"gorgonia.org/leanattention/rope"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/variant"

	"gorgonia.org/tensor"
)

// The test here takes everything that attention can be asked for to every way into it.
// Each computes the right result, or refuses with ErrUnsupported; nothing is ignored.

// request is what one attention is asked for.
type request struct {
	reftest.Shape
	query, kv tensor.Dtype
	schedules int         // that opts have
	opts      []la.Option // that the shape does not know
	gives     bool        // its cache gives pages back that the window leaves behind
	rotary    *rope.Config
	shard     la.Shard       // of its cache
	mixed     bool           // WithMixedPrecision is among opts
	padded    int            // rows of padding behind the queries
	source    variant.Source // of the shape's variant

	tiled bool // WithTileTokens is among opts

	entropy, mass bool // asked for beside the result
}

// spec is what a problem on tensors needs beside the shape.
func (r *request) spec() graphtest.Spec {
	return graphtest.Spec{QueryType: r.query, KVType: r.kv, Rows: r.Queries[0] + r.padded}
}

// precision is that of the engine at a place, with what it may round where mixed precision is asked for: on a CPU only
// prompts in AMX's tiles are rounded.
func (r *request) precision(at graphtest.Place, p reftest.Precision) reftest.Precision {
	if cpu.CheckTier() != nil || cpu.InUse().String() != "amx" || !r.mixed || at.Real || r.query != tensor.Float32 {
		return p
	}
	switch r.kv {
	case la.Float16: // two parts of bfloat16
		p.P, p.Query = reftest.Float16, max(p.Query, 0x1p-13)
	case la.BFloat16:
		p.P, p.Query = reftest.BFloat16, max(p.Query, 0x1p-8)
	}
	return p
}

// feature adds something to a request.
type feature struct {
	name string
	add  func(rng *rand.Rand, r *request)
}

// tile asks for LeanTiles of so many keys, once.
func (r *request) tile(tokens int) {
	if !r.tiled {
		r.tiled, r.opts = true, append(r.opts, la.WithTileTokens(tokens))
	}
}

// massTile is the number of keys of a LeanTile where one is asked for.
const massTile = 64

func option(o la.Option) func(*rand.Rand, *request) {
	return func(_ *rand.Rand, r *request) { r.opts = append(r.opts, o) }
}

func schedule(s la.Schedule) func(*rand.Rand, *request) {
	return func(_ *rand.Rand, r *request) {
		r.schedules, r.opts = r.schedules+1, append(r.opts, la.WithSchedule(s))
	}
}

var features = []feature{ // shapes first, of which the others make use
	{"many rows", func(_ *rand.Rand, r *request) { r.Queries[0], r.Keys[0] = 20, 30 }},
	{"attention mass", func(_ *rand.Rand, r *request) {
		r.mass, r.Keys[0] = true, 140
		r.tile(massTile)
	}},
	{"entropy", func(_ *rand.Rand, r *request) { r.entropy = true }},
	{"query lengths", func(_ *rand.Rand, r *request) { r.padded = 4 }},
	{"causal", func(_ *rand.Rand, r *request) { r.Causal = true }},
	{"trees", func(rng *rand.Rand, r *request) {
		r.Causal, r.Tree = true, true
		r.Trees = []attn.Tree{reftest.RandomTree(rng, r.Queries[0])}
	}},
	{"window", func(_ *rand.Rand, r *request) { r.Window = 5 }},
	{"window of a cache", func(_ *rand.Rand, r *request) { r.Window, r.gives = 5, true }},
	{"sink tokens", func(_ *rand.Rand, r *request) { r.Window, r.SinkTokens = 5, 3 }},
	{"soft cap", func(_ *rand.Rand, r *request) { r.SoftCap = 0.8 }},
	{"ALiBi", func(_ *rand.Rand, r *request) {
		r.Slopes = nil
		for h := range r.Heads {
			r.Slopes = append(r.Slopes, 1/float64(2+h))
		}
	}},
	{"bias", func(rng *rand.Rand, r *request) {
		r.Shape = graphtest.Biased(rng, r.Shape, 1, 1, r.Queries[0]+r.padded)
	}},
	{"dropout", func(_ *rand.Rand, r *request) { r.Dropout, r.Seed = 0.3, 5 }},
	{"sinks", func(_ *rand.Rand, r *request) {
		r.Sinks = nil
		for h := range r.Heads {
			r.Sinks = append(r.Sinks, float64(h)-0.5)
		}
	}},
	{"variant", func(_ *rand.Rand, r *request) {
		v := la.Variant{Score: "0.5*score - 0.25*abs(query-key)/(1+head)", Visible: "key != 3"}
		r.source = variant.Source{Score: v.Score, Visible: v.Visible}
		r.Variant = refused(variant.New(r.source))
		r.opts = append(r.opts, la.WithVariant(v))
	}},
	{"rotary", func(_ *rand.Rand, r *request) {
		r.rotary = &rope.Config{Base: 500, Dim: 32, Interleaved: r.Causal}
		r.opts = append(r.opts, la.WithRotary(*r.rotary))
	}},
	{"scale", func(_ *rand.Rand, r *request) { r.Scale = -0.3 }},
	{"values of another width", func(_ *rand.Rand, r *request) { r.ValueDim = 128 }},
	{"heads of 40", func(_ *rand.Rand, r *request) { r.Dim, r.ValueDim = 40, 40 }},
	{"float32 keys", func(_ *rand.Rand, r *request) { r.kv = tensor.Float32 }},
	{"float64 keys", func(_ *rand.Rand, r *request) { r.kv = tensor.Float64 }},
	{"bfloat16 keys", func(_ *rand.Rand, r *request) { r.kv = la.BFloat16 }},
	{"E4M3 keys of a cache", func(_ *rand.Rand, r *request) { r.kv = la.E4M3 }},
	{"Q4 keys of a cache", func(_ *rand.Rand, r *request) { r.kv = la.Q4 }},
	{"float64 queries", func(_ *rand.Rand, r *request) { r.query = tensor.Float64 }},
	{"float16 queries", func(_ *rand.Rand, r *request) { r.query = la.Float16 }},
	{"fixed split", schedule(la.FixedSplit(3))},
	{"per head", schedule(la.PerHead)},
	{"unfused", schedule(la.Unfused)},
	{"LeanTiles", func(_ *rand.Rand, r *request) { r.tile(massTile) }},
	{"workers", option(la.WithWorkers(3))},
	{"mixed precision", func(_ *rand.Rand, r *request) { r.mixed, r.opts = true, append(r.opts, la.WithMixedPrecision()) }},
	{"batch invariance", option(la.WithBatchInvariance())},
}

// entry is a way into attention. It computes a request and compares the result with the
// reference; an error is what it has been refused with.
type entry struct {
	name string
	do   func(t *testing.T, rng *rand.Rand, r request) error
}

// refused takes over a call that may refuse a request.
func refused[T any](x T, err error) T {
	if err != nil {
		panic(refusal{err})
	}
	return x
}

type refusal struct{ error }

// testFeatures asks all entries for each feature, for so many of 100 pairs of them, and for so many random sets of three to six.
func testFeatures(t *testing.T, entries []entry, pairs, sets int) {
	rng := reftest.Rand(t)
	done := map[string]int{}
	try := func(e entry, fs ...feature) {
		r := request{Shape: reftest.Shape{Heads: 4, KVHeads: 2, Dim: 64, ValueDim: 64, Queries: []int{3}, Keys: []int{40}}, query: tensor.Float32, kv: la.Float16}
		name := "plain"
		for _, f := range fs {
			f.add(rng, &r)
			name += ", " + f.name
		}
		var err error
		t.Run(e.name+": "+name, func(t *testing.T) {
			defer func() {
				if x := recover(); x != nil {
					no, ok := x.(refusal)
					if !ok {
						panic(x)
					}
					err = no.error
				}
			}()
			err = e.do(t, rng, r)
		})
		switch {
		case r.schedules > 1 && (err == nil || errors.Is(la.Cause(err), la.ErrOption)):
			if err == nil || !strings.Contains(err.Error(), "option WithSchedule is given twice") {
				t.Errorf("%s: %s: %v; want ErrOption for the second schedule", e.name, name, err)
			}
		case err == nil:
			done[e.name]++
		case !errors.Is(la.Cause(err), la.ErrUnsupported) && !errors.Is(la.Cause(err), la.ErrDType):
			t.Errorf("%s: %s: %v; want a result or ErrUnsupported", e.name, name, err)
		case len(fs) == 0:
			t.Errorf("%s: %s: %v", e.name, name, err)
		}
	}
	for _, e := range entries {
		try(e)
		for i, f := range features {
			try(e, f)
			for _, g := range features[i+1:] {
				if rng.IntN(100) < pairs {
					try(e, f, g)
				}
			}
		}
		if done[e.name] < 5 {
			t.Errorf("%s: %d requests were computed", e.name, done[e.name])
		}
	}
	for range sets {
		var some []feature
		for n := 3 + rng.IntN(4); len(some) < n; {
			some = some[:0]
			for _, f := range features {
				if rng.IntN(len(features)) < n {
					some = append(some, f)
				}
			}
		}
		try(entries[rng.IntN(len(entries))], some...)
	}
	t.Logf("computed: %v", done)
}

// TestFeatures is that of the CPU.
func TestFeatures(t *testing.T) {
	pairs, sets := reftest.Cases(t, 10, 100), reftest.Cases(t, 400, 5000)
	if reftest.RaceEnabled {
		pairs, sets = 5, 20
	}
	testFeatures(t, append(denseEntries(graphtest.Place{}), cachedEntry("CachedAttention", graphtest.Place{})), pairs, sets)
}

// TestGPUFeatures is that of a GPU.
func TestGPUFeatures(t *testing.T) {
	gpu := devicetest.Open(t)
	at := graphtest.Place{GPU: gpu, Real: true, There: true}
	testFeatures(t, append(denseEntries(at),
		cachedEntry("CachedAttention of operands there", at),
		cachedEntry("CachedAttention of operands on the host", graphtest.Place{GPU: gpu, Real: true}),
		recordedEntry("a recording of one row: a chain", gpu, 1),
		recordedEntry("a recording of two rows: a chain", gpu, 2),
		recordedEntry("a recording of five rows: launches that append", gpu, 5),
	), 0, reftest.Cases(t, 50, 5000))
}

// TestGPUsFeatures is that of several GPUs.
func TestGPUsFeatures(t *testing.T) {
	gpu := devicetest.OpenSome(t, 2)
	at := graphtest.Place{GPU: gpu, Real: true, There: true}
	testFeatures(t, append(denseEntries(at),
		shardedEntry(at),
		cachedEntry("CachedAttention of operands there", at),
		cachedEntry("CachedAttention of operands on the host", graphtest.Place{GPU: gpu, Real: true}),
		recordedEntry("a recording of one row", gpu, 1),
		recordedEntry("a recording of five rows", gpu, 5),
		byContext(cachedEntry("CachedAttention", at)),
		byContext(recordedEntry("a recording of five rows", gpu, 5)),
	), 0, reftest.Cases(t, 50, 5000))
}

// TestDevicesFeatures is that of caches that are sharded by context, on GPUs that tests make.
func TestDevicesFeatures(t *testing.T) {
	gpu, _ := la.FakeGPUs(t, 2)
	there, host := graphtest.Place{GPU: gpu, There: true}, graphtest.Place{GPU: gpu}
	testFeatures(t, []entry{
		byContext(cachedEntry("CachedAttention", there)),
		byContext(cachedEntry("CachedAttention of operands on the host", host)),
	}, 30, reftest.Cases(t, 50, 1000))
}
