package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// blockFormat is a format whose rows become groups.
type blockFormat struct {
	name     string // in the names of kernels
	elements int    // of a block
	bytes    int    // of a block
	minima   bool

	// block unpacks the block at from: a block of 32 elements is block b of the group at to.
	block func(u *unpacker, from, to reg.GPVirtual, b int)
	// group unpacks four blocks of 32 elements with AVX-512, of which the last may be missing: see unpacker.rest. nil: block does so.
	group func(u *unpacker, from, to reg.GPVirtual, rest bool)
}

var blockFormats = []blockFormat{
	{name: "I8", elements: 1, bytes: 1, group: (*unpacker).groupI8},
	{name: "Q80", elements: 32, bytes: 34, block: (*unpacker).blockQ80},
	{name: "Q40", elements: 32, bytes: 18, block: (*unpacker).blockQ40, group: (*unpacker).groupQ40},
	{name: "Q41", elements: 32, bytes: 20, minima: true, block: (*unpacker).blockQ41, group: (*unpacker).groupQ41},
}

// unpacker is a kernel that is being made.
type unpacker struct {
	*gen
	blockFormat
	constants map[string]reg.VecVirtual
	rest      []reg.OpmaskVirtual // of the loads of a group that is not whole
}

func (f blockFormat) begin(g *gen, set isa) (u *unpacker) {
	g.kernel("unpack"+f.name, set, blockSource, "unpack"+f.name+"Go", args)
	return &unpacker{gen: g, blockFormat: f, constants: map[string]reg.VecVirtual{}}
}

// rows makes the loop over rows. row gets registers of its own.
func (u *unpacker) rows(row func(from, to, ahead reg.GPVirtual)) {
	a := u.Dereference(u.Param("a"))
	dst, src, rows, from, to, ahead := u.field(a, "dst"), u.field(a, "src"), u.field(a, "rows"), u.GP64(), u.GP64(), u.field(a, "ahead")
	u.Label("row")
	u.MOVQ(src, from)
	u.MOVQ(dst, to)
	row(from, to, ahead)
	u.ADDQ(u.fieldAt(a, "srcRow"), src)
	u.ADDQ(u.fieldAt(a, "dstRow"), dst)
	u.DECQ(rows)
	u.JNZ(LabelRef("row"))
	u.ret()
}

// prefetch asks for as many bytes as a group has.
func (u *unpacker) prefetch(from, ahead reg.GPVirtual, bytes int) {
	for at := 0; at < bytes; at += 64 {
		u.PREFETCHT0(Mem{Base: from, Index: ahead, Scale: 1, Disp: at})
	}
}

// bytes returns a register with the same byte in all places. It must be asked for before the first loop.
func (u *unpacker) bytes(x byte) reg.VecVirtual {
	name := fmt.Sprintf("byte%02x", x)
	if u.constants[name] == nil {
		v := u.vec()
		u.VPBROADCASTD(u.words(name, uint32(x)*0x01010101), v)
		u.constants[name] = v
	}
	return u.constants[name]
}

// indices returns a register with numbers of 16 or 32 bits. It must be asked for before the first loop.
func (u *unpacker) indices(name string, bits int, x []int) reg.VecVirtual {
	if u.constants[name] == nil {
		words := make([]uint32, 16)
		for i, x := range x {
			words[i*bits/32] |= uint32(x) << (i * bits % 32)
		}
		v := u.ZMM()
		u.VMOVDQU32(u.words(name, words...), v)
		u.constants[name] = v
	}
	return u.constants[name]
}

// unpackAVX2 makes the kernel that goes block by block, with either instruction set.
func (f blockFormat) unpackAVX2(g *gen) {
	if f.block == nil {
		f.copyAVX2(g)
		return
	}
	f.byBlock(g, avx2)
}

func (f blockFormat) byBlock(g *gen, set isa) {
	u := f.begin(g, set)
	u.bytes(15)
	u.bytes(u.bias(0))
	u.bytes(u.bias(8))
	zero, n, left := g.GP32(), g.GP64(), g.GP64()
	g.XORL(zero, zero)
	g.MOVQ(g.fieldAt(g.Dereference(g.Param("a")), "n"), n)
	g.SHRQ(Imm(5), n)
	u.rows(func(from, to, ahead reg.GPVirtual) {
		g.MOVQ(n, left)
		g.Label("group")
		u.prefetch(from, ahead, 4*f.bytes)
		for b := range 4 {
			if b > 0 {
				g.TESTQ(left, left)
				g.JZ(LabelRef(fmt.Sprintf("none%d", b)))
			}
			f.block(u, from, to, b)
			g.DECQ(left)
		}
		g.ADDQ(U32(uint32(4*f.bytes)), from)
		g.ADDQ(U32(wSize), to)
		g.TESTQ(left, left)
		g.JNZ(LabelRef("group"))
		g.JMP(LabelRef("end"))
		for b := 1; b < 4; b++ {
			g.Label(fmt.Sprintf("none%d", b))
			g.MOVL(zero, Mem{Base: to, Disp: wScales + 4*b})
			if f.minima {
				g.MOVL(zero, Mem{Base: to, Disp: wMinima + 4*b})
			}
		}
		g.Label("end")
	})
}

// unpackAVX512 makes the kernel that goes group by group.
func (f blockFormat) unpackAVX512(g *gen) {
	if f.group == nil {
		f.byBlock(g, avx512)
		return
	}
	u := f.begin(g, avx512)
	a := g.Dereference(g.Param("a"))
	groups, rest, left := g.field(a, "n"), g.GP64(), g.GP64()
	g.MOVQ(groups, rest)
	g.SHRQ(Imm(7), groups)
	g.ANDQ(Imm(127), rest)
	for range 2 {
		u.rest = append(u.rest, g.K())
	}
	f.group(u, nil, nil, false) // constants, and masks of what is not a whole group
	u.masks(rest)
	size := 4 * f.bytes
	if f.elements == 1 {
		size = 128
	}
	u.rows(func(from, to, ahead reg.GPVirtual) {
		g.MOVQ(groups, left)
		g.TESTQ(left, left)
		g.JZ(LabelRef("rest"))
		g.Label("group")
		u.prefetch(from, ahead, size)
		f.group(u, from, to, false)
		g.ADDQ(U32(uint32(size)), from)
		g.ADDQ(U32(wSize), to)
		g.DECQ(left)
		g.JNZ(LabelRef("group"))
		g.Label("rest")
		g.TESTQ(rest, rest)
		g.JZ(LabelRef("end"))
		f.group(u, from, to, true)
		g.Label("end")
	})
}

// masks sets the masks of the two loads of a group with some elements.
func (u *unpacker) masks(rest reg.GPVirtual) {
	bits, all, zero := u.GP64(), u.GP64(), u.GP64()
	u.MOVQ(I32(-1), all)
	u.XORQ(zero, zero)
	u.MOVQ(rest, bits)
	mask := func(k reg.OpmaskVirtual) {
		m := u.GP64()
		u.BZHIQ(bits, all, m)
		u.KMOVQ(m, k)
	}
	switch u.name {
	case "I8": // loads of 64 bytes
		mask(u.rest[0])
		u.SUBQ(Imm(64), bits)
		u.CMOVQLT(zero, bits)
		mask(u.rest[1])
	case "Q40": // 9 words a block; the second load begins at the fourth word
		u.SHRQ(Imm(5), bits)
		u.LEAQ(Mem{Base: bits, Index: bits, Scale: 8}, bits)
		mask(u.rest[0])
		u.SUBQ(Imm(4), bits)
		u.CMOVQLT(zero, bits)
		mask(u.rest[1])
	case "Q41": // 5 words of 32 bits a block; the second load begins at the fourth
		u.SHRQ(Imm(5), bits)
		u.LEAQ(Mem{Base: bits, Index: bits, Scale: 4}, bits)
		mask(u.rest[0])
		u.SUBQ(Imm(4), bits)
		u.CMOVQLT(zero, bits)
		mask(u.rest[1])
	}
}

// bias returns what is added to integers from which zero is subtracted: see linearBlocks.
func (u *unpacker) bias(zero byte) byte {
	if u.isa == avx512 && !u.minima {
		return 128 - zero
	}
	return -zero
}

// put stores a half of a block.
func (u *unpacker) put(v reg.VecVirtual, to reg.GPVirtual, b, half int) {
	at := 32*b + 16*half
	if u.isa == avx512 {
		at = 64*half + 16*b
	}
	u.VMOVDQU(v.AsX(), Mem{Base: to, Disp: at})
}

// scale stores the scale of a block, of 16 bits at from.
func (u *unpacker) scale(from Mem, to reg.GPVirtual, b int) {
	bits, v := u.GP32(), u.XMM()
	u.MOVWLZX(from, bits)
	u.VMOVD(bits, v)
	u.VCVTPH2PS(v, v)
	u.VMOVSS(v, Mem{Base: to, Disp: wScales + 4*b})
}

// scaleAndMinimum stores both, of 16 bits each.
func (u *unpacker) scaleAndMinimum(from Mem, to reg.GPVirtual, b int) {
	v := u.XMM()
	u.VMOVD(from, v)
	u.VCVTPH2PS(v, v)
	u.VMOVSS(v, Mem{Base: to, Disp: wScales + 4*b})
	u.VEXTRACTPS(Imm(1), v, Mem{Base: to, Disp: wMinima + 4*b})
}

func (u *unpacker) blockQ80(from, to reg.GPVirtual, b int) {
	for half := range 2 {
		v := u.XMM()
		u.VMOVDQU(Mem{Base: from, Disp: 34*b + 2 + 16*half}, v)
		if u.isa == avx512 {
			u.VPXOR(u.bytes(128).AsX(), v, v)
		}
		u.put(v, to, b, half)
	}
	u.scale(Mem{Base: from, Disp: 34 * b}, to, b)
}

// nibbles returns the lower and the upper halves of 16 bytes.
func (u *unpacker) nibbles(from Mem) (low, high reg.VecVirtual) {
	low, high = u.XMM(), u.XMM()
	u.VMOVDQU(from, low)
	u.VPSRLW(Imm(4), low, high)
	u.VPAND(u.bytes(15).AsX(), low, low)
	u.VPAND(u.bytes(15).AsX(), high, high)
	return low, high
}

func (u *unpacker) blockQ40(from, to reg.GPVirtual, b int) {
	low, high := u.nibbles(Mem{Base: from, Disp: 18*b + 2})
	for half, v := range []reg.VecVirtual{low, high} {
		u.VPADDB(u.bytes(u.bias(8)).AsX(), v, v)
		u.put(v, to, b, half)
	}
	u.scale(Mem{Base: from, Disp: 18 * b}, to, b)
}

func (u *unpacker) blockQ41(from, to reg.GPVirtual, b int) {
	low, high := u.nibbles(Mem{Base: from, Disp: 20*b + 4})
	u.put(low, to, b, 0)
	u.put(high, to, b, 1)
	u.scaleAndMinimum(Mem{Base: from, Disp: 20 * b}, to, b)
}

// load loads 64 bytes, or what the mask of load i of a group has of them.
func (u *unpacker) load(from reg.GPVirtual, disp, bits, i int, rest bool) reg.VecVirtual {
	v, at := u.ZMM(), Mem{Base: from, Disp: disp}
	switch {
	case !rest:
		u.VMOVDQU32(at, v)
	case bits == 8:
		u.VMOVDQU8_Z(at, u.rest[i], v)
	case bits == 16:
		u.VMOVDQU16_Z(at, u.rest[i], v)
	default:
		u.VMOVDQU32_Z(at, u.rest[i], v)
	}
	return v
}

// split stores the halves of 64 bytes, each in the place of a half of a block.
func (u *unpacker) split(v reg.VecVirtual, to reg.GPVirtual) {
	low, mask, bias := u.ZMM(), u.bytes(15), u.bytes(u.bias(8))
	u.VPANDD(mask, v, low)
	u.VPSRLW(Imm(4), v, v)
	u.VPANDD(mask, v, v)
	if !u.minima {
		u.VPADDB(bias, low, low)
		u.VPADDB(bias, v, v)
	}
	u.VMOVDQU32(low, Mem{Base: to})
	u.VMOVDQU32(v, Mem{Base: to, Disp: 64})
}

// perBlock returns indices of n elements of each of four blocks, from an element of the block on. What is behind the first 64 bytes
// is in the other load, which begins at element `second`.
func perBlock(stride, first, n, second, ofLoad int) (all []int) {
	for b := range 4 {
		for i := range n {
			at := stride*b + first + i
			if at >= ofLoad {
				at += ofLoad - second
			}
			all = append(all, at)
		}
	}
	return all
}

func (u *unpacker) groupQ40(from, to reg.GPVirtual, rest bool) {
	nibbles := u.indices("nibbles", 16, perBlock(9, 1, 8, 4, 32))
	scales := u.indices("scales", 16, perBlock(9, 0, 1, 4, 32))
	u.bytes(15)
	u.bytes(u.bias(8))
	if from == nil {
		return
	}
	a, b := u.load(from, 0, 16, 0, rest), u.load(from, 8, 16, 1, rest)
	v, d := u.ZMM(), u.ZMM()
	u.VMOVDQA32(nibbles, v)
	u.VPERMI2W(b, a, v)
	u.VPERMW(a, scales, d)
	u.VCVTPH2PS(d.AsX(), d.AsX())
	u.VMOVUPS(d.AsX(), Mem{Base: to, Disp: wScales})
	u.split(v, to)
}

func (u *unpacker) groupQ41(from, to reg.GPVirtual, rest bool) {
	nibbles := u.indices("nibbles", 32, perBlock(5, 1, 4, 4, 16))
	factors := u.indices("factors", 32, []int{0, 5, 10, 15})
	order := u.indices("order", 32, []int{0, 2, 4, 6, 1, 3, 5, 7})
	u.bytes(15)
	u.bytes(u.bias(8))
	if from == nil {
		return
	}
	a, b := u.load(from, 0, 32, 0, rest), u.load(from, 16, 32, 1, rest)
	v, d := u.ZMM(), u.ZMM()
	u.VMOVDQA32(nibbles, v)
	u.VPERMI2D(b, a, v)
	u.VPERMD(a, factors, d)
	u.VCVTPH2PS(d.AsX(), d.AsY())
	u.VPERMPS(d.AsY(), order.AsY(), d.AsY())
	u.VMOVUPS(d.AsX(), Mem{Base: to, Disp: wScales})
	u.VEXTRACTF32X4(Imm(1), d.AsY(), Mem{Base: to, Disp: wMinima})
	u.split(v, to)
}

func (u *unpacker) groupI8(from, to reg.GPVirtual, rest bool) {
	var halves [2]reg.VecVirtual
	for i := range halves {
		halves[i] = u.indices(fmt.Sprint("half", i), 32, perBlock(8, 4*i, 4, 16, 16))
	}
	bias := u.bytes(128)
	one := u.indices("one", 32, []int{0x3f800000, 0x3f800000, 0x3f800000, 0x3f800000})
	if from == nil {
		return
	}
	a, b := u.load(from, 0, 8, 0, rest), u.load(from, 64, 8, 1, rest)
	u.VPXORD(bias, a, a)
	u.VPXORD(bias, b, b)
	for i, order := range halves {
		v := u.ZMM()
		u.VMOVDQA32(order, v)
		u.VPERMI2D(b, a, v)
		u.VMOVDQU32(v, Mem{Base: to, Disp: 64 * i})
	}
	u.VMOVUPS(one.AsX(), Mem{Base: to, Disp: wScales})
}

// copyAVX2 makes the kernel for signed bytes.
func (f blockFormat) copyAVX2(g *gen) {
	u := f.begin(g, avx2)
	a := g.Dereference(g.Param("a"))
	groups, rest, left := g.field(a, "n"), g.GP64(), g.GP64()
	g.MOVQ(groups, rest)
	g.SHRQ(Imm(7), groups)
	g.ANDQ(Imm(127), rest)
	one, zero := g.XMM(), g.YMM()
	g.VBROADCASTSS(g.words("one", 0x3f800000), one)
	g.VPXOR(zero, zero, zero)
	u.rows(func(from, to, ahead reg.GPVirtual) {
		g.MOVQ(groups, left)
		g.TESTQ(left, left)
		g.JZ(LabelRef("rest"))
		g.Label("group")
		u.prefetch(from, ahead, 128)
		v := g.vecs(4)
		for i, v := range v {
			g.VMOVDQU(Mem{Base: from, Disp: 32 * i}, v)
		}
		for i, v := range v {
			g.VMOVDQU(v, Mem{Base: to, Disp: 32 * i})
		}
		g.VMOVUPS(one, Mem{Base: to, Disp: wScales})
		g.ADDQ(U32(128), from)
		g.ADDQ(U32(wSize), to)
		g.DECQ(left)
		g.JNZ(LabelRef("group"))
		g.Label("rest")
		g.TESTQ(rest, rest)
		g.JZ(LabelRef("end"))
		for i := range v {
			g.VMOVDQU(zero, Mem{Base: to, Disp: 32 * i})
		}
		g.VMOVUPS(one, Mem{Base: to, Disp: wScales})
		g.MOVQ(rest, left)
		g.Label("pieces")
		g.CMPQ(left, Imm(16))
		g.JLT(LabelRef("ones"))
		g.VMOVDQU(Mem{Base: from}, v[0].AsX())
		g.VMOVDQU(v[0].AsX(), Mem{Base: to})
		g.ADDQ(Imm(16), from)
		g.ADDQ(Imm(16), to)
		g.SUBQ(Imm(16), left)
		g.JMP(LabelRef("pieces"))
		g.Label("ones")
		g.TESTQ(left, left)
		g.JZ(LabelRef("end"))
		x := g.GP32()
		g.MOVBLZX(Mem{Base: from}, x)
		g.MOVB(x.As8(), Mem{Base: to})
		g.INCQ(from)
		g.INCQ(to)
		g.DECQ(left)
		g.JMP(LabelRef("ones"))
		g.Label("end")
	})
}
