//go:build gc && !noasm && unix

package cpu

import "unsafe"

// weighOf returns a tier's function that turns scores into weights, for one row of n with outputs of 8 elements.
func weighOf[F Real](t Tier) func(s, o, m, l *F, n int) (empty int) {
	if t == TierGo {
		return nil
	}
	of := any(&neon32)
	if unsafe.Sizeof(F(0)) == 8 {
		of = &neon64
	}
	return func(s, o, m, l *F, n int) int { return of.(*neon[F]).Weigh(s, o, m, l, 1, n, n, 8) }
}
