package gradient

import (
	"math"

	"gorgonia.org/leanattention/internal/lean"
)

// A sink affects keys only as a part of the log-sum-exp.

// sink returns the gradient of a query head's sink: a further score with a value of 0. The parts of sequences and
// query positions are added in their order, in float64.
func (r *backwardRun[F]) sink(head int) F {
	s, o := &r.shape, &r.ops
	sink := float64(o.Sinks[head])
	if math.IsInf(sink, -1) {
		return 0 // its weight is 0
	}
	var sum float64
	for b := range s.Batch {
		first := (b*s.Heads + head) * s.Queries
		for row := first; row < first+s.QueriesOf(b); row++ {
			sum -= math.Exp(min(sink-float64(o.LSE[row]), 0)) * o.off(row, s.ValueDim)
		}
	}
	return F(sum)
}

// off returns D of an output row of dim elements: dO.O - dLSE.
func (o *Operands[F]) off(row, dim int) (off float64) {
	if o.DOut != nil {
		do := o.DOut[row*dim : (row+1)*dim]
		for j, x := range o.Out[row*dim : (row+1)*dim] {
			off += float64(x) * float64(do[j])
		}
	}
	if o.DLSE != nil {
		off -= float64(o.DLSE[row])
	}
	return off
}

// sink adds the sink of row r of the block, if there is one, to the measured maximum and sum.
func (w *backwardWorker[F]) sink(r int) {
	s := &w.run.shape
	if !s.Sinks || w.sees[r] == 0 {
		return
	}
	state := lean.State[F]{M: w.top[r], L: w.l[r]}
	state.Sink(F(float64(w.run.ops.Sinks[w.head0+(w.row+r)/s.Queries]) * lean.Log4E))
	w.top[r], w.l[r] = state.M, state.L
}
