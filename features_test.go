package leanattention_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/rewrite"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/rope"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/variant"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
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
	shard     la.Shard // of its cache
	mixed     bool     // WithMixedPrecision is among opts
	padded    int      // rows of padding behind the queries
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
		r.Variant = refused(variant.New(variant.Source{Score: v.Score, Visible: v.Visible}))
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
	{"float64 queries", func(_ *rand.Rand, r *request) { r.query = tensor.Float64 }},
	{"float16 queries", func(_ *rand.Rand, r *request) { r.query = la.Float16 }},
	{"fixed split", schedule(la.FixedSplit(3))},
	{"per head", schedule(la.PerHead)},
	{"unfused", schedule(la.Unfused)},
	{"LeanTiles", option(la.WithTileTokens(64))},
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
		failed := t.Failed()
		defer func() {
			if t.Failed() && !failed {
				t.Logf("that was %s: %s", e.name, name)
			}
		}()
		err := func() (err error) {
			defer func() {
				if x := recover(); x != nil {
					no, ok := x.(refusal)
					if !ok {
						panic(x)
					}
					err = no.error
				}
			}()
			return e.do(t, rng, r)
		}()
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

// byContext is an entry on a cache that is sharded by context.
func byContext(e entry) entry {
	return entry{e.name + ", sharded by context", func(t *testing.T, rng *rand.Rand, r request) error {
		r.shard = la.ShardContext
		return e.do(t, rng, r)
	}}
}

// shardedEntry is Attend of keys and values that are sharded by heads.
func shardedEntry(at graphtest.Place) entry {
	return entry{"Attend of sharded keys and values", func(t *testing.T, rng *rand.Rand, r request) error {
		p := graphtest.NewProblem(rng, r.Shape, r.spec())
		a := p.Args()
		var there []*device.Tensor
		for i, to := range []*G.Value{&a.Q, &a.K, &a.V, &a.Out} {
			x := (*to).(*tensor.Dense)
			d, err := at.GPU.Upload(x)
			if i == 1 || i == 2 {
				d, err = at.GPU.UploadSharded(x, len(x.Shape())-3)
			}
			*to, there = refused(d, err), append(there, d)
		}
		if p.InBias != nil {
			a.Bias = refused(at.GPU.Upload(p.InBias))
		}
		if p.InSinks != nil {
			a.Sinks = refused(at.GPU.Upload(p.InSinks))
		}
		a.LSE = graphtest.Upload(t, at.GPU, tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(p.Dims(p.Heads, p.Rows)...)))
		var first []byte
		for range 2 {
			if err := la.Attend(a, append(p.AttendOptions(), r.opts...)...); err != nil {
				return err
			}
			out, lse := graphtest.Download(t, a.Out), graphtest.Download(t, a.LSE)
			p.Check(t, p.ReferenceThere(at), out, lse)
			bits := fmt.Append(nil, out.Data(), lse.Data())
			if first != nil && !bytes.Equal(bits, first) {
				t.Errorf("%v: other bits", p.Shape)
			}
			first = bits
		}
		for _, d := range there {
			if err := d.Free(); err != nil {
				t.Error(err)
			}
		}
		return nil
	}}
}

// denseEntries are Attend and Attention.
func denseEntries(at graphtest.Place) []entry {
	problemOf := func(rng *rand.Rand, r request) *graphtest.Problem {
		return graphtest.NewProblem(rng, r.Shape, r.spec())
	}
	there := func(t *testing.T, x *tensor.Dense) G.Value {
		if at.GPU == nil {
			return x
		}
		d, err := at.GPU.Upload(x)
		if err != nil {
			panic(refusal{err})
		}
		return d
	}
	want := func(p *graphtest.Problem, r request) *reftest.Result {
		return p.Reference(r.precision(at, at.Precision(p.QueryType, p.KVType)))
	}
	return []entry{
		{"Attend", func(t *testing.T, rng *rand.Rand, r request) error {
			p := problemOf(rng, r)
			a := p.Args()
			host := []G.Value{a.Out, a.LSE}
			if at.GPU != nil {
				a.Q, a.K, a.V = there(t, p.InQ), there(t, p.InK), there(t, p.InV)
				a.Out = there(t, a.Out.(*tensor.Dense))
				a.LSE = graphtest.Upload(t, at.GPU, tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(p.Dims(p.Heads, p.Rows)...)))
				if p.InBias != nil {
					a.Bias = there(t, p.InBias)
				}
				if p.InSinks != nil {
					a.Sinks = there(t, p.InSinks)
				}
			}
			if err := la.Attend(a, append(p.AttendOptions(), r.opts...)...); err != nil {
				return err
			}
			if at.GPU != nil {
				host = []G.Value{graphtest.Download(t, a.Out), graphtest.Download(t, a.LSE)}
			}
			p.Check(t, want(p, r), host[0], host[1])
			return nil
		}},
		{"Attention", func(t *testing.T, rng *rand.Rand, r request) error {
			if r.Tree {
				return fmt.Errorf("no input of the node is for trees: %w", la.ErrUnsupported)
			}
			p := problemOf(rng, r)
			g := p.Graph()
			in := []*G.Node{g.Q, g.K, g.V}
			opts := slices.Concat(p.Options(), r.opts, g.LengthOptions(p))
			if at.GPU != nil {
				for i := range in {
					in[i] = refused(device.ToGPU(in[i], at.GPU))
				}
			}
			if g.BiasNode != nil {
				b := g.BiasNode
				if at.GPU != nil {
					b = refused(device.ToGPU(b, at.GPU))
				}
				opts = append(opts, la.WithBias(b))
			}
			if g.Seed != nil {
				opts = append(opts, la.WithDropout(p.Dropout, g.Seed))
			}
			if g.SinksNode != nil {
				s := g.SinksNode
				if at.GPU != nil {
					s = refused(device.ToGPU(s, at.GPU))
				}
				opts = append(opts, la.WithSinks(s))
			}
			out := refused(la.Attention(in[0], in[1], in[2], opts...))
			g.LSE = graphtest.LogSumExp(t, out)
			if g.Out = out; at.GPU != nil {
				g.Out, g.LSE = refused(device.ToHost(out)), refused(device.ToHost(g.LSE))
			}
			g.Read(t)
			vm := graphtest.NewTapeMachine(g.G)
			defer vm.Close()
			if err := vm.RunAll(); err != nil {
				return err
			}
			p.Check(t, want(p, r), g.OutValue, g.LSEValue)
			return nil
		}},
	}
}

// cacheOf is a cache for a request, of sequences that grow by a row at a time.
func cacheOf(t *testing.T, r request, device *device.GPU) *la.Cache {
	config := la.CacheConfig{Layers: 1, KVHeads: r.KVHeads, HeadDim: r.Dim, ValueDim: r.ValueDim, DType: r.kv, PageSize: 16, Pages: 40, Device: device, Shard: r.shard}
	if r.gives { // within a few steps
		config.PageSize, config.Window, config.SinkTokens = 2, r.Window, r.SinkTokens
	}
	c := refused(la.NewCache(config))
	t.Cleanup(func() { c.Close() })
	return c
}

// cachedEntry is CachedAttention: of a prompt, and of one row behind it.
func cachedEntry(name string, at graphtest.Place) entry {
	return entry{name, func(t *testing.T, rng *rand.Rand, r request) error {
		if r.Bias.X != nil || r.Dropout != 0 || r.padded != 0 {
			return fmt.Errorf("no node has a bias, dropout or lengths of queries there: %w", refusesNodes(t, r, at))
		}
		c := cacheOf(t, r, at.GPU)
		defer c.Close()
		seq := graphtest.NewStored(t, c)
		for _, tokens := range []int{r.Keys[0] - r.Queries[0], r.Queries[0]} {
			d, err := decoderOf(at, c, tokens, r)
			if err != nil {
				return err
			}
			a := graphtest.Appended{To: seq, Tokens: tokens}
			if r.Tree && tokens == r.Queries[0] {
				a.Tree = r.Trees[0]
				if err := d.Step.Set([]la.Append{{Seq: seq.Seq, Tokens: tokens, Parents: reftest.Parents(a.Tree)}}); err != nil {
					return errors.Join(err, d.VM.Close())
				}
				if err := d.Step.Rollback(); err != nil {
					t.Error(err)
				}
			}
			u := d.Set(t, rng, reftest.Normal, a)
			err = d.VM.RunAll()
			d.VM.Reset()
			if err != nil {
				return errors.Join(err, d.Step.Rollback(), d.VM.Close())
			}
			for l, x := range u.Cases {
				if err := d.Compare(t, l, u, x.Reference(r.precision(at, d.Precision(r.query, r.kv)))); err != nil {
					t.Errorf("%v: %v", x.Shape, err)
				}
			}
			d.Commit(t, u)
			if err := d.VM.Close(); err != nil {
				t.Error(err)
			}
		}
		return nil
	}}
}

// refusesNodes is what CachedAttention says of the bias, of the dropout or of the lengths of queries of a request.
func refusesNodes(t *testing.T, r request, at graphtest.Place) error {
	c := cacheOf(t, r, at.GPU)
	defer c.Close()
	step := refused(c.NewStep(1))
	g := G.NewGraph()
	in := func(name string, n int) *G.Node {
		return G.NewMatrix(g, r.query, G.WithShape(1, n), G.WithName(name))
	}
	var opts []la.Option
	if r.Bias.X != nil {
		opts = append(opts, la.WithBias(in("bias", 40)))
	}
	if r.Dropout != 0 {
		opts = append(opts, la.WithDropout(r.Dropout, G.NewScalar(g, tensor.Int, G.WithName("seed"))))
	}
	if r.padded != 0 {
		opts = append(opts, la.WithQueryLengths(G.NewVector(g, tensor.Int, G.WithShape(1), G.WithName("query lengths"))), la.WithQueriesAtEnd())
	}
	q, k, v := in("q", r.Heads*r.Dim), in("k", r.KVHeads*r.Dim), in("v", r.KVHeads*r.ValueDim)
	var err error
	for i := range opts {
		if _, err = la.CachedAttention(q, k, v, step.Layer(0), opts[i]); err == nil {
			t.Errorf("%v was taken, and nothing here tests it", opts[i])
		}
	}
	return err
}

// decoderOf is newDecoderAt for a request that may be refused.
func decoderOf(at graphtest.Place, c *la.Cache, tokens int, r request) (*graphtest.Decoder, error) {
	step, err := c.NewStep(tokens)
	if err != nil {
		return nil, err
	}
	mask := r.Mask
	mask.Tree = false // that is the step's
	at.Layers = []reftest.Shape{{Mask: mask, SoftCap: r.SoftCap, Slopes: r.Slopes, Sinks: r.Sinks, Variant: r.Variant, Scale: r.Scale}}
	d := &graphtest.Decoder{Place: at, Cache: c, Step: step, Heads: r.Heads, Query: r.query, OutValues: make([]G.Value, 1), LSEValues: make([]G.Value, 1)}
	g := G.NewGraph()
	var in [3]*G.Node
	for i, to := range []*[]*G.Node{&d.Q, &d.K, &d.V} {
		width := []int{r.Heads * r.Dim, r.KVHeads * r.Dim, r.KVHeads * r.ValueDim}[i]
		in[i] = G.NewMatrix(g, r.query, G.WithShape(tokens, width), G.WithName("qkv"[i:i+1]))
		*to = append(*to, in[i])
		if at.There {
			if in[i], err = device.ToGPU(in[i], at.GPU); err != nil {
				return nil, err
			}
		}
	}
	opts := append(d.Options(0), r.opts...)
	d.Rotary = r.rotary // its option is one of r.opts
	if r.Sinks != nil {
		sinks := graphtest.Input(g, "sinks", graphtest.SinksOf(r.query, r.Sinks))
		if at.There {
			if sinks, err = device.ToGPU(sinks, at.GPU); err != nil {
				return nil, err
			}
		}
		opts = append(opts, la.WithSinks(sinks))
	}
	out, err := la.CachedAttention(in[0], in[1], in[2], step.Layer(0), opts...)
	if err != nil {
		return nil, err
	}
	lse := refused(la.LogSumExp(out))
	if at.There {
		out, lse = refused(device.ToHost(out)), refused(device.ToHost(lse))
	}
	G.Read(out, &d.OutValues[0])
	G.Read(lse, &d.LSEValues[0])
	d.VM = graphtest.NewTapeMachine(g)
	return d, nil
}

// recordedEntry is CachedAttention between linear layers, recorded: a sequence for each
// row, which grows by a token in each replay.
func recordedEntry(name string, gpu *device.GPU, rows int) entry {
	return entry{name, func(t *testing.T, rng *rand.Rand, r request) error {
		if r.Bias.X != nil || r.Dropout != 0 {
			return refusesNodes(t, r, graphtest.Place{GPU: gpu})
		}
		c := cacheOf(t, r, gpu)
		defer c.Close()
		step := refused(c.NewStep(rows))
		g := G.NewGraph()
		const in = 128
		there := func(name string, x *tensor.Dense) *G.Node {
			d := refused(gpu.Upload(x))
			t.Cleanup(func() { d.Free() })
			return G.NewTensor(g, x.Dtype(), x.Dims(), G.WithShape(x.Shape()...), G.WithName(name), G.WithValue(d))
		}
		upload := func(name string, of tensor.Dtype, n, m int, scale float64) *G.Node {
			x := make([]float64, n*m)
			for i := range x {
				x[i] = scale * rng.NormFloat64()
			}
			return there(name, graphtest.TensorOf(of, x, n, m))
		}
		weights := r.kv
		if weights == tensor.Float64 {
			weights = la.Float16
		}
		x := upload("x", r.query, rows, in, 1)
		var ws []*G.Node
		for i, n := range []int{r.Heads * r.Dim, r.KVHeads * r.Dim, r.KVHeads * r.ValueDim} {
			ws = append(ws, upload("w"+"qkv"[i:i+1], weights, n, in, 0.1))
		}
		qkv := refused(nn.Linears(x, ws, nil))
		shape := reftest.Shape{Heads: r.Heads, KVHeads: r.KVHeads, Dim: r.Dim, ValueDim: r.ValueDim, Mask: r.Mask, SoftCap: r.SoftCap, Slopes: r.Slopes, Sinks: r.Sinks, Variant: r.Variant, Scale: r.Scale}
		d := &graphtest.Decoder{Place: graphtest.Place{Layers: []reftest.Shape{shape}}}
		opts := append(d.Options(0), r.opts...)
		if r.Sinks != nil {
			opts = append(opts, la.WithSinks(there("sinks", graphtest.SinksOf(r.query, r.Sinks))))
		}
		out := refused(la.CachedAttention(qkv[0], qkv[1], qkv[2], step.Layer(0), opts...))
		y := refused(nn.Linear(out, upload("wo", weights, in, r.Heads*r.ValueDim, 0.1), nil))
		values := make([]G.Value, 5)
		for i, n := range []*G.Node{qkv[0], qkv[1], qkv[2], out, y} {
			G.Read(n, &values[i])
		}
		vm := graphtest.NewTapeMachine(g)
		defer vm.Close()
		var appends []la.Append
		for range rows {
			a := la.Append{Seq: refused(c.NewSequence()), Tokens: 1}
			if r.Tree {
				a.Parents = []int{-1}
			}
			appends = append(appends, a)
		}
		history := make([][2][]float64, rows) // of each sequence, keys and values
		var rec *device.Recording
		defer func() {
			if rec != nil {
				rec.Close()
			}
		}()
		for turn := range 8 { // more than the window
			err := step.Run(appends, func() (err error) {
				run := func() error {
					defer vm.Reset()
					return vm.RunAll()
				}
				if turn == 0 {
					return run()
				}
				if turn == 1 {
					if rec, err = gpu.Record(run); err != nil {
						return err
					}
				}
				return rec.Replay()
			})
			if err != nil {
				return err
			}
			var now [4][]float64
			for i := range now {
				now[i] = graphtest.Floats(t, graphtest.Download(t, values[i]))
			}
			if r.rotary != nil {
				c := *r.rotary
				c.HeadDim = r.Dim
				for _, x := range now[:2] {
					for head := range slices.Chunk(x, r.Dim) {
						graphtest.Turn(t, head, c, turn, reftest.Float32)
					}
				}
			}
			s := shape
			s.Queries, s.Keys = graphtest.Repeated(rows, 1), graphtest.Repeated(rows, turn+1)
			x := reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32)
			x.Q, x.K, x.V = now[0], nil, nil
			for i := range rows {
				for j, to := range []*[]float64{&x.K, &x.V} {
					width := len(now[1+j]) / rows
					history[i][j] = append(history[i][j], now[1+j][i*width:(i+1)*width]...)
					for _, f := range history[i][j] {
						*to = append(*to, graphtest.Format(r.kv).Round(f))
					}
				}
			}
			want := x.Reference(graphtest.Place{GPU: gpu, Real: true, Rotary: r.rotary}.Precision(tensor.Float32, r.kv))
			if err := want.CompareO(func(seq, pos, h, i int) float64 { return now[3][(seq*r.Heads+h)*r.ValueDim+i] }); err != nil {
				t.Errorf("%s, turn %d, %v: %v", name, turn, s, err)
				return nil
			}
		}
		return nil
	}}
}

// testGPTOSS is the attention of gpt-oss: sinks in every layer, and a window in every second one; prompts in chunks, and
// tokens behind them.
func testGPTOSS(t *testing.T, at graphtest.Place, heads, kvHeads, window, prompt, rows int) {
	rng := reftest.Rand(t)
	full := reftest.RandomSinks(rng, reftest.Shape{Heads: heads, Mask: attn.Mask{Causal: true}})
	windowed := reftest.RandomSinks(rng, full)
	windowed.Window = window
	at.Layers = []reftest.Shape{windowed, full}
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 2, KVHeads: kvHeads, HeadDim: 64, DType: la.BFloat16, PageSize: 16, Pages: 2*(prompt/16+2) + 8, Device: at.GPU})
	la.PoisonFree(cache)
	read := graphtest.NewDecoderAt(t, at, cache, rows, heads, tensor.Float32, true)
	seqs := []*graphtest.Stored{graphtest.NewStored(t, cache), graphtest.NewStored(t, cache)}
	for chunk, of := range la.Chunks(rows, []la.Append{{Seq: seqs[0].Seq, Tokens: prompt}, {Seq: seqs[1].Seq, Tokens: window / 2}}) {
		var appended []graphtest.Appended
		for i, a := range chunk {
			appended = append(appended, graphtest.Appended{To: seqs[of[i]], Tokens: a.Tokens})
		}
		read.Do(t, rng, reftest.Normal, appended...)
	}
	decode := graphtest.NewDecoderAt(t, at, cache, 3, heads, tensor.Float32, true) // a row is nobody's
	for range 3 {
		decode.Do(t, rng, reftest.Peaked, graphtest.Appended{To: seqs[1], Tokens: 1}, graphtest.Appended{To: seqs[0], Tokens: 1})
	}
	closeCache(t, cache)
}

func TestGPTOSS(t *testing.T) { testGPTOSS(t, graphtest.Place{}, 64, 8, 128, 200, 90) }

func TestGPUGPTOSS(t *testing.T) {
	gpu := devicetest.Open(t)
	for _, there := range []bool{false, true} {
		testGPTOSS(t, graphtest.Place{GPU: gpu, Real: true, There: there}, 16, 2, 24, 50, 30)
	}
}

// TestGPUSinksComputed: sinks that a node makes on the GPU, in a graph whose nodes share memory.
func TestGPUSinksComputed(t *testing.T) {
	gpu := devicetest.Open(t)
	rng := reftest.Rand(t)
	s := reftest.Shape{Heads: 4, KVHeads: 2, Dim: 64, ValueDim: 64, Queries: []int{3}, Keys: []int{3}, Mask: attn.Mask{Causal: true}}
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 2, HeadDim: 64, PageSize: 4, Pages: 3, Device: gpu})
	step, err := cache.NewStep(3)
	if err != nil {
		t.Fatal(err)
	}
	g := G.NewGraph()
	there := func(n *G.Node) *G.Node {
		return graphtest.Move(t, n, func(n *G.Node) (*G.Node, error) { return device.ToGPU(n, gpu) })
	}
	q, k, v, half := f32(3, 256).node(g, "q"), f32(3, 128).node(g, "k"), f32(3, 128).node(g, "v"), f32(1, 4).node(g, "half")
	sinks, err := nn.Scale(there(half), 2)
	if err != nil {
		t.Fatal(err)
	}
	if sinks, err = nn.Reshape(sinks, 4); err != nil {
		t.Fatal(err)
	}
	out, err := la.CachedAttention(there(q), there(k), there(v), step.Layer(0), la.WithCausal(), la.WithSinks(sinks))
	if err != nil {
		t.Fatal(err)
	}
	var result G.Value
	G.Read(graphtest.Move(t, out, device.ToHost), &result)
	if err := rewrite.ShareMemory(g); err != nil {
		t.Fatal(err)
	}
	vm := graphtest.NewTapeMachine(g)
	defer vm.Close()
	for range 3 {
		s = reftest.RandomSinks(rng, s)
		c := reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32)
		halves := slices.Clone(s.Sinks)
		for i := range halves {
			halves[i] /= 2
		}
		for _, x := range []struct {
			n     *G.Node
			of    []float64
			shape []int
		}{{q, c.Q, []int{3, 256}}, {k, c.K, []int{3, 128}}, {v, c.V, []int{3, 128}}, {half, halves, []int{1, 4}}} {
			graphtest.Let(t, x.n, graphtest.TensorOf(tensor.Float32, x.of, x.shape...))
		}
		if err := step.Set([]la.Append{{Seq: graphtest.NewStored(t, cache).Seq, Tokens: 3}}); err != nil {
			t.Fatal(err)
		}
		graphtest.Again(t, vm)
		got := graphtest.Floats(t, result)
		want := c.Reference(graphtest.Place{GPU: gpu, Real: true}.Precision(tensor.Float32, tensor.Float32))
		if err := want.CompareO(func(_, pos, h, i int) float64 { return got[(pos*4+h)*64+i] }); err != nil {
			t.Errorf("%v: %v", s, err)
		}
		if err := step.Rollback(); err != nil {
			t.Fatal(err)
		}
	}
	closeCache(t, cache)
}
