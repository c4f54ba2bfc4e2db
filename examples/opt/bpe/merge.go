package bpe

// encoder holds what one call of Encode reuses from word to word.
type encoder struct {
	t     *Tokenizer
	ids   []int
	words map[string][]int // ids of the short words so far

	// The word being merged: a list of symbols by the position of their first
	// byte. A symbol that was merged into its left neighbour has size 0.
	symbols []symbol
	queue   []candidate
}

type symbol struct {
	id, size   int
	prev, next int // positions; -1 and the word's length at the ends
}

// candidate is a pair of neighbours that can be merged: the symbol at left and
// the one after it. It may be out of date when its turn comes.
type candidate struct{ rank, left int }

func (a candidate) before(b candidate) bool {
	return a.rank < b.rank || a.rank == b.rank && a.left < b.left
}

// maxCached is the length of the longest word that is remembered.
const maxCached = 64

func (e *encoder) word(word string) {
	if ids, ok := e.words[word]; ok {
		e.ids = append(e.ids, ids...)
		return
	}
	begin := len(e.ids)
	e.merge(word)
	if len(word) <= maxCached {
		e.words[word] = e.ids[begin:len(e.ids):len(e.ids)]
	}
}

// merge appends the ids of one word: of all pairs of neighbours the one of the
// lowest rank, and the leftmost of these, becomes one symbol, until no pair has
// a rank. The queue makes that O(n log n) for n bytes.
func (e *encoder) merge(word string) {
	s := e.symbols[:0]
	for i := range len(word) {
		s = append(s, symbol{e.t.bytes[word[i]], 1, i - 1, i + 1})
	}
	e.symbols, e.queue = s, e.queue[:0]
	for i := range s {
		e.offer(i)
	}
	for len(e.queue) > 0 {
		c := e.pop()
		left := &s[c.left]
		if left.size == 0 || left.next == len(s) {
			continue
		}
		right := &s[left.next]
		m, ok := e.t.merges[pair{left.id, right.id}]
		if !ok || m.rank != c.rank {
			continue
		}
		left.id, left.size, left.next = m.id, left.size+right.size, right.next
		right.size = 0
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
