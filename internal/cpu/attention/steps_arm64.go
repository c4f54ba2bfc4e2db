//go:build arm64 && gc && !noasm

package attention

import "gorgonia.org/leanattention/internal/cpu"

// Steps has the steps of the kernels for keys and values of type F, which gradients share. The functions are documented
// at their declarations.
type Steps[F cpu.Real] struct {
	Dims int // divisor of row lengths

	Score    func(s, q *F, k *Streams, at, rows, count, dim, stride, step int)
	Weigh    func(s, o, m, l *F, rows, n, stride, dim int) (empty int)
	Weighted func(o, p *F, v *Streams, at, rows, count, dim, stride, step int)
}

// The steps for queries of float32 and of float64.
var (
	Steps32 = Steps[float32]{8, scoreNEON, weighNEON, weightedNEON}
	Steps64 = Steps[float64]{4, score64NEON, weigh64NEON, weighted64NEON}
)
