package leanattention

import (
	"fmt"
	"hash"
	"reflect"
	"slices"
	"time"

	"gorgonia.org/leanattention/internal/kvstore"

	"gorgonia.org/leanattention/internal/operand"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/graph"
	"gorgonia.org/leanattention/internal/ongpu"

	"github.com/chewxy/hm"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// CachedAttention appends the keys and values of a step to a layer of a cache, and attends to all keys of that layer. Rows are
// tokens, in the order of [Step.Set]:
//
//	q    (T, H*d)       float32 or float64; on a GPU float32, Float16 or BFloat16
//	k    (T, Hkv*d)     as q
//	v    (T, Hkv*dv)    as q
//	out  (T, H*dv)      as q
//
// T is the number of rows of the step. d, dv and Hkv are those of the cache. H is a multiple of Hkv. Row i of a sequence that had L
// tokens and gets n attends to all L+n tokens, or with [WithCausal] to the first L+i+1. The output of an unassigned row is 0.
//
//   - Values in keys: v is nil on a cache with [CacheConfig].ValuesInKeys.
//   - GPUs: a cache on a GPU computes there. Either q, k and v are in host memory: the run copies them to the GPU and the output
//     back, and waits. Or each is a [device.Tensor] of that GPU, and so is the output: the run queues the work. The log-sum-exp is
//     float32.
//   - Graphs: a graph has at most one node for each layer of a step; a second one is [ErrGraph]. The graph is built once, and runs
//     for every step. A run writes only the reserved slots, so it can be repeated before [Step.Commit].
//   - Short steps: q, k and v of a run may have fewer rows than the graph, down to the rows that Set assigned.
//   - Options: all but [WithLengths], [WithQueryLengths], [WithQueriesAtEnd], [WithBias] and [WithDropout]. [WithRotary] rotates q
//     and k. With [WithSinks], the log-sum-exp of an unassigned row is its head's sink; the sinks are in host memory if q, k and v
//     are. [Shard] lists the options on a cache that is sharded by context.
//   - Windows: a cache without a Window keeps all tokens. On a cache with a [CacheConfig].Window each node has [WithWindow] of at
//     most that number, and [WithSinkTokens] of the cache's number; anything else is [ErrOption].
//   - Gradients: none.
//
// Errors:
//
//   - [ErrShape], [ErrDType], [ErrOption], [ErrUnsupported], [ErrGraph]; [ErrState] for a layer of no step
//   - in a run: [ErrState] for a step that is not set, [ErrClosed], errors of a GPU
func CachedAttention(q, k, v *G.Node, layer Layer, opts ...Option) (out *G.Node, err error) {
	const op = "CachedAttention"
	defer errs.RecoverTo(op, &err)
	c, err := newConfig(op, ofScores|optVariant|optSinks|optRotary|optSchedule|optTileTokens|optWorkers|optInvariant, opts)
	if err != nil {
		return nil, err
	}
	s := layer.step
	if s == nil || s.cache == nil {
		return nil, errs.Errorf(op, ErrState, "layer of no step: get it from Step.Layer")
	}
	if err := s.made(op); err != nil {
		return nil, err
	}
	cfg := &s.cache.config
	if err := cfg.keepsFor(op, &c); err != nil {
		return nil, err
	}
	if layer.index < 0 || layer.index >= cfg.Layers {
		return nil, errs.Errorf(op, ErrShape, "layer %d of a cache with %d layers", layer.index, cfg.Layers)
	}
	if err := c.setRotary(op, cfg.HeadDim); err != nil {
		return nil, err
	}
	switch {
	case cfg.ValuesInKeys && v != nil:
		return nil, errs.Errorf(op, ErrShape, "v is a node, and the values of the cache are parts of its keys (ValuesInKeys): pass nil")
	case cfg.ValuesInKeys:
		v = k
	}
	o, err := nodeOperands(op, q, k, v)
	if err != nil {
		return nil, err
	}
	rows, err := newTokenRows(op, o[0], o[1], o[2], s.tokens, cfg)
	if err != nil {
		return nil, err
	}
	if err = c.checkHeads(op, rows.Heads); err != nil {
		return nil, err
	}
	children := G.Nodes{q, k, v}
	if c.sinksNode != nil {
		if err = sinksNode(op, c.sinksNode, q, rows.Heads, rows.Query); err != nil {
			return nil, err
		}
		children = append(children, c.sinksNode)
	}
	nodes, err := c.variantNodes(op, q, rows.Query)
	if err != nil {
		return nil, err
	}
	if c.score.Variant != nil && cfg.Window > 0 {
		return nil, errs.Errorf(op, ErrUnsupported, "WithVariant, on a cache that gives pages back (Window %d): indices of keys change", cfg.Window)
	}
	children = append(children, nodes...)
	g := geometryOf(&rows, cfg, &c, layer.index)
	if err := s.cache.store.Supports(op, &g); err != nil {
		return nil, err
	}
	if err := layer.unused(op, q.Graph()); err != nil {
		return nil, err
	}
	a := &cachedOp{step: s, node: stepNode{layer: layer.index, plan: s.planFor(g)}, rows: rows, config: c, call: s.nextCall()}
	a.config.sinksNode = nil // the op is shared by clones of the graph: it must not hold nodes
	return ongpu.Apply(op, placeCached(a), children...)
}

// keepsFor returns an error if a node sees tokens that the cache drops.
func (c *CacheConfig) keepsFor(op string, node *config) error {
	switch window := node.mask.Window; {
	case c.Window == 0:
	case node.invariant:
		return errs.Errorf(op, ErrUnsupported, "WithBatchInvariance, on a cache that gives pages back (Window %d): the places of the others change", c.Window)
	case window == 0:
		return errs.Errorf(op, ErrOption, "a node without WithWindow, on a cache that keeps a Window of %d tokens", c.Window)
	case window > c.Window:
		return errs.Errorf(op, ErrOption, "WithWindow(%d), on a cache that keeps a Window of %d tokens", window, c.Window)
	case node.mask.SinkTokens != c.SinkTokens:
		return errs.Errorf(op, ErrOption, "WithSinkTokens(%d), on a cache that keeps %d SinkTokens beside a window", node.mask.SinkTokens, c.SinkTokens)
	case c.SinkTokens > 0 && node.score.Slopes != "":
		// Their distance from a query is not that of their places in the pages that are left.
		return errs.Errorf(op, ErrUnsupported, "WithALiBi, on a cache that keeps %d SinkTokens", c.SinkTokens)
	}
	return nil
}

// unused returns an error if graph g has a node on the layer. A second node would overwrite the keys and values of the first in the same run.
// Other graphs may have a node each: clones, results of Fuse, graphs of other machines.
func (l Layer) unused(op string, g *G.ExprGraph) error {
	for _, n := range g.AllNodes() {
		o, ok := n.Op().(interface{ occupies() (*Step, int) })
		if !ok {
			continue
		}
		if step, layer := o.occupies(); step == l.step && layer == l.index {
			return errs.Errorf(op, ErrGraph, "layer %d of the step has a node in this graph, %v: each of the cache's %d layers takes one",
				l.index, n, l.step.cache.config.Layers)
		}
	}
	return nil
}

// geometryOf describes the rows of a step to the engine, in a layer.
func geometryOf(r *kvstore.Rows, cfg *CacheConfig, c *config, layer int) attn.Problem {
	g := c.attention(cfg.HeadDim)
	g.Heads, g.KVHeads, g.Dim, g.ValueDim = r.Heads, cfg.KVHeads, cfg.HeadDim, cfg.ValueDim
	g.Pages, _ = cfg.format(layer) // which NewCache has checked
	g.QueryType, _ = operand.StorageType(r.Query)
	g.Query = attn.Strides{Row: r.Heads * cfg.HeadDim, Head: cfg.HeadDim}
	g.Out = attn.Strides{Row: r.Heads * cfg.ValueDim, Head: cfg.ValueDim}
	g.LSE = attn.Strides{Row: r.Heads, Head: 1}
	g.PageTokens = cfg.PageSize
	return g
}

// cachedOp is [CachedAttention].
type cachedOp struct {
	graph.Plain
	step *Step
	node stepNode
	rows kvstore.Rows
	config
	call    int // two nodes with the same arguments stay two
	lse     outputStore
	entropy outputStore
	mass    massStore

	memory ongpu.Node // of the output and the log-sum-exp on a GPU
}

// OnGPU makes it an [ongpu.Op].
func (op *cachedOp) OnGPU() *ongpu.Node { return &op.memory }

func (op *cachedOp) Arity() int { return len(op.inputs()) }
func (op *cachedOp) Type() hm.Type {
	m := func() hm.Type { return G.TensorType{Dims: 2, Of: hm.TypeVariable('a')} }
	args := []hm.Type{m(), m(), m()}
	if op.score.Sinks {
		args = append(args, G.TensorType{Dims: 1, Of: op.rows.LSEType()})
	}
	args = append(args, op.tensorTypes()...)
	return hm.NewFnType(append(args, m())...)
}

func (op *cachedOp) InferShape(in ...G.DimSizer) (tensor.Shape, error) {
	const name = "CachedAttention"
	shapes, err := G.DimSizersToShapes(in)
	if err != nil {
		return nil, errs.Errorf(name, ErrShape, "%v", err)
	}
	if len(shapes) != op.Arity() {
		return nil, errs.Errorf(name, ErrShape, "%d inputs; it has %d", len(shapes), op.Arity())
	}
	of := func(name string, s tensor.Shape) operand.Operand { return operand.New(name, s, op.rows.Query) }
	r, err := newTokenRows(name, of("q", shapes[0]), of("k", shapes[1]), of("v", shapes[2]), op.step.tokens, &op.step.cache.config)
	if err != nil {
		return nil, err
	}
	if op.score.Sinks {
		if err = checkSinks(name, operand.New("sinks", shapes[3], r.LSEType()), r.Heads, r.Query); err != nil {
			return nil, err
		}
	}
	return tensor.Shape{r.Tokens, r.Heads * op.step.cache.config.ValueDim}, nil
}

func (op *cachedOp) Do(in ...G.Value) (out G.Value, err error) {
	const name = "CachedAttention"
	defer errs.RecoverTo(name, &err)
	defer op.memory.Done(in, &out, &err)
	if len(in) != op.Arity() {
		return nil, errs.Errorf(name, ErrShape, "%d inputs; it has %d", len(in), op.Arity())
	}
	n := len(in) - op.tensors()
	o, err := op.step.cache.store.Operands(name, in[:n])
	if err != nil {
		return nil, err
	}
	// Gorgonia checks no value against the node's shape.
	tokens := op.step.tokens
	if s := o[0].Shape; len(s) == 2 && s[0] >= 1 && s[0] < tokens {
		tokens = s[0] // a run may have fewer rows
	}
	r, err := newTokenRows(name, o[0], o[1], o[2], tokens, &op.step.cache.config)
	if err != nil {
		return nil, err
	}
	if r.Heads != op.rows.Heads || r.Query != op.rows.Query {
		return nil, errs.Errorf(name, ErrShape, "q is %v %v, not what the graph was built for", o[0].DType, o[0].Shape)
	}
	if op.score.Sinks {
		if err = checkSinks(name, o[3], r.Heads, r.Query); err != nil {
			return nil, err
		}
	}
	call := op.layerCall(r, in, nil)
	call.Values = in[n:]
	if gpu := ongpu.PlaceOf(in[0]); gpu != nil && len(call.Values) > 0 {
		if call.There, err = op.readThere(name, gpu, call.Values, r.Query); err != nil {
			return nil, err
		}
	}
	for i, v := range in[n:] {
		if call.There != nil {
			break
		}
		t, err := op.readTensor(name, i, v, r.Query)
		if err != nil {
			return nil, err
		}
		call.Tensors = append(call.Tensors, variantTensor(t))
	}
	var entropy, mass G.Value
	entropyStore, massStore := op.entropy.asked(), op.mass.asked()
	if entropyStore != nil {
		call.Entropy = &entropy
	}
	if massStore != nil {
		call.Mass, call.Places = &mass, int(op.mass.places.Load())
	}
	out, lse, err := op.step.attend(name, &op.node, call)
	if err != nil {
		return nil, err
	}
	op.keepLSE(out, lse)
	entropyStore.put(entropies, out, entropy)
	massStore.put(masses, out, mass)
	return out, nil
}

// layerCall returns the call of the node in a run. If out is nil, the output is a new value.
func (op *cachedOp) layerCall(rows kvstore.Rows, in []G.Value, out *ongpu.Tensor) *kvstore.Call {
	return &kvstore.Call{Node: nodeOf{op.step, &op.node}, Layer: op.node.layer, Rows: rows, QKV: in[:3], Sinks: op.input(roleSinks, in), LSE: op.lse.asked() != nil, Out: out, Memory: &op.memory}
}

func (op *cachedOp) WriteHash(h hash.Hash) {
	fmt.Fprintf(h, "leanattention.CachedAttention cache %d step %d layer %d call %d %+v %s",
		op.step.cache.id, op.step.id, op.node.layer, op.call, op.rows, op.config.hash())
}
func (op *cachedOp) Hashcode() uint32 { return graph.Hashcode(op) }
func (op *cachedOp) String() string {
	return fmt.Sprintf("LeanCachedAttention{%v, H %d/%d%s}", &op.node, op.rows.Heads, op.step.cache.config.KVHeads, op.more())
}

// keepLSE keeps the log-sum-exp of a run for its node, if there is one.
func (op *cachedOp) keepLSE(out, lse G.Value) {
	if lse != nil {
		op.lse.put(logs, out, lse)
	}
}

func (op *cachedOp) cached() *cachedOp { return op }

// occupies returns the step and the layer that the op computes: see [Layer.unused].
func (op *cachedOp) occupies() (*Step, int) { return op.step, op.node.layer }

// DiffWRT: everything, since false would drop its part of a sum's gradient without a word.
func (op *cachedOp) DiffWRT(n int) []bool { return slices.Repeat([]bool{true}, n) }
func (op *cachedOp) SymDiff(G.Nodes, *G.Node, *G.Node) (G.Nodes, error) {
	return nil, errs.Errorf("CachedAttention", ErrUnsupported, "gradient through a cache")
}
func (op *cachedOp) DoDiff(G.ExecutionContext, G.Nodes, *G.Node) error {
	return errs.Errorf("CachedAttention", ErrUnsupported, "gradient through a cache")
}

var (
	_ G.SDOp = (*cachedOp)(nil)
	_ G.ADOp = (*cachedOp)(nil)
)

// Rows adds a node with the first rows of x to the graph: those that a run needs. x is an input, a vector or a matrix, in host memory or
// a [device.Tensor]:
//
//   - x with a row for each row of the step, such as token ids and positions: the rows that [Step.Set] assigns
//   - x with another number of rows: one row for each append of Set, such as [Step.Last]
//
// Nodes that read the result compute no other rows. So in a graph for long prompts and many sequences, a short prompt costs what its
// length costs:
//
//	ids, err = step.Rows(ids)
//	last, err = step.Rows(last)
//	h, err := nn.Embedding(table, ids, nil)
//	...
//	h, err = nn.Embedding(h, last, nil)
//
// Limits:
//
//   - Nodes of this module take values with fewer rows than the graph. Gorgonia's own nodes do not. gorgonia.Read copies to the value
//     of the last run: set its variable to nil, or use the node's Value.
//   - The value shares the memory of x. If Set assigned no rows, it has one row.
//   - A recording has a fixed number of rows: fewer than all are [ErrUnsupported], so a graph to record has no Rows.
//
// Errors: [ErrGraph], [ErrShape]; in a run [ErrState] for a step that is not set, [ErrShape] for more appends than x has rows.
func (s *Step) Rows(x *G.Node) (y *G.Node, err error) {
	const op = "Step.Rows"
	defer errs.RecoverTo(op, &err)
	if err := s.made("Rows"); err != nil {
		return nil, err
	}
	if x == nil {
		return nil, errs.Errorf(op, ErrGraph, "x is nil")
	}
	o := &rowsOp{step: s, dims: len(x.Shape()), call: s.nextCall()}
	if _, err := o.InferShape(x.Shape()); err != nil {
		return nil, err
	}
	return ongpu.Apply(op, o, x)
}

// rowsOp is [Step.Rows].
type rowsOp struct {
	graph.Plain
	step *Step
	dims int
	call int
}

func (op *rowsOp) Arity() int { return 1 }
func (op *rowsOp) Type() hm.Type {
	t := func() hm.Type { return G.TensorType{Dims: op.dims, Of: hm.TypeVariable('a')} }
	return hm.NewFnType(t(), t())
}

// IsPart says that the value is in the memory of the input.
func (op *rowsOp) IsPart() {}

func (op *rowsOp) InferShape(in ...G.DimSizer) (tensor.Shape, error) {
	const name = "Step.Rows"
	shapes, err := G.DimSizersToShapes(in)
	if err != nil {
		return nil, errs.Errorf(name, ErrShape, "%v", err)
	}
	if len(shapes) != 1 {
		return nil, errs.Errorf(name, ErrShape, "%d inputs; it has 1", len(shapes))
	}
	s := shapes[0]
	if len(s) < 1 || len(s) > 2 || s[0] < 1 || len(s) == 2 && s[1] < 1 {
		return nil, errs.Errorf(name, ErrShape, "x has shape %v; it must be a vector or a matrix with a row for each of the step's %d, or for each append", s, op.step.tokens)
	}
	return s.Clone(), nil
}

func (op *rowsOp) Do(in ...G.Value) (y G.Value, err error) {
	const name = "Step.Rows"
	defer errs.RecoverTo(name, &err)
	if len(in) != 1 {
		return nil, errs.Errorf(name, ErrShape, "%d inputs; it has 1", len(in))
	}
	shape, err := op.InferShape(in[0].Shape())
	if err != nil {
		return nil, err
	}
	rows, err := op.step.setRows(name, shape[0])
	if err != nil {
		return nil, err
	}
	if d, ok := ongpu.Of(in[0]); ok {
		if rows < shape[0] && d.GPU.Group.Recording() {
			return nil, errs.Errorf(name, ErrUnsupported, "%d of %d rows in a recording: record a graph without Rows", rows, shape[0])
		}
		part, err := d.Rows(0, rows)
		if err != nil {
			return nil, err
		}
		return part.Value(), nil
	}
	t, err := ongpu.Dense(name, "x", in[0])
	if err != nil {
		return nil, err
	}
	if rows == shape[0] {
		return t, nil
	}
	if !dense.RowMajor(t) {
		return nil, errs.Errorf(name, ErrUnsupported, "x is not in row-major order")
	}
	shape[0] = rows
	elements := reflect.ValueOf(t.Data()).Slice3(0, shape.TotalSize(), shape.TotalSize()).Interface()
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(elements)), nil
}

// setRows returns the number of rows of an input that a run needs, at least one: the assigned rows, or one for each append if the input does not
// have a row for each row of the step.
func (s *Step) setRows(op string, have int) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.open {
		return 0, errs.Errorf(op, ErrState, "step is not open: call Set first")
	}
	if have == s.tokens {
		return max(1, s.used()), nil
	}
	if n := len(s.sequences); n > have {
		return 0, errs.Errorf(op, ErrShape, "x has %d rows, and Set was given %d appends", have, n)
	}
	return max(1, len(s.sequences)), nil
}

func (op *rowsOp) WriteHash(h hash.Hash) {
	fmt.Fprintf(h, "leanattention.Rows cache %d step %d call %d", op.step.cache.id, op.step.id, op.call)
}
func (op *rowsOp) Hashcode() uint32 { return graph.Hashcode(op) }
func (op *rowsOp) String() string   { return "LeanRows" }

// Layer returns layer i of the cache, for the step's graph.
func (s *Step) Layer(i int) Layer { return Layer{step: s, index: i} }

// Layer is a layer of a cache, for [CachedAttention].
type Layer struct {
	step  *Step
	index int
}

// stepPlan is the schedule for the layers of one geometry.
type stepPlan struct {
	geometry attn.Problem
	plan     kvstore.Plan
	turn     uint64 // that plan was made in
	rows     int    // that it was made for
	used     bool   // the last run had the rows of sequences, and no others
}

// stepNode is the part of a [CachedAttention] node that its step uses.
type stepNode struct {
	layer int
	plan  *stepPlan
	run   uint64 // of the step, that the node last ran in; the step's mu guards it
}

func (n *stepNode) String() string { return fmt.Sprintf("layer %d", n.layer) }

// planFor returns the plan for layers of geometry g. Layers of one geometry share a plan.
func (s *Step) planFor(g attn.Problem) *stepPlan {
	return s.planOf(g, func() kvstore.Plan { return s.cache.store.NewPlan(s.tokens, g) })
}

// replan gives a node the plan for layers of geometry g.
func (s *Step) replan(n *stepNode, g attn.Problem) {
	p := s.planFor(g)
	s.mu.Lock()
	defer s.mu.Unlock()
	n.plan = p
}

// planOf is planFor for plans that make makes.
func (s *Step) planOf(g attn.Problem, make func() kvstore.Plan) *stepPlan {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.plans {
		if p.geometry == g {
			return p
		}
	}
	p := &stepPlan{geometry: g, plan: make()}
	s.plans = append(s.plans, p)
	return p
}

// nextCall numbers the CachedAttention nodes of the step's graphs.
func (s *Step) nextCall() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls++
	return s.calls
}

// checkOutputs returns an error if entropies or attention mass do not go with the step.
func (s *Step) checkOutputs(op string, n *stepNode, c *kvstore.Call) error {
	if (c.Entropy != nil || c.Mass != nil) && attn.HasTrees(s.sequences) {
		return errs.Errorf(op, ErrUnsupported, "%v: entropy or attention mass of a step with trees", n)
	}
	if c.Mass == nil {
		return nil
	}
	for i := range s.sequences {
		keys := s.sequences[i].Keys
		if tiles := attn.Ceil(keys, n.plan.geometry.TileTokens); tiles > c.Places {
			return errs.Errorf(op, ErrShape, "%v: append %d is to a sequence of %d tokens, which have %d LeanTiles, and attention mass has places for %d", n, i, keys, tiles, c.Places)
		}
	}
	return nil
}

// attend appends k and v to the node's layer, and attends to the layer. It writes only reserved slots, so it can be repeated.
func (s *Step) attend(op string, n *stepNode, c *kvstore.Call) (out, lse G.Value, err error) {
	s.cache.running.RLock()
	defer s.cache.running.RUnlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	p := n.plan
	switch {
	case s.cache.closed:
		return nil, nil, errs.Errorf(op, ErrClosed, "cache")
	case !s.open:
		return nil, nil, errs.Errorf(op, ErrState, "%v: step is not open: call Set first", n)
	}
	if err := s.checkOutputs(op, n, c); err != nil {
		return nil, nil, err
	}
	used := s.used()
	if c.Rows.Tokens < used {
		return nil, nil, errs.Errorf(op, ErrShape, "%v: q has %d rows, and Set gave %d to sequences", n, c.Rows.Tokens, used)
	}
	p.used = c.Rows.Tokens < s.tokens || p.used && used == s.tokens
	begin := time.Now()
	if p.turn != s.turn || p.rows != c.Rows.Tokens { // the node was made after Set, or the run has fewer rows
		if err := s.plan(op, p, c.Rows.Tokens); err != nil {
			return nil, nil, err
		}
	}
	if n.run == s.run {
		s.run++
	}
	s.began = true
	n.run, s.ran[n.layer] = s.run, 0
	if out, lse, err = p.plan.Attend(op, c); err != nil {
		return nil, nil, err
	}
	s.ran[n.layer] = s.run
	s.layers++
	s.time += time.Since(begin)
	return out, lse, nil
}
