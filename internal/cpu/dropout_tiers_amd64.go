//go:build amd64 && gc && !noasm

package cpu

// What AVX-512 would add is little: the random numbers of a row take less time than its products.
var dropTiers = [tiers]func(quad, query, head, sequence, seed, seedHigh, below uint32) uint64{droppedGo, droppedGo, droppedGo, droppedGo}
