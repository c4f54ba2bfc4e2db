package expression

import (
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
)

func TestMain(m *testing.M) {
	os.Exit(cputest.EveryTier(m, cpu.BestTier(), cpu.ForceTier).Run())
}

// TestStep: the tier's step computes the bits of stepGo, with NaN, infinities and extreme ints, and writes nothing else.
func TestStep(t *testing.T) {
	step := stepFor[float32]()
	if step == nil {
		t.Skip("the tier has no steps")
	}
	rng := rand.New(rand.NewPCG(rand.Uint64(), 3))
	for code := addF; code <= gather; code++ {
		for range 50 {
			n := 8 * (1 + rng.IntN(32))
			floats := code <= equalF || code == negateF || code == absF || code >= choose
			numbers := func() []uint32 {
				x := make([]uint32, n)
				for i := range x {
					switch {
					case floats:
						x[i] = math.Float32bits(float32(rng.NormFloat64()))
						if rng.IntN(8) == 0 {
							x[i] = []uint32{0, 1 << 31, 0x7f800000, 0xff800000, 0x7fc00000, 1, 0x7f7fffff}[rng.IntN(7)]
						}
					case code == and || code == or || code == not:
						x[i] = rng.Uint32N(2)
					default:
						x[i] = uint32(rng.Int32N(7) - 3)
						if rng.IntN(4) == 0 {
							x[i] = rng.Uint32()
						}
					}
				}
				return x
			}
			a, b, c := numbers(), numbers(), numbers()
			for i := range n {
				if c[i] = rng.Uint32N(2); code == shift {
					b[i] = rng.Uint32N(31)
				}
			}
			switch code {
			case hide:
				b = c
			case gather:
				for i := range b {
					b[i] = rng.Uint32N(uint32(n))
				}
			}
			got, want := make([]uint32, n+8), make([]uint32, n+8)
			at := func(x []uint32) *uint32 { return unsafe.SliceData(x) }
			step(uint64(code), at(got), at(a), at(b), at(c), n)
			stepGo(uint64(code), at(want), at(a), at(b), at(c), n)
			for i := range got { // any NaN is as good as another
				if x, y := math.Float32frombits(got[i]), math.Float32frombits(want[i]); x != x && y != y {
					got[i] = want[i]
				}
			}
			if !slices.Equal(got, want) {
				t.Fatalf("code %d of %d: %x, want %x", code, n, got, want)
			}
		}
	}
}
