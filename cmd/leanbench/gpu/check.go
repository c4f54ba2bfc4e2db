package gpu

import (
	"fmt"
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/half"
)

// verify replays a graph once and compares what one head of one sequence got with
// sums in float64: a speed is worth something only if the work was done.
func (d *gpuDevice) verify(c *Contender, p *gpuProblem, queries []half.Float16, out *cuda.Buffer) error {
	if d.unchecked {
		return nil
	}
	if err := out.Set(0, 0xff, out.Len()); err != nil {
		return err
	}
	if _, err := c.Replay(1); err != nil {
		return err
	}
	got := make([]half.Float16, p.dim)
	seq, head := d.rng.IntN(p.batch()), d.rng.IntN(p.heads)
	at := seq*p.geometry.Out.Row + head*p.geometry.Out.Head
	if err := out.Download(unsafe.Slice((*byte)(unsafe.Pointer(&got[0])), 2*p.dim), int64(2*at)); err != nil {
		return err
	}
	q, row := make([]float64, p.dim), make([]float64, p.dim)
	for i := range q {
		q[i], row[i] = float64(queries[seq*p.geometry.Query.Row+head*p.geometry.Query.Head+i].Float32()), float64(got[i].Float32())
	}
	// The last launch had the last operands.
	if err := compareRow(row, d.reference(p, seq, head, p.seqs[seq].Keys, d.set(p.Shape, p.Launches()-1)/2, q), 0.02); err != nil {
		return fmt.Errorf("sequence %d, head %d: %w", seq, head, err)
	}
	return nil
}

// compareRow reports an element that is off by more than a part of the largest one.
func compareRow(got, want []float64, part float64) error {
	largest := 0.0
	for _, w := range want {
		largest = max(largest, math.Abs(w))
	}
	for i, w := range want {
		// Written so that a NaN does not agree with anything.
		if x := got[i]; !(math.Abs(x-w) <= part*largest) {
			return fmt.Errorf("element %d is %v; it should be %v", i, x, w)
		}
	}
	return nil
}

// reference is softmax(scale * q K^T) V of one head and a sequence's first keys, whose
// operands begin at an element of the arena.
func (d *gpuDevice) reference(p *gpuProblem, seq, head, keys int, begin int64, query []float64) []float64 {
	g, s := &p.geometry, &p.seqs[seq]
	q := make([]float64, p.dim)
	for i := range q {
		q[i] = g.Scale * query[i]
	}
	out, most, sum := make([]float64, p.dim), math.Inf(-1), 0.0
	for j := range keys {
		at := begin + int64(s.Pages[j/g.PageTokens])*int64(g.Pages.Planes[0].At.Page) + int64(head/(p.heads/p.kvHeads)*g.Pages.Planes[0].At.Head+j%g.PageTokens*g.Pages.Planes[0].At.Row)
		score := 0.0
		for i, x := range d.row(at, p.dim) {
			score += q[i] * float64(x.Float32())
		}
		if score > most {
			scale := math.Exp(most - score)
			for i := range out {
				out[i] *= scale
			}
			sum, most = sum*scale, score
		}
		w := math.Exp(score - most)
		sum += w
		for i, x := range d.row(at+p.elements, p.dim) {
			out[i] += w * float64(x.Float32())
		}
	}
	for i := range out {
		out[i] /= sum
	}
	return out
}
