package vector

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/lean"
)

// Exponentials replaces each s_i by 4^(s_i-m) and returns their sum. m is at least every s_i.
func Exponentials[F cpu.Real](s []F, m F) F {
	if unsafe.Sizeof(m) == 4 {
		return F(exponentials32(*(*[]float32)(unsafe.Pointer(&s)), float32(m)))
	}
	var sum F
	for i, x := range s {
		e := lean.Exp4(x - m)
		s[i] = e
		sum += e
	}
	return sum
}

func exponentials32(s []float32, m float32) float32 {
	var a, b, c, d float32
	i := 0
	for ; i < len(s)-3; i += 4 {
		x := (*[4]float32)(s[i:])
		x[0], x[1], x[2], x[3] = exp4(x[0]-m), exp4(x[1]-m), exp4(x[2]-m), exp4(x[3]-m)
		a += x[0]
		b += x[1]
		c += x[2]
		d += x[3]
	}
	for ; i < len(s); i++ {
		s[i] = exp4(s[i] - m)
		a += s[i]
	}
	return (a + b) + (c + d)
}

// exp4 returns 4^x for x <= 0, within 2 units in the last place; below -63, where results would be
// subnormal, 0. 4^-Inf is 0 and 4^NaN is NaN.
//
// With n the integer nearest to 2x, 4^x = 2^n 4^f for -1/4 <= f <= 1/4: 2^n goes into the exponent, and
// 4^f is the polynomial in 2f of degree 6 whose greatest relative error, 2.6e-9, is the least among those
// that are exact at f = 0. The 2 is in the coefficients, so base 4 takes no more than base 2.
func exp4(x float32) float32 {
	const (
		// Adding 3*2^21 leaves no bits below a half: the sum is rounded to the nearest n/2.
		shift = 3 << 21

		c1 = 0.6931472149680414 * 2
		c2 = 0.24022652782877088 * 4
		c3 = 0.055503105509929686 * 8
		c4 = 0.009617692974769792 * 16
		c5 = 0.0013406643905945253 * 32
		c6 = 0.00015594677582896996 * 64
	)
	if x < -63 {
		return 0
	}
	t := x + shift
	f := x - (t - shift)
	y := (((((c6*f+c5)*f+c4)*f+c3)*f+c2)*f+c1)*f + 1
	// n is in the last bits of t, in two's complement, and is shifted to the exponent. A product, since y may be NaN.
	return y * math.Float32frombits(0x3f800000+math.Float32bits(t)<<23)
}
