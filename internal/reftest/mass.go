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

// Entropy computes the sum of -p_j ln p_j over each row's weights p_j of keys, and bounds for an implementation of p that sums
// 4^(s_j-m) and 4^(s_j-m) (s_j-m): (QueryRows, Heads). With errors e_j of scores, the entropy's error is at most
//
//	sum p_j e_j (|ln p_j| + entropy + 2), times e^(4 max e_j) for terms of higher order
//
// and what sums of n terms lose.
func (c *Case) Entropy(p Precision) (entropy, bound []float64) {
	all, u := c.Reference(p), p.Acc.Unit()+Float64.Unit()
	entropy, bound = make([]float64, len(all.LSE)), make([]float64, len(all.LSE))
	for seq, queries := range c.Queries {
		for pos := range queries {
			for h := range c.Heads {
				token := sum(c.Queries[:seq]) + pos
				at := token*c.Heads + h
				start, sinks := c.First(seq, pos), c.SinkKeys(seq, pos)
				var scores, errors []float64
				m, most := math.Inf(-1), 0.0
				for i := range c.Visible(seq, pos) - start + sinks {
					j := i
					if i >= sinks {
						j = start + i - sinks
					}
					product, abs := dot(row(c.Q, token, c.Heads, h, c.Dim), row(c.K, sum(c.Keys[:seq])+j, c.KVHeads, h/(c.Heads/c.KVHeads), c.Dim))
					s, off, _, _ := c.Score(seq, pos, h, j, float64(product*c.Scale), (u*float64(c.Dim+4)+p.Query)*abs*math.Abs(c.Scale), u)
					if c.Variant != nil {
						v := c.varied(seq, pos, h, j, s, off, u)
						if v.hidden {
							continue
						}
						s, off = v.values[v.Score], v.errors[v.Score]
					}
					scores, errors, m, most = append(scores, s), append(errors, off+4*u*math.Abs(s)), max(m, s), max(most, off)
				}
				if len(scores) == 0 || math.IsInf(m, -1) {
					continue
				}
				var first, mean float64
				for _, s := range scores {
					if w := math.Exp(s - all.LSE[at]); w > 0 {
						entropy[at] += w * (all.LSE[at] - s)
						mean += w * (m - s)
					}
				}
				for i, s := range scores {
					if w := math.Exp(s - all.LSE[at]); w > 0 {
						first += w * errors[i] * (math.Abs(s-all.LSE[at]) + entropy[at] + 2)
					}
				}
				n := float64(len(scores) + 40)
				bound[at] = first*math.Exp(min(4*most, 700)) + 3*u*n*(mean+entropy[at]+1) + n*1e-30
				if c.Sinks != nil {
					bound[at] += u * (4*math.Abs(all.LSE[at]) + 4*math.Abs(m) + 8) * (entropy[at] + mean + 2)
				}
			}
		}
	}
	return entropy, bound
}
