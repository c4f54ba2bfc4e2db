package leanattention

import (
	"fmt"
	"hash"
	"math"
	"slices"
	"sync/atomic"

	"gorgonia.org/leanattention/internal/operand"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/graph"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/stock"
	"gorgonia.org/leanattention/internal/variant"

	"github.com/chewxy/hm"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Attention adds exact attention to the graph of q, k and v:
//
//	out[b,h,i] = sum_j p_j v[b,h',j],  p = softmax_j(scale * q[b,h,i].k[b,h',j])
//
// over the keys j that query i sees, where h' = h/(H/Hkv) is the KV head of head h; 0 if the query sees none.
//
//	q    (B, H, Nq, d)      float32 or float64; on a GPU also Float16 or BFloat16, if k and v are of this type
//	k    (B, Hkv, Nk, d)    float32, float64, Float16 or BFloat16
//	v    (B, Hkv, Nk, dv)   as k
//	out  (B, H, Nq, dv)     as q
//
// or all of them without the axis B. H is a multiple of Hkv. Attention replaces BatchedMatMul, SoftMax and BatchedMatMul
// ([Default]). Arithmetic is in q's element type.
//
//   - Options: all but [WithRotary]. [WithSoftCap], [WithALiBi] and [WithBias], in this order, change scores. [WithCausal],
//     [WithWindow] and [WithLengths] hide keys. [WithQueryLengths] says which rows are queries.
//   - GPUs: if q, k and v of a run are each a [device.Tensor] of one GPU, and q is not float64, the node computes there, and the
//     output is there. Lengths are in host memory.
//   - Machines: the tape machine, any number of runs; the lisp machine, one run.
//   - Gradients, on both machines, in host memory: of q, k, v, the bias and the sinks, also through [LogSumExp], if k and v have q's
//     element type. Other gradients, and second derivatives, are [ErrUnsupported], on GPUs too.
//   - Gradients on a GPU, on the tape machine: of float32 and 16 bits, for head dims up to 128 that are multiples of 8, and values as wide
//     as keys. [WithDropout], [WithSinkTokens] and [WithVariant] need 16 bits. In float16 the Score of an Unnormalised variant must be at most 0.
//   - The backward pass computes the weights again from the log-sum-exp (FlashAttention, Dao et al., arXiv:2205.14135, algorithm 4),
//     so no memory grows with Nq*Nk. Gradients of keys and values that no query sees are 0. The bits of gradients do not depend on schedule, workers or tiles.
//
// Errors:
//
//   - [ErrShape], [ErrDType], [ErrOption]; [ErrGraph] for nodes that are nil or of several graphs
//   - in a run: [ErrLength] for a length out of [0, Nk], and as [WithLengths] says; [ErrUnsupported] for operands in different
//     places, or without a kernel; ErrShape and ErrDType for values that differ from their nodes
func Attention(q, k, v *G.Node, opts ...Option) (out *G.Node, err error) {
	const op = "Attention"
	defer errs.RecoverTo(op, &err)
	c, err := newConfig(op, ofScores|optVariant|optBias|optSinks|optDropout|optLengths|optQueryLengths|optQueriesAtEnd|optSchedule|optTileTokens|optWorkers|optInvariant, opts)
	if err != nil {
		return nil, err
	}
	p, err := nodesProblem(op, q, k, v)
	if err != nil {
		return nil, err
	}
	if err = c.checkHeads(op, p.heads); err != nil {
		return nil, err
	}
	a := &attentionOp{problem: p, config: c}
	children := G.Nodes{q, k, v}
	for _, x := range [...]struct {
		of role
		n  *G.Node
	}{{roleLengths, c.lengths}, {roleQueryLengths, c.queryLengths}} {
		if x.n == nil {
			continue
		}
		l, err := operand.OfNode(op, x.of.String(), x.n)
		if err != nil {
			return nil, err
		}
		if err = checkLengths(op, l, p.batch); err != nil {
			return nil, err
		}
		children = append(children, x.n)
	}
	if c.hasSeed() {
		if c.seed == nil {
			return nil, errs.Errorf(op, ErrOption, "WithDropout(%v, nil): it needs a node as the seed", c.score.Dropout)
		}
		s, err := operand.OfNode(op, "seed", c.seed)
		if err != nil {
			return nil, err
		}
		if err = checkSeed(op, s); err != nil {
			return nil, err
		}
		children = append(children, c.seed)
	}
	if c.biasNode != nil {
		if a.score.Bias, err = p.biasNode(op, c.biasNode); err != nil {
			return nil, err
		}
		a.score.Bias.Scale = c.biasScale
		a.constant[roleBias] = stock.Of(c.biasNode).Kind == stock.Constant
		children = append(children, c.biasNode)
	}
	if c.sinksNode != nil {
		if err = sinksNode(op, c.sinksNode, q, p.heads, p.query); err != nil {
			return nil, err
		}
		a.constant[roleSinks] = stock.Of(c.sinksNode).Kind == stock.Constant
		children = append(children, c.sinksNode)
	}
	nodes, err := a.variantNodes(op, q, p.query)
	if err != nil {
		return nil, err
	}
	for i, n := range nodes {
		a.constant[roleTensor+role(i)] = stock.Of(n).Kind == stock.Constant
		a.tensorShapes[i] = n.Shape().Clone()
	}
	children = append(children, nodes...)
	for i := 3; i < len(children); i++ {
		if err = sameGraph(op, a.inputs()[i].String(), children[i], q); err != nil {
			return nil, err
		}
	}
	// The op is shared by clones of the graph: it must not hold nodes.
	a.config.lengths, a.config.queryLengths, a.config.seed, a.config.biasNode, a.config.sinksNode = nil, nil, nil, nil, nil
	return ongpu.Apply(op, placeAttention(a, q, k, v), children...)
}

func nodesProblem(op string, q, k, v *G.Node) (p problem, err error) {
	o, err := nodeOperands(op, q, k, v)
	if err != nil {
		return p, err
	}
	return newNodeProblem(op, o[0], o[1], o[2])
}

// attentionOp is [Attention].
type attentionOp struct {
	graph.Plain
	problem
	config
	constant     [roles]bool                      // inputs that are constants: they have no gradient
	tensorShapes [variant.MaxTensors]tensor.Shape // of the variant
	lse          outputStore
	entropy      outputStore
	mass         massStore
	graded       atomic.Bool  // there are nodes of gradients
	stale        func() error // of a graph that Fuse made: see fuse.Match.Stale; else nil
	memory       ongpu.Node
}

// OnGPU implements [ongpu.Op].
func (op *attentionOp) OnGPU() *ongpu.Node { return &op.memory }

// Again implements [ongpu.StatefulOp].
func (op *attentionOp) Again() G.Op {
	return &attentionOp{problem: op.problem, config: op.config, constant: op.constant, tensorShapes: op.tensorShapes, stale: op.stale}
}

func (c *config) hasLengths() bool      { return c.given&optLengths != 0 }
func (c *config) hasQueryLengths() bool { return c.given&optQueryLengths != 0 }
func (c *config) hasSeed() bool         { return c.given&optDropout != 0 }
func (c *config) hasBias() bool         { return c.score.Bias != attn.Bias{} }

// furtherRoles are the optional inputs of attention after q, k and v, in order.
var furtherRoles = [...]role{roleLengths, roleQueryLengths, roleSeed, roleBias, roleSinks}

// inputRoles are the inputs of attention for each number of a variant's tensors, and each subset of furtherRoles, which is a bit mask.
var inputRoles = func() (all [variant.MaxTensors + 1][1 << len(furtherRoles)][]role) {
	for n := range all {
		for i := range all[n] {
			roles := []role{roleQ, roleK, roleV}
			for bit, of := range furtherRoles {
				if i>>bit&1 != 0 {
					roles = append(roles, of)
				}
			}
			for tensor := range n {
				roles = append(roles, roleTensor+role(tensor))
			}
			all[n][i] = roles
		}
	}
	return all
}()

// inputs returns the roles of the op's inputs.
func (c *config) inputs() []role {
	i := 0
	for bit, has := range [...]bool{c.hasLengths(), c.hasQueryLengths(), c.hasSeed(), c.hasBias(), c.score.Sinks} {
		if has {
			i |= 1 << bit
		}
	}
	return inputRoles[c.tensors()][i]
}

// tensors returns the number of the variant's tensors, which are the last inputs.
func (c *config) tensors() int {
	if c.score.Variant == nil {
		return 0
	}
	return len(c.score.Variant.Tensors)
}

// OperandName makes it a [graph.Named].
func (c *config) OperandName(i int) string { return c.inputs()[i].String() }

// input returns the input with a role; nil if there is none.
func (c *config) input(of role, in []G.Value) G.Value {
	if i := slices.Index(c.inputs(), of); i >= 0 {
		return in[i]
	}
	return nil
}

func (op *attentionOp) Arity() int { return len(op.inputs()) }

// Type is a new type at every call, because Gorgonia empties the one it gets.
// Its variables are not called b, which Gorgonia uses itself.
func (op *attentionOp) Type() hm.Type {
	of := func(dims int, v rune) hm.Type { return G.TensorType{Dims: dims, Of: hm.TypeVariable(v)} }
	args := []hm.Type{of(op.rank, 'a'), of(op.rank, 'c'), of(op.rank, 'c')}
	if op.hasLengths() {
		args = append(args, of(1, 'n'))
	}
	if op.hasQueryLengths() {
		args = append(args, of(1, 'm'))
	}
	if op.hasSeed() {
		args = append(args, hm.TypeVariable('s'))
	}
	if op.hasBias() {
		args = append(args, of(op.rank, 'a'))
	}
	if op.score.Sinks {
		args = append(args, of(1, 'u')) // of 16-bit queries they are float32
	}
	args = append(args, op.tensorTypes()...)
	return hm.NewFnType(append(args, of(op.rank, 'a'))...)
}

func (op *attentionOp) InferShape(in ...G.DimSizer) (tensor.Shape, error) {
	shapes, err := G.DimSizersToShapes(in)
	if err != nil {
		return nil, errs.Errorf("Attention", ErrShape, "%v", err)
	}
	if len(shapes) != op.Arity() {
		return nil, errs.Errorf("Attention", ErrShape, "%d inputs; it has %d", len(shapes), op.Arity())
	}
	p, err := newNodeProblem("Attention", operand.New("q", shapes[0], op.query), operand.New("k", shapes[1], op.storage), operand.New("v", shapes[2], op.storage))
	if err != nil {
		return nil, err
	}
	if i := slices.Index(op.inputs(), roleSinks); i >= 0 {
		if err = checkSinks("Attention", operand.New("sinks", shapes[i], operand.LSEType(op.query)), p.heads, op.query); err != nil {
			return nil, err
		}
	}
	return p.outShape(), nil
}

func (op *attentionOp) Do(in ...G.Value) (out G.Value, err error) {
	const name = "Attention"
	defer errs.RecoverTo(name, &err)
	defer op.memory.Done(in, &out, &err)
	if len(in) != op.Arity() {
		return nil, errs.Errorf(name, ErrShape, "%d inputs; it has %d", len(in), op.Arity())
	}
	if err := op.fresh(name); err != nil {
		return nil, err
	}
	gpu, err := ongpu.SamePlace(name, roleNames[:3], in[:3])
	if err != nil {
		return nil, err
	}
	r := denseRuns.Get().(*denseRun)
	defer denseRuns.Put(r)
	if gpu != nil {
		return op.doOnGPU(name, r, gpu, in)
	}
	t, err := op.read(name, r, in)
	if err != nil {
		return nil, err
	}
	p := &op.problem
	t[roleOut] = dense.New(p.query, p.outShape()...)
	store := op.logs()
	if store != nil {
		t[roleLSE] = dense.New(p.query, p.lseShape()...)
	}
	entropyStore, massStore := op.entropy.asked(), op.mass.asked()
	if entropyStore != nil {
		t[roleEntropy] = dense.New(p.query, p.lseShape()...)
	}
	if massStore != nil {
		t[roleMass] = dense.New(p.query, p.dims(int(op.mass.places.Load()))...)
	}
	if err = r.attend(name, p, &op.config, &t); err != nil {
		return nil, err
	}
	store.put(logs, t[roleOut], t[roleLSE])
	entropyStore.put(entropies, t[roleOut], t[roleEntropy])
	massStore.put(masses, t[roleOut], t[roleMass])
	return t[roleOut], nil
}

// fresh returns an error if inputs of a graph from Fuse lack values that were bound to the old graph.
func (op *attentionOp) fresh(name string) error {
	if op.stale == nil {
		return nil
	}
	if err := op.stale(); err != nil {
		return errs.Errorf(name, ErrState, "%v", err)
	}
	return nil
}

// read checks the inputs of a run, because Gorgonia does not compare values with the shapes of nodes. It stores lengths and seed in r.
func (op *attentionOp) read(name string, r *denseRun, in []G.Value) (t tensors, err error) {
	if !operand.IsQueryType(op.query) {
		return t, errs.Errorf(name, ErrDType, "q is %v; in %s it must be float32 or float64", op.query, errs.Host)
	}
	var bias attn.Bias
	r.whole(&op.problem)
	for i, of := range op.inputs() {
		if of == roleSeed {
			if r.seed, err = readSeed(name, in[i]); err != nil {
				return t, err
			}
			continue
		}
		if of.ofVariant() {
			if t[of], err = op.readTensor(name, int(of-roleTensor), in[i], op.query); err != nil {
				return t, err
			}
			continue
		}
		if t[of], err = ongpu.Dense(name, of.String(), in[i]); err != nil {
			return t, err
		}
		switch of {
		case roleLengths, roleQueryLengths:
			err = op.readLengths(name, r, of, t[of])
		case roleBias:
			bias, err = op.biasOf(name, operand.OfTensor("bias", t[of]))
			bias.Scale = op.score.Bias.Scale
		case roleSinks:
			err = checkSinks(name, operand.OfTensor("sinks", t[of]), op.heads, op.query)
		}
		if err != nil {
			return t, err
		}
	}
	if err = op.sameProblem(name, operand.OfTensor("q", t[roleQ]), operand.OfTensor("k", t[roleK]), operand.OfTensor("v", t[roleV])); err != nil {
		return t, err
	}
	if bias != op.score.Bias {
		return t, errs.Errorf(name, ErrShape, "bias %v is not what the graph was built for", t[roleBias].Shape())
	}
	return t, nil
}

// readLengths reads the lengths of a role into r.
func (op *attentionOp) readLengths(name string, r *denseRun, of role, t *tensor.Dense) (err error) {
	if err = checkLengths(name, operand.OfTensor(of.String(), t), op.batch); err != nil {
		return err
	}
	if of == roleLengths {
		r.lengths, err = operand.ReadLengths(name, of.String(), r.lengths[:0], t, op.keys)
	} else {
		r.queries, err = operand.ReadLengths(name, of.String(), r.queries[:0], t, op.queries)
	}
	return err
}

// sameProblem checks the values of a run against the graph.
func (op *attentionOp) sameProblem(name string, q, k, v operand.Operand) error {
	p, err := newNodeProblem(name, q, k, v)
	if err != nil {
		return err
	}
	if p != op.problem {
		return errs.Errorf(name, ErrShape, "q %v, k %v, v %v are not what the graph was built for", q.Shape, k.Shape, v.Shape)
	}
	return nil
}

// doOnGPU is Do for q, k and v on a GPU. Lengths are in host memory.
func (op *attentionOp) doOnGPU(name string, r *denseRun, gpu *ongpu.GPU, in []G.Value) (G.Value, error) {
	if op.graded.Load() {
		if _, err := gpu.Backward(name, op.gradient(false, 0).problemThere(), op.query); err != nil {
			return nil, err
		}
	}
	var o [3]operand.Operand
	for i := range o {
		o[i] = ongpu.Must(in[i]).Operand(roleNames[i])
	}
	if err := op.sameProblem(name, o[0], o[1], o[2]); err != nil {
		return nil, err
	}
	r.whole(&op.problem)
	for _, of := range [...]role{roleLengths, roleQueryLengths} {
		if i := slices.Index(op.config.inputs(), of); i >= 0 {
			t, err := ongpu.Dense(name, of.String(), in[i])
			if err != nil {
				return nil, err
			}
			if err = op.readLengths(name, r, of, t); err != nil {
				return nil, err
			}
		}
	}
	c := op.config
	further, err := op.furtherThere(name, gpu, op.input(roleBias, in), op.input(roleSinks, in), &c)
	if err != nil {
		return nil, err
	}
	if n := c.tensors(); n > 0 {
		if further.tensors, err = c.readThere(name, gpu, in[len(in)-n:], op.query); err != nil {
			return nil, err
		}
	}
	if c.score.Bias.Scale = op.score.Bias.Scale; c.score != op.score {
		return nil, errs.Errorf(name, ErrShape, "bias %v is not what the graph was built for", further.bias.Shape)
	}
	var there, lse *ongpu.Tensor
	if c.score.Dropout != 0 {
		there, lse, err = op.dropOnGPU(name, r, gpu, in, further)
	} else {
		there, lse, err = op.doDevice(name, r, gpu, in[:3], further, nil)
	}
	if err == nil && op.memory.From != nil {
		err = gpu.HaveRead(name, in)
	}
	if err != nil {
		return nil, err
	}
	op.logs().put(logs, there.Value(), lse.Value())
	return there.Value(), nil
}

func (op *attentionOp) WriteHash(h hash.Hash) {
	fmt.Fprintf(h, "leanattention.Attention %+v %s", op.problem, op.config.hash())
}
func (op *attentionOp) Hashcode() uint32 { return graph.Hashcode(op) }
func (op *attentionOp) String() string {
	return fmt.Sprintf("LeanAttention{H %d/%d, d %d/%d%s}", op.heads, op.kvHeads, op.dim, op.valueDim, op.more())
}

// more returns the part of an op's name for sinks and a rotary embedding.
func (c *config) more() (s string) {
	if c.rotary != (attn.Rotary{}) {
		s = ", rotary"
	}
	if c.score.Sinks {
		s += ", sinks"
	}
	if c.score.Variant != nil {
		s += ", variant"
	}
	return s
}

// firstThree reports that only the first three of n inputs can have a gradient.
func firstThree(n int) []bool {
	wrt := make([]bool, n)
	for i := range min(n, 3) {
		wrt[i] = true
	}
	return wrt
}

// hash returns all parameters of a config as text, for WriteHash.
func (c *config) hash() string {
	return fmt.Sprintf("given %x scale %x %v tile %d workers %d mask %+v score %+q rotary %+q",
		uint32(c.given), math.Float64bits(c.scale), c.schedule, c.tileTokens, c.workers, c.mask, fmt.Sprintf("%+v", c.score), fmt.Sprintf("%+v", c.rotary))
}

// SetStale has runs ask whether the values of a rewritten graph are out of date.
func (op *attentionOp) SetStale(stale func() error) { op.stale = stale }
