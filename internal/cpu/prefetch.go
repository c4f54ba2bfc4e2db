package cpu

// A Prefetcher is a Task with a guess of what its threads will read after it. Prefetch is called on the thread.
type Prefetcher interface{ Prefetch(thread int) Prefetch }

// Prefetch is memory that an idle thread prefetches in pieces. No one need keep the memory alive.
type Prefetch struct {
	At    uintptr
	Bytes int
	Fetch func(p uintptr, n int)
}

// PrefetchBytes is the number of bytes that are prefetched between two polls: some hundred nanoseconds.
const PrefetchBytes = 2 << 10

// some prefetches a piece; it returns false if nothing is left.
func (r *Prefetch) some() bool {
	n := min(r.Bytes, PrefetchBytes)
	if n <= 0 {
		return false
	}
	r.Fetch(r.At, n)
	r.At, r.Bytes = r.At+uintptr(n), r.Bytes-n
	return true
}
