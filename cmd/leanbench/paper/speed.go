package paper

import (
	"errors"
	"slices"

	"gorgonia.org/leanattention/cmd/leanbench/figure"
	"gorgonia.org/leanattention/cmd/leanbench/gpu"
	"gorgonia.org/leanattention/cmd/leanbench/measure"
	"gorgonia.org/leanattention/cmd/leanbench/nvml"

	"gorgonia.org/leanattention/internal/lean"
)

// What reports call our kernels by the schedules of others.
const (
	nameFixed   = "lean, fixed split"
	namePerHead = "lean, per head"
)

const raggedPages = 16 // tokens, where contexts differ: FlashInfer's have as many

// ways are our schedules, and the number of splits of the fixed one.
func (b *gpuBench) ways(x point) (ways []gpu.Way, parts int) {
	pages := 0
	if !x.even() {
		pages = raggedPages
	}
	parts = splits(len(x.lengths)*x.kvHeads, b.Info().Multiprocessors, slices.Max(x.lengths), x.dim)
	return []gpu.Way{
		{Name: gpu.Ours, Pages: pages},
		{Name: nameFixed, Policy: lean.Policy{Kind: lean.FixedSplit, Splits: parts}, Pages: pages},
		{Name: namePerHead, Policy: lean.Policy{Kind: lean.PerHead}, Pages: pages},
	}, parts
}

// measureSpeed has all who compute a shape take turns.
func (b *gpuBench) measureSpeed(p panel, x point) error {
	s := x.shape()
	ways, parts := b.ways(x)
	return b.With(s, ways, func(all []*gpu.Contender, ceilings int) error {
		times, err := gpu.Alternate(b.rounds(), s.Launches(), all)
		if err != nil {
			return err
		}
		t := taken{report: b.Report, panel: p, point: x, bytes: float64(s.Bytes())}
		for i, c := range all {
			t.add(c.Name, &times[i], i < ceilings)
		}
		t.figures(parts)
		if p.kind == use {
			return errors.Join(b.busy(p, x, parts), b.count(p, x, gpu.Metered(all, ceilings), ceilings))
		}
		return nil
	})
}

// taken are the times of a shape.
type taken struct {
	report  *measure.Report
	panel   panel
	point   point
	bytes   float64
	names   []string
	times   map[string]*gpu.Times
	ceiling *gpu.Times
}

// add takes times down. Of several ceilings the fastest is one.
func (t *taken) add(name string, times *gpu.Times, ceiling bool) {
	if t.times == nil {
		t.times = make(map[string]*gpu.Times)
	}
	if ceiling {
		if t.ceiling == nil || times.Rounds.Median() < t.ceiling.Rounds.Median() {
			t.ceiling = times
		}
		return
	}
	t.names, t.times[name] = append(t.names, name), times
}

// better is the faster of some that are there, by their medians.
func (t *taken) better(names ...string) (best *gpu.Times) {
	for _, n := range names {
		if x := t.times[n]; x != nil && (best == nil || x.Rounds.Median() < best.Rounds.Median()) {
			best = x
		}
	}
	return best
}

// figures takes down what times come to.
func (t *taken) figures(parts int) {
	row := func(name string) measure.Row { return t.report.Row(t.panel.table, t.point.label, name) }
	if t.ceiling != nil {
		r := row(measure.ReadCeiling)
		r.Add(measure.Micros, 1e6*t.ceiling.Median(), nil)
		r.Add(measure.Speed, t.bytes/t.ceiling.Rounds.Median()/1e9, nil)
	}
	var peers []string
	for _, name := range t.names {
		x, r := t.times[name], row(name)
		r.Add(measure.Micros, 1e6*x.Median(), nil)
		r.Add(measure.Speed, t.bytes/x.Rounds.Median()/1e9, nil)
		if t.ceiling != nil {
			r.Add(measure.GPUShare, x.Rounds.Faster(t.ceiling.Rounds), nil)
		}
		if name == nameFixed {
			r.Add("splits", float64(parts), nil)
		}
		if gpu.CountsAsBest(name) {
			peers = append(peers, name)
		}
	}
	lean := t.times[gpu.Ours]
	for _, c := range []struct {
		metric measure.Metric
		other  *gpu.Times
	}{
		{measure.OverFlash, t.better(gpu.PeerName("flash"))},
		{measure.OverVarlen, t.better(gpu.PeerName("flash-varlen"))},
		{measure.OverInfer, t.better(gpu.PeerName("flashinfer"), gpu.PeerName("flashinfer-tc"), gpu.PeerName("flashinfer-batch"))},
		{measure.OverCUDNN, t.better(gpu.PeerName("cudnn"))},
		{measure.OverBest, t.better(peers...)},
		{measure.OverFixed, t.times[nameFixed]},
		{measure.OverPerHead, t.times[namePerHead]},
	} {
		if c.other != nil {
			row(gpu.Ours).Add(c.metric, lean.Rounds.Faster(c.other.Rounds), nil)
		}
	}
}

// count takes down the share of the multiprocessors' time in which they have a warp, of all programs alike: by the GPU's
// counters, where there are some.
func (b *gpuBench) count(p panel, x point, all []*gpu.Contender, ceilings int) error {
	if b.none != nil || b.noCounters {
		return nil
	}
	for i, c := range all {
		share, err := b.Busy(c)
		if errors.Is(err, nvml.ErrNoCounters) {
			b.noCounters = true
			b.Note("%s: %v", p.table, err)
			return nil
		} else if err != nil {
			return err
		}
		b.Report.Row(p.table, x.label, gpu.MeteredName(all, i, ceilings)).Add(measure.BusyCounted, share, nil)
	}
	return nil
}

// busy takes down the share of the multiprocessors' time in which they have LeanTiles, by who has which of them.
func (b *gpuBench) busy(p panel, x point, parts int) error {
	s := figure.Step{Heads: x.heads, KVHeads: x.kvHeads, Dim: x.dim, Lengths: x.lengths, Multiprocessors: b.Info().Multiprocessors}
	for _, c := range []struct {
		name, policy string
		splits       int
	}{{gpu.Ours, "gpu", 0}, {nameFixed, "fixed-split", parts}, {namePerHead, "per-head", 0}} {
		share, err := figure.Occupancy(c.policy, c.splits, s)
		if err != nil {
			return err
		}
		b.Report.Row(p.table, x.label, c.name).Add(measure.BusyShare, share, nil)
	}
	return nil
}
