package half

import (
	"math"
	"math/rand/v2"
	"testing"
)

// TestQ4Numbers: what is decoded is the nearest of the numbers that the scale allows, zeros stay zeros, and numbers that a Q4 has stay
// as they are.
func TestQ4Numbers(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		var x, y [Q4Columns]float32
		size := math.Exp2(float64(rng.IntN(200) - 100))
		for i := range x {
			x[i] = float32(rng.NormFloat64() * size)
		}
		x[rng.IntN(len(x))] = 0
		var q [1]Q4
		EncodeQ4(q[:], x[:])
		DecodeQ4(y[:], q[:])
		scale := q[0].Scale()
		for i := range x {
			nearest := math.Inf(1)
			for _, n := range q4s {
				nearest = min(nearest, math.Abs(float64(x[i])-float64(n)*float64(scale)))
			}
			if off := math.Abs(float64(x[i]) - float64(y[i])); off > nearest*(1+1e-5)+1e-6*float64(size) || x[i] == 0 && y[i] != 0 {
				t.Fatalf("%v is stored as %v, scale %v", x[i], y[i], scale)
			}
		}
		again := q
		EncodeQ4(again[:], y[:])
		var z [Q4Columns]float32
		if DecodeQ4(z[:], again[:]); z != y {
			t.Fatalf("%v becomes %v", y, z)
		}
	}
}

// TestQ4Special: NaN, infinities, the largest and the smallest numbers.
func TestQ4Special(t *testing.T) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	for _, c := range []struct{ x, other, want float32 }{
		{inf, 1, Q4Largest}, {-inf, inf, -Q4Largest}, {math.MaxFloat32, 0, Q4Largest}, {nan, 1, nan}, {0, 0, 0}, {0x1p-149, 0, 0}, {0x1p-126, 0, 0}, {127 * 0x1p-126, 0, 127 * 0x1p-126}, {-3, 0, -3},
	} {
		x := [Q4Columns]float32{5: c.x, 20: c.other}
		var q [1]Q4
		EncodeQ4(q[:], x[:])
		DecodeQ4(x[:], q[:])
		if got := x[5]; !(math.Abs(float64(got-c.want)) <= math.Abs(float64(c.want))/120) && (got == got || c.want == c.want) {
			t.Errorf("%v beside %v is %v, want %v", c.x, c.other, got, c.want)
		}
		for i, y := range x {
			if i != 5 && i != 20 && (y != 0) != (c.want != c.want) {
				t.Errorf("a zero beside %v and %v is %v", c.x, c.other, y)
			}
		}
	}
}

// TestMixQ4: mixed twice, integers are 32 times as large; products of mixed rows are, too.
func TestMixQ4(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	var x, y [2 * Q4Columns]float64
	for i := range x {
		x[i], y[i] = float64(rng.IntN(200)-100), float64(rng.IntN(200)-100)
	}
	dot := func() (sum float64) {
		for i := range x {
			sum += x[i] * y[i]
		}
		return sum
	}
	was, want := x, 32*dot()
	MixQ4(x[:])
	MixQ4(y[:])
	if dot() != want {
		t.Errorf("the product is %v, want %v", dot(), want)
	}
	MixQ4(x[:])
	for i := range x {
		if x[i] != 32*was[i] {
			t.Errorf("%v becomes %v", was[i], x[i])
		}
	}
}
