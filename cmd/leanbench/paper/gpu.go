package paper

import (
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"

	"gorgonia.org/leanattention/cmd/leanbench/figure"
	"gorgonia.org/leanattention/cmd/leanbench/gpu"
	"gorgonia.org/leanattention/cmd/leanbench/measure"

	"gorgonia.org/leanattention/internal/lean"
)

// What reports call our kernels by the schedules of others.
const (
	nameFixed   = "lean, fixed split"
	namePerHead = "lean, per head"
)

const raggedPages = 16 // tokens, where contexts differ: FlashInfer's have as many

// open is the bench of the device that the flags name, or of what there is.
func (o *options) open(stdout, stderr io.Writer) (bench, error) {
	switch o.device {
	case "cpu":
		return o.openCPU(stdout, stderr)
	case "gpu":
		return o.openGPU(stdout, stderr)
	case "":
		driver, err := gpu.LoadDriver()
		if err == nil {
			_, err = driver.Info(0)
		}
		if err != nil {
			fmt.Fprintf(stderr, "no GPU is used: %v\n", err)
			return o.openCPU(stdout, stderr)
		}
		return o.openGPU(stdout, stderr)
	}
	return nil, fmt.Errorf("-device %q is neither gpu nor cpu", o.device)
}

// gpuBench measures on a GPU.
type gpuBench struct {
	*gpu.Bench
	o     *options
	began bool  // there is memory to read
	none  error // why there is no counter of energy

	scaling *gpu.Scaling // nil: not yet
	scaled  point        // which it measures

	whole   wholeDecoder
	wholeOf string // the panel that it is of; none yet
	noWhole error  // why there is none
}

func (o *options) openGPU(stdout, stderr io.Writer) (bench, error) {
	m, err := measure.ThisMachine(runtime.GOMAXPROCS(0))
	if err != nil {
		return nil, err
	}
	python := o.python
	if python == "" {
		python = "python3"
	}
	b := &gpuBench{Bench: gpu.NewBench(gpu.Options{Python: python, Peers: o.peers}, m, stdout, stderr), o: o}
	b.Report.Command = "paper"
	if unchecked {
		b.Unchecked()
	}
	if err := b.Open(); err != nil {
		return nil, err
	}
	b.none = b.OpenPower()
	return b, nil
}

// unchecked is for tests, whose kernels compute nothing.
var unchecked = false

func (b *gpuBench) report() *measure.Report { return b.Report }

func (b *gpuBench) close() (err error) {
	if b.scaling != nil {
		err = b.scaling.Close()
	}
	err = errors.Join(err, b.closeWhole())
	return errors.Join(err, b.Close())
}

// shape is a point's in float16.
func (x point) shape() gpu.Shape {
	if x.even() {
		return gpu.EvenShape(len(x.lengths), x.heads, x.kvHeads, x.lengths[0], x.dim)
	}
	name, _ := strings.CutSuffix(x.label, fmt.Sprintf(", %d heads of %d", x.heads, x.dim)) // which it adds
	name, _ = strings.CutSuffix(name, fmt.Sprintf(", %d/%d heads of %d", x.heads, x.kvHeads, x.dim))
	return gpu.RaggedShape(name, x.heads, x.kvHeads, x.dim, x.lengths)
}

// points leaves out what there is no memory for.
func (b *gpuBench) points(p panel) (points []point, seconds []float64) {
	if p.kind == scale || p.kind == whole {
		return p.gpu, repeat(b.costs(p), len(p.gpu)) // they say it themselves
	}
	room, err := b.Room()
	left := 0
	for _, x := range p.gpu {
		s := x.shape()
		if err == nil && s.Region() > room {
			left++
			continue
		}
		points, seconds = append(points, x), append(seconds, b.cost(p, s))
	}
	if left > 0 {
		b.Note("%s: for %d of its shapes there is no memory", p.table, left)
	}
	return points, seconds
}

// costs is about how long a point takes that is no launch alone.
func (b *gpuBench) costs(p panel) float64 {
	if p.kind == whole {
		return 30
	}
	return 8
}

// cost is about how long a shape takes, in seconds.
func (b *gpuBench) cost(p panel, s gpu.Shape) float64 {
	const contenders, bytesASecond = 9, 3e12
	graph := max(float64(s.Bytes())/bytesASecond, 6e-6) * float64(s.Launches())
	turns := float64(contenders * b.rounds())
	if p.kind == energy {
		return 1 + energyContenders*energySeconds*b.part()
	}
	return 1.5 + turns*max(2*graph, 0.006)
}

func repeat(v float64, n int) (all []float64) {
	for range n {
		all = append(all, v)
	}
	return all
}

func (b *gpuBench) rounds() int {
	if b.o.Quick {
		return 3
	}
	return 7
}

// begin takes memory for the largest shape.
func (b *gpuBench) begin(all []item) error {
	var shapes []gpu.Shape
	for _, x := range all {
		if x.panel.kind != scale && x.panel.kind != whole {
			shapes = append(shapes, x.point.shape())
		}
	}
	if len(all) == 0 {
		return nil
	}
	if err := b.Arenas(shapes); err != nil {
		return err
	}
	b.began = true
	b.Clock("before")
	return nil
}

func (b *gpuBench) end() {
	if b.began {
		b.Clock("after")
	}
}

func (b *gpuBench) measure(p panel, x point) error {
	switch p.kind {
	case energy:
		return b.measureEnergy(p, x)
	case scale:
		return b.measureScale(p, x)
	case whole:
		return b.measureWhole(p, x)
	}
	return b.measureSpeed(p, x)
}

// ways are our schedules, and the number of splits of the fixed one.
func (b *gpuBench) ways(x point) (ways []gpu.Way, parts int) {
	pages := 0
	if !x.even() {
		pages = raggedPages
	}
	longest := 0
	for _, n := range x.lengths {
		longest = max(longest, n)
	}
	parts = splits(len(x.lengths)*x.kvHeads, b.Info().Multiprocessors, longest, x.dim)
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
			return b.busy(p, x, parts)
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

// busy takes down the share of the multiprocessors' time in which they have LeanTiles.
// The kernels count no clocks: what is known is who has which LeanTiles.
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

// energyContenders is about how many there are.
const energyContenders = 8

// energySeconds is about how long a contender runs.
const energySeconds = 1.5

// part of the usual time is how long a contender runs for its energy.
func (b *gpuBench) part() float64 {
	if b.o.Quick {
		return 2.0 / 3
	}
	return 1
}

// measureEnergy has contenders run long enough for the GPU's counter of energy, in turn.
func (b *gpuBench) measureEnergy(p panel, x point) error {
	if b.none != nil {
		return leftOut("%v", b.none)
	}
	s := x.shape()
	ways, _ := b.ways(x)
	return b.With(s, ways, func(all []*gpu.Contender, ceilings int) error {
		of := make(map[string]gpu.Drawn)
		var names []string
		for i, c := range all {
			if i > 0 && i < ceilings || i >= ceilings+len(ways) && !gpu.CountsAsBest(c.Name) {
				continue // one ceiling is enough
			}
			d, err := b.Draw(c, b.part())
			if err != nil {
				return fmt.Errorf("%s: %w", c.Name, err)
			}
			name := c.Name
			if i < ceilings {
				name = measure.ReadCeiling
			}
			of[name], names = d, append(names, name)
		}
		flash, there := of[gpu.PeerName("flash")]
		for _, name := range names {
			d, r := of[name], b.Report.Row(p.table, x.label, name)
			r.Add(measure.Micros, 1e6*d.Seconds, nil)
			r.Add(measure.Watts, d.Watts, nil)
			r.Add(measure.TokenJoules, 1e3*d.Joules()/float64(len(x.lengths)), nil)
			r.Add(measure.ByteJoules, 1e3*d.Joules()/(float64(s.Bytes())/1e9), nil)
			if there {
				bar := measure.Only(name == gpu.Ours && x.lengths[0] >= 1<<16, measure.AtMost(0.8))
				r.Add(measure.OfFlashJoules, d.Joules()/flash.Joules(), bar)
			}
		}
		return nil
	})
}
