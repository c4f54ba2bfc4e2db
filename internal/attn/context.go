package attn

// Keys of a sequence may lie in several memories, as those of GPUs: its pages are dealt out to them. Attention to what a
// memory has of a sequence is attention to a part of its keys. It leaves a state, and the states of all parts merge to the
// whole. Queries see all keys before them, so of these each part is in any order and without a mask. How new tokens see
// each other is another matter: they are the last keys, and a part of their own.

// Place is one of several memories that pages are dealt out to: it has each page p with p mod Of = Index, as its own
// page p / Of. The zero Place has all pages, as they are.
type Place struct{ Index, Of int }

// Has says whether a page lies there.
func (p Place) Has(page int32) bool { return p.Of < 2 || int(page)%p.Of == p.Index }

// Own returns the number that a page has there.
func (p Place) Own(page int32) int32 { return page / int32(max(p.Of, 1)) }

// Count returns how many of pages [0, pages) lie there.
func (p Place) Count(pages int) int {
	if p.Of < 2 {
		return pages
	}
	return (pages - p.Index + p.Of - 1) / p.Of
}

// AppendKeys appends the pages with the first keys of a sequence that lie there, by their numbers there, and returns how
// many keys these are. Only the last page of all may have fewer keys than tokens.
func (p Place) AppendKeys(list, pages []int32, keys, pageTokens int) (own []int32, n int) {
	for at, page := range pages[:Ceil(keys, pageTokens)] {
		if p.Has(page) {
			list, n = append(list, p.Own(page)), n+min(pageTokens, keys-at*pageTokens)
		}
	}
	return list, n
}

// AppendSlots appends for each of some rows where there its new token goes, page*pageTokens + slot; -1 for those of
// no sequence and those that go elsewhere.
func (p Place) AppendSlots(slots []int, seqs []Sequence, rows, pageTokens int) []int {
	first := len(slots)
	for range rows {
		slots = append(slots, -1)
	}
	for i := range seqs {
		q := &seqs[i]
		for t := range q.Queries {
			key := q.Keys - q.Queries + t
			if page := q.Pages[key/pageTokens]; p.Has(page) {
				slots[first+q.Row+t] = int(p.Own(page))*pageTokens + key%pageTokens
			}
		}
	}
	return slots
}

// OfPart returns the problem of attention to a part of the keys before the queries, which leaves states: rows see all
// of these keys, and outputs and log-sum-exps lie one behind the other, those of so many heads. One part has the sinks.
func (p *Problem) OfPart(heads int, sinks bool) Problem {
	of := *p
	of.Mask, of.Score = Mask{}, Score{Cap: p.Cap, Sinks: p.Sinks && sinks}
	of.state(heads)
	return of
}

// OfNew returns the problem of attention of new tokens among themselves, which leaves states as OfPart does. Their keys
// and values lie in memory of so many rows for each head: the row of a token is its page.
func (p *Problem) OfNew(rows int) Problem {
	of := *p
	of.Sinks = false
	of.state(p.Heads)
	for i := range of.Pages.planes() {
		plane := &of.Pages.Planes[i]
		plane.At = PageStrides{Page: plane.Dim, Head: rows * plane.Dim, Row: plane.Dim}
	}
	of.PageTokens = rows
	return of
}

// state has results of p be states. Where queries have the type of keys, so do weights elsewhere, too.
func (p *Problem) state(heads int) {
	p.Out, p.LSE = PackedRows(heads, p.ValueDim), PackedRows(heads, 1)
	p.Mixed = p.Mixed || p.QueryType == p.Pages.Key().DType
}
