package variant

import (
	"fmt"
	"math"
	"unsafe"
)

// Tensor is the elements of a declared tensor, row-major. One of the slices has them.
type Tensor struct {
	Shape []int
	F32   []float32
	F64   []float64
	I32   []int32
	I64   []int64
}

// SetInts sets the elements to x, which is not copied.
func (t *Tensor) SetInts(x []int) {
	if unsafe.Sizeof(0) == 8 {
		t.I64 = unsafe.Slice((*int64)(unsafe.Pointer(unsafe.SliceData(x))), len(x))
	} else {
		t.I32 = unsafe.Slice((*int32)(unsafe.Pointer(unsafe.SliceData(x))), len(x))
	}
}

// Int reports whether the elements are ints.
func (t *Tensor) Int() bool { return t.I32 != nil || t.I64 != nil }

// Len returns the number of elements.
func (t *Tensor) Len() int { return len(t.F32) + len(t.F64) + len(t.I32) + len(t.I64) }

// At returns element i.
func (t *Tensor) At(i int) float64 {
	switch {
	case t.F32 != nil:
		return float64(t.F32[i])
	case t.F64 != nil:
		return t.F64[i]
	case t.I32 != nil:
		return float64(t.I32[i])
	}
	return float64(int32(t.I64[i]))
}

// Interval is the numbers from Lo to Hi. NaN may be a value beside them if Lo is -Inf and Hi is +Inf.
type Interval struct{ Lo, Hi float64 }

// Between returns the interval of the ints from lo to hi.
func Between(lo, hi int) Interval { return Interval{float64(lo), float64(hi)} }

// all returns an interval with every value of a kind.
func all(k Kind) Interval {
	switch k {
	case Int:
		return Interval{math.MinInt32, math.MaxInt32}
	case Bool:
		return Interval{0, 1}
	}
	return Interval{math.Inf(-1), math.Inf(1)}
}

// Bounds are ranges of the variables. The score and elements of floats are any numbers, or with Finite any finite numbers of float32.
type Bounds struct {
	Query, Key, Head, Sequence Interval
	Finite                     bool

	// Tensors are the tensors' elements, or nil. Without them an element may be any number.
	Tensors []Tensor
}

// float returns the interval of the score, and of an element that is a float.
func (b *Bounds) float() Interval {
	if b.Finite {
		return Interval{-math.MaxFloat32, math.MaxFloat32}
	}
	return all(Float)
}

// scanned is the most elements that Range reads for the bounds of an element.
const scanned = 4096

// Never and Always are the results of Sees for keys that no query sees, and for keys that all see.
const (
	Never = iota
	Sometimes
	Always
)

// Sees returns Never, Always or Sometimes: which of the keys within bounds the queries within bounds see. Sometimes is also the
// answer if Sees does not know. scratch is of len(p.Nodes).
func (p *Program) Sees(b *Bounds, scratch []Interval) int {
	if p.Visible < 0 {
		return Always
	}
	switch r := p.Range(p.Visible, b, scratch); {
	case r.Hi == 0:
		return Never
	case r.Lo == 1:
		return Always
	}
	return Sometimes
}

// Range returns an interval with all values of node i within the bounds.
func (p *Program) Range(i int, b *Bounds, scratch []Interval) Interval {
	for k := range p.Nodes[:i+1] {
		scratch[k] = p.bound(&p.Nodes[k], b, scratch)
	}
	return scratch[i]
}

// bound returns the interval of a node, from those of its arguments.
func (p *Program) bound(n *Node, b *Bounds, of []Interval) Interval {
	switch n.Op {
	case Constant:
		if n.Value != n.Value {
			return all(Float)
		}
		return Interval{n.Value, n.Value}
	case Score:
		return b.float()
	case Query:
		return b.Query
	case Key:
		return b.Key
	case Head:
		return b.Head
	case Sequence:
		return b.Sequence
	case Element:
		return p.boundElement(n, b, of)
	case Where:
		switch c := of[n.Args[0]]; {
		case c.Lo == 1:
			return of[n.Args[1]]
		case c.Hi == 0:
			return of[n.Args[2]]
		}
		return hull(of[n.Args[1]], of[n.Args[2]])
	}
	x := of[n.Args[0]]
	if len(n.Arguments(p)) == 1 {
		return n.boundUnary(x)
	}
	return n.boundBinary(x, of[n.Args[1]])
}

func hull(x, y Interval) Interval { return Interval{min(x.Lo, y.Lo), max(x.Hi, y.Hi)} }

// checked returns an interval for the exact values [lo, hi] of a node: all if one is NaN, or beyond the ints. The ends of floats move
// outwards, because engines round.
func (n *Node) checked(lo, hi float64) Interval {
	if lo != lo || hi != hi {
		return all(n.Kind)
	}
	if n.Kind == Int {
		if lo < math.MinInt32 || hi > math.MaxInt32 {
			return all(Int)
		}
		return Interval{lo, hi}
	}
	if n.Kind == Bool {
		return Interval{lo, hi}
	}
	const u = 1e-5
	return Interval{lo - u*math.Abs(lo) - 1e-30, hi + u*math.Abs(hi) + 1e-30}
}

// boundUnary bounds a function of one argument. All but Abs are monotonic.
func (n *Node) boundUnary(x Interval) Interval {
	exact := Node{Op: n.Op} // without wrapping around
	lo, hi := exact.Of(x.Lo, 0, 0), exact.Of(x.Hi, 0, 0)
	switch n.Op {
	case Abs:
		if x.Lo <= 0 && x.Hi >= 0 {
			lo, hi = 0, max(lo, hi)
		}
	case Log, Sqrt:
		if x.Lo < 0 {
			return all(n.Kind) // NaN
		}
	}
	if x == all(Float) && n.Kind == Float && n.Op != ToFloat {
		return all(Float) // NaN, perhaps
	}
	return n.checked(min(lo, hi), max(lo, hi))
}

// boundBinary bounds a function of two arguments.
func (n *Node) boundBinary(x, y Interval) Interval {
	lo, hi := math.Inf(1), math.Inf(-1)
	exact := Node{Op: n.Op} // without wrapping around
	for _, a := range [2]float64{x.Lo, x.Hi} {
		for _, b := range [2]float64{y.Lo, y.Hi} {
			v := exact.Of(a, b, 0)
			if v != v {
				return all(n.Kind)
			}
			lo, hi = min(lo, v), max(hi, v)
		}
	}
	nan := x == all(Float) || y == all(Float)
	switch n.Op {
	case Divide:
		if y.Lo <= 0 && y.Hi >= 0 {
			return all(Float)
		}
	case Remainder:
		if math.Floor(x.Lo/y.Lo) != math.Floor(x.Hi/y.Lo) || y.Lo != y.Hi {
			return Interval{0, y.Hi - 1}
		}
	case Less:
		switch {
		case x.Hi < y.Lo && !nan:
			return Interval{1, 1}
		case x.Lo >= y.Hi && !nan:
			return Interval{0, 0}
		}
		return all(Bool)
	case LessEqual:
		switch {
		case x.Hi <= y.Lo && !nan:
			return Interval{1, 1}
		case x.Lo > y.Hi && !nan:
			return Interval{0, 0}
		}
		return all(Bool)
	case Equal:
		switch {
		case x.Lo == x.Hi && x == y:
			return Interval{1, 1}
		case (x.Hi < y.Lo || y.Hi < x.Lo) && !nan:
			return Interval{0, 0}
		}
		return all(Bool)
	}
	if nan && n.Kind == Float {
		return all(Float)
	}
	return n.checked(lo, hi)
}

// boundElement bounds an element of a tensor: by its elements, if they are few enough to look at.
func (p *Program) boundElement(n *Node, b *Bounds, of []Interval) Interval {
	if n.Kind == Float {
		return b.float()
	}
	if b.Tensors == nil {
		return all(n.Kind)
	}
	t := &b.Tensors[n.Tensor]
	rank := p.Tensors[n.Tensor].Rank
	first, end, count := [maxRank]int{}, [maxRank]int{}, 1
	for axis := range rank {
		r := of[n.Args[axis]]
		first[axis], end[axis] = int(max(r.Lo, 0)), int(min(r.Hi, float64(t.Shape[axis]-1)))+1
		if count *= max(end[axis]-first[axis], 0); count == 0 || count > scanned {
			return all(n.Kind)
		}
	}
	lo, hi := math.Inf(1), math.Inf(-1)
	for i := range count {
		at, k := i, 0
		index := [maxRank]int{}
		for axis := rank - 1; axis >= 0; axis-- {
			size := end[axis] - first[axis]
			index[axis], at = first[axis]+at%size, at/size
		}
		for axis := range rank {
			k = k*t.Shape[axis] + index[axis]
		}
		v := t.At(k)
		lo, hi = min(lo, v), max(hi, v)
	}
	return Interval{lo, hi}
}

// CheckTensors returns an error if tensors are not those that p declares, or if an index may be out of range within the bounds.
func (p *Program) CheckTensors(tensors []Tensor, b *Bounds) error {
	if len(tensors) != len(p.Tensors) {
		return fmt.Errorf("%d tensors; the variant has %d", len(tensors), len(p.Tensors))
	}
	for i := range tensors {
		t, d := &tensors[i], &p.Tensors[i]
		if len(t.Shape) != d.Rank || t.Int() != d.Int {
			return fmt.Errorf("%s has shape %v, ints: %t; the variant has %d axes, ints: %t", d.Name, t.Shape, t.Int(), d.Rank, d.Int)
		}
		n := 1
		for _, size := range t.Shape {
			n *= size
		}
		if t.Len() != n {
			return fmt.Errorf("%s has %d elements and shape %v", d.Name, t.Len(), t.Shape)
		}
	}
	shapes := make([][]int, len(tensors))
	for i := range tensors {
		shapes[i] = tensors[i].Shape
	}
	return p.CheckIndices(shapes, b)
}

// CheckIndices returns an error if tensors of these shapes are not those that p declares, or if an index may be out of range within the bounds.
func (p *Program) CheckIndices(shapes [][]int, b *Bounds) error {
	if len(shapes) != len(p.Tensors) {
		return fmt.Errorf("%d tensors; the variant has %d", len(shapes), len(p.Tensors))
	}
	for i, d := range p.Tensors {
		if len(shapes[i]) != d.Rank {
			return fmt.Errorf("%s has shape %v; the variant has %d axes", d.Name, shapes[i], d.Rank)
		}
	}
	if len(shapes) == 0 {
		return nil
	}
	scratch := make([]Interval, len(p.Nodes))
	p.Range(len(p.Nodes)-1, b, scratch)
	for i := range p.Nodes {
		n := &p.Nodes[i]
		if n.Op != Element {
			continue
		}
		for axis, arg := range n.Arguments(p) {
			size, r := shapes[n.Tensor][axis], scratch[arg]
			if r.Lo < 0 || r.Hi > float64(size-1) {
				return fmt.Errorf("%s: the index %s is between %.0f and %.0f, and the axis has %d elements: max(0, min(%s, %d)) is in range",
					n.text, p.Nodes[arg].text, r.Lo, r.Hi, size, p.Nodes[arg].text, size-1)
			}
		}
	}
	return nil
}
