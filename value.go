package leanattention

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/vector"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/memory"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// readSeed is the number of a seed.
func readSeed(op string, v G.Value) (int64, error) {
	t, isTensor := v.(*tensor.Dense)
	at := ongpu.PlaceOf(v)
	switch {
	case v == nil || isTensor && t == nil:
		return 0, errs.Errorf(op, ErrShape, "seed is nil")
	case at != nil:
		return 0, errs.Errorf(op, ErrUnsupported, "seed is on %v; it must be in %s", at, errs.Host)
	case isTensor && !t.IsNativelyAccessible():
		return 0, errs.Errorf(op, ErrUnsupported, "seed lies in memory that Go cannot read")
	case isTensor: // Gorgonia's scalars are no tensors, as a rule
		if err := checkSeed(op, operand.OfTensor("seed", t)); err != nil {
			return 0, err
		}
	}
	switch x := v.Data().(type) {
	case int:
		return int64(x), nil
	case int32:
		return int64(x), nil
	case int64:
		return x, nil
	}
	return 0, errs.Errorf(op, ErrDType, "seed is a %T; it must be a scalar of int, int32 or int64", v)
}

// F16 is an IEEE 754 binary16 number, and BF16 a bfloat16 number. Both are types for storage, of keys, values and weights: arithmetic
// is in float32, or in float64 if the query is float64.
type (
	F16  = half.Float16
	BF16 = half.BFloat16
)

// Float16 and BFloat16 are the element types of tensors of [F16] and [BF16], for [CacheConfig], for nodes of keys and values, and for
// weights. Gorgonia accepts such tensors as inputs, and in reshape, transpose, slice and concat, but computes nothing on them.
var (
	Float16  = operand.Float16
	BFloat16 = operand.BFloat16
)

// E4M3 is the element type of caches ([CacheConfig]) that store keys and values as 8-bit floating-point numbers with 4 bits of
// exponent and 3 bits of fraction, as the OCP specification has them (E4M3FN). There are no tensors of the type.
var E4M3 = operand.E4M3

// Q4 is the element type of caches ([CacheConfig]) that store keys and values in 4 bits. 32 neighbours of a row are an element of 18
// bytes: a scale of 16 bits, and for each number an index of 4 bits to integers from -127 to 111 that suit a normal distribution. Keys
// are multiplied by a Hadamard matrix of 32 x 32 before they are rounded, and queries before scores: this spreads outliers, and leaves
// scores as they are. There are no tensors of the type.
var Q4 = operand.Q4

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

// CheckMemory returns [ErrOutOfMemory] if this process cannot take some more bytes of the host's memory. largest is the size of
// the largest value among these bytes. The text has the free bytes, and the owner of their limit: the machine, a cgroup, or the
// process. Go ends a process that takes more. On systems that do not tell, CheckMemory returns nil.
//
// [NewCache] and the nodes of this module check the memory for their own values.
func CheckMemory(bytes, largest int64) error {
	const op = "CheckMemory"
	if largest < 0 || largest > bytes {
		return errs.Errorf(op, ErrShape, "%d bytes, of which the largest value has %d", bytes, largest)
	}
	if err := memory.Check(bytes, largest); err != nil {
		return errs.Errorf(op, ErrOutOfMemory, "%d bytes in %s: %v", bytes, errs.Host, err)
	}
	return nil
}
