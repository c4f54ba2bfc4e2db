//go:build gc && !noasm && unix

package cpu

// weighOf returns a tier's function that turns scores into weights, for one row of n with outputs of 8 elements.
func weighOf(t tier) func(s, o, m, l *float32, n int) (empty int) {
	if t == tierGo {
		return nil
	}
	return func(s, o, m, l *float32, n int) int { return weighNEON(s, o, m, l, 1, n, n, 8) }
}
