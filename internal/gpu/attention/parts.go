package attention

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// If the keys of sequences are sharded over several GPUs (by context), each GPU writes the states of its part to the
// memory of the first GPU, which merges them. The kernel that merges prefixes does so (kernels/attn_prefix.cuh): it
// takes the last part as a row's own state.

// Parts describes the states of Count parts of the keys of the same rows: for each part, row and head an output and a
// log-sum-exp in float32. All are in one memory, after a table of their places.
type Parts struct{ Count, Rows, Heads, Dim int }

// at returns the offsets, in bytes, of the slots of rows, the outputs, the log-sum-exps, and the end.
func (p *Parts) at() (slots, out, lse, end int64) {
	const align = 256
	next := func(at int64, numbers ...int) int64 {
		return (at + int64(attn.Product(append(numbers, 4)...)) + align - 1) / align * align
	}
	slots = next(0, p.Rows+1)
	out = next(slots, p.Rows, p.Count-1)
	lse = next(out, p.Count, p.Rows, p.Heads, p.Dim)
	return slots, out, lse, next(lse, p.Count, p.Rows, p.Heads)
}

// Bytes returns the size of the memory.
func (p *Parts) Bytes() int64 {
	_, _, _, end := p.at()
	return end
}

// Table returns the beginning of the memory: for each row the index of its first slot, then the end of the last row's
// slots, then the slots, which are the rows of the states.
func (p *Parts) Table() []byte {
	others := p.Count - 1
	slots, _, _, _ := p.at()
	table := make([]int32, int(slots)/4+p.Rows*others)
	for row := range p.Rows {
		table[row] = int32(row * others)
		for i := range others {
			table[int(slots)/4+row*others+i] = int32(i*p.Rows + row)
		}
	}
	table[p.Rows] = int32(p.Rows * others)
	return gpu.BytesOf(table)
}

// State returns the memory of the states of part i and of all later parts.
func (p *Parts) State(b *cuda.Buffer, i int) (out, lse gpu.Memory) {
	_, outs, lses, _ := p.at()
	n := p.Rows * p.Heads
	out = gpu.Memory{Buffer: b, Offset: outs + int64(i)*int64(n)*int64(p.Dim)*4, DType: attn.Float32, Len: (p.Count - i) * n * p.Dim}
	lse = gpu.Memory{Buffer: b, Offset: lses + int64(i)*int64(n)*4, DType: attn.Float32, Len: (p.Count - i) * n}
	return out, lse
}

// Merged is the memory of results: the first Rows rows. LSE without a buffer is not written.
type Merged struct {
	Rows         int
	Out, LSE     gpu.Memory
	OutAt, LSEAt attn.Strides
}

// Merge queues the merging of all parts of each row, in the order of the parts. O_i and LSE_i are the state of part i:
//
//	LSE = ln sum e^LSE_i,   O = sum e^(LSE_i - LSE) O_i
//
// A part without keys has LSE_i = -Inf and no weight. Everything is checked first. Errors wrap attn.ErrShape and
// attn.ErrDType, or are the driver's.
func (e *Engine) Merge(s *cuda.Stream, p *Parts, b *cuda.Buffer, to *Merged) error {
	const op = "merge"
	switch {
	case p.Count < 1 || p.Heads < 1 || p.Dim < 4 || p.Dim%4 != 0 || to.Rows < 0 || to.Rows > p.Rows:
		return gpu.Errorf(op, attn.ErrShape, "%d rows of %+v", to.Rows, *p)
	case b.Len() < p.Bytes():
		return gpu.Errorf(op, attn.ErrShape, "%d bytes of %d for %+v", b.Len(), p.Bytes(), *p)
	case (to.OutAt.Row|to.OutAt.Head)%4 != 0:
		return gpu.Errorf(op, attn.ErrShape, "output strides %+v: they must be multiples of 4", to.OutAt)
	}
	if err := to.Out.Check(op, "out", to.OutAt.Extent(to.Rows, p.Heads, p.Dim)); err != nil {
		return err
	}
	if to.LSE.Buffer != nil {
		if to.LSE.DType != attn.Float32 {
			return gpu.Errorf(op, attn.ErrDType, "lse is %v; it must be %v", to.LSE.DType, attn.Float32)
		}
		if err := to.LSE.CheckLoose(op, "lse", to.LSEAt.Extent(to.Rows, p.Heads, 1)); err != nil {
			return err
		}
	}
	if to.Rows == 0 {
		return nil
	}
	if err := e.loadPrefixes(); err != nil {
		return err
	}
	slots, _, _, _ := p.at()
	out, lse := p.State(b, 0)
	last, lastLSE := p.State(b, p.Count-1)
	params := prefixMergeParams{
		own: last.Address(), ownLse: lastLSE.Address(), prefix: out.Address(), prefixLse: lse.Address(),
		starts: b.Address(), slots: b.Address() + uint64(slots), out: to.Out.Address(), lse: to.LSE.AddressOr0(),
		outRow: int64(to.OutAt.Row), outHead: int64(to.OutAt.Head), lseRow: int64(to.LSEAt.Row), lseHead: int64(to.LSEAt.Head),
		rows: int32(to.Rows), heads: int32(p.Heads), dim: int32(p.Dim), outType: gpu.Code(to.Out.DType),
	}
	var args cuda.Args
	cuda.Struct(&args, &params)
	args.Hold(b)
	args.Hold(to.Out.Buffer)
	if to.LSE.Buffer != nil {
		args.Hold(to.LSE.Buffer)
	}
	blocks := min(attn.Ceil(attn.Product(to.Rows, p.Heads), prefixThreads/32), prefixBlocks*e.blocks)
	return e.mergePrefixes.Launch(s, cuda.Grid{Blocks: [3]int{blocks}, Threads: [3]int{prefixThreads}, Overlap: e.hasCopyEngine()}, &args)
}
