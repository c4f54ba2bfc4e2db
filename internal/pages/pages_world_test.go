package pages

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"pgregory.net/rapid"
)

// world is a pool with all who hold its pages, and the memory that the pages stand for.
type world struct {
	pool   *Pool
	memory []int // token in each slot of each page
	last   int   // token that was made last

	sequences []*sequence
	holds     [][]int32 // lists of pages that somebody only reads
}

// sequence is a table with the tokens that it must have.
type sequence struct {
	table  Table
	tokens []int
	gap    Gap // of the tokens, those that it need not have

	append Reservation
	fresh  []int // tokens of the append
}

func newWorld(t *rapid.T) *world {
	count, size := rapid.IntRange(1, 12).Draw(t, "pages"), rapid.IntRange(1, 5).Draw(t, "tokens of a page")
	return &world{pool: NewSharded(count, size, rapid.IntRange(1, 3).Draw(t, "places")), memory: make([]int, count*size)}
}

// slot is where a token is whose pages, and those of its gap, are these.
func (w *world) slot(list []int32, gap Gap, token int) *int {
	if token >= gap.End {
		token -= w.pool.Shift(&Table{Gap: gap})
	}
	size := w.pool.size
	return &w.memory[int(list[token/size])*size+token%size]
}

// has says whether a token is in no gap.
func (g Gap) has(token int) bool { return token < g.First || token >= g.End }

// pick draws a sequence whose append is open, or one whose append is not. It skips the
// action if there is none.
func (w *world) pick(t *rapid.T, open bool) *sequence {
	var of []*sequence
	for _, s := range w.sequences {
		if s.table.open == open {
			of = append(of, s)
		}
	}
	if len(of) == 0 {
		t.Skip("no such sequence")
	}
	return rapid.SampledFrom(of).Draw(t, "sequence")
}

func (w *world) New(t *rapid.T) { w.sequences = append(w.sequences, new(sequence)) }

func (w *world) Clone(t *rapid.T) {
	s := w.pick(t, false)
	table, err := w.pool.Clone(&s.table)
	ok(t, err)
	w.sequences = append(w.sequences, &sequence{table: table, tokens: slices.Clone(s.tokens), gap: s.gap})
}

func (w *world) Truncate(t *rapid.T) {
	s := w.pick(t, false)
	n := rapid.IntRange(0, len(s.tokens)).Draw(t, "tokens")
	err := w.pool.Truncate(&s.table, n)
	if n > s.gap.First && n < s.gap.End {
		refused(t, err, ErrTokens)
		return
	}
	ok(t, err)
	if s.tokens = s.tokens[:n]; n <= s.gap.First {
		s.gap = Gap{}
	}
}

// Drop makes a gap, or a longer one.
func (w *world) Drop(t *rapid.T) {
	s := w.pick(t, false)
	g := s.gap
	if g == (Gap{}) {
		g.First = rapid.IntRange(0, len(s.tokens)).Draw(t, "first")
		g.End = g.First
	}
	g.End = rapid.IntRange(g.End, len(s.tokens)).Draw(t, "end")
	ok(t, w.pool.Drop(&s.table, g))
	s.gap = g
}

// Own writes some tokens of a sequence anew, and those of nobody else; or it undoes what it did.
func (w *world) Own(t *rapid.T) {
	s := w.pick(t, false)
	if len(s.tokens) == 0 {
		t.Skip("no tokens")
	}
	p := w.pool
	from := rapid.IntRange(0, len(s.tokens)-1).Draw(t, "from")
	to := rapid.IntRange(from+1, len(s.tokens)).Draw(t, "to")
	pages := map[int32]bool{}
	for i := from; i < to; i++ {
		if !s.gap.has(i) {
			refused(t, second(p.Own(&s.table, from, to)), ErrTokens)
			return
		}
		if page, _ := p.Place(&s.table, i); p.holders[page] > 1 {
			pages[page] = true
		}
	}
	before, free := w.state(), p.Free()
	owned, err := p.Own(&s.table, from, to)
	if len(pages) > free {
		refused(t, err, ErrFull)
		if after := w.state(); after != before {
			t.Fatalf("it was\n%s\nand is after what was refused\n%s", before, after)
		}
		return
	}
	ok(t, err)
	if len(owned) != len(pages) || p.Free() != free-len(owned) {
		t.Fatalf("%v, want copies of %v", owned, pages)
	}
	if rapid.IntRange(0, 2).Draw(t, "undo") == 0 {
		ok(t, p.Disown(&s.table, owned))
		if after := w.state(); after != before {
			t.Fatalf("it was\n%s\nand is, undone,\n%s", before, after)
		}
		return
	}
	for _, o := range owned {
		copy(w.memory[int(o.Page)*p.size:][:p.size], w.memory[int(o.Was)*p.size:])
	}
	for i := from; i < to; i++ {
		w.last++
		page, slot := p.Place(&s.table, i)
		s.tokens[i], w.memory[int(page)*p.size+slot] = w.last, w.last
	}
}

func second[T any](_ T, err error) error { return err }

// Forget is a sequence that is released.
func (w *world) Forget(t *rapid.T) {
	s := w.pick(t, false)
	ok(t, w.pool.Truncate(&s.table, 0))
	w.sequences = slices.DeleteFunc(w.sequences, func(x *sequence) bool { return x == s })
}

// Read holds the pages of a sequence for somebody who reads.
func (w *world) Read(t *rapid.T) {
	list := slices.Clone(w.pick(t, false).table.Pages)
	ok(t, w.pool.Hold(list))
	w.holds = append(w.holds, list)
}

// Take is for somebody who fills pages before there is a sequence.
func (w *world) Take(t *rapid.T) {
	before, n := w.pool.Free(), rapid.IntRange(0, 4).Draw(t, "pages")
	list, err := w.pool.Take([]int32{-7}, n)
	if n > before {
		refused(t, err, ErrFull)
		return
	}
	ok(t, err)
	if len(list) != n+1 || list[0] != -7 || w.pool.Free() != before-n {
		t.Fatalf("%d pages: %v, %d free of %d before", n, list, w.pool.Free(), before)
	}
	w.holds = append(w.holds, list[1:])
}

func (w *world) GiveUp(t *rapid.T) {
	if len(w.holds) == 0 {
		t.Skip("nobody reads")
	}
	i := rapid.IntRange(0, len(w.holds)-1).Draw(t, "hold")
	ok(t, w.pool.Release(w.holds[i]))
	w.holds = slices.Delete(w.holds, i, i+1)
}

// Reserve takes what Need says, or changes nothing.
func (w *world) Reserve(t *rapid.T) {
	s, n := w.pick(t, false), rapid.IntRange(1, 9).Draw(t, "tokens")
	need, free := w.pool.Need(&s.table, n), w.pool.Free()
	lists, _ := w.pool.Lists()
	err := w.pool.Reserve(&s.append, &s.table, n)
	if need > free {
		refused(t, err, ErrFull)
		return
	}
	ok(t, err)
	if taken := free - w.pool.Free(); taken != need || len(s.append.Fresh()) != need {
		t.Fatalf("%d pages needed, %d taken, %d in the reservation", need, taken, len(s.append.Fresh()))
	}
	w.checkPlaces(t, s, lists)
	if to, from, ok := s.append.Copy(); ok {
		size := w.pool.size
		copy(w.memory[int(to)*size:int(to+1)*size], w.memory[int(from)*size:])
	}
	s.fresh = s.fresh[:0]
	for range n {
		w.last++
		s.fresh = append(s.fresh, w.last)
	}
	w.write(s)
}

// checkPlaces checks that fresh pages go round the places, where those have some free: these were.
func (w *world) checkPlaces(t *rapid.T, s *sequence, free []int32) {
	in := func(shard int) (n int) {
		for _, page := range free {
			if int(page)%len(w.pool.free) == shard {
				n++
			}
		}
		return n
	}
	_, from, copied := s.append.Copy()
	for i, page := range s.append.Fresh() {
		shard, want := int(page)%len(w.pool.free), 0
		switch at := len(s.append.Pages) - len(s.append.Fresh()) + i; {
		case i == 0 && copied:
			want = int(from)
		case at > 0:
			want = int(s.append.Pages[at-1]) + 1
		default: // a new sequence begins where most are free
			for other := range w.pool.free {
				if in(other) > in(shard) || in(other) == in(shard) && other < shard {
					t.Fatalf("page %d of %v is first, free are %v", page, s.append.Pages, free)
				}
			}
			want = shard
		}
		for want %= len(w.pool.free); in(want) == 0; want = (want + 1) % len(w.pool.free) {
		}
		if shard != want {
			t.Fatalf("page %d of %v, of %d places, free are %v", page, s.append.Pages, len(w.pool.free), free)
		}
		free = slices.DeleteFunc(slices.Clone(free), func(x int32) bool { return x == page })
	}
}

// Write writes the tokens of an append again.
func (w *world) Write(t *rapid.T) { w.write(w.pick(t, true)) }

func (w *world) write(s *sequence) {
	for i, token := range s.fresh {
		*w.slot(s.append.Pages, s.gap, len(s.tokens)+i) = token
	}
}

func (w *world) Commit(t *rapid.T) {
	s := w.pick(t, true)
	ok(t, w.pool.Commit(&s.append))
	s.tokens = append(s.tokens, s.fresh...)
	if !slices.Equal(s.append.Pages, s.table.Pages) || len(s.append.Fresh()) != 0 {
		t.Fatalf("the reservation had %v, the table has %v", s.append.Pages, s.table.Pages)
	}
}

func (w *world) Rollback(t *rapid.T) {
	s := w.pick(t, true)
	table := s.table
	ok(t, w.pool.Rollback(&s.append))
	if !slices.Equal(table.Pages, s.table.Pages) || table.Tokens != s.table.Tokens {
		t.Fatalf("the table was %+v and is %+v", table, s.table)
	}
}

// Try reserves for several sequences and rolls all of it back: nothing has changed, to
// the order of the free list. What one needs does not depend on the others.
func (w *world) Try(t *rapid.T) {
	before := w.state()
	n := rapid.IntRange(1, 9).Draw(t, "tokens")
	var list []*sequence
	need := 0
	for _, s := range w.sequences {
		if !s.table.open {
			list = append(list, s)
			need += w.pool.Need(&s.table, n)
		}
	}
	list = rapid.Permutation(list).Draw(t, "order")
	free, done := w.pool.Free(), 0
	for _, s := range list {
		if err := w.pool.Reserve(&s.append, &s.table, n); err != nil {
			refused(t, err, ErrFull)
			break
		}
		done++
	}
	switch {
	case (done == len(list)) != (need <= free):
		t.Fatalf("%d pages needed, %d free: %d of %d reservations", need, free, done, len(list))
	case done == len(list) && free-w.pool.Free() != need:
		t.Fatalf("%d pages needed, %d taken", need, free-w.pool.Free())
	}
	for _, s := range slices.Backward(list[:done]) {
		ok(t, w.pool.Rollback(&s.append))
	}
	if after := w.state(); after != before {
		t.Fatalf("it was\n%s\nand is after the rollbacks\n%s", before, after)
	}
}

// Refuse does what must be refused, and looks that nothing has changed.
func (w *world) Refuse(t *rapid.T) {
	before := w.state()
	p := w.pool
	free, holders := p.Lists()
	refused(t, p.Hold([]int32{int32(p.Count())}), ErrPage)
	refused(t, p.Release([]int32{-1}), ErrPage)
	if len(free) > 0 {
		page := rapid.SampledFrom(free).Draw(t, "free page")
		refused(t, p.Hold([]int32{page}), ErrPage)
		refused(t, p.Release([]int32{page}), ErrPage)
	}
	var held []int32
	for i, n := range holders {
		if n > 0 {
			held = append(held, int32(i))
		}
	}
	if len(held) > 0 { // one place more than the page has holders, among pages that are all right
		page := rapid.SampledFrom(held).Draw(t, "held page")
		list := slices.Concat(held, slices.Repeat([]int32{page}, int(holders[page])))
		refused(t, p.Release(rapid.Permutation(list).Draw(t, "list")), ErrPage)
	}
	_, err := p.Take(nil, p.Free()+1)
	refused(t, err, ErrFull)
	var unused Reservation
	refused(t, p.Commit(&unused), ErrReservation)
	refused(t, p.Rollback(&unused), ErrReservation)
	for _, s := range w.sequences {
		if s.table.open {
			_, err := p.Clone(&s.table)
			refused(t, err, ErrReservation)
			refused(t, p.Truncate(&s.table, 0), ErrReservation)
			refused(t, p.Drop(&s.table, s.gap), ErrReservation)
			refused(t, p.Reserve(&unused, &s.table, 1), ErrReservation)
			refused(t, p.Reserve(&s.append, new(Table), 1), ErrReservation)
			continue
		}
		refused(t, p.Commit(&s.append), ErrReservation) // a second time, or the first
		refused(t, p.Rollback(&s.append), ErrReservation)
		refused(t, p.Reserve(&unused, &s.table, 0), ErrTokens)
		refused(t, p.Reserve(&unused, &s.table, -1), ErrTokens)
		for _, g := range []Gap{{-1, 0}, {s.gap.First, s.gap.First - 1}, {s.gap.First, s.table.Tokens + 1}} {
			refused(t, p.Drop(&s.table, g), ErrTokens)
		}
		if g := s.gap; g.End > g.First {
			refused(t, p.Drop(&s.table, Gap{g.First, g.End - 1}), ErrTokens)
			refused(t, p.Drop(&s.table, Gap{g.First + 1, g.End}), ErrTokens)
		}
		refused(t, p.Truncate(&s.table, -1), ErrTokens)
		refused(t, p.Truncate(&s.table, s.table.Tokens+1), ErrTokens)
		refused(t, p.Reserve(&unused, &s.table, p.Count()*p.size+1), ErrFull)
		if s.table.Tokens > 0 {
			refused(t, p.Reserve(&unused, &s.table, math.MaxInt), ErrTokens)
		}
	}
	if after := w.state(); after != before {
		t.Fatalf("it was\n%s\nand is after what was refused\n%s", before, after)
	}
}

// Check is the laws.
func (w *world) Check(t *rapid.T) {
	p := w.pool
	ok(t, w.check())
	free, holders := p.Lists()
	held := make([]int32, p.Count())
	count := func(list []int32) {
		for i, page := range list {
			held[page]++
			if slices.Contains(list[:i], page) {
				t.Fatalf("page %d is twice in %v", page, list)
			}
		}
	}
	for _, s := range w.sequences {
		count(s.table.Pages)
		count(s.append.Fresh())
		in := 0 // pages with nothing but tokens of the gap
		for page := range p.For(len(s.tokens)) {
			if first := page * p.size; first >= s.gap.First && first+p.size <= s.gap.End {
				in++
			}
		}
		if s.table.Tokens != len(s.tokens) || s.table.Gap != s.gap || len(s.table.Pages) != p.For(len(s.tokens))-in || p.Shift(&s.table) != in*p.size {
			t.Fatalf("%d tokens: table %+v", len(s.tokens), s.table)
		}
	}
	for _, list := range w.holds {
		count(list)
	}
	// A page has as many holders as there are references to it. It is in the free list,
	// once, if it has none.
	if !slices.Equal(held, holders) {
		t.Fatalf("pages are held %v times, the pool counts %v", held, holders)
	}
	shared := 0
	for page, n := range held {
		if n > 1 {
			shared++
		}
		shards := 0
		for _, f := range free {
			if f == int32(page) {
				shards++
			}
		}
		if n == 0 && shards != 1 || n > 0 && shards != 0 {
			t.Fatalf("page %d has %d holders and %d places in the free list %v", page, n, shards, free)
		}
	}
	if p.Free() != len(free) || p.Shared() != shared {
		t.Fatalf("%d free and %d shared, the pool counts %d and %d", len(free), shared, p.Free(), p.Shared())
	}
	// A page that is written has one holder.
	for _, s := range w.sequences {
		if !s.table.open {
			continue
		}
		for _, page := range s.append.Pages[(len(s.tokens)-p.Shift(&s.table))/p.size:] {
			if holders[page] != 1 {
				t.Fatalf("page %d is written and has %d holders", page, holders[page])
			}
		}
	}
	// So nobody's tokens are overwritten.
	for i, s := range w.sequences {
		for j, token := range s.tokens {
			if !s.gap.has(j) {
				continue
			}
			if got := *w.slot(s.table.Pages, s.gap, j); got != token {
				t.Fatalf("sequence %d: token %d is %d, want %d", i, j, got, token)
			}
		}
		for j, token := range slices.Concat(s.tokens, s.fresh) {
			if s.table.open && s.gap.has(j) && *w.slot(s.append.Pages, s.gap, j) != token {
				t.Fatalf("append to sequence %d: token %d is not %d", i, j, token)
			}
		}
	}
}

// state is the whole of the pool and of the tables.
func (w *world) state() string {
	free, holders := w.pool.Lists()
	text := fmt.Sprintf("free %v holders %v", free, holders)
	for _, s := range w.sequences {
		text += fmt.Sprintf("\n%v open %t fresh %v", s.table, s.table.open, s.append.Fresh())
	}
	return text
}

func ok(t *rapid.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func refused(t *rapid.T, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("%v, want %v", err, want)
	}
}

// check is that of the pool.
func (w *world) check() error {
	var tables []*Table
	var open []*Reservation
	for _, s := range w.sequences {
		tables = append(tables, &s.table)
		if s.table.open {
			open = append(open, &s.append)
		}
	}
	for _, list := range w.holds { // somebody else's
		tables = append(tables, &Table{Pages: list, Tokens: len(list) * w.pool.size})
	}
	return w.pool.Check(tables, open)
}
