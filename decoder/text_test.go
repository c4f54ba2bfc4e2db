package decoder

import (
	"slices"
	"testing"
)

// TestLookup: the guesses are the tokens that followed the last tokens before: after the longest match, and after the latest of
// several. At the end of the text the guesses go on with themselves.
func TestLookup(t *testing.T) {
	for _, c := range []struct {
		text []int
		most int
		want []int
	}{
		{nil, 4, nil},
		{[]int{1}, 4, nil},
		{[]int{1, 1}, 4, nil},
		{[]int{1, 2, 3, 4}, 4, nil},
		{[]int{7, 1, 7}, 4, nil},                     // one token predicts too little
		{[]int{1, 2, 3, 4, 5, 1, 2}, 2, []int{3, 4}}, // after a match
		{[]int{1, 2, 3, 4, 5, 1, 2}, 9, []int{3, 4, 5, 1, 2, 3, 4, 5, 1}},    // and again
		{[]int{5, 5, 5}, 4, []int{5, 5, 5, 5}},                               // a match that overlaps
		{[]int{0, 1, 2, 3, 9, 1, 2, 4, 1, 2}, 1, []int{4}},                   // the latest of two places
		{[]int{0, 1, 2, 3, 9, 9, 1, 2, 4, 0, 1, 2}, 1, []int{3}},             // the longer of two matches
		{[]int{6, 7, 8, 6, 7, 8, 6, 7}, 5, []int{8, 6, 7, 8, 6}},             // a text that repeats
		{[]int{3, 3, 1, 2, 0, 0, 1, 2, 3, 3}, 3, []int{1, 2, 0}},             // at the very beginning
		{[]int{1, 2, 3, 4, 5, 6, 1, 2, 3, 9, 9, 1, 2, 3}, 3, []int{9, 9, 1}}, // of three tokens
	} {
		text := &Text{tokens: c.text}
		if got := text.lookup(c.most); !slices.Equal(got, c.want) {
			t.Errorf("%v, %d: %v, want %v", c.text, c.most, got, c.want)
		}
	}
}
