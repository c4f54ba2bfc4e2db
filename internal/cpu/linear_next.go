package cpu

import "sync"

// nextRows knows which layer of one row follows which. Between two layers of a decoder's step one thread goes from node to node,
// and memory waits. The others ask meanwhile for the beginning of what they will read. That is what followed when the same
// weights were read the last time: a guess. If it is wrong, nothing is lost but time. Its addresses are hints, which
// keep no memory alive.
type nextRows struct {
	mu   sync.Mutex
	last *followed
	all  [1 << nextRowsBits]followed
}

// nextRowsBits is for more layers than most models have.
const nextRowsBits = 10

// followed is what followed the weights at an address.
type followed struct {
	weights uintptr
	by      []memory // by thread
}

// memory is bytes that nobody need hold.
type memory struct {
	at    uintptr
	bytes int
}

// turn takes down what r reads, behind what was read before, and tells r what is likely to be next.
func (n *nextRows) turn(r *rowRun) {
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
func (n *nextRows) find(weights uintptr) *followed {
	at := uint64(weights) * 0x9e3779b97f4a7c15 >> (64 - nextRowsBits)
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

// foresighted is a task that knows what its threads are likely to read behind it. after is called on the thread.
type foresighted interface{ after(thread int) reading }

// reading is memory that a thread asks for, a little at a time, as long as it has nothing else to do.
type reading struct {
	memory
	fetch func(p uintptr, n int)
}

// readBytes is what is asked for between two looks for work: what takes some hundred nanoseconds.
const readBytes = 2 << 10

// some asks for some of it; false: nothing is left.
func (r *reading) some() bool {
	n := min(r.bytes, readBytes)
	if n <= 0 {
		return false
	}
	r.fetch(r.at, n)
	r.at, r.bytes = r.at+uintptr(n), r.bytes-n
	return true
}
