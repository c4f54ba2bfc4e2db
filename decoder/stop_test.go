package decoder

import (
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// TestStopper: a text ends where the first stop text is complete, for any division into pieces, and nothing of that stop text is
// passed on.
func TestStopper(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		// Few letters, so that stop texts overlap each other and themselves.
		stops := rapid.SliceOfN(rapid.StringOfN(rapid.RuneFrom([]rune("abé")), 1, 5, -1), 0, 4).Draw(t, "stops")
		all := rapid.StringOfN(rapid.RuneFrom([]rune("abéè")), 0, 40, -1).Draw(t, "text")

		want, ends := all, false
		for end := 1; end <= len(all) && !ends; end++ {
			for _, stop := range stops {
				if rest, found := strings.CutSuffix(all[:end], stop); found && (!ends || len(rest) < len(want)) {
					want, ends = rest, true
				}
			}
		}

		s, got, ended := newStopper(stops), "", false
		for rest := []rune(all); len(rest) > 0 && !ended; {
			n := rapid.IntRange(0, len(rest)).Draw(t, "piece")
			var text string
			text, ended = s.add(string(rest[:n]), "")
			got, rest = got+text, rest[n:]
			if !strings.HasPrefix(want, got) {
				t.Fatalf("wrote %q of %q", got, want)
			}
		}
		if got += s.flush(); got != want || ended != ends {
			t.Fatalf("%q by %q: %q, ended %v, want %q, %v", all, stops, got, ended, want, ends)
		}
	})
}

// TestStopperSpecial: a stop text with the name of a special token is found where the token comes, which itself has no text. All
// other stop texts are found as if the token were not there.
func TestStopperSpecial(t *testing.T) {
	names := []string{"<a>", "<>", "b"}
	rapid.Check(t, func(t *rapid.T) {
		letters := rapid.StringOfN(rapid.RuneFrom([]rune("ab<>")), 1, 3, -1)
		part := rapid.OneOf(letters, rapid.SampledFrom(names))
		var stops []string
		for range rapid.IntRange(1, 3).Draw(t, "stops") {
			stops = append(stops, strings.Join(rapid.SliceOfN(part, 1, 3).Draw(t, "stop"), ""))
		}
		type token struct{ text, special string }
		var tokens []token
		for range rapid.IntRange(0, 20).Draw(t, "tokens") {
			if rapid.Bool().Draw(t, "special") {
				tokens = append(tokens, token{special: rapid.SampledFrom(names).Draw(t, "name")})
			} else {
				tokens = append(tokens, token{text: rapid.StringOfN(rapid.RuneFrom([]rune("ab<>")), 0, 3, -1).Draw(t, "text")})
			}
		}

		// place is a byte that comes: its token, and whether it is text or where in a name it is.
		type place struct {
			b          byte
			token      int
			name       bool
			begin, end bool // of a name
		}
		want, before, ends := "", 0, false
		find := func(come []place, stop string) (text, first int, ok bool) {
			n := len(stop)
			if n > len(come) {
				return 0, 0, false
			}
			match := come[len(come)-n:]
			for i, p := range match {
				if p.b != stop[i] || p.name && (i == 0 && !p.begin || i == n-1 && !p.end) {
					return 0, 0, false
				}
				if !p.name {
					text++
				}
			}
			return text, match[0].token, true
		}
		plain, named := []place{}, make([][]place, len(stops))
		check := func() {
			longest := -1
			for i, stop := range stops {
				for _, come := range [][]place{plain, named[i]} {
					if text, first, ok := find(come, stop); ok && text > longest {
						longest, before, ends = text, first, true
					}
				}
			}
			if ends {
				want = want[:len(want)-longest]
			}
		}
		for i, x := range tokens {
			for j := 0; j < len(x.text) && !ends; j++ {
				p := place{b: x.text[j], token: i}
				want += x.text[j : j+1]
				plain = append(plain, p)
				for k := range stops {
					named[k] = append(named[k], p)
				}
				check()
			}
			if x.special == "" || ends {
				continue
			}
			for k, stop := range stops {
				for j := 0; strings.Contains(stop, x.special) && j < len(x.special); j++ {
					named[k] = append(named[k], place{x.special[j], i, true, j == 0, j == len(x.special)-1})
				}
			}
			// The plain text was looked at before.
			was := plain
			plain = nil
			check()
			plain = was
		}

		s, got, ended := newStopper(stops), "", false
		for _, x := range tokens {
			var text string
			text, ended = s.add(x.text, x.special)
			if got += text; !strings.HasPrefix(want, got) {
				t.Fatalf("wrote %q of %q", got, want)
			}
			if ended {
				break
			}
		}
		if got += s.flush(); got != want || ended != ends || ended && s.at != before {
			t.Fatalf("%q by %q: %q, ended %v, %d tokens before it, want %q, %v, %d", tokens, stops, got, ended, s.at, want, ends, before)
		}
	})
}

// TestStopperHolds: text that cannot be the beginning of a stop text is not held back, and a long stop text takes no longer than a
// short one.
func TestStopperHolds(t *testing.T) {
	s := newStopper([]string{"\nQuestion", "aab"})
	for _, step := range []struct{ piece, want string }{
		{"one\n", "one"}, {"Qu", ""}, {"ick", "\nQuick"}, {"a", ""}, {"a", ""}, {"a", "a"}, {"c", "aac"},
	} {
		if got, ended := s.add(step.piece, ""); got != step.want || ended {
			t.Errorf("%q: %q, %v, want %q", step.piece, got, ended, step.want)
		}
	}
	if got, ended := s.add("a", ""); got != "" || ended || s.flush() != "a" {
		t.Errorf("a beginning at the end is lost")
	}

	s = newStopper([]string{strings.Repeat("a", 1<<16) + "b"})
	n := 0
	for range 1 << 17 { // quadratic, this would be 8e9 steps
		text, _ := s.add("a", "")
		n += len(text)
	}
	if n += len(s.flush()); n != 1<<17 {
		t.Errorf("%d letters", n)
	}
}
