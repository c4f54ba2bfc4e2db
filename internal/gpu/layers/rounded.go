package layers

import (
	"math"
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// This file has products of float32 operands that are rounded to 16 bits, for training. Weights, gradients and sums stay float32.
// A launch writes the rounded weights to scratch memory. Gradients need transposes, which a launch writes there, too. The products are
// then those of a Linear with weights of 16 bits.

const (
	// transposeTile is the number of rows and columns of a thread block of trainingTranspose.
	transposeTile = 64

	// roundedRows is the least number of rows of a Product that is rounded. A GEMM of fewer rows does not fill its tiles.
	roundedRows = 17
)

// canRound reports whether products of n elements can have operands of a type. A row of 16-bit weights is a multiple of 16 bytes.
func canRound(to attn.DType, n int) bool { return slices.Contains(gpu.Halves, to) && n%8 == 0 }

// checkProducts returns an error if operands can't be rounded to a type. 0 is no type.
func checkProducts(op string, to attn.DType) error {
	if to != 0 && !slices.Contains(gpu.Halves, to) {
		return gpu.Errorf(op, attn.ErrDType, "products of %v", to)
	}
	return nil
}

// rounds reports whether o has products of rounded numbers.
func (o *Linear) rounds() bool { return o.Products != 0 && canRound(o.Products, o.In) }

// checkProducts returns an error unless Products is 0, or a type of 16 bits and all weights are float32.
func (o *Linear) checkProducts(op string) error {
	if o.Products == 0 {
		return nil
	}
	for i := range o.Parts {
		if p := &o.Parts[i]; p.Packed != nil || p.W.DType != attn.Float32 {
			return gpu.Errorf(op, attn.ErrDType, "products of %v, and w of layer %d is %v, not %v", o.Products, i, p.W.DType, attn.Float32)
		}
	}
	return checkProducts(op, o.Products)
}

// rounded returns the layer with weights of 16 bits, and the number of float32 of the scratch for the weights. The layer has the
// rest of the scratch.
func (o *Linear) rounded() (in *Linear, apart int) {
	in = new(*o)
	r := scratch{of: o.Scratch}
	in.Parts = slices.Clone(o.Parts)
	for i := range in.Parts {
		in.Parts[i].W = r.takeOf(in.Parts[i].Out*o.In, o.Products)
	}
	in.Products, in.RoundX, in.Early, apart = 0, true, false, r.used
	in.Scratch = r.rest()
	return in, apart
}

// queueRounded queues a checked Linear that rounds.
func (d *Engine) queueRounded(s *cuda.Stream, o *Linear) error {
	need, err := d.Scratch(o)
	if err != nil {
		return err
	}
	if err := o.Scratch.CheckFloats("linear", "the scratch", need); err != nil {
		return err
	}
	in, _ := o.rounded()
	for i := range o.Parts {
		if err := d.Convert(s, &Convert{N: o.Parts[i].Out * o.In, X: o.Parts[i].W, Y: in.Parts[i].W}); err != nil {
			return err
		}
	}
	return d.Linear(s, in)
}

// transposeParams is struct TrainingTransposeParams.
type transposeParams struct {
	x, y                             uint64
	rows, columns, step, wide, dtype int32
	_                                [4]byte
}

// transpose queues the transpose of x, a matrix of rows x columns whose rows begin `step` elements apart. y, of its own type, gets `columns`
// rows of `wide` elements, the last wide-rows of which are zeros.
func (d *Engine) transpose(s *cuda.Stream, rows, columns, step, wide int, x, y gpu.Memory) error {
	blocks := attn.Product(attn.Ceil(wide, transposeTile), attn.Ceil(columns, transposeTile))
	if blocks > math.MaxInt32 {
		return gpu.Errorf("transpose", attn.ErrUnsupported, "%d x %d elements", rows, columns)
	}
	p := transposeParams{x: x.Address(), y: y.Address(), rows: int32(rows), columns: int32(columns), step: int32(step), wide: int32(wide), dtype: gpu.Code(y.DType)}
	return launchTraining(d, s, func(k *trainingKernels) *cuda.Function { return k.transpose }, blocks, &p, x, y)
}

// rounds reports whether o has products of rounded numbers.
func (o *Product) rounds() bool {
	return o.M >= roundedRows && (o.Transposed || o.K%8 == 0) && canRound(o.Products, 8)
}

// asLinear returns o as a layer with weights B^T, and the number of float32 of scratch memory for the transposes. The layer has the rest
// of the scratch memory.
func (o *Product) asLinear() (in *Linear, apart int) {
	wide := attn.Ceil(o.K, 8) * 8
	r := scratch{of: o.Scratch}
	in = &Linear{Rows: o.M, In: wide, X: o.A, Residual: o.Plus, RoundX: true}
	if o.Transposed {
		in.X = r.take(o.M * wide)
	}
	in.Parts = []LinearPart{{Out: o.N, W: r.takeOf(o.N*wide, o.Products), Y: o.C}}
	apart = r.used
	in.Scratch = r.rest()
	return in, apart
}

// hopperLayout returns how the operands of o lie in memory.
func (o *Product) hopperLayout() hopperLayout { return hopperLayout{a: o.Transposed, b: true} }

// untransposed reports whether kernels of hopper.go compute o, without transposes in memory.
func (d *Engine) untransposed(o *Product) bool {
	row := o.K
	if o.Transposed {
		row = o.M
	}
	return o.Products == attn.BFloat16 && d.hopperFor(o.Products, o.M, o.hopperLayout()) && row%8 == 0 && o.N%8 == 0
}

// aligned reports whether kernels of rounded products can read and write the operands where they are.
func (d *Engine) aligned(o *Product) bool {
	at := o.A.Address() | o.C.Address() | o.Plus.AddressOr0()
	if d.untransposed(o) {
		at |= o.B.Address()
	}
	return at%16 == 0
}

// asHopper returns o as a product of hopper.go, the launch, and the number of float32 of scratch memory.
func (d *Engine) asHopper(o *Product) (p *hopperProduct, l hopperLaunch, n int, err error) {
	r := scratch{of: o.Scratch}
	p = &hopperProduct{m: o.M, k: o.K, wide: o.K, layout: o.hopperLayout(), plus: o.Plus}
	if o.Transposed {
		p.wide = o.M
	}
	p.a = r.takeOf(o.M*o.K, o.Products)
	r.align()
	p.parts = []LinearPart{{Out: o.N, W: r.takeOf(o.K*o.N, o.Products), Y: o.C}}
	r.align()
	l, err = d.hopperLaunchOf(o.Products, p.layout, o.M, o.K, p.parts)
	p.scratch = r.take(p.slicesScratch(&l))
	return p, l, r.used, err
}

// ProductScratch returns how many float32 [Product].Scratch needs. The error is the driver's.
func (d *Engine) ProductScratch(o *Product) (int, error) {
	if !o.rounds() {
		return 0, nil
	}
	if d.untransposed(o) {
		_, _, n, err := d.asHopper(o)
		return n, err
	}
	in, apart := o.asLinear()
	n, err := d.Scratch(in)
	return apart + n, err
}

// productRounded queues a checked Product that rounds.
func (d *Engine) productRounded(s *cuda.Stream, o *Product) error {
	need, err := d.ProductScratch(o)
	if err != nil {
		return err
	}
	if err := o.Scratch.CheckFloats("product", "the scratch", need); err != nil {
		return err
	}
	if d.untransposed(o) {
		p, l, _, err := d.asHopper(o)
		if err != nil {
			return err
		}
		if err := d.roundTo(s, o.Products, Convert{N: o.M * o.K, X: o.A, Y: p.a}, Convert{N: o.K * o.N, X: o.B, Y: p.parts[0].W}); err != nil {
			return err
		}
		return d.queueHopper(s, p, &l)
	}
	in, _ := o.asLinear()
	if o.Transposed {
		if err := d.transpose(s, o.K, o.M, o.M, in.In, o.A, in.X); err != nil {
			return err
		}
	}
	if err := d.transpose(s, o.K, o.N, o.N, in.In, o.B, in.Parts[0].W); err != nil {
		return err
	}
	return d.Linear(s, in)
}
