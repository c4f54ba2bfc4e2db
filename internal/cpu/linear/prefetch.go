package linear

import "sync"

// prefetchTable knows which layer of one row follows which. Between two layers of a decoder's step one thread goes from node to node,
// and memory waits. The others ask meanwhile for the beginning of what they will read. That is what followed when the same
// weights were read the last time: a guess. If it is wrong, nothing is lost but time. Its addresses are hints, which
// keep no memory alive.
type prefetchTable struct {
	mu   sync.Mutex
	last *successors
	all  [1 << prefetchTableBits]successors
}

// prefetchTableBits is for more layers than most models have.
const prefetchTableBits = 10

// successors is what followed the weights at an address.
type successors struct {
	weights uintptr
	by      []memory // by thread
}

// memory is bytes that nobody need hold.
type memory struct {
	at    uintptr
	bytes int
}

// turn takes down what r reads, behind what was read before, and tells r what is likely to be next.
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

// find returns the place of some weights. What was in it of others is forgotten.
func (n *prefetchTable) find(weights uintptr) *successors {
	at := uint64(weights) * 0x9e3779b97f4a7c15 >> (64 - prefetchTableBits)
	f := &n.all[at]
	for i := range uint64(4) { // places that it may have
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
