// Package matmul multiplies tiles of matrices on the CPU, for linear layers of many rows, and for attention of many rows. What is called
// x, of some rows, is multiplied by weights, which are rows of as many elements: In.
package matmul

import "gorgonia.org/leanattention/internal/weight"

// A Set is the kernels of one tier that many rows are computed with.
type Set struct {
	Rows, Outs int // of a tile, at most
	Panels     int // times outs features: what a worker packs at a time

	Ways    [weight.Formats]Way
	Rounded [weight.Formats]*Way // where x may be rounded; nil: nothing is won

	Fewer *Set // what rows are computed with that are not many here; nil: nothing
}

// A Way is how weights of a type are multiplied.
type Way struct {
	FromRows int // so many rows are many: measured
	Depth    int // elements of In that go by at a time, a multiple of StepDepth

	// Mul[r] computes tiles of r rows. With parts there is one for r = the Set's Rows, and x is split first.
	Mul  []func(a *Args)
	Pack func(a *PackArgs) // so many rows of weights:
	Rows int

	Columns func(a *PackArgs) // packs columns of weights, as pack packs rows; nil: there is no such kernel

	Packing int // of how many rows products take as long as packing: measured

	XParts, WParts int // 0: numbers are float32
	Split          func(a *PackArgs)
	Odd            func(p *float32, n int) int // sees what is not finite, which parts do not keep apart from NaN
	Large          func(p *float32, n int) int // sees what is large or not finite
}

// PanelBytes is what the packed weights of a tile take.
func (t *Set) PanelBytes(w *Way) int {
	if w.WParts > 0 {
		return t.Outs * w.Depth * 2 * w.WParts
	}
	return t.Outs * w.Depth * 4
}
