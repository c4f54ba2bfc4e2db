package jsonschema

import (
	"encoding/binary"
	"sync"
)

// Schema is a compiled schema. A Schema is safe for concurrent use.
type Schema struct {
	*program
	vocabulary *Vocabulary
	start      *state

	mu     sync.Mutex // of all below, and of the states
	states map[string]*state
	stacks map[stackKey]*stack
	number uint32 // of stacks that were made
	size   int    // of states, without masks
	masks  int    // words
	key    []byte // memory of intern
	path   []*state
}

// Compile compiles a schema. The time and the memory are bounded, whatever the schema is.
func (v *Vocabulary) Compile(schema []byte) (*Schema, error) {
	root, err := parse(schema)
	if err != nil {
		return nil, err
	}
	b := newBuilder()
	entry, err := b.document(root)
	if err != nil {
		return nil, err
	}
	return b.compile(entry, v)
}

// state is where a text may be: a set of positions.
type state struct {
	at       []position
	complete bool // the text may end
	spelled  bool // single characters of the vocabulary lead to the end
	next     *[256]*state
	mask     []uint64 // nil: not computed yet
}

// position is a node in a rule, and the calls of the rule; nil: none.
type position struct {
	node  int32
	stack *stack
}

// stack is calls of rules. Equal stacks of one time are one stack.
type stack struct {
	up      *stack
	to      int32 // the node behind the call
	depth   int32
	number  uint32
	spelled bool // single characters of the vocabulary lead from to, and from those of the calls around, to the end
}

type stackKey struct {
	up uint32 // 0: none
	to int32
}

func (s *stack) levels() int32 {
	if s == nil {
		return 0
	}
	return s.depth
}

const (
	mostPositions = 512          // of a state
	mostVisits    = 2 * mostSize // of a closure: more than a program has nodes
	mostStates    = 1 << 11
	mostStateSize = 1 << 17
	mostMasks     = 1 << 20 // words
)

// dead is the state without a way to the end.
var dead = &state{next: new([256]*state)}

func init() {
	for b := range dead.next {
		dead.next[b] = dead
	}
}

// forget forgets all states, which are computed again when they are needed.
func (s *Schema) forget() {
	s.states, s.stacks, s.size, s.masks = map[string]*state{}, map[stackKey]*stack{}, 0, 0
	if s.start != nil {
		s.start.next = nil
	}
}

// closure collects the positions that other positions reach without a byte.
type closure struct {
	schema   *Schema
	visited  map[position]bool
	at       []position
	complete bool
	spelled  bool // of allowed: single characters lead from a position to the end
}

func (s *Schema) closure() *closure { return &closure{schema: s, visited: map[position]bool{}} }

// visit adds a position. The depth of a position is that of its calls, and of the calls that the way to the end needs.
func (c *closure) visit(node int32, up *stack) {
	s := c.schema
	p := position{node, up}
	if up.levels()+s.need[node] > mostDepth || len(c.visited) >= mostVisits || c.visited[p] {
		return
	}
	n := &s.nodes[node]
	c.visited[p] = true
	if len(n.edges) > 0 {
		c.at = append(c.at, p)
	}
	switch {
	case n.call > 0:
		if up.levels()+s.need[n.to[0]] <= mostDepth && up.levels()+1+s.need[n.call] <= mostDepth {
			c.visit(n.call, s.push(up, n.to[0]))
		}
		return
	case n.ret && up == nil:
		c.complete = true
	case n.ret:
		c.visit(up.to, up.up)
	}
	for _, to := range n.to {
		c.visit(to, up)
	}
}

// push returns a stack with one more call.
func (s *Schema) push(up *stack, to int32) *stack {
	key := stackKey{to: to}
	if up != nil {
		key.up = up.number
	}
	x := s.stacks[key]
	if x == nil {
		s.number++
		x = &stack{up: up, to: to, depth: up.levels() + 1, number: s.number}
		x.spelled = (up == nil || up.spelled) && up.levels()+s.spelled[to] <= mostDepth
		s.stacks[key] = x
		s.size++
	}
	return x
}

// spelledAt reports whether single characters lead from a position to the end.
func (s *Schema) spelledAt(p position) bool {
	return (p.stack == nil || p.stack.spelled) && p.stack.levels()+s.spelled[p.node] <= mostDepth
}

// intern returns the state of a closure.
func (s *Schema) intern(c *closure) *state {
	if len(c.at) == 0 && !c.complete {
		return dead
	}
	x := &state{at: c.at, complete: c.complete, spelled: c.complete}
	if len(x.at) > mostPositions { // those that certainly lead on come first
		var first, last []position
		for _, p := range x.at {
			if s.spelledAt(p) {
				first = append(first, p)
			} else {
				last = append(last, p)
			}
		}
		x.at = append(first, last...)[:mostPositions]
	}
	s.key = s.key[:0]
	if x.complete {
		s.key = append(s.key, 1)
	}
	for _, p := range x.at {
		x.spelled = x.spelled || s.spelledAt(p)
		number := uint32(0)
		if p.stack != nil {
			number = p.stack.number
		}
		s.key = binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(s.key, uint32(p.node)), number)
	}
	if old := s.states[string(s.key)]; old != nil {
		return old
	}
	if len(s.states) >= mostStates || s.size >= mostStateSize {
		key := string(s.key)
		s.forget()
		s.key = append(s.key[:0], key...)
	}
	s.states[string(s.key)] = x
	s.size += len(x.at)
	return x
}

// step returns the state behind a byte; dead: there is none.
func (s *Schema) step(x *state, b byte) *state {
	if x.next == nil {
		x.next = new([256]*state)
	}
	if to := x.next[b]; to != nil {
		return to
	}
	c := s.closure()
	for _, p := range x.at {
		if to := s.nodes[p.node].step(b); to >= 0 {
			c.visit(to, p.stack)
		}
	}
	x.next[b] = s.intern(c)
	return x.next[b]
}

// allowed returns the mask of a state.
func (s *Schema) allowed(x *state) []uint64 {
	if x.mask != nil {
		return x.mask
	}
	v := s.vocabulary
	mask := make([]uint64, v.words)
	if x == dead {
		return mask
	}
	// Most tokens may come in a string. Those that do not end the string do not depend on what comes behind the string.
	behind := map[int32]*closure{}
	rest := s.closure()
	for _, p := range x.at {
		if _, ok := s.inString(p.node); !ok {
			rest.at = append(rest.at, p)
			continue
		}
		c := behind[p.node]
		if c == nil {
			c = s.closure()
			behind[p.node] = c
		}
		if up := p.stack; up == nil {
			c.complete = true
		} else {
			c.visit(up.to, up.up)
		}
		c.spelled = c.spelled || p.stack == nil || p.stack.spelled
	}
	for node, c := range behind {
		of, _ := s.inString(node)
		m := &v.strings[of]
		if c.spelled {
			for j, word := range m.inside {
				mask[j] |= word
			}
		}
		to, names := s.intern(c), map[int32]bool{}
		if of != node {
			s.namesAt(node, 0, names)
		}
		for _, exit := range m.exits {
			if !names[exit] {
				s.walk(to, exit, mask)
			}
		}
	}
	if len(rest.at) > 0 {
		to := x
		if len(rest.at) < len(x.at) {
			to = s.intern(rest)
		}
		s.walk(to, 0, mask)
	}
	if x.complete {
		for _, id := range v.ends {
			mask[id/64] |= 1 << (id % 64)
		}
	}
	if s.masks += len(mask); s.masks > mostMasks {
		s.forget()
	}
	x.mask = mask
	return mask
}

// inString returns the node of the strings of all programs whose tokens a node has, except for names that end there. With tokens for all
// bytes, that is so for the nodes that others makes, too.
func (s *Schema) inString(node int32) (of int32, ok bool) {
	if int(node) < len(s.vocabulary.strings) {
		return node, true
	}
	of, ok = s.plain[node]
	return of, ok && s.vocabulary.complete
}

// namesAt adds the nodes of the tree at which a name ends that may not end: names from a node that others made, and from a node of the tree.
func (s *Schema) namesAt(node, from int32, names map[int32]bool) {
	tree := s.vocabulary.tree
	for i := from + 1; i < tree[from].end; i = tree[i].end {
		to := s.nodes[node].step(tree[i].last)
		if _, ok := s.plain[to]; ok {
			s.namesAt(to, i, names)
		} else if to < 0 && tree[i].last == '"' {
			names[i] = true
		}
	}
}

// walk adds the tokens that begin with a node of the tree to a mask. x is the state behind the text of the node.
func (s *Schema) walk(x *state, node int32, mask []uint64) {
	if x == dead {
		return
	}
	v := s.vocabulary
	add := func(x *state, i int32) {
		if x.spelled {
			for _, id := range v.tokens(i) {
				mask[id/64] |= 1 << (id % 64)
			}
		}
	}
	root := &v.tree[node]
	s.path[root.depth] = x
	add(x, node)
	for i := node + 1; i < root.end; {
		n := &v.tree[i]
		to := s.step(s.path[n.depth-1], n.last)
		if to == dead {
			i = n.end
			continue
		}
		s.path[n.depth] = to
		add(to, i)
		i++
	}
}

// Constrain returns the constraint of a new text.
func (s *Schema) Constrain() *Constraint { return &Constraint{s, s.start} }

// Constraint tells which tokens a text may have: see Constraint of package decoder. A Constraint is not safe for concurrent use.
type Constraint struct {
	schema *Schema
	at     *state
}

// Allowed returns the tokens that may come next: token i has bit i%64 of element i/64. The caller does not change the slice.
func (c *Constraint) Allowed() []uint64 {
	c.schema.mu.Lock()
	defer c.schema.mu.Unlock()
	return c.schema.allowed(c.at)
}

// Accept continues the text by a token that Allowed returns.
func (c *Constraint) Accept(token int) {
	s := c.schema
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.vocabulary.text(token) {
		c.at = s.step(c.at, b)
	}
}
