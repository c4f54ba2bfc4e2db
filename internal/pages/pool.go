package pages

import (
	"errors"
	"fmt"
	"slices"
)

var (
	// ErrFull: the pool has too few free pages.
	ErrFull = errors.New("too few free pages")

	// ErrPage: the pool does not have a page, or the page has no holder.
	ErrPage = errors.New("no such page is held")

	// ErrTokens: a number of tokens is out of range.
	ErrTokens = errors.New("number of tokens out of range")

	// ErrReservation: an append is open and must not be, or is not open and must be.
	ErrReservation = errors.New("append out of order")
)

// Pool is the pages of a cache. Its methods are not safe for concurrent use.
type Pool struct {
	size    int       // tokens of a page
	free    [][]int32 // the free pages of each shard; the last page is taken first
	left    int       // the number of all free pages
	holders []int32   // the number of holders of each page
}

// New returns a pool of count free pages of size tokens. Both numbers are at least 1. The lowest page is taken first.
func New(count, size int) *Pool { return NewSharded(count, size, 1) }

// NewSharded is New for pages in several shards, at least 1. Page i is in shard i mod shards. A pool takes
//
//   - the first page of a sequence from the shard with the most free pages
//   - each further page from the shard after that of the page before
//   - a copy from the shard of the original
//
// If that shard has no free page, the pool takes the page from the next shard that has one.
func NewSharded(count, size, shards int) *Pool {
	p := &Pool{size: size, free: make([][]int32, shards), left: count, holders: make([]int32, count)}
	for i := range count {
		page := int32(count - 1 - i)
		p.free[p.shard(page)] = append(p.free[p.shard(page)], page)
	}
	return p
}

// shard returns the shard of a page.
func (p *Pool) shard(page int32) int { return int(page) % len(p.free) }

// next returns the shard for the page that follows list.
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

// take takes a free page from a shard, or from the next shard that has one. The pool has a free page.
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

// Count returns the number of all pages.
func (p *Pool) Count() int { return len(p.holders) }

// Free returns the number of free pages.
func (p *Pool) Free() int { return p.left }

// Shared returns the number of pages with several holders.
func (p *Pool) Shared() int {
	n := 0
	for _, h := range p.holders {
		if h > 1 {
			n++
		}
	}
	return n
}

// For returns the number of pages that tokens tokens take.
func (p *Pool) For(tokens int) int {
	n := tokens / p.size
	if tokens%p.size != 0 {
		n++
	}
	return n
}

// Lists returns copies of the free lists, shard by shard, and of the number of holders of each page.
func (p *Pool) Lists() (free, holders []int32) {
	return slices.Concat(p.free...), slices.Clone(p.holders)
}

// Take appends n free pages to list, and makes each page held once. Errors: [ErrFull].
func (p *Pool) Take(list []int32, n int) ([]int32, error) {
	if err := p.has(n); err != nil {
		return list, err
	}
	for range n {
		list = append(list, p.take(p.next(list)))
	}
	return list, nil
}

// has returns an error if fewer than n pages are free.
func (p *Pool) has(n int) error {
	if n > p.left {
		return fmt.Errorf("%d pages needed, %d of %d free: %w", n, p.left, len(p.holders), ErrFull)
	}
	return nil
}

// Hold adds a holder to each page of list. Errors: [ErrPage] for a page without holders.
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

// Release removes a holder from each page of list. A page without holders is free. Release begins with the last page, so that it
// restores the order of the free list before Take. Errors: [ErrPage] for a page that is in list more often than it has holders.
func (p *Pool) Release(list []int32) error {
	for i := len(list) - 1; i >= 0; i-- {
		page := list[i]
		if err := p.held(page); err != nil {
			for _, page := range list[i+1:] { // restore
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

// held returns an error if a page has no holder.
func (p *Pool) held(page int32) error {
	if page < 0 || int(page) >= len(p.holders) {
		return fmt.Errorf("page %d of %d: %w", page, len(p.holders), ErrPage)
	}
	if p.holders[page] == 0 {
		return fmt.Errorf("page %d is free: %w", page, ErrPage)
	}
	return nil
}
