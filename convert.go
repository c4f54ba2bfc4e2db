package leanattention

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/vector"
	"gorgonia.org/leanattention/internal/errs"
)

// Convert writes the elements of src to dst in dst's type, rounded to the nearest, ties to even. Both are slices of the same length, of
// float32, [F16] or [BF16]. Convert runs on the caller's goroutine: convert parts on several goroutines.
//
// Errors: ErrDType and ErrShape, before anything is written. ErrDType for a finite element that dst's type does not have, after
// which dst has any values.
func Convert(dst, src any) error {
	const op = "Convert"
	to, ok := bufferOf(dst)
	if !ok {
		return errs.Errorf(op, ErrDType, "dst is a %T, want a slice of float32, leanattention.F16 or leanattention.BF16", dst)
	}
	from, ok := bufferOf(src)
	if !ok {
		return errs.Errorf(op, ErrDType, "src is a %T, want a slice of float32, leanattention.F16 or leanattention.BF16", src)
	}
	if to.Len != from.Len {
		return errs.Errorf(op, ErrShape, "dst has %d elements, and src %d", to.Len, from.Len)
	}
	if err := vector.Convert(to, from); err != nil {
		return errs.Engine(op, "a conversion", err)
	}
	infinity := uint16(0x7c00)
	switch {
	case to.DType == attn.Float32 || to.DType == from.DType || from.DType == attn.Float16:
		return nil // all numbers of src are in dst's type
	case to.DType == attn.BFloat16:
		infinity = 0x7f80
	}
	for _, i := range infinite(unsafe.Slice((*uint16)(to.Ptr), to.Len), infinity) {
		if x := element(&from, i); !math.IsInf(float64(x), 0) {
			return errs.Errorf(op, ErrDType, "element %d is %v, more than %v can have", i, x, to.DType)
		}
	}
	return nil
}

func bufferOf(x any) (b cpu.Buffer, ok bool) {
	switch x := x.(type) {
	case []float32:
		return cpu.Buffer{DType: attn.Float32, Ptr: unsafe.Pointer(unsafe.SliceData(x)), Len: len(x)}, true
	case []F16:
		return cpu.Buffer{DType: attn.Float16, Ptr: unsafe.Pointer(unsafe.SliceData(x)), Len: len(x)}, true
	case []BF16:
		return cpu.Buffer{DType: attn.BFloat16, Ptr: unsafe.Pointer(unsafe.SliceData(x)), Len: len(x)}, true
	}
	return b, false
}

// infinite returns the indices of infinite numbers.
func infinite(x []uint16, infinity uint16) (all []int) {
	const (
		block    = 256
		each     = 0x0001_0001_0001_0001
		top      = 0x8000 * each
		fraction = 0x7fff * each
	)
	most := uint64(0x8000-infinity) * each
	scan := func(from, to int) {
		for i, y := range x[from:to] {
			if y&0x7fff == infinity {
				all = append(all, from+i)
			}
		}
	}
	at := 0
	for at < len(x) && uintptr(unsafe.Pointer(&x[at]))%8 != 0 {
		at++
	}
	scan(0, at)
	for ; at+block <= len(x); at += block {
		fours := (*[block / 4]uint64)(unsafe.Pointer(&x[at]))
		reached := uint64(0)
		for i := 0; i < len(fours); i += 4 { // infinities and NaNs reach the highest bit
			reached |= (fours[i]&fraction + most) | (fours[i+1]&fraction + most) | (fours[i+2]&fraction + most) | (fours[i+3]&fraction + most)
		}
		if reached&top != 0 {
			scan(at, at+block)
		}
	}
	scan(at, len(x))
	return all
}

// element returns an element of float32 or bfloat16.
func element(b *cpu.Buffer, i int) float32 {
	if b.DType == attn.BFloat16 {
		return (*(*BF16)(b.At(i))).Float32()
	}
	return *(*float32)(b.At(i))
}
