package fuse

import (
	"fmt"
	"math"
	"slices"

	"gorgonia.org/leanattention/internal/stock"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// hidden is the largest number that a mask adds to the score of a hidden key. In float32 exp(-104) is 0, so -10000
// acts as -Inf unless a row's scores are some 9900 apart.
const hidden = -1e4

// causalQueries returns the number of queries for which an additive mask, in rows of one number for each key, is
// causal: row i is query i modulo queries, and sees the keys j <= keys-queries+i, at least one. The result is 1 for a
// mask that hides nothing, and 0 for a mask that is not causal.
func causalQueries(mask []float64, keys int) (queries int) {
	rows := len(mask) / keys
	for i := range rows {
		if seen(mask[i*keys:(i+1)*keys]) == keys {
			queries = i + 1 // the last query of a head is the first that sees all keys
			break
		}
	}
	if queries == 0 || queries > keys || rows%queries != 0 {
		return 0
	}
	for i := range rows {
		if seen(mask[i*keys:(i+1)*keys]) != keys-queries+i%queries+1 {
			return 0
		}
	}
	return queries
}

// seen returns how many keys a row of a mask shows if those are the first keys, and -1 otherwise.
func seen(row []float64) int {
	n := 0
	for n < len(row) && row[n] == 0 {
		n++
	}
	for _, x := range row[n:] {
		if !(x <= hidden) {
			return -1
		}
	}
	return n
}

// addend is an addend of scores.
type addend struct {
	at      placed    // the node that adds
	scores  *G.Node   // the scores
	node    *G.Node   // the addend
	numbers []float64 // its value in every run, or a block of the value; nil: unknown
	factor  float64   // factor of the addend
	scales  []scale   // further factors
}

// masked returns the addend of the node at; reason says why a node that adds is none.
func (g *given) masked(at placed) (mask addend, reason string) {
	n := at.node
	c := g.children[n]
	mask = addend{at: at, scores: c[0], node: c[1], factor: 1}
	switch {
	case g.isOfScores(c[0]):
		if g.kind(n) == stock.Sub {
			mask.factor = -1
		}
	case !g.isOfScores(c[1]):
		return mask, fmt.Sprintf("its scores come from %s, not from a product of queries and keys: %s", stock.Describe(n), g.instead(n))
	case g.kind(n) == stock.Sub:
		return mask, fmt.Sprintf("its scores are taken away from something, at %s: scale them by -1 and add that", stock.Describe(n))
	default:
		mask.scores, mask.node = c[1], c[0]
	}
	mask.numbers = g.block(mask.node)
	if at.flipped && len(mask.numbers) > 1 {
		mask.numbers = transposed(mask.numbers, n.Shape())
	}
	return mask, ""
}

// transposed returns x with its matrices transposed. A whole number of x makes a tensor of the given shape. The
// result is nil if x does not consist of whole matrices.
func transposed(x []float64, shape tensor.Shape) []float64 {
	rows, columns := shape[len(shape)-2], shape[len(shape)-1]
	if len(x)%(rows*columns) != 0 {
		return nil
	}
	y := make([]float64, len(x))
	for at := range x {
		matrix, row, column := at/(rows*columns), at/columns%rows, at%columns
		y[(matrix*columns+column)*rows+row] = x[at]
	}
	return y
}

// isOfScores reports whether n may be the scores of a SoftMax: a product that may be scaled and masked.
func (g *given) isOfScores(n *G.Node) bool {
	is, known := g.ofScores[n]
	if known {
		return is
	}
	switch g.kind(n) {
	case stock.Product:
		is = true
	case stock.Reshape:
		is = g.isOfScores(g.children[n][0])
	case stock.Mul, stock.Div, stock.Add, stock.Sub:
		is = g.isOfScores(g.children[n][0]) || g.isOfScores(g.children[n][1])
	}
	g.ofScores[n] = is
	return is
}

// splitMasks returns the number of queries for which the masks are causal, 1 if no mask is causal, and the masks that
// are biases.
func splitMasks(masks []addend, rows, keys int) (queries int, biases []addend) {
	var sum []float64
	for _, m := range masks {
		if m.numbers == nil || len(m.scales) > 0 {
			biases = append(biases, m)
		} else {
			sum = sumOfMasks(sum, m.numbers, m.factor)
		}
	}
	if sum == nil {
		return 1, biases
	}
	if len(sum)%keys == 0 {
		queries = causalQueries(sum, keys)
	}
	if queries == 0 || rows%queries != 0 {
		return 1, masks
	}
	return queries, biases
}

// fitBias makes a mask the bias of m.
func (g *given) fitBias(m *Match, scores placed, mask addend) (reason string) {
	n := mask.node
	for g.kind(n) == stock.Repeat { // the new node broadcasts the bias
		child, axis := g.children[n][0], g.ops[n].Axis
		if axis == mask.at.keyAxis() || child.Dims() != n.Dims() || child.Shape()[axis] != 1 {
			break
		}
		n = child
	}
	m.Bias, m.BiasScale = n, mask.factor
	m.bias = source{node: n, shape: n.Shape(), scales: mask.scales}
	if mask.at.flipped {
		m.bias = m.bias.then(step{pattern: swapOf(n.Dims())})
	}
	if !finite(mask.factor) || mask.factor == 0 {
		return fmt.Sprintf("the scales of its mask multiply to %v: add the mask behind the scale", mask.factor)
	}
	if g.computedFrom(n, scores.node) {
		return fmt.Sprintf("its mask, %s, is computed from its scores: leave it out where it is one number for each query, else compute it from something else", stock.Describe(n))
	}
	if m.biasShape = m.shareBias(m.bias.shape, mask.at.shape(), scores.shape()); m.biasShape == nil {
		return fmt.Sprintf("its mask, %s of %v, is repeated in a way that is not that of its heads and queries: give it the scores' axes, each of full size or 1", stock.Describe(n), n.Shape())
	}
	return ""
}

// computedFrom reports whether n is computed from of.
func (g *given) computedFrom(n, of *G.Node) bool {
	seen := map[*G.Node]bool{}
	var find func(n *G.Node) bool
	find = func(n *G.Node) bool {
		if n == of {
			return true
		}
		if seen[n] {
			return false
		}
		seen[n] = true
		return slices.ContainsFunc(g.children[n], find)
	}
	return find(n)
}

// shareBias returns the shape, for the new node, of a bias that is added to scores of shape at, which are a product
// of shape product. Repeated axes have size 1. nil: there is no such shape.
func (m *Match) shareBias(bias, at, product tensor.Shape) tensor.Shape {
	scores := append(m.qShape[:len(m.qShape)-1].Clone(), m.Keys)
	if slices.Equal(bias, at) {
		return scores // one number for each score
	}
	if len(bias) != len(at) || len(at) < 2 || bias[len(bias)-1] != m.Keys {
		return nil
	}
	if slices.Equal(at, scores) {
		return bias
	}
	// The axes before the rows are shared all or not at all. So are the axes that form the rows: queries, and in a
	// group heads too.
	lead, rows := bias[:len(bias)-2].TotalSize(), bias[len(bias)-2]
	outer, all := stack(product)
	if o, r := stack(at); (lead != 1 || rows != 1) && (o != outer || r != all || lead != 1 && lead != outer) {
		return nil
	}
	front := len(scores) - 2
	if m.Queries < all {
		front = 1
	}
	for i := range len(scores) - 1 {
		if i < front && lead == 1 || i >= front && rows == 1 {
			scores[i] = 1
		}
	}
	return scores
}

// sumOfMasks adds y, scaled, to x. Both are blocks, of which a whole number makes the mask; a nil x is zeros. An
// addend greater than 0 is no mask, even if another one cancels it: the scores lose digits.
func sumOfMasks(x, y []float64, scale float64) []float64 {
	a, b := max(len(x), 1), len(y)
	for b != 0 {
		a, b = b, a%b
	}
	sum := make([]float64, max(len(x), 1)/a*len(y)) // a common multiple of both lengths
	for i := range sum {
		if len(x) > 0 {
			sum[i] = x[i%len(x)]
		}
		if add := y[i%len(y)]; add == 0 {
			continue
		} else if add *= scale; add <= 0 {
			sum[i] += add
		} else {
			sum[i] = math.NaN()
		}
	}
	return sum
}
