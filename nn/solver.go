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

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// AdamW is a solver for weights in host memory or on a GPU. Step t computes, with the gradient g of all weights w together:
//
//	h = g min(1, Clip / |g|)
//	m = Beta1 m + (1 - Beta1) h,   v = Beta2 v + (1 - Beta2) h^2
//	w = w - Rate (m / (1 - Beta1^t) / (sqrt(v / (1 - Beta2^t)) + Epsilon) + Decay w)
//
// All fields may change between steps. Usual are Beta1 0.9, Beta2 0.999, Epsilon 1e-8, Decay 0.01 and Clip 1.
type AdamW struct {
	Rate         float64 // 0 or more
	Beta1, Beta2 float64 // in [0, 1)
	Epsilon      float64 // more than 0
	Decay        float64 // of weights; 0 or more
	Clip         float64 // the most norm of the gradient of all weights; 0: any
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
//   - Errors: ErrOption (fields), ErrLength (a gradient with a number that is not finite), ErrGraph (no gradient, a weight that is given
//     twice), ErrShape, ErrDType, ErrUnsupported (a layout, several GPUs, several places), ErrState (other weights than before, a copied
//     solver, within device.GPU.Record), ErrOutOfMemory.
func (s *AdamW) Step(model []G.ValueGrad) error {
	return s.step("AdamW.Step", model, func(steps int) (solverRule, error) {
		r := solverRule{
			moments: true, rate: s.Rate, decay: s.Decay, clip: s.Clip, beta1: s.Beta1, rest1: 1 - s.Beta1, beta2: s.Beta2, rest2: 1 - s.Beta2, epsilon: s.Epsilon,
			correct1: 1 / (1 - math.Pow(s.Beta1, float64(steps))), correct2: 1 / (1 - math.Pow(s.Beta2, float64(steps))),
		}
		switch {
		case !(s.Beta1 >= 0 && s.Beta1 < 1) || !(s.Beta2 >= 0 && s.Beta2 < 1):
			return r, errorf("AdamW.Step", errs.ErrOption, "Beta1 is %v and Beta2 %v, want both in [0, 1)", s.Beta1, s.Beta2)
		case !(s.Epsilon > 0) || math.IsInf(s.Epsilon, 1):
			return r, errorf("AdamW.Step", errs.ErrOption, "Epsilon is %v, want a finite number above 0", s.Epsilon)
		}
		return r, nil
	})
}

// SGD is a solver that steps against the gradient. All else is as in [AdamW]:
//
//	h = g min(1, Clip / |g|)
//	w = w - Rate (h + Decay w)
type SGD struct {
	Rate, Decay, Clip float64
	solver
}

// Step is as [AdamW.Step].
func (s *SGD) Step(model []G.ValueGrad) error {
	return s.step("SGD.Step", model, func(int) (solverRule, error) {
		return solverRule{rate: s.Rate, decay: s.Decay, clip: s.Clip}, nil
	})
}

// solverRule has the numbers of a step.
type solverRule struct {
	moments                                                                           bool
	clip, scale, beta1, rest1, beta2, rest2, correct1, correct2, epsilon, rate, decay float64
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
	return nil
}

// solver is the state of a solver.
type solver struct {
	mu    sync.Mutex
	mark  nocopy.Mark
	used  bool
	steps int
	kept  []kept // of the first step

	// Moments, after the first step: on a GPU, or of each weight the two.
	there *ongpu.Tensor
	here  any // [][2][]float32 or [][2][]float64
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

func (s *solver) step(title string, model []G.ValueGrad, ruleOf func(steps int) (solverRule, error)) (err error) {
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
	rule, err := ruleOf(s.steps + 1)
	if err == nil {
		err = rule.check(title)
	}
	if err != nil {
		return err
	}
	ws, err := readModel(title, model)
	if err != nil {
		return err
	}
	if err := s.same(title, ws); err != nil {
		return err
	}
	switch {
	case ws[0].at != nil:
		err = s.onGPU(title, ws, &rule)
	case ws[0].dtype == tensor.Float64:
		err = solve[float64](s, title, ws, &rule)
	default:
		err = solve[float32](s, title, ws, &rule)
	}
	if err != nil {
		return err
	}
	if s.kept == nil {
		for i := range ws {
			s.kept = append(s.kept, ws[i].kept)
		}
	}
	s.steps++
	return nil
}

// readModel returns the weights and gradients, which are in one place and of one type.
func readModel(title string, model []G.ValueGrad) (ws []trainedWeight, err error) {
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
		if w.grad, err = n.Grad(); err != nil || w.value == nil || w.grad == nil {
			return nil, errorf(title, errs.ErrGraph, "%s has no value or no gradient: run the graph of the gradients first", name)
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

// scaleBy sets the factor of the gradients, whose squares have these sums.
func (r *solverRule) scaleBy(title string, sums []float64) error {
	sum := 0.0
	for _, x := range sums {
		sum += x
	}
	norm := math.Sqrt(sum)
	if math.IsNaN(norm) || math.IsInf(norm, 0) {
		return errorf(title, errs.ErrLength, "the norm of the gradient is %v: a gradient has a number that is not finite, or is too large", norm)
	}
	if r.scale = 1; r.clip > 0 && norm > r.clip {
		r.scale = r.clip / norm
	}
	return nil
}

func solve[F float](s *solver, title string, ws []trainedWeight, rule *solverRule) error {
	type weight struct{ w, g []F }
	all, spans := make([]weight, len(ws)), make([]ongpu.Span, len(ws))
	for i := range ws {
		name, shape := ws[i].name, ws[i].shape
		t, err := ongpu.Dense(prefix+title, name, ws[i].value)
		if err != nil {
			return err
		}
		if !dense.RowMajor(t) {
			return errorf(title, errs.ErrUnsupported, "%s of shape %v is not in row-major order: train a clone in that order", name, shape)
		}
		if all[i].w, err = elements[F](title, name, t, shape); err != nil {
			return err
		}
		if all[i].g, err = elements[F](title, "the gradient of "+name, ws[i].grad, shape); err != nil {
			return err
		}
		spans[i] = ongpu.Span{Name: name, From: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(all[i].w)))), Bytes: uint64(len(all[i].w)) * uint64(unsafe.Sizeof(F(0)))}
	}
	if err := ongpu.Apart(prefix+title, spans); err != nil {
		return err
	}
	var sums []float64
	for i := range all {
		g := all[i].g
		part := make([]float64, (len(g)+layers.SolverPiece-1)/layers.SolverPiece)
		eachRow(len(part), layers.SolverPiece, func(row int) {
			part[row] = squares(g[row*layers.SolverPiece : min((row+1)*layers.SolverPiece, len(g))])
		})
		sums = append(sums, part...)
	}
	if err := rule.scaleBy(title, sums); err != nil {
		return err
	}
	moments, _ := s.here.([][2][]F)
	if moments == nil {
		moments = make([][2][]F, len(all))
		for i := range all {
			if rule.moments {
				moments[i] = [2][]F{dense.Make[F](len(all[i].w)), dense.Make[F](len(all[i].w))}
			}
		}
	}
	for i := range all {
		w, g, m, v := all[i].w, all[i].g, moments[i][0], moments[i][1]
		eachPiece(len(w), func(from, to int) {
			if !rule.moments {
				update(rule, w[from:to], g[from:to], nil, nil)
				return
			}
			update(rule, w[from:to], g[from:to], m[from:to], v[from:to])
		})
	}
	for i := range ws {
		clearElements[F](ws[i].grad.(*tensor.Dense))
	}
	s.here = moments
	return nil
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

// onGPU is solve for weights on a GPU.
func (s *solver) onGPU(title string, ws []trainedWeight, rule *solverRule) error {
	o := ongpu.Solver{Op: prefix + title, GPU: ws[0].at, Moments: rule.moments, Kept: s.there}
	for i := range ws {
		w := &ws[i]
		o.Names, o.Weights, o.Gradients = append(o.Names, w.name), append(o.Weights, ongpu.Must(w.value)), append(o.Gradients, ongpu.Must(w.grad))
	}
	err := o.Step(func(sums []float64) (layers.SolverRule, error) {
		if err := rule.scaleBy(title, sums); err != nil {
			return layers.SolverRule{}, err
		}
		f := func(x float64) float32 { return float32(x) }
		return layers.SolverRule{
			Moments: rule.moments, Scale: f(rule.scale), Beta1: f(rule.beta1), Rest1: f(rule.rest1), Beta2: f(rule.beta2), Rest2: f(rule.rest2),
			Correct1: f(rule.correct1), Correct2: f(rule.correct2), Epsilon: f(rule.epsilon), Rate: f(rule.rate), Decay: f(rule.decay),
		}, nil
	})
	s.there = o.Kept
	return err
}

var (
	_ G.Solver = (*AdamW)(nil)
	_ G.Solver = (*SGD)(nil)
)
