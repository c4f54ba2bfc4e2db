package leanattention

import (
	"fmt"
	"math"
	"slices"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// fuseMatch is an attention of the graph that was given.
type fuseMatch struct {
	softmax, out                  *G.Node
	q, k, v                       fuseSource
	scale                         float64
	causal                        bool
	bias                          *fuseSource // nil: none. Its scale is a factor on it.
	heads, kvHeads, queries, keys int

	qShape, kShape, vShape, biasShape tensor.Shape // as Attention takes them
}

// fuseSource is an operand of an attention: what some nodes further down, of
// the graph that was given, become in the new graph.
type fuseSource struct {
	node    *G.Node
	steps   []fuseStep
	shape   tensor.Shape
	scale   float64 // that was on the way
	dropped int     // nodes that were on the way and are no more
	copied  bool    // a transpose was added
}

// fuseStep is a Reshape or a Transpose.
type fuseStep struct {
	shape   tensor.Shape
	pattern []int
}

// fuseOperand is an operand and its shape for Attention.
type fuseOperand struct {
	source *fuseSource
	shape  tensor.Shape
}

func (m *fuseMatch) operands() []fuseOperand {
	all := []fuseOperand{{&m.q, m.qShape}, {&m.k, m.kShape}, {&m.v, m.vShape}}
	if m.bias != nil {
		all = append(all, fuseOperand{m.bias, m.biasShape})
	}
	return all
}

// copyPays is from how many queries on, for keys and for values, the time that
// a transposed copy by Gorgonia takes is won back.
const copyPays = 16

// match finds the attention in g.
func (g *fuseGraph) match() (matches []*fuseMatch, misses []Miss) {
	for _, n := range g.nodes {
		if g.kind(n) != stockSoftMax {
			continue
		}
		m := &fuseMatch{softmax: n, scale: 1}
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
func (g *fuseGraph) matchAt(m *fuseMatch) (reason string) {
	shape := m.softmax.Shape()
	m.keys = shape[len(shape)-1]
	if axis := softMaxAxis(g.ops[m.softmax], shape); axis != len(shape)-1 {
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
	m.q, m.k = g.source(c[0], s.transA, true), g.source(c[1], !s.transB, true)
	m.scale *= m.q.scale * m.k.scale * m.v.scale
	return g.fit(m, scores, masks)
}

// matchValues goes from the SoftMax to the product of the weights and values.
func (g *fuseGraph) matchValues(m *fuseMatch) (reason string) {
	for n := m.softmax; ; {
		user := g.only(n)
		switch {
		case user == nil && g.users[n] == 1:
			return "its result is a root, not the weights of values"
		case user == nil:
			return fmt.Sprintf("its result is needed %d times, and not by a product with values alone", g.users[n])
		case g.kind(user) == stockReshape:
			n = user
			continue
		case g.kind(user) != stockProduct:
			return fmt.Sprintf("its result goes into %s, not into a product with values", describe(user))
		case lastAxis(n) != m.keys:
			return fmt.Sprintf("its rows are not those of %s", describe(n))
		case g.children[user][0] != n || g.ops[user].transA:
			return fmt.Sprintf("its result is not the left side, untransposed, of %s", describe(user))
		}
		g.known[user] = true
		m.out, m.v = user, g.source(g.children[user][1], g.ops[user].transB, false)
		return ""
	}
}

// matchScores goes from the SoftMax back to the product of queries and keys. It
// returns that and the masks on the way.
func (g *fuseGraph) matchScores(m *fuseMatch) (scores *G.Node, masks []fuseMask, reason string) {
	for n := g.children[m.softmax][0]; ; {
		if g.only(n) == nil {
			return nil, nil, fmt.Sprintf("its scores are needed elsewhere too: %s", describe(n))
		}
		switch g.kind(n) {
		case stockProduct:
			if lastAxis(n) != m.keys {
				return nil, nil, fmt.Sprintf("its rows are not those of %s", describe(n))
			}
			g.known[n] = true
			return n, masks, ""
		case stockReshape:
			n = g.children[n][0]
		case stockMul, stockDiv:
			child, factor, ok := g.scaled(n)
			if !ok {
				return nil, nil, g.badScale(n)
			}
			m.scale *= factor
			n = child
		case stockAdd, stockSub:
			child, mask, reason := g.masked(n)
			if reason != "" {
				return nil, nil, reason
			}
			mask.factor *= m.scale                                  // what was scaled behind the mask scaled it too
			if len(mask.numbers) != 1 || !finite(mask.numbers[0]) { // one for all SoftMax takes no notice of
				masks = append(masks, mask)
			}
			n = child
		default:
			return nil, nil, fmt.Sprintf("its scores come from %s, not from a product of queries and keys", describe(n))
		}
	}
}

// scaled is the factor and the other input of n, which multiplies or divides.
func (g *fuseGraph) scaled(n *G.Node) (child *G.Node, factor float64, ok bool) {
	c := g.children[n]
	if x, ok := g.factor(c[1]); ok && c[0].Shape().Eq(n.Shape()) {
		if g.kind(n) == stockDiv {
			x = 1 / x
		}
		return c[0], x, true
	}
	if x, ok := g.factor(c[0]); ok && g.kind(n) == stockMul && c[1].Shape().Eq(n.Shape()) {
		return c[1], x, true
	}
	return nil, 0, false
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }

// badScale says why n, which should have put a scale on scores, does not.
func (g *fuseGraph) badScale(n *G.Node) string {
	for i := len(g.children[n]) - 1; i >= 0; i-- {
		if in := g.input(g.children[n][i]); in != nil {
			return fmt.Sprintf("the scale of its scores depends on %s, whose value may change: it must be one number that is constant", describe(in))
		}
	}
	return fmt.Sprintf("the scale of its scores, at %s, is not one number that is constant", describe(n))
}

// input is an input that n is, or is computed from by what scales are computed by.
func (g *fuseGraph) input(n *G.Node) *G.Node {
	seen := make(map[*G.Node]bool)
	var find func(n *G.Node) *G.Node
	find = func(n *G.Node) *G.Node {
		if seen[n] {
			return nil
		}
		seen[n] = true
		switch g.kind(n) {
		case stockInput:
			return n
		case stockReshape, stockTranspose, stockAdd, stockSub, stockMul, stockDiv, stockRepeat, stockPure:
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
func (g *fuseGraph) source(n *G.Node, swap, scales bool) fuseSource {
	s := g.peel(n, swap, scales)
	if !swap && s.dropped == 0 {
		return fuseSource{node: n, shape: n.Shape(), scale: 1}
	}
	return s
}

func (g *fuseGraph) peel(n *G.Node, swap, scales bool) (s fuseSource) {
	rank := n.Dims()
	switch kind := g.kind(n); {
	case scales && (kind == stockMul || kind == stockDiv):
		if child, factor, ok := g.scaled(n); ok {
			s = g.source(child, swap, scales)
			s.scale *= factor
			s.dropped++
			return s
		}
	case kind == stockTranspose:
		pattern := slices.Clone(g.ops[n].pattern)
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
		return g.source(child, false, scales).then(fuseStep{pattern: pattern})
	case kind == stockReshape:
		child, to := g.children[n][0], n.Shape()
		if !swap {
			return g.source(child, false, scales).then(fuseStep{shape: to})
		}
		from := child.Shape()
		if len(from) >= 2 && len(to) >= 2 && slices.Equal(from[len(from)-2:], to[len(to)-2:]) {
			swapLast(to)
			return g.source(child, true, scales).then(fuseStep{shape: to})
		}
	}
	s = fuseSource{node: n, shape: n.Shape(), scale: 1}
	if swap {
		pattern := make([]int, rank)
		for i := range pattern {
			pattern[i] = i
		}
		swapLast(pattern)
		s = s.then(fuseStep{pattern: pattern})
		s.copied = true
	}
	return s
}

// then adds a step.
func (s fuseSource) then(step fuseStep) fuseSource {
	s.steps = append(s.steps, step)
	if step.shape != nil {
		s.shape = step.shape
		return s
	}
	shape := make(tensor.Shape, len(step.pattern))
	for i, from := range step.pattern {
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
func (g *fuseGraph) fit(m *fuseMatch, scores *G.Node, masks []fuseMask) (reason string) {
	outer, rows := stack(scores.Shape())
	if o, r := stack(m.out.Shape()); o != outer || r != rows {
		return fmt.Sprintf("its scores are %d matrices of %d rows and its weights %d of %d", outer, rows, o, r)
	}
	m.queries = rows
	queries, biases := splitMasks(masks, rows, m.keys)
	if queries > 1 {
		m.causal, m.queries = true, queries
	}
	if len(biases) > 1 {
		return fmt.Sprintf("it has %d masks that are not causal, at %s and %s", len(biases), describe(biases[1].at), describe(biases[0].at))
	}
	switch {
	case !finite(m.scale):
		return "its scales multiply to a number that is not finite"
	case m.k.copied && rows < copyPays, m.v.copied && rows < copyPays, m.k.copied && m.v.copied && rows < 2*copyPays:
		return fmt.Sprintf("its keys or values come transposed, and for %d queries a copy of them does not pay", rows)
	}

	m.qShape, m.kShape, m.vShape = m.q.shape, m.k.shape, m.v.shape
	rank, group := len(m.qShape), rows/m.queries
	m.heads, m.kvHeads = outer*group, outer
	last := func(s tensor.Shape) int { return s[len(s)-1] }
	switch {
	case group > 1: // each matrix is a sequence
		m.qShape = tensor.Shape{outer, group, m.queries, last(m.qShape)}
		m.kShape = tensor.Shape{outer, 1, m.keys, last(m.kShape)}
		m.vShape = tensor.Shape{outer, 1, m.keys, last(m.vShape)}
	case rank < 3 || rank > 4 || !sameShape(m.qShape[:rank-2], m.vShape[:len(m.vShape)-2]):
		m.qShape = tensor.Shape{outer, rows, last(m.qShape)}
		m.kShape = tensor.Shape{outer, m.keys, last(m.kShape)}
		m.vShape = tensor.Shape{outer, m.keys, last(m.vShape)}
	}
	if len(biases) > 0 {
		if reason = g.fitBias(m, scores, biases[0]); reason != "" {
			return reason
		}
	}
	t := m.out.Dtype()
	if _, err := newProblem("Fuse", operand{"q", m.qShape, t}, operand{"k", m.kShape, t}, operand{"v", m.vShape, t}); err != nil {
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
func (g *fuseGraph) homemade(n *G.Node) (reason string) {
	if g.kind(n) != stockProduct || g.known[n] || n.Dims() < 3 {
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
		case stockSoftMax, stockSoftMaxGradient:
			return ""
		case stockSize:
			continue
		case stockProduct:
			if by != nil && !g.known[x] && x.Dims() == weights.Dims() && x.Shape().TotalSize() == weights.Shape().TotalSize() && lastAxis(x) == lastAxis(weights) {
				return fmt.Sprintf("its weights come from %s by way of %s, without a SoftMax", describe(x), describe(by))
			}
			continue
		case stockReshape, stockTranspose:
		default:
			if by == nil {
				by = x
			}
		}
		next = append(next, g.children[x]...)
	}
	return ""
}
