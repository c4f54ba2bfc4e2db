package cpu

import (
	"math"
	"unsafe"
)

// Bias places numbers that are added to scores: row-major, of shape (Sequences, Heads, Queries, Keys), where each of the
// first three sizes is that of the attention, or 1 for numbers that all share. The zero Bias is none.
type Bias struct {
	Sequences, Heads, Queries, Keys int
	Scale                           float64 // on the numbers; 0: 1
}

// scale returns the factor on the numbers.
func (b *Bias) scale() float64 {
	if b.Scale == 0 {
		return 1
	}
	return b.Scale
}

// row returns where the numbers of a query position begin.
func (b *Bias) row(seq, head, pos int) int {
	if b.Sequences == 1 {
		seq = 0
	}
	if b.Heads == 1 {
		head = 0
	}
	if b.Queries == 1 {
		pos = 0
	}
	return ((seq*b.Heads+head)*b.Queries + pos) * b.Keys
}

// size returns how many numbers there are, MaxInt if that is no int.
func (b *Bias) size() int { return product(b.Sequences, b.Heads, b.Queries, b.Keys) }

// check reports a bias that is not of an attention with so many heads.
func (b *Bias) check(op string, heads int) error {
	if *b == (Bias{}) {
		return nil
	}
	if b.Sequences < 1 || b.Heads != 1 && b.Heads != heads || b.Queries < 1 || b.Keys < 1 {
		return errorf(op, ErrShape, "a bias of %d sequences, %d heads, %d queries, %d keys for %d query heads",
			b.Sequences, b.Heads, b.Queries, b.Keys, heads)
	}
	if math.IsNaN(b.Scale) || math.IsInf(b.Scale, 0) {
		return errorf(op, ErrShape, "a bias with the factor %v", b.Scale)
	}
	return nil
}

// covers reports whether there are numbers for a sequence's queries and keys.
func (b *Bias) covers(seq, queries, keys int) bool {
	return *b == (Bias{}) || (b.Sequences == 1 || seq < b.Sequences) && (b.Queries == 1 || queries <= b.Queries) && keys <= b.Keys
}

// bend is what changes the scores of a tile before they become weights. Rows are the tile's.
type bend struct {
	Cap float64

	// One for each row: the slope, how far key 0 is from the row's position, and where the bias of key 0 lies, a *F.
	Slopes, Distances []float64
	Bias              []unsafe.Pointer
	BiasScale         float64 // on all of these, log4(e) included
}

// straight reports whether b changes nothing.
func (b *bend) straight() bool { return b.Cap == 0 && !b.ordered() }

// ordered reports whether it matters to b which key is which.
func (b *bend) ordered() bool { return b.Slopes != nil || b.Bias != nil }

// rows returns what b is for n of its rows.
func (b *bend) rows(row, n int) bend {
	part := bend{Cap: b.Cap}
	if b.Slopes != nil {
		part.Slopes, part.Distances = b.Slopes[row:row+n], b.Distances[row:row+n]
	}
	if b.Bias != nil {
		part.Bias, part.BiasScale = b.Bias[row:row+n], b.BiasScale
	}
	return part
}

// bendTile bends the scores of a tile, stride a row: of each row those of the keys that it sees.
func bendTile[F real](t *tile, scores []F, stride int) {
	if t.straight() {
		return
	}
	for r := range t.Rows {
		n := t.Count
		if t.Visible != nil {
			n = int(*(*int32)(unsafe.Add(t.Visible, 4*r)))
		}
		s := scores[r*stride : r*stride+n]
		if n == 0 {
			continue
		}
		if t.Cap != 0 {
			capScores(s, nil, t.Cap)
		}
		if t.Slopes != nil {
			slopeScores(s, t.Slopes[r], t.Distances[r])
		}
		if t.Bias != nil {
			biasScores(s, unsafe.Slice((*F)(t.Bias[r]), n), t.BiasScale)
		}
	}
}

// capScores makes each s_c of s
//
//	softCap tanh(s_c/softCap)
//
// and leaves the derivatives of that, unless derivatives is nil.
func capScores[F real](s, derivatives []F, softCap float64) {
	for c, x := range s {
		t := math.Tanh(float64(x) / softCap)
		s[c] = F(softCap * t)
		if derivatives != nil {
			derivatives[c] = F((1 - t) * (1 + t))
		}
	}
}
