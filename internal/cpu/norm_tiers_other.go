//go:build !amd64 || !gc || noasm

package cpu

var normTiers = func() (all [Tiers]normKernels) {
	for i := range all {
		all[i] = normGo
	}
	return all
}()
