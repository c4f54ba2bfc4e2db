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

// hostValue is a node's value in host memory, of which nobody else has a part but those who read it.
type hostValue struct {
	tensor *tensor.Dense // nil: there is none, or it stays
	left   int           // readers that have not run yet
}

// Done is deferred where a node has its result and its error: it has made a value of what it has read. Where these lie in host
// memory, what has been read by all gives its memory to values to come. A value that is the node's own, as [Node.Reads]
// has it, waits for its readers.
//
// A graph that runs twice at a time shares its nodes: then a reader knows by the address whose value it has, and what
// has been forgotten for another one is left to the garbage collector, as is what a failed run leaves behind.
func (n *Node) Done(in []G.Value, value *G.Value, err *error) {
	if *err != nil || n == nil || n.Reads == 0 && n.From == nil { // an op by itself has no node
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
		case meet(x, y): // the value lies in the input
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

// read counts a reader of the value, of which x is all or a part.
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

// SharedBy is the node whose value n's is, or has it as a part, if that is overwritten once those have run that read it: only
// nodes that were there when their graph was to share memory may. nil: it stays.
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

// Stay refuses nodes whose values are [SharedBy] others: who comes later can't read them.
func Stay(nodes ...*G.Node) error {
	for _, n := range nodes {
		if SharedBy(n) != nil {
			return fmt.Errorf("ShareMemory was called: the value of %v is overwritten once the nodes have run that read it then", n)
		}
	}
	return nil
}

// Apply is [graph.Apply] to nodes whose values stay. name is the op's in errors.
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

// meet says whether two tensors have memory in common.
func meet(a, b *tensor.Dense) bool {
	x, y := dense.Backing[byte](a), dense.Backing[byte](b)
	from, of := uintptr(unsafe.Pointer(unsafe.SliceData(x))), uintptr(unsafe.Pointer(unsafe.SliceData(y)))
	return from < of+uintptr(len(y)) && of < from+uintptr(len(x))
}
