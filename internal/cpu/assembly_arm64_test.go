//go:build gc && !noasm && unix

package cpu

// weighOf returns a tier's function that turns scores into weights, for one row of n with outputs of 8 elements.
func weighOf[F real](t tier) func(s, o, m, l *F, n int) (empty int) {
	weigh, ok := any(weighNEON).(func(s, o, m, l *F, rows, n, stride, dim int) int)
	if t == tierGo || !ok {
		return nil
	}
	return func(s, o, m, l *F, n int) int { return weigh(s, o, m, l, 1, n, n, 8) }
}
