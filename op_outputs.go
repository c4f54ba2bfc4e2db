package leanattention

import (
	"fmt"
	"hash"
	"sync"
	"sync/atomic"
	"weak"

	"gorgonia.org/leanattention/internal/operand"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu/attention"
	gpuattention "gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/graph"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/stock"

	"github.com/chewxy/hm"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// logs returns the store for the log-sum-exp of a run; nil if no node reads it.
func (op *attentionOp) logs() *outputStore { return op.lse.asked() }

// outputStore passes an output beside the result, such as the log-sum-exp, from an attention op to the op of the output's node, because an op
// of Gorgonia has one output. Clones of a graph share their ops and may run at the same time. So the store keeps each value with the result of
// its run, while something refers to the result. A result on a GPU keeps the value itself.
type outputStore struct {
	wanted atomic.Bool // a node asks for it
	mu     sync.Mutex
	of     map[weak.Pointer[tensor.Dense]]G.Value
}

// asked returns s if a node reads the output, else nil.
func (s *outputStore) asked() *outputStore {
	if s.wanted.Load() {
		return s
	}
	return nil
}

func (s *outputStore) put(kind outputKind, result, output G.Value) {
	if s == nil {
		return
	}
	if d, ok := ongpu.Of(result); ok { // a new tensor at each run
		*kind.of(d) = ongpu.Must(output)
		return
	}
	out := result.(*tensor.Dense)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.of == nil {
		s.of = make(map[weak.Pointer[tensor.Dense]]G.Value)
	}
	for p := range s.of { // results whose output no node has taken
		if p.Value() == nil {
			delete(s.of, p)
		}
	}
	s.of[weak.Make(out)] = output
}

// take removes and returns the output beside out. A value is returned once, since the node that gets the value may overwrite it.
func (s *outputStore) take(kind outputKind, out G.Value) G.Value {
	if d, ok := ongpu.Of(out); ok {
		at := kind.of(d)
		if t := *at; t != nil {
			*at = nil
			return t.Value()
		}
	}
	o, ok := out.(*tensor.Dense)
	if !ok {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p := weak.Make(o)
	lse, ok := s.of[p]
	if !ok {
		return nil
	}
	delete(s.of, p)
	return lse
}

// LogSumExp adds the second result of an attention to the graph: for each query the natural logarithm of the sum of the
// exponentials of its scores,
//
//	lse[b,h,i] = log sum_j exp(s_j),  s_j = scale * q[b,h,i].k[b,h',j]
//
// over the keys that the query sees. out is the node that [Attention] or [CachedAttention] has returned.
//
//   - The scores are those that the softmax is of, with [WithSoftCap], [WithALiBi] and [WithBias].
//   - [WithSinks] adds its exponential to the sum.
//   - A query that sees no key has -Inf, or with WithSinks the sink of its head.
//   - The shape is (B, H, Nq), or that without B, and (T, H) for CachedAttention.
//   - The element type is q's; on a GPU it is float32.
//   - For Attention the node has gradients in q, k, the bias and the sinks.
//   - A second call for the same node returns the same node.
//
// Errors: [ErrGraph] for any other node.
func LogSumExp(out *G.Node) (lse *G.Node, err error) {
	const op = "LogSumExp"
	defer errs.RecoverTo(op, &err)
	if out == nil || out.Graph() == nil {
		return nil, errs.Errorf(op, ErrGraph, "out is nil or in no graph")
	}
	switch of := out.Op().(type) {
	case interface{ attention() *attentionOp }:
		if v := of.attention().score.Variant; v != nil && v.Unnormalised {
			return nil, errs.Errorf(op, ErrUnsupported, "the attention has a Variant that is Unnormalised: its weights have no sum")
		}
		return of.attention().lseNode(out, stock.ChildrenOf(out))
	case interface{ cached() *cachedOp }:
		c := of.cached()
		if v := c.score.Variant; v != nil && v.Unnormalised {
			return nil, errs.Errorf(op, ErrUnsupported, "the attention has a Variant that is Unnormalised: its weights have no sum")
		}
		l := &outputOp{of: "CachedAttention", inRank: out.Dims(), dtype: c.rows.LSEType(), shape: c.rows.LSEShape(), from: &c.lse}
		return newOutput(l, out, out)
	}
	return nil, errs.Errorf(op, ErrGraph, "out is %s: it must be the node of Attention or CachedAttention", stock.Describe(out))
}

// lseNode is the node of the log-sum-exp of the attention node out, whose inputs are given: its gradients are in them.
func (op *attentionOp) lseNode(out *G.Node, inputs G.Nodes) (*G.Node, error) {
	l := &outputOp{of: "Attention", inRank: op.rank, dtype: operand.LSEType(op.query), shape: op.lseShape(), from: &op.lse, attention: op}
	return newOutput(l, out, lseChildren(out, inputs)...)
}

// newOutput adds a node of a log-sum-exp to the graph.
func newOutput(op *outputOp, out *G.Node, children ...*G.Node) (*G.Node, error) {
	n, err := ongpu.Apply(op.of, placeLSE(op, out), children...)
	if err == nil {
		op.from.wanted.Store(true)
	}
	return n, err
}

func (op *attentionOp) attention() *attentionOp { return op }

// Entropy adds the entropy of an attention's weights to the graph: for each query
//
//	entropy[b,h,i] = -sum_j p_j ln p_j
//
// over the keys that the query sees, with the weights p_j of [Attention]. out is the node that [Attention] or [CachedAttention] has returned.
//
//   - Shape and element type are those of [LogSumExp]. A query that sees no key has 0.
//   - [WithSinks] takes a part of the weights: the sum is over the keys alone.
//   - The node has no gradient.
//   - [ErrUnsupported]: trees ([Append.Parents]), [WithDropout], [WithBatchInvariance], and an Unnormalised [Variant].
//   - GPUs: one GPU, keys and values of float32 or 16 bits, heads of 64 and 128, and with a [Variant] also of 80, 96 and 256. Prompts take
//     several times as long as without entropies.
//   - A second call for the same node returns the same node.
//
// Other errors: [ErrGraph] for any other node.
func Entropy(out *G.Node) (entropy *G.Node, err error) {
	const op = "Entropy"
	defer errs.RecoverTo(op, &err)
	if out == nil || out.Graph() == nil {
		return nil, errs.Errorf(op, ErrGraph, "out is nil or in no graph")
	}
	g, l, of, err := outputOf(op, out)
	if err != nil {
		return nil, err
	}
	if err := attention.CanMeasure("attend", &g); err != nil {
		return nil, errs.Errorf(op, ErrUnsupported, "%v", err)
	}
	l.kind, l.from = entropies, of.entropies
	return of.ask(l, out)
}

// Mass adds attention mass to the graph: how much of its weights a query gives to each LeanTile, which has the t keys of [WithTileTokens],
//
//	mass[b,h,i,n] = sum_j p_j, j in [n*t, (n+1)*t)
//
// with the weights p_j of [Attention]. out is the node that [Attention] or [CachedAttention] has returned. Mass by page has the t of
// [CacheConfig].PageSize.
//
//   - places is the number of LeanTiles of a query. Those behind its last key have 0. For CachedAttention, a run with a sequence of more
//     tokens is [ErrShape]; for Attention, places is at least ceil(Nk/t).
//   - The shape is (B, H, Nq, places), or that without B, and (T, H, places) for CachedAttention. The element type is q's.
//   - [WithSinks] takes the rest of the weights.
//   - Small LeanTiles cost time. Sequences of a cache that share pages attend to these one by one.
//   - The node has no gradient.
//   - [ErrUnsupported]: trees ([Append.Parents]), [WithWindow], [WithSinkTokens], [WithDropout], [WithBatchInvariance], and an
//     Unnormalised [Variant].
//   - GPUs: as [Entropy], and t is a multiple of 64.
//   - A second call for the same node returns the same node; another number of places is [ErrOption].
//
// Other errors: [ErrGraph] for any other node, [ErrOption] without WithTileTokens or for places < 1.
func Mass(out *G.Node, places int) (mass *G.Node, err error) {
	const op = "Mass"
	defer errs.RecoverTo(op, &err)
	if out == nil || out.Graph() == nil {
		return nil, errs.Errorf(op, ErrGraph, "out is nil or in no graph")
	}
	g, l, of, err := outputOf(op, out)
	if err != nil {
		return nil, err
	}
	switch {
	case g.TileTokens == 0:
		return nil, errs.Errorf(op, ErrOption, "of attention without WithTileTokens, which says how many keys are summed")
	case places < 1 || places > maxPlaces:
		return nil, errs.Errorf(op, ErrOption, "%d places, which is outside [1, %d]", places, maxPlaces)
	case of.measure != nil && g.TileTokens%gpuattention.MassTile != 0:
		return nil, errs.Errorf(op, ErrUnsupported, "LeanTiles of %d keys, on a GPU: they have a multiple of %d", g.TileTokens, gpuattention.MassTile)
	case of.keys > places*g.TileTokens:
		return nil, errs.Errorf(op, ErrOption, "%d places for LeanTiles of %d keys: the %d keys have %d", places, g.TileTokens, of.keys, attn.Ceil(of.keys, g.TileTokens))
	}
	if err := attention.CanWeigh("attend", &g); err != nil {
		return nil, errs.Errorf(op, ErrUnsupported, "%v", err)
	}
	if !of.masses.places.CompareAndSwap(0, int32(places)) && of.masses.places.Load() != int32(places) {
		return nil, errs.Errorf(op, ErrOption, "%d places, and a node for %d is there", places, of.masses.places.Load())
	}
	l.kind, l.from, l.shape = masses, &of.masses.outputStore, append(l.shape, places)
	return of.ask(l, out)
}

const maxPlaces = 1 << 20

// massStore is the store for attention mass, with the number of places of a query; 0: no node has asked.
type massStore struct {
	outputStore
	places atomic.Int32
}

// outputStores are the stores of a node of attention, and the number of its keys; 0: a cache's.
type outputStores struct {
	entropies *outputStore
	masses    *massStore
	keys      int
	measure   func() // changes the plan of a layer on a GPU; nil: it need not change
}

// ask adds the node of an output to the graph.
func (of *outputStores) ask(l *outputOp, out *G.Node) (*G.Node, error) {
	n, err := newOutput(l, out, out)
	if err == nil && of.measure != nil {
		of.measure()
	}
	return n, err
}

// outputOf describes the attention of a node to the engine, and an output beside the result with a number for each query and head.
func outputOf(op string, out *G.Node) (g attn.Problem, l *outputOp, of outputStores, err error) {
	l = &outputOp{inRank: out.Dims()}
	switch x := out.Op().(type) {
	case interface{ attention() *attentionOp }:
		a := x.attention()
		g, of = a.geometry(&a.config), outputStores{entropies: &a.entropy, masses: &a.mass, keys: a.keys}
		l.of, l.dtype, l.shape = "Attention", operand.LSEType(a.query), a.lseShape()
	case interface{ cached() *cachedOp }:
		c := x.cached()
		g, of = geometryOf(&c.rows, &c.step.cache.config, &c.config, c.node.layer), outputStores{entropies: &c.entropy, masses: &c.mass}
		if c.step.cache.config.Device != nil {
			there := g
			there.Measures = true
			if err := c.step.cache.store.Supports(op, &there); err != nil {
				return g, l, of, err
			}
			of.measure = func() { c.step.replan(&c.node, there) }
		}
		l.of, l.dtype, l.shape = "CachedAttention", c.rows.LSEType(), c.rows.LSEShape()
	default:
		return g, l, of, errs.Errorf(op, ErrGraph, "out is %s: it must be the node of Attention or CachedAttention", stock.Describe(out))
	}
	return g, l, of, nil
}

// outputOp is the node of [LogSumExp], [Entropy] or [Mass]. The first input is the result of the attention, so the node runs after the
// attention. The value comes through the store. The other inputs are those of the attention, for the gradient.
type outputOp struct {
	graph.Plain
	of     string
	inRank int
	dtype  tensor.Dtype
	shape  tensor.Shape
	from   *outputStore

	kind      outputKind
	attention *attentionOp // nil: of a cache, or no log-sum-exp, without gradient
}

// ReadsFirst implements [ongpu.FirstOp]: the other inputs are for the gradient.
func (op *outputOp) ReadsFirst() {}

func (op *outputOp) Arity() int {
	if op.attention == nil {
		return 1
	}
	return op.attention.Arity() // for v the output
}

func (op *outputOp) Type() hm.Type {
	args := []hm.Type{G.TensorType{Dims: op.inRank, Of: hm.TypeVariable('a')}}
	if op.attention != nil {
		args = append(args, op.attention.lseInputTypes()...)
	}
	return hm.NewFnType(append(args, G.TensorType{Dims: len(op.shape), Of: op.dtype})...)
}
func (op *outputOp) InferShape(...G.DimSizer) (tensor.Shape, error) { return op.shape.Clone(), nil }
func (op *outputOp) Do(in ...G.Value) (G.Value, error) {
	if len(in) > 0 {
		if t := op.from.take(op.kind, in[0]); t != nil {
			return t, nil
		}
	}
	return nil, errs.Errorf(op.of, ErrState, "the "+op.what()+" was asked for before the attention ran")
}
func (op *outputOp) WriteHash(h hash.Hash) {
	fmt.Fprintf(h, "leanattention.LSE of %s %v %v kind %d", op.of, op.dtype, op.shape, op.kind)
}
func (op *outputOp) Hashcode() uint32 { return graph.Hashcode(op) }
func (op *outputOp) String() string   { return [...]string{"LSE", "Entropy", "Mass"}[op.kind] }

func (op *outputOp) what() string {
	return [...]string{"log-sum-exp", "entropy", "attention mass"}[op.kind]
}

// outputKind is the kind of an output beside the result of attention.
type outputKind int

const (
	logs outputKind = iota
	entropies
	masses
)

// of returns the place of the output in the result of an attention on a GPU.
func (k outputKind) of(d *ongpu.Tensor) **ongpu.Tensor {
	return [...]**ongpu.Tensor{&d.LSE, &d.Entropy, &d.Mass}[k]
}

var (
	_ G.SDOp = (*attentionOp)(nil)
	_ G.ADOp = (*attentionOp)(nil)
	_ G.SDOp = (*outputOp)(nil)
	_ G.ADOp = (*outputOp)(nil)
)
