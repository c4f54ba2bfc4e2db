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
	size    int       // tokens of a page
	free    [][]int32 // of each place, pages that nobody holds; the last one is taken first
	left    int       // how many these are, of all places
	holders []int32   // of each page
}

// New is a pool of free pages, each with room for size tokens. Both numbers are 1 or
// more. The lowest page is taken first.
func New(count, size int) *Pool { return NewSharded(count, size, 1) }

// NewDealt is New of pages that lie in several places, as GPUs are, 1 or more: page i is in place i mod places. The
// pages of a sequence go round the places: each is taken from the place behind that of the page before it, the first one
// from the place with the most free pages, and a copy from the place of what it is a copy of. A place that has no
// free page is passed over, so any page serves any sequence.
func NewSharded(count, size, shards int) *Pool {
	p := &Pool{size: size, free: make([][]int32, shards), left: count, holders: make([]int32, count)}
	for i := range count {
		page := int32(count - 1 - i)
		p.free[p.shard(page)] = append(p.free[p.shard(page)], page)
	}
	return p
}

// place is where a page lies.
func (p *Pool) shard(page int32) int { return int(page) % len(p.free) }

// next is the place that the page behind the last one of a list is to come from.
func (p *Pool) next(list []int32) (shard int) {
	if last := len(list) - 1; last >= 0 && list[last] >= 0 {
		return (p.shard(list[last]) + 1) % len(p.free)
	}
	for i, free := range p.free {
		if len(free) > len(p.free[shard]) {
			shard = i
		}
	}
	return shard
}

// take takes a free page, of which there is one, from a place or the next one that has some.
func (p *Pool) take(shard int) (page int32) {
	for len(p.free[shard]) == 0 {
		shard = (shard + 1) % len(p.free)
	}
	last := len(p.free[shard]) - 1
	page, p.free[shard] = p.free[shard][last], p.free[shard][:last]
	p.left--
	p.holders[page] = 1
	return page
}

// Count is the number of all pages.
func (p *Pool) Count() int { return len(p.holders) }

// Free is the number of pages that nobody holds.
func (p *Pool) Free() int { return p.left }

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

// Lists are copies of the free list, place by place, and of the number of holders of each page.
func (p *Pool) Lists() (free, holders []int32) {
	return slices.Concat(p.free...), slices.Clone(p.holders)
}

// Take appends n free pages to list. Each has one holder then. Errors: [ErrFull].
func (p *Pool) Take(list []int32, n int) ([]int32, error) {
	if err := p.has(n); err != nil {
		return list, err
	}
	for range n {
		list = append(list, p.take(p.next(list)))
	}
	return list, nil
}

// has checks that so many pages are free.
func (p *Pool) has(n int) error {
	if n > p.left {
		return fmt.Errorf("%d pages needed, %d of %d free: %w", n, p.left, len(p.holders), ErrFull)
	}
	return nil
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
	for i := len(list) - 1; i >= 0; i-- {
		page := list[i]
		if err := p.held(page); err != nil {
			for _, page := range list[i+1:] { // the other way round
				if free := &p.free[p.shard(page)]; p.holders[page] == 0 {
					*free = (*free)[:len(*free)-1]
					p.left--
				}
				p.holders[page]++
			}
			return err
		}
		if p.holders[page]--; p.holders[page] == 0 {
			free := &p.free[p.shard(page)]
			*free = append(*free, page)
			p.left++
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
