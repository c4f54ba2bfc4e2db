//go:build gc && !noasm && unix

package attention

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
)

// weighOf returns a tier's weigh function for one row of n scores with outputs of 8 elements.
func weighOf[F cpu.Real](t cpu.Tier) func(s, o, m, l *F, n int) (empty int) {
	var of any
	switch double := unsafe.Sizeof(F(0)) == 8; {
	case t == cpu.TierGo:
		return nil
	case t == cpu.TierAVX2 && double:
		of = weigh64AVX2
	case t == cpu.TierAVX2:
		of = weighAVX2
	case double:
		of = weigh64AVX512
	default:
		of = weighAVX512
	}
	weigh := of.(func(s, o, m, l *F, rows, n, stride, dim int, ahead **byte, aheadAt, aheadStep int) int)
	return func(s, o, m, l *F, n int) int {
		return weigh(s, o, m, l, 1, n, n, 8, array(&Streams{}), 0, 0)
	}
}
