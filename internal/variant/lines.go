package variant

// Line is a set of scores of a head that read the same element of a tensor.
type Line int

const (
	AnyLine      Line = iota // no such set is known
	HeadLine                 // all scores of the head
	KeyLine                  // all scores of a key
	QueryLine                // all scores of a query
	DistanceLine             // all scores with one distance between query and key
)

// LineOf returns the line of scores that read the element of a partial derivative.
func (p *Program) LineOf(partial Partial) Line {
	line := HeadLine
	for _, arg := range p.Nodes[partial.Element].Arguments(p) {
		line = both(line, p.lineOf(arg))
	}
	return line
}

// both returns the line for indices of which one is the same on line x and one on line y.
func both(x, y Line) Line {
	switch {
	case x == y || y == HeadLine:
		return x
	case x == HeadLine:
		return y
	}
	return AnyLine
}

// lineOf returns the line of scores on which a node has one value.
func (p *Program) lineOf(node int) Line {
	n := &p.Nodes[node]
	if q, k, ok := p.slopes(node); ok && q != 0 && q == -k {
		return DistanceLine
	}
	switch n.Op {
	case Score:
		return AnyLine
	case Query:
		return QueryLine
	case Key:
		return KeyLine
	}
	line := HeadLine
	for _, arg := range n.Arguments(p) {
		line = both(line, p.lineOf(arg))
	}
	return line
}

// slopes returns by how much a node grows with the query and with the key. ok reports whether the node is a sum of multiples of both and of a
// number that depends on neither.
func (p *Program) slopes(node int) (query, key int, ok bool) {
	n := &p.Nodes[node]
	switch n.Op {
	case Query:
		return 1, 0, true
	case Key:
		return 0, 1, true
	case Add, Subtract:
		if n.Kind != Int {
			break
		}
		q0, k0, ok0 := p.slopes(n.Args[0])
		q1, k1, ok1 := p.slopes(n.Args[1])
		if n.Op == Subtract {
			q1, k1 = -q1, -k1
		}
		return q0 + q1, k0 + k1, ok0 && ok1
	}
	return 0, 0, n.Needs&(NeedsScore|NeedsQuery|NeedsKey) == 0
}
