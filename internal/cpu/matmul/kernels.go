package matmul

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/weight"
)

// The Go forms of the kernels for tiles of linear layers, with the contracts of the assembly. NEON uses those that
// pack weights. The others serve tests alone, since with Go's kernels all rows are few.

// tileF32Go is
//
//	for r := range a.Rows {
//		for o := range a.outs {
//			y[r][o] = sum_k x[r][k] * w[k*a.outs+o], k < a.N
//		}
//	}
//
// with float32 weights, or += if a.More is not 0. Products are added one after the other.
func tileF32Go(a *Args) {
	w := unsafe.Slice((*float32)(a.W), a.N*a.outs)
	for r := range a.Rows {
		x := unsafe.Slice((*float32)(unsafe.Add(a.X, r*a.XRow)), a.N)
		y := unsafe.Slice((*float32)(unsafe.Add(a.Y, r*a.YRow)), a.outs)
		for o := range y {
			var sum float32
			for k, v := range x {
				sum = float32(math.FMA(float64(v), float64(w[k*a.outs+o]), float64(sum)))
			}
			if a.More != 0 {
				sum += y[o]
			}
			y[o] = sum
		}
	}
}

// packF32Go is
//
//	for k := range a.N {
//		for r := range 8 {
//			dst[k*DstStep][r] = src[min(r, a.Rows-1)][k]
//		}
//	}
//
// with dst and src of float32.
func packF32Go(a *PackArgs) { packRowsGo(a, weight.Float32) }

// packF16Go is packF32Go for weights that are stored as float16.
func packF16Go(a *PackArgs) { packRowsGo(a, weight.Float16) }

// packBF16Go is packF32Go for weights that are stored as bfloat16.
func packBF16Go(a *PackArgs) { packRowsGo(a, weight.BFloat16) }

func packRowsGo(a *PackArgs, f weight.Format) {
	var wide [128]float32
	for at := 0; at < a.N; at += len(wide) {
		n := min(len(wide), a.N-at)
		for r := range packRows {
			src := unsafe.Add(a.Src, min(r, a.Rows-1)*a.SrcRow+at*f.Bytes())
			of := wide[:n]
			weight.Decode(f, of, src)
			dst := unsafe.Add(a.Dst, at*a.DstStep+4*r)
			for k, v := range of {
				*(*float32)(unsafe.Add(dst, k*a.DstStep)) = v
			}
		}
	}
}

// widened returns element k of a row of weights, without a scale.
func widened(row unsafe.Pointer, k int, f weight.Format) float32 {
	var v [1]float32
	weight.Decode(f, v[:], unsafe.Add(row, k*f.Bytes()))
	return v[0]
}

// step is one part of StepRows rows by StepDepth elements, as bfloat16.
type step [StepRows][StepDepth]half.BFloat16

// splitF32Go writes parts of x, of float32. Its names say how many: with step s and part p,
//
//	for r := range a.Rows {
//		for k := range a.N {
//			dst[k/32*DstStep + p*DstPart][r][k%32] = part p of src[r][k]
//		}
//	}
//
// Part 0 is the upper 16 bits of a number, part 1 those of what it leaves, and so on: the sum of three parts is
// the number, that of two is off by less than 2^-15 of it. A single part is the number rounded to bfloat16, and 0
// where it is not normal.
// Elements behind the last are 0 to the end of their step.
func splitF32Go(a *PackArgs, parts int) {
	for k := range (a.N + StepDepth - 1) / StepDepth * StepDepth {
		for r := range a.Rows {
			var of [3]half.BFloat16
			if k < a.N {
				of = partsOf(widened(unsafe.Add(a.Src, r*a.SrcRow), k, weight.Float32), parts)
			}
			for p := range parts {
				(*step)(unsafe.Add(a.Dst, k/StepDepth*a.DstStep+p*a.DstPart))[r][k%StepDepth] = of[p]
			}
		}
	}
}

func partsOf(v float32, parts int) (of [3]half.BFloat16) {
	if parts == 1 {
		if math.Abs(float64(v)) < 0x1p-126 {
			v = float32(math.Copysign(0, float64(v)))
		}
		return [3]half.BFloat16{half.BFromFloat32(v)}
	}
	for p := range parts {
		of[p] = half.BFloat16(math.Float32bits(v) >> 16)
		v -= of[p].Float32()
	}
	return of
}

// splitX1Go is splitF32Go of one part.
func splitX1Go(a *PackArgs) { splitF32Go(a, 1) }

// splitX2Go is splitF32Go of two parts.
func splitX2Go(a *PackArgs) { splitF32Go(a, 2) }

// splitX3Go is splitF32Go of three parts.
func splitX3Go(a *PackArgs) { splitF32Go(a, 3) }

// pairsF32Go writes the parts of weights, of float32 in three parts. A part of a step has elements in pairs:
//
//	for r := range a.Rows {
//		for k := range a.N {
//			dst[k/32*DstStep + p*DstPart][k%32/2][2*r + k%2] = part p of src[r][k]
//		}
//	}
//
// with parts as splitF32Go makes them. Elements behind the last are 0 to the end of their step, those of rows
// behind the last anything.
func pairsF32Go(a *PackArgs) { pairsGo(a, weight.Float32, 3) }

// pairsF16Go is pairsF32Go for weights that are stored as float16, in two parts. a.Odd is as it was if the magnitude of all
// elements is less than 2^56.
func pairsF16Go(a *PackArgs) { pairsGo(a, weight.Float16, 2) }

// pairsBF16Go is pairsF16Go for weights that are stored as bfloat16, which are their one part.
func pairsBF16Go(a *PackArgs) { pairsGo(a, weight.BFloat16, 1) }

func pairsGo(a *PackArgs, f weight.Format, parts int) {
	for k := range (a.N + StepDepth - 1) / StepDepth * StepDepth {
		for r := range a.Rows {
			var of [3]half.BFloat16
			if k < a.N {
				of = a.stored(unsafe.Add(a.Src, r*a.SrcRow), k, f, parts)
			}
			for p := range parts {
				(*step)(unsafe.Add(a.Dst, k/StepDepth*a.DstStep+p*a.DstPart))[k%StepDepth/2][2*r+k%2] = of[p]
			}
		}
	}
}

// stored returns the parts of element k of a row that is stored as f, where a bfloat16 is its own part, and sets Odd
// if a 16-bit element is large.
func (a *PackArgs) stored(row unsafe.Pointer, k int, f weight.Format, parts int) [3]half.BFloat16 {
	v := widened(row, k, f)
	if f != weight.Float32 {
		a.Odd |= largeGo(&v, 1)
	}
	if f == weight.BFloat16 {
		return [3]half.BFloat16{half.BFloat16(math.Float32bits(v) >> 16)}
	}
	return partsOf(v, parts)
}

// columnsF16Go writes the two parts of values that are stored as float16, as weights whose features are 16 columns:
//
//	for r := range 16 {
//		for k := range a.N {
//			dst[k/32*DstStep + p*DstPart][k%32/2][2*r + k%2] = part p of src[k][r]
//		}
//	}
//
// where src[k] lies at src + k*SrcRow, with parts as splitF32Go makes them. If n is odd, element n is 0. What is behind
// it in its step is left as it is. a.Odd is as it was if the magnitude of all elements is less than 2^56.
func columnsF16Go(a *PackArgs) { columnsGo(a, weight.Float16, 2) }

// columnsBF16Go is columnsF16Go for values that are stored as bfloat16, which are their one part.
func columnsBF16Go(a *PackArgs) { columnsGo(a, weight.BFloat16, 1) }

func columnsGo(a *PackArgs, f weight.Format, parts int) {
	for k := range (a.N + 1) / 2 * 2 {
		for r := range StepRows {
			var of [3]half.BFloat16
			if k < a.N {
				of = a.stored(unsafe.Add(a.Src, k*a.SrcRow), r, f, parts)
			}
			for p := range parts {
				(*step)(unsafe.Add(a.Dst, k/StepDepth*a.DstStep+p*a.DstPart))[k%StepDepth/2][2*r+k%2] = of[p]
			}
		}
	}
}

// tilePartsGo computes tiles of 32 rows and 32 features from parts of bfloat16, over a.N steps; of one it is
//
//	y[r][o] = sum_k sum_ij x_i[r][k] * w_j[o][k], i + j < the parts of x
//
// or += if a.More is not 0. Step s of x has part i of rows 0 to 15 at s*XParts + i, counted in steps of 1024
// bytes, and those of rows 16 to 31 XRow behind; step s of w has part j of features 0 to 15, in pairs, at
// 2*(s*WParts + j), and those of features 16 to 31 behind it. Tile t of a.Tiles has features 32*t and more of y, and
// its weights t*WStep behind w; tile t of a.Tall has the rows t*XStep behind x and t*YStep behind y. Sums are in
// float32, and numbers that are not normal are 0. What is not finite may become NaN.
func tilePartsGo(a *Args) {
	for t := range a.Tiles {
		for r := range a.Tall {
			one := *a
			one.Y, one.W = unsafe.Add(a.Y, 4*2*StepRows*t+r*a.YStep), unsafe.Add(a.W, t*a.WStep)
			one.X = unsafe.Add(a.X, r*a.XStep)
			onePartsGo(&one)
		}
	}
}

func onePartsGo(a *Args) {
	for r := range 2 * StepRows {
		y := (*[2 * StepRows]float32)(unsafe.Add(a.Y, r*a.YRow))
		if a.More == 0 {
			*y = [2 * StepRows]float32{}
		}
		for s := range a.N {
			for i := range a.xParts {
				x := &(*step)(unsafe.Add(a.X, (s*a.xParts+i)*StepBytes+r/StepRows*a.XRow))[r%StepRows]
				for j := 0; j < a.wParts && i+j < a.xParts; j++ {
					for h := range 2 {
						w := (*step)(unsafe.Add(a.W, (2*(s*a.wParts+j)+h)*StepBytes))
						for k := range StepDepth {
							v := x[k].Float32()
							for o := range StepRows {
								y[h*StepRows+o] += v * w[k/2][2*o+k%2].Float32()
							}
						}
					}
				}
			}
		}
	}
}

// largeGo returns 0 if the magnitude of all n elements is less than 2^56: sums of 2^15 products of such numbers are finite.
func largeGo(p *float32, n int) (large int) {
	for _, v := range unsafe.Slice(p, n) {
		if !(math.Abs(float64(v)) < 0x1p56) {
			large = 1
		}
	}
	return large
}

// oddGo returns 0 if all n elements are finite.
func oddGo(p *float32, n int) (odd int) {
	for _, v := range unsafe.Slice(p, n) {
		if !(math.Abs(float64(v)) <= math.MaxFloat32) {
			odd = 1
		}
	}
	return odd
}

// GoFloats returns the Go forms of kernels for float32, for tests: tiles are small, and Go is slow.
func GoFloats() *Set {
	k := &Set{Rows: 5, Outs: 16, Panels: 3}
	mul := []func(*Args){nil}
	for rows := 1; rows <= k.Rows; rows++ {
		mul = append(mul, func(a *Args) {
			a.Rows, a.outs = rows, k.Outs
			tileF32Go(a)
		})
	}
	for d, pack := range map[weight.Format]func(*PackArgs){weight.Float32: packF32Go, weight.Float16: packF16Go, weight.BFloat16: packBF16Go} {
		k.Ways[d] = Way{FromRows: 16, Depth: 64, Mul: mul, Pack: pack, Rows: packRows}
	}
	return k
}

// GoParts returns the Go forms of kernels for parts of bfloat16, for tests.
func GoParts() *Set {
	k := &Set{Rows: 2 * StepRows, Outs: 2 * StepRows, Panels: 2}
	way := func(x, w int, pack, columns func(*PackArgs)) Way {
		mul := make([]func(*Args), k.Rows+1)
		mul[k.Rows] = func(a *Args) {
			a.xParts, a.wParts = x, w
			tilePartsGo(a)
		}
		split := func(a *PackArgs) { splitF32Go(a, x) }
		return Way{FromRows: 32, Depth: 2 * StepDepth, Mul: mul, Pack: pack, Columns: columns, Rows: StepRows, XParts: x, WParts: w, Split: split, Odd: oddGo, Large: largeGo}
	}
	f16, bf16 := way(2, 2, pairsF16Go, columnsF16Go), way(1, 1, pairsBF16Go, columnsBF16Go)
	k.Ways[weight.Float32], k.Ways[weight.Float16], k.Ways[weight.BFloat16] = way(3, 3, pairsF32Go, nil), way(3, 2, pairsF16Go, columnsF16Go), way(3, 1, pairsBF16Go, columnsBF16Go)
	k.Rounded[weight.Float16], k.Rounded[weight.BFloat16] = &f16, &bf16
	return k
}
