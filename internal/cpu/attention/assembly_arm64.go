//go:build arm64 && gc && !noasm

package attention

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/vector"
)

// Assembly for arm64 takes keys and values of the type of the queries. For queries of float32, those of fewer bits are decoded before,
// widenedKeys at a time. The assembly was tested on an emulator only: the constants follow from cache sizes, not from measurements.

const (
	// neonRows is the number of rows that score and weighted process together.
	neonRows = 4

	// neonDecodedRows is neonRows for values that are decoded for so many rows.
	neonDecodedRows = 16

	// neonValues is the number of bytes of values that are added to all rows before the next values: they stay in the
	// first-level cache while the rows pass.
	neonValues = 16 << 10
)

// neon is the attention kernel for queries, keys and values of type F, with its steps in assembly.
type neon[F cpu.Real] struct {
	Steps[F]
	plain kernel   // the Go kernel, for a Dim or ValueDim that is no multiple of Dims
	widen widen[F] // decodes a row of keys or values; nil: they are of type F
}

var (
	neon32 = neon[float32]{Steps: Steps32, plain: attendF32F32}
	neon64 = neon[float64]{Steps: Steps64, plain: attendF64F64}

	// neonNarrow has the kernels for queries of float32 on other types.
	neonNarrow = [attn.DTypes]neon[float32]{
		attn.Float16:  {Steps32, attendF32F16, widenF16NEON},
		attn.BFloat16: {Steps32, attendF32BF16, widenBF16NEON},
		attn.E4M3:     {Steps32, attendF32E4M3, func(dst []float32, src unsafe.Pointer) { vector.WidenRows(dst, attn.E4M3, src, &noScale, len(dst), 0) }},
		attn.Int8:     {Steps32, attendF32Int8, func(dst []float32, src unsafe.Pointer) { vector.WidenRows(dst, attn.Int8, src, &noScale, len(dst), 0) }},
		attn.Q4:       {Steps32, attendF32Q4, widenQ4[float32]},
	}
	noScale = float32(1)
)

func widenF16NEON(dst []float32, src unsafe.Pointer)  { fromF16NEON(&dst[0], src, len(dst)) }
func widenBF16NEON(dst []float32, src unsafe.Pointer) { fromBF16NEON(&dst[0], src, len(dst)) }

// attendTiers32 returns the kernels by tier, for queries of float32.
func attendTiers32(plain [attn.DTypes]kernel) [cpu.Tiers][attn.DTypes]kernel {
	t := allTiers(plain)
	t[cpu.TierNEON][attn.Float32] = neon32.attend
	for d := range neonNarrow {
		if a := &neonNarrow[d]; a.widen != nil {
			t[cpu.TierNEON][d] = a.attend
		}
	}
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
	stride, block := (t.Count+3)/4*4, neonRows
	if a.widen != nil {
		block = neonDecodedRows
	}
	values := func(row, rows, from, to int) { a.values(t, stride, row, rows, from, to) }
	a.scores(t, stride)
	scores := unsafe.Slice((*F)(t.Scores), t.Rows*stride)
	scaleScores(t, scores, stride, 1)
	modifyScores(t, scores, stride)
	keepScores(t, scores, stride)
	if t.Visible == nil {
		empty := a.Weigh(at[F](t.Scores, 0), at[F](t.O, 0), at[F](t.M, 0), at[F](t.L, 0), t.Rows, t.Count, stride, t.ValueDim)
		watchWeights(t, scores, t.M, stride)
		dropWeights(t, scores, stride)
		scaleWeights(t, scores, stride, 1)
		if empty == 0 {
			a.values(t, stride, 0, t.Rows, 0, t.Count)
			return
		}
		ragged[F](t, block, func(int) int { return t.Count }, values)
		return
	}
	visible := unsafe.Slice((*int32)(t.Visible), t.Rows)
	for r, n := range visible {
		if n > 0 {
			a.Weigh(at[F](t.Scores, r*stride), at[F](t.O, r*t.ValueDim), at[F](t.M, r), at[F](t.L, r), 1, int(n), stride, t.ValueDim)
		}
	}
	watchWeights(t, scores, t.M, stride)
	dropWeights(t, scores, stride)
	scaleWeights(t, scores, stride, 1)
	ragged[F](t, block, func(r int) int { return int(visible[r]) }, values)
}

// decoded decodes the rows of n keys or values, from number c on, for the steps. Four of them are step bytes before the next four.
func (a *neon[F]) decoded(t *tile, runs []Streams, step, dim, c, n int) (to *Streams, toStep int) {
	size := int(unsafe.Sizeof(F(0)))
	rows := unsafe.Slice((*F)(t.Wide), widenedKeys*dim)
	for i := range n {
		a.widen(rows[i*dim:(i+1)*dim], unsafe.Add(runs[(c+i)/t.Run][(c+i)%4], (c+i)%t.Run/4*step))
	}
	to = (*Streams)(unsafe.Add(t.Wide, size*widenedKeys*dim)) // a variable would be allocated
	for i := range to {
		(*[4]uintptr)(unsafe.Pointer(to))[i] = uintptr(unsafe.Pointer(&rows[i*dim])) // without a write barrier, which would read floats as a pointer
	}
	return to, 4 * dim * size
}

// scores computes the scores of all rows with all keys.
func (a *neon[F]) scores(t *tile, stride int) {
	together := t.Rows
	if t.Alone { // neonRows rows have another order of sums
		together = 1
	}
	most := t.Run
	if a.widen != nil {
		most = widenedKeys
	}
	for c := 0; c < t.Count; c += most {
		n, k, step := min(most, t.Count-c), &t.K[c/t.Run], t.KStep
		if a.widen != nil {
			k, step = a.decoded(t, t.K, t.KStep, t.Dim, c, n)
		}
		for r := 0; r < t.Rows; r += together {
			a.Score(at[F](t.Scores, r*stride+c), at[F](t.Q, r*t.Dim), k, 0, together, n, t.Dim, stride, step)
		}
	}
}

// values adds the weighted values of keys [from, to), from a multiple of 4, to rows [row, row+rows).
func (a *neon[F]) values(t *tile, stride, row, rows, from, to int) {
	most := max(neonValues/(int(unsafe.Sizeof(F(0)))*t.ValueDim)&^3, 4)
	for c := from; c < to; {
		v, first, step, n := &t.V[c/t.Run], c%t.Run/4*t.VStep, t.VStep, min(t.Run-c%t.Run, to-c, most)
		if a.widen != nil {
			n = min(widenedKeys, to-c)
			v, step = a.decoded(t, t.V, t.VStep, t.ValueDim, c, n)
			first = 0
		}
		a.Weighted(at[F](t.O, row*t.ValueDim), at[F](t.Scores, row*stride+c), v, first, rows, n, t.ValueDim, stride, step)
		c += n
	}
}
