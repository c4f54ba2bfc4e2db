package cpu

import (
	"runtime"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
)

// ReadSum returns the sum, modulo 2^64, of the 64-bit words of bs in the machine's byte order; bytes behind
// the last whole word of each are left out. It is a measuring tool: it reads as fast as this machine can, on all
// threads and in eight streams a thread, and so tells how much of the memory's speed a kernel reaches.
// Threads begin and end once for all of bs, and take pieces as they come to them.
// Each of bs begins at a multiple of 8 bytes. It does not allocate once e has been used.
//
// The error wraps ErrShape, ErrTier or ErrPanic.
func ReadSum(e *Engine, bs ...[]byte) (uint64, error) {
	if err := CheckTier(); err != nil {
		return 0, err
	}
	for _, b := range bs {
		if p := uintptr(unsafe.Pointer(unsafe.SliceData(b))); p%8 != 0 {
			return 0, attn.Errorf("read sum", attn.ErrShape, "the bytes begin at %#x, not at a multiple of 8", p)
		}
	}
	r := e.sums.Get()
	r.pieces = r.pieces[:0]
	words := 0
	for _, b := range bs {
		words += len(b) / 8
	}
	most := pieceOf(words, runtime.GOMAXPROCS(0))
	for _, b := range bs {
		r.cut(most, unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/8))
	}
	if err := e.Run(r, len(r.pieces)); err != nil {
		return 0, err // what its workers did is not known: it is not used again
	}
	var sum uint64
	for i := range r.pieces {
		sum += r.pieces[i].sum
		r.pieces[i].words = nil
	}
	e.sums.Put(r)
	return sum, nil
}

const (
	// sumWords is the number of words that eight streams of a cache line are.
	sumWords = 8 * CacheLine / 8

	// pieceWords is the least words of a piece where threads have several, piecesPerThread how many they have at most. A thread
	// that is done early waits for half a piece on average: with four of them each that was a tenth of the time.
	pieceWords      = 256 << 10 / 8
	piecesPerThread = 32
)

// pieceOf returns how many words a piece has, of so many in all.
func pieceOf(words, threads int) int {
	share := (words-1)/threads + 1
	return max(sumWords, (share-1)/min(max(share/pieceWords, 1), piecesPerThread)+1)
}

// sumRun is one call of ReadSum.
type sumRun struct{ pieces []sumPiece }

// sumPiece is the share of a worker, on a cache line of its own.
type sumPiece struct {
	words []uint64
	sum   uint64
	_     [CacheLine - 32]byte
}

// cut adds pieces of so many words at most, or somewhat more.
func (r *sumRun) cut(most int, words []uint64) {
	units := len(words) / sumWords
	n := max(1, min(units, (len(words)-1)/most+1))
	for i := range n {
		p := sumPiece{words: words[i*units/n*sumWords:]}
		if i < n-1 {
			p.words = words[i*units/n*sumWords : (i+1)*units/n*sumWords]
		}
		r.pieces = append(r.pieces, p)
	}
}

func (r *sumRun) Work(i, _ int) {
	p := &r.pieces[i]
	p.sum = 0
	stream := len(p.words) / sumWords * CacheLine // bytes
	if stream > 0 {
		p.sum = readSumTiers[InUse()]((*byte)(unsafe.Pointer(&p.words[0])), stream, stream)
	}
	for _, w := range p.words[stream:] { // stream bytes of each of eight streams are as many words
		p.sum += w
	}
}
