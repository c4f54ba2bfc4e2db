package layers

import (
	"math"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// trainingUnit is the module with the kernels of gradients.
const trainingUnit = "training"

// Constants of the kernels (kernels/gemm_training.cuh, nodes_training.cuh).
const (
	trainingThreads = nodeThreads
	trainingTile    = 128
	trainingColumns = 32 // of a thread block of column sums
	trainingEach    = 4
)

// trainingKernels are loaded at first use.
type trainingKernels struct {
	product                                [2]*cuda.Function // of A, and of its transpose
	sums, slopes, norm, convert, transpose *cuda.Function
}

// training returns the kernels. d.mu is held.
func (d *Engine) training() (*trainingKernels, error) {
	if d.trainingKernels != nil {
		return d.trainingKernels, nil
	}
	k := new(trainingKernels)
	if err := d.functions(trainingUnit, map[string]**cuda.Function{"training_product": &k.product[0], "training_product_transposed": &k.product[1], "training_sums": &k.sums, "training_slopes": &k.slopes, "training_norm": &k.norm, "training_convert": &k.convert, "training_transpose": &k.transpose}); err != nil {
		return nil, err
	}
	d.trainingKernels = k
	return k, nil
}

// launchTraining queues a kernel of the unit, with one struct of parameters.
func launchTraining[P any](d *Engine, s *cuda.Stream, kernel func(*trainingKernels) *cuda.Function, blocks int, p *P, memory ...gpu.Memory) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	k, err := d.training()
	if err != nil {
		return err
	}
	return queueNode(d, s, kernel(k), blocks, p, memory...)
}

// checkLooseFloats is [gpu.Memory.CheckFloats] of elements at any address.
func checkLooseFloats(op, name string, m *gpu.Memory, n int) error {
	if m.DType != attn.Float32 {
		return m.CheckFloats(op, name, n)
	}
	return m.CheckLoose(op, name, n)
}

// Product is the operands of C = A B + Plus, of row-major matrices of float32: A is M x K, or with Transposed the
// transpose of a matrix of K x M in memory, and B is K x N. Plus may have no buffer, and may be C. Products, of 16 bits, rounds A and B
// to this type where that is faster. Scratch has as many elements as [Engine.ProductScratch] returns.
type Product struct {
	M, N, K       int
	Transposed    bool
	A, B, Plus, C gpu.Memory
	Products      attn.DType
	Scratch       gpu.Memory
}

// productParams is struct TrainingParams.
type productParams struct {
	a, b, plus, c uint64
	m, n, k       int32
	_             [4]byte
}

// Product queues a Product. The bits are the same on every run.
func (d *Engine) Product(s *cuda.Stream, o *Product) error {
	const op = "product"
	if min(o.M, o.N, o.K) < 1 || max(o.M, o.N, o.K) > math.MaxInt32-trainingTile {
		return gpu.Errorf(op, attn.ErrShape, "%d x %d sums of %d products", o.M, o.N, o.K)
	}
	blocks := attn.Product(attn.Ceil(o.M, trainingTile), attn.Ceil(o.N, trainingTile))
	if blocks > math.MaxInt32 {
		return gpu.Errorf(op, attn.ErrUnsupported, "%d x %d sums", o.M, o.N)
	}
	for _, x := range []struct {
		name string
		of   *gpu.Memory
		n    int
	}{{"a", &o.A, attn.Product(o.M, o.K)}, {"b", &o.B, attn.Product(o.K, o.N)}, {"c", &o.C, attn.Product(o.M, o.N)}} {
		if err := checkLooseFloats(op, x.name, x.of, x.n); err != nil {
			return err
		}
	}
	if o.Plus.Buffer != nil {
		if err := checkLooseFloats(op, "plus", &o.Plus, attn.Product(o.M, o.N)); err != nil {
			return err
		}
	}
	if o.rounds() && d.aligned(o) {
		return d.productRounded(s, o)
	}
	p := productParams{a: o.A.Address(), b: o.B.Address(), plus: o.Plus.AddressOr0(), c: o.C.Address(), m: int32(o.M), n: int32(o.N), k: int32(o.K)}
	which := 0
	if o.Transposed {
		which = 1
	}
	return launchTraining(d, s, func(k *trainingKernels) *cuda.Function { return k.product[which] }, blocks, &p, o.A, o.B, o.Plus, o.C)
}

// Slopes is the operands of
//
//	DX = DY*Times*f'(X),   DTimes = DY*f(X),   f the Activation
//
// of N elements of float32. Times and DTimes may have no buffer. The elements of DY are contiguous. X, Times, DX and DTimes have rows
// of Width elements, which begin Step elements apart.
type Slopes struct {
	N, Width, Step           int
	Activation               attn.Activation
	DY, X, Times, DX, DTimes gpu.Memory
}

// slopeParams is struct TrainingSlopeParams.
type slopeParams struct {
	dy, x, times, dx, dtimes uint64
	n, width, step           int64
	activation               int32
	_                        [4]byte
}

// Slopes queues a Slopes.
func (d *Engine) Slopes(s *cuda.Stream, o *Slopes) error {
	const op = "slopes"
	switch {
	case o.N < 1 || o.Width < 1 || o.Step < o.Width || o.N%o.Width != 0:
		return gpu.Errorf(op, attn.ErrShape, "%d elements, rows of %d that begin %d apart", o.N, o.Width, o.Step)
	case o.Activation >= attn.Activations:
		return gpu.Errorf(op, attn.ErrShape, "the activation is %v", o.Activation)
	}
	blocks := attn.Ceil(o.N, trainingThreads*trainingEach)
	if blocks > math.MaxInt32 {
		return gpu.Errorf(op, attn.ErrUnsupported, "%d elements", o.N)
	}
	all := attn.Product(o.N/o.Width-1, o.Step) + o.Width
	for _, x := range []struct {
		name     string
		of       *gpu.Memory
		n        int
		optional bool
	}{{"dy", &o.DY, o.N, false}, {"x", &o.X, all, false}, {"the factors", &o.Times, all, true}, {"dx", &o.DX, all, false}, {"the factors' gradient", &o.DTimes, all, true}} {
		if x.optional && x.of.Buffer == nil {
			continue
		}
		if err := checkLooseFloats(op, x.name, x.of, x.n); err != nil {
			return err
		}
	}
	p := slopeParams{
		dy: o.DY.Address(), x: o.X.Address(), times: o.Times.AddressOr0(), dx: o.DX.Address(), dtimes: o.DTimes.AddressOr0(),
		n: int64(o.N), width: int64(o.Width), step: int64(o.Step), activation: int32(o.Activation),
	}
	if o.byFour() {
		return launchRows(d, s, func(k *rowsKernels) *cuda.Function { return k.slopes }, blocks, &p, o.DY, o.X, o.Times, o.DX, o.DTimes)
	}
	return launchTraining(d, s, func(k *trainingKernels) *cuda.Function { return k.slopes }, blocks, &p, o.DY, o.X, o.Times, o.DX, o.DTimes)
}

// Convert is the operands of Y = X of N elements, rounded to Y's type.
type Convert struct {
	N    int
	X, Y gpu.Memory
}

// convertParams is struct TrainingConvertParams.
type convertParams struct {
	x, y         uint64
	n            int64
	xType, yType int32
}

// Convert queues a Convert.
func (d *Engine) Convert(s *cuda.Stream, o *Convert) error {
	const op = "convert"
	blocks := attn.Ceil(o.N, trainingThreads*trainingEach)
	if o.N < 1 || blocks > math.MaxInt32 {
		return gpu.Errorf(op, attn.ErrShape, "%d elements", o.N)
	}
	if err := o.X.CheckLoose(op, "x", o.N); err != nil {
		return err
	}
	if err := o.Y.CheckLoose(op, "y", o.N); err != nil {
		return err
	}
	p := convertParams{x: o.X.Address(), y: o.Y.Address(), n: int64(o.N), xType: int32(o.X.DType), yType: int32(o.Y.DType)}
	if o.byVectors() {
		return launchRows(d, s, func(k *rowsKernels) *cuda.Function { return k.convert }, attn.Ceil(o.N, trainingThreads*convertEach), &p, o.X, o.Y)
	}
	return launchTraining(d, s, func(k *trainingKernels) *cuda.Function { return k.convert }, blocks, &p, o.X, o.Y)
}
