package layers

import (
	"math"
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// headsUnit is the module with linear layers by heads.
const headsUnit = "heads"

// Constants of the kernels (kernels/gemm_heads.cuh).
const (
	headsThreads = 128
	headsRows    = 8
	headsEach    = 4 // output features of a warp
	headsBlocks  = 4 // of a multiprocessor
)

// MostHeadRows is the largest number of rows of a HeadLinear. With more rows, a launch of tensor cores for each head takes less time.
const MostHeadRows = 256

// HeadLinear is the operands of linear layers by heads, all in one launch. For each row and head h
//
//	Y[h] = X[h] W[h]^T, followed by the Rest elements that follow X[h]
//
// X and Y are float32. Head h of row r begins at element XRow*r + XHead*h of X, and YRow*r + YHead*h of Y. W is (Heads*Out, In), of float16 or
// bfloat16. In is a multiple of 4, and W begins at a multiple of 16 bytes. X and Y share no memory.
type HeadLinear struct {
	Rows, Heads, In, Out, Rest int
	XRow, XHead, YRow, YHead   int
	X, W, Y                    gpu.Memory
}

// headLinearParams is struct HeadLinearParams.
type headLinearParams struct {
	x, w, y                    uint64
	rows, heads, in, out, rest int32
	xRow, xHead, yRow, yHead   int32
	sharers                    int32
}

func (o *HeadLinear) check(op string) error {
	switch {
	case min(o.Rows, o.Heads, o.In, o.Out) < 1 || o.Rest < 0:
		return gpu.Errorf(op, attn.ErrShape, "%d rows, %d heads, layers of %d to %d features with %d behind", o.Rows, o.Heads, o.In, o.Out, o.Rest)
	case o.In%4 != 0:
		return gpu.Errorf(op, attn.ErrUnsupported, "heads of %d elements: they must be multiples of 4", o.In)
	case o.Rows > MostHeadRows || max(attn.Product(o.Heads, o.Out, o.Rows), attn.Product(o.Rows, o.XRow), attn.Product(o.Rows, o.YRow)) > math.MaxInt32:
		return gpu.Errorf(op, attn.ErrUnsupported, "%d rows, of at most %d, %d heads of %d features, rows of %d and %d elements", o.Rows, MostHeadRows, o.Heads, o.Out, o.XRow, o.YRow)
	case o.XHead < 0 || o.XRow < 0 || o.YHead < o.Out+o.Rest || o.Rows > 1 && o.YRow < (o.Heads-1)*o.YHead+o.Out+o.Rest:
		return gpu.Errorf(op, attn.ErrShape, "rows of %d and %d elements, heads %d and %d apart", o.XRow, o.YRow, o.XHead, o.YHead)
	}
	if err := o.X.CheckFloats(op, "x", (o.Rows-1)*o.XRow+(o.Heads-1)*o.XHead+o.In+o.Rest); err != nil {
		return err
	}
	if !slices.Contains(gpu.Halves, o.W.DType) {
		return gpu.Errorf(op, attn.ErrDType, "w is %v, want %v or %v", o.W.DType, attn.Float16, attn.BFloat16)
	}
	if err := o.W.Check(op, "w", o.Heads*o.Out*o.In); err != nil {
		return err
	}
	return o.Y.CheckFloats(op, "y", (o.Rows-1)*o.YRow+(o.Heads-1)*o.YHead+o.Out+o.Rest)
}

// HeadLinear queues a HeadLinear.
func (d *Engine) HeadLinear(s *cuda.Stream, o *HeadLinear) error {
	const op = "linear layers by heads"
	if err := o.check(op); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.heads == nil {
		var f16, bf16 *cuda.Function
		if err := d.functions(headsUnit, map[string]**cuda.Function{"heads_f16": &f16, "heads_bf16": &bf16}); err != nil {
			return err
		}
		d.heads = map[attn.DType]*cuda.Function{attn.Float16: f16, attn.BFloat16: bf16}
	}
	p := headLinearParams{
		x: o.X.Address(), w: o.W.Address(), y: o.Y.Address(), rows: int32(o.Rows), heads: int32(o.Heads), in: int32(o.In), out: int32(o.Out), rest: int32(o.Rest),
		xRow: int32(o.XRow), xHead: int32(o.XHead), yRow: int32(o.YRow), yHead: int32(o.YHead),
	}
	// One wave of thread blocks.
	items := o.Heads * attn.Ceil(o.Rows, headsRows)
	p.sharers = int32(min(attn.Ceil(o.Out, headsThreads/32*headsEach), max(1, headsBlocks*d.info.Multiprocessors/items)))
	d.args.Reset()
	cuda.Struct(&d.args, &p)
	d.hold(o.X, o.W, o.Y)
	grid := cuda.Grid{Blocks: [3]int{items * int(p.sharers)}, Threads: [3]int{headsThreads}, Overlap: d.overlap(), Waits: true}
	return d.heads[o.W.DType].Launch(s, grid, &d.args)
}
