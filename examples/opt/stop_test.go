package main

import (
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// A text ends where the first stop text is complete, however it is cut into
// pieces, and nothing of that stop text is written.
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
			text, ended = s.add(string(rest[:n]))
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

// What can't be the beginning of a stop text is not held back, and a long stop text
// takes no longer than a short one.
func TestStopperHolds(t *testing.T) {
	s := newStopper([]string{"\nQuestion", "aab"})
	for _, step := range []struct{ piece, want string }{
		{"one\n", "one"}, {"Qu", ""}, {"ick", "\nQuick"}, {"a", ""}, {"a", ""}, {"a", "a"}, {"c", "aac"},
	} {
		if got, ended := s.add(step.piece); got != step.want || ended {
			t.Errorf("%q: %q, %v, want %q", step.piece, got, ended, step.want)
		}
	}
	if got, ended := s.add("a"); got != "" || ended || s.flush() != "a" {
		t.Errorf("a beginning at the end is lost")
	}

	s = newStopper([]string{strings.Repeat("a", 1<<16) + "b"})
	n := 0
	for range 1 << 17 { // quadratic, this would be 8e9 steps
		text, _ := s.add("a")
		n += len(text)
	}
	if n += len(s.flush()); n != 1<<17 {
		t.Errorf("%d letters", n)
	}
}
