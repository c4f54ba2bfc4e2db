package nn

import (
	"fmt"
	"slices"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/attention"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// MergeStates merges states of attention over disjoint keys, as leanattention.Merge does:
//
//	lse = ln sum_i exp(lses[i])
//	out = sum_i exp(lses[i]-lse) outs[i]
//
// The result is attention to all keys.
//
//   - outs[i] is an output of leanattention.Attention, (..., dv), and lses[i] its leanattention.LogSumExp, (...). out and lse have the same shapes.
//   - All are float32, or all are float64. On a GPU: float32. out and lse are one launch.
//   - A state without keys has a log-sum-exp of -Inf. Its output is not read and has no gradient.
//   - Gradients: of all inputs, in host memory, on both of Gorgonia's machines. No second derivative.
//   - Errors: ErrShape, ErrDType, ErrGraph (no states, nil nodes, other graphs).
//
// Gorgonia's lisp machine refuses a graph in which no node uses one of the results.
func MergeStates(outs, lses []*G.Node) (out, lse *G.Node, err error) {
	const name = "MergeStates"
	defer errs.RecoverTo(prefix+name, &err)
	if len(outs) == 0 || len(outs) != len(lses) {
		return nil, nil, errorf(name, errs.ErrGraph, "%d outputs and %d log-sum-exps, want as many, one or more", len(outs), len(lses))
	}
	if err := checkFloats(name, "outs[0]", outs[0]); err != nil {
		return nil, nil, err
	}
	shape := outs[0].Shape()
	if len(shape) < 2 {
		return nil, nil, errorf(name, errs.ErrShape, "outs[0] has shape %v, want (..., dv)", shape)
	}
	k := kind{len(shape), outs[0].Dtype()}
	both, err := newNode(mergedStates{k, len(outs)}, append(slices.Clone(outs), lses...)...)
	if err != nil {
		return nil, nil, err
	}
	part := mergedPart{kind: k, rest: slices.Clone(shape[1:])}
	if out, err = newView(part, both); err != nil {
		return nil, nil, err
	}
	part.lse = true
	lse, err = newView(part, both)
	return out, lse, err
}

// mergedStates is the rule of MergeStates. The inputs are outputs, and after them log-sum-exps. The result is one vector: the output,
// and from lseAt on the log-sum-exp.
type mergedStates struct {
	kind  // rank and type of an output
	count int
}

// lseAt returns where the log-sum-exp begins, after an output of so many elements: kernels write at multiples of 16 bytes.
func lseAt(out int) int { return aligned(out) }

func (r mergedStates) title() string { return "MergeStates" }
func (r mergedStates) String() string {
	return fmt.Sprintf("MergeStates{%v, rank %d, %d}", r.dtype, r.rank, r.count)
}

func (r mergedStates) arguments() []argument {
	outs := alike(r.rank, r.dtype, namesOf(r.count, func(i int) string { return fmt.Sprintf("outs[%d]", i) })...)
	lses := alike(r.rank-1, r.dtype, namesOf(r.count, func(i int) string { return fmt.Sprintf("lses[%d]", i) })...)
	return append(append(outs, lses...), argument{name: "out and lse", rank: 1, dtype: r.dtype})
}

func (r mergedStates) shape(in []tensor.Shape) (tensor.Shape, error) {
	if err := sameShape(r.title(), r.arguments()[:r.count], in[:r.count]); err != nil {
		return nil, err
	}
	for i, s := range in[r.count:] {
		if !slices.Equal(s, in[0][:r.rank-1]) {
			return nil, errorf(r.title(), errs.ErrShape, "outs[%d] has shape %v and lses[%d] %v, want (..., dv) and (...)", i, in[i], i, s)
		}
	}
	size := in[0].TotalSize()
	return tensor.Shape{lseAt(size) + size/r.dim(in[0])}, nil
}

func (r mergedStates) dim(out tensor.Shape) int { return out[r.rank-1] }

func (r mergedStates) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	if r.dtype == tensor.Float64 {
		return mergeStates[float64](r, in, shape)
	}
	return mergeStates[float32](r, in, shape)
}

func mergeStates[F float](r mergedStates, in []G.Value, shape tensor.Shape) (G.Value, error) {
	all, err := allElements[F](r.title(), in)
	if err != nil {
		return nil, err
	}
	t, y := output[F](shape)
	parts := make([]attention.States[F], r.count)
	for i := range parts {
		parts[i] = attention.States[F]{Out: all[i], LSE: all[r.count+i]}
	}
	size := len(all[0])
	clear(y[size:lseAt(size)])
	err = attention.MergeStates(cpu.Default(), attention.States[F]{Out: y[:size], LSE: y[lseAt(size):]}, r.dim(in[0].Shape()), parts...)
	return t, engineError(r.title(), err)
}

func (r mergedStates) launch(w *ongpu.Work, in []tensor.Shape, _ tensor.Shape) error {
	all, dim, size := memoryOf(w.In), r.dim(in[0]), in[0].TotalSize()
	out, lse := w.Out, w.Out
	out.Len = size
	lse.Offset += int64(lseAt(size)) * 4
	lse.Len = size / dim
	return w.MergeStates(&layers.States{Rows: size / dim, Dim: dim, Outs: all[:r.count], LSEs: all[r.count:], Out: out, LSE: lse, Scratch: w.Scratch})
}

// place adds the scratch memory for states beyond the limit of a launch.
func (r mergedStates) place(c *ongpu.Call, in []tensor.Shape, _ tensor.Shape) {
	n := (&layers.States{Rows: in[0].TotalSize() / r.dim(in[0]), LSEs: make([]gpu.Memory, r.count)}).Needs()
	c.Scratch = func(*layers.Engine) (int, error) { return n, nil }
}

func memoryOf(in []ongpu.Operand) []gpu.Memory {
	all := make([]gpu.Memory, len(in))
	for i := range in {
		all[i] = in[i].Memory
	}
	return all
}

// gradient of an output is the state's share times dout. Gradient of a log-sum-exp is the share times (dlse + dout.(outs[i]-out)).
func (r mergedStates) gradient(i int, in []G.Value, dy G.Value) (G.Value, error) {
	if r.dtype == tensor.Float64 {
		return mergedGradient[float64](r, i, in, dy)
	}
	return mergedGradient[float32](r, i, in, dy)
}

func mergedGradient[F float](r mergedStates, i int, in []G.Value, dy G.Value) (G.Value, error) {
	all, err := allElements[F](r.title(), append(slices.Clone(in), dy))
	if err != nil {
		return nil, err
	}
	outs, lses, grad := all[:r.count], all[r.count:2*r.count], all[2*r.count]
	dlse := grad[lseAt(len(outs[0])):]
	t, dx := output[F](in[i].Shape())
	dim := r.dim(in[0].Shape())
	of := func(x []F, row int) []F { return x[row*dim : (row+1)*dim] }
	states := make([]lean.Normalized[F], r.count)
	for row := range lses[0] {
		rowOf(states, lses, row)
		if i < r.count {
			w := lean.Share(states, i)
			to := of(dx, row)
			for j, g := range of(grad, row) {
				to[j] = w * g
			}
			continue
		}
		// outs[i]-out is the weighted sum of the differences to the other outputs.
		w := lean.Share(states, i-r.count)
		sum := float64(dlse[row])
		for k := range r.count {
			if s := lean.Share(states, k); s != 0 && w != 0 && k != i-r.count {
				x, y := of(outs[i-r.count], row), of(outs[k], row)
				for j, g := range of(grad, row) {
					sum += float64(s) * float64(g) * (float64(x[j]) - float64(y[j]))
				}
			}
		}
		dx[row] = F(float64(w) * sum)
	}
	return t, nil
}

// mergedPart is the rule of one result of MergeStates: a part of the vector, without a copy.
type mergedPart struct {
	kind              // rank and type of the output
	rest tensor.Shape // axes of the output after the first
	lse  bool         // the part is the log-sum-exp
}

func (r mergedPart) title() string { return "MergeStates" }
func (r mergedPart) String() string {
	return fmt.Sprintf("MergeStatesPart{lse %v, %v, (n, %v)}", r.lse, r.dtype, r.rest)
}

func (r mergedPart) arguments() []argument {
	y := argument{name: "out", rank: r.rank, dtype: r.dtype}
	if r.lse {
		y.name, y.rank = "lse", r.rank-1
	}
	return []argument{{name: "out and lse", rank: 1, dtype: r.dtype}, y}
}

// first returns the first axis of the output in a vector of n elements.
func (r mergedPart) first(n int) (first int, ok bool) {
	each := r.rest.TotalSize()
	rows := each / r.rest[len(r.rest)-1]
	for first = n / (each + rows); first > 0; first-- { // at most three elements are between output and log-sum-exp
		if size := lseAt(first*each) + first*rows; size <= n {
			return first, size == n
		}
	}
	return 0, false
}

// shape follows the vector: a run may have fewer rows than the graph.
func (r mergedPart) shape(in []tensor.Shape) (tensor.Shape, error) {
	first, ok := r.first(in[0][0])
	if !ok {
		return nil, errorf(r.title(), errs.ErrShape, "out and lse have %d elements, want those of outputs (n, %v)", in[0][0], r.rest)
	}
	y := append(tensor.Shape{first}, r.rest...)
	if r.lse {
		y = y[:len(y)-1]
	}
	return y, nil
}

func (r mergedPart) from(in tensor.Shape) int {
	if !r.lse {
		return 0
	}
	first, _ := r.first(in[0])
	return lseAt(first * r.rest.TotalSize())
}

func (r mergedPart) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	from := r.from(in[0].Shape())
	if r.dtype == tensor.Float64 {
		return partOf[float64](r, in[0], from, shape)
	}
	return partOf[float32](r, in[0], from, shape)
}

// gradient is dy in the part, and 0 elsewhere.
func (r mergedPart) gradient(_ int, in []G.Value, dy G.Value) (G.Value, error) {
	from := r.from(in[0].Shape())
	if r.dtype == tensor.Float64 {
		return amongZeros[float64](r.title(), in[0].Shape(), from, dy)
	}
	return amongZeros[float32](r.title(), in[0].Shape(), from, dy)
}

// allElements are those of tensors of any shapes.
func allElements[F float](title string, in []G.Value) ([][]F, error) {
	all := make([][]F, len(in))
	for i, v := range in {
		x, err := elements[F](title, fmt.Sprintf("input %d", i), v, v.Shape())
		if err != nil {
			return nil, err
		}
		all[i] = x
	}
	return all, nil
}

// rowOf are the log-sum-exps of a row, as states without outputs.
func rowOf[F float](states []lean.Normalized[F], lses [][]F, row int) []lean.Normalized[F] {
	for i := range states {
		states[i].LSE = lses[i][row]
	}
	return states
}
