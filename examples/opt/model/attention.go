package model

import (
	"time"

	la "gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
)

// cache stores the keys and values of a decoder's sequences.
type cache interface {
	// newAttention makes the attention of a graph with at least the given rows, and returns the graph's number of
	// rows.
	newAttention(rows int) (attention, int, error)
	truncate(sequence, tokens int) error
	Close() error
}

// attention is one graph's attention nodes, with their state between runs.
type attention interface {
	// node makes the node of a layer; see attend.
	node(b *builder, layer int, q, k, v *G.Node) *G.Node

	// usedRows returns the rows of x, of the graph's rows, that a run computes.
	usedRows(b *builder, x *G.Node) *G.Node

	// take sets counts to the tokens of each sequence for the next run, out of the tokens left. It takes some unless
	// none are left.
	take(left, counts []int)

	// step calls compute, which runs the graph: the next counts[i] tokens of sequence i are the rows from first[i]
	// on. step sets first before. After an error of compute the keys and values of the run are dropped.
	step(counts, first []int, compute func() error) error

	// spent returns the time in the attention of all runs.
	spent() time.Duration
}

// shareRows divides rows among the tokens left. Sequences with a single row come first: decode waits for no prompt.
func shareRows(rows int, left, counts []int) {
	appends := make([]la.Append, len(left))
	for i, n := range left {
		appends[i].Tokens = n
	}
	clear(counts)
	for chunk, of := range la.Chunks(rows, appends) {
		for i, a := range chunk {
			counts[of[i]] = a.Tokens
		}
		return // the rest is for later runs
	}
}
