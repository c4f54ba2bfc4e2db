package norm

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"runtime"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/reftest"
)

// TestNormKernels: the kernels in use give the bits of the Go kernels, sums but for their order, and write nothing else.
func TestNormKernels(t *testing.T) {
	t.Run("float32", testNormKernels[float32])
	t.Run("float64", testNormKernels[float64])
}

func testNormKernels[F cpu.Real](t *testing.T) {
	rng := reftest.Rand(t)
	for n := range 70 {
		var rows [4][]F // dst, src, gamma, beta
		for i := range rows {
			mem, free := cputest.Guarded(t, n*int(unsafe.Sizeof(F(0))))
			defer free()
			rows[i] = unsafe.Slice((*F)(mem), n)
		}
		dst, src := rows[0], rows[1]
		offset := rng.NormFloat64() * math.Exp2(float64(rng.IntN(20)))
		for _, row := range rows[1:] {
			for i := range row {
				row[i] = F(offset + rng.NormFloat64())
			}
		}
		mean, by := offset+rng.NormFloat64(), rng.NormFloat64()
		var sum, total, d, off, q float64
		for _, x := range src {
			x := float64(x)
			sum, total = sum+x, total+math.Abs(x)
			d, off, q = d+(x-mean), off+math.Abs(x-mean), q+(x-mean)*(x-mean)
		}
		bound := float64(2*n+2) * 0x1p-53
		if got := sumOf(src); !(math.Abs(got-sum) <= bound*total) {
			t.Fatalf("%v, sum of %d: %v, want %v", cpu.InUse(), n, got, sum)
		}
		if gotD, gotQ := deviationsOf(src, mean); !(math.Abs(gotD-d) <= bound*off && math.Abs(gotQ-q) <= bound*q) {
			t.Fatalf("%v, deviations of %d: %v and %v, want %v and %v", cpu.InUse(), n, gotD, gotQ, d, q)
		}
		for _, row := range rows[1:] {
			for i := range row {
				if rng.IntN(8) == 0 {
					row[i] = F([]float64{math.NaN(), math.Inf(1), math.Inf(-1), math.MaxFloat32, 0, 0x1p-149}[rng.IntN(6)])
				}
			}
		}
		for has := range 4 {
			var gamma, beta []F
			if has&1 != 0 {
				gamma = rows[2]
			}
			if has&2 != 0 {
				beta = rows[3]
			}
			for i := range dst {
				dst[i] = F(math.NaN())
			}
			normaliseInto(dst, src, gamma, beta, mean, by)
			for i, got := range dst {
				x := (float64(src[i]) - mean) * by
				if gamma != nil {
					x *= float64(gamma[i])
				}
				if beta != nil {
					x = float64(x) + float64(beta[i])
				}
				if want := F(x); got != want && (got == got || want == want) {
					t.Fatalf("%v, %d of %d, gamma %v, beta %v: %v, want %v", cpu.InUse(), i, n, gamma != nil, beta != nil, got, want)
				}
			}
		}
	}
}

// TestMoments: a mean that is large beside the spread costs no digits, and NaN and infinities come out as NaN.
func TestMoments(t *testing.T) {
	t.Run("float32", testMoments[float32])
	t.Run("float64", testMoments[float64])
}

func testMoments[F cpu.Real](t *testing.T) {
	rng := reftest.Rand(t)
	for _, n := range []int{1, 2, 3, 15, 16, 17, 33, 64, 100, 768, 1000} {
		offset, eps := 1e6*rng.NormFloat64(), 1e-5*(1+rng.Float64())
		x := make([]F, n)
		for i := range x {
			x[i] = F(offset + rng.NormFloat64())
		}
		num := func(v float64) *big.Float { return new(big.Float).SetPrec(300).SetFloat64(v) }
		mean, variance, squares, size := num(0), num(0), num(0), num(float64(n))
		for _, v := range x {
			mean.Add(mean, num(float64(v)))
			squares.Add(squares, num(0).Mul(num(float64(v)), num(float64(v))))
		}
		mean.Quo(mean, size)
		for _, v := range x {
			d := num(0).Sub(num(float64(v)), mean)
			variance.Add(variance, d.Mul(d, d))
		}
		root := func(sum *big.Float) float64 {
			sum.Add(sum.Quo(sum, size), num(eps))
			f, _ := sum.Quo(num(1), sum.Sqrt(sum)).Float64()
			return f
		}
		wantMean, _ := mean.Float64()
		// What a mean is off by is taken out again, so rounding is that of the differences and of their sums.
		bound := float64(n+8) * 0x1p-52
		gotMean, rstd := Moments(x, eps)
		if !(math.Abs(gotMean-wantMean) <= 0x1p-51*math.Abs(wantMean)+16*bound) {
			t.Errorf("%v, %d elements: mean %v, want %v", cpu.InUse(), n, gotMean, wantMean)
		}
		if want := root(variance); n > 1 && !(math.Abs(rstd-want) <= bound*want) {
			t.Errorf("%v, %d elements, mean %v: %v, want %v", cpu.InUse(), n, wantMean, rstd, want)
		}
		if got, want := ReciprocalRMS(x, eps), root(squares); !(math.Abs(got-want) <= bound*want) {
			t.Errorf("%v, %d elements: RMS norm by %v, want %v", cpu.InUse(), n, got, want)
		}
		x[rng.IntN(n)] = F([]float64{math.NaN(), math.Inf(1), math.Inf(-1)}[rng.IntN(3)])
		for _, rms := range []bool{false, true} {
			o, y := Norm[F]{N: n, Eps: eps, RMS: rms}, make([]F, n)
			o.Rows(cpu.Default(), y, x)
			for i, v := range y {
				if finite := x[i]-x[i] == 0; v == v && !(rms && finite && v == 0) {
					t.Fatalf("%v, %d elements, one not finite, RMS %v: element %d, %v, is %v", cpu.InUse(), n, rms, i, x[i], v)
				}
			}
		}
	}
}

// TestNormRows: a row has the bits that it has alone, whatever the other rows and the threads are.
func TestNormRows(t *testing.T) {
	t.Run("float32", testNormRows[float32])
	t.Run("float64", testNormRows[float64])
}

func testNormRows[F cpu.Real](t *testing.T) {
	var e cpu.Engine
	defer e.Close()
	rng := reftest.Rand(t)
	const rows, n = 300, 77
	cputest.SetProcs(t, 4)
	if cpu.ThreadsFor(rows*n*tiers[cpu.InUse()].nanos) < 2 {
		t.Fatal("not worth two threads: the case says nothing")
	}
	of := func(n int) []F {
		x := make([]F, n)
		for i := range x {
			x[i] = F(rng.NormFloat64())
		}
		return x
	}
	x, gamma, beta, residual := of(rows*n), of(n), of(n), of(rows*n)
	x[5*n+8], x[6*n] = F(math.NaN()), F(math.Inf(1))
	for _, rms := range []bool{false, true} {
		for _, b := range [][]F{nil, beta, residual} {
			y, want := make([]F, rows*n), make([]F, n)
			all := Norm[F]{N: n, Gamma: gamma, Beta: b, Eps: 1e-5, RMS: rms}
			all.Rows(&e, y, x)
			for row := range rows {
				one := all
				if len(b) > n {
					one.Beta = b[row*n : (row+1)*n]
				}
				one.Rows(&e, want, x[row*n:(row+1)*n])
				for i, v := range y[row*n : (row+1)*n] {
					if v != want[i] && (v == v || want[i] == want[i]) {
						t.Fatalf("%v, RMS %v, %d betas, row %d, element %d: %v, alone %v", cpu.InUse(), rms, len(b), row, i, v, want[i])
					}
				}
			}
		}
	}
}

// BenchmarkNorm has norms of rows in cache, and of more than a cache has, on one thread.
func BenchmarkNorm(b *testing.B) {
	b.Run("float32", benchmarkNorm[float32])
	b.Run("float64", benchmarkNorm[float64])
}

func benchmarkNorm[F cpu.Real](b *testing.B) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	for _, t := range []cpu.Tier{cpu.TierGo, cpu.BestTier()} {
		for _, rms := range []bool{false, true} {
			for _, size := range [][2]int{{8, 2048}, {2048, 2048}, {256, 64}} {
				rows, n := size[0], size[1]
				b.Run(fmt.Sprintf("%v/rms=%v/%dx%d", t, rms, rows, n), func(b *testing.B) {
					defer cpu.ForceTier(t.String())()
					x, y := make([]F, rows*n), make([]F, rows*n)
					for i := range x {
						x[i] = F(rand.NormFloat64())
					}
					o := Norm[F]{N: n, Gamma: x[:n], Beta: x[:n], Eps: 1e-5, RMS: rms}
					if rms {
						o.Beta = nil
					}
					for b.Loop() {
						o.Rows(cpu.Default(), y, x)
					}
					b.ReportMetric(b.Elapsed().Seconds()/float64(b.N*len(x))*1e9, "ns/element")
				})
			}
		}
	}
}
