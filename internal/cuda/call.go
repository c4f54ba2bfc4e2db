package cuda

import (
	"sync"

	"gorgonia.org/leanattention/internal/cuda/library"
)

// function is an entry point of the library.
type function struct {
	addr uintptr
	name string // the documented name, without the suffix of a version
}

// A pointer argument of a call is converted to uintptr in the argument list of one of the functions below. The
// directive then keeps its target alive, and off the stack, which could move.

// call makes the C call.
//
//go:uintptrescapes
func (f *function) call(args ...uintptr) result { return result(library.Call(f.addr, args...)) }

// frames are argument lists for call4 and call11. The compiler puts the lists of call on the heap, at each call.
var frames = sync.Pool{New: func() any { return new([11]uintptr) }}

// call4 is call for calls of every step: it allocates nothing. Functions with fewer
// parameters ignore the other arguments.
//
//go:uintptrescapes
func (f *function) call4(a, b, c, d uintptr) result {
	frame := frames.Get().(*[11]uintptr)
	defer frames.Put(frame)
	frame[0], frame[1], frame[2], frame[3] = a, b, c, d
	return result(library.Call(f.addr, frame[:4]...))
}

// call11 is call4 for cuLaunchKernel.
//
//go:uintptrescapes
func (f *function) call11(a, b, c, d, e, g, h, i, j, k, l uintptr) result {
	frame := frames.Get().(*[11]uintptr)
	defer frames.Put(frame)
	*frame = [11]uintptr{a, b, c, d, e, g, h, i, j, k, l}
	return result(library.Call(f.addr, frame[:]...))
}
