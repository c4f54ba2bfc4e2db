package e2e

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"slices"
	"strconv"
	"time"

	la "gorgonia.org/leanattention"
	lean "gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/cmd/leanbench/measure"

	"gorgonia.org/tensor"
)

// leanEngine is the engine of package decoder in this process.
type leanEngine struct {
	network lean.Network
	open    func(lean.Options) (*lean.Engine, error)
	options lean.Options // without sizes
	done    func() error // releases the resources behind weights and options

	// State after the last prompts.
	engine               *lean.Engine
	batch, length, steps int
	prompt               time.Duration
	prompts              int // sequences whose prompts have been read
}

// openLean opens a checkpoint whose matrices have the element type s.
func openLean(dir string, s measure.Storage) (engine, error) {
	m, err := lean.Open(dir)
	if err != nil {
		return nil, err
	}
	return &leanEngine{network: m.Network(), open: m.Engine, options: lean.Options{Weights: s.Dtype, Exact: true}, done: m.Close}, nil
}

// newLean returns an engine with random weights on gpu, or on the CPU if gpu is nil. The steps are exact.
func newLean(s shape, gpu *device.GPU, chunk int) (*leanEngine, error) {
	n, err := s.network()
	if err != nil {
		return nil, err
	}
	return newRandom(n, newRandomWeights(n), lean.Options{Device: gpu, Cache: la.Float16, Chunk: chunk, Exact: true}), nil
}

// newRandom returns an engine of a network and weights.
func newRandom(n lean.Network, weights lean.Weights, o lean.Options) *leanEngine {
	open := func(o lean.Options) (*lean.Engine, error) { return lean.NewEngine(n, weights, o) }
	return &leanEngine{network: n, open: open, options: o, done: func() error { return nil }}
}

// openLeanGPU returns an engine with random weights whose values are all on the first GPU.
func openLeanGPU(s shape, chunk int) (decoder, error) {
	gpu, err := device.Open(0)
	if err != nil {
		return nil, err
	}
	e, err := newLean(s, gpu, chunk)
	if err != nil {
		return nil, errors.Join(err, gpu.Close())
	}
	e.done = gpu.Close
	return e, nil
}

// with returns another engine of the same weights, which must be closed before e.
func (e *leanEngine) with(change func(*lean.Options)) *leanEngine {
	o := e.options
	change(&o)
	return &leanEngine{network: e.network, open: e.open, options: o, done: func() error { return nil }}
}

// otherSchedules are the schedules of attention with a name in -attn.
var otherSchedules = map[string]la.Schedule{"fixed": la.FixedSplit(fixedSplits), "default": la.Unfused}

func (e *leanEngine) attending(way string) engine {
	return e.with(func(o *lean.Options) { o.Schedule = otherSchedules[way] })
}

func (e *leanEngine) fixedSplit() engine { return e.attending("fixed") }

func (e *leanEngine) mix() { e.options.Exact = false }

func (e *leanEngine) giveBack() error { return errors.Join(e.forget(), emptyPool(e.options.Device)) }

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

// begin makes an engine for batch texts of length tokens and steps more, unless there is one.
func (e *leanEngine) begin(batch, length, steps int) (err error) {
	if e.engine != nil && batch == e.batch && length == e.length && steps == e.steps {
		return nil
	}
	if err := e.forget(); err != nil {
		return err
	}
	o := e.options
	// A text of the turn before stays in the cache beside the text that continues its prompt. Pages may be partly filled.
	const page = 64
	o.Batch, o.Context, o.Tokens = batch, length+steps, batch*(length+2*(steps+1)+3*page)
	if e.engine, err = e.open(o); err != nil {
		return err
	}
	e.batch, e.length, e.steps, e.prompts = batch, length, steps, 0
	return nil
}

// running is a text that is continued.
type running struct {
	next func() (lean.Token, error, bool)
	stop func()
	ids  []int
}

// start starts texts with the prompts of sequences from first on, and waits until each has its first token.
func (e *leanEngine) start(first, tokens int) (texts []*running, took time.Duration, err error) {
	vocab := e.network.Sizes().Vocab
	var requests []lean.Request
	for i := range e.batch {
		requests = append(requests, lean.Request{Prompt: promptTokens(first+i, e.length, vocab), Tokens: tokens, Ends: []int{}})
	}
	began := time.Now()
	all, err := e.engine.StartAll(context.Background(), requests...)
	if err != nil {
		return nil, 0, err
	}
	for _, text := range all {
		t := &running{}
		t.next, t.stop = iter.Pull2(text.Tokens())
		texts = append(texts, t)
	}
	for _, t := range texts {
		if err := t.take(); err != nil {
			return nil, 0, err
		}
	}
	return texts, time.Since(began), nil
}

// take waits for the next token.
func (t *running) take() error {
	token, err, ok := t.next()
	if err == nil && !ok {
		err = errors.New("the text has ended")
	}
	t.ids = append(t.ids, token.ID)
	return err
}

// decode reads the prompts only if they differ from the prompts of the previous turn.
func (e *leanEngine) decode(batch, length, steps int) (prompt, steady time.Duration, ids []string, err error) {
	if err := e.read(batch, length, steps); err != nil {
		return 0, 0, nil, err
	}
	// The engine has read the prompts, but for a token of each. The time of the steps begins when all texts have some tokens:
	// a GPU gives the host the tokens of 1, 1, 2 and 4 steps, and then of 4 at a time.
	began := time.Now()
	texts, _, err := e.start(0, steps+1)
	if err != nil {
		return 0, 0, nil, err
	}
	take := func(tokens int) error {
		for _, t := range texts {
			for range tokens {
				if err := t.take(); err != nil {
					return err
				}
			}
		}
		return nil
	}
	const settled = 8
	timed := steps + 1
	if steps >= 2*settled {
		if err := take(settled - 1); err != nil {
			return 0, 0, nil, err
		}
		began, timed = time.Now(), timed-settled
	}
	if err := take(steps + 1 - len(texts[0].ids)); err != nil {
		return 0, 0, nil, err
	}
	for _, t := range texts {
		t.stop()
	}
	steady = time.Since(began) * time.Duration(steps) / time.Duration(timed)
	for _, id := range texts[0].ids {
		ids = append(ids, strconv.Itoa(id))
	}
	return e.prompt, steady, ids, nil
}

// read makes an engine that has read the prompts.
func (e *leanEngine) read(batch, length, steps int) error {
	if err := e.begin(batch, length, steps); err != nil || e.prompts > 0 {
		return err
	}
	took, err := e.again(1)
	e.prompt, e.prompts = took, batch
	return err
}

// again reads prompts some times and returns the total time. The first time reads the prompts of decode. The others read
// prompts that the engine has not seen.
func (e *leanEngine) again(times int) (sum time.Duration, err error) {
	for range times {
		texts, took, err := e.start(e.prompts, 1)
		if err != nil {
			return 0, err
		}
		for _, t := range texts {
			t.stop()
		}
		e.prompts += e.batch
		sum += took
	}
	return sum, nil
}

// promptReader reads prompts repeatedly.
type promptReader interface {
	// read returns the time to the tokens that follow the prompts.
	read(batch, width int) (time.Duration, error)
	close() error
}

// leanPrompts is an engine that reads prompts.
type leanPrompts struct{ *leanEngine }

func (e *leanEngine) reading(mixed bool) promptReader {
	return leanPrompts{e.with(func(o *lean.Options) { o.Exact = !mixed })}
}

func (p leanPrompts) read(batch, width int) (time.Duration, error) {
	if err := p.begin(batch, width, 0); err != nil {
		return 0, err
	}
	return p.again(1)
}

func (e *leanEngine) forget() error {
	if e.engine == nil {
		return nil
	}
	d := e.engine
	e.engine = nil
	return d.Close()
}

func (e *leanEngine) rest() error { return e.close() }

func (e *leanEngine) close() error { return errors.Join(e.forget(), e.done()) }

// promptTokens returns the same tokens as the function in opt.py.
func promptTokens(sequence, length, vocab int) []int {
	ids := make([]int, length)
	for i := range ids {
		ids[i] = 4 + (7919*i+104729*sequence)%(vocab-4)
	}
	return ids
}

// check compares the tokens of texts with the most likely tokens of steps that tell probabilities, because a speed counts only
// if the result is right.
func (e *leanEngine) check() (err error) {
	const batch, length, steps = 2, 8, 4
	other := e.with(func(*lean.Options) {})
	defer func() { err = errors.Join(err, other.close()) }()
	if err := other.read(batch, length, steps); err != nil {
		return err
	}
	texts, _, err := other.start(0, steps+1)
	if err != nil {
		return err
	}
	vocab := e.network.Sizes().Vocab
	for i, t := range texts {
		for range steps {
			if err := t.take(); err != nil {
				return err
			}
		}
		t.stop()
		for step := range t.ids {
			text, err := other.engine.Start(context.Background(), lean.Request{
				Prompt: slices.Concat(promptTokens(i, length, vocab), t.ids[:step]), Tokens: 1, Ends: []int{}, LogProbs: 3,
			})
			if err != nil {
				return err
			}
			for token, err := range text.Tokens() {
				if err == nil {
					err = isLikely(token.Likely, vocab, t.ids[step])
				}
				if err != nil {
					return fmt.Errorf("step %d, sequence %d: %w", step, i, err)
				}
			}
		}
	}
	return nil
}

// isLikely returns an error unless the token is the most likely one. Rounding may decide between almost equally likely tokens.
func isLikely(likely []lean.Likely, vocab, id int) error {
	const near = 1e-3
	most := likely[0].LogProb
	for _, x := range likely {
		if x.ID == id && x.LogProb >= most-near {
			if most <= -math.Log(float64(vocab))+1e-9 {
				return fmt.Errorf("all tokens have the probability %v", math.Exp(most))
			}
			return nil
		}
	}
	return fmt.Errorf("token %d was chosen, and the most likely are %v", id, likely)
}
