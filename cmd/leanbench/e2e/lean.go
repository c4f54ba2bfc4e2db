package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/examples/opt/model"
	"gorgonia.org/leanattention/examples/opt/sample"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// leanEngine is the decoder of examples/opt in this process.
type leanEngine struct {
	weights *model.Weights
	options model.Options
	done    func() error // releases the resources behind weights and options

	// State after the last prompts. The next turn continues from this state.
	decoder       *model.Decoder
	batch, length int
	first         []int // the tokens that follow the prompts
	prompt        time.Duration
}

// openLean loads a checkpoint and keeps the weights in the checkpoint's element type s.
func openLean(dir string, s measure.Storage, linear model.Linear) (engine, error) {
	folder, err := hf.Open(dir)
	if err != nil {
		return nil, err
	}
	weights, err := model.Load(folder)
	if err != nil {
		return nil, errors.Join(err, folder.Close())
	}
	if n, stored := weights.Bytes(), weightBytes(weights.Config(), s); n != stored {
		return nil, errors.Join(fmt.Errorf("%s: %d bytes of weights, and in %s they are %d", dir, n, s.Name, stored), folder.Close())
	}
	return &leanEngine{weights: weights, options: model.Options{Linear: linear}, done: folder.Close}, nil
}

// weightBytes returns the size of a decoder's weights. Matrices are stored in s, and vectors in float32.
func weightBytes(c hf.Config, s measure.Storage) (n int64) {
	for w := range c.Weights() {
		size := s.Size
		if len(w.Shape) == 1 {
			size = 4
		}
		n += int64(elements(w.Shape) * size)
	}
	return n
}

// decode reads the prompts only if they differ from the prompts of the previous turn.
func (e *leanEngine) decode(batch, length, steps int) (prompt, steady time.Duration, ids []string, err error) {
	if err := e.read(batch, length, steps); err != nil {
		return 0, 0, nil, err
	}
	d, next := e.decoder, slices.Clone(e.first)
	ids = append(ids, strconv.Itoa(next[0]))
	began := time.Now()
	if e.options.Greedy { // no host work between two steps
		chosen, err := d.Continue(next, steps)
		if err != nil {
			return 0, 0, nil, err
		}
		took := time.Since(began)
		for _, now := range chosen {
			if now[0] < 0 {
				return 0, 0, nil, fmt.Errorf("a step chose no token")
			}
			ids = append(ids, strconv.Itoa(now[0]))
		}
		return e.prompt, took, ids, nil
	}
	for range steps {
		if err := d.Step(next); err != nil {
			return 0, 0, nil, err
		}
		if err := e.choose(next); err != nil {
			return 0, 0, nil, err
		}
		ids = append(ids, strconv.Itoa(next[0]))
	}
	return e.prompt, time.Since(began), ids, nil
}

// read returns a decoder that has read the prompts. Each sequence has capacity for steps more tokens.
func (e *leanEngine) read(batch, length, steps int) error {
	if e.decoder != nil && batch == e.batch && length == e.length && e.options.Capacity[0] == length+steps {
		for i := range batch {
			if err := e.decoder.Truncate(i, length); err != nil {
				return err
			}
		}
		return nil
	}
	if err := e.forget(); err != nil {
		return err
	}
	e.options.Capacity = nil
	prompts := make([][]int, batch)
	for i := range prompts {
		prompts[i] = promptTokens(i, length, e.weights.Config().VocabSize)
		e.options.Capacity = append(e.options.Capacity, length+steps)
	}
	d, err := e.weights.NewDecoder(e.options)
	if err != nil {
		return err
	}
	e.decoder, e.batch, e.length, e.first = d, batch, length, make([]int, batch)
	began := time.Now()
	if err := d.Prefill(context.Background(), prompts, nil); err != nil {
		return err
	}
	if err := e.choose(e.first); err != nil {
		return err
	}
	e.prompt = time.Since(began)
	return nil
}

// again reads the prompts another times times and returns the total time.
func (e *leanEngine) again(times int) (time.Duration, error) {
	prompts := make([][]int, e.batch)
	for i := range prompts {
		prompts[i] = promptTokens(i, e.length, e.weights.Config().VocabSize)
	}
	var sum time.Duration
	for range times {
		for i := range prompts {
			if err := e.decoder.Truncate(i, 0); err != nil {
				return 0, err
			}
		}
		began := time.Now()
		if err := e.decoder.Prefill(context.Background(), prompts, nil); err != nil {
			return 0, err
		}
		if err := e.choose(e.first); err != nil { // waits for the prompts to finish
			return 0, err
		}
		sum += time.Since(began)
	}
	return sum, nil
}

// choose sets next to the most likely token of each sequence.
func (e *leanEngine) choose(next []int) error {
	if err := mostLikely(e.decoder, e.options, next); err != nil {
		return err
	}
	for i, id := range next {
		if id < 0 || id >= e.weights.Config().VocabSize {
			return fmt.Errorf("sequence %d goes on with token %d, which the model does not have", i, id)
		}
	}
	return nil
}

// largest sets next to the tokens with the largest logits, as the opt command does.
func largest(d *model.Decoder, next []int) error {
	greedy, err := sample.New(sample.Config{TopP: 1})
	if err != nil {
		return err
	}
	for i := range next {
		if next[i], err = greedy.Next(d.Logits(i)); err != nil {
			return err
		}
	}
	return nil
}

func (e *leanEngine) forget() error {
	if e.decoder == nil {
		return nil
	}
	d := e.decoder
	e.decoder = nil
	return d.Close()
}

// promptTokens returns the same tokens as the function in opt.py.
func promptTokens(sequence, length, vocab int) []int {
	ids := make([]int, length)
	for i := range ids {
		ids[i] = 4 + (7919*i+104729*sequence)%(vocab-4)
	}
	return ids
}

func (e *leanEngine) close() error { return errors.Join(e.forget(), e.done()) }
