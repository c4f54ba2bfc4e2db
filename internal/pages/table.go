package pages

import (
	"fmt"
	"slices"
)

// Table is the page table of a sequence, which holds each of its pages once. The zero
// value is that of an empty sequence.
type Table struct {
	Pages  []int32 // as many as [Pool.For] gives for Tokens, less those that lie in the gap
	Tokens int     // of the sequence, those in the gap included
	Gap    Gap

	open bool // an append to it is reserved
}

// Gap is the tokens [First, End) of a sequence that were dropped: nobody will read them again. Pages with nothing but
// such tokens are not in the table.
type Gap struct{ First, End int }

// in returns the pages that lie in a gap, by their place among all pages of the sequence: so many, from the given one on.
func (p *Pool) in(g Gap) (at, n int) {
	at = p.For(g.First)
	return at, max(g.End/p.size-at, 0)
}

// Shift is how many tokens the pages hold that a table has no more: token j behind the gap is in page
// Pages[(j-Shift)/Size], as if it was token j-Shift. It is a multiple of Size.
func (p *Pool) Shift(t *Table) int {
	_, n := p.in(t.Gap)
	return n * p.size
}

// settled checks that no append to t is open.
func (t *Table) settled() error {
	if t.open {
		return fmt.Errorf("an append to the table is open: %w", ErrReservation)
	}
	return nil
}

// Clone is a table of the same pages and tokens. It becomes one more holder of each
// page. Errors: [ErrReservation] while an append to t is open.
func (p *Pool) Clone(t *Table) (Table, error) {
	if err := t.settled(); err != nil {
		return Table{}, err
	}
	if err := p.Hold(t.Pages); err != nil {
		return Table{}, err
	}
	return Table{Pages: slices.Clone(t.Pages), Tokens: t.Tokens, Gap: t.Gap}, nil
}

// Place is where a token of a table lies: its page, and its place there. It is not in the gap.
func (p *Pool) Place(t *Table, token int) (page int32, slot int) {
	if token >= t.Gap.First {
		token -= p.Shift(t)
	}
	return t.Pages[token/p.size], token % p.size
}

// Owned is a page of a table that it had shared, and that has another in its place now.
type Owned struct {
	Page, Was int32
	at        int // in the table
}

// Own gives a table pages of its own for the tokens [from, to), of which none is in the gap: a free page for each
// that has other holders, with nothing in it yet. Errors: [ErrFull], [ErrTokens] for tokens that it does not
// have, [ErrReservation] while an append to t is open.
func (p *Pool) Own(t *Table, from, to int) ([]Owned, error) {
	if err := t.settled(); err != nil {
		return nil, err
	}
	if from < 0 || to > t.Tokens || from >= to || max(from, t.Gap.First) < min(to, t.Gap.End) {
		return nil, fmt.Errorf("tokens [%d, %d) of %d, of which [%d, %d) were dropped: %w", from, to, t.Tokens, t.Gap.First, t.Gap.End, ErrTokens)
	}
	shift := 0
	if from >= t.Gap.First {
		shift = p.Shift(t)
	}
	var owned []Owned
	for at := (from - shift) / p.size; at <= (to-1-shift)/p.size; at++ {
		if was := t.Pages[at]; p.holders[was] > 1 {
			owned = append(owned, Owned{Was: was, at: at})
		}
	}
	if err := p.has(len(owned)); err != nil {
		return nil, err
	}
	for i := range owned {
		o := &owned[i]
		o.Page = p.take(p.shard(o.Was))
		p.holders[o.Was]--
		t.Pages[o.at] = o.Page
	}
	return owned, nil
}

// Disown undoes Own.
func (p *Pool) Disown(t *Table, owned []Owned) error {
	for _, o := range slices.Backward(owned) {
		if err := p.Hold([]int32{o.Was}); err != nil {
			return err
		}
		t.Pages[o.at] = o.Was
		if err := p.Release([]int32{o.Page}); err != nil {
			return err
		}
	}
	return nil
}

// Drop makes tokens the gap of a table, and releases the pages that hold no others. A gap begins where it began before,
// and may end further behind. Errors: [ErrTokens] for another beginning or a lower end than it had, or more tokens than
// there are, [ErrReservation] while an append to t is open.
func (p *Pool) Drop(t *Table, g Gap) error {
	if err := t.settled(); err != nil {
		return err
	}
	if g.First < 0 || g.End < g.First || g.End > t.Tokens {
		return fmt.Errorf("tokens [%d, %d) of %d: %w", g.First, g.End, t.Tokens, ErrTokens)
	}
	if was := t.Gap; was != (Gap{}) && (g.First != was.First || g.End < was.End) {
		return fmt.Errorf("tokens [%d, %d), and [%d, %d) were dropped before: %w", g.First, g.End, was.First, was.End, ErrTokens)
	}
	_, gone := p.in(t.Gap)
	at, all := p.in(g)
	if err := p.Release(t.Pages[at : at+all-gone]); err != nil {
		return err
	}
	t.Pages, t.Gap = slices.Delete(t.Pages, at, at+all-gone), g
	return nil
}

// Truncate keeps the first tokens of a table, and releases the pages behind them. With no tokens behind its beginning
// there is no gap any more. Errors: [ErrTokens] for more tokens than there are, or an end within the gap,
// [ErrReservation] while an append to t is open.
func (p *Pool) Truncate(t *Table, tokens int) error {
	if err := t.settled(); err != nil {
		return err
	}
	if tokens < 0 || tokens > t.Tokens {
		return fmt.Errorf("%d tokens of %d: %w", tokens, t.Tokens, ErrTokens)
	}
	gap := t.Gap
	switch {
	case tokens <= gap.First:
		gap = Gap{}
	case tokens < gap.End:
		return fmt.Errorf("%d tokens, of which [%d, %d) were dropped: %w", tokens, gap.First, gap.End, ErrTokens)
	}
	_, gone := p.in(gap)
	keep := p.For(tokens) - gone
	if err := p.Release(t.Pages[keep:]); err != nil {
		return err
	}
	t.Pages, t.Tokens, t.Gap = t.Pages[:keep], tokens, gap
	return nil
}

// Reservation is an append that is open: reserved, and neither committed nor rolled
// back. The zero value is not open. Reserve uses the memory of one that is not.
type Reservation struct {
	// Pages is the table as it will be. It stays until Reserve is called again.
	Pages []int32

	table    *Table // nil: not open
	tokens   int    // that are appended
	kept     int    // pages in front that are the table's own
	replaced int32  // page of the table that Pages[kept] is a copy of; -1: none
}

// Fresh are the pages that the reservation holds, and nobody else: none if it is not
// open. New tokens go there, and to what room the last page of the table has.
func (r *Reservation) Fresh() []int32 {
	if r.table == nil {
		return nil
	}
	return r.Pages[r.kept:]
}

// Of says whether the reservation is open, for so many tokens of t.
func (r *Reservation) Of(t *Table, tokens int) bool {
	return t != nil && r.table == t && r.tokens == tokens
}

// Copy says whether a page is copied before the new tokens are written, and which.
func (r *Reservation) Copy() (to, from int32, ok bool) {
	if r.table == nil || r.replaced < 0 {
		return 0, 0, false
	}
	return r.Pages[r.kept], r.replaced, true
}

// Need is the number of free pages that an append of so many tokens takes. If the last
// page of the table has room and other holders, one of them is for a copy of it.
func (p *Pool) Need(t *Table, tokens int) int {
	_, gone := p.in(t.Gap)
	n := p.For(t.Tokens+tokens) - gone - len(t.Pages)
	if tokens > 0 && p.sharedTail(t) {
		n++
	}
	return n
}

// Least is the number of pages of the pool that are held when so many tokens are reserved for each table, if there is no other
// table: what the reservations take, and what the tables hold. If it is more than [Pool.Count], no release of other
// tables makes room.
func (p *Pool) Least(tables []*Table, tokens []int) int {
	holders := map[int32]int{}
	for _, t := range tables {
		for _, page := range t.Pages {
			holders[page]++
		}
	}
	n := len(holders)
	for i, t := range tables {
		n += p.Need(t, tokens[i])
		if tail := len(t.Pages) - 1; tokens[i] > 0 && p.sharedTail(t) && holders[t.Pages[tail]] == 1 {
			n-- // the others are released: there is no copy
		}
	}
	return n
}

// sharedTail reports whether the next token goes to a page with other holders.
func (p *Pool) sharedTail(t *Table) bool {
	return t.Tokens%p.size != 0 && p.holders[t.Pages[len(t.Pages)-1]] > 1
}

// Reserve opens a reservation for an append of so many tokens to t. Errors: [ErrFull]
// if fewer pages than Need are free, [ErrTokens] for less than one token,
// [ErrReservation] if r is open, or another append to t.
func (p *Pool) Reserve(r *Reservation, t *Table, tokens int) error {
	if r.table != nil {
		return fmt.Errorf("the reservation is open: %w", ErrReservation)
	}
	if err := t.settled(); err != nil {
		return err
	}
	if tokens < 1 || t.Tokens+tokens < t.Tokens {
		return fmt.Errorf("%d tokens behind %d: %w", tokens, t.Tokens, ErrTokens)
	}
	kept, replaced := len(t.Pages), int32(-1)
	if p.sharedTail(t) {
		kept--
		replaced = t.Pages[kept]
	}
	need := p.Need(t, tokens)
	if err := p.has(need); err != nil {
		return err
	}
	list := append(r.Pages[:0], t.Pages[:kept]...)
	if replaced >= 0 {
		list, need = append(list, p.take(p.shard(replaced))), need-1
	}
	list, err := p.Take(list, need)
	if err != nil {
		return err
	}
	*r = Reservation{Pages: list, table: t, tokens: tokens, kept: kept, replaced: replaced}
	t.open = true
	return nil
}

// Commit puts the reserved pages and tokens into the table. A page that was copied is
// released. Errors: [ErrReservation] if r is not open.
func (p *Pool) Commit(r *Reservation) error {
	if err := r.opened(); err != nil {
		return err
	}
	t := r.table
	if err := p.Release(t.Pages[r.kept:]); err != nil { // the page that was copied
		return err
	}
	t.Pages = append(t.Pages[:r.kept], r.Fresh()...)
	t.Tokens += r.tokens
	t.open, r.table = false, nil
	return nil
}

// Rollback releases the reserved pages. If nothing was taken or released since Reserve,
// the pool is as it was before, to the order of the free list: so of several
// reservations the last one is rolled back first. Errors: [ErrReservation] if r is not
// open.
func (p *Pool) Rollback(r *Reservation) error {
	if err := r.opened(); err != nil {
		return err
	}
	if err := p.Release(r.Fresh()); err != nil {
		return err
	}
	r.table.open, r.table = false, nil
	return nil
}

// Check looks for inconsistencies of the pool, where tables and open reservations are all that hold pages. An error names
// the first one.
func (p *Pool) Check(tables []*Table, open []*Reservation) error {
	held, of := make([]int32, len(p.holders)), map[*Table]*Reservation{}
	hold := func(list []int32) error {
		seen := map[int32]bool{}
		for _, page := range list {
			if page < 0 || int(page) >= len(held) {
				return fmt.Errorf("page %d of %d", page, len(held))
			}
			if seen[page] {
				return fmt.Errorf("page %d twice in %v", page, list)
			}
			seen[page] = true
			held[page]++
		}
		return nil
	}
	for _, t := range tables {
		if err := p.checkTable(t); err != nil {
			return fmt.Errorf("table %+v: %w", *t, err)
		}
		if err := hold(t.Pages); err != nil {
			return fmt.Errorf("table %+v: %w", *t, err)
		}
	}
	for _, r := range open {
		if err := p.checkReservation(r); err != nil {
			return fmt.Errorf("reservation of %v: %w", r.Pages, err)
		}
		if of[r.table] != nil || !slices.Contains(tables, r.table) {
			return fmt.Errorf("reservation of %v: its table has another one, or is in use nowhere", r.Pages)
		}
		of[r.table] = r
		if err := hold(r.Fresh()); err != nil {
			return fmt.Errorf("reservation of %v: %w", r.Pages, err)
		}
	}
	for _, t := range tables {
		if t.open != (of[t] != nil) {
			return fmt.Errorf("table %+v: an append to it is noted: %t; it has a reservation: %t", *t, t.open, of[t] != nil)
		}
	}
	if err := p.checkFree(held); err != nil {
		return err
	}
	for _, r := range open { // a page that is written has one holder
		if last := r.kept - 1; r.replaced < 0 && r.table.Tokens%p.size != 0 && held[r.Pages[last]] != 1 {
			return fmt.Errorf("reservation of %v: new tokens are written to page %d, which has %d holders", r.Pages, r.Pages[last], held[r.Pages[last]])
		}
		for _, page := range r.Fresh() {
			if held[page] != 1 {
				return fmt.Errorf("reservation of %v: new tokens are written to page %d, which has %d holders", r.Pages, page, held[page])
			}
		}
	}
	return nil
}

func (p *Pool) checkTable(t *Table) error {
	g := t.Gap
	if t.Tokens < 0 || g.First < 0 || g.End < g.First || g.End > t.Tokens {
		return fmt.Errorf("%d tokens, of which [%d, %d) were dropped", t.Tokens, g.First, g.End)
	}
	_, gone := p.in(g)
	if want := p.For(t.Tokens) - gone; len(t.Pages) != want {
		return fmt.Errorf("%d pages and not %d", len(t.Pages), want)
	}
	return nil
}

func (p *Pool) checkReservation(r *Reservation) error {
	t := r.table
	if t == nil {
		return fmt.Errorf("it is not open")
	}
	_, gone := p.in(t.Gap)
	kept := len(t.Pages)
	if r.replaced >= 0 {
		if kept--; kept < 0 || r.replaced != t.Pages[kept] || t.Tokens%p.size == 0 {
			return fmt.Errorf("page %d is to be copied, and is not the last of table %+v, or is full", r.replaced, *t)
		}
	}
	switch {
	case r.tokens < 1:
		return fmt.Errorf("%d tokens", r.tokens)
	case r.kept != kept:
		return fmt.Errorf("%d pages of the table are kept and not %d", r.kept, kept)
	case len(r.Pages) != p.For(t.Tokens+r.tokens)-gone:
		return fmt.Errorf("%d pages for %d tokens behind %d", len(r.Pages), r.tokens, t.Tokens)
	case !slices.Equal(r.Pages[:kept], t.Pages[:kept]):
		return fmt.Errorf("it begins with other pages than table %+v", *t)
	}
	return nil
}

// checkFree checks the free lists and the numbers of holders, where each page has so many.
func (p *Pool) checkFree(held []int32) error {
	listed := make([]int, len(held))
	left := 0
	for shard, list := range p.free {
		for _, page := range list {
			if page < 0 || int(page) >= len(held) || p.shard(page) != shard {
				return fmt.Errorf("page %d of %d is in the free list of place %d of %d", page, len(held), shard, len(p.free))
			}
			listed[page]++
		}
		left += len(list)
	}
	for page, n := range held {
		switch {
		case n != p.holders[page]:
			return fmt.Errorf("page %d has %d holders, and %d are counted", page, n, p.holders[page])
		case n > 0 && listed[page] > 0:
			return fmt.Errorf("page %d has %d holders and is in the free list", page, n)
		case n == 0 && listed[page] != 1:
			return fmt.Errorf("page %d has no holder and is %d times in the free list", page, listed[page])
		}
	}
	if left != p.left {
		return fmt.Errorf("%d pages are free, and %d are counted", left, p.left)
	}
	return nil
}

// opened checks that r is open.
func (r *Reservation) opened() error {
	if r.table == nil {
		return fmt.Errorf("the reservation is not open: %w", ErrReservation)
	}
	return nil
}
