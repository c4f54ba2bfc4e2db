package attn

import (
	"fmt"
	"math"
)

// MostPlanes is the most planes that a format has.
const MostPlanes = 4

// Format says what the pages of a layer hold. It is the one description of pages: caches, page stores, saved sequences,
// engines and appends read it. A dense tensor of keys and one of values are two planes.
//
//   - A key is the rows of the first KeyPlanes planes, side by side.
//   - A value is the first Value.Dim elements of the row of plane Value.Plane. That plane is the one behind those of
//     the keys, or one of these: then a token's value is a part of its key, and no memory of its own holds it.
type Format struct {
	Planes    [MostPlanes]Plane // a plane without elements ends the list
	KeyPlanes int
	Value     Columns
}

// Plane is a row of elements for each token and KV head, and the scales of these elements.
type Plane struct {
	DType  DType
	Dim    int  // columns of a row: numbers
	Mixed  bool // rows are multiplied by a Hadamard matrix: see half.MixQ4
	Scales Scales
	Group  int         // columns that share a scale, with ScalesByGroup
	At     PageStrides // where rows lie
}

// Elements returns the elements of a row.
func (p *Plane) Elements() int { return p.Dim / p.DType.Columns() }

// Columns are the first Dim elements of the rows of a plane.
type Columns struct{ Plane, Dim int }

// Scales says which elements of a plane share a scale: a float32 that an engine multiplies them by.
type Scales uint8

const (
	NoScales      Scales = iota
	ScalesByHead         // those of a KV head, in all pages
	ScalesByPage         // those of a KV head in a page
	ScalesByToken        // those of a KV head of a token
	ScalesByGroup        // so many neighbouring columns of a KV head of a token
)

// String returns the words that follow "a plane with".
func (s Scales) String() string {
	if names := [...]string{"no scales", "a scale for each head", "a scale for each page and head", "a scale for each token and head",
		"scales for groups of columns"}; int(s) < len(names) {
		return names[s]
	}
	return fmt.Sprintf("Scales(%d)", uint8(s))
}

// Separate returns the format of keys and values of one type, each in a plane of its own, without scales.
func Separate(t DType, dim, valueDim int, key, value PageStrides) Format {
	return Format{
		Planes:    [MostPlanes]Plane{{DType: t, Dim: dim, At: key}, {DType: t, Dim: valueDim, At: value}},
		KeyPlanes: 1, Value: Columns{Plane: 1, Dim: valueDim},
	}
}

// As returns f with all planes of one type.
func (f Format) As(t DType) Format {
	for i := range f.planes() {
		f.Planes[i].DType = t
	}
	return f
}

// Packed returns f with its rows in pages of some heads and tokens: the rows of a head lie together, and the heads of a page.
func (f Format) Packed(heads, tokens int) Format {
	for i := range f.planes() {
		p := &f.Planes[i]
		n := p.Elements()
		p.At = PageStrides{Page: Product(heads, tokens, n), Head: Product(tokens, n), Row: n}
	}
	return f
}

// OfHeads returns f for pages that have some of its heads alone.
func (f Format) OfHeads(heads, all int) Format {
	for i := range f.planes() {
		p := &f.Planes[i].At
		p.Page = p.Page / all * heads
	}
	return f
}

// planes are those that there are.
func (f *Format) planes() []Plane {
	for i := range f.Planes {
		if f.Planes[i].Dim == 0 {
			return f.Planes[:i]
		}
	}
	return f.Planes[:]
}

// Key returns the first plane of the keys.
func (f *Format) Key() *Plane { return &f.Planes[0] }

// ValuePlane returns the plane that values are in.
func (f *Format) ValuePlane() *Plane { return &f.Planes[f.Value.Plane] }

// InKeys reports whether values are parts of keys.
func (f *Format) InKeys() bool { return f.Value.Plane < f.KeyPlanes }

// KeyDim returns the elements of a key.
func (f *Format) KeyDim() (n int) {
	for i := range f.Planes[:f.KeyPlanes] {
		n += f.Planes[i].Dim
	}
	return n
}

// Features returns what an engine must be able to do to read f.
func (f *Format) features() (x Feature) {
	if f.KeyPlanes > 1 {
		x |= SeveralPlanes
	}
	if f.InKeys() {
		x |= ValuesInKeys
	}
	for i := range f.planes() {
		if f.Planes[i].Mixed {
			x |= MixedKeys
		}
		if p := &f.Planes[i]; p.Scales != NoScales {
			x |= Scaled
		} else if p.DType != f.Planes[0].DType {
			x |= SeveralTypes
		}
	}
	return x
}

// TokenBytes returns the bytes of a token of one KV head: of its elements, and of the scales that are its own.
func (f *Format) TokenBytes() (n int) {
	for s := range f.Slabs {
		n += s.Row * s.DType.Size()
	}
	return n
}

// Slab is memory of a layer: the elements of a plane, or its scales.
type Slab struct {
	Plane  int
	Scales bool
	DType  DType
	Row    int // elements of a token of a KV head; 0: the slab has one element for each page and KV head
}

// Slabs visits the slabs that a page has a part of, in the order in which a saved sequence has them. Scales of heads are in no page.
func (f *Format) Slabs(visit func(Slab) bool) {
	for i := range f.planes() {
		p := &f.Planes[i]
		if !visit(Slab{Plane: i, DType: p.DType, Row: p.Elements()}) {
			return
		}
		if p.Scales > ScalesByHead && !visit(Slab{Plane: i, Scales: true, DType: Float32, Row: p.scalesOfToken()}) {
			return
		}
	}
}

// ScaledByHead visits the planes whose scales are those of heads, which no slab has.
func (f *Format) ScaledByHead(visit func(plane int) bool) {
	for i := range f.planes() {
		if f.Planes[i].Scales == ScalesByHead && !visit(i) {
			return
		}
	}
}

// scalesOfToken returns the scales of a token's row.
func (p *Plane) scalesOfToken() int {
	switch p.Scales {
	case ScalesByToken:
		return 1
	case ScalesByGroup:
		return Ceil(p.Dim, p.Group)
	}
	return 0
}

// ScaleOf returns which of a plane's scales the first element of a row has, in pages of some heads and tokens.
func (p *Plane) ScaleOf(page, head, slot, heads, tokens int) int {
	switch p.Scales {
	case ScalesByHead:
		return head
	case ScalesByPage:
		return page*heads + head
	}
	return ((page*heads+head)*tokens + slot) * p.scalesOfToken()
}

// ScaleLen returns how many scales the plane has for pages [0, pages).
func (p *Plane) ScaleLen(pages, heads, tokens int) int {
	switch p.Scales {
	case NoScales:
		return 0
	case ScalesByHead:
		return heads
	case ScalesByPage:
		return Product(pages, heads)
	}
	return Product(pages, heads, tokens, p.scalesOfToken())
}

// PageBytes returns the bytes that a page of some heads and tokens has of the slab.
func (s Slab) PageBytes(heads, tokens int) int {
	if s.Row == 0 {
		return Product(heads, s.DType.Size())
	}
	return Product(heads, tokens, s.Row, s.DType.Size())
}

// Memory is where an engine has the slabs of a layer, plane by plane.
type Memory[B any] [MostPlanes]struct{ Data, Scales B }

// InPlanes returns memory of planes without scales.
func InPlanes[B any](planes ...B) (m Memory[B]) {
	for i, b := range planes {
		m[i].Data = b
	}
	return m
}

// At returns where the memory of a slab is noted.
func (m *Memory[B]) At(s Slab) *B {
	if s.Scales {
		return &m[s.Plane].Scales
	}
	return &m[s.Plane].Data
}

// Check reports what is wrong with f. Errors wrap ErrShape or ErrDType.
func (f *Format) Check(op string) error {
	planes := f.planes()
	for i := range f.Planes {
		p := &f.Planes[i]
		switch {
		case p.Dim < 0 || p.Dim > math.MaxInt32:
			return Errorf(op, ErrShape, "plane %d has rows of %d elements", i, p.Dim)
		case p.Dim == 0 && (*p != Plane{} || i < len(planes)):
			return Errorf(op, ErrShape, "plane %d has no elements", i)
		case p.Dim == 0:
			continue
		case i > len(planes):
			return Errorf(op, ErrShape, "plane %d is behind one without elements", i)
		case p.DType.Size() == 0:
			return Errorf(op, ErrDType, "keys and values of %v", p.DType)
		case p.Dim%p.DType.Columns() != 0:
			return Errorf(op, ErrShape, "plane %d has rows of %d columns of %v, which has %d in an element", i, p.Dim, p.DType, p.DType.Columns())
		case p.Mixed && (p.DType != Q4 || i > 0 || f.KeyPlanes > 1 || f.InKeys()):
			return Errorf(op, ErrShape, "plane %d of %v is mixed; a plane of %v can be that has all of the keys, and no values", i, p.DType, Q4)
		case p.DType.Columns() > 1 && p.Scales != NoScales:
			return Errorf(op, ErrShape, "plane %d of %v has %v; its elements have scales of their own", i, p.DType, p.Scales)
		case p.Scales > ScalesByGroup:
			return Errorf(op, ErrShape, "plane %d has %v", i, p.Scales)
		case p.Scales == ScalesByGroup && (p.Group < 1 || p.Group > p.Dim) || p.Scales != ScalesByGroup && p.Group != 0:
			return Errorf(op, ErrShape, "plane %d has %v, groups of %d of %d columns", i, p.Scales, p.Group, p.Dim)
		}
		name := "key"
		if i >= f.KeyPlanes {
			name = "value"
		}
		if err := p.At.Check(op, name); err != nil {
			return err
		}
	}
	switch v := f.Value; {
	case f.KeyPlanes < 1 || f.KeyPlanes > len(planes):
		return Errorf(op, ErrShape, "keys of %d planes, of %d in all", f.KeyPlanes, len(planes))
	case v.Plane < 0 || v.Plane >= len(planes) || v.Plane > f.KeyPlanes:
		return Errorf(op, ErrShape, "values in plane %d, of %d with keys and %d in all", v.Plane, f.KeyPlanes, len(planes))
	case len(planes) > max(f.KeyPlanes, v.Plane+1):
		return Errorf(op, ErrShape, "%d planes; keys and values use %d", len(planes), max(f.KeyPlanes, v.Plane+1))
	case v.Dim < 1 || v.Dim > planes[v.Plane].Dim:
		return Errorf(op, ErrShape, "values of %d elements, of a plane of %d", v.Dim, planes[v.Plane].Dim)
	case v.Plane == f.KeyPlanes && v.Dim != planes[v.Plane].Dim:
		return Errorf(op, ErrShape, "values of %d elements, and a plane of %d that nothing else reads", v.Dim, planes[v.Plane].Dim)
	}
	return nil
}
