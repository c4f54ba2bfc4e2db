package cpu

import (
	"math"
	"unsafe"
)

// scoreMod is what changes the scores of a tile before they become weights. Rows are the tile's.
type scoreMod struct {
	Cap float64

	// One for each row: the slope, how far key number 0 is from the row's position, and where its bias lies, a *F.
	Slopes, Distances []float64
	Bias              []unsafe.Pointer
	BiasScale         float64 // on all of these, log4(e) included
}

// none reports whether b changes nothing.
func (b *scoreMod) none() bool { return b.Cap == 0 && !b.byKey() }

// byKey reports whether it matters to b which key is which.
func (b *scoreMod) byKey() bool { return b.Slopes != nil || b.Bias != nil }

// rows returns what b is for n of its rows.
func (b *scoreMod) rows(row, n int) scoreMod {
	part := scoreMod{Cap: b.Cap}
	if b.Slopes != nil {
		part.Slopes, part.Distances = b.Slopes[row:row+n], b.Distances[row:row+n]
	}
	if b.Bias != nil {
		part.Bias, part.BiasScale = b.Bias[row:row+n], b.BiasScale
	}
	return part
}

// modifyScores modifies the scores of a tile, stride a row: of each row those of the keys that it sees.
func modifyScores[F real](t *tile, scores []F, stride int) {
	if t.none() {
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
			softCapScores(s, t.Cap)
		}
		if t.byKey() {
			modifyByKey(t, r, s)
		}
	}
}

// modifyByKey is what modifyScores does that depends on which key is which, for the scores of a row.
func modifyByKey[F real](t *tile, row int, s []F) {
	o, n, further := &t.order, len(s), 0
	if o.streams && o.skip != 0 { // a run at a time: within it streams go on evenly
		n, further = t.Run, t.Run/4+o.skip
	}
	for number := 0; len(s) > 0; number += further {
		part := s[:min(n, len(s))]
		s = s[len(part):]
		if t.Slopes != nil {
			slopeScores(part, t.Slopes[row], t.Distances[row]+float64(number), o)
		}
		if t.Bias != nil {
			biasScores(part, at[F](t.Bias[row], number), t.BiasScale, o)
		}
	}
}

// softCapScores is capScores without derivatives.
func softCapScores[F real](s []F, softCap float64) {
	switch v := &vectorTiers[inUse]; {
	case softCap < 1e-30 || softCap > 1e30:
		capScores(s, nil, softCap)
	case unsafe.Sizeof(F(0)) == 4:
		v.softCap((*float32)(unsafe.Pointer(&s[0])), len(s), softCap)
	default:
		v.softCap64((*float64)(unsafe.Pointer(&s[0])), len(s), softCap)
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
