package ongpu

import (
	"cmp"
	"encoding/binary"
	"errors"
	"math"
	"slices"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/queue"

	"gorgonia.org/tensor"
)

// Solver is what a solver does to weights on a GPU. Weights and Gradients are tensors of float32 on this GPU, alike in shape.
type Solver struct {
	Op                 string
	GPU                *GPU
	Names              []string // of the weights
	Weights, Gradients []*Tensor
	Moments            bool

	// Kept has two moments for each weight after a first step; nil: they are 0. Added has sums of earlier gradients if Pending is set.
	Kept, Added *Tensor
	Pending     bool

	// Ranks adds the gradients of several ranks, in Total; nil: there is one.
	Ranks Comm
	Total *Tensor

	table, sums *Tensor
	from, to    []*Tensor // gradients, and sums to which they are added; no sums: they are all
}

// begin enters the GPU, and checks the operands.
func (s *Solver) begin() (kernels *layers.Engine, err error) {
	if err := s.GPU.Enter(s.Op); err != nil {
		return nil, err
	}
	if s.from = s.Gradients; s.Pending {
		s.to = s.parts(s.Added, 1)
	}
	if s.GPU.Group.Recording() {
		err = WithinRecord(s.Op, s.GPU)
	} else if kernels, err = s.GPU.Layers(s.Op); err == nil {
		err = s.check()
	}
	if err != nil {
		s.GPU.Group.Leave()
	}
	return kernels, err
}

// Check refuses operands that other calls would refuse.
func (s *Solver) Check() error {
	if _, err := s.begin(); err != nil {
		return err
	}
	s.GPU.Group.Leave()
	return nil
}

// Step updates all weights and moments; after an error or skip, none is updated. ruleOf gets the sum of the squares of the gradients.
func (s *Solver) Step(ruleOf func(sum float64) (rule layers.SolverRule, skip bool, err error)) (err error) {
	kernels, err := s.begin()
	if err != nil {
		return err
	}
	defer s.GPU.Group.Leave()
	fresh := s.Moments && s.Kept == nil
	defer func() { err = errors.Join(err, s.close(&s.Kept, fresh && err != nil)) }()
	if fresh {
		if s.Kept, err = s.memory(2); err != nil {
			return err
		}
		if s.Kept.Zero(); s.Kept.broken != nil {
			return Error(s.Op, s.Kept.broken)
		}
	}
	if s.Ranks != nil {
		if err := s.sumOfRanks(kernels); err != nil {
			return err
		}
	}
	sum, err := s.squares(kernels)
	if err != nil {
		return err
	}
	rule, skip, err := ruleOf(sum)
	if err != nil || skip {
		return err
	}
	return s.submit(func(sub *queue.Submission, o *layers.Solver) error {
		o.Rule = rule
		return s.write(sub, s.Weights, func(stream *cuda.Stream) error { return kernels.SolverUpdate(stream, o) })
	})
}

// Add adds the gradients to those of Added, or with an error none.
func (s *Solver) Add() (err error) {
	kernels, err := s.begin()
	if err != nil {
		return err
	}
	defer s.GPU.Group.Leave()
	fresh, first := s.Added == nil, !s.Pending
	defer func() { err = errors.Join(err, s.close(&s.Added, fresh && err != nil)) }()
	if fresh {
		if s.Added, err = s.memory(1); err != nil {
			return err
		}
	}
	return s.add(kernels, s.parts(s.Added, 1), s.Gradients, first)
}

// add queues a launch that adds tensors to others, or copies them if fresh.
func (s *Solver) add(kernels *layers.Engine, to, from []*Tensor, fresh bool) error {
	s.to, s.from = to, from
	if err := s.upload(); err != nil {
		return err
	}
	return s.submit(func(sub *queue.Submission, o *layers.Solver) error {
		return s.write(sub, to, func(stream *cuda.Stream) error { return kernels.SolverAdd(stream, o, fresh) })
	})
}

// sumOfRanks makes the gradients the sums over all ranks, in memory of their own.
func (s *Solver) sumOfRanks(kernels *layers.Engine) (err error) {
	if s.Total == nil {
		if s.Total, err = s.memory(1); err != nil {
			return err
		}
		if s.Total.Zero(); s.Total.broken != nil { // what lies between parts
			err := Error(s.Op, s.Total.broken)
			return errors.Join(err, s.close(&s.Total, true))
		}
	}
	total := s.parts(s.Total, 1)
	if s.Pending {
		if err := s.add(kernels, total, s.parts(s.Added, 1), true); err != nil {
			return err
		}
	}
	if err := s.add(kernels, total, s.Gradients, !s.Pending); err != nil {
		return err
	}
	s.from, s.to = total, nil
	if err := s.GPU.Queue.Submit(func(sub *queue.Submission) error {
		m, err := s.Total.Use(sub)
		if err != nil {
			return err
		}
		return s.Ranks.Queue(&Work{Submission: sub, In: []Operand{{Memory: m}}, Out: m}, Sum, m.Len, 0)
	}); err != nil {
		return s.GPU.computeError(s.Op, err)
	}
	return nil
}

// Replace gives all weights the elements of Added, or with an error none.
func (s *Solver) Replace() error {
	kernels, err := s.begin()
	if err != nil {
		return err
	}
	defer s.GPU.Group.Leave()
	return errors.Join(s.add(kernels, s.Weights, s.parts(s.Added, 1), true), s.close(nil, false))
}

// write queues a launch that writes tensors.
func (s *Solver) write(sub *queue.Submission, all []*Tensor, launch func(*cuda.Stream) error) error {
	for _, w := range all {
		sub.Written(w.Memory)
	}
	return sub.Do(launch)
}

// New allocates Added and Kept, for other weights and moments. The content is arbitrary.
func (s *Solver) New() (err error) {
	if _, err := s.begin(); err != nil {
		return err
	}
	defer s.GPU.Group.Leave()
	if s.Added, err = s.memory(1); err == nil && s.Moments {
		s.Kept, err = s.memory(2)
	}
	return err
}

// Parts returns the moments of each weight in Kept, and what Added has for each weight.
func (s *Solver) Parts() (moments, added []*Tensor) {
	if s.Kept != nil {
		moments = s.parts(s.Kept, 2)
	}
	if s.Added != nil {
		added = s.parts(s.Added, 1)
	}
	return moments, added
}

// parts returns the parts of a tensor of [Solver.memory].
func (s *Solver) parts(of *Tensor, each int) (all []*Tensor) {
	at := 0
	for _, w := range s.Weights {
		for range each {
			all = append(all, of.part(at, w.Shape.Clone()))
			at += padded(w.Size())
		}
	}
	return all
}

// check refuses weights that several GPUs have, and weights in the same memory.
func (s *Solver) check() error {
	spans := make([]Span, len(s.Weights))
	for i, w := range s.Weights {
		if w.Replicas != nil {
			return errs.Errorf(s.Op, errs.ErrUnsupported, "%s is replicated on several GPUs, want a tensor of one GPU: open each GPU alone, and let each be a rank of package ranks", s.Names[i])
		}
	}
	if err := s.submit(func(_ *queue.Submission, o *layers.Solver) error {
		for i, w := range s.Weights {
			spans[i] = Span{s.Names[i], o.Weights[i].W.Address(), uint64(w.Bytes())}
		}
		return nil
	}); err != nil {
		return err
	}
	return Apart(s.Op, spans)
}

// Span is the memory of something with a name.
type Span struct {
	Name        string
	From, Bytes uint64
}

// Apart returns an error if two spans have memory in common.
func Apart(op string, spans []Span) error {
	spans = slices.Clone(spans)
	slices.SortStableFunc(spans, func(a, b Span) int { return cmp.Compare(a.From, b.From) })
	for i := range spans[1:] {
		if a, b := &spans[i], &spans[i+1]; b.From-a.From < a.Bytes {
			return errs.Errorf(op, errs.ErrGraph, "%s and %s are in the same memory", a.Name, b.Name)
		}
	}
	return nil
}

// memory allocates memory for tensors of all weights' sizes, some for each weight.
func (s *Solver) memory(each int) (d *Tensor, err error) {
	n := 0
	for _, w := range s.Weights {
		n += each * padded(w.Size())
	}
	if err := CheckShape(s.Op, tensor.Float32, tensor.Shape{n}); err != nil {
		return nil, err
	}
	return s.GPU.Alloc(s.Op, tensor.Float32, tensor.Shape{n})
}

// padded returns the size of a part, after which the next one begins: a multiple of 16 bytes.
func padded(size int) int { return (size + 3) / 4 * 4 }

// upload copies the table of the weights to the GPU, in place of an earlier one.
func (s *Solver) upload() (err error) {
	var table []byte
	if err := s.submit(func(_ *queue.Submission, o *layers.Solver) error {
		table = o.Bytes()
		return nil
	}); err != nil {
		return err
	}
	if s.table == nil {
		if s.table, err = s.GPU.Alloc(s.Op, tensor.Int32, tensor.Shape{len(table) / 4}); err != nil {
			return err
		}
	}
	if err := s.table.Fill(table); err != nil {
		return TensorError(s.Op, "the table", err)
	}
	return nil
}

// squares waits for the work that makes the gradients, and returns the sum of their squares.
func (s *Solver) squares(kernels *layers.Engine) (sum float64, err error) {
	if err := s.upload(); err != nil {
		return 0, err
	}
	pieces := 0
	for _, w := range s.Weights {
		pieces += (w.Size() + layers.SolverPiece - 1) / layers.SolverPiece
	}
	if s.sums, err = s.GPU.Alloc(s.Op, tensor.Int32, tensor.Shape{2 * (pieces + 1)}); err != nil {
		return 0, err
	}
	if err := s.submit(func(sub *queue.Submission, o *layers.Solver) error {
		return sub.Do(func(stream *cuda.Stream) error { return kernels.SolverSquares(stream, o) })
	}); err != nil {
		return 0, err
	}
	data := make([]byte, 8)
	if err := s.sums.part(2*pieces, tensor.Shape{2}).Read(data); err != nil {
		return 0, TensorError(s.Op, "the sums", err)
	}
	return math.Float64frombits(binary.LittleEndian.Uint64(data)), nil
}

// close gives back the memory of the call, and with drop what more there is.
func (s *Solver) close(more **Tensor, drop bool) error {
	list := []*Tensor{s.table, s.sums}
	if drop {
		list = append(list, *more)
		*more = nil
	}
	s.table, s.sums = nil, nil
	return freeAll(slices.DeleteFunc(list, func(t *Tensor) bool { return t == nil }))
}

// submit calls f with the memory of all tensors that there are.
func (s *Solver) submit(f func(*queue.Submission, *layers.Solver) error) error {
	err := s.GPU.Queue.Submit(func(sub *queue.Submission) (err error) {
		o := &layers.Solver{Weights: make([]layers.SolverWeight, len(s.Weights))}
		if s.table != nil {
			if o.Table, err = s.table.Use(sub); err != nil {
				return err
			}
		}
		if s.sums != nil {
			if o.Sums, err = s.sums.Use(sub); err != nil {
				return err
			}
		}
		at := int64(0)
		for i, w := range s.Weights {
			x := &o.Weights[i]
			x.N = w.Size()
			if x.W, err = w.UseAs(sub, s.Names[i]); err != nil {
				return err
			}
			if x.G, err = s.from[i].UseAs(sub, "the gradient of "+s.Names[i]); err != nil {
				return err
			}
			if s.to != nil {
				if x.A, err = s.to[i].UseAs(sub, "the sum of gradients of "+s.Names[i]); err != nil {
					return err
				}
			}
			if s.Kept == nil {
				continue
			}
			for _, to := range []*Mem{&x.M, &x.V} {
				if *to, err = s.Kept.UseAs(sub, "the moments"); err != nil {
					return err
				}
				to.Offset, to.Len = to.Offset+4*at, x.N
				at += int64(padded(x.N))
			}
		}
		return f(sub, o)
	})
	if err != nil {
		return EngineError(s.Op, "queue", err)
	}
	return nil
}
