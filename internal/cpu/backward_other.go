//go:build !(amd64 || arm64) || !gc || noasm

package cpu

var backwardTiers = [tiers]*backwardKernels[float32]{tierGo: backwardGo32}
