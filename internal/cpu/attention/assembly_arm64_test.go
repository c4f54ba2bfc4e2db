//go:build gc && !noasm && unix

package attention

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
)

// weighOf returns a tier's weigh function for one row of n scores with outputs of 8 elements.
func weighOf[F cpu.Real](t cpu.Tier) func(s, o, m, l *F, n int) (empty int) {
	if t == cpu.TierGo {
		return nil
	}
	of := any(&neon32)
	if unsafe.Sizeof(F(0)) == 8 {
		of = &neon64
	}
	return func(s, o, m, l *F, n int) int { return of.(*neon[F]).Weigh(s, o, m, l, 1, n, n, 8) }
}
