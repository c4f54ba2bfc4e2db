package main

import (
	"slices"
	"strings"

	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// int4 reports whether blocks have a zero each.
func (f blockFormat) int4() bool { return strings.HasPrefix(f.name, "I4x") }

// blockI4 unpacks 32 elements of a block of INT4.
func (u *unpacker) blockI4(from, to reg.GPVirtual, b int) {
	runs := u.elements / 32
	at := b / runs * u.blockFormat.bytes
	low, high := u.nibbles(Mem{Base: from, Disp: at + 3 + 16*(b%runs)})
	zero := u.XMM()
	u.VPBROADCASTB(Mem{Base: from, Disp: at + 2}, zero)
	u.VPSUBB(zero, u.bytes(u.bias(0)).AsX(), zero)
	for half, v := range []reg.VecVirtual{low, high} {
		u.VPADDB(zero, v, v)
		u.put(v, to, b, half)
	}
	u.scale(Mem{Base: from, Disp: at}, to, b)
}

// headsI4 returns indices of bytes in the first words of the blocks of a group: those of the scales of 32 elements each, and the zero
// of each byte.
func (u *unpacker) headsI4() (scales, zeros reg.VecVirtual) {
	var s, z []int
	for b := range 4 {
		at := b / (u.elements / 32) * 4
		s = append(s, at, at+1)
		z = append(z, slices.Repeat([]int{at + 2}, 16)...)
	}
	return u.indices("scales", 8, s), u.indices("zeros", 8, z)
}

// groupI4 reads the blocks of INT4 of a group. A group that is not whole is copied before.
func (u *unpacker) groupI4(from reg.GPVirtual, rest bool) (q quad) {
	bytes, blocks, runs := u.blockFormat.bytes, 128/u.elements, u.elements/32
	at := func(b, disp int) Mem {
		if rest {
			return u.copied.Offset(bytes*b + disp)
		}
		return Mem{Base: from, Disp: bytes*b + disp}
	}
	if rest {
		for b := range blocks - 1 {
			for r := range runs {
				v := u.XMM()
				u.VMOVDQU32(Mem{Base: from, Disp: bytes*b + 3 + 16*r}, v)
				u.VMOVDQU32(v, at(b, 3+16*r))
			}
			head := u.GP32()
			u.MOVL(Mem{Base: from, Disp: bytes * b}, head)
			u.MOVL(head, at(b, 0))
			if b < blocks-2 {
				u.CMPQ(u.left, Imm(uint64(u.elements*(b+1))))
				u.JE(LabelRef("copied" + u.suffix))
			}
		}
		u.Label("copied" + u.suffix)
	}
	v, heads := u.ZMM(), u.ZMM()
	u.VMOVD(at(0, 0), heads.AsX())
	switch blocks {
	case 1:
		u.VMOVDQU32(at(0, 3), v)
	case 2:
		u.VMOVDQU32(at(0, 3), v.AsY())
		u.VINSERTI64X4(Imm(1), at(1, 3), v, v)
	case 4:
		u.VMOVDQU32(at(0, 3), v.AsX())
		for b := 1; b < 4; b++ {
			u.VINSERTI32X4(Imm(uint64(b)), at(b, 3), v, v)
		}
	}
	for b := 1; b < blocks; b++ {
		u.VPINSRD(Imm(uint64(b)), at(b, 0), heads.AsX(), heads.AsX())
	}
	scales, zeros := u.headsI4()
	d, zero := u.ZMM(), u.ZMM()
	u.VPSHUFB(scales.AsX(), heads.AsX(), d.AsX())
	u.VCVTPH2PS(d.AsX(), d.AsX())
	u.VSHUFI32X4(Imm(0), heads, heads, zero)
	u.VPSHUFB(zeros, zero, zero)
	u.VPSUBB(zero, u.bytes(128), zero)
	q.low, q.high = u.ZMM(), u.ZMM()
	u.VPANDD(u.bytes(15), v, q.low)
	u.VPSRLW(Imm(4), v, q.high)
	u.VPANDD(u.bytes(15), q.high, q.high)
	u.VPADDB(zero, q.low, q.low)
	u.VPADDB(zero, q.high, q.high)
	q.factors, q.stride = d, 1
	return q
}
