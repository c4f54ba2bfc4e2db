// Package fuse finds attention in a graph of Gorgonia's own ops, and builds a new graph with another node in its
// place. The user of the package provides the node.
//
//	graph.go    facts about the given graph: users, constants
//	match.go    from a softmax to the two products around it, and to q, k and v
//	softmax.go  a SoftMax, or one that is written out
//	scale.go    factors of the scores
//	mask.go     addends of the scores
//	heads.go    heads that were computed one by one
//	build.go    the new graph
//	step.go     the nodes around an attention in the new graph
//	link.go     later values of the old graph's inputs, in the new graph
package fuse

import (
	"fmt"
	"slices"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Attention provides the node in place of the ops that were found.
type Attention interface {
	// Fixed reports whether the value of an input never changes, like the value of a constant.
	Fixed(n *G.Node) bool

	// Check returns the error of operands of these shapes, (batch, heads, N, d) or without the batch.
	Check(q, k, v tensor.Shape, t tensor.Dtype) error

	// Node adds the node for a match to the graph of q, k and v. The seed of its dropout and the bias are further
	// inputs, in this order, if they are not nil.
	Node(q, k, v, seed, bias *G.Node, m *Match) (*G.Node, error)

	// Seed adds a node with another seed in each run to the graph of q.
	Seed(q *G.Node) (*G.Node, error)
}

// Result is the new graph.
type Result struct {
	Graph   *G.ExprGraph
	Matches []*Match // replaced matches, in the order of the given graph
	Misses  []Miss   // in the same order

	Images    map[*G.Node]*G.Node // by nodes of the given graph
	Attention map[*Match]*G.Node  // the new nodes
}

// Error is the error of an invalid graph, given or resulting.
type Error struct{ text string }

func (e *Error) Error() string { return e.text }

func errorf(format string, args ...any) error { return &Error{fmt.Sprintf(format, args...)} }

// Rewrite finds attention in the graph of the roots, at least one and all of one graph, and returns a new graph. The
// given graph stays as it is. The documentation of rewrite.Fuse lists the forms. An error is an [Error] or one of
// [Attention].Node.
func Rewrite(roots []*G.Node, attention Attention) (*Result, error) {
	g, err := newGiven(roots, attention)
	if err != nil {
		return nil, err
	}
	matches, misses := g.match()
	matches = g.joinHeads(matches)
	b, more := newBuilder(g, matches)
	if err = b.build(); err != nil {
		return nil, err
	}
	r := &Result{Graph: b.g, Misses: append(misses, more...), Images: b.images, Attention: b.attention}
	slices.SortStableFunc(r.Misses, func(x, y Miss) int { return g.at[x.Node] - g.at[y.Node] })
	for _, m := range b.all {
		if b.attention[m] != nil {
			r.Matches = append(r.Matches, m)
		}
	}
	return r, nil
}
