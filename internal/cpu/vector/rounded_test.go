package vector

import (
	"math"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"
)

// TestRounded: the kernels in use round as package half does, to the bits, NaN too, and write nothing else.
func TestRounded(t *testing.T) {
	rng := reftest.Rand(t)
	v := &tiers[cpu.InUse()]
	for _, f := range []struct {
		name   string
		kernel func(dst *uint16, src *float32, n int)
		one    func(float32) uint16
		widen  func(uint16) float32
	}{
		{"float16", v.toFloat16, func(x float32) uint16 { return uint16(half.FromFloat32(x)) }, func(h uint16) float32 { return half.Float16(h).Float32() }},
		{"bfloat16", v.toBFloat16, func(x float32) uint16 { return uint16(half.BFromFloat32(x)) }, func(h uint16) float32 { return half.BFloat16(h).Float32() }},
	} {
		// All numbers, and what lies beside them and in the middle between two, and anything.
		var all []float32
		for h := range 1 << 16 {
			x, next := f.widen(uint16(h)), f.widen(uint16(h+1))
			bits := math.Float32bits(x)
			middle := bits + (math.Float32bits(next)-bits)/2
			for _, b := range []uint32{bits, bits + 1, middle - 1, middle, middle + 1, rng.Uint32()} {
				all = append(all, math.Float32frombits(b))
			}
		}
		for _, nan := range []uint32{0x7f800001, 0xff800001, 0x7fc00000, 0x7fffffff, 0xffffffff, 0x7f802000} {
			all = append(all, math.Float32frombits(nan))
		}
		got := make([]uint16, len(all))
		f.kernel(&got[0], &all[0], len(all))
		for i, x := range all {
			if want := f.one(x); got[i] != want {
				t.Fatalf("%v, %s: %v (%#08x) is %#04x, want %#04x", cpu.InUse(), f.name, x, math.Float32bits(x), got[i], want)
			}
		}
		for n := range 70 {
			mem, free := cputest.Guarded(t, 2*n)
			mem2, free2 := cputest.Guarded(t, 4*n)
			dst, src := unsafe.Slice((*uint16)(mem), n), unsafe.Slice((*float32)(mem2), n)
			for i := range src {
				src[i], dst[i] = all[rng.IntN(len(all))], 0xffff
			}
			f.kernel((*uint16)(mem), (*float32)(mem2), n)
			for i, x := range src {
				if want := f.one(x); dst[i] != want {
					t.Fatalf("%v, %s, %d of %d: %v is %#04x, want %#04x", cpu.InUse(), f.name, i, n, x, dst[i], want)
				}
			}
			free()
			free2()
		}
	}
}
