package layers

import (
	"math"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// Products of numbers of float32 that are rounded to 16 bits first, as training takes them: weights and gradients stay
// float32, and so do sums. Weights are rounded, and transposed where a gradient wants them so, into scratch memory. The rest is a
// Linear with weights of 16 bits.

const transposeTile = 64 // rows and columns of a thread block (trainingTranspose)

// canRound reports whether a type has such products, and sums of n elements can be of it: rows of weights have a multiple of 16 bytes.
func canRound(to attn.DType, n int) bool {
	return (to == attn.Float16 || to == attn.BFloat16) && n%8 == 0
}

// rounds reports whether o has products of rounded numbers.
func (o *Linear) rounds() bool { return o.Products != 0 && canRound(o.Products, o.In) }

// checkProducts returns an error if no layer has such products.
func (o *Linear) checkProducts(op string) error {
	if o.Products == 0 {
		return nil
	}
	if o.Products != attn.Float16 && o.Products != attn.BFloat16 {
		return gpu.Errorf(op, attn.ErrDType, "products of %v", o.Products)
	}
	for i := range o.Parts {
		if p := &o.Parts[i]; p.Packed != nil || p.W.DType != attn.Float32 {
			return gpu.Errorf(op, attn.ErrDType, "products of %v, and w of layer %d is %v, not %v", o.Products, i, p.W.DType, attn.Float32)
		}
	}
	return nil
}

// rounded returns the layer with weights of 16 bits, and the number of float32 of the scratch for the weights. The layer has the
// rest of the scratch.
func (o *Linear) rounded() (in *Linear, apart int) {
	in = new(*o)
	in.Parts = append([]LinearPart(nil), o.Parts...)
	for i := range in.Parts {
		n := in.Parts[i].Out * o.In
		in.Parts[i].W = gpu.Memory{Buffer: o.Scratch.Buffer, Offset: o.Scratch.Offset + int64(apart)*4, DType: o.Products, Len: n}
		apart += attn.Ceil(n, 8) * 4
	}
	in.Products, in.RoundX, in.Early = 0, true, false
	in.Scratch.Offset += int64(apart) * 4
	in.Scratch.Len -= apart
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
	x, y                            uint64
	rows, columns, step, wide, kind int32
	_                               [4]byte
}

// transpose queues the transpose of x, of rows x columns of which rows begin `step` elements apart, in rows of `wide` elements of
// another type. Behind the first `rows` of them are zeros.
func (d *Engine) transpose(s *cuda.Stream, rows, columns, step, wide int, x, y gpu.Memory) error {
	blocks := attn.Product(attn.Ceil(wide, transposeTile), attn.Ceil(columns, transposeTile))
	if blocks > math.MaxInt32 {
		return gpu.Errorf("transpose", attn.ErrUnsupported, "%d x %d elements", rows, columns)
	}
	p := transposeParams{x: x.Address(), y: y.Address(), rows: int32(rows), columns: int32(columns), step: int32(step), wide: int32(wide), kind: gpu.Code(y.DType)}
	return launchTraining(d, s, func(k *trainingKernels) *cuda.Function { return k.transpose }, blocks, &p, x, y)
}

// rounds reports whether o has products of rounded numbers.
func (o *Product) rounds() bool {
	return o.M >= roundedRows && (o.Transposed || o.K%8 == 0) && canRound(o.Products, 8)
}

// roundedRows is the least number of rows for which rounding pays: fewer do not fill the tiles of a GEMM.
const roundedRows = 17

// asLinear returns o as a layer with weights B^T, and the number of float32 of the scratch besides the layer's own: for the transposes.
func (o *Product) asLinear() (in *Linear, apart int) {
	wide := attn.Ceil(o.K, 8) * 8
	take := func(n int, t attn.DType) gpu.Memory {
		m := gpu.Memory{Buffer: o.Scratch.Buffer, Offset: o.Scratch.Offset + int64(apart)*4, DType: t, Len: n}
		apart += attn.Ceil(n*t.Size(), 16) * 4
		return m
	}
	in = &Linear{Rows: o.M, In: wide, X: o.A, Residual: o.Plus, RoundX: true, Scratch: o.Scratch}
	if o.Transposed {
		in.X = take(o.M*wide, attn.Float32)
	}
	in.Parts = []LinearPart{{Out: o.N, W: take(o.N*wide, o.Products), Y: o.C}}
	in.Scratch.Offset += int64(apart) * 4
	in.Scratch.Len -= apart
	return in, apart
}

// ProductScratch returns how many float32 [Product].Scratch needs. The error is the driver's.
func (d *Engine) ProductScratch(o *Product) (int, error) {
	if !o.rounds() {
		return 0, nil
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
