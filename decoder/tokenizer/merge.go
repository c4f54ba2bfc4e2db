package tokenizer

import "math"

// encoder is the memory that a call of Encode reuses from word to word.
type encoder struct {
	t     *Tokenizer
	ids   []int
	most  int              // limit of ids
	over  bool             // there are more ids
	lost  int              // a byte without a token; -1: none
	words map[string][]int // ids of the short words so far

	// The word that is merged: a list of symbols by their position. A symbol that was merged into its left neighbour
	// has no token.
	symbols []symbol
	queue   []candidate
}

type symbol struct {
	id         int // -1: merged into its neighbour
	prev, next int // positions; -1 and the number of symbols at the ends
}

// candidate is a pair of neighbours that can be merged: the symbol at left and the next one. A candidate may be stale
// when it is taken from the queue.
type candidate struct{ rank, left int }

func (a candidate) before(b candidate) bool {
	return a.rank < b.rank || a.rank == b.rank && a.left < b.left
}

// maxCached is the length of the longest cached word.
const maxCached = 64

// word appends the ids of a word and reports whether more ids fit.
func (e *encoder) word(word string) bool {
	if ids, ok := e.words[word]; ok {
		return e.add(ids...)
	}
	if e.t.ignoreMerges {
		id, ok := e.t.whole(word)
		if _, added := e.t.texts[id]; ok && !added {
			return e.add(id)
		}
	}
	begin := len(e.ids)
	if !e.begin(word) {
		e.over = true
		return false
	}
	e.merge()
	if len(word) <= maxCached {
		e.words[word] = e.ids[begin:len(e.ids):len(e.ids)]
	}
	return e.add()
}

// begin makes symbols of a word's bytes, and reports whether the word can have few enough tokens: a token has at most
// longest symbols.
func (e *encoder) begin(word string) bool {
	t := e.t
	e.symbols = e.symbols[:0]
	if t.complete && len(word)/t.longest > e.most-len(e.ids) {
		return false
	}
	room := math.MaxInt
	if left := e.most - len(e.ids); left < math.MaxInt/t.longest-1 {
		room = (left + 1) * t.longest
	}
	fused := false
	for i := range len(word) {
		id := t.bytes[word[i]]
		if id >= 0 {
			fused = false
		} else {
			if t.unk < 0 {
				e.lost = int(word[i])
				continue
			}
			if fused && t.fuseUnk {
				continue
			}
			id, fused = t.unk, true
		}
		if len(e.symbols) == room {
			return false
		}
		n := len(e.symbols)
		e.symbols = append(e.symbols, symbol{id, n - 1, n + 1})
	}
	return true
}

// merge appends the ids of the symbols: the pair of neighbours with the lowest rank, and the leftmost of these,
// becomes one symbol, until no pair has a rank. The queue makes that O(n log n) for n symbols.
func (e *encoder) merge() {
	s := e.symbols
	e.queue = e.queue[:0]
	for i := range s {
		e.offer(i)
	}
	for len(e.queue) > 0 {
		c := e.pop()
		left := &s[c.left]
		if left.id < 0 || left.next == len(s) {
			continue
		}
		right := &s[left.next]
		m, ok := e.t.merges[pair{left.id, right.id}]
		if !ok || m.rank != c.rank {
			continue
		}
		left.id, left.next = m.id, right.next
		right.id = -1
		if left.next < len(s) {
			s[left.next].prev = c.left
		}
		e.offer(c.left)
		if left.prev >= 0 {
			e.offer(left.prev)
		}
	}
	for i := 0; i < len(s); i = s[i].next {
		e.ids = append(e.ids, s[i].id)
	}
}

// offer queues the pair that begins at left, if it can be merged.
func (e *encoder) offer(left int) {
	s := e.symbols
	if s[left].next == len(s) {
		return
	}
	if m, ok := e.t.merges[pair{s[left].id, s[s[left].next].id}]; ok {
		e.push(candidate{m.rank, left})
	}
}

// push and pop keep queue a binary heap, the first candidate at its root.
func (e *encoder) push(c candidate) {
	q := append(e.queue, c)
	i := len(q) - 1
	for i > 0 && c.before(q[(i-1)/2]) {
		q[i] = q[(i-1)/2]
		i = (i - 1) / 2
	}
	q[i], e.queue = c, q
}

func (e *encoder) pop() candidate {
	q := e.queue
	first, c := q[0], q[len(q)-1]
	q = q[:len(q)-1]
	i := 0
	for {
		child := 2*i + 1
		if child+1 < len(q) && q[child+1].before(q[child]) {
			child++
		}
		if child >= len(q) || !q[child].before(c) {
			break
		}
		q[i], i = q[child], child
	}
	if len(q) > 0 {
		q[i] = c
	}
	e.queue = q
	return first
}
