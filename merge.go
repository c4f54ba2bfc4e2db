package leanattention

import (
	"slices"

	"gorgonia.org/leanattention/internal/ongpu"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/attention"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/lean"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// State is the result of attention to a part of the keys: the output over these keys, and the natural logarithm of the sum of the
// exponentials of their scores. [Attend] writes a State to [Args.Out] and [Args.LSE]; [Attention] and [CachedAttention] make one
// with [LogSumExp].
//
//	Out  (..., dv)   float32 or float64
//	LSE  (...)       as Out
//
// For a query that sees no key, Out is 0 and LSE is -Inf. Libraries with logarithms of base 2, such as FlashInfer, have LSE/ln(2):
// multiply theirs by math.Ln2.
type State struct{ Out, LSE G.Value }

// Merge sets dst to the state of the union of the keys of all states, which must be disjoint. For each query
//
//	L       = sum_i exp(LSE_i)
//	dst.Out = sum_i exp(LSE_i)/L Out_i
//	dst.LSE = ln L
//
// with the largest LSE_i taken out of the exponentials. It is the softmax re-scaling operator of LeanAttention (Sanovar et al.,
// arXiv:2405.10480, section IV-A) for normalised states, associative and commutative up to rounding. So attention to keys in
// different places can be computed there, and merged.
//
//   - A state with an LSE of -Inf changes nothing, and its Out is not read. If all are such, Out is 0 and LSE is -Inf.
//   - An LSE of NaN or +Inf makes the query's output and LSE NaN.
//   - Sums have the order of the states, so the bits are the same on every run. A single state is copied.
//   - All tensors have the shapes and type of dst's tensors. dst's are row-major, and share no memory with others.
//   - GPUs: if all are a float32 [device.Tensor] of one GPU, Merge queues the work there and returns.
//   - [gorgonia.org/leanattention/nn.MergeStates] is Merge as a node, with gradients.
//
// Errors: [ErrShape], [ErrDType], [ErrUnsupported]; on a GPU also [ErrState] and [ErrClosed] for its tensors, and errors of the
// GPU.
func Merge(dst State, states ...State) (err error) {
	const op = "Merge"
	defer errs.RecoverTo(op, &err)
	if ongpu.PlaceOf(dst.Out) != nil {
		return mergeDevice(op, dst, states)
	}
	out, lse, err := dst.tensors(op, "dst.Out", "dst.LSE")
	if err != nil {
		return err
	}
	for _, t := range []struct {
		name string
		*tensor.Dense
	}{{"dst.Out", out}, {"dst.LSE", lse}} {
		if !dense.RowMajor(t.Dense) {
			return errs.Errorf(op, ErrUnsupported, "%s is not row-major: strides %v for shape %v", t.name, t.Strides(), t.Shape())
		}
	}
	if overlap(out, lse) {
		return errs.Errorf(op, ErrUnsupported, "dst.Out and dst.LSE share memory")
	}
	if len(states) == 0 {
		return errs.Errorf(op, ErrShape, "no states")
	}
	parts := make([][2]*tensor.Dense, len(states))
	for i, s := range states {
		o, l, err := s.tensors(op, "Out", "LSE")
		if err != nil {
			return errs.Errorf(op, Cause(err), "state %d: %v", i, err)
		}
		switch {
		case o.Dtype() != out.Dtype():
			return errs.Errorf(op, ErrDType, "state %d is of %v, dst of %v", i, o.Dtype(), out.Dtype())
		case !slices.Equal(o.Shape(), out.Shape()):
			return errs.Errorf(op, ErrShape, "state %d has an Out of shape %v, dst of %v", i, o.Shape(), out.Shape())
		case overlap(o, out) || overlap(o, lse) || overlap(l, out) || overlap(l, lse):
			return errs.Errorf(op, ErrUnsupported, "state %d shares memory with dst", i)
		}
		parts[i] = [2]*tensor.Dense{o, l}
	}
	if out.Dtype() == tensor.Float32 {
		return mergeTensors[float32](op, out, lse, parts)
	}
	return mergeTensors[float64](op, out, lse, parts)
}

// tensors returns the tensors of s, after a check of their shapes.
func (s State) tensors(op, outName, lseName string) (out, lse *tensor.Dense, err error) {
	if out, err = ongpu.Dense(op, outName, s.Out); err != nil {
		return nil, nil, err
	}
	if lse, err = ongpu.Dense(op, lseName, s.LSE); err != nil {
		return nil, nil, err
	}
	shape := out.Shape()
	switch of := out.Dtype(); {
	case of != tensor.Float32 && of != tensor.Float64:
		return nil, nil, errs.Errorf(op, ErrDType, "%s is %v, want float32 or float64", outName, of)
	case lse.Dtype() != of:
		return nil, nil, errs.Errorf(op, ErrDType, "%s is %v and %s %v", outName, of, lseName, lse.Dtype())
	case len(shape) < 2 || !slices.Equal(lse.Shape(), shape[:len(shape)-1]):
		return nil, nil, errs.Errorf(op, ErrShape, "%s has shape %v and %s %v, want (..., dv) and (...)", outName, shape, lseName, lse.Shape())
	}
	return out, lse, nil
}

// overlap reports whether two tensors share memory.
func overlap(a, b *tensor.Dense) bool {
	return a.Uintptr() < b.Uintptr()+b.MemSize() && b.Uintptr() < a.Uintptr()+a.MemSize()
}

func mergeTensors[F lean.Float](op string, out, lse *tensor.Dense, states [][2]*tensor.Dense) error {
	parts := make([]attention.States[F], len(states))
	for i, s := range states {
		parts[i] = attention.States[F]{Out: dense.Elements[F](s[0]), LSE: dense.Elements[F](s[1])}
	}
	shape := out.Shape()
	dst := attention.States[F]{Out: dense.Backing[F](out), LSE: dense.Backing[F](lse)}
	if err := attention.MergeStates(cpu.Default(), dst, shape[len(shape)-1], parts...); err != nil {
		return errs.Engine(op, "merge", err)
	}
	return nil
}
