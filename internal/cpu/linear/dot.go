package linear

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/vector"
	"gorgonia.org/leanattention/internal/weight"
)

// The Go forms of the kernels of linear layers. Their contracts hold for the assembly too.

var linearGo = linearKernels{
	dot: [weight.Formats][dotMaxRows + 1]func(*dotArgs){
		weight.Float32:  {nil, dotF32Go, dotF32Go, dotF32Go, dotF32Go},
		weight.Float64:  {nil, dotF64Go, dotF64Go, dotF64Go, dotF64Go},
		weight.Float16:  {nil, dotF16Go, dotF16Go, dotF16Go, dotF16Go},
		weight.BFloat16: {nil, dotBF16Go, dotBF16Go, dotBF16Go, dotBF16Go},
	},
	rows: 4,
	row: rowKernels{
		dot:     [weight.Formats]func(*rowArgs){weight.Float32: rowF32Go, weight.Float16: rowF16Go, weight.BFloat16: rowBF16Go},
		streams: rowGoStreams, unit: 64 << 10,
	},
}

// dotF32Go is
//
//	for r := range a.rows {
//		for s := range 4 {
//			y[r][s] = sum_k x[r][k] * w[s][k], k < a.n
//		}
//	}
//
// with float32 weights; see dotArgs. Sums are in float32, in an order that depends on nothing but the number
// of terms: the result of a row is the same whatever the other rows are and however many, and whether its
// terms come in one call or in several. Of several, all but the last have a multiple of dotPiece terms.
func dotF32Go(a *dotArgs) { dot[float32](a, weight.Float32) }

// dotF16Go is dotF32Go for weights that are stored as float16.
func dotF16Go(a *dotArgs) { dot[float32](a, weight.Float16) }

// dotBF16Go is dotF32Go for weights that are stored as bfloat16.
func dotBF16Go(a *dotArgs) { dot[float32](a, weight.BFloat16) }

// dotF64Go is dotF32Go for x, weights and y in float64.
func dotF64Go(a *dotArgs) { dot[float64](a, weight.Float64) }

// dot works on pieces of the rows, so that weights are widened once for all rows of x. Weights are of F, or their sums are
// float32.
func dot[F cpu.Real](a *dotArgs, f weight.Format) {
	var wide [dotStreams][dotPiece]float32
	var k [dotStreams][]F
	var fresh [dotMaxRows][dotStreams]F
	sums := &fresh
	if a.more != 0 || a.unfinished != 0 {
		sums = (*[dotMaxRows][dotStreams]F)(a.partial)
		if a.more == 0 {
			*sums = fresh
		}
	}
	for at := 0; at < a.n; at += dotPiece {
		n := min(dotPiece, a.n-at)
		for s := range k {
			p := unsafe.Add(a.w, s*a.wStep+at*f.Bytes())
			if f != weight.Float32 && f != weight.Float64 {
				weight.Decode(f, wide[s][:n], p)
				p = unsafe.Pointer(&wide[s])
			}
			k[s] = unsafe.Slice((*F)(p), n)
		}
		for r := range a.rows {
			x := unsafe.Slice((*F)(unsafe.Add(a.x, r*a.xRow+at*int(unsafe.Sizeof(F(0))))), n)
			var part [dotStreams]F
			vector.Dot4(&part, x, k[0], k[1], k[2], k[3])
			for s, v := range part {
				sums[r][s] += v
			}
		}
	}
	if a.unfinished != 0 {
		return
	}
	for r := range a.rows {
		for s, v := range sums[r] {
			*(*F)(unsafe.Add(a.y, r*a.yRow+s*a.yStep)) = v
		}
	}
}

// rowGoStreams is how many streams a row kernel in Go has.
const rowGoStreams = 8

// rowF32Go is
//
//	for r := range a.rows {
//		for s := range streams {
//			y[r][s] = sum_k x[k] * w[r][s][k], k < a.n
//		}
//	}
//
// with float32 weights; see rowArgs. A result has the bits that the dot kernels of the same instruction set give it.
func rowF32Go(a *rowArgs) { row(a, weight.Float32) }

// rowF16Go is rowF32Go for weights that are stored as float16.
func rowF16Go(a *rowArgs) { row(a, weight.Float16) }

// rowBF16Go is rowF32Go for weights that are stored as bfloat16.
func rowBF16Go(a *rowArgs) { row(a, weight.BFloat16) }

// prefetchGo asks for the cache lines of the n bytes at p to be brought into the second cache, and waits for none. That is a hint: nothing
// need be there.
func prefetchGo(p uintptr, n int) {}

func row(a *rowArgs, f weight.Format) {
	for r := range a.rows {
		for s := 0; s < rowGoStreams; s += dotStreams {
			four := dotArgs{
				y: unsafe.Add(a.y, r*a.yRow+s*a.yStep), yStep: a.yStep, x: a.x, rows: 1, n: a.n,
				w: unsafe.Add(a.w, r*(a.n*f.Bytes()+a.wSkip)+s*a.wStep), wStep: a.wStep,
			}
			dot[float32](&four, f)
		}
	}
}
