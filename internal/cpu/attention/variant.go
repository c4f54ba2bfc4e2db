package attention

import (
	"fmt"
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/variant"
)

// A variant changes the scores of a tile in pieces of variantKeys keys. The values of its nodes are
//
//   - one number, if they depend on neither score nor key: computed once for each row of a piece
//   - a vector that all rows share, if they depend on the key and not on score, query or head
//   - a vector for each row
const variantKeys = 256

// variantLevel says for what a node has a value of its own.
type variantLevel uint8

const (
	ofRow    variantLevel = iota // one number
	ofKeys                       // a vector that rows share
	ofScores                     // a vector
)

func levelOf(n *variant.Node) variantLevel {
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

// variantRun evaluates a variant for one worker.
type variantRun[F cpu.Real] struct {
	Program *variant.Program
	tensors []variant.Tensor

	nodes []int          // those that are computed, in order
	level []variantLevel // by node, as the next
	num   []float64      // the value of a node of a row
	f     [][]F          // vectors of floats; of a node of a row, num as a vector of length full
	i     [][]int32      // vectors of ints and bools, in the same way
	full  []int          // of a node of a row: how many elements of its vector are num
	bound []variant.Interval

	floats []F // memory of f
	ints   []int32

	// The block.
	seq, head0, group int
	positions         func(i int) int // of a query position among the keys
	from              int

	hides bool // some query may not see some key
}

// prepare makes v evaluate p's nodes that the roots need.
func (v *variantRun[F]) prepare(p *variant.Program, slopes bool) {
	if v.Program == p && len(v.full) == len(p.Nodes) {
		return
	}
	v.Program = p
	n := len(p.Nodes)
	need := make([]bool, n)
	need[p.Score] = true
	if p.Visible >= 0 {
		need[p.Visible] = true
	}
	if slopes {
		need[p.Slope] = true
	}
	for i := n - 1; i >= 0; i-- {
		for _, arg := range p.Nodes[i].Arguments(p) {
			need[arg] = need[arg] || need[i]
		}
	}
	v.nodes = v.nodes[:0]
	v.level, v.num, v.full = make([]variantLevel, n), make([]float64, n), make([]int, n)
	v.f, v.i, v.bound = make([][]F, n), make([][]int32, n), make([]variant.Interval, n)
	v.floats, v.ints = dense.Make[F](variantKeys*n), make([]int32, variantKeys*n)
	for i := range n {
		if !need[i] {
			continue
		}
		v.nodes = append(v.nodes, i)
		v.level[i] = levelOf(&p.Nodes[i])
		if p.Nodes[i].Kind == variant.Float {
			v.f[i] = v.floats[i*variantKeys:][:variantKeys]
		} else {
			v.i[i] = v.ints[i*variantKeys:][:variantKeys]
		}
	}
}

// open makes a block the run's.
func (v *variantRun[F]) open(b *block, tensors []variant.Tensor) {
	v.tensors = tensors
	v.seq, v.head0, v.group, v.from, v.positions, v.hides = b.index, b.head0, b.group, b.from, b.seq.position, v.Program.Visible >= 0
}

// forget drops pointers to operands and the plan.
func (v *variantRun[F]) forget() { v.tensors, v.positions = nil, nil }

// sight returns which of the keys [first, end) the rows of the block see: variant.Never, Sometimes or Always.
func (v *variantRun[F]) sight(b *block, first, end int) int {
	return v.Program.Sees(b.bounds(first, end, v.tensors), v.bound)
}

// bounds returns the ranges of a block's variables, for the keys [first, end).
func (b *block) bounds(first, end int, tensors []variant.Tensor) *variant.Bounds {
	between := func(lo, hi int) variant.Interval { return variant.Interval{Lo: float64(lo), Hi: float64(hi)} }
	return &variant.Bounds{
		Query: between(b.seq.position(b.from), b.seq.position(b.to-1)), Key: between(first, end-1),
		Head: between(b.head0, b.head0+b.group-1), Sequence: between(b.index, b.index), Tensors: tensors,
	}
}

// modify changes the scores of a tile, whose first row is row `row` of the block, with stride elements a row.
func (v *variantRun[F]) modify(t *tile, at unsafe.Pointer, stride int) {
	scores := unsafe.Slice((*F)(at), t.Rows*stride)
	for c := 0; c < t.Count; c += variantKeys {
		n := min(variantKeys, t.Count-c)
		v.keys(t, c, n)
		for r := range t.Rows {
			m := n
			if t.Visible != nil {
				m = min(n, int(*(*int32)(unsafe.Add(t.Visible, 4*r)))-c)
			}
			if m > 0 {
				row := t.variantRow + r
				v.row(v.positions(v.from+row/v.group), v.head0+row%v.group, scores[r*stride+c:][:m], nil)
			}
		}
	}
}

// keys computes what depends on n keys of a tile alone, from number c of the tile on.
func (v *variantRun[F]) keys(t *tile, c, n int) {
	for _, i := range v.nodes {
		node := &v.Program.Nodes[i]
		switch {
		case node.Op == variant.Key:
			t.order.indices(v.i[i][:n], t.key, c, t.Run)
		case v.level[i] == ofKeys:
			v.vector(i, node, n)
		case v.level[i] == ofRow && node.Needs&(variant.NeedsQuery|variant.NeedsHead) == 0:
			v.number(i, node, 0, 0)
		}
	}
}

// indices writes the indices of keys to dst: those of a tile's columns from c on. The tile counts from index key, in runs of `run` keys.
func (o *order) indices(dst []int32, key, c, run int) {
	for i := range dst {
		at := c + i
		n := key + at
		if o.streams {
			n = key + o.first[at%4] + at/4
			if o.skip != 0 {
				n += at / run * o.skip
			}
		}
		dst[i] = int32(n)
	}
}

// row changes the scores of a row, for the keys of the last call of keys. slopes, if not nil, receives the derivatives.
func (v *variantRun[F]) row(query, head int, scores, slopes []F) {
	p, n := v.Program, len(scores)
	for _, i := range v.nodes {
		node := &p.Nodes[i]
		switch {
		case node.Op == variant.Score:
			// Scores have the factor log4(e).
			scale(v.f[i][:n], scores, lean.Ln4)
		case v.level[i] == ofScores:
			v.vector(i, node, n)
		case v.level[i] == ofRow && node.Needs&(variant.NeedsQuery|variant.NeedsHead) != 0:
			v.number(i, node, query, head)
		}
	}
	if p.ChangesScores() {
		v.operandF(p.Score, n)
		scale(scores, v.f[p.Score][:n], lean.Log4E)
	}
	if slopes != nil {
		copy(slopes, v.operandF(p.Slope, n))
	}
	if p.Visible >= 0 && v.hides {
		for c, sees := range v.operandI(p.Visible, n) {
			if sees == 0 {
				scores[c] = F(math.Inf(-1))
			}
		}
	}
}

func scale[F cpu.Real](dst, src []F, by F) {
	src = src[:len(dst)]
	for i := range dst {
		dst[i] = src[i] * by
	}
}

// number computes a node of a row.
func (v *variantRun[F]) number(i int, n *variant.Node, query, head int) {
	var x [4]float64
	for k, arg := range n.Arguments(v.Program) {
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
		t := &v.tensors[n.Tensor]
		at := 0
		for axis := range n.Arguments(v.Program) {
			at = at*t.Shape[axis] + int(x[axis])
		}
		y = t.At(at)
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

// operandF returns n elements of a node, a float. operandI is for ints and bools.
func (v *variantRun[F]) operandF(i, n int) []F {
	x := v.f[i]
	if v.level[i] == ofRow && v.full[i] < n {
		fill(x[:n], F(v.num[i]))
		v.full[i] = n
	}
	return x[:n]
}

func (v *variantRun[F]) operandI(i, n int) []int32 {
	x := v.i[i]
	if v.level[i] == ofRow && v.full[i] < n {
		fill(x[:n], int32(v.num[i]))
		v.full[i] = n
	}
	return x[:n]
}

func fill[T any](x []T, to T) {
	x[0] = to
	for n := 1; n < len(x); n *= 2 {
		copy(x[n:], x[:n])
	}
}

// vector computes n elements of a node that is a vector.
func (v *variantRun[F]) vector(i int, n *variant.Node, count int) {
	args := n.Arguments(v.Program)
	if n.Op == variant.Element {
		v.elements(i, n, args, count)
		return
	}
	if n.Op == variant.Where {
		c := v.operandI(args[0], count)
		if n.Kind == variant.Float {
			choose(v.f[i][:count], c, v.operandF(args[1], count), v.operandF(args[2], count))
		} else {
			choose(v.i[i][:count], c, v.operandI(args[1], count), v.operandI(args[2], count))
		}
		return
	}
	floats := v.Program.Nodes[args[0]].Kind == variant.Float
	switch {
	case n.Op == variant.ToFloat:
		dst := v.f[i][:count]
		for k, x := range v.operandI(args[0], count) {
			dst[k] = F(x)
		}
	case n.Op == variant.ToInt:
		dst := v.i[i][:count]
		for k, x := range v.operandF(args[0], count) {
			dst[k] = int32(variant.Floor(float64(x)))
		}
	case len(args) == 1 && floats:
		ofFloats(n.Op, v.f[i][:count], v.operandF(args[0], count))
	case len(args) == 1:
		ofInts(n.Op, v.i[i][:count], v.operandI(args[0], count))
	case n.Kind == variant.Float:
		arithmetic(n.Op, v.f[i][:count], v.operandF(args[0], count), v.operandF(args[1], count))
	case n.Op == variant.Quotient || n.Op == variant.Remainder:
		divide(n.Op, v.i[i][:count], v.operandI(args[0], count), int32(v.num[args[1]]))
	case n.Op == variant.And || n.Op == variant.Or:
		logic(n.Op, v.i[i][:count], v.operandI(args[0], count), v.operandI(args[1], count))
	case n.Kind == variant.Bool && floats:
		compare(n.Op, v.i[i][:count], v.operandF(args[0], count), v.operandF(args[1], count))
	case n.Kind == variant.Bool:
		compare(n.Op, v.i[i][:count], v.operandI(args[0], count), v.operandI(args[1], count))
	default:
		arithmetic(n.Op, v.i[i][:count], v.operandI(args[0], count), v.operandI(args[1], count))
	}
}

// elements gathers elements of a tensor. Indices are in range: see variant.Program.CheckTensors.
func (v *variantRun[F]) elements(i int, n *variant.Node, args []int, count int) {
	t := &v.tensors[n.Tensor]
	var index [variantKeys]int
	for axis, arg := range args {
		size := t.Shape[axis]
		for k, x := range v.operandI(arg, count) {
			index[k] = index[k]*size + int(x)
		}
	}
	switch {
	case t.F32 != nil:
		gather(v.f[i][:count], t.F32, &index)
	case t.F64 != nil:
		gather(v.f[i][:count], t.F64, &index)
	case t.I32 != nil:
		gather(v.i[i][:count], t.I32, &index)
	default:
		gather(v.i[i][:count], t.I64, &index)
	}
}

func gather[T, U cpu.Real | int32 | int64](dst []T, src []U, index *[variantKeys]int) {
	for k := range dst {
		dst[k] = T(src[index[k]])
	}
}

func choose[T any](dst []T, c []int32, x, y []T) {
	x, y, c = x[:len(dst)], y[:len(dst)], c[:len(dst)]
	for k := range dst {
		if dst[k] = y[k]; c[k] != 0 {
			dst[k] = x[k]
		}
	}
}

func ofFloats[F cpu.Real](op variant.Op, dst, x []F) {
	x = x[:len(dst)]
	switch op {
	case variant.Negate:
		for k := range dst {
			dst[k] = -x[k]
		}
	case variant.Abs:
		for k := range dst {
			dst[k] = F(math.Abs(float64(x[k])))
		}
	default:
		n := variant.Node{Op: op}
		for k := range dst {
			dst[k] = F(n.Of(float64(x[k]), 0, 0))
		}
	}
}

func ofInts(op variant.Op, dst, x []int32) {
	for k, x := range x {
		switch op {
		case variant.Negate:
			dst[k] = -x
		case variant.Abs:
			dst[k] = max(x, -x)
		case variant.Not:
			dst[k] = 1 - x
		}
	}
}

func arithmetic[T cpu.Real | int32](op variant.Op, dst, x, y []T) {
	x, y = x[:len(dst)], y[:len(dst)]
	switch op {
	case variant.Add:
		for k := range dst {
			dst[k] = x[k] + y[k]
		}
	case variant.Subtract:
		for k := range dst {
			dst[k] = x[k] - y[k]
		}
	case variant.Multiply:
		for k := range dst {
			dst[k] = x[k] * y[k]
		}
	case variant.Divide:
		for k := range dst {
			dst[k] = x[k] / y[k]
		}
	case variant.Min:
		for k := range dst {
			dst[k] = min(x[k], y[k])
		}
	case variant.Max:
		for k := range dst {
			dst[k] = max(x[k], y[k])
		}
	}
}

func divide(op variant.Op, dst, x []int32, by int32) {
	for k, x := range x {
		q, r := x/by, x%by
		if r < 0 {
			q, r = q-1, r+by
		}
		if dst[k] = q; op == variant.Remainder {
			dst[k] = r
		}
	}
}

func logic(op variant.Op, dst, x, y []int32) {
	x, y = x[:len(dst)], y[:len(dst)]
	if op == variant.And {
		for k := range dst {
			dst[k] = x[k] & y[k]
		}
		return
	}
	for k := range dst {
		dst[k] = x[k] | y[k]
	}
}

func compare[T cpu.Real | int32](op variant.Op, dst []int32, x, y []T) {
	x, y = x[:len(dst)], y[:len(dst)]
	truth := func(b bool) int32 {
		if b {
			return 1
		}
		return 0
	}
	switch op {
	case variant.Less:
		for k := range dst {
			dst[k] = truth(x[k] < y[k])
		}
	case variant.LessEqual:
		for k := range dst {
			dst[k] = truth(x[k] <= y[k])
		}
	case variant.Equal:
		for k := range dst {
			dst[k] = truth(x[k] == y[k])
		}
	}
}

// seenTiles is a list of the LeanTiles of an output tile of which some query sees some key, as a variant says: numbers
// of the LeanTiles that the mask leaves.
type seenTiles struct{ at, n int }

// see appends the list of a block of query positions, which has n LeanTiles by its mask, and returns the list's length.
func (p *Plan) see(g *attn.Problem, s *span, index, from, to int, n int64) int64 {
	if g.Variant == nil || g.Variant.Visible < 0 {
		return n
	}
	if len(p.bound) < len(g.Variant.Nodes) {
		p.bound = make([]variant.Interval, len(g.Variant.Nodes))
	}
	list := seenTiles{at: len(p.seen)}
	b := block{seq: s, index: index, from: from, to: to, group: g.Heads}
	for i := range n {
		first, end := s.tile(g, from, to, i)
		if g.Variant.Sees(b.bounds(first, end, nil), p.bound) != variant.Never {
			p.seen = append(p.seen, int32(i))
		}
	}
	list.n = len(p.seen) - list.at
	p.lists = append(p.lists, list)
	return int64(list.n)
}

// tile returns the keys of LeanTile i of the query positions [from, to).
func (s *span) tile(g *attn.Problem, from, to int, i int64) (first, end int) {
	if g.Invariant {
		l := s.leanTiles(g, from, to)
		first = int(l.at(i)) * g.TileTokens
		return first, min(first+g.TileTokens, s.keys)
	}
	keys, _ := s.context(g, from, to)
	part := keys.Part(i, i+1, g.TileTokens)
	return part.First, part.End
}

// number returns the number of LeanTile i of b's list among those that the mask leaves.
func (b *block) number(i int64) int64 {
	if b.seen == nil {
		return i
	}
	return int64(b.seen[i])
}

// ranges calls f for the keys of LeanTiles [begin, end) of an output tile, a range of keys at a time. With a variant it leaves out those that
// no row of the block sees.
func (ws *workspace[F]) ranges(w *worker[F], b block, begin, end int64, f func(key, end int)) {
	g := &ws.plan.g
	if g.Variant == nil || g.Variant.Visible < 0 {
		context, _ := b.seq.context(g, b.from, b.to)
		part := context.Part(begin, end, g.TileTokens)
		f(part.First, part.End)
		return
	}
	v := &w.variant
	key, stop := 0, 0
	flush := func() {
		if key < stop {
			f(key, stop)
		}
	}
	for i := begin; i < end; i++ {
		first, last := b.seq.tile(g, b.from, b.to, b.number(i))
		sight := v.sight(&b, first, last)
		if sight == variant.Never {
			continue
		}
		if hides := sight == variant.Sometimes; first != stop || hides != v.hides {
			flush()
			key, v.hides = first, hides
		}
		stop = last
	}
	flush()
}

// tileModifier changes the scores of a tile.
type tileModifier interface {
	modify(t *tile, scores unsafe.Pointer, stride int)
}

// CheckTensors returns an error if tensors are not those of the problem's variant, or if an index of one may be out of range for a query
// and a key of the plan.
func (p *Plan) CheckTensors(tensors []variant.Tensor) error {
	v := p.g.Variant
	if v == nil {
		if len(tensors) > 0 {
			return fmt.Errorf("%d tensors, and the plan has no variant", len(tensors))
		}
		return nil
	}
	at := func(lo, hi int) variant.Interval { return variant.Interval{Lo: float64(lo), Hi: float64(max(lo, hi))} }
	first, last, keys, seqs := math.MaxInt, 0, 1, 1
	for i := range p.seqs {
		if s := &p.seqs[i]; s.keys > 0 && s.queries > 0 {
			first, last, keys, seqs = min(first, s.position(0)), max(last, s.keys-1), max(keys, s.keys), max(seqs, i+1)
		}
	}
	return v.CheckTensors(tensors, &variant.Bounds{
		Query: at(min(first, last), last), Key: at(0, keys-1), Head: at(0, p.g.Heads-1), Sequence: at(0, seqs-1),
	})
}
