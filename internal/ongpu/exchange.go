package ongpu

import (
	"errors"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/queue"
	"gorgonia.org/leanattention/kernels"
)

// sumPerGPU queues the sum of the members' partial sums: in a recording within the launches that make the partial
// sums, if all can.
func sumPerGPU(sub *queue.Submission, x *layers.Exchange, o *layers.AllReduce, works []memberWork) error {
	sum, fit := layers.NewSum(x, o), 0
	return sub.PerGPU(func(i int, sub *queue.Submission) error {
		if c, ok := sub.Deferred().(*layers.Megakernel); ok && sum.Fits(c, i) {
			fit++
		}
		return nil
	}, func(i int, sub *queue.Submission) error {
		if fit == len(works) {
			sum.Take(i)
			return nil
		}
		return sub.Do(func(s *cuda.Stream) error { return works[i].AllReduce(s, x, o, i) })
	})
}

// meetPerGPU queues the members' common work.
func meetPerGPU(sub *queue.Submission, x *layers.Exchange, meet func(*layers.Exchange, int, []*Work) error, works []memberWork) error {
	all := make([]*Work, len(works))
	for i := range works {
		all[i] = &works[i].Work
	}
	nothing := func(int, *queue.Submission) error { return nil }
	return sub.PerGPU(nothing, func(i int, _ *queue.Submission) error { return meet(x, i, all) })
}

// Exchange returns the memory and kernels for the members' sums, made at first use. The GPU is entered.
func (g *GPU) Exchange(op string, engines []*layers.Engine) (*layers.Exchange, error) {
	g.decoder.Lock()
	defer g.decoder.Unlock()
	if x := g.decoder.exchange.Load(); x != nil {
		return x, nil
	}
	if g.Group.Recording() {
		return nil, errs.Errorf(op, errs.ErrUnsupported, "on %v: a recording of a graph that has not run", g)
	}
	x, err := layers.NewExchange(engines, layers.ExchangeLimit)
	switch {
	case errors.Is(err, kernels.ErrNoImage), errors.Is(err, attn.ErrUnsupported):
		return nil, errs.Errorf(op, errs.ErrUnsupported, "on %v: %v", g, err)
	case err != nil:
		return nil, Error(op, err)
	}
	g.Queue.Check(x.Failed)
	g.UseExchange(x)
	return x, nil
}

// UseExchange sets the memory for the members' sums, which is closed with the GPU.
func (g *GPU) UseExchange(x *layers.Exchange) { g.decoder.exchange.Store(x) }
