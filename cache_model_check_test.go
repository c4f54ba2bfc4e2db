package leanattention

import (
	"errors"
	"fmt"
	"io"
	"slices"

	"pgregory.net/rapid"
)

// checkClosed closes the cache, in whatever state it is, and tries everything.
func (m *cacheModel) checkClosed(t *rapid.T) {
	expect(t, m.cache.Close())
	try := func(what string, err error) {
		if !errors.Is(err, ErrClosed) {
			t.Fatalf("%s of a closed cache: %v, want ErrClosed", what, err)
		}
	}
	try("Close", m.cache.Close())
	_, err := m.cache.NewSequence()
	try("NewSequence", err)
	_, err = m.cache.NewStep(1)
	try("NewStep", err)
	for _, s := range m.sequences {
		_, err = s.real.Fork()
		try("Fork", err)
		_, err = s.real.WriteTo(io.Discard)
		try("WriteTo", err)
		try("Truncate", s.real.Truncate(0))
		try("Keep", s.real.Keep(0, nil))
		try("Release", s.real.Release())
	}
	for _, s := range m.steps {
		try("Set", s.step.Set(nil))
		try("Run", s.step.Run(nil, func() error { return nil }))
		try("CachedAttention", s.runLayer(0, s.draw(m.rng, 0, s.fresh())))
		try("Commit", s.step.Commit())
		try("Rollback", s.step.Rollback())
	}
}

// Check compares everything there is, and poisons what nobody may read.
func (m *cacheModel) Check(t *rapid.T) {
	*m.actions++
	noError(t, m.cache.Check())
	m.checkStats(t)
	m.checkPages(t)
	view := m.cache.testView()
	for i, s := range m.sequences {
		if gap := s.real.table.Gap; gap.First != s.gone[0] || gap.End != s.gone[1] {
			t.Fatalf("sequence %d has given back tokens %v, want %v", i, gap, s.gone)
		}
		if err := view.checkTokens(s.real, s.tokens); err != nil {
			t.Fatalf("sequence %d: %v", i, err)
		}
	}
	for i, s := range m.steps {
		for j, p := range s.parts {
			for l := range m.cache.config.Layers {
				for n, tok := range slices.Concat(p.tokens, p.fresh) {
					if tok.k[l] == nil { // the layer has not run
						break
					}
					at, kept := p.real.place(n)
					if !kept {
						continue
					}
					if err := view.checkToken(l, s.step.reservations[j].Pages, at, tok); err != nil {
						t.Fatalf("step %d, append %d: %v", i, j, err)
					}
				}
			}
		}
	}
	m.poison()
}

func (m *cacheModel) checkStats(t *rapid.T) {
	cfg := m.cache.Config()
	want := CacheStats{
		FreePages: cfg.Pages - len(m.held()),
		Sequences: len(m.live()),
	}
	for _, n := range m.holders() {
		if n > 1 {
			want.Shared++
		}
	}
	for _, s := range m.sequences {
		want.Tokens += len(s.tokens)
	}
	if got := m.cache.Stats(); got != want {
		t.Fatalf("stats %+v, want %+v", got, want)
	}
}

// checkPages checks that the model's pages and the cache's are the same ones:
// what shares a page in the model shares it there, and nothing else does.
func (m *cacheModel) checkPages(t *rapid.T) {
	c := m.cache
	held := m.held()
	for p := range m.pageOf {
		if !held[p] {
			delete(m.pageOf, p)
		}
	}
	owner := make(map[int32]*modelPage)
	for p, n := range m.pageOf {
		owner[n] = p
	}
	match := func(who string, model []*modelPage, real []int32) {
		model = there(model)
		if len(model) != len(real) {
			t.Fatalf("%s has %d pages, want %d", who, len(real), len(model))
		}
		for i, p := range model {
			n, known := m.pageOf[p]
			if !known && owner[real[i]] == nil {
				m.pageOf[p], owner[real[i]] = real[i], p
			} else if !known || n != real[i] {
				t.Fatalf("%s has page %d at %d, which is another's (want %d, %t)", who, real[i], i, n, known)
			}
		}
	}
	for i, s := range m.sequences {
		match(fmt.Sprintf("sequence %d", i), s.pages, s.real.table.Pages)
	}
	for i, s := range m.steps {
		for j, p := range s.parts {
			match(fmt.Sprintf("step %d, append %d", i, j), p.after, s.step.reservations[j].Pages)
		}
	}

	// The cache's own books.
	holders := make([]int32, c.config.Pages)
	for _, s := range m.sequences {
		for _, p := range s.real.table.Pages {
			holders[p]++
		}
	}
	for _, s := range m.steps {
		for j := range s.parts {
			r := &s.step.reservations[j]
			for _, p := range r.Fresh() {
				holders[p]++
			}
		}
	}
	free := make(map[int32]bool)
	listed, counted := c.pool.Lists()
	for _, p := range listed {
		if free[p] || holders[p] != 0 {
			t.Fatalf("page %d is free twice, or free and held: %v, holders %v", p, listed, holders)
		}
		free[p] = true
	}
	for p, n := range holders {
		if n != counted[p] || (n == 0) != free[int32(p)] {
			t.Fatalf("page %d has %d holders, is free: %t; the cache counts %d", p, n, free[int32(p)], counted[p])
		}
	}
}

// poison writes NaN to all slots but those of committed tokens, copies of which
// an open step may have, and those that an open step has written.
func (m *cacheModel) poison() {
	type slot struct {
		layer int
		page  int32
		slot  int
	}
	size := m.cache.config.PageSize
	seen := make(map[slot]bool)
	for l := range m.cache.config.Layers {
		for _, s := range m.sequences {
			for i := range s.tokens {
				if at, kept := s.real.place(i); kept {
					seen[slot{l, s.real.table.Pages[at/size], at % size}] = true
				}
			}
		}
		for _, s := range m.steps {
			for j, p := range s.parts {
				for i, tok := range slices.Concat(p.tokens, p.fresh) {
					if at, kept := p.real.place(i); kept && tok.k[l] != nil {
						seen[slot{l, s.step.reservations[j].Pages[at/size], at % size}] = true
					}
				}
			}
		}
	}
	poisonUnseen(m.cache, func(l int, page int32, at int) bool { return seen[slot{l, page, at}] })
}

func (m *cacheModel) live() (live []*modelSequence) {
	for _, s := range m.sequences {
		if !s.released {
			live = append(live, s)
		}
	}
	return live
}

// holders is how many sequences point to a page.
func (m *cacheModel) holders() map[*modelPage]int {
	n := make(map[*modelPage]int)
	for _, s := range m.sequences {
		for _, p := range there(s.pages) {
			n[p]++
		}
	}
	return n
}

// held is the pages that sequences and open steps point to.
func (m *cacheModel) held() map[*modelPage]bool {
	held := make(map[*modelPage]bool)
	for p := range m.holders() {
		held[p] = true
	}
	for _, s := range m.steps {
		for _, part := range s.parts {
			for _, p := range there(part.after) {
				held[p] = true
			}
		}
	}
	return held
}

func (m *cacheModel) pagesFor(tokens int) int {
	n := 0
	for n*m.cache.config.PageSize < tokens {
		n++
	}
	return n
}

func indexes(n int) []int {
	list := make([]int, n)
	for i := range list {
		list[i] = i
	}
	return list
}
