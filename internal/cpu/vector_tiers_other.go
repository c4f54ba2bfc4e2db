//go:build !amd64 || !gc || noasm

package cpu

var vectorTiers = func() (all [Tiers]vectorKernels) {
	for i := range all {
		all[i] = vectorGo
	}
	return all
}()
