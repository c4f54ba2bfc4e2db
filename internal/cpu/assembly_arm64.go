//go:build arm64 && gc && !noasm

package cpu

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
)

// What assembly there is for arm64 is for keys and values of float32. It was tested on an emulator only: the
// numbers here are what caches suggest, not what measurements do.

const (
	// neonDims is what Dim and ValueDim must be multiples of: other tiles are left to the Go kernel.
	neonDims = 8

	// neonRows is how many rows scoreNEON and weightedNEON take together.
	neonRows = 4

	// neonValues is how many bytes of values at most are added to all rows before the next ones: they stay in
	// the first-level cache while rows go by.
	neonValues = 16 << 10
)

// attendTiers returns the kernels by tier, for queries of float32.
func attendTiers32(twins [attn.DTypes]kernel) [tiers][attn.DTypes]kernel {
	t := allTiers(twins)
	t[tierNEON][attn.Float32] = func(t *tile) {
		if t.Dim%neonDims != 0 || t.ValueDim%neonDims != 0 {
			twins[attn.Float32](t)
			return
		}
		attendNEON(t)
	}
	return t
}

// attendNEON is the kernel, for dims that are multiples of neonDims.
func attendNEON(t *tile) {
	stride := (t.Count + 3) / 4 * 4
	values := func(row, rows, from, to int) { valuesNEON(t, stride, row, rows, from, to) }
	for i := range t.K {
		c := i * t.Run
		scoreNEON(at32(t.Scores, c), at32(t.Q, 0), &t.K[i], 0, t.Rows, min(t.Run, t.Count-c), t.Dim, stride, t.KStep)
	}
	modifyScores(t, unsafe.Slice((*float32)(t.Scores), t.Rows*stride), stride)
	if t.Visible == nil {
		if weighNEON(at32(t.Scores, 0), at32(t.O, 0), at32(t.M, 0), at32(t.L, 0), t.Rows, t.Count, stride, t.ValueDim) == 0 {
			valuesNEON(t, stride, 0, t.Rows, 0, t.Count)
			return
		}
		ragged[float32](t, neonRows, func(int) int { return t.Count }, values)
		return
	}
	visible := unsafe.Slice((*int32)(t.Visible), t.Rows)
	for r, n := range visible {
		if n > 0 {
			weighNEON(at32(t.Scores, r*stride), at32(t.O, r*t.ValueDim), at32(t.M, r), at32(t.L, r), 1, int(n), stride, t.ValueDim)
		}
	}
	ragged[float32](t, neonRows, func(r int) int { return int(visible[r]) }, values)
}

// valuesNEON adds the weighted values of keys [from, to), from a multiple of 4, to rows [row, row+rows).
func valuesNEON(t *tile, stride, row, rows, from, to int) {
	most := max(neonValues/(4*t.ValueDim)&^3, 4)
	for c := from; c < to; {
		n := min(t.Run-c%t.Run, to-c, most)
		weightedNEON(at32(t.O, row*t.ValueDim), at32(t.Scores, row*stride+c), &t.V[c/t.Run], c%t.Run/4*t.VStep,
			rows, n, t.ValueDim, stride, t.VStep)
		c += n
	}
}

// attendTiers64 returns the kernels by tier, for queries of float64.
func attendTiers64(twins [attn.DTypes]kernel) [tiers][attn.DTypes]kernel { return allTiers(twins) }
