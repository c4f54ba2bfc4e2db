package dropout

import (
	"math"
	"testing"

	"pgregory.net/rapid"
)

// The known answers of Random123 1.14 (kat_vectors) for Philox4x32-7.
func TestPhilox(t *testing.T) {
	for _, c := range []struct {
		counter [4]uint32
		key     [2]uint32
		want    [4]uint32
	}{
		{[4]uint32{}, [2]uint32{}, [4]uint32{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}},
		{
			[4]uint32{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, [2]uint32{0xffffffff, 0xffffffff},
			[4]uint32{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662},
		},
		{
			[4]uint32{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, [2]uint32{0xa4093822, 0x299f31d0},
			[4]uint32{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a},
		},
	} {
		if got := Philox(c.counter, c.key); got != c.want {
			t.Errorf("%x of %x: %x, want %x", c.key, c.counter, got, c.want)
		}
	}
}

func TestOf(t *testing.T) {
	for _, c := range []struct {
		p    float64
		seed int64
		want Rule
	}{
		{0, 1, Rule{}},
		{0.5, 0, Rule{}},
		{0.5, 3, Rule{3, 1 << 15}},
		{0.25, -1, Rule{math.MaxUint64, 1 << 14}},
		{0x1p-16, 1, Rule{1, 1}},
		{0x1p-18, 1, Rule{}},
		{1 - 0x1p-53, 1, Rule{1, math.MaxUint16}},
	} {
		if got := Of(c.p, c.seed); got != c.want || got.None() != (c.want == Rule{}) {
			t.Errorf("%v, seed %d: %+v, want %+v", c.p, c.seed, got, c.want)
		}
		if k := c.want.Keep(); k <= 0 || k > 1 {
			t.Errorf("%+v keeps with probability %v", c.want, k)
		}
	}
}

// A block is its keys, one by one, and each part of a place and of a seed matters.
func TestBlock(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		number := rapid.Uint32()
		r := Rule{rapid.Uint64().Draw(t, "seed"), rapid.Uint16().Draw(t, "below")}
		at := Row{number.Draw(t, "sequence"), number.Draw(t, "head"), number.Draw(t, "query")}
		octet := uint32(rapid.IntRange(0, 1<<20).Draw(t, "octet"))
		block := r.Block(at, octet)
		for i := range BlockKeys {
			if got := block>>i&1 == 1; got != r.Drops(at, 8*int(octet)+i) {
				t.Fatalf("key %d of the block: %t", i, got)
			}
		}
	})
	r, at := Rule{7, 1 << 15}, Row{1, 2, 3}
	seen := map[uint64]bool{}
	for _, x := range []struct {
		Rule
		Row
		octet uint32
	}{
		{r, at, 5}, {Rule{8, 1 << 15}, at, 5}, {Rule{7 + 1<<32, 1 << 15}, at, 5}, {r, at, 21},
		{r, Row{2, 2, 3}, 5}, {r, Row{1, 3, 3}, 5}, {r, Row{1, 2, 4}, 5}, {r, Row{2, 1, 3}, 5}, {r, Row{1, 3, 2}, 5},
	} {
		seen[x.Block(x.Row, x.octet)] = true
	}
	if len(seen) != 9 {
		t.Errorf("%d of 9 places have masks of their own", len(seen))
	}
}

// The share that is dropped, of fixed seeds: a test of random ones would fail some day.
func TestShare(t *testing.T) {
	for _, p := range []float64{0.01, 0.1, 0.5, 0.9} {
		n, dropped := 0, 0
		for seed := range int64(20) {
			r := Of(p, seed+1)
			for row := range 20 {
				for key := range 500 {
					n++
					if r.Drops(RowOf(row%3, row%5, row), key) {
						dropped++
					}
				}
			}
		}
		off := math.Abs(float64(dropped) - float64(n)*p)
		if sigma := math.Sqrt(float64(n) * p * (1 - p)); off > 6*sigma {
			t.Errorf("p %v: %d of %d, %.1f sigma off", p, dropped, n, off/sigma)
		}
	}
}
