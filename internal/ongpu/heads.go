package ongpu

import (
	G "gorgonia.org/gorgonia"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/queue"
	"gorgonia.org/tensor"
)

// QKV is the query, the key and the value of a node.
type QKV [3]*Tensor

// QKVOf returns the query, the key and the value of a run: its first inputs.
func QKVOf(in []G.Value) (t QKV) {
	for i := range t {
		t[i] = Must(in[i])
	}
	return t
}

// Operands is Use for keys and values that may be sharded: sharded ones are left out.
func (t *QKV) Operands(sub *queue.Submission) (o AttentionOperands, err error) {
	if t[1].Shards != nil && t[2].Shards != nil {
		o.Q, err = t[0].UseAs(sub, "q")
	} else {
		o.Q, o.Pages[0].Data, o.Pages[1].Data, err = t.Use(sub)
	}
	return o, err
}

// Use returns the memory of each tensor, see [Tensor.Use].
func (t *QKV) Use(sub *queue.Submission) (q, k, v Mem, err error) {
	for i, to := range [...]*Mem{&q, &k, &v} {
		if *to, err = t[i].UseAs(sub, "qkv"[i:i+1]); err != nil {
			break
		}
	}
	return q, k, v, err
}

// ResultIn returns the given value, or a new value of the node, and its memory. The tensors of t stay unchanged.
func (t *QKV) ResultIn(sub *queue.Submission, to *Tensor, n *Node, dtype tensor.Dtype, shape tensor.Shape) (*Tensor, Mem, error) {
	if to != nil {
		m, err := to.UseAs(sub, "out")
		return to, m, err
	}
	return InUse(sub)(t[0].GPU.NodeValue(sub, n, dtype, shape, t[:]...))
}

// LogSumExp returns a new log-sum-exp of the node.
func (t *QKV) LogSumExp(sub *queue.Submission, n *Node, dtype tensor.Dtype, shape tensor.Shape) (*Tensor, Mem, error) {
	gpu := t[0].GPU
	return InUse(sub)(gpu.NextValue(sub, &n.On(gpu.Group, 0).Rest, dtype, shape, t[:]...))
}

// Beside returns a new value of the node in a slot of its memory, beside the value.
func (t *QKV) Beside(sub *queue.Submission, slot *queue.Slot, dtype tensor.Dtype, shape tensor.Shape) (*Tensor, Mem, error) {
	return InUse(sub)(t[0].GPU.NextValue(sub, slot, dtype, shape, t[:]...))
}

// InUse returns a function that adds the memory of a value to the value.
func InUse(sub *queue.Submission) func(*Tensor, error) (*Tensor, Mem, error) {
	return func(d *Tensor, err error) (*Tensor, Mem, error) {
		if err != nil {
			return nil, Mem{}, err
		}
		m, err := d.Use(sub)
		return d, m, err
	}
}

// Operands returns the parts of queries, outputs, log-sum-exps and sinks that belong to the heads of r.
func (r Heads) Operands(all *attn.Problem, o *AttentionOperands) AttentionOperands {
	first, _ := r.Queries(all)
	mine := AttentionOperands{Q: From(o.Q, first*all.Query.Head), Out: From(o.Out, first*all.Out.Head), Bias: o.Bias}
	if o.LSE.Buffer != nil {
		mine.LSE = From(o.LSE, first*all.LSE.Head)
	}
	if o.Sinks.Buffer != nil {
		mine.Sinks = From(o.Sinks, first)
	}
	return mine
}

// Heads is N KV heads from First on. If Copies is more than 1, Copies members have the keys and values of one KV head, and a member has share
// number Copy of the query heads.
type Heads struct{ First, N, Copy, Copies int }

// Queries returns the query heads of r: n heads from first on.
func (r Heads) Queries(g *attn.Problem) (first, n int) {
	each := g.Heads / g.KVHeads
	if r.Copies < 2 {
		return r.First * each, r.N * each
	}
	first, n = Share(each, r.Copies, r.Copy)
	return r.First*each + first, n
}

// HeadsOf returns the heads of member i.
func HeadsOf(heads, members, i int) (r Heads) {
	r.First, r.N = Share(heads, members, i)
	return r
}

// Part returns the problem of the heads of r alone. Its queries and outputs are parts of the longer rows.
func (r Heads) Part(g attn.Problem) attn.Problem {
	first, n := r.Queries(&g)
	g.Pages = g.Pages.OfHeads(r.N, g.KVHeads)
	g.Heads, g.KVHeads = n, r.N
	if g.Slopes != "" {
		g.Slopes = g.Slopes.Part(first, n)
	}
	return g
}

// UseTensors sets the tensors of a variant in o.
func UseTensors(sub *queue.Submission, tensors []*Tensor, o *AttentionOperands) (err error) {
	for i, t := range tensors {
		if o.Tensors[i].Memory, err = t.UseAs(sub, "a tensor of the variant"); err != nil {
			return err
		}
		o.Tensors[i].Shape = t.Shape
	}
	return nil
}

// From returns m from an element on.
func From(m Mem, element int) Mem {
	m.Offset += int64(element) * int64(m.DType.Size())
	m.Len -= element
	return m
}
