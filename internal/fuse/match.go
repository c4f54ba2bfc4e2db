package fuse

import (
	"fmt"
	"math"
	"slices"

	"gorgonia.org/leanattention/internal/stock"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Match is an attention of the graph that was given.
type Match struct {
	Output    *G.Node // the product of weights and values
	Scale     float64 // on the scores
	Causal    bool
	Bias      *G.Node // what else is added to the scores, nil: nothing
	BiasScale float64 // on it
	Heads     int     // query heads, of all sequences
	KVHeads   int
	Queries   int // of a head
	Keys      int

	softmax                           *G.Node
	q, k, v, bias                     source
	qShape, kShape, vShape, biasShape tensor.Shape // as the new node takes them
}

// Miss is a node that might have been part of an attention, and why it is not taken
// for one.
type Miss struct {
	Node   *G.Node
	Reason string
}

// source is an operand of an attention: what some nodes further down, of
// the graph that was given, become in the new graph.
type source struct {
	node    *G.Node
	steps   []step
	shape   tensor.Shape
	scale   float64 // that was on the way
	dropped int     // nodes that were on the way and are no more
	copied  bool    // a transpose was added
}

// step is a Reshape or a Transpose.
type step struct {
	shape   tensor.Shape
	pattern []int
}

// operand is an operand and its shape for the new node.
type operand struct {
	source *source
	shape  tensor.Shape
}

func (m *Match) operands() []operand {
	all := []operand{{&m.q, m.qShape}, {&m.k, m.kShape}, {&m.v, m.vShape}}
	if m.Bias != nil {
		all = append(all, operand{&m.bias, m.biasShape})
	}
	return all
}

// copyPays is from how many queries on, for keys and for values, the time that
// a transposed copy by Gorgonia takes is won back.
const copyPays = 16

// match finds the attention in g.
func (g *given) match() (matches []*Match, misses []Miss) {
	for _, n := range g.nodes {
		if g.kind(n) != stock.SoftMax {
			continue
		}
		m := &Match{softmax: n, Scale: 1}
		if reason := g.matchAt(m); reason != "" {
			misses = append(misses, Miss{n, reason})
		} else {
			matches = append(matches, m)
		}
	}
	for _, n := range g.nodes {
		if reason := g.homemade(n); reason != "" {
			misses = append(misses, Miss{n, reason})
		}
	}
	return matches, misses
}

// matchAt fills in m around its SoftMax. What stands in the way it returns.
func (g *given) matchAt(m *Match) (reason string) {
	shape := m.softmax.Shape()
	m.Keys = shape[len(shape)-1]
	if axis := g.ops[m.softmax].SoftMaxAxis(shape); axis != len(shape)-1 {
		return fmt.Sprintf("it goes along axis %d of %v, not the last one", axis, shape)
	}
	if reason = g.matchValues(m); reason != "" {
		return reason
	}
	scores, masks, reason := g.matchScores(m)
	if reason != "" {
		return reason
	}
	s, c := g.ops[scores], g.children[scores]
	m.q, m.k = g.source(c[0], s.TransA, true), g.source(c[1], !s.TransB, true)
	m.Scale *= m.q.scale * m.k.scale * m.v.scale
	return g.fit(m, scores, masks)
}

// matchValues goes from the SoftMax to the product of the weights and values.
func (g *given) matchValues(m *Match) (reason string) {
	for n := m.softmax; ; {
		user := g.only(n)
		switch {
		case user == nil && g.users[n] == 1:
			return "its result is a root, not the weights of values"
		case user == nil:
			return fmt.Sprintf("its result is needed %d times, and not by a product with values alone", g.users[n])
		case g.kind(user) == stock.Reshape:
			n = user
			continue
		case g.kind(user) != stock.Product:
			return fmt.Sprintf("its result goes into %s, not into a product with values", stock.Describe(user))
		case lastAxis(n) != m.Keys:
			return fmt.Sprintf("its rows are not those of %s", stock.Describe(n))
		case g.children[user][0] != n || g.ops[user].TransA:
			return fmt.Sprintf("its result is not the left side, untransposed, of %s", stock.Describe(user))
		}
		g.known[user] = true
		m.Output, m.v = user, g.source(g.children[user][1], g.ops[user].TransB, false)
		return ""
	}
}

// matchScores goes from the SoftMax back to the product of queries and keys. It
// returns that and the masks on the way.
func (g *given) matchScores(m *Match) (scores *G.Node, masks []addend, reason string) {
	for n := g.children[m.softmax][0]; ; {
		if g.only(n) == nil {
			return nil, nil, fmt.Sprintf("its scores are needed elsewhere too: %s", stock.Describe(n))
		}
		switch g.kind(n) {
		case stock.Product:
			if lastAxis(n) != m.Keys {
				return nil, nil, fmt.Sprintf("its rows are not those of %s", stock.Describe(n))
			}
			g.known[n] = true
			return n, masks, ""
		case stock.Reshape:
			n = g.children[n][0]
		case stock.Mul, stock.Div:
			child, factor, ok := g.scaled(n)
			if !ok {
				return nil, nil, g.badScale(n)
			}
			m.Scale *= factor
			n = child
		case stock.Add, stock.Sub:
			child, mask, reason := g.masked(n)
			if reason != "" {
				return nil, nil, reason
			}
			mask.factor *= m.Scale                                  // what was scaled behind the mask scaled it too
			if len(mask.numbers) != 1 || !finite(mask.numbers[0]) { // one for all SoftMax takes no notice of
				masks = append(masks, mask)
			}
			n = child
		default:
			return nil, nil, fmt.Sprintf("its scores come from %s, not from a product of queries and keys", stock.Describe(n))
		}
	}
}

// scaled is the factor and the other input of n, which multiplies or divides.
func (g *given) scaled(n *G.Node) (child *G.Node, factor float64, ok bool) {
	c := g.children[n]
	if x, ok := g.factor(c[1]); ok && c[0].Shape().Eq(n.Shape()) {
		if g.kind(n) == stock.Div {
			x = 1 / x
		}
		return c[0], x, true
	}
	if x, ok := g.factor(c[0]); ok && g.kind(n) == stock.Mul && c[1].Shape().Eq(n.Shape()) {
		return c[1], x, true
	}
	return nil, 0, false
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }

// badScale says why n, which should have put a scale on scores, does not.
func (g *given) badScale(n *G.Node) string {
	for i := len(g.children[n]) - 1; i >= 0; i-- {
		if in := g.input(g.children[n][i]); in != nil {
			return fmt.Sprintf("the scale of its scores depends on %s, whose value may change: it must be one number that is constant", stock.Describe(in))
		}
	}
	return fmt.Sprintf("the scale of its scores, at %s, is not one number that is constant", stock.Describe(n))
}

// input is an input that n is, or is computed from by what scales are computed by.
func (g *given) input(n *G.Node) *G.Node {
	seen := make(map[*G.Node]bool)
	var find func(n *G.Node) *G.Node
	find = func(n *G.Node) *G.Node {
		if seen[n] {
			return nil
		}
		seen[n] = true
		switch g.kind(n) {
		case stock.Input:
			return n
		case stock.Reshape, stock.Transpose, stock.Add, stock.Sub, stock.Mul, stock.Div, stock.Repeat, stock.Pure:
			for _, c := range g.children[n] {
				if in := find(c); in != nil {
					return in
				}
			}
		}
		return nil
	}
	return find(n)
}

// source goes from an operand of a product back to what is left of it without
// its scales, if they are to be taken off, and without transposes that need not
// be. With swap the operand is wanted with its last two axes swapped.
func (g *given) source(n *G.Node, swap, scales bool) source {
	s := g.peel(n, swap, scales)
	if !swap && s.dropped == 0 {
		return source{node: n, shape: n.Shape(), scale: 1}
	}
	return s
}

func (g *given) peel(n *G.Node, swap, scales bool) (s source) {
	rank := n.Dims()
	switch kind := g.kind(n); {
	case scales && (kind == stock.Mul || kind == stock.Div):
		if child, factor, ok := g.scaled(n); ok {
			s = g.source(child, swap, scales)
			s.scale *= factor
			s.dropped++
			return s
		}
	case kind == stock.Transpose:
		pattern := slices.Clone(g.ops[n].Pattern)
		if swap {
			swapLast(pattern)
		}
		child := g.children[n][0]
		if isIdentity(pattern) {
			s = g.source(child, false, scales)
			s.dropped++
			return s
		}
		if swapLast(pattern); isIdentity(pattern) { // the swap is all there is
			s = g.source(child, true, scales)
			s.copied = false // where a transpose had to stay it was there before
			return s
		}
		swapLast(pattern)
		return g.source(child, false, scales).then(step{pattern: pattern})
	case kind == stock.Reshape:
		child, to := g.children[n][0], n.Shape()
		if !swap {
			return g.source(child, false, scales).then(step{shape: to})
		}
		from := child.Shape()
		if len(from) >= 2 && len(to) >= 2 && slices.Equal(from[len(from)-2:], to[len(to)-2:]) {
			swapLast(to)
			return g.source(child, true, scales).then(step{shape: to})
		}
	}
	s = source{node: n, shape: n.Shape(), scale: 1}
	if swap {
		pattern := make([]int, rank)
		for i := range pattern {
			pattern[i] = i
		}
		swapLast(pattern)
		s = s.then(step{pattern: pattern})
		s.copied = true
	}
	return s
}

// then adds a step.
func (s source) then(next step) source {
	s.steps = append(s.steps, next)
	if next.shape != nil {
		s.shape = next.shape
		return s
	}
	shape := make(tensor.Shape, len(next.pattern))
	for i, from := range next.pattern {
		shape[i] = s.shape[from]
	}
	s.shape = shape
	return s
}

func swapLast[S ~[]int](x S) {
	n := len(x)
	x[n-1], x[n-2] = x[n-2], x[n-1]
}

func isIdentity(pattern []int) bool {
	for i, x := range pattern {
		if x != i {
			return false
		}
	}
	return true
}

func lastAxis(n *G.Node) int {
	s := n.Shape()
	if len(s) == 0 {
		return 1
	}
	return s[len(s)-1]
}

// fit finds the shapes of the operands for Attention.
func (g *given) fit(m *Match, scores *G.Node, masks []addend) (reason string) {
	outer, rows := stack(scores.Shape())
	if o, r := stack(m.Output.Shape()); o != outer || r != rows {
		return fmt.Sprintf("its scores are %d matrices of %d rows and its weights %d of %d", outer, rows, o, r)
	}
	m.Queries = rows
	queries, biases := splitMasks(masks, rows, m.Keys)
	if queries > 1 {
		m.Causal, m.Queries = true, queries
	}
	if len(biases) > 1 {
		return fmt.Sprintf("it has %d masks that are not causal, at %s and %s", len(biases), stock.Describe(biases[1].at), stock.Describe(biases[0].at))
	}
	switch {
	case !finite(m.Scale):
		return "its scales multiply to a number that is not finite"
	case m.k.copied && rows < copyPays, m.v.copied && rows < copyPays, m.k.copied && m.v.copied && rows < 2*copyPays:
		return fmt.Sprintf("its keys or values come transposed, and for %d queries a copy of them does not pay", rows)
	}

	m.qShape, m.kShape, m.vShape = m.q.shape, m.k.shape, m.v.shape
	rank, group := len(m.qShape), rows/m.Queries
	m.Heads, m.KVHeads = outer*group, outer
	last := func(s tensor.Shape) int { return s[len(s)-1] }
	switch {
	case group > 1: // each matrix is a sequence
		m.qShape = tensor.Shape{outer, group, m.Queries, last(m.qShape)}
		m.kShape = tensor.Shape{outer, 1, m.Keys, last(m.kShape)}
		m.vShape = tensor.Shape{outer, 1, m.Keys, last(m.vShape)}
	case rank < 3 || rank > 4 || !slices.Equal(m.qShape[:rank-2], m.vShape[:len(m.vShape)-2]):
		m.qShape = tensor.Shape{outer, rows, last(m.qShape)}
		m.kShape = tensor.Shape{outer, m.Keys, last(m.kShape)}
		m.vShape = tensor.Shape{outer, m.Keys, last(m.vShape)}
	}
	if len(biases) > 0 {
		if reason = g.fitBias(m, scores, biases[0]); reason != "" {
			return reason
		}
	}
	t := m.Output.Dtype()
	if err := g.attention.Check(m.qShape, m.kShape, m.vShape, t); err != nil {
		return err.Error()
	}
	return ""
}

// stack is a shape as a number of matrices and their rows.
func stack(s tensor.Shape) (matrices, rows int) {
	matrices = 1
	for _, n := range s[:len(s)-2] {
		matrices *= n
	}
	return matrices, s[len(s)-2]
}

// homemade says that n looks like the product of weights and values where the
// weights are computed without a SoftMax, from another product. It looks at
// products of stacks only, since those of plain matrices are linear layers.
func (g *given) homemade(n *G.Node) (reason string) {
	if g.kind(n) != stock.Product || g.known[n] || n.Dims() < 3 {
		return ""
	}
	const far = 32
	weights := g.children[n][0]
	seen, next := map[*G.Node]bool{}, []*G.Node{weights}
	var by *G.Node
	for len(next) > 0 && len(seen) < far {
		x := next[0]
		next = next[1:]
		if seen[x] {
			continue
		}
		seen[x] = true
		switch g.kind(x) {
		case stock.SoftMax, stock.SoftMaxGradient:
			return ""
		case stock.Size:
			continue
		case stock.Product:
			if by != nil && !g.known[x] && x.Dims() == weights.Dims() && x.Shape().TotalSize() == weights.Shape().TotalSize() && lastAxis(x) == lastAxis(weights) {
				return fmt.Sprintf("its weights come from %s by way of %s, without a SoftMax", stock.Describe(x), stock.Describe(by))
			}
			continue
		case stock.Reshape, stock.Transpose:
		default:
			if by == nil {
				by = x
			}
		}
		next = append(next, g.children[x]...)
	}
	return ""
}
