package attn

import (
	"slices"
	"sort"
)

// Prefixes are ranges of keys that several sequences of a step have in common, since their page tables name the same
// pages, as those of forks do. Attention to such a range can be computed for the rows of all of them at once, and the
// states merged with those of the sequences' own keys. The zero Prefixes can be used; once its memory has grown,
// Find does not allocate.
type Prefixes struct {
	Found []Prefix
	Own   []int // of each sequence, how many of its keys are in prefixes: its own begin there
	Saved int   // how many keys less are read

	keys  []uint64
	order []int32 // sequences, those of a prefix side by side
	seqs  []Sequence
	page  int
	after bool // a query sees no key behind it
	least int
	left  int // queries that members of further prefixes may have
}

// Prefix is the keys [First, End) of some sequences, which begin and end with pages. All of their queries see all of them.
type Prefix struct {
	First, End int
	from, to   int // in order
}

// Members are the sequences that have p, by their numbers.
func (f *Prefixes) Members(p *Prefix) []int32 { return f.order[p.from:p.to] }

// AppendOwn appends the sequences that Find was given to own, without what of them is in prefixes.
func (f *Prefixes) AppendOwn(own, seqs []Sequence) []Sequence {
	for i, q := range seqs {
		q.Keys -= f.Own[i]
		q.Pages = q.Pages[f.Own[i]/f.page:]
		own = append(own, q)
	}
	return own
}

// Sequence is a prefix of sequences as one whose queries are those of all members, which lie somewhere else: Row is 0.
func (f *Prefixes) Sequence(p *Prefix, seqs []Sequence) Sequence {
	members := f.Members(p)
	s := Sequence{Keys: p.End - p.First, Pages: seqs[members[0]].Pages[p.First/f.page:]}
	for _, m := range members {
		s.Queries += seqs[m].Queries
	}
	return s
}

// AppendRows appends the rows of these queries.
func (f *Prefixes) AppendRows(rows []int32, p *Prefix, seqs []Sequence) []int32 {
	for _, m := range f.Members(p) {
		for r := range seqs[m].Queries {
			rows = append(rows, int32(seqs[m].Row+r))
		}
	}
	return rows
}

// Shareable are the features with which all queries of a step see the same in keys before them, so that they can attend to prefixes
// together. A way into an engine adds what it makes no difference to, as schedules.
const Shareable = Causal | Trees | Cap | Sinks | Rotates

// InParts are the features with which a way into an engine can attend to a sequence's keys in parts whose states merge, since no
// mask and no change of scores depends on where a key lies among those before the new tokens.
const InParts = Shareable&^Rotates | OtherValueDim | OtherPolicy | SetTiles | SetWorkers

// OfPrefixes is the problem of attention to prefixes, which leaves states: all rows see all of their keys, queries have been
// turned, and rows lie one behind the other.
func (p *Problem) OfPrefixes() Problem {
	of := *p
	of.Mask, of.Score, of.Rotary = Mask{}, Score{Cap: p.Cap}, Rotary{}
	of.Query, of.Out, of.LSE = PackedRows(p.Heads, p.Dim), PackedRows(p.Heads, p.ValueDim), PackedRows(p.Heads, 1)
	return of
}

// Find looks for prefixes of the sequences of a problem, by which at least so many keys are read less: those
// of a prefix for each member but one. With a causal mask they lie before all queries. The members of all prefixes have so many queries at most, each counted as often as
// it is a member. A sequence may be a member of several prefixes, one behind the other:
// where what forks have in common has been forked itself.
//
// That two sequences have a page at the same place says that they have all pages before it: pages come to be shared by
// forks alone.
func (f *Prefixes) Find(g *Problem, seqs []Sequence, least, queries int) {
	f.seqs, f.page, f.after, f.least = seqs, g.PageTokens, g.Causal, max(least, 1)
	f.Saved, f.left = 0, queries
	f.Found, f.order, f.Own = f.Found[:0], f.order[:0], f.Own[:0]
	for i := range seqs {
		f.Own = append(f.Own, 0)
		if seqs[i].Queries > 0 && f.whole(int32(i)) > 0 {
			f.order = append(f.order, int32(i))
		}
	}
	if len(f.order) > 1 {
		f.split(0, len(f.order), 0, 0)
	}
	f.seqs = nil
}

// whole returns how many pages of a sequence are full of keys that all of its queries see.
func (f *Prefixes) whole(i int32) int {
	n := f.seqs[i].Keys
	if f.after {
		n = max(n-f.seqs[i].Queries, 0)
	}
	return n / f.page
}

// split looks for prefixes among the sequences order[from:to], which have so many pages in common, and whose keys are in
// prefixes up to page begin.
func (f *Prefixes) split(from, to, common, begin int) {
	next := func(i int32) int32 { // the first page that may differ
		if f.whole(i) <= common {
			return -1
		}
		return f.seqs[i].Pages[common]
	}
	all := f.order[from:to]
	if !slices.ContainsFunc(all[1:], func(i int32) bool { return next(i) != next(all[0]) }) {
		if next(all[0]) >= 0 {
			f.group(from, to, common, begin)
		}
		return
	}
	f.keys = f.keys[:0]
	for _, i := range all {
		f.keys = append(f.keys, uint64(next(i)+1)<<32|uint64(i))
	}
	slices.Sort(f.keys)
	for n, key := range f.keys {
		all[n] = int32(uint32(key))
	}
	for len(all) > 0 {
		n := 1
		for n < len(all) && next(all[n]) == next(all[0]) {
			n++
		}
		if n > 1 && next(all[0]) >= 0 {
			f.group(from, from+n, common, begin)
		}
		from, all = from+n, all[n:]
	}
}

// group is split of sequences that have one more page in common at least.
func (f *Prefixes) group(from, to, common, begin int) {
	first := f.order[from]
	end := f.whole(first)
	a, rows := f.seqs[first].Pages, f.seqs[first].Queries
	for _, i := range f.order[from+1 : to] {
		b := f.seqs[i].Pages
		rows += f.seqs[i].Queries
		if end = min(end, f.whole(i)); a[end-1] != b[end-1] {
			end = common + sort.Search(end-common, func(n int) bool { return a[common+n] != b[common+n] })
		}
	}
	if saved := (end - begin) * f.page * (to - from - 1); saved >= f.least && rows <= f.left {
		f.Saved, f.left = f.Saved+saved, f.left-rows
		f.Found = append(f.Found, Prefix{First: begin * f.page, End: end * f.page, from: from, to: to})
		for _, i := range f.order[from:to] {
			f.Own[i] = end * f.page
		}
		begin = end
	}
	f.split(from, to, end, begin)
}
