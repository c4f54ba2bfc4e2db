package vector

import (
	"fmt"
	"math"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"
)

// TestWidenRows: the kernels in use widen every number of 8 bits as package half does, to the bits, times scales of all sizes. They read
// and write nothing else.
func TestWidenRows(t *testing.T) {
	rng := reftest.Rand(t)
	scales := []float32{1, 0x1p-126, 0.3, -1.7, math.MaxFloat32, math.MaxFloat32 / 448, 0x1p-149, float32(math.NaN()), float32(math.Inf(1)), 0}
	for d, one := range map[attn.DType]func(uint8) float32{
		attn.E4M3: func(b uint8) float32 { return half.E4M3(b).Float32() },
		attn.Int8: func(b uint8) float32 { return half.Int8(b).Float32() },
	} {
		check := func(rows, n, step int) {
			t.Helper()
			from, freeFrom := cputest.Guarded(t, rows*n)
			to, freeTo := cputest.Guarded(t, 4*rows*n)
			by, freeBy := cputest.Guarded(t, 4*((rows-1)*step+1))
			defer freeFrom()
			defer freeTo()
			defer freeBy()
			src, dst, of := unsafe.Slice((*uint8)(from), rows*n), unsafe.Slice((*float32)(to), rows*n), unsafe.Slice((*float32)(by), (rows-1)*step+1)
			first := rng.IntN(256)
			for i := range src {
				src[i] = uint8(first + i)
			}
			for i := range of {
				of[i] = scales[rng.IntN(len(scales))]
			}
			if !WidenRows(dst, d, from, &of[0], n, step) {
				t.Fatalf("%v is refused", d)
			}
			for i, x := range dst {
				scale := of[i/n*step]
				if want := one(src[i]) * scale; math.Float32bits(x) != math.Float32bits(want) && (x == x || want == want) {
					t.Fatalf("%v, %v, %d rows of %d: %#02x times %v is %v, want %v", cpu.InUse(), d, rows, n, src[i], scale, x, want)
				}
			}
		}
		for n := 1; n < 70; n++ {
			for step := range 3 {
				check(1+rng.IntN(5), n, step)
			}
		}
		for range 40 {
			check(1+rng.IntN(40), []int{64, 128, 256, 1 + rng.IntN(600)}[rng.IntN(4)], rng.IntN(5))
		}
	}
	if WidenRows(make([]float32, 1), attn.Float16, nil, nil, 1, 1) {
		t.Error("float16 has 8 bits")
	}
}

func BenchmarkWidenRows(b *testing.B) {
	const rows, n = 64, 128
	src, dst, scales := make([]uint8, rows*n), make([]float32, rows*n), make([]float32, rows)
	for _, d := range []attn.DType{attn.E4M3, attn.Int8} {
		b.Run(fmt.Sprint(d), func(b *testing.B) {
			b.SetBytes(rows * n)
			for b.Loop() {
				WidenRows(dst, d, unsafe.Pointer(&src[0]), &scales[0], n, 1)
			}
		})
	}
}
