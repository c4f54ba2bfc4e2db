package vector

import (
	"math"
	"unsafe"
)

// SiLU is v/(1 + exp(-v)), and GELU by tanh is v/(1 + exp(u)) with the u below: 1 + tanh(u) is 2/(1 + exp(-2u)), and
// -2 sqrt(2/pi) (v + 0.044715 v^3) is v (tanhLinear + tanhCube v^2).
const (
	tanhLinear = -2 * math.Sqrt2 / math.SqrtPi
	tanhCube   = tanhLinear * 0.044715

	mostSquare = 1e30
)

// bySigmoidGo is
//
//	for i := range n {
//		dst[i] = dst[i] / (1 + exp(dst[i]*(linear + cubic*dst[i]*dst[i])))
//	}
//
// to 2^-22 of dst[i]. NaN stays NaN, and -Inf, for which exp is infinite too, becomes it.
func bySigmoidGo(dst *float32, n int, linear, cubic float32) {
	y := unsafe.Slice(dst, n)
	for i, v := range y {
		square := min(v*v, mostSquare) // an infinite square times 0 would be NaN
		y[i] = v / (1 + exp32(v*(linear+cubic*square)))
	}
}

// exp32 returns exp(x), to 2 units in the last place; 0 below -87, where it would soon be subnormal, and +Inf above
// 88.3. With n the integer nearest to x log2(e), exp(x) is 2^n times exp of the rest, by exp4's polynomial of degree
// 6.
func exp32(x float32) float32 {
	const (
		shift = 3 << 22 // adding it leaves no bits below 1
		high  = 0.693359375
		low   = math.Ln2 - high

		c1 = 0.6931472149680414 / math.Ln2
		c2 = 0.24022652782877088 / (math.Ln2 * math.Ln2)
		c3 = 0.055503105509929686 / (math.Ln2 * math.Ln2 * math.Ln2)
		c4 = 0.009617692974769792 / (math.Ln2 * math.Ln2 * math.Ln2 * math.Ln2)
		c5 = 0.0013406643905945253 / (math.Ln2 * math.Ln2 * math.Ln2 * math.Ln2 * math.Ln2)
		c6 = 0.00015594677582896996 / (math.Ln2 * math.Ln2 * math.Ln2 * math.Ln2 * math.Ln2 * math.Ln2)
	)
	switch {
	case x < -87:
		return 0
	case x > 88.3:
		return float32(math.Inf(1))
	}
	n := float32(x*(1/math.Ln2)+shift) - shift
	r := float32(x-n*high) - n*low
	p := 1 + r*(c1+r*(c2+r*(c3+r*(c4+r*(c5+r*c6)))))
	if x != x {
		return x
	}
	return p * math.Float32frombits(uint32(int32(n)+127)<<23)
}
