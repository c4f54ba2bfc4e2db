package reftest

import (
	"fmt"
	"math"

	"gorgonia.org/leanattention/internal/variant"
)

// Mass computes the sum of each row's weights over each `tile` keys, and bounds for an implementation of p: (QueryRows, Heads, tiles), with
// the number of tiles of the longest sequence. source is what the shape's variant is made of.
func (c *Case) Mass(p Precision, source variant.Source, tile int) (mass, bound []float64, tiles int) {
	for _, n := range c.Keys {
		tiles = max(tiles, (n+tile-1)/tile)
	}
	all := c.Reference(p)
	mass, bound = make([]float64, len(all.LSE)*tiles), make([]float64, len(all.LSE)*tiles)
	for t := range tiles {
		some := *c // attention to the keys of the tile alone
		some.last, some.Sinks = nil, nil
		of := source
		between := fmt.Sprintf("key >= %d && key < %d", t*tile, (t+1)*tile)
		if of.Visible = between; source.Visible != "" {
			of.Visible = fmt.Sprintf("(%s) && %s", source.Visible, between)
		}
		program, err := variant.New(of)
		if err != nil {
			panic(err)
		}
		some.Variant = program
		part := some.Reference(p)
		for i, x := range part.LSE {
			if off := 2 * (part.LSEBound[i] + all.LSEBound[i]); !math.IsInf(x, -1) {
				by, at := x-all.LSE[i], i*tiles+t
				mass[at] = math.Exp(by)
				bound[at] = max(min(math.Exp(by+off), 1)-mass[at], mass[at]-math.Exp(by-off)) + 4*p.Acc.Unit()*mass[at] + p.Acc.Tiny()
			}
		}
	}
	return mass, bound, tiles
}
