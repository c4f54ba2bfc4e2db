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
		o.Page = p.take(p.place(o.Was))
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
		list, need = append(list, p.take(p.place(replaced))), need-1
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

// opened checks that r is open.
func (r *Reservation) opened() error {
	if r.table == nil {
		return fmt.Errorf("the reservation is not open: %w", ErrReservation)
	}
	return nil
}
