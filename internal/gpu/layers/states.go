package layers

import (
	"math"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// States is the operands of merging normalised states of attention:
//
//	LSE = ln sum_i e^(LSEs[i])
//	Out = sum_i e^(LSEs[i]-LSE) Outs[i]
//
// of float32, except Out, which may be of 16 bits, with sums in the order of the states. Outs are Rows x Dim, and
// LSEs have a number for each row. A log-sum-exp of -Inf means no key, and its output is not read. One of Out and LSE
// may have no buffer; without Out there are no Outs, and Dim is 1. Out and LSE are no state's memory.
type States struct {
	Rows, Dim  int
	Outs, LSEs []gpu.Memory
	Out, LSE   gpu.Memory
	Scratch    gpu.Memory // as many elements as [States.Needs] returns
}

// Needs returns how many elements of scratch merging needs: states beyond a launch's limit are merged with the state
// of the earlier ones.
func (o *States) Needs() int {
	switch {
	case len(o.LSEs) <= nodeStates:
		return 0
	case o.rounds():
		return 2*o.Rows + o.Rows*o.Dim
	}
	return 2 * o.Rows
}

// rounds reports whether Out is of 16 bits: states between launches are not rounded.
func (o *States) rounds() bool { return o.Out.Buffer != nil && o.Out.DType != attn.Float32 }

// mergeParams is struct MergeParams.
type mergeParams struct {
	outs, lses           [nodeStates]uint64
	out, lse             uint64
	count                int64
	dim, states, outType int32
	_                    [4]byte
}

func (o *States) check(op string) error {
	all := o.Out.Buffer != nil
	switch {
	case o.Rows < 1 || o.Dim < 1 || max(o.Rows, o.Dim) > math.MaxInt32 || !all && o.Dim > 1:
		return gpu.Errorf(op, attn.ErrShape, "%d rows of %d elements", o.Rows, o.Dim)
	case len(o.LSEs) < 1 || all && len(o.Outs) != len(o.LSEs) || !all && len(o.Outs) > 0:
		return gpu.Errorf(op, attn.ErrShape, "%d outputs and %d log-sum-exps of states", len(o.Outs), len(o.LSEs))
	case !all && o.LSE.Buffer == nil:
		return gpu.Errorf(op, attn.ErrShape, "nothing to write")
	case attn.Ceil(o.Rows*o.Dim, nodeThreads*nodeEach) > math.MaxInt32:
		return gpu.Errorf(op, attn.ErrUnsupported, "%d rows of %d elements", o.Rows, o.Dim)
	}
	for i := range o.LSEs {
		if err := o.LSEs[i].CheckFloats(op, "a state's log-sum-exp", o.Rows); err != nil {
			return err
		}
	}
	for i := range o.Outs {
		if err := o.Outs[i].CheckFloats(op, "a state's output", o.Rows*o.Dim); err != nil {
			return err
		}
	}
	if all {
		if !gpu.Known(o.Out.DType) {
			return gpu.Errorf(op, attn.ErrDType, "the output is %v", o.Out.DType)
		}
		if err := o.Out.Check(op, "the output", o.Rows*o.Dim); err != nil {
			return err
		}
	}
	if err := o.LSE.CheckOptional(op, "the log-sum-exp", o.Rows); err != nil {
		return err
	}
	if n := o.Needs(); n > 0 {
		return o.Scratch.CheckFloats(op, "the scratch", n)
	}
	return nil
}

// MergeStates queues a merge.
func (d *Engine) MergeStates(s *cuda.Stream, o *States) error {
	const op = "merge of states"
	if err := o.check(op); err != nil {
		return err
	}
	held := []gpu.Memory{o.Out, o.LSE, o.Scratch}
	before, partial := uint64(0), o.Out.AddressOr0() // the log-sum-exp of the earlier launches, and its output
	if o.Needs() > 0 && o.rounds() {
		partial = o.Scratch.Address() + uint64(2*o.Rows*4)
	}
	for from, pass := 0, 0; from < len(o.LSEs); pass++ {
		p := mergeParams{count: int64(o.Rows) * int64(o.Dim), dim: int32(o.Dim)}
		add := func(out, lse uint64) {
			p.outs[p.states], p.lses[p.states] = out, lse
			p.states++
		}
		memory := held
		if pass > 0 {
			add(partial, before)
		}
		for ; from < len(o.LSEs) && p.states < nodeStates; from++ {
			memory = append(memory, o.LSEs[from])
			out := uint64(0)
			if o.Out.Buffer != nil {
				memory = append(memory, o.Outs[from])
				out = o.Outs[from].Address()
			}
			add(out, o.LSEs[from].Address())
		}
		if p.out, p.outType, p.lse = o.Out.AddressOr0(), gpu.Code(o.Out.DType), o.LSE.AddressOr0(); from < len(o.LSEs) {
			p.out, p.outType = partial, gpu.Code(attn.Float32)
			p.lse = o.Scratch.Address() + uint64(pass%2*o.Rows*4) // a launch does not overwrite what other threads read
		}
		before = p.lse
		blocks := attn.Ceil(o.Rows*o.Dim, nodeThreads*nodeEach)
		if err := launchNode(d, s, func(k *nodeKernels) *cuda.Function { return k.merge }, blocks, &p, memory...); err != nil {
			return err
		}
	}
	return nil
}
