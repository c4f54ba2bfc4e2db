package fuse

import (
	"fmt"
	"slices"

	"gorgonia.org/leanattention/internal/stock"

	G "gorgonia.org/gorgonia"
)

// softmax is a softmax of scores: a SoftMax, or Exp, Sum and a division.
type softmax struct {
	node   *G.Node // the result
	scores *G.Node
	uses   int // how often its own nodes read the scores
	axis   int
}

// softmaxes returns all softmaxes, in the order of the graph. A node that looks like a softmax and is none is a miss.
func (g *given) softmaxes() (all []softmax, misses []Miss) {
	for _, n := range g.nodes {
		switch kind := g.kind(n); {
		case kind == stock.SoftMax:
			child := g.children[n][0]
			all = append(all, softmax{node: n, scores: child, uses: 1, axis: g.ops[n].SoftMaxAxis(n.Shape())})
		case kind == stock.Div || kind == stock.Mul:
			s, reason := g.writtenOut(n)
			if s.node != nil {
				all = append(all, s)
			} else if reason != "" {
				misses = append(misses, Miss{n, reason})
			}
		}
	}
	return all, misses
}

// writtenOut returns the softmax whose last node is n, exponentials divided by their sum. Subtracting the maximum
// from the scores before makes no difference.
func (g *given) writtenOut(n *G.Node) (s softmax, reason string) {
	e, by, inverse := g.children[n][0], g.children[n][1], g.kind(n) == stock.Mul
	if inverse && g.kind(e) != stock.Exp {
		e, by = by, e
	}
	if g.kind(e) != stock.Exp {
		return s, ""
	}
	sum, ok := g.reduced(by, e, stock.Sum, inverse)
	if !ok {
		if reason = g.otherSum(e, by, inverse); reason != "" {
			g.written[n], g.written[e] = true, true
		}
		return s, reason
	}
	g.written[n], g.written[e] = true, true
	axis, ok := onlyAxis(e, sum.along)
	switch {
	case !ok:
		return s, "it divides by a sum over several axes: sum over the axis of the keys alone"
	case g.users[e] != 2 || !sum.alone:
		return s, "its exponentials or their sum are needed elsewhere too: compute them there again, or leave that out"
	}
	return softmax{node: n, scores: g.children[e][0], uses: 1, axis: axis}, ""
}

// otherSum returns why by, which divides the exponentials e, is not their sum, if by is made from a Sum. With
// inverse, e is multiplied by it.
func (g *given) otherSum(e, by *G.Node, inverse bool) (reason string) {
	divisor, alone := by, true // alone: between by and the Sum are only nodes that keep its numbers
	for inverse {
		switch c := g.children[divisor]; g.kind(divisor) {
		case stock.Reshape, stock.Repeat:
			divisor = c[0]
		case stock.Inverse:
			divisor, inverse = c[0], false
		case stock.Div:
			if g.value(c[0]) == nil {
				return ""
			}
			divisor, inverse, alone = c[1], false, false
		default:
			return ""
		}
	}
	const far = 32
	seen, next := map[*G.Node]bool{}, []*G.Node{divisor}
	var sum *G.Node
	for len(next) > 0 && len(seen) < far {
		n := next[0]
		next = next[1:]
		if seen[n] {
			continue
		}
		seen[n] = true
		switch g.kind(n) {
		case stock.Sum:
			if sum == nil || g.isSumOf(n, e) {
				sum = n
			}
		case stock.Reshape, stock.Repeat:
			next = append(next, g.children[n][0])
		case stock.Add, stock.Sub, stock.Mul, stock.Div, stock.Inverse, stock.Pure:
			alone = alone && sum != nil
			next = append(next, g.children[n]...)
		}
	}
	switch {
	case sum == nil:
		return ""
	case !g.isSumOf(sum, e):
		return fmt.Sprintf("it divides exponentials, %s, by a sum of others, %s: divide them by their own sum along the axis of the keys, or use SoftMax", stock.Describe(e), stock.Describe(sum))
	case !alone || g.children[sum][0] != e:
		return fmt.Sprintf("it divides exponentials by %s, which is made of their sum, %s, and more: divide them by that sum alone, or use SoftMax", stock.Describe(by), stock.Describe(sum))
	}
	return fmt.Sprintf("it divides exponentials by their sum along %s, %s, repeated along another axis: sum along the axis of the keys, and repeat the sum along that axis, or use SoftMax", axes(g.ops[sum].Along), stock.Describe(sum))
}

// isSumOf reports whether sum is a Sum of e, or of a Reshape of e.
func (g *given) isSumOf(sum, e *G.Node) bool {
	of := g.children[sum][0]
	for g.kind(of) == stock.Reshape && of != e {
		of = g.children[of][0]
	}
	return of == e
}

func axes(along []int) string {
	if len(along) == 1 {
		return fmt.Sprint("axis ", along[0])
	}
	return fmt.Sprint("axes ", along)
}

// reduction is a Sum or Max, broadcast to the shape of its operand.
type reduction struct {
	along []int
	alone bool // there is no other reader
}

// reduced reports whether n is a Sum or Max of of, broadcast to of's shape. With inverse n is its reciprocal.
func (g *given) reduced(n, of *G.Node, kind stock.Kind, inverse bool) (r reduction, ok bool) {
	if !n.IsScalar() && !n.Shape().Eq(of.Shape()) {
		return r, false
	}
	r.alone = true
	var repeated []int
	for {
		r.alone = r.alone && g.users[n] == 1
		switch k := g.kind(n); {
		case k == stock.Reshape:
		case k == stock.Inverse && inverse:
			inverse = false
		case k == stock.Repeat:
			child, axis := g.children[n][0], g.ops[n].Axis
			if child.Dims() != of.Dims() || child.Shape()[axis] != 1 {
				return r, false
			}
			repeated = append(repeated, axis)
		case k == kind && g.children[n][0] == of && !inverse:
			r.along = g.ops[n].Along
			for _, a := range repeated {
				if of.Shape()[a] > 1 && !slices.Contains(r.along, a) {
					return r, false
				}
			}
			return r, true
		default:
			return r, false
		}
		n = g.children[n][0]
	}
}

// onlyAxis returns the one of some axes along which n has more than one element, or the last axis if there is none.
func onlyAxis(n *G.Node, along []int) (axis int, ok bool) {
	axis = slices.Max(along)
	longer := 0
	for _, a := range along {
		if n.Shape()[a] > 1 {
			axis = a
			longer++
		}
	}
	return axis, longer <= 1
}

// withoutMaximum returns the minuend of at, a Sub, if at subtracts a maximum that the keys of a row share.
func (g *given) withoutMaximum(m *Match, at placed) *G.Node {
	n := at.node
	if g.kind(n) != stock.Sub || n.Dims() < 2 || at.keys() != m.Keys {
		return nil
	}
	of, axis := g.children[n][0], at.keyAxis()
	if !of.Shape().Eq(n.Shape()) || g.users[of] != 2 {
		return nil
	}
	r, ok := g.reduced(g.children[n][1], of, stock.Max, false)
	if !ok || !r.alone || of.Shape()[axis] > 1 && !slices.Contains(r.along, axis) {
		return nil
	}
	return of
}
