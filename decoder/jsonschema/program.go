package jsonschema

import (
	"fmt"
	"slices"
	"unicode/utf8"
)

// program is a pushdown automaton over bytes: nodes of rules, which call other rules.
type program struct {
	nodes []node
	size  int // of all nodes, with their edges
	// need is the least depth of calls from each node to the end of its rule; more than mostDepth: there is none. spelled is the same for
	// texts that consist of single characters of the vocabulary.
	need, spelled []int32
	// plain maps the nodes that others makes to the nodes of plainNode's rule behind the same bytes.
	plain map[int32]int32
}

// node is a state of a rule.
type node struct {
	edges []edge  // by a byte
	to    []int32 // without a byte; of a call: the node behind it
	call  int32   // a rule that comes first; 0: none
	ret   bool    // the rule may end
}

// edge is a step by a byte in [low, high]. Edges of a node are disjoint.
type edge struct {
	low, high byte
	to        int32
}

const (
	mostDepth = 64      // calls within each other
	mostSize  = 1 << 18 // of a program
	mostWays  = 256     // alternatives of a node
	never     = mostDepth + 1
)

func (p *program) add(n node) int32 {
	p.size += 1 + len(n.edges) + len(n.to)
	p.nodes = append(p.nodes, n)
	return int32(len(p.nodes) - 1)
}

// full reports that the program is too large: the caller adds no more nodes.
func (p *program) full() bool { return p.size > mostSize }

// text adds a text before a node.
func (p *program) text(s string, next int32) int32 {
	for i := len(s) - 1; i >= 0; i-- {
		next = p.add(node{edges: []edge{{s[i], s[i], next}}})
	}
	return next
}

// space adds a space that may be left out before a node.
func (p *program) space(next int32) int32 {
	return p.add(node{edges: []edge{{' ', ' ', next}}, to: []int32{next}})
}

// value adds a value before a node.
func (p *program) value(entry, next int32) int32 { return p.add(node{call: entry, to: []int32{next}}) }

// The nodes of strings are the first ones of each program. Rules of strings begin behind the first quote, and end with the last one.
const (
	endNode    = iota // the end of a rule
	stringNode        // a string
	plainNode         // a string without escapes
	otherNodes
)

// newProgram returns a program with the rules of strings.
func newProgram() *program {
	p := &program{plain: map[int32]int32{}}
	p.add(node{ret: true})
	p.add(node{})
	p.add(node{})
	p.nodes[plainNode].edges = append(p.characters(plainNode), edge{'"', '"', endNode})
	hex := func(next int32) int32 {
		return p.add(node{edges: []edge{{'0', '9', next}, {'A', 'F', next}, {'a', 'f', next}}})
	}
	two := hex(hex(stringNode))
	three := hex(two)
	// \uD800 to \uDBFF and \uDC00 to \uDFFF are halves of a character.
	low := p.add(node{edges: []edge{{'C', 'F', two}, {'c', 'f', two}}})
	low = p.text(`\u`, p.add(node{edges: []edge{{'D', 'D', low}, {'d', 'd', low}}}))
	high := hex(hex(low))
	d := p.add(node{edges: []edge{{'0', '7', two}, {'8', '9', high}, {'A', 'B', high}, {'a', 'b', high}}})
	code := p.add(node{edges: []edge{{'0', '9', three}, {'A', 'C', three}, {'D', 'D', d}, {'E', 'F', three}, {'a', 'c', three}, {'d', 'd', d}, {'e', 'f', three}}})
	escape := []edge{{'u', 'u', code}}
	for _, b := range []byte(`"\/bfnrt`) {
		escape = append(escape, edge{b, b, stringNode})
	}
	p.nodes[stringNode].edges = append(p.characters(stringNode), edge{'"', '"', endNode}, edge{'\\', '\\', p.add(node{edges: escape})})
	return p
}

// characters returns the edges of all characters that need no escape.
func (p *program) characters(next int32) []edge {
	rest := func(low, high byte, next int32) int32 { return p.add(node{edges: []edge{{low, high, next}}}) }
	one := rest(0x80, 0xbf, next)
	two := rest(0x80, 0xbf, one)
	three := rest(0x80, 0xbf, two)
	return []edge{
		{' ', '!', next}, {'#', '[', next}, {']', 0x7f, next},
		{0xc2, 0xdf, one}, {0xe0, 0xe0, rest(0xa0, 0xbf, one)}, {0xe1, 0xec, two}, {0xed, 0xed, rest(0x80, 0x9f, one)}, {0xee, 0xef, two},
		{0xf0, 0xf0, rest(0x90, 0xbf, two)}, {0xf1, 0xf3, three}, {0xf4, 0xf4, rest(0x80, 0x8f, two)},
	}
}

// step returns the node behind a byte; -1: none.
func (n *node) step(b byte) int32 {
	for i := range n.edges {
		if e := &n.edges[i]; e.low <= b && b <= e.high {
			return e.to
		}
	}
	return -1
}

// others adds a rule of strings without escapes that are none of some names.
func (p *program) others(names []string) int32 {
	if len(names) == 0 {
		return plainNode
	}
	slices.Sort(names)
	return p.othersAt(names, 0, plainNode)
}

// othersAt is others behind the first n bytes of names that are equal so far. plain is the node of plainNode's rule behind these bytes.
func (p *program) othersAt(names []string, n int, plain int32) int32 {
	p.size++ // of the node that is added at the end
	var own []edge
	end := false
	for len(names) > 0 && !p.full() {
		if len(names[0]) == n {
			end, names = true, names[1:]
			continue
		}
		b := names[0][n]
		same := 1
		for same < len(names) && names[same][n] == b {
			same++
		}
		if next := p.nodes[plain].step(b); next > endNode { // else the name needs an escape
			own = append(own, edge{b, b, p.othersAt(names[:same], n+1, next)})
		}
		names = names[same:]
	}
	p.size--
	to := p.add(node{edges: overlay(p.nodes[plain].edges, own, end)})
	p.plain[to] = plain
	return to
}

// overlay returns edges with some of single bytes replaced, and without the quote that ends a name.
func overlay(all, own []edge, end bool) (edges []edge) {
	for _, e := range all {
		if e.to == endNode && end {
			continue
		}
		low := int(e.low)
		for _, o := range own { // in order
			if o.low >= e.low && o.low <= e.high {
				if low < int(o.low) {
					edges = append(edges, edge{byte(low), o.low - 1, e.to})
				}
				edges = append(edges, o)
				low = int(o.low) + 1
			}
		}
		if low <= int(e.high) {
			edges = append(edges, edge{byte(low), e.high, e.to})
		}
	}
	return edges
}

// choice adds a choice of texts.
func (p *program) choice(texts []string) int32 {
	slices.Sort(texts)
	return p.choiceAt(texts, 0)
}

func (p *program) choiceAt(texts []string, n int) int32 {
	p.size++ // of the node that is added at the end
	var x node
	for len(texts) > 0 && !p.full() {
		if len(texts[0]) == n {
			x.to, texts = []int32{endNode}, texts[1:]
			continue
		}
		b, same := texts[0][n], 1
		for same < len(texts) && texts[same][n] == b {
			same++
		}
		x.edges = append(x.edges, edge{b, b, p.choiceAt(texts[:same], n+1)})
		texts = texts[same:]
	}
	p.size--
	return p.add(x)
}

// finish computes the depths.
func (p *program) finish(v *Vocabulary) error {
	if p.full() {
		return fmt.Errorf("jsonschema: the schema is too large: more than %d states, of which minItems and maxItems take as many as they say: %w", mostSize, ErrUnsupported)
	}
	p.need = p.depths(func(n *node, e edge) int32 { return e.to })
	p.spelled = p.need
	if !v.complete {
		p.spelled = p.depths(func(n *node, e edge) int32 { return p.spell(v, e) })
	}
	return nil
}

// spell returns the node behind a character of the vocabulary that begins with an edge; -1: none.
func (p *program) spell(v *Vocabulary, e edge) int32 {
	for b := int(e.low); b <= int(e.high); b++ {
		if v.characters[string([]byte{byte(b)})] {
			return e.to
		}
	}
	// A character of several bytes in a text is a chain.
	text := []byte{e.low}
	for e.low == e.high && len(text) <= utf8.UTFMax {
		if v.characters[string(text)] {
			return e.to
		}
		next := &p.nodes[e.to]
		if len(next.edges) != 1 || len(next.to) > 0 || next.ret {
			break
		}
		e = next.edges[0]
		text = append(text, e.low)
	}
	return -1
}

// depths computes the least depth from each node to the end of its rule.
func (p *program) depths(step func(n *node, e edge) int32) []int32 {
	depth := make([]int32, len(p.nodes))
	before := make([][]int32, len(p.nodes)) // the nodes that depend on a node
	var todo []int32
	for i := range p.nodes {
		depth[i] = never
		n := &p.nodes[i]
		if n.ret {
			depth[i] = 0
			todo = append(todo, int32(i))
		}
		for _, e := range n.edges {
			if to := step(n, e); to >= 0 {
				before[to] = append(before[to], int32(i))
			}
		}
		for _, to := range n.to {
			before[to] = append(before[to], int32(i))
		}
		if n.call > 0 {
			before[n.call] = append(before[n.call], int32(i))
		}
	}
	for len(todo) > 0 {
		last := len(todo) - 1
		to := todo[last]
		todo = todo[:last]
		for _, i := range before[to] {
			x := depth[to]
			if n := &p.nodes[i]; n.call > 0 {
				x = min(max(1+depth[n.call], depth[n.to[0]]), never)
			}
			if x < depth[i] {
				depth[i] = x
				todo = append(todo, i)
			}
		}
	}
	return depth
}
