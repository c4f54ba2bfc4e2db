package cpu

import (
	"runtime"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
)

// ReadSum returns the sum, modulo 2^64, of the 64-bit words of bs in the machine's byte order, without the bytes
// after the last whole word of each. ReadSum is a measuring tool: it reads as fast as this machine can, on all
// threads and in eight streams a thread, and so gives the read ceiling of a kernel. Threads begin and end once for
// all of bs, and take the next piece when they are free. Each of bs begins at a multiple of 8 bytes. ReadSum does not
// allocate once e has been used.
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
		return 0, err // the state of its workers is unknown: the run is not reused
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
	// sumWords is the number of words of a cache line in each of eight streams.
	sumWords = 8 * CacheLine / 8

	// pieceWords is the least number of words of a piece if threads have several pieces, piecesPerThread the largest
	// number of pieces. A thread that is done early waits for half a piece on average: with four pieces each, a tenth
	// of the time.
	pieceWords      = 256 << 10 / 8
	piecesPerThread = 32
)

// pieceOf returns the number of words of a piece.
func pieceOf(words, threads int) int {
	share := (words-1)/threads + 1
	return max(sumWords, (share-1)/min(max(share/pieceWords, 1), piecesPerThread)+1)
}

// sumRun is one call of ReadSum.
type sumRun struct{ pieces []sumPiece }

// sumPiece is a worker's share, on a cache line of its own.
type sumPiece struct {
	words []uint64
	sum   uint64
	_     [CacheLine - 32]byte
}

// cut adds pieces of at most the given words, or slightly more.
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
	for _, w := range p.words[stream:] { // the rest has as many words
		p.sum += w
	}
}
