package attention

import (
	"math"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/lean"
)

// Turn writes to `to` the head `from`, rotated by the cosines and sines of its pairs, which begin at element first. Elements
// before and after the pairs are copied. to may be from.
func Turn[F, G lean.Float](to, from []F, first int, cos, sin []G, interleaved bool) {
	pairs := len(cos)
	copy(to[:first], from[:first])
	to, from = to[first:], from[first:]
	copy(to[2*pairs:], from[2*pairs:])
	sin = sin[:pairs]
	// Each product is rounded explicitly: without fused multiply-add all architectures have the same bits.
	if interleaved {
		from, to = from[:2*pairs], to[:2*pairs]
		for i, c := range cos {
			a, b, c, s := from[2*i], from[2*i+1], F(c), F(sin[i])
			to[2*i], to[2*i+1] = F(a*c)-F(b*s), F(b*c)+F(a*s)
		}
		return
	}
	left, right := from[:pairs], from[pairs:2*pairs]
	toLeft, toRight := to[:pairs], to[pairs:2*pairs]
	for i, c := range cos {
		a, b, c, s := left[i], right[i], F(c), F(sin[i])
		toLeft[i], toRight[i] = F(a*c)-F(b*s), F(b*c)+F(a*s)
	}
}

// rotation has the rotations of a plan's rows, for queries and new keys. It is the same in all layers.
type rotation struct {
	of    attn.Rotary
	pairs int
	table []float64 // the cosines of each row's pairs, then the sines
}

// lay computes the table for the rows of checked sequences.
func (r *rotation) lay(of attn.Rotary, seqs []attn.Sequence) {
	r.of, r.pairs, r.table = of, of.Turns.Len(), r.table[:0]
	if r.pairs == 0 {
		return
	}
	rows := 0
	for i := range seqs {
		if q := &seqs[i]; q.Queries > 0 {
			rows = max(rows, q.Row+q.Queries)
		}
	}
	if n := rows * 2 * r.pairs; cap(r.table) < n {
		r.table = dense.Make[float64](n)
	} else {
		r.table = r.table[:n]
	}
	turns := make([]attn.Turning, r.pairs)
	for i := range turns {
		turns[i] = of.Turns.Of(i)
	}
	for i := range seqs {
		q := &seqs[i]
		for j := range q.Queries {
			cos, sin := r.row(q.Row + j)
			position := q.Position(j)
			for pair, turn := range turns {
				s, c := math.Sincos(turn.Angle(position))
				cos[pair], sin[pair] = of.Factor*c, of.Factor*s
			}
		}
	}
}

// turns reports whether the plan rotates.
func (r *rotation) turns() bool { return r.pairs > 0 }

// row returns the cosines and sines of a row.
func (r *rotation) row(i int) (cos, sin []float64) {
	all := r.table[i*2*r.pairs : (i+1)*2*r.pairs]
	return all[:r.pairs:r.pairs], all[r.pairs:]
}

// rows returns the number of rows.
func (r *rotation) rows() int {
	if r.pairs == 0 {
		return 0
	}
	return len(r.table) / (2 * r.pairs)
}

// turnRow rotates a head of a row.
func turnRow[F lean.Float](r *rotation, row int, to, from []F) {
	cos, sin := r.row(row)
	Turn(to, from, r.of.First, cos, sin, r.of.Interleaved)
}
