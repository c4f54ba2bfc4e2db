package attention

import (
	"math/bits"
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/dropout"
)

// drop has the dropout of a tile's weights, which applies after the weights are summed. Row r of the tile is query
// position position+(first+r)/group of query head head+(first+r)%group. Key 0 of the tile is key `key` of the sequence.
type drop struct {
	rule                  dropout.Rule
	sequence, head, group int
	position, key, first  int
}

// drops reports whether d may drop anything.
func (d *drop) drops() bool { return !d.rule.None() }

// row returns the coordinates of row r's weights.
func (d *drop) row(r int) dropout.Row {
	r += d.first
	return dropout.RowOf(d.sequence, d.head+r%d.group, d.position+r/d.group)
}

// dropWeights clears the dropped weights of a tile. weights has stride elements a row, and only visible keys count. The
// division by the share of kept weights is left to finish.
func dropWeights[F cpu.Real](t *tile, weights []F, stride int) {
	if !t.drops() {
		return
	}
	for r := range t.Rows {
		n := t.Count
		if t.Visible != nil {
			n = int(*(*int32)(unsafe.Add(t.Visible, 4*r)))
		}
		dropRow(weights[r*stride:r*stride+n], t.rule, t.row(r), t.key)
	}
}

// dropRow clears the weights of a row, from key `key` on, that a rule drops.
func dropRow[F cpu.Real](weights []F, rule dropout.Rule, row dropout.Row, key int) {
	for at := -(key % 8); at < len(weights); at += dropout.BlockKeys {
		ZeroMarked(weights, at, droppedOf(rule, row, key+at))
	}
}

// ZeroMarked clears x[at+i] for each set bit i of marks, within x.
func ZeroMarked[F cpu.Real](x []F, at int, marks uint64) {
	if at < 0 {
		marks, at = marks>>-at, 0
	}
	if x = x[at:]; len(x) < dropout.BlockKeys {
		marks &= 1<<len(x) - 1
	}
	for ; marks != 0; marks &= marks - 1 {
		x[bits.TrailingZeros64(marks)] = 0
	}
}

// droppedOf returns the drop bits of dropout.BlockKeys keys of a row, from key on, a multiple of 8.
func droppedOf(r dropout.Rule, row dropout.Row, key int) uint64 {
	return dropTiers[cpu.InUse()](uint32(key/8), row.Query, row.Head, row.Sequence, uint32(r.Seed), uint32(r.Seed>>32), uint32(r.Below))
}

// DroppedFrom is droppedOf for any key.
func DroppedFrom(r dropout.Rule, row dropout.Row, key int) uint64 {
	first := key % 8
	marks := droppedOf(r, row, key-first) >> first
	if first != 0 {
		marks |= droppedOf(r, row, key-first+dropout.BlockKeys) << (dropout.BlockKeys - first)
	}
	return marks
}

// droppedGo returns 64 bits: bit i is set if the random number of key 8*octet+i of a row is less than below, of 16 bits. The number
// is half i%8 of the words of Philox4x32-7 with the counter (octet + i/8, query, head, sequence).
func droppedGo(octet, query, head, sequence, seed, seedHigh, below uint32) (dropped uint64) {
	r := dropout.Rule{Seed: uint64(seedHigh)<<32 | uint64(seed), Below: uint16(below)}
	return r.Block(dropout.Row{Sequence: sequence, Head: head, Query: query}, octet)
}
