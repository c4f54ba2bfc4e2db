package nn

import (
	"fmt"
	"hash"
	"slices"

	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/operand"

	"github.com/chewxy/hm"
	"gorgonia.org/leanattention/internal/graph"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Embedding gathers rows of a table, such as those of a sequence's tokens or of
// their positions, or of any matrix, such as the last row of each text, which alone needs logits:
//
//	y[i] = table[ids[i]] + residual[i]
//
// with table of shape (vocabulary, width), ids a vector of n int or int32, and y and
// residual (n, width); residual may be nil for none, and serves to add the
// embedding of a token to that of its position without a node of its own.
//
// Types:
//
//   - table float32, leanattention.Float16 or leanattention.BFloat16: residual and y are float32, which holds every
//     number of the 16-bit types
//   - table float64: residual and y are float64, on the CPU alone
//
// Gathering is exact. The same table may be the w of a tied [Linear]. A table whose values are not in
// row-major order is copied at each run.
//
// Each id is in [0, vocabulary). Gorgonia has no types for that, so a wrong one
// is found when the graph runs, before anything is computed: ErrLength. A table that is computed may have fewer rows in a
// run than the graph was built for, see leanattention.Step.Rows: rows that were not computed belong to nobody, and are 0.
//
// It computes on a GPU where each of its inputs is a [device.Tensor]; ids are int32
// there, and one outside of the table makes a row of NaN, since the host does not
// see them. On a GPU a table of float64 is ErrUnsupported.
//
// Gradients of table and residual are available on both of Gorgonia's machines, in host memory;
// they can not be differentiated once more. The table's has its shape, and is zero but for the rows
// that ids name. With a table of 16 bits, asking for a gradient is ErrUnsupported.
//
// Errors: ErrShape, ErrDType, ErrGraph (nil table or ids, other graphs).
func Embedding(table, ids, residual *G.Node) (y *G.Node, err error) {
	const name = "Embedding"
	defer errs.RecoverTo(prefix+name, &err)
	if table == nil || ids == nil {
		return nil, errorf(name, errs.ErrGraph, "table or ids is nil")
	}
	op := embedding{table: table.Dtype(), ids: ids.Dtype(), residual: residual != nil, gpu: new(ongpu.Node)}
	if s := table.Shape(); len(s) == 2 {
		op.rows = s[0]
	}
	children := G.Nodes{table, ids}
	if op.residual {
		children = append(children, residual)
	}
	shapes := make([]tensor.Shape, len(children))
	for i, n := range children {
		if n.Graph() != table.Graph() {
			return nil, errorf(name, errs.ErrGraph, "%s and table are in different graphs", embeddingInputs[i])
		}
		shapes[i] = n.Shape()
	}
	switch {
	case !isWeight(op.table) && op.table != tensor.Float64:
		return nil, errorf(name, errs.ErrDType, "table is of %v, want float32, float64, Float16 or BFloat16", op.table)
	case op.ids != tensor.Int && op.ids != tensor.Int32:
		return nil, errorf(name, errs.ErrDType, "ids are of %v, want int or int32", op.ids)
	case op.residual && residual.Dtype() != op.sum():
		return nil, errorf(name, errs.ErrDType, "residual is of %v, want %v for a table of %v", residual.Dtype(), op.sum(), op.table)
	}
	if _, err := op.shape(shapes); err != nil {
		return nil, err
	}
	return ongpu.Apply(prefix+name, op, children...)
}

// isWeight reports whether t is a type of the tables and weights of layers that compute in float32.
func isWeight(t tensor.Dtype) bool {
	return t == tensor.Float32 || t == operand.Float16 || t == operand.BFloat16
}

var embeddingInputs = [...]string{"table", "ids", "residual"}

// embedding is the operator: children table, ids, then residual where present.
// It holds no state, so one value may serve any number of nodes and runs.
type embedding struct {
	graph.Plain
	table    tensor.Dtype
	ids      tensor.Dtype
	residual bool
	rows     int // of the table that the graph was built for
	gpu      *ongpu.Node
}

// sum is the type of the residual and the output.
func (op embedding) sum() tensor.Dtype {
	if op.table == tensor.Float64 {
		return tensor.Float64
	}
	return tensor.Float32
}

// shape checks the shapes of the inputs and returns the output's.
func (op embedding) shape(in []tensor.Shape) (tensor.Shape, error) {
	const name = "Embedding"
	if len(in) != op.Arity() {
		return nil, errorf(name, errs.ErrShape, "%d inputs, want %d", len(in), op.Arity())
	}
	table, ids := in[0], in[1]
	if len(table) != 2 || table[0] < 1 || table[1] < 1 {
		return nil, errorf(name, errs.ErrShape, "table has shape %v, want rank 2 and no empty axis", table)
	}
	if len(ids) != 1 || ids[0] < 1 {
		return nil, errorf(name, errs.ErrShape, "ids has shape %v, want a vector and not an empty one", ids)
	}
	out := tensor.Shape{ids[0], table[1]}
	if op.residual && !slices.Equal(in[2], out) {
		return nil, errorf(name, errs.ErrShape, "residual has shape %v, want %v for table of shape %v and ids of shape %v", in[2], out, table, ids)
	}
	return out, nil
}

// OnGPU makes it an [ongpu.Op].
func (op embedding) OnGPU() *ongpu.Node { return op.gpu }

func (op embedding) Arity() int { return 2 + count(op.residual) }

// OperandName makes it a [graph.Named].
func (op embedding) OperandName(i int) string { return embeddingInputs[i] }

// Type makes a new type at each call: Gorgonia takes the one it is given apart.
func (op embedding) Type() hm.Type {
	ts := []hm.Type{tensorOf(2, op.table), tensorOf(1, op.ids)}
	if op.residual {
		ts = append(ts, tensorOf(2, op.sum()))
	}
	return hm.NewFnType(append(ts, tensorOf(2, op.sum()))...)
}

func (op embedding) InferShape(in ...G.DimSizer) (tensor.Shape, error) {
	shapes, err := G.DimSizersToShapes(in)
	if err != nil {
		return nil, err
	}
	return op.shape(shapes)
}

func (op embedding) String() string {
	return fmt.Sprintf("Embedding{table %v, ids %v, residual %v}", op.table, op.ids, op.residual)
}
func (op embedding) WriteHash(h hash.Hash) { fmt.Fprint(h, op.String(), op.rows) }
func (op embedding) Hashcode() uint32      { return graph.Hashcode(op) }

// Do returns a new tensor at each call: what Gorgonia's in-place nodes do to it
// afterwards can harm nobody.
func (op embedding) Do(in ...G.Value) (y G.Value, err error) {
	const name = "Embedding"
	defer errs.RecoverTo(prefix+name, &err)
	defer op.gpu.Done(in, &y, &err)
	if len(in) != op.Arity() {
		return nil, errorf(name, errs.ErrGraph, "%d inputs, want %d", len(in), op.Arity())
	}
	if anyOnGPU(in) {
		return op.doGPU(in)
	}
	var most [len(embeddingInputs)]tensor.Shape
	shapes := most[:len(in)]
	for i, v := range in {
		shapes[i] = v.Shape()
	}
	shape, err := op.shape(shapes)
	if err != nil {
		return nil, err
	}
	ids, err := op.readIDs(in[1], shapes[0][0])
	if err != nil {
		return nil, err
	}
	switch op.table {
	case operand.Float16:
		return gather(op, in, shape, ids, half.DecodeFloat16[half.Float16])
	case operand.BFloat16:
		return gather(op, in, shape, ids, half.DecodeBFloat16[half.BFloat16])
	case tensor.Float64:
		return gather(op, in, shape, ids, func(dst, src []float64) { copy(dst, src) })
	}
	return gather(op, in, shape, ids, func(dst, src []float32) { copy(dst, src) })
}

// readIDs is the ids as ints, all of which are below n or name a row that was not computed.
func (op embedding) readIDs(v G.Value, n int) ([]int, error) {
	const name = "Embedding"
	ids, err := integers(name, "ids", op.ids, v)
	n = max(n, op.rows)
	for i, id := range ids {
		if id < 0 || id >= n {
			return nil, errorf(name, errs.ErrLength, "ids[%d] is %d, outside [0, %d)", i, id, n)
		}
	}
	return ids, err
}

// gather is the output: rows ids of the table, widened, plus the residual. A row that the table does not have is 0.
func gather[F float, T any](op embedding, in []G.Value, shape tensor.Shape, ids []int, widen func(dst []F, src []T)) (G.Value, error) {
	table, err := elements[T](op.title(), "table", in[0], in[0].Shape())
	if err != nil {
		return nil, err
	}
	var residual []F
	if op.residual {
		if residual, err = elements[F](op.title(), "residual", in[2], shape); err != nil {
			return nil, err
		}
	}
	t, y := output[F](shape)
	rows, n := in[0].Shape()[0], shape[1]
	eachRow(len(ids), n, func(row int) {
		to, id := y[row*n:(row+1)*n], ids[row]
		if id < rows {
			widen(to, table[id*n:(id+1)*n])
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

// DiffWRT says that table and residual have gradients.
func (op embedding) DiffWRT(int) []bool { return diffWRT(op.arguments()) }

// SymDiff adds the nodes of the gradients (tape machine).
func (op embedding) SymDiff(in G.Nodes, _, dy *G.Node) (grads G.Nodes, err error) {
	defer errs.RecoverTo(prefix+op.title(), &err)
	return embeddingGradients(inGraph, op, in, dy)
}

// DoDiff adds the gradients to those of the inputs (lisp machine).
func (op embedding) DoDiff(_ G.ExecutionContext, in G.Nodes, y *G.Node) (err error) {
	defer errs.RecoverTo(prefix+op.title(), &err)
	return addGradients(op.title(), in, y, func(in []G.Value, dy G.Value) ([]G.Value, error) {
		return embeddingGradients(atOnce, op, in, dy)
	})
}

func embeddingGradients[T any](do step[T], op embedding, in []T, dy T) ([]T, error) {
	if op.table != op.sum() {
		return nil, errorf(op.title(), errs.ErrUnsupported, "gradient with a table of %v; it must be of float32 or float64", op.table)
	}
	return gradients(do, op, in, dy)
}

func (op embedding) title() string { return "Embedding" }

func (op embedding) arguments() []argument {
	args := []argument{{name: "table", rank: 2, dtype: op.table}, {name: "ids", rank: 1, dtype: op.ids, data: true}}
	if op.residual {
		args = append(args, argument{name: "residual", rank: 2, dtype: op.sum()})
	}
	return append(args, argument{name: "y", rank: 2, dtype: op.sum()})
}

// gradient adds the rows of dy to those of the table that they were made of; the residual's is dy.
func (op embedding) gradient(i int, in []G.Value, dy G.Value) (G.Value, error) {
	if op.table == tensor.Float64 {
		return embeddingGrad[float64](op, i, in, dy)
	}
	return embeddingGrad[float32](op, i, in, dy)
}

func embeddingGrad[F float](op embedding, i int, in []G.Value, grad G.Value) (G.Value, error) {
	dy, err := elements[F](op.title(), "the output's gradient", grad, grad.Shape())
	if err != nil {
		return nil, err
	}
	if i > 0 {
		t, d := output[F](in[i].Shape())
		copy(d, dy)
		return t, nil
	}
	t, d := zeros[F](in[0].Shape())
	ids, err := op.readIDs(in[1], in[0].Shape()[0])
	if err != nil {
		return nil, err
	}
	n := grad.Shape()[1]
	for row, id := range ids {
		if id >= in[0].Shape()[0] {
			continue
		}
		to := d[id*n : (id+1)*n]
		for i, v := range dy[row*n : (row+1)*n] {
			to[i] += v
		}
	}
	return t, nil
}

var (
	_ G.SDOp    = embedding{}
	_ G.ADOp    = embedding{}
	_ derivable = embedding{}
)
