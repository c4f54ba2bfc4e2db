// Package expression evaluates the expressions of variants (package variant) for the keys of a row, as vectors.
package expression

import (
	"math/bits"
	"slices"
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/vector"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/variant"
)

// Most is the most keys of an evaluation.
const Most = 256

// level says for what a node has a value of its own.
type level uint8

const (
	ofRow    level = iota // one number: the node depends on neither score nor key
	ofKeys                // a vector that rows share: the node depends on the key, and not on score, query or head
	ofScores              // a vector
)

func levelOf(n *variant.Node) level {
	switch {
	case n.Needs&variant.NeedsScore != 0:
		return ofScores
	case n.Needs&variant.NeedsKey == 0:
		return ofRow
	case n.Needs&(variant.NeedsQuery|variant.NeedsHead) == 0:
		return ofKeys
	}
	return ofScores
}

// Run evaluates a program. It is for one goroutine. [Run.Open], [Run.Keys] and [Run.Row] are called in this order, the later ones many times for
// a call of an earlier one.
type Run[F cpu.Real] struct {
	p       *variant.Program
	tensors []variant.Tensor
	seq     int

	roots  []int
	nodes  []int     // those that are computed, in order
	level  []level   // by node, as the next
	num    []float64 // the value of a node of a row
	floats [][]F     // vectors of floats; of a node of a row, num as a vector of length full
	ints   [][]int32 // vectors of ints and bools, in the same way
	full   []int     // of a node of a row: how many elements of its vector are num
	bounds []variant.Interval

	// If the score becomes the sum or the difference of itself and a term without the score, only the term is computed.
	term  int // -1: none
	minus bool

	codes    []stepCode                                     // of nodes
	step     func(code uint64, dst, a, b, c *uint32, n int) // of the tier; nil: none
	divisors []int32
	natural  []F // ln 4, by which scores are multiplied
	internal []F // log4(e)
	scaled   []F // the term
}

// Prepare makes v evaluate p, and further nodes of p.
func (v *Run[F]) Prepare(p *variant.Program, further ...int) {
	term, minus := p.Term()
	root := p.Score
	if term >= 0 {
		root = term
	}
	roots := append([]int{root}, further...)
	if p.Visible >= 0 {
		roots = append(roots, p.Visible)
	}
	v.step = stepFor[F]()
	if v.p == p && slices.Equal(v.roots, roots) {
		return
	}
	v.p, v.roots, v.term, v.minus = p, roots, term, minus
	n := len(p.Nodes)
	need := make([]bool, n)
	for _, i := range roots {
		need[i] = true
	}
	count := 0
	for i := n - 1; i >= 0; i-- {
		if need[i] {
			count++
		}
		for _, arg := range p.Nodes[i].Arguments(p) {
			need[arg] = need[arg] || need[i]
		}
	}
	v.nodes = v.nodes[:0]
	v.level, v.num, v.full = make([]level, n), make([]float64, n), make([]int, n)
	v.floats, v.ints, v.bounds = make([][]F, n), make([][]int32, n), make([]variant.Interval, n)
	floats, ints := dense.Make[F](Most*count), make([]int32, Most*count)
	v.divisors, v.codes = make([]int32, Most), make([]stepCode, n)
	v.natural, v.internal, v.scaled = dense.Make[F](Most), dense.Make[F](Most), dense.Make[F](Most)
	fill(v.natural, lean.Ln4)
	fill(v.internal, F(lean.Log4E))
	for i := range n {
		if !need[i] {
			continue
		}
		v.nodes = append(v.nodes, i)
		if args := p.Nodes[i].Arguments(p); len(args) > 0 {
			v.codes[i] = codes[p.Nodes[args[0]].Kind][p.Nodes[i].Op]
		}
		if v.level[i] = levelOf(&p.Nodes[i]); p.Nodes[i].Kind == variant.Float {
			v.floats[i] = cpu.Cut(&floats, Most)
		} else {
			v.ints[i], ints = ints[:Most], ints[Most:]
		}
		if n := &p.Nodes[i]; n.Op == variant.Constant {
			v.num[i] = float64(F(n.Value))
		}
	}
}

// Program returns the program of the last call of Prepare, or nil.
func (v *Run[F]) Program() *variant.Program { return v.p }

// Open sets the tensors, and the number of the sequence.
func (v *Run[F]) Open(tensors []variant.Tensor, seq int) { v.tensors, v.seq = tensors, seq }

// Tensors returns the tensors.
func (v *Run[F]) Tensors() []variant.Tensor { return v.tensors }

// Forget drops the tensors.
func (v *Run[F]) Forget() { v.tensors = nil }

// Sees returns variant.Never, Sometimes or Always: which of the keys within the bounds the queries within the bounds see.
func (v *Run[F]) Sees(b *variant.Bounds) int { return v.p.Sees(b, v.bounds) }

// Keys computes what n keys have in common for all rows. indices writes the indices of the keys.
func (v *Run[F]) Keys(n int, indices func(dst []int32)) {
	for _, i := range v.nodes {
		node := &v.p.Nodes[i]
		switch {
		case node.Op == variant.Key:
			indices(v.ints[i][:n])
			for k := n; k < padded(n); k++ {
				v.ints[i][k] = v.ints[i][n-1] // an index in range
			}
		case v.level[i] == ofKeys:
			v.vector(i, node, n)
		case v.level[i] == ofRow && node.Needs&(variant.NeedsQuery|variant.NeedsHead) == 0:
			v.number(i, node, 0, 0)
		}
	}
}

// Row changes the scores of a row, which have the factor log4(e), for the first len(scores) keys of Keys. With hides it hides keys: their scores
// become -Inf.
func (v *Run[F]) Row(query, head int, scores []F, hides bool) {
	p, n := v.p, len(scores)
	for _, i := range v.nodes {
		node := &p.Nodes[i]
		switch {
		case node.Op == variant.Score:
			v.times(v.floats[i][:n], scores, v.natural)
		case v.level[i] == ofScores:
			v.vector(i, node, n)
		case v.level[i] == ofRow && node.Needs&(variant.NeedsQuery|variant.NeedsHead) != 0:
			v.number(i, node, query, head)
		}
	}
	switch {
	case v.term >= 0:
		v.addTerm(scores)
	case p.ChangesScores():
		v.times(scores, v.Floats(p.Score, n), v.internal)
	}
	if p.Visible >= 0 && hides {
		sees, whole := v.Ints(p.Visible, n), n&^7
		if v.step == nil {
			whole = 0
		} else if whole > 0 {
			v.step(uint64(hide), pointer(scores), pointer(scores), pointer(sees), nil, whole)
		}
		hideScores(scores[whole:], scores[whole:], sees[whole:])
	}
}

// times computes dst = x y.
func (v *Run[F]) times(dst, x, y []F) {
	whole := v.inSteps(multiplyF, dst, x, y)
	arithmetic(variant.Multiply, dst[whole:], x[whole:], y[whole:])
}

// inSteps computes as many elements of dst as the tier's step can, and returns their number.
func (v *Run[F]) inSteps(code stepCode, dst, x, y []F) (whole int) {
	if whole = len(dst) &^ 7; v.step == nil {
		return 0
	}
	if whole > 0 {
		v.step(uint64(code), pointer(dst), pointer(x), pointer(y), nil, whole)
	}
	return whole
}

// addTerm adds the term to scores, or takes it off.
func (v *Run[F]) addTerm(scores []F) {
	n := len(scores)
	x := v.Floats(v.term, n)
	v.times(v.scaled[:n], x, v.internal)
	code, op := addF, variant.Add
	if v.minus {
		code, op = subtractF, variant.Subtract
	}
	whole := v.inSteps(code, scores, scores, v.scaled)
	arithmetic(op, scores[whole:], scores[whole:], v.scaled[whole:n])
}

// number computes a node of a row.
func (v *Run[F]) number(i int, n *variant.Node, query, head int) {
	var x [4]float64
	for k, arg := range n.Arguments(v.p) {
		x[k] = v.num[arg]
	}
	var y float64
	switch n.Op {
	case variant.Query:
		y = float64(query)
	case variant.Head:
		y = float64(head)
	case variant.Sequence:
		y = float64(v.seq)
	case variant.Element:
		y = v.tensors[n.Tensor].At(v.index(n, &x))
	default:
		y = n.Of(x[0], x[1], x[2])
	}
	if n.Kind == variant.Float {
		y = float64(F(y))
	}
	if y != v.num[i] {
		v.num[i], v.full[i] = y, 0
	}
}

// index returns the index of an element in its tensor.
func (v *Run[F]) index(n *variant.Node, x *[4]float64) (at int) {
	for axis := range n.Arguments(v.p) {
		at = at*v.tensors[n.Tensor].Shape[axis] + int(x[axis])
	}
	return at
}

// Floats returns n elements of a node, a float, for the row of the last call of Row. Ints is for ints and bools.
func (v *Run[F]) Floats(i, n int) []F { return spread(v, i, n, v.floats[i]) }

// Ints returns n elements of a node that is an int or a bool, as Floats does.
func (v *Run[F]) Ints(i, n int) []int32 { return spread(v, i, n, v.ints[i]) }

// spread makes a vector of the number of a node of a row.
func spread[F cpu.Real, T cpu.Real | int32](v *Run[F], i, n int, x []T) []T {
	if v.level[i] == ofRow && v.full[i] < n {
		fill(x[:n], T(v.num[i]))
		v.full[i] = n
	}
	return x[:n]
}

// Indices writes the indices, in its tensor, of an element for n keys to dst.
func (v *Run[F]) Indices(i, n int, dst []int32) {
	node := &v.p.Nodes[i]
	dst = dst[:n]
	clear(dst)
	for axis, arg := range node.Arguments(v.p) {
		size := int32(v.tensors[node.Tensor].Shape[axis])
		for k, x := range v.Ints(arg, n) {
			dst[k] = dst[k]*size + x
		}
	}
}

// vector computes n elements of a node that is a vector, and perhaps more.
func (v *Run[F]) vector(i int, n *variant.Node, count int) {
	args := n.Arguments(v.p)
	if n.Op == variant.Element {
		v.elements(i, n, args, count)
		return
	}
	if v.step != nil && v.inStep(i, n, args, padded(count)) {
		return
	}
	if n.Op == variant.Where {
		c := v.Ints(args[0], count)
		if n.Kind == variant.Float {
			pick(v.floats[i][:count], c, v.Floats(args[1], count), v.Floats(args[2], count))
		} else {
			pick(v.ints[i][:count], c, v.Ints(args[1], count), v.Ints(args[2], count))
		}
		return
	}
	floats := v.p.Nodes[args[0]].Kind == variant.Float
	switch {
	case n.Op == variant.ToFloat:
		widen(v.floats[i][:count], v.Ints(args[0], count))
	case n.Op == variant.ToInt:
		dst := v.ints[i][:count]
		for k, x := range v.Floats(args[0], count) {
			dst[k] = int32(variant.Floor(float64(x)))
		}
	case n.Op == variant.Tanh:
		dst := v.floats[i][:count]
		copy(dst, v.Floats(args[0], count))
		vector.SoftCap(dst, 1)
	case len(args) == 1 && floats:
		ofFloats(n.Op, v.floats[i][:count], v.Floats(args[0], count))
	case len(args) == 1:
		ofInts(n.Op, v.ints[i][:count], v.Ints(args[0], count))
	case n.Kind == variant.Float:
		arithmetic(n.Op, v.floats[i][:count], v.Floats(args[0], count), v.Floats(args[1], count))
	case n.Op == variant.Quotient || n.Op == variant.Remainder:
		divide(n.Op, v.ints[i][:count], v.Ints(args[0], count), int32(v.num[args[1]]))
	case n.Op == variant.And || n.Op == variant.Or:
		logic(n.Op, v.ints[i][:count], v.Ints(args[0], count), v.Ints(args[1], count))
	case n.Kind == variant.Bool && floats:
		compare(n.Op, v.ints[i][:count], v.Floats(args[0], count), v.Floats(args[1], count))
	case n.Kind == variant.Bool:
		compare(n.Op, v.ints[i][:count], v.Ints(args[0], count), v.Ints(args[1], count))
	default:
		arithmetic(n.Op, v.ints[i][:count], v.Ints(args[0], count), v.Ints(args[1], count))
	}
}

// padded returns the least multiple of 8 from n on, of which steps compute vectors.
func padded(n int) int { return (n + 7) &^ 7 }

// inStep is vector by the tier's step. It returns false if the step does not have the operation.
func (v *Run[F]) inStep(i int, n *variant.Node, args []int, count int) bool {
	code, x := v.codes[i], [3]*uint32{}
	switch divisor := 0; n.Op {
	case variant.Where:
		code = choose
		args = []int{args[1], args[2], args[0]}
	case variant.Quotient, variant.Remainder:
		divisor = int(v.num[args[1]])
		if divisor&(divisor-1) != 0 {
			return false
		}
		if code = shift; n.Op == variant.Remainder {
			code, divisor = and, divisor-1
		} else {
			divisor = bits.TrailingZeros(uint(divisor))
		}
		fill(v.divisors[:count], int32(divisor))
		x[1] = pointer(v.divisors)
		args = args[:1]
	}
	if code == noStep {
		return false
	}
	for k, arg := range args {
		x[k] = v.operand(arg, count)
	}
	dst := pointer(v.ints[i])
	if n.Kind == variant.Float {
		dst = pointer(v.floats[i])
	}
	v.step(uint64(code), dst, x[0], x[1], x[2], count)
	return true
}

// operand returns the vector of a node, of either kind.
func (v *Run[F]) operand(i, n int) *uint32 {
	if v.p.Nodes[i].Kind == variant.Float {
		return pointer(v.Floats(i, n))
	}
	return pointer(v.Ints(i, n))
}

func pointer[T any](x []T) *uint32 { return (*uint32)(unsafe.Pointer(unsafe.SliceData(x))) }

// elements gathers elements of a tensor. Indices are in range: see variant.Program.CheckTensors.
func (v *Run[F]) elements(i int, n *variant.Node, args []int, count int) {
	t := &v.tensors[n.Tensor]
	var index [Most]int
	for axis, arg := range args {
		size := t.Shape[axis]
		for k, x := range v.Ints(arg, count) {
			index[k] = index[k]*size + int(x)
		}
	}
	switch {
	case t.F32 != nil:
		gather(v.floats[i][:count], t.F32, &index)
	case t.F64 != nil:
		gather(v.floats[i][:count], t.F64, &index)
	case t.I32 != nil:
		gather(v.ints[i][:count], t.I32, &index)
	default:
		gather(v.ints[i][:count], t.I64, &index)
	}
}
