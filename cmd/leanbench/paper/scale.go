package paper

import (
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
		s, err := b.OpenScaling(p.table, pace, func(_ gpu.Shape, gpus int) int {
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
	return b.scaling.Measure(x.shape(), x.label)
}
