package linear

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu/vector"
	"gorgonia.org/leanattention/internal/weight"
)

// The Go forms of the kernels for weights of 8 and fewer bits. Their contracts hold for the assembly too, but for the order of
// integers in a group: here it is that of the row.

// blockKind is a kind of formats that one kernel serves.
type blockKind uint8

const (
	plainBlocks  blockKind = iota // signed integers, a scale for 32
	minimaBlocks                  // integers that are not negative, a scale and a minimum for 32
	halfBlocks                    // signed integers, a scale for 16
	blockKinds   = iota
)

// kindOf returns the kind of a format.
func kindOf(f weight.Format) blockKind {
	switch {
	case f.HasMinima():
		return minimaBlocks
	case f.Run() == 16:
		return halfBlocks
	}
	return plainBlocks
}

// blockKernels are the kernels of one tier for weights of 8 and fewer bits.
type blockKernels struct {
	unpack [weight.Formats]func(*unpackArgs) // nil: the tier lacks the format
	round  func(*roundArgs)
	expand [blockKinds]func(*expandArgs)
	one    [blockKinds]func(*groupArgs)        // a row of x by sets of dotStreams output features
	row    [weight.Formats]func(*blockRowArgs) // a row of x by rows of weights; nil: they are unpacked, for one
	e4m3   [dotMaxRows + 1]func(*blockRowArgs) // so many rows of x by rows of E4M3; nil: they are widened before
	many   [blockKinds]func(*groupArgs)        // several rows of x by several output features; nil: a tier with panels

	rows, outs int // of many; outs divides blockOuts

	// Panels, which are the weights of panelOuts output features, serve panelRows and more rows of x. 0: none.
	panelRows  int
	pack       [weight.Formats]func(*unpackArgs) // nil: rows are unpacked, for interleave
	interleave func(*interleaveArgs)
	panel      [blockKinds]func(*panelArgs)

	strips stripKernels // for more rows: see blocks_strips.go
}

var blocksGo = blockKernels{
	unpack: [weight.Formats]func(*unpackArgs){
		weight.Int8: unpackI8Go, weight.Q8_0: unpackQ80Go, weight.Q4_0: unpackQ40Go, weight.Q4_1: unpackQ41Go,
		weight.Q5_0: unpackQ50Go, weight.Q5_1: unpackQ51Go, weight.Q4_K: unpackQ4KGo, weight.Q5_K: unpackQ5KGo, weight.Q6_K: unpackQ6KGo,
		weight.Int4_32: unpackI4x32Go, weight.Int4_64: unpackI4x64Go, weight.Int4_128: unpackI4x128Go,
	},
	round:  roundGo,
	expand: [blockKinds]func(*expandArgs){expandGo, expandMinimaGo, expandHalvesGo},
	one:    [blockKinds]func(*groupArgs){oneGo, oneMinimaGo, oneHalvesGo},
	row: [weight.Formats]func(*blockRowArgs){
		weight.Int8: rowI8Go, weight.Q8_0: rowQ80Go, weight.Q4_0: rowQ40Go, weight.Q4_1: rowQ41Go,
		weight.Int4_32: rowI4x32Go, weight.Int4_64: rowI4x64Go, weight.Int4_128: rowI4x128Go,
	},
	e4m3: [dotMaxRows + 1]func(*blockRowArgs){nil, rowsE4M3Go, rowsE4M3Go, rowsE4M3Go, rowsE4M3Go},
	many: [blockKinds]func(*groupArgs){manyGo, manyMinimaGo, manyHalvesGo},
	rows: manyGoRows, outs: manyGoOuts,
	pack: [weight.Formats]func(*unpackArgs){
		weight.Int8: packI8Go, weight.Q8_0: packQ80Go, weight.Q4_0: packQ40Go, weight.Q4_1: packQ41Go,
		weight.Int4_32: packI4x32Go, weight.Int4_64: packI4x64Go, weight.Int4_128: packI4x128Go,
	},
	panelRows: 6, interleave: interleaveGo, panel: [blockKinds]func(*panelArgs){panelGo, panelMinimaGo, panelHalvesGo},
}

const manyGoRows, manyGoOuts = 4, 1

// roundGo rounds a row of x to 8 bits. Each block of 32 elements has the scale max |x| / 127, and the integers nearest to x / scale,
// ties to even. A block that is not finite has the scale NaN, and one whose elements are less than 2^-120 the scale 0; the integers
// of both are 0. Behind the row all is 0, to the end of its last group.
func roundGo(a *roundArgs) {
	x := unsafe.Slice((*float32)(a.src), a.n)
	groups := unsafe.Slice((*xGroup)(a.dst), (a.n-1)/groupElements+1)
	for g := range groups {
		to := &groups[g]
		*to = xGroup{}
		for b := range groupBlocks {
			at := g*groupElements + 32*b
			if at >= a.n {
				break
			}
			block := x[at:min(at+32, a.n)]
			scale, ok := weight.RoundInt8(to.q[32*b:], block)
			if !ok {
				scale = float32(math.NaN())
			}
			sum := int32(0)
			for _, q := range to.q[32*b:][:32] {
				sum += int32(q)
			}
			to.scales[b], to.sums[b] = scale, scale*float32(sum)
		}
	}
}

// unpackI8Go makes groups of rows of signed bytes, with scales of 1. Scales are 0 in blocks behind the end of a row.
func unpackI8Go(a *unpackArgs) { unpack(a, weight.Int8) }

// unpackQ80Go makes groups of rows of Q8_0. Scales are 0 in blocks behind the end of a row.
func unpackQ80Go(a *unpackArgs) { unpack(a, weight.Q8_0) }

// unpackQ40Go makes groups of rows of Q4_0. Scales are 0 in blocks behind the end of a row.
func unpackQ40Go(a *unpackArgs) { unpack(a, weight.Q4_0) }

// unpackQ41Go makes groups of rows of Q4_1. Scales and minima are 0 in blocks behind the end of a row.
func unpackQ41Go(a *unpackArgs) { unpack(a, weight.Q4_1) }

// unpackQ50Go makes groups of rows of Q5_0. Scales are 0 in blocks behind the end of a row.
func unpackQ50Go(a *unpackArgs) { unpack(a, weight.Q5_0) }

// unpackQ51Go makes groups of rows of Q5_1. Scales and minima are 0 in blocks behind the end of a row.
func unpackQ51Go(a *unpackArgs) { unpack(a, weight.Q5_1) }

// unpackQ4KGo makes groups of rows of Q4_K.
func unpackQ4KGo(a *unpackArgs) { unpack(a, weight.Q4_K) }

// unpackQ5KGo makes groups of rows of Q5_K.
func unpackQ5KGo(a *unpackArgs) { unpack(a, weight.Q5_K) }

// unpackQ6KGo makes groups of rows of Q6_K.
func unpackQ6KGo(a *unpackArgs) { unpack(a, weight.Q6_K) }

// unpackI4x32Go makes groups of rows of INT4 in groups of 32. Scales are 0 in blocks behind the end of a row.
func unpackI4x32Go(a *unpackArgs) { unpack(a, weight.Int4_32) }

// unpackI4x64Go makes groups of rows of INT4 in groups of 64. Scales are 0 in blocks behind the end of a row.
func unpackI4x64Go(a *unpackArgs) { unpack(a, weight.Int4_64) }

// unpackI4x128Go makes groups of rows of INT4 in groups of 128.
func unpackI4x128Go(a *unpackArgs) { unpack(a, weight.Int4_128) }

func unpack(a *unpackArgs, f weight.Format) {
	var scales [8 * groupBlocks]float32
	var minima [4 * groupBlocks]float32
	const most = 2 * groupElements // a multiple of each block
	for r := range a.rows {
		src, groups := unsafe.Add(a.src, r*a.srcRow), unsafe.Slice((*weightGroup)(unsafe.Add(a.dst, r*a.dstRow)), (a.n-1)/groupElements+1)
		for at := 0; at < a.n; at += most {
			n := min(most, a.n-at)
			var q [most]int8
			clear(scales[:])
			clear(minima[:])
			if f == weight.Int8 {
				copy(q[:], unsafe.Slice((*int8)(unsafe.Add(src, at)), n))
				for b := range (n + 31) / 32 {
					scales[b] = 1
				}
			} else {
				weight.Unpack(f, q[:n], scales[:], minima[:], unsafe.Slice((*byte)(unsafe.Add(src, f.Size(at))), f.Size(n)))
			}
			for g := range (n-1)/groupElements + 1 {
				to := &groups[at/groupElements+g]
				copy(to.q[:], unsafe.Slice((*byte)(unsafe.Pointer(&q[g*groupElements])), groupElements))
				for b := range groupBlocks {
					i := g*groupBlocks + b
					if f.Run() == 16 {
						to.scales[b], to.high[b], to.minima[b] = scales[2*i], scales[2*i+1], 0
					} else {
						to.scales[b], to.high[b], to.minima[b] = scales[i], 0, minima[i]
					}
				}
			}
		}
	}
}

// expandGo converts groups of signed integers to float32: each is a scale times an integer.
func expandGo(a *expandArgs) { expand(a, plainBlocks) }

// expandMinimaGo converts groups with minima to float32: each is a scale times an integer, rounded, plus a minimum.
func expandMinimaGo(a *expandArgs) { expand(a, minimaBlocks) }

// expandHalvesGo is expandGo for groups with a scale for each half of a block.
func expandHalvesGo(a *expandArgs) { expand(a, halfBlocks) }

func expand(a *expandArgs, kind blockKind) {
	for r := range a.rows {
		groups := unsafe.Slice((*weightGroup)(unsafe.Add(a.src, r*a.srcRow)), a.groups)
		for g := range groups {
			from, to := &groups[g], (*[groupElements]float32)(unsafe.Add(a.dst, r*a.dstRow+4*groupElements*g))
			for b := range groupBlocks {
				high := from.scales[b]
				if kind == halfBlocks {
					high = from.high[b]
				}
				for half, scale := range [2]float32{from.scales[b], high} {
					q, y := (*[16]byte)(from.q[32*b+16*half:]), (*[16]float32)(to[32*b+16*half:])
					for i, v := range q {
						y[i] = float32(scale * float32(int8(v)))
					}
					if kind == minimaBlocks {
						for i := range y {
							y[i] += from.minima[b]
						}
					}
				}
			}
		}
	}
}

// oneGo is
//
//	for o := range 4 * a.sets {
//		y[o] = sum_b x.scales[b] * w[o].scales[b] * sum_e x.q[b][e] * w[o].q[b][e]
//	}
//
// over the blocks b of a row, with e < 32. Sums of products of integers are exact. Sums over blocks are float32, in an order that
// depends on the number of blocks alone.
func oneGo(a *groupArgs) { products(a, plainBlocks, 1, dotStreams*a.sets) }

// oneMinimaGo is oneGo with w[o].minima[b] * x.sums[b] added for each block.
func oneMinimaGo(a *groupArgs) { products(a, minimaBlocks, 1, dotStreams*a.sets) }

// oneHalvesGo is oneGo for blocks whose halves have scales of their own.
func oneHalvesGo(a *groupArgs) { products(a, halfBlocks, 1, dotStreams*a.sets) }

// manyGo is oneGo for several rows of x, and several output features. A result has the bits that oneGo gives it.
func manyGo(a *groupArgs) { products(a, plainBlocks, manyGoRows, manyGoOuts) }

// manyMinimaGo is manyGo with the minima of oneMinimaGo.
func manyMinimaGo(a *groupArgs) { products(a, minimaBlocks, manyGoRows, manyGoOuts) }

// manyHalvesGo is manyGo for the blocks of oneHalvesGo.
func manyHalvesGo(a *groupArgs) { products(a, halfBlocks, manyGoRows, manyGoOuts) }

func products(a *groupArgs, kind blockKind, rows, outs int) {
	for r := range rows {
		x := unsafe.Slice((*xGroup)(unsafe.Add(a.x, r*a.xRow)), a.groups)
		for o := range outs {
			var sum, minima float32
			addProducts(&sum, &minima, unsafe.Slice((*weightGroup)(unsafe.Add(a.w, o*a.wRow)), a.groups), x, kind)
			*(*float32)(unsafe.Add(a.y, r*a.yRow+o*a.yStep)) = sum + minima
		}
	}
}

// addProducts adds the products of groups, and those of minima.
func addProducts(sum, minima *float32, w []weightGroup, x []xGroup, kind blockKind) {
	for g := range w {
		wg, xg := &w[g], &x[g]
		for b := range groupBlocks {
			scale := xg.scales[b]
			low, high := dot8(&wg.q, &xg.q, 32*b), dot8(&wg.q, &xg.q, 32*b+16)
			if kind == halfBlocks {
				*sum += float32(float32(wg.high[b]*scale) * float32(high))
			} else {
				low += high
			}
			*sum += float32(float32(wg.scales[b]*scale) * float32(low))
			if kind == minimaBlocks {
				*minima += float32(wg.minima[b] * xg.sums[b])
			}
		}
	}
}

// interleaveGo makes one set of panelGroups of the weightGroups of four rows.
func interleaveGo(a *interleaveArgs) {
	to := unsafe.Slice((*panelGroup)(a.dst), a.groups)
	for s := range dotStreams {
		for g := range to {
			at := unsafe.Add(a.src, s*a.srcRow+g*int(unsafe.Sizeof(weightGroup{})))
			from, second, set := (*weightGroup)(at), (*[groupBlocks]float32)(unsafe.Add(at, a.second)), &to[g][0]
			copy(set.q[s*groupElements:], from.q[:])
			for b := range groupBlocks {
				set.scales[4*b+s], set.second[4*b+s] = from.scales[b], second[b]
			}
		}
	}
}

// packI8Go makes one set of panelGroups of four rows of signed bytes: see unpackI8Go.
func packI8Go(a *unpackArgs) { pack(a, weight.Int8) }

// packQ80Go is packI8Go for rows of Q8_0.
func packQ80Go(a *unpackArgs) { pack(a, weight.Q8_0) }

// packQ40Go is packI8Go for rows of Q4_0.
func packQ40Go(a *unpackArgs) { pack(a, weight.Q4_0) }

// packQ41Go is packI8Go for rows of Q4_1.
func packQ41Go(a *unpackArgs) { pack(a, weight.Q4_1) }

// packI4x32Go is packI8Go for rows of INT4 in groups of 32.
func packI4x32Go(a *unpackArgs) { pack(a, weight.Int4_32) }

// packI4x64Go is packI8Go for rows of INT4 in groups of 64.
func packI4x64Go(a *unpackArgs) { pack(a, weight.Int4_64) }

// packI4x128Go is packI8Go for rows of INT4 in groups of 128.
func packI4x128Go(a *unpackArgs) { pack(a, weight.Int4_128) }

func pack(a *unpackArgs, f weight.Format) {
	var rows [dotStreams]weightGroup
	size := int(unsafe.Sizeof(weightGroup{}))
	for at := 0; at < a.n; at += groupElements {
		unpack(&unpackArgs{dst: unsafe.Pointer(&rows), dstRow: size, src: unsafe.Add(a.src, f.Size(at)), srcRow: a.srcRow, rows: dotStreams, n: min(groupElements, a.n-at)}, f)
		interleaveGo(&interleaveArgs{dst: unsafe.Add(a.dst, at/groupElements*int(unsafe.Sizeof(panelGroup{}))), src: unsafe.Pointer(&rows), srcRow: size, second: secondOf[kindOf(f)], groups: 1})
	}
}

// panelGo is oneGo for the rows of x and the output features of a panel. A result has the bits that oneGo gives it.
func panelGo(a *panelArgs) { panel(a, plainBlocks) }

// panelMinimaGo is panelGo with the minima of oneMinimaGo.
func panelMinimaGo(a *panelArgs) { panel(a, minimaBlocks) }

// panelHalvesGo is panelGo for the blocks of oneHalvesGo.
func panelHalvesGo(a *panelArgs) { panel(a, halfBlocks) }

func panel(a *panelArgs, kind blockKind) {
	groups := a.groups + a.half
	w := unsafe.Slice((*panelGroup)(a.w), groups)
	partial := func(r int) *[panelOuts][2]float32 {
		return (*[panelOuts][2]float32)(unsafe.Add(a.partial, r*panelPartial))
	}
	for r := 0; r < a.rows && a.more == 0; r++ {
		clear(partial(r)[:])
	}
	for g := range w {
		for o := range panelOuts {
			set, s := &w[g][o/dotStreams], o%dotStreams
			group := weightGroup{q: [groupElements]byte(set.q[s*groupElements:])}
			for b := range groupBlocks {
				group.scales[b], group.high[b], group.minima[b] = set.scales[4*b+s], set.second[4*b+s], set.second[4*b+s]
			}
			for r := range a.rows {
				x, sums := unsafe.Slice((*xGroup)(unsafe.Add(a.x, r*a.xRow)), groups), &partial(r)[o]
				addProducts(&sums[0], &sums[1], unsafe.Slice(&group, 1), x[g:g+1], kind)
			}
		}
	}
	for r := 0; r < a.rows && a.unfinished == 0; r++ {
		y := (*[panelOuts]float32)(unsafe.Add(a.y, r*a.yRow))
		for o, sums := range partial(r) {
			y[o] = sums[0] + sums[1]
		}
	}
}

// rowI8Go computes what oneGo computes, with the same bits, for rows of signed bytes.
func rowI8Go(a *blockRowArgs) { rowOfBlocks(a, weight.Int8) }

// rowQ80Go computes what oneGo computes, with the same bits, for rows of Q8_0.
func rowQ80Go(a *blockRowArgs) { rowOfBlocks(a, weight.Q8_0) }

// rowQ40Go computes what oneGo computes, with the same bits, for rows of Q4_0.
func rowQ40Go(a *blockRowArgs) { rowOfBlocks(a, weight.Q4_0) }

// rowQ41Go is oneMinimaGo for rows of Q4_1, with the same bits.
func rowQ41Go(a *blockRowArgs) { rowOfBlocks(a, weight.Q4_1) }

// rowI4x32Go computes what oneGo computes, with the same bits, for rows of INT4 in groups of 32.
func rowI4x32Go(a *blockRowArgs) { rowOfBlocks(a, weight.Int4_32) }

// rowI4x64Go is rowI4x32Go for groups of 64.
func rowI4x64Go(a *blockRowArgs) { rowOfBlocks(a, weight.Int4_64) }

// rowI4x128Go is rowI4x32Go for groups of 128.
func rowI4x128Go(a *blockRowArgs) { rowOfBlocks(a, weight.Int4_128) }

func rowOfBlocks(a *blockRowArgs, f weight.Format) {
	const some = 2
	var w [some]weightGroup
	x := unsafe.Slice((*xGroup)(a.x), (a.n-1)/groupElements+1)
	for o := range a.sets * dotStreams {
		var sum, minima float32
		for at := 0; at < a.n; at += some * groupElements {
			n := min(some*groupElements, a.n-at)
			unpack(&unpackArgs{dst: unsafe.Pointer(&w), src: unsafe.Add(a.w, o*a.wRow+f.Size(at)), rows: 1, n: n}, f)
			groups := (n-1)/groupElements + 1
			addProducts(&sum, &minima, w[:groups], x[at/groupElements:][:groups], kindOf(f))
		}
		*(*float32)(unsafe.Add(a.y, o*a.yStep)) = sum + minima
	}
}

// rowsE4M3Go is
//
//	for r := range a.rows {
//		for o := range 4 * a.sets {
//			y[r][o] = sum_k x[r][k] * (scales[o][k / a.group] * w[o][k]), k < a.n
//		}
//	}
//
// with weights of E4M3, which are rounded to float32; a kernel serves one number of rows. Results have the bits that dotF32Go gives to
// the float32 weights. There is no NaN among the weights.
func rowsE4M3Go(a *blockRowArgs) {
	var wide [dotStreams][dotPiece]float32
	for set := range a.sets {
		var sums [dotMaxRows][dotStreams]float32
		for at := 0; at < a.n; at += dotPiece {
			n := min(dotPiece, a.n-at)
			for s := range wide {
				o, to := set*dotStreams+s, wide[s][:n]
				weight.Decode(weight.E4M3, to, unsafe.Add(a.w, o*a.wRow+at))
				scale := *(*float32)(unsafe.Add(a.scales, o*a.scaleRow+4*(at/a.group)))
				for i := range to {
					to[i] *= scale
				}
			}
			for r := range a.rows {
				x := unsafe.Slice((*float32)(unsafe.Add(a.x, r*a.xRow+4*at)), n)
				var part [dotStreams]float32
				vector.Dot4(&part, x, wide[0][:n], wide[1][:n], wide[2][:n], wide[3][:n])
				for s, v := range part {
					sums[r][s] += v
				}
			}
		}
		for r := range a.rows {
			for s, v := range sums[r] {
				*(*float32)(unsafe.Add(a.y, r*a.yRow+(set*dotStreams+s)*a.yStep)) = v
			}
		}
	}
}

// dot8 returns the sum of 16 products.
func dot8(w *[groupElements]byte, x *[groupElements]int8, at int) (sum int32) {
	p, q := (*[16]byte)(w[at:]), (*[16]int8)(x[at:])
	for i, v := range p {
		sum += int32(int8(v)) * int32(q[i])
	}
	return sum
}
