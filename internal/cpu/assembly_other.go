//go:build !(amd64 || arm64) || !gc || noasm

package cpu

func attendTiers(twins [dtypes]kernel) [tiers][dtypes]kernel {
	return [tiers][dtypes]kernel{tierGo: twins}
}
