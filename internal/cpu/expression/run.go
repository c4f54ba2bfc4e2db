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
	ofKeys []instruction // for a call of Keys, in order
	ofRow  []instruction // for a call of Row
	level  []level       // by node, as the next
	num    []float64     // the value of a node of a row
	floats [][]F         // vectors of floats; of a node of a row, num as a vector of length full
	ints   [][]int32     // vectors of ints and bools, in the same way
	full   []int         // of a node of a row: how many elements of its vector are num
	bounds []variant.Interval

	// If the score becomes the sum or the difference of itself and a term without the score, only the term is computed.
	term  int // -1: none
	minus bool

	step              func(code uint64, dst, a, b, c *uint32, n int) // of the tier; nil: none
	natural, internal []F                                            // vectors of ln(4) and log4(e), between which scores are converted
	scaled            []F                                            // scratch
	index             []int32
}

// instruction computes a node.
type instruction struct {
	node int
	*variant.Node
	args []int
	code stepCode // if the tier has steps; noStep: loops compute the node
	dst  *uint32
	x    [3]*uint32 // operands of the step
	rows []int      // args that are nodes of a row
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
	if step := stepFor[F](); v.p == p && slices.Equal(v.roots, roots) && (step == nil) == (v.step == nil) {
		return
	} else {
		v.step = step
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
	v.ofKeys, v.ofRow = nil, nil
	v.level, v.num, v.full = make([]level, n), make([]float64, n), make([]int, n)
	v.floats, v.ints, v.bounds = make([][]F, n), make([][]int32, n), make([]variant.Interval, n)
	floats, ints := dense.Make[F](Most*(count+3)), make([]int32, Most*(2*count+1))
	v.natural, v.internal, v.scaled = cpu.Cut(&floats, Most), cpu.Cut(&floats, Most), cpu.Cut(&floats, Most)
	v.index, ints = ints[:Most], ints[Most:]
	fill(v.natural, lean.Ln4)
	fill(v.internal, F(lean.Log4E))
	for i := range n {
		if !need[i] {
			continue
		}
		node := &p.Nodes[i]
		x := instruction{node: i, Node: node, args: node.Arguments(p)}
		if v.level[i] = levelOf(node); node.Kind == variant.Float {
			v.floats[i] = cpu.Cut(&floats, Most)
			x.dst = pointer(v.floats[i])
		} else {
			v.ints[i], ints = ints[:Most], ints[Most:]
			x.dst = pointer(v.ints[i])
		}
		for _, arg := range x.args {
			if v.level[arg] == ofRow {
				x.rows = append(x.rows, arg)
			}
		}
		if v.step != nil && v.level[i] != ofRow {
			ints = v.setStep(&x, ints)
		}
		switch ofAll := node.Needs&(variant.NeedsQuery|variant.NeedsHead) == 0; {
		case v.level[i] == ofKeys, v.level[i] == ofRow && ofAll:
			v.ofKeys = append(v.ofKeys, x)
		default:
			v.ofRow = append(v.ofRow, x)
		}
	}
}

// setStep sets the step of an instruction, if there is one. It takes the vector of a constant from ints, and returns the rest.
func (v *Run[F]) setStep(x *instruction, ints []int32) []int32 {
	if len(x.args) == 0 || x.Op == variant.Element {
		return ints
	}
	x.code = codes[v.p.Nodes[x.args[0]].Kind][x.Op]
	args := x.args
	switch x.Op {
	case variant.Where:
		x.code, args = choose, []int{args[1], args[2], args[0]}
	case variant.Quotient, variant.Remainder:
		by := int32(v.p.Nodes[args[1]].Value)
		if by&(by-1) != 0 {
			return ints
		}
		constant := ints[:Most]
		ints, args, x.rows = ints[Most:], args[:1], nil
		if x.code = and; x.Op == variant.Remainder {
			fill(constant, by-1)
		} else {
			x.code = shift
			fill(constant, int32(bits.TrailingZeros32(uint32(by))))
		}
		x.x[1] = pointer(constant)
	}
	for k, arg := range args {
		if v.p.Nodes[arg].Kind == variant.Float {
			x.x[k] = pointer(v.floats[arg])
		} else {
			x.x[k] = pointer(v.ints[arg])
		}
	}
	return ints
}

func pointer[T any](x []T) *uint32 { return (*uint32)(unsafe.Pointer(unsafe.SliceData(x))) }

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
	for i := range v.ofKeys {
		switch x := &v.ofKeys[i]; {
		case x.Op == variant.Key:
			keys := v.ints[x.node]
			indices(keys[:n])
			for k := n; k < padded(n); k++ {
				keys[k] = keys[n-1] // an index in range
			}
		case v.level[x.node] == ofRow:
			v.number(x, 0, 0)
		default:
			v.vector(x, n)
		}
	}
}

// Row changes the scores of a row, which have the factor log4(e), for the first len(scores) keys of Keys. With hides it hides keys: their scores
// become -Inf.
func (v *Run[F]) Row(query, head int, scores []F, hides bool) {
	p, n := v.p, len(scores)
	for i := range v.ofRow {
		switch x := &v.ofRow[i]; {
		case x.Op == variant.Score:
			v.combine(multiplyF, v.floats[x.node][:n], scores, v.natural)
		case v.level[x.node] == ofRow:
			v.number(x, query, head)
		default:
			v.vector(x, n)
		}
	}
	switch {
	case v.term >= 0:
		v.combine(multiplyF, v.scaled[:n], v.Floats(v.term, n), v.internal)
		code := addF
		if v.minus {
			code = subtractF
		}
		v.combine(code, scores, scores, v.scaled)
	case p.ChangesScores():
		v.combine(multiplyF, scores, v.Floats(p.Score, n), v.internal)
	}
	if p.Visible >= 0 && hides {
		sees, whole := v.Ints(p.Visible, n), 0
		if v.step != nil && n >= 8 {
			whole = n &^ 7
			v.step(uint64(hide), pointer(scores), pointer(scores), pointer(sees), nil, whole)
		}
		hideScores(scores[whole:], scores[whole:], sees[whole:])
	}
}

// combine computes dst = x y, x + y or x - y.
func (v *Run[F]) combine(code stepCode, dst, x, y []F) {
	whole := 0
	if v.step != nil && len(dst) >= 8 {
		whole = len(dst) &^ 7
		v.step(uint64(code), pointer(dst), pointer(x), pointer(y), nil, whole)
	}
	op := variant.Multiply
	switch code {
	case addF:
		op = variant.Add
	case subtractF:
		op = variant.Subtract
	}
	arithmetic(op, dst[whole:], x[whole:], y[whole:])
}

// number computes a node of a row.
func (v *Run[F]) number(x *instruction, query, head int) {
	var y float64
	switch x.Op {
	case variant.Query:
		y = float64(query)
	case variant.Head:
		y = float64(head)
	case variant.Sequence:
		y = float64(v.seq)
	case variant.Element:
		at, t := 0, &v.tensors[x.Tensor]
		for axis, arg := range x.args {
			at = at*t.Shape[axis] + int(v.num[arg])
		}
		y = t.At(at)
	default:
		var a [3]float64
		for k, arg := range x.args {
			a[k] = v.num[arg]
		}
		y = x.Of(a[0], a[1], a[2])
	}
	if x.Kind == variant.Float {
		y = float64(F(y))
	}
	if y != v.num[x.node] {
		v.num[x.node], v.full[x.node] = y, 0
	}
}

// Floats returns n elements of a node, a float, for the row of the last call of Row. Ints is for ints and bools.
func (v *Run[F]) Floats(i, n int) []F {
	v.spread(i, n)
	return v.floats[i][:n]
}

// Ints returns n elements of a node that is an int or a bool, as Floats does.
func (v *Run[F]) Ints(i, n int) []int32 {
	v.spread(i, n)
	return v.ints[i][:n]
}

// spread makes a vector of the number of a node of a row.
func (v *Run[F]) spread(i, n int) {
	if v.level[i] != ofRow || v.full[i] >= n {
		return
	}
	v.full[i] = n
	if x := v.floats[i]; x != nil {
		if x[0] = F(v.num[i]); v.step == nil {
			fill(x[:n], x[0])
		} else {
			v.full[i] = padded(n)
			v.step(uint64(spread), pointer(x), pointer(x), nil, nil, padded(n))
		}
		return
	}
	x := v.ints[i]
	if x[0] = int32(v.num[i]); v.step == nil {
		fill(x[:n], x[0])
	} else {
		v.full[i] = padded(n)
		v.step(uint64(spread), pointer(x), pointer(x), nil, nil, padded(n))
	}
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

// padded returns the least multiple of 8 from n on, of which steps compute vectors.
func padded(n int) int { return (n + 7) &^ 7 }

// vector computes n elements of a node that is a vector, and perhaps more.
func (v *Run[F]) vector(x *instruction, n int) {
	switch {
	case x.Op == variant.Element:
		v.elements(x, n)
	case x.code != noStep:
		for _, arg := range x.rows {
			v.spread(arg, padded(n))
		}
		v.step(uint64(x.code), x.dst, x.x[0], x.x[1], x.x[2], padded(n))
	default:
		v.loop(x, n)
	}
}

// loop is vector by loops of Go.
func (v *Run[F]) loop(x *instruction, n int) {
	args := x.args
	floats := v.p.Nodes[args[0]].Kind == variant.Float
	f, i := v.floats[x.node], v.ints[x.node]
	if x.Kind == variant.Float {
		f = f[:n]
	} else {
		i = i[:n]
	}
	switch {
	case x.Op == variant.Where && x.Kind == variant.Float:
		pick(f, v.Ints(args[0], n), v.Floats(args[1], n), v.Floats(args[2], n))
	case x.Op == variant.Where:
		pick(i, v.Ints(args[0], n), v.Ints(args[1], n), v.Ints(args[2], n))
	case x.Op == variant.ToFloat:
		widen(f, v.Ints(args[0], n))
	case x.Op == variant.ToInt:
		for k, y := range v.Floats(args[0], n) {
			i[k] = int32(variant.Floor(float64(y)))
		}
	case x.Op == variant.Tanh:
		copy(f, v.Floats(args[0], n))
		vector.SoftCap(f, 1)
	case len(args) == 1 && floats:
		ofFloats(x.Op, f, v.Floats(args[0], n))
	case len(args) == 1:
		ofInts(x.Op, i, v.Ints(args[0], n))
	case x.Kind == variant.Float:
		arithmetic(x.Op, f, v.Floats(args[0], n), v.Floats(args[1], n))
	case x.Op == variant.Quotient || x.Op == variant.Remainder:
		divide(x.Op, i, v.Ints(args[0], n), int32(v.num[args[1]]))
	case x.Op == variant.And || x.Op == variant.Or:
		logic(x.Op, i, v.Ints(args[0], n), v.Ints(args[1], n))
	case x.Kind == variant.Bool && floats:
		compare(x.Op, i, v.Floats(args[0], n), v.Floats(args[1], n))
	case x.Kind == variant.Bool:
		compare(x.Op, i, v.Ints(args[0], n), v.Ints(args[1], n))
	default:
		arithmetic(x.Op, i, v.Ints(args[0], n), v.Ints(args[1], n))
	}
}

// elements gathers elements of a tensor. Indices are in range: see variant.Program.CheckTensors.
func (v *Run[F]) elements(x *instruction, n int) {
	t := &v.tensors[x.Tensor]
	at, axis := 0, 0 // the first indices may be the row's
	for ; v.level[x.args[axis]] == ofRow; axis++ {
		at = at*t.Shape[axis] + int(v.num[x.args[axis]])
	}
	index := v.Ints(x.args[axis], n)
	at *= t.Shape[axis]
	for axis++; axis < len(x.args); axis++ {
		size := int32(t.Shape[axis])
		at *= t.Shape[axis]
		for k, y := range v.Ints(x.args[axis], n) {
			v.index[k] = index[k]*size + y
		}
		index = v.index[:n]
	}
	whole, table := 0, (*uint32)(nil)
	if t.F32 != nil {
		table = (*uint32)(unsafe.Pointer(&t.F32[at]))
	} else if t.I32 != nil {
		table = (*uint32)(unsafe.Pointer(&t.I32[at]))
	}
	if table != nil && v.step != nil && n >= 8 {
		whole = n &^ 7
		v.step(uint64(gather), x.dst, table, pointer(index), nil, whole)
	}
	index = index[whole:]
	switch {
	case t.F32 != nil:
		take(v.floats[x.node][whole:n], t.F32[at:], index)
	case t.F64 != nil:
		take(v.floats[x.node][whole:n], t.F64[at:], index)
	case t.I32 != nil:
		take(v.ints[x.node][whole:n], t.I32[at:], index)
	default:
		take(v.ints[x.node][whole:n], t.I64[at:], index)
	}
}
