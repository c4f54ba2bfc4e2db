package cpu

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/lean"
)

// Append stores the rows of a step's keys (or values), rounded to the dtype of dst:
//
//	dst[page][head][slot] = src[seqs[s].Row+i][head]
//
// for token i of seqs[s], whose key position Keys-Queries+i lies in page and slot. at places dst and
// from places src, both with rows of dim elements. Of g, KVHeads and PageTokens are used. Everything
// is checked before anything is written; the error wraps ErrShape, ErrDType or ErrPage.
func Append[F lean.Float](e *Engine, g *attn.Problem, seqs []attn.Sequence, dst Buffer, at attn.PageStrides, dim int, src []F, from attn.Strides) error {
	if err := checkAppend("append", g, seqs, dst, at, dim, src, from); err != nil {
		return err
	}
	r := appendRun[F]{pages: g, seqs: seqs, dst: dst, at: at, dim: dim, src: src, from: from}
	r.run(e)
	return nil
}

// AppendTurned is Append of keys to those of a plan, whose rotary embedding turns them on their way. seqs are those that the
// plan was built of.
func AppendTurned[F lean.Float](e *Engine, p *Plan, seqs []attn.Sequence, dst Buffer, src []F, from attn.Strides) error {
	const op = "append"
	g, r := &p.g, &p.rotation
	if err := checkAppend(op, g, seqs, dst, g.Key, g.Dim, src, from); err != nil {
		return err
	}
	for i := range seqs {
		if q := &seqs[i]; q.Queries > 0 && q.Row+q.Queries > r.rows() {
			return attn.Errorf(op, attn.ErrShape, "sequence %d has rows [%d,%d), and the plan turns %d", i, q.Row, q.Row+q.Queries, r.rows())
		}
	}
	run := appendRun[F]{pages: g, seqs: seqs, dst: dst, at: g.Key, dim: g.Dim, src: src, from: from, turns: r}
	run.run(e)
	return nil
}

// appendRun is a call of Append, whose arguments were checked: all new tokens, in the order of the
// sequences, of which each worker has as many.
type appendRun[F lean.Float] struct {
	pages         *attn.Problem
	seqs          []attn.Sequence
	dst           Buffer
	at            attn.PageStrides
	dim           int
	src           []F
	from          attn.Strides
	turns         *rotation // nil: rows are stored as they are
	rows, workers int
}

func (r *appendRun[F]) run(e *Engine) {
	for i := range r.seqs {
		r.rows += r.seqs[i].Queries
	}
	work := float64(r.rows) * float64(r.pages.KVHeads*r.dim) * appendNanos
	if r.turns != nil {
		work *= 2
	}
	if r.workers = min(threadsFor(work), r.rows); r.workers < 2 {
		r.store(0, r.rows)
		return
	}
	shared := *r // r stays where it is: one thread allocates nothing
	e.pool.must(&shared, r.workers)
}

func (r *appendRun[F]) work(w, _ int) { r.store(w*r.rows/r.workers, (w+1)*r.rows/r.workers) }

// store stores rows [first, end) of all new ones.
func (r *appendRun[F]) store(first, end int) {
	g := r.pages
	var turned []F
	if r.turns != nil {
		turned = make([]F, g.KVHeads*r.dim)
	}
	for i := range r.seqs {
		q := &r.seqs[i]
		for t, last := max(first, 0), min(end, q.Queries); t < last; {
			row := q.Row + t
			if r.turns == nil {
				to, n := slots(g, q, r.at, t, last-t)
				storeRows(&r.dst, to, r.at, r.src, row*r.from.Row, r.from, n, g.KVHeads, r.dim)
				t += n
				continue
			}
			for h := range g.KVHeads {
				turnRow(r.turns, row, turned[h*r.dim:][:r.dim], r.src[row*r.from.Row+h*r.from.Head:][:r.dim])
			}
			to, _ := slots(g, q, r.at, t, 1)
			storeRows(&r.dst, to, r.at, turned, 0, attn.Strides{Row: len(turned), Head: r.dim}, 1, g.KVHeads, r.dim)
			t++
		}
		first, end = first-q.Queries, end-q.Queries
	}
}

// slots returns where the keys of up to most new tokens lie, from token t on, and how many of them lie together.
func slots(g *attn.Problem, q *attn.Sequence, at attn.PageStrides, t, most int) (to, n int) {
	key := q.Keys - q.Queries + t
	slot := key % g.PageTokens
	return int(q.Pages[key/g.PageTokens])*at.Page + slot*at.Row, min(most, g.PageTokens-slot)
}

// checkAppend reports what is wrong with the arguments of Append.
func checkAppend[F lean.Float](op string, g *attn.Problem, seqs []attn.Sequence, dst Buffer, at attn.PageStrides, dim int, src []F, from attn.Strides) error {
	switch {
	case g.KVHeads < 1 || g.PageTokens < 1 || dim < 1:
		return attn.Errorf(op, attn.ErrShape, "%d KV heads, pages of %d tokens, rows of %d elements",
			g.KVHeads, g.PageTokens, dim)
	case from.Row < 0 || from.Head < 0:
		return attn.Errorf(op, attn.ErrShape, "source strides %+v", from)
	}
	if err := at.Check(op, "destination"); err != nil {
		return err
	}
	if err := dst.check(op, "the destination"); err != nil {
		return err
	}
	for i := range seqs {
		q := &seqs[i]
		if err := q.CheckAppend(op, i, g.PageTokens, func(page, slots int) bool {
			return at.Extent(page+1, g.KVHeads, slots, dim) <= dst.Len
		}); err != nil {
			return err
		}
		if q.Queries > 0 && from.Extent(q.Row+q.Queries, g.KVHeads, dim) > len(src) {
			return attn.Errorf(op, attn.ErrShape, "sequence %d has rows [%d,%d), the source has %d elements",
				i, q.Row, q.Row+q.Queries, len(src))
		}
	}
	return nil
}

// storeRows stores n neighbouring rows of each head, in runs as long as both sides have them.
func storeRows[F lean.Float](dst *Buffer, to int, at attn.PageStrides, src []F, of int, from attn.Strides, n, heads, dim int) {
	switch {
	case at.Row == dim && from.Row == dim: // the rows of a head
		for h := range heads {
			store(dst, to+h*at.Head, src[of+h*from.Head:][:n*dim])
		}
	case at.Head == dim && from.Head == dim: // the heads of a row
		for r := range n {
			store(dst, to+r*at.Row, src[of+r*from.Row:][:heads*dim])
		}
	default:
		for h := range heads {
			for r := range n {
				store(dst, to+h*at.Head+r*at.Row, src[of+h*from.Head+r*from.Row:][:dim])
			}
		}
	}
}

// store rounds src into the elements of dst from i on.
func store[F lean.Float](dst *Buffer, i int, src []F) {
	p := dst.at(i)
	if s, ok := any(src).([]float32); ok { // rounded once as they are
		switch dst.DType {
		case attn.Float32:
			copy(unsafe.Slice((*float32)(p), len(s)), s)
			return
		case attn.Float16:
			half.EncodeFloat16(unsafe.Slice((*half.Float16)(p), len(s)), s)
			return
		case attn.BFloat16:
			half.EncodeBFloat16(unsafe.Slice((*half.BFloat16)(p), len(s)), s)
			return
		}
	}
	switch dst.DType {
	case attn.Float32:
		d := unsafe.Slice((*float32)(p), len(src))
		for i, x := range src {
			d[i] = float32(x)
		}
	case attn.Float64:
		d := unsafe.Slice((*float64)(p), len(src))
		for i, x := range src {
			d[i] = float64(x)
		}
	case attn.Float16:
		d := unsafe.Slice((*half.Float16)(p), len(src))
		for i, x := range src {
			d[i] = half.FromFloat64(float64(x))
		}
	case attn.BFloat16:
		d := unsafe.Slice((*half.BFloat16)(p), len(src))
		for i, x := range src {
			d[i] = half.BFromFloat64(float64(x))
		}
	}
}
