package ongpu

import (
	"fmt"
	"unsafe"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/graph"
	"gorgonia.org/leanattention/internal/stock"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// hostValue is a node's value in host memory that only its readers share.
type hostValue struct {
	tensor *tensor.Dense // nil: no value, or a value that stays
	left   int           // readers that have not run yet
}

// Done is deferred where a node has its result and its error: the node has made a value from its inputs. An input in
// host memory whose readers have all run frees its memory for later values. A value of the node itself, with
// [Node.Reads] set, waits for its readers.
//
// A graph that runs twice at the same time shares its nodes. A reader then identifies a value by its address. The
// garbage collector frees values that another run has dropped, and values of failed runs.
func (n *Node) Done(in []G.Value, value *G.Value, err *error) {
	if *err != nil || n == nil || n.Reads == 0 && n.From == nil { // an op outside a graph has no node
		return
	}
	y, ok := (*value).(*tensor.Dense)
	if !ok { // on a GPU
		return
	}
	own := n.Reads > 0
	for i, from := range n.From {
		x, ok := in[i].(*tensor.Dense)
		switch {
		case !ok:
		case meet(x, y): // the value is a part of the input
			own = false
		case from != nil:
			from.read(x)
		}
	}
	if own {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.host = hostValue{y, n.Reads}
	}
}

// Copied takes the place of [Node.Done] for a [PartOp] whose value in host memory is a copy of the first input. Readers of the value count as
// readers of the input.
func (n *Node) Copied(in []G.Value, value *G.Value, err *error) {
	if *err == nil && len(n.From) > 0 && n.From[0] != nil {
		if x, ok := in[0].(*tensor.Dense); ok {
			for range n.Reads - 1 {
				n.From[0].read(x)
			}
		}
	}
	n.Done(in, value, err)
}

// read counts a reader of the value. x is the value or a part of it.
func (n *Node) read(x *tensor.Dense) {
	n.mu.Lock()
	defer n.mu.Unlock()
	v := &n.host
	if v.tensor == nil || !meet(x, v.tensor) {
		return
	}
	if v.left--; v.left == 0 {
		dense.Recycle(v.tensor)
		v.tensor = nil
	}
}

// SharedBy returns the node whose value n's value is, or contains, if that value is overwritten after its readers
// have run: only nodes that existed when the graph began to share memory may read the value. SharedBy returns nil if
// the value stays.
func SharedBy(n *G.Node) *Node {
	switch o := n.Op().(type) {
	case Op:
		if o.OnGPU().Reads > 0 {
			return o.OnGPU()
		}
	case PartOp:
		return SharedBy(stock.ChildrenOf(n)[0])
	}
	return nil
}

// Stay refuses nodes for which [SharedBy] is not nil: later nodes can't read their values.
func Stay(nodes ...*G.Node) error {
	for _, n := range nodes {
		if SharedBy(n) != nil {
			return fmt.Errorf("ShareMemory was called: the value of %v is overwritten once the nodes have run that read it then", n)
		}
	}
	return nil
}

// Apply is [graph.Apply] to nodes whose values stay. name is the op's name in errors.
func Apply(name string, op G.Op, children ...*G.Node) (*G.Node, error) {
	err := Stay(children...)
	if err == nil {
		var n *G.Node
		if n, err = graph.Apply(op, children...); err == nil {
			return n, nil
		}
	}
	return nil, errs.Errorf(name, errs.ErrGraph, "%v", err)
}

// meet reports whether two tensors share memory.
func meet(a, b *tensor.Dense) bool {
	x, y := dense.Backing[byte](a), dense.Backing[byte](b)
	from, of := uintptr(unsafe.Pointer(unsafe.SliceData(x))), uintptr(unsafe.Pointer(unsafe.SliceData(y)))
	return from < of+uintptr(len(y)) && of < from+uintptr(len(x))
}
