package nn

import (
	"fmt"
	"hash"
	"slices"

	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/graph"
	"gorgonia.org/leanattention/internal/ongpu"

	"github.com/chewxy/hm"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// A step applies an op: inGraph makes a node, for SymDiff and the tape machine, and atOnce computes a value, for DoDiff and the lisp
// machine. So both machines have the same formulas.
type step[T any] func(op G.Op, in ...T) (T, error)

func inGraph(op G.Op, in ...*G.Node) (*G.Node, error) {
	return ongpu.Apply(prefix+"gradient", op, in...)
}

func atOnce(op G.Op, in ...G.Value) (G.Value, error) { return op.Do(in...) }

// gradients returns the gradients of an op's inputs, nil for data.
func gradients[T any](do step[T], s signature, in []T, dy T) ([]T, error) {
	d, ok := s.(derivable)
	if !ok {
		return nil, errorf(s.title(), errs.ErrUnsupported, "gradient")
	}
	args := d.arguments()
	if len(in) != len(args)-1 {
		return nil, errorf(d.title(), errs.ErrGraph, "%d inputs, want %d", len(in), len(args)-1)
	}
	if n, ok := s.(normRule); ok && n.hasGamma() {
		return normGradients(do, n, in, dy)
	}
	grads := make([]T, len(in))
	for i := range in {
		if args[i].data {
			continue
		}
		g, err := do(newGradient(d, i), append(slices.Clone(in), dy)...)
		if err != nil {
			return nil, err
		}
		grads[i] = g
	}
	return grads, nil
}

// addGradients implements DoDiff: it computes gradients from the values of the inputs, and adds them to those of the nodes.
func addGradients(title string, in G.Nodes, y *G.Node, of func(in []G.Value, dy G.Value) ([]G.Value, error)) error {
	if err := ongpu.Stay(append(slices.Clone(in), y)...); err != nil {
		return errorf(title, errs.ErrGraph, "%v", err)
	}
	values := make([]G.Value, len(in))
	for i, n := range in {
		values[i] = n.Value()
	}
	if anyOnGPU(values) {
		return errorf(title+" gradient", errs.ErrUnsupported, "an input is on a GPU, and the lisp machine adds gradients in host memory: use a tape machine")
	}
	dy, err := y.Grad()
	if err != nil {
		return errorf(title, errs.ErrGraph, "%v", err)
	}
	grads, err := of(values, dy)
	if err != nil {
		return err
	}
	for i, d := range grads {
		if d == nil {
			continue
		}
		sum, err := in[i].Grad()
		if err != nil {
			return errorf(title, errs.ErrGraph, "%v", err)
		}
		if _, err = tensor.Add(sum, d, tensor.UseUnsafe()); err != nil {
			return errorf(title, errs.ErrGraph, "%v", err)
		}
	}
	return nil
}

// gradient is the op of the gradient of one input, since an op of Gorgonia has one result. Its inputs are those of the op, and the
// gradient of the op's result. A gradient is computed where its inputs are.
type gradient struct {
	graph.Plain
	d   derivable
	of  int
	gpu *ongpu.Node
}

func newGradient(d derivable, of int) gradient { return gradient{d: d, of: of, gpu: new(ongpu.Node)} }

// OnGPU implements [ongpu.Op].
func (op gradient) OnGPU() *ongpu.Node { return op.gpu }

// A trained op has gradients on a GPU, too.
type trained interface {
	derivable

	// launchGradient queues the gradient of input i. The work's inputs are the op's inputs, and then the gradient dy of the result.
	launchGradient(i int, w *ongpu.Work, in []tensor.Shape) error
}

// A scratchTrained op needs scratch memory for a gradient on a GPU, in float32 elements.
type scratchTrained interface {
	gradientScratch(d *layers.Engine, i int, in []tensor.Shape) (int, error)
}

func (op gradient) Arity() int { return len(op.d.arguments()) }

// OperandName makes it a [graph.Named].
func (op gradient) OperandName(i int) string {
	if args := op.d.arguments(); i < len(args)-1 {
		return args[i].name
	}
	return "the output's gradient"
}

func (op gradient) Type() hm.Type {
	args := op.d.arguments()
	return typeOf(append(args, args[op.of])...)
}

func (op gradient) shape(in []tensor.Shape) (tensor.Shape, error) {
	args := op.d.arguments()
	if len(in) != len(args) {
		return nil, errorf(op.d.title(), errs.ErrShape, "gradient: %d inputs, want %d", len(in), len(args))
	}
	last := len(in) - 1
	y, err := checkShapes(op.d, in[:last])
	if err != nil {
		return nil, err
	}
	if !slices.Equal(y, in[last]) {
		return nil, errorf(op.d.title(), errs.ErrShape, "the output's gradient has shape %v, want %v", in[last], y)
	}
	return in[op.of].Clone(), nil
}

func (op gradient) InferShape(in ...G.DimSizer) (tensor.Shape, error) {
	shapes, err := G.DimSizersToShapes(in)
	if err != nil {
		return nil, err
	}
	return op.shape(shapes)
}

func (op gradient) String() string {
	return fmt.Sprintf("d%s of %v", op.d.arguments()[op.of].name, op.d)
}
func (op gradient) WriteHash(h hash.Hash) { fmt.Fprint(h, "leanattention.nn.", op.String()) }
func (op gradient) Hashcode() uint32      { return graph.Hashcode(op) }

func (op gradient) Do(in ...G.Value) (dx G.Value, err error) {
	title := op.d.title() + " gradient"
	defer errs.RecoverTo(prefix+title, &err)
	defer op.gpu.Done(in, &dx, &err)
	args := op.d.arguments()
	if len(in) != len(args) {
		return nil, errorf(title, errs.ErrGraph, "%d inputs, want %d", len(in), len(args))
	}
	for i, v := range in {
		if d := v.Dtype(); d != args[i].dtype {
			return nil, errorf(title, errs.ErrDType, "%s is of %v when run, want %v", args[i].name, d, args[i].dtype)
		}
	}
	shape, err := op.shape(shapesOf(in))
	if err != nil {
		return nil, err
	}
	if anyOnGPU(in) {
		return op.onGPU(title, in, shape)
	}
	last := len(in) - 1
	return op.d.gradient(op.of, in[:last], in[last])
}

func (op gradient) onGPU(title string, in []G.Value, shape tensor.Shape) (G.Value, error) {
	t, ok := op.d.(trained)
	if !ok {
		return nil, errorf(title, errs.ErrUnsupported, "an input is on a GPU, want host memory")
	}
	args := op.d.arguments()
	for i := range args {
		if err := args[i].checkGPU(title); err != nil {
			return nil, err
		}
	}
	shapes := shapesOf(in)
	call := ongpu.Call{
		Op: "nn." + title, Node: op.gpu, Names: namesOf(len(in), op.OperandName), In: tensorsOf(in), DType: args[op.of].dtype, Shape: shape,
		Queue: func(w *ongpu.Work) error { return t.launchGradient(op.of, w, shapes) },
	}
	if s, ok := op.d.(scratchTrained); ok {
		call.Scratch = func(d *layers.Engine) (int, error) { return s.gradientScratch(d, op.of, shapes) }
	}
	return ongpu.Compute(&call)
}

// amongZeros returns a tensor of zeros, with the elements of a value from one element on.
func amongZeros[F float](title string, shape tensor.Shape, from int, v G.Value) (G.Value, error) {
	x, err := elements[F](title, "the output's gradient", v, v.Shape())
	if err != nil {
		return nil, err
	}
	t, y := zeros[F](shape)
	copy(y[from:], x)
	return t, nil
}

// DiffWRT, SymDiff and DoDiff refuse second derivatives. Without these methods, Gorgonia panics or takes the derivative for zero.
func (op gradient) DiffWRT(inputs int) []bool { return slices.Repeat([]bool{true}, inputs) }

func (op gradient) SymDiff(G.Nodes, *G.Node, *G.Node) (G.Nodes, error) {
	return nil, errorf(op.d.title(), errs.ErrUnsupported, "second derivative")
}

func (op gradient) DoDiff(G.ExecutionContext, G.Nodes, *G.Node) error {
	return errorf(op.d.title(), errs.ErrUnsupported, "second derivative")
}

var (
	_ G.SDOp = gradient{}
	_ G.ADOp = gradient{}
)
