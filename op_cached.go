package leanattention

import (
	"fmt"
	"hash"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/graph"
	"gorgonia.org/leanattention/internal/ongpu"

	"github.com/chewxy/hm"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// CachedAttention appends the keys and values of a step to a layer of a cache,
// and attends to all that the layer then holds. Rows are tokens, in the order
// of [Step.Set]:
//
//	q    (T, H*d)       float32 or float64; on a GPU float32, Float16 or BFloat16
//	k    (T, Hkv*d)     as q
//	v    (T, Hkv*dv)    as q
//	out  (T, H*dv)      as q
//
// where T is the step's number of rows, d, dv and Hkv are the cache's, and H
// follows from q's width; it is a multiple of Hkv. Row i of a sequence that
// had L tokens and gets n attends to all L+n of them, or with [WithCausal] to
// the first L+i+1, as a decoder wants. Rows that Set gave to nobody are 0.
//
// On a cache with a GPU the layer computes there. q, k and v may be in host
// memory: they are copied there, and the output back, and the run waits for it.
// Or each is a [DeviceTensor] of that GPU, and so is the output then: the run
// queues the work and goes on. The log-sum-exp is float32 there, whatever q is.
//
// A graph has one node for each layer of a step: a second one is [ErrGraph].
//
// The graph is built once, and run for every step. A run writes only the slots
// that Set reserved, so it may be repeated before [Step.Commit]. q, k and v of a run may
// have fewer rows than the graph was built for, if they have those that Set gave to
// sequences: a short prompt costs what it is long. The node takes
// every option but [WithLengths], since the cache knows the lengths, and [WithBias];
// tokens that a window has left behind stay in the cache. It has no gradient: a cache is for
// inference.
//
// Errors: [ErrShape], [ErrDType], [ErrOption], [ErrUnsupported], [ErrGraph], and
// [ErrState] for a layer of no step; in a run [ErrState] for a step that is not set,
// [ErrClosed] and what goes wrong on a GPU.
func CachedAttention(q, k, v *G.Node, layer Layer, opts ...Option) (out *G.Node, err error) {
	const op = "CachedAttention"
	defer recoverTo(op, &err)
	c, err := newConfig(op, ofScores|optLSE|optSchedule|optTileTokens|optWorkers, opts)
	if err != nil {
		return nil, err
	}
	s := layer.step
	if s == nil || s.cache == nil {
		return nil, errorf(op, ErrState, "layer of no step: get it from Step.Layer")
	}
	cfg := &s.cache.config
	if layer.index < 0 || layer.index >= cfg.Layers {
		return nil, errorf(op, ErrShape, "layer %d of a cache with %d layers", layer.index, cfg.Layers)
	}
	o, err := nodeOperands(op, q, k, v)
	if err != nil {
		return nil, err
	}
	rows, err := newTokenRows(op, o[0], o[1], o[2], s.tokens, cfg)
	if err != nil {
		return nil, err
	}
	if err = c.checkHeads(op, rows.heads); err != nil {
		return nil, err
	}
	g := rows.geometry(cfg, &c)
	if err := s.cache.store.supports(op, &g); err != nil {
		return nil, err
	}
	if err := layer.unused(op, q.Graph()); err != nil {
		return nil, err
	}
	a := &cachedOp{step: s, node: stepNode{layer: layer.index, plan: s.planFor(g)}, rows: rows, config: c, call: s.nextCall()}
	if c.lse != nil {
		a.lse = new(lseStore)
	}
	a.config.lse = nil // the op is shared by clones of the graph: it must not hold nodes
	if out, err = apply(op, placeCached(a), q, k, v); err != nil {
		return nil, err
	}
	if c.lse != nil {
		if *c.lse, err = lseNode(op, out, rows.lseType(), rows.lseShape()); err != nil {
			q.Graph().RemoveNode(out) // so that the layer can be built again
			return nil, err
		}
	}
	return out, nil
}

// unused checks that no node of graph g is on the layer. The second one would write
// its keys and values where the first has put its own, in the same run. Other graphs
// may have a node each: clones, what [Fuse] makes of g, or graphs of other machines.
func (l Layer) unused(op string, g *G.ExprGraph) error {
	for _, n := range g.AllNodes() {
		if o, ok := n.Op().(interface{ cached() *cachedOp }); ok && o.cached().step == l.step && o.cached().node.layer == l.index {
			return errorf(op, ErrGraph, "layer %d of the step has a node in this graph, %v: each of the cache's %d layers takes one",
				l.index, n, l.step.cache.config.Layers)
		}
	}
	return nil
}

// geometry describes the rows of a step to the engine.
func (r *tokenRows) geometry(cfg *CacheConfig, c *config) attn.Problem {
	g := c.attention(cfg.HeadDim)
	g.Heads, g.KVHeads, g.Dim, g.ValueDim = r.heads, cfg.KVHeads, cfg.HeadDim, cfg.ValueDim
	g.KV, _ = storageType(cfg.DType) // which NewCache has checked
	g.Query = attn.Strides{Row: r.heads * cfg.HeadDim, Head: cfg.HeadDim}
	g.Out = attn.Strides{Row: r.heads * cfg.ValueDim, Head: cfg.ValueDim}
	g.LSE = attn.Strides{Row: r.heads, Head: 1}
	g.Key, g.Value = cfg.pageStrides(cfg.HeadDim), cfg.pageStrides(cfg.ValueDim)
	g.PageTokens = cfg.PageSize
	return g
}

// cachedOp is [CachedAttention].
type cachedOp struct {
	graph.Plain
	step *Step
	node stepNode
	rows tokenRows
	config
	call int       // two nodes with the same arguments stay two
	lse  *lseStore // nil unless asked for

	memory ongpu.Node // of the output and the log-sum-exp on a GPU
}

// OnGPU makes it an [ongpu.Op].
func (op *cachedOp) OnGPU() *ongpu.Node { return &op.memory }

func (op *cachedOp) Arity() int { return 3 }
func (op *cachedOp) Type() hm.Type {
	m := func() hm.Type { return G.TensorType{Dims: 2, Of: hm.TypeVariable('a')} }
	return hm.NewFnType(m(), m(), m(), m())
}

func (op *cachedOp) InferShape(in ...G.DimSizer) (tensor.Shape, error) {
	const name = "CachedAttention"
	shapes, err := G.DimSizersToShapes(in)
	if err != nil {
		return nil, errorf(name, ErrShape, "%v", err)
	}
	if len(shapes) != 3 {
		return nil, errorf(name, ErrShape, "%d inputs; it has 3", len(shapes))
	}
	of := func(name string, s tensor.Shape) operand { return operand{name, s, op.rows.query} }
	r, err := newTokenRows(name, of("q", shapes[0]), of("k", shapes[1]), of("v", shapes[2]), op.step.tokens, &op.step.cache.config)
	if err != nil {
		return nil, err
	}
	return tensor.Shape{r.tokens, r.heads * op.step.cache.config.ValueDim}, nil
}

func (op *cachedOp) Do(in ...G.Value) (out G.Value, err error) {
	const name = "CachedAttention"
	defer recoverTo(name, &err)
	if len(in) != 3 {
		return nil, errorf(name, ErrShape, "%d inputs; it has 3", len(in))
	}
	o, err := op.step.cache.store.operands(name, in)
	if err != nil {
		return nil, err
	}
	// Gorgonia checks no value against the node's shape.
	tokens := op.step.tokens
	if s := o[0].shape; len(s) == 2 && s[0] >= 1 && s[0] < tokens {
		tokens = s[0] // a run may have fewer rows
	}
	r, err := newTokenRows(name, o[0], o[1], o[2], tokens, &op.step.cache.config)
	if err != nil {
		return nil, err
	}
	if r.heads != op.rows.heads || r.query != op.rows.query {
		return nil, errorf(name, ErrShape, "q is %v %v, not what the graph was built for", o[0].dtype, o[0].shape)
	}
	out, lse, err := op.step.attend(name, op.layerCall(r, in, nil))
	if err != nil {
		return nil, err
	}
	op.lse.put(out, lse)
	return out, nil
}

// layerCall is a run of the node. The output goes to a new value if none is given.
func (op *cachedOp) layerCall(rows tokenRows, qkv []G.Value, out *DeviceTensor) *layerCall {
	return &layerCall{node: &op.node, rows: rows, qkv: qkv, lse: op.lse != nil, out: out, memory: &op.memory}
}

func (op *cachedOp) WriteHash(h hash.Hash) {
	fmt.Fprintf(h, "leanattention.CachedAttention cache %d step %d layer %d call %d %+v %s",
		op.step.cache.id, op.step.id, op.node.layer, op.call, op.rows, op.config.hash())
}
func (op *cachedOp) Hashcode() uint32 { return graph.Hashcode(op) }
func (op *cachedOp) String() string {
	return fmt.Sprintf("LeanCachedAttention{%v, H %d/%d}", &op.node, op.rows.heads, op.step.cache.config.KVHeads)
}
func (op *cachedOp) store() *lseStore  { return op.lse }
func (op *cachedOp) cached() *cachedOp { return op }

func (op *cachedOp) DiffWRT(n int) []bool { return firstThree(n) }
func (op *cachedOp) SymDiff(G.Nodes, *G.Node, *G.Node) (G.Nodes, error) {
	return nil, errorf("CachedAttention", ErrUnsupported, "gradient through a cache")
}
func (op *cachedOp) DoDiff(G.ExecutionContext, G.Nodes, *G.Node) error {
	return errorf("CachedAttention", ErrUnsupported, "gradient through a cache")
}

var (
	_ G.SDOp = (*cachedOp)(nil)
	_ G.ADOp = (*cachedOp)(nil)
)
