// Package graph is what every op of this module needs to live in a Gorgonia
// graph: the answers that are the same for all of them, and a way to apply an
// op that does not panic.
package graph

import (
	"fmt"
	"hash/fnv"
	"slices"
	"strings"

	"gorgonia.org/leanattention/internal/stock"

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

// Named is an op whose operands have names in errors.
type Named interface {
	// OperandName is the name of input i.
	OperandName(i int) string
}

// Apply is gorgonia.ApplyOp, whose panics become errors. It refuses operands that are
// not [Distinct].
func Apply(op G.Op, children ...*G.Node) (n *G.Node, err error) {
	defer func() {
		if r := recover(); r != nil {
			n, err = nil, fmt.Errorf("%v", r)
		}
	}()
	name := func(i int) string { return fmt.Sprintf("input %d", i) }
	if named, ok := op.(Named); ok {
		name = named.OperandName
	}
	if err := Distinct(name, children...); err != nil {
		return nil, err
	}
	return G.ApplyOp(op, children...)
}

// Distinct refuses an input without a name that is several operands. Gorgonia makes one node
// of all inputs without a name that have one type and shape, so the caller most likely
// meant several inputs. A named input, and a node with an op, may be several operands.
func Distinct(name func(i int) string, operands ...*G.Node) error {
	for i, n := range operands {
		if !Nameless(n) || slices.Index(operands, n) != i {
			continue
		}
		var same []string
		for j, other := range operands {
			if other == n {
				same = append(same, name(j))
			}
		}
		if last := len(same) - 1; last > 0 {
			return fmt.Errorf("%s and %s are one node, an input without a name: Gorgonia makes one node of all nameless inputs with type %v and shape %v; name each of them (gorgonia.WithName)",
				strings.Join(same[:last], ", "), same[last], n.Type(), n.Shape())
		}
	}
	return nil
}

// Nameless says whether n is an input without a name.
func Nameless(n *G.Node) bool { return stock.Of(n).Kind == stock.Input && stock.NameOf(n) == "" }
