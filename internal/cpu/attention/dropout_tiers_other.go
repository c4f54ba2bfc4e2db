//go:build !amd64 || !gc || noasm

package attention

import "gorgonia.org/leanattention/internal/cpu"

var dropTiers = func() (all [cpu.Tiers]func(octet, query, head, sequence, seed, seedHigh, below uint32) uint64) {
	for i := range all {
		all[i] = droppedGo
	}
	return all
}()
