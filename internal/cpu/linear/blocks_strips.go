package linear

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/weight"
)

// Many rows of x with tile registers, which multiply 16 rows of integers by as many: strips. x is rounded and brought into strips once,
// and weights a part of In at a time. A product fills a tile register and covers one block, since each block has scales of its own.
// Vector registers, whose lanes are the 16 rows of x, scale the products and add them.

const (
	stripRows   = 16  // of x; a strip of weights has panelOuts
	stripPanels = 4   // the most panels that x is multiplied by for each part of In
	stripBlock  = 512 // the most rows of x at a time, a multiple of stripRows

	stripGroups = 4 // the most groups of a row in a panel: an even number, whose products stay near the first-level cache

	stripPartial = 4 * groupBlocks * stripRows * panelOuts // bytes of the sums of a strip and a panel, or of the products of a group

	signs = 0x8080808080808080 // of bytes
)

// xStrip is a group of stripRows rows of x. Element 4*k + i of block b of row r is q[b][k][r][i].
type xStrip struct {
	q            [groupBlocks][8][stripRows][4]int8
	scales, sums [groupBlocks][stripRows]float32
}

// weightStrip is a group of panelOuts rows of weights. Element e of block 2*p + h of row o is q[p][o][h][e], signed. second is minima.
type weightStrip struct {
	q              [groupBlocks / 2][panelOuts][2][32]int8
	scales, second [groupBlocks][panelOuts]float32
}

// stripKernels are the kernels of a tier that multiply strips.
type stripKernels struct {
	rows int // the least number of rows of x: measured. 0: there are no such kernels

	x, w func(*interleaveArgs)        // make strips of groups
	mul  [blockKinds]func(*stripArgs) // nil: the kind has no such kernel
	ones func(*stripArgs)             // for weights whose scales are 1
}

// stripXGo makes xStrips of the xGroups of stripRows rows.
func stripXGo(a *interleaveArgs) {
	to := unsafe.Slice((*xStrip)(a.dst), a.groups)
	for r := range stripRows {
		from := unsafe.Slice((*xGroup)(unsafe.Add(a.src, r*a.srcRow)), a.groups)
		for g := range to {
			for e, q := range from[g].q {
				to[g].q[e/32][e%32/4][r][e%4] = q
			}
			for b := range groupBlocks {
				to[g].scales[b][r], to[g].sums[b][r] = from[g].scales[b], from[g].sums[b]
			}
		}
	}
}

// stripWGo makes weightStrips of the weightGroups of panelOuts rows. Kernels for AVX-512 flip the bits of the integers that a.flip has:
// 128 was added to those that are signed.
func stripWGo(a *interleaveArgs) {
	to := unsafe.Slice((*weightStrip)(a.dst), a.groups)
	for o := range panelOuts {
		for g := range to {
			at := unsafe.Add(a.src, o*a.srcRow+g*int(unsafe.Sizeof(weightGroup{})))
			from, second := (*weightGroup)(at), (*[groupBlocks]float32)(unsafe.Add(at, a.second))
			for e, q := range from.q {
				to[g].q[e/64][o][e/32%2][e%32] = int8(q)
			}
			for b := range groupBlocks {
				to[g].scales[b][o], to[g].second[b][o] = from.scales[b], second[b]
			}
		}
	}
}

// stripsGo multiplies strips of x by panels. A result has the bits that oneAVX512 gives it: four sums of blocks, each of every fourth,
// by fused additions, which are added at the end.
func stripsGo(a *stripArgs) { strips(a, plainBlocks) }

// stripsMinimaGo is stripsGo with the minima of oneMinimaGo.
func stripsMinimaGo(a *stripArgs) { strips(a, minimaBlocks) }

// stripsOnesGo is stripsGo for weights whose scales are 1.
func stripsOnesGo(a *stripArgs) { strips(a, plainBlocks) }

func strips(a *stripArgs, kind blockKind) {
	w := unsafe.Slice((*weightStrip)(a.w), a.groups)
	for first := 0; first < a.rows; first += stripRows {
		strip := first / stripRows
		x, sums := unsafe.Slice((*xStrip)(unsafe.Add(a.x, strip*a.xStep)), a.groups), (*[panelOuts][groupBlocks][stripRows]float32)(unsafe.Add(a.partial, strip*stripPartial))
		if a.more == 0 {
			clear(sums[:])
		}
		for o := range panelOuts {
			for r := range stripRows {
				var s [groupBlocks]float32
				for b := range s {
					s[b] = sums[o][b][r]
				}
				for g := range x {
					addStrips(&s, &x[g], &w[g], r, o, kind)
				}
				for b, v := range s {
					sums[o][b][r] = v
				}
				if a.unfinished == 0 && first+r < a.rows {
					*(*float32)(unsafe.Add(a.y, (first+r)*a.yRow+4*o)) = (s[0] + s[2]) + (s[1] + s[3])
				}
			}
		}
	}
}

// addStrips adds the products of a group of a row of x and of a row of weights.
func addStrips(sums *[groupBlocks]float32, x *xStrip, w *weightStrip, r, o int, kind blockKind) {
	for b := range sums {
		var sum int32
		for e, q := range w.q[b/2][o][b%2] {
			sum += int32(q) * int32(x.q[b][e/4][r][e%4])
		}
		sums[b] = fused(w.scales[b][o]*float32(sum), x.scales[b][r], sums[b])
		if kind == minimaBlocks {
			sums[b] = fused(x.sums[b][r], w.second[b][o], sums[b])
		}
	}
}

// fused returns x*y + z, rounded once.
func fused(x, y, z float32) float32 {
	p, c := float64(x)*float64(y), float64(z) // p is exact
	s := p + c
	t := s - p
	rest := (p - (s - t)) + (c - t) // what s lacks, but for sums that are not finite
	// A sum of 53 bits that is rounded to odd and then to 24 bits is rounded once.
	if bits := math.Float64bits(s); rest != 0 && rest-rest == 0 && bits&1 == 0 {
		if (rest > 0) == (s > 0) {
			bits++
		} else {
			bits--
		}
		s = math.Float64frombits(bits)
	}
	return float32(s)
}

// stripFeatures computes the sums of output features [from, to) of a layer, some panels at a time. The last panel may be a part.
func (l *linearRun) stripFeatures(s *blockScratch, layer *linearLayer, from, to int) {
	for ; from < to; from += stripPanels * panelOuts {
		l.stripSet(s, layer, from, min(stripPanels*panelOuts, to-from))
	}
}

// stripSet computes the sums of n output features from o on.
func (l *linearRun) stripSet(s *blockScratch, layer *linearLayer, o, n int) {
	const most, size = stripGroups * groupElements, stripGroups * int(unsafe.Sizeof(weightStrip{}))
	b, k, order, mul := &l.blocks, &l.blocks.kernels.strips, &s.interleave, &s.stripMul
	panels, strips, whole := (n-1)/panelOuts+1, l.stripCount(), n/panelOuts
	s.panel.Grow(panels * size)
	s.partial.Grow(strips * panels * stripPartial)
	s.products.Grow(stripGroups * stripPartial)
	s.edge.Grow(4 * l.rows * panelOuts)
	multiply := k.mul[b.kind]
	if l.format == weight.Int8 && k.ones != nil {
		multiply = k.ones
	}
	for first := 0; first < l.in; first += most {
		elements := min(most, l.in-first)
		groups := (elements-1)/groupElements + 1
		for p := range panels {
			s.groups.Grow(panelOuts * stripGroups * int(unsafe.Sizeof(weightGroup{})))
			l.unpackRows(s, unsafe.Add(layer.w, (o+p*panelOuts)*l.wRow+l.format.Size(first)), min(panelOuts, n-p*panelOuts), elements, 0)
			*order = interleaveArgs{dst: unsafe.Add(s.panel.At, p*size), src: s.groups.At, srcRow: s.unpack.dstRow, second: secondOf[b.kind], groups: groups}
			if b.kind != minimaBlocks {
				order.flip = signs
			}
			k.w(order)
		}
		*mul = stripArgs{
			x: unsafe.Add(b.x.At, layer.rounded*strips*b.xStep()+first/groupElements*int(unsafe.Sizeof(xStrip{}))), xStep: b.xStep(),
			rows: l.rows, groups: groups, sums: s.products.At, more: first,
		}
		if first+elements < l.in {
			mul.unfinished = 1
		}
		for p := range panels {
			mul.y, mul.yRow = unsafe.Add(layer.y, l.first*layer.yRow+(o+p*panelOuts)*l.size), layer.yRow
			if p == whole {
				mul.y, mul.yRow = s.edge.At, 4*panelOuts
			}
			mul.w, mul.partial = unsafe.Add(s.panel.At, p*size), unsafe.Add(s.partial.At, p*strips*stripPartial)
			multiply(mul)
		}
	}
	for r := 0; r < l.rows && whole < panels; r++ {
		y := unsafe.Add(layer.y, (l.first+r)*layer.yRow+(o+whole*panelOuts)*l.size)
		copy(unsafe.Slice((*float32)(y), n%panelOuts), unsafe.Slice((*float32)(unsafe.Add(s.edge.At, 4*r*panelOuts)), panelOuts))
	}
}

// inStrips reports whether so many rows are multiplied in strips.
func (l *linearRun) inStrips(rows int) bool {
	if !l.blocks.integer {
		return false
	}
	k := &l.blocks.kernels.strips
	return k.rows > 0 && rows >= k.rows && k.mul[l.blocks.kind] != nil
}

// stripCount returns the number of strips of the block's rows.
func (l *linearRun) stripCount() int { return (l.rows-1)/stripRows + 1 }

// xStep returns the bytes of a strip of x.
func (b *blockRun) xStep() int { return b.groups * int(unsafe.Sizeof(xStrip{})) }

// roundStrips rounds share i of the strips of a layer's x.
func (l *linearRun) roundStrips(s *roundScratch, layer *linearLayer, i int) {
	b := &l.blocks
	s.strip.Grow(stripRows * b.xRow())
	for strip := i * l.stripCount() / l.shares; strip < (i+1)*l.stripCount()/l.shares; strip++ {
		for k := strip * stripRows; k < min((strip+1)*stripRows, l.rows); k++ {
			l.roundRow(s, unsafe.Add(s.strip.At, k%stripRows*b.xRow()), layer, k)
		}
		s.order = interleaveArgs{dst: unsafe.Add(b.x.At, (layer.rounded*l.stripCount()+strip)*b.xStep()), src: s.strip.At, srcRow: b.xRow(), groups: b.groups}
		b.kernels.strips.x(&s.order)
	}
}
