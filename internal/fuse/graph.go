package fuse

import (
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/stock"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// given has the facts about the given graph.
type given struct {
	attention Attention
	all       []*G.Node // of the graph
	roots     []*G.Node // the given roots and all statements
	nodes     []*G.Node // nodes that the roots need, in the order of the graph
	at        map[*G.Node]int
	children  map[*G.Node][]*G.Node
	ops       map[*G.Node]stock.Op
	users     map[*G.Node]int // how often a node is an input of others or a root
	user      map[*G.Node]*G.Node
	constant  map[*G.Node]G.Value // values computed from constants; nil: not constant
	known     map[*G.Node]bool    // products on both sides of a SoftMax
	ofScores  map[*G.Node]bool    // results of isOfScores
	written   map[*G.Node]bool    // softmaxes and near softmaxes without a SoftMax, and their exponentials
}

func newGiven(roots []*G.Node, attention Attention) (*given, error) {
	g := &given{
		attention: attention,
		at:        make(map[*G.Node]int), children: make(map[*G.Node][]*G.Node), ops: make(map[*G.Node]stock.Op),
		users: make(map[*G.Node]int), user: make(map[*G.Node]*G.Node), constant: make(map[*G.Node]G.Value), known: make(map[*G.Node]bool), ofScores: make(map[*G.Node]bool), written: make(map[*G.Node]bool),
	}
	all := roots[0].Graph().AllNodes()
	g.all = all
	g.roots = append(g.roots, roots...)
	for i, n := range all {
		g.at[n] = i
		if stock.Of(n).Kind == stock.Statement {
			g.roots = append(g.roots, n)
		}
	}
	needed := make(map[*G.Node]bool)
	var visit func(n *G.Node) error
	visit = func(n *G.Node) error {
		if needed[n] {
			return nil
		}
		if _, ok := g.at[n]; !ok {
			return errorf("%v is an input of others and not in their graph", n)
		}
		needed[n] = true
		g.ops[n], g.children[n] = stock.Of(n), stock.ChildrenOf(n)
		for _, c := range g.children[n] {
			if err := visit(c); err != nil {
				return err
			}
			if g.ops[n].Kind != stock.Size { // the broadcast of a mask reads the scores' shape, which is known
				g.users[c]++
				g.user[c] = n
			}
		}
		return nil
	}
	for _, r := range g.roots {
		if err := visit(r); err != nil {
			return nil, err
		}
		g.users[r]++
	}
	for _, n := range all {
		if needed[n] {
			g.nodes = append(g.nodes, n)
		}
	}
	return g, nil
}

func (g *given) kind(n *G.Node) stock.Kind { return g.ops[n].Kind }

// only returns the one user of n; nil if there are others, or if n is a root.
func (g *given) only(n *G.Node) *G.Node {
	if g.users[n] != 1 {
		return nil
	}
	return g.user[n]
}

// value returns the value of n in every run, if known: of a constant, or computed from constants and shapes alone.
func (g *given) value(n *G.Node) G.Value {
	v, known := g.constant[n]
	if !known {
		v = g.compute(n)
		g.constant[n] = v
	}
	return v
}

func (g *given) compute(n *G.Node) G.Value {
	switch g.kind(n) {
	case stock.Input:
		if !g.attention.Fixed(n) {
			return nil
		}
		fallthrough
	case stock.Constant:
		return n.Value()
	case stock.Size:
		child := g.children[n][0]
		if axis := g.ops[n].Axis; axis < child.Dims() {
			return scalarOf(n.Dtype(), child.Shape()[axis])
		}
		return nil
	}
	if !g.kind(n).Plain() {
		return nil
	}
	var in []G.Value
	for _, c := range g.children[n] {
		v := g.value(c)
		if v == nil {
			return nil
		}
		in = append(in, v)
	}
	return do(n, in)
}

// do computes n, and returns nil after a failure.
func do(n *G.Node, in []G.Value) (v G.Value) {
	defer func() {
		if recover() != nil {
			v = nil
		}
	}()
	v, err := n.Op().Do(in...)
	if err != nil || v == nil || !v.Shape().Eq(n.Shape()) {
		return nil
	}
	return v
}

// scalarOf returns the size n as Gorgonia's SizeOf does.
func scalarOf(t tensor.Dtype, n int) G.Value {
	switch t {
	case tensor.Float64:
		return G.NewF64(float64(n))
	case tensor.Float32:
		return G.NewF32(float32(n))
	case tensor.Int:
		return G.NewI(n)
	}
	return nil
}

// numbers returns the elements of a float value in row-major order, nil for other types.
func numbers(v G.Value) []float64 {
	switch v := v.(type) {
	case *G.F32:
		return []float64{float64(*v)}
	case *G.F64:
		return []float64{float64(*v)}
	case *tensor.Dense:
		if v == nil || !v.IsNativelyAccessible() || v.IsMasked() {
			return nil
		}
		switch v.Dtype() {
		case tensor.Float64:
			return dense.Elements[float64](v)
		case tensor.Float32:
			x := dense.Elements[float32](v)
			y := make([]float64, len(x))
			for i, f := range x {
				y[i] = float64(f)
			}
			return y
		}
	}
	return nil
}

// factor returns the number that all elements of n have in every run.
func (g *given) factor(n *G.Node) (x float64, ok bool) {
	all := numbers(g.value(n))
	if len(all) == 0 {
		return 0, false
	}
	for _, y := range all {
		if y != all[0] {
			return 0, false
		}
	}
	return all[0], true
}

// block returns the elements of n in every run: if these are a row of equal blocks, one block, and otherwise all. A
// mask that is broadcast to all heads is never computed in full.
func (g *given) block(n *G.Node) []float64 {
	switch g.kind(n) {
	case stock.Reshape:
		return g.block(g.children[n][0])
	case stock.Repeat:
		child := g.children[n][0]
		axis, shape := g.ops[n].Axis, child.Shape()
		if axis >= len(shape) || shape[axis] != 1 {
			break
		}
		// The axes after the repeated one are repeated in place.
		block := g.block(child)
		if n := len(block); n > 0 && (shape[:axis].TotalSize() == 1 || shape[axis:].TotalSize()%n == 0) {
			return block
		}
	}
	return numbers(g.value(n))
}
