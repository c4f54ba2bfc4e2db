package leanattention

import (
	"errors"
	"fmt"
	"hash"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/graph"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"

	"github.com/chewxy/hm"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// What the tests of caches share: graphs of attention layers over a step, the
// tokens that they write, and looks at a cache's memory.

func newTestCache(t testing.TB, config CacheConfig) *Cache {
	t.Helper()
	c, err := NewCache(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Check(); err != nil && !errors.Is(err, ErrClosed) {
			t.Errorf("behind the test: %v", err)
		}
	})
	poisonUnseen(c, nil)
	return c
}

func newTestSequence(t testing.TB, c *Cache) *Sequence {
	t.Helper()
	s, err := c.NewSequence()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func forkTest(t testing.TB, s *Sequence) *Sequence {
	t.Helper()
	f, err := s.Fork()
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// wrong checks that err wraps want, and says some texts.
func wrong(t *testing.T, what string, err, want error, texts ...string) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: %v, want %v", what, err, want)
		return
	}
	for _, text := range texts {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v does not say %q", what, err, text)
		}
	}
}

// noError ends the test at the first error.
func noError(t interface {
	Helper()
	Fatal(...any)
}, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

func formatOf(t tensor.Dtype) reftest.Format {
	switch t {
	case tensor.Float32:
		return reftest.Float32
	case Float16:
		return reftest.Float16
	case BFloat16:
		return reftest.BFloat16
	}
	return reftest.Float64
}

// testToken is what a cache is to hold of one token: k[layer] is (KVHeads, HeadDim)
// and v[layer] (KVHeads, ValueDim), rounded as they are stored; nil before the
// layer ran.
type testToken struct{ k, v [][]float64 }

func newTestTokens(n, layers int) []*testToken {
	tokens := make([]*testToken, n)
	for i := range tokens {
		tokens[i] = &testToken{make([][]float64, layers), make([][]float64, layers)}
	}
	return tokens
}

// stepGraph is a step with a graph that runs all layers of a cache in order:
//
//	out[i] = CachedAttention(q[i], k[i], v[i], layer i)
//
// where each node waits for the one before, so that a run can fail between two.
type stepGraph struct {
	step    *Step
	heads   int
	dtype   tensor.Dtype
	mask    attn.Mask
	in      [][3]*G.Node
	nodes   []*G.Node
	out     []G.Value
	lse     []G.Value
	fault   *fault
	vm      G.VM
	there   bool // a layer that runs by itself gets its operands on the cache's GPU
	apart   bool // members of several GPUs compute in all layers apart that can; else in every second one
	columns bool // and of a cache that is sharded by context have columns of queries and values
	cores   bool // precision is that of tensor cores
}

func newStepGraph(t interface {
	Helper()
	Fatal(...any)
}, c *Cache, tokens, heads int, dtype tensor.Dtype, opts ...Option) *stepGraph {
	t.Helper()
	step, err := c.NewStep(tokens)
	noError(t, err)
	s := &stepGraph{step: step, heads: heads, dtype: dtype, fault: &fault{layer: -1}}
	for _, o := range opts {
		switch o.kind {
		case optCausal:
			s.mask.Causal = true
		case optWindow:
			s.mask.Window = o.n
		case optSinkTokens:
			s.mask.SinkTokens = o.n
		}
	}
	cfg := c.Config()
	s.out, s.lse = make([]G.Value, cfg.Layers), make([]G.Value, cfg.Layers)
	g := G.NewGraph()
	for l := range cfg.Layers {
		var in [3]*G.Node
		for i, width := range [...]int{heads * cfg.HeadDim, cfg.KVHeads * cfg.HeadDim, cfg.KVHeads * cfg.ValueDim} {
			in[i] = G.NewMatrix(g, dtype, G.WithShape(tokens, width), G.WithName(fmt.Sprintf("%c%d", "qkv"[i], l)))
		}
		q := in[0]
		if l > 0 {
			q, err = G.ApplyOp(&faultOp{fault: s.fault, layer: l}, q, s.nodes[l-1])
			noError(t, err)
		}
		out, err := CachedAttention(q, in[1], in[2], step.Layer(l), opts...)
		noError(t, err)
		lse, err := LogSumExp(out)
		noError(t, err)
		G.Read(out, &s.out[l])
		G.Read(lse, &s.lse[l])
		s.in, s.nodes = append(s.in, in), append(s.nodes, out)
	}
	noError(t, graph.Check("test", g))
	s.vm = G.NewTapeMachine(g)
	return s
}

func (s *stepGraph) close() { s.vm.Close() }

// fault makes a graph fail before a layer, once.
type fault struct{ layer int }

var errFault = errors.New("a fault that the test injected")

// faultOp gives its first input on, when the second is there.
type faultOp struct {
	graph.Plain
	fault *fault
	layer int
}

func (op *faultOp) Arity() int { return 2 }
func (op *faultOp) Type() hm.Type {
	m := func() hm.Type { return G.TensorType{Dims: 2, Of: hm.TypeVariable('a')} }
	return hm.NewFnType(m(), m(), m())
}
func (op *faultOp) InferShape(in ...G.DimSizer) (tensor.Shape, error) {
	return in[0].(tensor.Shape).Clone(), nil
}
func (op *faultOp) Do(in ...G.Value) (G.Value, error) {
	if op.fault.layer == op.layer {
		op.fault.layer = -1
		return nil, errFault
	}
	return in[0], nil
}
func (op *faultOp) WriteHash(h hash.Hash) { fmt.Fprintf(h, "fault %d", op.layer) }
func (op *faultOp) Hashcode() uint32      { return graph.Hashcode(op) }
func (op *faultOp) String() string        { return "fault" }

// layerInput is what one layer of a stepGraph gets: q as it is computed with,
// and the tensors.
type layerInput struct {
	q       []float64
	tensors [3]*tensor.Dense
}

// draw makes the inputs of a layer, and puts what the cache is to hold of them
// into tokens, which are those of all sequences of the step in order. Rows that
// belong to nobody are NaN.
func (s *stepGraph) draw(rng *rand.Rand, layer int, tokens []*testToken) layerInput {
	cfg := s.step.cache.config
	var in layerInput
	for i, width := range [...]int{s.heads * cfg.HeadDim, cfg.KVHeads * cfg.HeadDim, cfg.KVHeads * cfg.ValueDim} {
		x := make([]float64, s.step.tokens*width)
		reftest.Poison(x[len(tokens)*width:])
		for j := range x[:len(tokens)*width] {
			x[j] = formatOf(s.dtype).Round(rng.NormFloat64())
		}
		in.tensors[i] = newMatrix(s.dtype, x, s.step.tokens, width)
		if i == 0 {
			in.q = x
			continue
		}
		for j, tok := range tokens {
			row := make([]float64, width)
			for at, y := range x[j*width : (j+1)*width] {
				row[at] = formatOf(cfg.DType).Round(y)
			}
			if i == 1 {
				tok.k[layer] = row
			} else {
				tok.v[layer] = row
			}
		}
	}
	return in
}

func newMatrix(t tensor.Dtype, x []float64, rows, columns int) *tensor.Dense {
	if t == tensor.Float32 {
		return tensor.New(tensor.WithShape(rows, columns), tensor.WithBacking(reftest.Convert[float32](x)))
	}
	return tensor.New(tensor.WithShape(rows, columns), tensor.WithBacking(append([]float64(nil), x...)))
}

// runLayer runs the node of one layer by itself.
func (s *stepGraph) runLayer(layer int, in layerInput) error {
	op := s.nodes[layer].Op().(*cachedOp)
	values := []G.Value{in.tensors[0], in.tensors[1], in.tensors[2]}
	if s.there {
		c := s.step.cache
		gpu := c.config.Device
		for i := range values {
			var err error
			if values[i], err = s.upload(gpu, layer, i, in.tensors[i]); err != nil {
				return err
			}
		}
	}
	out, err := op.Do(values...)
	if err != nil {
		return err
	}
	lse := op.lse.take(logs, out)
	if s.there {
		var e1, e2 error
		out, e1 = out.(*device.Tensor).Download()
		lse, e2 = lse.(*device.Tensor).Download()
		if err := errors.Join(e1, e2); err != nil {
			return err
		}
	}
	s.out[layer], s.lse[layer] = out, lse
	return nil
}

// upload puts an operand where members can compute apart, in layers that do so.
func (s *stepGraph) upload(gpu *device.GPU, layer, operand int, x tensor.Tensor) (*device.Tensor, error) {
	c := s.step.cache
	switch n := len(gpu.Internal().Members); {
	case n == 1 || !s.apart && layer%2 == 0:
		return gpu.Upload(x)
	case c.store.Shards() > 1 && (!s.columns || x.Shape()[1]%n > 0 || operand == 1):
		return gpu.UploadReplicated(x)
	case c.store.Shards() > 1 || c.config.KVHeads%n == 0: // each member has its heads' rows, or columns that all gather
		return gpu.UploadSharded(x, 1)
	}
	return gpu.Upload(x)
}

// run runs the graph; with failAt > 0 it fails before that layer.
func (s *stepGraph) run(inputs []layerInput, failAt int) error {
	for l, in := range inputs {
		for i, n := range s.in[l] {
			if err := G.Let(n, in.tensors[i]); err != nil {
				return err
			}
		}
	}
	s.fault.layer = -1
	if failAt > 0 {
		s.fault.layer = failAt
	}
	defer s.vm.Reset()
	return Cause(s.vm.RunAll())
}

// stepPart is the rows of a sequence in a step: the tokens of its whole context,
// of which the last n are the step's.
type stepPart struct {
	context []*testToken
	n       int
	tree    attn.Tree
}

// checkLayer compares a layer's output with attention over dense rows.
func (s *stepGraph) checkLayer(layer int, q []float64, parts []stepPart) error {
	cfg := s.step.cache.config
	rows := 0
	c := &reftest.Case{Shape: reftest.Shape{
		Heads: s.heads, KVHeads: cfg.KVHeads, Dim: cfg.HeadDim, ValueDim: cfg.ValueDim,
		Mask: s.mask, Scale: 1 / math.Sqrt(float64(cfg.HeadDim)),
	}}
	var first []int
	for _, p := range parts {
		first = append(first, rows)
		rows += p.n
		c.Queries, c.Keys = append(c.Queries, p.n), append(c.Keys, len(p.context))
		c.Tree, c.Trees = c.Tree || p.tree != nil, append(c.Trees, p.tree)
		for _, tok := range p.context {
			c.K, c.V = append(c.K, tok.k[layer]...), append(c.V, tok.v[layer]...)
		}
	}
	c.Q = q[:rows*s.heads*cfg.HeadDim]
	precision := reftest.Precision{Acc: formatOf(s.dtype), Out: formatOf(s.dtype)}
	if s.cores && cfg.DType == BFloat16 {
		precision.P = reftest.Float16 // a weight is the sum of two
	}
	want := c.Reference(precision)
	out, lse := float64s(s.out[layer]), float64s(s.lse[layer])
	width := s.heads * cfg.ValueDim
	if len(out) != s.step.tokens*width || len(lse) != s.step.tokens*s.heads {
		return fmt.Errorf("layer %d: %d outputs, %d log-sum-exps", layer, len(out), len(lse))
	}
	if err := want.CompareO(func(seq, pos, head, i int) float64 {
		return out[(first[seq]+pos)*width+head*cfg.ValueDim+i]
	}); err != nil {
		return fmt.Errorf("layer %d: output: %w", layer, err)
	}
	if err := want.CompareLSE(func(seq, pos, head int) float64 {
		return lse[(first[seq]+pos)*s.heads+head]
	}); err != nil {
		return fmt.Errorf("layer %d: log-sum-exp: %w", layer, err)
	}
	for i, x := range out[rows*width:] {
		if x != 0 {
			return fmt.Errorf("layer %d: row %d belongs to nobody and has %v", layer, rows+i/width, x)
		}
	}
	for i, x := range lse[rows*s.heads:] {
		if !math.IsInf(x, -1) {
			return fmt.Errorf("layer %d: row %d belongs to nobody and has the log-sum-exp %v", layer, rows+i/s.heads, x)
		}
	}
	return nil
}

// float64s is the elements of a float32 or float64 tensor.
func float64s(v G.Value) []float64 {
	switch x := v.Data().(type) {
	case []float64:
		return x
	case []float32:
		y := make([]float64, len(x))
		for i, f := range x {
			y[i] = float64(f)
		}
		return y
	}
	return nil
}

// testRow is where the elements of a slot in one head of a layer are in the keys
// (or values), and their number.
func (v *testView) testRow(values bool, layer int, page int32, head, slot int) (b *cpu.Buffer, at, n int) {
	b, n = &v.keys[layer], v.config.HeadDim
	if values {
		b, n = &v.values[layer], v.config.ValueDim
	}
	return b, ((int(page)*v.config.KVHeads+head)*v.config.PageSize + slot) * n, n
}

func testElement(b *cpu.Buffer, i int) float64 {
	p := unsafe.Add(b.Ptr, i*b.DType.Size())
	switch b.DType {
	case attn.Float16:
		return float64((*(*half.Float16)(p)).Float32())
	case attn.BFloat16:
		return float64((*(*half.BFloat16)(p)).Float32())
	}
	return float64(*(*float32)(p))
}

// checkToken compares the slots of a token in one layer, bit for bit.
func (c *testView) checkToken(layer int, pages []int32, position int, want *testToken) error {
	page, slot := pages[position/c.config.PageSize], position%c.config.PageSize
	for _, values := range [...]bool{false, true} {
		row := want.k[layer]
		if values {
			row = want.v[layer]
		}
		for h := range c.config.KVHeads {
			b, at, n := c.testRow(values, layer, page, h, slot)
			for i, x := range row[h*n : (h+1)*n] {
				if got := testElement(b, at+i); math.Float64bits(got) != math.Float64bits(x) {
					return fmt.Errorf("layer %d, position %d (page %d, slot %d), head %d, element %d, values %t: %v, want %v",
						layer, position, page, slot, h, i, values, got, x)
				}
			}
		}
	}
	return nil
}

// place is where a token is in the pages of a sequence, also in those that it has in an open step, if it is kept.
func (s *Sequence) place(token int) (at int, kept bool) {
	gap := s.table.Gap
	if token < gap.First {
		return token, true
	}
	return token - s.cache.pool.Shift(&s.table), token >= gap.End
}

// checkTokens compares all that a sequence holds.
func (s *Sequence) checkTokens(want []*testToken) error {
	return s.cache.testView().checkTokens(s, want)
}

func (c *testView) checkTokens(s *Sequence, want []*testToken) error {
	if s.Len() != len(want) {
		return fmt.Errorf("sequence has %d tokens, want %d", s.Len(), len(want))
	}
	for l := range c.config.Layers {
		for i, tok := range want {
			at, kept := s.place(i)
			if !kept {
				continue
			}
			if err := c.checkToken(l, s.table.Pages, at, tok); err != nil {
				return err
			}
		}
	}
	return nil
}

// poisonUnseen writes NaN to every slot that nobody may read: seen says which
// slots of a page are somebody's in a layer.
func poisonUnseen(cache *Cache, seen func(layer int, page int32, slot int) bool) {
	c := cache.testView()
	defer c.flush()
	for l := range c.config.Layers {
		for page := range int32(c.config.Pages) {
			for slot := range c.config.PageSize {
				if seen != nil && seen(l, page, slot) {
					continue
				}
				for h := range c.config.KVHeads {
					for _, values := range [...]bool{false, true} {
						b, at, n := c.testRow(values, l, page, h, slot)
						if b.DType == attn.Float32 {
							reftest.Poison(unsafe.Slice((*float32)(b.Ptr), b.Len)[at : at+n])
						} else {
							reftest.Poison16(unsafe.Slice((*uint16)(b.Ptr), b.Len)[at : at+n])
						}
					}
				}
			}
		}
	}
}

// testContext is a sequence and what it is to hold.
type testContext struct {
	seq    *Sequence
	tokens []*testToken
}

func (c *testContext) fork(t testing.TB) *testContext {
	t.Helper()
	return &testContext{forkTest(t, c.seq), append([]*testToken(nil), c.tokens...)}
}

func (c *testContext) truncate(t testing.TB, n int) {
	t.Helper()
	noError(t, c.seq.Truncate(n))
	c.tokens = c.tokens[:n:n]
}

// testAppend gives the next n rows of a step to a context.
type testAppend struct {
	*testContext
	n int
}

func set(s *stepGraph, appends ...testAppend) error {
	var a []Append
	for _, x := range appends {
		a = append(a, Append{Seq: x.seq, Tokens: x.n})
	}
	return s.step.Set(a)
}

// attempt runs the graph of a step that is set, with new values, and checks all
// outputs if it comes to its end. It returns the tokens of each append.
func (s *stepGraph) attempt(rng *rand.Rand, failAt int, appends ...testAppend) (fresh [][]*testToken, err error) {
	layers := s.step.cache.config.Layers
	var all []*testToken
	var parts []stepPart
	for _, a := range appends {
		tokens := newTestTokens(a.n, layers)
		all, fresh = append(all, tokens...), append(fresh, tokens)
		parts = append(parts, stepPart{context: append(a.tokens[:len(a.tokens):len(a.tokens)], tokens...), n: a.n})
	}
	var inputs []layerInput
	for l := range layers {
		inputs = append(inputs, s.draw(rng, l, all))
	}
	if err := s.run(inputs, failAt); err != nil {
		return nil, err
	}
	for l, in := range inputs {
		if err := s.checkLayer(l, in.q, parts); err != nil {
			return nil, err
		}
	}
	return fresh, nil
}

// advance does a whole step.
func (s *stepGraph) advance(t testing.TB, rng *rand.Rand, appends ...testAppend) {
	t.Helper()
	noError(t, set(s, appends...))
	fresh, err := s.attempt(rng, 0, appends...)
	noError(t, err, s.step.Commit())
	for i, a := range appends {
		a.tokens = append(a.tokens, fresh[i]...)
		noError(t, a.seq.checkTokens(a.tokens))
	}
}
