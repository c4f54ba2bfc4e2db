package decoder

import (
	"errors"
	"fmt"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// shards returns the number of parts of latent vectors, and the sizes of the cache. The shards of a layer are KV heads of one cache;
// with Ranks, each process has one shard.
func (o *Options) shards(s Sizes) (n int, of Sizes, err error) {
	if o.TPLA == nil {
		return 1, s, nil
	}
	fail := func(kind error, format string, args ...any) (int, Sizes, error) {
		return 0, s, fmt.Errorf("decoder: Options.TPLA: %s: %w", fmt.Sprintf(format, args...), kind)
	}
	switch {
	case s.Latent == 0:
		return fail(ErrUnsupported, "the network has no latent attention")
	case o.Device != nil && len(o.Device.Members()) > 1:
		return fail(ErrUnsupported, "Options.Device is %v: use one GPU, or Ranks with a GPU each", o.Device)
	case fewBits(o.Cache):
		return fail(ErrUnsupported, "Options.Cache is %v: use float32, leanattention.Float16 or BFloat16", o.Cache)
	}
	for layer := range s.Layers {
		t := o.TPLA(layer)
		if t == nil {
			return fail(ErrConfig, "layer %d has none", layer)
		}
		shards := t.Shards
		if shards == 0 {
			shards = 2
		}
		if shards < 2 || s.Latent%shards != 0 || layer > 0 && shards != n {
			return fail(ErrConfig, "layer %d has %d shards of latent vectors of %d elements: want a divisor above 1, the same for all layers", layer, shards, s.Latent)
		}
		n = shards
	}
	rope := s.HeadDim - s.Latent
	s.Latent /= n
	s.HeadDim = s.Latent + rope
	switch size := o.world().Size; {
	case !o.several():
		s.KVHeads *= n
	case size != n:
		return fail(ErrConfig, "%d shards of latent vectors for %d ranks: want one for each", n, size)
	}
	return n, s, nil
}

// slicedWeights is the weights of nn.MLA that make and read latent vectors, in the memory of the engine's device. bias may be nil.
type slicedWeights struct{ down, bias, norm, key, value G.Value }

// slice returns the latent attention of a layer with rotated weights, and that of its shards. With a GPU, the first is nil: prompts
// are approximate. With Ranks, there is one shard, that of the rank. The weights are made once for all graphs.
func (e *Engine) slice(g *G.ExprGraph, layer int, m *nn.MLA) (all []*nn.MLA, err error) {
	if e.sliced[layer] == nil {
		if e.sliced[layer], err = e.sliceLayer(layer, m); err != nil {
			return nil, err
		}
	}
	for i, w := range e.sliced[layer] {
		if w == nil {
			all = append(all, nil)
			continue
		}
		of := func(name string, v G.Value) *G.Node { return input(g, fmt.Sprintf("TPLA %d.%d %s", layer, i, name), v) }
		part := *m
		part.Down, part.Norm, part.Key, part.Value = of("down", w.down), of("norm", w.norm), of("key", w.key), of("value", w.value)
		if w.bias != nil {
			part.DownBias = of("bias", w.bias)
		}
		all = append(all, &part)
	}
	return all, nil
}

func (e *Engine) sliceLayer(layer int, m *nn.MLA) (all []*slicedWeights, err error) {
	w := nn.LatentWeights{Heads: m.Heads}
	for _, x := range []struct {
		n  *G.Node
		to **tensor.Dense
	}{{m.Down, &w.Down}, {m.DownBias, &w.DownBias}, {m.Norm, &w.Norm}, {m.Key, &w.Key}, {m.Value, &w.Value}} {
		if x.n == nil {
			continue
		}
		if *x.to, err = e.hostWeight(x.n); err != nil {
			return nil, err
		}
	}
	whole, shards, err := e.options.TPLA(layer).Slice(&w)
	if err != nil {
		return nil, fmt.Errorf("decoder: layer %d: %w", layer, err)
	}
	if e.options.several() {
		rank := e.options.world().Rank
		shards = shards[rank : rank+1]
	}
	for _, w := range append([]*nn.LatentWeights{whole}, shards...) {
		if w == whole && e.options.Device != nil {
			all = append(all, nil)
			continue
		}
		to := new(slicedWeights)
		for _, x := range []struct {
			t  *tensor.Dense
			to *G.Value
		}{{w.Down, &to.down}, {w.DownBias, &to.bias}, {w.Norm, &to.norm}, {w.Key, &to.key}, {w.Value, &to.value}} {
			switch {
			case x.t == nil:
			case e.options.Device == nil:
				*x.to = x.t
			default:
				d, err := e.options.Device.Upload(x.t)
				if err != nil {
					return nil, fmt.Errorf("decoder: Options.TPLA: layer %d: %w", layer, err)
				}
				*x.to = d
				free := e.free
				e.free = func() error {
					err := d.Free()
					if errors.Is(err, la.ErrClosed) {
						err = nil
					}
					return errors.Join(err, free())
				}
			}
		}
		all = append(all, to)
	}
	return all, nil
}

// hostWeight returns the whole weight of an input in host memory.
func (e *Engine) hostWeight(n *G.Node) (*tensor.Dense, error) {
	if t, ok := n.Value().(*tensor.Dense); ok {
		return t, nil
	}
	if e.options.Device != nil {
		for w := range e.network.Weights() {
			if w.Name == n.Name() {
				return (&placement{as: e.options.Weights}).load(e.from, &w)
			}
		}
	}
	return nil, fmt.Errorf("decoder: Options.TPLA: %s is a %T, want float32, leanattention.Float16 or BFloat16: %w", n.Name(), n.Value(), ErrUnsupported)
}

// absorbed returns the sum of the shards' attention, which attend makes as one node: the shards are KV heads.
func absorbed(shards []*nn.MLA, x *G.Node, attend func(q, k *G.Node) (*G.Node, error), opts []nn.Option) (*G.Node, error) {
	var qs, ks []*G.Node
	var out *G.Node
	// All queries are there in the innermost call.
	var from func(j int) (*G.Node, error)
	from = func(j int) (sum *G.Node, err error) {
		var rest *G.Node
		y, err := shards[j].Absorbed(x, func(q, k *G.Node) (*G.Node, error) {
			qs, ks = append(qs, q), append(ks, k)
			if j+1 < len(shards) {
				rest, err = from(j + 1)
			} else if q, err = nn.Concat(1, qs...); err == nil {
				if k, err = nn.Concat(1, ks...); err == nil {
					out, err = attend(q, k)
				}
			}
			if err != nil {
				return nil, err
			}
			n := out.Shape()[1] / len(shards)
			return nn.Slice(out, 1, j*n, (j+1)*n)
		}, opts...)
		if err != nil || rest == nil {
			return y, err
		}
		return nn.Add(y, rest)
	}
	return from(0)
}

// parted returns latent vectors as the shards store them: a part of each, with the elements behind it.
func parted(latents *G.Node, shards, latent int) (*G.Node, error) {
	var parts []*G.Node
	of := func(from, to int) error {
		part, err := nn.Slice(latents, 1, from, to)
		parts = append(parts, part)
		return err
	}
	n, all := latent/shards, latents.Shape()[1]
	for j := range shards {
		if err := of(j*n, (j+1)*n); err != nil {
			return nil, err
		}
		if latent < all {
			if err := of(latent, all); err != nil {
				return nil, err
			}
		}
	}
	return nn.Concat(1, parts...)
}

// sliced is [Builder.MLA] by shards.
func (b *Builder) sliced(layer int, m *nn.MLA, x *G.Node, options []la.Option, opts []nn.Option) (*G.Node, error) {
	all, err := b.slice(b.graph, layer, m)
	if err != nil {
		return nil, err
	}
	whole, shards := all[0], all[1:]
	if b.prompts {
		return whole.Expanded(x, func(q, k, v, latents *G.Node) (*G.Node, error) {
			latents, err := parted(latents, len(shards), whole.Norm.Shape()[0])
			if err != nil {
				return nil, err
			}
			return la.PromptAttention(q, k, v, latents, m.Heads, b.step.Layer(layer), options...)
		}, opts...)
	}
	y, err := absorbed(shards, x, func(q, k *G.Node) (*G.Node, error) {
		return la.CachedAttention(q, k, nil, b.step.Layer(layer), options...)
	}, opts)
	if err != nil || b.ranks == nil {
		return y, err
	}
	if y, err = nn.AllReduce(y, b.ranks); err != nil {
		return nil, err
	}
	// From here on, each rank computes with its own heads.
	from, to := b.ranks.World().Part(m.Heads)
	each := y.Shape()[1] / m.Heads
	return nn.Slice(y, 1, from*each, to*each)
}
