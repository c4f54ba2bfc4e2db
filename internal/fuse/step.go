package fuse

import (
	"fmt"
	"hash"
	"slices"
	"sync/atomic"

	"gorgonia.org/leanattention/internal/graph"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// step is a Reshape, a Transpose or a Slice of the last axis.
type step struct {
	shape   tensor.Shape // of the result of a Reshape or a Slice
	pattern []int        // of a Transpose
	slice   tensor.Slice
}

// idle reports whether the step leaves n as it is.
func (s step) idle(n *G.Node) bool { return s.pattern == nil && slices.Equal(n.Shape(), s.shape) }

// apply makes the step's node of n, if one is needed.
func (s step) apply(n *G.Node) (*G.Node, error) {
	if s.idle(n) {
		return n, nil
	}
	op, err := s.op(n)
	if err != nil {
		return nil, err
	}
	return applyStep(newStepOp(op), n)
}

// applyCopied makes a Reshape of n in memory of its own.
func (s step) applyCopied(n *G.Node) (*G.Node, error) {
	op, err := s.op(n)
	if err != nil {
		return nil, err
	}
	return applyStep(&copyOp{newStepOp(op)}, n)
}

// op returns the op that makes the step from a node like n.
func (s step) op(n *G.Node) (G.Op, error) {
	like := G.NewTensor(G.NewGraph(), n.Dtype(), n.Dims(), G.WithShape(n.Shape()...))
	apply := func() (*G.Node, error) { return G.Reshape(like, slices.Clone(s.shape)) }
	if s.pattern != nil {
		apply = func() (*G.Node, error) { return G.Transpose(like, slices.Clone(s.pattern)...) }
	}
	if s.slice != nil {
		apply = func() (*G.Node, error) {
			return G.Slice(like, append(make([]tensor.Slice, n.Dims()-1), s.slice)...)
		}
	}
	out, err := apply()
	if err != nil {
		return nil, errorf("%v", err)
	}
	return out.Op(), nil
}

func applyStep(op G.Op, in ...*G.Node) (*G.Node, error) {
	n, err := graph.Apply(op, in...)
	if err != nil {
		return nil, errorf("%v", err)
	}
	return n, nil
}

// stepOp is an op of Gorgonia that belongs to no other node: merged with a node of the old graph, it would move that
// node in the order. Machines don't see that stepOp may overwrite its inputs as Gorgonia's op does, so stepOp makes a
// new value, or a Reshape of one.
type stepOp struct {
	stockStep
	id uint64
}

type stockStep interface {
	G.SDOp
	G.ADOp
}

var steps atomic.Uint64

func newStepOp(op G.Op) *stepOp { return &stepOp{op.(stockStep), steps.Add(1)} }

func (op *stepOp) WriteHash(h hash.Hash) {
	op.stockStep.WriteHash(h)
	fmt.Fprintf(h, "leanattention.Fuse %d", op.id)
}
func (op *stepOp) Hashcode() uint32 { return graph.Hashcode(op) }

// copyOp is a step whose result, and whose gradient, is in memory of its own.
type copyOp struct{ *stepOp }

func (op *copyOp) Do(in ...G.Value) (G.Value, error) {
	out, err := op.stockStep.Do(in...)
	if err != nil {
		return nil, err
	}
	return G.CloneValue(out)
}

func (op *copyOp) SymDiff(in G.Nodes, out, grad *G.Node) (G.Nodes, error) {
	n, err := step{shape: in[0].Shape()}.applyCopied(grad)
	if err != nil {
		return nil, err
	}
	return G.Nodes{n}, nil
}
