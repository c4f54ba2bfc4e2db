package leanattention

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/graph"

	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

var smallCache = CacheConfig{Layers: 3, KVHeads: 2, HeadDim: 4, ValueDim: 3, PageSize: 4, Pages: 12}

// A step may be set before its graph is built.
func TestGraphBuiltAfterSet(t *testing.T) {
	c := newTestCache(t, CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 2, PageSize: 2, Pages: 2})
	step, err := c.NewStep(1)
	noError(t, err)
	seq := newTestSequence(t, c)
	noError(t, step.Set([]Append{{Seq: seq, Tokens: 1}}))
	g := G.NewGraph()
	x := func(name string, v ...float32) *G.Node {
		return G.NewMatrix(g, tensor.Float32, G.WithShape(1, 2), G.WithName(name),
			G.WithValue(tensor.New(tensor.WithShape(1, 2), tensor.WithBacking(v))))
	}
	out, err := CachedAttention(x("q", 1, 1), x("k", 1, 2), x("v", 3, 4), step.Layer(0))
	noError(t, err)
	m := G.NewTapeMachine(g)
	defer m.Close()
	noError(t, m.RunAll(), step.Commit())
	if got := float64s(out.Value()); got[0] != 3 || got[1] != 4 {
		t.Fatalf("got %v, want the value of the only token", got)
	}
}

// Layers have one plan where all that a schedule or a kernel depends on is equal, and
// each its own where anything differs.
func TestPlansOfLayers(t *testing.T) {
	cfg := smallCache
	cfg.Layers = 40
	c := newTestCache(t, cfg)
	step, err := c.NewStep(3)
	noError(t, err)
	g := G.NewGraph()
	layer := 0
	add := func(heads int, opts ...Option) {
		t.Helper()
		var in [3]*G.Node
		for i, width := range [...]int{heads * cfg.HeadDim, cfg.KVHeads * cfg.HeadDim, cfg.KVHeads * cfg.ValueDim} {
			in[i] = G.NewMatrix(g, tensor.Float32, G.WithShape(3, width), G.WithName(fmt.Sprint("qkv"[i], heads, layer)))
		}
		_, err := CachedAttention(in[0], in[1], in[2], step.Layer(layer), opts...)
		noError(t, err)
		layer++
	}
	options := [][]Option{
		nil, {WithCausal()}, {WithScale(1)}, {WithScale(2)}, {WithWindow(3)}, {WithWindow(4)}, {WithSoftCap(1)}, {WithSoftCap(2)},
		{WithALiBi([]float64{1, 2, 3, 4})}, {WithALiBi([]float64{1, 2, 3, 5})}, {WithSchedule(PerHead)}, {WithSchedule(FixedSplit(2))}, {WithSchedule(FixedSplit(3))},
		{WithTileTokens(1)}, {WithTileTokens(2)}, {WithWorkers(1)}, {WithWorkers(2)}, {WithCausal(), WithWorkers(1)},
	}
	for range 2 {
		for _, o := range options {
			add(4, o...)
		}
		if n := len(step.plans); n != len(options) {
			t.Fatalf("%d plans for %d kinds of layers", n, len(options))
		}
	}
	add(2)
	add(2)
	if n := len(step.plans); n != len(options)+1 {
		t.Errorf("%d plans after layers of two heads", n)
	}
}

// Where the pool's numbers are wrong, which only a defect could bring about, calls say
// so and change nothing: no page goes to two sequences.
func TestWrongPool(t *testing.T) {
	for name, do := range map[string]func(*Sequence, *Step) error{
		"Fork":     func(q *Sequence, _ *Step) error { _, err := q.Fork(); return err },
		"WriteTo":  func(q *Sequence, _ *Step) error { _, err := q.WriteTo(new(bytes.Buffer)); return err },
		"Truncate": func(q *Sequence, _ *Step) error { return q.Truncate(1) },
		"Release":  func(q *Sequence, _ *Step) error { return q.Release() },
	} {
		c := newTestCache(t, smallCache)
		q := newTestSequence(t, c)
		Lengthen(q, 10)
		step, err := c.NewStep(4)
		noError(t, err, c.pool.Release(q.table.Pages[1:]))
		before := booksOf(c)
		if err := do(q, step); !errors.Is(err, ErrInternal) || !strings.Contains(err.Error(), name+": pages: page ") {
			t.Errorf("%s: %v", name, err)
		}
		if after := booksOf(c); !after.equal(before) || q.Len() != 10 {
			t.Errorf("%s: %+v, before %+v", name, after, before)
		}
		wrong(t, name, c.Check(), ErrInternal)
		noError(t, c.Close())
	}
	c := newTestCache(t, smallCache)
	defer c.Close()
	q := newTestSequence(t, c)
	step, err := c.NewStep(4)
	noError(t, err, step.Set([]Append{{Seq: q, Tokens: 4}}), c.pool.Release(step.reservations[0].Fresh()))
	if err := step.Rollback(); !errors.Is(err, ErrInternal) || !strings.Contains(err.Error(), "Rollback: pages: page 0 is free") {
		t.Error(err)
	}
	if c.pool.Free() != smallCache.Pages || step.open || q.step != nil {
		t.Errorf("%d pages free, step %v, sequence %v", c.pool.Free(), step, q)
	}
	c2 := newTestCache(t, smallCache)
	defer c2.Close()
	step, err = c2.NewStep(4)
	noError(t, err)
	err = step.Run([]Append{{Seq: newTestSequence(t, c2), Tokens: 4}}, func() error {
		noError(t, c2.pool.Release(step.reservations[0].Fresh()))
		return errFault
	})
	if !errors.Is(err, errFault) || !errors.Is(err, ErrInternal) || !strings.Contains(err.Error(), "Run: pages: page 0 is free") || step.open {
		t.Errorf("Run: %v, %v", err, step)
	}
}

// testDecoder is a decoder reduced to its attention: for each layer
//
//	h = h + CachedAttention(h Wq, h Wk, h Wv) Wo
//
// in float64 over a float32 cache.
type testDecoder struct {
	width, heads   int
	config         CacheConfig
	wq, wk, wv, wo []*tensor.Dense // by layer
}

func newTestDecoder(rng *rand.Rand, width, heads int, c CacheConfig) *testDecoder {
	d := &testDecoder{width: width, heads: heads, config: c}
	weights := func(rows, columns int) *tensor.Dense {
		x := make([]float64, rows*columns)
		for i := range x {
			x[i] = rng.NormFloat64() / math.Sqrt(float64(rows))
		}
		return newMatrix(tensor.Float64, x, rows, columns)
	}
	for range c.Layers {
		d.wq = append(d.wq, weights(width, heads*c.HeadDim))
		d.wk = append(d.wk, weights(width, c.KVHeads*c.HeadDim))
		d.wv = append(d.wv, weights(width, c.KVHeads*c.ValueDim))
		d.wo = append(d.wo, weights(heads*c.ValueDim, width))
	}
	return d
}

// testPass is the decoder's graph for a number of rows.
type testPass struct {
	step *Step
	x    *G.Node
	h    G.Value
	vm   G.VM
}

func (d *testDecoder) pass(t testing.TB, c *Cache, rows int) *testPass {
	t.Helper()
	step, err := c.NewStep(rows)
	noError(t, err)
	g := G.NewGraph()
	p := &testPass{step: step, x: G.NewMatrix(g, tensor.Float64, G.WithShape(rows, d.width), G.WithName("x"))}
	h := p.x
	for l := range d.config.Layers {
		weight := func(name string, w *tensor.Dense) *G.Node {
			return G.NewMatrix(g, tensor.Float64, G.WithShape(w.Shape()...), G.WithName(fmt.Sprint(name, l)), G.WithValue(w))
		}
		times := func(x, w *G.Node) *G.Node { return G.Must(G.Mul(x, w)) }
		a, err := CachedAttention(times(h, weight("q", d.wq[l])), times(h, weight("k", d.wk[l])), times(h, weight("v", d.wv[l])),
			step.Layer(l), WithCausal())
		noError(t, err)
		h = G.Must(G.Add(h, times(a, weight("o", d.wo[l]))))
	}
	G.Read(h, &p.h)
	noError(t, graph.Check("test", g))
	p.vm = G.NewTapeMachine(g)
	return p
}

// decoderContext is a sequence with its inputs, and attention over dense rows
// of what the cache is to hold.
type decoderContext struct {
	seq  *Sequence
	x    [][]float64 // inputs that are still to come
	done int
	k, v [][]float64 // by layer
	h    []float64   // outputs that are expected, of the tokens handed out last
}

// expect adds one token to the dense rows, and its output to c.h.
func (d *testDecoder) expect(c *decoderContext, x []float64) {
	cfg := &d.config
	h := append([]float64(nil), x...)
	group := d.heads / cfg.KVHeads
	for l := range cfg.Layers {
		q := matVec(h, d.wq[l])
		for _, k := range matVec(h, d.wk[l]) {
			c.k[l] = append(c.k[l], float64(float32(k)))
		}
		for _, v := range matVec(h, d.wv[l]) {
			c.v[l] = append(c.v[l], float64(float32(v)))
		}
		n := len(c.k[l]) / (cfg.KVHeads * cfg.HeadDim)
		var out []float64
		for head := range d.heads {
			kv := head / group
			p, sum := make([]float64, n), 0.0
			for j := range p {
				for i := range cfg.HeadDim {
					p[j] += q[head*cfg.HeadDim+i] * c.k[l][(j*cfg.KVHeads+kv)*cfg.HeadDim+i]
				}
				p[j] = math.Exp(p[j] / math.Sqrt(float64(cfg.HeadDim)))
				sum += p[j]
			}
			o := make([]float64, cfg.ValueDim)
			for j := range p {
				for i := range o {
					o[i] += p[j] / sum * c.v[l][(j*cfg.KVHeads+kv)*cfg.ValueDim+i]
				}
			}
			out = append(out, o...)
		}
		for i, y := range matVec(out, d.wo[l]) {
			h[i] += y
		}
	}
	c.h = append(c.h, h...)
}

func matVec(x []float64, w *tensor.Dense) []float64 {
	columns := w.Shape()[1]
	y, data := make([]float64, columns), w.Data().([]float64)
	for i, a := range x {
		for j := range y {
			y[j] += a * data[i*columns+j]
		}
	}
	return y
}

// do gives the next tokens of each context, as many as counts says, to the
// rows of the graph, and compares all outputs.
func (d *testDecoder) do(t testing.TB, p *testPass, contexts []*decoderContext, counts []int) {
	t.Helper()
	var appends []Append
	x := make([]float64, 0, p.step.Tokens()*d.width)
	for i, c := range contexts {
		appends = append(appends, Append{Seq: c.seq, Tokens: counts[i]})
		c.h = c.h[:0]
		for _, row := range c.x[c.done : c.done+counts[i]] {
			x = append(x, row...)
			d.expect(c, row)
		}
		c.done += counts[i]
	}
	used := len(x)
	x = x[:cap(x)]
	reftest.Poison(x[used:])
	noError(t, p.step.Set(appends), G.Let(p.x, newMatrix(tensor.Float64, x, p.step.Tokens(), d.width)),
		p.vm.RunAll(), p.step.Commit())
	p.vm.Reset()
	h := p.h.Data().([]float64)
	for i, c := range contexts {
		for j, want := range c.h {
			// What is computed twice in float64 may round to neighbours in float32.
			if diff := math.Abs(h[j] - want); !(diff <= 1e-6*(1+math.Abs(want))) {
				t.Fatalf("context %d, tokens to %d, element %d: %v, want %v", i, c.done, j, h[j], want)
			}
		}
		h = h[len(c.h):]
		if c.seq.Len() != c.done {
			t.Fatalf("context %d has %d tokens, want %d", i, c.seq.Len(), c.done)
		}
	}
}

// A decoder as one has it: a graph of 16 rows that takes prompts in chunks, and
// a graph of 4 rows that takes a token of each sequence, over one cache.
func TestPrefillAndDecodeGraphs(t *testing.T) {
	rng := reftest.Rand(t)
	config := CacheConfig{Layers: 2, KVHeads: 2, HeadDim: 5, ValueDim: 3, PageSize: 8, Pages: 40}
	d := newTestDecoder(rng, 6, 4, config)
	cache := newTestCache(t, config)
	prefill, decode := d.pass(t, cache, 16), d.pass(t, cache, 4)
	defer prefill.vm.Close()
	defer decode.vm.Close()
	context := func(tokens int) *decoderContext {
		c := &decoderContext{seq: newTestSequence(t, cache), k: make([][]float64, 2), v: make([][]float64, 2)}
		for range tokens {
			x := make([]float64, d.width)
			for i := range x {
				x[i] = rng.NormFloat64()
			}
			c.x = append(c.x, x)
		}
		return c
	}

	prompts := []int{37, 5, 16, 1}
	var all []*decoderContext
	for _, n := range prompts {
		all = append(all, context(n+60))
	}
	for { // chunks: the rows of a run are filled with prompts in order
		var now []*decoderContext
		var counts []int
		rows := 16
		for i, c := range all {
			if n := min(prompts[i]-c.done, rows); n > 0 {
				now, counts = append(now, c), append(counts, n)
				rows -= n
			}
		}
		if now == nil {
			break
		}
		d.do(t, prefill, now, counts)
	}
	ones := []int{1, 1, 1, 1}
	for i := range 60 {
		switch i {
		case 20: // one leaves, and its pages come back
			free := cache.Stats().FreePages
			noError(t, all[1].seq.Release())
			if got := cache.Stats().FreePages; got <= free {
				t.Fatalf("%d pages free, %d before", got, free)
			}
			all = append(all[:1], all[2:]...)
		case 30: // and a new one comes, beside those that decode
			all = append(all, context(11+60))
			d.do(t, prefill, all, []int{1, 1, 1, 11})
			continue
		}
		d.do(t, decode, all, ones[:len(all)])
	}
}

// The lisp machine, for its one run.
func TestCachedAttentionOnLispMachine(t *testing.T) {
	rng := reftest.Rand(t)
	c := newTestCache(t, smallCache)
	s := newStepGraph(t, c, 3, 2, tensor.Float32, WithCausal())
	defer s.close()
	seq := newTestSequence(t, c)
	tokens := newTestTokens(2, smallCache.Layers)
	noError(t, s.step.Set([]Append{{Seq: seq, Tokens: 2}}))
	var inputs []layerInput
	for l := range smallCache.Layers {
		inputs = append(inputs, s.draw(rng, l, tokens))
		for i, n := range s.in[l] {
			noError(t, G.Let(n, inputs[l].tensors[i]))
		}
	}
	m := G.NewLispMachine(s.nodes[0].Graph(), G.ExecuteFwdOnly())
	defer m.Close()
	noError(t, m.RunAll(), s.step.Commit(), seq.checkTokens(tokens))
	for l, in := range inputs {
		noError(t, s.checkLayer(l, in.q, []stepPart{{context: tokens, n: 2}}))
	}
}
