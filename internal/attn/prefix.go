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
	Own   []int // of each sequence, how many of its keys are in prefixes
	Saved int   // how many keys less are read
	Turn  int   // changes with all of this, and where the queries of sequences in prefixes lie

	page  int
	limit limits
	first []int32 // of each sequence, the first page of which all of its queries see all keys
	full  []int32 // of each sequence, how many pages are full of keys that all of its queries see; 0: it is no member
	order []int32 // sequences that may be members, by their full pages, page by page: those of a prefix are side by side
	alike []int32 // of each place in order, how many full pages its sequence and the next one have in common
	rows  []rows  // of each place in order
	hides bool    // a window hides keys of some of them

	members []int32 // of all prefixes
	chosen  []int32 // those that members are where windows hide keys: not all of a node's sequences
	holes   []hole
	hidden  []int32 // of each sequence, how many pages are left out since no query sees a key of them
	last    []int32 // of each sequence, the number of its last hole behind 0: none
	pages   []int32 // of sequences without what is in prefixes
	nodes   []node  // of the tree of forks, those with the last sequences first
	above   []node  // scratch
	keys    []uint64
	moved   []int32
}

// limits are what Find was told, besides sequences.
type limits struct{ page, sequences, least, queries, sinks int }

// rows are those of a sequence's queries, and the first page of which these see all keys.
type rows struct{ first, n, page int }

// hole is the pages [first, end) of a sequence that are in a prefix, or that a window hides. before is the number of the hole before it, behind 0: none.
type hole struct{ before, first, end int32 }

// node is sequences order[from:to], which have so many pages in common, and no others.
type node struct{ from, to, pages int32 }

// Prefix is the keys [First, End) of some sequences, which begin and end with pages. All of their queries see all of them.
type Prefix struct {
	First, End int
	from, to   int // in Prefixes.members
}

// Members are the sequences that have p, by their numbers.
func (f *Prefixes) Members(p *Prefix) []int32 { return f.members[p.from:p.to] }

// AppendOwn appends the sequences that Find was given to own, without what of them is in prefixes. Of those that are in some it leaves out
// pages that a window hides, too.
func (f *Prefixes) AppendOwn(own, seqs []Sequence) []Sequence {
	at := len(own)
	own = append(own, seqs...)
	f.pages = f.pages[:0]
	for i, n := range f.Own {
		if n == 0 {
			continue
		}
		q := &own[at+i]
		if q.Keys -= n; !f.hides {
			q.Pages = q.Pages[n/f.page:]
			continue
		}
		q.Keys -= int(f.hidden[i]) * f.page // all that is seen is as far from the queries as it was
		// From the last one on: what is between two holes is brought behind what comes first.
		begin := len(f.pages)
		f.pages = f.appendWithout(f.pages, f.last[i], q.Pages)
		q.Pages = f.pages[begin:len(f.pages):len(f.pages)]
		if f.first[i] > 0 {
			q.Cut += n
		}
	}
	return own
}

// appendWithout appends a sequence's pages without what is in a hole and in those before it.
func (f *Prefixes) appendWithout(to []int32, at int32, pages []int32) []int32 {
	if at == 0 {
		return append(to, pages...)
	}
	h := f.holes[at-1]
	return append(f.appendWithout(to, h.before, pages[:h.first]), pages[h.end:]...)
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
		q := &seqs[m]
		rows = append(rows, int32(q.Row))
		for r := 1; r < q.Queries; r++ { // members have one at least
			rows = append(rows, int32(q.Row+r))
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
// then prefixes are cut, or sequences are members of none, see [Prefixes.Find]. A way into an engine adds what it makes no difference to, as schedules.
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
// of a prefix for each member but one. With a causal mask they lie before all queries. Sequences of which a window hides
// keys are members of prefixes of which all of their queries see all keys: what is their own is in front of these and behind, see [Sequence.Cut].
// With slopes they are members of none. The members of all prefixes have so many queries at most, each counted as often as
// it is a member. A sequence may be a member of several prefixes, one behind the other:
// where what forks have in common has been forked itself.
//
// That two sequences have a page at the same place says that they have all pages before it: pages come to be shared by
// forks alone.
//
// What it finds does not depend on what it found before. But sequences that were in order then mostly are again, a token
// later, and to see that is most of what Find does.
func (f *Prefixes) Find(g *Problem, seqs []Sequence, least, queries int) {
	now := limits{g.PageTokens, len(seqs), max(least, 1), queries, g.SinkTokens}
	f.hides = false
	f.page = now.page
	members := f.count(g, seqs)
	ordered, same := f.stillInOrder(seqs, members)
	if same && now == f.limit {
		return
	}
	f.limit = now
	f.Turn++
	if !ordered {
		f.order, f.alike, f.rows = f.order[:0], zeros(f.alike, members), zeros(f.rows, members)
		for i, n := range f.full {
			if n > 0 {
				f.order = append(f.order, int32(i))
			}
		}
		if members > 1 {
			f.sort(seqs, 0, members, 0)
		}
	}
	for at, i := range f.order {
		f.rows[at] = rows{seqs[i].Row, seqs[i].Queries, int(f.first[i])}
	}
	f.Saved, f.Found, f.Own = 0, f.Found[:0], zeros(f.Own, len(seqs))
	f.list()
	if f.hides {
		f.takeSeen(now.least, queries)
	} else {
		f.take(now.least, queries)
	}
}

// count says how many sequences may be members, and lists how many full pages each has.
func (f *Prefixes) count(g *Problem, seqs []Sequence) (members int) {
	f.full, f.first = zeros(f.full, len(seqs)), zeros(f.first, len(seqs))
	for i := range seqs {
		q := &seqs[i]
		seen := q.Keys
		if g.Causal {
			seen -= q.Queries
		}
		if q.Queries == 0 || seen < f.page {
			continue
		}
		if g.Window != 0 {
			if first, _ := g.Mask.Keys(q.Queries, q.Keys, q.Queries-1); first > 0 {
				// New keys are its own: a window that is narrower then is one still.
				seen = min(seen, q.Keys-q.Queries)
				if first = Ceil(first, f.page); g.Slopes != "" || first >= seen/f.page {
					continue
				}
				f.first[i], f.hides = int32(first), true
			}
		}
		f.full[i] = int32(seen / f.page)
		members++
	}
	return members
}

// zeros is so many of them, in the memory of s if that is enough.
func zeros[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n, 2*n)
	}
	s = s[:n]
	clear(s)
	return s
}

// next is the page of sequence i behind so many that are full, and -1 if there is none.
func (f *Prefixes) next(seqs []Sequence, i int32, pages int) int32 {
	if int(f.full[i]) <= pages {
		return -1
	}
	return seqs[i].Pages[pages]
}

// stillInOrder says whether order is that of these sequences, as it was that of others. Then alike is, too: only what has
// changed is looked for. same: they have in common what those had, and queries in the same rows.
func (f *Prefixes) stillInOrder(seqs []Sequence, members int) (ordered, same bool) {
	if len(f.order) != members {
		return false, false
	}
	same = true
	for at, b := range f.order {
		if int(b) >= len(seqs) || f.full[b] == 0 {
			return false, false
		}
		if same = same && f.rows[at] == (rows{seqs[b].Row, seqs[b].Queries, int(f.first[b])}); at == 0 {
			continue
		}
		a := f.order[at-1]
		x, y := seqs[a].Pages[:f.full[a]], seqs[b].Pages[:f.full[b]]
		most := min(len(x), len(y))
		n := min(int(f.alike[at-1]), most)
		if n > 0 && x[n-1] != y[n-1] {
			n = sort.Search(n-1, func(n int) bool { return x[n] != y[n] })
		} else if n < most && x[n] == y[n] {
			n += 1 + sort.Search(most-n-1, func(more int) bool { return x[n+1+more] != y[n+1+more] })
		}
		if f.alike[at-1] != int32(n) {
			same, f.alike[at-1] = false, int32(n)
		}
		if c, d := f.next(seqs, a, n), f.next(seqs, b, n); c > d || c == d && a > b {
			return false, false
		}
	}
	return true, same
}

// sort puts order[from:to] in order, which is that of their numbers and has so many pages in common.
func (f *Prefixes) sort(seqs []Sequence, from, to, pages int) {
	all := f.order[from:to]
	// What all have in common, and whether some end there.
	first := seqs[all[0]].Pages
	end := int(f.full[all[0]])
	for _, i := range all[1:] {
		b := seqs[i].Pages
		if end = min(end, int(f.full[i])); end > pages && first[end-1] != b[end-1] {
			end = pages + sort.Search(end-pages, func(n int) bool { return first[pages+n] != b[pages+n] })
		}
	}
	f.keys, f.moved = f.keys[:0], append(f.moved[:0], all...)
	for at, i := range all {
		f.keys = append(f.keys, uint64(f.next(seqs, i, end)+1)<<32|uint64(at))
	}
	if !slices.IsSorted(f.keys) {
		slices.Sort(f.keys)
		for n, key := range f.keys {
			all[n] = f.moved[uint32(key)]
		}
	}
	for len(all) > 0 { // f.keys are other ones when sort has been called
		n, page := 1, f.next(seqs, all[0], end)
		for n < len(all) && f.next(seqs, all[n], end) == page {
			n++
		}
		if page < 0 {
			for at := from; at < from+n; at++ {
				f.alike[at] = int32(end)
			}
		} else if n > 1 {
			f.sort(seqs, from, from+n, end+1)
		}
		f.alike[from+n-1] = int32(end) // the last one and the next are alike in what all are
		from, all = from+n, all[n:]
	}
}

// list lists the tree's nodes.
func (f *Prefixes) list() {
	// From the last place on: a node ends where sequences before it have less in common. Nodes that begin at one place end
	// one behind the other, the largest last.
	f.nodes, f.above = f.nodes[:0], f.above[:0]
	for at := len(f.order) - 2; at >= -1; at-- {
		n, to := int32(0), int32(at+2)
		if at >= 0 {
			n = f.alike[at]
		}
		for last := len(f.above) - 1; last >= 0 && f.above[last].pages > n; last-- {
			open := f.above[last]
			open.from, to = int32(at+1), open.to
			f.nodes, f.above = append(f.nodes, open), f.above[:last]
		}
		if last := len(f.above) - 1; n > 0 && (last < 0 || f.above[last].pages < n) {
			f.above = append(f.above, node{to: to, pages: n})
		}
	}
}

// take makes prefixes of the tree's nodes, from its root on, those that are worth it.
func (f *Prefixes) take(least, queries int) {
	f.members = f.order
	// above are the nodes around one that are prefixes.
	for _, n := range slices.Backward(f.nodes) {
		begin, members := int32(0), int(n.to-n.from)
		for last := len(f.above) - 1; last >= 0; last-- {
			if f.above[last].to > n.from {
				begin = f.above[last].pages
				break
			}
			f.above = f.above[:last]
		}
		saved := int(n.pages-begin) * f.page * (members - 1)
		if saved < least {
			continue
		}
		all := 0
		for _, r := range f.rows[n.from:n.to] {
			all += r.n
		}
		if all > queries {
			continue
		}
		f.Saved, queries = f.Saved+saved, queries-all
		f.Found = append(f.Found, Prefix{First: int(begin) * f.page, End: int(n.pages) * f.page, from: int(n.from), to: int(n.to)})
		for _, i := range f.order[n.from:n.to] {
			f.Own[i] = int(n.pages) * f.page
		}
		f.above = append(f.above, n)
	}
	f.above = f.above[:0]
}

// takeSeen is take where windows hide keys. Of a node those sequences are members that see enough: what they see later than the
// others is their own, or what others see earlier. It takes what saves most.
func (f *Prefixes) takeSeen(least, queries int) {
	f.chosen, f.holes, f.last, f.hidden = f.chosen[:0], f.holes[:0], zeros(f.last, len(f.Own)), zeros(f.hidden, len(f.Own))
	sinks := Ceil(f.limit.sinks, f.page)
	for _, n := range slices.Backward(f.nodes) {
		// The sequences by where they may begin.
		f.keys = f.keys[:0]
		for at := n.from; at < n.to; at++ {
			i := f.order[at]
			begin := f.first[i]
			if last := f.last[i]; last > 0 {
				begin = max(begin, f.holes[last-1].end)
			}
			f.keys = append(f.keys, uint64(begin)<<32|uint64(at))
		}
		slices.Sort(f.keys)
		members, begin, saved := 0, 0, 0
		all, rows := 0, 0
		for others, key := range f.keys {
			from := int(key >> 32)
			all += f.rows[uint32(key)].n
			if s := (int(n.pages) - from) * f.page * others; s > saved && all <= queries {
				members, begin, saved, rows = others+1, from, s, all
			}
		}
		if saved < least {
			continue
		}
		f.Saved, queries = f.Saved+saved, queries-rows
		p := Prefix{First: begin * f.page, End: int(n.pages) * f.page, from: len(f.chosen)}
		for _, key := range f.keys[:members] {
			at := uint32(key)
			i := f.order[at]
			// The last query's first key is in the page before first[i] or begins that one. The first query's is n-1 keys earlier at most. Of
			// pages in front nobody sees a key.
			if gone := int(f.first[i]) - 1 - Ceil(f.rows[at].n-1, f.page); f.last[i] == 0 && gone > sinks {
				f.hidden[i] = int32(gone - sinks)
				f.holes = append(f.holes, hole{0, int32(sinks), int32(gone)})
				f.last[i] = int32(len(f.holes))
			}
			f.holes = append(f.holes, hole{f.last[i], int32(begin), n.pages})
			f.chosen, f.last[i] = append(f.chosen, i), int32(len(f.holes))
			f.Own[i] += p.End - p.First
		}
		p.to = len(f.chosen)
		f.Found = append(f.Found, p)
	}
	f.members = f.chosen
}
