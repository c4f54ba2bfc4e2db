package main

import (
	"slices"
	"strings"
)

// stopper ends a text before a stop text. The text comes in pieces, one for each token:
// what may be the beginning of a stop text is held back until it is known.
//
// The text ends before the stop text that is complete first, however the pieces
// are cut; of several that are complete with the same byte it is the one that begins
// first.
//
// A special token has no text. A stop text that has the token's name in it is found
// where the token comes, too; in all other stop texts the token is nothing.
type stopper struct {
	stops []stopText
	held  []byte // the longest beginning of a stop text that what came so far ends with
	total int    // bytes of text that came so far
	ends  []int  // total after each token
	at    int    // when the text has ended: how many tokens are wholly before the stop text
}

// stopText finds a text in another one, byte by byte (Knuth, Morris and Pratt).
type stopText struct {
	text  string
	back  []int // of each beginning of text, by its length: the longest shorter one that it ends with
	seen  int   // the longest beginning of text that what came so far ends with
	come  int   // bytes that came so far
	named bool  // the names of special tokens are among them, if text has them
	names []stopName
}

// stopName is the name of a special token among the bytes that came.
type stopName struct{ token, begin, end int }

func newStopper(stops []string) *stopper {
	s := &stopper{}
	for _, text := range stops {
		back := make([]int, len(text)+1)
		for i, n := 1, 0; i < len(text); i++ {
			for n > 0 && text[n] != text[i] {
				n = back[n]
			}
			if text[n] == text[i] {
				n++
			}
			back[i+1] = n
		}
		s.stops = append(s.stops, stopText{text: text, back: back}, stopText{text: text, back: back, named: true})
	}
	return s
}

// next takes a byte, and says whether the stop text is complete.
func (t *stopText) next(b byte) bool {
	t.come++
	for t.seen > 0 && (t.seen == len(t.text) || t.text[t.seen] != b) {
		t.seen = t.back[t.seen]
	}
	if t.text[t.seen] == b {
		t.seen++
	}
	return t.seen == len(t.text)
}

// name takes the name of a special token, and says whether the stop text is complete
// behind it.
func (t *stopText) name(name string, token int) (complete bool) {
	if !t.named || !strings.Contains(t.text, name) {
		return false
	}
	t.names = slices.DeleteFunc(t.names, func(n stopName) bool { return n.end <= t.come-len(t.text) })
	t.names = append(t.names, stopName{token, t.come, t.come + len(name)})
	for i := range len(name) {
		complete = t.next(name[i])
	}
	return complete
}

// visible is how many of the last n bytes are text, and no names.
func (t *stopText) visible(n int) int {
	begin := t.come - n
	for _, m := range t.names {
		n -= max(0, m.end-max(m.begin, begin))
	}
	return n
}

// within reports whether the complete stop text begins inside a name, which the text
// does not have but as a whole.
func (t *stopText) within() bool {
	begin := t.come - len(t.text)
	return slices.ContainsFunc(t.names, func(n stopName) bool { return n.begin < begin && begin < n.end })
}

// add continues the text by what a token has of it, and by the name of a special token.
// It returns what is certain of the text, and whether it has ended.
func (s *stopper) add(piece, special string) (text string, ended bool) {
	if len(s.stops) == 0 {
		return piece, false
	}
	for i := range len(piece) {
		s.held = append(s.held, piece[i])
		s.total++
		if text, ended = s.end(func(t *stopText) bool { return t.next(piece[i]) }); ended {
			return text, true
		}
	}
	if special != "" {
		if text, ended = s.end(func(t *stopText) bool { return t.name(special, len(s.ends)) }); ended {
			return text, true
		}
	}
	s.ends = append(s.ends, s.total)
	hold := 0
	for i := range s.stops {
		hold = max(hold, s.stops[i].visible(s.stops[i].seen))
	}
	return s.take(len(s.held) - hold), false
}

// end ends the text if it completes a stop text for which complete says so.
func (s *stopper) end(complete func(*stopText) bool) (text string, ended bool) {
	longest := -1
	for i := range s.stops {
		t := &s.stops[i]
		if !complete(t) || t.within() {
			continue
		}
		n := t.visible(len(t.text))
		if n <= longest {
			continue
		}
		longest = n
		s.at, _ = slices.BinarySearch(s.ends, s.total-n+1)
		for _, m := range t.names {
			if m.end > t.come-len(t.text) {
				s.at = min(s.at, m.token)
			}
		}
	}
	if longest < 0 {
		return "", false
	}
	text, s.held = string(s.held[:len(s.held)-longest]), nil
	return text, true
}

// take returns so many bytes of what is held, which is held no more.
func (s *stopper) take(n int) string {
	text := string(s.held[:n])
	s.held = s.held[n:]
	return text
}

// flush is what was held back of a text that has ended otherwise.
func (s *stopper) flush() string { return s.take(len(s.held)) }
