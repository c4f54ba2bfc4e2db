package nn

import (
	"fmt"
	"slices"

	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/operand"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Slice returns elements [from, to) of an axis of x, counted from 0:
//
//	y[..., i, ...] = x[..., from+i, ...]
//
// The elements are copied.
//
//   - x: rank 1 or more, float32 or float64. On a GPU: float32. y has the rank and type of x.
//   - A run may have fewer rows than the graph, if the rows of the slice are there. Rows in any order are an [Embedding] of x.
//   - Gradient: in host memory on both of Gorgonia's machines, on a GPU on the tape machine. No second derivative.
//   - Errors: ErrShape (axis, from, to), ErrDType, ErrGraph (nil x).
func Slice(x *G.Node, axis, from, to int) (y *G.Node, err error) {
	const name = "Slice"
	defer errs.RecoverTo(prefix+name, &err)
	if err := checkFloats(name, "x", x); err != nil {
		return nil, err
	}
	return newNode(moving{slice{kind{len(x.Shape()), x.Dtype()}, axis, from, to}}, x)
}

// Concat joins tensors along an axis, counted from 0. The tensors have one rank and type, and one shape except for the axis. Types,
// GPUs and gradients are as [Slice].
//
// Errors: ErrShape, ErrDType, ErrGraph (nil tensors, no tensors, other graphs).
func Concat(axis int, xs ...*G.Node) (y *G.Node, err error) {
	const name = "Concat"
	defer errs.RecoverTo(prefix+name, &err)
	if len(xs) == 0 {
		return nil, errorf(name, errs.ErrGraph, "no tensors")
	}
	if err := checkFloats(name, "x[0]", xs[0]); err != nil {
		return nil, err
	}
	return newNode(moving{concat{kind{len(xs[0].Shape()), xs[0].Dtype()}, axis, len(xs)}}, xs...)
}

// SplitHeads turns x of shape (batch, n, heads*d) into (batch, heads, n, d), the layout of leanattention.Attention.
// leanattention.CachedAttention takes x as it is. Gradients are computed as those of [Slice].
//
// Types: float32, float64, float16 and bfloat16; on a GPU not float64.
//
// Errors: ErrShape, ErrDType, ErrGraph (nil x).
func SplitHeads(x *G.Node, heads int) (y *G.Node, err error) {
	const name = "SplitHeads"
	defer errs.RecoverTo(prefix+name, &err)
	if err := checkMoved(name, x); err != nil {
		return nil, err
	}
	return newNode(moving{split{kind{3, x.Dtype()}, heads}}, x)
}

// MergeHeads turns x of shape (batch, heads, n, d) into (batch, n, heads*d). All else is as [SplitHeads].
func MergeHeads(x *G.Node) (y *G.Node, err error) {
	const name = "MergeHeads"
	defer errs.RecoverTo(prefix+name, &err)
	if err := checkMoved(name, x); err != nil {
		return nil, err
	}
	return newNode(moving{merge{kind{4, x.Dtype()}}}, x)
}

// Reshape returns the elements of x in another shape of the same size. If both shapes have the same number of rows, a run may have
// fewer rows than the graph.
//
//   - x: rank 1 or more, types as [SplitHeads]. On a GPU: without a copy, in gradients, too.
//   - Gradient: in host memory on both of Gorgonia's machines, on a GPU on the tape machine. No second derivative.
//   - Errors: ErrShape, ErrDType, ErrGraph (nil x).
func Reshape(x *G.Node, shape ...int) (y *G.Node, err error) {
	const name = "Reshape"
	defer errs.RecoverTo(prefix+name, &err)
	if err := checkMoved(name, x); err != nil {
		return nil, err
	}
	if len(shape) == 0 {
		return nil, errorf(name, errs.ErrShape, "the shape of a scalar, want one axis or more")
	}
	for _, d := range shape {
		if d < 1 {
			return nil, errorf(name, errs.ErrShape, "shape %v, want no empty axis", shape)
		}
	}
	old := x.Shape()
	if attn.Product(shape...) != old.TotalSize() {
		return nil, errorf(name, errs.ErrShape, "x has shape %v of %d elements, want as many in shape %v", old, old.TotalSize(), shape)
	}
	r := reshape{kind: kind{len(old), x.Dtype()}, to: slices.Clone(shape), size: old.TotalSize()}
	if old[0] == shape[0] {
		r.rows = old.TotalSize() / shape[0]
	}
	return newCopied(r, x)
}

// checkMoved is [checkFloats] for the input of ops that also move elements of 16 bits.
func checkMoved(name string, x *G.Node) error {
	if x != nil && len(x.Shape()) > 0 && (x.Dtype() == operand.Float16 || x.Dtype() == operand.BFloat16) {
		return nil
	}
	return checkFloats(name, "x", x)
}

// moveable marks arguments that may have elements of 16 bits.
func moveable(args []argument) []argument {
	for i := range args {
		args[i].halves = true
	}
	return args
}

// kind is the rank of a rule's inputs, and the type of inputs and result.
type kind struct {
	rank  int
	dtype tensor.Dtype
}

// A path moves elements from inputs to a result.
type path interface {
	fmt.Stringer
	title() string
	arguments() []argument
	shape(in []tensor.Shape) (tensor.Shape, error)
	moves(in []tensor.Shape, out tensor.Shape) []attn.Move // of each input
}

// moving is the rule of a path.
type moving struct{ path }

func (r moving) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	return movedOf(r.title(), r.moves(shapesOf(in), shape), in, shape)
}

// movedOf moves elements of any type.
func movedOf(title string, moves []attn.Move, in []G.Value, shape tensor.Shape) (G.Value, error) {
	switch in[0].Dtype() {
	case tensor.Float64:
		return moved[float64](title, moves, in, shape)
	case operand.Float16:
		return moved[half.Float16](title, moves, in, shape)
	case operand.BFloat16:
		return moved[half.BFloat16](title, moves, in, shape)
	}
	return moved[float32](title, moves, in, shape)
}

func moved[F any](title string, moves []attn.Move, in []G.Value, shape tensor.Shape) (G.Value, error) {
	t, y := dense.Unwritten[F](dtypeOf[F](), shape)
	count := 0
	for i := range moves {
		count += moves[i].Count()
	}
	if count < len(y) { // the gradient of a slice: zero elsewhere
		clear(y)
	}
	for i := range moves {
		x, err := elements[F](title, "x", in[i], in[i].Shape())
		if err != nil {
			return nil, err
		}
		attn.MoveElements(&moves[i], y, x)
	}
	return t, nil
}

// graphGradients moves back, without x where its shape is known from that of dy.
func (r moving) graphGradients(in []*G.Node, dy *G.Node) ([]*G.Node, error) {
	back := r
	switch p := r.path.(type) {
	case split:
		back = moving{merge{kind{4, p.dtype}}}
	case merge:
		back = moving{split{kind{3, p.dtype}, in[0].Shape()[1]}}
	default:
		return gradients(inGraph, r, in, dy)
	}
	dx, err := newNode(back, dy)
	return []*G.Node{dx}, err
}

func (r moving) valueGradients(in []G.Value, dy G.Value) ([]G.Value, error) {
	return gradients(atOnce, r, in, dy)
}

// gradient moves back.
func (r moving) gradient(i int, in []G.Value, dy G.Value) (G.Value, error) {
	back := []attn.Move{r.moves(shapesOf(in), dy.Shape())[i].Back()}
	return movedOf(r.title(), back, []G.Value{dy}, in[i].Shape())
}

func (r moving) launch(w *ongpu.Work, in []tensor.Shape, shape tensor.Shape) error {
	return launchMoves(w, r.moves(in, shape))
}

func launchMoves(w *ongpu.Work, moves []attn.Move) error {
	for i, m := range moves {
		if err := w.Move(&layers.Move{Move: m, X: w.In[i].Memory, Y: w.Out}); err != nil {
			return err
		}
	}
	return nil
}

func (r moving) launchGradient(i int, w *ongpu.Work, in []tensor.Shape) error {
	last := len(in) - 1
	return launchBack(w, r.moves(in[:last], in[last])[i].Back(), w.In[last].Memory)
}

// launchBack moves elements of dy to a gradient, which is 0 elsewhere.
func launchBack(w *ongpu.Work, back attn.Move, dy gpu.Memory) error {
	if back.Count() < w.Out.Len {
		if err := w.Do(func(s *cuda.Stream) error { return s.Set(w.Out.Buffer, w.Out.Offset, 0, w.Out.Size()) }); err != nil {
			return err
		}
	}
	return w.Move(&layers.Move{Move: back, X: dy, Y: w.Out})
}

// along returns the product of a shape's axes before an axis, and the product of those after.
func along(s tensor.Shape, axis int) (before, behind int) {
	return attn.Product(s[:axis]...), attn.Product(s[axis+1:]...)
}

type slice struct {
	kind
	axis, first, end int
}

func (r slice) title() string { return "Slice" }
func (r slice) String() string {
	return fmt.Sprintf("Slice{%v, rank %d, axis %d, [%d, %d)}", r.dtype, r.rank, r.axis, r.first, r.end)
}
func (r slice) arguments() []argument { return alike(r.rank, r.dtype, "x", "y") }

func (r slice) shape(in []tensor.Shape) (tensor.Shape, error) {
	x := in[0]
	if r.axis < 0 || r.axis >= len(x) {
		return nil, errorf("Slice", errs.ErrShape, "axis %d, want an axis of x of shape %v", r.axis, x)
	}
	if r.first < 0 || r.end <= r.first || r.end > x[r.axis] {
		return nil, errorf("Slice", errs.ErrShape, "elements [%d, %d), want some within axis %d of x of shape %v", r.first, r.end, r.axis, x)
	}
	y := x.Clone()
	y[r.axis] = r.end - r.first
	return y, nil
}

func (r slice) moves(in []tensor.Shape, out tensor.Shape) []attn.Move {
	before, behind := along(out, r.axis)
	m := attn.Move{Dims: [3]int{1, 1, before}, N: out[r.axis] * behind}
	m.From = attn.Lattice{At: r.first * behind, Steps: [3]int{0, 0, in[0][r.axis] * behind}}
	m.To.Steps[2] = m.N
	return []attn.Move{m}
}

type concat struct {
	kind
	axis, count int
}

func (r concat) title() string { return "Concat" }
func (r concat) String() string {
	return fmt.Sprintf("Concat{%v, rank %d, axis %d, %d}", r.dtype, r.rank, r.axis, r.count)
}

func (r concat) arguments() []argument {
	names := namesOf(r.count, func(i int) string { return fmt.Sprintf("x[%d]", i) })
	return alike(r.rank, r.dtype, append(names, "y")...)
}

func (r concat) shape(in []tensor.Shape) (tensor.Shape, error) {
	y := in[0].Clone()
	if r.axis < 0 || r.axis >= len(y) {
		return nil, errorf("Concat", errs.ErrShape, "axis %d, want an axis of x[0] of shape %v", r.axis, y)
	}
	for i, s := range in[1:] {
		if !slices.Equal(s[:r.axis], y[:r.axis]) || !slices.Equal(s[r.axis+1:], y[r.axis+1:]) {
			return nil, errorf("Concat", errs.ErrShape, "x[%d] has shape %v, want that of x[0], %v, except for axis %d", i+1, s, in[0], r.axis)
		}
		y[r.axis] += s[r.axis]
	}
	return y, nil
}

func (r concat) moves(in []tensor.Shape, out tensor.Shape) (moves []attn.Move) {
	before, behind := along(out, r.axis)
	at := 0
	for _, s := range in {
		m := attn.Move{Dims: [3]int{1, 1, before}, N: s[r.axis] * behind}
		m.From.Steps[2] = m.N
		m.To = attn.Lattice{At: at, Steps: [3]int{0, 0, out[r.axis] * behind}}
		moves = append(moves, m)
		at += m.N
	}
	return moves
}

type split struct {
	kind
	heads int
}

func (r split) title() string { return "SplitHeads" }
func (r split) String() string {
	return fmt.Sprintf("SplitHeads{%v, %d}", r.dtype, r.heads)
}

func (r split) arguments() []argument {
	return moveable(append(alike(3, r.dtype, "x"), alike(4, r.dtype, "y")...))
}

func (r split) shape(in []tensor.Shape) (tensor.Shape, error) {
	x := in[0]
	if r.heads < 1 || x[2]%r.heads != 0 {
		return nil, errorf("SplitHeads", errs.ErrShape, "%d heads, want a divisor of the last axis of x of shape %v", r.heads, x)
	}
	return tensor.Shape{x[0], r.heads, x[1], x[2] / r.heads}, nil
}

func (r split) moves(_ []tensor.Shape, out tensor.Shape) []attn.Move {
	return []attn.Move{merged(out).Back()}
}

// merged is the move from (batch, heads, n, d) to (batch, n, heads, d).
func merged(s tensor.Shape) attn.Move {
	b, h, n, d := s[0], s[1], s[2], s[3]
	return attn.Move{
		Dims: [3]int{b, h, n}, N: d,
		From: attn.Lattice{Steps: [3]int{h * n * d, n * d, d}}, To: attn.Lattice{Steps: [3]int{h * n * d, d, h * d}},
	}
}

type merge struct{ kind }

func (r merge) title() string  { return "MergeHeads" }
func (r merge) String() string { return fmt.Sprintf("MergeHeads{%v}", r.dtype) }

func (r merge) arguments() []argument {
	return moveable(append(alike(4, r.dtype, "x"), alike(3, r.dtype, "y")...))
}

func (r merge) shape(in []tensor.Shape) (tensor.Shape, error) {
	x := in[0]
	return tensor.Shape{x[0], x[2], x[1] * x[3]}, nil
}

func (r merge) moves(in []tensor.Shape, _ tensor.Shape) []attn.Move {
	return []attn.Move{merged(in[0])}
}

// reshape is the rule of Reshape.
type reshape struct {
	kind
	to   []int
	size int // elements
	rows int // elements of a row, if a run may have fewer rows; 0: a run has all rows
}

func (r reshape) title() string { return "Reshape" }
func (r reshape) String() string {
	return fmt.Sprintf("Reshape{%v, rank %d, to %v, rows of %d}", r.dtype, r.rank, r.to, r.rows)
}

func (r reshape) arguments() []argument {
	return moveable(append(alike(r.rank, r.dtype, "x"), alike(len(r.to), r.dtype, "y")...))
}

func (r reshape) shape(in []tensor.Shape) (tensor.Shape, error) {
	size := in[0].TotalSize()
	if r.rows > 0 && size == r.rows*in[0][0] && in[0][0] <= r.to[0] {
		return append(tensor.Shape{in[0][0]}, r.to[1:]...), nil
	}
	if size != r.size {
		return nil, errorf("Reshape", errs.ErrShape, "x has shape %v of %d elements, want as many in shape %v", in[0], size, r.to)
	}
	return slices.Clone(r.to), nil
}

func (r reshape) from(tensor.Shape) int { return 0 }

func (r reshape) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	n := shape.TotalSize()
	return movedOf(r.title(), []attn.Move{{Dims: [3]int{1, 1, 1}, N: n}}, in, shape)
}

// back returns the path of the gradient.
func (r reshape) back(x tensor.Shape) reshape {
	return reshape{kind: kind{len(r.to), r.dtype}, to: slices.Clone(x), size: r.size, rows: r.rows}
}

func (r reshape) graphGradients(in []*G.Node, dy *G.Node) ([]*G.Node, error) {
	dx, err := newCopied(r.back(in[0].Shape()), dy)
	return []*G.Node{dx}, err
}

func (r reshape) valueGradients(in []G.Value, dy G.Value) ([]G.Value, error) {
	dx, err := r.compute([]G.Value{dy}, in[0].Shape())
	return []G.Value{dx}, err
}

var (
	_ trained  = moving{}
	_ window   = reshape{}
	_ composed = moving{}
	_ composed = reshape{}
)
