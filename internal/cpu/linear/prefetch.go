package linear

import "sync"

// prefetchTable records which layer of one row follows which. Between two layers of a decoder's step one thread goes
// from node to node, and memory is idle. The other threads meanwhile prefetch the beginning of their next weights:
// those that followed the last time. A wrong guess only costs time. The addresses keep no memory alive.
type prefetchTable struct {
	mu   sync.Mutex
	last *successors
	all  [1 << prefetchTableBits]successors
}

// prefetchTableBits serves more layers than most models have.
const prefetchTableBits = 10

// successors are the weights that followed the weights at an address.
type successors struct {
	weights uintptr
	by      []memory // by thread
}

// memory is a range of bytes that may be invalid.
type memory struct {
	at    uintptr
	bytes int
}

// turn records that r follows the layer before, and gives r the likely next weights.
func (n *prefetchTable) turn(r *rowRun) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.last != nil {
		n.last.by = n.last.by[:0]
		for i := range r.ranges {
			n.last.by = append(n.last.by, r.beginning(i))
		}
	}
	n.last = n.find(uintptr(r.begins(0, 0)))
	r.then = append(r.then, n.last.by...)
}

// find returns the entry of some weights, which may replace another entry.
func (n *prefetchTable) find(weights uintptr) *successors {
	at := uint64(weights) * 0x9e3779b97f4a7c15 >> (64 - prefetchTableBits)
	f := &n.all[at]
	for i := range uint64(4) { // the possible entries
		other := &n.all[(at+i)%uint64(len(n.all))]
		if other.weights == weights || other.weights == 0 {
			f = other
			break
		}
	}
	if f.weights != weights {
		f.weights, f.by = weights, f.by[:0]
	}
	return f
}
