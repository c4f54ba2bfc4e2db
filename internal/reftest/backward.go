package reftest

import (
	"math"
	"runtime"
	"sync"

	"gorgonia.org/leanattention/internal/dropout"
)

// Gradients holds the gradients of a cost with respect to the operands of a Case, and the error bounds for an
// implementation of a Precision. The layouts are those of the case.
type Gradients struct {
	Shape
	DQ, DK, DV                []float64
	DQBound, DKBound, DVBound []float64
	DBias, DBiasBound         []float64   // as the shape's Bias
	DSinks, DSinksBound       []float64   // as the shape's Sinks
	DTensors, DTensorsBound   [][]float64 // as the shape's Tensors
}

// Backward computes the gradients of a cost. dO (QueryRows, Heads, ValueDim) is the cost's gradient with
// respect to the output, and dLSE (QueryRows, Heads) the gradient with respect to the log-sum-exp. Either may
// be nil, which means 0. With p_j = e^(s_j-lse) and D = dO.o - dLSE:
//
//	dp_j = dO.v_j     ds_j = p_j (dp_j - D)     (times the derivative of a soft cap)
//	dq = scale sum_j ds_j k_j    dk_j = scale sum ds_j q    dv_j = sum p_j dO
//
// With dropout, dO.v_j and p_j dO have the factor z_j, which is 0 or 1/(1-Dropout), and dO is rounded once
// more.
//
// The gradient of a bias number is the sum of ds_j, without the derivative of a soft cap, over all scores
// that the number is added to. The gradient of a sink is the sum of -p D over all query rows of its head,
// with the sink's weight p = e^(sink-lse). The sums of dk and dv run over all query rows of a KV head.
//
// forward is the case's Reference for the same p. Its bounds enter, because an implementation uses its own o
// and lse. The implementation computes p_j from its own scores and its own lse, with the error
//
//	|dp_j| <= min(p_j (e^eps_j - 1) + tiny, 1)
//	eps_j = u (d+4) scale sum_i |q_i k_ij| + LSEBound + u (2 |lse| + |s_j-lse| + 6)
//
// (weights are between 0 and 1). The error of dO.v_j is at most u (dv+2) sum_i |dO_i v_ij|, and the error of
// D at most sum_i |dO_i| OBound_i + u (dv+4) (sum_i |dO_i o_i| + |dLSE|). The error of ds_j follows by the
// product rule. The error of a sum of n terms is at most the sum of the terms' errors plus u (n+12) times the
// sum of the terms' absolute values. This bound covers any order of summation, straight or in blocks, and
// some more factors.
//
// With a coarser format P of tensor cores, the products' operands p_j z_j and ds_j are rounded to P. In float16, which has few
// exponents, they have factors: p is multiplied by 2^15, and ds by the power of two that makes the bound B of its KV head's
// numbers less than 2^15 and at least 2^14. So their absolute errors are at most 2^-40 and 2^-39 B, with
//
//	B = (2 max_j |v_j| max_i sum |dO_i| + max |dLSE|) / (1 - Dropout)
//
// With a variant B has a factor: at most 4 or the largest derivative of a score, whichever is more.
//
// With a coarser Out, results are rounded to Out.
func (c *Case) Backward(p Precision, forward *Result, dO, dLSE []float64) *Gradients {
	g := &Gradients{
		Shape: c.Shape,
		DQ:    make([]float64, len(c.Q)), DQBound: make([]float64, len(c.Q)),
		DK: make([]float64, len(c.K)), DKBound: make([]float64, len(c.K)),
		DV: make([]float64, len(c.V)), DVBound: make([]float64, len(c.V)),
	}
	tensors := make([]*sharedSums, len(c.Tensors))
	for i := range tensors {
		tensors[i] = newSharedSums(c.Tensors[i].Len())
	}
	bias, sinks := newSharedSums(len(c.Bias.X)), newSharedSums(len(c.Sinks))
	steep := c.steepest(p)
	type task struct{ seq, head int }
	tasks := make(chan task)
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for t := range tasks {
				b := backward{c: c, p: p, g: g, steep: steep, bias: bias, sinks: sinks, tensors: tensors, forward: forward, dO: dO, dLSE: dLSE, seq: t.seq, kv: t.head}
				b.run()
			}
		})
	}
	for s := range c.Queries {
		for h := range c.KVHeads {
			tasks <- task{s, h}
		}
	}
	close(tasks)
	wg.Wait()
	u := p.Acc.Unit() + Float64.Unit()
	g.DBias, g.DBiasBound = bias.result(c.Bias.scale(), u, p.Acc.Tiny())
	p.store(g.DBias, g.DBiasBound)
	g.DSinks, g.DSinksBound = sinks.result(1, u, p.Acc.Tiny())
	for _, t := range tensors {
		sums, bounds := t.result(1, u, p.Acc.Tiny())
		p.store(sums, bounds)
		g.DTensors, g.DTensorsBound = append(g.DTensors, sums), append(g.DTensorsBound, bounds)
	}
	return g
}

// sharedSums accumulates the gradient of a bias or of sinks. All heads add to it concurrently.
type sharedSums struct {
	sync.Mutex
	sums, bounds, abs []float64 // abs: sums of absolute values
	terms             []int
}

func newSharedSums(n int) *sharedSums {
	return &sharedSums{sums: make([]float64, n), bounds: make([]float64, n), abs: make([]float64, n), terms: make([]int, n)}
}

func (b *sharedSums) add(at int, ds, dsErr float64) {
	b.sums[at] += ds
	b.bounds[at] += dsErr
	b.abs[at] += math.Abs(ds) + dsErr
	b.terms[at]++
}

// result returns the sums times scale, and their error bounds.
func (b *sharedSums) result(scale, u, tiny float64) (sums, bounds []float64) {
	for i, n := range b.terms {
		b.sums[i] *= scale
		b.bounds[i] = (b.bounds[i]+u*float64(n+12)*b.abs[i])*math.Abs(scale) + tiny
	}
	return b.sums, b.bounds
}

// backward computes the contributions of one KV head of a sequence.
type backward struct {
	c        *Case
	p        Precision
	g        *Gradients
	bias     *sharedSums
	sinks    *sharedSums
	tensors  []*sharedSums
	forward  *Result
	dO, dLSE []float64
	seq, kv  int
	steep    float64 // derivatives of scores are at most this

	uP, leastP, leastDS float64 // errors of operands of format P: relative, and absolute of p and ds

	// Sums of the absolute values of the terms of dk and dv, for the error bounds.
	dkAbs, dvAbs []float64

	qAbs, dOAbs []float64 // absolute values of a row's query and gradient
}

// absOf returns the absolute values of x, in to if its capacity suffices.
//
//go:norace
func absOf(to, x []float64) []float64 {
	to = to[:0]
	for _, v := range x {
		to = append(to, math.Abs(v))
	}
	return to
}

func (b *backward) run() {
	c := b.c
	b.dkAbs, b.dvAbs = make([]float64, c.Keys[b.seq]*c.Dim), make([]float64, c.Keys[b.seq]*c.ValueDim)
	group := c.Heads / c.KVHeads
	if b.p.P.Unit() > b.p.Acc.Unit() {
		b.uP = b.p.P.Unit()
		if b.p.P == Float16 {
			b.leastP, b.leastDS = 0x1p-40, 0x1p-39*b.bound()*b.steep
		}
	}
	for h := b.kv * group; h < (b.kv+1)*group; h++ {
		for pos := range c.Queries[b.seq] {
			b.row(pos, h)
		}
	}
	u := b.unit()
	chain := u * float64(group*c.Queries[b.seq]+12)
	for j := range c.Keys[b.seq] {
		for i, x := range b.key(b.g.DKBound, j, c.Dim) {
			b.key(b.g.DKBound, j, c.Dim)[i] = math.Abs(c.Scale)*(x+chain*b.dkAbs[j*c.Dim+i]) + b.p.Acc.Tiny()
			b.key(b.g.DK, j, c.Dim)[i] *= c.Scale
		}
		for i := range c.ValueDim {
			b.key(b.g.DVBound, j, c.ValueDim)[i] += chain*b.dvAbs[j*c.ValueDim+i] + b.p.Acc.Tiny()
		}
		b.p.store(b.key(b.g.DK, j, c.Dim), b.key(b.g.DKBound, j, c.Dim))
		b.p.store(b.key(b.g.DV, j, c.ValueDim), b.key(b.g.DVBound, j, c.ValueDim))
	}
}

// steepest returns the factor of B with the case's variant.
func (c *Case) steepest(p Precision) float64 {
	if c.Variant == nil || c.Variant.Linear() {
		return 1
	}
	most := 4.0
	for seq, queries := range c.Queries {
		for pos := range queries {
			for h := range c.Heads {
				at := sum(c.Queries[:seq]) + pos
				for j := c.First(seq, pos); j < c.Visible(seq, pos); j++ {
					s, _ := dot(row(c.Q, at, c.Heads, h, c.Dim), row(c.K, sum(c.Keys[:seq])+j, c.KVHeads, h/(c.Heads/c.KVHeads), c.Dim))
					s, off, _, _ := c.Score(seq, pos, h, j, s*c.Scale, 0, p.Acc.Unit())
					if v := c.varied(seq, pos, h, j, s, off, p.Acc.Unit()); !v.hidden {
						if slope := math.Abs(v.values[v.Slope]) + v.errors[v.Slope]; !math.IsInf(slope, 0) && slope == slope {
							most = max(most, slope)
						}
					}
				}
			}
		}
	}
	return most
}

// bound returns B of the KV head.
func (b *backward) bound() float64 {
	c := b.c
	group := c.Heads / c.KVHeads
	var value, rowSum, dLSE float64
	for j := range c.Keys[b.seq] {
		for _, x := range b.key(c.V, j, c.ValueDim) {
			value = max(value, math.Abs(x))
		}
	}
	for pos := range c.Queries[b.seq] {
		for h := b.kv * group; h < (b.kv+1)*group; h++ {
			at, sum := (sum(c.Queries[:b.seq])+pos)*c.Heads+h, 0.0
			if b.dO != nil {
				for _, x := range b.dO[at*c.ValueDim : (at+1)*c.ValueDim] {
					sum += math.Abs(x)
				}
			}
			if rowSum = max(rowSum, sum); b.dLSE != nil {
				dLSE = max(dLSE, math.Abs(b.dLSE[at]))
			}
		}
	}
	return (2*value*rowSum + dLSE) / dropout.Of(c.Dropout, c.Seed).Keep()
}

// store adds the rounding of stored numbers to their bounds.
func (p *Precision) store(x, bound []float64) {
	if p.Out.Unit() <= p.Acc.Unit() {
		return
	}
	for i, v := range x {
		most := math.Abs(v) + bound[i]
		if bound[i] += p.Out.Unit() * (most + p.Out.Tiny()); most+bound[i] > p.Out.Largest() {
			bound[i] = math.Inf(1)
		}
	}
}

func (b *backward) unit() float64 { return b.p.Acc.Unit() + Float64.Unit() }

// key returns row j of the sequence from an array in the layout of the keys.
func (b *backward) key(x []float64, j, dim int) []float64 {
	return row(x, sum(b.c.Keys[:b.seq])+j, b.c.KVHeads, b.kv, dim)
}

// row adds the contributions of one query row in one head.
//
//go:norace
func (b *backward) row(pos, head int) {
	c, u := b.c, b.unit()
	start, end := c.First(b.seq, pos), c.Visible(b.seq, pos)
	sinks := c.SinkKeys(b.seq, pos) // keys before start that the row sees, too
	n := end - start + sinks
	at := (sum(c.Queries[:b.seq])+pos)*c.Heads + head
	dq, dqBound := b.g.DQ[at*c.Dim:(at+1)*c.Dim], b.g.DQBound[at*c.Dim:(at+1)*c.Dim]
	q := c.Q[at*c.Dim : (at+1)*c.Dim]
	lse, lseErr := b.forward.LSE[at], b.forward.LSEBound[at]
	if math.IsInf(lse, -1) {
		return
	}
	if sink := c.Sink(head); !math.IsInf(sink, -1) {
		b.sink(at, head, sink, lse, lseErr)
	}
	if n <= 0 {
		return
	}
	if c.Bias.X != nil {
		b.bias.Lock()
		defer b.bias.Unlock()
	}
	for _, t := range b.tensors {
		t.Lock()
		defer t.Unlock()
	}
	dO, d, dErr := b.outGradient(at)
	most := 1.0 // weight
	if c.Variant != nil && c.Variant.Unnormalised {
		d, dErr, lse, lseErr, most = 0, 0, 0, 0, math.Inf(1)
	}
	b.qAbs, b.dOAbs = absOf(b.qAbs, q), absOf(b.dOAbs, dO)
	drops := c.drops()
	for i := range n {
		j := i
		if i >= sinks {
			j = start + i - sinks
		}
		k := b.key(c.K, j, c.Dim)
		s, sAbs := dot(q, k)
		// The conversion prevents a fused multiply-subtract, as on arm64. The forward pass rounded the
		// product, and for large scores this rounding exceeds the difference between a weight of 0 and a
		// weight of 1.
		s, sOff, slope, slopeErr := c.Score(b.seq, pos, head, j, float64(s*c.Scale), u*float64(c.Dim+4)*sAbs*math.Abs(c.Scale), u)
		var v variedScore
		if c.Variant != nil {
			if v = c.varied(b.seq, pos, head, j, s, sOff, u); v.hidden {
				continue
			}
			s, sOff = v.values[v.Score], v.errors[v.Score]
		}
		w := math.Exp(s - lse)
		eps := sOff + lseErr + u*(2*math.Abs(lse)+math.Abs(s-lse)+6)
		wErr := math.Min(w*expm1(math.Min(eps, 700))+b.p.Acc.Tiny(), most)

		var dp, dpAbs float64
		if dO != nil {
			dp, dpAbs = dot(dO, b.key(c.V, j, c.ValueDim))
		}
		z, rounded := 1.0, 0.0
		if drops {
			z, rounded = c.Kept(b.seq, pos, head, j), 4
			dp, dpAbs = z*dp, z*dpAbs
		}
		e := u*(float64(c.ValueDim+2)+rounded)*dpAbs + dErr
		e += 2 * u * (math.Abs(dp) + math.Abs(d) + e)
		ds := w * (dp - d)
		dsErr := wErr*(math.Abs(dp-d)+e) + w*e + 2*u*math.Abs(ds)
		if c.Variant != nil {
			for k := range v.Partials {
				tensor, at, by, byErr := v.partial(k)
				b.tensors[tensor].add(at, ds*by, dsErr*(math.Abs(by)+byErr)+math.Abs(ds)*byErr+2*u*math.Abs(ds*by))
			}
			by, byErr := v.values[v.Slope], v.errors[v.Slope]
			ds, dsErr = ds*by, dsErr*(math.Abs(by)+byErr)+math.Abs(ds)*(byErr+2*u*math.Abs(by))
		}
		if c.Bias.X != nil {
			b.bias.add(c.Bias.Row(b.seq, head, pos)+j, ds, dsErr)
		}
		if c.SoftCap != 0 {
			ds, dsErr = ds*slope, dsErr*(slope+slopeErr)+math.Abs(ds)*(slopeErr+2*u)
		}

		dsErr += b.uP*(math.Abs(ds)+dsErr) + b.leastDS
		wErr += b.uP*(w+wErr) + b.leastP

		dk, dkBound := b.key(b.g.DK, j, c.Dim), b.key(b.g.DKBound, j, c.Dim)
		dkAbs, k, dq, dqBound, qAbs := b.dkAbs[j*c.Dim:][:len(q)], k[:len(q)], dq[:len(q)], dqBound[:len(q)], b.qAbs[:len(q)]
		dk, dkBound = dk[:len(q)], dkBound[:len(q)]
		dsAbs := math.Abs(ds) + dsErr
		dqErr := dsErr + u*float64(n+12)*dsAbs
		for i, q := range q {
			dq[i] += ds * k[i]
			dqBound[i] += dqErr * math.Abs(k[i])
			dk[i] += ds * q
			dkBound[i] += dsErr * qAbs[i]
			dkAbs[i] += dsAbs * qAbs[i]
		}
		dv, dvBound := b.key(b.g.DV, j, c.ValueDim), b.key(b.g.DVBound, j, c.ValueDim)
		dvAbs, dOAbs := b.dvAbs[j*c.ValueDim:][:len(dO)], b.dOAbs[:len(dO)]
		dv, dvBound = dv[:len(dO)], dvBound[:len(dO)]
		zw, zErr, zAbs := z*w, z*(wErr+rounded*u*w), z*(w+wErr)
		for i, x := range dO {
			dv[i] += zw * x
			dvBound[i] += zErr * dOAbs[i]
			dvAbs[i] += zAbs * dOAbs[i]
		}
	}
	for i := range dq {
		dq[i] *= c.Scale
		dqBound[i] = dqBound[i]*math.Abs(c.Scale) + b.p.Acc.Tiny()
	}
	b.p.store(dq, dqBound)
}

// sink adds the contribution of output row at to the sink of its head. The sink acts as a score with the
// value 0.
func (b *backward) sink(at, head int, sink, lse, lseErr float64) {
	u := b.unit()
	_, d, dErr := b.outGradient(at)
	w := math.Exp(sink - lse)
	eps := 2*u*math.Abs(sink) + lseErr + u*(2*math.Abs(lse)+math.Abs(sink-lse)+6)
	wErr := math.Min(w*expm1(math.Min(eps, 700))+b.p.Acc.Tiny(), 1)
	e := dErr + 2*u*(math.Abs(d)+dErr)
	b.sinks.Lock()
	defer b.sinks.Unlock()
	b.sinks.add(head, -w*d, wErr*(math.Abs(d)+e)+w*e+2*u*w*math.Abs(d))
}

// outGradient returns dO of output row at, D, and the error bound of D.
func (b *backward) outGradient(at int) (dO []float64, d, dErr float64) {
	dv, u := b.c.ValueDim, b.unit()
	if b.dO != nil {
		dO = b.dO[at*dv : (at+1)*dv]
		var abs float64
		d, abs = dot(dO, b.forward.O[at*dv:(at+1)*dv])
		_, dErr = dot(dO, b.forward.OBound[at*dv:(at+1)*dv])
		dErr += u * float64(dv+4) * abs
	}
	if b.dLSE != nil {
		d -= b.dLSE[at]
		dErr += 2 * u * (math.Abs(b.dLSE[at]) + math.Abs(d))
	}
	return dO, d, dErr
}

// dot returns x.y and the sum of the products' absolute values.
//
//go:norace
func dot(x, y []float64) (s, abs float64) {
	var s1, abs1 float64 // two sums each: an addition waits for the one before
	for len(x) >= 4 && len(y) >= 4 {
		a, b, c, d := x[0]*y[0], x[1]*y[1], x[2]*y[2], x[3]*y[3]
		s += a + b
		s1 += c + d
		abs += math.Abs(a) + math.Abs(b)
		abs1 += math.Abs(c) + math.Abs(d)
		x, y = x[4:], y[4:]
	}
	for i, v := range x {
		s += v * y[i]
		abs += math.Abs(v * y[i])
	}
	return s + s1, abs + abs1
}
