//go:build (amd64 || arm64) && gc && !noasm && unix

package attention

import (
	"math"
	"math/big"
	"math/rand/v2"
	"runtime/debug"
	"syscall"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/reftest"
)

// These tests cover errors that only assembly can have. The tests of the Go kernels check every tier's results.

// fence is memory between two inaccessible pages.
type fence struct{ mem []byte }

func newFence(t *testing.T, size int) *fence {
	t.Helper()
	page := syscall.Getpagesize()
	size = (size + page - 1) / page * page
	mem, err := syscall.Mmap(-1, 0, size+2*page, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Munmap(mem); err != nil {
			t.Error(err)
		}
	})
	for _, guard := range [][]byte{mem[:page], mem[page+size:]} {
		if err := syscall.Mprotect(guard, syscall.PROT_NONE); err != nil {
			t.Fatal(err)
		}
	}
	return &fence{mem[page : page+size]}
}

// take returns n bytes at the beginning or the end of the memory. The rest is 0xff, which is NaN in every type.
func (f *fence) take(n int, end bool) unsafe.Pointer {
	f.mem[0] = 0xff
	for n := 1; n < len(f.mem); n *= 2 {
		copy(f.mem[n:], f.mem[:n])
	}
	if end {
		return unsafe.Pointer(&f.mem[len(f.mem)-n])
	}
	return unsafe.Pointer(&f.mem[0])
}

// fenced is a tile whose arrays and streams are all fenced.
type fenced[F cpu.Real] struct {
	t       tile
	dtype   attn.DType
	o, m, l []F
	fences  [14]*fence
}

func newFenced[F cpu.Real](t *testing.T) *fenced[F] {
	f := new(fenced[F])
	for i := range f.fences {
		f.fences[i] = newFence(t, 1<<18)
	}
	return f
}

func (f *fenced[F]) floats(i, n int, end bool) []F {
	return unsafe.Slice((*F)(f.fences[i].take(n*int(unsafe.Sizeof(F(0))), end)), n)
}

// draw fills f for the given sizes.
func (f *fenced[F]) draw(rng *rand.Rand, d attn.DType, rows, count, dim, valueDim int, masked, end bool) {
	f.dtype = d
	q := f.floats(0, rows*dim, end)
	f.o, f.m, f.l = f.floats(1, rows*valueDim, end), f.floats(2, rows, end), f.floats(3, rows, end)
	for i := range q {
		q[i] = F(rng.NormFloat64()) / 4
	}
	for r := range rows {
		f.m[r], f.l[r] = F(math.Inf(-1)), 0
		if r%2 == 1 {
			f.m[r], f.l[r] = F(rng.NormFloat64()), 1+F(rng.Float64())
		}
		for i := range valueDim {
			f.o[r*valueDim+i] = f.l[r] * F(rng.NormFloat64())
		}
	}
	scores := f.floats(4, rows*((count+15)/16*16), end)
	wide := f.floats(5, wideOf(dim, valueDim), end)
	f.t = tile{
		Rows: rows, Count: count, Dim: dim, ValueDim: valueDim,
		Q: unsafe.Pointer(&q[0]), O: unsafe.Pointer(&f.o[0]), M: unsafe.Pointer(&f.m[0]), L: unsafe.Pointer(&f.l[0]),
		Scores: unsafe.Pointer(&scores[0]), Wide: unsafe.Pointer(&wide[0]),
		K: make([]Streams, 1), V: make([]Streams, 1), Run: (count + 3) / 4 * 4,
		KStep: dim * d.Size() / d.Columns(), VStep: valueDim * d.Size() / d.Columns(),
	}
	if masked {
		visible := make([]int32, rows)
		for r := range visible {
			visible[r] = int32(rng.IntN(count + 1))
		}
		f.t.Visible = unsafe.Pointer(&visible[0])
	}
	for s := range 4 {
		n := (count - s + 3) / 4
		f.t.K[0][s] = f.rows(rng, 6+s, n, dim, end)
		f.t.V[0][s] = f.rows(rng, 10+s, n, valueDim, end)
	}
}

// rows returns n rows; with n 0, a pointer that must not be read.
func (f *fenced[F]) rows(rng *rand.Rand, i, n, dim int, end bool) unsafe.Pointer {
	x := make([]F, n*dim)
	for i := range x {
		x[i] = F(rng.NormFloat64())
	}
	if n == 0 {
		mem := f.fences[i].mem
		return unsafe.Add(unsafe.Pointer(&mem[0]), len(mem))
	}
	b := cpu.Buffer{DType: f.dtype, Ptr: f.fences[i].take(len(x)*f.dtype.Size()/f.dtype.Columns(), end), Len: len(x) / f.dtype.Columns()}
	cputest.Store(b.Ptr, b.DType, 0, x)
	return b.Ptr
}

// result is the states after a kernel.
type result[F cpu.Real] struct{ o, m, l []F }

// run runs a kernel on f and restores the states.
func (f *fenced[F]) run(t *testing.T, k kernel) result[F] {
	t.Helper()
	before := result[F]{clone(f.o), clone(f.m), clone(f.l)}
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if err := recover(); err != nil {
			t.Fatalf("%v, %d rows, %d keys, dims %d and %d: %v", f.dtype, f.t.Rows, f.t.Count, f.t.Dim, f.t.ValueDim, err)
		}
	}()
	k(&f.t)
	after := result[F]{clone(f.o), clone(f.m), clone(f.l)}
	copy(f.o, before.o)
	copy(f.m, before.m)
	copy(f.l, before.l)
	return after
}

func clone[F cpu.Real](x []F) []F { return append([]F(nil), x...) }

// near reports whether a and b differ by no more than the bound.
func (a result[F]) near(t *testing.T, b result[F], bound float64) bool {
	t.Helper()
	for name, p := range map[string][2][]F{"O": {a.o, b.o}, "M": {a.m, b.m}, "L": {a.l, b.l}} {
		for i, x := range p[0] {
			x, y := float64(x), float64(p[1][i])
			if x == y || x != x && y != y || math.Abs(x-y) <= bound*(1+math.Abs(y)) {
				continue
			}
			t.Errorf("%s[%d]: %v, the Go kernel has %v", name, i, x, y)
			return false
		}
	}
	return true
}

// assembled returns the types of keys and values with assembly for queries of type F.
func assembled[F cpu.Real]() []attn.DType {
	if unsafe.Sizeof(F(0)) == 8 {
		return []attn.DType{attn.Float64, attn.Float32, attn.Float16, attn.BFloat16}
	}
	return []attn.DType{attn.Float32, attn.Float16, attn.BFloat16}
}

// kernelOf returns a tier's kernel.
func kernelOf[F cpu.Real](t cpu.Tier, d attn.DType) kernel {
	defer cpu.ForceTier(t.String())()
	return kernelFor[F](d)
}

// Kernels access no byte outside their arrays, and agree with the Go kernels.
func TestAssemblyFenced(t *testing.T) {
	t.Run("float32", testAssemblyFenced[float32])
	t.Run("float64", testAssemblyFenced[float64])
}

func testAssemblyFenced[F cpu.Real](t *testing.T) {
	skipGo(t)
	rng := reftest.Rand(t)
	f := newFenced[F](t)
	dims := []int{1, 3, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 72, 80, 96, 100, 128, 136, 256}
	try := func(rows, count, dim, valueDim int) bool {
		types := assembled[F]()
		if unsafe.Sizeof(F(0)) == 4 && dim%32 == 0 && valueDim%32 == 0 {
			types = append(types, attn.Q4)
		}
		for _, d := range types {
			f.draw(rng, d, rows, count, dim, valueDim, rng.IntN(3) == 0, rng.IntN(2) == 0)
			want := f.run(t, kernelOf[F](cpu.TierGo, d))
			// A score is a sum of dim products of about 1/4, rounded in another order. A weight has its score's error
			// as a relative error. A sum has the weights' errors and its own.
			bound := cputest.AccOf[F]().Unit() * (4*float64(dim) + float64(count) + 64)
			if !f.run(t, kernelFor[F](d)).near(t, want, bound) {
				t.Errorf("%v, %d rows, %d keys, dims %d and %d", d, rows, count, dim, valueDim)
				return false
			}
		}
		return true
	}
	for _, dim := range dims {
		for count := 1; count <= 9; count++ {
			if !try(1+rng.IntN(9), count, dim, dims[rng.IntN(len(dims))]) {
				return
			}
		}
	}
	for _, rows := range []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 31, 64, 71} {
		for _, count := range []int{63, 64, 66, 127, 128, 201} {
			if !try(rows, count, 32*(1+rng.IntN(4)), 32*(1+rng.IntN(4))) {
				return
			}
		}
		for _, count := range []int{15, 16, 17, 31, 32, 33, 63, 64, 65, 100} {
			if !try(rows, count, dims[rng.IntN(len(dims))], dims[rng.IntN(len(dims))]) {
				return
			}
		}
	}
}

// One key has nearly all weight, in any part of the tile.
func TestAssemblyPeaked(t *testing.T) {
	t.Run("float32", testAssemblyPeaked[float32])
	t.Run("float64", testAssemblyPeaked[float64])
}

func testAssemblyPeaked[F cpu.Real](t *testing.T) {
	rng := reftest.Rand(t)
	for range 60 {
		for _, d := range assembled[F]() {
			c := newCall[F](rng, d, 1+rng.IntN(20), 1+rng.IntN(150), 8*(1+rng.IntN(17)), 8*(1+rng.IntN(17)), rng.IntN(3) == 0)
			for i := range c.q {
				c.q[i] *= 8
			}
			testKernel(t, d, c)
		}
	}
}

// Keys and values at odd elements.
func TestAssemblyUnaligned(t *testing.T) {
	t.Run("float32", testAssemblyUnaligned[float32])
	t.Run("float64", testAssemblyUnaligned[float64])
}

func testAssemblyUnaligned[F cpu.Real](t *testing.T) {
	rng := reftest.Rand(t)
	f := newFenced[F](t)
	for _, d := range assembled[F]() {
		for shift := range 16 {
			f.draw(rng, d, 1+rng.IntN(20), 80, 64, 64, false, false)
			want := f.run(t, kernelFor[F](d))
			for s := range 4 {
				for i, p := range []*unsafe.Pointer{&f.t.K[0][s], &f.t.V[0][s]} {
					mem := f.fences[6+4*i+s].mem
					n := 20 * 64 * d.Size()
					copy(mem[shift*d.Size():][:n], mem[:n])
					*p = unsafe.Add(*p, shift*d.Size())
				}
			}
			if !f.run(t, kernelFor[F](d)).near(t, want, 0) {
				t.Fatalf("%v at element %d", d, shift)
			}
		}
	}
}

// NaN and infinities reach the same outputs as in the Go kernel.
func TestAssemblyNotFinite(t *testing.T) {
	t.Run("float32", testAssemblyNotFinite[float32])
	t.Run("float64", testAssemblyNotFinite[float64])
}

func testAssemblyNotFinite[F cpu.Real](t *testing.T) {
	skipGo(t)
	rng := reftest.Rand(t)
	f := newFenced[F](t)
	nan, inf := math.NaN(), math.Inf(1)
	for range 600 {
		d := assembled[F]()[rng.IntN(len(assembled[F]()))]
		rows, count := 1+rng.IntN(20), 1+rng.IntN(80)
		dim, valueDim := 8*(1+rng.IntN(12)), 8*(1+rng.IntN(12))
		if rng.IntN(2) == 0 { // sizes that fill tiles
			count, dim, valueDim = 64+rng.IntN(150), 32*(1+rng.IntN(4)), 32*(1+rng.IntN(4))
		}
		f.draw(rng, d, rows, count, dim, valueDim, rng.IntN(2) == 0, true)
		bad := []float64{nan, inf, -inf}[rng.IntN(3)]
		switch rng.IntN(5) {
		case 0:
			unsafe.Slice((*F)(f.t.Q), rows*dim)[rng.IntN(rows*dim)] = F(bad)
		case 1, 2:
			at, width := &f.t.K[0], dim
			if rng.IntN(2) == 0 {
				at, width = &f.t.V[0], valueDim
			}
			c := rng.IntN(count)
			b := cpu.Buffer{DType: d, Ptr: at[c%4], Len: 1 << 20}
			cputest.Store(b.Ptr, b.DType, c/4*width+rng.IntN(width), []F{F(bad)})
		case 3: // every score is -Inf, or NaN: a row may stay empty
			q := unsafe.Slice((*F)(f.t.Q), rows*dim)
			for i := range q {
				q[i] = 1
			}
			for c := range count {
				b := cpu.Buffer{DType: d, Ptr: f.t.K[0][c%4], Len: 1 << 20}
				cputest.Store(b.Ptr, b.DType, c/4*dim+rng.IntN(dim), []F{F(-inf)})
			}
			b := cpu.Buffer{DType: d, Ptr: f.t.V[0][0], Len: 1 << 20}
			cputest.Store(b.Ptr, b.DType, rng.IntN(valueDim), []F{F(bad)})
		case 4:
			f.t.Visible = nil // a row without visible keys would be left unchanged
			f.m[rng.IntN(rows)] = F(bad)
		}
		want := f.run(t, kernelOf[F](cpu.TierGo, d))
		if got := f.run(t, kernelFor[F](d)); !got.near(t, want, 1e-4) {
			t.Fatalf("%v, %d rows, %d keys, dims %d and %d", d, rows, count, dim, valueDim)
		}
	}
}

// Weights are powers of four to within 2 units in the last place, with exp4's rules at the ends; in float64 to within
// 1.5.
func TestAssemblyExp4(t *testing.T) {
	t.Run("float32", func(t *testing.T) { testAssemblyExp4[float32](t, -63, 2) })
	t.Run("float64", func(t *testing.T) { testAssemblyExp4[float64](t, -511, 1.5) })
}

// skipGo skips tests that compare the current tier with the tier go.
func skipGo(t *testing.T) {
	t.Helper()
	if cpu.InUse() == cpu.TierGo {
		t.Skip("no assembly in use")
	}
}

func testAssemblyExp4[F cpu.Real](t *testing.T, least, bound float64) {
	weigh := weighOf[F](cpu.InUse())
	if weigh == nil {
		t.Skip("no assembly in use")
	}
	rng := reftest.Rand(t)
	u := cputest.AccOf[F]().Unit()
	s, o := make([]F, 1<<12), make([]F, 8)
	for n := 1; n < len(s); n += 1 + rng.IntN(500) {
		x := s[:n]
		for i := range x {
			switch rng.IntN(4) {
			case 0:
				x[i] = F(rng.Float64() * (least - 2))
			case 1:
				x[i] = F(-math.Float64frombits(rng.Uint64N(math.Float64bits(2 - least))))
			case 2:
				x[i] = -F(rng.IntN(int(-4*least)+5)) / 4
			case 3: // next to the middle between two halves, or a half
				x[i] = min(-F(rng.IntN(int(-4*least)+2))/4*F(1+u*float64(2*rng.IntN(5)-4)), 0)
			}
		}
		x[rng.IntN(n)] = 0
		if n > 1 {
			x[0] = F(math.Inf(-1))
			x[1] = 0
		}
		before := clone(x)
		m, l := F(math.Inf(-1)), F(0)
		if weigh(&x[0], &o[0], &m, &l, n) != 0 {
			t.Fatal("a row is left")
		}
		var sum float64
		for i, got := range x {
			if x := float64(before[i]); x < least {
				if got != 0 {
					t.Fatalf("4^%v: got %v, want 0", x, got)
				}
			} else if d := unitsOff(float64(got), x) * 0x1p-53 / u; !(d <= bound) {
				t.Fatalf("4^%v: got %v, %v ulp off", x, got, d)
			}
			sum += float64(got)
		}
		if m != 0 || math.Abs(float64(l)-sum) > u*(sum*float64(n)/8+8*sum) {
			t.Fatalf("M = %v, L = %v, want 0, %v", m, l, sum)
		}
	}
}

var ln2, _, _ = big.ParseFloat("0.69314718055994530941723212145817656807550013436025525", 10, 160, big.ToNearestEven)

// unitsOff returns the difference of y and 4^x in units in the last place of a float64.
func unitsOff(y, x float64) float64 {
	n := math.Round(2 * x)
	f := new(big.Float).SetPrec(160).SetFloat64(2*x - n)
	f.Mul(f, ln2)
	sum, term := big.NewFloat(1).SetPrec(160), big.NewFloat(1).SetPrec(160)
	for i := 1; i < 27; i++ {
		term.Quo(term.Mul(term, f), big.NewFloat(float64(i)))
		sum.Add(sum, term)
	}
	_, e := math.Frexp(math.Exp2(2 * x))
	off, _ := sum.Sub(sum.SetMantExp(sum, int(n)), new(big.Float).SetFloat64(y)).Float64()
	return math.Abs(off) / math.Ldexp(1, e-53)
}
