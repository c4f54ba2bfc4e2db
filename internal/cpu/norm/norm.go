// Package norm computes layer norm and RMS norm on the CPU.
package norm

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/vector"
)

// kernels are the functions of one tier for the passes of a norm over a row, each with the contract of its Go kernel
// below. Sums have another order.
type kernels struct {
	sum          func(x *float32, n int) float64
	deviations   func(x *float32, n int, mean float64) (sum, squares float64)
	normalise    func(dst, src, gamma, beta *float32, n int, mean, by float64)
	sum64        func(x *float64, n int) float64
	deviations64 func(x *float64, n int, mean float64) (sum, squares float64)
	normalise64  func(dst, src, gamma, beta *float64, n int, mean, by float64)

	nanos float64 // nanoseconds of one thread for an element, all passes
}

var goKernels = kernels{
	sum: sumGo, deviations: deviationsGo, normalise: normaliseGo, sum64: sum64Go, deviations64: deviations64Go, normalise64: normalise64Go,
	nanos: cpu.ElementNanos,
}

// A Norm is layer norm, or RMS norm, of rows of N elements. Gamma may be nil for ones, and Beta for zeros. Beta may
// have as many elements as x: then each row has its own, as with a residual.
type Norm[F cpu.Real] struct {
	N           int
	Gamma, Beta []F
	Eps         float64
	RMS         bool
}

// Rows writes the norms of all rows of x to y, on as many threads as the call is worth. The bits of a row depend on
// the row alone.
func (o *Norm[F]) Rows(e *cpu.Engine, y, x []F) {
	if len(x) == 0 {
		return
	}
	e.Each(len(x)/o.N, float64(len(x))*tiers[cpu.InUse()].nanos, func(row int) {
		from, to := row*o.N, (row+1)*o.N
		beta := o.Beta
		if len(beta) > o.N {
			beta = beta[from:to]
		}
		o.row(y[from:to], x[from:to], beta)
	})
}

// row writes the norm of one row:
//
//	y[i] = (x[i] - mean) / sqrt(variance + eps) * gamma[i] + beta[i]
//	y[i] = x[i] / sqrt(mean(x^2) + eps) * gamma[i] + beta[i]            with RMS
func (o *Norm[F]) row(y, x, beta []F) {
	mean, by := 0.0, 0.0
	if o.RMS {
		by = ReciprocalRMS(x, o.Eps)
	} else {
		mean, by = Moments(x, o.Eps)
	}
	normaliseInto(y, x, o.Gamma, beta, mean, by)
}

// Moments returns the mean of x and 1/sqrt(variance + eps), in float64. The second pass also sums the differences to
// the first pass's mean, and both results are corrected by the rounding found there.
func Moments[F cpu.Real](x []F, eps float64) (mean, rstd float64) {
	n := float64(len(x))
	mean = sumOf(x) / n
	d, q := deviationsOf(x, mean)
	d /= n
	variance := math.Max(0, q/n-d*d)
	return mean + d, 1 / math.Sqrt(variance+eps)
}

// ReciprocalRMS returns 1/sqrt(mean(x^2) + eps), in float64.
func ReciprocalRMS[F cpu.Real](x []F, eps float64) float64 {
	return 1 / math.Sqrt(vector.Dot(x, x)/float64(len(x))+eps)
}

// sumOf returns the sum of x in float64, in an order that depends on its length alone.
func sumOf[F cpu.Real](x []F) float64 {
	switch v := &tiers[cpu.InUse()]; {
	case len(x) == 0:
		return 0
	case unsafe.Sizeof(F(0)) == 4:
		return v.sum((*float32)(unsafe.Pointer(&x[0])), len(x))
	default:
		return v.sum64((*float64)(unsafe.Pointer(&x[0])), len(x))
	}
}

// deviationsOf returns the sums of the differences of x to mean, and of their squares, in float64, in the order of
// sumOf.
func deviationsOf[F cpu.Real](x []F, mean float64) (sum, squares float64) {
	switch v := &tiers[cpu.InUse()]; {
	case len(x) == 0:
		return 0, 0
	case unsafe.Sizeof(F(0)) == 4:
		return v.deviations((*float32)(unsafe.Pointer(&x[0])), len(x), mean)
	default:
		return v.deviations64((*float64)(unsafe.Pointer(&x[0])), len(x), mean)
	}
}

// normaliseInto computes dst = (src - mean) * by * gamma + beta in float64. gamma and beta may be nil.
func normaliseInto[F cpu.Real](dst, src, gamma, beta []F, mean, by float64) {
	if len(src) == 0 {
		return
	}
	dst = dst[:len(src)]
	var p [2]unsafe.Pointer
	for i, s := range [...][]F{gamma, beta} {
		if s != nil {
			p[i] = unsafe.Pointer(unsafe.SliceData(s[:len(src)]))
		}
	}
	to, from := unsafe.Pointer(&dst[0]), unsafe.Pointer(&src[0])
	if v := &tiers[cpu.InUse()]; unsafe.Sizeof(F(0)) == 4 {
		v.normalise((*float32)(to), (*float32)(from), (*float32)(p[0]), (*float32)(p[1]), len(src), mean, by)
	} else {
		v.normalise64((*float64)(to), (*float64)(from), (*float64)(p[0]), (*float64)(p[1]), len(src), mean, by)
	}
}

// sumGo is
//
//	for i := range n {
//		sum += float64(x[i])
//	}
//	return sum
//
// in any order of sums.
func sumGo(x *float32, n int) float64 { return sumOfElements(unsafe.Slice(x, n)) }

// sum64Go is sumGo for float64:
//
//	for i := range n {
//		sum += x[i]
//	}
//	return sum
func sum64Go(x *float64, n int) float64 { return sumOfElements(unsafe.Slice(x, n)) }

// deviationsGo is
//
//	for i := range n {
//		d := float64(x[i]) - mean
//		sum += d
//		squares += d * d
//	}
//	return sum, squares
//
// in any order of sums.
func deviationsGo(x *float32, n int, mean float64) (sum, squares float64) {
	return sumsOfDeviations(unsafe.Slice(x, n), mean)
}

// deviations64Go is deviationsGo for float64:
//
//	for i := range n {
//		d := x[i] - mean
//		sum += d
//		squares += d * d
//	}
//	return sum, squares
func deviations64Go(x *float64, n int, mean float64) (sum, squares float64) {
	return sumsOfDeviations(unsafe.Slice(x, n), mean)
}

// normaliseGo is
//
//	for i := range n {
//		dst[i] = float32((float64(src[i]) - mean) * by * float64(gamma[i]) + float64(beta[i]))
//	}
//
// without a gamma, or a beta, that is nil.
func normaliseGo(dst, src, gamma, beta *float32, n int, mean, by float64) {
	normalise(dst, src, gamma, beta, n, mean, by)
}

// normalise64Go is normaliseGo for float64:
//
//	for i := range n {
//		dst[i] = (src[i] - mean) * by * gamma[i] + beta[i]
//	}
func normalise64Go(dst, src, gamma, beta *float64, n int, mean, by float64) {
	normalise(dst, src, gamma, beta, n, mean, by)
}

// sumOfElements keeps four sums, which hide the latency of an addition.
func sumOfElements[F cpu.Real](x []F) float64 {
	var s0, s1, s2, s3 float64
	i := 0
	for ; i+4 <= len(x); i += 4 {
		v := x[i : i+4 : i+4]
		s0 += float64(v[0])
		s1 += float64(v[1])
		s2 += float64(v[2])
		s3 += float64(v[3])
	}
	for ; i < len(x); i++ {
		s0 += float64(x[i])
	}
	return s0 + s1 + s2 + s3
}

func sumsOfDeviations[F cpu.Real](x []F, mean float64) (sum, squares float64) {
	var d0, d1, q0, q1 float64
	i := 0
	for ; i+2 <= len(x); i += 2 {
		v := x[i : i+2 : i+2]
		a, b := float64(v[0])-mean, float64(v[1])-mean
		d0 += a
		q0 += a * a
		d1 += b
		q1 += b * b
	}
	if i < len(x) {
		a := float64(x[i]) - mean
		d0 += a
		q0 += a * a
	}
	return d0 + d1, q0 + q1
}

// normalise rounds products before the addition, as the kernels do.
func normalise[F cpu.Real](to, from, gamma, beta *F, n int, mean, by float64) {
	dst, src := unsafe.Slice(to, n), unsafe.Slice(from, n)
	switch g, b := unsafe.Slice(gamma, count(gamma, n)), unsafe.Slice(beta, count(beta, n)); {
	case gamma != nil && beta != nil:
		for i, x := range src {
			dst[i] = F(float64((float64(x)-mean)*by*float64(g[i])) + float64(b[i]))
		}
	case gamma != nil:
		for i, x := range src {
			dst[i] = F((float64(x) - mean) * by * float64(g[i]))
		}
	case beta != nil:
		for i, x := range src {
			dst[i] = F(float64((float64(x)-mean)*by) + float64(b[i]))
		}
	default:
		for i, x := range src {
			dst[i] = F((float64(x) - mean) * by)
		}
	}
}

// count returns n, or 0 for a nil p.
func count[F cpu.Real](p *F, n int) int {
	if p == nil {
		return 0
	}
	return n
}
