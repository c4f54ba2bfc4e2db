package fuse

import (
	"fmt"
	"slices"

	"gorgonia.org/leanattention/internal/stock"

	G "gorgonia.org/gorgonia"
)

// builder makes the new graph. Gorgonia runs nodes in the order in which they were made, as far as their inputs
// allow, and overwrites values without later readers. Gorgonia treats the result of a Reshape as a value of its own,
// though the memory is shared, so graphs may depend on that order more than they show. Nodes are made in the order of
// the old graph, and an attention at the position of its output: its operands are needed as long as before.
type builder struct {
	old       *given
	g         *G.ExprGraph
	link      *link
	all       []*Match
	matches   map[*G.Node]*Match // by their outputs
	needed    map[*G.Node]bool
	images    map[*G.Node]*G.Node
	attention map[*Match]*G.Node
}

// newBuilder plans the new graph. Matches that can't be part of the new graph are left out, with the reasons.
func newBuilder(old *given, matches []*Match) (b *builder, misses []Miss) {
	b = &builder{old: old, g: G.NewGraph(), images: make(map[*G.Node]*G.Node), attention: make(map[*Match]*G.Node)}
	for {
		b.plan(matches)
		bad, reason := b.misfit(matches)
		if bad == nil {
			b.all = matches
			return b, misses
		}
		at := slices.Index(matches, bad)
		matches = slices.Replace(slices.Clone(matches), at, at+1, bad.parts...)
		if bad.parts == nil {
			misses = append(misses, Miss{bad.softmax.node, reason})
		}
	}
}

func (b *builder) plan(matches []*Match) {
	b.matches, b.needed = make(map[*G.Node]*Match), make(map[*G.Node]bool)
	for _, m := range matches {
		b.matches[m.Output] = m
	}
	for _, r := range b.old.roots {
		b.need(r)
	}
}

// misfit returns a match that can't be built, and the reason; nil if there is none.
func (b *builder) misfit(matches []*Match) (m *Match, reason string) {
	for _, m := range matches {
		if !b.needed[m.Output] {
			return m, "its product with values is part of another attention: make that product a root to keep this one"
		}
		if n := b.overwrites(m); n != nil {
			return m, fmt.Sprintf("%s may overwrite an operand before all are there: make that node behind the attention", stock.Describe(n))
		}
	}
	return nil, ""
}

// overwrites returns a node that may overwrite an operand of m before the attention reads it. The attention reads
// later than the product of queries and keys did. The operand's own node is needed until then, so overwrites searches
// for a result that is written over another node of the same memory.
func (b *builder) overwrites(m *Match) *G.Node {
	for _, n := range b.old.nodes {
		if n == m.Output {
			break
		}
		if _, ok := n.Op().(G.UsePreallocDoer); !ok || !b.needed[n] || n.Op().OverwritesInput() < 0 {
			continue
		}
		written := b.old.children[n][n.Op().OverwritesInput()]
		for _, s := range m.inputs() {
			if written != s && b.old.memory(written) == b.old.memory(s) {
				return n
			}
		}
	}
	return nil
}

// memory returns the node whose memory n's value has.
func (g *given) memory(n *G.Node) *G.Node {
	for g.kind(n) == stock.Reshape || g.kind(n) == stock.Dropout {
		n = g.children[n][0]
	}
	return n
}

// inputs returns the nodes whose images are inputs of the image of n.
func (b *builder) inputs(n *G.Node) []*G.Node {
	if m := b.matches[n]; m != nil {
		return m.inputs()
	}
	return b.old.children[n]
}

func (b *builder) need(n *G.Node) {
	if b.needed[n] {
		return
	}
	b.needed[n] = true
	for _, c := range b.inputs(n) {
		b.need(c)
	}
}

func (b *builder) build() error {
	b.link = newLink(b.g, b.old.all)
	for _, n := range b.old.nodes {
		if b.needed[n] {
			if err := b.make(n); err != nil {
				return err
			}
		}
	}
	for _, n := range b.old.nodes { // nodes that Grad left behind
		for _, of := range n.DerivOf() {
			if b.images[n] != nil && b.images[of] != nil {
				G.SetDerivOf(b.images[n], b.images[of])
			}
		}
	}
	return nil
}

// make makes the image of n, after the images of its inputs.
func (b *builder) make(n *G.Node) (err error) {
	if b.images[n] != nil {
		return nil
	}
	for _, c := range b.inputs(n) {
		if err = b.make(c); err != nil {
			return err
		}
	}
	if m := b.matches[n]; m != nil {
		b.images[n], err = b.attend(m)
	} else {
		b.images[n], err = b.copy(n)
	}
	return err
}

// copy makes a node like n with the images of its inputs.
func (b *builder) copy(n *G.Node) (*G.Node, error) {
	if b.old.kind(n) == stock.Constant {
		return b.g.AddNode(G.NewConstant(n.Value(), G.WithName(stock.NameOf(n)))), nil
	}
	var children G.Nodes
	for _, c := range b.old.children[n] {
		children = append(children, b.images[c])
	}
	opts := []G.NodeConsOpt{G.In(b.g), G.WithName(stock.NameOf(n))}
	if b.old.kind(n) != stock.Statement {
		opts = append([]G.NodeConsOpt{stock.TypeOf(n)}, opts...)
	}
	if s := n.Shape(); len(s) > 0 {
		opts = append(opts, G.WithShape(s...))
	}
	if n.Op() != nil {
		opts = append(opts, G.WithOp(n.Op()), G.WithChildren(slices.Clone(children)))
	}
	image := G.NewUniqueNode(opts...)
	if err := sure(image, children...); err != nil {
		return nil, err
	}
	if b.old.kind(n) == stock.Input {
		if v := n.Value(); v != nil {
			bind(image, v)
		}
		b.link.add(n, image)
	}
	return image, nil
}

// sure checks that Gorgonia did not merge a new node with another node that has other inputs.
func sure(n *G.Node, children ...*G.Node) error {
	if !slices.Equal(stock.ChildrenOf(n), children) {
		return errorf("%v has the 32-bit hash of a node with other inputs; rename an input", n)
	}
	return nil
}

// attend makes the attention of a match, and the nodes that give the result the shape of its output.
func (b *builder) attend(m *Match) (out *G.Node, err error) {
	var in []*G.Node
	for _, o := range m.operands() {
		n, err := b.operand(o)
		if err != nil {
			return nil, err
		}
		in = append(in, n)
	}
	var bias, seed *G.Node
	if m.Bias != nil {
		bias = in[3]
	}
	if m.Dropout != 0 {
		if seed, err = b.old.attention.Seed(in[0]); err != nil {
			return nil, err
		}
		in = slices.Insert(in, 3, seed)
	}
	m.Stale = b.link.stale
	n, err := b.old.attention.Node(in[0], in[1], in[2], seed, bias, m)
	if err != nil {
		return nil, err
	}
	if err = sure(n, in...); err != nil {
		return nil, err
	}
	b.attention[m] = n
	if out, err = m.asOutput(n); err != nil {
		return nil, err
	}
	if name := stock.NameOf(m.Output); name != "" {
		G.WithName(name)(out)
	}
	return out, nil
}

// operand makes an operand from the rest of its old nodes: scaled, and in the shape of the new node.
//
// A graph may overwrite a node without later readers, and a Reshape's input through the Reshape. Gradients read
// operands later than the attention does. So an operand is a node that the old products read too, an input, which
// stays, or memory of its own.
func (b *builder) operand(o operand) (n *G.Node, err error) {
	n = b.images[o.source.node]
	own := len(o.scales) > 0
	for _, s := range o.scales {
		if n, err = scaleBy(n, b.images[s.node], s.divides); err != nil {
			return nil, err
		}
	}
	for _, s := range o.source.steps {
		own = own || s.pattern != nil
		if n, err = s.apply(n); err != nil {
			return nil, err
		}
	}
	last, memory := step{shape: o.shape}, b.old.memory(o.source.node)
	changed := len(o.source.steps) > 0 || !last.idle(n) || o.source.dropped > 0 && memory != o.source.node
	if !own && changed && b.old.kind(memory) != stock.Input && b.old.kind(memory) != stock.Constant {
		return last.applyCopied(n)
	}
	return last.apply(n)
}

// asOutput makes the new node, n, equal to the old output, in memory of its own.
func (m *Match) asOutput(n *G.Node) (*G.Node, error) {
	if m.apart != nil {
		n, err := step{pattern: m.apart}.apply(n)
		if err != nil {
			return nil, err
		}
		return step{shape: m.Output.Shape()}.apply(n)
	}
	shape := placed{m.Output, m.flipped}.shape()
	if m.flipped {
		n, err := step{shape: shape}.apply(n)
		if err != nil {
			return nil, err
		}
		return step{pattern: swapOf(len(shape))}.apply(n)
	}
	if s := (step{shape: shape}); !s.idle(n) {
		return s.applyCopied(n)
	}
	return n, nil
}

// Prefixes of the names of inputs that leanattention.Default makes: constants, which Gorgonia would confuse with each
// other as constants.
const (
	ScaleName = "leanattention.scale("
	MaskName  = "leanattention.causal("
)
