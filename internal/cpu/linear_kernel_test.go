package cpu

import (
	"math"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/reftest"
)

// TestDotKernels: the kernels in use against their Go twins, which are within the rounding of two sums of
// so many terms; rows that come in several calls have the bits of one call; and calls whose streams are
// one give each the result.
func TestDotKernels(t *testing.T) {
	rng := reftest.Rand(t)
	k := linearTiers[inUse]
	for _, d := range []attn.DType{attn.Float32, attn.Float16, attn.BFloat16} {
		for rows := 1; rows <= k.rows; rows++ {
			for _, n := range []int{0, 1, 2, 5, 8, 15, 16, 17, 31, 32, 33, 47, 63, 64, 95, 127, 128, 129, 256, 300, 513} {
				c := newLinearCase[float32](t, rng, d, rows, n, dotStreams)
				partial := make([]byte, partialBytes)
				a := dotArgs{
					y: unsafe.Pointer(&c.Y[0]), yStep: 4, yRow: 4 * dotStreams,
					w: c.W.Ptr, wStep: n * d.Size(), x: unsafe.Pointer(unsafe.SliceData(c.X)), xRow: 4 * n,
					rows: rows, n: n, ahead: 1 << 20, aheadStep: 64, partial: unsafe.Pointer(&partial[0]),
				}
				k.dot[d][rows](&a)
				got := append([]float32(nil), c.Y...)
				linearGo.dot[d][rows](&a)
				for i, twin := range c.Y {
					size := 0.0
					for j, v := range c.w[i%dotStreams] {
						size += math.Abs(v * float64(c.X[i/dotStreams*n+j]))
					}
					if diff := math.Abs(float64(got[i]) - float64(twin)); !(diff <= 2*float64(n)*0x1p-24*size) {
						t.Fatalf("%v %v, %d rows of %d: result %d is %v, of the Go kernel %v", inUse, d, rows, n, i, got[i], twin)
					}
				}

				if parts := n / dotPiece; parts > 1 {
					b := a
					b.unfinished = 1
					for done := 0; done < n; done += b.n {
						b.n = dotPiece * (1 + rng.IntN(2))
						if b.n >= n-done {
							b.n, b.unfinished = n-done, 0
						}
						b.w, b.x = unsafe.Add(a.w, done*d.Size()), unsafe.Add(a.x, 4*done)
						k.dot[d][rows](&b)
						b.more = 1
					}
					for i, v := range c.Y {
						if v != got[i] {
							t.Fatalf("%v %v, %d rows of %d: result %d is %v in parts, %v at once", inUse, d, rows, n, i, v, got[i])
						}
					}
				}

				a.wStep, a.yStep = 0, 0
				k.dot[d][rows](&a)
				for r := range rows {
					if v := c.Y[r*dotStreams]; v != got[r*dotStreams] {
						t.Fatalf("%v %v, %d rows of %d: row %d is %v from one stream, %v from the first of four",
							inUse, d, rows, n, r, v, got[r*dotStreams])
					}
				}
				c.close()
			}
		}
	}
}

// TestRowKernels: the kernels for one row in use give the bits of the dot kernels, whether streams are neighbouring rows of weights,
// have a part each or are all the same, and change no argument.
func TestRowKernels(t *testing.T) {
	rng := reftest.Rand(t)
	all := linearTiers[inUse]
	k := &all.row
	for _, d := range []attn.DType{attn.Float32, attn.Float16, attn.BFloat16} {
		if k.dot[d] == nil {
			continue // the dot kernels compute it
		}
		for _, n := range []int{0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65, 95, 128, 129, 300, 513} {
			rows := 1 + rng.IntN(3)
			out := rows * k.streams
			c := newLinearCase[float32](t, rng, d, 1, n, out)
			want := make([]float32, out)
			for i := range want {
				one := dotArgs{
					y: unsafe.Pointer(&c.Y[i]), w: unsafe.Add(c.W.Ptr, i*n*d.Size()), x: unsafe.Pointer(unsafe.SliceData(c.X)), rows: 1, n: n,
				}
				all.dot[d][1](&one)
				want[i] = c.Y[i]
			}
			check := func(name string, step, row, rows int) {
				t.Helper()
				for i := range c.Y {
					c.Y[i] = float32(math.NaN())
				}
				size := n * d.Size()
				a := rowArgs{
					y: unsafe.Pointer(&c.Y[0]), yRow: 4 * row, yStep: 4 * step, w: c.W.Ptr, wSkip: (row - 1) * size, wStep: step * size,
					x: unsafe.Pointer(unsafe.SliceData(c.X)), n: n, rows: rows, next: rng.IntN(1 << 20), behind: -rng.IntN(1 << 20),
				}
				lines := size / cacheLine
				a.beyond = rng.IntN(lines + 1)
				a.within = lines - a.beyond
				before := a
				k.dot[d](&a)
				if a != before {
					t.Fatalf("%v %v, %d rows of %d, %s: the arguments were %+v, and are %+v", inUse, d, rows, n, name, before, a)
				}
				for i, v := range c.Y {
					if math.Float32bits(v) != math.Float32bits(want[i]) {
						t.Fatalf("%v %v, %d rows of %d, %s: result %d is %v, of the dot kernel %v", inUse, d, rows, n, name, i, v, want[i])
					}
				}
			}
			check("side by side", 1, k.streams, rows)
			check("apart", rows, 1, rows)
			check("one stream", 0, 1, out)
			c.close()
		}
	}
}

// TestVectorKernels: the kernels in use give the bits of their Go twins, and write nothing else.
func TestVectorKernels(t *testing.T) {
	rng := reftest.Rand(t)
	k := linearTiers[inUse]
	for n := range 70 {
		mem, free := guarded(t, 4*n)
		mem2, free2 := guarded(t, 4*n)
		dst, src := unsafe.Slice((*float32)(mem), n), unsafe.Slice((*float32)(mem2), n)
		for _, twin := range []bool{false, true} {
			for i := range dst {
				dst[i], src[i] = float32(rng.NormFloat64()), float32(rng.NormFloat64())
				switch rng.IntN(8) {
				case 0:
					dst[i] = float32(math.NaN())
				case 1:
					dst[i] = float32(math.Inf(1 - 2*rng.IntN(2)))
				}
			}
			was := append([]float32(nil), dst...)
			add, relu := k.add, k.relu
			if twin {
				add, relu = addGo, reluGo
			}
			add((*float32)(mem), (*float32)(mem2), n)
			for i, v := range dst {
				if want := was[i] + src[i]; v != want && (v == v || want == want) {
					t.Fatalf("%v, add of %d: element %d is %v, want %v", inUse, n, i, v, want)
				}
			}
			copy(dst, was)
			relu((*float32)(mem), n)
			for i, v := range dst {
				if want := max(was[i], 0); v != want && (v == v || want == want) {
					t.Fatalf("%v, relu of %d: element %d is %v, want %v", inUse, n, i, v, want)
				}
			}
			by, v := rng.NormFloat64(), vectorTiers[inUse]
			if twin {
				v = vectorGo
			}
			v.scale((*float32)(mem), (*float32)(mem2), n, by)
			for i, got := range dst {
				if want := float32(float64(src[i]) * by); got != want && (got == got || want == want) {
					t.Fatalf("%v, scale of %d: element %d is %v, want %v", inUse, n, i, got, want)
				}
			}
			v.divide((*float32)(mem), (*float32)(mem2), n, float32(by))
			for i, got := range dst {
				if want := src[i] / float32(by); got != want && (got == got || want == want) {
					t.Fatalf("%v, divide of %d: element %d is %v, want %v", inUse, n, i, got, want)
				}
			}

			copy(dst, was)
			for i := range src {
				if rng.IntN(4) == 0 {
					src[i] = []float32{float32(math.Inf(-1)), float32(math.Inf(1)), float32(math.NaN()), -math.MaxFloat32, math.MaxFloat32, -1e38}[rng.IntN(6)]
				}
			}
			by *= 3
			checkBias := func(name string, number func(i int) int) {
				t.Helper()
				for i, got := range dst {
					x := float64(src[number(i)])
					p := x * by
					if !math.IsInf(x, 0) && p == p {
						p = max(p, -math.MaxFloat32)
					}
					if want := float32(float64(was[i]) + p); got != want && (got == got || want == want) {
						t.Fatalf("%v, %s of %d, factor %v: element %d, %v and %v, is %v, want %v", inUse, name, n, by, i, was[i], x, got, want)
					}
				}
				copy(dst, was)
			}
			v.bias((*float32)(mem), (*float32)(mem2), n, by)
			checkBias("bias", func(i int) int { return i })
			var first [4]int // of streams, of which src has no more: quarters in any order
			length := 0
			for _, s := range rng.Perm(4) {
				first[s] = length
				length += (n - s + 3) / 4
			}
			v.biasStreams((*float32)(mem), (*float32)(mem2), n, by, &first)
			checkBias("bias of streams", func(i int) int { return first[i%4] + i/4 })
			from := float64(rng.IntN(1<<20) - 1<<19)
			for s := range first {
				first[s] = rng.IntN(1 << 20)
			}
			for _, step := range []int{1, 4} {
				if step == 4 {
					first = [4]int{0, 1, 2, 3}
				}
				v.slope((*float32)(mem), n, by, from, float64(step), &first)
				for i, got := range dst {
					p := by * (from + float64(first[i%4]+i/4*step))
					if want := float32(float64(was[i]) + float64(p)); got != want && (got == got || want == want) {
						t.Fatalf("%v, slope of %d, step %d, %v: element %d is %v, want %v", inUse, n, step, first, i, got, want)
					}
				}
				copy(dst, was)
			}
			sum, most := 0.0, 0.0
			for i, x := range dst {
				if x != x || math.IsInf(float64(x), 0) {
					dst[i] = float32(rng.NormFloat64())
				}
				if y := src[i]; y != y || math.IsInf(float64(y), 0) {
					src[i] = float32(rng.NormFloat64())
				}
				p := float64(dst[i]) * float64(src[i])
				sum, most = sum+p, most+math.Abs(p)
			}
			if got := v.dot((*float32)(mem), (*float32)(mem2), n); !(math.Abs(got-sum) <= float64(n+1)*0x1p-53*most) {
				t.Fatalf("%v, sum of %d products: %v, want %v", inUse, n, got, sum)
			}
			softCap := math.Exp(rng.NormFloat64() * 4)
			for i := range was {
				was[i] = float32(softCap * rng.NormFloat64() * math.Ldexp(1, rng.IntN(8)-4-rng.IntN(2)*rng.IntN(60)))
				if rng.IntN(9) == 0 {
					was[i] = []float32{float32(math.Inf(-1)), float32(math.Inf(1)), float32(math.NaN()), -math.MaxFloat32, math.MaxFloat32, 0}[rng.IntN(6)]
				}
			}
			copy(dst, was)
			v.softCap((*float32)(mem), n, softCap)
			for i, got := range dst {
				want := softCap * math.Tanh(float64(was[i])/softCap)
				if !(math.Abs(float64(got)-want) <= 0x1p-21*math.Abs(want)+0x1p-149) && (got == got || want == want) {
					t.Fatalf("%v, soft cap %v of %d: element %d, %v, is %v, want %v", inUse, softCap, n, i, was[i], got, want)
				}
			}
		}
		free()
		free2()
	}
}

// TestVectorKernels64 is TestVectorKernels for float64.
func TestVectorKernels64(t *testing.T) {
	rng := reftest.Rand(t)
	for n := range 70 {
		mem, free := guarded(t, 8*n)
		mem2, free2 := guarded(t, 8*n)
		dst, src := unsafe.Slice((*float64)(mem), n), unsafe.Slice((*float64)(mem2), n)
		for _, v := range []vectorKernels{vectorTiers[inUse], vectorGo} {
			sum, most := 0.0, 0.0
			for i := range dst {
				dst[i], src[i] = rng.NormFloat64(), rng.NormFloat64()
				sum, most = sum+dst[i]*src[i], most+math.Abs(dst[i]*src[i])
			}
			if got := v.dot64((*float64)(mem), (*float64)(mem2), n); !(math.Abs(got-sum) <= float64(n+1)*0x1p-53*most) {
				t.Fatalf("%v, sum of %d products: %v, want %v", inUse, n, got, sum)
			}
			for i := range src {
				if rng.IntN(8) == 0 {
					src[i] = []float64{math.NaN(), math.Inf(1), math.Inf(-1), math.MaxFloat64, 0}[rng.IntN(5)]
				}
			}
			by := rng.NormFloat64()
			check := func(name string, of func(x float64) float64) {
				t.Helper()
				for i, got := range dst {
					if want := of(src[i]); got != want && (got == got || want == want) {
						t.Fatalf("%v, %s of %d: element %d is %v, want %v", inUse, name, n, i, got, want)
					}
				}
			}
			v.scale64((*float64)(mem), (*float64)(mem2), n, by)
			check("scale", func(x float64) float64 { return x * by })
			softCap := math.Exp(rng.NormFloat64() * 4)
			was := make([]float64, n)
			for i := range was {
				was[i] = softCap * rng.NormFloat64() * math.Ldexp(1, rng.IntN(8)-4-rng.IntN(2)*rng.IntN(60))
				if rng.IntN(9) == 0 {
					was[i] = []float64{math.Inf(-1), math.Inf(1), math.NaN(), -math.MaxFloat64, math.MaxFloat64, 0}[rng.IntN(6)]
				}
			}
			copy(dst, was)
			v.softCap64((*float64)(mem), n, softCap)
			for i, got := range dst {
				want := softCap * math.Tanh(was[i]/softCap)
				if !(math.Abs(got-want) <= 0x1p-50*math.Abs(want)+0x1p-1070) && (got == got || want == want) {
					t.Fatalf("%v, soft cap %v of %d: element %d, %v, is %v, want %v", inUse, softCap, n, i, was[i], got, want)
				}
			}
			v.divide64((*float64)(mem), (*float64)(mem2), n, by)
			check("divide", func(x float64) float64 { return x / by })
		}
		free()
		free2()
	}
}
