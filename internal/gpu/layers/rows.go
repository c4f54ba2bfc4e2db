package layers

import (
	"math"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// rowsUnit is the module with kernels of gradients that read and write each number once, and of moves and conversions by vectors.
const rowsUnit = "rows"

// Constants of the kernels (kernels/nodes_rows.cuh), and of the parts of sums over rows (SumParts). The parts depend on the shape alone, so
// bits do not depend on the GPU.
const (
	rowsColumns   = 128
	rowsVectors   = 8
	rowsOfPart    = 128
	mostRowParts  = 64
	leastNormRows = 512 // the least number of rows of rowsLayerNorm: the kernels of decode steps, which have fewer rows, are loaded already
	normBlocks    = 132
)

// rowsKernels are loaded at first use.
type rowsKernels struct {
	sums, round, layerNorm, slopes, convert *cuda.Function
	norm, move                              [2]*cuda.Function // norm: of narrow and of wide rows; move: of 2 and of 16 bytes
	widen                                   [2]*cuda.Function // of one element and of eight
}

// launchRows queues a kernel of the unit, with one struct of parameters.
func launchRows[P any](d *Engine, s *cuda.Stream, kernel func(*rowsKernels) *cuda.Function, blocks int, p *P, memory ...gpu.Memory) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.rowsKernels == nil {
		k := new(rowsKernels)
		if err := d.functions(rowsUnit, map[string]**cuda.Function{
			"rows_sums": &k.sums, "rows_round": &k.round, "rows_layer_norm": &k.layerNorm, "rows_slopes": &k.slopes, "rows_convert": &k.convert, "rows_norm": &k.norm[0], "rows_norm_wide": &k.norm[1], "rows_widen_1": &k.widen[0], "rows_widen_8": &k.widen[1], "rows_move_2": &k.move[0], "rows_move_16": &k.move[1],
		}); err != nil {
			return err
		}
		d.rowsKernels = k
	}
	return queueNode(d, s, kernel(d.rowsKernels), blocks, p, memory...)
}

// ColumnSums is the operands of Y, the sums over rows of X or of X times Times. X has Rows x N elements of float32. Times
// may have no buffer. Scratch has as many elements as [ColumnSums.ScratchSize] returns.
type ColumnSums struct {
	Rows, N              int
	X, Times, Y, Scratch gpu.Memory
}

// SumParts returns the number of parts into which sums over rows are divided. A second launch adds the sums of the parts.
func SumParts(rows int) int { return min(attn.Ceil(rows, rowsOfPart), mostRowParts) }

// ScratchSize returns how many float32 Scratch needs: the sums of the parts.
func (o *ColumnSums) ScratchSize() int {
	if n := SumParts(o.Rows); n > 1 {
		return n * o.N
	}
	return 0
}

// rowsSumsParams is struct RowsSumsParams.
type rowsSumsParams struct {
	x, times, y            uint64
	rows, n, each, aligned int32
}

// sumsParams is struct TrainingSumsParams.
type sumsParams struct {
	x, times, y   uint64
	rows, n, step int32
	_             [4]byte
}

// ColumnSums queues a ColumnSums. The bits are the same on every run.
func (d *Engine) ColumnSums(s *cuda.Stream, o *ColumnSums) error {
	const op = "column sums"
	if min(o.Rows, o.N) < 1 || max(o.Rows, o.N) > math.MaxInt32-trainingThreads {
		return gpu.Errorf(op, attn.ErrShape, "%d rows of %d elements", o.Rows, o.N)
	}
	all := attn.Product(o.Rows, o.N)
	if err := checkLooseFloats(op, "x", &o.X, all); err != nil {
		return err
	}
	if err := o.Times.CheckOptional(op, "the factors", all); err != nil {
		return err
	}
	if err := o.Y.CheckFloats(op, "y", o.N); err != nil {
		return err
	}
	parts, to := SumParts(o.Rows), o.Y
	if parts > 1 {
		to = o.Scratch
		if err := to.CheckFloats(op, "the scratch", o.ScratchSize()); err != nil {
			return err
		}
	}
	if err := d.sumParts(s, o.Rows, o.N, o.X, o.Times, to); err != nil || parts == 1 {
		return err
	}
	return d.addParts(s, parts, o.N, to, o.Y)
}

// sumParts queues y, the sums over the rows of each part of x times `times`.
func (d *Engine) sumParts(s *cuda.Stream, rows, n int, x, times, y gpu.Memory) error {
	parts := SumParts(rows)
	p := rowsSumsParams{x: x.Address(), times: times.AddressOr0(), y: y.Address(), rows: int32(rows), n: int32(n), each: int32(attn.Ceil(rows, parts))}
	if fours(n, x, times) {
		p.aligned = 1
	}
	return launchRows(d, s, func(k *rowsKernels) *cuda.Function { return k.sums }, parts*attn.Ceil(n, rowsColumns), &p, x, times, y)
}

// addParts queues y, the sums of `parts` rows of n elements.
func (d *Engine) addParts(s *cuda.Stream, parts, n int, x, y gpu.Memory) error {
	p := sumsParams{x: x.Address(), y: y.Address(), rows: int32(parts), n: int32(n), step: int32(n)}
	return launchTraining(d, s, func(k *trainingKernels) *cuda.Function { return k.sums }, attn.Ceil(n, trainingColumns), &p, x, y)
}

// fours reports whether kernels can read and write rows of n elements by four.
func fours(n int, all ...gpu.Memory) bool {
	at := uint64(0)
	for i := range all {
		at |= all[i].AddressOr0()
	}
	return n%4 == 0 && at%16 == 0
}

// NormGradient is the operands of gradients of a [Norm] of Rows x N elements: DX is the gradient of X, and DY that of the result. Sums gets
// the gradients of Gamma and of Beta, each padded to a multiple of 4 elements, and may have no buffer. Beta is unused. Scratch has as many
// elements as [NormGradient.ScratchSize] returns.
type NormGradient struct {
	Norm
	Rows, N                  int
	X, DY, DX, Sums, Scratch gpu.Memory
}

// inWarps reports whether the lanes of a warp keep a row of n elements in registers.
func inWarps(n int) bool { return n%4 == 0 && n <= 4*rowsVectors*32 }

// rowsLayerNormParams is struct RowsLayerNormParams.
type rowsLayerNormParams struct {
	x, gamma, beta, y uint64
	rows, n           int32
	eps               float32
	dtype             int32
}

// rowsLayerNorm queues a checked layer norm of leastNormRows rows or more.
func (d *Engine) rowsLayerNorm(s *cuda.Stream, rows, n int, x, y gpu.Memory, norm *Norm) error {
	p := rowsLayerNormParams{x: x.Address(), gamma: norm.Gamma.AddressOr0(), beta: norm.Beta.AddressOr0(), y: y.Address(), rows: int32(rows), n: int32(n), eps: float32(norm.Eps), dtype: gpu.Code(y.DType)}
	return launchRows(d, s, func(k *rowsKernels) *cuda.Function { return k.layerNorm }, attn.Ceil(rows, trainingThreads/32), &p, x, y, norm.Gamma, norm.Beta)
}

// inRegisters reports whether threads keep whole rows in registers.
func (o *NormGradient) inRegisters() bool {
	return o.N%4 == 0 && o.N <= 4*rowsVectors*trainingThreads
}

// wide reports whether a thread block has a row, and not a warp.
func (o *NormGradient) wide() bool { return !inWarps(o.N) }

// blocks returns the number of thread blocks with rows in registers.
func (o *NormGradient) blocks() int {
	if o.wide() {
		return min(o.Rows, normBlocks)
	}
	return min(attn.Ceil(o.Rows, trainingThreads/32), normBlocks)
}

// ScratchSize returns how many float32 Scratch needs for Sums: the sums of each thread block, or norms and the sums of parts.
func (o *NormGradient) ScratchSize() int {
	if o.inRegisters() {
		return 2 * o.blocks() * o.N
	}
	sums := ColumnSums{Rows: o.Rows, N: o.N}
	return attn.Ceil(o.Rows*o.N, 4)*4 + sums.ScratchSize()
}

// normGradientParams is struct TrainingNormParams.
type normGradientParams struct {
	x, gamma, dy, dx uint64
	n, rms           int32
	eps, offset      float32
}

// rowsNormParams is struct RowsNormParams.
type rowsNormParams struct {
	x, gamma, dy, dx, sums uint64
	rows, n, rms           int32
	eps, offset            float32
	_                      [4]byte
}

// NormGradient queues a NormGradient. The bits are the same on every run.
func (d *Engine) NormGradient(s *cuda.Stream, o *NormGradient) error {
	const op = "norm gradient"
	if min(o.Rows, o.N) < 1 || max(o.Rows, o.N) > math.MaxInt32-trainingThreads {
		return gpu.Errorf(op, attn.ErrShape, "%d rows of %d elements", o.Rows, o.N)
	}
	if err := o.check(op, o.N); err != nil {
		return err
	}
	all := attn.Product(o.Rows, o.N)
	for _, x := range []struct {
		name string
		of   *gpu.Memory
	}{{"x", &o.X}, {"dy", &o.DY}, {"dx", &o.DX}} {
		if err := x.of.CheckFloats(op, x.name, all); err != nil {
			return err
		}
	}
	sums := o.Sums.Buffer != nil
	if sums {
		if err := o.Sums.CheckFloats(op, "the sums", 2*attn.Ceil(o.N, 4)*4); err != nil {
			return err
		}
		if err := o.Scratch.CheckFloats(op, "the scratch", o.ScratchSize()); err != nil {
			return err
		}
	}
	rms := int32(0)
	if o.RMS {
		rms = 1
	}
	if o.inRegisters() {
		p := rowsNormParams{x: o.X.Address(), gamma: o.Gamma.AddressOr0(), dy: o.DY.Address(), dx: o.DX.Address(), rows: int32(o.Rows), n: int32(o.N), rms: rms, eps: float32(o.Eps), offset: o.offset()}
		which := 0
		if o.wide() {
			which = 1
		}
		if sums {
			p.sums = o.Scratch.Address()
		}
		if err := launchRows(d, s, func(k *rowsKernels) *cuda.Function { return k.norm[which] }, o.blocks(), &p, o.X, o.Gamma, o.DY, o.DX, o.Scratch); err != nil || !sums {
			return err
		}
		return d.addParts(s, o.blocks(), 2*o.N, o.Scratch, o.Sums)
	}
	p := normGradientParams{x: o.X.Address(), gamma: o.Gamma.AddressOr0(), dy: o.DY.Address(), dx: o.DX.Address(), n: int32(o.N), rms: rms, eps: float32(o.Eps), offset: o.offset()}
	if err := launchTraining(d, s, func(k *trainingKernels) *cuda.Function { return k.norm }, o.Rows, &p, o.X, o.Gamma, o.DY, o.DX); err != nil || !sums {
		return err
	}
	return d.normSums(s, o)
}

// normSums queues the gradients of gamma and beta for rows that are not in registers. The gradients of gamma are sums of dy times the norm
// without gamma.
func (d *Engine) normSums(s *cuda.Stream, o *NormGradient) error {
	memory := scratch{of: o.Scratch}
	normed := memory.take(attn.Ceil(o.Rows*o.N, 4) * 4)
	plain := Norm{Eps: o.Eps, RMS: o.RMS}
	if err := d.Norm(s, o.Rows, o.N, o.X, normed, &plain); err != nil {
		return err
	}
	of := ColumnSums{Rows: o.Rows, N: o.N, X: o.DY, Times: normed, Y: elementsFrom(o.Sums, 0, o.N), Scratch: memory.rest()}
	if err := d.ColumnSums(s, &of); err != nil {
		return err
	}
	of.Times, of.Y = gpu.Memory{}, elementsFrom(o.Sums, attn.Ceil(o.N, 4)*4, o.N)
	return d.ColumnSums(s, &of)
}

// byFour reports whether a kernel computes Slopes by four elements.
func (o *Slopes) byFour() bool {
	return fours(o.Width, o.DY, o.X, o.Times, o.DX, o.DTimes) && o.Step%4 == 0
}

// convertEach is the number of elements of a thread of rowsConvert.
const convertEach = 8

// byVectors reports whether a kernel converts by vectors of 16 bytes.
func (o *Convert) byVectors() bool {
	return (o.X.Address()|o.Y.Address())%16 == 0 && (o.X.DType == attn.Float32) != (o.Y.DType == attn.Float32)
}

// rowsMoveParams is struct RowsMoveParams.
type rowsMoveParams struct {
	x, y                           uint64
	from, to                       [3]int32
	count, second, third, n, dtype int32
	_                              [4]byte
}

// byUnits returns the parameters of a move of units of `each` elements. ok reports whether all distances are multiples of a unit, and
// addresses multiples of 16 bytes; single elements may have any address.
func (o *Move) byUnits(each int) (p rowsMoveParams, ok bool) {
	at := func(m *gpu.Memory, l *attn.Lattice) uint64 { return m.Address() + uint64(l.At*m.DType.Size()) }
	x, y := at(&o.X, &o.From), at(&o.Y, &o.To)
	if ok = (each == 1 || (x|y)%16 == 0) && o.N%each == 0 && max(o.Extent(&o.From), o.Extent(&o.To))/each < math.MaxInt32-trainingThreads*trainingEach; !ok {
		return p, false
	}
	p = rowsMoveParams{x: x, y: y, count: int32(o.Count() / each), second: int32(o.Dims[1]), third: int32(o.Dims[2]), n: int32(o.N / each), dtype: int32(o.X.DType)}
	for i := range p.from {
		from, to := o.From.Steps[i], o.To.Steps[i]
		if o.Dims[i] == 1 {
			from, to = 0, 0
		}
		if from%each != 0 || to%each != 0 {
			return p, false
		}
		p.from[i], p.to[i] = int32(from/each), int32(to/each)
	}
	return p, true
}

// queueUnits queues a move by units, if there is a kernel for it.
func (d *Engine) queueUnits(s *cuda.Stream, o *Move) (queued bool, err error) {
	size, widens, which, each := o.X.DType.Size(), o.X.DType != o.Y.DType, 1, 8
	if !widens {
		each = 16 / size
	}
	p, ok := o.byUnits(each)
	if !ok && size == 2 {
		which = 0
		if p, ok = o.byUnits(1); !ok {
			return false, gpu.Errorf("move", attn.ErrUnsupported, "%d elements of %v", o.Count(), o.X.DType)
		}
	}
	if !ok {
		return false, nil
	}
	blocks := attn.Ceil(int(p.count), trainingThreads*trainingEach)
	if widens {
		blocks = attn.Ceil(int(p.count), trainingThreads)
	}
	return true, launchRows(d, s, func(k *rowsKernels) *cuda.Function {
		if widens {
			return k.widen[which]
		}
		return k.move[which]
	}, blocks, &p, o.X, o.Y)
}
