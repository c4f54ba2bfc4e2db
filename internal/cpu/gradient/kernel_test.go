package gradient

import (
	"math"
	"math/rand/v2"
	"testing"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/reftest"
)

// TestBackwardKernels holds the functions of backward passes to their contracts, computed in float64.
func TestBackwardKernels(t *testing.T) {
	rng := reftest.Rand(t)
	n := cputest.Cases(t, 26, 100)
	if testing.Short() {
		n = 20
	}
	for range n {
		dim := 1 + rng.IntN(70)
		if rng.IntN(2) == 0 {
			dim = 8 * (1 + rng.IntN(17))
		}
		testBackwardKernels[float32](t, rng, dim)
		testBackwardKernels[float64](t, rng, dim)
		if t.Failed() {
			return
		}
	}
}

// margin is how many elements are watched on either side of a matrix.
const margin = 16

// matrix is rows x cols, stride a row, with NaN between and around the rows.
type matrix[F cpu.Real] struct {
	name               string
	rows, cols, stride int
	x                  []F // from the first element on
	mem                []F
	was                []F // a copy
}

func newMatrix[F cpu.Real](rng *rand.Rand, name string, rows, cols, stride int) *matrix[F] {
	mem := cputest.Filled[F](rows*stride + 2*margin)
	m := &matrix[F]{name: name, rows: rows, cols: cols, stride: stride, x: mem[margin : len(mem)-margin], mem: mem}
	for r := range rows {
		for c := range cols {
			m.x[r*stride+c] = F(rng.NormFloat64())
		}
	}
	m.was = append(m.was, m.x...)
	return m
}

func (m *matrix[F]) old(r, c int) float64 { return float64(m.was[r*m.stride+c]) }

// check compares the numbers with those of want, which comes with a bound, and looks for what was written beside them.
func (m *matrix[F]) check(t *testing.T, want func(r, c int) (x, bound float64)) {
	t.Helper()
	for i, got := range m.mem {
		r, c := (i-margin)/m.stride, (i-margin)%m.stride
		if i < margin || r >= m.rows || c >= m.cols {
			if !cputest.IsUntouched(got) {
				t.Errorf("%v was written at %d, beside %s, which is %d x %d, stride %d", got, i-margin, m.name, m.rows, m.cols, m.stride)
				return
			}
			continue
		}
		if x, bound := want(r, c); !(math.Abs(float64(got)-x) <= bound) {
			t.Errorf("%s[%d][%d] of %d x %d is %v, want %v within %v", m.name, r, c, m.rows, m.cols, got, x, bound)
			return
		}
	}
}

func testBackwardKernels[F cpu.Real](t *testing.T, rng *rand.Rand, dim int) {
	t.Helper()
	k, u := backwardKernelsFor[F](dim, dim), cputest.AccOf[F]().Unit()
	w := &backwardScratch[F]{
		wide: make([]F, panelOf(max(dim, backwardKeys/2))), idle: make([]F, backwardRows*idleDim), stats: make([]F, 2*backwardRows),
	}
	rows, cols := 1+rng.IntN(backwardRows), up(1+rng.IntN(backwardKeys), k.lanes)
	stride := cols + rng.IntN(20)

	// The products of all rows with all columns, and sums of u a term.
	product := func(n int, x, y func(i int) float64) (sum, bound float64) {
		for i := range n {
			p := x(i) * y(i)
			sum, bound = sum+p, bound+math.Abs(p)
		}
		return sum, bound * u * float64(n+2)
	}
	x, y := newMatrix[F](rng, "x", rows, dim, dim), newMatrix[F](rng, "y", cols, dim, dim)
	s := newMatrix[F](rng, "scores", rows, cols, stride)
	k.scores(w, s.x, x.x, y.x, rows, cols, dim, stride)
	s.check(t, func(r, c int) (float64, float64) {
		return product(dim, func(i int) float64 { return x.old(r, i) }, func(i int) float64 { return y.old(c, i) })
	})

	up4 := up(rows, 4)
	count := up(1+rng.IntN(cols), 4)
	p, o := newMatrix[F](rng, "p", up4, count, stride), newMatrix[F](rng, "o", up4, dim, dim)
	k.add(w, o.x, p.x, y.x, up4, count, dim, stride)
	o.check(t, func(r, i int) (float64, float64) {
		sum, bound := product(count, func(c int) float64 { return p.old(r, c) }, func(c int) float64 { return y.old(c, i) })
		return o.old(r, i) + sum, bound + u*math.Abs(o.old(r, i)+sum) + u*float64(count)*math.Abs(o.old(r, i))
	})

	n := 1 + rng.IntN(cols)
	p, o = newMatrix[F](rng, "p", up4, n, stride), newMatrix[F](rng, "o", n, dim, dim)
	v := newMatrix[F](rng, "v", up4, dim, dim)
	k.addTransposed(w, o.x, p.x, v.x, up4, n, dim, stride)
	o.check(t, func(c, i int) (float64, float64) {
		sum, bound := product(up4, func(r int) float64 { return p.old(r, c) }, func(r int) float64 { return v.old(r, i) })
		return o.old(c, i) + sum, bound + u*math.Abs(o.old(c, i)+sum) + u*float64(up4)*math.Abs(o.old(c, i))
	})

	p, ds := newMatrix[F](rng, "weights", rows, n, stride), newMatrix[F](rng, "gradients", rows, n, stride)
	m, factor, off := newMatrix[F](rng, "m", rows, 1, 1), newMatrix[F](rng, "factor", rows, 1, 1), newMatrix[F](rng, "off", rows, 1, 1)
	weight := func(r, c int) (float64, float64) {
		x := math.Min(p.old(r, c)-m.old(r, 0), 0)
		e := math.Exp2(2*x) * factor.old(r, 0)
		return e, math.Abs(e) * u * (8 + 4*math.Abs(x))
	}
	k.gradient(w, p.x, ds.x, m.x, factor.x, off.x, rows, n, stride)
	p.check(t, weight)
	ds.check(t, func(r, c int) (float64, float64) {
		e, bound := weight(r, c)
		d := ds.old(r, c) - off.old(r, 0)
		return e * d, (bound + 4*u*math.Abs(e)) * math.Abs(d)
	})
	for _, x := range []*matrix[F]{m, factor, off} {
		x.check(t, func(r, _ int) (float64, float64) { return x.old(r, 0), 0 })
	}
}
