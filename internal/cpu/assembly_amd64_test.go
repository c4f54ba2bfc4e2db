//go:build gc && !noasm && unix

package cpu

// weighOf returns a tier's function that turns scores into weights, for one row of n with outputs of 8 elements.
func weighOf(t tier) func(s, o, m, l *float32, n int) (empty int) {
	weigh := weighAVX512
	switch t {
	case tierGo:
		return nil
	case tierAVX2:
		weigh = weighAVX2
	}
	return func(s, o, m, l *float32, n int) int {
		return weigh(s, o, m, l, 1, n, n, 8, array(&streams{}), 0, 0)
	}
}
