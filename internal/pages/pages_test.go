package pages

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/script"

	"pgregory.net/rapid"
)

// TestPool does anything in any order.
func TestPool(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t)
		t.Repeat(rapid.StateMachineActions(w))
	})
}

// TestPoolFor: so many pages are enough for the tokens, and one less is not.
func TestPoolFor(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := New(1, rapid.IntRange(1, 1<<20).Draw(t, "tokens of a page"))
		tokens := rapid.IntRange(0, min(1<<40, math.MaxInt/2)).Draw(t, "tokens")
		if n := p.For(tokens); n*p.size < tokens || n > 0 && (n-1)*p.size >= tokens || n < 0 {
			t.Fatalf("%d pages of %d tokens for %d tokens", n, p.size, tokens)
		}
	})
	if n := New(1, 2).For(math.MaxInt); n != math.MaxInt/2+1 {
		t.Errorf("%d pages for as many tokens as there can be", n)
	}
}

// TestDropAllocates: a table whose first pages go as new ones come keeps its memory.
func TestDropAllocates(t *testing.T) {
	const window = 10
	p := New(6, 4)
	var table Table
	var r Reservation
	step := func() {
		err := errors.Join(p.Reserve(&r, &table, 3), p.Commit(&r))
		if end := table.Tokens - window; end > 0 {
			err = errors.Join(err, p.Drop(&table, Gap{End: end}))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for range 20 {
		step()
	}
	if n := testing.AllocsPerRun(1000, step); n > 0 || cap(table.Pages) > 16 {
		t.Errorf("%v allocations, a table of %d pages", n, cap(table.Pages))
	}
}

// TestCheck: Check finds each kind of inconsistency, and names it.
func TestCheck(t *testing.T) {
	type state struct {
		p          *Pool
		a, b, c, d Table // b is a clone of a, d has a gap
		r, s       Reservation
		tables     []*Table
		open       []*Reservation
	}
	build := func() *state {
		w := &state{p: NewSharded(16, 4, 2)}
		w.tables, w.open = []*Table{&w.a, &w.b, &w.c, &w.d}, []*Reservation{&w.r, &w.s}
		add := func(t *Table, n int) {
			var r Reservation
			if err := errors.Join(w.p.Reserve(&r, t, n), w.p.Commit(&r)); err != nil {
				panic(err)
			}
		}
		add(&w.a, 6)
		clone, err := w.p.Clone(&w.a)
		w.b = clone
		add(&w.d, 20)
		add(&w.c, 2)
		if err = errors.Join(err, w.p.Drop(&w.d, Gap{1, 13}), w.p.Reserve(&w.r, &w.b, 4), w.p.Reserve(&w.s, &w.c, 9), w.p.Check(w.tables, w.open)); err != nil {
			t.Fatal(err)
		}
		return w
	}
	for what, x := range map[string]struct {
		corrupt func(w *state)
		text    string
	}{
		"a holder more":                  {func(w *state) { w.p.holders[w.a.Pages[0]]++ }, "has 2 holders, and 3 are counted"},
		"a holder less":                  {func(w *state) { w.p.holders[w.d.Pages[0]]-- }, "has 1 holders, and 0 are counted"},
		"a table nobody knows":           {func(w *state) { w.tables = w.tables[1:] }, "are counted"},
		"a free page in use":             {func(w *state) { p := w.p.shard(w.d.Pages[0]); w.p.free[p] = append(w.p.free[p], w.d.Pages[0]) }, "is in the free list"},
		"a page that is lost":            {func(w *state) { w.p.free[0] = w.p.free[0][1:] }, "is 0 times in the free list"},
		"a page twice free":              {func(w *state) { w.p.free[0] = append(w.p.free[0], w.p.free[0][0]) }, "is 2 times in the free list"},
		"a free page in another place":   {func(w *state) { w.p.free[0][0], w.p.free[1][0] = w.p.free[1][0], w.p.free[0][0] }, "free list of place"},
		"a free page that there is not":  {func(w *state) { w.p.free[0][0] = 16 }, "page 16 of 16 is in the free list"},
		"a count of free pages":          {func(w *state) { w.p.left++ }, "pages are free, and"},
		"a page twice in a table":        {func(w *state) { w.a.Pages[1] = w.a.Pages[0] }, "twice in"},
		"a page that there is not":       {func(w *state) { w.a.Pages[1] = 16 }, "page 16 of 16"},
		"a page before all others":       {func(w *state) { w.a.Pages[1] = -1 }, "page -1 of 16"},
		"a page too few":                 {func(w *state) { w.a.Pages = w.a.Pages[:1] }, "1 pages and not 2"},
		"a page too many":                {func(w *state) { w.a.Tokens = 4 }, "2 pages and not 1"},
		"a gap that has no end":          {func(w *state) { w.d.Gap.End = 0 }, "[1, 0) were dropped"},
		"a gap behind the tokens":        {func(w *state) { w.d.Gap.End = 21 }, "[1, 21) were dropped"},
		"negative tokens":                {func(w *state) { w.a.Tokens = -1 }, "-1 tokens"},
		"a gap before the tokens":        {func(w *state) { w.d.Gap.First = -1 }, "[-1, 13) were dropped"},
		"an open append without one":     {func(w *state) { w.a.open = true }, "an append to it is noted: true"},
		"an append that is not noted":    {func(w *state) { w.b.open = false }, "an append to it is noted: false"},
		"a reservation that is not open": {func(w *state) { w.r.table = nil }, "it is not open"},
		"two reservations of a table":    {func(w *state) { r := w.s; w.open = append(w.open, &r) }, "its table has another one"},
		"a reservation of no table":      {func(w *state) { t := w.b; w.r.table = &t }, "in use nowhere"},
		"a reservation of no tokens":     {func(w *state) { w.r.tokens = 0 }, "0 tokens"},
		"fewer pages reserved":           {func(w *state) { w.s.Pages = w.s.Pages[:2] }, "2 pages for 9 tokens behind 2"},
		"another page kept":              {func(w *state) { w.r.Pages[0] = w.d.Pages[0] }, "begins with other pages"},
		"another number kept":            {func(w *state) { w.s.kept = 0 }, "0 pages of the table are kept and not 1"},
		"a copy of another page":         {func(w *state) { w.r.replaced = w.b.Pages[0] }, "is to be copied"},
		"a fresh page of another":        {func(w *state) { w.s.Pages[2] = w.d.Pages[0] }, "holders"},
		"a shared page that is written": {func(w *state) {
			w.p.holders[w.c.Pages[0]]++
			w.tables = append(w.tables, &Table{Pages: slices.Clone(w.c.Pages), Tokens: 2})
		}, "new tokens are written to page"},
		"a shared fresh page": {func(w *state) {
			fresh := w.s.Fresh()[:1]
			w.p.holders[fresh[0]]++
			w.tables = append(w.tables, &Table{Pages: slices.Clone(fresh), Tokens: 2})
		}, "new tokens are written to page"},
	} {
		w := build()
		x.corrupt(w)
		if err := w.p.Check(w.tables, w.open); err == nil || !strings.Contains(err.Error(), x.text) {
			t.Errorf("%s: %v, want %q", what, err, x.text)
		}
	}
}

// TestScript: what calls give, step by step.
//
//	pool COUNT SIZE          a new pool, without tables
//	take NAME N              pages that are held without a table, and release NAME
//	add NAME N               an append of N tokens, committed, to a table that is new or not
//	clone NAME OF
//	drop NAME FIRST END
//	own NAME FROM TO         and disown NAME
//	least NAME N ...
//	place NAME TOKEN ...
func TestScript(t *testing.T) {
	var pool *Pool
	var tables map[string]*Table
	var taken map[string][]int32
	var owned map[string][]Owned
	show := func(name string, list []int32) string {
		return fmt.Sprintf("%s: %s", name, strings.Trim(fmt.Sprint(list), "[]"))
	}
	script.Run(t, "testdata/pages.txt", func(words []string) (string, error) {
		var names []string
		var n []int
		for _, word := range words[1:] {
			if i, err := strconv.Atoi(word); err == nil {
				n = append(n, i)
			} else {
				names = append(names, word)
			}
		}
		if words[0] == "pool" {
			pool, tables, taken, owned = New(n[0], n[1]), map[string]*Table{}, map[string][]int32{}, map[string][]Owned{}
			return "", nil
		}
		var name string
		var table *Table
		if len(names) > 0 {
			if name = names[0]; tables[name] == nil {
				tables[name] = new(Table)
			}
			table = tables[name]
		}
		text, err := "", error(nil)
		switch words[0] {
		case "take":
			taken[name], err = pool.Take(nil, n[0])
			text = show(name, taken[name])
			delete(tables, name)
		case "release":
			err = pool.Release(taken[name])
			delete(taken, name)
			delete(tables, name)
		case "add":
			var r Reservation
			if err = pool.Reserve(&r, table, n[0]); err == nil {
				err = pool.Commit(&r)
			}
			text = show(name, table.Pages)
		case "clone":
			*table, err = pool.Clone(tables[names[1]])
		case "drop":
			err = pool.Drop(table, Gap{First: n[0], End: n[1]})
			text = show(name, table.Pages)
		case "own":
			owned[name], err = pool.Own(table, n[0], n[1])
			text = show(name, table.Pages)
		case "disown":
			err = pool.Disown(table, owned[name])
			text = show(name, table.Pages)
		case "least":
			var of []*Table
			for _, name := range names {
				if tables[name] == nil {
					tables[name] = new(Table)
				}
				of = append(of, tables[name])
			}
			return fmt.Sprintf("%d pages", pool.Least(of, n)), nil
		case "place":
			for _, token := range n {
				page, slot := pool.Place(table, token)
				text += fmt.Sprintf("token %d: page %d, slot %d\n", token, page, slot)
			}
		default:
			t.Fatalf("no command %q", words[0])
		}
		var all []*Table
		for _, table := range tables {
			all = append(all, table)
		}
		for _, list := range taken {
			all = append(all, &Table{Pages: list, Tokens: len(list) * pool.size})
		}
		return text, errors.Join(err, pool.Check(all, nil))
	})
}
