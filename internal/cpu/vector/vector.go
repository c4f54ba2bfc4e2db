// Package vector computes on vectors of numbers on the CPU, in vector registers if there are any: sums and products,
// activations, score modifications, rounding and widening. The package also has the loops of the Go kernels.
package vector

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
)

// kernels are the functions of one tier for the elements of queries, outputs and scores, each with the contract and
// the bits of its Go kernel below.
type kernels struct {
	scale  func(dst, src *float32, n int, by float64)
	divide func(dst, src *float32, n int, by float32)
	bias   func(dst, src *float32, n int, by float64)
	slope  func(dst *float32, n int, by, from, step float64, first *[4]int)

	biasStreams func(dst, src *float32, n int, by float64, first *[4]int)

	softCap func(dst *float32, n int, by float64) // within 2^-21 of the Go kernel
	dot     func(x, y *float32, n int) float64    // with another order of sums

	scale64, divide64 func(dst, src *float64, n int, by float64)
	dot64             func(x, y *float64, n int) float64
	softCap64         func(dst *float64, n int, by float64) // within 2^-50 of the Go kernel

	add, times func(dst, src *float32, n int)
	relu, gelu func(dst *float32, n int)

	toFloat16, toBFloat16 func(dst *uint16, src *float32, n int)
	roundNanos            float64 // nanoseconds of one thread for an element

	fromE4M3, fromInt8 func(dst *float32, src *uint8, scales *float32, rows, n, step int)
}

// Scale computes dst = src * by, rounded once.
func Scale[F cpu.Real](dst, src []F, by float64) {
	switch v := &tiers[cpu.InUse()]; {
	case len(dst) == 0:
	case unsafe.Sizeof(F(0)) == 4:
		v.scale((*float32)(unsafe.Pointer(&dst[0])), (*float32)(unsafe.Pointer(&src[0])), len(dst), by)
	default:
		v.scale64((*float64)(unsafe.Pointer(&dst[0])), (*float64)(unsafe.Pointer(&src[0])), len(dst), by)
	}
}

// Divide computes dst = src / by.
func Divide[F cpu.Real](dst, src []F, by F) {
	switch v := &tiers[cpu.InUse()]; {
	case len(dst) == 0:
	case unsafe.Sizeof(by) == 4:
		v.divide((*float32)(unsafe.Pointer(&dst[0])), (*float32)(unsafe.Pointer(&src[0])), len(dst), float32(by))
	default:
		v.divide64((*float64)(unsafe.Pointer(&dst[0])), (*float64)(unsafe.Pointer(&src[0])), len(dst), float64(by))
	}
}

// Add computes dst += src.
func Add[F cpu.Real](dst, src []F) {
	if unsafe.Sizeof(F(0)) == 4 {
		tiers[cpu.InUse()].add((*float32)(unsafe.Pointer(unsafe.SliceData(dst))), (*float32)(unsafe.Pointer(unsafe.SliceData(src[:len(dst)]))), len(dst))
		return
	}
	addEach(dst, src)
}

// Times computes dst *= src.
func Times(dst, src []float32) {
	tiers[cpu.InUse()].times(unsafe.SliceData(dst), unsafe.SliceData(src[:len(dst)]), len(dst))
}

// Dot returns the sum of the products of x and y in float64, in an order that depends on their length alone.
func Dot[F cpu.Real](x, y []F) float64 {
	y = y[:len(x)]
	switch v := &tiers[cpu.InUse()]; {
	case len(x) == 0:
		return 0
	case unsafe.Sizeof(F(0)) == 4:
		return v.dot((*float32)(unsafe.Pointer(&x[0])), (*float32)(unsafe.Pointer(&y[0])), len(x))
	default:
		return v.dot64((*float64)(unsafe.Pointer(&x[0])), (*float64)(unsafe.Pointer(&y[0])), len(x))
	}
}

// oneByOne has the first numbers of four streams that are the next four keys: numbers of a stream are 4 apart.
var oneByOne = [4]int{0, 1, 2, 3}

// AddSlopes adds slope (distance+j) to each s_c of s. j is c, or first[c%4] + c/4 if first is not nil.
func AddSlopes[F cpu.Real](s []F, slope, distance float64, first *[4]int) {
	if slope == 0 || len(s) == 0 {
		return
	}
	step := 1.0
	if first == nil {
		first, step = &oneByOne, 4
	}
	if unsafe.Sizeof(F(0)) == 4 {
		tiers[cpu.InUse()].slope((*float32)(unsafe.Pointer(&s[0])), len(s), slope, distance, step, first)
		return
	}
	addSlope(s, slope, distance, step, first)
}

// AddBiases adds by bias_j to each s_c of s. j is c, or first[c%4] + c/4 if first is not nil. Only an infinite bias
// makes a sum infinite: a finite bias that is too large with the factor becomes the lowest number, so that the key
// stays visible to a row without better keys.
func AddBiases[F cpu.Real](s []F, bias *F, by float64, first *[4]int) {
	if len(s) == 0 {
		return
	}
	if unsafe.Sizeof(F(0)) == 4 {
		dst, src := (*float32)(unsafe.Pointer(&s[0])), (*float32)(unsafe.Pointer(bias))
		if first != nil {
			tiers[cpu.InUse()].biasStreams(dst, src, len(s), by, first)
		} else {
			tiers[cpu.InUse()].bias(dst, src, len(s), by)
		}
		return
	}
	if first != nil {
		addBiasStreams(s, bias, by, -math.MaxFloat64, first)
		return
	}
	addBias(s, unsafe.Slice(bias, len(s)), by, -math.MaxFloat64)
}

var goKernels = kernels{
	scale: scaleGo, divide: divideGo, bias: biasGo, slope: slopeGo, softCap: softCapGo, biasStreams: biasStreamsGo, dot: dotGo,
	scale64: scale64Go, divide64: divide64Go, dot64: dot64Go, softCap64: softCap64Go,
	add: addGo, times: timesGo, relu: reluGo, gelu: geluGo, toFloat16: toFloat16Go, toBFloat16: toBFloat16Go, roundNanos: cpu.ElementNanos,
	fromE4M3: fromE4M3Go, fromInt8: fromInt8Go,
}

// scaleGo is
//
//	for i := range n {
//		dst[i] = float32(float64(src[i]) * by)
//	}
func scaleGo(dst, src *float32, n int, by float64) {
	scale(unsafe.Slice(dst, n), unsafe.Slice(src, n), by)
}

// divideGo is
//
//	for i := range n {
//		dst[i] = src[i] / by
//	}
func divideGo(dst, src *float32, n int, by float32) {
	divide(unsafe.Slice(dst, n), unsafe.Slice(src, n), by)
}

// scale64Go is
//
//	for i := range n {
//		dst[i] = src[i] * by
//	}
func scale64Go(dst, src *float64, n int, by float64) {
	scale(unsafe.Slice(dst, n), unsafe.Slice(src, n), by)
}

// divide64Go is
//
//	for i := range n {
//		dst[i] = src[i] / by
//	}
func divide64Go(dst, src *float64, n int, by float64) {
	divide(unsafe.Slice(dst, n), unsafe.Slice(src, n), by)
}

// dotGo is
//
//	for i := range n {
//		sum += float64(x[i]) * float64(y[i])
//	}
//	return sum
//
// in any order of sums.
func dotGo(x, y *float32, n int) float64 {
	return sumOfProducts(unsafe.Slice(x, n), unsafe.Slice(y, n))
}

// dot64Go is
//
//	for i := range n {
//		sum += x[i] * y[i]
//	}
//	return sum
//
// in any order of sums.
func dot64Go(x, y *float64, n int) float64 {
	return sumOfProducts(unsafe.Slice(x, n), unsafe.Slice(y, n))
}

// biasGo is
//
//	for i := range n {
//		p := float64(src[i]) * by
//		if p < -math.MaxFloat32 && !math.IsInf(p, -1) {
//			p = -math.MaxFloat32
//		}
//		dst[i] = float32(float64(dst[i]) + p)
//	}
func biasGo(dst, src *float32, n int, by float64) {
	addBias(unsafe.Slice(dst, n), unsafe.Slice(src, n), by, -math.MaxFloat32)
}

// biasStreamsGo is
//
//	for i := range n {
//		p := float64(src[first[i%4]+i/4]) * by
//		if p < -math.MaxFloat32 && !math.IsInf(p, -1) {
//			p = -math.MaxFloat32
//		}
//		dst[i] = float32(float64(dst[i]) + p)
//	}
func biasStreamsGo(dst, src *float32, n int, by float64, first *[4]int) {
	addBiasStreams(unsafe.Slice(dst, n), src, by, -math.MaxFloat32, first)
}

// slopeGo is
//
//	for i := range n {
//		p := by * (from + (float64(first[i%4]) + step*float64(i/4)))
//		dst[i] = float32(float64(dst[i]) + p)
//	}
//
// where first, and from, and step are whole numbers, and their sums exact.
func slopeGo(dst *float32, n int, by, from, step float64, first *[4]int) {
	addSlope(unsafe.Slice(dst, n), by, from, step, first)
}

// addBias is biasGo; a finite element of src gives at least lowest. The conversions prevent fused products and sums.
func addBias[F cpu.Real](dst, src []F, by, lowest float64) {
	src = src[:len(dst)]
	for i, x := range dst {
		p := float64(float64(src[i]) * by)
		if p < lowest && !math.IsInf(float64(src[i]), 0) {
			p = lowest
		}
		dst[i] = F(float64(x) + p)
	}
}

// addBiasStreams is biasStreamsGo, as addBias is biasGo.
func addBiasStreams[F cpu.Real](dst []F, src *F, by, lowest float64, first *[4]int) {
	for s, number := range first {
		if s >= len(dst) {
			return
		}
		bias := unsafe.Slice((*F)(unsafe.Add(unsafe.Pointer(src), uintptr(number)*unsafe.Sizeof(F(0)))), (len(dst)-s+3)/4)
		for i, b := range bias {
			p := float64(float64(b) * by)
			if p < lowest && !math.IsInf(float64(b), 0) {
				p = lowest
			}
			x := &dst[4*i+s]
			*x = F(float64(*x) + p)
		}
	}
}

func addSlope[F cpu.Real](dst []F, by, from, step float64, first *[4]int) {
	var at [4]float64
	for s := range at {
		at[s] = from + float64(first[s])
	}
	for i, x := range dst {
		dst[i] = F(float64(x) + float64(by*at[i%4]))
		at[i%4] += step
	}
}

func sumOfProducts[F cpu.Real](x, y []F) (sum float64) {
	y = y[:len(x)]
	for i, x := range x {
		sum += float64(x) * float64(y[i])
	}
	return sum
}

func scale[F cpu.Real](dst, src []F, by float64) {
	dst = dst[:len(src)]
	for i, x := range src {
		dst[i] = F(float64(x) * by)
	}
}

func divide[F cpu.Real](dst, src []F, by F) {
	dst = dst[:len(src)]
	for i, x := range src {
		dst[i] = x / by
	}
}

// addGo is
//
//	for i := range n {
//		dst[i] += src[i]
//	}
func addGo(dst, src *float32, n int) { addEach(unsafe.Slice(dst, n), unsafe.Slice(src, n)) }

// timesGo is
//
//	for i := range n {
//		dst[i] *= src[i]
//	}
func timesGo(dst, src *float32, n int) {
	by := unsafe.Slice(src, n)
	for i := range by {
		unsafe.Slice(dst, n)[i] *= by[i]
	}
}

func addEach[F cpu.Real](dst, src []F) {
	src = src[:len(dst)]
	for i := range dst {
		dst[i] += src[i]
	}
}
