package model

import (
	"errors"
	"fmt"
	"hash"
	"hash/fnv"
	"time"

	"github.com/chewxy/hm"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// clock measures the time between nodes of a graph, which runs one node after the other. A node that starts the clock
// passes a value on after all earlier nodes have been computed, and a node that stops the clock passes the result on.
type clock struct {
	began time.Time
	total time.Duration
}

// start passes q, k and v on after all three are computed. Their users come after the start of the clock.
func (c *clock) start(b *builder, layer int, q, k, v *G.Node) (q2, k2, v2 *G.Node) {
	k2 = b.pass(fmt.Sprintf("clock %d start", layer), func() { c.began = time.Now() }, k, q, v)
	q2 = b.pass(fmt.Sprintf("clock %d q", layer), nil, q, k2)
	v2 = b.pass(fmt.Sprintf("clock %d v", layer), nil, v, k2)
	return q2, k2, v2
}

// stop passes x on.
func (c *clock) stop(b *builder, layer int, x *G.Node) *G.Node {
	return b.pass(fmt.Sprintf("clock %d stop", layer), func() { c.total += time.Since(c.began) }, x)
}

func (b *builder) pass(name string, then func(), x *G.Node, after ...*G.Node) *G.Node {
	return b.do(func() (*G.Node, error) {
		op := &passOp{name: name, then: then, children: 1 + len(after)}
		return G.ApplyOp(op, append(G.Nodes{x}, after...)...)
	})
}

// passOp's value is the value of its first child. No other node may write or later read that value, because Gorgonia
// does not know that the nodes share memory. name is unique in the graph.
type passOp struct {
	name     string
	then     func() // called when the node runs; nil: nothing
	children int
}

func (op *passOp) Arity() int { return op.children }

// Type takes matrices only, all of one element type.
func (op *passOp) Type() hm.Type {
	var ts []hm.Type
	for range op.children + 1 {
		ts = append(ts, G.TensorType{Dims: 2, Of: hm.TypeVariable('a')})
	}
	return hm.NewFnType(ts...)
}

func (op *passOp) InferShape(in ...G.DimSizer) (tensor.Shape, error) {
	shapes, err := G.DimSizersToShapes(in)
	if err != nil {
		return nil, err
	}
	return shapes[0].Clone(), nil
}

func (op *passOp) Do(in ...G.Value) (G.Value, error) {
	if len(in) != op.children {
		return nil, errors.New("model: " + op.name + ": wrong number of inputs")
	}
	if op.then != nil {
		op.then()
	}
	return in[0], nil
}

func (op *passOp) ReturnsPtr() bool      { return false }
func (op *passOp) CallsExtern() bool     { return false }
func (op *passOp) OverwritesInput() int  { return -1 }
func (op *passOp) String() string        { return op.name }
func (op *passOp) WriteHash(h hash.Hash) { fmt.Fprint(h, op.name) }
func (op *passOp) Hashcode() uint32 {
	h := fnv.New32a()
	op.WriteHash(h)
	return h.Sum32()
}
