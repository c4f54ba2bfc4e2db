//go:build gc && !noasm && unix

package attention

import (
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/reftest"
)

// weighOf returns a tier's weigh function for one row of n scores with outputs of 8 elements.
func weighOf[F cpu.Real](t cpu.Tier) func(s, o, m, l *F, n int) (empty int) {
	if t == cpu.TierGo {
		return nil
	}
	of := any(&neon32)
	if unsafe.Sizeof(F(0)) == 8 {
		of = &neon64
	}
	return func(s, o, m, l *F, n int) int { return of.(*neon[F]).Weigh(s, o, m, l, 1, n, n, 8) }
}

// TestAssemblyEight: keys and values of 8 bits are decoded, and no byte outside of arrays is accessed. See TestAssemblyFenced.
func TestAssemblyEight(t *testing.T) {
	skipGo(t)
	rng := reftest.Rand(t)
	f := newFenced[float32](t)
	dims := []int{8, 16, 40, 64, 128}
	for _, d := range []attn.DType{attn.E4M3, attn.Int8} {
		for _, count := range []int{1, 2, 3, 4, 5, 7, 63, 64, 65, 66, 127, 130, 200} {
			rows, dim, valueDim := 1+rng.IntN(20), dims[rng.IntN(len(dims))], dims[rng.IntN(len(dims))]
			f.draw(rng, d, rows, count, dim, valueDim, rng.IntN(2) == 0, rng.IntN(2) == 0)
			want := f.run(t, kernelOf[float32](cpu.TierGo, d))
			if bound := 0x1p-24 * (4*float64(dim) + float64(count) + 64); !f.run(t, kernelFor[float32](d)).near(t, want, bound) {
				t.Errorf("%v, %d rows, %d keys, dims %d and %d", d, rows, count, dim, valueDim)
			}
		}
	}
}
