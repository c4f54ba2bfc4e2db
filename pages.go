package leanattention

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/pages"
)

// Need is the number of free pages that a step of these appends takes, whatever the step's number of rows. Nothing
// changes. Set of them is [ErrCacheFull] exactly if Need is more than [CacheStats].FreePages at that time. So a server can
// tell which sequences the next step has room for, before it sets the step.
//
// Appends that the cache has no room for, even if all other sequences are released, are [ErrLength], here and in Set:
// waiting does not help. Where the cache has a [CacheConfig].Window, the appends may have room in several steps
// ([Chunks]), since each Commit gives pages back.
//
// Other errors are those of Set: [ErrState], [ErrLength], [ErrClosed].
func (c *Cache) Need(appends []Append) (pages int, err error) {
	const op = "Need"
	if err := c.made(op); err != nil {
		return 0, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return 0, errs.Errorf(op, ErrClosed, "cache")
	}
	if pages, err = c.need(op, appends, math.MaxInt); err == nil {
		err = c.never(op, appends)
	}
	if err != nil {
		return 0, err
	}
	return pages, nil
}

// Check looks for inconsistencies: of free pages, page tables and reservations, of the numbers of their holders, and of
// sequences, open steps and counts. There is none, unless this package has a defect: so the error is [ErrInternal], and names what
// was found. Check is for tests, and for servers that want to know before they go on behind an error. It takes time that grows
// with the number of pages and sequences, while other calls on the cache wait. Errors: [ErrInternal], [ErrClosed].
func (c *Cache) Check() (err error) {
	const op = "Check"
	if err := c.made(op); err != nil {
		return err
	}
	defer errs.RecoverTo(op, &err)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return errs.Errorf(op, ErrClosed, "cache")
	}
	if err := c.check(); err != nil {
		return errs.Errorf(op, ErrInternal, "%v", err)
	}
	return nil
}

// check is Check with the mu held, which guards what is looked at in steps, too.
func (c *Cache) check() error {
	var tables []*pages.Table
	var open []*pages.Reservation
	sequences, tokens := 0, 0
	for s, counted := range c.holders {
		if err := c.checkSequence(s, counted); err != nil {
			return fmt.Errorf("sequence of %d tokens: %w", s.table.Tokens, err)
		}
		tables = append(tables, &s.table)
		if counted {
			sequences, tokens = sequences+1, tokens+s.table.Tokens
		}
	}
	for s := range c.open {
		if err := c.checkStep(s); err != nil {
			return fmt.Errorf("step of %d rows: %w", s.tokens, err)
		}
		for i := range s.reservations {
			open = append(open, &s.reservations[i].Reservation)
		}
	}
	if sequences != c.sequences || tokens != c.tokens {
		return fmt.Errorf("%d sequences have %d tokens, and %d with %d are counted", sequences, tokens, c.sequences, c.tokens)
	}
	return c.pool.Check(tables, open)
}

func (c *Cache) checkSequence(s *Sequence, counted bool) error {
	config, gap := &c.config, s.table.Gap
	if s.cache != c || s.released || s.mark.Problem("", "") != "" {
		return errors.New("it is of another cache, released or a copy")
	}
	if s.step != nil {
		of := func(r reservation) bool { return r.seq == s }
		if !counted || !c.open[s.step] || !slices.ContainsFunc(s.step.reservations, of) {
			return errors.New("it is in a step that is not open or does not have it")
		}
	}
	if gap == (pages.Gap{}) {
		return nil
	}
	if config.Window == 0 || gap.First != config.SinkTokens || gap.End > s.table.Tokens-config.Window+1 {
		return fmt.Errorf("tokens [%d, %d) were given back, and the cache keeps a Window of %d and %d SinkTokens", gap.First, gap.End, config.Window, config.SinkTokens)
	}
	return nil
}

func (c *Cache) checkStep(s *Step) error {
	if s.cache != c || !s.open || len(s.sequences) != len(s.reservations) {
		return fmt.Errorf("it is of another cache or not open, or has %d reservations for %d sequences", len(s.reservations), len(s.sequences))
	}
	row := 0
	for i := range s.reservations {
		r, seq := &s.reservations[i], &s.sequences[i]
		if !c.holders[r.seq] || r.seq.step != s || !r.Of(&r.seq.table, r.tokens) {
			return fmt.Errorf("append %d has a sequence that is not in the step, or the reservation of another one", i)
		}
		gone := c.pool.Shift(&r.seq.table)
		if seq.Row != row || seq.Queries != r.tokens || seq.Before != gone || seq.Keys != r.seq.table.Tokens-gone+r.tokens || !slices.Equal(seq.Pages, r.Pages) {
			return fmt.Errorf("append %d is computed in rows [%d, %d) with %d keys in pages %v, and has %d tokens from row %d on behind %d, %d of which were given back, in pages %v",
				i, seq.Row, seq.Row+seq.Queries, seq.Keys, seq.Pages, r.tokens, row, r.seq.table.Tokens, gone, r.Pages)
		}
		row += r.tokens
	}
	if row > s.tokens {
		return fmt.Errorf("%d rows are given to sequences", row)
	}
	return nil
}

// What GPUs do where pages are dealt out to them, by context.
