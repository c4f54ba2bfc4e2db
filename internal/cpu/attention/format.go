package attention

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/vector"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/lean"
)

// Kernels read keys and values in place if both have one type and no scales. Keys and values of any other format are
// decoded to the type of the queries, decodedKeys at a time. All rows of an output tile use one decoding.

// decodedKeys is the number of keys that are decoded at a time.
const decodedKeys = invariantKeys

// readInPlace reports whether kernels read keys and values of a format in place.
func readInPlace(f *attn.Format) bool {
	k, v := f.Key(), f.ValuePlane()
	return f.KeyPlanes == 1 && k.Scales == attn.NoScales && v.Scales == attn.NoScales && k.DType == v.DType && kernelFor[float32](k.DType) != nil
}

// storedType returns the type of the keys and values that kernels read.
func storedType[F cpu.Real](f *attn.Format) attn.DType {
	switch {
	case readInPlace(f):
		return f.Key().DType
	case unsafe.Sizeof(F(0)) == 4:
		return attn.Float32
	}
	return attn.Float64
}

// rowDecoder decodes rows of keys and values into its own memory.
type rowDecoder interface {
	// decode decodes the key and the value of a slot into row i.
	decode(i, page, slot int)
	// row returns the decoded row i of keys and of values.
	row(i int) (k, v unsafe.Pointer)
}

// decoder decodes rows of one KV head.
type decoder[F cpu.Real] struct {
	plan         *Plan
	pages        *attn.Memory[cpu.Buffer]
	head         int
	keys, values []F
}

func (d *decoder[F]) row(i int) (k, v unsafe.Pointer) {
	g := &d.plan.g
	return unsafe.Pointer(&d.keys[i*g.Dim]), unsafe.Pointer(&d.values[i*g.ValueDim])
}

func (d *decoder[F]) decode(i, page, slot int) {
	g := &d.plan.g
	f := &g.Pages
	key, value := d.keys[i*g.Dim:][:g.Dim], d.values[i*g.ValueDim:][:g.ValueDim]
	for p := range f.KeyPlanes {
		part := key[:f.Planes[p].Dim]
		if d.plane(part, p, page, slot); p == f.Value.Plane {
			copy(value, part)
		}
		key = key[len(part):]
	}
	if !f.InKeys() {
		d.plane(value, f.Value.Plane, page, slot)
	}
}

// plane decodes a row of one plane into dst.
func (d *decoder[F]) plane(dst []F, plane, page, slot int) {
	g, m := &d.plan.g, &d.pages[plane]
	p := &g.Pages.Planes[plane]
	widenTo[F](p.DType)(dst, m.Data.At(p.At.Offset(page, d.head, slot)))
	if p.Scales == attn.NoScales {
		return
	}
	at, group := p.ScaleOf(page, d.head, slot, g.KVHeads, g.PageTokens), len(dst)
	if p.Scales == attn.ScalesByGroup {
		group = p.Group
	}
	for ; len(dst) > 0; at++ {
		n := min(group, len(dst))
		scale := F(*(*float32)(m.Scales.At(at)))
		for i := range dst[:n] {
			dst[i] *= scale
		}
		dst = dst[n:]
	}
}

// largestOf has, by type, the magnitude to which scales bring a row's largest element; 0: scales are 1, since the type
// has float32's range.
var largestOf = [attn.DTypes]float64{attn.Float16: 65504, attn.E4M3: half.MaxE4M3, attn.Int8: half.MaxInt8}

// room has, by type, how many times the largest element of a page's first token the page holds. Larger elements of later
// tokens are stored as the largest number. 0: scales are 1.
var room = [attn.DTypes]float64{attn.Float16: 256, attn.E4M3: 16, attn.Int8: 4}

// leastScale is the smallest scale of a row: the smallest normal float32. Smaller scales would have fewer bits.
const leastScale = 0x1p-126

// storeScaled stores a row in a plane, from element at and scale scaleAt on.
func storeScaled[F lean.Float](x *appendPlane, at, scaleAt int, row []F) {
	group := len(row)
	if x.Scales == attn.ScalesByGroup {
		group = x.Group
	}
	for ; len(row) > 0; scaleAt++ {
		part := row[:min(group, len(row))]
		switch x.Scales {
		case attn.NoScales:
			vector.Store(&x.data, at, part)
		case attn.ScalesByHead, attn.ScalesByPage:
			divideInto(&x.data, at, part, *(*float32)(x.scales.At(scaleAt)))
		default:
			scale := scaleOf(part, largestOf[x.DType])
			*(*float32)(x.scales.At(scaleAt)) = scale
			divideInto(&x.data, at, part, scale)
		}
		at, row = at+len(part), row[len(part):]
	}
}

// scaleOf returns the scale that brings the largest element of a row to most:
//
//	max(min(max |x|, the largest float32) / most, leastScale)
//
// The quotient is rounded once, to float32. So the scale of a row of float32 is the same in every engine with IEEE
// division. The scale of a row with NaN is NaN, and makes the whole row NaN.
func scaleOf[F lean.Float](row []F, most float64) float32 {
	if most == 0 {
		return 1
	}
	largest := F(0)
	for _, x := range row {
		largest = max(largest, x, -x) // NaN if one is NaN
	}
	return scaleTo(largest, most)
}

// pageScaleOf returns the scale of a page whose first token has a row. It is scaleOf with room, of the elements that are
// not NaN: NaN is then stored as an element, and other tokens keep their numbers. If these elements are zeros, it is 1.
func pageScaleOf[F lean.Float](row []F, t attn.DType) float32 {
	largest := F(0)
	for _, x := range row {
		if x == x {
			largest = max(largest, x, -x)
		}
	}
	if largest == 0 || room[t] == 0 {
		return 1
	}
	return scaleTo(largest, largestOf[t]/room[t])
}

func scaleTo[F lean.Float](largest F, most float64) float32 {
	if largest != largest {
		return float32(math.NaN()) // one NaN of many
	}
	return max(float32(min(float64(largest), math.MaxFloat32)/most), leastScale)
}

// divideInto stores the elements of row divided by scale.
func divideInto[F lean.Float](dst *cpu.Buffer, at int, row []F, scale float32) {
	var some [64]F
	for len(row) > 0 {
		part := some[:min(len(row), len(some))]
		for i := range part {
			part[i] = row[i] / F(scale)
		}
		vector.Store(dst, at, part)
		at, row = at+len(part), row[len(part):]
	}
}

// checkScales returns an error if scales are not float32 or their buffer is bad.
func checkScales(op string, scales *cpu.Buffer) error {
	if scales.DType != attn.Float32 {
		return attn.Errorf(op, attn.ErrDType, "scales are %v; they must be %v", scales.DType, attn.Float32)
	}
	return scales.Check(op, "the buffer of scales")
}
