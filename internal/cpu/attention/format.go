package attention

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/vector"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/lean"
)

// Kernels read keys and values in place if both have one type, and no scales or those of tokens. Keys and values of any
// other format are decoded to the type of the queries, decodedKeys at a time. All rows of an output tile use one decoding.

// decodedKeys is the number of keys that are decoded at a time.
const decodedKeys = invariantKeys

// readInPlace reports whether kernels for queries of type F read keys and values in place.
func readInPlace[F cpu.Real](g *attn.Problem) bool {
	f := &g.Pages
	k, v := f.Key(), f.ValuePlane()
	plain := k.Scales == attn.NoScales && v.Scales == attn.NoScales && k.DType.Size() > 1
	return f.KeyPlanes == 1 && k.DType == v.DType && kernelFor[F](k.DType) != nil && (plain || readScaled(g))
}

// storedType returns the type of the keys and values that kernels read.
func storedType[F cpu.Real](g *attn.Problem) attn.DType {
	switch {
	case readInPlace[F](g):
		return g.Pages.Key().DType
	case unsafe.Sizeof(F(0)) == 4:
		return attn.Float32
	}
	return attn.Float64
}

// rowDecoder decodes rows of keys and values into its own memory.
type rowDecoder interface {
	// decode decodes the keys and the values of n slots of a page, from one slot on, into rows from row i on.
	decode(i, n, page, slot int)
	// row returns the decoded row i of keys and of values.
	row(i int) (k, v unsafe.Pointer)
	// strides returns the elements from a row of keys to the next, and of values.
	strides() (key, value int)
}

// decoder decodes rows of one KV head.
type decoder[F cpu.Real] struct {
	plan         *Plan
	pages        *attn.Memory[cpu.Buffer]
	head         int
	keys, values []F // no values if they are parts of the keys
}

// grow allocates memory for rows of a problem.
func (d *decoder[F]) grow(g *attn.Problem) {
	if n := decodedKeys * g.Dim; len(d.keys) < n {
		d.keys = dense.Make[F](n)
	}
	if n := decodedKeys * g.ValueDim; !g.Pages.InKeys() && len(d.values) < n {
		d.values = dense.Make[F](n)
	}
}

func (d *decoder[F]) strides() (key, value int) {
	if g := &d.plan.g; g.Pages.InKeys() {
		return g.Dim, g.Dim
	}
	return d.plan.g.Dim, d.plan.g.ValueDim
}

func (d *decoder[F]) row(i int) (k, v unsafe.Pointer) {
	g := &d.plan.g
	key := d.keys[i*g.Dim:][:g.Dim]
	if !g.Pages.InKeys() {
		return unsafe.Pointer(&key[0]), unsafe.Pointer(&d.values[i*g.ValueDim])
	}
	first := 0
	for p := range g.Pages.Value.Plane {
		first += g.Pages.Planes[p].Dim
	}
	return unsafe.Pointer(&key[0]), unsafe.Pointer(&key[first])
}

func (d *decoder[F]) decode(i, n, page, slot int) {
	g := &d.plan.g
	f := &g.Pages
	first := 0
	for p := range f.KeyPlanes {
		d.plane(d.keys[i*g.Dim+first:], g.Dim, n, p, page, slot)
		first += f.Planes[p].Dim
	}
	if !f.InKeys() {
		d.plane(d.values[i*g.ValueDim:], g.ValueDim, n, f.Value.Plane, page, slot)
	}
}

// plane decodes n rows of one plane into dst. Rows of dst are stride elements apart.
func (d *decoder[F]) plane(dst []F, stride, n, plane, page, slot int) {
	g, m := &d.plan.g, &d.pages[plane]
	p := &g.Pages.Planes[plane]
	if p.At.Row == p.Dim && stride == p.Dim { // rows lie together
		if d.eightBits(dst[:n*p.Dim], plane, page, slot) {
			return
		}
	}
	for r := range n {
		row := dst[r*stride:][:p.Dim]
		if d.eightBits(row, plane, page, slot+r) {
			continue
		}
		widenTo[F](p.DType)(row, m.Data.At(p.At.Offset(page, d.head, slot+r)))
		if p.Scales == attn.NoScales {
			continue
		}
		at, group := p.ScaleOf(page, d.head, slot+r, g.KVHeads, g.PageTokens), p.Dim
		if p.Scales == attn.ScalesByGroup {
			group = p.Group
		}
		for ; len(row) > 0; at++ {
			n := min(group, len(row))
			scale := F(*(*float32)(m.Scales.At(at)))
			for i := range row[:n] {
				row[i] *= scale
			}
			row = row[n:]
		}
	}
}

// eightBits decodes rows that lie together, if they have 8-bit elements in groups of one size and queries are float32. It
// returns false if not.
func (d *decoder[F]) eightBits(dst []F, plane, page, slot int) bool {
	g, m := &d.plan.g, &d.pages[plane]
	p := &g.Pages.Planes[plane]
	to, ok := any(dst).([]float32)
	if !ok || p.Scales == attn.NoScales || p.DType.Size() != 1 {
		return false
	}
	group, step := p.Dim, 0
	switch p.Scales {
	case attn.ScalesByToken:
		step = 1
	case attn.ScalesByGroup:
		if group, step = p.Group, 1; p.Dim%group != 0 {
			return false
		}
	}
	scales := m.Scales.At(p.ScaleOf(page, d.head, slot, g.KVHeads, g.PageTokens))
	return vector.WidenRows(to, p.DType, m.Data.At(p.At.Offset(page, d.head, slot)), (*float32)(scales), group, step)
}

// largestOf has, by type, the magnitude to which scales bring a row's largest element; 0: scales are 1, since the type
// has float32's range.
var largestOf = [attn.DTypes]float64{attn.Float16: 65504, attn.E4M3: half.MaxE4M3, attn.Int8: half.MaxInt8}

// headroom is, by type, the largest element that a page can store, over the largest element of the page's first token. Larger elements
// of later tokens saturate. 0: scales are 1.
var headroom = [attn.DTypes]float64{attn.Float16: 256, attn.E4M3: 16, attn.Int8: 4}

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
	if row, ok := any(row).([]float32); ok {
		return scaleTo(magnitude(row), most)
	}
	largest := F(0)
	for _, x := range row {
		largest = max(largest, x, -x) // NaN if one is NaN
	}
	return scaleTo(largest, most)
}

// magnitude returns the largest magnitude of a row, or NaN if an element is. Bits of magnitudes have the order of the
// numbers, and those of NaN are the largest.
func magnitude(row []float32) float32 {
	var most [4]uint32
	at := 0
	for ; at+4 <= len(row); at += 4 {
		for i, x := range (*[4]float32)(row[at:]) {
			most[i] = max(most[i], math.Float32bits(x)&^(1<<31))
		}
	}
	for _, x := range row[at:] {
		most[0] = max(most[0], math.Float32bits(x)&^(1<<31))
	}
	return math.Float32frombits(max(most[0], most[1], most[2], most[3]))
}

// pageScaleOf returns the scale of a page from the row of its first token: scaleOf with headroom, without elements that are NaN. NaN is
// stored as an element, so later tokens keep their numbers. The scale of a row of zeros is 1.
func pageScaleOf[F lean.Float](row []F, t attn.DType) float32 {
	largest := F(0)
	for _, x := range row {
		if x == x {
			largest = max(largest, x, -x)
		}
	}
	if largest == 0 || headroom[t] == 0 {
		return 1
	}
	return scaleTo(largest, largestOf[t]/headroom[t])
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
		if to, ok := any(part).([]float32); ok {
			vector.Divide(to, any(row).([]float32)[:len(to)], scale)
		} else {
			for i := range part {
				part[i] = row[i] / F(scale)
			}
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
