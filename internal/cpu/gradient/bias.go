package gradient

import (
	"gorgonia.org/leanattention/internal/cpu/vector"
)

// The gradient of the bias is a phase of its own, from scores that are computed once more: all rows that share a
// number of the bias contribute to it, so the worker of a piece of the bias goes through all of them in one order.
// Adding in the other phase would need a copy of the bias for each thread.

// cutBias cuts the bias into pieces, and returns their number.
func (r *backwardRun[F]) cutBias() (units int) {
	s := &r.shape
	r.biasRows = chunkRows
	if s.Bias.Queries == 1 {
		r.biasRows = s.Queries // all queries share a row
	}
	r.rowBlocks = (s.Queries-1)/r.biasRows + 1
	others := s.Bias.Sequences * s.Bias.Heads * r.rowBlocks
	want := (minUnits-1)/others + 1
	blocks := (s.Keys-1)/chunkKeys + 1
	r.biasKeys = ((blocks-1)/want + 1) * chunkKeys
	r.keyBlocks = (s.Keys-1)/r.biasKeys + 1
	return others * r.keyBlocks
}

// bias computes the gradient of a piece of the bias: some keys of some query positions of a head of a sequence, or of
// all heads, or sequences.
func (r *backwardRun[F]) bias(w *backwardWorker[F], unit int) {
	s := &r.shape
	first := unit % r.keyBlocks * r.biasKeys
	end := min(first+r.biasKeys, s.Keys)
	unit /= r.keyBlocks
	from := unit % r.rowBlocks * r.biasRows
	to := min(from+r.biasRows, s.Queries)
	unit /= r.rowBlocks
	seq, seqs := unit/s.Bias.Heads, 1
	head, heads := unit%s.Bias.Heads, 1
	r.eachRow(seq, head, from, to, first, end, func(db []F) { clear(db) })
	if s.Bias.Sequences == 1 {
		seqs = s.Batch
	}
	if s.Bias.Heads == 1 {
		heads = s.Heads
	}
	group := s.Group()
	for b := seq; b < seq+seqs; b++ {
		live := s.Live(b)
		for h := head; h < head+heads; {
			w.open(r, b*s.KVHeads+h/group, live)
			n := 1 // heads with consecutive rows
			if to-from == s.Queries {
				n = min(head+heads, h/group*group+group) - h
			}
			row := h % group * s.Queries
			w.addBias(row+from, row+(n-1)*s.Queries+to, first, min(end, live))
			h += n
		}
	}
	if scale := s.Bias.Factor(); scale != 1 {
		r.eachRow(seq, head, from, to, first, end, func(db []F) {
			vector.Scale(db, db, scale)
		})
	}
}

// eachRow calls f with the gradients for keys [first, end), for each row of the bias of query positions [from, to) of
// a head.
func (r *backwardRun[F]) eachRow(seq, head, from, to, first, end int, f func(db []F)) {
	b := &r.shape.Bias
	if b.Queries == 1 {
		from, to = 0, 1
	}
	for pos := from; pos < to; pos++ {
		at := b.Row(seq, head, pos)
		f(r.ops.DBias[at+first : at+end])
	}
}

// addBias adds the part of rows [row, rows) of the KV head and keys [first, end) to the gradient of the bias.
func (w *backwardWorker[F]) addBias(row, rows, first, end int) {
	s := &w.run.shape
	for row < rows {
		n := blockRows(s, row, rows)
		w.pack(row, n)
		if w.extreme() {
			w.measure()
		}
		last := min(end, w.most)
		for key := max(first, w.low); key < last; key += backwardKeys {
			count := min(backwardKeys, last-key)
			from, to := w.seeing(key, count)
			w.gradients(from, to, key, count)
			for r := from; r < to; r++ {
				low, high := w.see(r, key, count)
				at := s.Bias.Row(w.seq, w.head0+(row+r)/s.Queries, (row+r)%s.Queries) + key
				vector.Add(w.run.ops.DBias[at+low:at+high], w.ds[r*w.stride:][low:high])
			}
		}
		row += n
	}
}
