//go:build !amd64 || !gc || noasm

package cpu

func bestTier() tier { return tierGo }
