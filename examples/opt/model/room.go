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

// CheckRoom says, before anything is loaded, whether the host or the GPU, or each of several, has room for
// its part of the weights of a source in a type (see [LoadAs]), for the cache of a decoder and, about, for the rows of its graphs:
// if not, leanattention.ErrOutOfMemory with the numbers. On the host weights that keep their type stay where the file is mapped, and the
// system reads them again when it has to: they are not counted.
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
		mine := cache / int64(gpus) // evenly, but for a page
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

// ChunkBytes is what the rows of the prompts' graph take on a GPU, about: the values of a
// layer, which the others share.
func (o *Options) ChunkBytes(c hf.Config) int64 {
	const spare = 5 // quarters: buffers come in sizes of four between powers of two
	row := 2*int64(c.HiddenSize) + 2*int64(c.FFNDim)
	if o.AllLogits {
		row += int64(c.VocabSize)
	}
	return int64(o.chunk()) * row * 4 * spare / 4
}

// hostBytes is what the rows of the graphs take in host memory, about: their layers share the values of one, but those of
// Gorgonia's own nodes do not, which compute the scores of each head besides.
func (o *Options) hostBytes(c hf.Config) int64 {
	batch, most := int64(len(o.Capacity)), int64(slices.Max(o.Capacity))
	rows, layers, scores := int64(o.chunk())+batch*int64(2+o.Draft), int64(1), int64(0)
	values := int64(4) // of a row's width, in a layer
	switch {
	case o.Attention == Fused:
		rows, scores, layers = 2*batch*most, most*most, int64(c.Layers)
	case !o.paged():
		each := (int64(o.chunk())+batch-1)/batch + int64(2+o.Draft)
		rows, scores, layers = each*batch, each*(most+each)*batch*int64(c.Heads)*4, int64(c.Layers)
		values = 10 // as measured: Gorgonia's machine keeps most of what its nodes compute
	case o.Linear == StockLinear:
		layers = int64(c.Layers)
	}
	logits := batch * int64(2+o.Draft)
	if o.AllLogits {
		logits += int64(o.chunk())
	}
	return 4 * (rows*layers*(values*int64(c.HiddenSize)+2*int64(c.FFNDim)) + scores + logits*int64(c.VocabSize))
}

// shortage turns the panic of a value that the host has no memory for into an error.
func shortage(err *error) {
	switch r := recover().(type) {
	case nil:
	case *memory.Shortage:
		*err = fmt.Errorf("model: %d bytes in host memory: %v: %w", r.Bytes, r, la.ErrOutOfMemory)
	default:
		panic(r)
	}
}

// draftBytes is what the rows of the graph for drafts take on a GPU, about: it is recorded, so that
// each layer has memory of its own.
func (o *Options) draftBytes(c hf.Config) int64 {
	if o.Draft == 0 {
		return 0
	}
	row := int64(c.Layers)*(6*int64(c.HiddenSize)+int64(c.FFNDim)) + int64(c.VocabSize)
	return int64(len(o.Capacity)) * int64(1+o.Draft) * row * 4
}

// chunk is the rows of the prompts' graph.
func (o *Options) chunk() int {
	total := 0
	for _, n := range o.Capacity {
		total += n
	}
	switch {
	case o.Chunk > 0:
		return o.Chunk
	case o.Attention == Fused: // a pass computes all tokens, however few are new
		return total
	case o.AllLogits: // each row of logits takes memory here, and on a GPU there
		return min(total, LogitsChunk)
	case o.Device != nil:
		return min(total, GPUChunk)
	}
	return min(total, max(DefaultChunk, min(CoreChunk*runtime.GOMAXPROCS(0), ManyCoresChunk)))
}

// cacheBytes is the memory of the keys and values of all sequences at their capacity.
func (o *Options) cacheBytes(c hf.Config) (int64, error) {
	switch {
	case o.paged():
		return o.cacheConfig(c).Bytes()
	case o.Attention == Fused: // it has none
		return 0, nil
	}
	return int64(len(o.Capacity)) * int64(slices.Max(o.Capacity)) * tokenBytes(c, tensor.Float32), nil
}
