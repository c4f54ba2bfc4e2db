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
func Append[F lean.Float](g *attn.Problem, seqs []attn.Sequence, dst Buffer, at attn.PageStrides, dim int, src []F, from attn.Strides) error {
	if err := checkAppend("append", g, seqs, dst, at, dim, src, from); err != nil {
		return err
	}
	for i := range seqs {
		q := &seqs[i]
		for t := 0; t < q.Queries; {
			to, n := slots(g, q, at, t, q.Queries-t)
			storeRows(&dst, to, at, src, (q.Row+t)*from.Row, from, n, g.KVHeads, dim)
			t += n
		}
	}
	return nil
}

// AppendTurned is Append of keys to those of a plan, whose rotary embedding turns them on their way. seqs are those that the
// plan was built of.
func AppendTurned[F lean.Float](p *Plan, seqs []attn.Sequence, dst Buffer, src []F, from attn.Strides) error {
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
	together := attn.Strides{Row: g.KVHeads * g.Dim, Head: g.Dim}
	turned := make([]F, together.Row)
	for i := range seqs {
		q := &seqs[i]
		for t := range q.Queries {
			row := q.Row + t
			for h := range g.KVHeads {
				turnRow(r, row, turned[h*g.Dim:][:g.Dim], src[row*from.Row+h*from.Head:][:g.Dim])
			}
			to, _ := slots(g, q, g.Key, t, 1)
			storeRows(&dst, to, g.Key, turned, 0, together, 1, g.KVHeads, g.Dim)
		}
	}
	return nil
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
	switch p := dst.at(i); dst.DType {
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
