//go:build !(amd64 || arm64) || !gc || noasm

package vector

import "gorgonia.org/leanattention/internal/cpu"

var tiers = func() (all [cpu.Tiers]kernels) {
	for i := range all {
		all[i] = goKernels
	}
	return all
}()
