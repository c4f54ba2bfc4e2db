package cpu

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/lean"
)

// Activate replaces each element of x by f of it. NaN stays NaN.
func Activate[F lean.Float](f attn.Activation, x []F) {
	p := unsafe.SliceData(x)
	switch k := linearTiers[inUse]; {
	case len(x) == 0 || f == attn.NoActivation:
	case unsafe.Sizeof(F(0)) == 8:
		activate64(f, unsafe.Slice((*float64)(unsafe.Pointer(p)), len(x)))
	case f == attn.ReLU:
		k.relu((*float32)(unsafe.Pointer(p)), len(x))
	case f == attn.GELU:
		k.gelu((*float32)(unsafe.Pointer(p)), len(x))
	case f == attn.GELUTanh:
		geluTanhGo(unsafe.Slice((*float32)(unsafe.Pointer(p)), len(x)))
	case f == attn.SiLU:
		siluGo(unsafe.Slice((*float32)(unsafe.Pointer(p)), len(x)))
	}
}

func activate64(f attn.Activation, x []float64) {
	switch f {
	case attn.ReLU:
		rectify(x)
	case attn.GELU:
		for i, v := range x {
			x[i] = v / 2 * math.Erfc(-v/math.Sqrt2)
		}
	case attn.GELUTanh:
		for i, v := range x {
			x[i] = v / (1 + math.Exp(v*(tanhLinear+tanhCube*v*v)))
		}
	case attn.SiLU:
		for i, v := range x {
			x[i] = v / (1 + math.Exp(-v))
		}
	}
}

// The error function in float32, to 2.5 ulp: of z in [0, erfNear)
//
//	erf(z) = z + z A(z^2)
//
// and from there on, since erfc(z)^(-1/8) is nearly a polynomial,
//
//	erf(z) = 1 - 1/B(z)^8
//
// which is 1 where B is large, and NaN for NaN. A and B are minimax: with exact arithmetic the errors are
// 0.1 and 0.6 of 2^-24. The coefficients are in the order of the powers.
const erfNear = 1.25

var (
	erfA = [...]float32{0.12837917, -0.3761263, 0.11283675, -0.026860248, 0.0052090166, -0.00083395705, 0.00010393879, -7.5729686e-06}
	erfB = [...]float32{1.0280553, 0.030905148, 0.27036622, -0.13514522, 0.083998404, -0.021089798, 0.0030652343}
)

func erf32(x float32) float32 {
	z := math.Float32frombits(math.Float32bits(x) &^ (1 << 31))
	var y float32
	if z < erfNear {
		u := z * z
		y = z + z*(erfA[0]+u*(erfA[1]+u*(erfA[2]+u*(erfA[3]+u*(erfA[4]+u*(erfA[5]+u*(erfA[6]+u*erfA[7])))))))
	} else {
		b := erfB[0] + z*(erfB[1]+z*(erfB[2]+z*(erfB[3]+z*(erfB[4]+z*(erfB[5]+z*erfB[6])))))
		b *= b
		b *= b
		b *= b
		y = 1 - 1/b
	}
	return math.Float32frombits(math.Float32bits(y) | math.Float32bits(x)&(1<<31))
}

// geluGo is
//
//	for i := range n {
//		dst[i] = dst[i]/2 * (1 + erf(dst[i]/sqrt(2)))
//	}
//
// which is off by no more than 2^-22 of dst[i]. (Of the result, which is small where dst[i] is below -1,
// that is more: the sum loses digits, as it does elsewhere.) NaN stays NaN, and -Inf, 0 times -Inf, becomes it.
func geluGo(dst *float32, n int) {
	y := unsafe.Slice(dst, n)
	for i, v := range y {
		y[i] = 0.5 * v * (1 + erf32(v*(1/math.Sqrt2)))
	}
}

// 1 + tanh(u) is 2/(1 + exp(-2u)), and -2 sqrt(2/pi) (v + 0.044715 v^3) is v (tanhLinear + tanhCube v^2).
const (
	tanhLinear = -2 * math.Sqrt2 / math.SqrtPi
	tanhCube   = tanhLinear * 0.044715
)

// geluTanhGo is
//
//	for i := range y {
//		y[i] = y[i]/2 * (1 + tanh(sqrt(2/pi) * (y[i] + 0.044715*y[i]*y[i]*y[i])))
//	}
//
// to 2^-22 of y[i]. NaN stays NaN, and -Inf becomes it.
func geluTanhGo(y []float32) {
	for i, v := range y {
		y[i] = v / (1 + exp32(v*(tanhLinear+tanhCube*v*v)))
	}
}

// siluGo is
//
//	for i := range y {
//		y[i] = y[i] / (1 + exp(-y[i]))
//	}
//
// to 2^-22 of y[i]. NaN stays NaN, and -Inf becomes it.
func siluGo(y []float32) {
	for i, v := range y {
		y[i] = v / (1 + exp32(-v))
	}
}

// exp32 is exp(x), to 2 units in the last place; 0 below -87, where it would soon be subnormal, and +Inf above
// 88.3. With n the integer nearest to x log2(e), it is 2^n times exp of the rest, by exp4's polynomial of degree 6.
func exp32(x float32) float32 {
	const (
		shift = 3 << 22 // adding it leaves no bits for less than 1
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
