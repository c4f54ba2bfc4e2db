//go:build !amd64 || !gc || noasm

package cpu

// There are no tile registers.
var promptTiers [Tiers]*promptWays
