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
	full  []int32 // of each sequence, how many pages are full of keys that all of its queries see
	order []int32 // sequences, those of a prefix side by side
	seqs  []Sequence
	page  int
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

// AppendShifts appends, for each of these rows, how many keys it is nearer to the prefix in [Prefixes.Sequence] than it is in its
// own sequence, as a number that is mostly negative. With ALiBi the scores of a row would be slope times this more: its log-sum-exp,
//
//	LSE = ln sum_j e^(s_j + slope (j-p)) = slope (p'-p) + ln sum_j e^(s_j + slope (j-p'))
//
// is that of the position p' which Sequence gives it and, more, slope times its shift. Its output is the same.
func (f *Prefixes) AppendShifts(shifts []int32, p *Prefix, seqs []Sequence) []int32 {
	rows := 0
	for _, m := range f.Members(p) {
		rows += seqs[m].Queries
	}
	at := p.First + Position(rows, p.End-p.First, 0)
	for _, m := range f.Members(p) {
		q := &seqs[m]
		for r := range q.Queries {
			shifts = append(shifts, int32(at-Position(q.Queries, q.Keys, r)))
			at++
		}
	}
	return shifts
}

// Shareable are the features with which queries of a step can attend to prefixes together: they see the same in keys before them, or
// what differs is a number that is added to all scores of a row (slopes, see [Prefixes.AppendShifts]). A window may hide keys:
// sequences of which it does are members of no prefix. A way into an engine adds what it makes no difference to, as schedules.
const Shareable = Causal | Window | SinkTokens | Trees | Cap | SlopesOfHeads | Sinks | Rotates

// InParts are the features with which a way into an engine can attend to a sequence's keys in parts whose states merge, since no
// mask and no change of scores depends on where a key lies among those before the new tokens.
const InParts = Causal | Trees | Cap | Sinks | OtherValueDim | OtherPolicy | SetTiles | SetWorkers

// OfPrefixes is the problem of attention to prefixes, which leaves states: all rows see all of their keys, queries have been
// turned, and rows lie one behind the other. Of slopes log-sum-exps are to be shifted: [Prefixes.AppendShifts].
func (p *Problem) OfPrefixes() Problem {
	of := *p
	of.Mask, of.Score, of.Rotary = Mask{}, Score{Cap: p.Cap, Slopes: p.Slopes}, Rotary{}
	of.Query, of.Out, of.LSE = PackedRows(p.Heads, p.Dim), PackedRows(p.Heads, p.ValueDim), PackedRows(p.Heads, 1)
	return of
}

// Find looks for prefixes of the sequences of a problem, by which at least so many keys are read less: those
// of a prefix for each member but one. With a causal mask they lie before all queries. Sequences of which a window hides a
// key are members of none. The members of all prefixes have so many queries at most, each counted as often as
// it is a member. A sequence may be a member of several prefixes, one behind the other:
// where what forks have in common has been forked itself.
//
// That two sequences have a page at the same place says that they have all pages before it: pages come to be shared by
// forks alone.
func (f *Prefixes) Find(g *Problem, seqs []Sequence, least, queries int) {
	f.seqs, f.page, f.least = seqs, g.PageTokens, max(least, 1)
	f.Saved, f.left = 0, queries
	f.Found, f.order, f.Own, f.full = f.Found[:0], f.order[:0], f.Own[:0], f.full[:0]
	for i := range seqs {
		q := &seqs[i]
		seen := q.Keys
		if g.Causal {
			seen = max(seen-q.Queries, 0)
		}
		full := seen / f.page
		if g.Window != 0 && full > 0 {
			if first, _ := g.Mask.Keys(q.Queries, q.Keys, q.Queries-1); first > 0 {
				full = 0
			}
		}
		f.Own, f.full = append(f.Own, 0), append(f.full, int32(full))
		if q.Queries > 0 && full > 0 {
			f.order = append(f.order, int32(i))
		}
	}
	if len(f.order) > 1 {
		f.split(0, len(f.order), 0, 0)
	}
	f.seqs = nil
}

// split looks for prefixes among the sequences order[from:to], which have so many pages in common, and whose keys are in
// prefixes up to page begin.
func (f *Prefixes) split(from, to, common, begin int) {
	next := func(i int32) int32 { // the first page that may differ
		if int(f.full[i]) <= common {
			return -1
		}
		return f.seqs[i].Pages[common]
	}
	all := f.order[from:to]
	f.keys = f.keys[:0]
	alike, page := true, next(all[0])
	for _, i := range all {
		n := next(i)
		alike = alike && n == page
		f.keys = append(f.keys, uint64(n+1)<<32|uint64(i))
	}
	if alike {
		if page >= 0 {
			f.group(from, to, common, begin)
		}
		return
	}
	slices.Sort(f.keys)
	for n, key := range f.keys {
		all[n] = int32(uint32(key))
	}
	for len(all) > 0 { // f.keys are other ones when group has been called
		n, page := 1, next(all[0])
		for n < len(all) && next(all[n]) == page {
			n++
		}
		if n > 1 && page >= 0 {
			f.group(from, from+n, common, begin)
		}
		from, all = from+n, all[n:]
	}
}

// group is split of sequences that have one more page in common at least.
func (f *Prefixes) group(from, to, common, begin int) {
	first := f.order[from]
	end := int(f.full[first])
	a, rows := f.seqs[first].Pages, f.seqs[first].Queries
	for _, i := range f.order[from+1 : to] {
		b := f.seqs[i].Pages
		rows += f.seqs[i].Queries
		if end = min(end, int(f.full[i])); a[end-1] != b[end-1] {
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
