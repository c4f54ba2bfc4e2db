package gradient

import (
	"fmt"
	"math"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/expression"
	"gorgonia.org/leanattention/internal/variant"
)

// A variant's derivatives are expressions, too. The gradients of its tensors are a phase of their own, from scores that
// are computed once more: each of a fixed number of units has sums of its own for all elements, which are added in the
// order of the units.

// varied evaluates the variant for a worker.
type varied[F cpu.Real] struct {
	expression.Run[F]
	first, count int // the keys of the last call of Keys
	slopes       []F // as backwardWorker.p: the derivatives of scores

	// In the phase of tensors, for each of the program's Partials: the derivatives and the indices of elements, as p.
	by [][]F
	at [][]int32
}

// openVariant prepares the worker for the variant, and for what the run's phase needs of it.
func (w *backwardWorker[F]) openVariant() {
	s := &w.run.shape
	if s.Variant == nil {
		return
	}
	v, block := &w.varied, backwardRows*w.stride
	roots := []int{s.Variant.Slope}
	if w.run.phase == phaseTensors {
		for _, p := range s.Variant.Partials {
			roots = append(roots, p.By, p.Element)
		}
	}
	v.Prepare(s.Variant, roots...)
	v.Open(w.run.ops.Tensors, w.seq)
	v.count = 0
	if len(v.slopes) < block {
		v.slopes = make([]F, block)
	}
	for w.run.phase == phaseTensors && len(v.by) < len(s.Variant.Partials) {
		v.by, v.at = append(v.by, make([]F, block)), append(v.at, make([]int32, block))
	}
}

// vary changes the scores of row r of the block, of keys from `from` of the n keys from the given key on, and stores the derivatives.
func (w *backwardWorker[F]) vary(r, head, key, n, from int, scores []F) {
	s, v := &w.run.shape, &w.varied
	if first := key + from; v.count == 0 || v.first != first || v.count < len(scores) {
		v.first, v.count = first, n-from
		v.Keys(v.count, func(dst []int32) {
			for i := range dst {
				dst[i] = int32(first + i)
			}
		})
	}
	count, at := len(scores), r*w.stride+from
	v.Row(s.Position(w.seq, w.row+r), head, scores, true)
	copy(v.slopes[at:], v.Floats(s.Variant.Slope, count))
	partials := s.Variant.Partials
	if w.run.phase != phaseTensors {
		partials = nil
	}
	for k, p := range partials {
		copy(v.by[k][at:], v.Floats(p.By, count))
		v.Indices(p.Element, count, v.at[k][at:])
	}
	for c, x := range scores {
		if x == F(math.Inf(-1)) { // hidden: the derivatives may be anything
			v.slopes[at+c] = 0
			for k := range partials {
				v.by[k][at+c] = 0
			}
		}
	}
}

// hidden reports whether no row of the block sees any of n keys, from the given key on, by the variant.
func (w *backwardWorker[F]) hidden(key, n int) bool {
	s := &w.run.shape
	if s.Variant == nil || s.Variant.Visible < 0 {
		return false
	}
	lo, hi := math.MaxInt, math.MinInt
	for r := range w.rows {
		p := s.Position(w.seq, w.row+r)
		lo, hi = min(lo, p), max(hi, p)
	}
	return w.varied.Sees(&variant.Bounds{
		Query: variant.Between(lo, hi), Key: variant.Between(key, key+n-1), Sequence: variant.Between(w.seq, w.seq), Tensors: w.varied.Tensors(),
		Head: variant.Between(w.head0+w.row/s.Queries, w.head0+(w.row+w.rows-1)/s.Queries),
	}) == variant.Never
}

// chain turns gradients of changed scores, of rows [row, end), into those of the scores before, by the derivatives. In the phase of tensors it
// first adds the elements' gradients to sums.
func (w *backwardWorker[F]) chain(row, end, key, n int) {
	v := &w.varied
	for r := row; r < end; r++ {
		from, to := w.see(r, key, n)
		at := r * w.stride
		ds := w.ds[at+from : at+to]
		if w.run.phase == phaseTensors {
			for k, p := range w.run.shape.Variant.Partials {
				sums := w.sums[w.run.shape.Variant.Nodes[p.Element].Tensor]
				by, index := v.by[k][at+from:at+to], v.at[k][at+from:at+to]
				for c, d := range ds {
					sums[index[c]] += float64(d) * float64(by[c])
				}
			}
		}
		if w.run.shape.Variant.Linear() {
			continue
		}
		for c, x := range v.slopes[at+from : at+to] {
			ds[c] *= x
		}
	}
}

// cutTensors makes the sums of the phase of tensors, and returns the number of its units.
func (r *backwardRun[F]) cutTensors() (units int) {
	s := &r.shape
	heads := s.Batch * s.KVHeads
	r.tensorParts = (minUnits-1)/heads + 1
	units = min(heads*r.tensorParts, minUnits)
	r.tensorSums = make([][][]float64, units)
	for u := range r.tensorSums {
		for i := range r.ops.Tensors {
			n := 0
			if !r.ops.Tensors[i].Int() {
				n = r.ops.Tensors[i].Len()
			}
			r.tensorSums[u] = append(r.tensorSums[u], make([]float64, n))
		}
	}
	return units
}

// tensors adds the gradients of a unit's share of the rows to its sums.
func (r *backwardRun[F]) tensors(w *backwardWorker[F], unit int) {
	s := &r.shape
	tasks := s.Batch * s.KVHeads * r.tensorParts
	for task := unit; task < tasks; task += len(r.tensorSums) {
		head, part := task/r.tensorParts, task%r.tensorParts
		live := s.Live(head / s.KVHeads)
		w.open(r, head, live)
		w.sums = r.tensorSums[unit]
		for row, end := s.Rows()*part/r.tensorParts, s.Rows()*(part+1)/r.tensorParts; row < end; {
			n := blockRows(s, row, end)
			w.pack(row, n)
			if w.extreme() {
				w.measure()
			}
			for key := w.low; key < min(live, w.most); key += backwardKeys {
				count := min(backwardKeys, min(live, w.most)-key)
				if from, to := w.seeing(key, count); from < to {
					w.gradients(from, to, key, count)
				}
			}
			row += n
		}
	}
	w.sums = nil
}

// addTensors adds the sums of all units.
func (r *backwardRun[F]) addTensors() {
	for i, to := range r.ops.DTensors {
		for k := range to {
			var sum float64
			for _, unit := range r.tensorSums {
				sum += unit[i][k]
			}
			to[k] = F(sum)
		}
	}
	r.tensorSums = nil
}

// wantsTensors reports whether the gradient of a tensor is wanted.
func (o *Operands[F]) wantsTensors() bool {
	for _, d := range o.DTensors {
		if d != nil {
			return true
		}
	}
	return false
}

// checkTensors returns an error for tensors that are not those of the variant, or too small.
func (o *Operands[F]) checkTensors(s *Shape) error {
	if s.Variant == nil {
		if len(o.Tensors) > 0 {
			return fmt.Errorf("%d tensors without a variant", len(o.Tensors))
		}
		return nil
	}
	if len(o.DTensors) != 0 && len(o.DTensors) != len(o.Tensors) {
		return fmt.Errorf("%d tensors and %d gradients", len(o.Tensors), len(o.DTensors))
	}
	for i, d := range o.DTensors {
		if d != nil && (o.Tensors[i].Int() || len(d) != o.Tensors[i].Len()) {
			return fmt.Errorf("the gradient of %s has %d elements", s.Variant.Tensors[i].Name, len(d))
		}
	}
	first, keys := 0, 1
	for b := range s.Batch {
		if live := s.Live(b); live > 0 && s.QueriesOf(b) > 0 {
			first, keys = min(first, s.Position(b, 0)), max(keys, live)
		}
	}
	return s.Variant.CheckTensors(o.Tensors, &variant.Bounds{
		Query: variant.Between(first, keys-1), Key: variant.Between(0, keys-1), Head: variant.Between(0, s.Heads-1), Sequence: variant.Between(0, s.Batch-1),
	})
}
