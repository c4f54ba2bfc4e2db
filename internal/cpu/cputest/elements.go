package cputest

import (
	"math"
	"math/rand/v2"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/variant"
)

// Untouched is a NaN that no arithmetic makes: outputs hold it until they are written.
var Untouched = math.Float64frombits(0xfff8_dead_beef_0001)

// IsUntouched reports whether x is what an output was filled with.
func IsUntouched[F lean.Float](x F) bool {
	return math.Float64bits(float64(x)) == math.Float64bits(float64(F(Untouched)))
}

// FormatOf is what keys and values of d hold; float64 storage holds what queries of float32 can hold.
func FormatOf[F lean.Float](d attn.DType) reftest.Format {
	switch d {
	case attn.Float32:
		return reftest.Float32
	case attn.Float16:
		return reftest.Float16
	case attn.BFloat16:
		return reftest.BFloat16
	}
	return AccOf[F]()
}

// AccOf is the format that queries of type F are accumulated in.
func AccOf[F lean.Float]() reftest.Format {
	if unsafe.Sizeof(F(0)) == 4 {
		return reftest.Float32
	}
	return reftest.Float64
}

// BiasOf is b as a problem has it.
func BiasOf(b reftest.Bias) attn.Bias {
	return attn.Bias{Sequences: b.Sequences, Heads: b.Heads, Queries: b.Queries, Keys: b.Keys, Scale: b.Scale}
}

// TensorsOf returns the tensors of a variant with floats of type F.
func TensorsOf[F lean.Float](tensors []variant.Tensor) (of []variant.Tensor) {
	for _, t := range tensors {
		if t.Int() {
			of = append(of, t)
			continue
		}
		switch x := any(reftest.Convert[F](t.F64)).(type) {
		case []float32:
			t.F32, t.F64 = x, nil
		case []float64:
			t.F64 = x
		}
		of = append(of, t)
	}
	return of
}

// Filled returns n elements that nothing has written.
func Filled[F lean.Float](n int) []F {
	x := make([]F, n)
	for i := range x {
		x[i] = F(Untouched)
	}
	return x
}

// Store rounds x into the elements of type d at p from i on. x has whole elements.
func Store[F lean.Float](p unsafe.Pointer, d attn.DType, i int, x []F) {
	p = unsafe.Add(p, i*d.Size())
	for i, x := range x {
		switch d {
		case attn.Float32:
			unsafe.Slice((*float32)(p), i+1)[i] = float32(x)
		case attn.Float64:
			unsafe.Slice((*float64)(p), i+1)[i] = float64(x)
		case attn.Float16:
			unsafe.Slice((*half.Float16)(p), i+1)[i] = half.FromFloat64(float64(x))
		case attn.BFloat16:
			unsafe.Slice((*half.BFloat16)(p), i+1)[i] = half.BFromFloat64(float64(x))
		case attn.E4M3:
			unsafe.Slice((*half.E4M3)(p), i+1)[i] = half.E4M3FromFloat64(float64(x))
		case attn.Int8:
			unsafe.Slice((*half.Int8)(p), i+1)[i] = half.Int8FromFloat64(float64(x))
		}
	}
	if d == attn.Q4 {
		row := make([]float32, len(x))
		for i := range row {
			row[i] = float32(x[i])
		}
		half.EncodeQ4(unsafe.Slice((*half.Q4)(p), len(x)/half.Q4Columns), row)
	}
}

// Load returns element i of those of type d at p.
func Load(p unsafe.Pointer, d attn.DType, i int) float64 {
	p = unsafe.Add(p, i*d.Size())
	switch d {
	case attn.Float32:
		return float64(*(*float32)(p))
	case attn.Float64:
		return *(*float64)(p)
	case attn.Float16:
		return float64((*(*half.Float16)(p)).Float32())
	case attn.E4M3:
		return float64((*(*half.E4M3)(p)).Float32())
	case attn.Int8:
		return float64((*(*half.Int8)(p)).Float32())
	default:
		return float64((*(*half.BFloat16)(p)).Float32())
	}
}

// Rounded is x as d holds it.
func Rounded(x float64, d attn.DType) float64 {
	switch d {
	case attn.Float32:
		return float64(float32(x))
	case attn.Float16:
		return float64(half.FromFloat64(x).Float32())
	case attn.BFloat16:
		return float64(half.BFromFloat64(x).Float32())
	}
	return x
}

// Noise returns n elements of type d in (-1/2, 1/2): some, again and again.
func Noise(d attn.DType, n int) unsafe.Pointer {
	x := make([]float32, min(n*d.Columns(), 1<<16))
	for i := range x {
		x[i] = rand.Float32() - 0.5
	}
	words := make([]uint64, (n*d.Size()+7)/8)
	p := unsafe.Pointer(unsafe.SliceData(words))
	Store(p, d, 0, x)
	mem := unsafe.Slice((*byte)(p), n*d.Size())
	for done := len(x) / d.Columns() * d.Size(); done < len(mem); done *= 2 {
		copy(mem[done:], mem[:done])
	}
	return p
}

// Floats are the types of keys and values whose numbers need no scales.
var Floats = []attn.DType{attn.Float32, attn.Float64, attn.Float16, attn.BFloat16}

// WeightTypes are the types that weights beside float32 have.
var WeightTypes = []attn.DType{attn.Float32, attn.Float16, attn.BFloat16}
