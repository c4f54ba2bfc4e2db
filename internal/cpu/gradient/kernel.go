package gradient

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/attention"
	"gorgonia.org/leanattention/internal/cpu/vector"
)

// backwardKernels are the kernels of a backward pass. Matrices are row-major with rows as long as they have columns,
// unless a stride is given.
type backwardKernels[F cpu.Real] struct {
	// dims divides Dim and ValueDim; for other sizes there are the Go kernels.
	dims int

	// lanes is the width of a panel: a divisor of backwardRows and of backwardKeys, and a multiple of 4.
	lanes int

	// scores computes, for r < rows, c < cols:
	//
	//	s[r*stride+c] = sum_i x[r*dim+i] y[c*dim+i]
	//
	// cols is a multiple of lanes.
	scores func(w *backwardScratch[F], s, x, y []F, rows, cols, dim, stride int)

	// gradient computes, for r < rows, c < n, with i = r*stride + c:
	//
	//	p[i] = 4^min(p[i]-m[r], 0) factor[r]
	//	ds[i] = p[i] (ds[i] - off[r])
	gradient func(w *backwardScratch[F], p, ds, m, factor, off []F, rows, n, stride int)

	// weigh computes, for r < rows, c < n, with top = max(m[r], max_c s[r*stride+c]):
	//
	//	s[r*stride+c] = 4^(s[r*stride+c]-top)
	//	l[r] = 4^(m[r]-top) l[r] + sum_c s[r*stride+c]
	//	m[r] = top
	//
	// A row whose top is -Inf is left as it is. rows is at most backwardRows.
	weigh func(w *backwardScratch[F], s, m, l []F, rows, n, stride int)

	// add computes, for r < rows, i < dim:
	//
	//	o[r*dim+i] += sum_c p[r*stride+c] v[c*dim+i]   (c < count)
	//
	// rows and count are multiples of 4.
	add func(w *backwardScratch[F], o, p, v []F, rows, count, dim, stride int)

	// addTransposed computes, for c < count, i < dim:
	//
	//	o[c*dim+i] += sum_r p[r*stride+c] v[r*dim+i]   (r < rows)
	//
	// rows is a multiple of 4.
	addTransposed func(w *backwardScratch[F], o, p, v []F, rows, count, dim, stride int)
}

// backwardScratch is the scratch memory of a backward pass's kernels.
type backwardScratch[F cpu.Real] struct {
	quad attention.Streams // four rows of a matrix: an array on the stack could move
	wide []F               // panelOf(the longest row), or 16 x backwardKeys if that is more
	idle []F               // backwardRows x idleDim zeros
	// Maxima and sums of rows: 2 x backwardRows.
	stats []F
}

// open makes w.quad the first four of x's rows, which are row elements apart: the streams that assembly reads.
func (w *backwardScratch[F]) open(x []F, row int) *attention.Streams {
	_ = x[3*row]
	for i := range w.quad {
		w.quad[i] = unsafe.Pointer(&x[i*row])
	}
	return &w.quad
}

// idleDim is the length of the outputs that weigh would rescale, which are unused.
const idleDim = 8

// panelOf returns the largest number of elements of a panel of rows of n elements.
func panelOf(n int) int { return 32 * ((n + 15) / 16 * 16) }

var backwardGo32, backwardGo64 = backwardGo[float32](), backwardGo[float64]()

// backwardKernelsFor returns the kernels in use for rows of these sizes.
func backwardKernelsFor[F cpu.Real](dim, valueDim int) *backwardKernels[F] {
	if unsafe.Sizeof(F(0)) == 8 {
		return (*backwardKernels[F])(unsafe.Pointer(backwardTiers64[cpu.InUse()].orGo(backwardGo64, dim, valueDim)))
	}
	return (*backwardKernels[F])(unsafe.Pointer(backwardTiers32[cpu.InUse()].orGo(backwardGo32, dim, valueDim)))
}

// orGo returns k if k serves rows of these sizes, and otherwise the Go kernels.
func (k *backwardKernels[F]) orGo(other *backwardKernels[F], dim, valueDim int) *backwardKernels[F] {
	if dim%k.dims != 0 || valueDim%k.dims != 0 {
		return other
	}
	return k
}

func backwardGo[F cpu.Real]() *backwardKernels[F] {
	return &backwardKernels[F]{
		dims: 1, lanes: 16,
		scores: scoresGo[F], weigh: weighGo[F], gradient: gradientGo[F], add: addProductGo[F], addTransposed: addTransposedGo[F],
	}
}

func scoresGo[F cpu.Real](_ *backwardScratch[F], s, x, y []F, rows, cols, dim, stride int) {
	for c := 0; c < cols; c += 4 {
		k := y[c*dim : (c+4)*dim]
		for r := range rows {
			vector.Dot4((*[4]F)(s[r*stride+c:]), x[r*dim:(r+1)*dim], k[:dim], k[dim:2*dim], k[2*dim:3*dim], k[3*dim:])
		}
	}
}

func weighGo[F cpu.Real](_ *backwardScratch[F], s, m, l []F, rows, n, stride int) {
	for r := range rows {
		row := s[r*stride : r*stride+n]
		top := max(m[r], vector.Maximum(row))
		if top == F(math.Inf(-1)) {
			continue
		}
		l[r] = l[r]*exp4Of(m[r]-top) + vector.Exponentials(row, top)
		m[r] = top
	}
}

// exp4Of returns 4^x for x <= 0, as exponentials computes it.
func exp4Of[F cpu.Real](x F) F {
	e := [1]F{x}
	return vector.Exponentials(e[:], 0)
}

func addProductGo[F cpu.Real](_ *backwardScratch[F], o, p, v []F, rows, count, dim, stride int) {
	for r := range rows {
		to := o[r*dim : (r+1)*dim]
		for c := 0; c < count; c += 4 {
			x := v[c*dim : (c+4)*dim]
			vector.Add4(to, (*[4]F)(p[r*stride+c:]), x[:dim], x[dim:2*dim], x[2*dim:3*dim], x[3*dim:])
		}
	}
}

func addTransposedGo[F cpu.Real](_ *backwardScratch[F], o, p, v []F, rows, count, dim, stride int) {
	for r := 0; r < rows; r += 4 {
		x := v[r*dim : (r+4)*dim]
		p0, p1, p2, p3 := p[r*stride:], p[(r+1)*stride:], p[(r+2)*stride:], p[(r+3)*stride:]
		for c := range count {
			vector.Add4(o[c*dim:(c+1)*dim], &[4]F{p0[c], p1[c], p2[c], p3[c]}, x[:dim], x[dim:2*dim], x[2*dim:3*dim], x[3*dim:])
		}
	}
}

func gradientGo[F cpu.Real](w *backwardScratch[F], p, ds, m, factor, off []F, rows, n, stride int) {
	gradientBy(w, weighGo[F], p, ds, m, factor, off, rows, n, stride)
}

// gradientBy is a gradient of backwardKernels through their weigh.
func gradientBy[F cpu.Real](w *backwardScratch[F], weigh func(w *backwardScratch[F], s, m, l []F, rows, n, stride int), p, ds, m, factor, off []F, rows, n, stride int) {
	top, sums := w.stats[:rows], w.stats[rows:2*rows]
	copy(top, m)
	clear(sums)
	for r := range rows {
		for c, x := range p[r*stride : r*stride+n] {
			p[r*stride+c] = min(x, m[r])
		}
	}
	weigh(w, p, top, sums, rows, n, stride)
	for r := range rows {
		p, ds := p[r*stride:r*stride+n], ds[r*stride:r*stride+n]
		f, off := factor[r], off[r]
		for c, x := range p {
			p[c] = x * f
			ds[c] = p[c] * (ds[c] - off)
		}
	}
}
