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

// CheckRoom says, before anything is loaded, whether the host or the GPU has room for
// the weights of a source in a type (see [LoadAs]) and for the cache of a decoder:
// if not, leanattention.ErrOutOfMemory with the numbers. Activations need some
// more. On the host weights that keep their type stay where the file is mapped, and the
// system reads them again when it has to: they are not counted.
func CheckRoom(from Source, matrices tensor.Dtype, o Options) error {
	c := from.Config()
	if err := o.check(c); err != nil {
		return err
	}
	var weights, made int64
	for p := range c.Weights() {
		t, err := from.Tensor(p.Name, p.Shape...)
		if err != nil {
			return err
		}
		as := loadedAs(t, matrices)
		bytes := int64(t.Shape().TotalSize()) * int64(as.Size())
		weights += bytes
		if as != t.Dtype() {
			made += bytes
		}
	}
	cache, err := o.cacheBytes(c)
	if err != nil {
		return err
	}
	if o.Device == nil {
		if err := memory.Check(made + cache); err != nil {
			return fmt.Errorf("model: %d MB of converted weights and %d MB of cache in host memory: %v: %w", made>>20, cache>>20, err, la.ErrOutOfMemory)
		}
		return nil
	}
	memory, err := o.Device.Memory()
	if err != nil {
		return err
	}
	chunk := o.ChunkBytes(c) + o.draftBytes(c)
	if weights+cache+chunk > memory.Free {
		return fmt.Errorf("model: %d MB of weights, %d MB of cache and %d MB for prompts of %d tokens at once on %v, which has %d of %d MB free: %w",
			weights>>20, cache>>20, chunk>>20, o.chunk(), o.Device, memory.Free>>20, memory.Total>>20, la.ErrOutOfMemory)
	}
	return nil
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
		return min(total, DefaultChunk)
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
