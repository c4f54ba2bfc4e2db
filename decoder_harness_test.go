package leanattention_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// place is where a test's caches are: the zero value is the host.
type place struct {
	gpu   *la.GPU
	real  bool // it has kernels for some head dims only, and tensor cores round its numbers
	there bool // q, k and v are on the GPU as well, and so is what comes out

	bent   reftest.Shape   // the window, soft cap and slopes of decoders there
	layers []reftest.Shape // and, where layers differ, of each of them; Causal and Scale too
}

func (p place) String() string {
	if p.gpu == nil {
		return "host"
	}
	return fmt.Sprintf("%v, operands there %v", p.gpu, p.there)
}

// queries are the element types of q.
func (p place) queries() []tensor.Dtype {
	if p.gpu == nil {
		return []tensor.Dtype{tensor.Float32, tensor.Float64}
	}
	return []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16}
}

// precision is that of attention with queries and outputs of one type and keys of
// another.
func (p place) precision(query, kv tensor.Dtype) reftest.Precision {
	if query == tensor.Float64 {
		return reftest.Precision{Acc: reftest.Float64}
	}
	r := reftest.Precision{Acc: reftest.Float32, Out: format(query)}
	switch {
	case !p.real || kv == tensor.Float32:
	case query == kv: // tensor cores are given weights of the keys' type
		r.P = format(kv)
	case kv == la.BFloat16: // the sum of two queries, and of two weights
		r.P, r.Query = reftest.Float16, 0x1p-16
	}
	return r
}

// decoder is a graph with one CachedAttention node for each layer of a cache,
// whose inputs a test sets freely.
type decoder struct {
	place
	cache      *la.Cache
	step       *la.Step
	heads      int
	query      tensor.Dtype
	causal     bool
	vm         G.VM
	q, k, v    []*G.Node // one for each layer
	outV, lseV []G.Value
}

func newCache(t testing.TB, c la.CacheConfig) *la.Cache {
	t.Helper()
	cache, err := la.NewCache(c)
	if err != nil {
		t.Fatal(err)
	}
	return cache
}

func newDecoder(t testing.TB, c *la.Cache, tokens, heads int, query tensor.Dtype, causal bool, opts ...la.Option) *decoder {
	t.Helper()
	return newDecoderAt(t, place{}, c, tokens, heads, query, causal, opts...)
}

// newDecoderAt is newDecoder for a cache that is in a place.
func newDecoderAt(t testing.TB, at place, c *la.Cache, tokens, heads int, query tensor.Dtype, causal bool, opts ...la.Option) *decoder {
	t.Helper()
	step, err := c.NewStep(tokens)
	if err != nil {
		t.Fatal(err)
	}
	cfg := c.Config()
	d := &decoder{place: at, cache: c, step: step, heads: heads, query: query, causal: causal}
	d.outV, d.lseV = make([]G.Value, cfg.Layers), make([]G.Value, cfg.Layers)
	g := G.NewGraph()
	for l := range cfg.Layers {
		matrix := func(name string, width int) *G.Node {
			return G.NewMatrix(g, query, G.WithShape(tokens, width), G.WithName(fmt.Sprint(name, l)))
		}
		d.q = append(d.q, matrix("q", heads*cfg.HeadDim))
		d.k = append(d.k, matrix("k", cfg.KVHeads*cfg.HeadDim))
		d.v = append(d.v, matrix("v", cfg.KVHeads*cfg.ValueDim))
		in := [3]*G.Node{d.q[l], d.k[l], d.v[l]}
		if at.there {
			for i := range in {
				in[i] = move(t, in[i], func(n *G.Node) (*G.Node, error) { return la.ToDevice(n, at.gpu) })
			}
		}
		var lse *G.Node
		out, err := la.CachedAttention(in[0], in[1], in[2], step.Layer(l), append(append(slices.Clone(opts), d.options(l)...), la.WithLSE(&lse))...)
		if err != nil {
			t.Fatal(err)
		}
		if at.there {
			out, lse = move(t, out, la.ToHost), move(t, lse, la.ToHost)
		}
		G.Read(out, &d.outV[l])
		G.Read(lse, &d.lseV[l])
	}
	if err := la.CheckGraph(g); err != nil {
		t.Fatal(err)
	}
	d.vm = newTapeMachine(g)
	t.Cleanup(func() { d.vm.Close() })
	return d
}

// shape is what layer l makes of scores.
func (d *decoder) shape(l int) reftest.Shape {
	if d.layers != nil {
		return d.layers[l]
	}
	s := d.bent
	s.Causal = d.causal
	return s
}

func (d *decoder) options(l int) []la.Option {
	s := d.shape(l)
	o := bends(s)
	if s.Causal {
		o = append(o, la.WithCausal())
	}
	if s.Scale != 0 {
		o = append(o, la.WithScale(s.Scale))
	}
	return o
}

func move(t testing.TB, n *G.Node, to func(*G.Node) (*G.Node, error)) *G.Node {
	t.Helper()
	m, err := to(n)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// stored is a sequence, and what the cache must hold of it: for each layer
// (tokens, KVHeads, dim) as it was rounded.
type stored struct {
	seq  *la.Sequence
	k, v [][]float64
}

func newStored(t testing.TB, c *la.Cache) *stored {
	t.Helper()
	seq, err := c.NewSequence()
	if err != nil {
		t.Fatal(err)
	}
	n := c.Config().Layers
	return &stored{seq, make([][]float64, n), make([][]float64, n)}
}

func (s *stored) fork(t testing.TB) *stored {
	t.Helper()
	seq, err := s.seq.Fork()
	if err != nil {
		t.Fatal(err)
	}
	f := &stored{seq: seq}
	for l := range s.k {
		f.k, f.v = append(f.k, slices.Clone(s.k[l])), append(f.v, slices.Clone(s.v[l]))
	}
	return f
}

// appended is some tokens of a sequence in a step.
type appended struct {
	to     *stored
	tokens int
}

// turn is one step: the cases of its layers, for the reference, and the new
// tokens' keys and values.
type turn struct {
	cases []*reftest.Case
	rows  int
	parts []appended
}

// set begins a step, and binds inputs to the graph.
func (d *decoder) set(t testing.TB, rng *rand.Rand, in reftest.Inputs, parts ...appended) *turn {
	t.Helper()
	var appends []la.Append
	for _, p := range parts {
		appends = append(appends, la.Append{Seq: p.to.seq, Tokens: p.tokens})
	}
	if err := d.step.Set(appends); err != nil {
		t.Fatal(err)
	}
	return d.draw(t, rng, in, parts...)
}

// draw binds inputs to the graph: new keys and values in the query's type, and
// NaN in the rows that belong to nobody.
func (d *decoder) draw(t testing.TB, rng *rand.Rand, in reftest.Inputs, parts ...appended) *turn {
	t.Helper()
	cfg := d.cache.Config()
	u := &turn{parts: parts}
	for l := range d.q {
		s := d.shape(l)
		s.Heads, s.KVHeads, s.Dim, s.ValueDim = d.heads, cfg.KVHeads, cfg.HeadDim, cfg.ValueDim
		for _, p := range parts {
			s.Queries = append(s.Queries, p.tokens)
			s.Keys = append(s.Keys, p.to.seq.Len()+p.tokens)
		}
		u.rows = s.QueryRows()
		c := reftest.New(rng, s, in, format(d.query), format(d.query))
		q := slices.Clone(c.Q)
		k := d.history(c.K, cfg.KVHeads*cfg.HeadDim, parts, func(s *stored) []float64 { return s.k[l] })
		v := d.history(c.V, cfg.KVHeads*cfg.ValueDim, parts, func(s *stored) []float64 { return s.v[l] })
		let(t, d.q[l], d.rows(q, d.heads*cfg.HeadDim))
		let(t, d.k[l], d.rows(k, cfg.KVHeads*cfg.HeadDim))
		let(t, d.v[l], d.rows(v, cfg.KVHeads*cfg.ValueDim))
		u.cases = append(u.cases, c)
	}
	return u
}

// history puts into all the rows of earlier tokens what the cache holds, rounds
// those of new tokens as the cache does, and returns the new ones as they were.
func (d *decoder) history(all []float64, width int, parts []appended, old func(*stored) []float64) (fresh []float64) {
	f := format(d.cache.Config().DType)
	for _, p := range parts {
		n := copy(all, old(p.to))
		x := all[n : n+p.tokens*width]
		fresh = append(fresh, x...)
		for i := range x {
			x[i] = f.Round(x[i])
		}
		all = all[n+len(x):]
	}
	return fresh
}

// rows is x as rows of the step, with NaN in those that x has not.
func (d *decoder) rows(x []float64, width int) *tensor.Dense {
	for len(x) < d.step.Tokens()*width {
		x = append(x, math.NaN())
	}
	return tensorOf(d.query, x, d.step.Tokens(), width)
}

// run runs the graph, and compares every layer with the reference.
func (d *decoder) run(t testing.TB, u *turn) {
	t.Helper()
	again(t, d.vm)
	d.checkRows(t, u)
	for l, c := range u.cases {
		want := c.Reference(d.precision(d.query, d.cache.Config().DType))
		if err := d.compare(t, l, u, want); err != nil {
			t.Fatalf("layer %d, %v: %v", l, c.Shape, err)
		}
	}
}

// checkRows checks what the step says of its rows.
func (d *decoder) checkRows(t testing.TB, u *turn) {
	t.Helper()
	var positions, last []int
	for _, p := range u.parts {
		for i := range p.tokens {
			positions = append(positions, p.to.seq.Len()+i)
		}
		last = append(last, len(positions)-1)
	}
	positions = append(positions, make([]int, d.step.Tokens()-len(positions))...)
	if p, l := d.step.Positions(), d.step.Last(); !slices.Equal(p, positions) || !slices.Equal(l, last) {
		t.Fatalf("positions %v, last rows %v; want %v, %v", p, l, positions, last)
	}
}

func (d *decoder) compare(t testing.TB, layer int, u *turn, want *reftest.Result) error {
	t.Helper()
	dv := d.cache.Config().ValueDim
	if got, want := d.outV[layer].Shape(), (tensor.Shape{d.step.Tokens(), d.heads * dv}); !got.Eq(want) {
		return fmt.Errorf("output has shape %v, want %v", got, want)
	}
	if got, want := d.lseV[layer].Shape(), (tensor.Shape{d.step.Tokens(), d.heads}); !got.Eq(want) {
		return fmt.Errorf("log-sum-exp has shape %v, want %v", got, want)
	}
	out, lse := floats(t, d.outV[layer]), floats(t, d.lseV[layer])
	first := make([]int, len(u.parts)+1)
	for i, p := range u.parts {
		first[i+1] = first[i] + p.tokens
	}
	if err := want.CompareO(func(s, pos, h, i int) float64 { return out[((first[s]+pos)*d.heads+h)*dv+i] }); err != nil {
		return fmt.Errorf("output: %w", err)
	}
	if err := want.CompareLSE(func(s, pos, h int) float64 { return lse[(first[s]+pos)*d.heads+h] }); err != nil {
		return fmt.Errorf("log-sum-exp: %w", err)
	}
	if i := slices.IndexFunc(out[u.rows*d.heads*dv:], func(f float64) bool { return f != 0 }); i >= 0 {
		return fmt.Errorf("rows of nobody: element %d is not 0", i)
	}
	if i := slices.IndexFunc(lse[u.rows*d.heads:], func(f float64) bool { return !math.IsInf(f, -1) }); i >= 0 {
		return fmt.Errorf("rows of nobody: log-sum-exp %d is not -Inf", i)
	}
	return nil
}

// commit commits the step, and notes what the cache holds now.
func (d *decoder) commit(t testing.TB, u *turn) {
	t.Helper()
	if err := d.step.Commit(); err != nil {
		t.Fatal(err)
	}
	cfg := d.cache.Config()
	for l, c := range u.cases {
		at := 0
		for i, p := range u.parts {
			n := c.Keys[i]
			wk, wv := cfg.KVHeads*cfg.HeadDim, cfg.KVHeads*cfg.ValueDim
			p.to.k[l] = slices.Clone(c.K[at*wk : (at+n)*wk])
			p.to.v[l] = slices.Clone(c.V[at*wv : (at+n)*wv])
			at += n
		}
	}
}

// do is a whole step.
func (d *decoder) do(t testing.TB, rng *rand.Rand, in reftest.Inputs, parts ...appended) {
	t.Helper()
	u := d.set(t, rng, in, parts...)
	d.run(t, u)
	d.commit(t, u)
}

// bits is the bits of all outputs.
func (d *decoder) bits(t testing.TB) []uint64 {
	t.Helper()
	var all []uint64
	for l := range d.outV {
		all = append(append(all, bits(t, d.outV[l])...), bits(t, d.lseV[l])...)
	}
	return all
}
