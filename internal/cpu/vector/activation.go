package vector

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/lean"
)

// Activate replaces each element of x by f of the element. NaN stays NaN.
func Activate[F lean.Float](f attn.Activation, x []F) {
	p := unsafe.SliceData(x)
	switch k := &tiers[cpu.InUse()]; {
	case len(x) == 0 || f == attn.NoActivation:
	case unsafe.Sizeof(F(0)) == 8:
		activate64(f, unsafe.Slice((*float64)(unsafe.Pointer(p)), len(x)))
	case f == attn.ReLU:
		k.relu((*float32)(unsafe.Pointer(p)), len(x))
	case f == attn.GELU:
		k.gelu((*float32)(unsafe.Pointer(p)), len(x))
	case f == attn.GELUTanh:
		sigmoidTiers[cpu.InUse()]((*float32)(unsafe.Pointer(p)), len(x), tanhLinear, tanhCube)
	case f == attn.SiLU:
		sigmoidTiers[cpu.InUse()]((*float32)(unsafe.Pointer(p)), len(x), -1, 0)
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

// The error function in float32, to 2.5 ulp. For z in [0, erfNear)
//
//	erf(z) = z + z A(z^2)
//
// and from there on, since erfc(z)^(-1/8) is nearly a polynomial,
//
//	erf(z) = 1 - 1/B(z)^8
//
// which is 1 for large B, and NaN for NaN. A and B are minimax: with exact arithmetic the errors are 0.1 and 0.6 of
// 2^-24. The coefficients are in the order of the powers.
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

// reluGo is
//
//	for i := range n {
//		dst[i] = max(dst[i], 0)
//	}
//
// NaN stays NaN.
func reluGo(dst *float32, n int) { rectify(unsafe.Slice(dst, n)) }

func rectify[F cpu.Real](dst []F) {
	for i, x := range dst {
		dst[i] = max(x, 0)
	}
}
