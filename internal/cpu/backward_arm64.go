//go:build arm64 && gc && !noasm

package cpu

var (
	backwardTiers32 = [tiers]*backwardKernels[float32]{
		tierGo: backwardGo32,
		tierNEON: {
			dims: 8, lanes: 16,
			scores: scoresNEON, weigh: weighRowsNEON, gradient: gradientNEON, add: addProductNEON, addTransposed: addTransposedNEON,
		},
	}
	backwardTiers64 = [tiers]*backwardKernels[float64]{tierGo: backwardGo64, tierNEON: backwardGo64}
)

func scoresNEON(w *backwardScratch[float32], s, x, y []float32, rows, cols, dim, stride int) {
	scoreNEON(&s[0], &x[0], w.open(y, dim), 0, rows, cols, dim, stride, 16*dim)
}

func weighRowsNEON(w *backwardScratch[float32], s, m, l []float32, rows, n, stride int) {
	weighNEON(&s[0], &w.idle[0], &m[0], &l[0], rows, n, stride, idleDim)
}

func gradientNEON(w *backwardScratch[float32], p, ds, m, factor, off []float32, rows, n, stride int) {
	gradientBy(w, weighRowsNEON, p, ds, m, factor, off, rows, n, stride)
}

func addProductNEON(w *backwardScratch[float32], o, p, v []float32, rows, count, dim, stride int) {
	weightedNEON(&o[0], &p[0], w.open(v, dim), 0, rows, count, dim, stride, 16*dim)
}

// addTransposedNEON transposes some rows at a time.
func addTransposedNEON(w *backwardScratch[float32], o, p, v []float32, rows, count, dim, stride int) {
	const most = 16
	for r := 0; r < rows; r += most {
		n := min(most, rows-r)
		for i := range n {
			for c, x := range p[(r+i)*stride : (r+i)*stride+count] {
				w.wide[c*most+i] = x
			}
		}
		addProductNEON(w, o, w.wide, v[r*dim:], count, n, dim, most)
	}
}
