//go:build arm64 && gc && !noasm

package gradient

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/attention"
)

var (
	backwardTiers32 = [cpu.Tiers]*backwardKernels[float32]{cpu.TierGo: backwardGo32, cpu.TierNEON: neonSteps[float32]{attention.Steps32}.kernels()}
	backwardTiers64 = [cpu.Tiers]*backwardKernels[float64]{cpu.TierGo: backwardGo64, cpu.TierNEON: neonSteps[float64]{attention.Steps64}.kernels()}
)

// neonSteps are the steps of the attention kernels, combined for backward passes.
type neonSteps[F cpu.Real] struct{ attention.Steps[F] }

func (a neonSteps[F]) kernels() *backwardKernels[F] {
	return &backwardKernels[F]{
		dims: a.Dims, lanes: 16,
		scores: a.scores, weigh: a.weighRows, gradient: a.gradients, add: a.add, addTransposed: a.addTransposed,
	}
}

func (a neonSteps[F]) scores(w *backwardScratch[F], s, x, y []F, rows, cols, dim, stride int) {
	a.Score(&s[0], &x[0], w.open(y, dim), 0, rows, cols, dim, stride, 4*dim*int(unsafe.Sizeof(F(0))))
}

func (a neonSteps[F]) weighRows(w *backwardScratch[F], s, m, l []F, rows, n, stride int) {
	a.Weigh(&s[0], &w.idle[0], &m[0], &l[0], rows, n, stride, idleDim)
}

func (a neonSteps[F]) gradients(w *backwardScratch[F], p, ds, m, factor, off []F, rows, n, stride int) {
	gradientBy(w, a.weighRows, p, ds, m, factor, off, rows, n, stride)
}

func (a neonSteps[F]) add(w *backwardScratch[F], o, p, v []F, rows, count, dim, stride int) {
	a.Weighted(&o[0], &p[0], w.open(v, dim), 0, rows, count, dim, stride, 4*dim*int(unsafe.Sizeof(F(0))))
}

// addTransposed transposes some rows at a time.
func (a neonSteps[F]) addTransposed(w *backwardScratch[F], o, p, v []F, rows, count, dim, stride int) {
	const most = 16
	for r := 0; r < rows; r += most {
		n := min(most, rows-r)
		for i := range n {
			for c, x := range p[(r+i)*stride : (r+i)*stride+count] {
				w.wide[c*most+i] = x
			}
		}
		a.add(w, o, w.wide, v[r*dim:], count, n, dim, most)
	}
}
