package model

import (
	"fmt"
	"strings"

	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/ranks"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// The parts of a model in several processes, as in Megatron: each rank has some heads, and some inner features of the
// feed-forward network. So q, k, v and the first feed-forward layer are cut by output features. The output projection
// and the second feed-forward layer are cut by input features: they make partial sums, which nn.AllReduce adds. Rank
// 0 adds bias and residual once. Tables, norms and the head are whole on every rank. If ranks have several GPUs each,
// a rank's part is sharded over its GPUs as a whole model is (shards.go): the GPUs of a rank sum first, and then each
// sums with the same GPU of the other ranks.

// cut is a rank's part of a weight: indices of an axis.
type cut struct {
	axis, from, to int
	none           bool // another rank has the weight
}

// Checksums returns the checksums of a folder's weights that ranks compare: of all elements of a replicated weight,
// and of a part of each sharded weight. See [hf.Folder.Checksums].
func Checksums(from *hf.Folder, world ranks.World) ([]string, error) {
	world.Rank = 0 // equal on all ranks
	return from.Checksums(func(w hf.Weight) bool {
		c := cutOf(from.Config(), world, w.Name, w.Shape)
		return !c.none && c.from == 0 && c.to == w.Shape[c.axis]
	})
}

// featureBlock divides parts of the feed-forward network: columns of a weight begin at aligned rows of 16 bytes.
const featureBlock = 16

// cutOf returns a rank's part of a weight.
func cutOf(c hf.Config, w ranks.World, name string, shape []int) cut {
	whole := cut{0, 0, shape[0], false}
	if w.Size <= 1 {
		return whole
	}
	dir, kind, _ := cutLast(name, ".") // weight or bias
	_, layer, _ := cutLast(dir, ".")
	switch layer {
	case "q_proj", "k_proj", "v_proj":
		from, to := w.Part(c.Heads)
		return cut{0, from * c.HeadDim(), to * c.HeadDim(), false}
	case "fc1":
		from, to := features(c, w)
		return cut{0, from, to, false}
	case "out_proj", "fc2":
		if kind == "bias" {
			whole.none = w.Rank != 0
			return whole
		}
		from, to := w.Part(c.Heads)
		from, to = from*c.HeadDim(), to*c.HeadDim()
		if layer == "fc2" {
			from, to = features(c, w)
		}
		return cut{1, from, to, false}
	}
	return whole
}

// features returns a rank's inner features of the feed-forward network.
func features(c hf.Config, w ranks.World) (from, to int) {
	blocks := (c.FFNDim + featureBlock - 1) / featureBlock
	from, to = w.Part(blocks)
	return from * featureBlock, min(to*featureBlock, c.FFNDim)
}

func cutLast(s, sep string) (before, after string, found bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return "", s, false
	}
	return s[:i], s[i+len(sep):], true
}

// checkWorld returns an error if a model has no parts for so many ranks.
func checkWorld(c hf.Config, w ranks.World) error {
	if blocks := c.FFNDim / featureBlock; w.Size > c.Heads || w.Size > max(blocks, 1) {
		return fmt.Errorf("%w: %d ranks for %d heads and %d blocks of %d features: each needs one", ErrConfig, w.Size, c.Heads, blocks, featureBlock)
	}
	return nil
}

// of returns the part of a tensor. A part that is not whole rows is a copy.
func (c cut) of(t *tensor.Dense) *tensor.Dense {
	shape := t.Shape().Clone()
	if c.from == 0 && c.to == shape[c.axis] {
		return t
	}
	outer, inner := 1, int(t.Dtype().Size())
	for i, n := range shape {
		if i < c.axis {
			outer *= n
		} else if i > c.axis {
			inner *= n
		}
	}
	all, n := dense.Backing[byte](t), shape[c.axis]
	shape[c.axis] = c.to - c.from
	part := tensor.New(tensor.Of(t.Dtype()), tensor.WithShape(shape...))
	to := dense.Backing[byte](part)
	for i := range outer {
		to = to[copy(to, all[(i*n+c.from)*inner:(i*n+c.to)*inner]):]
	}
	return part
}

// world returns the world of a decoder's options.
func (o *Options) world() ranks.World {
	if o.Ranks == nil {
		return ranks.World{Size: 1}
	}
	return o.Ranks.World()
}

// checkRanks refuses options that ranks don't support.
func (o *Options) checkRanks(c hf.Config) error {
	w := o.world()
	switch {
	case w.Size == 1:
		return nil
	case o.Device == nil:
		return fmt.Errorf("%w: %d ranks on the CPU, and they compute on GPUs", ErrConfig, w.Size)
	}
	return checkWorld(c, w)
}

// checkWeights returns an error if the weights are not those of the options' rank.
func (o *Options) checkWeights(w *Weights) error {
	if a, b := w.world, o.world(); max(a.Size, 1) != b.Size || a.Rank != b.Rank {
		return fmt.Errorf("%w: weights of rank %d of %d for a decoder of rank %d of %d", ErrConfig, a.Rank, max(a.Size, 1), b.Rank, b.Size)
	}
	return nil
}

// partial is a linear layer that is cut by input features: the sum of the ranks' partial sums.
func (b *builder) partial(x *G.Node, name string, residual *G.Node) *G.Node {
	if b.ranks == nil || b.ranks.World().Size == 1 {
		return b.linear(x, "", name, false, residual)
	}
	if b.ranks.World().Rank != 0 {
		residual = nil
	}
	y := b.linear(x, "", name, false, residual)
	return b.do(func() (*G.Node, error) { return nn.AllReduce(y, b.ranks) })
}

// fromFirst returns rank 0's value of a node that is equal on all ranks: different GPUs may have different bits.
func (b *builder) fromFirst(x *G.Node) *G.Node {
	if b.ranks == nil || b.ranks.World().Size == 1 {
		return x
	}
	return b.do(func() (*G.Node, error) { return nn.Broadcast(x, b.ranks, 0) })
}
