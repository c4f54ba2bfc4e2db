package attn

import (
	"math"
	"slices"
)

// Sequence is one sequence's part of a step: query position i is row Row+i of the queries and outputs,
// and key j is in page Pages[j/PageTokens], slot j%PageTokens. Engines do not read entries of Pages beyond the last key. Rows of different
// sequences do not overlap.
//
// The last keys of a sequence with a Tree are those of its queries.
type Sequence struct {
	Row, Queries, Keys int
	Pages              []int32
	Cut                int   // keys that were removed within the window: the window is narrower by this number
	Tree               Tree  // of the queries; nil: none
	Before             int   // tokens of the sequence whose pages were released
	Positions          []int // of the queries, for rotary embeddings and position tables; nil: the positions in the sequence
	QueryOnly          bool  // keys and values of the queries are not stored; there is one query
}

// Position returns the position of query i for rotary embeddings: Positions[i] if given, else the index of the token in its sequence, counted
// from 0. The index of a token of a tree follows from its depth.
func (q *Sequence) Position(i int) int {
	if q.Positions != nil {
		return q.Positions[i]
	}
	depth := i
	if q.Tree != nil {
		depth = q.Tree.Depth(i)
	}
	keys := q.Keys
	if q.QueryOnly { // the queries stand behind the keys
		keys += q.Queries
	}
	return q.Before + Position(q.Queries, keys, depth)
}

// Narrowed returns m with the window of the sequence.
func (q *Sequence) Narrowed(m Mask) Mask {
	m.Window -= q.Cut
	return m
}

// HasTrees reports whether a sequence has a tree.
func HasTrees(seqs []Sequence) bool {
	for i := range seqs {
		if seqs[i].Tree != nil {
			return true
		}
	}
	return false
}

// CheckTree returns an error if the tree of sequence i does not fit.
func (q *Sequence) CheckTree(op string, i int, m Mask) error {
	switch {
	case q.Tree == nil:
		return nil
	case !m.Tree:
		return Errorf(op, ErrShape, "sequence %d has a tree, and the problem is of none", i)
	case q.Keys < q.Queries:
		return Errorf(op, ErrShape, "sequence %d has a tree of %d tokens and %d keys", i, q.Queries, q.Keys)
	}
	if err := q.Tree.Check(q.Queries); err != nil {
		return Errorf(op, ErrShape, "sequence %d: %v", i, err)
	}
	return nil
}

// Check returns an error if sequence i is malformed.
func (q *Sequence) Check(op string, i, pageTokens int) error {
	if err := q.CheckSize(op, i, pageTokens); err != nil || q.Queries == 0 {
		return err
	}
	if pages := q.Live(pageTokens); Highest(pages) > math.MaxInt32 {
		j := slices.IndexFunc(pages, func(page int32) bool { return page < 0 })
		return Errorf(op, ErrPage, "sequence %d names page %d at %d", i, pages[j], j)
	}
	return nil
}

// Live returns the pages with keys.
func (q *Sequence) Live(pageTokens int) []int32 { return q.Pages[:Ceil(q.Keys, pageTokens)] }

// CheckSize is Check without the range of page numbers.
func (q *Sequence) CheckSize(op string, i, pageTokens int) error {
	if q.Row < 0 || q.Queries < 0 || q.Keys < 0 || q.Row > math.MaxInt-q.Queries {
		return Errorf(op, ErrShape, "sequence %d has row %d, %d queries, %d keys", i, q.Row, q.Queries, q.Keys)
	}
	if q.Queries == 0 {
		return nil
	}
	if len(q.Pages) < Ceil(q.Keys, pageTokens) {
		return Errorf(op, ErrPage, "sequence %d has %d pages of %d tokens for %d keys",
			i, len(q.Pages), pageTokens, q.Keys)
	}
	return nil
}

// Highest returns the highest page; 0 for no pages. A negative page counts as higher than all others. Four independent chains of comparisons
// hide the latency of each comparison.
func Highest(pages []int32) uint32 {
	var a, b, c, d uint32
	for len(pages) >= 8 {
		x := pages[:8]
		a, b, c, d = max(a, uint32(x[0])), max(b, uint32(x[1])), max(c, uint32(x[2])), max(d, uint32(x[3]))
		a, b, c, d = max(a, uint32(x[4])), max(b, uint32(x[5])), max(c, uint32(x[6])), max(d, uint32(x[7]))
		pages = pages[8:]
	}
	for _, page := range pages {
		a = max(a, uint32(page))
	}
	return max(a, b, c, d)
}

// Ceil returns ceil(n/size) for n >= 0: the number of pages or LeanTiles of n tokens.
func Ceil(n, size int) int {
	if n == 0 {
		return 0
	}
	return (n-1)/size + 1
}

// CheckAppend returns an error if sequence i appends to slots that do not exist. fits reports whether the first slots slots of a page are in the
// destination.
func (q *Sequence) CheckAppend(op string, i, pageTokens int, fits func(page, slots int) bool) error {
	if q.Row < 0 || q.Queries < 0 || q.Keys < q.Queries || q.Row > math.MaxInt-q.Queries {
		return Errorf(op, ErrShape, "sequence %d has row %d, %d queries, %d keys", i, q.Row, q.Queries, q.Keys)
	}
	if q.Queries == 0 {
		return nil
	}
	live := Ceil(q.Keys, pageTokens)
	if len(q.Pages) < live {
		return Errorf(op, ErrPage, "sequence %d has %d pages of %d tokens for %d keys",
			i, len(q.Pages), pageTokens, q.Keys)
	}
	for j := (q.Keys - q.Queries) / pageTokens; j < live; j++ {
		page, slots := int(q.Pages[j]), min(q.Keys-j*pageTokens, pageTokens)
		if page < 0 || !fits(page, slots) {
			return Errorf(op, ErrPage, "sequence %d names page %d at %d", i, page, j)
		}
	}
	return nil
}
