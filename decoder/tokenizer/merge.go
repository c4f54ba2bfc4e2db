package tokenizer

import "math/rand/v2"

// symbol is a part of a word that is merged. The parts are a list by their positions.
type symbol struct {
	id         int32  // of its token; none: there is no such token; gone: it was merged into its left neighbour
	begin, end int32  // of its bytes in the word
	prev, next int32  // positions; -1 and the number of symbols at the ends
	with       merged // what it becomes with the next symbol; rank notMerged: nothing
}

const notMerged = -1

const (
	none32 = -1
	gone   = -2
)

// candidate is a pair of neighbours that can be merged, the symbol at left and the next one: the rank of the pair, and left
// in the lower 32 bits. A candidate may be stale when it is taken from the queue.
type candidate uint64

func newCandidate(rank, left int32) candidate { return candidate(uint64(rank)<<32 | uint64(left)) }

func (c candidate) rank() int32 { return int32(c >> 32) }

func (c candidate) left() int32 { return int32(uint32(c)) }

// pairs are the pairs that can be merged.
type pairs interface {
	// pair returns the rank of a pair of neighbours in a word, and the token that they become. Lower ranks are first.
	pair(word string, left, right *symbol) (m merged, ok bool)
}

// reset begins a word with up to n symbols.
func (e *encoder) reset(n int) {
	if e.symbols = e.symbols[:0]; cap(e.symbols) < n {
		e.symbols = make([]symbol, 0, n)
	}
}

// push appends a symbol to the word's.
func (e *encoder) push(id int32, begin, end int) {
	n := int32(len(e.symbols))
	e.symbols = append(e.symbols, symbol{id, int32(begin), int32(end), n - 1, n + 1, merged{rank: notMerged}})
}

// merge merges the symbols: the pair of neighbours with the lowest rank, and the leftmost of these, becomes one symbol,
// until no pair has a rank. The queue makes that O(n log n) for n symbols.
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

// up and down keep queue a heap, the first candidate at its root. A node has four children: that is half the depth of a
// binary heap, and the children are in one cache line.
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

// merged is what a pair becomes.
type merged struct{ rank, id int32 }

// idPairs are pairs by the ids of their tokens: a hash table with linear probing, half full at most.
type idPairs struct {
	keys   []uint64 // 0: empty; the key of a pair is not 0, as pairKey adds 1
	values []merged
	n      int
	seed   uint64 // keys are from a file, which must not choose where they are
}

func pairKey(left, right int32) uint64 { return (uint64(uint32(left))<<32 | uint64(uint32(right))) + 1 }

// slot returns the place of a key, or where it belongs.
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

// add adds a pair, and reports whether it is new. more is how many pairs may come.
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

// textPairs are pairs by the text that they become, as in SentencePiece and tiktoken: any pair can be merged whose text
// is a token.
type textPairs struct {
	tokens  map[string]merged
	longest int // bytes of a token
}

func (p *textPairs) pair(word string, left, right *symbol) (merged, bool) {
	if left.id == frozen || right.id == frozen || int(right.end-left.begin) > p.longest {
		return merged{}, false
	}
	m, ok := p.tokens[word[left.begin:right.end]]
	return m, ok
}

// frozen is the id of a symbol that is not merged.
const frozen = -3
