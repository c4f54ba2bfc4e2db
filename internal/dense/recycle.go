package dense

import (
	"math/bits"
	"sync"
	"unsafe"

	"gorgonia.org/tensor"
)

// recycled is memory of values that nobody reads any more, by its size: the collector takes what nobody asks for.
var recycled [binsOf * 48]sync.Pool

// binsOf is how many sizes there are from one power of two to the next.
const binsOf = 8

// bin is that of memory of so many bytes, 8 at least: the last one whose least size they have.
func bin(bytes int) int {
	power := bits.Len(uint(bytes)) - 1
	return min(power*binsOf+(bytes>>(power-3))&(binsOf-1), len(recycled)-1)
}

// Recycle gives the memory of a tensor to those that [Unwritten] makes. Nobody may look at it again, and it is all that the
// tensor's memory is: no part of another one.
func Recycle(t *tensor.Dense) {
	b := Backing[byte](t)
	poison(b)
	if len(b) >= muchBytes {
		recycled[bin(len(b))].Put(&b)
	}
}

// again is recycled memory of n elements, or nil. There may be some bytes more of it than n elements have, which are lost to others.
func again[T any](n int) []T {
	bytes := n * int(unsafe.Sizeof(*new(T)))
	for i := range 2 { // what is of this bin may be too small, and of the next one it is not
		pool := &recycled[min(bin(bytes)+i, len(recycled)-1)]
		b, ok := pool.Get().(*[]byte)
		if !ok {
			continue
		}
		p := unsafe.Pointer(unsafe.SliceData(*b))
		if len(*b) >= bytes && uintptr(p)%unsafe.Alignof(*new(T)) == 0 {
			return unsafe.Slice((*T)(p), n)
		}
		pool.Put(b)
	}
	return nil
}
