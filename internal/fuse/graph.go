package fuse

import (
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/stock"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// given is what is known of the graph that was given.
type given struct {
	attention Attention
	all       []*G.Node // of the graph
	roots     []*G.Node // those that were given and all statements
	nodes     []*G.Node // that the roots need, in the order of the graph
	at        map[*G.Node]int
	children  map[*G.Node][]*G.Node
	ops       map[*G.Node]stock.Op
	users     map[*G.Node]int // how often a node is an input of others or a root
	user      map[*G.Node]*G.Node
	constant  map[*G.Node]G.Value // computed of constants; nil: it is not
	known     map[*G.Node]bool    // products on either side of a SoftMax
	ofScores  map[*G.Node]bool    // what isOfScores has found
	written   map[*G.Node]bool    // softmaxes without a SoftMax, or nearly so, and their exponentials
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
			if g.ops[n].Kind != stock.Size { // broadcasting a mask asks for the scores' shape, which is known
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

// only is the one node that uses n, and nil where there are others, or n is a
// root.
func (g *given) only(n *G.Node) *G.Node {
	if g.users[n] != 1 {
		return nil
	}
	return g.user[n]
}

// value is what n has at every run, as far as that is known: the value of a
// constant, or of something computed from constants and shapes alone.
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

// do is what n computes, nil if that fails.
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

// scalarOf is the size n as Gorgonia's SizeOf has it.
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

// numbers is the elements of a float value in row-major order, nil for others.
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

// factor is the number that all elements of n have, at every run.
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

// block is the elements of n, at every run, if those are a row of equal blocks:
// one of them, else all. A mask that is broadcast to all heads is never made so.
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
		// Everything behind the axis is repeated in place.
		block := g.block(child)
		if n := len(block); n > 0 && (shape[:axis].TotalSize() == 1 || shape[axis:].TotalSize()%n == 0) {
			return block
		}
	}
	return numbers(g.value(n))
}
