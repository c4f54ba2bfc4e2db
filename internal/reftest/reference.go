package reftest

import (
	"math"
	"runtime"
	"slices"
	"sync"
)

// Precision describes the rounding of the implementation under test. Let u be the unit roundoff of Acc (plus
// that of float64, for the reference's own rounding), d the head dimension, n the number of visible keys, s_j
// = scale*q.k_j, m = max s_j, p_j = e^(s_j-m), l = sum p_j and o = sum p_j v_j / l.
//
// A score s_j is a dot product of d terms, times a factor that holds scale and log4(e) and that may have been
// multiplied into q:
//
//	|ds_j| <= (u (d+4) + u_Q) scale sum_i |q_i k_ij|
//
// where u_Q is the relative loss of a query. [Shape.Score] propagates this error through a soft cap, slopes
// and a bias.
//
// An error of a score is a relative error of its weight. Further errors come from the difference s_j - m and
// from the exponential. The rescaling of running maxima splits the difference into several, without changing
// the sum. The exponential may be off by two units in the last place, and may be 0 below tiny, Acc's smallest
// normal number:
//
//	|dp_j| <= p_j (e^eps_j - 1) + tiny,   eps_j = |ds_j| + u (m-s_j) + 6u
//
// A common factor of all weights cancels in o, which leaves
//
//	sum_j |dp_j| |v_j - o| / sum_j p_j e^-eps_j
//
// and never more than max |v_j - o|, because o lies between the values for any weights. If scores are so
// large that the largest weight's eps is not small, weights are taken relative to the largest weight, and its
// eps is added to the other weights' eps.
//
// A term of a sum over the keys passes through a chain of at most g additions, and through some rescalings.
// The number of rescalings is the number of rises of a running maximum, about log n. Together they cause a
// relative error of
//
//	r = u (g + 6 log2 n + 12)
//
// of l, and of the sum of absolute values in o. In total
//
//	|do| <= weights' part + (r + u_P) sum p_j |v_j| / l + Least sum |v_j| / l + (r + 3u) |o| + rounding to Out
//
// For the log-sum-exp, the scores' errors enter as a weighted mean:
//
//	|dLSE| <= min(sum_j |dp_j| / l, max eps_j) + r + 4u (|m| + |ln l| + 1)
//
// With dropout o = sum p_j z_j v_j / l, where z_j is the exact factor of weight j. The bounds then hold for
// the values z_j v_j. The factor may be multiplied into any of l, p_j and o, which adds 4u |o|.
//
// An attention sink z is an additional score with the value 0. The bounds for keys hold for the sink, except
// that its product is exact and its only rounding is that of the factor log4(e):
//
//	|dz| <= 2u |z|
//
// The output of a row that sees no key is exactly 0. Its LSE is exactly -Inf, or, with a sink, the sink's
// score with an error of at most 4u (|z| + 1).
type Precision struct {
	Acc Format // format of scores, exponentials, sums and the LSE
	P   Format // format of the weights in the product with V, if coarser than Acc (tensor cores)
	Out Format // format of the stored output, if coarser than Acc

	// Query is u_Q, the relative loss of a query element in the product with keys. It is 0 if the product
	// uses all bits of the element.
	Query float64

	// Least is the absolute error of a weight relative to a largest weight of 1. It is not 0 if the weights'
	// format has few exponents. The error of the largest weight's value does not always cover it: a sink may
	// have the largest weight, and a sink has no value.
	Least float64

	// Chain is g, the longest chain of additions in a sum over n keys. 0 means min(n, 8 sqrt(n)), which
	// covers any tile of between sqrt(n)/7 and 7 sqrt(n) keys. A straight sum over all keys needs n.
	Chain int
}

func (p Precision) chain(n int) float64 {
	if p.Chain > 0 {
		return float64(p.Chain)
	}
	return math.Min(float64(n), 8*math.Sqrt(float64(n)))
}

// Result is the attention of a Case with the error bounds for an implementation of a Precision. Rows are in
// the order of the case's queries:
//
//	O, OBound (QueryRows, Heads, ValueDim)   LSE, LSEBound (QueryRows, Heads)
type Result struct {
	Shape
	O, LSE           []float64
	OBound, LSEBound []float64
}

// Reference computes o = softmax(s) V and LSE = ln sum e^(s_j) for every query row and head in float64, with
// the error bounds for p. s is scale * q K^T with the shape's soft cap, slopes, bias, sinks and masks.
// Reference caches its last result, because tests compute one case with many schedules.
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
	seen   []int     // keys that a row sees
	s, off []float64 // scores and their error bounds
	w, dw  []float64 // weights and their error bounds
	part   []float64 // a block's sum of weighted values
	kept   []float64 // values of kept weights, times the dropout factor
	none   []float64 // value of a sink

	// Parts of the output's bounds, per element.
	spread, abs, absP []float64
	hull              []uint64 // absBits
}

// zeros returns n zeros, in x if its capacity suffices.
func zeros[T float64 | uint64](x []T, n int) []T {
	x = slices.Grow(x[:0], n)[:n]
	clear(x)
	return x
}

// row is excluded from race detection. The sums share no memory with the code under test, and race detection
// took most of their time.
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
	if n == 0 { // o and bound stay 0
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
		if c.Variant != nil {
			if v := c.varied(seq, pos, head, w.seen[j], w.s[j], w.off[j], u); v.hidden {
				w.s[j], w.off[j] = math.Inf(-1), 0
			} else {
				w.s[j], w.off[j] = v.values[v.Score], v.errors[v.Score]
			}
		}
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

	// Sums run in blocks of about sqrt(n), which keeps the reference's own rounding error below that of the
	// code under test.
	var l float64
	w.w = w.w[:0]
	block := max(int(math.Sqrt(float64(n))), 1)
	for at := 0; at < n; at += block {
		var lPart float64
		part := zeros(w.part, len(o))
		w.part = part
		end := min(at+block, n)
		for j := at; j < end; j++ {
			p := math.Exp(w.s[j] - m)
			w.w = append(w.w, p)
			lPart += p
		}
		j := at
		for ; j+4 <= end; j += 4 {
			p := w.w[j : j+4 : j+4]
			v0, v1, v2, v3 := value(j)[:len(part)], value(j + 1)[:len(part)], value(j + 2)[:len(part)], value(j + 3)[:len(part)]
			for i := range part {
				part[i] += (p[0]*v0[i] + p[1]*v1[i]) + (p[2]*v2[i] + p[3]*v3[i])
			}
		}
		for ; j < end; j++ {
			p, v := w.w[j], value(j)[:len(part)]
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
		b := math.Min(w.spread[i]/den, math.Float64frombits(w.hull[i])) + ((r+uP)*w.abs[i]+w.absP[i])/l + (r+(3+rescaled)*u)*math.Abs(o[i])
		if out := w.p.Out; out.Unit() > w.p.Acc.Unit() {
			b += out.Unit() * (math.Abs(o[i]) + b + out.Tiny())
		}
		bound[i] = b
	}
	lseBound = dLSE + r + 4*u*(math.Abs(m)+math.Abs(math.Log(l))+1)
	if c.Variant != nil && c.Variant.Unnormalised {
		sum := math.Exp(lse)
		for i := range o {
			bound[i] = (bound[i]+math.Abs(o[i])*(math.Expm1(lseBound)+8*u))*sum + (w.abs[i]/l+1)*w.p.Acc.Tiny()
			o[i] *= sum
		}
	}
	if c.Variant != nil { // scores may have errors without a bound, such as those of exponentials of huge scores
		if lseBound != lseBound {
			lseBound = math.Inf(1)
		}
		for i, b := range bound {
			if b != b {
				bound[i] = math.Inf(1)
			}
		}
	}
	return lse, lseBound
}

// keep returns the values of the visible keys, times the dropout factors of their weights.
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

// sums accumulates the parts of the bound of each element of o: the sum of dw |v - o|, the largest |v - o|,
// the sum of w |v| and the sum of tiny |v|.
//
//go:norace
func (w *worker) sums(o []float64, value func(j int) []float64, tiny float64) {
	n := len(o)
	w.spread, w.abs, w.absP = zeros(w.spread, n), zeros(w.abs, n), zeros(w.absP, n)
	w.hull = zeros(w.hull, n)
	spread, hull, abs, absP := w.spread[:n], w.hull[:n], w.abs[:n], w.absP[:n]
	for j := 0; j < len(w.w); j++ {
		p, dw, v := w.w[j], w.dw[j], value(j)[:n]
		if j+1 < len(w.w) && dw <= math.MaxFloat64 && w.dw[j+1] <= math.MaxFloat64 { // two keys at once are faster
			j++
			p2, dw2, v2 := w.w[j], w.dw[j], value(j)[:n]
			for i, o := range o {
				x, x2 := v[i], v2[i]
				d, d2 := absBits(x-o), absBits(x2-o)
				hull[i] = max(hull[i], d, d2)
				spread[i] += dw*math.Float64frombits(d) + dw2*math.Float64frombits(d2)
				abs[i] += p*math.Abs(x) + p2*math.Abs(x2)
			}
			if tiny > 0 {
				for i := range v {
					absP[i] += tiny * (math.Abs(v[i]) + math.Abs(v2[i]))
				}
			}
			continue
		}
		if dw > math.MaxFloat64 { // here, 0 times an infinite dw is 0
			for i, o := range o {
				if v[i] != o {
					spread[i] = dw
				}
			}
			dw = 0
		}
		for i, o := range o {
			x := v[i]
			d := absBits(x - o)
			hull[i] = max(hull[i], d)
			spread[i] += dw * math.Float64frombits(d)
			abs[i] += p * math.Abs(x)
		}
		if tiny > 0 {
			for i, v := range v {
				absP[i] += tiny * math.Abs(v)
			}
		}
	}
}

// scores computes the scaled products for the visible keys, whose rows start at key row first. off gets the
// sums of absolute values that bound their rounding.
//
//go:norace
func (w *worker) scores(q []float64, first, kv int) {
	w.s, w.off = w.s[:0], w.off[:0]
	for _, j := range w.seen {
		s, abs := dot(q, row(w.c.K, first+j, w.c.KVHeads, kv, w.c.Dim)) // dot, so that Backward gets the same bits
		w.s = append(w.s, s*w.c.Scale)
		w.off = append(w.off, abs*math.Abs(w.c.Scale))
	}
}

// weightErrors fills dw with the error bounds of the weights. It returns the lower bound of the computed sum
// of weights, and the error of the LSE that the scores' errors cause.
//
//go:norace
func (w *worker) weightErrors(u, m, l float64, peak int) (den, lse float64) {
	var sum, worst float64
	tiny := w.p.Acc.Tiny()
	eps := func(j int) float64 {
		return w.off[j] + u*(min(m-w.s[j], math.MaxFloat64)+6)
	}
	ref := eps(peak)
	relative := ref > 0.1 // weights are taken relative to the peak's weight
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
			x := expm1(e)
			d = w.w[j] * x
			den += w.w[j] / (1 + x)
		} else {
			d = math.Exp(s - m + e) // the weight may underflow to 0 where this exponential does not
			den += w.w[j] * math.Exp(-e)
		}
		d += tiny
		w.dw = append(w.dw, d)
		sum += d
	}
	if relative {
		return den, worst
	}
	return den, math.Min(sum/l, worst)
}

// absBits returns the bits of |x|. Bits of positive numbers have the order of the numbers, and their maximum takes no branch.
//
//go:norace
func absBits(x float64) uint64 { return math.Float64bits(x) &^ (1 << 63) }

// expm1 is math.Expm1 for arguments from 0, faster for most of the errors of weights.
//
//go:norace
func expm1(x float64) float64 {
	if x > 1e-3 {
		return math.Expm1(x)
	}
	return x * (1 + x/2*(1+x/3*(1+x/4))) // relative error below x^4/120
}
