package gguf

// format is a type of 16 bits.
type format bool

const (
	binary16 format = false
	bfloat16 format = true
)

// round rounds src to nearest, ties to even. It returns the first element that is finite and whose rounding is not,
// or -1. Its calls are direct, so that arguments stay off the heap.
func (f format) round(dst []uint16, src []float32) int {
	if f == bfloat16 {
		return toBFloat16(dst, src)
	}
	return toFloat16(dst, src)
}

// decoder16 decodes whole blocks and rounds them. A type of 4 bits has 16 numbers for each scale, and rounding the 16
// is less work than rounding the elements. False: some of the 16 have no finite rounding, and an element may be one.
type decoder16 func(dst []uint16, src []byte, f format) bool

func decode16Q4_0(dst []uint16, src []byte, f format) bool {
	for ; len(dst) >= 32; dst, src = dst[32:], src[18:] {
		b := (*[18]byte)(src)
		d := load16(b[:])
		var exact [16]float32
		for q := range exact {
			exact[q] = d * signed[byte(q-8)]
		}
		var of [16]uint16
		if f.round(of[:], exact[:]) >= 0 {
			return false
		}
		y := (*[32]uint16)(dst)
		for i, x := range b[2:] {
			y[i], y[16+i] = of[x&15], of[x>>4]
		}
	}
	return true
}

func decode16Q4_1(dst []uint16, src []byte, f format) bool {
	for ; len(dst) >= 32; dst, src = dst[32:], src[20:] {
		b := (*[20]byte)(src)
		var of [16]uint16
		if !numbers(&of, load16(b[:]), load16(b[2:]), f) {
			return false
		}
		y := (*[32]uint16)(dst)
		for i, x := range b[4:] {
			y[i], y[16+i] = of[x&15], of[x>>4]
		}
	}
	return true
}

func decode16Q4_K(dst []uint16, src []byte, f format) bool {
	for ; len(dst) >= 256; dst, src = dst[256:], src[144:] {
		b := (*[144]byte)(src)
		d, m, scales := load16(b[:]), load16(b[2:]), (*[12]byte)(b[4:])
		for j := range 4 {
			y, qs := (*[64]uint16)(dst[64*j:]), (*[32]byte)(b[16+32*j:])
			d1, m1 := scalesK(scales, 2*j)
			d2, m2 := scalesK(scales, 2*j+1)
			var low, upper [16]uint16
			if !numbers(&low, d*d1, -(m*m1), f) || !numbers(&upper, d*d2, -(m*m2), f) {
				return false
			}
			for i, x := range qs {
				y[i], y[32+i] = low[x&15], upper[x>>4]
			}
		}
	}
	return true
}

// numbers has d*q + m for each q, rounded.
func numbers(of *[16]uint16, d, m float32, f format) bool {
	var exact [16]float32
	for q := range exact {
		exact[q] = float32(d*whole[q]) + m
	}
	return f.round(of[:], exact[:]) < 0
}
