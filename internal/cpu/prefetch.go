package cpu

// A Prefetcher is a Task that knows what its threads are likely to read behind it. Prefetch is called on the thread.
type Prefetcher interface{ Prefetch(thread int) Prefetch }

// Prefetch is memory that a thread asks for, a little at a time, as long as it has nothing else to do. Nobody need hold the memory.
type Prefetch struct {
	At    uintptr
	Bytes int
	Fetch func(p uintptr, n int)
}

// PrefetchBytes is what is asked for between two looks for work: what takes some hundred nanoseconds.
const PrefetchBytes = 2 << 10

// some asks for some of it; false: nothing is left.
func (r *Prefetch) some() bool {
	n := min(r.Bytes, PrefetchBytes)
	if n <= 0 {
		return false
	}
	r.Fetch(r.At, n)
	r.At, r.Bytes = r.At+uintptr(n), r.Bytes-n
	return true
}
