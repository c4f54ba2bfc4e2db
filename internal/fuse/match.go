package fuse

import (
	"fmt"
	"math"
	"slices"

	"gorgonia.org/leanattention/internal/graph"
	"gorgonia.org/leanattention/internal/stock"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Match is an attention of the given graph.
type Match struct {
	Output    *G.Node   // the product of weights and values
	Scale     float64   // factor of the scores
	Scales    []*G.Node // nodes whose numbers multiply or divide the scores too, and may change
	Causal    bool
	Bias      *G.Node   // another addend of the scores; nil: none
	BiasScale float64   // factor of Bias
	Dropout   float64   // the probability that a weight is dropped
	Dropouts  []*G.Node // dropouts without effect
	Heads     int       // query heads of all sequences
	KVHeads   int
	Queries   int // queries of a head
	Keys      int

	// Stale returns an error if an input of the old graph has a value that its image in the new graph lacks: the
	// running machine has no [link].
	Stale func() error

	softmax                           softmax
	q, k, v, bias                     source
	qShape, kShape, vShape, biasShape tensor.Shape // for the new node
	scales                            []scale      // factors to be applied to q
	flipped                           bool         // the output is the transpose of the new node's result
	parts                             []*Match     // attentions whose outputs are concatenated: the new node has all their heads
	apart                             []int        // of parts: the pattern that moves the output's heads after its tokens
	swaps, reshapes                   *G.Node      // nodes between scores and output, if any
}

// Miss is a node that might have been part of an attention, and the reason why it is not.
type Miss struct {
	Node   *G.Node
	Reason string
}

// source is an operand of an attention: the image of some earlier nodes of the given graph.
type source struct {
	node    *G.Node
	steps   []step
	shape   tensor.Shape
	scale   float64 // removed factor
	scales  []scale // removed factors that may change
	dropped int     // number of removed nodes
	copied  bool    // a transpose was added
}

// operand is an operand, its factors, and its shape for the new node.
type operand struct {
	source *source
	scales []scale
	shape  tensor.Shape
}

func (m *Match) operands() []operand {
	all := []operand{{&m.q, m.scales, m.qShape}, {&m.k, nil, m.kShape}, {&m.v, nil, m.vShape}}
	if m.Bias != nil {
		all = append(all, operand{&m.bias, m.bias.scales, m.biasShape})
	}
	return all
}

// inputs returns the nodes of the given graph from which the new node is made.
func (m *Match) inputs() (all []*G.Node) {
	for _, o := range m.operands() {
		all = append(all, o.source.node)
		for _, s := range o.scales {
			all = append(all, s.node)
		}
	}
	return all
}

// copyPays is the number of queries from which on a transposed copy of keys or of values by Gorgonia saves more time
// than it costs.
const copyPays = 16

// match finds the attention in g.
func (g *given) match() (matches []*Match, misses []Miss) {
	all, misses := g.softmaxes()
	for _, s := range all {
		m := &Match{softmax: s, Scale: 1}
		if reason := g.matchAt(m); reason != "" {
			misses = append(misses, Miss{s.node, reason})
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

// matchAt fills in m around its softmax. reason says what prevents a match.
func (g *given) matchAt(m *Match) (reason string) {
	shape, axis := m.softmax.node.Shape(), m.softmax.axis
	last := len(shape) - 1
	if axis != last && axis != last-1 || last < 0 {
		return fmt.Sprintf("it goes along axis %d of %v, not the last one: transpose the scores, so that the keys are the last axis", axis, shape)
	}
	m.Keys = shape[axis]
	if axis != last {
		m.swaps = m.softmax.node
	}
	if reason = g.matchValues(m, axis != last); reason != "" {
		return reason
	}
	scores, masks, reason := g.matchScores(m, axis != last)
	if reason != "" {
		return reason
	}
	s, c := g.ops[scores.node], g.children[scores.node]
	if scores.flipped { // keys times queries
		m.q, m.k = g.source(c[1], !s.TransB, true), g.source(c[0], s.TransA, true)
	} else {
		m.q, m.k = g.source(c[0], s.TransA, true), g.source(c[1], !s.TransB, true)
	}
	m.Scale *= m.q.scale * m.k.scale * m.v.scale
	m.scales = slices.Concat(m.scales, m.q.scales, m.k.scales)
	for _, x := range m.scales {
		m.Scales = append(m.Scales, x.node)
	}
	return g.fit(m, scores, masks)
}

// placed is a node of matrices, which may be transposes of the intended matrices.
type placed struct {
	node    *G.Node
	flipped bool
}

// keys returns the size of the axis of keys of scores or weights.
func (p placed) keys() int {
	if s := p.node.Shape(); p.flipped {
		return s[len(s)-2]
	}
	return lastAxis(p.node)
}

// keyAxis returns the axis of the keys.
func (p placed) keyAxis() int {
	if p.flipped {
		return p.node.Dims() - 2
	}
	return p.node.Dims() - 1
}

// shape returns the shape of the intended matrices.
func (p placed) shape() tensor.Shape {
	s := p.node.Shape().Clone()
	if p.flipped {
		swapLast(s)
	}
	return s
}

// through goes from n, which is scores or weights, to next, which has the same numbers: by a Reshape or a
// transposition of matrices in either direction.
func (g *given) through(m *Match, at placed, n, next *G.Node) (to placed, ok bool) {
	to = placed{next, at.flipped}
	switch g.kind(n) {
	case stock.Reshape:
		x, y := at.node.Shape(), next.Shape()
		if len(x) < 2 || len(y) < 2 || !slices.Equal(x[len(x)-2:], y[len(y)-2:]) {
			m.reshapes = n
		}
		return to, true
	case stock.Transpose:
		pattern := slices.Clone(g.ops[n].Pattern)
		if swapLast(pattern); isIdentity(pattern) {
			m.swaps, to.flipped = n, !at.flipped
			return to, true
		}
	case stock.Dropout:
		if g.ops[n].Idle {
			m.Dropouts = append(m.Dropouts, n)
			return to, true
		}
	}
	return to, false
}

// mixed returns why matrices that are both transposed and reshaped are not followed: their rows have moved.
func (m *Match) mixed() (reason string) {
	if m.swaps == nil || m.reshapes == nil {
		return ""
	}
	return fmt.Sprintf("its matrices are transposed, at %s, and reshaped, at %s: transpose queries, keys or values instead, or reshape those", stock.Describe(m.swaps), stock.Describe(m.reshapes))
}

// matchValues goes from the softmax to the product of the weights and values.
func (g *given) matchValues(m *Match, flipped bool) (reason string) {
	for at := (placed{m.softmax.node, flipped}); ; {
		n, user := at.node, g.only(at.node)
		switch {
		case user == nil && g.users[n] == 1:
			return "its result is a root, not the weights of values: if it is to be attention, multiply values by it"
		case user == nil:
			return fmt.Sprintf("its result is needed %d times, and not by a product with values alone: do not read the weights, and call Fuse before Grad", g.users[n])
		}
		if to, ok := g.through(m, at, user, user); ok {
			if reason = m.mixed(); reason != "" {
				return reason
			}
			at = to
			continue
		}
		children, op := g.children[user], g.ops[user]
		if op.Kind == stock.Dropout {
			if p, ok := dropoutOf(m.Dropout, op.Probability); ok {
				at.node, m.Dropout = user, p
				continue
			}
		}
		switch {
		case op.Kind == stock.Dropout:
			return fmt.Sprintf("its result goes into %s, which drops with probability %v: give it one from 0 on and below 1", stock.Describe(user), op.Probability)
		case op.Kind == stock.Mul || op.Kind == stock.Div:
			return fmt.Sprintf("its result goes into %s, not into a product with values: put that on the values, on the output, or as a mask on the scores", stock.Describe(user))
		case op.Kind != stock.Product:
			return fmt.Sprintf("its result goes into %s, not into a product with values: leave that out, or put it behind the product", stock.Describe(user))
		case len(n.Shape()) < 2 || at.keys() != m.Keys:
			return fmt.Sprintf("its rows are not those of %s: reshape it so that the last axis is that of the keys", stock.Describe(n))
		}
		switch {
		case children[0] == n && op.TransA == at.flipped:
			m.v = g.source(children[1], op.TransB, false)
		case children[1] == n && op.TransB != at.flipped:
			m.v, m.flipped = g.source(children[0], !op.TransA, false), true
		default:
			return fmt.Sprintf("it goes along axis %d of %v, and its product with values, %s, sums over the other axis: take the softmax along the keys, and multiply (queries, keys) by (keys, d)", m.softmax.axis, m.softmax.node.Shape(), stock.Describe(user))
		}
		g.known[user] = true
		m.Output = user
		return ""
	}
}

// dropoutOf returns the probability that one of two dropouts drops a weight, if attention has such a dropout. The
// first probability may be 0 for none.
func dropoutOf(p, q float64) (both float64, ok bool) {
	if both = q; p != 0 {
		both = 1 - (1-p)*(1-q)
	}
	return both, q > 0 && q < 1 && both < 1
}

// matchScores goes from the softmax back to the product of queries and keys. It returns the product and the masks in
// between.
func (g *given) matchScores(m *Match, flipped bool) (scores placed, masks []addend, reason string) {
	at, uses := placed{m.softmax.scores, flipped}, m.softmax.uses
	for {
		n := at.node
		switch {
		case g.users[n] != uses:
			return at, nil, fmt.Sprintf("its scores are needed elsewhere too, at %s: do not read them, and call Fuse before Grad", stock.Describe(n))
		case g.kind(n) == stock.Product && at.keys() != m.Keys:
			return at, nil, fmt.Sprintf("its rows are not those of %s: reshape it so that the last axis is that of the keys", stock.Describe(n))
		case g.kind(n) == stock.Product:
			g.known[n] = true
			return at, masks, ""
		}
		uses = 1
		if of := g.withoutMaximum(m, at); of != nil {
			at.node, uses = of, 2
			continue
		}
		var mask *addend
		if at, mask, reason = g.changed(m, at); reason != "" {
			return at, nil, reason
		}
		if mask != nil {
			masks = append(masks, *mask)
		}
	}
}

// changed returns the scores from which one node, at, is made. m records the node. mask is the addend, if the node
// adds.
func (g *given) changed(m *Match, at placed) (of placed, mask *addend, reason string) {
	n := at.node
	if len(g.children[n]) > 0 {
		if to, ok := g.through(m, at, n, g.children[n][0]); ok {
			return to, nil, m.mixed()
		}
	}
	switch g.kind(n) {
	case stock.Mul, stock.Div:
		child, s, ok := g.scaled(n, true)
		if !ok {
			return at, nil, g.badScale(n)
		}
		m.Scale *= s.number
		if s.node != nil {
			m.scales = append(m.scales, s)
		}
		return placed{child, at.flipped}, nil, ""
	case stock.Add, stock.Sub:
		add, reason := g.masked(at)
		if reason != "" {
			return at, nil, reason
		}
		add.factor *= m.Scale // a scale after the mask scales the mask too
		add.scales = slices.Clone(m.scales)
		if len(add.numbers) != 1 || !finite(add.numbers[0]) { // SoftMax ignores an addend that all scores share
			mask = &add
		}
		return placed{add.scores, at.flipped}, mask, ""
	}
	return at, nil, fmt.Sprintf("its scores come from %s, not from a product of queries and keys: %s", stock.Describe(n), g.instead(n))
}

// instead returns what to write in place of n, from which scores come.
func (g *given) instead(n *G.Node) string {
	switch g.kind(n) {
	case stock.Dropout:
		return "put it behind the softmax; for inference give it probability 0, or make a machine with EvalMode before Fuse"
	case stock.Transpose:
		return "move axes of queries and keys, in front of the product"
	case stock.Pure:
		return "where it is the tanh of a soft cap use Attention with WithSoftCap"
	}
	return "compute scores by BatchedMatMul, or Mul, and change them by a scale and a mask alone"
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }

// source goes from an operand of a product back to the node without its scales, if scales are to be removed, and
// without needless transposes. With swap the operand is wanted with its last two axes swapped.
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
		if child, by, ok := g.scaled(n, false); ok {
			s = g.source(child, swap, scales)
			s.scale *= by.number
			if by.node != nil {
				s.scales = append(s.scales, by)
			}
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
		if swapLast(pattern); isIdentity(pattern) { // the swap is the whole transpose
			s = g.source(child, true, scales)
			s.copied = false // a transpose that has to stay was in the given graph
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
		s = s.then(step{pattern: swapOf(rank)})
		s.copied = true
	}
	return s
}

// swapOf returns the pattern that swaps the last two axes.
func swapOf(rank int) []int {
	pattern := make([]int, rank)
	for i := range pattern {
		pattern[i] = i
	}
	swapLast(pattern)
	return pattern
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
func (g *given) fit(m *Match, scores placed, masks []addend) (reason string) {
	outer, rows := stack(scores.shape())
	if o, r := stack(placed{m.Output, m.flipped}.shape()); o != outer || r != rows {
		return fmt.Sprintf("its scores are %d matrices of %d rows and its weights %d of %d: reshape queries, keys or the output instead", outer, rows, o, r)
	}
	m.Queries = rows
	queries, biases := splitMasks(masks, rows, m.Keys)
	if queries > 1 {
		m.Causal, m.Queries = true, queries
	}
	if len(biases) > 1 {
		return fmt.Sprintf("it has %d masks that are not causal, at %s and %s: add them to each other first", len(biases), stock.Describe(biases[1].at.node), stock.Describe(biases[0].at.node))
	}
	switch {
	case !finite(m.Scale):
		return "its scales multiply to a number that is not finite: scale by finite ones"
	case m.k.copied && rows < copyPays, m.v.copied && rows < copyPays, m.k.copied && m.v.copied && rows < 2*copyPays:
		return fmt.Sprintf("its keys or values come transposed, and for %d queries a copy of them does not pay: keep them as (keys, d)", rows)
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
	sources := []*G.Node{m.q.node, m.k.node, m.v.node}
	if m.Bias != nil {
		sources = append(sources, m.bias.node)
	}
	if err := graph.Distinct(func(i int) string { return [...]string{"queries", "keys", "values", "the mask"}[i] }, sources...); err != nil {
		return err.Error()
	}
	t := m.Output.Dtype()
	if err := g.attention.Check(m.qShape, m.kShape, m.vShape, t); err != nil {
		return err.Error()
	}
	return ""
}

// stack returns a shape as a number of matrices and their rows.
func stack(s tensor.Shape) (matrices, rows int) {
	matrices = 1
	for _, n := range s[:len(s)-2] {
		matrices *= n
	}
	return matrices, s[len(s)-2]
}

// homemade reports that n looks like the product of weights and values where the weights are computed from another
// product through exponentials, without a SoftMax. Products with other nodes between them are other layers.
func (g *given) homemade(n *G.Node) (reason string) {
	if g.kind(n) != stock.Product || g.known[n] {
		return ""
	}
	for _, c := range g.children[n] {
		scores, by, softmax := g.exponentials(c)
		switch {
		case softmax: // has a line of its own
			return ""
		case scores != nil:
			g.known[scores] = true // one line for all products, such as those of gradients
			return fmt.Sprintf("its weights come from %s by way of %s, without a SoftMax: make them by SoftMax, or by Exp, Sum along the last axis and a division", stock.Describe(scores), stock.Describe(by))
		}
	}
	return ""
}

// route has the facts about a path back from weights.
type route struct {
	exp     bool // the path has an exponential
	surely  bool // which is not part of a common activation
	sum     bool // the path has a Sum
	altered bool // the path changes the exponential other than by a product or a quotient
}

// then returns the route past n, on to input i of n.
func (r route) then(kind stock.Kind, i int) route {
	switch kind {
	case stock.Exp:
		r.exp, r.surely = true, r.surely || r.sum || !r.altered
	case stock.LogSoftMax:
		r.exp, r.surely = true, true
	case stock.Sum:
		r.sum = true
	case stock.Reshape, stock.Transpose, stock.Repeat, stock.Mul, stock.Dropout:
	case stock.Div:
		r.altered = r.altered || i == 1
	default:
		r.altered = true
	}
	return r
}

// exponentials searches for scores from which weights are computed through exponentials: a product of the same size.
// It returns the scores and the last node of the path, or reports a softmax on the path. The weights of plain
// matrices may be the activations of a linear layer, such as 1/(1+exp(-x)). There only exponentials count that are
// the weights, except for factors, or that are summed.
func (g *given) exponentials(weights *G.Node) (scores, by *G.Node, softmax bool) {
	const far = 64
	type place struct {
		node *G.Node
		route
	}
	seen, next := map[place]bool{}, []place{{node: weights}}
	size, shape := weights.Shape().TotalSize(), weights.Shape()
	for len(next) > 0 && len(seen) < far {
		at := next[0]
		next = next[1:]
		if seen[at] {
			continue
		}
		seen[at] = true
		x, kind := at.node, g.kind(at.node)
		switch {
		case g.written[x] || kind == stock.SoftMax || kind == stock.SoftMaxGradient:
			return nil, nil, true
		case kind == stock.Size:
			continue
		case kind == stock.Product:
			found := at.exp && (at.surely || weights.Dims() > 2)
			if found && !g.known[x] && x.Shape().TotalSize() == size && slices.Contains(shape[len(shape)-2:], lastAxis(x)) {
				return x, by, false
			}
			continue
		}
		if by == nil && kind != stock.Reshape && kind != stock.Transpose {
			by = x
		}
		for i, c := range g.children[x] {
			next = append(next, place{c, at.then(kind, i)})
		}
	}
	return nil, nil, false
}
