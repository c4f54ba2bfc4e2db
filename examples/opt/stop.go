package main

// stopper ends a text before a stop text. The text comes in pieces: what may be the
// beginning of a stop text is held back until it is known.
//
// The text ends before the stop text that is complete first, however the pieces
// are cut; of several that are complete with the same byte it is the longest.
type stopper struct {
	stops []stopText
	held  []byte // the longest beginning of a stop text that what came so far ends with
}

// stopText finds a text in another one, byte by byte (Knuth, Morris and Pratt).
type stopText struct {
	text string
	back []int // of each beginning of text, by its length: the longest shorter one that it ends with
	seen int   // the longest beginning of text that what came so far ends with
}

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
		s.stops = append(s.stops, stopText{text: text, back: back})
	}
	return s
}

// next takes a byte, and says whether the stop text is complete.
func (t *stopText) next(b byte) bool {
	for t.seen > 0 && (t.seen == len(t.text) || t.text[t.seen] != b) {
		t.seen = t.back[t.seen]
	}
	if t.text[t.seen] == b {
		t.seen++
	}
	return t.seen == len(t.text)
}

// add continues the text. It returns what is certain of it, and whether it has
// ended.
func (s *stopper) add(piece string) (text string, ended bool) {
	begin := len(s.held)
	s.held = append(s.held, piece...)
	for i := begin; i < len(s.held); i++ {
		longest := 0
		for j := range s.stops {
			if t := &s.stops[j]; t.next(s.held[i]) {
				longest = max(longest, len(t.text))
			}
		}
		if longest > 0 {
			text, s.held = string(s.held[:i+1-longest]), nil
			return text, true
		}
	}
	hold := 0
	for _, t := range s.stops {
		hold = max(hold, t.seen)
	}
	return s.take(len(s.held) - hold), false
}

// take returns so many bytes of what is held, which is held no more.
func (s *stopper) take(n int) string {
	text := string(s.held[:n])
	s.held = s.held[n:]
	return text
}

// flush is what was held back of a text that has ended otherwise.
func (s *stopper) flush() string { return s.take(len(s.held)) }
