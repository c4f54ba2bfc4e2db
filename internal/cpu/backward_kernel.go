package cpu

import (
	"math"
	"unsafe"
)

// backwardKernels is what a backward pass computes with. Matrices are row-major with rows as long as they
// have columns, unless a stride is given.
type backwardKernels[F real] struct {
	// dims is what Dim and ValueDim must be multiples of; for others there are the Go kernels.
	dims int

	// lanes is the width of a panel: a divisor of backwardRows and of backwardKeys, and a multiple of 4.
	lanes int

	// scores computes, for r < rows, c < cols:
	//
	//	s[r*stride+c] = sum_i x[r*dim+i] y[c*dim+i]
	//
	// cols is a multiple of lanes.
	scores func(w *backwardScratch[F], s, x, y []F, rows, cols, dim, stride int)

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

	// transpose computes, for r < lanes, c < cols:
	//
	//	t[c*lanes+r] = s[r*stride+c]
	//
	// cols is a multiple of lanes.
	transpose func(w *backwardScratch[F], t, s []F, cols, stride int)
}

// backwardScratch is what kernels of a backward pass need for themselves.
type backwardScratch[F real] struct {
	quad streams // four rows of a matrix: an array on the stack would not stay there
	wide []F     // panelOf(the longest row)
	idle []F     // backwardRows x idleDim zeros
}

// open makes w.quad the first four of x's rows, which are so many elements apart: the streams that assembly reads.
func (w *backwardScratch[F]) open(x []F, row int) *streams {
	_ = x[3*row]
	for i := range w.quad {
		w.quad[i] = unsafe.Pointer(&x[i*row])
	}
	return &w.quad
}

// idleDim is the length of the outputs that weigh would re-scale if there were any.
const idleDim = 8

// panelOf returns how many elements a panel of rows of n elements may take.
func panelOf(n int) int { return 32 * ((n + 15) / 16 * 16) }

var backwardGo32, backwardGo64 = backwardGo[float32](), backwardGo[float64]()

// backwardKernelsFor returns the kernels in use for rows of these sizes.
func backwardKernelsFor[F real](dim, valueDim int) *backwardKernels[F] {
	if unsafe.Sizeof(F(0)) == 8 {
		return (*backwardKernels[F])(unsafe.Pointer(backwardTiers64[inUse].orGo(backwardGo64, dim, valueDim)))
	}
	return (*backwardKernels[F])(unsafe.Pointer(backwardTiers32[inUse].orGo(backwardGo32, dim, valueDim)))
}

// orGo returns k if it is for rows of these sizes, else the Go kernels.
func (k *backwardKernels[F]) orGo(other *backwardKernels[F], dim, valueDim int) *backwardKernels[F] {
	if dim%k.dims != 0 || valueDim%k.dims != 0 {
		return other
	}
	return k
}

func backwardGo[F real]() *backwardKernels[F] {
	return &backwardKernels[F]{
		dims: 1, lanes: 16,
		scores: scoresGo[F], weigh: weighGo[F], add: addProductGo[F], transpose: transposeGo[F],
	}
}

func scoresGo[F real](_ *backwardScratch[F], s, x, y []F, rows, cols, dim, stride int) {
	for c := 0; c < cols; c += 4 {
		k := y[c*dim : (c+4)*dim]
		for r := range rows {
			dot4((*[4]F)(s[r*stride+c:]), x[r*dim:(r+1)*dim], k[:dim], k[dim:2*dim], k[2*dim:3*dim], k[3*dim:])
		}
	}
}

func weighGo[F real](_ *backwardScratch[F], s, m, l []F, rows, n, stride int) {
	for r := range rows {
		row := s[r*stride : r*stride+n]
		top := max(m[r], maximum(row))
		if top == F(math.Inf(-1)) {
			continue
		}
		l[r] = l[r]*exp4Of(m[r]-top) + exponentials(row, top)
		m[r] = top
	}
}

// exp4Of is 4^x for x <= 0, as exponentials computes it.
func exp4Of[F real](x F) F {
	e := [1]F{x}
	return exponentials(e[:], 0)
}

func addProductGo[F real](_ *backwardScratch[F], o, p, v []F, rows, count, dim, stride int) {
	for r := range rows {
		to := o[r*dim : (r+1)*dim]
		for c := 0; c < count; c += 4 {
			x := v[c*dim : (c+4)*dim]
			add4(to, (*[4]F)(p[r*stride+c:]), x[:dim], x[dim:2*dim], x[2*dim:3*dim], x[3*dim:])
		}
	}
}

func transposeGo[F real](_ *backwardScratch[F], t, s []F, cols, stride int) {
	const lanes = 16
	for r := range lanes {
		row := s[r*stride : r*stride+cols]
		for c, x := range row {
			t[c*lanes+r] = x
		}
	}
}
