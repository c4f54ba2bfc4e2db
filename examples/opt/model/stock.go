package model

import (
	"errors"
	"fmt"
	"math"
	"time"

	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/internal/dense"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// masked is added to the score of a hidden slot. It is finite, because Inf - Inf is NaN, and large enough to absorb
// any score.
const masked = -1e30

// stockCache has the keys and values of all sequences in tensors of a fixed capacity, as a graph of stock nodes needs
// them: for each layer a tensor (B*H, capacity, d), an input of the graphs. Slots are written between runs.
type stockCache struct {
	batch, heads, dim, capacity int
	keys, values                []*tensor.Dense // by layer
	lengths                     []int           // by sequence
}

func newStockCache(c hf.Config, batch, capacity int) *stockCache {
	s := &stockCache{batch: batch, heads: c.Heads, dim: c.HeadDim(), capacity: capacity, lengths: make([]int, batch)}
	zeros := func() *tensor.Dense {
		return dense.New(tensor.Float32, batch*s.heads, capacity, s.dim)
	}
	for range c.Layers {
		s.keys, s.values = append(s.keys, zeros()), append(s.values, zeros())
	}
	return s
}

// newAttention takes the same number of rows for each sequence.
func (c *stockCache) newAttention(rows int) (attention, int, error) {
	each := (rows + c.batch - 1) / c.batch
	return newStockAttention(c, each), each * c.batch, nil
}

// truncate leaves the keys and values in place: the graphs' masks hide them.
func (c *stockCache) truncate(sequence, tokens int) error {
	c.lengths[sequence] = tokens
	return nil
}

func (c *stockCache) Close() error { return nil }

// stockAttention is attention as a user of Gorgonia writes it without leanattention. A run takes the same number T of
// rows of each sequence. The scores of the rows against the cached keys and against the run's own keys are two
// matrices,
//
//	old = q Kᵀ + mask     (B*H, T, capacity)
//	now = q kᵀ + causal   (B*H, T, T)
//
// of which one softmax is made, with the maximum m of each row of both:
//
//	out = (exp(old-m) V + exp(now-m) v) / (sum exp(old-m) + sum exp(now-m))
//
// The softmax is written out because Gorgonia's SoftMax takes the maximum of the wrong elements and is NaN for masked
// rows of different lengths. Every run reads the whole capacity for sequences of any length.
type stockAttention struct {
	cache *stockCache
	rows  int // T

	mask   *tensor.Dense // (B*H, T, capacity): 0 for the slots in use
	causal *tensor.Dense // (1, T, T)
	seen   []int         // by sequence, the slots that mask shows

	counts       []int     // of the run
	keys, values []G.Value // of the run, by layer
	clock        clock
}

func newStockAttention(cache *stockCache, rows int) *stockAttention {
	a := &stockAttention{
		cache: cache, rows: rows, seen: make([]int, cache.batch),
		mask:   dense.New(tensor.Float32, cache.batch*cache.heads, rows, cache.capacity),
		causal: dense.New(tensor.Float32, 1, rows, rows),
		keys:   make([]G.Value, len(cache.keys)), values: make([]G.Value, len(cache.keys)),
	}
	for i := range a.mask.Float32s() {
		a.mask.Float32s()[i] = masked
	}
	for i := range rows {
		for j := i + 1; j < rows; j++ {
			a.causal.Float32s()[i*rows+j] = masked
		}
	}
	return a
}

func (a *stockAttention) node(b *builder, layer int, q, k, v *G.Node) *G.Node {
	c, bh, rows := a.cache, a.cache.batch*a.cache.heads, a.rows
	q, k, v = a.clock.start(b, layer, q, k, v)
	if b.err != nil {
		return nil
	}
	G.Read(k, &a.keys[layer])
	G.Read(v, &a.values[layer])

	product := func(x, y *G.Node, transposed bool) *G.Node {
		return b.do(func() (*G.Node, error) { return G.BatchedMatMul(x, y, false, transposed) })
	}
	q, k, v = a.split(b, q), a.split(b, k), a.split(b, v)
	oldK := b.input(fmt.Sprintf("cache.%d.keys", layer), c.keys[layer])
	oldV := b.input(fmt.Sprintf("cache.%d.values", layer), c.values[layer])
	q = b.do(func() (*G.Node, error) {
		return G.HadamardProd(q, G.NewConstant(float32(1/math.Sqrt(float64(c.dim))), G.WithName("scale")))
	})
	old := b.add(product(q, oldK, true), b.input("mask", a.mask))
	now := product(q, k, true)
	if rows > 1 {
		causal := b.input("causal", a.causal)
		now = b.do(func() (*G.Node, error) { return G.BroadcastAdd(now, causal, nil, []byte{0}) })
	}

	// column reduces the keys' axis to one element.
	column := func(reduce func(*G.Node, ...int) (*G.Node, error), x *G.Node) *G.Node {
		x = b.do(func() (*G.Node, error) { return reduce(x, 2) })
		return b.reshape(x, bh, rows, 1)
	}
	most := b.maximum(column(G.Max, old), column(G.Max, now))
	exp := func(x *G.Node) *G.Node {
		x = b.do(func() (*G.Node, error) { return G.BroadcastSub(x, most, nil, []byte{2}) })
		return b.do(func() (*G.Node, error) { return G.Exp(x) })
	}
	old, now = exp(old), exp(now)
	sum := b.add(column(G.Sum, old), column(G.Sum, now))
	out := b.add(product(old, oldV, false), product(now, v, false))
	out = b.do(func() (*G.Node, error) { return G.BroadcastHadamardDiv(out, sum, nil, []byte{2}) })
	return a.clock.stop(b, layer, a.join(b, out))
}

// split turns rows (B*T, H*d) into heads (B*H, T, d).
func (a *stockAttention) split(b *builder, x *G.Node) *G.Node {
	c := a.cache
	if a.rows > 1 {
		x = b.reshape(x, c.batch, a.rows, c.heads, c.dim)
		x = b.do(func() (*G.Node, error) { return G.Transpose(x, 0, 2, 1, 3) })
	}
	return b.reshape(x, c.batch*c.heads, a.rows, c.dim)
}

// join is the reverse of split.
func (a *stockAttention) join(b *builder, x *G.Node) *G.Node {
	c := a.cache
	if a.rows > 1 {
		x = b.reshape(x, c.batch, c.heads, a.rows, c.dim)
		x = b.do(func() (*G.Node, error) { return G.Transpose(x, 0, 2, 1, 3) })
	}
	return b.reshape(x, c.batch*a.rows, c.heads*c.dim)
}

func (b *builder) reshape(x *G.Node, shape ...int) *G.Node {
	return b.do(func() (*G.Node, error) { return G.Reshape(x, shape) })
}

// maximum returns the larger of x and y, element by element, for which Gorgonia has no node: x where x >= y, and y
// elsewhere.
func (b *builder) maximum(x, y *G.Node) *G.Node {
	fromX := b.do(func() (*G.Node, error) { return G.Gte(x, y, true) })
	fromY := b.do(func() (*G.Node, error) { return G.Lt(x, y, true) })
	x = b.do(func() (*G.Node, error) { return G.HadamardProd(x, fromX) })
	y = b.do(func() (*G.Node, error) { return G.HadamardProd(y, fromY) })
	return b.add(x, y)
}

func (a *stockAttention) usedRows(_ *builder, x *G.Node) *G.Node { return x }

func (a *stockAttention) take(left, counts []int) {
	for i, n := range left {
		counts[i] = min(n, a.rows)
	}
}

func (a *stockAttention) step(counts, first []int, compute func() error) error {
	if err := a.begin(counts, first); err != nil {
		return err
	}
	err := compute()
	return errors.Join(err, a.end(err == nil))
}

func (a *stockAttention) begin(counts, first []int) error {
	c, mask := a.cache, a.mask.Float32s()
	for i, n := range counts {
		if c.lengths[i]+n > c.capacity {
			return fmt.Errorf("%w: %d tokens of sequence %d in a capacity of %d", ErrConfig, c.lengths[i]+n, i, c.capacity)
		}
	}
	a.counts = append(a.counts[:0], counts...)
	for i := range counts {
		first[i] = i * a.rows
		shown, length := a.seen[i], c.lengths[i]
		for row := i * c.heads * a.rows; row < (i+1)*c.heads*a.rows; row++ {
			slots := mask[row*c.capacity : (row+1)*c.capacity]
			for j := shown; j < length; j++ {
				slots[j] = 0
			}
			for j := length; j < shown; j++ {
				slots[j] = masked
			}
		}
		a.seen[i] = length
	}
	return nil
}

// end copies the run's keys and values, which are results of the graph, into their slots.
func (a *stockAttention) end(keep bool) error {
	if !keep {
		return nil
	}
	began := time.Now()
	c := a.cache
	for layer := range c.keys {
		for _, p := range []struct {
			to   *tensor.Dense
			from G.Value
		}{{c.keys[layer], a.keys[layer]}, {c.values[layer], a.values[layer]}} {
			from, ok := p.from.Data().([]float32)
			if !ok || len(from) != c.batch*a.rows*c.heads*c.dim {
				return fmt.Errorf("model: keys or values of layer %d are %T of shape %v", layer, p.from.Data(), p.from.Shape())
			}
			c.write(p.to.Float32s(), from, a.counts, a.rows)
		}
	}
	for i, n := range a.counts {
		c.lengths[i] += n
	}
	a.clock.total += time.Since(began)
	return nil
}

// write copies counts[i] rows of each sequence i, which has `rows` rows in from, after its length.
func (c *stockCache) write(to, from []float32, counts []int, rows int) {
	for i, n := range counts {
		for t := range n {
			for h := range c.heads {
				slot := ((i*c.heads+h)*c.capacity + c.lengths[i] + t) * c.dim
				copy(to[slot:slot+c.dim], from[((i*rows+t)*c.heads+h)*c.dim:])
			}
		}
	}
}

func (a *stockAttention) spent() time.Duration { return a.clock.total }
