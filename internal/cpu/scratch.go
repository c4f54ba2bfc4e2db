package cpu

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/dense"
)

// Real is the type that kernels compute in.
type Real interface{ float32 | float64 }

// CacheLine is the size of a cache line in bytes: writes of different threads are at least so far apart.
const CacheLine = 64

// Cut takes n values off the front of *values.
func Cut[F Real](values *[]F, n int) []F {
	s := (*values)[:n:n]
	*values = (*values)[n:]
	return s
}

// Padded returns n rounded up so that the values after n values of F begin another cache line.
func Padded(n int) int { return (n + CacheLine/4 - 1) / (CacheLine / 4) * (CacheLine / 4) }

// Aligned is memory that begins at a cache line.
type Aligned struct {
	bytes []byte
	At    unsafe.Pointer
}

// Grow makes a at least n bytes large. Earlier contents are lost.
func (a *Aligned) Grow(n int) {
	if len(a.bytes) < n+CacheLine {
		a.bytes = dense.Memory[byte](n + CacheLine)
		a.At = unsafe.Pointer(&a.bytes[-uintptr(unsafe.Pointer(&a.bytes[0]))%CacheLine])
	}
}
