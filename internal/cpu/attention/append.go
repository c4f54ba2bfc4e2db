package attention

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/vector"
	"gorgonia.org/leanattention/internal/lean"
)

// Append stores the rows of a step's keys (or values), rounded to the dtype of dst:
//
//	dst[page][head][slot] = src[seqs[s].Row+i][head]
//
// for token i of seqs[s], whose key position Keys-Queries+i lies in page and slot. at places dst and
// from places src, both with rows of dim elements. Of g, KVHeads and PageTokens are used. Everything
// is checked before anything is written; the error wraps ErrShape, ErrDType or ErrPage.
func Append[F lean.Float](e *cpu.Engine, g *attn.Problem, seqs []attn.Sequence, dst cpu.Buffer, at attn.PageStrides, dim int, src []F, from attn.Strides) error {
	r := appendRun[F]{pages: g, seqs: seqs}
	r.parts[0] = appendPart[F]{NewRows: NewRows[F]{dst, src, from}, at: at, dim: dim}
	return r.run(e, r.parts[:1])
}

// NewRows are the rows of a step's keys, or of its values: what Append calls src and from, and dst.
type NewRows[F lean.Float] struct {
	To   cpu.Buffer
	Rows []F
	From attn.Strides
}

// AppendLayer is Append of a layer's keys and of its values, to where the plan's problem has them. The plan's rotary
// embedding, if it has one, turns keys on their way. seqs are those that the plan was built of.
func AppendLayer[F lean.Float](e *cpu.Engine, p *Plan, seqs []attn.Sequence, keys, values NewRows[F]) error {
	g := &p.g
	r := appendRun[F]{pages: g, seqs: seqs}
	r.parts[0] = appendPart[F]{NewRows: keys, at: g.Key, dim: g.Dim}
	r.parts[1] = appendPart[F]{NewRows: values, at: g.Value, dim: g.ValueDim}
	if p.rotation.turns() {
		r.parts[0].turns = &p.rotation
		for i := range seqs {
			if q, rows := &seqs[i], p.rotation.rows(); q.Queries > 0 && q.Row+q.Queries > rows {
				return attn.Errorf("append", attn.ErrShape, "sequence %d has rows [%d,%d), and the plan turns %d", i, q.Row, q.Row+q.Queries, rows)
			}
		}
	}
	return r.run(e, r.parts[:])
}

// appendRun is a call: all new tokens, in the order of the sequences, of which each worker has as many.
type appendRun[F lean.Float] struct {
	pages         *attn.Problem
	seqs          []attn.Sequence
	parts         [2]appendPart[F] // of keys, of values, or of both
	rows, workers int
	turned        []F // of each thread a row
}

// appendPart is the keys of a call, or the values.
type appendPart[F lean.Float] struct {
	NewRows[F]
	at    attn.PageStrides
	dim   int
	turns *rotation // nil: rows are stored as they are
}

func (r *appendRun[F]) run(e *cpu.Engine, parts []appendPart[F]) error {
	width, turned := 0, 0 // elements of a row
	for i := range parts {
		p := &parts[i]
		if err := p.check("append", r.pages, r.seqs); err != nil {
			return err
		}
		if width += p.dim; p.turns != nil {
			turned = p.dim
		}
	}
	for i := range r.seqs {
		r.rows += r.seqs[i].Queries
	}
	nanos := vector.RoundNanos()
	if unsafe.Sizeof(F(0)) == 8 {
		nanos = cpu.ElementNanos
	}
	heads := r.pages.KVHeads
	work := float64(r.rows) * float64(heads) * (float64(width)*nanos + float64(turned)*cpu.ElementNanos)
	threads := min(cpu.ThreadsFor(work), r.rows)
	r.turned = make([]F, max(threads, 1)*heads*turned)
	if threads < 2 {
		r.store(0, r.rows, 0)
		return nil
	}
	shared := *r // r stays where it is: one thread allocates nothing
	shared.workers = min(threads*cpu.SharesFor(work, threads, cpu.RowShareNanos), r.rows)
	e.Must(&shared, shared.workers, threads)
	return nil
}

func (r *appendRun[F]) Work(w, thread int) {
	r.store(w*r.rows/r.workers, (w+1)*r.rows/r.workers, thread)
}

// store stores rows [first, end) of all new ones.
func (r *appendRun[F]) store(first, end, thread int) {
	for i := range r.seqs {
		q := &r.seqs[i]
		if from, to := max(first, 0), min(end, q.Queries); from < to {
			for p := range r.parts {
				r.parts[p].store(r, q, from, to, thread)
			}
		}
		first, end = first-q.Queries, end-q.Queries
	}
}

// store stores new tokens [t, end) of a sequence.
func (p *appendPart[F]) store(r *appendRun[F], q *attn.Sequence, t, end, thread int) {
	g, heads := r.pages, r.pages.KVHeads
	if p.dim == 0 { // there is no such part
		return
	}
	for t < end {
		row := q.Row + t
		if p.turns == nil {
			to, n := slots(g, q, p.at, t, end-t)
			storeRows(&p.To, to, p.at, p.Rows, row*p.From.Row, p.From, n, heads, p.dim)
			t += n
			continue
		}
		turned := r.turned[thread*heads*p.dim:][:heads*p.dim]
		for h := range heads {
			turnRow(p.turns, row, turned[h*p.dim:][:p.dim], p.Rows[row*p.From.Row+h*p.From.Head:][:p.dim])
		}
		to, _ := slots(g, q, p.at, t, 1)
		storeRows(&p.To, to, p.at, turned, 0, attn.Strides{Row: len(turned), Head: p.dim}, 1, heads, p.dim)
		t++
	}
}

// slots returns where the keys of up to most new tokens lie, from token t on, and how many of them lie together.
func slots(g *attn.Problem, q *attn.Sequence, at attn.PageStrides, t, most int) (to, n int) {
	key := q.Keys - q.Queries + t
	slot := key % g.PageTokens
	return int(q.Pages[key/g.PageTokens])*at.Page + slot*at.Row, min(most, g.PageTokens-slot)
}

// check reports what is wrong with a part.
func (p *appendPart[F]) check(op string, g *attn.Problem, seqs []attn.Sequence) error {
	switch {
	case g.KVHeads < 1 || g.PageTokens < 1 || p.dim < 1:
		return attn.Errorf(op, attn.ErrShape, "%d KV heads, pages of %d tokens, rows of %d elements",
			g.KVHeads, g.PageTokens, p.dim)
	case p.From.Row < 0 || p.From.Head < 0:
		return attn.Errorf(op, attn.ErrShape, "source strides %+v", p.From)
	}
	if err := p.at.Check(op, "destination"); err != nil {
		return err
	}
	if err := p.To.Check(op, "the destination"); err != nil {
		return err
	}
	for i := range seqs {
		q := &seqs[i]
		if err := q.CheckAppend(op, i, g.PageTokens, func(page, slots int) bool {
			return p.at.Extent(page+1, g.KVHeads, slots, p.dim) <= p.To.Len
		}); err != nil {
			return err
		}
		if q.Queries > 0 && p.From.Extent(q.Row+q.Queries, g.KVHeads, p.dim) > len(p.Rows) {
			return attn.Errorf(op, attn.ErrShape, "sequence %d has rows [%d,%d), the source has %d elements",
				i, q.Row, q.Row+q.Queries, len(p.Rows))
		}
	}
	return nil
}

// storeRows stores n neighbouring rows of each head, in runs as long as both sides have them.
func storeRows[F lean.Float](dst *cpu.Buffer, to int, at attn.PageStrides, src []F, of int, from attn.Strides, n, heads, dim int) {
	switch {
	case at.Row == dim && from.Row == dim: // the rows of a head
		for h := range heads {
			vector.Store(dst, to+h*at.Head, src[of+h*from.Head:][:n*dim])
		}
	case at.Head == dim && from.Head == dim: // the heads of a row
		for r := range n {
			vector.Store(dst, to+r*at.Row, src[of+r*from.Row:][:heads*dim])
		}
	default:
		for h := range heads {
			for r := range n {
				vector.Store(dst, to+h*at.Head+r*at.Row, src[of+h*from.Head+r*from.Row:][:dim])
			}
		}
	}
}
