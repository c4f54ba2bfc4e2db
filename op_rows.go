package leanattention

import (
	"fmt"
	"hash"
	"reflect"

	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/graph"

	"github.com/chewxy/hm"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Rows is the rows of x that [Step.Set] gives to sequences, in a run: the first ones. x has a
// row for each of the step's rows, as inputs of token ids and positions have; it is a vector
// or a matrix, in host memory or a [DeviceTensor]. Nodes behind it compute no other rows, so
// a graph for long prompts costs a short one no more than that is long:
//
//	ids, err = step.Rows(ids)
//	h, err := nn.Embedding(table, ids, nil)
//	...
//
// The nodes of this module take values of fewer rows than the graph was built for;
// Gorgonia's own do not, and gorgonia.Read copies into the value of the run before: set
// its variable to nil, or ask the node for its Value. Where Set gave no rows, it is one. The value is in the memory of x.
// A [Recording] has the rows that it was made with: fewer than all are [ErrUnsupported] there.
//
// Errors: [ErrGraph], [ErrShape]; in a run [ErrState] for a step that is not set.
func (s *Step) Rows(x *G.Node) (y *G.Node, err error) {
	const op = "Step.Rows"
	defer recoverTo(op, &err)
	if err := s.made("Rows"); err != nil {
		return nil, err
	}
	if x == nil {
		return nil, errorf(op, ErrGraph, "x is nil")
	}
	o := &rowsOp{step: s, dims: len(x.Shape()), call: s.nextCall()}
	if _, err := o.InferShape(x.Shape()); err != nil {
		return nil, err
	}
	return apply(op, o, x)
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
		return nil, errorf(name, ErrShape, "%v", err)
	}
	if len(shapes) != 1 {
		return nil, errorf(name, ErrShape, "%d inputs; it has 1", len(shapes))
	}
	s := shapes[0]
	if len(s) < 1 || len(s) > 2 || s[0] != op.step.tokens || len(s) == 2 && s[1] < 1 {
		return nil, errorf(name, ErrShape, "x has shape %v; it must be a vector or a matrix with a row for each of the step's %d", s, op.step.tokens)
	}
	return s.Clone(), nil
}

func (op *rowsOp) Do(in ...G.Value) (y G.Value, err error) {
	const name = "Step.Rows"
	defer recoverTo(name, &err)
	if len(in) != 1 {
		return nil, errorf(name, ErrShape, "%d inputs; it has 1", len(in))
	}
	shape, err := op.InferShape(in[0].Shape())
	if err != nil {
		return nil, err
	}
	rows, err := op.step.setRows(name)
	if err != nil {
		return nil, err
	}
	if d, ok := in[0].(*DeviceTensor); ok {
		if rows < shape[0] && d.gpu.group.Recording() {
			return nil, errorf(name, ErrUnsupported, "%d of %d rows in a recording", rows, shape[0])
		}
		return d.Rows(0, rows)
	}
	t, err := denseValue(name, "x", in[0])
	if err != nil {
		return nil, err
	}
	if rows == shape[0] {
		return t, nil
	}
	if !dense.RowMajor(t) {
		return nil, errorf(name, ErrUnsupported, "x is not in row-major order")
	}
	shape[0] = rows
	elements := reflect.ValueOf(t.Data()).Slice3(0, shape.TotalSize(), shape.TotalSize()).Interface()
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(elements)), nil
}

// setRows is how many rows a run has: those that Set gave to sequences, and one at least.
func (s *Step) setRows(op string) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.open {
		return 0, errorf(op, ErrState, "step is not open: call Set first")
	}
	return max(1, s.used()), nil
}

func (op *rowsOp) WriteHash(h hash.Hash) {
	fmt.Fprintf(h, "leanattention.Rows cache %d step %d call %d", op.step.cache.id, op.step.id, op.call)
}
func (op *rowsOp) Hashcode() uint32 { return graph.Hashcode(op) }
func (op *rowsOp) String() string   { return "LeanRows" }
