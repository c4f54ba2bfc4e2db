package paper

import (
	"fmt"

	"gorgonia.org/leanattention/cmd/leanbench/gpu"
	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

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
				bar := measure.Only(name == gpu.Ours && (len(x.lengths) > 1 || x.lengths[0] >= 1<<17), measure.AtMost(0.8))
				r.Add(measure.OfFlashJoules, d.Joules()/flash.Joules(), bar)
			}
		}
		return nil
	})
}
