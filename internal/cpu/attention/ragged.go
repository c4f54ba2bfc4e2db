//go:build (amd64 || arm64) && gc && !noasm

package attention

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
)

// ragged adds the weighted values to the rows of a tile, with queries of type F, if rows have different numbers of
// weights. Row r has weights for sees(r) keys, or for none if its state is still empty. values adds the values of keys
// [from, to), from a multiple of 4, to rows [row, row+rows). It is fastest for block rows together.
func ragged[F cpu.Real](t *tile, block int, sees func(r int) int, values func(row, rows, from, to int)) {
	m := unsafe.Slice((*F)(t.M), t.Rows)
	keys := func(r int) int {
		if m[r] == F(math.Inf(-1)) {
			return 0
		}
		return sees(r)
	}
	for from := 0; from < t.Rows; from += block {
		to := min(from+block, t.Rows)
		common := t.Count
		for r := from; r < to; r++ {
			common = min(common, keys(r)&^3)
		}
		values(from, to-from, 0, common)
		for r := from; r < to; r++ {
			values(r, 1, common, keys(r))
		}
	}
}
