package decoder

import (
	"math"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// States is the operands of the merging of states of attention, which are normalised:
//
//	LSE = ln sum_i e^(LSEs[i])
//	Out = sum_i e^(LSEs[i]-LSE) Outs[i]
//
// of float32, with sums in the order of the states. Outs are Rows x Dim, and LSEs have a number for each
// row. One of -Inf is of no key, and its output is not read. One of Out and LSE may have no buffer; without Out
// there are no Outs, and Dim is 1. Out and LSE are no state's.
type States struct {
	Rows, Dim  int
	Outs, LSEs []gpu.Memory
	Out, LSE   gpu.Memory
	Scratch    gpu.Memory // as many elements as [States.Needs] says
}

// Needs is how many elements of scratch the merging of so many states takes: more than a launch merges are merged with the
// state of those before them.
func (o *States) Needs() int {
	if len(o.LSEs) <= nodeStates {
		return 0
	}
	return 2 * o.Rows
}

// mergeParams is struct MergeParams.
type mergeParams struct {
	outs, lses  [nodeStates]uint64
	out, lse    uint64
	count       int64
	dim, states int32
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
	if err := o.Out.CheckOptional(op, "the output", o.Rows*o.Dim); err != nil {
		return err
	}
	if err := o.LSE.CheckOptional(op, "the log-sum-exp", o.Rows); err != nil {
		return err
	}
	if n := o.Needs(); n > 0 {
		return o.Scratch.CheckFloats(op, "the scratch", n)
	}
	return nil
}

// MergeStates queues it.
func (d *Engine) MergeStates(s *cuda.Stream, o *States) error {
	const op = "merge of states"
	if err := o.check(op); err != nil {
		return err
	}
	held := []gpu.Memory{o.Out, o.LSE, o.Scratch}
	before := uint64(0) // the log-sum-exp of what was merged before
	for from, pass := 0, 0; from < len(o.LSEs); pass++ {
		p := mergeParams{out: o.Out.AddressOr0(), count: int64(o.Rows) * int64(o.Dim), dim: int32(o.Dim)}
		add := func(out, lse uint64) {
			p.outs[p.states], p.lses[p.states] = out, lse
			p.states++
		}
		memory := held
		if pass > 0 {
			add(p.out, before)
		}
		for ; from < len(o.LSEs) && p.states < nodeStates; from++ {
			memory = append(memory, o.LSEs[from])
			out := uint64(0)
			if p.out != 0 {
				memory = append(memory, o.Outs[from])
				out = o.Outs[from].Address()
			}
			add(out, o.LSEs[from].Address())
		}
		if p.lse = o.LSE.AddressOr0(); from < len(o.LSEs) { // what other threads read is not written over
			p.lse = o.Scratch.Address() + uint64(pass%2*o.Rows*4)
		}
		before = p.lse
		blocks := attn.Ceil(o.Rows*o.Dim, nodeThreads*nodeEach)
		if err := launchNode(d, s, func(k *nodeKernels) *cuda.Function { return k.merge }, blocks, &p, memory...); err != nil {
			return err
		}
	}
	return nil
}
