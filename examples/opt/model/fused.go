package model

import (
	"errors"
	"fmt"
	"math"
	"time"

	"gorgonia.org/leanattention/rewrite"

	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/internal/dense"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// textCache keeps the texts, and no keys and values: every run computes all tokens of all sequences again.
type textCache struct {
	stockCache // for its sizes
	texts      [][]int
	asWritten  bool
}

func newTextCache(c hf.Config, batch, capacity int, asWritten bool) *textCache {
	return &textCache{
		stockCache: stockCache{batch: batch, heads: c.Heads, dim: c.HeadDim(), capacity: capacity},
		texts:      make([][]int, batch), asWritten: asWritten,
	}
}

// newAttention takes a row for each token of a sequence's capacity, of which the given number are new in a run.
func (c *textCache) newAttention(tokens int) (attention, int, error) {
	mask := dense.New(tensor.Float32, 1, c.capacity, c.capacity)
	for i := range c.capacity {
		for j := i + 1; j < c.capacity; j++ {
			mask.Float32s()[i*c.capacity+j] = masked
		}
	}
	stock := stockAttention{cache: &c.stockCache, rows: c.capacity}
	return &fusedAttention{cache: c, stock: stock, mask: mask, tokens: tokens}, c.batch * c.capacity, nil
}

func (c *textCache) truncate(sequence, tokens int) error {
	c.texts[sequence] = c.texts[sequence][:tokens]
	return nil
}

// fusedAttention is attention as one first writes it with Gorgonia's nodes,
//
//	out = softmax(q kᵀ / sqrt(d) + causal) v
//
// over the whole text at every run, in a graph that rewrite.Fuse then rewrites. The results of rows after a text's
// end are ignored.
type fusedAttention struct {
	cache  *textCache
	stock  stockAttention // splits and joins heads
	mask   *tensor.Dense  // (1, capacity, capacity)
	tokens int            // most tokens of a run
	first  []int
	run    []int // the tokens of the run, of each sequence
	clock  clock
}

func (a *fusedAttention) node(b *builder, layer int, q, k, v *G.Node) *G.Node {
	b.fuse = !a.cache.asWritten
	q, k, v = a.clock.start(b, layer, q, k, v)
	q, k, v = a.stock.split(b, q), a.stock.split(b, k), a.stock.split(b, v)
	scores := b.do(func() (*G.Node, error) { return G.BatchedMatMul(q, k, false, true) })
	scaled := b.do(func() (*G.Node, error) {
		return G.HadamardDiv(scores, G.NewConstant(float32(math.Sqrt(float64(a.cache.dim))), G.WithName("scale")))
	})
	if a.cache.capacity > 1 {
		all := scaled
		scaled = b.do(func() (*G.Node, error) {
			return G.BroadcastAdd(all, b.g.AddNode(G.NewConstant(a.mask, G.WithName("causal"))), nil, []byte{0})
		})
	}
	weights := b.do(func() (*G.Node, error) { return G.SoftMax(scaled, 2) })
	out := b.do(func() (*G.Node, error) { return G.BatchedMatMul(weights, v) })
	return a.clock.stop(b, layer, a.stock.join(b, out))
}

// fused returns Fuse's graph of the builder's graph, with an attention for each layer, and its logits.
func (b *builder) fused(logits *G.Node) (*G.ExprGraph, *G.Node, error) {
	f, err := rewrite.Fuse(logits)
	if err != nil {
		return nil, nil, err
	}
	if len(f.Matches) != b.w.config.Layers {
		return nil, nil, fmt.Errorf("model: not all of %d layers were fused: %v", b.w.config.Layers, f)
	}
	return f.Graph, f.Roots[0], nil
}

func (a *fusedAttention) usedRows(_ *builder, x *G.Node) *G.Node { return x }

func (a *fusedAttention) take(left, counts []int) { shareRows(a.tokens, left, counts) }

func (a *fusedAttention) step(counts, first []int, compute func() error) error {
	if err := a.begin(counts, first); err != nil {
		return err
	}
	err := compute()
	return errors.Join(err, a.end(err == nil))
}

func (a *fusedAttention) begin(counts, first []int) error {
	c := a.cache
	for i, n := range counts {
		if len(c.texts[i])+n > c.capacity {
			return fmt.Errorf("%w: %d tokens of sequence %d in a capacity of %d", ErrConfig, len(c.texts[i])+n, i, c.capacity)
		}
		first[i] = i*c.capacity + len(c.texts[i])
	}
	a.first, a.run = append(a.first[:0], first...), append(a.run[:0], counts...)
	return nil
}

// fill puts the texts before a run's tokens, which are in g already.
func (a *fusedAttention) fill(g *graph) {
	for i, text := range a.cache.texts {
		at := i * a.cache.capacity
		a.cache.texts[i] = append(text, g.tokens[a.first[i]:a.first[i]+a.run[i]]...)
		copy(g.tokens[at:], text)
		for j := range text {
			g.positions[at+j] = j + hf.PositionOffset
		}
	}
}

func (a *fusedAttention) end(keep bool) error {
	if !keep {
		for i, n := range a.run {
			a.cache.texts[i] = a.cache.texts[i][:len(a.cache.texts[i])-n]
		}
	}
	return nil
}

func (a *fusedAttention) spent() time.Duration { return a.clock.total }
