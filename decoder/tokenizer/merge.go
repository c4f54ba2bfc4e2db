package tokenizer

import "math/rand/v2"

// symbol is a part of a word in a BPE. The symbols of a word are a doubly linked list.
type symbol struct {
	id         int32  // token; none32: no token; gone: merged into the left neighbour
	begin, end int32  // bytes of the word
	prev, next int32  // list links; -1 and the number of symbols at the ends
	with       merged // result of merging with the next symbol; rank notMerged: no merge
}

const notMerged = -1

const (
	none32 = -1
	gone   = -2
)

// candidate is a pair that can be merged: the symbol at position left and the next symbol. The upper 32 bits are the rank
// of the pair, and the lower 32 bits are left. A candidate in the queue may be stale.
type candidate uint64

func newCandidate(rank, left int32) candidate { return candidate(uint64(rank)<<32 | uint64(left)) }

func (c candidate) rank() int32 { return int32(c >> 32) }

func (c candidate) left() int32 { return int32(uint32(c)) }

// pairs is a set of pairs that can be merged.
type pairs interface {
	// pair returns the rank and the token of a pair of neighbours in a word. The pair with the lowest rank is merged first.
	pair(word string, left, right *symbol) (m merged, ok bool)
}

// reset removes the symbols and allocates capacity for n symbols.
func (e *encoder) reset(n int) {
	if e.symbols = e.symbols[:0]; cap(e.symbols) < n {
		e.symbols = make([]symbol, 0, n)
	}
}

// push appends a symbol.
func (e *encoder) push(id int32, begin, end int) {
	n := int32(len(e.symbols))
	e.symbols = append(e.symbols, symbol{id, int32(begin), int32(end), n - 1, n + 1, merged{rank: notMerged}})
}

// merge merges the leftmost of the pairs with the lowest rank into one symbol, until no pair has a rank. With the queue,
// merge takes O(n log n) time for n symbols.
func (e *encoder) merge(word string, p pairs) {
	s := e.symbols
	if e.queue = e.queue[:0]; cap(e.queue) < len(s) {
		e.queue = make([]candidate, 0, len(s))
	}
	offer := func(left int32) {
		l := &s[left]
		l.with.rank = notMerged
		if l.next < int32(len(s)) {
			if m, ok := p.pair(word, l, &s[l.next]); ok {
				l.with = m
				e.queue = append(e.queue, newCandidate(m.rank, left))
			}
		}
	}
	for i := range s {
		offer(int32(i))
	}
	for i := (len(e.queue) - 2) / 4; i >= 0 && len(e.queue) > 1; i-- {
		e.down(i)
	}
	for len(e.queue) > 0 {
		c := e.queue[0]
		last := len(e.queue) - 1
		e.queue[0] = e.queue[last]
		if e.queue = e.queue[:last]; last > 1 {
			e.down(0)
		}
		left := &s[c.left()]
		if left.id == gone || left.with.rank != c.rank() {
			continue
		}
		right := &s[left.next]
		left.id, left.end, left.next = left.with.id, right.end, right.next
		right.id = gone
		if left.next < int32(len(s)) {
			s[left.next].prev = c.left()
		}
		for _, at := range [2]int32{c.left(), left.prev} {
			if n := len(e.queue); at >= 0 {
				if offer(at); len(e.queue) > n {
					e.up(n)
				}
			}
		}
	}
}

// up and down maintain the heap e.queue, with the least candidate at the root. A node has four children: the depth is half
// that of a binary heap, and the children are in one cache line.
func (e *encoder) up(i int) {
	q := e.queue
	c := q[i]
	for i > 0 && c < q[(i-1)/4] {
		q[i] = q[(i-1)/4]
		i = (i - 1) / 4
	}
	q[i] = c
}

func (e *encoder) down(i int) {
	q := e.queue
	c := q[i]
	for {
		first := 4*i + 1
		if first >= len(q) {
			break
		}
		child := first
		for k, d := range q[first+1 : min(first+4, len(q))] {
			if d < q[child] {
				child = first + 1 + k
			}
		}
		if q[child] >= c {
			break
		}
		q[i], i = q[child], child
	}
	q[i] = c
}

// merged is the rank of a pair and the token that the pair becomes.
type merged struct{ rank, id int32 }

// idPairs maps pairs of token ids to merges. idPairs is a hash table with linear probing, at most half full.
type idPairs struct {
	keys   []uint64 // 0: empty; pairKey adds 1, so the key of a pair is not 0
	values []merged
	n      int
	seed   uint64 // random, so that a hostile file cannot cause collisions
}

func pairKey(left, right int32) uint64 { return (uint64(uint32(left))<<32 | uint64(uint32(right))) + 1 }

// slot returns the index of a key, or the index at which to insert the key.
func (p *idPairs) slot(key uint64) int {
	mask := len(p.keys) - 1
	h := (key ^ p.seed) * 0x9e3779b97f4a7c15
	h = (h ^ h>>32) * 0xd6e8feb86659fd93
	at := int(h>>33) & mask
	for p.keys[at] != key && p.keys[at] != 0 {
		at = (at + 1) & mask
	}
	return at
}

func (p *idPairs) get(left, right int32) (merged, bool) {
	if p.n == 0 {
		return merged{}, false
	}
	key := pairKey(left, right)
	at := p.slot(key)
	return p.values[at], p.keys[at] == key
}

// add adds a pair, and reports whether the pair is new. more is the expected number of further pairs.
func (p *idPairs) add(left, right int32, m merged, more int) bool {
	if 2*(p.n+1) > len(p.keys) {
		old := *p
		size := 16
		for size < 2*(p.n+1+more) {
			size *= 2
		}
		p.keys, p.values, p.seed = make([]uint64, size), make([]merged, size), rand.Uint64()
		for i, key := range old.keys {
			if key != 0 {
				at := p.slot(key)
				p.keys[at], p.values[at] = key, old.values[i]
			}
		}
	}
	key := pairKey(left, right)
	at := p.slot(key)
	if p.keys[at] == key {
		return false
	}
	p.keys[at], p.values[at] = key, m
	p.n++
	return true
}

func (p *idPairs) pair(_ string, left, right *symbol) (merged, bool) {
	return p.get(left.id, right.id)
}

// textPairs maps the text of a pair to a merge, as in SentencePiece and tiktoken: a pair can be merged if the text of the
// pair is a token.
type textPairs struct {
	tokens  map[string]merged
	longest int // maximum bytes of a token
}

func (p *textPairs) pair(word string, left, right *symbol) (merged, bool) {
	if left.id == frozen || right.id == frozen || int(right.end-left.begin) > p.longest {
		return merged{}, false
	}
	m, ok := p.tokens[word[left.begin:right.end]]
	return m, ok
}

// frozen is the id of a symbol that must not be merged.
const frozen = -3
