package leanattention

import (
	"fmt"
	"slices"

	"gorgonia.org/leanattention/internal/fuse"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/graph"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Default adds attention made of Gorgonia's own ops, BatchedMatMul, SoftMax and BatchedMatMul, with the arguments of [Attention]. It
// is the baseline of the measurements. k and v have q's element type.
//
//   - Options: [WithScale], [WithSoftCap], [WithALiBi], [WithBias], [WithWindow], [WithSinkTokens], and [WithCausal] for
//     Nq <= Nk, because SoftMax has no result for a row without keys.
//   - Default reads all Nk keys.
//   - Gorgonia's SoftMax subtracts the maximum of the tensor's first element and the row's other elements. SoftMax gives NaN for a
//     row far below that maximum. Attention has no such limit.
func Default(q, k, v *G.Node, opts ...Option) (out *G.Node, err error) {
	const op = "Default"
	defer errs.RecoverTo(op, &err)
	c, err := newConfig(op, ofScores|optBias, opts)
	if err != nil {
		return nil, err
	}
	in, err := nodeOperands(op, q, k, v)
	if err != nil {
		return nil, err
	}
	p, err := newProblem(op, in[0], in[1], in[2])
	if err != nil {
		return nil, err
	}
	if p.storage != p.query {
		return nil, errs.Errorf(op, ErrDType, "k is %v and q is %v", p.storage, p.query)
	}
	if err = c.checkHeads(op, p.heads); err != nil {
		return nil, err
	}
	if c.biasNode != nil {
		if _, err = p.biasNode(op, c.biasNode); err != nil {
			return nil, err
		}
		if err = sameGraph(op, "bias", c.biasNode, q); err != nil {
			return nil, err
		}
	}
	if c.mask.Causal && p.queries > p.keys {
		return nil, errs.Errorf(op, ErrUnsupported, "WithCausal with %d queries over %d keys: rows that see no key", p.queries, p.keys)
	}

	operands := []*G.Node{q, k, v}
	if c.biasNode != nil {
		operands = append(operands, c.biasNode)
	}
	if err = graph.Distinct(func(i int) string { return [...]string{"q", "k", "v", "bias"}[i] }, operands...); err != nil {
		return nil, errs.Errorf(op, ErrGraph, "%v", err)
	}

	// The rows of a KV head are the queries of all heads of its group. They are
	// adjacent in memory, so grouped queries cost a reshape, not a copy of K.
	outer, rows := p.batch*p.kvHeads, p.heads/p.kvHeads*p.queries
	chain := nodeChain{op: op}
	q3 := chain.reshape(q, outer, rows, p.dim)
	k3 := chain.reshape(k, outer, p.keys, p.dim)
	v3 := chain.reshape(v, outer, p.keys, p.valueDim)
	s := chain.do(func() (*G.Node, error) { return G.BatchedMatMul(q3, k3, false, true) })
	scaled := func(scale float64) {
		s = chain.do(func() (*G.Node, error) { return G.HadamardProd(s, scaleNode(q.Graph(), p.query, scale)) })
	}
	if c.score.Cap == 0 {
		scaled(c.scaleFor(p.dim))
	} else {
		scaled(c.scaleFor(p.dim) / c.score.Cap)
		s = chain.do(func() (*G.Node, error) { return G.Tanh(s) })
		scaled(c.score.Cap)
	}
	if c.score.Slopes != "" {
		b := slopesNode(q.Graph(), &p, c.score.Slopes)
		s = chain.do(func() (*G.Node, error) { return G.Add(s, b) })
	}
	if c.biasNode != nil {
		s = chain.addBias(s, c.biasNode, &p)
	}
	if c.mask.Causal && p.queries > 1 || c.mask.Window > 0 && c.mask.Window < p.keys {
		m := maskNode(q.Graph(), &p, &c, rows)
		s = chain.do(func() (*G.Node, error) { return G.BroadcastAdd(s, m, nil, []byte{0}) })
	}
	w := chain.do(func() (*G.Node, error) { return G.SoftMax(s, 2) })
	o := chain.do(func() (*G.Node, error) { return G.BatchedMatMul(w, v3) })
	out = chain.reshape(o, p.outShape()...)
	if chain.err != nil {
		return nil, chain.err
	}
	return out, nil
}

// nodeChain builds a chain of nodes, until the first error.
type nodeChain struct {
	op  string
	err error
}

func (c *nodeChain) do(build func() (*G.Node, error)) *G.Node {
	if c.err != nil {
		return nil
	}
	n, err := build()
	if err != nil {
		c.err = errs.Errorf(c.op, ErrGraph, "%v", err)
	}
	return n
}

func (c *nodeChain) reshape(n *G.Node, shape ...int) *G.Node {
	if c.err == nil && slices.Equal(n.Shape(), shape) {
		return n
	}
	return c.do(func() (*G.Node, error) { return G.Reshape(n, shape) })
}

// addBias adds a bias to scores of any layout.
func (c *nodeChain) addBias(s, bias *G.Node, p *problem) *G.Node {
	to := p.dims(p.keys)
	var along []byte // the axes on which the bias is shared
	for i, n := range bias.Shape() {
		if n != to[i] {
			along = append(along, byte(i))
		}
	}
	if c.err != nil {
		return nil
	}
	laid := s.Shape().Clone()
	s = c.reshape(s, to...)
	s = c.do(func() (*G.Node, error) {
		if along == nil {
			return G.Add(s, bias)
		}
		return G.BroadcastAdd(s, bias, nil, along)
	})
	return c.reshape(s, laid...)
}

// scaleNode returns an input for a scale, in place of a constant: Gorgonia takes constants with equal text for one, such as
// float32(1) and float64(1). The name makes the scales of many layers one node.
func scaleNode(g *G.ExprGraph, t tensor.Dtype, scale float64) *G.Node {
	var v any = scale
	if t == tensor.Float32 {
		v = float32(scale)
	}
	return G.NewScalar(g, t, G.WithName(fmt.Sprintf(fuse.ScaleName+"%v,%v)", v, t)), G.WithValue(v))
}

// maskedScore is added to the scores of hidden keys. Its exponential is 0 in both types, and SoftMax gives no NaN, as it does for -Inf.
const maskedScore = -1e9

// maskNode returns the additive mask (1, rows, keys) of a causal problem, or of one with a window. Rows are (heads of the group,
// queries). Fuse of package rewrite knows a causal mask by its name.
func maskNode(g *G.ExprGraph, p *problem, c *config, rows int) *G.Node {
	name := fmt.Sprintf("%s%d,%d,%d,%v)", fuse.MaskName, rows, p.queries, p.keys, p.query)
	if c.mask.Window > 0 {
		name = fmt.Sprintf("leanattention.window(%d,%d,%t,%d,%d,%d,%v)", c.mask.Window, c.mask.SinkTokens, c.mask.Causal, rows, p.queries, p.keys, p.query)
	}
	return biasNode(g, p, name, tensor.Shape{1, rows, p.keys}, func(row, j int) float64 {
		at := p.keys - p.queries + row%p.queries
		if c.mask.Causal && j > at || c.mask.Window > 0 && j <= at-c.mask.Window && j >= c.mask.SinkTokens {
			return maskedScore
		}
		return 0
	})
}

// slopesNode returns an input with the terms of [WithALiBi], for scores (batch*kvHeads, rows, keys).
func slopesNode(g *G.ExprGraph, p *problem, slopes attn.Slopes) *G.Node {
	rows := p.heads / p.kvHeads * p.queries
	name := fmt.Sprintf("leanattention.slopes(%d,%d,%d,%d,%v,%x)", p.batch, p.kvHeads, p.queries, p.keys, p.query, string(slopes))
	return biasNode(g, p, name, tensor.Shape{p.batch * p.kvHeads, rows, p.keys}, func(row, j int) float64 {
		head := row / p.queries % p.heads
		return slopes.Of(head) * float64(j-(p.keys-p.queries+row%p.queries))
	})
}

// biasNode returns an input with the term of each row and key.
func biasNode(g *G.ExprGraph, p *problem, name string, shape tensor.Shape, bias func(row, key int) float64) *G.Node {
	m := dense.New(p.query, shape...)
	if p.query == tensor.Float32 {
		fill(dense.Backing[float32](m), p.keys, bias)
	} else {
		fill(dense.Backing[float64](m), p.keys, bias)
	}
	return G.NewTensor(g, p.query, 3, G.WithShape(shape...), G.WithName(name), G.WithValue(m))
}

func fill[F float32 | float64](m []F, keys int, bias func(row, key int) float64) {
	for at := range m {
		m[at] = F(bias(at/keys, at%keys))
	}
}
