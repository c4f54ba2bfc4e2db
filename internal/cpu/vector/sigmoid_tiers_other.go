//go:build !amd64 || !gc || noasm

package vector

import "gorgonia.org/leanattention/internal/cpu"

var sigmoidTiers = func() (all [cpu.Tiers]func(dst *float32, n int, linear, cubic float32)) {
	for i := range all {
		all[i] = bySigmoidGo
	}
	return all
}()
