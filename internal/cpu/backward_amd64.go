//go:build amd64 && gc && !noasm

package cpu

// The parts of the attention kernels, put together for backward passes.

var backwardTiers = [tiers]*backwardKernels[float32]{
	tierGo:     backwardGo32,
	tierAVX2:   backwardParts{8, 16, panelF32AVX2, scorePanelAVX2, weighAVX2, weightedBlockF32AVX2}.kernels(),
	tierAVX512: backwardParts{1, 32, panelF32AVX512, scorePanelAVX512, weighAVX512, weightedBlockF32AVX512}.kernels(),
	tierAMX:    backwardParts{1, 32, panelF32AVX512, scorePanelAVX512, weighAVX512, weightedBlockF32AVX512}.kernels(),
}

// backwardParts are parts of a tier's attention kernels, with dims and lanes as backwardKernels has them. A
// call of panel makes half of a panel.
type backwardParts struct {
	dims, lanes   int
	panel         func(panel *float32, k **byte, at, dim, step int)
	scorePanel    func(s, q, panel *float32, rows, dim, stride int)
	weigh         func(s, o, m, l *float32, rows, n, stride, dim int, ahead **byte, aheadAt, aheadStep int) (empty int)
	weightedBlock func(o, p *float32, v **byte, at, rows, count, dim, stride, step int, ahead **byte, aheadAt, aheadStep int)
}

func (b backwardParts) kernels() *backwardKernels[float32] {
	return &backwardKernels[float32]{
		dims: b.dims, lanes: b.lanes,
		scores: b.scores, weigh: b.weighRows, add: b.add, transpose: b.transpose,
	}
}

func (b backwardParts) scores(w *backwardScratch[float32], s, x, y []float32, rows, cols, dim, stride int) {
	for c := 0; c < cols; c += b.lanes {
		b.transpose(w, w.wide, y[c*dim:], dim, dim)
		b.scorePanel(&s[c], &x[0], &w.wide[0], rows, dim, stride)
	}
}

func (b backwardParts) weighRows(w *backwardScratch[float32], s, m, l []float32, rows, n, stride int) {
	b.weigh(&s[0], &w.idle[0], &m[0], &l[0], rows, n, stride, idleDim, array(w.open(s, 0)), 0, 0)
}

func (b backwardParts) add(w *backwardScratch[float32], o, p, v []float32, rows, count, dim, stride int) {
	four := array(w.open(v, dim))
	b.weightedBlock(&o[0], &p[0], four, 0, rows, count, dim, stride, 16*dim, four, 0, 16*dim)
}

func (b backwardParts) transpose(w *backwardScratch[float32], t, s []float32, cols, stride int) {
	for half := 0; half < b.lanes; half += b.lanes / 2 {
		b.panel(&t[half], array(w.open(s[half*stride:], stride)), 0, cols, 16*stride)
	}
}
