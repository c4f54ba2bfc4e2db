package cpu

import "gorgonia.org/leanattention/internal/attn"

// linearKernels is what a linear layer is computed with: the functions of one tier, each with the contract
// of its twin in linear_go.go.
type linearKernels struct {
	// dot[d][r] takes weights of type d and r rows of x, 1 <= r <= rows.
	dot  [attn.DTypes][dotMaxRows + 1]func(a *dotArgs)
	rows int

	tiles *linearTiles // for many rows; nil: they are computed as few are

	add  func(dst, src *float32, n int)
	relu func(dst *float32, n int)
	gelu func(dst *float32, n int)
}
