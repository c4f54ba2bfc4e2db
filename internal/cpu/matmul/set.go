// Package matmul multiplies tiles of matrices on the CPU, for linear layers of many rows, and for attention of many
// rows. The rows of x are multiplied by weights, which are rows of as many elements: In.
package matmul

import "gorgonia.org/leanattention/internal/weight"

// A Set is the kernels of one tier for many rows.
type Set struct {
	Rows, Outs int // of a tile, at most
	Panels     int // times outs features: what a worker packs at a time

	Ways    [weight.Formats]Way
	Rounded [weight.Formats]*Way // if x may be rounded; nil: no gain

	Fewer *Set // kernels for fewer rows than the Set's; nil: none
}

// A Way is how weights of a type are multiplied.
type Way struct {
	FromRows int // least number of many rows: measured
	Depth    int // elements of In at a time, a multiple of StepDepth

	// Mul[r] computes tiles of r rows. With parts there is one for r = the Set's Rows, and x is split first.
	Mul  []func(a *Args)
	Pack func(a *PackArgs) // rows of weights packed at once
	Rows int

	Columns func(a *PackArgs) // packs columns of weights, as Pack packs rows; nil: none

	Packing int // number of rows whose products take as long as packing: measured

	XParts, WParts int // 0: float32
	Split          func(a *PackArgs)
	Odd            func(p *float32, n int) int // finds elements that are not finite, which parts confuse with NaN
	Large          func(p *float32, n int) int // finds elements that are large or not finite
}

// PanelBytes returns the size of the packed weights of a tile.
func (t *Set) PanelBytes(w *Way) int {
	if w.WParts > 0 {
		return t.Outs * w.Depth * 2 * w.WParts
	}
	return t.Outs * w.Depth * 4
}
