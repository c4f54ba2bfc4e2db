package attn

import (
	"slices"
	"sort"
)

// Prefixes are ranges of keys that several sequences of a step share: their page tables name the same pages, as the tables of forks do.
// An engine can attend to a shared range once, for the rows of all of these sequences, and merge the states with those of the
// sequences' own keys. The zero Prefixes is ready for use. Find does not allocate after its memory has grown.
type Prefixes struct {
	Found []Prefix
	Own   []int // for each sequence, the number of its keys in prefixes
	Saved int   // the number of keys that need not be read again
	Turn  int   // changes with the prefixes, and with the rows of their members

	page  int
	limit limits
	first []int32 // for each sequence, the first page of which all of its queries see all keys
	full  []int32 // for each sequence, the number of full pages whose keys all of its queries see; 0: no member
	order []int32 // possible members, sorted by their full pages, so that the members of a prefix are neighbours
	alike []int32 // for each index of order, the number of full pages that its sequence shares with the next
	rows  []rows  // for each index of order
	hides bool    // a window hides keys of some sequence

	members []int32 // of all prefixes
	chosen  []int32 // the members if windows hide keys: a part of a node's sequences
	holes   []hole
	hidden  []int32 // for each sequence, the number of pages that are left out because no query sees their keys
	last    []int32 // for each sequence, 1 + the index of its last hole; 0: none
	pages   []int32 // of sequences, without those in prefixes
	nodes   []node  // of the tree of forks, from the last sequences to the first
	above   []node  // scratch
	keys    []uint64
	moved   []int32
}

// limits are the arguments of Find besides the sequences.
type limits struct{ page, sequences, least, queries, sinks int }

// rows are the rows of a sequence's queries, and the first page of which all queries see all keys.
type rows struct{ first, n, page int }

// hole is pages [first, end) of a sequence that are in a prefix or hidden by a window. before is 1 + the index of the hole before; 0: none.
type hole struct{ before, first, end int32 }

// node is the sequences order[from:to], which are all that share their first pages pages.
type node struct{ from, to, pages int32 }

// Prefix is the keys [First, End) of its members, from the beginning of a page to the end of one. All queries of the members see all of these
// keys.
type Prefix struct {
	First, End int
	from, to   int // in Prefixes.members
}

// Members returns the numbers of the sequences that share p.
func (f *Prefixes) Members(p *Prefix) []int32 { return f.members[p.from:p.to] }

// AppendOwn appends the sequences of Find to own, without their keys in prefixes. If a member has a window, AppendOwn also removes the pages
// that the window hides.
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
		q.Keys -= int(f.hidden[i]) * f.page // distances from the queries to visible keys stay the same
		// The pages between holes are appended from the first to the last.
		begin := len(f.pages)
		f.pages = f.appendWithout(f.pages, f.last[i], q.Pages)
		q.Pages = f.pages[begin:len(f.pages):len(f.pages)]
		if f.first[i] > 0 {
			q.Cut += n
		}
	}
	return own
}

// appendWithout appends the pages of a sequence without those in hole at and in the holes before it.
func (f *Prefixes) appendWithout(to []int32, at int32, pages []int32) []int32 {
	if at == 0 {
		return append(to, pages...)
	}
	h := f.holes[at-1]
	return append(f.appendWithout(to, h.before, pages[:h.first]), pages[h.end:]...)
}

// Sequence returns a sequence with the keys of p and the queries of all members. Its Row is 0: AppendRows lists the rows.
func (f *Prefixes) Sequence(p *Prefix, seqs []Sequence) Sequence {
	members := f.Members(p)
	s := Sequence{Keys: p.End - p.First, Pages: seqs[members[0]].Pages[p.First/f.page:]}
	for _, m := range members {
		s.Queries += seqs[m].Queries
	}
	return s
}

// AppendRows appends the rows of the queries of [Prefixes.Sequence].
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

// AppendShifts appends, for each row of AppendRows, the shift p'-p. p is the position of the query in its own sequence, and p' its position in
// [Prefixes.Sequence]. With ALiBi the outputs are the same, and the log-sum-exps differ by slope times the shift:
//
//	LSE = ln sum_j e^(s_j + slope (j-p)) = slope (p'-p) + ln sum_j e^(s_j + slope (j-p'))
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

// Shareable are the features with which the queries of several sequences can attend to a prefix together. The scores of a query and a key of the
// prefix are then the same for all members, up to a number for each row (see [Prefixes.AppendShifts]). A window may hide keys of a prefix: see
// [Prefixes.Find]. Each engine adds the features that make no difference to it, such as schedules.
const Shareable = Causal | Window | SinkTokens | Trees | Cap | SlopesOfHeads | Sinks | Rotates | RotatesBehind

// InParts are the features with which an engine can attend to parts of a sequence's keys and merge their states: no mask and no change of scores
// depends on the index of a key before the new tokens.
const InParts = Causal | Trees | Cap | Sinks | OtherValueDim | SeveralPlanes | ValuesInKeys | SeveralTypes | Scaled | OtherPolicy | SetTiles | SetWorkers

// OfPrefixes returns the problem of attention to prefixes, which leaves states. All rows see all keys, queries are rotated already, and rows
// are packed. With slopes the caller has to shift the log-sum-exps: [Prefixes.AppendShifts].
func (p *Problem) OfPrefixes() Problem {
	of := *p
	of.Mask, of.Score, of.Rotary = Mask{}, Score{Cap: p.Cap, Slopes: p.Slopes}, Rotary{}
	of.Query, of.Out, of.LSE = PackedRows(p.Heads, p.Dim), PackedRows(p.Heads, p.ValueDim), PackedRows(p.Heads, 1)
	return of
}

// Find finds prefixes of the sequences of a problem.
//
//   - A prefix saves its keys for each member but one. Find takes prefixes that save at least least keys.
//   - With a causal mask a prefix is before all queries of its members.
//   - If a window hides keys of a sequence, the sequence is a member only of prefixes of which all of its queries see all keys. Its own keys
//     are then before and after the prefix: see [Sequence.Cut]. With slopes, such a sequence is no member.
//   - The members of all prefixes have at most queries queries. A query counts once for each prefix.
//   - A sequence can be a member of several consecutive prefixes, if a fork was forked again.
//
// Two sequences with the same page at one index share all pages before that index, because only forks share pages.
//
// The result does not depend on earlier calls. But most steps keep the order of the sequences, so Find checks the last order before it sorts.
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

// count returns the number of possible members, and sets f.full and f.first.
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
				// New keys are the sequence's own, so that the window stays one when it is narrowed.
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

// zeros returns n zeros, in the memory of s if it is large enough.
func zeros[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n, 2*n)
	}
	s = s[:n]
	clear(s)
	return s
}

// next returns full page number pages of sequence i; -1 if there is none.
func (f *Prefixes) next(seqs []Sequence, i int32, pages int) int32 {
	if int(f.full[i]) <= pages {
		return -1
	}
	return seqs[i].Pages[pages]
}

// stillInOrder reports whether f.order, from an earlier call, is the order of these sequences. If so, it updates f.alike. same reports that nothing
// changed: neither the shared pages nor the rows of the queries.
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

// sort sorts order[from:to], which share their first pages pages and are in the order of their numbers.
func (f *Prefixes) sort(seqs []Sequence, from, to, pages int) {
	all := f.order[from:to]
	// end is the number of pages that all share.
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
	for len(all) > 0 { // a recursive sort overwrites f.keys
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
		f.alike[from+n-1] = int32(end) // the last sequence and the next share what all share
		from, all = from+n, all[n:]
	}
}

// list lists the nodes of the tree.
func (f *Prefixes) list() {
	// From the last index down. A node begins where a sequence shares fewer pages with the one before. Of nodes that begin at one index
	// the largest comes last.
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

// take makes prefixes of the nodes that save enough, from the root on.
func (f *Prefixes) take(least, queries int) {
	f.members = f.order
	// above are the nodes that contain the current node and are prefixes.
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

// takeSeen is take if windows hide keys. The members of a node are the sequences that see enough of its pages. takeSeen chooses the members that
// save most.
func (f *Prefixes) takeSeen(least, queries int) {
	f.chosen, f.holes, f.last, f.hidden = f.chosen[:0], f.holes[:0], zeros(f.last, len(f.Own)), zeros(f.hidden, len(f.Own))
	sinks := Ceil(f.limit.sinks, f.page)
	for _, n := range slices.Backward(f.nodes) {
		// The sequences, sorted by the first page that they see.
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
			// The first key of the last query is in the page before first[i], or begins page first[i]. The first key of the first query is at most
			// n-1 keys earlier. No query sees a key of the pages before.
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
