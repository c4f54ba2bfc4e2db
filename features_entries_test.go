package leanattention_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

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
		r.isDense()
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
		r.setOutputs(t, at.GPU, p, &a)
		var first []byte
		for range 2 {
			if err := la.Attend(a, append(p.AttendOptions(), r.opts...)...); err != nil {
				return err
			}
			out, lse := graphtest.Download(t, a.Out), graphtest.Download(t, a.LSE)
			p.Check(t, p.ReferenceThere(at), out, lse)
			if r.entropy || r.mass {
				t.Error("entropies or attention mass of sharded keys, and nothing here tests them")
			}
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

// isDense refuses keys of types that no tensor has.
func (r *request) isDense() {
	if slices.Contains(eightTypes, r.kv) {
		panic(refusal{fmt.Errorf("no tensor has keys of %v: %w", r.kv, la.ErrDType)})
	}
}

// stored returns keys or values of heads as a cache on a GPU has them.
func (r *request) stored(x []float64, keys bool) []float64 {
	x = slices.Clone(x)
	for row := range slices.Chunk(x, map[bool]int{false: r.ValueDim, true: r.Dim}[keys]) {
		switch r.kv {
		case la.Q4:
			reftest.StoreQ4(row, keys, reftest.Float32)
		case la.E4M3:
			reftest.E4M3.Store(row, reftest.E4M3.Scale(row), reftest.Float32)
		default:
			for i := range row {
				row[i] = graphtest.Format(r.kv).Round(row[i])
			}
		}
	}
	return x
}

// denseEntries are Attend and Attention.
func denseEntries(at graphtest.Place) []entry {
	problemOf := func(rng *rand.Rand, r request) *graphtest.Problem {
		r.isDense()
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
	check := func(t *testing.T, p *graphtest.Problem, r request, out, lse G.Value, o outputs) {
		precision := r.precision(at, at.Precision(p.QueryType, p.KVType))
		p.Check(t, p.Reference(precision), out, lse)
		r.checkOutputs(t, p.Case, precision, o, func(seq, pos, h int) int { return (seq*p.Heads+h)*p.Rows + pos })
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
			r.setOutputs(t, at.GPU, p, &a)
			if err := la.Attend(a, append(p.AttendOptions(), r.opts...)...); err != nil {
				return err
			}
			if at.GPU != nil {
				host = []G.Value{graphtest.Download(t, a.Out), graphtest.Download(t, a.LSE)}
			}
			check(t, p, r, host[0], host[1], outputs{a.Entropy, a.Mass})
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
			o := r.read(out, at.GPU != nil, r.Keys[0])
			if g.Out = out; at.GPU != nil {
				g.Out, g.LSE = refused(device.ToHost(out)), refused(device.ToHost(g.LSE))
			}
			g.Read(t)
			vm := graphtest.NewTapeMachine(g.G)
			defer vm.Close()
			if err := vm.RunAll(); err != nil {
				return err
			}
			check(t, p, r, g.OutValue, g.LSEValue, *o)
			return nil
		}},
	}
}

// outputs are the entropies and the attention mass of a request, on the host or on a GPU; nil where not asked for.
type outputs struct{ entropy, mass G.Value }

// setOutputs adds poisoned outputs to the arguments of Attend.
func (r *request) setOutputs(t *testing.T, gpu *device.GPU, p *graphtest.Problem, a *la.Args) {
	poisoned := func(dims ...int) G.Value {
		x := make([]float64, tensor.ProdInts(dims))
		reftest.Poison(x)
		d := graphtest.TensorOf(a.LSE.Dtype(), x, dims...)
		if gpu != nil {
			return graphtest.Upload(t, gpu, d)
		}
		return d
	}
	if r.entropy {
		a.Entropy = poisoned(p.Dims(p.Heads, p.Rows)...)
	}
	if r.mass {
		a.Mass = poisoned(p.Dims(p.Heads, p.Rows, attn.Ceil(r.Keys[0], massTile))...)
	}
}

// read adds the nodes of the outputs to the graph, for sequences of so many keys. The values are there after a run.
func (r *request) read(out *G.Node, there bool, keys int) *outputs {
	o := new(outputs)
	to := func(n *G.Node, v *G.Value) {
		if there {
			n = refused(device.ToHost(n))
		}
		G.Read(n, v)
	}
	if r.entropy {
		to(refused(la.Entropy(out)), &o.entropy)
	}
	if r.mass {
		to(refused(la.Mass(out, attn.Ceil(keys, massTile))), &o.mass)
	}
	return o
}

// checkOutputs compares outputs with the reference. at is the place of a query and head among the entropies.
func (r *request) checkOutputs(t *testing.T, c *reftest.Case, p reftest.Precision, o outputs, at func(seq, pos, h int) int) {
	t.Helper()
	// Of the places of a query, the first n are the reference's, and the others have 0.
	check := func(name string, of G.Value, want, bound []float64, n, places int) {
		if d, ok := of.(*device.Tensor); ok {
			of = graphtest.Download(t, d)
		}
		got := graphtest.Floats(t, of)
		for seq, queries := range c.Queries {
			for pos := range queries {
				for h := range c.Heads {
					for i, x := range got[at(seq, pos, h)*places:][:places] {
						var w, off float64
						if i < n {
							w, off = want[i], bound[i]
						}
						if !(math.Abs(x-w) <= off) {
							t.Errorf("%s of query %d, %d, head %d, place %d is %v, want %v within %v", name, seq, pos, h, i, x, w, off)
							return
						}
					}
					want, bound = want[n:], bound[n:]
				}
			}
		}
	}
	if r.entropy {
		want, bound := c.Entropy(p)
		check("the entropy", o.entropy, want, bound, 1, 1)
	}
	if r.mass {
		want, bound, tiles := c.Mass(p, r.source, massTile)
		check("the attention mass", o.mass, want, bound, tiles, o.mass.Shape()[o.mass.Shape().Dims()-1])
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
			d, o, err := decoderOf(at, c, tokens, r)
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
				precision := r.precision(at, d.Precision(r.query, r.kv))
				if err := d.Compare(t, l, u, x.Reference(precision)); err != nil {
					t.Errorf("%v: %v", x.Shape, err)
				}
				r.checkOutputs(t, x, precision, *o, func(_, pos, h int) int { return pos*r.Heads + h })
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
func decoderOf(at graphtest.Place, c *la.Cache, tokens int, r request) (*graphtest.Decoder, *outputs, error) {
	step, err := c.NewStep(tokens)
	if err != nil {
		return nil, nil, err
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
				return nil, nil, err
			}
		}
	}
	opts := append(d.Options(0), r.opts...)
	d.Rotary = r.rotary // its option is one of r.opts
	if r.Sinks != nil {
		sinks := graphtest.Input(g, "sinks", graphtest.SinksOf(r.query, r.Sinks))
		if at.There {
			if sinks, err = device.ToGPU(sinks, at.GPU); err != nil {
				return nil, nil, err
			}
		}
		opts = append(opts, la.WithSinks(sinks))
	}
	out, err := la.CachedAttention(in[0], in[1], in[2], step.Layer(0), opts...)
	if err != nil {
		return nil, nil, err
	}
	lse, o := refused(la.LogSumExp(out)), r.read(out, at.There, r.Keys[0])
	if at.There {
		out, lse = refused(device.ToHost(out)), refused(device.ToHost(lse))
	}
	G.Read(out, &d.OutValues[0])
	G.Read(lse, &d.LSEValues[0])
	d.VM = graphtest.NewTapeMachine(g)
	return d, o, nil
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
		if weights == tensor.Float64 || slices.Contains(eightTypes, weights) {
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
		o := r.read(out, false, massTile)
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
			if x.Q, x.K, x.V = now[0], nil, nil; r.kv == la.Q4 { // its keys are mixed
				reftest.MixQ4(x.Q, reftest.Float64)
				for i := range x.Q {
					x.Q[i] /= 32
				}
			}
			for i := range rows {
				for j, to := range []*[]float64{&x.K, &x.V} {
					width := len(now[1+j]) / rows
					history[i][j] = append(history[i][j], now[1+j][i*width:(i+1)*width]...)
					*to = append(*to, r.stored(history[i][j], j == 0)...)
				}
			}
			precision := graphtest.Place{GPU: gpu, Real: true, Rotary: r.rotary}.Precision(tensor.Float32, r.kv)
			r.checkOutputs(t, x, precision, *o, func(seq, _, h int) int { return seq*r.Heads + h })
			want := x.Reference(precision)
			if err := want.CompareO(func(seq, pos, h, i int) float64 { return now[3][(seq*r.Heads+h)*r.ValueDim+i] }); err != nil {
				t.Errorf("%s, turn %d, %v: %v", name, turn, s, err)
				return nil
			}
		}
		return nil
	}}
}
