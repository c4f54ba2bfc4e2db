package leanattention

import (
	"fmt"
	"hash"
	"slices"

	"gorgonia.org/leanattention/internal/kvstore"

	"gorgonia.org/leanattention/internal/operand"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	cpuattention "gorgonia.org/leanattention/internal/cpu/attention"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/graph"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/ongpu"

	"github.com/chewxy/hm"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// PromptAttention appends the latent vectors of a step to a layer of a cache with [CacheConfig].ValuesInKeys, and attends to keys and values
// that were made from them: those of the step's own tokens. It is for the beginning of texts, as nn.MLA.Expanded needs it: the keys and
// values of each head have fewer elements than latent vectors. Rows are tokens, in the order of [Step.Set]:
//
//	q, k     (T, heads*d)     float32 or float64
//	v        (T, heads*dv)    as q
//	latents  (T, Hkv*D)       as q; Hkv and D are the cache's KVHeads and HeadDim
//	out      (T, heads*dv)    as q
//
// All is as for [CachedAttention], but for the following:
//
//   - Sequences: [Step.Set] is [ErrState] for a sequence that has tokens. Later tokens need CachedAttention, in a graph and a step of their
//     own.
//   - Heads: each query head has keys and values of its own.
//   - Scale: without [WithScale], 1/sqrt(d).
//   - Options: [WithRotary] rotates latents, and q and k in the same way: as many elements of their heads, the first or the last ones.
//     [WithSinks] is [ErrUnsupported], and there is no [LogSumExp].
//   - Keys and values have the cache's type, in memory that the step keeps.
//   - Devices: CPUs alone. Caches: those of 8 bits are [ErrUnsupported].
func PromptAttention(q, k, v, latents *G.Node, heads int, layer Layer, opts ...Option) (out *G.Node, err error) {
	const op = "PromptAttention"
	defer errs.RecoverTo(op, &err)
	c, err := newConfig(op, ofScores|optRotary|optSchedule|optTileTokens|optWorkers|optInvariant, opts)
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
	store, ok := s.cache.store.(*kvstore.HostPages)
	switch {
	case layer.index < 0 || layer.index >= cfg.Layers:
		return nil, errs.Errorf(op, ErrShape, "layer %d of a cache with %d layers", layer.index, cfg.Layers)
	case !cfg.ValuesInKeys:
		return nil, errs.Errorf(op, ErrUnsupported, "the cache has values of its own: make a cache with ValuesInKeys, or call CachedAttention")
	case cfg.DType.Size() == 1: // chunks attend to what the cache stores, and keys made from latents would not be rounded
		return nil, errs.Errorf(op, ErrUnsupported, "the cache is of %v: make a cache of Float16, BFloat16 or float32, or call CachedAttention", cfg.DType)
	case !ok:
		return nil, errs.Errorf(op, ErrUnsupported, "the cache is on %s: keep the cache in host memory", s.cache.store.Where())
	}
	var all [4]operand.Operand
	for i, n := range [...]*G.Node{q, k, v, latents} {
		if all[i], err = operand.OfNode(op, promptNames[i], n); err != nil {
			return nil, err
		}
		if err = sameGraph(op, promptNames[i], n, q); err != nil {
			return nil, err
		}
	}
	r, err := promptRowsOf(op, all, heads, s.tokens, cfg)
	if err != nil {
		return nil, err
	}
	if err = c.checkHeads(op, heads); err != nil {
		return nil, err
	}
	own, latent, err := r.geometries(op, cfg, &c)
	if err != nil {
		return nil, err
	}
	if err := store.Supports(op, &own); err != nil {
		return nil, err
	}
	if err := layer.unused(op, q.Graph()); err != nil {
		return nil, err
	}
	plan := s.planOf(own, func() kvstore.Plan { return &promptPlan{store: store, latent: latent, own: own} })
	c.rotaryOf, c.rotary = nil, own.Rotary
	a := &promptOp{step: s, node: stepNode{layer: layer.index, plan: plan}, rows: r, config: c, call: s.nextCall()}
	return ongpu.Apply(op, a, q, k, v, latents)
}

var promptNames = [...]string{"q", "k", "v", "latents"}

// promptRows describes the operands of a [PromptAttention].
type promptRows struct {
	kvstore.Rows
	dim, valueDim int // of each head
}

// promptRowsOf checks q, k, v and latents against the step and its cache.
func promptRowsOf(op string, all [4]operand.Operand, heads, tokens int, c *CacheConfig) (r promptRows, err error) {
	q := all[0]
	if heads < 1 {
		return r, errs.Errorf(op, ErrShape, "%d heads", heads)
	}
	for i, o := range all {
		if len(o.Shape) != 2 {
			return r, errs.Errorf(op, ErrShape, "%s has rank %d, shape %v; rows are tokens: it must be (tokens, elements)", o.Name, len(o.Shape), o.Shape)
		}
		width := o.Shape[1]
		switch {
		case o.Shape[0] != tokens:
			return r, errs.Errorf(op, ErrShape, "%s has %d rows and the step %d tokens", o.Name, o.Shape[0], tokens)
		case i < 3 && (width < heads || width%heads != 0):
			return r, errs.Errorf(op, ErrShape, "%s has %d columns, not those of %d heads", o.Name, width, heads)
		case i == 1 && width != q.Shape[1]:
			return r, errs.Errorf(op, ErrShape, "k has %d columns and q %d: each head has keys of its own", width, q.Shape[1])
		case i == 3 && width != c.KVHeads*c.HeadDim:
			return r, errs.Errorf(op, ErrShape, "latents has %d columns; the cache's %d KV heads need %d", width, c.KVHeads, c.KVHeads*c.HeadDim)
		case !operand.IsQueryType(o.DType):
			return r, errs.Errorf(op, ErrDType, "%s is %v; it must be float32 or float64", o.Name, o.DType)
		case o.DType != q.DType:
			return r, errs.Errorf(op, ErrDType, "%s is %v and q is %v", o.Name, o.DType, q.DType)
		}
	}
	r.Rows = kvstore.Rows{Tokens: tokens, Heads: heads, Query: q.DType}
	r.dim, r.valueDim = q.Shape[1]/heads, all[2].Shape[1]/heads
	return r, nil
}

// promptPage is the number of tokens of a page of keys and values.
const promptPage = 64

// geometries describes to the engine the attention to the step's own keys and values, and that to latent vectors, which rotates and stores
// them. It computes the rotations of both.
func (r *promptRows) geometries(op string, cfg *CacheConfig, c *config) (own, latent attn.Problem, err error) {
	of, both := c.rotaryOf, *c
	if of != nil && of.Dim == 0 && cfg.HeadDim != r.dim {
		return own, latent, errs.Errorf(op, ErrShape, "WithRotary: Dim is 0, all elements of a head, and latents have %d and keys %d: set Dim", cfg.HeadDim, r.dim)
	}
	if err := both.setRotary(op, cfg.HeadDim); err != nil {
		return own, latent, err
	}
	latent = geometryOf(&kvstore.Rows{Tokens: r.Tokens, Heads: cfg.KVHeads, Query: r.Query}, cfg, &both, 0)
	latent.Slopes = ""
	if both = *c; of != nil {
		keys := *of
		keys.HeadDim = r.dim
		both.rotaryOf = &keys
	}
	if err := both.setRotary(op+": keys", r.dim); err != nil {
		return own, latent, err
	}
	own = both.attention(r.dim)
	own.Heads, own.KVHeads, own.Dim, own.ValueDim, own.PageTokens = r.Heads, r.Heads, r.dim, r.valueDim, promptPage
	own.Pages = attn.Separate(latent.Pages.Key().DType, r.dim, r.valueDim, attn.PageStrides{}, attn.PageStrides{}).Packed(r.Heads, promptPage)
	own.QueryType = latent.QueryType
	own.Query, own.Out, own.LSE = attn.PackedRows(r.Heads, r.dim), attn.PackedRows(r.Heads, r.valueDim), attn.Strides{Row: r.Heads, Head: 1}
	return own, latent, nil
}

// promptPlan is a [kvstore.Plan] for the layers of [PromptAttention].
type promptPlan struct {
	store       *kvstore.HostPages
	own, latent attn.Problem

	seqs, ownSeqs       []attn.Sequence
	pages               []int32 // of ownSeqs
	plan, stores        cpuattention.Plan
	keysAndValues       attn.Memory[cpu.Buffer] // of the layer that runs
	keys, values, count int                     // elements of a page of each, and pages
}

// Build plans a step of sequences without cached tokens.
func (p *promptPlan) Build(op string, seqs []attn.Sequence, _ int) error {
	p.seqs, p.ownSeqs, p.pages = seqs, p.ownSeqs[:0], p.pages[:0]
	for i := range seqs {
		if seqs[i].QueryOnly {
			return errs.Errorf(op, ErrUnsupported, "append %d is QueryOnly, and a PromptAttention of the step has keys for new tokens alone: use CachedAttention", i)
		}
		if before := seqs[i].Before + seqs[i].Keys - seqs[i].Queries; before > 0 {
			return errs.Errorf(op, ErrState, "append %d is to a sequence of %d tokens, and a PromptAttention of the step takes sequences without tokens: use CachedAttention", i, before)
		}
		for range attn.Ceil(seqs[i].Queries, promptPage) {
			p.pages = append(p.pages, int32(len(p.pages)))
		}
	}
	first := 0
	for _, s := range seqs {
		n := attn.Ceil(s.Queries, promptPage)
		s.Pages = p.pages[first:][:n]
		p.ownSeqs, first = append(p.ownSeqs, s), first+n
	}
	tree := attn.HasTrees(seqs)
	for _, x := range []struct {
		plan *cpuattention.Plan
		g    attn.Problem
		seqs []attn.Sequence
	}{{&p.stores, p.latent, seqs}, {&p.plan, p.own, p.ownSeqs}} {
		x.g.Tree = tree
		if err := x.plan.Build(x.g, x.seqs); err != nil {
			return errs.Engine(op, "plan", err)
		}
	}
	return nil
}

// Attend appends the latent vectors, and attends to the keys and values of the step.
func (p *promptPlan) Attend(op string, c *kvstore.Call) (out, lse G.Value, err error) {
	if n := len(p.pages); n > p.count {
		t, page := p.own.Pages.Key().DType, p.own.Heads*promptPage
		p.keysAndValues = attn.InPlanes(operand.NewBuffer(t, n*page*p.own.Dim), operand.NewBuffer(t, n*page*p.own.ValueDim))
		p.count = n
	}
	if c.Rows.Query == tensor.Float32 {
		out, err = promptLayer[float32](p, c)
	} else {
		out, err = promptLayer[float64](p, c)
	}
	if err != nil {
		return nil, nil, errs.Engine(op, c.Node.String(), err)
	}
	return out, nil, nil
}

func promptLayer[F lean.Float](p *promptPlan, c *kvstore.Call) (G.Value, error) {
	e, g := cpu.Default(), &p.own
	of := func(i int, strides attn.Strides) cpuattention.NewRows[F] {
		return cpuattention.NewRows[F]{Rows: dense.Elements[F](c.QKV[i].(*tensor.Dense)), From: strides}
	}
	o, elements := dense.Unwritten[F](c.Rows.Query, tensor.Shape{c.Rows.Tokens, g.Heads * g.ValueDim})
	used := 0
	for i := range p.seqs {
		used = max(used, p.seqs[i].Row+p.seqs[i].Queries)
	}
	clear(elements[used*g.Heads*g.ValueDim:])
	if err := cpuattention.AppendLayer(e, &p.stores, p.seqs, &p.store.Layers[c.Layer], of(3, attn.PackedRows(p.latent.KVHeads, p.latent.Dim)), cpuattention.NewRows[F]{}); err != nil {
		return nil, err
	}
	keys, values := of(1, attn.PackedRows(g.Heads, g.Dim)), of(2, attn.PackedRows(g.Heads, g.ValueDim))
	if err := cpuattention.AppendLayer(e, &p.plan, p.ownSeqs, &p.keysAndValues, keys, values); err != nil {
		return nil, err
	}
	operands := &cpuattention.Operands[F]{Q: of(0, g.Query).Rows, Out: elements, Pages: p.keysAndValues}
	if err := cpuattention.Run(e, &p.plan, operands); err != nil {
		return nil, err
	}
	return o, nil
}

// promptOp is [PromptAttention].
type promptOp struct {
	graph.Plain
	step *Step
	node stepNode
	rows promptRows
	config
	call int // two nodes with the same arguments stay two
}

func (op *promptOp) occupies() (*Step, int) { return op.step, op.node.layer }

// OperandName implements [graph.Named].
func (op *promptOp) OperandName(i int) string { return promptNames[i] }

func (op *promptOp) Arity() int { return len(promptNames) }
func (op *promptOp) Type() hm.Type {
	m := func() hm.Type { return G.TensorType{Dims: 2, Of: hm.TypeVariable('a')} }
	return hm.NewFnType(m(), m(), m(), m(), m())
}

// rowsOf checks operands with some rows, and returns their description.
func (op *promptOp) rowsOf(name string, all [4]operand.Operand, tokens int) (r promptRows, err error) {
	if r, err = promptRowsOf(name, all, op.rows.Heads, tokens, &op.step.cache.config); err != nil {
		return r, err
	}
	if r.Query != op.rows.Query || r.dim != op.rows.dim || r.valueDim != op.rows.valueDim {
		return r, errs.Errorf(name, ErrShape, "q is %v %v and v %v, not what the graph was built for", all[0].DType, all[0].Shape, all[2].Shape)
	}
	return r, nil
}

func (op *promptOp) InferShape(in ...G.DimSizer) (tensor.Shape, error) {
	const name = "PromptAttention"
	shapes, err := G.DimSizersToShapes(in)
	if err != nil {
		return nil, errs.Errorf(name, ErrShape, "%v", err)
	}
	if len(shapes) != op.Arity() {
		return nil, errs.Errorf(name, ErrShape, "%d inputs; it has %d", len(shapes), op.Arity())
	}
	var all [4]operand.Operand
	for i, s := range shapes {
		all[i] = operand.New(promptNames[i], s, op.rows.Query)
	}
	r, err := op.rowsOf(name, all, op.step.tokens)
	if err != nil {
		return nil, err
	}
	return tensor.Shape{r.Tokens, r.Heads * r.valueDim}, nil
}

func (op *promptOp) Do(in ...G.Value) (out G.Value, err error) {
	const name = "PromptAttention"
	defer errs.RecoverTo(name, &err)
	if len(in) != op.Arity() {
		return nil, errs.Errorf(name, ErrShape, "%d inputs; it has %d", len(in), op.Arity())
	}
	var all [4]operand.Operand
	for i, v := range in {
		t, err := ongpu.Dense(name, promptNames[i], v)
		if err != nil {
			return nil, err
		}
		all[i] = operand.OfTensor(promptNames[i], t)
	}
	tokens := op.step.tokens
	if s := all[0].Shape; len(s) == 2 && s[0] >= 1 && s[0] < tokens {
		tokens = s[0] // a run may have fewer rows
	}
	r, err := op.rowsOf(name, all, tokens)
	if err != nil {
		return nil, err
	}
	out, _, err = op.step.attend(name, &op.node, &kvstore.Call{Node: nodeOf{op.step, &op.node}, Layer: op.node.layer, Rows: r.Rows, QKV: in})
	return out, err
}

func (op *promptOp) WriteHash(h hash.Hash) {
	fmt.Fprintf(h, "leanattention.PromptAttention cache %d step %d layer %d call %d %+v %s",
		op.step.cache.id, op.step.id, op.node.layer, op.call, op.rows, op.config.hash())
}
func (op *promptOp) Hashcode() uint32 { return graph.Hashcode(op) }
func (op *promptOp) String() string {
	return fmt.Sprintf("LeanPromptAttention{%v, H %d%s}", &op.node, op.rows.Heads, op.more())
}

// DiffWRT: everything, since false would drop its part of a sum's gradient without a word.
func (op *promptOp) DiffWRT(n int) []bool { return slices.Repeat([]bool{true}, n) }
func (op *promptOp) SymDiff(G.Nodes, *G.Node, *G.Node) (G.Nodes, error) {
	return nil, errs.Errorf("PromptAttention", ErrUnsupported, "gradient through a cache")
}
func (op *promptOp) DoDiff(G.ExecutionContext, G.Nodes, *G.Node) error {
	return errs.Errorf("PromptAttention", ErrUnsupported, "gradient through a cache")
}

var (
	_ G.SDOp = (*promptOp)(nil)
	_ G.ADOp = (*promptOp)(nil)
)
