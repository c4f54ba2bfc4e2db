package e2e

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/examples/llama"

	G "gorgonia.org/gorgonia"
)

// leanLlama is the decoder of examples/llama with random weights.
type leanLlama struct {
	config   llama.Config
	gpu      *device.GPU // nil: the CPU
	chunk    int         // rows of the graph for prompts
	mixed    bool
	schedule la.Schedule
	random   randomWeights
	weights  map[string]G.Value // keyed by name, shared by all decoders
	borrowed bool               // weights belong to another leanLlama, which frees them
	size     int64              // size of the weights, in bytes
	done     func() error       // releases what holds the weights

	// State after the last prompts. The next turn continues from this state.
	decoder             *llama.Decoder
	sequences           []*la.Sequence
	batch, length, room int
	first               []int // the tokens that follow the prompts
	prompt              time.Duration
}

// llamaChunk is the default number of rows of the graph for prompts.
const llamaChunk = 512

// openLlamaGPU returns a decoder whose values are all on the first GPU.
func openLlamaGPU(c llama.Config, chunk int) (decoder, error) {
	gpu, err := device.Open(0)
	if err != nil {
		return nil, err
	}
	e := newLeanLlama(c, gpu, chunk)
	e.done = gpu.Close
	return e, nil
}

// newLeanLlama returns a decoder on gpu, or on the CPU if gpu is nil.
func newLeanLlama(c llama.Config, gpu *device.GPU, chunk int) *leanLlama {
	if chunk == 0 {
		chunk = llamaChunk
	}
	most := c.Hidden * max(c.Vocab, c.Inner, c.Heads*c.Rotary.HeadDim)
	return &leanLlama{
		config: c, gpu: gpu, chunk: chunk, random: newRandomWeights(most), weights: make(map[string]G.Value),
		done: func() error { return nil },
	}
}

// weight returns a weight and makes it on first use.
func (e *leanLlama) weight(name string, shape ...int) (G.Value, error) {
	if w := e.weights[name]; w != nil {
		return w, nil
	}
	t, err := e.random.Tensor(name, shape...)
	if err != nil {
		return nil, err
	}
	e.size += int64(t.Size()) * int64(t.Dtype().Size())
	var w G.Value = t
	if e.gpu != nil {
		if w, err = e.gpu.Upload(t); err != nil {
			return nil, err
		}
	}
	e.weights[name] = w
	return w, nil
}

// make makes a decoder for batch sequences of the given number of tokens each.
func (e *leanLlama) make(batch, tokens, chunk int, greedy bool) (*llama.Decoder, error) {
	const page = 16 // of each sequence, the last page may be partly filled, and another page may be allocated
	rows := []int{batch}
	if chunk > batch {
		rows = append(rows, chunk)
	}
	return llama.New(e.config, e.weight, llama.Options{
		Rows: rows, Tokens: batch * (tokens + 2*page), KV: la.Float16, Device: e.gpu, Mixed: e.mixed, Greedy: greedy, Schedule: e.schedule,
	})
}

// decode reads the prompts only if they differ from the prompts of the previous turn.
func (e *leanLlama) decode(batch, length, steps int) (prompt, steady time.Duration, ids []string, err error) {
	if err := e.read(batch, length, steps); err != nil {
		return 0, 0, nil, err
	}
	ids = append(ids, strconv.Itoa(e.first[0]))
	began := time.Now()
	all, err := e.decoder.Continue(e.sequences, e.first, steps)
	if err != nil {
		return 0, 0, nil, err
	}
	steady = time.Since(began)
	for _, tokens := range all {
		ids = append(ids, strconv.Itoa(tokens[0]))
	}
	return e.prompt, steady, ids, nil
}

// read returns a decoder that has read the prompts. Each sequence has capacity for steps more tokens.
func (e *leanLlama) read(batch, length, steps int) error {
	if e.has(batch, length, steps) {
		return e.truncate(length)
	}
	if err := e.begin(batch, length, steps); err != nil {
		return err
	}
	return e.fill()
}

// has reports whether the decoder was made for batch prompts of length tokens and has capacity for steps steps.
func (e *leanLlama) has(batch, length, steps int) bool {
	return e.decoder != nil && batch == e.batch && length == e.length && steps <= e.room
}

func (e *leanLlama) truncate(length int) error {
	for _, s := range e.sequences {
		if err := s.Truncate(length); err != nil {
			return err
		}
	}
	return nil
}

// begin makes a decoder with empty sequences.
func (e *leanLlama) begin(batch, length, steps int) error {
	if err := e.forget(); err != nil {
		return err
	}
	d, err := e.make(batch, length+steps, min(e.chunk, length), true)
	if err != nil {
		return err
	}
	e.decoder, e.batch, e.length, e.room, e.sequences = d, batch, length, steps, nil
	for range batch {
		s, err := d.NewSequence()
		if err != nil {
			return err
		}
		e.sequences = append(e.sequences, s)
	}
	return nil
}

// fill reads the prompts into the empty sequences.
func (e *leanLlama) fill() error {
	e.first = nil
	began := time.Now()
	for i, s := range e.sequences {
		next := 0
		for ids := promptTokens(i, e.length, e.config.Vocab); len(ids) > 0; {
			n := min(len(ids), max(min(e.chunk, e.length), e.batch))
			tokens, err := e.decoder.Next(llama.Text{Seq: s, IDs: ids[:n]})
			if err != nil {
				return err
			}
			next, ids = tokens[0][n-1], ids[n:]
		}
		e.first = append(e.first, next)
	}
	e.prompt = time.Since(began)
	return nil
}

func (e *leanLlama) forget() error {
	if e.decoder == nil {
		return nil
	}
	d := e.decoder
	e.decoder = nil
	return d.Close()
}

func (e *leanLlama) giveBack() error {
	return errors.Join(e.forget(), emptyPool(e.gpu))
}

func (e *leanLlama) mix() { e.mixed = true }

// borrow returns another decoder that shares the weights. It must be closed before e.
func (e *leanLlama) borrow() *leanLlama {
	return &leanLlama{
		config: e.config, gpu: e.gpu, chunk: e.chunk, mixed: e.mixed, schedule: e.schedule, random: e.random, weights: e.weights, borrowed: true,
		done: func() error { return nil },
	}
}

func (e *leanLlama) fixedSplit() engine {
	other := e.borrow()
	other.schedule = la.FixedSplit(fixedSplits)
	return other
}

func (e *leanLlama) reading(mixed bool) promptReader {
	other := e.borrow()
	other.mixed = mixed
	return llamaPrompts{other}
}

// llamaPrompts reads prompts repeatedly.
type llamaPrompts struct{ e *leanLlama }

func (p llamaPrompts) read(batch, width int) (time.Duration, error) {
	var err error
	if p.e.has(batch, width, 0) {
		err = p.e.truncate(0)
	} else {
		err = p.e.begin(batch, width, 0)
	}
	if err == nil {
		err = p.e.fill()
	}
	return p.e.prompt, err
}

func (p llamaPrompts) close() error { return p.e.close() }

func (e *leanLlama) queued() float64 { return 0 }

func (e *leanLlama) close() error {
	err := e.forget()
	if e.borrowed {
		return err
	}
	for _, w := range e.weights {
		if t, ok := w.(*device.Tensor); ok {
			err = errors.Join(err, t.Free())
		}
	}
	return errors.Join(err, e.done())
}

// check verifies the size of the weights, and compares the measured decoder's tokens with the logits of a
// decoder that returns logits.
func (e *leanLlama) check() (err error) {
	const batch, length, steps = 2, 8, 4
	measured, err := e.make(batch, length+steps, length, true)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, measured.Close()) }()
	if want := llamaBytes(&e.config, 2, true); e.size != want {
		return fmt.Errorf("%d bytes of weights, and in float16 they are %d", e.size, want)
	}
	telling, err := e.make(batch, length+steps, length, false)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, telling.Close()) }()
	var texts [2][]llama.Text // of measured and of telling
	var sequences []*la.Sequence
	next := make([]int, batch)
	for i := range batch {
		for j, d := range []*llama.Decoder{measured, telling} {
			s, err := d.NewSequence()
			if err != nil {
				return err
			}
			texts[j] = append(texts[j], llama.Text{Seq: s, IDs: promptTokens(i, length, e.config.Vocab)})
		}
		sequences = append(sequences, texts[0][i].Seq)
		tokens, err := measured.Next(texts[0][i])
		if err != nil {
			return err
		}
		logits, err := telling.Step(texts[1][i])
		if err != nil {
			return err
		}
		next[i] = tokens[0][length-1]
		if err := isLargest(logits[0][length-1], next[i]); err != nil {
			return fmt.Errorf("sequence %d: %w", i, err)
		}
	}
	for step := range steps {
		for i := range next {
			texts[1][i].IDs = []int{next[i]}
		}
		logits, err := telling.Step(texts[1]...)
		if err != nil {
			return err
		}
		all, err := measured.Continue(sequences, next, 1)
		if err != nil {
			return err
		}
		for i, id := range all[0] {
			if err := isLargest(logits[i][0], id); err != nil {
				return fmt.Errorf("step %d, sequence %d: %w", step, i, err)
			}
		}
		next = all[0]
	}
	return nil
}

// llamaBytes returns the size of the weights. Each element of a matrix has element bytes. If all is false,
// llamaBytes counts only the bytes that a step reads. A step reads a negligible part of the token embedding,
// unless the embedding is also the output matrix.
func llamaBytes(c *llama.Config, element int, all bool) int64 {
	heads := (c.Heads + c.KVHeads) * c.Rotary.HeadDim
	matrices := c.Layers*c.Hidden*(2*heads+3*c.Inner) + c.Vocab*c.Hidden
	if all && !c.Tied {
		matrices += c.Vocab * c.Hidden
	}
	norms := (2*c.Layers + 1) * c.Hidden // in float32
	return int64(matrices*element + norms*4)
}
