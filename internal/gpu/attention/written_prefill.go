package attention

import (
	"fmt"
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/variant"
)

// Attention of many query rows with a user's variant (kernels/attn_written_prefill.cuh).

// writtenPrefill is struct WrittenPrefillParams.
type writtenPrefill struct {
	prefillParams
	score   scoreParams
	written writtenParams
	_       [(mapAlign - (unsafe.Sizeof(scoreParams{})+unsafe.Sizeof(writtenParams{}))%mapAlign) % mapAlign]byte
}

// prompts are the LeanTiles, of cutKeys keys, of sequences with output tiles of prefill kernels.
type prompts struct {
	numbers map[int32]prompt // by the sequences' first rows
	blocks  []writtenBlock
	ends    []int32 // of each block the number of keys in its LeanTiles
	tiles   []int32
}

// prompt is the number of a sequence among the caller's, and its first block of rows; -1: not listed yet.
type prompt struct{ number, first int32 }

// begin makes the sequences known whose LeanTiles dealOut may list.
func (l *prompts) begin(seqs []attn.Sequence) {
	if l.numbers == nil {
		l.numbers = map[int32]prompt{}
	}
	clear(l.numbers)
	l.blocks, l.ends, l.tiles = l.blocks[:0], l.ends[:0], l.tiles[:0]
	for i := range seqs {
		if seqs[i].Queries > 0 {
			l.numbers[int32(seqs[i].Row)] = prompt{int32(i), -1}
		}
	}
}

// promptKeys returns the number of keys in the LeanTiles that a prefill kernel's output tile has: block number `block` of `rows` packed
// rows of a sequence, with a variant that hides keys.
func (w *written) promptKeys(g *attn.Problem, s *sequence, block, rows int) int32 {
	l := &w.prompts
	of := l.numbers[s.row]
	if of.first < 0 {
		of.first = int32(len(l.blocks))
		l.numbers[s.row] = of
		for first, all := 0, int(s.queries)*g.Group(); first < all; first += rows {
			end := min(first+rows, all)
			begin := len(l.tiles)
			n := w.see(g, s, int(of.number), first, end, cutKeys, &l.blocks, &l.tiles)
			_, stop := g.Mask.Keys(int(s.queries), int(s.keys), (end-1)/g.Group())
			keys := n * cutKeys
			if last := attn.Ceil(stop, cutKeys) - 1; n > 0 && (len(l.tiles) == begin || l.tiles[len(l.tiles)-1] == int32(last)) {
				keys += stop - (last+1)*cutKeys // the sequence's last keys are less than a LeanTile
			}
			l.ends = append(l.ends, int32(keys))
		}
	}
	return l.ends[of.first+int32(block)]
}

// listPrompts gives the kernel the lists that dealOut has made.
func (w *written) listPrompts(seqs []sequence) {
	l := &w.prompts
	for i := range seqs {
		w.many.lists.data = append(w.many.lists.data, max(l.numbers[seqs[i].row].first, 0)) // 0: the sequence has no such output tile
	}
	w.many.blocks.data, w.many.tiles.data = append(w.many.blocks.data, l.blocks...), append(w.many.tiles.data, l.tiles...)
}

// arguments returns the template arguments of a prefill kernel behind the head dim: see kernels/attn_prefill.cuh and attn_prefill_mma.cuh.
func (k *kernel) arguments(anyOutput bool) string {
	t := &k.tile
	shape := fmt.Sprint(t.rows / 64)
	if t.warps > 0 {
		shape = fmt.Sprintf("%d, %d", t.warps, t.rows/t.warps/16)
	}
	return fmt.Sprintf("%s, %d, %d, %t, %t", shape, t.keys, t.stages, k.parts > 1, k.parts > 1 || !k.exact || anyOutput)
}

// loadWritten replaces the line for the operands' types that g names by its compiled kernel.
func (e *Engine) loadWritten(op string, g *attn.Problem, of *prefillKernels) error {
	line := of.taken(g, false)
	made, err := e.print(op, g, line)
	if err != nil {
		return err
	}
	for _, k := range [...]**kernel{&of.same, &of.rounded, &of.precise} {
		if *k == line {
			*k = made.kernel
		}
	}
	return nil
}

// runWrittenPrefill queues attention with a variant by a prefill kernel.
func (p *Plan) runWrittenPrefill(s *cuda.Stream, o *Operands, k *kernel) error {
	g := &p.form.geometry
	if k.line != nil {
		k = k.line
	}
	made, err := p.engine.print("run", g, k)
	if err != nil {
		return err
	}
	own := p.writtenTo(o)
	if err := p.prefillArguments(&own, k); err != nil {
		return err
	}
	l := &p.written.prefill
	*l = writtenPrefill{prefillParams: p.prefillParams, score: p.scoresOf(g, o, k)}
	if onlyMasks(g) {
		l.score.changes, l.scale, l.natural = 0, float32(g.Scale*math.Log2E), float32(g.Scale)
	} else {
		l.scale, l.natural = float32(g.Scale*lean.Log4E), 1
	}
	p.expressionOf(&l.written, o, &made, &p.written.many)
	p.args.Reset()
	cuda.Struct(&p.args, l)
	p.hold(o)
	if err := made.functions[0].Launch(s, p.engine.prefillLaunch(k), &p.args); err != nil {
		return err
	}
	return p.restore(s, o, &own)
}

// onlyMasks reports whether nothing changes scores, and nothing depends on them: then the softmax has the scale.
func onlyMasks(g *attn.Problem) bool {
	v := g.Variant
	return g.Scale > 0 && g.Features()&changeFeatures == 0 && !v.ChangesScores() && (v.Visible < 0 || v.Nodes[v.Visible].Needs&variant.NeedsScore == 0)
}
