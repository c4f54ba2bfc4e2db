package attention

import (
	"math/bits"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// unfusedParams is struct UnfusedParams.
type unfusedParams struct {
	Params
	scores    uint64
	dim, kind int32 // of keys and values
}

const (
	unfusedThreads = 256
	unfusedBlocks  = 4 // of a multiprocessor
)

// mostScores bounds the number of scores in memory, which is quadratic in the lengths.
const mostScores = 1 << 36

// scores returns the number of scores that memory must hold: those of this step, or of the largest reserved step.
func (p *Plan) scores(op string, g *attn.Problem, need int64) (int64, error) {
	if most := int64(mostScores); need > most {
		return 0, gpu.Errorf(op, attn.ErrShape, "%d scores in memory; unfused attention supports %d", need, most)
	}
	least := uint64(max(p.least.Queries, 1))
	for _, n := range [...]int{p.least.Pages, g.PageTokens, g.Heads} {
		hi, lo := bits.Mul64(least, uint64(n))
		if least = lo; hi != 0 || lo > mostScores {
			return 0, gpu.Errorf(op, attn.ErrShape, "scores of %d queries, %d pages of %d tokens and %d heads in memory; unfused attention supports %d",
				p.least.Queries, p.least.Pages, g.PageTokens, g.Heads, int64(mostScores))
		}
	}
	return max(need, int64(least)), nil
}

// runUnfused queues the three launches.
func (p *Plan) runUnfused(s *cuda.Stream, o *Operands, k *kernel) error {
	e := p.engine
	if _, err := p.arguments(o); err != nil {
		return err
	}
	p.unfusedParams = unfusedParams{Params: p.params.Params, dim: int32(p.form.geometry.Dim), kind: gpu.Code(o.Pages[0].Data.DType)}
	if p.memory.scores != nil { // without keys there are no scores
		p.unfusedParams.scores = p.memory.scores.Address()
	}
	grid := cuda.Grid{Blocks: [3]int{unfusedBlocks * e.blocks}, Threads: [3]int{unfusedThreads}, Overlap: e.hasCopyEngine()}
	for _, f := range k.functions {
		p.args.Reset()
		cuda.Struct(&p.args, &p.unfusedParams)
		p.hold(o)
		if err := f.Launch(s, grid, &p.args); err != nil {
			return err
		}
	}
	return nil
}
