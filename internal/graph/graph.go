// Package graph is what every op of this module needs to live in a Gorgonia
// graph: the answers that are the same for all of them, and a way to apply an
// op that does not panic.
package graph

import (
	"fmt"
	"hash/fnv"

	G "gorgonia.org/gorgonia"
)

// Plain is what the ops of this module tell Gorgonia's machines: they make a
// new value at every run, in Go memory, and overwrite no input. (A value that
// is kept from run to run would be overwritten by the in-place ops behind it.)
// It is to be embedded.
type Plain struct{}

func (Plain) ReturnsPtr() bool     { return false }
func (Plain) CallsExtern() bool    { return false }
func (Plain) OverwritesInput() int { return -1 }

// Hashcode is the hash of what op writes into it. Gorgonia makes one node of
// two whose hashes are equal, so ops write every parameter.
func Hashcode(op G.Op) uint32 {
	h := fnv.New32a()
	op.WriteHash(h)
	return h.Sum32()
}

// Apply is gorgonia.ApplyOp, whose panics become errors.
func Apply(op G.Op, children ...*G.Node) (n *G.Node, err error) {
	defer func() {
		if r := recover(); r != nil {
			n, err = nil, fmt.Errorf("%v", r)
		}
	}()
	return G.ApplyOp(op, children...)
}
