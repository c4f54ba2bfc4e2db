package layers

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// RoundedProducts is the operands of a product in the gradients of linear layers of one x. DY is the gradient of the output of one layer, as
// [Rounding] stores the gradient. Scratch has as many elements as [Engine.RoundedXScratch] or [Engine.RoundedWScratch] returns.
type RoundedProducts struct {
	Rows, In                     int
	Outs                         []int // of all layers
	Layer                        int
	Products                     attn.DType
	DY, With, Plus, Out, Scratch gpu.Memory // With: w for the gradient of x, and x for that of w
	Norm                         *Norm      // of x; nil: none
}

func (o *RoundedProducts) out() int { return o.Outs[o.Layer] }

// inHalves reports whether [Rounding] stores 16 bits: kernels of hopper.go then compute all products of the layers.
func (d *Engine) inHalves(o *RoundedProducts) bool {
	for _, out := range o.Outs {
		toX := Product{M: o.Rows, N: o.In, K: out, Products: o.Products}
		toW := Product{M: out, N: o.In, K: o.Rows, Transposed: true, Products: o.Products}
		if !toX.rounds() || !toW.rounds() || !d.untransposed(&toX) || !d.untransposed(&toW) {
			return false
		}
	}
	return true
}

// ofHalves returns a product of a gradient in 16 bits, the number of float32 of scratch memory, and the launch. Its second operand, of n
// elements, is rounded to scratch memory.
func (d *Engine) ofHalves(o *RoundedProducts, p hopperProduct, n int) (hopperProduct, hopperLaunch, int, error) {
	r := scratch{of: o.Scratch}
	p.a, p.wide = o.DY, o.out()
	p.a.DType = o.Products
	p.parts = []LinearPart{{Out: o.In, W: r.takeOf(n, o.Products), Y: o.Out}}
	l, err := d.hopperLaunchOf(o.Products, p.layout, p.m, p.k, p.parts)
	p.scratch = r.take(l.scratch())
	return p, l, r.used, err
}

// halvesToX is ofHalves for the gradient of x.
func (d *Engine) halvesToX(o *RoundedProducts) (hopperProduct, hopperLaunch, int, error) {
	return d.ofHalves(o, hopperProduct{m: o.Rows, k: o.out(), layout: hopperLayout{b: true}, plus: o.Plus}, o.out()*o.In)
}

// halvesToW is ofHalves for the gradient of w.
func (d *Engine) halvesToW(o *RoundedProducts) (hopperProduct, hopperLaunch, int, error) {
	return d.ofHalves(o, hopperProduct{m: o.out(), k: o.Rows, layout: hopperLayout{a: true, b: true}}, o.Rows*o.In)
}

// checkHalves checks the operands of a product of a gradient in 16 bits.
func (o *RoundedProducts) checkHalves(op string, with, out, need int) error {
	if err := o.With.CheckFloats(op, "w or x", with); err != nil {
		return err
	}
	if err := o.Out.CheckFloats(op, "the gradient", out); err != nil {
		return err
	}
	if need == 0 {
		return nil
	}
	return o.Scratch.CheckFloats(op, "the scratch", need)
}

// rowsRoundParams is struct RowsRoundParams.
type rowsRoundParams struct {
	x, before, y, sums               uint64
	rows, n, each, dtype, activation int32
	_                                [4]byte
}

// Rounding is the operands of a launch that stores X, the gradient of a layer's output, in Y for [RoundedProducts], and in Sums the sums over
// each of [SumParts] parts of the rows. Sums may have no buffer. Y has as many bytes as X. With Before, X is the gradient of
// Activation(Before), and Y that of Before.
type Rounding struct {
	RoundedProducts
	Activation         attn.Activation
	X, Before, Y, Sums gpu.Memory
}

// Rounding queues a Rounding.
func (d *Engine) Rounding(s *cuda.Stream, o *Rounding) error {
	const op = "rounding"
	n, all := o.out(), attn.Product(o.Rows, o.out())
	for _, x := range []struct {
		name string
		of   *gpu.Memory
		n    int
	}{{"x", &o.X, all}, {"y", &o.Y, all}, {"the sums", &o.Sums, SumParts(o.Rows) * n}, {"the activation's input", &o.Before, all}} {
		if (x.of == &o.Sums || x.of == &o.Before) && x.of.Buffer == nil {
			continue
		}
		if err := checkLooseFloats(op, x.name, x.of, x.n); err != nil {
			return err
		}
	}
	if d.inHalves(&o.RoundedProducts) {
		if !fours(n, o.X, o.Before, o.Y) {
			return gpu.Errorf(op, attn.ErrShape, "an operand does not begin at a multiple of 16 bytes")
		}
		p := rowsRoundParams{x: o.X.Address(), before: o.Before.AddressOr0(), activation: int32(o.Activation), y: o.Y.Address(), sums: o.Sums.AddressOr0(), rows: int32(o.Rows), n: int32(n), each: int32(attn.Ceil(o.Rows, SumParts(o.Rows))), dtype: gpu.Code(o.Products)}
		return launchRows(d, s, func(k *rowsKernels) *cuda.Function { return k.round }, SumParts(o.Rows)*attn.Ceil(n, rowsColumns), &p, o.X, o.Before, o.Y, o.Sums)
	}
	var err error
	if o.Before.Buffer != nil {
		err = d.Slopes(s, &Slopes{N: all, Width: all, Step: all, Activation: o.Activation, DY: o.X, X: o.Before, DX: o.Y})
	} else {
		err = d.Move(s, &Move{Move: attn.Move{Dims: [3]int{1, 1, 1}, N: all}, X: o.X, Y: o.Y})
	}
	if err != nil || o.Sums.Buffer == nil {
		return err
	}
	return d.sumParts(s, o.Rows, n, o.Y, gpu.Memory{}, o.Sums)
}

// AddParts queues y, the sum of `parts` vectors of n elements.
func (d *Engine) AddParts(s *cuda.Stream, parts, n int, x, y gpu.Memory) error {
	const op = "sums of parts"
	if err := checkLooseFloats(op, "x", &x, attn.Product(parts, n)); err != nil {
		return err
	}
	if err := checkLooseFloats(op, "y", &y, n); err != nil {
		return err
	}
	return d.addParts(s, parts, n, x, y)
}

// toX returns the product of the gradient of x.
func (o *RoundedProducts) toX() Product {
	return Product{M: o.Rows, N: o.In, K: o.out(), A: o.DY, B: o.With, C: o.Out, Plus: o.Plus, Products: o.Products, Scratch: o.Scratch}
}

// RoundedX queues the gradient of x, DY W + Plus.
func (d *Engine) RoundedX(s *cuda.Stream, o *RoundedProducts) error {
	if d.inHalves(o) {
		p, l, need, err := d.halvesToX(o)
		if err != nil {
			return err
		}
		if err := o.checkHalves("gradient of x", o.out()*o.In, o.Rows*o.In, need); err != nil {
			return err
		}
		if err := d.roundTo(s, o.Products, l.flags(p.scratch), Convert{N: o.out() * o.In, X: o.With, Y: p.parts[0].W}); err != nil {
			return err
		}
		return d.queueHopper(s, &p, &l)
	}
	p := o.toX()
	return d.Product(s, &p)
}

// RoundedXScratch returns how many float32 Scratch needs for RoundedX. The error is the driver's.
func (d *Engine) RoundedXScratch(o *RoundedProducts) (int, error) {
	if d.inHalves(o) {
		_, _, n, err := d.halvesToX(o)
		return n, err
	}
	p := o.toX()
	return d.ProductScratch(&p)
}

// toW returns the product of the gradient of w, and the number of float32 of scratch memory for the norm of x.
func (o *RoundedProducts) toW() (p Product, apart int) {
	p = Product{M: o.out(), N: o.In, K: o.Rows, Transposed: true, A: o.DY, B: o.With, C: o.Out, Products: o.Products, Scratch: o.Scratch}
	if o.Norm != nil {
		r := scratch{of: o.Scratch}
		p.B = r.take(o.Rows * o.In)
		apart = r.used
		p.Scratch = r.rest()
	}
	return p, apart
}

// RoundedW queues the gradient of w, the transpose of DY times norm(x).
func (d *Engine) RoundedW(s *cuda.Stream, o *RoundedProducts) error {
	if d.inHalves(o) {
		return d.roundedW(s, o)
	}
	need, err := d.RoundedWScratch(o)
	if err != nil {
		return err
	}
	if need > 0 {
		if err := o.Scratch.CheckFloats("gradient of w", "the scratch", need); err != nil {
			return err
		}
	}
	p, _ := o.toW()
	if o.Norm != nil {
		if err := d.Norm(s, o.Rows, o.In, o.With, p.B, o.Norm); err != nil {
			return err
		}
	}
	return d.Product(s, &p)
}

// roundedW is RoundedW of a gradient in 16 bits.
func (d *Engine) roundedW(s *cuda.Stream, o *RoundedProducts) error {
	p, l, need, err := d.halvesToW(o)
	if err != nil {
		return err
	}
	if err := o.checkHalves("gradient of w", o.Rows*o.In, o.out()*o.In, need+o.Rows); err != nil {
		return err
	}
	x, flags := p.parts[0].W, l.flags(p.scratch)
	if o.Norm == nil {
		if err := d.roundTo(s, o.Products, flags, Convert{N: o.Rows * o.In, X: o.With, Y: x}); err != nil {
			return err
		}
		return d.queueHopper(s, &p, &l)
	}
	if err := o.Norm.check("norm", o.In); err != nil {
		return err
	}
	if err := d.operandsOf(s, &Linear{Rows: o.Rows, In: o.In, X: o.With, Norm: o.Norm, Scratch: o.Scratch}, x); err != nil {
		return err
	}
	if err := d.roundTo(s, o.Products, flags); err != nil { // behind the operands, whose factors may lie there
		return err
	}
	return d.queueHopper(s, &p, &l)
}

// operandsOf queues y, the operands of norm(x) or x in 16 bits, which lie at the beginning of the scratch memory. Behind the operands lie
// factors of the rows, which are 1 in bfloat16.
func (d *Engine) operandsOf(s *cuda.Stream, o *Linear, y gpu.Memory) error {
	if n := o.Norm; n != nil && !n.RMS && y.DType == attn.BFloat16 && o.Rows >= leastNormRows && inWarps(o.In) {
		return d.rowsLayerNorm(s, o.Rows, o.In, o.X, y, n)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.queueOperands(s, o, y.DType, &gemmLaunch{parts: 1})
}

// RoundedWScratch returns how many float32 Scratch needs for RoundedW. The error is the driver's.
func (d *Engine) RoundedWScratch(o *RoundedProducts) (int, error) {
	if d.inHalves(o) {
		_, _, n, err := d.halvesToW(o)
		return n + o.Rows, err // with factors of the rows of the norm
	}
	p, apart := o.toW()
	n, err := d.ProductScratch(&p)
	return apart + n, err
}
