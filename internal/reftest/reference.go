package reftest

import (
	"math"
	"runtime"
	"slices"
	"sync"
)

// Precision says how the implementation under test rounds. With u the unit
// roundoff of Acc (plus that of float64, for the reference's own rounding), d
// the head dimension, n the number of visible keys, s_j = scale*q.k_j,
// m = max s_j, p_j = e^(s_j-m), l = sum p_j and o = sum p_j v_j / l:
//
// A score s_j is a dot product of d terms, times a factor that holds scale and
// log4(e) and may have been multiplied into q before:
//
//	|ds_j| <= (u (d+4) + u_Q) scale sum_i |q_i k_ij|
//
// where u_Q is what is lost of a query. What a soft cap, slopes and a bias make of that is at [Shape.Score].
//
// An error of a score is a relative error of its weight, and more come from the
// difference s_j - m (which the re-scaling of running maxima divides into several
// without changing the sum) and from the exponential, which may be off by two
// units in the last place, and may be 0 below tiny, Acc's smallest normal number:
//
//	|dp_j| <= p_j (e^eps_j - 1) + tiny,   eps_j = |ds_j| + u (m-s_j) + 6u
//
// What all weights have in common cancels in o, which leaves
//
//	sum_j |dp_j| |v_j - o| / sum_j p_j e^-eps_j
//
// and never more than max |v_j - o|, as any weights give an o between the
// values. Where scores are so large that the largest weight's eps is not small,
// weights are taken relative to that one, and its eps is added to the others'.
//
// A term of a sum over the keys goes through at most a chain of g additions, and
// through some re-scalings, whose number is that of rises of a running maximum
// and so about log n. This is a relative error of
//
//	r = u (g + 6 log2 n + 12)
//
// of l, and of the sum of absolute values in o. In all
//
//	|do| <= weights' part + (r + u_P) sum p_j |v_j| / l + Least sum |v_j| / l + (r + 3u) |o| + rounding to Out
//
// and for the log-sum-exp, of which the scores' errors are a weighted mean,
//
//	|dLSE| <= min(sum_j |dp_j| / l, max eps_j) + r + 4u (|m| + |ln l| + 1)
//
// With dropout o = sum p_j z_j v_j / l, where z_j is what weight j is multiplied by, exactly. So all of this holds for
// the values z_j v_j, and the factor, which may be multiplied into any of l, p_j and o, adds 4u |o|.
//
// An attention sink z is one score more, whose value is 0: what is said of keys goes for it, but that its product is
// exact, and its rounding that of the factor log4(e) alone:
//
//	|dz| <= 2u |z|
//
// A row that sees no key is exactly 0 with an LSE of exactly -Inf, or of its sink, off by 4u (|z| + 1).
type Precision struct {
	Acc Format // of scores, exponentials, sums and the LSE
	P   Format // of the weights where they are multiplied by V, if coarser than Acc (tensor cores)
	Out Format // of the stored output, if coarser than Acc

	// Query is u_Q, the part of a query's element that is lost where it is multiplied
	// by keys: 0 where the product takes all of its bits.
	Query float64

	// Least is by how much a weight may be off beside the largest, of 1, whatever it is: where weights have few
	// exponents as they are multiplied by V. A sink can have the largest one, and has no value whose error covers that.
	Least float64

	// Chain is g, the longest chain of additions in a sum over n keys. 0 stands
	// for min(n, 8 sqrt(n)), which covers any tile of between sqrt(n)/7 and
	// 7 sqrt(n) keys. A sum that goes straight through all keys needs n.
	Chain int
}

func (p Precision) chain(n int) float64 {
	if p.Chain > 0 {
		return float64(p.Chain)
	}
	return math.Min(float64(n), 8*math.Sqrt(float64(n)))
}

// Result is the attention of a Case, and by how much an implementation of a
// Precision may differ from it. Rows are in the order of the case's queries:
//
//	O, OBound (QueryRows, Heads, ValueDim)   LSE, LSEBound (QueryRows, Heads)
type Result struct {
	Shape
	O, LSE           []float64
	OBound, LSEBound []float64
}

// Reference computes o = softmax(s) V and LSE = ln sum e^(s_j), where s is scale *
// q K^T with the shape's soft cap, slopes, bias, sinks and masks, for every query row and head in float64, with the bounds for p.
// Tests compute one case by many schedules: what has been asked for last is not computed again.
func (c *Case) Reference(p Precision) *Result {
	if c.last == nil {
		return c.reference(p)
	}
	return c.last.of(c, p)
}

func (c *Case) reference(p Precision) *Result {
	rows := c.QueryRows() * c.Heads
	r := &Result{
		Shape:    c.Shape,
		O:        make([]float64, rows*c.ValueDim),
		OBound:   make([]float64, rows*c.ValueDim),
		LSE:      make([]float64, rows),
		LSEBound: make([]float64, rows),
	}
	type task struct{ seq, head int }
	tasks := make(chan task)
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			w := worker{c: c, p: p}
			for t := range tasks {
				for pos := range c.Queries[t.seq] {
					at := (sum(c.Queries[:t.seq])+pos)*c.Heads + t.head
					dv := c.ValueDim
					r.LSE[at], r.LSEBound[at] = w.row(t.seq, pos, t.head, r.O[at*dv:(at+1)*dv], r.OBound[at*dv:(at+1)*dv])
				}
			}
		})
	}
	for s := range c.Queries {
		for h := range c.Heads {
			tasks <- task{s, h}
		}
	}
	close(tasks)
	wg.Wait()
	return r
}

// worker holds the buffers of one goroutine of Reference.
type worker struct {
	c      *Case
	p      Precision
	seen   []int     // the keys that a row sees
	s, off []float64 // scores, and by how much they may be off
	w, dw  []float64 // weights and the bounds of their errors
	part   []float64 // a block's sum of weighted values
	kept   []float64 // values of kept weights, with the factor on these
	none   []float64 // the value of a sink

	// What the bounds of the output's elements are made of, each by element.
	spread, hull, abs, absP []float64
}

// zeros is n of them, in x if it has room.
func zeros(x []float64, n int) []float64 {
	x = slices.Grow(x[:0], n)[:n]
	clear(x)
	return x
}

// The race detector need not look at the sums of a reference, which share nothing with what they
// judge, and took most of its time there.
//
//go:norace
func (w *worker) row(seq, pos, head int, o, bound []float64) (lse, lseBound float64) {
	c := w.c
	w.seen = w.seen[:0]
	for j := range c.SinkKeys(seq, pos) {
		w.seen = append(w.seen, j)
	}
	for j := c.First(seq, pos); j < c.Visible(seq, pos); j++ {
		if c.Sees(seq, pos, j) {
			w.seen = append(w.seen, j)
		}
	}
	n := len(w.seen)
	u := w.p.Acc.Unit() + Float64.Unit()
	sink := c.Sink(head)
	if n == 0 { // o and bound are 0
		if math.IsInf(sink, -1) {
			return sink, 0
		}
		return sink, 4 * u * (math.Abs(sink) + 1)
	}
	kv := head / (c.Heads / c.KVHeads)
	first := sum(c.Keys[:seq])
	of := func(j int) []float64 { return row(c.V, first+w.seen[j], c.KVHeads, kv, c.ValueDim) }
	rescaled := 0.0
	if c.drops() {
		rescaled = 4
		of = w.keep(seq, pos, head, of)
	}
	keys := n
	value := func(j int) []float64 {
		if j == keys { // the sink
			w.none = zeros(w.none, c.ValueDim)
			return w.none
		}
		return of(j)
	}
	w.scores(c.Query(seq, pos, head), first, kv)
	peak := 0
	for j := range n {
		w.s[j], w.off[j], _, _ = c.Score(seq, pos, head, w.seen[j], w.s[j], (u*float64(c.Dim+4)+w.p.Query)*w.off[j], u)
		if w.s[j] > w.s[peak] {
			peak = j
		}
	}
	if !math.IsInf(sink, -1) {
		w.s, w.off = append(w.s, sink), append(w.off, 2*u*math.Abs(sink))
		if n++; sink > w.s[peak] {
			peak = keys
		}
	}
	m := w.s[peak]
	if math.IsInf(m, -1) {
		return m, 0 // a bias hides all keys
	}

	// Sums run in blocks of about sqrt(n), so that the reference's own rounding
	// stays below that of what it judges.
	var l float64
	w.w = w.w[:0]
	block := max(int(math.Sqrt(float64(n))), 1)
	for at := 0; at < n; at += block {
		var lPart float64
		part := zeros(w.part, len(o))
		w.part = part
		for j := at; j < min(at+block, n); j++ {
			p := math.Exp(w.s[j] - m)
			w.w = append(w.w, p)
			lPart += p
			v := value(j)
			for i := range part {
				part[i] += p * v[i]
			}
		}
		l += lPart
		for i, x := range part {
			o[i] += x
		}
	}
	for i := range o {
		o[i] /= l
	}
	lse = m + math.Log(l)

	r := u * (w.p.chain(n) + 6*math.Log2(float64(n)) + 12)
	den, dLSE := w.weightErrors(u, m, l, peak)
	uP, tinyP := 0.0, 0.0
	if w.p.P.Unit() > w.p.Acc.Unit() {
		uP, tinyP = w.p.P.Unit(), w.p.P.Unit()*w.p.P.Tiny()
	}
	w.sums(o, value, tinyP+w.p.Least)
	for i := range bound {
		b := math.Min(w.spread[i]/den, w.hull[i]) + ((r+uP)*w.abs[i]+w.absP[i])/l + (r+(3+rescaled)*u)*math.Abs(o[i])
		if out := w.p.Out; out.Unit() > w.p.Acc.Unit() {
			b += out.Unit() * (math.Abs(o[i]) + b + out.Tiny())
		}
		bound[i] = b
	}
	return lse, dLSE + r + 4*u*(math.Abs(m)+math.Abs(math.Log(l))+1)
}

// keep returns the values of the keys that the row sees as they are weighed where weights are dropped.
//
//go:norace
func (w *worker) keep(seq, pos, head int, value func(j int) []float64) func(j int) []float64 {
	d := w.c.ValueDim
	w.kept = zeros(w.kept, len(w.seen)*d)
	for j, key := range w.seen {
		z := w.c.Kept(seq, pos, head, key)
		for i, x := range value(j) {
			w.kept[j*d+i] = z * x
		}
	}
	return func(j int) []float64 { return w.kept[j*d : (j+1)*d] }
}

// sums adds up, for each element of o, what its bound is made of: dw |v - o|, of
// which it keeps the largest |v - o|, w |v| and tiny |v|.
//
//go:norace
func (w *worker) sums(o []float64, value func(j int) []float64, tiny float64) {
	n := len(o)
	w.spread, w.hull, w.abs, w.absP = zeros(w.spread, n), zeros(w.hull, n), zeros(w.abs, n), zeros(w.absP, n)
	spread, hull, abs, absP := w.spread[:n], w.hull[:n], w.abs[:n], w.absP[:n]
	for j, p := range w.w {
		dw, v := w.dw[j], value(j)[:n]
		if dw > math.MaxFloat64 { // 0 times an infinite dw is 0 here
			for i, o := range o {
				if v[i] != o {
					spread[i] = dw
				}
			}
			dw = 0
		}
		for i, o := range o {
			x := v[i]
			d := math.Abs(x - o)
			spread[i] += dw * d
			if d > hull[i] {
				hull[i] = d
			}
			abs[i] += p * math.Abs(x)
		}
		if tiny == 0 {
			continue
		}
		for i, v := range v {
			absP[i] += tiny * math.Abs(v)
		}
	}
}

// scores computes the scaled products for the keys that are seen, counted from key row first on, and in off
// the sums of absolute values that bound their rounding.
//
//go:norace
func (w *worker) scores(q []float64, first, kv int) {
	w.s, w.off = w.s[:0], w.off[:0]
	for _, j := range w.seen {
		s, abs := dot(q, row(w.c.K, first+j, w.c.KVHeads, kv, w.c.Dim)) // which gradients compute again, and to the same bits
		w.s = append(w.s, s*w.c.Scale)
		w.off = append(w.off, abs*math.Abs(w.c.Scale))
	}
}

// weightErrors fills dw with the bounds on the weights' errors. It returns the
// lower bound of the computed sum of weights, and by how much the scores' errors
// move the LSE.
//
//go:norace
func (w *worker) weightErrors(u, m, l float64, peak int) (den, lse float64) {
	var sum, worst float64
	eps := func(j int) float64 {
		return w.off[j] + u*(min(m-w.s[j], math.MaxFloat64)+6)
	}
	ref := eps(peak)
	relative := ref > 0.1 // weights are taken relative to the peak's
	w.dw = w.dw[:0]
	for j, s := range w.s {
		if math.IsInf(s, -1) { // hidden by a bias
			w.dw = append(w.dw, 0)
			continue
		}
		e := eps(j)
		worst = math.Max(worst, e)
		switch {
		case relative && j == peak:
			e = 0
		case relative:
			e += ref
		}
		var d float64
		if e < 0.1 {
			d = w.w[j] * math.Expm1(e)
		} else {
			d = math.Exp(s - m + e) // the weight itself may be 0 and the sum of exponents not
		}
		d += w.p.Acc.Tiny()
		w.dw = append(w.dw, d)
		sum += d
		den += w.w[j] * math.Exp(-e)
	}
	if relative {
		return den, worst
	}
	return den, math.Min(sum/l, worst)
}
