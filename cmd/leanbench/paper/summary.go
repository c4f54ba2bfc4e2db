package paper

import (
	"slices"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
	"gorgonia.org/leanattention/cmd/leanbench/report"
)

// overs are what is averaged over all shapes: how many times as fast as others ours is.
var overs = []measure.Metric{
	measure.OverFlash, measure.OverInfer, measure.OverCUDNN, measure.OverVarlen, measure.OverBest, measure.OverFixed, measure.OverPerHead,
	measure.OverStock, measure.OverTorch,
}

// summarize takes down means and extremes over the shapes of all figures, in place of those that are there.
func summarize(r *measure.Report) {
	r.Figures = slices.DeleteFunc(r.Figures, func(f measure.Figure) bool { return f.Table == tableAll })
	var alone []string // attention alone, and no more of one GPU
	for _, p := range panels() {
		if p.kind == speed || p.kind == use {
			alone = append(alone, p.table)
		}
	}
	for _, m := range overs {
		var all []float64
		seen := make(map[string]bool) // a shape may be part of several figures: it counts once
		for _, f := range r.Figures {
			if f.Metric == m && slices.Contains(alone, f.Table) && !seen[f.Case] {
				seen[f.Case] = true
				all = append(all, f.Value)
			}
		}
		if len(all) == 0 {
			continue
		}
		sum, slower := 0.0, 0
		for _, v := range all {
			if sum += v; v < report.SameSpeed {
				slower++
			}
		}
		row := r.Row(tableAll, string(m), "lean")
		row.Add("shapes", float64(len(all)), nil)
		row.Add("mean", sum/float64(len(all)), nil)
		row.Add("least", slices.Min(all), nil)
		row.Add("most", slices.Max(all), nil)
		row.Add("slower", float64(slower), nil)
	}
}
