//go:build !(amd64 || arm64) || !gc || noasm

package cpu

const tiers = 1

var tierNames = [tiers]string{"go"}

func bestTier() tier { return tierGo }
