package paper

import (
	"slices"

	"gorgonia.org/leanattention/cmd/leanbench/gpu"
	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// energyContenders is about how many there are.
const energyContenders = 9

// part of the usual time is how long a contender runs for its energy.
func (b *gpuBench) part() float64 {
	if b.o.Quick {
		return 1.0 / 2
	}
	return 1
}

// measureEnergy has contenders run long enough for the GPU's counter of energy, in turn. One of them only reads: nobody who
// reads all keys and values can draw less.
func (b *gpuBench) measureEnergy(p panel, x point) error {
	if b.none != nil {
		return leftOut("%v", b.none)
	}
	s := x.shape()
	ways, _ := b.ways(x)
	return b.With(s, ways, func(all []*gpu.Contender, ceilings int) error {
		some := gpu.Metered(all, ceilings)
		drawn, err := b.Draw(some, b.part())
		if err != nil {
			return err
		}
		flash := slices.IndexFunc(some, func(c *gpu.Contender) bool { return c.Name == gpu.PeerName("flash") })
		for i, d := range drawn {
			name := gpu.MeteredName(some, i, ceilings)
			r := b.Report.Row(p.table, x.label, name)
			r.Add(measure.Micros, 1e6*d.Seconds, nil)
			r.Add(measure.Watts, d.Watts, nil)
			r.Add(measure.TokenJoules, 1e3*d.Joules()/float64(len(x.lengths)), nil)
			r.Add(measure.ByteJoules, 1e3*d.Joules()/(float64(s.Bytes())/1e9), nil)
			if ceilings > 0 {
				r.Add(measure.OfReadJoules, d.Joules()/drawn[0].Joules(), nil)
			}
			if flash >= 0 {
				asked := p.id == "13" && name == gpu.Ours && (len(x.lengths) > 1 || x.lengths[0] >= 1<<17)
				bar := measure.Only(asked, measure.AtMost(0.8))
				r.Add(measure.OfFlashJoules, d.Joules()/drawn[flash].Joules(), bar)
			}
		}
		return nil
	})
}
