package paper

import (
	"fmt"
	"io"
	"slices"
	"time"

	"gorgonia.org/leanattention/cmd/leanbench/cpu"
	"gorgonia.org/leanattention/cmd/leanbench/measure"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/memory"
)

// cpuBench measures on this machine's cores, in float32: Gorgonia's nodes take nothing shorter.
type cpuBench struct {
	*cpu.Batches
	pace measure.Pace
}

// quickPace is that of -quick. It is a variable for tests.
var quickPace = measure.Pace{Rounds: 7, Turn: 40 * time.Millisecond}

func (o *options) openCPU(stdout, stderr io.Writer) (bench, error) {
	python := o.python
	if !o.peers {
		python = ""
	}
	pace := o.Pace()
	if o.Quick {
		pace = quickPace
	}
	b, err := cpu.NewBatches("paper -device cpu", o.Options, pace, python, stdout, stderr)
	if err != nil {
		return nil, err
	}
	return &cpuBench{b, pace}, nil
}

func (b *cpuBench) report() *measure.Report { return b.Report() }

func (b *cpuBench) close() error { return b.Close() }

func (x point) batch() cpu.Batch {
	return cpu.Batch{Heads: x.heads, KVHeads: x.kvHeads, Dim: x.dim, Lengths: x.lengths, Storage: measure.StoreF32}
}

// points are those of the panels that make sense on cores, and about how long each takes.
func (b *cpuBench) points(p panel) (points []point, costs []float64) {
	for _, x := range p.cpu {
		// Ours, copies for nodes that take no strides, and PyTorch's own.
		if err := memory.Check(3*int64(x.batch().Region()), int64(x.batch().Region())); err != nil {
			b.Report().Notes = append(b.Report().Notes, fmt.Sprintf("%s, %s is left out: %v", p.table, x.label, err))
			continue
		}
		points, costs = append(points, x), append(costs, b.cost(x))
	}
	return points, costs
}

func (b *cpuBench) cost(x point) float64 {
	const contenders, bytesASecond, filling = 7, 8e9, 0.5
	step := float64(x.batch().Bytes()) / bytesASecond
	return filling + float64(b.pace.Rounds+1)*contenders*max(b.pace.Turn.Seconds(), 2*step)
}

func (b *cpuBench) begin([]item) error { return nil }

func (b *cpuBench) end() {}

func (b *cpuBench) measure(p panel, x point) error {
	if p.kind != speed {
		return leftOut("it is for GPUs")
	}
	s := x.batch()
	workers := b.report().Machine.Workers
	parts := splits(len(x.lengths)*x.kvHeads, workers, slices.Max(x.lengths), x.dim)
	names, all, err := b.Measure(s, []cpu.Schedule{
		{Name: cpu.NameAttend, Schedule: la.StreamK}, {Name: nameFixed, Schedule: la.FixedSplit(parts)}, {Name: namePerHead, Schedule: la.PerHead},
	})
	if err != nil {
		return err
	}
	times := make(map[string]measure.Samples)
	for i, name := range names {
		times[name] = all[i]
		r := b.report().Row(p.table, x.label, name)
		r.Add(measure.Micros, 1e6*all[i].Median(), nil)
		r.Add(measure.Speed, float64(s.Bytes())/all[i].Median()/1e9, nil)
		if i > 0 {
			r.Add(measure.Share, all[i].Faster(all[0]), nil)
		}
		if name == nameFixed {
			r.Add("splits", float64(parts), nil)
		}
	}
	lean := times[cpu.NameAttend]
	torch := times[cpu.NameTorch]
	if packed := times[cpu.NamePacked]; packed != nil && packed.Median() < torch.Median() {
		torch = packed
	}
	row := b.report().Row(p.table, x.label, cpu.NameAttend)
	for _, c := range []struct {
		metric measure.Metric
		other  measure.Samples
	}{
		{measure.OverStock, times[cpu.NameStock]}, {measure.OverTorch, torch},
		{measure.OverFixed, times[nameFixed]}, {measure.OverPerHead, times[namePerHead]},
	} {
		if c.other != nil {
			row.Add(c.metric, lean.Faster(c.other), nil)
		}
	}
	return nil
}
