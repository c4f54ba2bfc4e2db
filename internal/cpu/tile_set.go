package cpu

import "gorgonia.org/leanattention/internal/attn"

// linearTiles is what many rows are computed with on a tier.
type linearTiles struct {
	rows, outs int // of a tile, at most
	panels     int // times outs features: what a worker packs at a time

	ways    [attn.DTypes]tileWay
	rounded [attn.DTypes]*tileWay // where x may be rounded; nil: nothing is won

	fewer *linearTiles // what rows are computed with that are not many here; nil: nothing
}

// tileWay is how weights of a type are multiplied.
type tileWay struct {
	fromRows int // so many rows are many: measured
	depth    int // elements of In that go by at a time, a multiple of stepDepth

	// mul[r] computes tiles of r rows. With parts there is one for r = rows, and x is split first.
	mul  []func(a *tileArgs)
	pack func(a *packArgs) // so many rows of weights:
	rows int

	columns func(a *packArgs) // packs columns of weights, as pack packs rows; nil: there is no such kernel

	packing int // of how many rows products take as long as packing: measured

	xParts, wParts int // 0: numbers are float32
	split          func(a *packArgs)
	odd            func(p *float32, n int) int // sees what is not finite, which parts do not keep apart from NaN
	large          func(p *float32, n int) int // sees what is large or not finite
}

// panelBytes is what the packed weights of a tile take.
func (t *linearTiles) panelBytes(w *tileWay) int {
	if w.wParts > 0 {
		return t.outs * w.depth * 2 * w.wParts
	}
	return t.outs * w.depth * 4
}
