//go:build !amd64 || !gc || noasm

package cpu

var readSumTiers = func() (all [Tiers]func(p *byte, step, n int) uint64) {
	for i := range all {
		all[i] = readSumGo
	}
	return all
}()
