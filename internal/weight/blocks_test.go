package weight

import (
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"
)

// element returns element i of a block as the description of the format has it, in float64.
func element(f Format, b []byte, i int) float64 {
	number := func(at int) float64 { return float64(half.Float16(uint16(b[at]) | uint16(b[at+1])<<8).Float32()) }
	nibble := func(at int) float64 { // of Q4_0 and others
		if i < 16 {
			return float64(b[at+i] & 15)
		}
		return float64(b[at+i-16] >> 4)
	}
	switch f {
	case Q8_0:
		return number(0) * float64(int8(b[2+i]))
	case Q4_0:
		return number(0) * (nibble(2) - 8)
	case Q4_1:
		return number(0)*nibble(4) + number(2)
	case Q5_0:
		return number(0) * (nibble(6) + 16*float64(b[2+i/8]>>(i%8)&1) - 16)
	case Q5_1:
		return number(0)*(nibble(8)+16*float64(b[4+i/8]>>(i%8)&1)) + number(2)
	case Q4_K, Q5_K:
		run, x := i/32, b[4:]
		scale, minimum := float64(x[run%4]&63), float64(x[4+run%4]&63)
		if run >= 4 {
			scale, minimum = float64(x[4+run]&15)+16*float64(x[run-4]>>6), float64(x[4+run]>>4)+16*float64(x[run]>>6)
		}
		at, high := 16, 0.0
		if f == Q5_K {
			at, high = 48, 16*float64(b[16+i%32]>>run&1)
		}
		return number(0)*scale*(float64(b[at+run/2*32+i%32]>>(run%2*4)&15)+high) - number(2)*minimum
	case Q6_K:
		half, of := i/128, i%128/32
		low := b[64*half+of%2*32+i%32] >> (of / 2 * 4) & 15
		high := b[128+32*half+i%32] >> (2 * of) & 3
		return number(208) * float64(int8(b[192+i/16])) * (float64(low) + 16*float64(high) - 32)
	}
	if bytes := map[Format]int{Int4_32: 19, Int4_64: 35, Int4_128: 67}[f]; bytes == len(b) {
		run := b[3+i/32*16:]
		return number(0) * (float64(run[i%16]>>(i%32/16*4)&15) - float64(int8(b[2])))
	}
	panic(f.String())
}

// oddScales are numbers of 16 bits that scales and minima may have: zeros, infinities, NaN, subnormal and extreme ones.
var oddScales = []uint16{0, 1 << 15, 1, 0x83ff, 0x400, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e01}

// factors are the offsets of the 16-bit numbers in a block.
var factors = map[Format][]int{Q8_0: {0}, Q4_0: {0}, Q4_1: {0, 2}, Q5_0: {0}, Q5_1: {0, 2}, Q4_K: {0, 2}, Q5_K: {0, 2}, Q6_K: {208}, Int4_32: {0}, Int4_64: {0}, Int4_128: {0}}

func formatsInBlocks() (all []Format) {
	for f := range Format(Formats) {
		if f.Block() > 1 {
			all = append(all, f)
		}
	}
	return all
}

// TestBlocks: decoding has the float32 number that is nearest to each element.
func TestBlocks(t *testing.T) {
	rng := reftest.Rand(t)
	for _, f := range formatsInBlocks() {
		if len(factors[f]) == 0 {
			t.Fatalf("%v has no factors in this test", f)
		}
		for try := range 200 {
			blocks := 1 + rng.IntN(5)
			src := make([]byte, f.Bytes()*blocks+1)[1:] // blocks are not aligned
			for i := range src {
				src[i] = byte(rng.Uint32())
			}
			for b := range blocks {
				for _, at := range factors[f] {
					x := half.FromFloat32(float32(rng.NormFloat64()))
					if try%3 == 0 {
						x = half.Float16(oddScales[rng.IntN(len(oddScales))])
					}
					src[b*f.Bytes()+at], src[b*f.Bytes()+at+1] = byte(x), byte(x>>8)
				}
			}
			for at := 2; f >= Int4_32 && f <= Int4_128 && at < len(src); at += f.Bytes() {
				src[at] %= MaxInt4Zero + 1
			}
			got := make([]float32, blocks*f.Block())
			Decode(f, got, unsafe.Pointer(&src[0]))
			for i, v := range got {
				want := float32(element(f, src[i/f.Block()*f.Bytes():][:f.Bytes()], i%f.Block()))
				if math.Float32bits(v) != math.Float32bits(want) && (v == v || want == want) {
					t.Fatalf("%v: element %d of %d is %v, want %v", f, i, len(got), v, want)
				}
			}
		}
	}
}

// TestRoundInt8: rounding is to the nearest integer of a scale, and what is not finite is an error.
func TestRoundInt8(t *testing.T) {
	rng := reftest.Rand(t)
	for range 200 {
		x, q := make([]float32, 1+rng.IntN(70)), make([]int8, 70)
		size := float32(math.Exp2(float64(rng.IntN(250) - 130)))
		for i := range x {
			x[i] = float32(rng.NormFloat64()) * size
		}
		largest := 0.0
		for _, v := range x {
			largest = max(largest, math.Abs(float64(v)))
		}
		scale, ok := RoundInt8(q, x)
		if !ok || scale < 0 || largest >= 0x1p-120 && math.Abs(float64(scale)*127-largest) > largest*0x1p-22 {
			t.Fatalf("scale %v of %v, %v", scale, largest, ok)
		}
		got := make([]float32, len(x))
		Decode(Int8, got, unsafe.Pointer(&q[0]))
		for i, v := range got {
			if off := math.Abs(float64(v)*float64(scale) - float64(x[i])); off > float64(scale)*0.50001 && off > 0x1p-120 {
				t.Fatalf("%v became %v of %v", x[i], v, scale)
			}
		}
	}
	for _, bad := range []float32{float32(math.NaN()), float32(math.Inf(1)), float32(math.Inf(-1))} {
		x := []float32{1, 2, bad, 4}
		rand.Shuffle(len(x), func(i, j int) { x[i], x[j] = x[j], x[i] })
		if _, ok := RoundInt8(make([]int8, 4), x); ok {
			t.Errorf("%v was rounded", x)
		}
	}
	if scale, ok := RoundInt8(make([]int8, 2), []float32{0, 0}); !ok || scale != 0 {
		t.Errorf("zeros have the scale %v, %v", scale, ok)
	}
}

// TestRoundInt4: rounding has an error of at most that of the largest scale, whose elements are within half a step, and what is not
// finite is an error.
func TestRoundInt4(t *testing.T) {
	rng := reftest.Rand(t)
	for _, f := range []Format{Int4_32, Int4_64, Int4_128} {
		for try := range 200 {
			groups := 1 + rng.IntN(3)
			x, q := make([]float32, groups*f.Block()), make([]byte, groups*f.Bytes())
			size := float32(math.Exp2(float64(rng.IntN(20) - 12)))
			for i := range x {
				if x[i] = float32(rng.NormFloat64()) * size; rng.IntN(50) == 0 {
					x[i] *= 20
				}
				if try%5 == 0 { // a group may have one sign
					x[i] = -float32(math.Abs(float64(x[i])))
				}
			}
			if try%7 == 0 {
				clear(x[:f.Block()])
			}
			if scale, ok := Round(f, q, x); scale != 1 || !ok {
				t.Fatalf("%v of %v: %v, %v", f, x, scale, ok)
			}
			if at, zero := f.BadZero(q); at >= 0 {
				t.Fatalf("%v: block %d has the zero %d", f, at, zero)
			}
			got := make([]float32, len(x))
			Decode(f, got, unsafe.Pointer(&q[0]))
			for g := range groups {
				least, most, sum := 0.0, 0.0, 0.0
				for i := g * f.Block(); i < (g+1)*f.Block(); i++ {
					least, most = min(least, float64(x[i])), max(most, float64(x[i]))
					sum += math.Pow(float64(got[i]-x[i]), 2)
				}
				step := (most - least) / 15
				if bound := float64(f.Block()) * math.Pow(step/2*1.01+step*0.5, 2); sum > bound { // of the integer, and of the zero
					t.Fatalf("%v: the squared error is %v of %v, want at most %v", f, sum, x, bound)
				}
			}
		}
		for _, bad := range []float32{float32(math.NaN()), float32(math.Inf(1)), float32(math.Inf(-1)), math.MaxFloat32} {
			x := make([]float32, f.Block())
			x[rng.IntN(len(x))] = bad
			if _, ok := Round(f, make([]byte, f.Bytes()), x); ok {
				t.Errorf("%v: %v was rounded", f, bad)
			}
		}
	}
}

// TestRoundE4M3: rounding is to the nearest number of a scale, and what is not finite is an error.
func TestRoundE4M3(t *testing.T) {
	rng := reftest.Rand(t)
	for range 200 {
		x, q := make([]float32, 1+rng.IntN(70)), make([]byte, 70)
		size := float32(math.Exp2(float64(rng.IntN(220) - 100)))
		for i := range x {
			x[i] = float32(rng.NormFloat64()) * size
		}
		largest := 0.0
		for _, v := range x {
			largest = max(largest, math.Abs(float64(v)))
		}
		scale, ok := Round(E4M3, q[:len(x)], x)
		if !ok || math.Abs(float64(scale)*448-largest) > largest*0x1p-22 || BadE4M3(q) >= 0 {
			t.Fatalf("scale %v of %v, %v", scale, largest, ok)
		}
		m := Matrix{Format: E4M3, Ptr: unsafe.Pointer(&q[0]), Len: len(x), Scales: []float32{scale}}
		got := make([]float32, len(x))
		m.Row(got, 0, nil)
		for i, v := range got {
			if off := math.Abs(float64(v) - float64(x[i])); off > math.Abs(float64(x[i]))/16*1.0001 && off > float64(scale)*0x1p-10*1.0001 {
				t.Fatalf("%v became %v with the scale %v", x[i], v, scale)
			}
		}
	}
	for _, bad := range []float32{float32(math.NaN()), float32(math.Inf(1)), float32(math.Inf(-1))} {
		if _, ok := Round(E4M3, make([]byte, 2), []float32{1, bad}); ok {
			t.Errorf("%v was rounded", bad)
		}
	}
	if scale, ok := Round(E4M3, make([]byte, 2), []float32{math.MaxFloat32, -1}); !ok || scale*448-scale*448 != 0 {
		t.Errorf("the largest number: the scale is %v, %v", scale, ok)
	}
	if scale, ok := Round(E4M3, make([]byte, 2), []float32{0, 0x1p-120}); !ok || scale != 0 {
		t.Errorf("tiny numbers have the scale %v, %v", scale, ok)
	}
	if at := BadE4M3([]byte{0x7e, 0xfe, 0xff}); at != 2 {
		t.Errorf("NaN is at %d", at)
	}
}

// TestE4M3Scales: a scale is bad if 448 times the scale is not finite.
func TestE4M3Scales(t *testing.T) {
	rng := reftest.Rand(t)
	for range 200 {
		scales := []float32{0, math.MaxFloat32 / 448, -math.MaxFloat32 / 448, 0x1p-149}
		for range 20 {
			scales = append(scales, float32(rng.NormFloat64()*math.Exp2(float64(rng.IntN(180)-100))))
		}
		if at := BadE4M3Scale(scales); at >= 0 {
			t.Fatalf("%v is refused", scales[at])
		}
		want := rng.IntN(len(scales))
		scales[want] = []float32{math.MaxFloat32 / 447, -math.MaxFloat32, float32(math.NaN()), float32(math.Inf(1)), float32(math.Inf(-1))}[rng.IntN(5)]
		if at := BadE4M3Scale(scales); at != want {
			t.Fatalf("scale %d of %v is bad, and not %d", want, scales, at)
		}
	}
}
