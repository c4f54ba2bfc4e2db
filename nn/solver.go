package nn

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"unsafe"

	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/nocopy"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/ranks"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// AdamW is a solver for weights in host memory or on a GPU. Step t computes, with the gradient g of all weights together:
//
//	g = g / (Scale Rows)
//	h = g min(1, Clip / |g|)
//	m = Beta1 m + (1 - Beta1) h,   v = Beta2 v + (1 - Beta2) h^2
//	w = w - Rate (m / (1 - Beta1^t) / (sqrt(v / (1 - Beta2^t)) + Epsilon) + Decay w)
//
// All fields may change between steps. Usual are Beta1 0.9, Beta2 0.999, Epsilon 1e-8, Decay 0.01 and Clip 1.
//
// Small gradients are 0 in float16. So the gradient that [Backpropagate] is given for each row of a loss may be Scale in place of 1. With
// Grow, Step finds the largest scale: a Step whose gradient is not finite changes no weight and no moment, drops the gradient, halves Scale
// and returns no error. After Grow other steps in a row, Step doubles Scale, at most to 2^32. Below 2^-32 the gradient is an error, since
// then the loss is not finite.
type AdamW struct {
	Rate         float64 // 0 or more
	Beta1, Beta2 float64 // in [0, 1)
	Epsilon      float64 // more than 0
	Decay        float64 // of weights; 0 or more
	Clip         float64 // the most norm of the gradient of all weights; 0: any
	Rows         int     // of the sum that the gradient is of, if the loss is their mean; 0: 1
	Scale        float64 // of the loss; 0: 1
	Grow         int     // steps until Scale is doubled; 0: Scale stays, and a gradient that is not finite is an error

	// Ranks are processes that train one model, each with other rows. Step adds their gradients as AllReduce does. nil: there is one.
	Ranks *ranks.Comm
	solver
}

// Step updates all weights of a model, or with an error none, and no moment. The weights are in the order of the first step.
//
//   - Weights and gradients: float32 or float64, all alike, in host memory; or float32 on one GPU. The weights are whole and in row-major
//     order.
//   - The bits are the same on every run, and on a GPU those of float32 in host memory. Sums of squares have a fixed order, in float64.
//   - On a GPU: Step waits for the gradients. The update is queued.
//   - Gradients in host memory are 0 afterwards, as with Gorgonia's solvers: gorgonia.BindDualValues adds the next ones.
//   - Concurrent calls wait for each other. A solver is used by its pointer.
//   - With Ranks, all ranks begin with the same weights, have the same fields, and call Step together. The sum of all gradients has the same
//     bits on every rank, so weights stay the same. Rows are those of all ranks. A rank that can't go on calls ranks.Comm.Fail.
//   - Errors: ErrOption (fields), ErrLength (a gradient with a number that is not finite), ErrGraph (no gradient, a weight that is given
//     twice), ErrShape, ErrDType, ErrUnsupported (a layout, several GPUs, several places), ErrState (other weights than before, a copied
//     solver, another Scale than in Accumulate, a Comm that Join has not made, within device.GPU.Record), ErrRank, ErrOutOfMemory.
func (s *AdamW) Step(model []G.ValueGrad) error { return s.step("AdamW.Step", model, s.rule) }

// Accumulate adds the gradients of a run to those of earlier calls, or with an error none. The next Step adds its own gradients and takes
// the sum. So a batch may have several runs: all but the last are followed by Accumulate.
//
// For the mean over batches of different sizes, the gradients are those of the sum of the loss over rows, and Rows is the number of all
// rows of all runs that count, whose target is not -1. All else, and the errors, are as in Step. Numbers that are not finite are left to Step.
func (s *AdamW) Accumulate(model []G.ValueGrad) error {
	return s.accumulate("AdamW.Accumulate", model, s.rule)
}

func (s *AdamW) rule(title string, steps int) (solverRule, error) {
	r := solverRule{
		moments: true, rate: s.Rate, decay: s.Decay, clip: s.Clip, beta1: s.Beta1, rest1: 1 - s.Beta1, beta2: s.Beta2, rest2: 1 - s.Beta2, epsilon: s.Epsilon,
		correct1: 1 / (1 - math.Pow(s.Beta1, float64(steps))), correct2: 1 / (1 - math.Pow(s.Beta2, float64(steps))),
		rows: s.Rows, grow: s.Grow, lossScale: &s.Scale, ranks: s.Ranks,
	}
	switch {
	case !(s.Beta1 >= 0 && s.Beta1 < 1) || !(s.Beta2 >= 0 && s.Beta2 < 1):
		return r, errorf(title, errs.ErrOption, "Beta1 is %v and Beta2 %v, want both in [0, 1)", s.Beta1, s.Beta2)
	case !(s.Epsilon > 0) || math.IsInf(s.Epsilon, 1):
		return r, errorf(title, errs.ErrOption, "Epsilon is %v, want a finite number above 0", s.Epsilon)
	}
	return r, r.check(title)
}

// SGD is a solver that steps against the gradient. All else is as in [AdamW]:
//
//	g = g / (Scale Rows)
//	h = g min(1, Clip / |g|)
//	w = w - Rate (h + Decay w)
type SGD struct {
	Rate, Decay, Clip float64
	Rows              int
	Scale             float64
	Grow              int
	Ranks             *ranks.Comm
	solver
}

// Step is as [AdamW.Step].
func (s *SGD) Step(model []G.ValueGrad) error { return s.step("SGD.Step", model, s.rule) }

// Accumulate is as [AdamW.Accumulate].
func (s *SGD) Accumulate(model []G.ValueGrad) error {
	return s.accumulate("SGD.Accumulate", model, s.rule)
}

func (s *SGD) rule(title string, _ int) (solverRule, error) {
	r := solverRule{rate: s.Rate, decay: s.Decay, clip: s.Clip, rows: s.Rows, grow: s.Grow, lossScale: &s.Scale, ranks: s.Ranks}
	return r, r.check(title)
}

// Limits of a scale of the loss: those of what Grow does, and of what Scale may be.
const (
	leastScale, mostScale = 1.0 / (1 << 32), 1 << 32
	leastOption           = 1.0 / (1 << 60)
	mostOption            = 1 << 60
)

// solverRule has the numbers of a step.
type solverRule struct {
	moments                                                                           bool
	clip, scale, beta1, rest1, beta2, rest2, correct1, correct2, epsilon, rate, decay float64

	rows, grow int
	lossScale  *float64 // the solver's field
	ranks      *ranks.Comm
	skip       bool // the gradient is not finite, and the scale too large
}

// several says whether there are other ranks.
func (r *solverRule) several() bool { return r.ranks != nil && r.ranks.World().Size > 1 }

// scaleOf is the scale of the loss.
func (r *solverRule) scaleOf() float64 {
	if *r.lossScale == 0 {
		return 1
	}
	return *r.lossScale
}

func (r *solverRule) check(title string) error {
	for _, x := range []struct {
		name string
		of   float64
	}{{"Rate", r.rate}, {"Decay", r.decay}, {"Clip", r.clip}} {
		if !(x.of >= 0) || math.IsInf(x.of, 1) {
			return errorf(title, errs.ErrOption, "%s is %v, want a finite number of at least 0", x.name, x.of)
		}
	}
	if x := r.scaleOf(); !(x >= leastOption && x <= mostOption) {
		return errorf(title, errs.ErrOption, "Scale is %v, want 0, or a number from %v to %v", x, leastOption, float64(mostOption))
	}
	if r.ranks != nil && r.ranks.World().Size < 1 {
		return errorf(title, errs.ErrState, "Ranks is not from ranks.Join")
	}
	if r.rows < 0 || r.grow < 0 {
		return errorf(title, errs.ErrOption, "Rows is %d and Grow %d, want both at least 0", r.rows, r.grow)
	}
	return nil
}

// solver is the state of a solver.
type solver struct {
	mu    sync.Mutex
	mark  nocopy.Mark
	used  bool
	steps int
	kept  []kept // of the first step
	grown int    // steps since the scale of the loss changed

	// Moments, after the first step: on a GPU, or of each weight the two.
	there *ongpu.Tensor
	here  any // [][2][]float32 or [][2][]float64

	// Sums of the gradients of some runs at one scale: on a GPU, or of each weight. The memory is kept.
	runs       int
	scaled     float64
	addedThere *ongpu.Tensor
	totalThere *ongpu.Tensor // of all ranks
	addedHere  any           // [][]float32 or [][]float64
}

// kept says what a weight was in the first step.
type kept struct {
	shape tensor.Shape
	dtype tensor.Dtype
	at    *ongpu.GPU // nil: in host memory
}

// trainedWeight is a weight and its gradient.
type trainedWeight struct {
	kept
	name        string
	value, grad G.Value
}

// ruleOf checks the fields of a solver, and returns the numbers of a step.
type ruleOf func(title string, step int) (solverRule, error)

// locked checks a call and calls f: with gradients the call is a part of a step, which needs the solver's fields.
func (s *solver) locked(title string, model []G.ValueGrad, gradients bool, of ruleOf, f func([]trainedWeight, *solverRule) error) (err error) {
	defer errs.RecoverTo(prefix+title, &err)
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.used {
		s.mark.Set()
		s.used = true
	}
	if problem := s.mark.Problem("the solver", "its first Step"); problem != "" {
		return errorf(title, errs.ErrState, "%s", problem)
	}
	rule, err := of(title, s.steps+1)
	if err != nil && gradients {
		return err
	}
	if gradients && s.runs > 0 && rule.scaleOf() != s.scaled {
		return errorf(title, errs.ErrState, "Scale is %v, and was %v in an earlier run of this step", rule.scaleOf(), s.scaled)
	}
	ws, err := readModel(title, model, gradients)
	if err != nil {
		return err
	}
	if err := s.same(title, ws); err != nil {
		return err
	}
	return f(ws, &rule)
}

// remember keeps the names, shapes, types and places of the weights.
func (s *solver) remember(ws []trainedWeight) {
	if s.kept == nil {
		for i := range ws {
			s.kept = append(s.kept, ws[i].kept)
		}
	}
}

func (s *solver) step(title string, model []G.ValueGrad, of ruleOf) error {
	return s.locked(title, model, true, of, func(ws []trainedWeight, rule *solverRule) (err error) {
		switch {
		case ws[0].at != nil:
			err = s.onGPU(title, ws, rule)
		case ws[0].dtype == tensor.Float64:
			err = solve[float64](s, title, ws, rule)
		default:
			err = solve[float32](s, title, ws, rule)
		}
		if err != nil {
			return err
		}
		s.remember(ws)
		s.runs = 0
		if rule.skip {
			*rule.lossScale, s.grown = rule.scaleOf()/2, 0
			return nil
		}
		s.steps++
		if s.grown++; rule.grow > 0 && s.grown >= rule.grow {
			*rule.lossScale, s.grown = max(rule.scaleOf(), min(2*rule.scaleOf(), mostScale)), 0
		}
		return nil
	})
}

func (s *solver) accumulate(title string, model []G.ValueGrad, of ruleOf) error {
	return s.locked(title, model, true, of, func(ws []trainedWeight, rule *solverRule) (err error) {
		switch {
		case ws[0].at != nil:
			o := s.gpuOf(title, ws, rule)
			err = o.Add()
			s.addedThere = o.Added
		case ws[0].dtype == tensor.Float64:
			err = add[float64](s, title, ws)
		default:
			err = add[float32](s, title, ws)
		}
		if err != nil {
			return err
		}
		s.remember(ws)
		s.runs, s.scaled = s.runs+1, rule.scaleOf()
		return nil
	})
}

// readModel returns the weights, and the gradients if they are wanted, which are in one place and of one type.
func readModel(title string, model []G.ValueGrad, gradients bool) (ws []trainedWeight, err error) {
	if len(model) == 0 {
		return nil, errorf(title, errs.ErrGraph, "the model has no weights")
	}
	for i, n := range model {
		name := fmt.Sprintf("weight %d", i)
		node, isNode := n.(*G.Node)
		if n == nil || isNode && node == nil {
			return nil, errorf(title, errs.ErrGraph, "%s is nil", name)
		}
		if isNode {
			name = called(name, node)
		}
		w := trainedWeight{name: name, value: n.Value()}
		if w.grad = w.value; gradients {
			if w.grad, err = n.Grad(); err != nil || w.value == nil || w.grad == nil {
				return nil, errorf(title, errs.ErrGraph, "%s has no value or no gradient: run the graph of the gradients first", name)
			}
		} else if w.value == nil {
			return nil, errorf(title, errs.ErrGraph, "%s has no value", name)
		}
		w.shape, w.dtype, w.at = w.value.Shape().Clone(), w.value.Dtype(), ongpu.PlaceOf(w.value)
		if w.dtype != tensor.Float32 && (w.dtype != tensor.Float64 || w.at != nil) {
			return nil, errorf(title, errs.ErrDType, "%s is of %v, want float32, or float64 in host memory%s", name, w.dtype, toConvert(w.dtype, tensor.Float32))
		}
		switch first := append(ws, w)[0]; {
		case w.grad.Dtype() != w.dtype || w.dtype != first.dtype:
			return nil, errorf(title, errs.ErrDType, "%s is of %v, its gradient of %v, and %s of %v: want one type", name, w.dtype, w.grad.Dtype(), first.name, first.dtype)
		case !slices.Equal(w.grad.Shape(), w.shape):
			return nil, errorf(title, errs.ErrShape, "%s has shape %v, and its gradient %v", name, w.shape, w.grad.Shape())
		case ongpu.PlaceOf(w.grad) != w.at || w.at != first.at:
			return nil, errorf(title, errs.ErrUnsupported, "%s is %s, its gradient %s, and %s %s: they must be in one place", name, ongpu.InPlace(w.at, first.at), ongpu.InPlace(ongpu.PlaceOf(w.grad), first.at), first.name, ongpu.InPlace(first.at, first.at))
		}
		ws = append(ws, w)
	}
	return ws, nil
}

// same checks that the weights are those of the first step.
func (s *solver) same(title string, ws []trainedWeight) error {
	if s.kept == nil {
		return nil
	}
	if len(ws) != len(s.kept) {
		return errorf(title, errs.ErrState, "the number of weights is %d, and was %d in the first step", len(ws), len(s.kept))
	}
	for i, was := range s.kept {
		if w := &ws[i]; !slices.Equal(w.shape, was.shape) || w.dtype != was.dtype || w.at != was.at {
			return errorf(title, errs.ErrState, "%s is %v %v %s, and was %v %v %s in the first step", w.name, w.dtype, w.shape, ongpu.InPlace(w.at, was.at), was.dtype, was.shape, ongpu.InPlace(was.at, was.at))
		}
	}
	return nil
}

// scaleBy sets scale, the factor of the gradients, or skip. sum is the sum of the squares of the gradients.
func (r *solverRule) scaleBy(title string, sum float64) error {
	by := r.scaleOf() * float64(max(r.rows, 1))
	norm := math.Sqrt(sum) / by
	if math.IsNaN(norm) || math.IsInf(norm, 0) {
		if r.skip = r.grow > 0 && r.scaleOf() > leastScale; r.skip {
			return nil
		}
		return errorf(title, errs.ErrLength, "the norm of the gradient is %v: a gradient has a number that is not finite, or is too large", norm)
	}
	if r.scale = 1 / by; r.clip > 0 && norm > r.clip {
		r.scale = r.clip / norm / by
	}
	return nil
}

// hostWeight is a weight in host memory with its gradient. a is the sum of earlier gradients, to which g is added; nil: there are none.
type hostWeight[F float] struct{ w, g, a []F }

// readHost returns the weights of a model in host memory.
func readHost[F float](s *solver, title string, ws []trainedWeight) (all []hostWeight[F], err error) {
	all, spans := make([]hostWeight[F], len(ws)), make([]ongpu.Span, len(ws))
	sums, _ := s.addedHere.([][]F)
	for i := range ws {
		name, shape := ws[i].name, ws[i].shape
		t, err := ongpu.Dense(prefix+title, name, ws[i].value)
		if err != nil {
			return nil, err
		}
		if !dense.RowMajor(t) {
			return nil, errorf(title, errs.ErrUnsupported, "%s of shape %v is not in row-major order: train a clone in that order", name, shape)
		}
		if all[i].w, err = elements[F](title, name, t, shape); err != nil {
			return nil, err
		}
		if all[i].g, err = elements[F](title, "the gradient of "+name, ws[i].grad, shape); err != nil {
			return nil, err
		}
		if s.runs > 0 {
			all[i].a = sums[i]
		}
		spans[i] = ongpu.Span{Name: name, From: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(all[i].w)))), Bytes: uint64(len(all[i].w)) * uint64(unsafe.Sizeof(F(0)))}
	}
	return all, ongpu.Apart(prefix+title, spans)
}

// gradient returns elements of the gradient, in memory of its own if there are earlier gradients.
func (x *hostWeight[F]) gradient(from, to int) []F {
	if x.a == nil {
		return x.g[from:to]
	}
	sum := make([]F, to-from)
	for i, a := range x.a[from:to] {
		sum[i] = a + x.g[from+i]
	}
	return sum
}

// sumOfRanks makes the gradient the sum of all ranks' gradients of weight i, in their order.
func (x *hostWeight[F]) sumOfRanks(title string, i int, comm *ranks.Comm) (err error) {
	label := fmt.Sprintf("%s, weight %d of %d elements of %v", title, i, len(x.w), dtypeOf[F]())
	x.g, err = sumOfHosts(title, label, x.gradient(0, len(x.w)), comm)
	x.a = nil
	return err
}

// eachSolverPiece calls f for pieces of a weight, at once.
func eachSolverPiece[F float](x *hostWeight[F], f func(piece, from, to int, gradient []F)) {
	eachRow((len(x.w)+layers.SolverPiece-1)/layers.SolverPiece, layers.SolverPiece, func(piece int) {
		from := piece * layers.SolverPiece
		to := min(from+layers.SolverPiece, len(x.w))
		f(piece, from, to, x.gradient(from, to))
	})
}

// add is Accumulate for weights in host memory.
func add[F float](s *solver, title string, ws []trainedWeight) error {
	all, err := readHost[F](s, title, ws)
	if err != nil {
		return err
	}
	sums, _ := s.addedHere.([][]F)
	if sums == nil {
		sums = make([][]F, len(all))
		for i := range all {
			sums[i] = dense.Make[F](len(all[i].w))
		}
	}
	for i := range all {
		eachSolverPiece(&all[i], func(_, from, to int, g []F) { copy(sums[i][from:to], g) })
		clearElements[F](ws[i].grad.(*tensor.Dense))
	}
	s.addedHere = sums
	return nil
}

func solve[F float](s *solver, title string, ws []trainedWeight, rule *solverRule) error {
	all, err := readHost[F](s, title, ws)
	if err != nil {
		return err
	}
	if rule.several() {
		for i := range all {
			if err := all[i].sumOfRanks(title, i, rule.ranks); err != nil {
				return err
			}
		}
	}
	var sums []float64
	for i := range all {
		part := make([]float64, (len(all[i].g)+layers.SolverPiece-1)/layers.SolverPiece)
		eachSolverPiece(&all[i], func(piece, _, _ int, g []F) { part[piece] = squares(g) })
		sums = append(sums, part...)
	}
	if err := rule.scaleBy(title, foldSums(sums)); err != nil {
		return err
	}
	if !rule.skip {
		moments, _ := s.here.([][2][]F)
		if moments == nil {
			moments = newMoments(all, rule.moments)
		}
		for i := range all {
			m, v := moments[i][0], moments[i][1]
			eachSolverPiece(&all[i], func(_, from, to int, g []F) {
				if !rule.moments {
					update(rule, all[i].w[from:to], g, nil, nil)
					return
				}
				update(rule, all[i].w[from:to], g, m[from:to], v[from:to])
			})
		}
		s.here = moments
	}
	for i := range ws {
		clearElements[F](ws[i].grad.(*tensor.Dense))
	}
	return nil
}

// newMoments returns moments of zeros, or without moments none.
func newMoments[F float](all []hostWeight[F], moments bool) [][2][]F {
	list := make([][2][]F, len(all))
	for i := range all {
		if moments {
			list[i] = [2][]F{dense.Make[F](len(all[i].w)), dense.Make[F](len(all[i].w))}
		}
	}
	return list
}

// clearElements sets the elements of a tensor in any layout to 0, and no others of its memory.
func clearElements[F float](t *tensor.Dense) {
	if dense.RowMajor(t) {
		clear(dense.Elements[F](t))
		return
	}
	all, it := dense.Backing[F](t), t.Iterator()
	for i, err := it.Start(); err == nil; i, err = it.Next() {
		all[i] = 0
	}
}

// squares returns the sum of squares, in the order of the kernel.
func squares[F float](g []F) float64 {
	var sums [layers.SolverSums]float64
	for i, x := range g {
		sums[i%len(sums)] += float64(float64(x) * float64(x))
	}
	return foldSums(sums[:])
}

// foldSums returns a sum in the order of the kernels.
func foldSums(all []float64) float64 {
	var sums [layers.SolverSums]float64
	for i, x := range all {
		sums[i%len(sums)] += x
	}
	for n := len(sums) / 2; n > 0; n /= 2 {
		for i := range n {
			sums[i] += sums[i+n]
		}
	}
	return sums[0]
}

// update is the update of [layers.SolverRule]. A conversion keeps a product and a sum from being rounded as one.
func update[F float](r *solverRule, w, g, m, v []F) {
	scale, beta1, rest1, beta2, rest2 := F(r.scale), F(r.beta1), F(r.rest1), F(r.beta2), F(r.rest2)
	correct1, correct2, epsilon, rate, decay := F(r.correct1), F(r.correct2), F(r.epsilon), F(r.rate), F(r.decay)
	for i, x := range w {
		u := F(scale * g[i])
		if m != nil {
			m[i] = F(beta1*m[i]) + F(rest1*u)
			v[i] = F(beta2*v[i]) + F(rest2*F(u*u))
			u = F(correct1*m[i]) / (F(math.Sqrt(float64(F(correct2*v[i])))) + epsilon)
		}
		w[i] = x - F(rate*(u+F(decay*x)))
	}
}

// gpuOf returns what the solver does to weights on a GPU.
func (s *solver) gpuOf(title string, ws []trainedWeight, rule *solverRule) *ongpu.Solver {
	o := &ongpu.Solver{Op: prefix + title, GPU: ws[0].at, Moments: rule.moments, Kept: s.there, Added: s.addedThere, Total: s.totalThere, Pending: s.runs > 0}
	for i := range ws {
		w := &ws[i]
		o.Names, o.Weights, o.Gradients = append(o.Names, w.name), append(o.Weights, ongpu.Must(w.value)), append(o.Gradients, ongpu.Must(w.grad))
	}
	return o
}

// onGPU is solve for weights on a GPU.
func (s *solver) onGPU(title string, ws []trainedWeight, rule *solverRule) error {
	o := s.gpuOf(title, ws, rule)
	if rule.several() {
		o.Ranks = rule.ranks.Internal()
	}
	err := o.Step(func(sum float64) (layers.SolverRule, bool, error) {
		if err := rule.scaleBy(title, sum); err != nil || rule.skip {
			return layers.SolverRule{}, rule.skip, err
		}
		f := func(x float64) float32 { return float32(x) }
		return layers.SolverRule{
			Moments: rule.moments, Scale: f(rule.scale), Beta1: f(rule.beta1), Rest1: f(rule.rest1), Beta2: f(rule.beta2), Rest2: f(rule.rest2),
			Correct1: f(rule.correct1), Correct2: f(rule.correct2), Epsilon: f(rule.epsilon), Rate: f(rule.rate), Decay: f(rule.decay),
		}, false, nil
	})
	s.there, s.totalThere = o.Kept, o.Total
	return err
}

var (
	_ G.Solver = (*AdamW)(nil)
	_ G.Solver = (*SGD)(nil)
)
