package leanattention

import (
	"gorgonia.org/leanattention/internal/kvstore"

	"gorgonia.org/leanattention/internal/operand"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// role is the role of a tensor in attention, or in its gradient.
type role int

const (
	roleQ role = iota
	roleK
	roleV
	roleLengths
	roleQueryLengths
	roleSeed
	roleBias
	roleSinks
	roleTensor // the first of a variant
	roleTensor1
	roleTensor2
	roleTensor3
	roleOut
	roleLSE
	roleEntropy
	roleMass
	roleGrad // the gradient of out or of lse, which comes in
	roles    // how many there are
)

var roleNames = [roles]string{"q", "k", "v", "lengths", "query lengths", "seed", "bias", "sinks", "tensor 0 of the variant", "tensor 1 of the variant", "tensor 2 of the variant", "tensor 3 of the variant", "out", "lse", "entropy", "mass", "the gradient"}

func (r role) String() string { return roleNames[r] }

// ofVariant reports whether r is a tensor of a variant.
func (r role) ofVariant() bool { return r >= roleTensor && r <= roleTensor3 }

// tensors are the tensors of a run by role; nil: none.
type tensors [roles]*tensor.Dense

// nodeOperands describes q, k and v, which are nodes of one graph.
func nodeOperands(op string, q, k, v *G.Node) (o [3]operand.Operand, err error) {
	for i, n := range [...]*G.Node{q, k, v} {
		name := [...]string{"q", "k", "v"}[i]
		if o[i], err = operand.OfNode(op, name, n); err != nil {
			return o, err
		}
		if err = sameGraph(op, name, n, q); err != nil {
			return o, err
		}
	}
	return o, nil
}

// sameGraph checks that node n is in the graph of q.
func sameGraph(op, name string, n, q *G.Node) error {
	if n.Graph() != q.Graph() {
		return errs.Errorf(op, ErrGraph, "%s is in another graph than q", name)
	}
	return nil
}

// problem is the geometry of attention on dense tensors:
//
//	q (batch, heads, queries, dim), k (batch, kvHeads, keys, dim),
//	v (batch, kvHeads, keys, valueDim) -> out (batch, heads, queries, valueDim)
//
// with rank 4, or without the batch axis with rank 3.
type problem struct {
	rank                                                int
	batch, heads, kvHeads, queries, keys, dim, valueDim int
	query, storage                                      tensor.Dtype
	shared                                              bool // keys and values are one sequence's, which all of the batch attend to
}

// newProblem checks q, k and v against each other.
func newProblem(op string, q, k, v operand.Operand) (problem, error) {
	return problemOf(op, q, k, v, operand.IsQueryType, "it must be float32 or float64")
}

// newNodeProblem is newProblem for nodes, whose values may be on a GPU.
func newNodeProblem(op string, q, k, v operand.Operand) (problem, error) {
	query := func(t tensor.Dtype) bool {
		return operand.IsQueryType(t) || operand.IsDeviceQueryType(t) && t == k.DType
	}
	return problemOf(op, q, k, v, query, "it must be float32 or float64, or on a GPU the type of k and v")
}

// newDeviceProblem is newProblem for tensors on a GPU.
func newDeviceProblem(op string, q, k, v operand.Operand) (problem, error) {
	return problemOf(op, q, k, v, operand.IsDeviceQueryType, "on a GPU it must be float32, Float16 or BFloat16")
}

func problemOf(op string, q, k, v operand.Operand, query func(tensor.Dtype) bool, mustBe string) (p problem, err error) {
	for _, o := range [...]operand.Operand{q, k, v} {
		if r := len(o.Shape); r != 3 && r != 4 {
			return p, errs.Errorf(op, ErrShape, "%s has rank %d, shape %v; it must be (heads, N, d) or (batch, heads, N, d)", o.Name, r, o.Shape)
		}
		if len(o.Shape) != len(q.Shape) {
			return p, errs.Errorf(op, ErrShape, "%s has rank %d and %s rank %d", o.Name, len(o.Shape), q.Name, len(q.Shape))
		}
		for axis, n := range o.Shape {
			if n < 1 {
				return p, errs.Errorf(op, ErrShape, "%s has size %d on axis %d, shape %v", o.Name, n, axis, o.Shape)
			}
		}
	}
	if !query(q.DType) {
		return p, errs.Errorf(op, ErrDType, "%s is %v; %s", q.Name, q.DType, mustBe)
	}
	if _, ok := operand.StorageType(k.DType); !ok {
		return p, errs.Errorf(op, ErrDType, "%s is %v; it must be float32, float64, Float16 or BFloat16", k.Name, k.DType)
	}
	if v.DType != k.DType {
		return p, errs.Errorf(op, ErrDType, "%s is %v and %s is %v", v.Name, v.DType, k.Name, k.DType)
	}

	p.rank, p.query, p.storage, p.batch = len(q.Shape), q.DType, k.DType, 1
	qs, ks, vs := q.Shape, k.Shape, v.Shape
	if p.rank == 4 {
		if ks[0] != qs[0] || vs[0] != qs[0] {
			return p, errs.Errorf(op, ErrShape, "batch is %d in %s, %d in %s, %d in %s", qs[0], q.Name, ks[0], k.Name, vs[0], v.Name)
		}
		p.batch = qs[0]
		qs, ks, vs = qs[1:], ks[1:], vs[1:]
	}
	p.heads, p.queries, p.dim = qs[0], qs[1], qs[2]
	p.kvHeads, p.keys, p.valueDim = ks[0], ks[1], vs[2]
	switch {
	case vs[0] != p.kvHeads:
		return p, errs.Errorf(op, ErrShape, "%s has %d heads and %s %d", k.Name, p.kvHeads, v.Name, vs[0])
	case p.heads%p.kvHeads != 0:
		return p, errs.Errorf(op, ErrShape, "%s has %d heads, not a multiple of the %d heads of %s", q.Name, p.heads, p.kvHeads, k.Name)
	case ks[2] != p.dim:
		return p, errs.Errorf(op, ErrShape, "%s has head dim %d and %s %d", q.Name, p.dim, k.Name, ks[2])
	case vs[1] != p.keys:
		return p, errs.Errorf(op, ErrShape, "%s has %d keys and %s %d", k.Name, p.keys, v.Name, vs[1])
	}
	return p, nil
}

// dims returns (batch, heads, queries, last), without batch for rank 3 and without last if it is 0.
func (p *problem) dims(last int) tensor.Shape {
	s := make(tensor.Shape, 0, 4)
	if p.rank == 4 {
		s = append(s, p.batch)
	}
	s = append(s, p.heads, p.queries)
	if last > 0 {
		s = append(s, last)
	}
	return s
}

func (p *problem) outShape() tensor.Shape { return p.dims(p.valueDim) }
func (p *problem) lseShape() tensor.Shape { return p.dims(0) }

// keyShape is the shape of k, or of v.
func (p *problem) keyShape(last int) tensor.Shape {
	s := tensor.Shape{p.kvHeads, p.keys, last}
	if p.rank == 4 {
		s = append(tensor.Shape{p.batch}, s...)
	}
	return s
}

// biasOf checks a bias for p, and returns its strides.
func (p *problem) biasOf(op string, o operand.Operand) (b attn.Bias, err error) {
	sizes := [...]int{p.batch, p.heads, p.queries, p.keys}
	all := sizes[4-p.rank:]
	if o.DType != p.query {
		return b, errs.Errorf(op, ErrDType, "bias is %v and q is %v", o.DType, p.query)
	}
	good := len(o.Shape) == len(all) && o.Shape[len(all)-1] == p.keys
	for i := 0; good && i < len(all); i++ {
		good = o.Shape[i] == all[i] || o.Shape[i] == 1
	}
	if !good {
		return b, errs.Errorf(op, ErrShape, "bias has shape %v; it must be %v, or 1 in place of any number but the last", o.Shape, p.dims(p.keys))
	}
	s := o.Shape
	b.Sequences = 1
	if p.rank == 4 {
		b.Sequences, s = s[0], s[1:]
	}
	b.Heads, b.Queries, b.Keys = s[0], s[1], s[2]
	return b, nil
}

// biasNode is biasOf for a node.
func (p *problem) biasNode(op string, n *G.Node) (b attn.Bias, err error) {
	o, err := operand.OfNode(op, "bias", n)
	if err != nil {
		return b, err
	}
	return p.biasOf(op, o)
}

// biasShape is the shape of a tensor of b.
func (p *problem) biasShape(b attn.Bias) tensor.Shape {
	s := tensor.Shape{b.Heads, b.Queries, b.Keys}
	if p.rank == 4 {
		s = append(tensor.Shape{b.Sequences}, s...)
	}
	return s
}

// checkSinks checks the sinks of heads query heads, for queries of type query.
func checkSinks(op string, o operand.Operand, heads int, query tensor.Dtype) error {
	if want := operand.LSEType(query); o.DType != want {
		return errs.Errorf(op, ErrDType, "sinks is %v; for a q of %v it must be %v", o.DType, query, want)
	}
	if len(o.Shape) != 1 || o.Shape[0] != heads {
		return errs.Errorf(op, ErrShape, "sinks has shape %v; it must be (%d), a number for each query head", o.Shape, heads)
	}
	return nil
}

// sinksNode is checkSinks for a node of the graph of q.
func sinksNode(op string, n, q *G.Node, heads int, query tensor.Dtype) error {
	o, err := operand.OfNode(op, "sinks", n)
	if err != nil {
		return err
	}
	if err = checkSinks(op, o, heads, query); err != nil {
		return err
	}
	return sameGraph(op, "sinks", n, q)
}

// checkLengths checks the node or tensor of lengths of a batch, of keys or of queries.
func checkLengths(op string, l operand.Operand, batch int) error {
	switch l.DType {
	case tensor.Int, tensor.Int32, tensor.Int64:
	default:
		return errs.Errorf(op, ErrDType, "%s is %v; it must be int, int32 or int64", l.Name, l.DType)
	}
	if len(l.Shape) != 1 || l.Shape[0] != batch {
		return errs.Errorf(op, ErrShape, "%s has shape %v; it must be (%d), one length for each sequence", l.Name, l.Shape, batch)
	}
	return nil
}

// checkSeed checks the node or the value of a seed.
func checkSeed(op string, s operand.Operand) error {
	switch s.DType {
	case tensor.Int, tensor.Int32, tensor.Int64:
	default:
		return errs.Errorf(op, ErrDType, "seed is %v; it must be int, int32 or int64", s.DType)
	}
	if len(s.Shape) != 0 {
		return errs.Errorf(op, ErrShape, "seed has shape %v; it must be a scalar", s.Shape)
	}
	return nil
}

// newTokenRows checks q, k and v against the step and its cache.
func newTokenRows(op string, q, k, v operand.Operand, tokens int, c *CacheConfig) (r kvstore.Rows, err error) {
	widths := [...]int{0, c.KVHeads * c.HeadDim, c.KVHeads * c.ValueDim}
	if c.ValuesInKeys {
		widths[2] = widths[1] // v is k
	}
	for i, o := range [...]operand.Operand{q, k, v} {
		if len(o.Shape) != 2 {
			return r, errs.Errorf(op, ErrShape, "%s has rank %d, shape %v; rows are tokens: it must be (tokens, heads*d)", o.Name, len(o.Shape), o.Shape)
		}
		if o.Shape[0] != tokens {
			return r, errs.Errorf(op, ErrShape, "%s has %d rows and the step %d tokens", o.Name, o.Shape[0], tokens)
		}
		if i > 0 && o.Shape[1] != widths[i] {
			return r, errs.Errorf(op, ErrShape, "%s has %d columns; the cache's %d KV heads need %d", o.Name, o.Shape[1], c.KVHeads, widths[i])
		}
		if c.Device == nil && !operand.IsQueryType(o.DType) {
			return r, errs.Errorf(op, ErrDType, "%s is %v; it must be float32 or float64", o.Name, o.DType)
		}
		if c.Device != nil && !operand.IsDeviceQueryType(o.DType) {
			return r, errs.Errorf(op, ErrDType, "%s is %v; on a GPU it must be float32, Float16 or BFloat16", o.Name, o.DType)
		}
		if o.DType != q.DType {
			return r, errs.Errorf(op, ErrDType, "%s is %v and %s is %v", o.Name, o.DType, q.Name, q.DType)
		}
	}
	width := q.Shape[1]
	if width < 1 || width%c.HeadDim != 0 {
		return r, errs.Errorf(op, ErrShape, "q has %d columns, not a multiple of the cache's head dim %d", width, c.HeadDim)
	}
	r = kvstore.Rows{Tokens: tokens, Heads: width / c.HeadDim, Query: q.DType}
	if r.Heads%c.KVHeads != 0 {
		return r, errs.Errorf(op, ErrShape, "q has %d heads, not a multiple of the cache's %d KV heads", r.Heads, c.KVHeads)
	}
	return r, nil
}
