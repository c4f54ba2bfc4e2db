package fuse

import (
	"fmt"
	"hash"
	"reflect"
	"sync"
	"weak"

	"gorgonia.org/leanattention/internal/graph"
	"gorgonia.org/leanattention/internal/stock"

	"github.com/chewxy/hm"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// link is the op of the first node of a new graph, whose input is a constant. So a machine runs the op before it
// loads any input of the graph. The op binds values that gorgonia.Let has bound to inputs of the old graph since the
// last run to the images of these inputs. (gorgonia.Let sets a field of the node, so two nodes can't share a
// binding.)
//
// A program of gorgonia.CompileFunction has only nodes that its outputs need, and so no link. There the attention
// nodes report a value that was not passed on: see [Match.Stale].
type link struct {
	graph.Plain
	of []*link // links of the old graph, if it is the result of an earlier Rewrite

	mu     sync.Mutex
	inputs []linkedInput
}

// linkedInput is an input of the old graph and its image. The op keeps neither alive.
type linkedInput struct {
	old, image           weak.Pointer[G.Node]
	oldValue, imageValue G.Value // at the last check
}

// newLink adds the node of a link to an empty graph.
func newLink(g *G.ExprGraph, old []*G.Node) *link {
	l := new(link)
	for _, n := range old {
		if of, ok := n.Op().(*link); ok {
			l.of = append(l.of, of)
		}
	}
	// Gorgonia's Backpropagate removes a node without an edge.
	const name = "link to the graph that Fuse was given"
	child := g.AddNode(G.NewConstant(0.0, G.WithName(name+", input")))
	G.NewUniqueNode(G.WithType(tensor.Float64), G.In(g), G.WithOp(l), G.WithChildren(G.Nodes{child}), G.WithName(name))
	return l
}

// add links an input of the old graph to its image.
func (l *link) add(old, image *G.Node) {
	l.inputs = append(l.inputs, linkedInput{weak.Make(old), weak.Make(image), old.Value(), image.Value()})
}

// each calls do for each input whose old node has a new value since the last check and whose image has not. If both
// were bound, the image keeps its value.
func (l *link) each(do func(in *linkedInput, old, image *G.Node) error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.inputs {
		in := &l.inputs[i]
		old, image := in.old.Value(), in.image.Value()
		if old == nil || image == nil || old.Value() == nil || is(old.Value(), in.oldValue, false) {
			continue
		}
		if !is(image.Value(), in.imageValue, true) {
			in.oldValue, in.imageValue = old.Value(), image.Value()
			continue
		}
		if err := do(in, old, image); err != nil {
			return err
		}
	}
	return nil
}

// is reports whether two values are identical. For values that can't be compared is returns unknown.
func is(a, b G.Value, unknown bool) bool {
	if a != nil && b != nil && !reflect.ValueOf(a).Comparable() {
		return unknown
	}
	return a == b
}

// handOn binds the new values to the images.
func (l *link) handOn() error {
	for _, of := range l.of {
		if err := of.handOn(); err != nil {
			return err
		}
	}
	return l.each(func(in *linkedInput, old, image *G.Node) error {
		bind(image, old.Value())
		in.oldValue, in.imageValue = old.Value(), image.Value()
		return nil
	})
}

// stale returns the error of a value that was not passed on.
func (l *link) stale() error {
	for _, of := range l.of {
		if err := of.stale(); err != nil {
			return err
		}
	}
	return l.each(func(_ *linkedInput, old, _ *G.Node) error {
		return errorf("%s of the graph that Fuse was given has a new value, and this program has no node that hands it on: bind it to the node of the new graph (Fused.Node)", stock.Describe(old))
	})
}

// bind binds a value as Let does or, if Let refuses the value, as WithValue does, which may reshape it.
func bind(n *G.Node, v G.Value) {
	if err := G.Let(n, v); err != nil {
		G.WithValue(v)(n)
	}
}

func (l *link) Do(...G.Value) (v G.Value, err error) {
	defer func() {
		if r := recover(); r != nil {
			v, err = nil, fmt.Errorf("Fuse: a value of the old graph: %v", r)
		}
	}()
	return G.NewF64(0), l.handOn()
}

func (l *link) Arity() int { return 1 }
func (l *link) Type() hm.Type {
	return hm.NewFnType(tensor.Float64, tensor.Float64)
}
func (l *link) InferShape(...G.DimSizer) (tensor.Shape, error) { return tensor.ScalarShape(), nil }
func (l *link) WriteHash(h hash.Hash)                          { fmt.Fprint(h, "leanattention.Fuse link") }
func (l *link) Hashcode() uint32                               { return graph.Hashcode(l) }
func (l *link) String() string                                 { return "Link" }

// A link has no gradient.
func (l *link) DiffWRT(n int) []bool { return make([]bool, n) }
func (l *link) SymDiff(in G.Nodes, _, _ *G.Node) (G.Nodes, error) {
	return make(G.Nodes, len(in)), nil
}
func (l *link) DoDiff(G.ExecutionContext, G.Nodes, *G.Node) error { return nil }

var (
	_ G.SDOp = (*link)(nil)
	_ G.ADOp = (*link)(nil)
)
