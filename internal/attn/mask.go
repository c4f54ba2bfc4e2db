package attn

// Mask says which keys a query sees. The zero Mask hides none.
//
// Everything that hides keys by their position is a field here, and [Mask.Keys] is the only place that knows what
// it hides. Only a [Tree], which is of one sequence, hides further keys among its new ones.
type Mask struct {
	Causal bool // position p sees keys j <= p, else all
	Window int  // if not 0, only those with j > p-Window; it may be larger than any context

	// SinkTokens: with a window, the first so many keys are seen, too (StreamingLLM: Xiao et al., arXiv:2309.17453). A
	// window that begins before their end, or right behind it, leaves no key out.
	SinkTokens int

	Tree bool // sequences may have trees: of the keys that Keys returns, one sees the new ones that its tree says
}

// Position returns the place of query position i of a sequence among its keys: the queries are its last ones.
func Position(queries, keys, i int) int { return keys - queries + i }

// Keys returns the keys [first, end) that query position i of a sequence sees, besides the first [Mask.SinkKeys] of them all.
// first <= end, and both rise with i.
func (m Mask) Keys(queries, keys, i int) (first, end int) {
	p := Position(queries, keys, i)
	if end = keys; m.Causal {
		end = max(p+1, 0)
	}
	if m.Window != 0 && m.Window <= p {
		first = p - m.Window + 1
	}
	if first <= m.SinkTokens {
		first = 0
	}
	return first, end
}

// SinkKeys returns how many of all keys, from key 0 on, a query position sees besides those that Keys returns, which begin
// with first: there are others between them. Causal or not, they come before its position.
func (m Mask) SinkKeys(first int) int { return min(m.SinkTokens, first) }

// Range returns the keys [first, end) that any of the query positions [from, to) sees, for from < to, besides the first
// [Mask.SinkKeys] of them all.
func (m Mask) Range(queries, keys, from, to int) (first, end int) {
	first, _ = m.Keys(queries, keys, from)
	_, end = m.Keys(queries, keys, to-1)
	return first, end
}

// Check reports what is wrong with m.
func (m Mask) Check(op string) error {
	if m.Window < 0 {
		return Errorf(op, ErrShape, "a window of %d keys", m.Window)
	}
	if m.SinkTokens < 0 {
		return Errorf(op, ErrShape, "%d sink tokens", m.SinkTokens)
	}
	return nil
}
