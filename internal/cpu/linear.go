package cpu

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/lean"
)

// LinearOperands are the matrices of a linear layer, dense and row-major:
//
//	X Rows x In, W Out x In, Bias Out, Times, Residual and Y Rows x Out
//
// Bias, Times and Residual may be nil. If F is a float32, W is of float32, float16 or bfloat16; if it is a
// float64, of float64. Y overlaps none of the others.
type LinearOperands[F lean.Float] struct {
	Rows, In, Out         int
	X                     []F
	W                     Buffer
	Bias, Times, Residual []F
	Y                     []F
	Activation            attn.Activation

	// RoundX lets X be rounded to the type of W where that is faster.
	RoundX bool
}

// Linear computes
//
//	y = f(x W^T + bias) times + residual,   f the Activation
//
// with sums in F, whatever the weights are stored in. A block of rows reads the weights from memory once: for
// few rows (see linear_run.go) the speed is that of memory, for many (linear_tiles.go) that of multiplication.
// NaN and infinities propagate, NaN through f too.
//
// The order of sums follows from In, from the kernels in use (see TierVariable) and from whether rows are few or
// many: a row has the same bits whatever the other rows are, on any number of threads.
//
// Everything is checked before anything is written; the error wraps ErrShape, ErrDType, ErrTier, or
// ErrPanic, with which Y is undefined. It does not allocate once e has computed a layer of this size.
func Linear[F lean.Float](e *Engine, o *LinearOperands[F]) error {
	if errInUse != nil {
		return errInUse
	}
	if err := o.check(); err != nil {
		return err
	}
	if o.Rows == 0 || o.Out == 0 {
		return nil
	}
	l := e.linear.get()
	l.kernels = linearTiers[inUse]
	l.in, l.out = o.In, o.Out
	l.size, l.dtype, l.wRow = int(unsafe.Sizeof(F(0))), o.W.DType, o.In*o.W.DType.Size()
	l.x, l.w, l.y = unsafe.Pointer(unsafe.SliceData(o.X)), o.W.Ptr, unsafe.Pointer(unsafe.SliceData(o.Y))
	l.bias, l.residual = unsafe.Pointer(unsafe.SliceData(o.Bias)), unsafe.Pointer(unsafe.SliceData(o.Residual))
	l.times = unsafe.Pointer(unsafe.SliceData(o.Times))
	l.activation, l.roundX = o.Activation, o.RoundX
	if err := l.run(&e.pool, o.Rows); err != nil {
		return err // what its workers did is not known: it is not used again
	}
	l.x, l.w, l.y, l.bias, l.times, l.residual = nil, nil, nil, nil, nil, nil
	for i := range l.workers {
		l.workers[i].args = dotArgs{}
	}
	e.linear.put(l)
	return nil
}

// check reports what is wrong with o.
func (o *LinearOperands[F]) check() error {
	const op = "linear"
	if o.Rows < 0 || o.In < 0 || o.Out < 0 {
		return attn.Errorf(op, attn.ErrShape, "%d rows of %d elements, %d output features", o.Rows, o.In, o.Out)
	}
	if o.Activation >= attn.Activations {
		return attn.Errorf(op, attn.ErrShape, "the activation is %v", o.Activation)
	}
	if err := o.W.check(op, "the weight buffer"); err != nil {
		return err
	}
	size := int(unsafe.Sizeof(F(0)))
	if (size == 8) != (o.W.DType == attn.Float64) {
		return attn.Errorf(op, attn.ErrDType, "the weights are of %v, the rest has %d bytes an element", o.W.DType, size)
	}
	for _, m := range []struct {
		name            string
		got, rows, cols int
	}{
		{"x", len(o.X), o.Rows, o.In},
		{"the weights", o.W.Len, o.Out, o.In},
		{"the output", len(o.Y), o.Rows, o.Out},
		{"the bias", len(o.Bias), 1, o.Out},
		{"what it is multiplied by", len(o.Times), o.Rows, o.Out},
		{"the residual", len(o.Residual), o.Rows, o.Out},
	} {
		absent := m.name == "the bias" && o.Bias == nil || m.name == "the residual" && o.Residual == nil || m.name == "what it is multiplied by" && o.Times == nil
		if want := attn.Product(m.rows, m.cols); !absent && m.got < want {
			return attn.Errorf(op, attn.ErrShape, "%s has %d elements, want %d x %d", m.name, m.got, m.rows, m.cols)
		}
	}
	return nil
}
