package layers

import (
	"fmt"
	"math"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// PartStates is the operands of merging the states of attention that the members of a group have made, each of a part
// of the keys of the same Rows rows and Heads heads:
//
//	YLSE = ln sum e^LSE_i,   Y = sum e^(LSE_i - YLSE) Out_i
//
// in the order of the members, with Own last: all members get the same bits. A state of no key has a log-sum-exp of
// -Inf and an output of zeros. Outputs are Rows x Heads x Dim of float32, log-sum-exps Rows x Heads.
//
// Consecutive members form groups of Places members. Each group has its share of the heads, in order, and merges the
// states of these heads: other heads in its members' memory are not read. All members get Y of all heads.
//
// With Scatter, which needs one group, Y and YLSE of member i have heads i*Heads/members up to (i+1)*Heads/members alone. Heads is a multiple
// of the number of members.
type PartStates struct {
	Rows, Heads, Dim, Places int

	Out, LSE    []gpu.Memory // one for each member, in its memory
	Own, OwnLSE []gpu.Memory // one more state for each member; nil: none
	Y           []gpu.Memory // one for each member: float32, float16 or bfloat16
	YLSE        []gpu.Memory // one for each member, float32; nil: not wanted
	Scatter     bool
}

// mergeStatesParams is struct MergeStatesParams.
type mergeStatesParams struct {
	group                          exchangeGroup
	out, lse                       [exchangeMembers]uint64
	ownOut, ownLse, y, yLse        uint64
	rows, heads, dim, kind, places int32
	own                            int32
}

// MergeParts queues a member's part on a stream of the member, in the order of the group's operations. Errors wrap
// attn.ErrShape and attn.ErrDType, or are the driver's; then nothing is queued.
func (x *Exchange) MergeParts(s *cuda.Stream, o *PartStates, member int) error {
	const op = "merge of parts"
	d, err := x.engine(op, member)
	if err != nil {
		return err
	}
	members := len(x.engines)
	const most = math.MaxInt32 - exchangeAhead*exchangeBlocks*exchangeThreads // kernels count fours in steps of a grid
	switch {
	case o.Rows < 1 || o.Heads < 1 || o.Dim < 4 || o.Dim%4 != 0 || o.Rows > most/o.Heads || o.Rows*o.Heads > most/(o.Dim/4):
		return gpu.Errorf(op, attn.ErrShape, "%d rows of %d heads of %d", o.Rows, o.Heads, o.Dim)
	case o.Places < 1 || members%o.Places != 0 || o.Heads%(members/o.Places) != 0:
		return gpu.Errorf(op, attn.ErrShape, "%d heads, and %d members of %d places", o.Heads, members, o.Places)
	case o.Scatter && (o.Places != members || o.Heads%members != 0):
		return gpu.Errorf(op, attn.ErrShape, "%d heads to scatter over %d members of %d places: want one group, and a multiple of its members", o.Heads, members, o.Places)
	}
	states := o.Rows * o.Heads
	count, merged := states*o.Dim, states // merged: states of Y
	if o.Scatter {
		merged /= members
	}
	all := func(int) int { return count }
	for _, err := range []error{
		x.operands(op, "out", o.Out, false, all), x.loose(op, "lse", o.LSE, false, states),
		x.operands(op, "the own out", o.Own, true, all), x.loose(op, "the own lse", o.OwnLSE, true, states),
		x.loose(op, "the merged lse", o.YLSE, true, merged),
	} {
		if err != nil {
			return err
		}
	}
	if (o.Own == nil) != (o.OwnLSE == nil) {
		return gpu.Errorf(op, attn.ErrShape, "an own output without its log-sum-exp, or the other way round")
	}
	if len(o.Y) != members {
		return gpu.Errorf(op, attn.ErrShape, "y of %d members of %d", len(o.Y), members)
	}
	for i := range o.Y {
		if err := o.Y[i].Check(op, fmt.Sprintf("y of member %d", i), merged*o.Dim); err != nil {
			return err
		}
	}
	y := o.Y[member]
	own, ownLSE, lse := at(o.Own, member), at(o.OwnLSE, member), at(o.YLSE, member)
	p := mergeStatesParams{group: x.group(member), ownOut: own.AddressOr0(), ownLse: ownLSE.AddressOr0(), y: y.Address(), yLse: lse.AddressOr0(),
		rows: int32(o.Rows), heads: int32(o.Heads), dim: int32(o.Dim), kind: gpu.Code(y.DType), places: int32(o.Places)}
	for i := range x.engines {
		p.out[i], p.lse[i] = o.Out[i].Address(), o.LSE[i].Address()
	}
	if o.Scatter {
		p.own = int32(o.Heads / members)
	}
	many, words := 0, merged*(o.Dim+2) // words of log-sum-exps are all in one half of an inbox
	if words > x.few.merge {
		many = 1
	}
	memory := append(append([]gpu.Memory{own, ownLSE, y, lse}, o.Out...), o.LSE...)
	return launchExchange(d, s, x, x.kernels[member].mergeStates[many], d.exchangeGrid(x, merged*o.Dim/4), &p, memory)
}
