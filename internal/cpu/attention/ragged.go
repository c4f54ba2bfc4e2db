//go:build (amd64 || arm64) && gc && !noasm

package attention

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
)

// ragged adds the weighted values where rows of a tile, of queries of type F, differ in the keys that they have weights for: row r
// has those of sees(r) keys, or, if its state is still empty, none. values adds those of keys [from, to), from
// a multiple of 4, to rows [row, row+rows); it takes block rows together best.
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
