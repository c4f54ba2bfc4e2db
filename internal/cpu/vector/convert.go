package vector

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/lean"
)

// Convert writes the elements of src to dst in dst's type, rounded to the nearest, ties to even. Both have as many
// elements, of float32, float16 or bfloat16. Convert runs on one thread. The error wraps ErrShape or ErrDType, before
// anything is written.
func Convert(dst, src cpu.Buffer) error {
	const op = "convert"
	for _, b := range []struct {
		*cpu.Buffer
		name string
	}{{&dst, "the destination"}, {&src, "the source"}} {
		if err := b.Check(op, b.name); err != nil {
			return err
		}
		switch b.DType {
		case attn.Float32, attn.Float16, attn.BFloat16:
		default:
			return attn.Errorf(op, attn.ErrDType, "%s is of %v, want float32, float16 or bfloat16", b.name, b.DType)
		}
	}
	if dst.Len != src.Len {
		return attn.Errorf(op, attn.ErrShape, "%d elements of the destination, %d of the source", dst.Len, src.Len)
	}
	if dst.DType == attn.Float32 && src.DType != attn.Float32 { // widened in place
		wide(&src, 0, unsafe.Slice((*float32)(dst.Ptr), dst.Len))
		return nil
	}
	if src.DType == attn.Float32 {
		Store(&dst, 0, unsafe.Slice((*float32)(src.Ptr), src.Len))
		return nil
	}
	var block [1024]float32 // fits the first-level cache
	for at := 0; at < src.Len; at += len(block) {
		Store(&dst, at, wide(&src, at, block[:min(len(block), src.Len-at)]))
	}
	return nil
}

// wide returns the elements from i on as float32, as many as block has: in place if they are float32, and otherwise
// in block.
func wide(b *cpu.Buffer, i int, block []float32) []float32 {
	switch p := b.At(i); b.DType {
	case attn.Float16:
		half.DecodeFloat16(block, unsafe.Slice((*uint16)(p), len(block)))
	case attn.BFloat16:
		half.DecodeBFloat16(block, unsafe.Slice((*uint16)(p), len(block)))
	default:
		return unsafe.Slice((*float32)(p), len(block))
	}
	return block
}

// Store rounds src into the elements of dst from i on. For attn.Q4, src is rounded to float32 first, and has whole elements.
func Store[F lean.Float](dst *cpu.Buffer, i int, src []F) {
	p := dst.At(i)
	if s, ok := any(src).([]float32); ok { // rounded once
		switch dst.DType {
		case attn.Float32:
			copy(unsafe.Slice((*float32)(p), len(s)), s)
			return
		case attn.Float16:
			tiers[cpu.InUse()].toFloat16((*uint16)(p), unsafe.SliceData(s), len(s))
			return
		case attn.BFloat16:
			tiers[cpu.InUse()].toBFloat16((*uint16)(p), unsafe.SliceData(s), len(s))
			return
		case attn.E4M3:
			d := unsafe.Slice((*half.E4M3)(p), len(s))
			for i, x := range s {
				d[i] = half.E4M3FromFloat32(x)
			}
			return
		case attn.Int8:
			d := unsafe.Slice((*half.Int8)(p), len(s))
			for i, x := range s {
				d[i] = half.Int8FromFloat32(x)
			}
			return
		case attn.Q4:
			half.EncodeQ4(unsafe.Slice((*half.Q4)(p), len(s)/half.Q4Columns), s)
			return
		}
	}
	switch dst.DType {
	case attn.Q4:
		d := unsafe.Slice((*half.Q4)(p), len(src)/half.Q4Columns)
		var some [half.Q4Columns]float32
		for i := range d {
			for j := range some {
				some[j] = float32(src[i*len(some)+j])
			}
			half.EncodeQ4(d[i:i+1], some[:])
		}
	case attn.Float32:
		d := unsafe.Slice((*float32)(p), len(src))
		for i, x := range src {
			d[i] = float32(x)
		}
	case attn.Float64:
		d := unsafe.Slice((*float64)(p), len(src))
		for i, x := range src {
			d[i] = float64(x)
		}
	case attn.Float16:
		d := unsafe.Slice((*half.Float16)(p), len(src))
		for i, x := range src {
			d[i] = half.FromFloat64(float64(x))
		}
	case attn.BFloat16:
		d := unsafe.Slice((*half.BFloat16)(p), len(src))
		for i, x := range src {
			d[i] = half.BFromFloat64(float64(x))
		}
	case attn.E4M3:
		d := unsafe.Slice((*half.E4M3)(p), len(src))
		for i, x := range src {
			d[i] = half.E4M3FromFloat64(float64(x))
		}
	case attn.Int8:
		d := unsafe.Slice((*half.Int8)(p), len(src))
		for i, x := range src {
			d[i] = half.Int8FromFloat64(float64(x))
		}
	}
}

// RoundNanos returns the approximate time of one thread for an element of a float32 that Store rounds.
func RoundNanos() float64 { return tiers[cpu.InUse()].roundNanos }
