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

// Solver is a step of a solver for weights on a GPU. Weights and Gradients are tensors of float32 on this GPU, alike in shape.
type Solver struct {
	Op                 string
	GPU                *GPU
	Names              []string // of the weights
	Weights, Gradients []*Tensor
	Moments            bool

	// Kept has two moments for each weight after a first step; nil: they are 0.
	Kept *Tensor

	table, sums *Tensor
}

// Step updates all weights and moments, or with an error none. ruleOf gets the sums of the squares of the gradients, one for each
// [layers.SolverPiece] elements of a gradient.
func (s *Solver) Step(ruleOf func(sums []float64) (layers.SolverRule, error)) (err error) {
	if err := s.GPU.Enter(s.Op); err != nil {
		return err
	}
	defer s.GPU.Group.Leave()
	if s.GPU.Group.Recording() {
		return WithinRecord(s.Op, s.GPU)
	}
	kernels, err := s.GPU.Layers(s.Op)
	if err != nil {
		return err
	}
	if err := s.check(); err != nil {
		return err
	}
	fresh := s.Moments && s.Kept == nil
	defer func() { err = errors.Join(err, s.close(fresh && err != nil)) }()
	if fresh {
		if err := s.newMoments(); err != nil {
			return err
		}
	}
	sums, err := s.squares(kernels)
	if err != nil {
		return err
	}
	rule, err := ruleOf(sums)
	if err != nil {
		return err
	}
	return s.submit(func(sub *queue.Submission, o *layers.Solver) error {
		o.Rule = rule
		for _, w := range s.Weights {
			sub.Written(w.Memory)
		}
		return sub.Do(func(stream *cuda.Stream) error { return kernels.SolverUpdate(stream, o) })
	})
}

// check refuses weights that several GPUs have, and weights in the same memory.
func (s *Solver) check() error {
	spans := make([]Span, len(s.Weights))
	for i, w := range s.Weights {
		if w.Replicas != nil {
			return errs.Errorf(s.Op, errs.ErrUnsupported, "%s is replicated on several GPUs, want a tensor of one GPU", s.Names[i])
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

// newMoments makes moments of zeros.
func (s *Solver) newMoments() (err error) {
	n := 0
	for _, w := range s.Weights {
		n += 2 * padded(w.Size())
	}
	if err := CheckShape(s.Op, tensor.Float32, tensor.Shape{n}); err != nil {
		return err
	}
	if s.Kept, err = s.GPU.Alloc(s.Op, tensor.Float32, tensor.Shape{n}); err != nil {
		return err
	}
	if s.Kept.Zero(); s.Kept.broken != nil {
		return Error(s.Op, s.Kept.broken)
	}
	return nil
}

// padded returns the size of a moment, after which the next one begins: a multiple of 16 bytes.
func padded(size int) int { return (size + 3) / 4 * 4 }

// squares waits for the work that makes the gradients, and returns the sums of their squares.
func (s *Solver) squares(kernels *layers.Engine) (sums []float64, err error) {
	var table []byte
	pieces := 0
	if err := s.submit(func(_ *queue.Submission, o *layers.Solver) error {
		table, pieces = o.Bytes(), o.Pieces()
		return nil
	}); err != nil {
		return nil, err
	}
	if s.table, err = s.GPU.Alloc(s.Op, tensor.Int32, tensor.Shape{len(table) / 4}); err != nil {
		return nil, err
	}
	if s.sums, err = s.GPU.Alloc(s.Op, tensor.Int32, tensor.Shape{2 * pieces}); err != nil {
		return nil, err
	}
	if err := s.table.Fill(table); err != nil {
		return nil, TensorError(s.Op, "the table", err)
	}
	if err := s.submit(func(sub *queue.Submission, o *layers.Solver) error {
		return sub.Do(func(stream *cuda.Stream) error { return kernels.SolverSquares(stream, o) })
	}); err != nil {
		return nil, err
	}
	data := make([]byte, s.sums.Bytes())
	if err := s.sums.Read(data); err != nil {
		return nil, TensorError(s.Op, "the sums", err)
	}
	for ; len(data) > 0; data = data[8:] {
		sums = append(sums, math.Float64frombits(binary.LittleEndian.Uint64(data)))
	}
	return sums, nil
}

// close gives back the memory of the step, and the moments if they are not kept.
func (s *Solver) close(moments bool) error {
	list := []*Tensor{s.table, s.sums}
	if moments {
		list = append(list, s.Kept)
		s.Kept = nil
	}
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
			if x.G, err = s.Gradients[i].UseAs(sub, "the gradient of "+s.Names[i]); err != nil {
				return err
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
