package linear

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
)

// Weights whose columns have an order read a copy of x in that order. Layers of one x and one order share the copy.

// orderRun makes a copy of the rows of x. As a task for the pool its workers are shares of the rows.
type orderRun struct {
	copies []orderedX // the last one is being made
	shares int
}

// orderedX is a copy of x.
type orderedX struct {
	x        unsafe.Pointer
	xRow     int // bytes
	order    []int32
	rows     int
	elements cpu.Aligned
}

const copyNanos = 1 // nanoseconds to copy an element

// begin forgets the copies. Their memory stays.
func (r *orderRun) begin() {
	for i := range r.copies {
		c := &r.copies[i]
		c.x, c.order = nil, nil
	}
	r.copies = r.copies[:0]
}

// of returns the rows of x, float32, in an order.
func (r *orderRun) of(e *cpu.Engine, x unsafe.Pointer, xRow int, order []int32, rows int) (unsafe.Pointer, error) {
	for i := range r.copies {
		if c := &r.copies[i]; c.x == x && c.xRow == xRow && unsafe.SliceData(c.order) == unsafe.SliceData(order) {
			return c.elements.At, nil
		}
	}
	if n := len(r.copies); n < cap(r.copies) {
		r.copies = r.copies[:n+1]
	} else {
		r.copies = append(r.copies, orderedX{})
	}
	c := &r.copies[len(r.copies)-1]
	c.x, c.xRow, c.order, c.rows = x, xRow, order, rows
	c.elements.Grow(rows * len(order) * 4)
	r.shares = min(rows, cpu.ThreadsFor(float64(rows*len(order))*copyNanos))
	return c.elements.At, e.RunOn(r, r.shares, r.shares)
}

// Work copies a share of the rows.
func (r *orderRun) Work(i, _ int) {
	c := &r.copies[len(r.copies)-1]
	n := len(c.order)
	for row := i * c.rows / r.shares; row < (i+1)*c.rows/r.shares; row++ {
		x, y := unsafe.Slice((*float32)(unsafe.Add(c.x, row*c.xRow)), n), unsafe.Slice((*float32)(unsafe.Add(c.elements.At, 4*row*n)), n)
		for j, from := range c.order {
			y[j] = x[from]
		}
	}
}
