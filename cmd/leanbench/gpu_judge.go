package main

import (
	"slices"
	"strings"
)

// judge takes the figures of a case down: those of its contenders, in order.
func (b *gpuBench) judge(c gpuCase, all []*gpuContender, times []gpuTimes, ceilings int) {
	var ceiling, flash, batch, best, dense *gpuTimes
	readers := make(map[string]*gpuTimes) // by the contender that has the same pages
	for _, n := range c.pages {
		if i := slices.IndexFunc(all, func(x *gpuContender) bool { return x.name == readerName(n) }); i >= 0 {
			readers[pageName(n)] = &times[i]
		}
	}
	for i, x := range all {
		t := &times[i]
		switch {
		case i < ceilings:
			if ceiling == nil || t.rounds.median() < ceiling.rounds.median() {
				ceiling = t
			}
		case x.name == ours:
			dense = t
		case isPeer(x.name):
			switch x.name {
			case peerNames["flash"]:
				flash = t
			case peerNames["flashinfer-batch"]:
				batch = t
			}
			if countsAsBest(x.name) && (best == nil || t.rounds.median() < best.rounds.median()) {
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
		r := b.report.row(c.table, is, x.name)
		mean := t.rounds.median()
		isDense, isPaged := t == dense, strings.HasPrefix(x.name, ours+", pages")
		r.add(micros, 1e6*quantile(t.replays, 0.5), only(isDense, c.micros))
		r.add(micros10, 1e6*quantile(t.replays, 0.1), nil)
		r.add(micros90, 1e6*quantile(t.replays, 0.9), nil)
		r.add(speed, float64(c.shape.bytes())/mean/1e9, nil)
		if ceiling != nil && t != ceiling {
			r.add(gpuShare, t.rounds.faster(ceiling.rounds), only(isDense, c.share))
			if isPaged && c.ragged != nil {
				allowed := 1.05*ceiling.rounds.median() + 5e-6
				r.add(ofAllowed, mean/allowed, c.ragged)
			}
		}
		if isPaged && dense != nil {
			r.add(ofDense, t.rounds.faster(dense.rounds), c.paged)
		}
		if reader := readers[x.name]; reader != nil {
			r.add(ofReader, t.rounds.faster(reader.rounds), nil)
		}
		if strings.HasPrefix(x.name, ours+", groups") && dense != nil {
			r.add(timeOfMHA, 1/t.rounds.faster(dense.rounds), c.grouped)
		}
		if isDense && flash != nil {
			r.add(overFlash, t.rounds.faster(flash.rounds), c.flash)
		}
		if isDense && best != nil {
			over := t.rounds.faster(best.rounds)
			r.add(overBest, over, atLeast(1))
			b.overBest = append(b.overBest, over)
		}
		if isPaged && dense == nil && best != nil {
			r.add(overBest, t.rounds.faster(best.rounds), c.best)
		}
		if isPaged && dense == nil && batch != nil {
			r.add(overBatch, t.rounds.faster(batch.rounds), c.batch)
		}
	}
}

// quantile is the smallest value that a share p of x does not exceed, or the
// median of x for 0.5.
func quantile(x []float64, p float64) float64 {
	sorted := append([]float64(nil), x...)
	m := median(sorted) // sorts
	if p == 0.5 {
		return m
	}
	return sorted[min(int(p*float64(len(sorted))), len(sorted)-1)]
}
