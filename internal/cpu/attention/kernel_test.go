package attention

import (
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
)

// call is one kernel call, with all operands in separate memory between NaN.
type call[F cpu.Real] struct {
	t       tile
	q, o    []F
	m, l    []F
	visible []int32
	k, v    [][]F // keys and values as the kernel should read them, in order of c
	mem     [8]any
	guards  []guard[F]
}

// guard is memory that a kernel must not change.
type guard[F cpu.Real] struct {
	name string
	mem  []F
}

const guardLen = 16

// guarded returns n values between guards of NaN.
func (c *call[F]) guarded(name string, n int) []F {
	mem := cputest.Filled[F](n + 2*guardLen)
	c.guards = append(c.guards, guard[F]{name, mem[:guardLen]}, guard[F]{name, mem[guardLen+n:]})
	return mem[guardLen : guardLen+n : guardLen+n]
}

// newCall draws a call for the given sizes. Keys are in four streams, or in order if rows have different visible keys.
// Between rows there is NaN.
func newCall[F cpu.Real](rng *rand.Rand, d attn.DType, rows, count, dim, valueDim int, masked bool) *call[F] {
	c := new(call[F])
	c.q = c.guarded("q", rows*dim)
	c.o, c.m, c.l = c.guarded("o", rows*valueDim), c.guarded("m", rows), c.guarded("l", rows)
	scores := c.guarded("scores", rows*((count+15)/16*16))
	wide := c.guarded("wide", wideOf(dim, valueDim))
	for i := range c.q {
		c.q[i] = F(rng.NormFloat64())
	}
	for r := range rows {
		state := lean.State[F]{O: c.o[r*valueDim : (r+1)*valueDim]}
		state.Reset()
		if rng.IntN(2) == 0 { // earlier keys are in the state
			state.M, state.L = F(4*rng.NormFloat64()), F(1+rng.Float64())
			for i := range state.O {
				state.O[i] = F(rng.NormFloat64())
			}
		}
		c.m[r], c.l[r] = state.M, state.L
	}
	c.t = tile{
		Rows: rows, Count: count, Dim: dim, ValueDim: valueDim,
		Q: unsafe.Pointer(&c.q[0]), O: unsafe.Pointer(&c.o[0]),
		M: unsafe.Pointer(&c.m[0]), L: unsafe.Pointer(&c.l[0]),
		Scores: unsafe.Pointer(&scores[0]), Wide: unsafe.Pointer(&wide[0]),
	}
	if masked {
		for range rows {
			c.visible = append(c.visible, int32(rng.IntN(count+1)))
		}
		c.t.Visible = unsafe.Pointer(&c.visible[0])
	}
	c.t.Run = (count + 3) / 4 * 4
	if !masked && rng.IntN(2) == 0 {
		c.t.Run = 4 * (1 + rng.IntN(c.t.Run/4))
		if count > 64 && rng.IntN(2) == 0 {
			c.t.Run = 64 * (1 + rng.IntN(3))
		}
	}
	c.k = c.rows(rng, 0, d, dim, masked, &c.t.K, &c.t.KStep)
	c.v = c.rows(rng, 1, d, valueDim, masked, &c.t.V, &c.t.VStep)
	return c
}

// rows stores random rows for the tile's keys or values and returns them.
func (c *call[F]) rows(rng *rand.Rand, i int, d attn.DType, dim int, masked bool, at *[]Streams, step *int) [][]F {
	f := cputest.FormatOf[F](d)
	gap := rng.IntN(3)
	row := dim + gap
	runs := (c.t.Count + c.t.Run - 1) / c.t.Run
	p := new(problem[F])
	buf := p.buffer(0, d, runs*c.t.Run*row+gap)
	c.mem[i] = p
	*step = row * d.Size()
	length := c.t.Run / 4 // rows of a stream
	order := rng.Perm(4 * runs)
	place := func(k int) int { return (order[k/c.t.Run*4+k%4]*length + k%c.t.Run/4) * row }
	if masked {
		*step *= 4
		place = func(k int) int { return k * row }
	}
	*at = make([]Streams, runs)
	for r := range runs {
		for s := range 4 {
			(*at)[r][s] = buf.At(place(r*c.t.Run + s))
		}
	}
	var rows [][]F
	for k := range c.t.Count {
		x := make([]F, dim)
		for j := range x {
			x[j] = F(f.Round(rng.NormFloat64()))
		}
		cputest.Store(buf.Ptr, buf.DType, place(k), x)
		rows = append(rows, x)
	}
	return rows
}

// TestKernels compares every kernel with its contract, computed in float64.
func TestKernels(t *testing.T) {
	rng := reftest.Rand(t)
	n := cputest.Cases(t, 30, 100)
	if reftest.RaceEnabled {
		n = 20 // a kernel has no goroutines
	}
	for _, d := range cputest.Floats {
		for range n {
			rows, count := 1+rng.IntN(9), 1+rng.IntN(40)
			dim, valueDim := 1+rng.IntN(70), 1+rng.IntN(70)
			if rng.IntN(3) == 0 { // many rows, of dims with kernels of their own
				rows, count = 1+rng.IntN(70), 1+rng.IntN(150)
				dim, valueDim = 8*(1+rng.IntN(17)), 8*(1+rng.IntN(17))
			} else if rng.IntN(3) == 0 { // sizes that fill tiles
				rows, count = 4+rng.IntN(15), 60+rng.IntN(500)
				dim, valueDim = 32*(1+rng.IntN(6)), 32*(1+rng.IntN(6))
			}
			masked := rng.IntN(2) == 0
			testKernel(t, d, newCall[float32](rng, d, rows, count, dim, valueDim, masked))
			testKernel(t, d, newCall[float64](rng, d, rows, count, dim, valueDim, masked))
		}
	}
}

// expected has the expected state of one row, and its error bounds.
type expected struct {
	o, oBound []float64
	m, mBound float64
	l, lBound float64
}

// expect computes row r by the kernel contract. Rounding errors:
//
//   - a score: (Dim+4) u sum |q_i k_i|
//   - a weight, relative: the errors of its score and of the maximum, u times the difference of the two, and 2 units of 4^x
//   - a sum: u for each term
func (c *call[F]) expect(r int) expected {
	u := cputest.AccOf[F]().Unit()
	dim, valueDim := c.t.Dim, c.t.ValueDim
	sees := c.t.Count
	if c.visible != nil {
		sees = int(c.visible[r])
	}
	oldM := float64(c.m[r])
	e := expected{o: make([]float64, valueDim), oBound: make([]float64, valueDim), m: oldM}
	s := make([]float64, sees)
	var abs float64
	for j := range s {
		var a float64
		for i, x := range c.q[r*dim : (r+1)*dim] {
			y := float64(x) * float64(c.k[j][i])
			s[j] += y
			a += math.Abs(y)
		}
		abs = max(abs, a)
		e.m = max(e.m, s[j])
	}
	e.mBound = u * float64(dim+4) * abs
	if math.IsInf(e.m, -1) {
		return e
	}

	far := 0.0
	add := func(s, l float64, o []F) {
		p := math.Exp2(2 * (s - e.m))
		e.l += p * l
		for i, x := range o {
			e.o[i] += p * float64(x)
			e.oBound[i] += p * math.Abs(float64(x))
		}
		if p > 0 {
			far = max(far, e.m-s)
		}
	}
	add(oldM, float64(c.l[r]), c.o[r*valueDim:(r+1)*valueDim])
	for j := range s {
		add(s[j], 1, c.v[j])
	}
	relative := 4*e.mBound + u*(2*far+float64(sees)+8)
	e.lBound = relative * e.l
	for i := range e.oBound {
		e.oBound[i] *= relative
	}
	return e
}

func testKernel[F cpu.Real](t *testing.T, d attn.DType, c *call[F]) {
	t.Helper()
	want := make([]expected, c.t.Rows)
	for r := range want {
		want[r] = c.expect(r)
	}
	kernelFor[F](d)(&c.t)
	near := func(got F, want, bound float64) bool {
		return float64(got) == want || math.Abs(float64(got)-want) <= bound
	}
	for r, e := range want {
		if !near(c.m[r], e.m, e.mBound) {
			t.Fatalf("%v, row %d: M = %v, want %v within %v", d, r, c.m[r], e.m, e.mBound)
		}
		if !near(c.l[r], e.l, e.lBound) {
			t.Fatalf("%v, row %d: L = %v, want %v within %v", d, r, c.l[r], e.l, e.lBound)
		}
		for i, o := range e.o {
			if got := c.o[r*c.t.ValueDim+i]; !near(got, o, e.oBound[i]) {
				t.Fatalf("%v, row %d: O[%d] = %v, want %v within %v", d, r, i, got, o, e.oBound[i])
			}
		}
	}
	for _, g := range c.guards {
		for i, x := range g.mem {
			if !cputest.IsUntouched(x) {
				t.Fatalf("%v: wrote %v beside %s, at %d", d, x, g.name, i)
			}
		}
	}
}

// A Visible that hides nothing changes no bit.
func TestKernelAllVisible(t *testing.T) {
	rng := reftest.Rand(t)
	for range 50 {
		const dim = 12
		count := 1 + rng.IntN(30)
		c := newCall[float32](rng, attn.Float32, 3, count, dim, dim, true)
		for i := range c.visible {
			c.visible[i] = int32(count) // all keys are visible to all rows
		}
		var got [2][]float32
		for i := range got {
			o, m, l := append([]float32(nil), c.o...), append([]float32(nil), c.m...), append([]float32(nil), c.l...)
			call := c.t
			call.O, call.M, call.L = unsafe.Pointer(&o[0]), unsafe.Pointer(&m[0]), unsafe.Pointer(&l[0])
			if i == 1 {
				call.Visible = nil
			}
			attendF32F32(&call)
			got[i] = append(append(o, m...), l...)
		}
		for i := range got[0] {
			if got[0][i] != got[1][i] {
				t.Fatalf("%v with Visible, %v without", got[0], got[1])
			}
		}
	}
}
