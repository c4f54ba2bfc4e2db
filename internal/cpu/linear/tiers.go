package linear

import (
	"gorgonia.org/leanattention/internal/cpu/matmul"
	"gorgonia.org/leanattention/internal/weight"
)

// linearKernels are the kernels of one tier, each with the contract of its Go kernel in dot.go.
type linearKernels struct {
	// dot[f][r] takes weights of format f and r rows of x, 1 <= r <= rows. A format without kernels in a tier has those in Go.
	dot  [weight.Formats][dotMaxRows + 1]func(a *dotArgs)
	rows int

	row rowKernels // for one row

	blocks *blockKernels // for weights of 8 and fewer bits; nil: those in Go

	tiles *matmul.Set // for many rows; nil: the dot kernels compute them
}

func init() {
	for _, k := range linearTiers {
		if k != nil && k.blocks == nil {
			k.blocks = &blocksGo
		}
		for f := range linearGo.dot {
			if k != nil && k.dot[f][1] == nil {
				k.dot[f] = linearGo.dot[f]
			}
		}
	}
}

// rowKernels compute layers of one row, with the bits of the dot kernels of the same instruction set.
type rowKernels struct {
	dot     [weight.Formats]func(a *rowArgs) // nil: the dot kernels compute it
	streams int
	side    int // bytes of a row of weights from which on streams take neighbouring rows; with shorter rows each stream has a part of a piece
	ahead   int // prefetch distance of each stream in bytes
	unit    int // most bytes of weights of a piece, but at least a row of each stream

	// A thread that waits for the next layer of one row prefetches the weights that it will read there: see
	// prefetchTable.
	fetch func(p uintptr, n int) // nil: none
	idle  int
}
