package attention

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/vector"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/lean"
)

// Append stores the rows of a step's keys (or values) in dst, rounded to dst's type:
//
//	dst[page][head][slot] = src[seqs[s].Row+i][head]
//
// for token i of seqs[s], whose key has position Keys-Queries+i, in page and slot. dst has strides at, src has strides
// from. Both have rows of dim elements. Append uses KVHeads and PageTokens of g. Everything is checked before anything
// is written. Errors wrap ErrShape, ErrDType or ErrPage.
func Append[F lean.Float](e *cpu.Engine, g *attn.Problem, seqs []attn.Sequence, dst cpu.Buffer, at attn.PageStrides, dim int, src []F, from attn.Strides) error {
	r := appendRun[F]{pages: g, seqs: seqs}
	plane := attn.Plane{DType: dst.DType, Dim: dim, At: at}
	r.parts[0] = appendPart[F]{NewRows: NewRows[F]{src, from}, dim: dim}
	r.parts[0].add(&plane, dst, cpu.Buffer{})
	return r.run(e, r.parts[:1])
}

// NewRows has the rows of a step's keys, or of its values: src and from of Append.
type NewRows[F lean.Float] struct {
	Rows []F
	From attn.Strides
}

// AppendLayer is Append of a layer's keys and values to the planes of the plan's problem. If the plan has a rotary
// embedding, AppendLayer rotates the keys. If values are parts of their keys, values.Rows must be nil. seqs are the
// sequences of the plan's Build.
func AppendLayer[F lean.Float](e *cpu.Engine, p *Plan, seqs []attn.Sequence, to *attn.Memory[cpu.Buffer], keys, values NewRows[F]) error {
	g := &p.g
	f := &g.Pages
	r := appendRun[F]{pages: g, seqs: seqs}
	r.parts[0] = appendPart[F]{NewRows: keys, dim: g.Dim}
	for i := range f.KeyPlanes {
		r.parts[0].add(&f.Planes[i], to[i].Data, to[i].Scales)
	}
	parts := r.parts[:1]
	switch v := f.Value.Plane; {
	case !f.InKeys():
		r.parts[1] = appendPart[F]{NewRows: values, dim: g.ValueDim}
		r.parts[1].add(&f.Planes[v], to[v].Data, to[v].Scales)
		parts = r.parts[:]
	case values.Rows != nil:
		return attn.Errorf("append", attn.ErrShape, "values are parts of their keys in these pages: pass no values")
	}
	if p.rotation.turns() {
		r.parts[0].turns = &p.rotation
		for i := range seqs {
			if q, rows := &seqs[i], p.rotation.rows(); q.Queries > 0 && q.Row+q.Queries > rows {
				return attn.Errorf("append", attn.ErrShape, "sequence %d has rows [%d,%d), and the plan rotates %d rows", i, q.Row, q.Row+q.Queries, rows)
			}
		}
	}
	return r.run(e, parts)
}

// scaledNanos is the time of one thread for an element that is scaled and rounded to 8 or 4 bits.
const scaledNanos = 4

// appendRun is one call: all new tokens, in the order of the sequences, divided evenly among the workers.
type appendRun[F lean.Float] struct {
	pages         *attn.Problem
	seqs          []attn.Sequence
	parts         [2]appendPart[F] // of keys, of values, or of both
	rows, workers int
	turned        []F // a row for each thread
}

// appendPart has the keys of a call, or the values.
type appendPart[F lean.Float] struct {
	NewRows[F]
	dim    int
	planes [attn.MostPlanes]appendPlane // the planes of a row
	count  int
	turns  *rotation // nil: rows are stored without rotation
}

// appendPlane is a plane and its memory.
type appendPlane struct {
	attn.Plane
	data, scales cpu.Buffer
}

func (p *appendPart[F]) add(plane *attn.Plane, data, scales cpu.Buffer) {
	p.planes[p.count] = appendPlane{*plane, data, scales}
	p.count++
}

func (r *appendRun[F]) run(e *cpu.Engine, parts []appendPart[F]) error {
	width, turned := 0, 0 // elements of a row
	for i := range parts {
		p := &parts[i]
		if err := p.check("append", r.pages, r.seqs); err != nil {
			return err
		}
		if width += p.dim; p.changes() {
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
	if x := &parts[0].planes[0]; x.Scales != attn.NoScales || x.DType == attn.Q4 {
		nanos = scaledNanos
	}
	heads := r.pages.KVHeads
	work := float64(r.rows) * float64(heads) * (float64(width)*nanos + float64(turned)*cpu.ElementNanos)
	threads := min(cpu.ThreadsFor(work), r.rows)
	r.turned = make([]F, max(threads, 1)*heads*turned)
	for i := range parts {
		parts[i].scalePages(r)
	}
	if threads < 2 {
		r.store(0, r.rows, 0)
		return nil
	}
	shared := *r // a copy, so that r does not escape: with one thread nothing is allocated
	shared.workers = min(threads*cpu.SharesFor(work, threads, cpu.RowShareNanos), r.rows)
	e.Must(&shared, shared.workers, threads)
	return nil
}

func (r *appendRun[F]) Work(w, thread int) {
	r.store(w*r.rows/r.workers, (w+1)*r.rows/r.workers, thread)
}

// store stores rows [first, end) of all new rows.
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
	simple := p.count == 1 && p.planes[0].Scales == attn.NoScales
	for t < end {
		n := 1
		src, of, from := p.row(r, q.Row+t, thread)
		page, slot := slots(g, q, t)
		if simple {
			if !p.changes() {
				n = min(end-t, g.PageTokens-slot)
			}
			x := &p.planes[0]
			storeRows(&x.data, page*x.At.Page+slot*x.At.Row, x.At, src, of, from, n, heads, p.dim, x.Elements())
		} else {
			for h := range heads {
				head := src[of+h*from.Head:][:p.dim]
				for i := range p.planes[:p.count] {
					x := &p.planes[i]
					storeScaled(x, x.At.Offset(page, h, slot), x.ScaleOf(page, h, slot, heads, g.PageTokens), head[:x.Dim])
					head = head[x.Dim:]
				}
			}
		}
		t += n
	}
}

// changes reports whether rows are rotated or mixed before they are stored.
func (p *appendPart[F]) changes() bool { return p.turns != nil || p.planes[0].Mixed }

// row returns the memory of a row as it is stored: rotated and mixed, if the part is. The result is valid until the thread's next call.
func (p *appendPart[F]) row(r *appendRun[F], row, thread int) (src []F, of int, from attn.Strides) {
	of = row * p.From.Row
	if !p.changes() {
		return p.Rows, of, p.From
	}
	heads := r.pages.KVHeads
	turned := r.turned[thread*heads*p.dim:][:heads*p.dim]
	for h := range heads {
		to, src := turned[h*p.dim:][:p.dim], p.Rows[of+h*p.From.Head:][:p.dim]
		if p.turns != nil {
			turnRow(p.turns, row, to, src)
			src = to
		}
		if p.planes[0].Mixed {
			const largest = half.Q4Largest / half.Q4Columns // sums are finite
			for i, x := range src {
				to[i] = min(max(x, -largest), largest)
			}
			half.MixQ4(to)
		}
	}
	return turned, 0, attn.Strides{Row: len(turned), Head: p.dim}
}

// scalePages sets the scales of the pages whose first tokens are new, in planes with scales of pages.
func (p *appendPart[F]) scalePages(r *appendRun[F]) {
	first := 0 // element of a row
	for i := range p.planes[:p.count] {
		x := &p.planes[i]
		first += x.Dim
		if x.Scales != attn.ScalesByPage {
			continue
		}
		for s := range r.seqs {
			q := &r.seqs[s]
			for t := range q.Queries {
				page, slot := slots(r.pages, q, t)
				if slot > 0 {
					continue
				}
				src, of, from := p.row(r, q.Row+t, 0)
				for h := range r.pages.KVHeads {
					row := src[of+h*from.Head+first-x.Dim:][:x.Dim]
					*(*float32)(x.scales.At(x.ScaleOf(page, h, 0, r.pages.KVHeads, r.pages.PageTokens))) = pageScaleOf(row, x.DType)
				}
			}
		}
	}
}

// slots returns the place of new token t's key.
func slots(g *attn.Problem, q *attn.Sequence, t int) (page, slot int) {
	key := q.Keys - q.Queries + t
	return int(q.Pages[key/g.PageTokens]), key % g.PageTokens
}

// check returns an error if the part does not fit the problem or the sequences.
func (p *appendPart[F]) check(op string, g *attn.Problem, seqs []attn.Sequence) error {
	switch {
	case g.KVHeads < 1 || g.PageTokens < 1 || p.dim < 1:
		return attn.Errorf(op, attn.ErrShape, "%d KV heads, pages of %d tokens, rows of %d elements",
			g.KVHeads, g.PageTokens, p.dim)
	case p.From.Row < 0 || p.From.Head < 0:
		return attn.Errorf(op, attn.ErrShape, "source strides %+v: they must not be negative", p.From)
	}
	for i := range seqs {
		if q := &seqs[i]; q.Queries > 0 && p.From.Extent(q.Row+q.Queries, g.KVHeads, p.dim) > len(p.Rows) {
			return attn.Errorf(op, attn.ErrShape, "sequence %d has rows [%d,%d), the source has %d elements",
				i, q.Row, q.Row+q.Queries, len(p.Rows))
		}
	}
	for i := range p.planes[:p.count] {
		if err := p.planes[i].check(op, g, seqs); err != nil {
			return err
		}
	}
	return nil
}

// check returns an error if the plane does not fit the problem or the sequences.
func (x *appendPlane) check(op string, g *attn.Problem, seqs []attn.Sequence) error {
	if err := x.At.Check(op, "destination"); err != nil {
		return err
	}
	if err := x.data.Check(op, "the destination"); err != nil {
		return err
	}
	if x.data.DType != x.DType {
		return attn.Errorf(op, attn.ErrDType, "the destination is %v, the plan is for %v", x.data.DType, x.DType)
	}
	if x.Scales != attn.NoScales {
		if err := checkScales(op, &x.scales); err != nil {
			return err
		}
	}
	for i := range seqs {
		if err := seqs[i].CheckAppend(op, i, g.PageTokens, func(page, slots int) bool {
			return x.At.Extent(page+1, g.KVHeads, slots, x.Elements()) <= x.data.Len && x.ScaleLen(page+1, g.KVHeads, g.PageTokens) <= x.scales.Len
		}); err != nil {
			return err
		}
	}
	return nil
}

// storeRows stores n consecutive rows of each head, in runs that are contiguous on both sides.
func storeRows[F lean.Float](dst *cpu.Buffer, to int, at attn.PageStrides, src []F, of int, from attn.Strides, n, heads, dim, elements int) {
	switch {
	case at.Row == elements && from.Row == dim: // the rows of a head
		for h := range heads {
			vector.Store(dst, to+h*at.Head, src[of+h*from.Head:][:n*dim])
		}
	case at.Head == elements && from.Head == dim: // the heads of a row
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
