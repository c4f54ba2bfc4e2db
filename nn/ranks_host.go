package nn

import (
	"fmt"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/attention"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/graph"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/ranks"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// MergeRanks merges the states of attention that all ranks have over disjoint keys, as [MergeStates] does, in the order of the ranks. Each
// rank gets the result of its own heads alone: ranks.World.Part of the heads.
//
//	out (rows, heads*dv), lse (rows, heads) -> y (rows, own heads*dv)
//
// It is for a context that is sharded over processes: each rank attends with all heads to its part of the keys.
//
//   - With the latent vectors of [MLA], pass the output of [MLA.Absorbed], whose values' weights stand before the exchange, and the
//     log-sum-exp of the attention: heads*value elements of a row cross in place of heads*latent. The result is exact.
//   - Types: float32 or float64, in host memory, for ranks that have joined without GPUs; float32 on the rank's GPU. There, states cross to
//     all ranks, as many broadcasts as ranks.
//   - A rank without keys has a log-sum-exp of -Inf, and its output is not read.
//   - All ranks have the same rows and run the same collectives in the same order. A world of one returns out.
//   - Gradients: ErrUnsupported.
//   - Errors: ErrShape (fewer heads than ranks too), ErrDType, ErrGraph (nil nodes, other graphs), ErrState (nil comm). In a run: ErrRank.
func MergeRanks(out, lse *G.Node, comm *ranks.Comm) (y *G.Node, err error) {
	const name = "MergeRanks"
	defer errs.RecoverTo(prefix+name, &err)
	if err := checkFloats(name, "out", out); err != nil {
		return nil, err
	}
	if err := checkFloats(name, "lse", lse); err != nil {
		return nil, err
	}
	size := comm.World().Size
	if size < 1 {
		return nil, errorf(name, errs.ErrState, "comm is not from ranks.Join")
	}
	r := mergedRanks{dtype: out.Dtype(), comm: comm}
	if err := checkChildren(r, []*G.Node{out, lse}); err != nil {
		return nil, err
	}
	if _, err := r.shape([]tensor.Shape{out.Shape(), lse.Shape()}); err != nil {
		return nil, err
	}
	if size == 1 {
		if err := graph.Distinct(func(i int) string { return r.arguments()[i].name }, out, lse); err != nil {
			return nil, errorf(name, errs.ErrGraph, "%v", err)
		}
		return out, nil
	}
	return newNode(r, out, lse)
}

// mergedRanks is the rule of MergeRanks.
type mergedRanks struct {
	dtype tensor.Dtype
	comm  *ranks.Comm
}

func (r mergedRanks) title() string  { return "MergeRanks" }
func (r mergedRanks) String() string { return fmt.Sprintf("MergeRanks{%v, comm %p}", r.dtype, r.comm) }

func (r mergedRanks) arguments() []argument {
	return []argument{{name: "out", rank: 2, dtype: r.dtype}, {name: "lse", rank: 2, dtype: r.dtype}, {name: "y", rank: 2, dtype: r.dtype}}
}

func (r mergedRanks) shape(in []tensor.Shape) (tensor.Shape, error) {
	out, lse, w := in[0], in[1], r.comm.World()
	switch {
	case out[0] != lse[0] || lse[1] < 1 || out[1]%lse[1] != 0 || out[1] < 1:
		return nil, errorf(r.title(), errs.ErrShape, "out has shape %v and lse %v, want (rows, heads*dv) and (rows, heads)", out, lse)
	case lse[1] < w.Size:
		return nil, errorf(r.title(), errs.ErrShape, "lse has shape %v, and there are %d ranks: want a head for each", lse, w.Size)
	}
	from, to := w.Part(lse[1])
	return tensor.Shape{out[0], (to - from) * (out[1] / lse[1])}, nil
}

func (r mergedRanks) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	if r.dtype == tensor.Float64 {
		return mergedHeads[float64](r, in, shape)
	}
	return mergedHeads[float32](r, in, shape)
}

func mergedHeads[F float](r mergedRanks, in []G.Value, shape tensor.Shape) (G.Value, error) {
	all, err := allElements[F](r.title(), in)
	if err != nil {
		return nil, err
	}
	w, rows, heads := r.comm.World(), shape[0], in[1].Shape()[1]
	dim := in[0].Shape()[1] / heads
	parts := make([][]byte, w.Size)
	for i := range parts {
		of := w
		of.Rank = i
		from, to := of.Part(heads)
		part := make([]F, 0, rows*(to-from)*(dim+1))
		for row := range rows {
			part = append(part, all[0][(row*heads+from)*dim:(row*heads+to)*dim]...)
		}
		for row := range rows {
			part = append(part, all[1][row*heads+from:row*heads+to]...)
		}
		parts[i] = bytesOf(part)
	}
	got, err := r.comm.Internal().Exchange(fmt.Sprintf("%s of %d rows and %d heads of %d elements of %v", r.title(), rows, heads, dim, r.dtype), parts)
	if err != nil {
		return nil, rankError(r.title(), err)
	}
	states, n := make([]attention.States[F], w.Size), shape.TotalSize()
	for i, b := range got {
		x := elementsOf[F](b)
		if len(x) != n+n/dim {
			return nil, errorf(r.title(), errs.ErrShape, "rank %d has sent %d elements, want %d", i, len(x), n+n/dim)
		}
		states[i] = attention.States[F]{Out: x[:n], LSE: x[n:]}
	}
	t, y := output[F](shape)
	err = attention.MergeStates(cpu.Default(), attention.States[F]{Out: y, LSE: make([]F, n/dim)}, dim, states...)
	return t, engineError(r.title(), err)
}

// rankStates says where a rank's states lie in an exchange of all states: for each owner the outputs of the owner's heads, and then their
// log-sum-exps. Each begins at a multiple of 16 bytes.
type rankStates struct {
	world      ranks.World
	rows, dim  int
	heads      int
	outs, lses []int // by owner, the first elements
	all        int   // elements
}

func (r mergedRanks) states(in []tensor.Shape) rankStates {
	heads := in[1][1]
	s := rankStates{world: r.comm.World(), rows: in[0][0], heads: heads, dim: in[0][1] / heads}
	for rank := range s.world.Size {
		from, to := s.of(rank)
		s.outs = append(s.outs, s.all)
		s.all += aligned(s.rows * (to - from) * s.dim)
		s.lses = append(s.lses, s.all)
		s.all += aligned(s.rows * (to - from))
	}
	return s
}

// of returns the heads of an owner.
func (s *rankStates) of(rank int) (from, to int) {
	w := s.world
	w.Rank = rank
	return w.Part(s.heads)
}

func (r mergedRanks) place(c *ongpu.Call, in []tensor.Shape, _ tensor.Shape) {
	s := r.states(in)
	c.Scratch = func(*layers.Engine) (int, error) { return (s.world.Size+1)*s.all + s.merged(nil, nil).Needs(), nil }
}

// merged is the merging of the ranks' states of this rank's heads.
func (s *rankStates) merged(w *ongpu.Work, of func(rank int) gpu.Memory) *layers.States {
	own := s.world.Rank
	from, to := s.of(own)
	n := s.rows * (to - from)
	o := &layers.States{Rows: n, Dim: s.dim, LSEs: make([]gpu.Memory, s.world.Size)}
	if w == nil {
		return o
	}
	o.Out = w.Out
	for rank := range o.LSEs {
		o.Outs, o.LSEs[rank] = append(o.Outs, part(of(rank), s.outs[own], n*s.dim)), part(of(rank), s.lses[own], n)
	}
	return o
}

// launch packs the states by owners, sends them to all ranks, and merges those of the rank's own heads.
func (r mergedRanks) launch(w *ongpu.Work, in []tensor.Shape, _ tensor.Shape) error {
	s := r.states(in)
	all := s.all
	packed := part(w.Scratch, 0, all)
	of := func(rank int) gpu.Memory { return part(w.Scratch, (rank+1)*all, all) }
	for rank := range s.world.Size {
		from, to := s.of(rank)
		for _, x := range []struct{ operand, dim, at int }{{0, s.dim, s.outs[rank]}, {1, 1, s.lses[rank]}} {
			n := (to - from) * x.dim
			m := attn.Move{Dims: [3]int{1, 1, s.rows}, N: n, From: attn.Lattice{At: from * x.dim, Steps: [3]int{0, 0, s.heads * x.dim}}, To: attn.Lattice{At: x.at, Steps: [3]int{0, 0, n}}}
			if err := w.Move(&layers.Move{Move: m, X: w.In[x.operand].Memory, Y: packed}); err != nil {
				return err
			}
		}
	}
	for rank := range s.world.Size {
		send := *w
		send.In, send.Out = []ongpu.Operand{{Memory: packed}}, of(rank)
		if err := r.comm.Internal().Queue(&send, ongpu.Broadcast, all, rank); err != nil {
			return err
		}
	}
	o := s.merged(w, of)
	o.Scratch = part(w.Scratch, (s.world.Size+1)*all, o.Needs())
	return w.MergeStates(o)
}

// inHost is a collective of host memory.
func inHost[F float | int32](r together, in G.Value, shape tensor.Shape) (G.Value, error) {
	x, err := elements[F](r.title(), "x", in, shape)
	if err != nil {
		return nil, err
	}
	label := fmt.Sprintf("%s from rank %d of %d elements of %v", r.title(), r.from, len(x), r.dtype)
	var y []F
	if r.what == ongpu.Sum {
		y, err = sumOfHosts(r.title(), label, x, r.comm)
	} else {
		var got [][]F
		if got, err = exchanged(r.title(), label, x, r.comm, r.from == r.comm.World().Rank, r.from); err == nil {
			y = got[0]
		}
	}
	if err != nil {
		return nil, err
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(y)), nil
}

// sumOfHosts returns the sum of all ranks' x, in their order.
func sumOfHosts[F float | int32](title, label string, x []F, comm *ranks.Comm) (y []F, err error) {
	all := make([]int, comm.World().Size)
	for i := range all {
		all[i] = i
	}
	got, err := exchanged(title, label, x, comm, true, all...)
	if err != nil {
		return nil, err
	}
	for _, part := range got[1:] {
		for k, v := range part {
			got[0][k] += v
		}
	}
	return got[0], nil
}

// exchanged returns the x of some ranks. A rank sends its own, or does not.
func exchanged[F float | int32](title, label string, x []F, comm *ranks.Comm, send bool, from ...int) (all [][]F, err error) {
	parts := make([][]byte, comm.World().Size)
	if send {
		for i := range parts {
			parts[i] = bytesOf(x)
		}
	}
	got, err := comm.Internal().Exchange(label, parts)
	if err != nil {
		return nil, rankError(title, err)
	}
	for _, rank := range from {
		part := elementsOf[F](got[rank])
		if len(part) != len(x) {
			return nil, errorf(title, errs.ErrShape, "rank %d has sent %d elements, want %d", rank, len(part), len(x))
		}
		all = append(all, part)
	}
	return all, nil
}

// rankError keeps the kind of a rank's failure.
func rankError(name string, err error) error { return fmt.Errorf(prefix+"%s: %w", name, err) }

func bytesOf[F any](x []F) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), len(x)*int(unsafe.Sizeof(*new(F))))
}

// elementsOf returns the elements of bytes, which may begin at any address.
func elementsOf[F any](b []byte) []F {
	x := make([]F, len(b)/int(unsafe.Sizeof(*new(F))))
	copy(bytesOf(x), b)
	return x
}
