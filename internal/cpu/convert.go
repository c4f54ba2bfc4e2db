package cpu

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/half"
)

// Convert writes the elements of src to dst in dst's type, rounded to the nearest, ties to even. Both have as many, of float32,
// float16 or bfloat16. It is for one thread. The error wraps ErrShape or ErrDType, and nothing was written.
func Convert(dst, src Buffer) error {
	const op = "convert"
	for _, b := range []struct {
		*Buffer
		name string
	}{{&dst, "the destination"}, {&src, "the source"}} {
		if err := b.check(op, b.name); err != nil {
			return err
		}
		if b.DType == attn.Float64 {
			return attn.Errorf(op, attn.ErrDType, "%s is of %v, want float32, float16 or bfloat16", b.name, b.DType)
		}
	}
	if dst.Len != src.Len {
		return attn.Errorf(op, attn.ErrShape, "%d elements of the destination, %d of the source", dst.Len, src.Len)
	}
	if dst.DType == attn.Float32 && src.DType != attn.Float32 { // widened in place
		src.wide(0, unsafe.Slice((*float32)(dst.Ptr), dst.Len))
		return nil
	}
	var block [1024]float32 // stays in the first cache
	for at := 0; at < src.Len; at += len(block) {
		store(&dst, at, src.wide(at, block[:min(len(block), src.Len-at)]))
	}
	return nil
}

// wide is the elements from i on as float32, as many as block has: where they lie, or there.
func (b *Buffer) wide(i int, block []float32) []float32 {
	switch p := b.at(i); b.DType {
	case attn.Float16:
		half.DecodeFloat16(block, unsafe.Slice((*uint16)(p), len(block)))
	case attn.BFloat16:
		half.DecodeBFloat16(block, unsafe.Slice((*uint16)(p), len(block)))
	default:
		return unsafe.Slice((*float32)(p), len(block))
	}
	return block
}
