//go:build amd64 && gc && !noasm

package attention

import "gorgonia.org/leanattention/internal/cpu"

// AVX-512 would gain little: random numbers take less time than the products of their row.
var dropTiers = [cpu.Tiers]func(octet, query, head, sequence, seed, seedHigh, below uint32) uint64{droppedGo, droppedAVX2, droppedAVX2, droppedAVX2}
