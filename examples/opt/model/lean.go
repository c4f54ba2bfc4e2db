package model

import (
	"errors"
	"time"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/examples/opt/hf"

	G "gorgonia.org/gorgonia"
)

// leanCache is a leanattention.Cache with the pages that the sequences may need.
type leanCache struct {
	*la.Cache
	sequences []*la.Sequence
	workers   int
	schedule  la.Schedule
	mixed     bool
}

// pageSize is the number of tokens of a page.
const pageSize = 64

// pages returns the pages that the sequences and their forks may need.
func (o *Options) pages() int {
	pages := (o.ForkTokens + pageSize - 1) / pageSize
	for _, n := range o.Capacity {
		pages += (n + pageSize - 1) / pageSize
	}
	// A page that begins with shared tokens and ends with others is copied by all continuations, and may be held
	// until all have copied it.
	parted := map[Shared]bool{}
	for _, s := range o.Shared {
		pages -= s.Tokens / pageSize
		if s.Tokens%pageSize != 0 {
			parted[s] = true
		}
	}
	return pages + len(parted)
}

// cacheConfig returns the configuration of a decoder's paged cache.
func (o *Options) cacheConfig(c hf.Config) la.CacheConfig {
	from, to := o.world().Part(c.Heads)
	pages := o.pages()
	if o.Device != nil {
		pages = max(pages, len(o.Device.Members())) // with too few heads each GPU has some of the pages
	}
	return la.CacheConfig{Layers: c.Layers, KVHeads: to - from, HeadDim: c.HeadDim(), DType: o.Cache, PageSize: pageSize, Pages: pages, Device: o.Device, Shard: o.Shard}
}

func newLeanCache(c hf.Config, o *Options) (*leanCache, error) {
	cache, err := la.NewCache(o.cacheConfig(c))
	if err != nil {
		return nil, err
	}
	l := &leanCache{Cache: cache, workers: o.Workers, schedule: o.Schedule, mixed: o.Mixed}
	if o.Attention == Default {
		l.schedule = la.Unfused
	}
	for range o.Capacity {
		s, err := cache.NewSequence()
		if err != nil {
			return nil, errors.Join(err, cache.Close())
		}
		l.sequences = append(l.sequences, s)
	}
	return l, nil
}

func (l *leanCache) newAttention(rows int) (attention, int, error) {
	step, err := l.NewStep(rows)
	if err != nil {
		return nil, 0, err
	}
	options := []la.Option{la.WithCausal(), la.WithWorkers(l.workers), la.WithSchedule(l.schedule)}
	if l.mixed {
		options = append(options, la.WithMixedPrecision())
	}
	return &leanAttention{rows: step, sequences: l.sequences, options: options}, rows, nil
}

func (l *leanCache) truncate(sequence, tokens int) error {
	return l.sequences[sequence].Truncate(tokens)
}

// leanAttention is leanattention.CachedAttention: the rows of a step are the tokens of the sequences in order.
type leanAttention struct {
	rows      *la.Step
	sequences []*la.Sequence
	options   []la.Option
	appends   []la.Append
}

func (a *leanAttention) node(b *builder, layer int, q, k, v *G.Node) *G.Node {
	return b.do(func() (*G.Node, error) {
		return la.CachedAttention(q, k, v, a.rows.Layer(layer), a.options...)
	})
}

func (a *leanAttention) usedRows(b *builder, x *G.Node) *G.Node {
	return b.do(func() (*G.Node, error) { return a.rows.Rows(x) })
}

func (a *leanAttention) take(left, counts []int) { shareRows(a.rows.Tokens(), left, counts) }

func (a *leanAttention) step(counts, first []int, compute func() error) error {
	a.appends = a.appends[:0]
	row := 0
	for i, n := range counts {
		if first[i] = row; n > 0 {
			a.appends = append(a.appends, la.Append{Seq: a.sequences[i], Tokens: n})
			row += n
		}
	}
	return a.rows.Run(a.appends, compute)
}

func (a *leanAttention) spent() time.Duration { return a.rows.AttentionTime() }
