package attention

import (
	"fmt"
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/expression"
	"gorgonia.org/leanattention/internal/variant"
)

// variantRun changes the scores of a worker's tiles by a variant.
type variantRun[F cpu.Real] struct {
	expression.Run[F]
	block block
	hides bool // some query may not see some key
}

// open makes a block the run's.
func (v *variantRun[F]) open(b *block, tensors []variant.Tensor) {
	v.Open(tensors, b.index)
	v.block, v.hides = *b, v.Program().Visible >= 0
}

// forget drops pointers to operands and the plan.
func (v *variantRun[F]) forget() {
	v.Forget()
	v.block = block{}
}

// sight returns which of the keys [first, end) the rows of the block see: variant.Never, Sometimes or Always.
func (v *variantRun[F]) sight(b *block, first, end int) int {
	limits := b.bounds(first, end, v.Tensors())
	return v.Sees(&limits)
}

// bounds returns the ranges of a block's variables, for the keys [first, end).
func (b *block) bounds(first, end int, tensors []variant.Tensor) variant.Bounds {
	return variant.Bounds{
		Query: variant.Between(b.seq.position(b.from), b.seq.position(b.to-1)), Key: variant.Between(first, end-1),
		Head: variant.Between(b.head0, b.head0+b.group-1), Sequence: variant.Between(b.index, b.index), Tensors: tensors,
	}
}

// modify changes the scores of a tile, with stride elements a row.
func (v *variantRun[F]) modify(t *tile, at unsafe.Pointer, stride int) {
	scores := unsafe.Slice((*F)(at), t.Rows*stride)
	for c := 0; c < t.Count; c += expression.Most {
		n := min(expression.Most, t.Count-c)
		v.Keys(n, func(dst []int32) { t.indices(dst, c) })
		for r := range t.Rows {
			m := n
			if t.Visible != nil {
				m = min(n, int(*(*int32)(unsafe.Add(t.Visible, 4*r)))-c)
			}
			if m > 0 {
				row, b := t.blockRow+r, &v.block
				v.Row(b.seq.position(b.from+row/b.group), b.head0+row%b.group, scores[r*stride+c:][:m], v.hides)
			}
		}
	}
}

// indices writes the indices in the sequence of the tile's keys from number c on.
func (t *tile) indices(dst []int32, c int) {
	o := &t.order
	if !o.streams {
		for i := range dst {
			dst[i] = int32(t.key + c + i)
		}
		return
	}
	for i := range dst { // c and runs are multiples of 4
		at := c + i
		n := t.key + o.first[i%4] + at/4
		if o.skip != 0 {
			n += at / t.Run * o.skip
		}
		dst[i] = int32(n)
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
		limits := b.bounds(first, end, nil)
		if g.Variant.Sees(&limits, p.bound) != variant.Never {
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
	first, last, keys, seqs := math.MaxInt, 0, 1, 1
	for i := range p.seqs {
		if s := &p.seqs[i]; s.keys > 0 && s.queries > 0 {
			first, last, keys, seqs = min(first, s.position(0)), max(last, s.keys-1), max(keys, s.keys), max(seqs, i+1)
		}
	}
	return v.CheckTensors(tensors, &variant.Bounds{
		Query: variant.Between(min(first, last), last), Key: variant.Between(0, keys-1), Head: variant.Between(0, p.g.Heads-1), Sequence: variant.Between(0, seqs-1),
	})
}
