package paper

import (
	"fmt"
	"time"

	"gorgonia.org/leanattention/cmd/leanbench/gpu"
	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// measureScale has the heads of a shape on one GPU and on several. A GPU computes its own
// heads: FlashDecoding splits as many contexts as there are of them.
func (b *gpuBench) measureScale(p panel, x point) error {
	if b.scaling == nil {
		pace := measure.Pace{Rounds: b.rounds(), Turn: 20 * time.Millisecond}
		multiprocessors := b.Info().Multiprocessors
		s, err := gpu.OpenScaling(b.Report, p.table, pace, func(_ gpu.Shape, gpus int) int {
			return splits(len(b.scaled.lengths)*b.scaled.kvHeads/gpus, multiprocessors, b.scaled.lengths[0], b.scaled.dim)
		})
		if err != nil {
			return leftOut("%v", err)
		}
		b.scaling = s
	}
	if b.scaling.Most() < 2 {
		return leftOut("there is one GPU")
	}
	b.scaled = x
	why, err := b.scaling.Measure(x.shape(), x.label)
	if why != "" {
		b.Note("%s: %s: %s", p.table, x.label, why)
		fmt.Fprintf(b.Stderr, "%s: left out: %s\n", x.label, why)
	}
	return err
}
