//go:build gc && !noasm

package linear

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/weight"
)

// Assembly for groups of weights gives the bits of the Go kernels. Operands end at guard pages.

// oddFactors are numbers of 16 bits that factors of weights may have: zeros, infinities, NaN, subnormal and extreme ones.
var oddFactors = []uint16{0, 1 << 15, 1, 0x83ff, 0x400, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e01}

// blockTiers are the kernels for the processor.
func blockTiers(t *testing.T) map[string]*blockKernels {
	if cpu.InUse() != cpu.TierNEON {
		t.Skip("this tier has the Go kernels")
	}
	all := map[string]*blockKernels{"NEON": &blocksNEON}
	if blocksOfNEON() == &blocksDot {
		all["dot products"] = &blocksDot
	}
	return all
}

// same reports whether numbers have the same bits, or are both NaN.
func same(x, y float32) bool {
	return math.Float32bits(x) == math.Float32bits(y) || x != x && y != y
}

// untouched is what guardedOf fills floats with.
var untouched = math.Float32frombits(0x55555555)

// guardedOf returns n elements that nothing has written, in guarded memory. Their bytes are 0x55.
func guardedOf[T any](t *testing.T, n int) []T {
	var one T
	size := n * int(unsafe.Sizeof(one))
	p, free := cputest.Guarded(t, size)
	t.Cleanup(free)
	b := unsafe.Slice((*byte)(p), size)
	for i := range b {
		b[i] = 0x55
	}
	return unsafe.Slice((*T)(p), n)
}

// oddWeights returns rows of weights of a format in guarded memory, of which some have odd factors, and all bytes of Int8 and Q8_0.
func oddWeights(t *testing.T, rng *rand.Rand, f weight.Format, n, rows int) unsafe.Pointer {
	c, _ := newBlockCase(t, rng, f, 1, n, rows)
	t.Cleanup(c.close)
	b := unsafe.Slice((*byte)(c.W.Ptr), f.Size(n*rows))
	for at := 0; at < len(b) && f.Block() > 1; at += f.Bytes() {
		for _, k := range factorsOf[f] {
			if x := oddFactors[rng.IntN(len(oddFactors))]; rng.IntN(8) == 0 {
				b[at+k], b[at+k+1] = byte(x), byte(x>>8)
			}
		}
	}
	return c.W.Ptr
}

// oddX returns a row of x whose blocks are of all sizes.
func oddX(rng *rand.Rand, n int) []float32 {
	x := make([]float32, n)
	for at := 0; at < n; at += 32 {
		size := math.Exp2(float64(rng.IntN(12) - 6))
		switch rng.IntN(12) {
		case 0:
			size = 0
		case 1:
			size = 0x1p-121
		case 2:
			size = 0x1p-119
		case 3:
			size = 0x1p120
		}
		for i := range x[at:min(at+32, n)] {
			x[at+i] = float32(rng.NormFloat64() * size)
		}
	}
	return x
}

// roundedX returns rows of x that are rounded, each a multiple of 32 elements.
func roundedX(rng *rand.Rand, n, rows int) []xGroup {
	groups := (n-1)/groupElements + 1
	all := make([]xGroup, groups*rows)
	for r := range rows {
		x := append(oddX(rng, n), make([]float32, 31)...)[:(n+31)/32*32]
		roundGo(&roundArgs{dst: unsafe.Pointer(&all[r*groups]), src: unsafe.Pointer(&x[0]), n: len(x)})
	}
	return all
}

// TestRoundKernel: rounded rows have the bits of Go, also those that are not finite.
func TestRoundKernel(t *testing.T) {
	rng := reftest.Rand(t)
	for name, k := range blockTiers(t) {
		for n := 32; n <= 32*14; n += 32 {
			x, odd := guardedOf[float32](t, n), oddX(rng, n)
			for i := range odd {
				if rng.IntN(300) == 0 {
					odd[i] = []float32{float32(math.NaN()), float32(math.Inf(1)), float32(math.Inf(-1)), 0x1p-149}[rng.IntN(4)]
				}
				if rng.IntN(20) == 0 && i > 0 { // a tie, or another largest element
					odd[i] = -odd[i-1] / float32(1+rng.IntN(2))
				}
			}
			copy(x, odd)
			groups := (n-1)/groupElements + 1
			got, want := guardedOf[xGroup](t, groups), make([]xGroup, groups)
			k.round(&roundArgs{dst: unsafe.Pointer(&got[0]), src: unsafe.Pointer(&x[0]), n: n})
			roundGo(&roundArgs{dst: unsafe.Pointer(&want[0]), src: unsafe.Pointer(&x[0]), n: n})
			for g := range got {
				if got[g].q != want[g].q || !slices.EqualFunc(got[g].scales[:], want[g].scales[:], same) || !slices.EqualFunc(got[g].sums[:], want[g].sums[:], same) {
					t.Fatalf("%s: group %d of %d elements is\n%v\nwant\n%v", name, g, n, got[g], want[g])
				}
			}
		}
	}
}

// TestUnpackKernels: unpacked groups have the bits of Go.
func TestUnpackKernels(t *testing.T) {
	rng := reftest.Rand(t)
	for name, k := range blockTiers(t) {
		for f := range weight.Format(weight.Formats) {
			if blocksGo.unpack[f] == nil {
				continue
			}
			for _, n := range blockWidths(f) {
				rows, groups, size := 1+rng.IntN(4), (n-1)/groupElements+1, int(unsafe.Sizeof(weightGroup{}))
				w := oddWeights(t, rng, f, n, rows)
				row := groups + rng.IntN(2)
				got, want := guardedOf[weightGroup](t, row*(rows-1)+groups), make([]weightGroup, groups*rows)
				args := unpackArgs{dst: unsafe.Pointer(&got[0]), dstRow: row * size, src: w, srcRow: f.Size(n), rows: rows, n: n, fetch: uintptr(rng.Uint64()), fetchStep: 64}
				before := args
				if k.unpack[f](&args); args != before {
					t.Fatalf("%s: the arguments were %+v, and are %+v", name, before, args)
				}
				args.dst, args.dstRow = unsafe.Pointer(&want[0]), groups*size
				blocksGo.unpack[f](&args)
				for i := range got {
					r, g := i/row, i%row
					if g == groups {
						if got[i].scales[0] != untouched {
							t.Fatalf("%s %v: a group behind row %d of %d elements was written", name, f, r, n)
						}
						continue
					}
					second := secondOf[kindOf(f)]
					a, b := &got[i], &want[r*groups+g]
					numbers := func(g *weightGroup) []float32 {
						of := append([]float32(nil), g.scales[:]...)
						if kindOf(f) == plainBlocks {
							return of
						}
						return append(of, (*[groupBlocks]float32)(unsafe.Add(unsafe.Pointer(g), second))[:]...)
					}
					if a.q != b.q || !slices.EqualFunc(numbers(a), numbers(b), same) {
						t.Fatalf("%s %v: group %d of row %d of %d elements is\n%v\nwant\n%v", name, f, g, r, n, *a, *b)
					}
				}
			}
		}
	}
}

// unpackedRows returns groups of rows of random weights of a kind, in guarded memory.
func unpackedRows(t *testing.T, rng *rand.Rand, kind blockKind, n, rows int) []weightGroup {
	f := [blockKinds]weight.Format{weight.Q8_0, weight.Q4_1, weight.Q6_K}[kind]
	whole := (n-1)/f.Block()*f.Block() + f.Block()
	groups, size := (whole-1)/groupElements+1, int(unsafe.Sizeof(weightGroup{}))
	all := guardedOf[weightGroup](t, groups*rows)
	blocksGo.unpack[f](&unpackArgs{dst: unsafe.Pointer(&all[0]), dstRow: groups * size, src: oddWeights(t, rng, f, whole, rows), srcRow: f.Size(whole), rows: rows, n: whole})
	for i := range all {
		for j := range all[i].q {
			if rng.IntN(10) == 0 {
				all[i].q[j] = 0x80 // the largest products
			}
		}
	}
	return all
}

// TestExpandKernels: float32 weights have the bits of Go.
func TestExpandKernels(t *testing.T) {
	rng := reftest.Rand(t)
	for name, k := range blockTiers(t) {
		for kind := range blockKind(blockKinds) {
			for range 20 {
				rows := 1 + rng.IntN(4)
				w := unpackedRows(t, rng, kind, 32*(1+rng.IntN(12)), rows)
				groups := len(w) / rows
				row := groups*groupElements + 8*rng.IntN(2)
				got, want := guardedOf[float32](t, row*(rows-1)+groups*groupElements), make([]float32, row*rows)
				for i := range want {
					want[i] = untouched
				}
				args := expandArgs{dst: unsafe.Pointer(&got[0]), dstRow: 4 * row, src: unsafe.Pointer(&w[0]), srcRow: groups * int(unsafe.Sizeof(w[0])), rows: rows, groups: groups}
				k.expand[kind](&args)
				args.dst = unsafe.Pointer(&want[0])
				blocksGo.expand[kind](&args)
				for i, v := range got {
					if !same(v, want[i]) {
						t.Fatalf("%s, kind %d, %d groups: element %d of row %d is %v, want %v", name, kind, groups, i%row, i/row, v, want[i])
					}
				}
			}
		}
	}
}

// TestOneKernels: products of a row of x have the bits of Go.
func TestOneKernels(t *testing.T) {
	rng := reftest.Rand(t)
	for name, k := range blockTiers(t) {
		for kind := range blockKind(blockKinds) {
			finite := 0
			for try := range reftest.AtLeast(30, func() bool { return finite >= 10 }) {
				n, sets := 32*(1+rng.IntN(30)), 1+rng.IntN(3)
				w := unpackedRows(t, rng, kind, n, sets*dotStreams)
				groups, size := len(w)/(sets*dotStreams), int(unsafe.Sizeof(w[0]))
				x := roundedX(rng, groups*groupElements, 1)
				step := 1 + rng.IntN(2)
				got, want := guardedOf[float32](t, step*(sets*dotStreams-1)+1), make([]float32, step*sets*dotStreams)
				args := groupArgs{y: unsafe.Pointer(&got[0]), yStep: 4 * step, w: unsafe.Pointer(&w[0]), wRow: groups * size, x: unsafe.Pointer(&x[0]), groups: groups, sets: sets}
				if try%5 == 0 { // all output features are the same
					args.sets, args.wRow = 1, 0
				}
				before := args
				if k.one[kind](&args); args != before {
					t.Fatalf("%s: the arguments were %+v, and are %+v", name, before, args)
				}
				args.y = unsafe.Pointer(&want[0])
				blocksGo.one[kind](&args)
				for o := range args.sets * dotStreams {
					if a, b := got[o*step], want[o*step]; !same(a, b) {
						t.Fatalf("%s, kind %d, %d groups: result %d of %d is %v, want %v", name, kind, groups, o, args.sets*dotStreams, a, b)
					} else if b-b == 0 && b != 0 {
						finite++
					}
				}
			}
			if finite < 10 {
				t.Errorf("%s, kind %d: %d results are finite and not 0", name, kind, finite)
			}
		}
	}
}

// TestBlockRowKernels: products of a row of x and rows of weights as they are stored have the bits of Go.
func TestBlockRowKernels(t *testing.T) {
	rng := reftest.Rand(t)
	for name, k := range blockTiers(t) {
		for f, row := range k.row {
			if f := weight.Format(f); row != nil {
				widths, finite := blockWidths(f), 0
				for try := range reftest.AtLeast(3*len(widths), func() bool { return finite >= 10 }) {
					n, sets := widths[try%len(widths)], 1+rng.IntN(3)
					x, outs := roundedX(rng, n, 1), sets*dotStreams
					step := 1 + rng.IntN(2)
					got, want := guardedOf[float32](t, step*(outs-1)+1), make([]float32, step*outs)
					args := blockRowArgs{y: unsafe.Pointer(&got[0]), yStep: 4 * step, w: oddWeights(t, rng, f, n, outs), wRow: f.Size(n), x: unsafe.Pointer(&x[0]), n: n, sets: sets, fetch: uintptr(rng.Uint64())}
					if try%5 == 0 { // all output features are the same
						args.sets, args.wRow = 1, 0
					}
					before := args
					if row(&args); args != before {
						t.Fatalf("%s %v: the arguments were %+v, and are %+v", name, f, before, args)
					}
					args.y = unsafe.Pointer(&want[0])
					rowOfBlocks(&args, f)
					for o := range args.sets * dotStreams {
						if a, b := got[o*step], want[o*step]; !same(a, b) {
							t.Fatalf("%s %v, %d elements: result %d of %d is %v, want %v", name, f, n, o, args.sets*dotStreams, a, b)
						} else if b-b == 0 && b != 0 {
							finite++
						}
					}
				}
				if finite < 10 {
					t.Errorf("%s %v: %d results are finite and not 0", name, f, finite)
				}
			}
		}
	}
}

// TestE4M3Kernels: products of rows of x and rows of E4M3 have the bits of float32 weights.
func TestE4M3Kernels(t *testing.T) {
	rng := reftest.Rand(t)
	for name, k := range blockTiers(t) {
		for rows := 1; rows < len(k.e4m3) && k.e4m3[rows] != nil; rows++ {
			for _, n := range []int{1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 100, 127, 128, 129, 255, 256, 300, 777} {
				sets := 1 + rng.IntN(3)
				c, wide := newBlockCase(t, rng, weight.E4M3, rows, n, sets*dotStreams)
				t.Cleanup(c.close)
				groups := c.W.Groups(n)
				for i := range c.W.Scales {
					if rng.IntN(8) == 0 {
						c.W.Scales[i] = []float32{0, 0x1p-149, 0x1p-130, math.MaxFloat32 / 448}[rng.IntN(4)]
					}
				}
				scales := guardedOf[float32](t, len(c.W.Scales))
				copy(scales, c.W.Scales)
				step, row := 1+rng.IntN(2), n+rng.IntN(3)
				x := guardedOf[float32](t, row*(rows-1)+n)
				for i := range x {
					x[i] = float32(rng.NormFloat64())
				}
				outs := sets * dotStreams
				got := guardedOf[float32](t, step*outs*rows)
				args := blockRowArgs{
					y: unsafe.Pointer(&got[0]), yStep: 4 * step, yRow: 4 * step * outs, w: c.W.Ptr, wRow: n, x: unsafe.Pointer(&x[0]), xRow: 4 * row, n: n, sets: sets,
					rows: rows, scales: unsafe.Pointer(&scales[0]), scaleRow: 4 * groups, group: (n + dotPiece - 1) / dotPiece * dotPiece,
				}
				if c.W.Group > 0 {
					args.group = c.W.Group
				}
				k.e4m3[rows](&args)
				decoded := unsafe.Slice((*float32)(wide.W.Ptr), n*outs)
				for o := range outs {
					c.W.Row(decoded[o*n:][:n], o, nil)
				}
				want := make([]float32, rows*outs)
				for set := range sets {
					linearNEON.dot[weight.Float32][rows](&dotArgs{
						y: unsafe.Pointer(&want[set*dotStreams]), yStep: 4, yRow: 4 * outs, w: unsafe.Pointer(&decoded[set*dotStreams*n]), wStep: 4 * n,
						x: unsafe.Pointer(&x[0]), xRow: 4 * row, rows: rows, n: n,
					})
				}
				for i, v := range want {
					if !same(got[i*step], v) {
						t.Fatalf("%s, %d rows of %d elements: result %d of row %d is %v, want %v", name, rows, n, i%outs, i/outs, got[i*step], v)
					}
				}
			}
		}
	}
}

// TestPanelKernels: products of rows of x and a panel have the bits of Go, in one call and in several. The rows of the panel come
// from the tier's own kernel.
func TestPanelKernels(t *testing.T) {
	if unsafe.Sizeof(panelGroup{}) != panelBytes {
		t.Fatalf("a panelGroup has %d bytes, and the assembly %d", unsafe.Sizeof(panelGroup{}), panelBytes)
	}
	rng := reftest.Rand(t)
	for name, k := range blockTiers(t) {
		for kind, panel := range k.panel {
			if panel == nil {
				continue
			}
			kind, finite := blockKind(kind), 0
			for try := range reftest.AtLeast(24, func() bool { return finite >= 10 }) {
				n, rows := 32*(1+rng.IntN(24)), 1+try%11
				w := unpackedRows(t, rng, kind, n, panelOuts)
				groups, size := len(w)/panelOuts, int(unsafe.Sizeof(w[0]))
				packed := func(interleave func(*interleaveArgs)) unsafe.Pointer {
					all := guardedOf[panelGroup](t, groups)
					for set := range all[0] {
						interleave(&interleaveArgs{dst: unsafe.Pointer(&all[0][set]), src: unsafe.Pointer(&w[dotStreams*set*groups]), srcRow: groups * size, second: secondOf[kind], groups: groups})
					}
					return unsafe.Pointer(&all[0])
				}
				x := roundedX(rng, groups*groupElements, rows)
				step := panelOuts + rng.IntN(3)
				got, want := guardedOf[float32](t, step*(rows-1)+panelOuts), make([]float32, step*rows)
				for i := range want {
					want[i] = untouched
				}
				args := panelArgs{
					yRow: 4 * step, x: unsafe.Pointer(&x[0]), xRow: groups * int(unsafe.Sizeof(x[0])), rows: rows, groups: groups,
					partial: unsafe.Pointer(&guardedOf[[panelPartial]byte](t, rows)[0]), fetch: uintptr(rng.Uint64()), lines: 1,
				}
				whole := args
				whole.y, whole.w = unsafe.Pointer(&want[0]), packed(blocksGo.interleave)
				blocksGo.panel[kind](&whole)
				args.y, args.w = unsafe.Pointer(&got[0]), packed(k.interleave)
				for at := 0; at < groups; {
					part := args
					part.groups, part.more, part.unfinished = 1+rng.IntN(groups-at), at, groups
					part.w, part.x = unsafe.Add(args.w, at*panelBytes), unsafe.Add(args.x, at*int(unsafe.Sizeof(x[0])))
					if at += part.groups; at == groups {
						part.unfinished = 0
					}
					part.half = rng.IntN(2)
					part.groups -= part.half
					if part.groups == 0 {
						part.groups, part.half = 1, 0
					}
					before := part
					if panel(&part); part != before {
						t.Fatalf("%s: the arguments were %+v, and are %+v", name, before, part)
					}
				}
				for i, v := range got {
					if !same(v, want[i]) {
						t.Fatalf("%s, kind %d, %d rows of %d groups: result %d of row %d is %v, want %v", name, kind, rows, groups, i%step, i/step, v, want[i])
					} else if v-v == 0 && v != 0 && v != untouched {
						finite++
					}
				}
			}
			if finite < 10 {
				t.Errorf("%s, kind %d: %d results are finite and not 0", name, kind, finite)
			}
		}
	}
}

// TestBlockKernelsWithoutDot: layers on processors without dot products.
func TestBlockKernelsWithoutDot(t *testing.T) {
	was := linearTiers[cpu.InUse()]
	if cpu.InUse() != cpu.TierNEON || was.blocks == &blocksNEON {
		t.Skip("the other tests have run without dot products")
	}
	own := *was
	own.blocks = &blocksNEON
	linearTiers[cpu.InUse()] = &own
	defer func() { linearTiers[cpu.InUse()] = was }()
	for name, test := range map[string]func(*testing.T){"alone": TestBlocksAlone, "odd": TestBlocksOdd} {
		t.Run(name, test)
	}
}
