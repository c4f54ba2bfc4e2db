package vector

import (
	"math"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/reftest"
)

// TestVectorKernels: the kernels in use give the bits of the Go kernels, and write nothing else.
func TestVectorKernels(t *testing.T) {
	rng := reftest.Rand(t)
	for n := range 70 {
		mem, free := cputest.Guarded(t, 4*n)
		mem2, free2 := cputest.Guarded(t, 4*n)
		dst, src := unsafe.Slice((*float32)(mem), n), unsafe.Slice((*float32)(mem2), n)
		for _, goKernel := range []bool{false, true} {
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
			k := tiers[cpu.InUse()]
			if goKernel {
				k = goKernels
			}
			k.add((*float32)(mem), (*float32)(mem2), n)
			for i, v := range dst {
				if want := was[i] + src[i]; v != want && (v == v || want == want) {
					t.Fatalf("%v, add of %d: element %d is %v, want %v", cpu.InUse(), n, i, v, want)
				}
			}
			copy(dst, was)
			k.relu((*float32)(mem), n)
			for i, v := range dst {
				if want := max(was[i], 0); v != want && (v == v || want == want) {
					t.Fatalf("%v, relu of %d: element %d is %v, want %v", cpu.InUse(), n, i, v, want)
				}
			}
			by := rng.NormFloat64()
			k.scale((*float32)(mem), (*float32)(mem2), n, by)
			for i, got := range dst {
				if want := float32(float64(src[i]) * by); got != want && (got == got || want == want) {
					t.Fatalf("%v, scale of %d: element %d is %v, want %v", cpu.InUse(), n, i, got, want)
				}
			}
			k.divide((*float32)(mem), (*float32)(mem2), n, float32(by))
			for i, got := range dst {
				if want := src[i] / float32(by); got != want && (got == got || want == want) {
					t.Fatalf("%v, divide of %d: element %d is %v, want %v", cpu.InUse(), n, i, got, want)
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
						t.Fatalf("%v, %s of %d, factor %v: element %d, %v and %v, is %v, want %v", cpu.InUse(), name, n, by, i, was[i], x, got, want)
					}
				}
				copy(dst, was)
			}
			k.bias((*float32)(mem), (*float32)(mem2), n, by)
			checkBias("bias", func(i int) int { return i })
			var first [4]int // of streams, of which src has no more: quarters in any order
			length := 0
			for _, s := range rng.Perm(4) {
				first[s] = length
				length += (n - s + 3) / 4
			}
			k.biasStreams((*float32)(mem), (*float32)(mem2), n, by, &first)
			checkBias("bias of streams", func(i int) int { return first[i%4] + i/4 })
			from := float64(rng.IntN(1<<20) - 1<<19)
			for s := range first {
				first[s] = rng.IntN(1 << 20)
			}
			for _, step := range []int{1, 4} {
				if step == 4 {
					first = [4]int{0, 1, 2, 3}
				}
				k.slope((*float32)(mem), n, by, from, float64(step), &first)
				for i, got := range dst {
					p := by * (from + float64(first[i%4]+i/4*step))
					if want := float32(float64(was[i]) + float64(p)); got != want && (got == got || want == want) {
						t.Fatalf("%v, slope of %d, step %d, %v: element %d is %v, want %v", cpu.InUse(), n, step, first, i, got, want)
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
			if got := k.dot((*float32)(mem), (*float32)(mem2), n); !(math.Abs(got-sum) <= float64(n+1)*0x1p-53*most) {
				t.Fatalf("%v, sum of %d products: %v, want %v", cpu.InUse(), n, got, sum)
			}
			softCap := math.Exp(rng.NormFloat64() * 4)
			for i := range was {
				was[i] = float32(softCap * rng.NormFloat64() * math.Ldexp(1, rng.IntN(8)-4-rng.IntN(2)*rng.IntN(60)))
				if rng.IntN(9) == 0 {
					was[i] = []float32{float32(math.Inf(-1)), float32(math.Inf(1)), float32(math.NaN()), -math.MaxFloat32, math.MaxFloat32, 0}[rng.IntN(6)]
				}
			}
			copy(dst, was)
			k.softCap((*float32)(mem), n, softCap)
			for i, got := range dst {
				want := softCap * math.Tanh(float64(was[i])/softCap)
				if !(math.Abs(float64(got)-want) <= 0x1p-21*math.Abs(want)+0x1p-149) && (got == got || want == want) {
					t.Fatalf("%v, soft cap %v of %d: element %d, %v, is %v, want %v", cpu.InUse(), softCap, n, i, was[i], got, want)
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
		mem, free := cputest.Guarded(t, 8*n)
		mem2, free2 := cputest.Guarded(t, 8*n)
		dst, src := unsafe.Slice((*float64)(mem), n), unsafe.Slice((*float64)(mem2), n)
		for _, v := range []kernels{tiers[cpu.InUse()], goKernels} {
			sum, most := 0.0, 0.0
			for i := range dst {
				dst[i], src[i] = rng.NormFloat64(), rng.NormFloat64()
				sum, most = sum+dst[i]*src[i], most+math.Abs(dst[i]*src[i])
			}
			if got := v.dot64((*float64)(mem), (*float64)(mem2), n); !(math.Abs(got-sum) <= float64(n+1)*0x1p-53*most) {
				t.Fatalf("%v, sum of %d products: %v, want %v", cpu.InUse(), n, got, sum)
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
						t.Fatalf("%v, %s of %d: element %d is %v, want %v", cpu.InUse(), name, n, i, got, want)
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
					t.Fatalf("%v, soft cap %v of %d: element %d, %v, is %v, want %v", cpu.InUse(), softCap, n, i, was[i], got, want)
				}
			}
			v.divide64((*float64)(mem), (*float64)(mem2), n, by)
			check("divide", func(x float64) float64 { return x / by })
		}
		free()
		free2()
	}
}
