package e2e

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/cmd/leanbench/measure"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/examples/opt/model"

	"gorgonia.org/tensor"
)

// openLeanGPU returns a decoder with random weights whose values are all on the first GPU.
func openLeanGPU(c hf.Config, chunk int) (optDecoder, error) {
	gpu, err := device.Open(0)
	if err != nil {
		return nil, err
	}
	e, err := newLeanGPU(c, gpu, chunk)
	if err != nil {
		return nil, errors.Join(err, gpu.Close())
	}
	e.done = gpu.Close
	return e, nil
}

// newLeanGPU returns a decoder on gpu, or on the CPU if gpu is nil.
func newLeanGPU(c hf.Config, gpu *device.GPU, chunk int) (leanGPU, error) {
	weights, err := model.Load(newRandomModel(c))
	if err != nil {
		return leanGPU{}, err
	}
	if n, want := weights.Bytes(), weightBytes(c, measure.StoreF16); n != want {
		return leanGPU{}, fmt.Errorf("%d bytes of weights, and in float16 they are %d", n, want)
	}
	options := model.Options{Device: gpu, Cache: la.Float16, Chunk: chunk}
	return leanGPU{&leanEngine{weights: weights, options: greedy(options), done: func() error { return nil }}}, nil
}

// leanGPU is the decoder of examples/opt on a GPU.
type leanGPU struct{ *leanEngine }

func (e leanGPU) attending(way string) engine {
	o := e.options
	o.Attention, o.Schedule, _ = model.AttentionNamed(way)
	return &leanEngine{weights: e.weights, options: o, done: func() error { return nil }}
}

func (e leanGPU) fixedSplit() engine { return e.attending("fixed") }

func (e leanGPU) giveBack() error {
	return errors.Join(e.forget(), emptyPool(e.options.Device))
}

// emptyPool makes a GPU return unused pooled memory to the driver. The pool does so when an allocation
// exceeds the available memory.
func emptyPool(g *device.GPU) error {
	if g == nil {
		return nil
	}
	const more = 1 << 45 // in bytes
	for range 2 {        // the first failed allocation finds the unreferenced values
		t, err := g.NewTensor(tensor.Float32, more/4)
		if err == nil {
			return errors.Join(fmt.Errorf("%v gives 32 TB", g), t.Free())
		}
		if !errors.Is(err, la.ErrOutOfMemory) {
			return err
		}
	}
	return nil
}

func (e leanGPU) mix() { e.options.Mixed = true }

func (e leanGPU) queued() float64 {
	if e.decoder == nil {
		return 0
	}
	s := e.decoder.Stats().Decode
	return s.Attention.Seconds() / max(s.Time.Seconds(), 1e-9)
}

// check compares the measured decoder's tokens with the logits of a decoder that returns logits, because a
// speed counts only if the result is right.
func (e leanGPU) check() (err error) {
	const batch, length, steps = 2, 8, 4
	o := e.options
	o.Capacity = slices.Repeat([]int{length + steps}, batch)
	measured, err := e.weights.NewDecoder(o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, measured.Close()) }()
	telling, err := e.weights.NewDecoder(model.Options{Device: o.Device, Cache: o.Cache, Chunk: o.Chunk, Capacity: o.Capacity, Mixed: o.Mixed})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, telling.Close()) }()
	vocab := e.weights.Config().VocabSize
	next, prompts := make([]int, batch), make([][]int, batch)
	for i := range prompts {
		prompts[i] = promptTokens(i, length, vocab)
	}
	for _, d := range []*model.Decoder{measured, telling} {
		if err := d.Prefill(context.Background(), prompts, nil); err != nil {
			return err
		}
	}
	for step := range steps {
		if err := mostLikely(measured, o, next); err != nil {
			return err
		}
		for i := range next {
			if err := isLargest(telling.Logits(i), next[i]); err != nil {
				return fmt.Errorf("step %d, sequence %d: %w", step, i, err)
			}
		}
		for _, d := range []*model.Decoder{measured, telling} {
			if err := d.Step(next); err != nil {
				return err
			}
		}
	}
	return nil
}

// isLargest returns an error unless the token has the largest logit. Other tokens may have the same logit.
func isLargest(logits []float32, id int) error {
	least, most := float32(math.Inf(1)), float32(math.Inf(-1))
	for i, v := range logits {
		if f := float64(v); math.IsNaN(f) || math.IsInf(f, 0) {
			return fmt.Errorf("logit %d is %v", i, v)
		}
		least, most = min(least, v), max(most, v)
	}
	switch {
	case id < 0 || id >= len(logits):
		return fmt.Errorf("token %d of %d was chosen", id, len(logits))
	case least == most:
		return fmt.Errorf("all logits are %v", most)
	case logits[id] < most:
		return fmt.Errorf("token %d was chosen, whose logit is %v, and the largest is %v", id, logits[id], most)
	}
	return nil
}
