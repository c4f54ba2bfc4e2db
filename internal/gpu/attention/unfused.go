package attention

import (
	"math/bits"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// unfusedUnit is the module with the kernels of attention in three launches.
const unfusedUnit = "unfused"

// unfused is those kernels.
type unfused struct {
	scores, sum [attn.DTypes]*cuda.Function
	softmax     *cuda.Function
}

// unfusedParams is struct UnfusedParams.
type unfusedParams struct {
	Params
	scores    uint64
	dim, kind int32 // of keys and values
}

const (
	unfusedThreads = 256
	unfusedBlocks  = 4 // on a multiprocessor
)

// loadUnfused loads the kernels when they are first needed. Errors:
// [kernels.ErrNoImage] where there are none for this GPU, and the driver's.
func (e *Engine) loadUnfused() error {
	e.unfused.Lock()
	defer e.unfused.Unlock()
	if e.unfused.unfused != nil {
		return nil
	}
	m, err := e.dev.Module(unfusedUnit, func() ([]byte, error) { return gpu.Image(unfusedUnit, e.info.Capability) })
	if err != nil {
		return err
	}
	u := new(unfused)
	if u.softmax, err = m.Function("unfused_softmax"); err != nil {
		return err
	}
	for _, i := range gpu.Types {
		if u.scores[i], err = m.Function("unfused_scores_" + gpu.Name(i)); err != nil {
			return err
		}
		if u.sum[i], err = m.Function("unfused_sum_" + gpu.Name(i)); err != nil {
			return err
		}
	}
	e.unfused.unfused = u
	return nil
}

// mostScores bounds the memory of scores: whoever wants more has forgotten what
// they are quadratic in.
const mostScores = 1 << 36

// scores is how many there has to be room for: those of this step, and of any that
// was announced.
func (p *Plan) scores(op string, g *attn.Problem, need int64) (int64, error) {
	if most := int64(mostScores); need > most {
		return 0, gpu.Errorf(op, attn.ErrShape, "%d scores in memory; unfused attention takes %d", need, most)
	}
	least := uint64(max(p.least.Queries, 1))
	for _, n := range [...]int{p.least.Pages, g.PageTokens, g.Heads} {
		hi, lo := bits.Mul64(least, uint64(n))
		if least = lo; hi != 0 || lo > mostScores {
			return 0, gpu.Errorf(op, attn.ErrShape, "scores of %d queries, %d pages of %d tokens and %d heads in memory; unfused attention takes %d",
				p.least.Queries, p.least.Pages, g.PageTokens, g.Heads, int64(mostScores))
		}
	}
	return max(need, int64(least)), nil
}

// runUnfused queues the three launches of operands that were checked, whose
// parameters are filled.
func (p *Plan) runUnfused(s *cuda.Stream, o *Operands) error {
	e, element := p.engine, o.K.DType
	u := unfusedParams{Params: p.params.Params, dim: int32(p.look.geometry.Dim), kind: gpu.Code(o.K.DType)}
	if p.memory.scores != nil { // no key, no score
		u.scores = p.memory.scores.Address()
	}
	grid := cuda.Grid{Blocks: [3]int{unfusedBlocks * e.blocks}, Threads: [3]int{unfusedThreads}, Overlap: e.copies()}
	for _, f := range [...]*cuda.Function{e.unfused.scores[element], e.unfused.softmax, e.unfused.sum[element]} {
		p.args.Reset()
		cuda.Struct(&p.args, &u)
		p.hold(o)
		if err := f.Launch(s, grid, &p.args); err != nil {
			return err
		}
	}
	return nil
}
