package cpu

import (
	"runtime"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
)

// ReadSum returns the sum, modulo 2^64, of the 64-bit words of b in the machine's byte order; bytes behind
// the last whole word are left out. It is a measuring tool: it reads as fast as this machine can, on all
// threads and in eight streams a thread, and so tells how much of the memory's speed a kernel reaches.
// b begins at a multiple of 8 bytes. It does not allocate once e has been used.
//
// The error wraps ErrShape, ErrTier or ErrPanic.
func ReadSum(e *Engine, b []byte) (uint64, error) {
	if errInUse != nil {
		return 0, errInUse
	}
	if p := uintptr(unsafe.Pointer(unsafe.SliceData(b))); p%8 != 0 {
		return 0, attn.Errorf("read sum", attn.ErrShape, "the bytes begin at %#x, not at a multiple of 8", p)
	}
	r := e.sums.get()
	r.words = unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/8)
	r.shares = max(1, min(runtime.GOMAXPROCS(0), len(r.words)/sumWords))
	for len(r.parts) < r.shares {
		r.parts = append(r.parts, part{})
	}
	if err := e.pool.run(r, r.shares); err != nil {
		return 0, err // what its workers did is not known: it is not used again
	}
	var sum uint64
	for _, p := range r.parts[:r.shares] {
		sum += p.sum
	}
	r.words = nil
	e.sums.put(r)
	return sum, nil
}

// sumWords is the number of words that eight streams of a cache line are.
const sumWords = 8 * cacheLine / 8

// sumRun is one call of ReadSum.
type sumRun struct {
	words  []uint64
	shares int
	parts  []part
}

// part is the sum of a worker's share, on a cache line of its own.
type part struct {
	sum uint64
	_   [cacheLine - 8]byte
}

func (r *sumRun) work(i int) {
	units := len(r.words) / sumWords
	share := r.words[i*units/r.shares*sumWords : (i+1)*units/r.shares*sumWords]
	if i == r.shares-1 {
		share = r.words[i*units/r.shares*sumWords:]
	}
	var sum uint64
	stream := len(share) / sumWords * cacheLine // bytes
	if stream > 0 {
		sum = readSumTiers[inUse]((*byte)(unsafe.Pointer(&share[0])), stream, stream)
	}
	for _, w := range share[stream:] { // stream bytes of each of eight streams are as many words
		sum += w
	}
	r.parts[i].sum = sum
}
