package main

import (
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// Formats of five and six bits, and those in blocks of 256 elements.

// fifthConstants returns which byte of four has the bit of each of 32 integers, and the bit.
func (u *unpacker) fifthConstants() (order, bits reg.VecVirtual) {
	get := func(name string, words ...uint32) reg.VecVirtual {
		if u.constants[name] == nil {
			v := u.YMM()
			u.VMOVDQU(u.words(name, words...), v)
			u.constants[name] = v
		}
		return u.constants[name]
	}
	order = get("fifthOrder", 0, 0, 0x01010101, 0x01010101, 0x02020202, 0x02020202, 0x03030303, 0x03030303)
	bits = get("fifthBits", 0x08040201, 0x80402010, 0x08040201, 0x80402010, 0x08040201, 0x80402010, 0x08040201, 0x80402010)
	return order, bits
}

// fiveBits stores integers of 5 bits: fifth has the fifth bits, and from the lower bits.
func (u *unpacker) fiveBits(fifth, from Mem, to reg.GPVirtual, b int) {
	order, bits := u.fifthConstants()
	h, v, high := u.YMM(), u.YMM(), u.XMM()
	u.VPBROADCASTD(fifth, h)
	u.VPSHUFB(order, h, h)
	u.VPAND(bits, h, h)
	u.VPCMPEQB(bits, h, h)
	u.VPAND(u.bytes(16), h, h)
	u.VMOVDQU(from, v.AsX())
	u.VPSRLW(Imm(4), v.AsX(), high)
	u.VINSERTI128(Imm(1), high, v, v)
	u.VPAND(u.bytes(15), v, v)
	u.VPOR(h, v, v)
	if !u.minima {
		u.VPADDB(u.bytes(u.bias(16)), v, v)
	}
	u.putRun(v, to, b)
}

func (u *unpacker) blockQ50(from, to reg.GPVirtual, b int) {
	u.fiveBits(Mem{Base: from, Disp: 22*b + 2}, Mem{Base: from, Disp: 22*b + 6}, to, b)
	u.scale(Mem{Base: from, Disp: 22 * b}, to, b)
}

func (u *unpacker) blockQ51(from, to reg.GPVirtual, b int) {
	u.fiveBits(Mem{Base: from, Disp: 24*b + 4}, Mem{Base: from, Disp: 24*b + 8}, to, b)
	u.scaleAndMinimum(Mem{Base: from, Disp: 24 * b}, to, b)
}

// superConstants sets the registers that blocks of 256 elements need.
func (u *unpacker) superConstants() {
	u.bytes(15)
	switch u.name {
	case "Q4K", "Q5K":
		u.sign()
		if u.name == "Q5K" {
			u.bytes(1)
		}
	case "Q6K":
		u.bytes(3)
		u.bytes(u.bias(32))
		u.evenOdd()
	}
}

func (u *unpacker) sign() reg.VecVirtual {
	if u.constants["sign"] == nil {
		v := u.YMM()
		u.VPBROADCASTD(u.words("sign", 1<<31), v)
		u.constants["sign"] = v
	}
	return u.constants["sign"]
}

func (u *unpacker) evenOdd() reg.VecVirtual {
	if u.constants["evenOdd"] == nil {
		v := u.YMM()
		u.VMOVDQU(u.words("evenOdd", 0, 2, 4, 6, 1, 3, 5, 7), v)
		u.constants["evenOdd"] = v
	}
	return u.constants["evenOdd"]
}

// half returns a number of 16 bits as float32, in all lanes.
func (u *unpacker) half(from Mem) reg.VecVirtual {
	bits, v := u.GP32(), u.YMM()
	u.MOVWLZX(from, bits)
	u.VMOVD(bits, v.AsX())
	u.VCVTPH2PS(v.AsX(), v.AsX())
	u.VBROADCASTSS(v.AsX(), v)
	return v
}

// sixBits stores the scales and the minima of two groups: see sixBits of package weight.
func (u *unpacker) sixBits(from, to reg.GPVirtual) {
	word := func(i int) reg.GPVirtual {
		r := u.GP32()
		u.MOVL(Mem{Base: from, Disp: 4 + 4*i}, r)
		return r
	}
	// eight returns 4 + 4 bytes as float32.
	eight := func(first, last reg.GPVirtual) reg.VecVirtual {
		v := u.YMM()
		u.VMOVD(first, v.AsX())
		u.VPINSRD(Imm(1), last, v.AsX(), v.AsX())
		u.VPMOVZXBD(v.AsX(), v)
		u.VCVTDQ2PS(v, v)
		return v
	}
	for i := range 2 { // scales, minima
		low, upper, last := word(i), word(i), word(2)
		u.ANDL(U32(0x3f3f3f3f), low)
		u.SHRL(Imm(2), upper)
		u.ANDL(U32(0x30303030), upper)
		if i == 1 {
			u.SHRL(Imm(4), last)
		}
		u.ANDL(U32(0x0f0f0f0f), last)
		u.ORL(upper, last)
		v := eight(low, last)
		u.VMULPS(u.half(Mem{Base: from, Disp: 2 * i}), v, v)
		at := wScales
		if i == 1 {
			at = wMinima
			u.VXORPS(u.sign(), v, v)
		}
		u.VMOVUPS(v.AsX(), Mem{Base: to, Disp: at})
		u.VEXTRACTF128(Imm(1), v, Mem{Base: to, Disp: wSize + at})
	}
}

// putRun stores 32 integers: run 4*i + b is block b of group i.
func (u *unpacker) putRun(v reg.VecVirtual, to reg.GPVirtual, run int) {
	m, b := Mem{Base: to, Disp: run / 4 * wSize}, run%4
	if u.isa == avx2 {
		u.VMOVDQU(v, m.Offset(32*b))
		return
	}
	u.VMOVDQU(v.AsX(), m.Offset(16*b))
	u.VEXTRACTI128(Imm(1), v, m.Offset(64+16*b))
}

// runs stores the integers of Q4_K, and with fifth bits those of Q5_K.
func (u *unpacker) runs(from, to reg.GPVirtual, at int, fifth reg.VecVirtual) {
	for j := range 4 {
		low, high := u.YMM(), u.YMM()
		u.VMOVDQU(Mem{Base: from, Disp: at + 32*j}, low)
		u.VPSRLW(Imm(4), low, high)
		u.VPAND(u.bytes(15), low, low)
		u.VPAND(u.bytes(15), high, high)
		for i, v := range []reg.VecVirtual{low, high} {
			if fifth != nil {
				bit := u.YMM()
				u.VPSRLW(Imm(uint64(2*j+i)), fifth, bit)
				u.VPAND(u.bytes(1), bit, bit)
				u.VPSLLW(Imm(4), bit, bit)
				u.VPOR(bit, v, v)
			}
			u.putRun(v, to, 2*j+i)
		}
	}
}

func (u *unpacker) superQ4K(from, to reg.GPVirtual) {
	u.sixBits(from, to)
	u.runs(from, to, 16, nil)
}

func (u *unpacker) superQ5K(from, to reg.GPVirtual) {
	u.sixBits(from, to)
	fifth := u.YMM()
	u.VMOVDQU(Mem{Base: from, Disp: 16}, fifth)
	u.runs(from, to, 48, fifth)
}

func (u *unpacker) superQ6K(from, to reg.GPVirtual) {
	d := u.half(Mem{Base: from, Disp: 208})
	for half := range 2 {
		scales := u.YMM()
		u.VPMOVSXBD(Mem{Base: from, Disp: 192 + 8*half}, scales)
		u.VCVTDQ2PS(scales, scales)
		u.VMULPS(d, scales, scales)
		u.VPERMPS(scales, u.evenOdd(), scales)
		u.VMOVUPS(scales, Mem{Base: to, Disp: half*wSize + wScales})
		upper := u.YMM()
		u.VMOVDQU(Mem{Base: from, Disp: 128 + 32*half}, upper)
		for i := range 4 {
			v, h := u.YMM(), u.YMM()
			u.VMOVDQU(Mem{Base: from, Disp: 64*half + 32*(i%2)}, v)
			if i >= 2 {
				u.VPSRLW(Imm(4), v, v)
			}
			u.VPAND(u.bytes(15), v, v)
			u.VPSRLW(Imm(uint64(2*i)), upper, h)
			u.VPAND(u.bytes(3), h, h)
			u.VPSLLW(Imm(4), h, h)
			u.VPOR(h, v, v)
			u.VPADDB(u.bytes(u.bias(32)), v, v)
			u.putRun(v, to, 4*half+i)
		}
	}
}
