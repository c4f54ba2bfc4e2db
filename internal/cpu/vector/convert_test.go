package vector

import (
	"errors"
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

// TestConvert: elements of every type become those of every other, each the nearest, and nothing else is written.
func TestConvert(t *testing.T) {
	rng := reftest.Rand(t)
	one := func(d attn.DType, v float32) float32 {
		switch d {
		case attn.Float16:
			return half.FromFloat32(v).Float32()
		case attn.BFloat16:
			return half.BFromFloat32(v).Float32()
		}
		return v
	}
	for _, n := range []int{0, 1, 7, 1023, 1024, 1025, 5000} {
		for _, from := range cputest.WeightTypes {
			for _, to := range cputest.WeightTypes {
				buffer := func(d attn.DType) cpu.Buffer {
					mem, free := cputest.Guarded(t, n*d.Size())
					t.Cleanup(free)
					return cpu.Buffer{DType: d, Ptr: mem, Len: n}
				}
				src, dst := buffer(from), buffer(to)
				given := make([]float32, n)
				for i := range given {
					given[i] = one(from, float32(rng.NormFloat64()*math.Exp2(float64(rng.IntN(60)-30))))
					cputest.Store(src.Ptr, src.DType, i, given[i:i+1])
				}
				if err := Convert(dst, src); err != nil {
					t.Fatal(err)
				}
				for i, v := range given {
					if got := wide(&dst, i, []float32{0})[0]; math.Float32bits(got) != math.Float32bits(one(to, v)) {
						t.Fatalf("%v, %v to %v, %d elements: element %d is %v, of %v", cpu.InUse(), from, to, n, i, got, v)
					}
				}
			}
		}
	}

	var eight [8]float32
	good := cpu.Buffer{DType: attn.Float32, Ptr: unsafe.Pointer(&eight[0]), Len: 8}
	for _, c := range []struct {
		dst, src cpu.Buffer
		want     error
	}{
		{good, cpu.Buffer{DType: attn.Float32, Ptr: good.Ptr, Len: 7}, attn.ErrShape}, {good, cpu.Buffer{DType: attn.Float64, Ptr: good.Ptr, Len: 8}, attn.ErrDType},
		{cpu.Buffer{DType: attn.Float64, Ptr: good.Ptr, Len: 8}, good, attn.ErrDType}, {cpu.Buffer{Len: 8}, good, attn.ErrShape},
	} {
		if err := Convert(c.dst, c.src); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", fmt.Sprint(c.dst, c.src), err, c.want)
		}
	}
}
