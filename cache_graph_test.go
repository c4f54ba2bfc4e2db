package leanattention

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"testing"

	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

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
	noError(t, CheckGraph(g))
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
		appends = append(appends, Append{c.seq, counts[i]})
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

// A graph that runs for thousands of steps takes no more memory and no more
// goroutines.
func TestDecodeDoesNotGrow(t *testing.T) {
	rng := reftest.Rand(t)
	c := newTestCache(t, CacheConfig{Layers: 2, KVHeads: 2, HeadDim: 8, PageSize: 16, Pages: 64})
	s := newStepGraph(t, c, 4, 4, tensor.Float32, WithCausal())
	defer s.close()
	var appends []testAppend
	var tokens []*testToken
	for range 4 {
		appends = append(appends, testAppend{&testContext{seq: newTestSequence(t, c)}, 1})
		tokens = append(tokens, newTestTokens(1, 2)...)
	}
	in := []layerInput{s.draw(rng, 0, tokens), s.draw(rng, 1, tokens)}
	decode := func(steps int) (objects, goroutines int) {
		for range steps {
			noError(t, set(s, appends...), s.run(in, 0), s.step.Commit())
			if appends[0].seq.Len() == 200 {
				for _, a := range appends {
					noError(t, a.seq.Truncate(3))
				}
			}
		}
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int(m.HeapObjects), runtime.NumGoroutine()
	}
	objects, goroutines := decode(200)
	objectsAfter, goroutinesAfter := decode(1500)
	if objectsAfter > objects+300 {
		t.Errorf("%d objects after 200 steps, %d after 1700", objects, objectsAfter)
	}
	if goroutinesAfter > goroutines+runtime.GOMAXPROCS(0) {
		t.Errorf("%d goroutines after 200 steps, %d after 1700", goroutines, goroutinesAfter)
	}
	t.Logf("objects %d, %d; goroutines %d, %d", objects, objectsAfter, goroutines, goroutinesAfter)
	if n := s.step.Stats().Layers; n != 2*1700 {
		t.Errorf("%d layers have run, want 3400", n)
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
	noError(t, s.step.Set([]Append{{seq, 2}}))
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
		noError(t, s.checkLayer(l, in.q, []stepPart{{tokens, 2}}))
	}
}
