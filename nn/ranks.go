package nn

import (
	"fmt"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/ranks"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// AllReduce is the sum of all ranks' x, element by element, with the same bits on every rank:
//
//	y = x of rank 0 + x of rank 1 + ...
//
// A layer whose weight (out, in) is split by input features is AllReduce of the ranks' linear layers. One rank adds bias and
// residual.
//
//   - x: float32, of one shape on all ranks, on the rank's GPUs. Ranks that have joined without GPUs have x in host memory, in float32 or
//     float64. In a world of one, y is x.
//   - If a rank has several GPUs and x is replicated on them, each sums with the same GPUs of the other ranks, and y is replicated.
//     Otherwise y is on the first GPU. All ranks have x on one GPU, or all have replicas. With three or more ranks, replicas may
//     differ by rounding.
//   - All ranks run the same collectives in the same order. The order is the graph's if each depends on the one before.
//   - Gradients: ErrUnsupported.
//   - Errors: ErrShape, ErrDType, ErrGraph (nil x), ErrState (nil comm). In a run: ErrUnsupported (x elsewhere than the ranks have
//     joined with), ErrRank (a rank has failed).
func AllReduce(x *G.Node, comm *ranks.Comm) (y *G.Node, err error) {
	const name = "AllReduce"
	defer errs.RecoverTo(prefix+name, &err)
	if err := checkFloats(name, "x", x); err != nil {
		return nil, err
	}
	return newTogether(together{kind: kind{len(x.Shape()), x.Dtype()}, comm: comm, what: ongpu.Sum}, x)
}

// Broadcast is the x of one rank, on every rank, such as the token that one rank has chosen. x is float32 or int32. All else is as
// [AllReduce].
//
// Errors: those of AllReduce; ErrOption if there is no rank from.
func Broadcast(x *G.Node, comm *ranks.Comm, from int) (y *G.Node, err error) {
	const name = "Broadcast"
	defer errs.RecoverTo(prefix+name, &err)
	if x == nil || x.Dtype() != tensor.Int32 {
		if err := checkFloats(name, "x", x); err != nil {
			return nil, err
		}
	}
	if len(x.Shape()) == 0 {
		return nil, errorf(name, errs.ErrShape, "x is a scalar, want rank 1 or more")
	}
	if comm != nil && (from < 0 || from >= comm.World().Size) {
		return nil, errorf(name, errs.ErrOption, "from is rank %d, outside [0, %d)", from, comm.World().Size)
	}
	return newTogether(together{kind: kind{len(x.Shape()), x.Dtype()}, comm: comm, what: ongpu.Broadcast, from: from}, x)
}

func newTogether(r together, x *G.Node) (*G.Node, error) {
	if r.comm.World().Size < 1 {
		return nil, errorf(r.title(), errs.ErrState, "comm is not from ranks.Join")
	}
	if r.comm.World().Size == 1 {
		return x, nil
	}
	return newNode(r, x)
}

// together is the rule of a collective.
type together struct {
	kind
	comm *ranks.Comm
	what ongpu.Collective
	from int
}

func (r together) title() string {
	if r.what == ongpu.Broadcast {
		return "Broadcast"
	}
	return "AllReduce"
}

func (r together) String() string {
	return fmt.Sprintf("%s{%v, rank %d, from %d, comm %p}", r.title(), r.dtype, r.rank, r.from, r.comm)
}

func (r together) arguments() []argument {
	args := alike(r.rank, r.dtype, "x", "y")
	for i := range args {
		args[i].data = r.dtype == tensor.Int32
	}
	return args
}

func (r together) shape(in []tensor.Shape) (tensor.Shape, error) { return in[0].Clone(), nil }

func (r together) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	switch r.dtype {
	case tensor.Float64:
		return inHost[float64](r, in[0], shape)
	case tensor.Int32:
		return inHost[int32](r, in[0], shape)
	}
	return inHost[float32](r, in[0], shape)
}

func (r together) launch(w *ongpu.Work, _ []tensor.Shape, shape tensor.Shape) error {
	return r.comm.Internal().Queue(w, r.what, shape.TotalSize(), r.from)
}
