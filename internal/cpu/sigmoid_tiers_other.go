//go:build !amd64 || !gc || noasm

package cpu

var sigmoidTiers = func() (all [Tiers]func(dst *float32, n int, linear, cubic float32)) {
	for i := range all {
		all[i] = bySigmoidGo
	}
	return all
}()
