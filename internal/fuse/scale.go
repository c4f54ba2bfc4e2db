package fuse

import (
	"fmt"

	"gorgonia.org/leanattention/internal/stock"

	G "gorgonia.org/gorgonia"
)

// scale is a factor of scores: a number, or the number of a node, which may change, and which divides if divides is
// set.
type scale struct {
	number  float64
	node    *G.Node // nil: none
	divides bool
}

// scaled returns the scale and the other input of n, which multiplies or divides. For scores, the scale is the input
// that is not scores.
func (g *given) scaled(n *G.Node, scores bool) (child *G.Node, s scale, ok bool) {
	c, divides := g.children[n], g.kind(n) == stock.Div
	for i := len(c) - 1; i >= 0; i-- {
		child, by := c[1-i], c[i]
		if i == 0 && divides || !child.Shape().Eq(n.Shape()) {
			continue
		}
		if x, ok := g.factor(by); ok {
			if divides {
				x = 1 / x
			}
			return child, scale{number: x}, true
		}
		if x := g.single(by); x != nil && !child.IsScalar() && !(scores && g.isOfScores(by) && !g.isOfScores(child)) {
			return child, scale{number: 1, node: x, divides: divides}, true
		}
	}
	return nil, scale{}, false
}

// single returns a node of one number that all elements of n have.
func (g *given) single(n *G.Node) *G.Node {
	for {
		switch k := g.kind(n); {
		case n.IsScalar():
			return n
		case k == stock.Reshape || k == stock.Repeat || k == stock.Transpose:
			n = g.children[n][0]
		case n.Shape().TotalSize() == 1:
			return n
		default:
			return nil
		}
	}
}

// badScale returns why n, which should scale scores, does not.
func (g *given) badScale(n *G.Node) string {
	c := g.children[n]
	if g.kind(n) == stock.Div && c[0].IsScalar() {
		return fmt.Sprintf("its scores divide something, at %s: divide the scores by that instead", stock.Describe(n))
	}
	return fmt.Sprintf("the scale of its scores, at %s, is not one number for all of them: scale queries or keys where it is that of a query or a key; where it is a mask of 0 and 1 add 0 and -1e9 instead", stock.Describe(n))
}

// scaleBy multiplies or divides n by the one number of by.
func scaleBy(n, by *G.Node, divides bool) (*G.Node, error) {
	like := G.NewTensor(G.NewGraph(), n.Dtype(), n.Dims(), G.WithShape(n.Shape()...))
	if !by.IsScalar() {
		one := G.NewTensor(like.Graph(), n.Dtype(), by.Dims(), G.WithShape(by.Shape()...), G.WithName("one"))
		sum, err := G.Sum(one)
		if err != nil {
			return nil, errorf("%v", err)
		}
		if by, err = applyStep(newStepOp(sum.Op()), by); err != nil {
			return nil, err
		}
	}
	apply, number := G.HadamardProd, G.NewScalar(like.Graph(), n.Dtype(), G.WithName("number"))
	if divides {
		apply = G.HadamardDiv
	}
	out, err := apply(like, number)
	if err != nil {
		return nil, errorf("%v", err)
	}
	return applyStep(newStepOp(out.Op()), n, by)
}
