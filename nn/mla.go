package nn

import (
	"slices"

	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"

	"gorgonia.org/leanattention/internal/dense"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// MLA is multi-head latent attention without the output projection, as in DeepSeek-V2 (arXiv:2405.04434, section 2.1), DeepSeek-V3,
// Kimi and MiniCPM3. For the rows of x, and head h
//
//	q[h]   = head h of norm(x QueryDown^T + QueryBias) Query^T, a part of nope elements and one of rope elements
//	c, r   = the first latent elements of x Down^T + DownBias, normalised, and the rope elements behind them
//	k[h]   = [c Key[h], r]
//	v[h]   = c Value[h]^T
//	y[h]   = attention of q[h] to k[h] and v[h]
//
// Norms are [RMSNorm]. The cache stores c and r alone: latent + rope elements for all heads. The sizes follow from the weights:
//
//   - Query (heads*(nope+rope), rank) and QueryDown (rank, width); without QueryDown, Query is (heads*(nope+rope), width)
//   - Down (latent+rope, width). rope may be 0.
//   - Key (heads*latent, nope) and Value (heads*value, latent): [SplitKVUp] makes both from a checkpoint's kv_b_proj
//
// The function that attends also rotates the last rope elements of the heads of queries and keys, or none of them in models without
// rotation, and scales scores: by 1/sqrt(nope+rope) and [rope.YaRN.ScoreScale]. Weights that checkpoints have for interleaved pairs need
// [rope.Config].Interleaved.
//
// MLA has two forms with the same results but for rounding. [MLA.Absorbed] reads latent vectors alone, so it is the form of decoding, and of
// prompts behind cached tokens. [MLA.Expanded] makes the keys and values of all heads, which for DeepSeek's sizes takes 3.4 times fewer
// operations for each pair of a query and a key: it is the form of prompts without cached tokens, and of training.
type MLA struct {
	Heads int
	Eps   float64 // of both norms

	QueryDown *G.Node // q_a_proj; nil: none
	QueryNorm *G.Node // q_a_layernorm: rank elements; nil without QueryDown
	Query     *G.Node // q_b_proj, or q_proj
	QueryBias *G.Node // of QueryDown, or of Query if there is no QueryDown; nil: none

	Down     *G.Node // kv_a_proj_with_mqa
	DownBias *G.Node // nil: none
	Norm     *G.Node // kv_a_layernorm: latent elements

	Key, Value *G.Node
}

// mlaSizes are the sizes of an MLA.
type mlaSizes struct{ nope, rope, latent, value int }

// sizes checks the weights against each other.
func (m *MLA) sizes() (s mlaSizes, err error) {
	const name = "MLA"
	if m == nil {
		return s, errorf(name, errs.ErrGraph, "the MLA is nil")
	}
	if m.Heads < 1 {
		return s, errorf(name, errs.ErrShape, "Heads is %d, want at least 1", m.Heads)
	}
	if (m.QueryDown == nil) != (m.QueryNorm == nil) {
		return s, errorf(name, errs.ErrGraph, "one of QueryDown and QueryNorm is nil, want both or none")
	}
	for _, w := range []struct {
		name string
		n    *G.Node
		rank int
		may  bool // be nil
	}{
		{"QueryDown", m.QueryDown, 2, true}, {"QueryNorm", m.QueryNorm, 1, true}, {"QueryBias", m.QueryBias, 1, true}, {"DownBias", m.DownBias, 1, true},
		{"Query", m.Query, 2, false}, {"Down", m.Down, 2, false}, {"Norm", m.Norm, 1, false}, {"Key", m.Key, 2, false}, {"Value", m.Value, 2, false},
	} {
		switch {
		case w.n == nil && !w.may:
			return s, errorf(name, errs.ErrGraph, "%s is nil", w.name)
		case w.n != nil && len(w.n.Shape()) != w.rank:
			return s, errorf(name, errs.ErrShape, "%s has shape %v, want rank %d", w.name, w.n.Shape(), w.rank)
		}
	}
	q, down, key, value := m.Query.Shape(), m.Down.Shape(), m.Key.Shape(), m.Value.Shape()
	s = mlaSizes{nope: key[1], latent: m.Norm.Shape()[0], value: value[0] / m.Heads}
	s.rope = down[0] - s.latent
	switch {
	case s.rope < 0:
		return s, errorf(name, errs.ErrShape, "Down has shape %v, want at least the %d rows that Norm of shape %v has", down, s.latent, m.Norm.Shape())
	case key[0] != m.Heads*s.latent:
		return s, errorf(name, errs.ErrShape, "Key has shape %v, want (%d*%d, nope) for %d heads and Norm of shape %v", key, m.Heads, s.latent, m.Heads, m.Norm.Shape())
	case value[1] != s.latent || value[0] != m.Heads*s.value || s.value < 1:
		return s, errorf(name, errs.ErrShape, "Value has shape %v, want (%d*value, %d) for %d heads and Norm of shape %v", value, m.Heads, s.latent, m.Heads, m.Norm.Shape())
	case q[0] != m.Heads*(s.nope+s.rope):
		return s, errorf(name, errs.ErrShape, "Query has shape %v, want %d*(%d+%d) rows for %d heads, Key of shape %v and Down of shape %v", q, m.Heads, s.nope, s.rope, m.Heads, key, down)
	}
	return s, nil
}

// Absorbed returns the attention of the rows of x, a node of shape (rows, heads*value), with the up-projections of keys and values applied
// to queries and results:
//
//	q[h] k[h] = [Key[h] nope part of q[h], rope part of q[h]] [c, r],   y[h] = Value[h] (sum of weights c)
//
// attend is called with
//
//	q (rows, heads*(latent+rope)), k (rows, latent+rope), not rotated
//
// and returns the attention of all heads to one KV head whose values are the first latent elements of the keys, of shape
// (rows, heads*latent):
//
//	y, err := m.Absorbed(x, func(q, k *gorgonia.Node) (*gorgonia.Node, error) {
//		return leanattention.CachedAttention(q, k, nil, step.Layer(i), leanattention.WithCausal(),
//			leanattention.WithScale(scale), leanattention.WithRotary(rope.Config{HeadDim: latent + rope, Dim: rope, Last: true}))
//	})
//
// The contract:
//
//   - Options: a norm of x, [WithRMSNorm] or [WithNorm], and [WithMixedPrecision] and [WithBatchInvariance] of all linear layers.
//   - Types and gradients: those of [Linear] and [HeadLinear].
//   - Errors: ErrShape, ErrDType, ErrGraph (nil nodes, other graphs), ErrOption, ErrUnsupported; errors of attend.
func (m *MLA) Absorbed(x *G.Node, attend func(q, k *G.Node) (*G.Node, error), opts ...Option) (y *G.Node, err error) {
	const name = "MLA.Absorbed"
	defer errs.RecoverTo(prefix+name, &err)
	s, q, c, r, own, err := m.project(name, x, opts)
	if err != nil {
		return nil, err
	}
	k, err := behind(c, r)
	if err != nil {
		return nil, err
	}
	if q, err = newHeadLinear(headLinear{name: name, heads: m.Heads, rest: s.rope > 0}, q, m.Key, own); err != nil {
		return nil, err
	}
	if y, err = attend(q, k); err != nil {
		return nil, err
	}
	return newHeadLinear(headLinear{name: name, heads: m.Heads}, y, m.Value, own)
}

// Expanded returns what [MLA.Absorbed] does, with the keys and values of each head. attend is called with
//
//	q, k    (rows, heads*(nope+rope)), not rotated
//	v       (rows, heads*value)
//	latents (rows, latent+rope), not rotated: the k of Absorbed, which is to be cached
//
// and returns the attention of each head to its own keys and values, of shape (rows, heads*value). All else is as Absorbed. On a GPU: ErrUnsupported when run.
func (m *MLA) Expanded(x *G.Node, attend func(q, k, v, latents *G.Node) (*G.Node, error), opts ...Option) (y *G.Node, err error) {
	const name = "MLA.Expanded"
	defer errs.RecoverTo(prefix+name, &err)
	s, q, c, r, own, err := m.project(name, x, opts)
	if err != nil {
		return nil, err
	}
	latents, err := behind(c, r)
	if err != nil {
		return nil, err
	}
	k, err := newHeadLinear(headLinear{name: name, heads: m.Heads, rest: s.rope > 0, keys: true}, latents, m.Key, own)
	if err != nil {
		return nil, err
	}
	v, err := Linear(c, m.Value, nil, own...)
	if err != nil {
		return nil, err
	}
	return attend(q, k, v, latents)
}

// behind returns c with r behind it. r may be nil.
func behind(c, r *G.Node) (*G.Node, error) {
	if r == nil {
		return c, nil
	}
	return Concat(1, c, r)
}

// project returns the queries of all heads, the latent vectors, the elements behind them (nil: none), and the options of all linear layers.
func (m *MLA) project(name string, x *G.Node, opts []Option) (s mlaSizes, q, c, r *G.Node, own []Option, err error) {
	if s, err = m.sizes(); err != nil {
		return s, nil, nil, nil, nil, err
	}
	if x == nil {
		return s, nil, nil, nil, nil, errorf(name, errs.ErrGraph, "x is nil")
	}
	for _, o := range opts {
		switch o.name {
		case "", optionNorm, optionRMSNorm:
		case optionMixed, optionInvariant:
			own = append(own, o)
		default:
			return s, nil, nil, nil, nil, errorf(name, errs.ErrUnsupported, "option %s, want a norm, %s, %s or none", o.name, optionMixed, optionInvariant)
		}
	}
	first := m.QueryDown
	if first == nil {
		first = m.Query
	}
	if q, c, err = both(x, first, m.Down, m.QueryBias, m.DownBias, opts); err != nil {
		return s, nil, nil, nil, nil, err
	}
	if m.QueryDown != nil {
		if q, err = Linear(q, m.Query, nil, append(slices.Clone(own), WithRMSNorm(m.QueryNorm, m.Eps))...); err != nil {
			return s, nil, nil, nil, nil, err
		}
	}
	if s.rope > 0 {
		if r, err = Slice(c, 1, s.latent, s.latent+s.rope); err == nil {
			c, err = Slice(c, 1, 0, s.latent)
		}
		if err != nil {
			return s, nil, nil, nil, nil, err
		}
	}
	c, err = RMSNorm(c, m.Norm, nil, m.Eps)
	return s, q, c, r, own, err
}

// both returns two layers of one x, in one node if they are alike. Several GPUs may have all of one and parts of the other.
func both(x, v, w, a, b *G.Node, opts []Option) (y, z *G.Node, err error) {
	if (a == nil) == (b == nil) && v.Dtype() == w.Dtype() && ongpu.Alike(v.Value(), w.Value()) {
		var bs []*G.Node
		if a != nil {
			bs = []*G.Node{a, b}
		}
		ys, err := Linears(x, []*G.Node{v, w}, bs, opts...)
		if err != nil {
			return nil, nil, err
		}
		return ys[0], ys[1], nil
	}
	if y, err = Linear(x, v, a, opts...); err == nil {
		z, err = Linear(x, w, b, opts...)
	}
	return y, z, err
}

// SplitKVUp returns Key and Value of an [MLA] from the matrix that checkpoints have, kv_b_proj of shape (heads*(nope+value), latent). Of the
// rows of a head the first nope ones make keys.
//
// w is float32, float64, leanattention.Float16 or leanattention.BFloat16. key and value have its type, and memory of their own.
//
// Errors: ErrShape, ErrDType, ErrUnsupported (w is not in host memory).
func SplitKVUp(w *tensor.Dense, heads, nope int) (key, value *tensor.Dense, err error) {
	const name = "SplitKVUp"
	defer errs.RecoverTo(prefix+name, &err)
	if w == nil || !w.IsNativelyAccessible() {
		return nil, nil, errorf(name, errs.ErrUnsupported, "w is no tensor in host memory")
	}
	s := w.Shape()
	if len(s) != 2 || heads < 1 || nope < 1 || s[0]%heads != 0 || s[0]/heads <= nope || s[1] < 1 {
		return nil, nil, errorf(name, errs.ErrShape, "w has shape %v, want (heads*(nope+value), latent) for %d heads and nope of %d", s, heads, nope)
	}
	switch w.Dtype() {
	case tensor.Float32:
		key, value = splitUp[float32](w, heads, nope)
	case tensor.Float64:
		key, value = splitUp[float64](w, heads, nope)
	case operand.Float16:
		key, value = splitUp[half.Float16](w, heads, nope)
	case operand.BFloat16:
		key, value = splitUp[half.BFloat16](w, heads, nope)
	default:
		return nil, nil, errorf(name, errs.ErrDType, "w is of %v, want float32, float64, Float16 or BFloat16", w.Dtype())
	}
	return key, value, nil
}

func splitUp[T any](w *tensor.Dense, heads, nope int) (key, value *tensor.Dense) {
	rows, latent := w.Shape()[0]/heads, w.Shape()[1]
	x := dense.Elements[T](w)
	nk, nv := nope*latent, (rows-nope)*latent
	keys, values := dense.Make[T](heads*nk), dense.Make[T](heads*nv)
	eachRow(heads, nk+nv, func(h int) {
		of := x[h*(nk+nv):][:nk+nv]
		transpose(keys[h*nk:][:nk], of[:nk], 0, nope, nope, latent, latent)
		copy(values[h*nv:], of[nk:])
	})
	return tensor.New(tensor.WithShape(heads*latent, nope), tensor.WithBacking(keys)),
		tensor.New(tensor.WithShape(heads*(rows-nope), latent), tensor.WithBacking(values))
}
