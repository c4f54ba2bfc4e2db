package decoder

import (
	"slices"
	"strings"
)

// stopper ends a text before a stop text. The text comes in pieces, one for each token; the possible beginning of a
// stop text is held back until it is certain.
//
// The text ends before the stop text that is complete first, for any division into pieces; among several that are
// complete with the same byte, before the one that begins first.
//
// A special token has no text. A stop text that contains the token's name matches the token too; for all other stop
// texts the token is nothing. With [Request].Special the name is a part of the text, and no name is passed to add.
type stopper struct {
	stops []stopText
	held  []byte // the longest beginning of a stop text at the end of the text so far
	total int    // bytes of text so far
	ends  []int  // total after each token
	at    int    // after the text has ended: how many tokens are wholly before the stop text
}

// stopText finds a text in another one, byte by byte (Knuth, Morris and Pratt).
type stopText struct {
	text  string
	back  []int // for each beginning of text, by its length: the longest shorter beginning at its end
	seen  int   // the longest beginning of text at the end of the bytes so far
	come  int   // bytes so far
	named bool  // the bytes include the names of special tokens, if text contains them
	names []stopName
}

// stopName is the name of a special token among the bytes.
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

// next takes a byte, and reports whether the stop text is complete.
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

// name takes the name of a special token, and reports whether the stop text is complete after it.
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

// visible returns how many of the last n bytes are text, not names.
func (t *stopText) visible(n int) int {
	begin := t.come - n
	for _, m := range t.names {
		n -= max(0, m.end-max(m.begin, begin))
	}
	return n
}

// within reports whether the complete stop text begins inside a name, which the text contains only as a whole.
func (t *stopText) within() bool {
	begin := t.come - len(t.text)
	return slices.ContainsFunc(t.names, func(n stopName) bool { return n.begin < begin && begin < n.end })
}

// add continues the text by a token's text, and by the name of a special token. It returns the certain part of the
// text, and whether the text has ended.
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

// end ends the text if it completes a stop text for which complete returns true.
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

// take returns and removes n bytes of the held text.
func (s *stopper) take(n int) string {
	text := string(s.held[:n])
	s.held = s.held[n:]
	return text
}

// flush returns the held text of a text that has ended otherwise.
func (s *stopper) flush() string { return s.take(len(s.held)) }
