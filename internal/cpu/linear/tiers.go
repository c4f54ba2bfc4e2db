package linear

import (
	"gorgonia.org/leanattention/internal/cpu/matmul"
	"gorgonia.org/leanattention/internal/weight"
)

// linearKernels is what a linear layer is computed with: the functions of one tier, each with the contract
// of the Go kernel in dot.go.
type linearKernels struct {
	// dot[d][r] takes weights of type d and r rows of x, 1 <= r <= rows.
	dot  [weight.Formats][dotMaxRows + 1]func(a *dotArgs)
	rows int

	row rowKernels // for one row

	tiles *matmul.Set // for many rows; nil: they are computed as few are
}

// rowKernels compute layers of one row. Those of one instruction set have the bits of its dot kernels.
type rowKernels struct {
	dot     [weight.Formats]func(a *rowArgs) // nil: the dot kernels compute it
	streams int
	side    int // bytes of a row of weights from which on streams take neighbouring rows; of shorter ones each has a part of a piece
	ahead   int // bytes of each stream that are asked for ahead of their use
	unit    int // bytes of weights that a piece has at most, if these are a row of each stream

	// While a thread waits for the next layer of one row, it asks for so many bytes of the weights that it will read there: see
	// prefetchTable.
	fetch func(p uintptr, n int) // nil: none
	idle  int
}
