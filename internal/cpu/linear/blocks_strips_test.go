package linear

import (
	"math"
	"math/big"
	"slices"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/weight"
)

// withStrips gives the tier in use the kernels k for so many and more rows of x, until restore is called.
func withStrips(rows int, k stripKernels) (restore func()) {
	was := linearTiers[cpu.InUse()]
	own, blocks := *was, *was.blocks
	k.rows = rows
	blocks.strips = k
	own.blocks = &blocks
	linearTiers[cpu.InUse()] = &own
	return func() { linearTiers[cpu.InUse()] = was }
}

// stripsOf returns kernels for strips that the tier in use can execute, and the least number of rows of x whose bits they give: those
// of the tier, or the Go forms.
func stripsOf() (k stripKernels, rows int) {
	if k = linearTiers[cpu.InUse()].blocks.strips; k.rows > 0 {
		return k, 2
	}
	k = stripKernels{x: stripXGo, w: stripWGo, mul: [blockKinds]func(*stripArgs){stripsGo, stripsMinimaGo, nil}, ones: stripsOnesGo}
	if order := stripOrder(); order != nil {
		k.x, k.w = order[0], order[1]
		return k, 2
	}
	return k, 1 // integers are in the order of the row, and sums in another order than those of a single row
}

// stripOrder returns the kernels of AVX-512 that make strips, if the tier in use has groups in their order.
var stripOrder = func() []func(*interleaveArgs) { return nil }

// TestStrips: the tests of weights of 8 and fewer bits, with strips for any number of rows.
func TestStrips(t *testing.T) {
	k, rows := stripsOf()
	if k.rows == 0 {
		t.Skip("this tier has no kernels for strips: the Go forms would take long")
	}
	defer withStrips(rows, k)()
	for name, test := range map[string]func(*testing.T){
		"rounded": TestBlocksRounded, "any x": TestBlocksRound, "alone": TestBlocksAlone, "odd": TestBlocksOdd, "together": TestBlocksTogether,
		"order": TestBlocksOrder, "allocations": TestBlocksDoNotAllocate,
	} {
		t.Run(name, test)
	}
}

// TestStripBits: layers in strips have the results of float64 and, if groups are those of AVX-512, the bits of the kernels for fewer rows;
// for parts of panels and of strips, and rows of weights that take several calls.
func TestStripBits(t *testing.T) {
	rng := reftest.Rand(t)
	k, least := stripsOf()
	for _, f := range roundingFormats() {
		if k.mul[kindOf(f)] == nil {
			continue
		}
		most := blockWidths(f)
		rows, in, out := least+rng.IntN(20), most[rng.IntN(len(most))], 1+rng.IntN(40)
		if rng.IntN(8) == 0 {
			in = (stripGroups*groupElements/f.Block() + 1) * f.Block()
		}
		c, _ := newBlockCase(t, rng, f, rows, in, out)
		c.RoundX = true
		integersIn(rng, c.X, in)
		c.cancelled = cancelled(c)
		restore := withStrips(0, k) // none
		c.run(t, cpu.Default())
		restore()
		want := slices.Clone(c.Y)
		restore = withStrips(least, k)
		c.run(t, cpu.Default())
		restore()
		c.check(t)
		for i, v := range c.Y {
			if least > 1 && math.Float32bits(v) != math.Float32bits(want[i]) {
				t.Fatalf("%v %v, %d x %d x %d: result %d is %v in strips, and %v without", cpu.InUse(), f, rows, in, out, i, v, want[i])
			}
		}
		c.close()
	}
}

// TestStripKernels: kernels for strips have the bits of the Go forms, for parts of strips and for groups that come in several calls,
// and write nothing but their results.
func TestStripKernels(t *testing.T) {
	rng := reftest.Rand(t)
	k, _ := stripsOf()
	all, goes := append(k.mul[:], k.ones), append([]func(*stripArgs){stripsGo, stripsMinimaGo, nil}, stripsOnesGo)
	for kind, mul := range all {
		if mul == nil {
			continue
		}
		for range 5 {
			rows, groups, beyond := 1+rng.IntN(40), 1+rng.IntN(5), rng.IntN(3)
			strips := (rows-1)/stripRows + 1
			x, w := make([]xStrip, strips*(groups+beyond)), make([]weightStrip, groups)
			random := func(f *[groupBlocks][16]float32) {
				for b := range f {
					for i := range f[b] {
						f[b][i] = float32(math.Ldexp(rng.NormFloat64(), rng.IntN(20)-10))
					}
				}
			}
			for i := range x {
				q := unsafe.Slice((*int8)(unsafe.Pointer(&x[i].q)), unsafe.Sizeof(x[i].q))
				for j := range q {
					q[j] = int8(rng.IntN(255) - 127)
				}
				random(&x[i].scales)
				random(&x[i].sums)
			}
			for i := range w {
				q := unsafe.Slice((*int8)(unsafe.Pointer(&w[i].q)), unsafe.Sizeof(w[i].q))
				for j := range q {
					q[j] = int8(rng.IntN(256) - 128)
				}
				random(&w[i].scales)
				random(&w[i].second)
				for b := 0; b < groupBlocks && kind == blockKinds; b++ {
					for o := range panelOuts {
						w[i].scales[b][o] = 1
					}
				}
			}
			yRow := panelOuts + rng.IntN(5)
			run := func(mul func(*stripArgs), parts []int) []float32 {
				y := make([]float32, (rows+stripRows)*yRow)
				for i := range y {
					y[i] = float32(cputest.Untouched)
				}
				var partial, sums cpu.Aligned
				partial.Grow(strips * stripPartial)
				sums.Grow(groups * stripPartial)
				a := stripArgs{y: unsafe.Pointer(&y[0]), yRow: 4 * yRow, rows: rows, partial: partial.At, sums: sums.At,
					xStep: (groups + beyond) * int(unsafe.Sizeof(x[0]))}
				at := 0
				for i, n := range parts {
					a.x, a.w, a.groups, a.more, a.unfinished = unsafe.Pointer(&x[at]), unsafe.Pointer(&w[at]), n, at, len(parts)-1-i
					before := a
					if mul(&a); a != before {
						t.Fatalf("%v: the arguments were %+v, and are %+v", cpu.InUse(), before, a)
					}
					at += n
				}
				return y
			}
			parts := []int{groups}
			for parts[len(parts)-1] > 1 && rng.IntN(3) > 0 {
				last := &parts[len(parts)-1]
				n := 1 + rng.IntN(*last-1)
				*last -= n
				parts = append(parts, n)
			}
			got, want := run(mul, parts), run(goes[kind], []int{groups})
			for i, v := range want {
				inside := i/yRow < rows && i%yRow < panelOuts
				if math.Float32bits(got[i]) != math.Float32bits(v) || inside == cputest.IsUntouched(v) {
					t.Fatalf("%v, kind %d, %d rows, groups %v: result (%d, %d) is %v, want %v", cpu.InUse(), kind, rows, parts, i/yRow, i%yRow, got[i], v)
				}
			}
		}
	}
}

// TestStripOrder: strips of rounded x and of weights are those that the Go forms make, of any format.
func TestStripOrder(t *testing.T) {
	rng := reftest.Rand(t)
	k, _ := stripsOf()
	b := linearTiers[cpu.InUse()].blocks
	for _, f := range roundingFormats() {
		for _, in := range blockWidths(f)[:4] {
			c, _ := newBlockCase(t, rng, f, stripRows, in, panelOuts)
			groups := (in-1)/groupElements + 1
			whole := (in + 31) / 32 * 32
			x := make([]float32, stripRows*whole)
			for r := range stripRows {
				copy(x[r*whole:], c.X[r*in:][:in])
			}
			order := func(b *blockKernels, k stripKernels, flip uint64) (xs []xStrip, ws []weightStrip) {
				xs, ws = make([]xStrip, groups), make([]weightStrip, groups)
				xRows, wRows := make([]xGroup, stripRows*groups), make([]weightGroup, panelOuts*groups)
				row := groups * int(unsafe.Sizeof(xGroup{}))
				for r := range stripRows {
					b.round(&roundArgs{dst: unsafe.Pointer(&xRows[r*groups]), src: unsafe.Pointer(&x[r*whole]), n: whole})
				}
				k.x(&interleaveArgs{dst: unsafe.Pointer(&xs[0]), src: unsafe.Pointer(&xRows[0]), srcRow: row, groups: groups})
				row = groups * int(unsafe.Sizeof(weightGroup{}))
				b.unpack[f](&unpackArgs{dst: unsafe.Pointer(&wRows[0]), dstRow: row, src: c.W.Ptr, srcRow: f.Size(in), rows: panelOuts, n: in})
				k.w(&interleaveArgs{dst: unsafe.Pointer(&ws[0]), src: unsafe.Pointer(&wRows[0]), srcRow: row, second: secondOf[kindOf(f)], groups: groups, flip: flip})
				for i := range ws {
					if kindOf(f) == plainBlocks { // which has no second
						ws[i].second = [groupBlocks][panelOuts]float32{}
					}
					for b := range groupBlocks {
						for o := range panelOuts {
							if 128*i+32*b >= in { // integers and scales of Int8 behind the end of a row are anything, since those of x are 0
								ws[i].q[b/2][o][b%2] = [32]int8{}
								if f == weight.Int8 {
									ws[i].scales[b][o] = 0
								}
							}
						}
					}
				}
				return xs, ws
			}
			flip := uint64(0)
			if kindOf(f) != minimaBlocks {
				flip = signs
			}
			gotX, gotW := order(b, k, flip)
			wantX, wantW := order(&blocksGo, stripKernels{x: stripXGo, w: stripWGo}, flip)
			for i := range groups {
				if gotX[i] != wantX[i] {
					t.Fatalf("%v %v: group %d of %d elements of x differs", cpu.InUse(), f, i, in)
				}
				if gotW[i] != wantW[i] {
					t.Fatalf("%v %v: group %d of %d elements of weights differs", cpu.InUse(), f, i, in)
				}
			}
			c.close()
		}
	}
}

// TestFused: the product and the sum are rounded once, also near ties of float32.
func TestFused(t *testing.T) {
	rng := reftest.Rand(t)
	for range 20000 {
		number := func(e int) float32 {
			bits := rng.Uint32() & (1<<23 - 1)
			if rng.IntN(2) == 0 {
				bits &= 3 << 21 // products and sums are often at ties
			}
			return float32(math.Ldexp(float64(1<<23|bits), rng.IntN(e)-23)) * float32(1-2*rng.IntN(2))
		}
		x, y, z := number(8), number(8), number(60)
		sum := new(big.Float).SetPrec(200).Mul(big.NewFloat(float64(x)), big.NewFloat(float64(y)))
		want, _ := sum.Add(sum, big.NewFloat(float64(z))).Float32()
		if got := fused(x, y, z); got != want {
			t.Fatalf("%v * %v + %v is %v, want %v", x, y, z, got, want)
		}
	}
}
