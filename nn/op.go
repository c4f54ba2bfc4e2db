package nn

import (
	"fmt"
	"hash"
	"slices"

	"gorgonia.org/leanattention/internal/errs"

	"github.com/chewxy/hm"
	"gorgonia.org/leanattention/internal/gpu/decoder"
	"gorgonia.org/leanattention/internal/graph"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"
	"gorgonia.org/leanattention/internal/weight"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// A rule is what an op of this package is made of: what it takes, and what it makes of it.
// A [node] or a [view] is the op, and says to Gorgonia what all of them say.
type rule interface {
	signature

	// compute is the result in host memory.
	compute(in []G.Value, shape tensor.Shape) (G.Value, error)
}

// A signature is what a rule takes and makes.
type signature interface {
	fmt.Stringer   // with every parameter: its text is the op's hash
	title() string // in errors

	// arguments are the inputs, and behind them the result.
	arguments() []argument

	// shape checks the shapes of the inputs, whose ranks are right, and is the result's.
	shape(in []tensor.Shape) (tensor.Shape, error)
}

// A derivable op has gradients of the inputs that are not `data`.
type derivable interface {
	signature

	// gradient is that of input i: its product with the gradient dy of the result.
	gradient(i int, in []G.Value, dy G.Value) (G.Value, error)
}

// argument is an input of an op, or its result.
type argument struct {
	name    string
	rank    int
	dtype   tensor.Dtype
	data    bool // it has no gradient, as indices have none
	weights bool // its type stands for a format of weights, and its value may be an [operand.Weight]
}

// checkGPU is an error if a kernel cannot read or write such an argument.
func (a *argument) checkGPU(title string) error {
	if a.weights {
		has := func(f weight.Format) bool { return f.Kernels() != "" }
		if f, ok := operand.WeightFormat(a.dtype); ok && has(f) {
			return nil
		}
		return errorf(title, errs.ErrUnsupported, "%s of %v on a GPU, want %s: convert %s, or run the node in host memory", a.name, a.dtype, weight.Names(has), a.name)
	}
	want := tensor.Float32
	if a.data {
		want = tensor.Int32
	}
	if a.dtype != want {
		return errorf(title, errs.ErrUnsupported, "%s of %v on a GPU, want %v", a.name, a.dtype, want)
	}
	return nil
}

// A composed op has gradients that are made by other ops: a rule in a graph, and at once.
type composed interface {
	graphGradients(in []*G.Node, dy *G.Node) ([]*G.Node, error)
	valueGradients(in []G.Value, dy G.Value) ([]G.Value, error)
}

// operator is what a node and a view have in common.
type operator struct {
	graph.Plain
	rule
	args *[]argument // of the rule; nil: not known yet
}

// newOperator keeps the rule's arguments: a run should not make them again.
func newOperator(r rule) operator {
	args := r.arguments()
	return operator{rule: r, args: &args}
}

func (op operator) arguments() []argument {
	if op.args == nil {
		return op.rule.arguments()
	}
	return *op.args
}

func (op operator) Arity() int { return len(op.arguments()) - 1 }

// OperandName makes it a [graph.Named].
func (op operator) OperandName(i int) string { return op.arguments()[i].name }

// Type makes a new type at each call: Gorgonia takes the one it is given apart.
func (op operator) Type() hm.Type { return typeOf(op.arguments()...) }

func typeOf(args ...argument) hm.Type {
	ts := make([]hm.Type, len(args))
	for i, a := range args {
		ts[i] = G.TensorType{Dims: a.rank, Of: a.dtype}
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

// checkShapes is shape of inputs of any number and rank.
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

// checkValues checks what a run gives an op, and is the result's shape.
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

// Do returns a new value at each call: what Gorgonia's in-place nodes do to it afterwards can
// harm nobody.
func (op operator) Do(in ...G.Value) (y G.Value, err error) {
	defer errs.RecoverTo(prefix+op.title(), &err)
	shape, err := checkValues(op, in)
	if err != nil {
		return nil, err
	}
	if anyOnGPU(in) {
		return nil, errorf(op.title(), errs.ErrUnsupported, "%s on a GPU", op.arguments()[0].name)
	}
	return op.compute(in, shape)
}

// DiffWRT says which inputs have gradients.
func (op operator) DiffWRT(int) []bool { return diffWRT(op.arguments()) }

func diffWRT(args []argument) []bool {
	wrt := make([]bool, len(args)-1)
	for i := range wrt {
		wrt[i] = !args[i].data
	}
	return wrt
}

// SymDiff adds the nodes of the gradients (tape machine).
func (op operator) SymDiff(in G.Nodes, _, dy *G.Node) (grads G.Nodes, err error) {
	defer errs.RecoverTo(prefix+op.title(), &err)
	if c, ok := op.rule.(composed); ok {
		return c.graphGradients(in, dy)
	}
	return gradients(inGraph, op.rule, in, dy)
}

// DoDiff adds the gradients to those of the inputs (lisp machine).
func (op operator) DoDiff(_ G.ExecutionContext, in G.Nodes, y *G.Node) (err error) {
	defer errs.RecoverTo(prefix+op.title(), &err)
	return addGradients(op.title(), in, y, func(in []G.Value, dy G.Value) ([]G.Value, error) {
		if c, ok := op.rule.(composed); ok {
			return c.valueGradients(in, dy)
		}
		return gradients(atOnce, op.rule, in, dy)
	})
}

// node is an op that computes where its inputs are.
type node struct {
	operator
	gpu *ongpu.Node
}

// A launched rule can compute on a GPU.
type launched interface {
	// launch queues it. Inputs and result are of float32, int32 where they are data, and weights of formats that have kernels.
	launch(w *ongpu.Work, in []tensor.Shape, shape tensor.Shape) error
}

// A placed rule says besides how several GPUs compute, or how much memory the work needs.
type placed interface {
	place(c *ongpu.Call, in []tensor.Shape, shape tensor.Shape)
}

// A scratching rule needs memory on a GPU besides: so many elements of float32.
type scratching interface {
	scratch(shape tensor.Shape) int
}

// OnGPU makes it an [ongpu.Op].
func (op node) OnGPU() *ongpu.Node { return op.gpu }

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
	shapes := shapesOf(in)
	call := ongpu.Call{
		Op: "nn." + op.title(), Node: op.gpu, Names: namesOf(len(in), func(i int) string { return args[i].name }),
		In: tensorsOf(in), DType: args[len(args)-1].dtype, Shape: shape,
		Queue: func(w *ongpu.Work) error { return r.launch(w, shapes, shape) },
	}
	if s, ok := op.rule.(scratching); ok {
		call.Scratch = func(*decoder.Engine) (int, error) { return s.scratch(shape), nil }
	}
	if p, ok := op.rule.(placed); ok {
		p.place(&call, shapes, shape)
	}
	return ongpu.Compute(&call)
}

// view is an op whose value is some of the elements of its input, one behind the other: on a GPU in
// the same memory.
type view struct{ operator }

// A window is the rule of a view.
type window interface {
	rule
	from(in tensor.Shape) int // the first of the elements
}

// IsPart makes it an [ongpu.PartOp].
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
func newView(r window, x *G.Node) (*G.Node, error) {
	if err := checkChildren(r, []*G.Node{x}); err != nil {
		return nil, err
	}
	return ongpu.Apply(prefix+r.title(), view{newOperator(r)}, x)
}

// newNode makes the node of a rule, whose arguments are as the first child is; the children
// are checked.
func newNode(r rule, children ...*G.Node) (*G.Node, error) {
	op := node{newOperator(r), new(ongpu.Node)}
	if err := checkChildren(r, children); err != nil {
		return nil, err
	}
	return ongpu.Apply(prefix+r.title(), op, children...)
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

// checkFloats checks what most ops want of their first input.
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

// data says that an argument has no gradient.
func data(a argument) argument { a.data = true; return a }

// alike are arguments of one rank and type.
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
			return errorf(title, errs.ErrShape, "%s has shape %v, %s %v", args[i+1].name, s, args[0].name, in[0])
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
