package attn

// Several GPUs can share the pages of a sequence. Attention to the pages of one GPU is attention to a part of the keys, and leaves a
// state. The states of all parts merge to the whole. All queries see all keys before the new tokens, so the order of these keys in a part makes
// no difference, and a part needs no mask. The new tokens are the last keys, and a part of their own.

// ContextShard is one of Of shards of the pages of a cache. Page p is in the shard with Index = p mod Of, and has the number p / Of there.
// The zero ContextShard has all pages, with their own numbers.
type ContextShard struct{ Index, Of int }

// Has reports whether a page is in the shard.
func (p ContextShard) Has(page int32) bool { return p.Of < 2 || int(page)%p.Of == p.Index }

// Own returns the number of a page in the shard.
func (p ContextShard) Own(page int32) int32 { return page / int32(max(p.Of, 1)) }

// Count returns how many of the pages [0, pages) are in the shard.
func (p ContextShard) Count(pages int) int {
	if p.Of < 2 {
		return pages
	}
	return (pages - p.Index + p.Of - 1) / p.Of
}

// AppendKeys appends to list the shard's pages of the first keys of a sequence, by their numbers in the shard. n is the number of keys in
// these pages. Only the last page of the sequence may be partly filled.
func (p ContextShard) AppendKeys(list, pages []int32, keys, pageTokens int) (own []int32, n int) {
	for at, page := range pages[:Ceil(keys, pageTokens)] {
		if p.Has(page) {
			list, n = append(list, p.Own(page)), n+min(pageTokens, keys-at*pageTokens)
		}
	}
	return list, n
}

// AppendSlots appends to slots, for each row, the slot of its new token in the shard: page*pageTokens + slot. The slot is -1 for a row of no
// sequence, for a token of another shard, and for one that is not stored.
func (p ContextShard) AppendSlots(slots []int, seqs []Sequence, rows, pageTokens int) []int {
	first := len(slots)
	for range rows {
		slots = append(slots, -1)
	}
	for i := range seqs {
		q := &seqs[i]
		if q.QueryOnly {
			continue
		}
		for t := range q.Queries {
			key := q.Keys - q.Queries + t
			if page := q.Pages[key/pageTokens]; p.Has(page) {
				slots[first+q.Row+t] = int(p.Own(page))*pageTokens + key%pageTokens
			}
		}
	}
	return slots
}

// OfPart returns the problem of attention to a part of the keys before the new tokens. Queries see all of these keys. The results are states in
// packed rows of heads heads. One part adds the sinks.
func (p *Problem) OfPart(heads int, sinks bool) Problem {
	of := *p
	of.Mask, of.Score = Mask{}, Score{Cap: p.Cap, Sinks: p.Sinks && sinks}
	of.state(heads)
	return of
}

// OfNew returns the problem of attention of new tokens among themselves, which leaves states as OfPart does. Memory has rows rows for each KV head,
// and the first row of a sequence is its page.
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

// state makes the results of p states: float32 in packed rows. If queries have the type of keys, kernels for other results round weights to
// that type, too, so p.Mixed allows the same here.
func (p *Problem) state(heads int) {
	p.Out, p.LSE = PackedRows(heads, p.ValueDim), PackedRows(heads, 1)
	p.Mixed = p.Mixed || p.QueryType == p.Pages.Key().DType
}
