package attention

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/vector"
	"gorgonia.org/leanattention/internal/lean"
)

// canModify has the score changes of attention on a CPU. A new one is a field of attn.Score that [workspace.scoreMod]
// reads, and a step of modifyScores.
const canModify = attn.Cap | attn.SlopesOfHeads | attn.AddedBias | attn.Varied

// scoreMod has the changes of a tile's scores. Its slices are by row of the tile.
type scoreMod struct {
	Cap float64

	// For each row: the slope; the distance of key number 0 from the row's position; the address of the row's bias, a
	// *F.
	Slopes, Distances []float64
	Bias              []unsafe.Pointer
	BiasScale         float64 // factor of the bias, including log4(e)

	variant  tileModifier // nil: none
	watcher  tileWatcher  // nil: none
	blockRow int          // the tile's first row, in the block
}

// scoreMod returns the score modification of the block's rows. [workspace.modAt] sets the parts that depend on keys.
func (ws *workspace[F]) scoreMod(w *worker[F], b block) scoreMod {
	g := &ws.plan.g
	s := scoreMod{Cap: g.Cap * lean.Log4E}
	if g.Slopes != "" {
		s.Slopes, s.Distances = w.slopes[:b.rows], w.distances[:b.rows]
		for r := range s.Slopes {
			s.Slopes[r] = g.Slopes.Of(b.head0+r%b.group) * lean.Log4E
		}
	}
	if g.Bias != (attn.Bias{}) {
		s.Bias, s.BiasScale = w.bias[:b.rows], g.Bias.Factor()*lean.Log4E
	}
	if g.Variant != nil {
		w.variant.open(&b, ws.ops.Tensors)
		s.variant = &w.variant
	}
	if ws.ops.Entropy != nil {
		s.watcher = &w.entropy
	}
	return s
}

// modAt sets the positions in t's score modification and dropout for a call. row is the tile's first row in the block,
// key the key from which the tile's order counts.
func (ws *workspace[F]) modAt(t *tile, b block, row, key int) {
	t.position, t.key = b.from+row/b.group, key
	for r := range t.Distances {
		t.Distances[r] = float64(key - b.seq.position(b.from+(row+r)/b.group))
	}
	for r := range t.Bias {
		pos, head := b.from+(row+r)/b.group, b.head0+(row+r)%b.group
		t.Bias[r] = unsafe.Pointer(&ws.ops.Bias[ws.plan.g.Bias.Row(b.index, head, pos)+key])
	}
}

// none reports whether b changes no score.
func (b *scoreMod) none() bool { return b.Cap == 0 && !b.byKey() }

// byKey reports whether b depends on the positions of keys.
func (b *scoreMod) byKey() bool { return b.Slopes != nil || b.Bias != nil || b.variant != nil }

// rows returns b for rows [row, row+n).
func (b *scoreMod) rows(row, n int) scoreMod {
	part := scoreMod{Cap: b.Cap, variant: b.variant, watcher: b.watcher, blockRow: b.blockRow + row}
	if b.Slopes != nil {
		part.Slopes, part.Distances = b.Slopes[row:row+n], b.Distances[row:row+n]
	}
	if b.Bias != nil {
		part.Bias, part.BiasScale = b.Bias[row:row+n], b.BiasScale
	}
	return part
}

// modifyScores modifies the scores of a tile, with stride elements a row: of each row those of its visible keys.
func modifyScores[F cpu.Real](t *tile, scores []F, stride int) {
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
			vector.SoftCap(s, t.Cap)
		}
		if t.Slopes != nil || t.Bias != nil {
			modifyByKey(t, r, s)
		}
	}
	if t.variant != nil {
		t.variant.modify(t, unsafe.Pointer(unsafe.SliceData(scores)), stride)
	}
}

// modifyByKey applies the changes that depend on the positions of keys to the scores of a row.
func modifyByKey[F cpu.Real](t *tile, row int, s []F) {
	o, n, further := &t.order, len(s), 0
	var first *[4]int
	if o.streams {
		first = &o.first
	}
	if o.streams && o.skip != 0 { // one run at a time, in which streams advance evenly
		n, further = t.Run, t.Run/4+o.skip
	}
	for number := 0; len(s) > 0; number += further {
		part := s[:min(n, len(s))]
		s = s[len(part):]
		if t.Slopes != nil {
			vector.AddSlopes(part, t.Slopes[row], t.Distances[row]+float64(number), first)
		}
		if t.Bias != nil {
			vector.AddBiases(part, at[F](t.Bias[row], number), t.BiasScale, first)
		}
	}
}
