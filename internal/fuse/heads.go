package fuse

import (
	"slices"

	"gorgonia.org/leanattention/internal/stock"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// joinHeads replaces attentions of one head each, whose queries, keys and values are slices of the same projections
// and whose outputs go into one Concat, by one attention of all heads. Both compute the same. The parts are kept for
// the case that the whole can't be built.
func (g *given) joinHeads(matches []*Match) []*Match {
	of := make(map[*G.Node]*Match)
	for _, m := range matches {
		of[m.Output] = m
	}
	for _, n := range g.nodes {
		if g.kind(n) != stock.Concat {
			continue
		}
		var parts []*Match
		for _, c := range g.children[n] {
			if m := of[c]; m != nil && g.only(c) == n {
				parts = append(parts, m)
			}
		}
		if len(parts) < 2 || len(parts) != len(g.children[n]) {
			continue
		}
		if joined := g.join(n, parts); joined != nil {
			matches = slices.DeleteFunc(slices.Clone(matches), func(m *Match) bool { return slices.Contains(parts, m) })
			matches = append(matches, joined)
		}
	}
	slices.SortStableFunc(matches, func(x, y *Match) int { return g.at[x.softmax.node] - g.at[y.softmax.node] })
	return matches
}

// join returns the attention whose output is the Concat of the parts' outputs; nil if there is none.
func (g *given) join(concat *G.Node, parts []*Match) *Match {
	first, rank := parts[0], concat.Dims()
	if g.ops[concat].Axis != rank-1 || rank < 2 || rank > 3 {
		return nil
	}
	for _, m := range parts {
		if m.flipped || m.Output.Dims() != rank || m.Queries != first.Queries || m.Queries != m.Output.Shape()[rank-2] || m.Keys != first.Keys ||
			m.Scale != first.Scale || m.Causal != first.Causal || m.Dropout != first.Dropout || !slices.Equal(m.scales, first.scales) ||
			m.Bias != first.Bias || m.BiasScale != first.BiasScale || !slices.Equal(m.bias.scales, first.bias.scales) {
			return nil
		}
	}
	m := *first
	m.Output, m.parts, m.apart = concat, parts, headsOf(rank, len(parts))
	m.Heads, m.KVHeads = len(parts)*first.Heads, len(parts)*first.Heads
	m.Dropouts = nil
	for _, p := range parts {
		m.Dropouts = append(m.Dropouts, p.Dropouts...)
	}
	for _, o := range []struct {
		of    func(m *Match) *source
		shape *tensor.Shape
	}{
		{func(m *Match) *source { return &m.q }, &m.qShape},
		{func(m *Match) *source { return &m.k }, &m.kShape},
		{func(m *Match) *source { return &m.v }, &m.vShape},
	} {
		var all []*source
		for _, p := range parts {
			all = append(all, o.of(p))
		}
		joined := g.joinSources(all)
		if joined == nil {
			return nil
		}
		*o.of(&m) = *joined
		*o.shape = joined.shape
	}
	if m.Bias != nil {
		// Each head has one matrix of scores for each sequence, and the same bias.
		m.biasShape = first.biasShape.Clone()
		if b := first.biasShape; rank == 3 {
			m.biasShape = tensor.Shape{b[0], 1, b[len(b)-2], b[len(b)-1]}
		}
		if len(first.biasShape) != 3 {
			return nil
		}
	}
	if err := g.attention.Check(m.qShape, m.kShape, m.vShape, concat.Dtype()); err != nil {
		return nil
	}
	return &m
}

// joinSources returns the source of which consecutive slices of equal size along the last axis are cut, as heads.
func (g *given) joinSources(all []*source) *source {
	first := all[0].node
	rank, n := first.Dims(), len(all)
	for i, s := range all {
		op := g.ops[s.node]
		if op.Kind != stock.Slice || len(s.steps) > 0 || op.Axis != rank-1 || s.node.Dims() != rank ||
			!s.node.Shape().Eq(first.Shape()) || g.children[s.node][0] != g.children[first][0] ||
			op.From != g.ops[first].From+i*lastAxis(first) {
			return nil
		}
	}
	from := g.children[first][0]
	for g.kind(from) == stock.Whole {
		from = g.children[from][0]
	}
	if from.Dims() != rank {
		return nil
	}
	j := source{node: from, shape: from.Shape(), scale: 1}
	begin, end := g.ops[first].From, g.ops[all[n-1].node].To
	if end != begin+n*lastAxis(first) {
		return nil
	}
	if begin != 0 || end != lastAxis(from) {
		j = j.then(step{slice: G.S(begin, end), shape: append(from.Shape()[:rank-1].Clone(), end-begin)})
	}
	heads := headsOf(rank, n)
	j = j.then(step{shape: append(from.Shape()[:rank-1].Clone(), n, lastAxis(first))})
	return ptr(j.then(step{pattern: heads}))
}

func ptr[T any](x T) *T { return &x }

// headsOf returns the pattern that moves n heads before the tokens, and back.
func headsOf(rank, n int) []int {
	if rank == 2 {
		return []int{1, 0, 2}
	}
	return []int{0, 2, 1, 3}
}
