package nn

import (
	"fmt"
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"
	"gorgonia.org/leanattention/internal/stock"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// One node joins the gradients of the parts of a [Linears] to the gradient of the whole. If nothing but a conversion, a Reshape and a
// SplitHeads lies between each part and attention, the node also undoes these three.

// readersOf counts the readers of each node. Each mention of a node in `more` counts as a reader.
func readersOf(sorted G.Nodes, more ...G.Nodes) map[*G.Node]int {
	readers := map[*G.Node]int{}
	for _, n := range slices.Concat(more...) {
		readers[n]++
	}
	for _, n := range sorted {
		for _, c := range stock.ChildrenOf(n) {
			readers[c]++
		}
	}
	return readers
}

// partGradient is the gradient dy of a part of the joined output of a [Linears]. If there are nodes behind the part, the last one first, dy
// is the gradient of the last one.
type partGradient struct {
	part, dy *G.Node
	behind   G.Nodes
}

// partOfLinears returns the gradient of a part, given the gradient dy of the part or of the last node behind the part.
func partOfLinears(n, dy *G.Node, readers map[*G.Node]int) (p partGradient, ok bool) {
	if _, ok := nodeRule[linearPart](n); ok {
		return partGradient{part: n, dy: dy}, true
	}
	// The nodes behind the part, the last one first. Nothing else reads them, and their gradients are not asked for.
	chain := G.Nodes{n}
	for range 3 {
		c := stock.ChildrenOf(n)
		if len(c) != 1 || readers[c[0]] != 1 {
			return p, false
		}
		n = c[0]
		chain = append(chain, n)
	}
	moves, _ := nodeRule[moving](chain[0])
	_, isSplit := moves.path.(split)
	_, isReshape := nodeRule[reshape](chain[1])
	_, isConvert := nodeRule[convert](chain[2])
	_, isPart := nodeRule[linearPart](chain[3])
	short := chain[0].Dtype() == operand.Float16 || chain[0].Dtype() == operand.BFloat16
	return partGradient{chain[3], dy, chain[:3]}, short && isSplit && isReshape && isConvert && isPart
}

// behindActivation is the gradient dy behind an activation f of the output of layers that nothing else reads.
type behindActivation struct {
	of linear
	f  attn.Activation
	dy *G.Node
}

// behindLayers returns the gradient dy of an activation n as a gradient of the layers in front of n, if there are such layers: a GPU multiplies
// dy by the slopes while it rounds dy.
func behindLayers(n, dy *G.Node, readers map[*G.Node]int) (a behindActivation, ok bool) {
	r, isActivation := nodeRule[activation](n)
	if !isActivation {
		return a, false
	}
	c := stock.ChildrenOf(n)[0]
	l, isLinear := nodeRule[linear](c)
	return behindActivation{l, r.f, dy}, isLinear && readers[c] == 1 && l.products != 0 && l.activation == attn.NoActivation && !l.gate && !l.residual && !l.joined
}

// alone returns the gradient of the part itself.
func (p partGradient) alone() (dy *G.Node, err error) {
	dy = p.dy
	for _, n := range p.behind {
		down, err := n.Op().(G.SDOp).SymDiff(stock.ChildrenOf(n), n, dy)
		if err != nil {
			return nil, err
		}
		dy = down[0]
	}
	return dy, nil
}

// sortParts sorts gradients of parts by their place in the whole. whole reports that the parts are the whole. heads reports that each part has
// a node behind it, and that the gradients have one type.
func sortParts(list []partGradient) (whole, heads bool, last linearPart) {
	first := func(p partGradient) int { r, _ := nodeRule[linearPart](p.part); return r.before }
	slices.SortFunc(list, func(a, b partGradient) int { return first(a) - first(b) })
	at := 0
	whole, heads = true, true
	for _, p := range list {
		last, _ = nodeRule[linearPart](p.part)
		whole = whole && last.before == at
		heads = heads && len(p.behind) > 0 && p.dy.Dtype() == list[0].dy.Dtype()
		at += last.width
	}
	return whole && at == last.all, heads, last
}

// ofHeads returns the gradients of the inputs of layers with products of 16 bits, if the gradients of all parts are behind SplitHeads and of
// the products' type, and nothing else reads the whole: a GPU then joins the parts as operands. Otherwise ofHeads returns nil.
func ofHeads(n *G.Node, list []partGradient, alone bool) ([]*G.Node, error) {
	l, ok := nodeRule[linear](n)
	whole, heads, _ := sortParts(list)
	if !ok || !alone || !whole || !heads || l.products != attn.BFloat16 || list[0].dy.Dtype() != operand.BFloat16 || l.activation != attn.NoActivation || l.gate || l.residual {
		return nil, nil
	}
	var dys G.Nodes
	for _, p := range list {
		dys = append(dys, p.dy)
	}
	return linearGradientsThrough(inGraph, l, stock.ChildrenOf(n), dys, attn.NoActivation)
}

// ofWhole returns the contributions of parts to the gradient of the whole: one, if the parts are the whole and nothing else reads the
// whole, or each part among zeros.
func ofWhole(whole *G.Node, list []partGradient, alone bool) (all []*G.Node, err error) {
	every, heads, last := sortParts(list)
	alone = alone && every
	join := joinParts{from: list[0].dy.Dtype(), to: last.dtype, heads: alone && heads}
	for _, p := range list {
		if !join.heads {
			join.from = last.dtype
			if p.dy, err = p.alone(); err != nil {
				return nil, err
			}
		}
		if !alone {
			down, err := p.part.Op().(G.SDOp).SymDiff(G.Nodes{whole}, p.part, p.dy)
			if err != nil {
				return nil, err
			}
			p.dy = down[0]
		}
		r, _ := nodeRule[linearPart](p.part)
		all, join.widths = append(all, p.dy), append(join.widths, r.width)
	}
	if !alone {
		return all, nil
	}
	y, err := newNode(join, all...)
	return []*G.Node{y}, err
}

// joinParts is the rule from the gradients of all parts of a [Linears] to that of the whole. With heads, the gradients are those of 16 bits
// behind SplitHeads.
type joinParts struct {
	widths   []int
	from, to tensor.Dtype
	heads    bool
}

func (r joinParts) title() string { return "Linears" }
func (r joinParts) String() string {
	return fmt.Sprintf("JoinParts{%v, %v to %v, heads %t}", r.widths, r.from, r.to, r.heads)
}

func (r joinParts) arguments() []argument {
	rank := 2
	if r.heads {
		rank = 4
	}
	names := namesOf(len(r.widths), func(i int) string { return fmt.Sprintf("the gradient of layer %d", i) })
	return moveable(append(alike(rank, r.from, names...), argument{name: "y", rank: 1, dtype: r.to}))
}

func (r joinParts) shape(in []tensor.Shape) (tensor.Shape, error) {
	all, rows := 0, func(s tensor.Shape) int {
		if r.heads {
			return s[0] * s[2]
		}
		return s[0]
	}
	for i, s := range in {
		if rows(s) != rows(in[0]) || s.TotalSize() != rows(s)*r.widths[i] {
			return nil, errorf(r.title(), errs.ErrShape, "the gradient of layer %d has shape %v, want %d rows of %d elements", i, s, rows(in[0]), r.widths[i])
		}
		all += s.TotalSize()
	}
	return tensor.Shape{all}, nil
}

func (r joinParts) moves(in []tensor.Shape) (moves []attn.Move) {
	at := 0
	for _, s := range in {
		m := attn.Move{Dims: [3]int{1, 1, 1}, N: s.TotalSize()}
		if r.heads {
			m = merged(s)
		}
		m.To.At = at
		moves = append(moves, m)
		at += s.TotalSize()
	}
	return moves
}

func (r joinParts) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	moves := r.moves(shapesOf(in))
	switch r.from {
	case operand.Float16:
		return joinedOf(moves, in, shape, half.DecodeFloat16[half.Float16])
	case operand.BFloat16:
		return joinedOf(moves, in, shape, half.DecodeBFloat16[half.BFloat16])
	}
	return movedOf(r.title(), moves, in, shape)
}

// joinedOf moves elements of 16 bits to a vector of float32.
func joinedOf[H any](moves []attn.Move, in []G.Value, shape tensor.Shape, decode func([]float32, []H)) (G.Value, error) {
	const title = "Linears"
	short, err := moved[H](title, moves, in, shape)
	if err != nil {
		return nil, err
	}
	t, y := output[float32](shape)
	decode(y, dense.Elements[H](short.(*tensor.Dense)))
	return t, nil
}

func (r joinParts) launch(w *ongpu.Work, in []tensor.Shape, _ tensor.Shape) error {
	return launchMoves(w, r.moves(in))
}

var _ launched = joinParts{}
