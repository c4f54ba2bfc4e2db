package gpu

import (
	"slices"
	"strings"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// judge takes the figures of a case down: those of its contenders, in order.
func (b *Bench) judge(c gpuCase, all []*Contender, times []Times, ceilings int) {
	var ceiling, flash, batch, best, dense *Times
	readers := make(map[string]*Times) // by the contender that has the same pages
	for _, n := range c.pages {
		if i := slices.IndexFunc(all, func(x *Contender) bool { return x.Name == readerName(n) }); i >= 0 {
			readers[pageName(n)] = &times[i]
		}
	}
	for i, x := range all {
		t := &times[i]
		switch {
		case i < ceilings:
			if ceiling == nil || t.Rounds.Median() < ceiling.Rounds.Median() {
				ceiling = t
			}
		case x.Name == ours:
			dense = t
		case isPeer(x.Name):
			switch x.Name {
			case peerNames["flash"]:
				flash = t
			case peerNames["flashinfer-batch"]:
				batch = t
			}
			if countsAsBest(x.Name) && (best == nil || t.Rounds.Median() < best.Rounds.Median()) {
				best = t
			}
		}
	}
	is := c.shape.String()
	for i, x := range all {
		t := &times[i]
		if i < ceilings && t != ceiling {
			continue // the other one is what the memory gives
		}
		r := b.Report.Row(c.table, is, x.Name)
		mean := t.Rounds.Median()
		isDense, isPaged := t == dense, strings.HasPrefix(x.Name, ours+", pages")
		r.Add(measure.Micros, 1e6*quantile(t.Replays, 0.5), measure.Only(isDense, c.micros))
		r.Add(measure.Micros10, 1e6*quantile(t.Replays, 0.1), nil)
		r.Add(measure.Micros90, 1e6*quantile(t.Replays, 0.9), nil)
		r.Add(measure.Speed, float64(c.shape.Bytes())/mean/1e9, nil)
		if ceiling != nil && t != ceiling {
			r.Add(measure.GPUShare, t.Rounds.Faster(ceiling.Rounds), measure.Only(isDense, c.share))
			if isPaged && c.ragged != nil {
				allowed := 1.05*ceiling.Rounds.Median() + 5e-6
				r.Add(measure.OfAllowed, mean/allowed, c.ragged)
			}
		}
		if isPaged && dense != nil {
			r.Add(measure.OfDense, t.Rounds.Faster(dense.Rounds), c.paged)
		}
		if reader := readers[x.Name]; reader != nil {
			r.Add(measure.OfReader, t.Rounds.Faster(reader.Rounds), nil)
		}
		if strings.HasPrefix(x.Name, ours+", groups") && dense != nil {
			r.Add(measure.TimeOfMHA, 1/t.Rounds.Faster(dense.Rounds), c.grouped)
		}
		if isDense && flash != nil {
			r.Add(measure.OverFlash, t.Rounds.Faster(flash.Rounds), c.flash)
		}
		if isDense && best != nil {
			over := t.Rounds.Faster(best.Rounds)
			r.Add(measure.OverBest, over, measure.AtLeast(1))
			b.overBest = append(b.overBest, over)
		}
		if isPaged && dense == nil && best != nil {
			r.Add(measure.OverBest, t.Rounds.Faster(best.Rounds), c.best)
		}
		if isPaged && dense == nil && batch != nil {
			r.Add(measure.OverBatch, t.Rounds.Faster(batch.Rounds), c.batch)
		}
	}
}

// quantile is the smallest value that a share p of x does not exceed, or the
// median of x for 0.5.
func quantile(x []float64, p float64) float64 {
	sorted := append([]float64(nil), x...)
	m := measure.Median(sorted) // sorts
	if p == 0.5 {
		return m
	}
	return sorted[min(int(p*float64(len(sorted))), len(sorted)-1)]
}
