package model

import (
	"time"

	la "gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
)

// cache is where the keys and values of a decoder's sequences are kept.
type cache interface {
	// newAttention makes the attention of a graph, which needs so many rows,
	// and tells how many the graph is to have.
	newAttention(rows int) (attention, int, error)
	truncate(sequence, tokens int) error
	Close() error
}

// attention is one graph's attention nodes, with what they need from run to run.
type attention interface {
	// node makes the node of a layer; see attend.
	node(b *builder, layer int, q, k, v *G.Node) *G.Node

	// usedRows makes the rows of x, of the graph's rows, that a run computes.
	usedRows(b *builder, x *G.Node) *G.Node

	// take sets counts to the tokens of each sequence that the next run takes,
	// of those that are left. Some are taken unless none are left.
	take(left, counts []int)

	// step calls compute, which runs the graph: the next counts[i] tokens of sequence i are the
	// rows from first[i] on. It sets first before. After an error of compute the keys and values of
	// the run are forgotten.
	step(counts, first []int, compute func() error) error

	// spent is the time in the attention of all runs.
	spent() time.Duration
}

// shareRows gives rows to the tokens that are left. It begins with those who need a
// single row: they wait for no prompt.
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
		return // the rest is for the runs behind this one
	}
}
