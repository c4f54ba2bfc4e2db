package attention

import (
	"math/bits"
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/dropout"
)

// drop is what drops weights of a tile, once they are summed. Row r of the tile is query position position+(first+r)/group of
// query head head+(first+r)%group, and its key 0 is the given key of the sequence.
type drop struct {
	rule                  dropout.Rule
	sequence, head, group int
	position, key, first  int
}

// drops reports whether d may drop anything.
func (d *drop) drops() bool { return !d.rule.None() }

// row returns where the weights of a row of the tile are.
func (d *drop) row(r int) dropout.Row {
	r += d.first
	return dropout.RowOf(d.sequence, d.head+r%d.group, d.position+r/d.group)
}

// dropWeights makes 0 of the weights that a tile drops, stride a row: of each row those of the keys that it sees. What
// others are divided by is left to the end.
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

// dropRow makes 0 of what a rule drops of a row's weights from the given key on.
func dropRow[F cpu.Real](weights []F, rule dropout.Rule, row dropout.Row, key int) {
	for at := -(key % 4); at < len(weights); at += dropout.BlockKeys {
		ZeroMarked(weights, at, droppedOf(rule, row, key+at))
	}
}

// ZeroMarked makes 0 of x[at+i] for each bit i of marks, as far as there is such an element.
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

// droppedOf returns what a rule drops of dropout.BlockKeys keys of a row, from a multiple of 4 on.
func droppedOf(r dropout.Rule, row dropout.Row, key int) uint64 {
	return dropTiers[cpu.InUse()](uint32(key/4), row.Query, row.Head, row.Sequence, uint32(r.Seed), uint32(r.Seed>>32), r.Below)
}

// DroppedFrom is droppedOf for any key.
func DroppedFrom(r dropout.Rule, row dropout.Row, key int) uint64 {
	first := key % 4
	marks := droppedOf(r, row, key-first) >> first
	if first != 0 {
		marks |= droppedOf(r, row, key-first+dropout.BlockKeys) << (dropout.BlockKeys - first)
	}
	return marks
}

// droppedGo returns, as bit i for i < 64, whether the random number of key 4*quad+i of a row is less than below: number i%4 of
// Philox4x32-10 of the counter (quad + i/4, query, head, sequence).
func droppedGo(quad, query, head, sequence, seed, seedHigh, below uint32) (dropped uint64) {
	r := dropout.Rule{Seed: uint64(seedHigh)<<32 | uint64(seed), Below: below}
	return r.Block(dropout.Row{Sequence: sequence, Head: head, Query: query}, quad)
}
