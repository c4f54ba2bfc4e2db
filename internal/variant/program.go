package variant

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
	"weak"
)

// ErrSource is wrapped by errors of [New].
var ErrSource = errors.New("variant")

// Limits of a Program.
const (
	maxText    = 4096 // bytes of an expression
	maxNodes   = 256  // of both expressions together
	maxDerived = 4096 // of these and their derivatives
	maxDepth   = 64
	// MaxTensors is the most tensors of a Program.
	MaxTensors = 4
	maxRank    = 4
)

// Kind is the type of a value.
type Kind uint8

const (
	Float Kind = iota
	Int
	Bool
)

func (k Kind) String() string { return [...]string{"float", "int", "bool"}[k] }

// Declared is a tensor that a Program reads: its name in the expressions, its rank, and whether its elements are ints.
type Declared struct {
	Name string
	Rank int
	Int  bool
}

// Source is what a Program is made of.
type Source struct {
	Score   string // "": the score itself
	Visible string // "": true
	Params  map[string]float64
	Tensors []Declared

	// Unnormalised means that the weight of a key is exp(score), not divided by the sum of all weights.
	Unnormalised bool
}

// Program is a checked Source. Programs of equal Sources are the same pointer, so a Program is compared by ==.
type Program struct {
	Nodes    []Node     // arguments come before their users
	Score    int        // index of the node
	Visible  int        // index of the node; -1: every key is visible
	Slope    int        // index of the derivative of Score by the score
	Partials []Partial  // the derivatives of Score by elements of tensors
	Tensors  []Declared // sorted by name
	Params   map[string]float64

	Unnormalised bool

	text string

	once   sync.Once // of WithoutCausal
	rest   *Program
	causal bool
}

// Partial is the derivative of Score by a node that is an element of a tensor.
type Partial struct{ Element, By int }

// String returns the Program's source in a canonical form.
func (p *Program) String() string {
	if p == nil {
		return ""
	}
	return p.text
}

// canonical returns s as text, in which equal Sources are equal.
func (s *Source) canonical() string {
	var b strings.Builder
	fmt.Fprintf(&b, "score %q visible %q unnormalised %t", s.Score, s.Visible, s.Unnormalised)
	names := make([]string, 0, len(s.Params))
	for name := range s.Params {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		fmt.Fprintf(&b, " %s=%x", name, math.Float64bits(s.Params[name]))
	}
	for _, t := range s.Tensors {
		fmt.Fprintf(&b, " %s[%d]%t", t.Name, t.Rank, t.Int)
	}
	return b.String()
}

var (
	programsMu sync.Mutex
	programs   = map[string]weak.Pointer[Program]{}
)

// New returns the Program of a Source. Errors wrap [ErrSource], and name the part of the expression.
func New(s Source) (*Program, error) {
	s.Tensors = slices.Clone(s.Tensors)
	slices.SortFunc(s.Tensors, func(a, b Declared) int { return strings.Compare(a.Name, b.Name) })
	text := s.canonical()
	if p := known(text); p != nil {
		return p, nil
	}
	p, err := compile(&s)
	if err != nil {
		return nil, fmt.Errorf("%w: %v", ErrSource, err)
	}
	p.text, p.Params = text, maps.Clone(s.Params)
	programsMu.Lock()
	defer programsMu.Unlock()
	if was := programs[text].Value(); was != nil {
		return was, nil
	}
	programs[text] = weak.Make(p)
	runtime.AddCleanup(p, forget, text)
	return p, nil
}

func known(text string) *Program {
	programsMu.Lock()
	defer programsMu.Unlock()
	return programs[text].Value()
}

// forget removes a Program that nothing refers to.
func forget(text string) {
	programsMu.Lock()
	defer programsMu.Unlock()
	if programs[text].Value() == nil {
		delete(programs, text)
	}
}

// Positions reports whether positions of queries matter.
func (p *Program) Positions() bool {
	if p == nil {
		return false
	}
	for i := range p.Nodes {
		if p.Nodes[i].Op == Query {
			return true
		}
	}
	return false
}

// ChangesScores reports whether Score is not the score itself.
func (p *Program) ChangesScores() bool { return p.Nodes[p.Score].Op != Score }

// Term returns the node t if Score is score + t or t + score, or with minus score - t, and t does not depend on the score; -1 otherwise.
func (p *Program) Term() (t int, minus bool) {
	n := &p.Nodes[p.Score]
	if n.Op != Add && n.Op != Subtract {
		return -1, false
	}
	a, b := n.Args[0], n.Args[1]
	if n.Op == Add && p.Nodes[b].Op == Score {
		a, b = b, a
	}
	if p.Nodes[a].Op != Score || p.Nodes[b].Needs&NeedsScore != 0 {
		return -1, false
	}
	return b, n.Op == Subtract
}

// Linear reports whether the derivative of Score by the score is 1.
func (p *Program) Linear() bool {
	n := &p.Nodes[p.Slope]
	return n.Op == Constant && n.Value == 1
}
