// Package fuse finds attention in a graph of Gorgonia's own ops and builds the graph
// anew, with another node in its place. The node is its user's.
//
//	graph.go    what is known of the graph that was given: users, constants
//	match.go    from a softmax to the two products around it, and to q, k and v
//	softmax.go  a SoftMax, or one that is written out
//	scale.go    what multiplies the scores on the way
//	mask.go     what is added to them
//	heads.go    heads that were computed one by one
//	build.go    the new graph
//	step.go     the nodes around an attention in it
//	link.go     later values of the old graph's inputs, in the new graph
package fuse

import (
	"fmt"
	"slices"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Attention is what stands in the place of the ops that were found.
type Attention interface {
	// Fixed says of an input whether its value never changes, like that of a constant.
	Fixed(n *G.Node) bool

	// Check says what is wrong with operands of these shapes, (batch, heads, N, d) or
	// without the batch.
	Check(q, k, v tensor.Shape, t tensor.Dtype) error

	// Node adds the node for a match to the graph of q, k and v, and of the seed of its
	// dropout and the bias if these are not nil, in this order.
	Node(q, k, v, seed, bias *G.Node, m *Match) (*G.Node, error)

	// Seed adds a node with another seed in each run to the graph of q.
	Seed(q *G.Node) (*G.Node, error)
}

// Result is a graph that was built anew.
type Result struct {
	Graph   *G.ExprGraph
	Matches []*Match // that were replaced, in the order of the graph that was given
	Misses  []Miss   // in that order too

	Images    map[*G.Node]*G.Node // by nodes of the graph that was given
	Attention map[*Match]*G.Node  // the new nodes
}

// Error is what is wrong with a graph, that was given or that would come out.
type Error struct{ text string }

func (e *Error) Error() string { return e.text }

func errorf(format string, args ...any) error { return &Error{fmt.Sprintf(format, args...)} }

// Rewrite looks for attention in the graph of the roots, which are at least one and
// of one graph, and returns the graph anew. The one that was given stays as it is.
// What is found is in the documentation of leanattention.Fuse. An error is an
// [Error] or one of [Attention].Node.
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
