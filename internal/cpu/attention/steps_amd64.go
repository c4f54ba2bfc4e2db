//go:build amd64 && gc && !noasm

package attention

import "gorgonia.org/leanattention/internal/cpu"

// Steps has the steps of a tier's kernels that gradients share: scores and weights. The functions are documented at
// their declarations. A call of Panel makes half of a panel.
type Steps[F cpu.Real] struct {
	Panel      func(panel *F, k **byte, at, dim, step int)
	ScorePanel func(s, q, panel *F, rows, dim, stride int)
	Weigh      func(s, o, m, l *F, rows, n, stride, dim int, ahead **byte, aheadAt, aheadStep int) (empty int)
}

// The steps by tier, for queries of float32 and of float64. TierGo has none.
var (
	Steps32 = [cpu.Tiers]Steps[float32]{cpu.TierAVX2: {panelF32AVX2, scorePanelAVX2, weighAVX2}, cpu.TierAVX512: steps32AVX512, cpu.TierAMX: steps32AVX512}
	Steps64 = [cpu.Tiers]Steps[float64]{cpu.TierAVX2: {panelF64AVX2, scorePanel64AVX2, weigh64AVX2}, cpu.TierAVX512: steps64AVX512, cpu.TierAMX: steps64AVX512}

	steps32AVX512 = Steps[float32]{panelF32AVX512, scorePanelAVX512, weighAVX512}
	steps64AVX512 = Steps[float64]{panelF64AVX512, scorePanel64AVX512, weigh64AVX512}
)
