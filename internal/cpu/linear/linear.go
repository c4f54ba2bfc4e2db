// Package linear computes linear layers on the CPU.
package linear

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/weight"
)

// kept is the state of linear layers in an engine.
type kept struct {
	runs       cpu.Spare[linearRun]
	quantised  cpu.Spare[quantisedRun]
	successors prefetchTable
}

// Operands are the matrices of a linear layer, dense and row-major:
//
//	X Rows x In, W Out x In, Bias Out, Times, Residual and Y Rows x Out
//
// Bias, Times and Residual may be nil. F is the type of the sums of W's format. Y overlaps none of the others.
type Operands[F lean.Float] struct {
	Rows, In, Out         int
	XRow, YRow            int // elements between two rows of X, and of Y; 0: In, and Out
	X                     []F
	W                     weight.Matrix
	Bias, Times, Residual []F
	Y                     []F
	Activation            attn.Activation

	// RoundX lets X be rounded to the type of W if that is faster: to 8 bits by block of 32 elements, if W has 8 or fewer bits.
	RoundX bool

	// QuantiseX rounds each row of X to the type of W, INT8 or E4M3, if there are weight.LeastQuantisedRows rows or more: see
	// weight.QuantiseRow. RoundX takes no effect on such rows.
	QuantiseX bool

	// AnyRows gives a row the same bits for any number of rows: sums have the order that a single row has.
	AnyRows bool
}

// Run computes
//
//	y = f(x W^T scales + bias) times + residual,   f the Activation
//
// with sums in F for any type of the weights. A block of rows reads the weights from memory once: few rows (see
// run.go) run at the speed of memory, many rows (tiles.go) at the speed of multiplication. NaN and infinities
// propagate, NaN through f too.
//
// The order of sums follows from In, from the kernels in use (see TierVariable) and from the choice between few and
// many rows, which AnyRows takes away: a row has the same bits for any other rows and any number of threads.
//
// Everything is checked before anything is written. The error wraps ErrShape, ErrDType, ErrTier, or ErrPanic; after
// ErrPanic Y is undefined. Run does not allocate once e has computed a layer of this size.
func Run[F lean.Float](e *cpu.Engine, o *Operands[F]) error {
	if err := cpu.CheckTier(); err != nil {
		return err
	}
	if err := o.check(); err != nil {
		return err
	}
	return run(e, unsafe.Slice(o, 1))
}

// run computes checked layers that can be computed together.
func run[F lean.Float](e *cpu.Engine, all []Operands[F]) error {
	if !all[0].quantises() {
		return linears(e, all)
	}
	for i := range all {
		if err := quantised(e, any(&all[i]).(*Operands[float32])); err != nil {
			return err
		}
	}
	return nil
}

// RunAll computes layers in order, with the same bits as Run: Times of a layer may be the Y of an earlier one. All
// layers are checked before anything is written. Layers of the same rows share one fork and one join, such as query,
// key and value, or the two halves of a gated unit. So do layers of one In and different X, such as those of heads, if
// the rows are few.
func RunAll[F lean.Float](e *cpu.Engine, all []Operands[F]) error {
	if err := cpu.CheckTier(); err != nil {
		return err
	}
	for i := range all {
		if err := all[i].check(); err != nil {
			return err
		}
	}
	for len(all) > 0 {
		n := 1
		if len(all) > 1 && waits(all[:1], &all[1]) {
			if all[0].joins(&all[1]) && all[0].Out == all[1].Out {
				n = 2
			}
		} else {
			for n < len(all) && all[0].joins(&all[n]) && !waits(all[:n], &all[n]) {
				n++
			}
		}
		if err := run(e, all[:n]); err != nil {
			return err
		}
		all = all[n:]
	}
	return nil
}

// joins reports whether another layer has rows of the same size, and weights of the same type.
func (o *Operands[F]) joins(other *Operands[F]) bool {
	return other.Rows == o.Rows && other.In == o.In && other.W.Format == o.W.Format && other.W.Group == o.W.Group && other.RoundX == o.RoundX && other.QuantiseX == o.QuantiseX && other.AnyRows == o.AnyRows
}

// Has reports whether the CPU in use has kernels for weights of a format.
func Has(f weight.Format) bool {
	k := linearTiers[cpu.InUse()]
	return k.dot[f][1] != nil || k.blocks.unpack[f] != nil || f == weight.E4M3
}

// rows returns the elements between two rows of X, and of Y.
func (o *Operands[F]) rows() (x, y int) {
	x, y = o.XRow, o.YRow
	if x == 0 {
		x = o.In
	}
	if y == 0 {
		y = o.Out
	}
	return x, y
}

// waits reports whether a layer needs the results of earlier ones.
func waits[F lean.Float](some []Operands[F], other *Operands[F]) bool {
	for i := range some {
		if y := unsafe.SliceData(some[i].Y); y != nil && (y == unsafe.SliceData(other.Times) || y == unsafe.SliceData(other.Residual)) {
			return true
		}
	}
	return false
}

// linears is run without quantised rows.
func linears[F lean.Float](e *cpu.Engine, all []Operands[F]) error {
	o := &all[0]
	if o.Rows == 0 {
		return nil
	}
	free := &cpu.Own[kept](e).runs
	l := free.Get()
	l.kernels = linearTiers[cpu.InUse()]
	l.in = o.In
	l.size, l.format, l.wRow = int(unsafe.Sizeof(F(0))), o.W.Format, o.W.Format.Size(o.In)
	l.roundX, l.anyRows, l.group = o.RoundX, o.AnyRows, o.W.Group
	l.layers, l.inTurn = l.layers[:0], false
	l.ordered.begin()
	for i := range all {
		o := &all[i]
		l.inTurn = l.inTurn || waits(all[:i], o)
		if o.Out > 0 {
			xRow, y := o.rows()
			x := unsafe.Pointer(unsafe.SliceData(o.X))
			if o.W.Order != nil {
				at, err := l.ordered.of(e, x, xRow*l.size, o.W.Order, o.Rows)
				if err != nil {
					return err
				}
				x, xRow = at, o.In
			}
			l.layers = append(l.layers, linearLayer{
				x: x, xRow: xRow * l.size, yRow: y * l.size,
				out: o.Out, w: o.W.Ptr, scales: unsafe.Pointer(unsafe.SliceData(o.W.Scales)), y: unsafe.Pointer(unsafe.SliceData(o.Y)), bias: unsafe.Pointer(unsafe.SliceData(o.Bias)),
				times: unsafe.Pointer(unsafe.SliceData(o.Times)), residual: unsafe.Pointer(unsafe.SliceData(o.Residual)), activation: o.Activation,
			})
		}
	}
	if err := l.run(e, o.Rows); err != nil {
		return err // the state of its workers is unknown: the run is not reused
	}
	clear(l.layers)
	l.ordered.begin()
	for i := range l.workers {
		l.workers[i].args = dotArgs{}
		l.workers[i].blocks.forget()
	}
	free.Put(l)
	return nil
}

// check returns the error of invalid operands.
func (o *Operands[F]) check() error {
	const op = "linear"
	if o.Rows < 0 || o.In < 0 || o.Out < 0 {
		return attn.Errorf(op, attn.ErrShape, "%d rows of %d elements, %d output features", o.Rows, o.In, o.Out)
	}
	xRow, yRow := o.rows()
	if xRow < o.In || yRow < o.Out {
		return attn.Errorf(op, attn.ErrShape, "rows of x are %d elements apart, and of y %d, want at least %d and %d", xRow, yRow, o.In, o.Out)
	}
	if o.Activation >= attn.Activations {
		return attn.Errorf(op, attn.ErrShape, "the activation is %v", o.Activation)
	}
	if err := o.W.Check(op, "the weight buffer"); err != nil {
		return err
	}
	size := int(unsafe.Sizeof(F(0)))
	if size != o.W.Format.Sums().Size() {
		return attn.Errorf(op, attn.ErrDType, "the weights are of %v, the rest has %d bytes an element", o.W.Format, size)
	}
	if o.In%o.W.Format.Block() != 0 {
		return attn.Errorf(op, attn.ErrShape, "rows of x have %d elements, and the weights are of %v: want a multiple of %d", o.In, o.W.Format, o.W.Format.Block())
	}
	if !Has(o.W.Format) {
		return attn.Errorf(op, attn.ErrUnsupported, "the weights are of %v, and the CPU has kernels for %s: convert the weights", o.W.Format, weight.Names(Has))
	}
	if err := o.checkQuantised(op); err != nil {
		return err
	}
	if n := len(o.W.Order); o.W.Order != nil && n != o.In {
		return attn.Errorf(op, attn.ErrShape, "the weights have an order of %d columns, want %d", n, o.In)
	}
	if want := attn.Product(o.Out, o.W.Groups(o.In)); o.W.Scales != nil && len(o.W.Scales) < want {
		return attn.Errorf(op, attn.ErrShape, "the weights have %d scales, want %d", len(o.W.Scales), want)
	}
	for _, m := range []struct {
		name                 string
		got, rows, cols, row int // row: elements between two rows
	}{
		{"x", len(o.X), o.Rows, o.In, xRow},
		{"the weights", o.W.Len, o.Out, o.In, o.In},
		{"the output", len(o.Y), o.Rows, o.Out, yRow},
		{"the bias", len(o.Bias), 1, o.Out, o.Out},
		{"what it is multiplied by", len(o.Times), o.Rows, o.Out, o.Out},
		{"the residual", len(o.Residual), o.Rows, o.Out, o.Out},
	} {
		absent := m.name == "the bias" && o.Bias == nil || m.name == "the residual" && o.Residual == nil || m.name == "what it is multiplied by" && o.Times == nil
		want := attn.Product(m.rows, m.cols)
		if want > 0 && want < math.MaxInt {
			if want = attn.Product(m.rows-1, m.row); want < math.MaxInt-m.cols {
				want += m.cols
			}
		}
		if !absent && m.got < want {
			return attn.Errorf(op, attn.ErrShape, "%s has %d elements, want %d x %d", m.name, m.got, m.rows, m.cols)
		}
	}
	return nil
}
