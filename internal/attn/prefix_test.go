package attn

import (
	"math"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/pages"

	"pgregory.net/rapid"
)

// forks draws sequences whose pages are a tree of forks.
func forks(t *rapid.T, page int) (seqs []Sequence) {
	fresh := int32(0)
	for i := range rapid.IntRange(0, 12).Draw(t, "sequences") {
		q := Sequence{Queries: rapid.IntRange(0, 3).Draw(t, "queries")}
		q.Keys = q.Queries + rapid.IntRange(0, 12*page).Draw(t, "keys")
		if i > 0 && rapid.IntRange(0, 4).Draw(t, "fork") > 0 {
			of := seqs[rapid.IntRange(0, i-1).Draw(t, "of")]
			n := rapid.IntRange(0, min(of.Keys, q.Keys)/page).Draw(t, "pages")
			q.Pages = slices.Clone(of.Pages[:n])
		}
		for len(q.Pages) < Ceil(q.Keys, page) {
			q.Pages = append(q.Pages, fresh)
			fresh++
		}
		seqs = append(seqs, q)
	}
	return seqs
}

func TestPrefixes(t *testing.T) {
	var f Prefixes // the memory of one is the next one's
	rapid.Check(t, func(t *rapid.T) {
		page, least := rapid.IntRange(1, 4).Draw(t, "page"), rapid.IntRange(1, 12).Draw(t, "worth")
		most := rapid.OneOf(rapid.Just(math.MaxInt), rapid.IntRange(0, 30)).Draw(t, "most queries")
		seqs := forks(t, page)
		g := Problem{PageTokens: page, Mask: Mask{Causal: rapid.Bool().Draw(t, "causal")}}
		f.Find(&g, seqs, least, most)
		seen := func(q *Sequence) int { // keys that all queries see
			if g.Causal {
				return q.Keys - q.Queries
			}
			return q.Keys
		}
		if len(f.Own) != len(seqs) {
			t.Fatalf("%d sequences, %d with keys of their own", len(seqs), len(f.Own))
		}
		at := make([]int, len(seqs)) // how far the prefixes of a sequence are
		has := map[[3]int]bool{}     // page number n of sequences i and j is in a prefix of both
		queries, saved := 0, 0
		for i := range f.Found {
			p := &f.Found[i]
			m := f.Members(p)
			if len(m) < 2 || (p.End-p.First)*(len(m)-1) < least || p.First%page != 0 || p.End%page != 0 {
				t.Fatalf("prefix [%d, %d) of %v", p.First, p.End, m)
			}
			saved += (p.End - p.First) * (len(m) - 1)
			for _, a := range m {
				q := &seqs[a]
				queries += q.Queries
				if q.Queries == 0 || p.First != at[a] || p.End > seen(q) {
					t.Fatalf("sequence %d, %+v: prefix [%d, %d), the one before ended at %d", a, q, p.First, p.End, at[a])
				}
				at[a] = p.End
				if !slices.Equal(q.Pages[:p.End/page], seqs[m[0]].Pages[:p.End/page]) {
					t.Fatalf("sequences %d and %d have other pages than prefix [%d, %d)", a, m[0], p.First, p.End)
				}
				for _, b := range m {
					for n := p.First / page; n < p.End/page; n++ {
						has[[3]int{n, int(a), int(b)}] = true
					}
				}
			}
		}
		if !slices.Equal(at, f.Own) {
			t.Fatalf("prefixes end at %v, keys of their own begin at %v", at, f.Own)
		}
		if queries > most || saved != f.Saved {
			t.Fatalf("members have %d queries, %d are the most; %d keys are saved, not %d", queries, most, saved, f.Saved)
		}
		if least > 1 || most < math.MaxInt {
			return
		}
		for i := range seqs { // then there is all that can be
			for j := range i {
				a, b := &seqs[i], &seqs[j]
				for n := 0; a.Queries > 0 && b.Queries > 0 && n < min(seen(a), seen(b))/page && a.Pages[n] == b.Pages[n]; n++ {
					if !has[[3]int{n, i, j}] {
						t.Fatalf("page %d of sequences %d and %d is in no prefix: %+v", n, i, j, f.Found)
					}
				}
			}
		}
	})
}

// Where windows hide keys, all queries see what they see by themselves, each key once: keys of their own, with a window that is narrower by what was
// cut out, and those of the prefixes that their sequences are members of.
func TestPrefixesCut(t *testing.T) {
	var f Prefixes
	cut, hidden, later := 0, 0, 0 // sequences that were cut, those without what is hidden, and such that have keys of their own between two prefixes
	for range 1000 {
		rapid.Check(t, func(t *rapid.T) {
			page := rapid.IntRange(1, 4).Draw(t, "page")
			seqs := forks(t, page)
			g := Problem{PageTokens: page, Mask: Mask{Causal: rapid.Bool().Draw(t, "causal"), Window: rapid.IntRange(1, 12*page+5).Draw(t, "window")}}
			if rapid.Bool().Draw(t, "with sink tokens") {
				g.SinkTokens = rapid.IntRange(1, 3*page).Draw(t, "sink tokens")
			}
			most := rapid.OneOf(rapid.Just(math.MaxInt), rapid.IntRange(0, 30)).Draw(t, "most queries")
			f.Find(&g, seqs, rapid.SampledFrom([]int{1, 1, page, 5 * page}).Draw(t, "worth"), most)
			own := f.AppendOwn(nil, seqs)
			see := func(q *Sequence, m Mask, i int) (keys []int) { // keys by where they lie
				first, end := m.Keys(q.Queries, q.Keys, i)
				for key := range end {
					if key >= first || key < m.SinkKeys(first) {
						keys = append(keys, int(q.Pages[key/page])*page+key%page)
					}
				}
				return keys
			}
			of, saved, queries := make([][]int, len(seqs)), 0, 0
			for i := range f.Found {
				p := &f.Found[i]
				s := f.Sequence(p, seqs)
				saved += s.Keys * (len(f.Members(p)) - 1)
				queries += s.Queries
				for _, m := range f.Members(p) {
					if len(of[m]) > 0 && seqs[m].Pages[p.First/page-1]*int32(page) != int32(of[m][len(of[m])-1]/page*page) {
						later++
					}
					of[m] = append(of[m], see(&s, Mask{}, 0)...)
				}
			}
			if saved != f.Saved || queries > most {
				t.Fatalf("%d keys are saved, not %d; %d queries", saved, f.Saved, queries)
			}
			for n := range seqs {
				q, o := &seqs[n], &own[n]
				if o.Row != q.Row || o.Queries != q.Queries || o.Keys+len(of[n]) > q.Keys || f.Own[n] != len(of[n]) || len(of[n]) == 0 && o.Keys != q.Keys {
					t.Fatalf("sequence %d, %+v, is %+v behind %d keys", n, q, o, f.Own[n])
				}
				if o.Cut > 0 {
					cut++
				}
				if gone := q.Keys - o.Keys - len(of[n]); gone > 0 {
					hidden++
				} else if first, _ := g.Mask.Keys(q.Queries, q.Keys, 0); gone == 0 && o.Cut > 0 && first >= (Ceil(g.SinkTokens, page)+2)*page+q.Queries {
					t.Fatalf("sequence %d, %+v, has all %d keys that no query sees in %+v", n, q, first, o)
				}
				m := o.Narrowed(g.Mask)
				if m.Window < 1 {
					t.Fatalf("sequence %d has a window of %d", n, m.Window)
				}
				for i := range q.Queries {
					want, have := see(q, g.Mask, i), append(see(o, m, i), of[n]...)
					slices.Sort(want)
					if slices.Sort(have); !slices.Equal(want, have) {
						t.Fatalf("query %d of sequence %d sees %v instead of %v: %+v in %+v", i, n, have, want, f.Found, seqs)
					}
				}
			}
		})
		if cut > 100 && hidden > 100 && later > 5 {
			return
		}
	}
	t.Errorf("%d sequences were cut, %d are without what is hidden, %d have keys of their own between two prefixes", cut, hidden, later)
}

// What is found of a step is what is found of it by itself, whatever was found before: sequences are forked, grow, are truncated, lose
// what windows leave behind and go, and come in another order.
func TestPrefixesOfSteps(t *testing.T) {
	again, fresh, hides := 0, 0, 0 // steps of which all was as before, and others with prefixes; such with sequences of which a window hides keys
	for range 1000 {
		rapid.Check(t, func(t *rapid.T) {
			size := rapid.IntRange(1, 3).Draw(t, "page")
			pool, g := pages.New(1000, size), Problem{PageTokens: size, Mask: Mask{Causal: rapid.Bool().Draw(t, "causal")}}
			if rapid.Bool().Draw(t, "window") {
				g.Window = rapid.IntRange(1, 40).Draw(t, "of")
			}
			var tables []*pages.Table
			var was Prefixes
			lay := rapid.Permutation([]int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}).Draw(t, "order")
			for range rapid.IntRange(1, 12).Draw(t, "steps") {
				for range rapid.IntRange(0, 3).Draw(t, "changes") {
					at := func() int { return rapid.IntRange(0, len(tables)-1).Draw(t, "table") }
					switch what := rapid.IntRange(0, 7).Draw(t, "what"); {
					case len(tables) == 0 || what == 0 && len(tables) < len(lay):
						tables = append(tables, new(pages.Table))
						grow(t, pool, tables[len(tables)-1], rapid.IntRange(1, 30).Draw(t, "tokens"))
					case what <= 3 && len(tables) < len(lay):
						x, err := pool.Clone(tables[at()])
						noError(t, err)
						tables = append(tables, &x)
					case what == 4:
						x := tables[at()]
						noError(t, pool.Truncate(x, rapid.IntRange(x.Gap.End, x.Tokens).Draw(t, "left")))
					case what == 5:
						i := at()
						noError(t, pool.Release(tables[i].Pages))
						tables = slices.Delete(tables, i, i+1)
					case what == 6:
						x := tables[at()]
						gap := x.Gap
						if gap == (pages.Gap{}) {
							gap.First = min(size, x.Tokens)
							gap.End = gap.First
						}
						gap.End = rapid.IntRange(gap.End, x.Tokens).Draw(t, "gone")
						noError(t, pool.Drop(x, gap))
					default:
						lay = rapid.Permutation(lay).Draw(t, "order")
					}
				}
				var seqs []Sequence
				row := 0
				for _, i := range lay {
					if i >= len(tables) {
						continue
					}
					q := Sequence{Row: row, Queries: rapid.SampledFrom([]int{1, 1, 1, 1, 1, 1, 0, 3}).Draw(t, "queries")}
					grow(t, pool, tables[i], q.Queries)
					q.Keys, q.Pages = tables[i].Tokens-pool.Shift(tables[i]), tables[i].Pages
					row += q.Queries
					seqs = append(seqs, q)
				}
				most := rapid.SampledFrom([]int{math.MaxInt, math.MaxInt, math.MaxInt, 10}).Draw(t, "most")
				var now Prefixes
				turn := was.Turn
				was.Find(&g, seqs, 1, most)
				now.Find(&g, seqs, 1, most)
				if !slices.Equal(was.Found, now.Found) || !slices.Equal(was.Own, now.Own) || was.Saved != now.Saved || !slices.Equal(was.order, now.order) || !slices.Equal(was.members, now.members) {
					t.Fatalf("%+v: found %v in %v, own keys from %v, %d saved; by itself %v in %v, %v, %d", seqs,
						was.Found, was.order, was.Own, was.Saved, now.Found, now.order, now.Own, now.Saved)
				}
				alike := func(a, b Sequence) bool { return a.Keys == b.Keys && a.Cut == b.Cut && slices.Equal(a.Pages, b.Pages) }
				if a, b := was.AppendOwn(nil, seqs), now.AppendOwn(nil, seqs); !slices.EqualFunc(a, b, alike) {
					t.Fatalf("%+v: what is their own is %+v; by itself %+v", seqs, a, b)
				}
				if now.hides {
					hides++
				}
				if len(now.Found) > 0 && was.Turn == turn {
					again++
				} else if len(now.Found) > 0 {
					fresh++
				}
			}
		})
		if again > 20 && fresh > 20 && hides > 200 {
			return
		}
	}
	t.Errorf("%d steps were as the step before, %d others had prefixes, in %d windows hid keys", again, fresh, hides)
}

// grow appends tokens to a table.
func grow(t *rapid.T, pool *pages.Pool, x *pages.Table, tokens int) {
	if tokens == 0 {
		return
	}
	var r pages.Reservation
	noError(t, pool.Reserve(&r, x, tokens))
	noError(t, pool.Commit(&r))
}

func noError(t *rapid.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// 256 sequences: a system prompt, 16 conversations, 16 samples of each.
func benchmarkForks() []Sequence {
	var seqs []Sequence
	var fresh int32
	pages := func(n int) (p []int32) {
		for range n {
			p = append(p, fresh)
			fresh++
		}
		return p
	}
	system := pages(256)
	for range 16 {
		conversation := pages(64)
		for range 16 {
			q := Sequence{Queries: 1, Pages: slices.Concat(system, conversation, pages(20))}
			q.Keys = 16 * len(q.Pages)
			seqs = append(seqs, q)
		}
	}
	return seqs
}

func TestPrefixesAllocations(t *testing.T) {
	seqs := benchmarkForks()
	var f Prefixes
	find := func() { f.Find(&Problem{PageTokens: 16, Mask: Mask{Causal: true}}, seqs, 256, math.MaxInt) }
	if find(); len(f.Found) != 17 {
		t.Errorf("%d prefixes", len(f.Found))
	}
	if n := testing.AllocsPerRun(10, find); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkPrefixes(b *testing.B) {
	seqs := benchmarkForks()
	var f Prefixes
	for b.Loop() {
		f.Find(&Problem{PageTokens: 16, Mask: Mask{Causal: true}}, seqs, 256, math.MaxInt)
	}
}
