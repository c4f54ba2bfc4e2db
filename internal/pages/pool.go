package pages

import (
	"errors"
	"fmt"
	"slices"
)

var (
	// ErrFull is a pool with too few free pages.
	ErrFull = errors.New("too few free pages")

	// ErrPage is a page that the pool does not have, or that nobody holds.
	ErrPage = errors.New("no such page is held")

	// ErrTokens is a number of tokens outside of its range.
	ErrTokens = errors.New("number of tokens out of range")

	// ErrReservation is an append that is open and must not be, or the other way round.
	ErrReservation = errors.New("append out of order")
)

// Pool is the pages of a cache. Its methods must not be called at the same time.
type Pool struct {
	size    int     // tokens of a page
	free    []int32 // pages that nobody holds; the last one is taken first
	holders []int32 // of each page
}

// New is a pool of free pages, each with room for size tokens. Both numbers are 1 or
// more. The lowest page is taken first.
func New(count, size int) *Pool {
	p := &Pool{size: size, free: make([]int32, count), holders: make([]int32, count)}
	for i := range p.free {
		p.free[i] = int32(count - 1 - i)
	}
	return p
}

// Count is the number of all pages.
func (p *Pool) Count() int { return len(p.holders) }

// Free is the number of pages that nobody holds.
func (p *Pool) Free() int { return len(p.free) }

// Shared is the number of pages with more than one holder.
func (p *Pool) Shared() int {
	n := 0
	for _, h := range p.holders {
		if h > 1 {
			n++
		}
	}
	return n
}

// For is the number of pages that so many tokens take.
func (p *Pool) For(tokens int) int {
	n := tokens / p.size
	if tokens%p.size != 0 {
		n++
	}
	return n
}

// Lists are copies of the free list and of the number of holders of each page.
func (p *Pool) Lists() (free, holders []int32) {
	return slices.Clone(p.free), slices.Clone(p.holders)
}

// Take appends n free pages to list. Each has one holder then. Errors: [ErrFull].
func (p *Pool) Take(list []int32, n int) ([]int32, error) {
	if n > len(p.free) {
		return list, fmt.Errorf("%d pages needed, %d of %d free: %w", n, len(p.free), len(p.holders), ErrFull)
	}
	for range n {
		last := len(p.free) - 1
		page := p.free[last]
		p.free = p.free[:last]
		p.holders[page] = 1
		list = append(list, page)
	}
	return list, nil
}

// Hold adds a holder to each page of the list. Errors: [ErrPage] for one that nobody
// holds.
func (p *Pool) Hold(list []int32) error {
	for _, page := range list {
		if err := p.held(page); err != nil {
			return err
		}
	}
	for _, page := range list {
		p.holders[page]++
	}
	return nil
}

// Release takes a holder from each page of the list, the last page first: so it undoes
// Take to the order of the free list. A page that has no holder left is free. Errors:
// [ErrPage] for a page that has fewer holders than it has places in the list.
func (p *Pool) Release(list []int32) error {
	free := len(p.free)
	for i := len(list) - 1; i >= 0; i-- {
		page := list[i]
		if err := p.held(page); err != nil {
			p.free = p.free[:free]
			for _, page := range list[i+1:] {
				p.holders[page]++
			}
			return err
		}
		if p.holders[page]--; p.holders[page] == 0 {
			p.free = append(p.free, page)
		}
	}
	return nil
}

// held checks that somebody holds a page.
func (p *Pool) held(page int32) error {
	if page < 0 || int(page) >= len(p.holders) {
		return fmt.Errorf("page %d of %d: %w", page, len(p.holders), ErrPage)
	}
	if p.holders[page] == 0 {
		return fmt.Errorf("page %d is free: %w", page, ErrPage)
	}
	return nil
}
