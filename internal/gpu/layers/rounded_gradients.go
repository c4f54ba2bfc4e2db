package layers

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// RoundedProducts is the operands of the products in the gradients of linear layers of one x. DY has the gradients of the outputs, as
// [Rounding] stores them. Scratch has as many elements as [Engine.RoundedXScratch] or [Engine.RoundedWScratch] returns.
type RoundedProducts struct {
	Rows, In    int
	Outs        []int // of the layers
	Products    attn.DType
	DY, Scratch gpu.Memory
	X, DX       gpu.Memory
	W, DW       []gpu.Memory // of each layer. The gradients follow each other, each from a multiple of four elements on
	Norm        *Norm        // of X; nil: none
}

// before returns the columns of DY before layer i.
func (o *RoundedProducts) before(i int) (n int) {
	for _, out := range o.Outs[:i] {
		n += out
	}
	return n
}

// all returns the columns of DY.
func (o *RoundedProducts) all() int { return o.before(len(o.Outs)) }

// inHalves reports whether [Rounding] stores 16 bits: kernels of hopper.go then compute all products of the layers. DY is then a matrix with
// the columns of all layers, and otherwise a matrix of float32 for each layer.
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
func (d *Engine) ofHalves(o *RoundedProducts, p hopperProduct, y gpu.Memory, n int) (hopperProduct, hopperLaunch, int, error) {
	r := scratch{of: o.Scratch}
	p.a, p.wide = o.DY, o.all()
	p.a.DType = o.Products
	p.parts = []LinearPart{{Out: o.In, W: r.takeOf(n, o.Products), Y: y}}
	l, err := d.hopperLaunchOf(o.Products, p.layout, p.m, p.k, p.parts)
	p.scratch = r.take(p.slicesScratch(&l))
	return p, l, r.used, err
}

// halvesToX is ofHalves for the gradient of x.
func (d *Engine) halvesToX(o *RoundedProducts) (hopperProduct, hopperLaunch, int, error) {
	return d.ofHalves(o, hopperProduct{m: o.Rows, k: o.all(), layout: hopperLayout{b: true}}, o.DX, o.all()*o.In)
}

// halvesToW is ofHalves for the gradients of all w, which are one matrix.
func (d *Engine) halvesToW(o *RoundedProducts) (hopperProduct, hopperLaunch, int, error) {
	all := gpu.Memory{}
	if len(o.DW) > 0 {
		all = o.DW[0]
		all.Len = o.all() * o.In
	}
	return d.ofHalves(o, hopperProduct{m: o.all(), k: o.Rows, layout: hopperLayout{a: true, b: true}}, all, o.Rows*o.In)
}

// checkScratch checks the scratch memory of products.
func (o *RoundedProducts) checkScratch(op string, need int) error {
	if need == 0 {
		return nil
	}
	return o.Scratch.CheckFloats(op, "the scratch", need)
}

// checkLayers checks the memory of weights, or of their gradients.
func (o *RoundedProducts) checkLayers(op, name string, of []gpu.Memory) error {
	if len(of) != len(o.Outs) {
		return gpu.Errorf(op, attn.ErrShape, "%d of %s for %d layers", len(of), name, len(o.Outs))
	}
	for i := range of {
		if err := of[i].CheckFloats(op, name, o.Outs[i]*o.In); err != nil {
			return err
		}
	}
	return nil
}

// rowsRoundParams is struct RowsRoundParams.
type rowsRoundParams struct {
	x, before, y, sums                                  uint64
	rows, n, each, dtype, activation, step, tokens, dim int32
}

// Rounding is the operands of a launch that stores X, the gradient of the output of one layer, in DY, and in Sums the sums over each of
// [SumParts] parts of the rows. Sums may have no buffer. DY has as many bytes as the gradients of all layers in float32. With Before, X is the
// gradient of Activation(Before), and DY has that of Before. With Dim, X has the type of Products and the shape (Rows/Tokens, heads, Tokens,
// Dim), and there is no Before.
type Rounding struct {
	RoundedProducts
	Layer           int
	Activation      attn.Activation
	Tokens, Dim     int
	X, Before, Sums gpu.Memory
}

// heads returns the move of X to the gradient of the layer's output.
func (o *Rounding) heads() attn.Move {
	n, t, d := o.Outs[o.Layer], o.Tokens, o.Dim
	return attn.Move{Dims: [3]int{o.Rows / t, n / d, t}, N: d, From: attn.Lattice{Steps: [3]int{t * n, t * d, d}}, To: attn.Lattice{Steps: [3]int{t * n, d, n}}}
}

// checkHeads checks X with Dim.
func (o *Rounding) checkHeads(op string) error {
	switch n := o.Outs[o.Layer]; {
	case o.Tokens < 1 || o.Rows%o.Tokens != 0 || o.Dim%4 != 0 || n%o.Dim != 0:
		return gpu.Errorf(op, attn.ErrShape, "%d rows of %d tokens, %d elements of heads of %d", o.Rows, o.Tokens, n, o.Dim)
	case o.X.DType != o.Products || o.X.Len < o.Rows*n || o.X.Address()%8 != 0 || o.Before.Buffer != nil:
		return gpu.Errorf(op, attn.ErrShape, "x of %v has %d elements of %d", o.X.DType, o.X.Len, o.Rows*n)
	}
	return nil
}

// Rounding queues a Rounding.
func (d *Engine) Rounding(s *cuda.Stream, o *Rounding) error {
	const op = "rounding"
	n := o.Outs[o.Layer]
	all := attn.Product(o.Rows, n)
	for _, x := range []struct {
		name string
		of   *gpu.Memory
		n    int
	}{{"x", &o.X, all}, {"dy", &o.DY, attn.Product(o.Rows, o.all())}, {"the sums", &o.Sums, SumParts(o.Rows) * n}, {"the activation's input", &o.Before, all}} {
		if (x.of == &o.Sums || x.of == &o.Before) && x.of.Buffer == nil || x.of == &o.X && o.Dim > 0 {
			continue
		}
		if err := checkLooseFloats(op, x.name, x.of, x.n); err != nil {
			return err
		}
	}
	if o.Dim > 0 {
		if err := o.checkHeads(op); err != nil {
			return err
		}
	}
	if d.inHalves(&o.RoundedProducts) {
		y := o.DY
		y.Offset += 2 * int64(o.before(o.Layer))
		if !fours(n, o.Before, o.DY) || o.Dim == 0 && !fours(n, o.X) {
			return gpu.Errorf(op, attn.ErrShape, "an operand does not begin at a multiple of 16 bytes")
		}
		p := rowsRoundParams{x: o.X.Address(), before: o.Before.AddressOr0(), activation: int32(o.Activation), y: y.Address(), sums: o.Sums.AddressOr0(), rows: int32(o.Rows), n: int32(n), each: int32(attn.Ceil(o.Rows, SumParts(o.Rows))), dtype: gpu.Code(o.Products), step: int32(o.all()), tokens: int32(o.Tokens), dim: int32(o.Dim)}
		return launchRows(d, s, func(k *rowsKernels) *cuda.Function { return k.round }, SumParts(o.Rows)*attn.Ceil(n, rowsColumns), &p, o.X, o.Before, y, o.Sums)
	}
	y := o.layer(o.Layer)
	var err error
	if o.Before.Buffer != nil {
		err = d.Slopes(s, &Slopes{N: all, Width: all, Step: all, Activation: o.Activation, DY: o.X, X: o.Before, DX: y})
	} else if o.Dim > 0 {
		err = d.Move(s, &Move{Move: o.heads(), X: o.X, Y: y})
	} else {
		err = d.Move(s, &Move{Move: attn.Move{Dims: [3]int{1, 1, 1}, N: all}, X: o.X, Y: y})
	}
	if err != nil || o.Sums.Buffer == nil {
		return err
	}
	return d.sumParts(s, o.Rows, n, y, gpu.Memory{}, o.Sums)
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

// layer returns the gradient of a layer in float32.
func (o *RoundedProducts) layer(i int) gpu.Memory {
	return elementsFrom(o.DY, o.Rows*o.before(i), o.Rows*o.Outs[i])
}

// toX returns the product of a layer in the gradient of x.
func (o *RoundedProducts) toX(i int) Product {
	p := Product{M: o.Rows, N: o.In, K: o.Outs[i], A: o.layer(i), C: o.DX, Products: o.Products, Scratch: o.Scratch}
	if i > 0 {
		p.Plus = o.DX
	}
	return p
}

// RoundedX queues DX, the sum of DY W of the layers.
func (d *Engine) RoundedX(s *cuda.Stream, o *RoundedProducts) error {
	const op = "gradient of x"
	if err := o.checkLayers(op, "w", o.W); err != nil {
		return err
	}
	if err := o.DX.CheckFloats(op, "dx", o.Rows*o.In); err != nil {
		return err
	}
	if !d.inHalves(o) {
		for i := range o.Outs {
			p := o.toX(i)
			p.B = o.W[i]
			if err := d.Product(s, &p); err != nil {
				return err
			}
		}
		return nil
	}
	p, l, need, err := d.halvesToX(o)
	if err != nil {
		return err
	}
	if err := o.checkScratch(op, need); err != nil {
		return err
	}
	var round []Convert
	for i, w := range o.W {
		to := p.parts[0].W
		to.Offset, to.Len = to.Offset+2*int64(o.before(i)*o.In), o.Outs[i]*o.In
		round = append(round, Convert{N: to.Len, X: w, Y: to})
	}
	if err := d.roundTo(s, o.Products, round...); err != nil {
		return err
	}
	return d.queueHopper(s, &p, &l)
}

// RoundedXScratch returns how many float32 Scratch needs for RoundedX. The error is the driver's.
func (d *Engine) RoundedXScratch(o *RoundedProducts) (most int, err error) {
	if d.inHalves(o) {
		_, _, n, err := d.halvesToX(o)
		return n, err
	}
	for i := range o.Outs {
		p := o.toX(i)
		n, err := d.ProductScratch(&p)
		if err != nil {
			return 0, err
		}
		most = max(most, n)
	}
	return most, nil
}

// toW returns the product of the gradient of w of a layer. x has norm(X).
func (o *RoundedProducts) toW(i int, x, scratch gpu.Memory) Product {
	return Product{M: o.Outs[i], N: o.In, K: o.Rows, Transposed: true, A: o.layer(i), B: x, Products: o.Products, Scratch: scratch}
}

// normed returns scratch memory for norm(X), and the rest; without a norm, X.
func (o *RoundedProducts) normed() (x, rest gpu.Memory, apart int) {
	if o.Norm == nil {
		return o.X, o.Scratch, 0
	}
	r := scratch{of: o.Scratch}
	x = r.take(o.Rows * o.In)
	apart = r.used
	return x, r.rest(), apart
}

// RoundedW queues DW, for each layer the transpose of DY times norm(X).
func (d *Engine) RoundedW(s *cuda.Stream, o *RoundedProducts) error {
	const op = "gradient of w"
	if err := o.checkLayers(op, "dw", o.DW); err != nil {
		return err
	}
	if err := o.X.CheckFloats(op, "x", o.Rows*o.In); err != nil {
		return err
	}
	if d.inHalves(o) {
		return d.roundedW(s, o)
	}
	need, err := d.RoundedWScratch(o)
	if err != nil {
		return err
	}
	if err := o.checkScratch(op, need); err != nil {
		return err
	}
	x, rest, _ := o.normed()
	if o.Norm != nil {
		if err := d.Norm(s, o.Rows, o.In, o.X, x, o.Norm); err != nil {
			return err
		}
	}
	for i := range o.Outs {
		p := o.toW(i, x, rest)
		p.C = o.DW[i]
		if err := d.Product(s, &p); err != nil {
			return err
		}
	}
	return nil
}

// roundedW is RoundedW of gradients in 16 bits.
func (d *Engine) roundedW(s *cuda.Stream, o *RoundedProducts) error {
	p, l, need, err := d.halvesToW(o)
	if err != nil {
		return err
	}
	if err := o.checkScratch("gradient of w", need+o.Rows); err != nil {
		return err
	}
	x := p.parts[0].W
	if o.Norm == nil {
		if err := d.roundTo(s, o.Products, Convert{N: o.Rows * o.In, X: o.X, Y: x}); err != nil {
			return err
		}
		return d.queueHopper(s, &p, &l)
	}
	if err := o.Norm.check("norm", o.In); err != nil {
		return err
	}
	if err := d.operandsOf(s, &Linear{Rows: o.Rows, In: o.In, X: o.X, Norm: o.Norm, Scratch: o.Scratch}, x); err != nil {
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
func (d *Engine) RoundedWScratch(o *RoundedProducts) (most int, err error) {
	if d.inHalves(o) {
		_, _, n, err := d.halvesToW(o)
		return n + o.Rows, err // with factors of the rows of the norm
	}
	x, rest, apart := o.normed()
	for i := range o.Outs {
		p := o.toW(i, x, rest)
		n, err := d.ProductScratch(&p)
		if err != nil {
			return 0, err
		}
		most = max(most, n)
	}
	return apart + most, nil
}
