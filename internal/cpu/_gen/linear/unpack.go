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
	// super unpacks a block of 256 elements to two groups.
	super func(u *unpacker, from, to reg.GPVirtual)
	// nil: block or super does all.
	// group reads four blocks of 32 elements with AVX-512. Of the rest of a row, which is not a whole group, the last are zeros.
	group func(u *unpacker, from reg.GPVirtual, rest bool) quad
}

var blockFormats = []blockFormat{
	{name: "I8", elements: 1, bytes: 1, group: (*unpacker).groupI8},
	{name: "Q80", elements: 32, bytes: 34, block: (*unpacker).blockQ80, group: (*unpacker).groupQ80},
	{name: "Q40", elements: 32, bytes: 18, block: (*unpacker).blockQ40, group: (*unpacker).groupQ40},
	{name: "Q50", elements: 32, bytes: 22, block: (*unpacker).blockQ50},
	{name: "Q51", elements: 32, bytes: 24, minima: true, block: (*unpacker).blockQ51},
	{name: "Q4K", elements: 256, bytes: 144, minima: true, super: (*unpacker).superQ4K},
	{name: "Q5K", elements: 256, bytes: 176, minima: true, super: (*unpacker).superQ5K},
	{name: "Q6K", elements: 256, bytes: 210, super: (*unpacker).superQ6K},
	{name: "I4x32", elements: 32, bytes: 19, block: (*unpacker).blockI4, group: (*unpacker).groupI4},
	{name: "I4x64", elements: 64, bytes: 35, block: (*unpacker).blockI4, group: (*unpacker).groupI4},
	{name: "I4x128", elements: 128, bytes: 67, block: (*unpacker).blockI4, group: (*unpacker).groupI4},
	{name: "Q41", elements: 32, bytes: 20, minima: true, block: (*unpacker).blockQ41, group: (*unpacker).groupQ41},
}

// unpacker is a kernel that is being made.
type unpacker struct {
	*gen
	blockFormat
	constants map[string]reg.VecVirtual
	rest      []reg.OpmaskVirtual // of the loads of a group that is not whole

	copied Mem           // a copy of the rest of a row
	left   reg.GPVirtual // the elements of the rest
	suffix string        // of labels

	narrow bool // constants have 32 bytes

	fetch, fetchStep reg.GPVirtual
}

// groupBytes returns the bytes of a group.
func (f blockFormat) groupBytes() int { return 128 / f.elements * f.bytes }

func (f blockFormat) begin(g *gen, set isa) (u *unpacker) {
	g.kernel("unpack"+f.name, set, blockSource, "unpack"+f.name+"Go", args)
	return &unpacker{gen: g, blockFormat: f, constants: map[string]reg.VecVirtual{}}
}

// rows makes the loop over rows. row gets registers of its own.
func (u *unpacker) rows(row func(from, to reg.GPVirtual)) {
	a := u.Dereference(u.Param("a"))
	dst, src, rows, from, to := u.field(a, "dst"), u.field(a, "src"), u.field(a, "rows"), u.GP64(), u.GP64()
	u.fetch, u.fetchStep = u.field(a, "fetch"), u.field(a, "fetchStep")
	u.Label("row")
	u.MOVQ(src, from)
	u.MOVQ(dst, to)
	row(from, to)
	u.ADDQ(u.fieldAt(a, "srcRow"), src)
	u.ADDQ(u.fieldAt(a, "dstRow"), dst)
	u.DECQ(rows)
	u.JNZ(LabelRef("row"))
	u.ret()
}

// prefetchLines asks for some bytes at fetch, and takes fetch on.
func (g *gen) prefetchLines(fetch reg.GPVirtual, step Op, bytes int) {
	for at := 0; at < bytes; at += 64 {
		g.PREFETCHT1(Mem{Base: fetch, Disp: at})
	}
	g.ADDQ(step, fetch)
}

// bytes returns a register with the same byte in all places. It must be asked for before the first loop.
func (u *unpacker) bytes(x byte) reg.VecVirtual {
	name := fmt.Sprintf("byte%02x", x)
	if u.constants[name] == nil {
		v := u.vec()
		if u.narrow {
			v = u.YMM()
		}
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

// unpackAVX2 makes the kernel for AVX2.
func (f blockFormat) unpackAVX2(g *gen) {
	switch {
	case f.super != nil:
		f.bySuper(g, avx2)
	case f.block != nil:
		f.byBlock(g, avx2)
	default:
		f.copyAVX2(g)
	}
}

// bySuper makes the kernel that goes by blocks of 256 elements.
func (f blockFormat) bySuper(g *gen, set isa) {
	u := f.begin(g, set)
	u.narrow = true
	u.superConstants()
	n, left := g.GP64(), g.GP64()
	g.MOVQ(g.fieldAt(g.Dereference(g.Param("a")), "n"), n)
	g.SHRQ(Imm(8), n)
	u.rows(func(from, to reg.GPVirtual) {
		g.MOVQ(n, left)
		g.Label("block")
		for range 2 {
			u.prefetchLines(u.fetch, u.fetchStep, f.bytes/2)
		}
		f.super(u, from, to)
		g.ADDQ(U32(uint32(f.bytes)), from)
		g.ADDQ(U32(2*wSize), to)
		g.DECQ(left)
		g.JNZ(LabelRef("block"))
	})
}

// byBlock makes the kernel that goes block by block.
func (f blockFormat) byBlock(g *gen, set isa) {
	u := f.begin(g, set)
	u.narrow = true
	u.bytes(15)
	u.bytes(u.bias(0))
	if !f.int4() {
		u.bytes(u.bias(8))
	}
	if f.name == "Q50" || f.name == "Q51" {
		u.bytes(16)
		u.bytes(u.bias(16))
		u.fifthConstants()
	}
	zero, n, left := g.GP32(), g.GP64(), g.GP64()
	g.XORL(zero, zero)
	g.MOVQ(g.fieldAt(g.Dereference(g.Param("a")), "n"), n)
	g.SHRQ(Imm(5), n)
	u.rows(func(from, to reg.GPVirtual) {
		g.MOVQ(n, left)
		g.Label("group")
		u.prefetchLines(u.fetch, u.fetchStep, f.groupBytes())
		for b := range 4 {
			if b > 0 {
				g.TESTQ(left, left)
				g.JZ(LabelRef(fmt.Sprintf("none%d", b)))
			}
			f.block(u, from, to, b)
			g.DECQ(left)
		}
		g.ADDQ(U32(uint32(f.groupBytes())), from)
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

// eachGroup emits body for each of left groups, and then for a part of a group if rest is not 0. left is 0 afterwards.
func (g *gen) eachGroup(left, rest reg.GPVirtual, body func(part bool)) {
	g.TESTQ(left, left)
	g.JZ(LabelRef("rest"))
	g.Label("group")
	body(false)
	g.DECQ(left)
	g.JNZ(LabelRef("group"))
	g.Label("rest")
	g.TESTQ(rest, rest)
	g.JZ(LabelRef("end"))
	body(true)
	g.Label("end")
}

// unpackAVX512 makes the kernel that goes group by group.
func (f blockFormat) unpackAVX512(g *gen) {
	switch {
	case f.super != nil:
		f.bySuper(g, avx512)
		return
	case f.group == nil:
		f.byBlock(g, avx512)
		return
	}
	u := f.begin(g, avx512)
	a := g.Dereference(g.Param("a"))
	groups, rest, left := g.field(a, "n"), g.GP64(), g.GP64()
	g.MOVQ(groups, rest)
	g.SHRQ(Imm(7), groups)
	g.ANDQ(Imm(127), rest)
	u.prepareRest(rest)
	u.groupConstants()
	size := f.groupBytes()
	if f.elements == 1 {
		u.indices("one", 32, []int{0x3f800000, 0x3f800000, 0x3f800000, 0x3f800000})
	}
	if f.minima {
		u.indices("order", 32, []int{0, 2, 4, 6, 1, 3, 5, 7})
	}
	u.left = rest
	u.rows(func(from, to reg.GPVirtual) {
		g.MOVQ(groups, left)
		g.eachGroup(left, rest, func(part bool) {
			if !part {
				u.prefetchLines(u.fetch, u.fetchStep, size)
			}
			u.storeGroup(f.group(u, from, part), to)
			if !part {
				g.ADDQ(U32(uint32(size)), from)
				g.ADDQ(U32(wSize), to)
			}
		})
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

// quad is a group in registers: the first halves of four blocks, the second halves, and float32 factors. The scale of block b is
// factor stride*b, and its minimum the factor after that. Without factors, scales are 1.
//
// Instead of the halves there may be what split makes them of.
type quad struct {
	packed             reg.VecVirtual
	low, high, factors reg.VecVirtual
	stride             int
}

// groupConstants sets the registers that groups need.
func (u *unpacker) groupConstants() {
	switch u.name {
	case "I8":
		u.halves(0)
		u.halves(1)
		u.bytes(128)
		return
	case "Q80":
		u.bytes(128)
		return
	case "I4x32", "I4x64", "I4x128":
		u.bytes(15)
		u.bytes(128)
		u.headsI4()
		return
	case "Q40":
		u.nibblesQ40()
		u.scalesQ40()
	case "Q41":
		u.nibblesQ41()
		u.factorsQ41()
	}
	u.bytes(15)
	u.bytes(u.bias(8))
}

func (u *unpacker) nibblesQ40() reg.VecVirtual {
	return u.indices("nibbles", 16, perBlock(9, 1, 8, 4, 32))
}
func (u *unpacker) scalesQ40() reg.VecVirtual {
	return u.indices("factors", 16, perBlock(9, 0, 1, 4, 32))
}
func (u *unpacker) nibblesQ41() reg.VecVirtual {
	return u.indices("nibbles", 32, perBlock(5, 1, 4, 4, 16))
}
func (u *unpacker) factorsQ41() reg.VecVirtual { return u.indices("factors", 32, []int{0, 5, 10, 15}) }
func (u *unpacker) halves(i int) reg.VecVirtual {
	return u.indices(fmt.Sprint("half", i), 32, perBlock(8, 4*i, 4, 16, 16))
}

// split returns the halves of 64 bytes, each in the place of a half of a block.
func (u *unpacker) split(v reg.VecVirtual) (low, high reg.VecVirtual) {
	low, high = u.ZMM(), u.ZMM()
	u.VPANDD(u.bytes(15), v, low)
	u.VPSRLW(Imm(4), v, high)
	u.VPANDD(u.bytes(15), high, high)
	if !u.minima {
		u.VPADDB(u.bytes(u.bias(8)), low, low)
		u.VPADDB(u.bytes(u.bias(8)), high, high)
	}
	return low, high
}

func (u *unpacker) groupQ40(from reg.GPVirtual, rest bool) (q quad) {
	a, b := u.load(from, 0, 16, 0, rest), u.load(from, 8, 16, 1, rest)
	v, d := u.ZMM(), u.ZMM()
	u.VMOVDQA32(u.nibblesQ40(), v)
	u.VPERMI2W(b, a, v)
	u.VPERMW(a, u.scalesQ40(), d)
	u.VCVTPH2PS(d.AsX(), d.AsX())
	q.packed = v
	q.factors, q.stride = d, 1
	return q
}

func (u *unpacker) groupQ41(from reg.GPVirtual, rest bool) (q quad) {
	a, b := u.load(from, 0, 32, 0, rest), u.load(from, 16, 32, 1, rest)
	v, d := u.ZMM(), u.ZMM()
	u.VMOVDQA32(u.nibblesQ41(), v)
	u.VPERMI2D(b, a, v)
	u.VPERMD(a, u.factorsQ41(), d)
	u.VCVTPH2PS(d.AsX(), d.AsY())
	q.packed = v
	q.factors, q.stride = d, 2
	return q
}

func (u *unpacker) groupI8(from reg.GPVirtual, rest bool) (q quad) {
	a, b := u.load(from, 0, 8, 0, rest), u.load(from, 64, 8, 1, rest)
	u.VPXORD(u.bytes(128), a, a)
	u.VPXORD(u.bytes(128), b, b)
	for i, to := range []*reg.VecVirtual{&q.low, &q.high} {
		*to = u.ZMM()
		u.VMOVDQA32(u.halves(i), *to)
		u.VPERMI2D(b, a, *to)
	}
	return q
}

// groupQ80 reads each block by itself. A group that is not whole is copied before.
func (u *unpacker) groupQ80(from reg.GPVirtual, rest bool) (q quad) {
	at := func(b, disp int) Mem {
		if rest {
			return u.copied.Offset(34*b + disp)
		}
		return Mem{Base: from, Disp: 34*b + disp}
	}
	if rest {
		for b := range 3 {
			for _, half := range []int{2, 18} {
				v := u.XMM()
				u.VMOVDQU32(Mem{Base: from, Disp: 34*b + half}, v)
				u.VMOVDQU32(v, at(b, half))
			}
			bits := u.GP32()
			u.MOVWLZX(Mem{Base: from, Disp: 34 * b}, bits)
			u.MOVW(bits.As16(), at(b, 0))
			if b < 2 {
				u.CMPQ(u.left, Imm(uint64(32*(b+1))))
				u.JE(LabelRef("copied" + u.suffix))
			}
		}
		u.Label("copied" + u.suffix)
	}
	for i, to := range []*reg.VecVirtual{&q.low, &q.high} {
		v := u.ZMM()
		u.VMOVDQU32(at(0, 2+16*i), v.AsX())
		for b := 1; b < 4; b++ {
			u.VINSERTI32X4(Imm(uint64(b)), at(b, 2+16*i), v, v)
		}
		u.VPXORD(u.bytes(128), v, v)
		*to = v
	}
	d, bits := u.ZMM(), u.GP32()
	u.MOVWLZX(at(0, 0), bits)
	u.VMOVD(bits, d.AsX())
	for b := 1; b < 4; b++ {
		u.VPINSRW(Imm(uint64(b)), at(b, 0), d.AsX(), d.AsX())
	}
	u.VCVTPH2PS(d.AsX(), d.AsX())
	q.factors, q.stride = d, 1
	return q
}

// storeGroup makes a weightGroup.
func (u *unpacker) storeGroup(q quad, to reg.GPVirtual) {
	if q.packed != nil {
		q.low, q.high = u.split(q.packed)
	}
	u.VMOVDQU32(q.low, Mem{Base: to})
	u.VMOVDQU32(q.high, Mem{Base: to, Disp: 64})
	switch {
	case q.factors == nil:
		u.VMOVUPS(u.indices("one", 32, []int{0x3f800000, 0x3f800000, 0x3f800000, 0x3f800000}).AsX(), Mem{Base: to, Disp: wScales})
	case q.stride == 1:
		u.VMOVUPS(q.factors.AsX(), Mem{Base: to, Disp: wScales})
	default:
		d := u.YMM()
		u.VPERMPS(q.factors.AsY(), u.indices("order", 32, []int{0, 2, 4, 6, 1, 3, 5, 7}).AsY(), d)
		u.VMOVUPS(d.AsX(), Mem{Base: to, Disp: wScales})
		u.VEXTRACTF32X4(Imm(1), d, Mem{Base: to, Disp: wMinima})
	}
}

// prepareRest makes the masks of a group that is not whole, or the memory for a copy.
func (u *unpacker) prepareRest(rest reg.GPVirtual) {
	if u.name == "Q80" || u.int4() {
		size := (u.groupBytes() + 15) / 8 * 8
		u.copied = u.AllocLocal(size)
		zero := u.GP64()
		u.XORQ(zero, zero)
		for at := 0; at < size; at += 8 {
			u.MOVQ(zero, u.copied.Offset(at))
		}
		return
	}
	for range 2 {
		u.rest = append(u.rest, u.K())
	}
	u.masks(rest)
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
	u.rows(func(from, to reg.GPVirtual) {
		g.MOVQ(groups, left)
		g.TESTQ(left, left)
		g.JZ(LabelRef("rest"))
		g.Label("group")
		u.prefetchLines(u.fetch, u.fetchStep, 128)
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
