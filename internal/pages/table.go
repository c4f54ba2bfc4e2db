package pages

import (
	"fmt"
	"slices"
)

// Table is the page table of a sequence. It holds each of its pages once. The zero Table is that of an empty sequence.
type Table struct {
	Pages  []int32 // [Pool.For] of Tokens, less the pages in the gap
	Tokens int     // of the sequence, including those in the gap
	Gap    Gap

	open bool // an append is reserved
}

// Gap is the dropped tokens [First, End) of a sequence. Pages with only dropped tokens are not in the table.
type Gap struct{ First, End int }

// in returns the pages in a gap: n pages from number first of the sequence on.
func (p *Pool) in(g Gap) (at, n int) {
	at = p.For(g.First)
	return at, max(g.End/p.size-at, 0)
}

// Shift returns the number of tokens of the pages that the gap has released, a multiple of Size. Token j after the gap is in page
// Pages[(j-Shift)/Size].
func (p *Pool) Shift(t *Table) int {
	_, n := p.in(t.Gap)
	return n * p.size
}

// settled returns an error if an append to t is open.
func (t *Table) settled() error {
	if t.open {
		return fmt.Errorf("an append to the table is open: %w", ErrReservation)
	}
	return nil
}

// Clone returns a table of the same pages and tokens, which is a further holder of each page. Errors: [ErrReservation] while an append to
// t is open.
func (p *Pool) Clone(t *Table) (Table, error) {
	if err := t.settled(); err != nil {
		return Table{}, err
	}
	if err := p.Hold(t.Pages); err != nil {
		return Table{}, err
	}
	return Table{Pages: slices.Clone(t.Pages), Tokens: t.Tokens, Gap: t.Gap}, nil
}

// Place returns the page and the slot of a token outside the gap.
func (p *Pool) Place(t *Table, token int) (page int32, slot int) {
	if token >= t.Gap.First {
		token -= p.Shift(t)
	}
	return t.Pages[token/p.size], token % p.size
}

// Owned is a shared page of a table that [Pool.Own] has replaced.
type Owned struct {
	Page, Was int32
	at        int // in the table
}

// Own replaces each shared page of the tokens [from, to) by a free page, which the caller has to fill. No token of the range is in the
// gap. Errors: [ErrFull]; [ErrTokens] for tokens that the table does not have; [ErrReservation] while an append to t is open.
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

// Drop sets the gap of a table, and releases the pages with only dropped tokens. A gap can grow at its end only. Errors:
//
//   - [ErrTokens] for another beginning, a lower end, or an end behind the last token
//   - [ErrReservation] while an append to t is open
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

// Truncate keeps the first tokens of a table, and releases the pages after them. A table without tokens after the beginning of its gap
// has no gap. Errors:
//
//   - [ErrTokens] for more tokens than the table has, or an end in the gap
//   - [ErrReservation] while an append to t is open
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

// Reservation is an append between Reserve and Commit or Rollback. The zero Reservation is not open. Reserve reuses the memory of a
// Reservation that is not open.
type Reservation struct {
	// Pages is the table after Commit. It is valid until the next Reserve.
	Pages []int32

	table    *Table // nil: not open
	tokens   int    // new
	kept     int    // leading pages that stay those of the table
	replaced int32  // the page of the table that Pages[kept] is a copy of; -1: none
}

// Fresh returns the pages that only the reservation holds; none if the reservation is not open. New tokens go to these pages, and to the
// free slots of the table's last page.
func (r *Reservation) Fresh() []int32 {
	if r.table == nil {
		return nil
	}
	return r.Pages[r.kept:]
}

// Of reports whether the reservation is open for tokens tokens of t.
func (r *Reservation) Of(t *Table, tokens int) bool {
	return t != nil && r.table == t && r.tokens == tokens
}

// Copy returns the page to copy before the new tokens are written, and whether there is one.
func (r *Reservation) Copy() (to, from int32, ok bool) {
	if r.table == nil || r.replaced < 0 {
		return 0, 0, false
	}
	return r.Pages[r.kept], r.replaced, true
}

// Need returns the number of free pages that an append of tokens tokens takes. It includes a page for a copy, if the last page of the table
// is shared and not full.
func (p *Pool) Need(t *Table, tokens int) int {
	_, gone := p.in(t.Gap)
	n := p.For(t.Tokens+tokens) - gone - len(t.Pages)
	if tokens > 0 && p.sharedTail(t) {
		n++
	}
	return n
}

// Least returns the number of pages that the tables and their reservations hold, if no other table holds pages. If the number is above
// [Pool.Count], no release of other tables makes the reservations possible.
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
			n-- // without other holders there is no copy
		}
	}
	return n
}

// sharedTail reports whether the next token goes to a shared page.
func (p *Pool) sharedTail(t *Table) bool {
	return t.Tokens%p.size != 0 && p.holders[t.Pages[len(t.Pages)-1]] > 1
}

// Reserve opens a reservation for an append of tokens tokens to t. Errors:
//
//   - [ErrFull] if fewer pages than Need are free
//   - [ErrTokens] for less than one token
//   - [ErrReservation] if r, or another append to t, is open
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

// Commit puts the reserved pages and tokens into the table, and releases the page that was copied. Errors: [ErrReservation] if r is not
// open.
func (p *Pool) Commit(r *Reservation) error {
	if err := r.opened(); err != nil {
		return err
	}
	t := r.table
	if err := p.Release(t.Pages[r.kept:]); err != nil { // the original of a copy
		return err
	}
	t.Pages = append(t.Pages[:r.kept], r.Fresh()...)
	t.Tokens += r.tokens
	t.open, r.table = false, nil
	return nil
}

// Rollback releases the reserved pages. If the pool has not changed since Reserve, Rollback also restores the order of the free list. So
// several reservations are rolled back in reverse order. Errors: [ErrReservation] if r is not open.
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

// Check returns an error that names the first inconsistency of the pool. tables and open are all holders of pages.
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
	for _, r := range open { // a page to write has one holder
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

// checkFree checks the free lists against the number of holders of each page.
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

// opened returns an error if r is not open.
func (r *Reservation) opened() error {
	if r.table == nil {
		return fmt.Errorf("the reservation is not open: %w", ErrReservation)
	}
	return nil
}
