package attention

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/vector"
	"gorgonia.org/leanattention/internal/lean"
)

// Entropy of a row's weights p_j over its keys: the sum of -p_j ln p_j. It follows from the log-sum-exp and from the mean of the scores, for
// which a worker keeps the scores of each tile until the tile's kernel has made weights of them.

// canMeasure has the features of attention that goes with entropy: kernels have all scores of a row in memory, and weights have a sum.
var canMeasure = attn.Can{Name: "the entropy of weights", Features: canWeigh.Features | attn.Window | attn.SinkTokens, KV: canAttend.KV}

// CanMeasure returns an error if the entropy of weights does not go with a problem.
func CanMeasure(op string, g *attn.Problem) error {
	if err := canMeasure.Do(op, g); err != nil {
		return err
	}
	if g.Variant != nil && g.Variant.Unnormalised {
		return attn.Errorf(op, attn.ErrUnsupported, "the entropy of a variant that is Unnormalised: its weights have no sum")
	}
	return nil
}

// checkEntropy returns an error if the plan can't have entropies, or if the memory for them is too small.
func checkEntropy[F cpu.Real](op string, p *Plan, o *Operands[F]) error {
	if o.Entropy == nil {
		return nil
	}
	if err := CanMeasure(op, &p.g); err != nil {
		return err
	}
	if n := p.g.LSE.Extent(p.rows, p.g.Heads, 1); len(o.Entropy) < n {
		return attn.Errorf(op, attn.ErrShape, "entropies have %d elements, the plan needs %d", len(o.Entropy), n)
	}
	return nil
}

// clearEntropy writes the entropies of rows that no worker visits, because they see no key.
func clearEntropy[F cpu.Real](p *Plan, o *Operands[F]) {
	if o.Entropy == nil {
		return
	}
	for i := range p.seqs {
		s := &p.seqs[i]
		for row := s.row; row < s.row+s.queries; row++ {
			for h := range p.g.Heads {
				o.Entropy[row*p.g.LSE.Row+h*p.g.LSE.Head] = 0
			}
		}
	}
}

// moments are the sums of a row over some keys, with scores s_j of base 4 that are at most m: l = sum 4^(s_j-m), t = sum 4^(s_j-m) (s_j-m).
type moments struct{ m, l, t float64 }

// add adds the sums of other keys.
func (x *moments) add(y moments) {
	switch {
	case y.l == 0:
		return
	case x.l == 0:
		*x = y
		return
	}
	if y.m > x.m {
		*x, y = y, *x
	}
	if a := math.Exp2(2 * (y.m - x.m)); a > 0 { // else the difference may be infinite
		x.l, x.t = x.l+a*y.l, x.t+a*(y.t+(y.m-x.m)*y.l)
	}
}

// entropy returns the entropy of weights of the keys, which are e^score over e^lse.
func (x *moments) entropy(lse float64, sinks bool) float64 {
	if x.l == 0 {
		return 0
	}
	own := math.Log(x.l) - x.t/x.l*lean.Ln4 // of weights with the sum 1
	if !sinks {
		return own
	}
	rest := lse - (x.m*lean.Ln4 + math.Log(x.l)) // -ln of the sum of the keys' weights
	return math.Exp(-rest) * (own + rest)
}

// shareOfEntropy returns what some of a row's keys add to the row's entropy: the keys' own entropy and log-sum-exp, that of all keys, and the sink
// that the former has.
func shareOfEntropy(own, lse, all, sink float64) float64 {
	w := math.Exp(lse - all)
	if !(w > 0) {
		return 0
	}
	return w * (own + (all-lse)*(1-math.Exp(sink-lse)))
}

// entropyRun sums for a worker.
type entropyRun[F cpu.Real] struct {
	rows   []moments // of the block
	scores []F       // of a tile
	ones   []F
}

func (e *entropyRun[F]) grow(rows int) {
	if len(e.rows) < rows {
		e.rows = make([]moments, rows)
	}
}

func (e *entropyRun[F]) reset() { clear(e.rows) }

// growMoments makes room for the rows of n partials.
func (ws *workspace[F]) growMoments(n, rows int) {
	if len(ws.moments) >= n && len(ws.moments[0]) >= rows {
		return
	}
	ws.moments = make([][]moments, n)
	for i := range ws.moments {
		ws.moments[i] = make([]moments, rows)
	}
}

// mergeMoments adds the rows' sums of an output tile in the order of the workers, as merge does.
func (ws *workspace[F]) mergeMoments(b block, k lean.Work, first, last int) []moments {
	if ws.ops.Entropy == nil {
		return nil
	}
	sched := &ws.plan.sched
	k.Begin = 0
	sum := ws.moments[sched.Slot(first, k)]
	k.Begin = 1
	for i := first + 1; i <= last; i++ {
		if begin, end := sched.Range(i); begin == end {
			continue
		}
		for r, x := range ws.moments[sched.Slot(i, k)][:b.rows] {
			sum[r].add(x)
		}
	}
	return sum
}

// keep copies the scores of a tile, with stride elements a row.
func (e *entropyRun[F]) keep(t *tile, at unsafe.Pointer, stride int) {
	n := t.Rows * stride
	if len(e.scores) < n {
		e.scores = make([]F, n)
	}
	copy(e.scores, unsafe.Slice((*F)(at), n))
}

// watch adds the scores of a tile to the rows' sums, by the weights that the kernel has made of them: 4^(s-m), with the rows' maxima m.
func (e *entropyRun[F]) watch(t *tile, at, maxima unsafe.Pointer, stride int) {
	all, m := unsafe.Slice((*F)(at), t.Rows*stride), unsafe.Slice((*F)(maxima), t.Rows)
	for len(e.ones) < t.Count {
		e.ones = append(e.ones, 1)
	}
	for r := range t.Rows {
		n := t.Count
		if t.Visible != nil {
			n = int(*(*int32)(unsafe.Add(t.Visible, 4*r)))
		}
		if n == 0 || m[r] == F(math.Inf(-1)) {
			continue
		}
		weights, scores := all[r*stride:r*stride+n], e.scores[r*stride:r*stride+n]
		x := moments{m: float64(m[r]), l: vector.Dot(weights, e.ones[:n])}
		const near = 32 // a maximum whose product with l rounds little
		if x.t = vector.Dot(weights, scores) - x.m*x.l; x.t != x.t || math.Abs(x.m) > near {
			x.t = 0
			for i, w := range weights {
				if w > 0 { // the score of a hidden key is -Inf
					x.t += float64(w) * float64(scores[i]-m[r])
				}
			}
		}
		e.rows[t.blockRow+r].add(x)
	}
}

// keepScores keeps the scores of a tile, as the softmax gets them, for watchWeights.
func keepScores[F cpu.Real](t *tile, scores []F, stride int) {
	if t.watcher != nil {
		t.watcher.keep(t, unsafe.Pointer(unsafe.SliceData(scores)), stride)
	}
}

// watchWeights lets the worker look at the weights of a tile, and at the maxima of its rows.
func watchWeights[F cpu.Real](t *tile, weights []F, maxima unsafe.Pointer, stride int) {
	if t.watcher != nil {
		t.watcher.watch(t, unsafe.Pointer(unsafe.SliceData(weights)), maxima, stride)
	}
}

// tileWatcher looks at the scores of a tile, and then at the weights.
type tileWatcher interface {
	keep(t *tile, scores unsafe.Pointer, stride int)
	watch(t *tile, weights, maxima unsafe.Pointer, stride int)
}
