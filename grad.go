package leanattention

import (
	"fmt"
	"hash"
	"slices"

	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/gradient"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/graph"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/variant"

	"github.com/chewxy/hm"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// On the tape machine the gradients of an attention are these nodes:
//
//	out      Attention(q, k, v, lengths, query lengths, seed, bias, sinks), which is there
//	lse      LSE(out, q, k, lengths, query lengths, seed, bias, sinks), which saves what the forward pass left
//	packed   the gradients of all, computed once, in one vector
//	dq       the part of packed that is dq, without a copy; and dk, dv, dbias, dsinks
//
// An op of Gorgonia has one result; that it is a plain tensor and no state of
// the op's keeps runs of a graph and of its clones apart, and lets the machine's
// watches for NaN look at it.
//
// The log-sum-exp has gradients of its own in all of these but v, beside those of the
// output. The lisp machine asks ops for sums instead of nodes (DoDiff).

// DiffWRT says that q, k, v, the bias and the sinks have a gradient.
func (op *attentionOp) DiffWRT(n int) []bool {
	wrt := firstThree(n)
	for i, of := range op.inputs() {
		if i < n && op.hasGradient(of) {
			wrt[i] = true
		}
	}
	return wrt
}

// hasGradient reports whether an optional input has a gradient.
func (op *attentionOp) hasGradient(of role) bool {
	return (of == roleBias && op.hasBias() || of == roleSinks && op.score.Sinks || of.ofVariant() && op.hasPartial(int(of-roleTensor))) && !op.constant[of]
}

// SymDiff adds the nodes of the gradients (tape machine).
func (op *attentionOp) SymDiff(in G.Nodes, out, grad *G.Node) (grads G.Nodes, err error) {
	const name = "Attention.SymDiff"
	defer errs.RecoverTo(name, &err)
	if err := op.differentiable(name, len(in)); err != nil {
		return nil, err
	}
	op.graded.Store(true)
	lse, err := op.lseNode(out, in)
	if err != nil {
		return nil, err
	}
	return op.gradNodes(name, op.gradient(false, grad.Dims()), slices.Concat(in, G.Nodes{out, lse, grad}), len(in))
}

// SymDiff adds the nodes of the gradients (tape machine).
func (op *outputOp) SymDiff(in G.Nodes, lse, grad *G.Node) (grads G.Nodes, err error) {
	name := op.of + ".SymDiff"
	defer errs.RecoverTo(name, &err)
	a := op.attention
	if a == nil {
		return nil, errs.Errorf(op.of, ErrUnsupported, "gradient of the %s", op.what())
	}
	if err := a.differentiable(name, len(in)); err != nil {
		return nil, err
	}
	return a.gradNodes(name, a.gradient(true, grad.Dims()), slices.Concat(in[1:], G.Nodes{lse, grad}), len(in))
}

// differentiable reports whether op has gradients, of so many inputs.
func (op *attentionOp) differentiable(name string, inputs int) error {
	if inputs != op.Arity() {
		return errs.Errorf(name, ErrShape, "%d inputs; it has %d", inputs, op.Arity())
	}
	if op.storage != op.query {
		return errs.Errorf(name, ErrUnsupported, "gradient with k and v of %v and q of %v", op.storage, op.query)
	}
	if op.invariant {
		return errs.Errorf(name, ErrUnsupported, "gradient with batch invariance")
	}
	// A q of 16 bits is for GPUs alone, which have gradients with other options.
	kv, _ := operand.StorageType(op.query)
	there := !operand.IsQueryType(op.query) && attention.CanBackward(name, gradientProblem(&op.problem, &op.config), kv) == nil
	if err := gradient.Can(op.mask, op.score); err != nil && !there {
		return errs.Errorf(name, ErrUnsupported, "%v", err)
	}
	return nil
}

// gradNodes adds a node of packed gradients and those of its parts. The result
// has an entry for each input of the op that is differentiated.
func (op *attentionOp) gradNodes(name string, g *gradOp, children G.Nodes, inputs int) (G.Nodes, error) {
	packed, err := ongpu.Apply(name, g, children...)
	if err != nil {
		return nil, err
	}
	grads := make(G.Nodes, inputs)
	for _, p := range g.parts() {
		if grads[p.input], err = ongpu.Apply(name, &partOp{total: g.total(), gradPart: p}, packed); err != nil {
			return nil, err
		}
	}
	return grads, nil
}

// lseChildren are the children of an [outputOp] on attention node out: v has no
// part in a log-sum-exp.
func lseChildren(out *G.Node, inputs []*G.Node) []*G.Node {
	return append([]*G.Node{out, inputs[0], inputs[1]}, inputs[3:]...)
}

// lseInputTypes are the types of an outputOp's children but the first.
func (op *attentionOp) lseInputTypes() []hm.Type {
	t := []hm.Type{
		G.TensorType{Dims: op.rank, Of: hm.TypeVariable('d')},
		G.TensorType{Dims: op.rank, Of: hm.TypeVariable('c')},
	}
	if op.hasLengths() {
		t = append(t, G.TensorType{Dims: 1, Of: hm.TypeVariable('n')})
	}
	if op.hasQueryLengths() {
		t = append(t, G.TensorType{Dims: 1, Of: hm.TypeVariable('m')})
	}
	if op.hasSeed() {
		t = append(t, hm.TypeVariable('s'))
	}
	if op.hasBias() {
		t = append(t, G.TensorType{Dims: op.rank, Of: hm.TypeVariable('d')})
	}
	if op.score.Sinks {
		t = append(t, G.TensorType{Dims: 1, Of: hm.TypeVariable('u')})
	}
	return append(t, op.tensorTypes()...)
}

// DiffWRT: of a cache everything, since false would drop its part of a sum's
// gradient without a word; else all inputs of the attention but v, as the output has its own.
func (op *outputOp) DiffWRT(n int) []bool {
	if op.attention == nil {
		return firstThree(n)
	}
	wrt := op.attention.DiffWRT(n)
	wrt[0] = false
	return wrt
}

// gradOp computes gradients, of an attention's output or of its log-sum-exp, and
// packs them into one vector. Its children are those of inputs.
type gradOp struct {
	graph.Plain
	problem
	config
	ofLSE        bool
	ofBias       bool                     // it is one of the gradients
	ofSinks      bool                     // they are
	ofTensors    [variant.MaxTensors]bool // they are
	tensorShapes [variant.MaxTensors]tensor.Shape
	gradRank     int // of the gradient that comes in: 0 where Gorgonia made a scalar of it
	memory       ongpu.Node
}

// gradient returns the op of the gradients of op's output, or of its log-sum-exp.
func (op *attentionOp) gradient(ofLSE bool, gradRank int) *gradOp {
	g := &gradOp{problem: op.problem, config: op.config, ofLSE: ofLSE, ofBias: op.hasGradient(roleBias), ofSinks: op.hasGradient(roleSinks), gradRank: gradRank}
	for i := range g.ofTensors {
		g.ofTensors[i] = op.hasGradient(roleTensor + role(i))
	}
	g.tensorShapes = op.tensorShapes
	return g
}

// gradPart is one gradient: the role and the number of the input, the shape, and the first element in the vector of all gradients.
type gradPart struct {
	of    role
	input int
	shape tensor.Shape
	from  int
	wide  bool // it is float32 and has two elements of a vector of 16 bits for each of its own
}

// end returns the first element of the vector behind the part.
func (p *gradPart) end() int {
	if p.wide {
		return p.from + 2*p.shape.TotalSize()
	}
	return p.from + p.shape.TotalSize()
}

func (op *gradOp) parts() []gradPart {
	parts := []gradPart{{of: roleQ, input: 0, shape: op.dims(op.dim)}, {of: roleK, input: 1, shape: op.keyShape(op.dim)}, {of: roleV, input: 2, shape: op.keyShape(op.valueDim)}}
	if op.ofLSE {
		parts = parts[:2]
		parts[0].input, parts[1].input = 1, 2 // behind the output
	}
	add := func(of role, shape tensor.Shape) {
		parts = append(parts, gradPart{of: of, input: slices.Index(op.config.inputs(), of), shape: shape, wide: of == roleSinks && operand.LSEType(op.query) != op.query})
	}
	if op.ofBias {
		add(roleBias, op.biasShape(op.score.Bias))
	}
	if op.ofSinks {
		add(roleSinks, tensor.Shape{op.heads})
	}
	for i, wanted := range op.ofTensors {
		if wanted {
			add(roleTensor+role(i), op.tensorShapes[i])
		}
	}
	at := 0
	for i := range parts {
		if operand.LSEType(op.query) != op.query { // kernels want multiples of 16 bytes
			at = attn.Ceil(at, 8) * 8
		}
		parts[i].from = at
		at = parts[i].end()
	}
	return parts
}

// total returns the length of the vector.
func (op *gradOp) total() int {
	parts := op.parts()
	return parts[len(parts)-1].end()
}

// gradInput is an input of a gradOp, with its required shape and element type.
type gradInput struct {
	of role
	operand.Operand
}

// inputs are the children.
func (op *gradOp) inputs() (in []gradInput) {
	add := func(of role, name string, shape tensor.Shape) {
		t := op.query
		if of == roleSinks || of == roleLSE || of == roleGrad && op.ofLSE {
			t = operand.LSEType(t)
		}
		in = append(in, gradInput{of, operand.New(name, shape, t)})
	}
	for _, of := range op.config.inputs() {
		switch of {
		case roleQ:
			add(of, "q", op.dims(op.dim))
		case roleK:
			add(of, "k", op.keyShape(op.dim))
		case roleV:
			if !op.ofLSE { // it has no part in a log-sum-exp
				add(of, "v", op.keyShape(op.valueDim))
			}
		case roleLengths, roleQueryLengths:
			add(of, of.String(), tensor.Shape{op.batch}) // of one of three integer types
		case roleSeed:
			add(of, "seed", tensor.ScalarShape()) // of one of three integer types, too
		case roleBias:
			add(of, "bias", op.biasShape(op.score.Bias))
		case roleSinks:
			add(of, "sinks", tensor.Shape{op.heads})
		default:
			i := of - roleTensor // of any type that the variant has
			add(of, op.score.Variant.Tensors[i].Name, op.tensorShapes[i])
		}
	}
	if op.ofLSE {
		add(roleLSE, "lse", op.lseShape())
		add(roleGrad, "the gradient of lse", op.lseShape())
		return in
	}
	add(roleOut, "out", op.outShape())
	add(roleLSE, "lse", op.lseShape())
	add(roleGrad, "the gradient of out", op.outShape())
	return in
}

func (op *gradOp) Arity() int { return len(op.inputs()) }

// OperandName makes it a [graph.Named].
func (op *gradOp) OperandName(i int) string { return op.inputs()[i].Name }

func (op *gradOp) Type() hm.Type {
	var args []hm.Type
	in := op.inputs()
	for i, o := range in {
		of := hm.TypeVariable('a')
		switch o.of {
		case roleLengths:
			of = hm.TypeVariable('n')
		case roleQueryLengths:
			of = hm.TypeVariable('m')
		case roleSeed:
			args = append(args, hm.TypeVariable('s'))
			continue
		case roleSinks, roleLSE: // of 16-bit queries they are float32
			of = hm.TypeVariable('l')
		case roleGrad:
			if op.ofLSE {
				of = hm.TypeVariable('l')
			}
		}
		if o.of.ofVariant() {
			of = hm.TypeVariable('w' + rune(o.of-roleTensor))
		}
		if i == len(in)-1 && op.gradRank == 0 {
			args = append(args, of)
			continue
		}
		args = append(args, G.TensorType{Dims: len(o.Shape), Of: of})
	}
	return hm.NewFnType(append(args, G.TensorType{Dims: 1, Of: hm.TypeVariable('a')})...)
}

func (op *gradOp) InferShape(in ...G.DimSizer) (tensor.Shape, error) {
	shapes, err := G.DimSizersToShapes(in)
	if err != nil {
		return nil, errs.Errorf(op.name(), ErrShape, "%v", err)
	}
	want := op.inputs()
	if len(shapes) != len(want) {
		return nil, errs.Errorf(op.name(), ErrShape, "%d inputs; it has %d", len(shapes), len(want))
	}
	for i, w := range want {
		if i == len(want)-1 && w.Shape.TotalSize() == 1 && shapes[i].TotalSize() == 1 {
			continue // Gorgonia makes scalars of tensors of one element
		}
		if !slices.Equal(shapes[i], w.Shape) {
			return nil, errs.Errorf(op.name(), ErrShape, "%s has shape %v; it must be %v", w.Name, shapes[i], w.Shape)
		}
	}
	return tensor.Shape{op.total()}, nil
}

func (op *gradOp) name() string { return "Attention gradient" }

func (op *gradOp) WriteHash(h hash.Hash) {
	fmt.Fprintf(h, "leanattention.Gradient %+v %s lse %t bias %t sinks %t tensors %v rank %d", op.problem, op.config.hash(), op.ofLSE, op.ofBias, op.ofSinks, op.ofTensors, op.gradRank)
}
func (op *gradOp) Hashcode() uint32 { return graph.Hashcode(op) }
func (op *gradOp) String() string {
	if op.ofLSE {
		return "LeanAttentionGradient{LSE}"
	}
	return "LeanAttentionGradient"
}

// OnGPU implements [ongpu.Op].
func (op *gradOp) OnGPU() *ongpu.Node { return &op.memory }

// IsPart implements [ongpu.PartOp].
func (op *partOp) IsPart() {}

// Do computes the gradients.
func (op *gradOp) Do(in ...G.Value) (packed G.Value, err error) {
	name := op.name()
	defer errs.RecoverTo(name, &err)
	defer op.memory.Done(in, &packed, &err)
	want := op.inputs()
	if len(in) != len(want) {
		return nil, errs.Errorf(name, ErrShape, "%d inputs; it has %d", len(in), len(want))
	}
	if gpu := ongpu.PlaceOf(in[0]); gpu != nil {
		return op.doOnGPU(name, gpu, in)
	}
	var t tensors
	var seed int64
	for i, w := range want {
		v := in[i]
		if w.of == roleSeed {
			if seed, err = readSeed(name, v); err != nil {
				return nil, err
			}
			continue
		}
		if i == len(in)-1 {
			v = operand.OneElement(v, w.Shape)
		}
		if w.of.ofVariant() {
			if t[w.of], err = op.readTensor(name, int(w.of-roleTensor), v, op.query); err != nil {
				return nil, err
			}
			continue
		}
		if t[w.of], err = ongpu.Dense(name, w.Name, v); err != nil {
			return nil, err
		}
		got := operand.OfTensor(w.Name, t[w.of])
		if w.of == roleLengths || w.of == roleQueryLengths {
			err = checkLengths(name, got, op.batch)
		} else if !slices.Equal(got.Shape, w.Shape) || got.DType != w.DType {
			err = errs.Errorf(name, ErrShape, "%s is %v %v; it must be %v %v", w.Name, got.DType, got.Shape, w.DType, w.Shape)
		}
		if err != nil {
			return nil, err
		}
	}
	to := dense.New(op.query, op.total())
	if err = op.backward(name, &t, seed, to); err != nil {
		return nil, err
	}
	return to, nil
}

// partOp is one of the packed gradients. Its value is that part of the packed memory, which no other node reads or writes, so later ops may
// overwrite it.
type partOp struct {
	graph.Plain
	gradPart
	total int
}

func (op *partOp) Arity() int { return 1 }
func (op *partOp) Type() hm.Type {
	a := hm.TypeVariable('a')
	part := hm.Type(a)
	if op.wide {
		part = tensor.Float32
	}
	return hm.NewFnType(G.TensorType{Dims: 1, Of: a}, G.TensorType{Dims: len(op.shape), Of: part})
}
func (op *partOp) InferShape(...G.DimSizer) (tensor.Shape, error) { return op.shape.Clone(), nil }
func (op *partOp) WriteHash(h hash.Hash) {
	fmt.Fprintf(h, "leanattention.Part d%v %d %d %v %t", op.of, op.total, op.from, op.shape, op.wide)
}
func (op *partOp) Hashcode() uint32 { return graph.Hashcode(op) }
func (op *partOp) String() string   { return "LeanAttention d" + op.of.String() }

func (op *partOp) Do(in ...G.Value) (part G.Value, err error) {
	const name = "Attention gradient"
	defer errs.RecoverTo(name, &err)
	if len(in) != 1 {
		return nil, errs.Errorf(name, ErrShape, "%d inputs; it has 1", len(in))
	}
	if ongpu.PlaceOf(in[0]) != nil {
		if op.wide {
			return ongpu.PartAs(name, in[0], op.from, op.shape, tensor.Float32)
		}
		return ongpu.Part(name, in[0], op.from, op.shape)
	}
	t, err := ongpu.Dense(name, "packed", in[0])
	if err != nil {
		return nil, err
	}
	if !slices.Equal(t.Shape(), tensor.Shape{op.total}) {
		return nil, errs.Errorf(name, ErrShape, "packed has shape %v; it must be (%d)", t.Shape(), op.total)
	}
	var backing any
	end := op.end()
	switch t.Dtype() {
	case tensor.Float32:
		backing = dense.Backing[float32](t)[op.from:end:end]
	case tensor.Float64:
		backing = dense.Backing[float64](t)[op.from:end:end]
	default:
		return nil, errs.Errorf(name, ErrDType, "packed is %v", t.Dtype())
	}
	return tensor.New(tensor.WithShape(op.shape.Clone()...), tensor.WithBacking(backing)), nil
}

// Gradients have none. Gorgonia panics at an op that cannot say so.
func (op *gradOp) DiffWRT(n int) []bool { return slices.Repeat([]bool{true}, n) }
func (op *partOp) DiffWRT(n int) []bool { return slices.Repeat([]bool{true}, n) }
func (op *gradOp) SymDiff(G.Nodes, *G.Node, *G.Node) (G.Nodes, error) {
	return nil, errs.Errorf("Attention", ErrUnsupported, "second derivative")
}
func (op *partOp) SymDiff(G.Nodes, *G.Node, *G.Node) (G.Nodes, error) {
	return nil, errs.Errorf("Attention", ErrUnsupported, "second derivative")
}
func (op *gradOp) DoDiff(G.ExecutionContext, G.Nodes, *G.Node) error {
	return errs.Errorf("Attention", ErrUnsupported, "second derivative")
}
func (op *partOp) DoDiff(G.ExecutionContext, G.Nodes, *G.Node) error {
	return errs.Errorf("Attention", ErrUnsupported, "second derivative")
}

var (
	_ G.SDOp = (*gradOp)(nil)
	_ G.ADOp = (*gradOp)(nil)
	_ G.SDOp = (*partOp)(nil)
	_ G.ADOp = (*partOp)(nil)
)

// backward computes the gradients of checked tensors into the vector packed.
func (op *gradOp) backward(name string, t *tensors, seed int64, packed *tensor.Dense) error {
	s := gradientProblem(&op.problem, &op.config)
	err := op.setLengths(name, s, t)
	if err != nil {
		return err
	}
	if op.query == tensor.Float32 {
		err = backwardDense[float32](s, t, seed, op.parts(), packed)
	} else {
		err = backwardDense[float64](s, t, seed, op.parts(), packed)
	}
	if err != nil {
		return errs.Engine(name, "backward", err)
	}
	return nil
}

// gradientProblem returns the engines' problem, of whole sequences.
func gradientProblem(p *problem, c *config) *attn.Gradient {
	return &attn.Gradient{
		Batch: p.batch, Heads: p.heads, KVHeads: p.kvHeads, Queries: p.queries, Keys: p.keys, Dim: p.dim, ValueDim: p.valueDim,
		Scale: c.scaleFor(p.dim), Mask: c.mask, Score: c.score, Workers: c.workers,
	}
}

// setLengths sets the lengths of s, if there are some.
func (op *problem) setLengths(name string, s *attn.Gradient, t *tensors) (err error) {
	for _, x := range [...]struct {
		of       role
		capacity int
		to       *[]int
	}{{roleLengths, op.keys, &s.Lengths}, {roleQueryLengths, op.queries, &s.QueryLengths}} {
		if l := t[x.of]; l != nil {
			if *x.to, err = operand.ReadLengths(name, x.of.String(), make([]int, 0, op.batch), l, x.capacity); err != nil {
				return err
			}
		}
	}
	return nil
}

// backwardDense computes the gradients of parts: of the output if given, else of the log-sum-exp.
func backwardDense[F lean.Float](s *gradient.Shape, t *tensors, seed int64, parts []gradPart, packed *tensor.Dense) error {
	elements := func(of role) []F {
		if t[of] == nil {
			return nil
		}
		return dense.Elements[F](t[of])
	}
	o := gradient.Operands[F]{
		Q: elements(roleQ), K: elements(roleK), V: elements(roleV), Bias: elements(roleBias), Sinks: elements(roleSinks),
		Out: elements(roleOut), LSE: elements(roleLSE), Seed: seed,
	}
	if t[roleOut] != nil {
		o.DOut = elements(roleGrad)
	} else {
		o.DLSE = elements(roleGrad)
	}
	to := dense.Backing[F](packed)
	of := [roles]*[]F{roleQ: &o.DQ, roleK: &o.DK, roleV: &o.DV, roleBias: &o.DBias, roleSinks: &o.DSinks}
	o.Tensors = variantTensors(s.Variant, t)
	o.DTensors = make([][]F, len(o.Tensors))
	for i := range o.DTensors {
		of[roleTensor+role(i)] = &o.DTensors[i]
	}
	for _, p := range parts {
		*of[p.of] = to[p.from:p.end():p.end()]
	}
	return gradient.Run(cpu.Default(), s, &o)
}

// DoDiff adds the gradients to those of the inputs (lisp machine).
func (op *attentionOp) DoDiff(_ G.ExecutionContext, in G.Nodes, out *G.Node) (err error) {
	const name = "Attention.DoDiff"
	defer errs.RecoverTo(name, &err)
	if err := op.differentiable(name, len(in)); err != nil {
		return err
	}
	grad, err := gradOf(name, out)
	if err != nil {
		return err
	}
	values := valuesOf(in)
	lse, err := op.logSumExp(name, values)
	if err != nil {
		return err
	}
	return op.gradient(false, 0).addTo(name, in, append(values, out.Value(), lse, grad))
}

// DoDiff adds the gradients to those of the inputs (lisp machine).
func (op *outputOp) DoDiff(_ G.ExecutionContext, in G.Nodes, lse *G.Node) (err error) {
	name := op.of + ".DoDiff"
	defer errs.RecoverTo(name, &err)
	a := op.attention
	if a == nil {
		return errs.Errorf(op.of, ErrUnsupported, "gradient of the %s", op.what())
	}
	if err := a.differentiable(name, len(in)); err != nil {
		return err
	}
	grad, err := gradOf(name, lse)
	if err != nil {
		return err
	}
	return a.gradient(true, 0).addTo(name, in, append(valuesOf(in[1:]), lse.Value(), grad))
}

func valuesOf(in G.Nodes) []G.Value {
	values := make([]G.Value, 0, len(in)+3)
	for _, n := range in {
		values = append(values, n.Value())
	}
	return values
}

// gradOf returns the gradient of a node's value.
func gradOf(name string, n *G.Node) (G.Value, error) {
	grad, err := n.Grad()
	if err != nil {
		return nil, errs.Errorf(name, ErrGraph, "%v", err)
	}
	return grad, nil
}

// logSumExp computes the log-sum-exp again. The lisp machine has only the nodes of the graph, which may lack one for the log-sum-exp. It runs a
// graph once, so this happens once.
func (op *attentionOp) logSumExp(name string, in []G.Value) (lse *tensor.Dense, err error) {
	r := denseRuns.Get().(*denseRun)
	defer denseRuns.Put(r)
	t, err := op.read(name, r, in)
	if err != nil {
		return nil, err
	}
	t[roleOut] = dense.New(op.query, op.outShape()...)
	t[roleLSE] = dense.New(op.query, op.lseShape()...)
	return t[roleLSE], r.attend(name, &op.problem, &op.config, &t)
}

// addTo adds the gradients for values to those of the nodes in.
func (op *gradOp) addTo(name string, in G.Nodes, values []G.Value) error {
	packed, err := op.Do(values...)
	if err != nil {
		return err
	}
	for _, p := range op.parts() {
		part, err := (&partOp{total: op.total(), gradPart: p}).Do(packed)
		if err != nil {
			return err
		}
		sum, err := gradOf(name, in[p.input])
		if err != nil {
			return err
		}
		if _, err = tensor.Add(sum, part, tensor.UseUnsafe()); err != nil {
			return errs.Errorf(name, ErrGraph, "the gradient of %v: %v", p.of, err)
		}
	}
	return nil
}
