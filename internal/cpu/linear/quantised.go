package linear

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/vector"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/weight"
)

// Layers that quantise rows of x, as GPUs do. The kernels of float32 multiply the quantised numbers. Float32 has sums of integers up to 2^24
// exactly, in any order, so x of INT8 is cut into digits for which the sums are no larger: about twice the products of float32 for rows of up
// to 16512 elements, and three or four times for longer ones. So INT8 has the bits of exact sums.

// digits returns the base and the number of the digits that x is cut into. Base 0: x is not cut.
func digits(f weight.Format, in int) (base, n int) {
	if f == weight.E4M3 {
		return 0, 1
	}
	for _, c := range [...]struct{ most, base, n int }{{127, 0, 1}, {8, 16, 2}, {3, 7, 3}, {2, 4, 4}} {
		base, n = c.base, c.n
		if c.most*127*in <= 1<<24 {
			break
		}
	}
	return base, n
}

// quantisedBlock is the number of rows that are quantised at a time.
const quantisedBlock = 512

const (
	quantiseNanos = 4 // nanoseconds to quantise an element
	finishNanos   = 2 // nanoseconds to finish an output
)

// quantisedRun computes a layer. As a task for the pool its workers are shares of a block's rows, which are quantised or finished.
type quantisedRun struct {
	o           *Operands[float32]
	base, n     int
	first, rows int // the block
	shares      int
	finishes    bool
	scales      []float32
	bytes       cpu.Aligned // a row for each worker
	x, y        cpu.Aligned // for each digit: rows of x, and sums
}

func (o *Operands[F]) quantises() bool { return o.QuantiseX && o.Rows >= weight.LeastQuantisedRows }

// checkQuantised returns an error if x cannot be quantised by row.
func (o *Operands[F]) checkQuantised(op string) error {
	switch {
	case !o.QuantiseX:
	case !weight.QuantisesRows(o.W.Format):
		return attn.Errorf(op, attn.ErrUnsupported, "rows of x that are quantised, and weights of %v: want %s, or x as it is", o.W.Format, weight.Names(weight.QuantisesRows))
	case o.In > weight.MostQuantised:
		return attn.Errorf(op, attn.ErrUnsupported, "rows of x that are quantised have %d elements, want at most %d", o.In, weight.MostQuantised)
	}
	return nil
}

// quantised computes a checked layer.
func quantised(e *cpu.Engine, o *Operands[float32]) error {
	free := &cpu.Own[kept](e).quantised
	r := free.Get()
	r.o = o
	r.base, r.n = digits(o.W.Format, o.In)
	layer := Operands[float32]{In: o.In, Out: o.Out, W: o.W}
	if o.W.Format != weight.E4M3 {
		layer.W.Scales = nil
	}
	for r.first = 0; r.first < o.Rows; r.first += r.rows {
		r.rows = min(quantisedBlock, o.Rows-r.first)
		r.x.Grow(4 * r.n * r.rows * o.In)
		r.y.Grow(4 * r.n * r.rows * o.Out)
		if cap(r.scales) < r.rows {
			r.scales = make([]float32, r.rows)
		}
		r.scales = r.scales[:r.rows]
		if err := r.each(e, false, r.rows*o.In*quantiseNanos); err != nil {
			return err
		}
		layer.Rows = r.rows
		for digit := range r.n {
			layer.X, layer.Y = r.floats(&r.x, digit, o.In), r.floats(&r.y, digit, o.Out)
			if err := linears(e, []Operands[float32]{layer}); err != nil {
				return err
			}
		}
		if err := r.each(e, true, r.n*r.rows*o.Out*finishNanos); err != nil {
			return err
		}
	}
	r.o = nil
	free.Put(r)
	return nil
}

func (r *quantisedRun) each(e *cpu.Engine, finishes bool, nanos int) error {
	r.finishes, r.shares = finishes, min(r.rows, cpu.ThreadsFor(float64(nanos)))
	r.bytes.Grow(r.shares * r.o.In)
	return e.RunOn(r, r.shares, r.shares)
}

// floats returns a digit's rows of `columns` elements.
func (r *quantisedRun) floats(of *cpu.Aligned, digit, columns int) []float32 {
	return unsafe.Slice((*float32)(unsafe.Add(of.At, 4*digit*r.rows*columns)), r.rows*columns)
}

// Work quantises or finishes a share of the rows.
func (r *quantisedRun) Work(i, _ int) {
	for row := i * r.rows / r.shares; row < (i+1)*r.rows/r.shares; row++ {
		if r.finishes {
			r.finish(row)
		} else {
			r.quantise(row, unsafe.Slice((*byte)(unsafe.Add(r.bytes.At, i*r.o.In)), r.o.In))
		}
	}
}

// quantise makes a row of each digit.
func (r *quantisedRun) quantise(row int, bytes []byte) {
	o, n := r.o, r.o.In
	xRow, _ := o.rows()
	r.scales[row] = weight.QuantiseRow(o.W.Format, bytes, o.X[(r.first+row)*xRow:][:n])
	lowest := r.floats(&r.x, 0, n)[row*n:][:n]
	if o.W.Format == weight.E4M3 {
		for k, b := range bytes {
			lowest[k] = half.E4M3(b).Float32()
		}
		return
	}
	for k, b := range bytes {
		lowest[k] = float32(int8(b))
	}
	for digit := 1; digit < r.n; digit++ {
		high, by := r.floats(&r.x, digit, n)[row*n:][:n], float32(r.base)
		for k, v := range lowest {
			high[k] = float32(math.RoundToEven(float64(v / by)))
			lowest[k] = v - float32(by*high[k])
		}
		lowest = high
	}
}

// finish makes a row of y of the sums.
func (r *quantisedRun) finish(row int) {
	o, n := r.o, r.o.Out
	_, yRow := o.rows()
	y := o.Y[(r.first+row)*yRow:][:n]
	if r.n == 1 {
		copy(y, r.floats(&r.y, 0, n)[row*n:])
	} else {
		for c := range y {
			var sum int32
			for digit := r.n - 1; digit >= 0; digit-- {
				sum = sum*int32(r.base) + int32(r.floats(&r.y, digit, n)[row*n+c])
			}
			y[c] = float32(sum)
		}
	}
	if o.W.Format != weight.E4M3 && o.W.Scales != nil {
		multiplyBy(y, o.W.Scales[:n])
	}
	for c := range y {
		y[c] *= r.scales[row]
	}
	if o.Bias != nil {
		vector.Add(y, o.Bias[:n])
	}
	vector.Activate(o.Activation, y)
	at := (r.first + row) * n
	if o.Times != nil {
		multiplyBy(y, o.Times[at:][:n])
	}
	if o.Residual != nil {
		vector.Add(y, o.Residual[at:][:n])
	}
}
