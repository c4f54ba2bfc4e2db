//go:build amd64 && gc && !noasm

package attention

import "gorgonia.org/leanattention/internal/cpu"

// The wider vectors of AVX-512 would make little of it: random numbers take less time than the products of their row.
var dropTiers = [cpu.Tiers]func(quad, query, head, sequence, seed, seedHigh, below uint32) uint64{droppedGo, droppedAVX2, droppedAVX2, droppedAVX2}
