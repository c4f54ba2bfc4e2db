package leanattention

import (
	"iter"
	"slices"
)

// Part is what a step takes of one of the appends that [Chunks] cuts.
type Part struct {
	Of   int // the append, an index in what was cut
	From int // the part is its tokens [From, To), counted from 0
	To   int
}

// Chunks cuts appends of any number of tokens, as long prompts are, into steps of so
// many rows. Each step is a list for [Step.Set], and beside each append of it the
// part that it is:
//
//	for appends, parts := range leanattention.Chunks(step.Tokens(), todo) {
//		err := step.Set(appends)
//		row := 0
//		for _, p := range parts {
//			row += copy(ids[row:], prompts[p.Of][p.From:p.To])
//		}
//		err = machine.RunAll()
//		...
//		for i, row := range step.Last() {
//			if p := parts[i]; p.To == todo[p.Of].Tokens {
//				// prompt p.Of is read: row has the logits of its next token
//			}
//		}
//	}
//
// Appends with a single token left get their rows first, so that a sequence that
// decodes does not wait for the prompt of another. The rows that are left go to the
// others in order, each as many as it can use. The parts of a step are in the order
// of the appends.
//
// Each step is worked out when the loop comes to it, from what appends were when the
// loop began. An append of 0 tokens is in no step. What no step can take is left for
// Set to refuse: a negative number of tokens is passed on as it is, and so is all of
// appends if rows is less than 1.
func Chunks(rows int, appends []Append) iter.Seq2[[]Append, []Part] {
	return func(yield func([]Append, []Part) bool) {
		todo := slices.Clone(appends)
		done := make([]int, len(todo))
		for {
			chunk, parts := nextChunk(rows, todo, done)
			if len(chunk) == 0 || !yield(chunk, parts) {
				return
			}
		}
	}
}

// nextChunk is one step of Chunks. It adds to done what the step takes of each append.
func nextChunk(rows int, appends []Append, done []int) (chunk []Append, parts []Part) {
	taken := shareRows(rows, appends, done)
	for i, n := range taken {
		if n == 0 {
			continue
		}
		chunk = append(chunk, Append{Seq: appends[i].Seq, Tokens: n})
		parts = append(parts, Part{Of: i, From: done[i], To: done[i] + n})
		done[i] += n
	}
	return chunk, parts
}

// shareRows says how many tokens of each append are in the next step.
func shareRows(rows int, appends []Append, done []int) []int {
	taken := make([]int, len(appends))
	uncut := rows < 1
	for i, a := range appends {
		if left := a.Tokens - done[i]; left < 0 || left == 1 && rows > 0 || uncut {
			taken[i] = left
			rows -= max(left, 0)
		}
	}
	for i, a := range appends {
		if left := a.Tokens - done[i]; left > 1 && !uncut {
			taken[i] = min(left, max(rows, 0))
			rows -= taken[i]
		}
	}
	return taken
}
