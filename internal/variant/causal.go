package variant

import "slices"

// WithoutCausal returns a Program that equals p for keys up to the query, if p hides all others by the condition key <= query: Visible is that
// condition, or it and others. The Program is nil if it changes nothing. Engines have a mask for that condition.
func (p *Program) WithoutCausal() (rest *Program, ok bool) {
	p.once.Do(func() { p.rest, p.causal = p.splitCausal() })
	return p.rest, p.causal
}

func (p *Program) splitCausal() (rest *Program, ok bool) {
	if p.Visible < 0 {
		return nil, false
	}
	own := &Program{
		Nodes: slices.Clone(p.Nodes), Score: p.Score, Visible: p.Visible, Slope: p.Slope, Partials: p.Partials, Tensors: p.Tensors, Params: p.Params,
		Unnormalised: p.Unnormalised, text: p.text + " for keys up to the query",
	}
	switch whole, found := own.dropCausal(p.Visible); {
	case !found:
		return nil, false
	case whole:
		own.Visible = -1
	}
	if own.Visible < 0 && !own.Unnormalised && !own.ChangesScores() {
		return nil, true
	}
	return own, true
}

// dropCausal takes the condition key <= query out of a conjunction, node i. whole: node i is that condition. Other users of the conjunction
// get the same value for keys up to the query.
func (p *Program) dropCausal(i int) (whole, found bool) {
	n := &p.Nodes[i]
	switch n.Op {
	case LessEqual:
		whole = p.Nodes[n.Args[0]].Op == Key && p.Nodes[n.Args[1]].Op == Query
		return whole, whole
	case And:
		for k, arg := range n.Args[:2] {
			whole, found := p.dropCausal(arg)
			if whole {
				*n = p.Nodes[n.Args[1-k]]
			}
			if found {
				return false, true
			}
		}
	}
	return false, false
}
