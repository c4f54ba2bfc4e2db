package nn

import (
	"fmt"
	"hash"
	"slices"

	"gorgonia.org/leanattention/internal/errs"

	"github.com/chewxy/hm"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/graph"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"
	"gorgonia.org/leanattention/internal/weight"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// A rule says what an op takes and computes. A [node] or a [view] is the op of a rule, with Gorgonia's methods.
type rule interface {
	signature

	// compute returns the result in host memory.
	compute(in []G.Value, shape tensor.Shape) (G.Value, error)
}

// A signature says what a rule takes and returns.
type signature interface {
	fmt.Stringer   // with each parameter, since the hash of the op is that of its text
	title() string // the op's name in errors

	// arguments returns the inputs, and after them the result.
	arguments() []argument

	// shape checks the shapes of the inputs, and returns that of the result. The ranks are those of arguments.
	shape(in []tensor.Shape) (tensor.Shape, error)
}

// A derivable op has gradients of all inputs except data.
type derivable interface {
	signature

	// gradient returns the gradient of input i, given the gradient dy of the result.
	gradient(i int, in []G.Value, dy G.Value) (G.Value, error)
}

// argument is an input of an op, or its result.
type argument struct {
	name    string
	rank    int
	dtype   tensor.Dtype
	data    bool // without a gradient, as indices
	weights bool // dtype stands for a format of weights, and a value may be an [operand.Weight]
	packed  bool // GPUs also take weights of 8 and 4 bits
	halves  bool // GPUs also take float16 and bfloat16
}

// checkGPU returns an error if kernels cannot read or write the argument.
func (a *argument) checkGPU(title string) error {
	if a.weights {
		has := func(f weight.Format) bool { return f.Kernels() != "" || a.packed && weight.CanPack(f) }
		f, ok := operand.WeightFormat(a.dtype)
		if ok && has(f) {
			return nil
		}
		return errorf(title, errs.ErrUnsupported, "%s of %v on a GPU, want %s: convert %s, or keep all inputs in host memory", a.name, f, weight.Names(has), a.name)
	}
	want := tensor.Float32
	if a.data {
		want = tensor.Int32
	}
	if half := a.dtype == operand.Float16 || a.dtype == operand.BFloat16; a.dtype != want && !(a.halves && half) {
		return errorf(title, errs.ErrUnsupported, "%s of %v on a GPU, want %v", a.name, a.dtype, want)
	}
	return nil
}

// A composed op has gradients that are made by other ops.
type composed interface {
	graphGradients(in []*G.Node, dy *G.Node) ([]*G.Node, error)
	valueGradients(in []G.Value, dy G.Value) ([]G.Value, error)
}

// A composedOfOutput op has such gradients that also read its result, in a graph.
type composedOfOutput interface {
	outputGradients(in []*G.Node, y, dy *G.Node) ([]*G.Node, error)
}

// operator has the methods of nodes and views.
type operator struct {
	graph.Plain
	rule
	args *[]argument // of the rule
}

// newOperator keeps the rule's arguments, so that runs do not allocate them.
func newOperator(r rule) operator {
	args := r.arguments()
	return operator{rule: r, args: &args}
}

func (op operator) arguments() []argument { return *op.args }

func (op operator) Arity() int { return len(op.arguments()) - 1 }

// OperandName implements [graph.Named].
func (op operator) OperandName(i int) string { return op.arguments()[i].name }

// Type returns a new type at each call, since Gorgonia modifies it.
func (op operator) Type() hm.Type { return typeOf(op.arguments()...) }

func typeOf(args ...argument) hm.Type {
	ts := make([]hm.Type, len(args))
	for i, a := range args {
		if ts[i] = a.dtype; a.rank > 0 {
			ts[i] = G.TensorType{Dims: a.rank, Of: a.dtype}
		}
	}
	return hm.NewFnType(ts...)
}

func (op operator) InferShape(in ...G.DimSizer) (tensor.Shape, error) {
	shapes, err := G.DimSizersToShapes(in)
	if err != nil {
		return nil, err
	}
	return checkShapes(op.rule, shapes)
}

func (op operator) WriteHash(h hash.Hash) { fmt.Fprint(h, "leanattention.nn.", op.String()) }
func (op operator) Hashcode() uint32      { return graph.Hashcode(op) }

// checkShapes checks the number and the ranks of inputs, and returns the shape of the result.
func checkShapes(r signature, in []tensor.Shape) (tensor.Shape, error) {
	args := r.arguments()
	if len(in) != len(args)-1 {
		return nil, errorf(r.title(), errs.ErrShape, "%d inputs, want %d", len(in), len(args)-1)
	}
	for i, s := range in {
		a := &args[i]
		if len(s) != a.rank {
			return nil, errorf(r.title(), errs.ErrShape, "%s has shape %v, want rank %d", a.name, s, a.rank)
		}
		for _, d := range s {
			if d < 1 {
				return nil, errorf(r.title(), errs.ErrShape, "%s has shape %v, want no empty axis", a.name, s)
			}
		}
	}
	return r.shape(in)
}

// checkValues checks the values of a run, and returns the shape of the result.
func checkValues(r signature, in []G.Value) (tensor.Shape, error) {
	args := r.arguments()
	if len(in) != len(args)-1 {
		return nil, errorf(r.title(), errs.ErrGraph, "%d inputs, want %d", len(in), len(args)-1)
	}
	for i, v := range in {
		if d := v.Dtype(); d != args[i].dtype {
			return nil, errorf(r.title(), errs.ErrDType, "%s is of %v when run, want %v", args[i].name, d, args[i].dtype)
		}
	}
	return checkShapes(r, shapesOf(in))
}

// Do returns a new value at each call, which Gorgonia's in-place nodes may overwrite.
func (op operator) Do(in ...G.Value) (y G.Value, err error) {
	defer errs.RecoverTo(prefix+op.title(), &err)
	shape, err := checkValues(op, in)
	if err != nil {
		return nil, err
	}
	if anyOnGPU(in) {
		return nil, errorf(op.title(), errs.ErrUnsupported, "an input is on a GPU, want host memory")
	}
	return op.compute(in, shape)
}

// DiffWRT reports which inputs have gradients.
func (op operator) DiffWRT(int) []bool { return diffWRT(op.arguments()) }

func diffWRT(args []argument) []bool {
	wrt := make([]bool, len(args)-1)
	for i := range wrt {
		wrt[i] = !args[i].data
	}
	return wrt
}

// SymDiff adds the nodes of the gradients, for the tape machine.
func (op operator) SymDiff(in G.Nodes, y, dy *G.Node) (grads G.Nodes, err error) {
	defer errs.RecoverTo(prefix+op.title(), &err)
	if c, ok := op.rule.(composedOfOutput); ok {
		return c.outputGradients(in, y, dy)
	}
	if c, ok := op.rule.(composed); ok {
		return c.graphGradients(in, dy)
	}
	return gradients(inGraph, op.rule, in, dy)
}

// DoDiff adds the gradients to those of the inputs, for the lisp machine.
func (op operator) DoDiff(_ G.ExecutionContext, in G.Nodes, y *G.Node) (err error) {
	defer errs.RecoverTo(prefix+op.title(), &err)
	return addGradients(op.title(), in, y, func(in []G.Value, dy G.Value) ([]G.Value, error) {
		if c, ok := op.rule.(composed); ok {
			return c.valueGradients(in, dy)
		}
		return gradients(atOnce, op.rule, in, dy)
	})
}

// node is an op that computes where its inputs are, on the CPU or on a GPU.
type node struct {
	operator
	gpu *ongpu.Node
}

// A launched rule can compute on a GPU.
type launched interface {
	// launch queues the work. Inputs and result are float32, data int32, and weights in a format that has kernels.
	launch(w *ongpu.Work, in []tensor.Shape, shape tensor.Shape) error
}

// A placed rule adds to the call how several GPUs compute, or the scratch memory.
type placed interface {
	place(c *ongpu.Call, in []tensor.Shape, shape tensor.Shape)
}

// A scratching rule needs scratch memory on a GPU, in float32 elements.
type scratching interface {
	scratch(shape tensor.Shape) int
}

// A hosted rule may have an option that GPUs do not know; "": none.
type hosted interface{ onHost() (option string) }

// OnGPU implements [ongpu.Op].
func (op node) OnGPU() *ongpu.Node { return op.gpu }

// Again implements [ongpu.StatefulOp].
func (op node) Again() G.Op { return node{op.operator, new(ongpu.Node)} }

func (op node) Do(in ...G.Value) (y G.Value, err error) {
	defer errs.RecoverTo(prefix+op.title(), &err)
	defer op.gpu.Done(in, &y, &err)
	r, ok := op.rule.(launched)
	if !ok || !anyOnGPU(in) {
		return op.operator.Do(in...)
	}
	args := op.arguments()
	shape, err := checkValues(op.operator, in)
	if err != nil {
		return nil, err
	}
	for i := range args {
		if err := args[i].checkGPU(op.title()); err != nil {
			return nil, err
		}
	}
	if h, ok := op.rule.(hosted); ok && h.onHost() != "" {
		return nil, errorf(op.title(), errs.ErrUnsupported, "option %s with inputs on a GPU: keep all inputs in host memory, or leave the option out", h.onHost())
	}
	shapes := shapesOf(in)
	call := ongpu.Call{
		Op: "nn." + op.title(), Node: op.gpu, Names: namesOf(len(in), func(i int) string { return args[i].name }),
		In: tensorsOf(in), DType: args[len(args)-1].dtype, Shape: shape,
		Queue: func(w *ongpu.Work) error { return r.launch(w, shapes, shape) },
	}
	if s, ok := op.rule.(scratching); ok {
		call.Scratch = func(*layers.Engine) (int, error) { return s.scratch(shape), nil }
	}
	if p, ok := op.rule.(placed); ok {
		p.place(&call, shapes, shape)
	}
	return ongpu.Compute(&call)
}

// view is an op whose value is contiguous elements of its input. On a GPU, the value is in the input's memory.
type view struct{ operator }

// aligned returns n, rounded up to a number of float32 that fill whole pieces of 16 bytes: kernels read and write from such pieces on.
func aligned(n int) int { return (n + 3) / 4 * 4 }

// nodeRule returns the rule of a node of this package, if it has the type R.
func nodeRule[R rule](n *G.Node) (r R, ok bool) {
	switch o := n.Op().(type) {
	case node:
		r, ok = o.rule.(R)
	case view:
		r, ok = o.rule.(R)
	case copied:
		r, ok = o.rule.(R)
	}
	return r, ok
}

// A window is the rule of a view.
type window interface {
	rule
	from(in tensor.Shape) int // the first element
}

// IsPart implements [ongpu.PartOp].
func (op view) IsPart() {}

func (op view) Do(in ...G.Value) (y G.Value, err error) {
	if !anyOnGPU(in) {
		return op.operator.Do(in...)
	}
	defer errs.RecoverTo(prefix+op.title(), &err)
	shape, err := checkValues(op.rule, in)
	if err != nil {
		return nil, err
	}
	return ongpu.Part("nn."+op.title(), in[0], op.rule.(window).from(in[0].Shape()), shape)
}

// newView makes the node of a view.
func newView(r window, x *G.Node) (*G.Node, error) { return apply(r, view{newOperator(r)}, x) }

// apply makes the node of an op of a rule, and checks the children.
func apply(r rule, op G.Op, children ...*G.Node) (*G.Node, error) {
	if err := checkChildren(r, children); err != nil {
		return nil, err
	}
	return ongpu.Apply(prefix+r.title(), op, children...)
}

// copied is a view that copies in host memory, since in-place ops after a view could write into its input.
type copied struct {
	view
	gpu *ongpu.Node
}

// OnGPU implements [ongpu.Op].
func (op copied) OnGPU() *ongpu.Node { return op.gpu }

// Again implements [ongpu.StatefulOp].
func (op copied) Again() G.Op { return copied{op.view, new(ongpu.Node)} }

func (op copied) Do(in ...G.Value) (y G.Value, err error) {
	defer op.gpu.Copied(in, &y, &err)
	return op.view.Do(in...)
}

// newCopied makes the node of a copied.
func newCopied(r window, children ...*G.Node) (*G.Node, error) {
	return apply(r, copied{view{newOperator(r)}, new(ongpu.Node)}, children...)
}

// newNode makes the node of a rule.
func newNode(r rule, children ...*G.Node) (*G.Node, error) {
	return apply(r, node{newOperator(r), new(ongpu.Node)}, children...)
}

func checkChildren(r rule, children []*G.Node) error {
	args := r.arguments()
	shapes := make([]tensor.Shape, len(children))
	for i, n := range children {
		switch {
		case n == nil:
			return errorf(r.title(), errs.ErrGraph, "%s is nil", args[i].name)
		case n.Graph() != children[0].Graph():
			return errorf(r.title(), errs.ErrGraph, "%s and %s are in different graphs", args[i].name, args[0].name)
		case n.Dtype() != args[i].dtype:
			return errorf(r.title(), errs.ErrDType, "%s is of %v, want %v%s", called(args[i].name, n), n.Dtype(), args[i].dtype, toConvert(n.Dtype(), args[i].dtype))
		}
		shapes[i] = n.Shape()
	}
	_, err := checkShapes(r, shapes)
	return err
}

// checkFloats checks that a node is a float32 or float64 tensor.
func checkFloats(name, what string, x *G.Node) error {
	switch {
	case x == nil:
		return errorf(name, errs.ErrGraph, "%s is nil", what)
	case x.Dtype() != tensor.Float32 && x.Dtype() != tensor.Float64:
		return errorf(name, errs.ErrDType, "%s is of %v, want float32 or float64%s", called(what, x), x.Dtype(), toConvert(x.Dtype(), tensor.Float32))
	case len(x.Shape()) == 0:
		return errorf(name, errs.ErrShape, "%s is a scalar, want rank 1 or more", what)
	}
	return nil
}

// data marks an argument as data.
func data(a argument) argument { a.data = true; return a }

// alike returns arguments of one rank and type.
func alike(rank int, dtype tensor.Dtype, names ...string) []argument {
	args := make([]argument, len(names))
	for i, n := range names {
		args[i] = argument{name: n, rank: rank, dtype: dtype}
	}
	return args
}

func sameShape(title string, args []argument, in []tensor.Shape) error {
	for i, s := range in[1:] {
		if !slices.Equal(s, in[0]) {
			return errorf(title, errs.ErrShape, "%s has shape %v, want that of %s, %v", args[i+1].name, s, args[0].name, in[0])
		}
	}
	return nil
}

var (
	_ G.SDOp = node{}
	_ G.ADOp = node{}
	_ G.SDOp = view{}
	_ G.ADOp = view{}
)
