package cpu

import "gorgonia.org/leanattention/internal/attn"

// LinearTiles is what many rows are computed with on a tier.
type LinearTiles struct {
	Rows, Outs int // of a tile, at most
	Panels     int // times outs features: what a worker packs at a time

	Ways    [attn.DTypes]TileWay
	Rounded [attn.DTypes]*TileWay // where x may be rounded; nil: nothing is won

	Fewer *LinearTiles // what rows are computed with that are not many here; nil: nothing
}

// TileWay is how weights of a type are multiplied.
type TileWay struct {
	FromRows int // so many rows are many: measured
	Depth    int // elements of In that go by at a time, a multiple of StepDepth

	// Mul[r] computes tiles of r rows. With parts there is one for r = rows, and x is split first.
	Mul  []func(a *TileArgs)
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
func (t *LinearTiles) PanelBytes(w *TileWay) int {
	if w.WParts > 0 {
		return t.Outs * w.Depth * 2 * w.WParts
	}
	return t.Outs * w.Depth * 4
}
