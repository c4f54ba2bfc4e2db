package nn

import (
	"fmt"
	"slices"
	"unsafe"

	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"

	"gorgonia.org/leanattention/internal/weight"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Embedding gathers rows of a table or of any other matrix:
//
//	y[i] = table[ids[i]] + residual[i]
//
// Without a residual, the rows are those of the table.
//
//   - Shapes: table (vocabulary, width), ids (n), y and residual (n, width). residual may be nil.
//   - Types: table float32, leanattention.Float16 or leanattention.BFloat16, or of [Rounded] or [Quantised] (on a GPU see [Linear]), with residual and y
//     float32; or all float64, on the CPU alone. ids int or int32; int32 on a GPU. Gathering is exact.
//   - ids are in [0, vocabulary). On the CPU, another id is ErrLength when the graph runs, before anything is written. On a GPU,
//     another id makes a row of NaN, since the host does not read ids there.
//   - A computed table may have fewer rows in a run than in the graph (leanattention.Step.Rows). Rows that were not computed are 0.
//   - One table may also be the w of a [Linear]. Each run copies a table that is not in row-major order.
//   - On a GPU: all inputs are a [device.Tensor].
//   - Gradients: of table and residual, in host memory on both of Gorgonia's machines, on a GPU on the tape machine. The table's has the
//     table's shape, and rows of one id are added in their order. With a table of 16 bits or fewer, a gradient is ErrUnsupported. No
//     second derivative.
//   - Errors: ErrShape, ErrDType, ErrGraph (nil table or ids, other graphs).
func Embedding(table, ids, residual *G.Node) (y *G.Node, err error) {
	const name = "Embedding"
	defer errs.RecoverTo(prefix+name, &err)
	if table == nil || ids == nil {
		return nil, errorf(name, errs.ErrGraph, "table or ids is nil")
	}
	of, ok := operand.WeightFormat(table.Dtype())
	switch {
	case !ok:
		return nil, errorf(name, errs.ErrDType, "%s is of %v, want %s", called("table", table), table.Dtype(), weight.Names(weight.Format.Known))
	case ids.Dtype() != tensor.Int && ids.Dtype() != tensor.Int32:
		return nil, errorf(name, errs.ErrDType, "%s is of %v, want int or int32", called("ids", ids), ids.Dtype())
	}
	op, in := embedding{table: of, ids: ids.Dtype()}, gathered[*G.Node]{table: table, ids: ids}
	if s := table.Shape(); len(s) == 2 {
		op.rows = s[0]
	}
	if residual != nil {
		op.residual, in.residual = true, &residual
	}
	return newNode(op, in.list()...)
}

// gathered has the operands of an [Embedding] by name. T is what stands for an operand.
type gathered[T any] struct {
	table, ids T
	residual   *T // nil: no residual
}

// list returns the operands in the order of the op's inputs.
func (o *gathered[T]) list() []T {
	list := []T{o.table, o.ids}
	if o.residual != nil {
		list = append(list, *o.residual)
	}
	return list
}

// operandsOf names the operands in a list of the op's inputs.
func operandsOf[T any](op embedding, list []T) gathered[T] {
	o := gathered[T]{table: list[0], ids: list[1]}
	if op.residual {
		o.residual = &list[2]
	}
	return o
}

// embedding is the rule of Embedding. Its inputs are the operands of gathered.
type embedding struct {
	table    weight.Format
	ids      tensor.Dtype
	residual bool
	rows     int // rows of the table in the graph
}

func (op embedding) title() string { return "Embedding" }

// sum returns the type of residual and output.
func (op embedding) sum() tensor.Dtype { return operand.SumType(op.table) }

func (op embedding) arguments() []argument {
	in := gathered[argument]{
		table: argument{name: "table", rank: 2, dtype: operand.WeightType(op.table), weights: true, packed: true},
		ids:   argument{name: "ids", rank: 1, dtype: op.ids, data: true},
	}
	if op.residual {
		in.residual = &argument{name: "residual", rank: 2, dtype: op.sum()}
	}
	return append(in.list(), argument{name: "y", rank: 2, dtype: op.sum()})
}

func (op embedding) shape(list []tensor.Shape) (tensor.Shape, error) {
	in := operandsOf(op, list)
	out := tensor.Shape{in.ids[0], in.table[1]}
	if in.residual != nil && !slices.Equal(*in.residual, out) {
		return nil, errorf(op.title(), errs.ErrShape, "residual has shape %v, want %v for table of shape %v and ids of shape %v", *in.residual, out, in.table, in.ids)
	}
	return out, nil
}

func (op embedding) String() string {
	return fmt.Sprintf("Embedding{table %v of %d rows, ids %v, residual %v}", op.table, op.rows, op.ids, op.residual)
}

func (op embedding) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	if op.table == weight.Float64 {
		return gather(op, in, shape, func(dst []float64, m *weight.Matrix, from int) {
			copy(dst, unsafe.Slice((*float64)(m.At(from)), len(dst)))
		})
	}
	return gather(op, in, shape, func(dst []float32, m *weight.Matrix, from int) {
		inOrder := scratch[float32](len(dst))
		defer giveBack(inOrder)
		m.Row(dst, from/len(dst), *inOrder)
	})
}

// readIDs returns the ids as ints. Each is below n, the rows of the table in this run, or below the rows of the table in the graph.
func (op embedding) readIDs(v G.Value, n int) ([]int, error) {
	ids, err := integers(op.title(), "ids", op.ids, v)
	n = max(n, op.rows)
	for i, id := range ids {
		if id < 0 || id >= n {
			return nil, errorf(op.title(), errs.ErrLength, "ids[%d] is %d, outside [0, %d)", i, id, n)
		}
	}
	return ids, err
}

// gather computes the output. widen converts elements of the table, from an element on. A row that the table lacks in this run is 0.
func gather[F float](op embedding, list []G.Value, shape tensor.Shape, widen func(dst []F, table *weight.Matrix, from int)) (G.Value, error) {
	in := operandsOf(op, list)
	rows, n := in.table.Shape()[0], shape[1]
	ids, err := op.readIDs(in.ids, rows)
	if err != nil {
		return nil, err
	}
	table, err := weights(op.title(), "table", in.table)
	if err != nil {
		return nil, err
	}
	var residual []F
	if in.residual != nil {
		if residual, err = elements[F](op.title(), "residual", *in.residual, shape); err != nil {
			return nil, err
		}
	}
	t, y := output[F](shape)
	eachRow(len(ids), n, func(row int) {
		to, id := y[row*n:(row+1)*n], ids[row]
		if id < rows {
			widen(to, &table, id*n)
		} else {
			clear(to)
		}
		if residual != nil {
			for i, r := range residual[row*n : (row+1)*n] {
				to[i] += r
			}
		}
	})
	return t, nil
}

func (op embedding) graphGradients(in []*G.Node, dy *G.Node) ([]*G.Node, error) {
	return embeddingGradients(inGraph, op, in, dy)
}

func (op embedding) valueGradients(in []G.Value, dy G.Value) ([]G.Value, error) {
	return embeddingGradients(atOnce, op, in, dy)
}

func embeddingGradients[T any](do step[T], op embedding, in []T, dy T) ([]T, error) {
	if operand.WeightType(op.table) != op.sum() {
		return nil, errorf(op.title(), errs.ErrUnsupported, "gradient with a table of %v, want float32 or float64", op.table)
	}
	return gradients(do, op, in, dy)
}

// gradient of the table adds each row of dy to the table's row that it came from. The gradient of the residual is dy.
func (op embedding) gradient(i int, in []G.Value, dy G.Value) (G.Value, error) {
	if op.table == weight.Float64 {
		return embeddingGrad[float64](op, i, in, dy)
	}
	return embeddingGrad[float32](op, i, in, dy)
}

func embeddingGrad[F float](op embedding, i int, list []G.Value, grad G.Value) (G.Value, error) {
	dy, err := elements[F](op.title(), "the output's gradient", grad, grad.Shape())
	if err != nil {
		return nil, err
	}
	if i > 0 { // the residual: ids have no gradient
		t, d := output[F](list[i].Shape())
		copy(d, dy)
		return t, nil
	}
	in := operandsOf(op, list)
	rows, n := in.table.Shape()[0], grad.Shape()[1]
	t, d := zeros[F](in.table.Shape())
	ids, err := op.readIDs(in.ids, rows)
	if err != nil {
		return nil, err
	}
	for row, id := range ids {
		if id >= rows {
			continue
		}
		to := d[id*n : (id+1)*n]
		for i, v := range dy[row*n : (row+1)*n] {
			to[i] += v
		}
	}
	return t, nil
}

func (op embedding) launchGradient(i int, w *ongpu.Work, list []tensor.Shape) error {
	last := len(list) - 1
	dy := w.In[last].Memory
	if i > 0 { // the residual
		return w.Elements(&layers.Elements{N: list[last].TotalSize(), X: dy, Y: w.Out})
	}
	in, shape := operandsOf(op, w.In), operandsOf(op, list)
	return w.TableGradient(&layers.TableGradient{Rows: shape.ids[0], N: shape.table[1], TableRows: shape.table[0], IDs: in.ids.Memory, DY: dy, DTable: w.Out})
}

var (
	_ rule     = embedding{}
	_ launched = embedding{}
	_ composed = embedding{}
	_ trained  = embedding{}
)
