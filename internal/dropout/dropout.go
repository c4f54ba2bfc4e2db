// Package dropout says which weights of an attention are dropped. That follows from the seed of the run and the
// weight's place alone: no order of computing, no cut into tiles and no neighbour in the batch has a part in it, and a
// backward pass finds the same weights again with nothing stored (FlashAttention, Dao et al., arXiv:2205.14135, appendix B).
package dropout

import "math"

// Rule says which weights are dropped. The zero Rule drops none.
type Rule struct {
	Seed  uint64
	Below uint16 // a weight whose random number of 16 bits is less is dropped
}

// Of returns the rule of a probability in [0, 1), rounded to a multiple of 2^-16 below 1, and a seed. A seed of 0 drops
// nothing.
func Of(probability float64, seed int64) Rule {
	below := math.RoundToEven(probability * (1 << 16))
	if !(below >= 1) || seed == 0 {
		return Rule{}
	}
	return Rule{Seed: uint64(seed), Below: uint16(min(below, math.MaxUint16))}
}

// None reports whether r drops nothing.
func (r Rule) None() bool { return r.Below == 0 }

// Keep returns the probability that a weight is kept: those that are have the factor 1/Keep.
func (r Rule) Keep() float64 { return 1 - float64(r.Below)/(1<<16) }

// Row is the weights of a query position in a query head of a sequence of the batch.
type Row struct{ Sequence, Head, Query uint32 }

// RowOf returns a row. Numbers count modulo 2^32.
func RowOf(sequence, head, query int) Row {
	return Row{uint32(sequence), uint32(head), uint32(query)}
}

// Drops reports whether r drops the weight of a key of a row.
func (r Rule) Drops(at Row, key int) bool {
	return r.numbers(at, uint32(key/8))[key%8] < r.Below
}

// BlockKeys is how many keys [Rule.Block] takes.
const BlockKeys = 64

// Block returns whether r drops the weights of keys [8*octet, 8*octet+BlockKeys) of a row, bit by bit from the lowest on.
func (r Rule) Block(at Row, octet uint32) (dropped uint64) {
	for i := range uint32(BlockKeys / 8) {
		for j, x := range r.numbers(at, octet+i) {
			less := (uint64(x) - uint64(r.Below)) >> 63
			dropped |= less << (8*i + uint32(j))
		}
	}
	return dropped
}

// numbers returns the random numbers of the keys 8*octet to 8*octet+7 of a row: the halves of the words, the lower one first.
func (r Rule) numbers(at Row, octet uint32) (all [8]uint16) {
	for i, x := range Philox([4]uint32{octet, at.Query, at.Head, at.Sequence}, [2]uint32{uint32(r.Seed), uint32(r.Seed >> 32)}) {
		all[2*i], all[2*i+1] = uint16(x), uint16(x>>16)
	}
	return all
}

// The constants of Philox4x32.
const (
	rounds = 7

	multiplier0, multiplier1 = 0xd2511f53, 0xcd9e8d57
	weyl0, weyl1             = 0x9e3779b9, 0xbb67ae85
)

// Philox is Philox4x32-7, a bijection of counters for each key: Salmon, Moraes, Dror and Shaw, Parallel random numbers: as
// easy as 1, 2, 3 (SC 2011). Seven rounds are the fewest whose numbers pass BigCrush, for counters and for keys that count up.
func Philox(counter [4]uint32, key [2]uint32) [4]uint32 {
	a, b, c, d := counter[0], counter[1], counter[2], counter[3]
	k0, k1 := key[0], key[1]
	for range rounds {
		x, y := uint64(a)*multiplier0, uint64(c)*multiplier1
		a, b, c, d = uint32(y>>32)^b^k0, uint32(y), uint32(x>>32)^d^k1, uint32(x)
		k0 += weyl0
		k1 += weyl1
	}
	return [4]uint32{a, b, c, d}
}
