package nn

import (
	"fmt"
	"slices"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/attention"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/decoder"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// MergeStates is the output of attention to the keys of several states, which have none in common, and [MergeLSE] the
// log-sum-exp. They are leanattention.Merge in a graph:
//
//	lse = ln sum_i exp(lses[i])
//	out = sum_i exp(lses[i]-lse) outs[i]
//
// outs[i] is what leanattention.Attention returns for a part of the keys, of shape (..., dv), and lses[i], of shape (...), is
// the node that leanattention.WithLSE gives there. All are float32, or all float64. A state of no key, whose log-sum-exp is
// -Inf, is not read, and has no gradient.
//
// It computes on a GPU where all are a [device.Tensor] of float32. Gradients for all of them are available on both of
// Gorgonia's machines, in host memory; they can not be differentiated once more.
//
// Errors: ErrShape, ErrDType, ErrGraph (nil nodes, none, other graphs).
func MergeStates(outs, lses []*G.Node) (out *G.Node, err error) {
	const name = "MergeStates"
	defer errs.RecoverTo(prefix+name, &err)
	if len(outs) == 0 || len(outs) != len(lses) {
		return nil, errorf(name, errs.ErrGraph, "%d outputs and %d log-sum-exps", len(outs), len(lses))
	}
	if err := checkFloats(name, "outs[0]", outs[0]); err != nil {
		return nil, err
	}
	s := states{kind{len(outs[0].Shape()), outs[0].Dtype()}, len(outs)}
	if s.rank < 2 {
		return nil, errorf(name, errs.ErrShape, "outs[0] has shape %v, want (..., dv)", outs[0].Shape())
	}
	return newNode(mergedOut{s}, append(slices.Clone(outs), lses...)...)
}

// MergeLSE is the log-sum-exp of attention to the keys of several states; see [MergeStates].
func MergeLSE(lses ...*G.Node) (lse *G.Node, err error) {
	const name = "MergeLSE"
	defer errs.RecoverTo(prefix+name, &err)
	if len(lses) == 0 {
		return nil, errorf(name, errs.ErrGraph, "no log-sum-exps")
	}
	if err := checkFloats(name, "lses[0]", lses[0]); err != nil {
		return nil, err
	}
	return newNode(mergedLSE{states{kind{len(lses[0].Shape()) + 1, lses[0].Dtype()}, len(lses)}}, lses...)
}

// states are some of them: their outputs have the rank.
type states struct {
	kind
	count int
}

func (s states) lses() []argument {
	return alike(s.rank-1, s.dtype, namesOf(s.count, func(i int) string { return fmt.Sprintf("lses[%d]", i) })...)
}

// mergedLSE is the rule of the log-sum-exp, whose inputs are those of the states.
type mergedLSE struct{ states }

func (r mergedLSE) title() string { return "MergeLSE" }
func (r mergedLSE) String() string {
	return fmt.Sprintf("MergeLSE{%v, rank %d, %d}", r.dtype, r.rank, r.count)
}

func (r mergedLSE) arguments() []argument {
	return append(r.lses(), alike(r.rank-1, r.dtype, "lse")...)
}

func (r mergedLSE) shape(in []tensor.Shape) (tensor.Shape, error) {
	return in[0].Clone(), sameShape(r.title(), r.lses(), in)
}

func (r mergedLSE) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	if r.dtype == tensor.Float64 {
		return mergeLSE[float64](r, in, shape)
	}
	return mergeLSE[float32](r, in, shape)
}

func mergeLSE[F float](r mergedLSE, in []G.Value, shape tensor.Shape) (G.Value, error) {
	lses, err := allElements[F](r.title(), in)
	if err != nil {
		return nil, err
	}
	t, y := output[F](shape)
	states := make([]lean.Normalized[F], r.count)
	for i := range y {
		y[i] = lean.MergeNormalized(nil, rowOf(states, lses, i))
	}
	return t, nil
}

func (r mergedLSE) launch(w *ongpu.Work, _ []tensor.Shape, shape tensor.Shape) error {
	return w.MergeStates(&decoder.States{Rows: shape.TotalSize(), Dim: 1, LSEs: memoryOf(w.In), LSE: w.Out, Scratch: w.Scratch})
}

// scratch is what the states that a launch does not merge need besides.
func (r mergedLSE) scratch(shape tensor.Shape) int {
	return (&decoder.States{Rows: shape.TotalSize(), LSEs: make([]gpu.Memory, r.count)}).Needs()
}

// gradient is the state's share.
func (r mergedLSE) gradient(i int, in []G.Value, dy G.Value) (G.Value, error) {
	if r.dtype == tensor.Float64 {
		return mergedLSEGradient[float64](r, i, in, dy)
	}
	return mergedLSEGradient[float32](r, i, in, dy)
}

func mergedLSEGradient[F float](r mergedLSE, i int, in []G.Value, dy G.Value) (G.Value, error) {
	lses, err := allElements[F](r.title(), append(slices.Clone(in), dy))
	if err != nil {
		return nil, err
	}
	grad := lses[r.count]
	lses = lses[:r.count]
	t, dx := output[F](dy.Shape())
	states := make([]lean.Normalized[F], r.count)
	for row := range dx {
		dx[row] = lean.Share(rowOf(states, lses, row), i) * grad[row]
	}
	return t, nil
}

// mergedOut is the rule of the output. Its inputs are the outputs of the states, and behind them their log-sum-exps.
type mergedOut struct{ states }

func (r mergedOut) title() string { return "MergeStates" }
func (r mergedOut) String() string {
	return fmt.Sprintf("MergeStates{%v, rank %d, %d}", r.dtype, r.rank, r.count)
}

func (r mergedOut) arguments() []argument {
	outs := alike(r.rank, r.dtype, namesOf(r.count, func(i int) string { return fmt.Sprintf("outs[%d]", i) })...)
	return append(append(outs, r.lses()...), alike(r.rank, r.dtype, "out")...)
}

func (r mergedOut) shape(in []tensor.Shape) (tensor.Shape, error) {
	if err := sameShape(r.title(), r.arguments()[:r.count], in[:r.count]); err != nil {
		return nil, err
	}
	for i, s := range in[r.count:] {
		if !slices.Equal(s, in[0][:r.rank-1]) {
			return nil, errorf(r.title(), errs.ErrShape, "outs[%d] has shape %v and lses[%d] %v, want (..., dv) and (...)", i, in[i], i, s)
		}
	}
	return in[0].Clone(), nil
}

func (r mergedOut) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	if r.dtype == tensor.Float64 {
		return mergeOut[float64](r, in, shape)
	}
	return mergeOut[float32](r, in, shape)
}

func mergeOut[F float](r mergedOut, in []G.Value, shape tensor.Shape) (G.Value, error) {
	all, err := allElements[F](r.title(), in)
	if err != nil {
		return nil, err
	}
	t, y := output[F](shape)
	parts := make([]attention.States[F], r.count)
	for i := range parts {
		parts[i] = attention.States[F]{Out: all[i], LSE: all[r.count+i]}
	}
	lse := make([]F, len(parts[0].LSE))
	err = attention.MergeStates(cpu.Default(), attention.States[F]{Out: y, LSE: lse}, shape[r.rank-1], parts...)
	return t, engineError(r.title(), err)
}

func (r mergedOut) launch(w *ongpu.Work, _ []tensor.Shape, shape tensor.Shape) error {
	all, dim := memoryOf(w.In), shape[r.rank-1]
	return w.MergeStates(&decoder.States{Rows: shape.TotalSize() / dim, Dim: dim, Outs: all[:r.count], LSEs: all[r.count:], Out: w.Out, Scratch: w.Scratch})
}

func (r mergedOut) scratch(shape tensor.Shape) int {
	return mergedLSE(r).scratch(shape[:r.rank-1])
}

func memoryOf(in []ongpu.Operand) []gpu.Memory {
	all := make([]gpu.Memory, len(in))
	for i := range in {
		all[i] = in[i].Memory
	}
	return all
}

// gradient of an output is the state's share of dout; that of a log-sum-exp the share of dout.(outs[i]-out).
func (r mergedOut) gradient(i int, in []G.Value, dy G.Value) (G.Value, error) {
	if r.dtype == tensor.Float64 {
		return mergedOutGradient[float64](r, i, in, dy)
	}
	return mergedOutGradient[float32](r, i, in, dy)
}

func mergedOutGradient[F float](r mergedOut, i int, in []G.Value, dy G.Value) (G.Value, error) {
	all, err := allElements[F](r.title(), append(slices.Clone(in), dy))
	if err != nil {
		return nil, err
	}
	outs, lses, grad := all[:r.count], all[r.count:2*r.count], all[2*r.count]
	t, dx := output[F](in[i].Shape())
	dim := dy.Shape()[r.rank-1]
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
		// outs[i]-out is a sum, too: of the differences to the others.
		var sum float64
		w := lean.Share(states, i-r.count)
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
