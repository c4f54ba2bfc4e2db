package externalop

import (
	"errors"
	"fmt"
	"hash"
	"hash/fnv"
	"math"
	"slices"
	"testing"

	"github.com/chewxy/hm"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Scale adds y = factor * x to the graph, for a float64 tensor x of any rank but
// 0. It is the smallest operator that does all that the page asks for.
func Scale(x *G.Node, factor float64) (y *G.Node, err error) {
	defer recoverTo(&err) // ApplyOp panics on some mistakes
	if x == nil {
		return nil, errors.New("scale: x is nil")
	}
	if x.Dims() == 0 || x.Dtype() != tensor.Float64 { // nobody else checks the rank
		return nil, fmt.Errorf("scale: x is %v of shape %v, want a float64 tensor", x.Dtype(), x.Shape())
	}
	return G.ApplyOp(&scaleOp{factor: factor, shape: x.Shape().Clone()}, x)
}

type scaleOp struct {
	factor float64
	shape  tensor.Shape
}

// What the graph asks.

func (op *scaleOp) Arity() int { return 1 }

func (op *scaleOp) Type() hm.Type { // a new one at each call, and no variable b
	t := G.TensorType{Dims: len(op.shape), Of: hm.TypeVariable('a')}
	return hm.NewFnType(t, t)
}

func (op *scaleOp) InferShape(in ...G.DimSizer) (tensor.Shape, error) {
	shapes, err := G.DimSizersToShapes(in)
	if err != nil {
		return nil, err
	}
	if len(shapes) != 1 || !slices.Equal(shapes[0], op.shape) {
		return nil, fmt.Errorf("scale: inputs of shapes %v, want %v", shapes, op.shape)
	}
	return op.shape.Clone(), nil
}

// What tells nodes apart: every parameter, to the last bit.

func (op *scaleOp) WriteHash(h hash.Hash) {
	fmt.Fprintf(h, "externalop.Scale %x %v", math.Float64bits(op.factor), op.shape)
}

func (op *scaleOp) Hashcode() uint32 {
	h := fnv.New32a()
	op.WriteHash(h)
	return h.Sum32()
}

func (op *scaleOp) String() string { return fmt.Sprintf("Scale{%v}", op.factor) }

// What the machines ask: a new value at each run, in Go memory, no input changed.

func (op *scaleOp) ReturnsPtr() bool     { return false }
func (op *scaleOp) CallsExtern() bool    { return false }
func (op *scaleOp) OverwritesInput() int { return -1 }

func (op *scaleOp) Do(in ...G.Value) (y G.Value, err error) {
	defer recoverTo(&err) // a panic here would end the process
	if len(in) != 1 {
		return nil, fmt.Errorf("scale: %d inputs, want 1", len(in))
	}
	x, ok := in[0].(*tensor.Dense)
	if !ok || !x.IsNativelyAccessible() {
		return nil, fmt.Errorf("scale: x is a %T, want a *tensor.Dense", in[0])
	}
	if x.Dtype() != tensor.Float64 || !slices.Equal(x.Shape(), op.shape) { // nobody else checks
		return nil, fmt.Errorf("scale: x is %v of shape %v, want float64 of %v", x.Dtype(), x.Shape(), op.shape)
	}
	if x.RequiresIterator() || x.DataOrder().IsColMajor() { // a view: its elements in their order
		x = x.Materialize().(*tensor.Dense)
		if x.DataOrder().IsColMajor() {
			return nil, errors.New("scale: x is column-major")
		}
	}
	to := make([]float64, x.Size())
	for i, v := range x.Float64s() {
		to[i] = op.factor * v
	}
	return tensor.New(tensor.WithShape(op.shape.Clone()...), tensor.WithBacking(to)), nil
}

// What Grad asks, for the tape machine.

func (op *scaleOp) DiffWRT(inputs int) []bool { return slices.Repeat([]bool{true}, inputs) }

func (op *scaleOp) SymDiff(in G.Nodes, y, grad *G.Node) (G.Nodes, error) {
	dx, err := Scale(grad, op.factor)
	if err != nil {
		return nil, err
	}
	return G.Nodes{dx}, nil
}

// DoDiff is what the lisp machine asks: add to the gradient of the input.
func (op *scaleOp) DoDiff(_ G.ExecutionContext, in G.Nodes, y *G.Node) (err error) {
	defer recoverTo(&err)
	dy, err := y.Grad()
	if err != nil {
		return err
	}
	dx, err := in[0].Grad()
	if err != nil {
		return err
	}
	add, err := op.Do(dy)
	if err != nil {
		return err
	}
	_, err = tensor.Add(dx, add, tensor.UseUnsafe())
	return err
}

func recoverTo(err *error) {
	if r := recover(); r != nil {
		*err = fmt.Errorf("scale: %v", r)
	}
}

var (
	_ G.SDOp = (*scaleOp)(nil)
	_ G.ADOp = (*scaleOp)(nil)
)

func ExampleScale() {
	g := G.NewGraph()
	x := G.NodeFromAny(g, vector(1, 2, 3), G.WithName("x"))
	y := G.Must(Scale(x, 10))
	dx, err := G.Grad(G.Must(G.Sum(G.Must(G.Square(y)))), x)
	if err != nil {
		fmt.Println(err)
		return
	}

	var value, gradient G.Value
	G.Read(y, &value)
	G.Read(dx[0], &gradient)
	m := G.NewTapeMachine(g)
	defer m.Close()
	for range 2 {
		if err := m.RunAll(); err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println(value.Data(), gradient.Data())
		m.Reset()
	}
	// Output:
	// [10 20 30] [200 400 600]
	// [10 20 30] [200 400 600]
}

// TestScale: the operator on both machines, on a view, and what it refuses.
func TestScale(t *testing.T) {
	g := G.NewGraph()
	x := input(g, "x", 1, 2, 3)
	G.Must(G.Sum(G.Must(Scale(x, 2))))
	m := G.NewLispMachine(g)
	defer m.Close()
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
	if dx, err := x.Grad(); err != nil || !slices.Equal(dx.Data().([]float64), []float64{2, 2, 2}) {
		t.Errorf("on the lisp machine the gradient is %v, %v", dx, err)
	}

	wide := tensor.New(tensor.WithShape(2, 3), tensor.WithBacking([]float64{1, 2, 3, 4, 5, 6}))
	if err := wide.T(); err != nil {
		t.Fatal(err)
	}
	op := &scaleOp{factor: 1, shape: tensor.Shape{3, 2}}
	if y, err := op.Do(wide); err != nil || !slices.Equal(y.Data().([]float64), []float64{1, 4, 2, 5, 3, 6}) {
		t.Errorf("of a transposed tensor: %v, %v", y, err)
	}

	for name, in := range map[string][]G.Value{
		"nothing": {}, "nil": {nil}, "a scalar": {G.NewF64(1)}, "two": {wide, wide},
		"another shape": {vector(1)}, "float32": {tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(3, 2))},
	} {
		if y, err := op.Do(in...); err == nil || y != nil {
			t.Errorf("Do of %s: %v, %v", name, y, err)
		}
	}
	for name, n := range map[string]*G.Node{
		"nil": nil, "a scalar": G.NewScalar(g, tensor.Float64, G.WithName("s")), "no graph": G.NewConstant(wide),
		"float32": G.NewVector(g, tensor.Float32, G.WithShape(2), G.WithName("f")),
	} {
		if y, err := Scale(n, 1); err == nil || y != nil {
			t.Errorf("Scale of %s: %v, %v", name, y, err)
		}
	}
}
