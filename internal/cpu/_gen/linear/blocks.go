package main

import (
	"fmt"
	"math"

	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

const blockSource = "blocks_go.go"

// Offsets in a weightGroup and an xGroup, and their sizes. Integers are at 0.
const (
	wScales, wHigh, wMinima, wSize = 128, 144, 160, 192
	xScales, xSums                 = 128, 144
	xWideScales, xWideSums         = 192, 256
	xOffsets, xSize                = 320, 512 // of blocks, of their first halves, of their second halves
)

// kind is what a kernel of groups does: see blockKind.
type kind struct {
	name           string
	minima, halves bool
	ones           bool // scales are 1
}

var kinds = []kind{{name: ""}, {name: "Minima", minima: true}, {name: "Halves", halves: true}}

// linearBlocks makes the kernels for weights of 8 and fewer bits.
//
// With AVX2 the integers of a group are in order and signed. AVX-512: see quads.go.
func linearBlocks(g *gen) {
	for _, set := range []isa{avx2, avx512} {
		g.roundBlocks(set)
		for _, k := range kinds {
			g.expandBlocks(set, k)
			if set == avx2 {
				g.products(k, "one", 1, 4)
				g.products(k, "many", 4, 1)
			} else {
				g.oneQuads(k)
				g.panel(k)
			}
		}
		rows := 2 // the registers of AVX2 have the sums of two
		if set == avx512 {
			rows = 4
		}
		for nx := 1; nx <= rows; nx++ {
			rowsE4M3(g, set, nx)
		}
	}
	g.interleave()
	for _, f := range blockFormats {
		f.unpackAVX2(g)
		f.unpackAVX512(g)
		if f.group != nil {
			f.rowAVX512(g)
			f.pack(g)
		}
	}
}

// words returns values of 32 bits in memory.
func (g *gen) words(name string, x ...uint32) Mem {
	m := g.StaticGlobal(name + g.fn)
	g.DataAttributes(attr.RODATA | attr.NOPTR)
	for _, x := range x {
		g.AppendDatum(U32(x))
	}
	return m
}

// roundBlocks makes the kernel that rounds x.
func (g *gen) roundBlocks(set isa) {
	g.kernel("round", set, blockSource, "roundGo", args)
	a := g.Dereference(g.Param("a"))
	dst, src, left := g.field(a, "dst"), g.field(a, "src"), g.field(a, "n")
	g.SHRQ(Imm(5), left)
	abs, byAll, order := g.YMM(), g.YMM(), g.YMM()
	g.VPBROADCASTD(g.words("abs", 1<<31-1), abs)
	g.VMOVDQU(g.words("order", 0, 4, 1, 5, 2, 6, 3, 7), order)
	c127 := g.XMM()
	g.VMOVSS(g.words("c127", math.Float32bits(127)), c127)
	zero := g.YMM()
	g.VPXOR(zero, zero, zero)
	bits := g.GP32()

	g.Label("group")
	g.CMPQ(left, Imm(4))
	g.JGE(LabelRef("whole"))
	for i := 0; i < xSize; i += 32 {
		g.VMOVDQU(zero, Mem{Base: dst, Disp: i})
	}
	g.Label("whole")
	for b := range 4 {
		next := fmt.Sprintf("next%d", b)
		if b > 0 {
			g.TESTQ(left, left)
			g.JZ(LabelRef("done"))
		}
		v := []reg.VecVirtual{g.YMM(), g.YMM(), g.YMM(), g.YMM()}
		most, t := g.YMM(), g.YMM()
		for i := range v {
			g.VMOVUPS(Mem{Base: src, Disp: 32 * i}, v[i])
			if i == 0 {
				g.VPAND(abs, v[i], most)
				continue
			}
			g.VPAND(abs, v[i], t)
			g.VPMAXUD(t, most, most)
		}
		g.VEXTRACTI128(Imm(1), most, t.AsX())
		g.VPMAXUD(t.AsX(), most.AsX(), most.AsX())
		g.VPSHUFD(Imm(0b01001110), most.AsX(), t.AsX())
		g.VPMAXUD(t.AsX(), most.AsX(), most.AsX())
		g.VPSHUFD(Imm(0b10110001), most.AsX(), t.AsX())
		g.VPMAXUD(t.AsX(), most.AsX(), most.AsX())
		g.VMOVD(most.AsX(), bits)
		scale, by := g.XMM(), g.XMM()
		g.CMPL(bits, U32(0x7f800000))
		g.JAE(LabelRef(fmt.Sprintf("odd%d", b)))
		g.CMPL(bits, U32(7<<23))
		g.JB(LabelRef(fmt.Sprintf("tiny%d", b)))
		g.VDIVSS(c127, most.AsX(), scale)
		g.VDIVSS(most.AsX(), c127, by)
		g.VBROADCASTSS(by, byAll)
		for i := range v {
			g.VMULPS(byAll, v[i], v[i])
			g.VCVTPS2DQ(v[i], v[i])
		}
		g.Label(fmt.Sprintf("store%d", b))
		bytes, t2 := g.YMM(), g.YMM()
		g.VPACKSSDW(v[1], v[0], bytes)
		g.VPACKSSDW(v[3], v[2], t2)
		g.VPACKSSWB(t2, bytes, bytes)
		g.VPERMD(bytes, order, bytes)
		g.VPADDD(v[1], v[0], v[0])
		g.VPADDD(v[3], v[2], v[2])
		g.VPHADDD(v[2], v[0], v[0])
		g.VPHADDD(v[0], v[0], v[0])
		g.VEXTRACTI128(Imm(1), v[0], t.AsX())
		halves, sums := g.XMM(), g.XMM() // sums of the first half, of the second half, of both again; of the block in all lanes
		g.VPADDD(t.AsX(), v[0].AsX(), halves)
		g.VPHADDD(halves, halves, sums)
		if set == avx2 {
			g.VMOVDQU(bytes, Mem{Base: dst, Disp: 32 * b})
		} else {
			g.VMOVDQU(bytes.AsX(), Mem{Base: dst, Disp: 16 * b})
			g.VEXTRACTI128(Imm(1), bytes, Mem{Base: dst, Disp: 64 + 16*b})
			for i, v := range []reg.VecVirtual{sums, halves, halves} {
				g.VPSHUFD(Imm([]uint64{0, 0, 0x55}[i]), v, t.AsX())
				g.VPSLLD(Imm(7), t.AsX(), t.AsX())
				g.VPSUBD(t.AsX(), zero.AsX(), t.AsX())
				g.VMOVDQU(t.AsX(), Mem{Base: dst, Disp: xOffsets + 64*i + 16*b})
			}
		}
		g.VCVTDQ2PS(sums, sums)
		g.VBROADCASTSS(scale, scale)
		g.VMULPS(scale, sums, sums)
		g.VMOVSS(scale, Mem{Base: dst, Disp: xScales + 4*b})
		g.VMOVSS(sums, Mem{Base: dst, Disp: xSums + 4*b})
		if set == avx512 {
			g.VMOVUPS(scale, Mem{Base: dst, Disp: xWideScales + 16*b})
			g.VMOVUPS(sums, Mem{Base: dst, Disp: xWideSums + 16*b})
		}
		g.JMP(LabelRef(next))
		g.Label(fmt.Sprintf("odd%d", b))
		g.VMOVSS(g.words(fmt.Sprintf("nan%d", b), 0x7fc00000), scale)
		g.JMP(LabelRef(fmt.Sprintf("none%d", b)))
		g.Label(fmt.Sprintf("tiny%d", b))
		g.VXORPS(scale, scale, scale)
		g.Label(fmt.Sprintf("none%d", b))
		for i := range v {
			g.VPXOR(v[i], v[i], v[i])
		}
		g.JMP(LabelRef(fmt.Sprintf("store%d", b)))
		g.Label(next)
		g.ADDQ(U32(128), src)
		g.DECQ(left)
	}
	g.ADDQ(U32(xSize), dst)
	g.TESTQ(left, left)
	g.JNZ(LabelRef("group"))
	g.Label("done")
	g.ret()
}

// expandBlocks makes the kernel that converts groups to float32.
func (g *gen) expandBlocks(set isa, k kind) {
	g.kernel("expand"+k.name, set, blockSource, "expand"+k.name+"Go", args)
	a := g.Dereference(g.Param("a"))
	dst, src, rows := g.field(a, "dst"), g.field(a, "src"), g.field(a, "rows")
	bias := g.vec()
	if set == avx512 && !k.minima {
		g.VPBROADCASTD(g.words("bias", 128), bias)
	}
	to, from, left := g.GP64(), g.GP64(), g.GP64()
	v, scale, minimum := g.vec(), g.vec(), g.vec()
	g.Label("row")
	g.MOVQ(dst, to)
	g.MOVQ(src, from)
	g.MOVQ(g.fieldAt(a, "groups"), left)
	g.Label("group")
	for b := range 4 {
		at := func(n int) Mem { return Mem{Base: from, Disp: n} }
		g.VBROADCASTSS(at(wScales+4*b), scale)
		if k.minima {
			g.VBROADCASTSS(at(wMinima+4*b), minimum)
		}
		for i := 0; i < 32; i += set.lanes {
			if k.halves && i == 16 {
				g.VBROADCASTSS(at(wHigh+4*b), scale)
			}
			if set == avx2 {
				g.VPMOVSXBD(at(32*b+i), v)
			} else {
				g.VPMOVZXBD(at(16*b+4*i), v)
				if !k.minima {
					g.VPSUBD(bias, v, v)
				}
			}
			g.VCVTDQ2PS(v, v)
			g.VMULPS(scale, v, v)
			if k.minima {
				g.VADDPS(minimum, v, v)
			}
			g.VMOVUPS(v, Mem{Base: to, Disp: 128*b + 4*i})
		}
	}
	g.ADDQ(U32(wSize), from)
	g.ADDQ(U32(512), to)
	g.DECQ(left)
	g.JNZ(LabelRef("group"))
	g.ADDQ(g.fieldAt(a, "dstRow"), dst)
	g.ADDQ(g.fieldAt(a, "srcRow"), src)
	g.DECQ(rows)
	g.JNZ(LabelRef("row"))
	g.ret()
}

// groupTile is what a kernel of products has in registers.
type groupTile struct {
	*gen
	kind
	x, w []reg.GPVirtual // rows
	sums [][]reg.VecVirtual
	at   reg.GPVirtual // bytes from the beginning of a row of w
	atX  reg.GPVirtual
	ones reg.VecVirtual
}

// products makes the kernel for AVX2 of some rows of x and some of w.
func (g *gen) products(k kind, name string, nx, nw int) {
	g.kernel(name+k.name, avx2, blockSource, name+k.name+"Go", args)
	a := g.Dereference(g.Param("a"))
	t := &groupTile{gen: g, kind: k}
	// rows returns registers with addresses of rows, of which the first is set.
	rows := func(n int, first reg.GPVirtual) []reg.GPVirtual {
		all := []reg.GPVirtual{first}
		for len(all) < n {
			all = append(all, g.GP64())
		}
		return all
	}
	follow := func(all []reg.GPVirtual, step string) {
		if len(all) == 1 {
			return
		}
		by := g.field(a, step)
		for i := 1; i < len(all); i++ {
			g.LEAQ(Mem{Base: all[i-1], Index: by, Scale: 1}, all[i])
		}
	}
	t.x, t.w = rows(nx, g.field(a, "x")), rows(nw, g.field(a, "w"))
	follow(t.x, "xRow")
	y := g.field(a, "y")
	var sets reg.GPVirtual
	if nx == 1 {
		sets = g.field(a, "sets")
	}
	t.ones = g.YMM()
	g.VPBROADCASTD(g.words("ones", 1<<16|1), t.ones)
	g.Label("set")
	follow(t.w, "wRow")
	for range nx {
		v := g.vecs(nw)
		g.zero(v...)
		t.sums = append(t.sums, v)
	}
	left := g.GP64()
	t.at, t.atX = g.GP64(), g.GP64()
	g.MOVQ(g.fieldAt(a, "groups"), left)
	g.XORQ(t.at, t.at)
	g.XORQ(t.atX, t.atX)
	g.Label("group")
	t.group()
	t.addMinima()
	g.ADDQ(U32(wSize), t.at)
	g.ADDQ(U32(xSize), t.atX)
	g.DECQ(left)
	g.JNZ(LabelRef("group"))
	// Four results make a vector: those of a row of x, or of four rows.
	if yStep := g.field(a, "yStep"); nx == 1 {
		g.put4(g.sum4(t.sums[0]), yStep, y)
		g.LEAQ(Mem{Base: y, Index: yStep, Scale: 4}, y)
		row := g.field(a, "wRow")
		g.LEAQ(Mem{Base: t.w[0], Index: row, Scale: 4}, t.w[0])
		g.DECQ(sets)
		g.JNZ(LabelRef("set"))
	} else {
		yRow := g.field(a, "yRow")
		for s := range t.w {
			if s > 0 {
				g.ADDQ(yStep, y)
			}
			g.put4(g.sum4([]reg.VecVirtual{t.sums[0][s], t.sums[1][s], t.sums[2][s], t.sums[3][s]}), yRow, y)
		}
	}
	g.ret()
}

// put4 stores the first four lanes, step bytes apart.
func (g *gen) put4(four reg.VecVirtual, step, y reg.GPVirtual) {
	y2 := g.GP64()
	g.LEAQ(Mem{Base: y, Index: step, Scale: 2}, y2)
	g.VMOVSS(four, Mem{Base: y})
	g.VEXTRACTPS(Imm(1), four, Mem{Base: y, Index: step, Scale: 1})
	g.VEXTRACTPS(Imm(2), four, Mem{Base: y2})
	g.VEXTRACTPS(Imm(3), four, Mem{Base: y2, Index: step, Scale: 1})
}

func (t *groupTile) wAt(s, disp int) Mem { return Mem{Base: t.w[s], Index: t.at, Scale: 1, Disp: disp} }
func (t *groupTile) xAt(r, disp int) Mem {
	return Mem{Base: t.x[r], Index: t.atX, Scale: 1, Disp: disp}
}

// addMinima adds the minima of a group times the sums of x, in four lanes.
func (t *groupTile) addMinima() {
	if !t.minima {
		return
	}
	load := func(from Mem) reg.VecVirtual {
		v := t.vec()
		t.VMOVUPS(from, v.AsX())
		return v
	}
	var w []reg.VecVirtual
	for s := range t.w {
		w = append(w, load(t.wAt(s, wMinima)))
	}
	for r := range t.x {
		x := load(t.xAt(r, xSums))
		for s := range w {
			t.VFMADD231PS(x, w[s], t.sums[r][s])
		}
	}
}

// group adds the products of a group, block by block.
func (t *groupTile) group() {
	w, size, x, v, scale, both := t.YMM(), t.YMM(), t.YMM(), t.YMM(), t.YMM(), t.YMM()
	// scaleOf loads the scales of a block of w.
	scaleOf := func(s, b int, v reg.VecVirtual) {
		t.VBROADCASTSS(t.wAt(s, wScales+4*b), v)
		if t.halves {
			high := t.YMM()
			t.VBROADCASTSS(t.wAt(s, wHigh+4*b), high)
			t.VBLENDPS(Imm(0xf0), high, v, v)
		}
	}
	loadW := func(s, b int) {
		t.VMOVDQU(t.wAt(s, 32*b), w)
		if !t.minima {
			t.VPABSB(w, size)
		}
	}
	product := func(r, s int) {
		if t.minima {
			t.VPMADDUBSW(x, w, v)
		} else {
			t.VPSIGNB(w, x, v)
			t.VPMADDUBSW(v, size, v)
		}
		t.VPMADDWD(t.ones, v, v)
		t.VCVTDQ2PS(v, v)
		t.VFMADD231PS(both, v, t.sums[r][s])
	}
	for b := range 4 {
		if len(t.x) == 1 {
			t.VMOVDQU(t.xAt(0, 32*b), x)
			t.VBROADCASTSS(t.xAt(0, xScales+4*b), scale)
			for s := range t.w {
				loadW(s, b)
				scaleOf(s, b, both)
				t.VMULPS(scale, both, both)
				product(0, s)
			}
			continue
		}
		for s := range t.w {
			loadW(s, b)
			scaleOf(s, b, scale)
			for r := range t.x {
				t.VMOVDQU(t.xAt(r, 32*b), x)
				t.VBROADCASTSS(t.xAt(r, xScales+4*b), both)
				t.VMULPS(scale, both, both)
				product(r, s)
			}
		}
	}
}
