//go:build amd64 && gc && !noasm

package gradient

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/attention"
)

// Backward passes combine parts of the attention kernels.

var (
	backward32AVX512 = backwardParts[float32]{1, 32, attention.Steps32[cpu.TierAVX512], gradientAVX512, weightedRowsAVX512, weightedColumnsAVX512}.kernels()
	backward64AVX512 = backwardParts[float64]{1, 16, attention.Steps64[cpu.TierAVX512], gradient64AVX512, weightedRows64AVX512, weightedColumns64AVX512}.kernels()

	backwardTiers32 = [cpu.Tiers]*backwardKernels[float32]{
		cpu.TierGo:     backwardGo32,
		cpu.TierAVX2:   backwardParts[float32]{8, 16, attention.Steps32[cpu.TierAVX2], gradientAVX2, weightedRowsAVX2, weightedColumnsAVX2}.kernels(),
		cpu.TierAVX512: backward32AVX512,
		cpu.TierAMX:    backward32AVX512,
	}
	backwardTiers64 = [cpu.Tiers]*backwardKernels[float64]{
		cpu.TierGo:     backwardGo64,
		cpu.TierAVX2:   backwardParts[float64]{4, 8, attention.Steps64[cpu.TierAVX2], gradient64AVX2, weightedRows64AVX2, weightedColumns64AVX2}.kernels(),
		cpu.TierAVX512: backward64AVX512,
		cpu.TierAMX:    backward64AVX512,
	}
)

// backwardParts are parts of a tier's attention kernels, with dims and lanes as in backwardKernels.
type backwardParts[F cpu.Real] struct {
	dims, lanes   int
	steps         attention.Steps[F]
	gradient      func(p, ds, m, factor, off *F, rows, n, stride int)
	rows, columns func(o, p, v *F, terms, count, dim, stride int)
}

func (b backwardParts[F]) kernels() *backwardKernels[F] {
	return &backwardKernels[F]{
		dims: b.dims, lanes: b.lanes,
		scores: b.scores, weigh: b.weighRows, gradient: b.gradients, add: b.addRows, addTransposed: b.addColumns,
	}
}

func (b backwardParts[F]) scores(w *backwardScratch[F], s, x, y []F, rows, cols, dim, stride int) {
	for c := 0; c < cols; c += b.lanes {
		for half := 0; half < b.lanes; half += b.lanes / 2 {
			b.steps.Panel(&w.wide[half], pointers(w.open(y[(c+half)*dim:], dim)), 0, dim, 4*dim*int(unsafe.Sizeof(F(0))))
		}
		b.steps.ScorePanel(&s[c], &x[0], &w.wide[0], rows, dim, stride)
	}
}

func (b backwardParts[F]) weighRows(w *backwardScratch[F], s, m, l []F, rows, n, stride int) {
	b.steps.Weigh(&s[0], &w.idle[0], &m[0], &l[0], rows, n, stride, idleDim, pointers(w.open(s, 0)), 0, 0)
}

func (b backwardParts[F]) gradients(_ *backwardScratch[F], p, ds, m, factor, off []F, rows, n, stride int) {
	b.gradient(&p[0], &ds[0], &m[0], &factor[0], &off[0], rows, n, stride)
}

func (b backwardParts[F]) addRows(_ *backwardScratch[F], o, p, v []F, rows, count, dim, stride int) {
	b.rows(&o[0], &p[0], &v[0], count, rows, dim, stride)
}

func (b backwardParts[F]) addColumns(_ *backwardScratch[F], o, p, v []F, rows, count, dim, stride int) {
	b.columns(&o[0], &p[0], &v[0], rows, count, dim, stride)
}

// pointers returns s as assembly takes it.
func pointers(s *attention.Streams) **byte { return (**byte)(unsafe.Pointer(s)) }
