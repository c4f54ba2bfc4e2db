//go:build arm64 && gc && !noasm

package attention

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
)

// Assembly for arm64 takes keys and values of the type of the queries. It was tested on an emulator only: the constants
// follow from cache sizes, not from measurements.

const (
	// neonRows is the number of rows that score and weighted process together.
	neonRows = 4

	// neonValues is the number of bytes of values that are added to all rows before the next values: they stay in the
	// first-level cache while the rows pass.
	neonValues = 16 << 10
)

// neon is the attention kernel for queries, keys and values of type F, with its steps in assembly.
type neon[F cpu.Real] struct {
	Steps[F]
	plain kernel // the Go kernel, for a Dim or ValueDim that is no multiple of Dims
}

var (
	neon32 = neon[float32]{Steps32, attendF32F32}
	neon64 = neon[float64]{Steps64, attendF64F64}
)

// attendTiers32 returns the kernels by tier, for queries of float32.
func attendTiers32(plain [attn.DTypes]kernel) [cpu.Tiers][attn.DTypes]kernel {
	t := allTiers(plain)
	t[cpu.TierNEON][attn.Float32] = neon32.attend
	return t
}

// attendTiers64 returns the kernels by tier, for queries of float64.
func attendTiers64(plain [attn.DTypes]kernel) [cpu.Tiers][attn.DTypes]kernel {
	t := allTiers(plain)
	t[cpu.TierNEON][attn.Float64] = neon64.attend
	return t
}

// attend implements kernel.
func (a *neon[F]) attend(t *tile) {
	if t.Dim%a.Dims != 0 || t.ValueDim%a.Dims != 0 {
		a.plain(t)
		return
	}
	stride := (t.Count + 3) / 4 * 4
	values := func(row, rows, from, to int) { a.values(t, stride, row, rows, from, to) }
	for i := range t.K {
		c := i * t.Run
		together := t.Rows
		if t.Alone { // neonRows rows have another order of sums
			together = 1
		}
		for r := 0; r < t.Rows; r += together {
			a.Score(at[F](t.Scores, r*stride+c), at[F](t.Q, r*t.Dim), &t.K[i], 0, together, min(t.Run, t.Count-c), t.Dim, stride, t.KStep)
		}
	}
	scores := unsafe.Slice((*F)(t.Scores), t.Rows*stride)
	modifyScores(t, scores, stride)
	if t.Visible == nil {
		empty := a.Weigh(at[F](t.Scores, 0), at[F](t.O, 0), at[F](t.M, 0), at[F](t.L, 0), t.Rows, t.Count, stride, t.ValueDim)
		dropWeights(t, scores, stride)
		if empty == 0 {
			a.values(t, stride, 0, t.Rows, 0, t.Count)
			return
		}
		ragged[F](t, neonRows, func(int) int { return t.Count }, values)
		return
	}
	visible := unsafe.Slice((*int32)(t.Visible), t.Rows)
	for r, n := range visible {
		if n > 0 {
			a.Weigh(at[F](t.Scores, r*stride), at[F](t.O, r*t.ValueDim), at[F](t.M, r), at[F](t.L, r), 1, int(n), stride, t.ValueDim)
		}
	}
	dropWeights(t, scores, stride)
	ragged[F](t, neonRows, func(r int) int { return int(visible[r]) }, values)
}

// values adds the weighted values of keys [from, to), from a multiple of 4, to rows [row, row+rows).
func (a *neon[F]) values(t *tile, stride, row, rows, from, to int) {
	most := max(neonValues/(int(unsafe.Sizeof(F(0)))*t.ValueDim)&^3, 4)
	for c := from; c < to; {
		n := min(t.Run-c%t.Run, to-c, most)
		a.Weighted(at[F](t.O, row*t.ValueDim), at[F](t.Scores, row*stride+c), &t.V[c/t.Run], c%t.Run/4*t.VStep,
			rows, n, t.ValueDim, stride, t.VStep)
		c += n
	}
}
