package model

import (
	"fmt"
	"runtime"
	"slices"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/internal/memory"

	"gorgonia.org/tensor"
)

// CheckRoom checks, before loading, that the host or each GPU has memory for its part of a source's weights in a type
// (see [LoadAs]), for the cache of a decoder and, approximately, for the rows of its graphs; otherwise the error is
// leanattention.ErrOutOfMemory with the numbers. Weights on the host that keep their type are not counted: they stay
// in the mapped file, and the system reads them again when necessary.
func CheckRoom(from Source, matrices tensor.Dtype, o Options) error {
	c := from.Config()
	if err := o.check(c); err != nil {
		return err
	}
	gpus := max(len(o.Device.Members()), 1)
	weights := make([]int64, gpus)
	var made int64
	for p := range placing(c, o.world(), gpus) {
		t, err := from.Tensor(p.from, p.shape...)
		if err != nil {
			return err
		}
		as := loadedAs(t, matrices)
		part := cutOf(c, o.world(), p.from, p.shape)
		if part.none {
			continue
		}
		p.shape = slices.Clone(p.shape)
		p.shape[part.axis] = part.to - part.from
		for i := range weights {
			weights[i] += p.bytesOn(i, gpus, as.Size())
		}
		if as != t.Dtype() && p.name == p.from {
			made += int64(tensor.Shape(p.shape).TotalSize()) * int64(as.Size())
		}
	}
	cache, err := o.cacheBytes(c)
	if err != nil {
		return err
	}
	if o.Device == nil {
		rows := o.hostBytes(c)
		if err := memory.Check(made+cache+rows, max(made, cache/int64(2*c.Layers))); err != nil {
			return fmt.Errorf("model: %d MB of converted weights, %d MB of cache and %d MB for the rows of %d sequences in host memory: %v: %w",
				made>>20, cache>>20, rows>>20, len(o.Capacity), err, la.ErrOutOfMemory)
		}
		return nil
	}
	chunk, draft := o.ChunkBytes(c), o.draftBytes(c)
	return checkFree(o.Device, func(i int) (int64, string) {
		mine := cache / int64(gpus) // evenly, except for a page
		if o.Shard == la.ShardHeads {
			from, to := o.world().Part(c.Heads)
			heads := to - from
			mine = cache / int64(heads) * int64((i+1)*heads/gpus-i*heads/gpus)
		}
		values := chunk + draft
		if i > 0 {
			values = chunk
		}
		return weights[i] + mine + values, fmt.Sprintf("%d MB of weights, %d MB of cache and %d MB for prompts of %d tokens at once", weights[i]>>20, mine>>20, values>>20, o.chunk())
	})
}

// ChunkBytes returns the approximate memory of the prompts' graph's rows on a GPU: the values of a layer, which the
// other layers share.
func (o *Options) ChunkBytes(c hf.Config) int64 {
	const spare = 5 // quarters: buffers come in sizes of four between powers of two
	row := 2*int64(c.HiddenSize) + 2*int64(c.FFNDim)
	if o.AllLogits {
		row += int64(c.VocabSize)
	}
	return int64(o.chunk()) * row * 4 * spare / 4
}

// hostBytes returns the approximate host memory of the graphs' rows: their layers share the values of one layer,
// except Gorgonia's own nodes, which also compute the scores of each head.
func (o *Options) hostBytes(c hf.Config) int64 {
	batch, most := int64(len(o.Capacity)), int64(slices.Max(o.Capacity))
	rows, layers, scores := int64(o.chunk())+batch*int64(2+o.Draft), int64(1), int64(0)
	values := int64(4) // values of a row's width in a layer
	switch {
	case o.Attention == Fused:
		rows, scores, layers = 2*batch*most, most*most, int64(c.Layers)
	case !o.paged():
		each := (int64(o.chunk())+batch-1)/batch + int64(2+o.Draft)
		rows, scores, layers = each*batch, each*(most+each)*batch*int64(c.Heads)*4, int64(c.Layers)
		values = 10 // as measured: Gorgonia's machine keeps most values of its nodes
	case o.Linear == StockLinear:
		layers = int64(c.Layers)
	}
	logits := batch * int64(2+o.Draft)
	if o.AllLogits {
		logits += int64(o.chunk())
	}
	return 4 * (rows*layers*(values*int64(c.HiddenSize)+2*int64(c.FFNDim)) + scores + logits*int64(c.VocabSize))
}

// shortage turns the panic of a value that does not fit the host's memory into an error.
func shortage(err *error) {
	switch r := recover().(type) {
	case nil:
	case *memory.Shortage:
		*err = fmt.Errorf("model: %d bytes in host memory: %v: %w", r.Bytes, r, la.ErrOutOfMemory)
	default:
		panic(r)
	}
}

// draftBytes returns the approximate memory of the drafts' graph's rows on a GPU: the graph is recorded, so each
// layer has memory of its own.
func (o *Options) draftBytes(c hf.Config) int64 {
	if o.Draft == 0 {
		return 0
	}
	row := int64(c.Layers)*(6*int64(c.HiddenSize)+int64(c.FFNDim)) + int64(c.VocabSize)
	return int64(len(o.Capacity)) * int64(1+o.Draft) * row * 4
}

// chunk returns the number of rows of the prompts' graph.
func (o *Options) chunk() int {
	total := 0
	for _, n := range o.Capacity {
		total += n
	}
	switch {
	case o.Chunk > 0:
		return o.Chunk
	case o.Attention == Fused: // a pass computes all tokens, also if few are new
		return total
	case o.AllLogits: // each row of logits takes memory, also on a GPU
		return min(total, LogitsChunk)
	case o.Device != nil:
		return min(total, GPUChunk)
	}
	return min(total, max(DefaultChunk, min(CoreChunk*runtime.GOMAXPROCS(0), ManyCoresChunk)))
}

// cacheBytes returns the memory of the keys and values of all sequences at their capacity.
func (o *Options) cacheBytes(c hf.Config) (int64, error) {
	switch {
	case o.paged():
		return o.cacheConfig(c).Bytes()
	case o.Attention == Fused: // no cache
		return 0, nil
	}
	return int64(len(o.Capacity)) * int64(slices.Max(o.Capacity)) * tokenBytes(c, tensor.Float32), nil
}
