package model

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/ranks"

	"gorgonia.org/tensor"
)

// Attention names an implementation of the attention node.
type Attention int

const (
	Lean    Attention = iota // leanattention.CachedAttention on a paged cache
	Default                  // Gorgonia's own nodes over a fixed capacity; on a GPU, where they don't run, leanattention.Unfused
	Fused                    // Gorgonia's own nodes over the whole text, without a cache, rewritten by rewrite.Fuse
)

// AttentionNamed returns the attention of a flag's value: lean; fixed and head, which are Lean with FlashDecoding's
// schedule (8 splits of every head's keys) or FlashAttention-2's; default, or fused.
func AttentionNamed(name string) (a Attention, s la.Schedule, known bool) {
	switch name {
	case "lean":
		return Lean, la.StreamK, true
	case "fixed":
		return Lean, la.FixedSplit(8), true
	case "head":
		return Lean, la.PerHead, true
	case "default":
		return Default, la.StreamK, true
	case "fused":
		return Fused, la.StreamK, true
	}
	return 0, la.StreamK, false
}

// Linear names an implementation of the linear layers.
type Linear int

const (
	LeanLinear  Linear = iota // nn.Linear, which reads weights at the memory's speed
	StockLinear               // Gorgonia's own nodes
)

// Options is the configuration of a [Decoder].
type Options struct {
	// Capacity is the largest number of tokens of each sequence, in [1, Config.MaxPositions].
	Capacity []int

	// ForkTokens is the number of tokens for which [Decoder.Fork] may need pages in total, besides those of Capacity.
	ForkTokens int

	// Shared is the beginning of each sequence that another sequence has read: see [Decoder.Share]. Keys and values
	// of these tokens take no memory again. nil: nothing is shared.
	Shared []Shared

	// Chunk is the number of rows of the prompts' graph, which share one pass over the weights. Longer prompts take
	// several passes; shorter prompts compute only their rows. 0: as many as the Capacity needs, but at most
	// DefaultChunk, or CoreChunk a core, or GPUChunk on a GPU; LogitsChunk with AllLogits. [Options.ChunkBytes]
	// returns their memory.
	Chunk int

	Attention Attention
	Schedule  la.Schedule // of Lean
	Linear    Linear
	Cache     tensor.Dtype // element type of Lean's cache; zero value: float32
	Shard     la.Shard     // how several GPUs shard the cache
	Workers   int          // of Lean's attention; 0: GOMAXPROCS

	// Mixed allows linear layers to round their inputs to the weights' type, and attention its queries to the
	// cache's, if that is faster: see WithMixedPrecision of both packages.
	Mixed bool

	// Device is the GPU that computes and has the weights, the cache and all values between them; nil: host memory
	// and the CPU. The weights are copied for the first decoder that needs them, and stay until the GPU is closed.
	// Each of several GPUs has some heads of the cache and some output features of each linear layer; the first has
	// the rest.
	Device *device.GPU

	// Ranks are the processes that compute a model together, each with as many GPUs, Device, and the weights of
	// [LoadPart]; nil: this process has the whole model. All ranks must make the same decoder and the same calls. All
	// ranks continue with the tokens, or the logits, of rank 0.
	Ranks *ranks.Comm

	// Greedy chooses the most likely token where the logits are, for [Decoder.Chosen]: on a GPU only tokens are
	// downloaded then, and there are no [Decoder.Logits].
	Greedy bool

	// Choices chooses tokens where the logits are, for each sequence by its choice, with random numbers from Seed and
	// the sequence's number.
	Choices []nn.Choice
	Seed    uint64

	// Draft is the largest number of tokens of a draft that [Decoder.Verify] takes after each sequence, in [0,
	// MostDraft]; 0: none. Drafts need a graph of 1+Draft rows a sequence, which is recorded on a GPU.
	Draft int

	// AllLogits makes the prompts' graph compute the logits of every position, for [Decoder.PromptLogits], at the
	// cost of a row of the vocabulary each.
	AllLogits bool

	asWritten bool // for tests: Fused is not rewritten
}

const (
	// DefaultChunk is enough rows for the products with the weights to be bound by arithmetic on a few cores, and for
	// weights to be packed rarely. More cores read the weights no faster: each core from the seventh on adds
	// CoreChunk, up to ManyCoresChunk.
	DefaultChunk   = 384
	CoreChunk      = 64
	ManyCoresChunk = 1024
	// LogitsChunk is for rows with logits each: with a large vocabulary logits take more memory than all else.
	LogitsChunk = 128
	// GPUChunk is enough for output tiles on all multiprocessors of a GPU, and for the host to stay ahead.
	GPUChunk = 2048
)

// Stats has the work that a decoder has done.
type Stats struct {
	Prefill, Decode Phase // tokens of rejected drafts do not count as tokens of Decode
	Draft           DraftStats
	Device          string // the GPU that computed; "" if none did
}

// Phase is the work of one of the two graphs.
type Phase struct {
	Passes    int           // runs of the graph
	First     time.Duration // time of the first run, which loads kernels and allocates memory on a GPU
	Tokens    int           // tokens of the runs
	Time      time.Duration // time of the runs
	Attention time.Duration // the part of Time in the attention nodes and their cache
	Bytes     int64         // bytes that the runs had to read: weights, keys and values; 0 with [Fused]
}

// Decoder continues a batch of sequences. A Decoder is not safe for use by several goroutines at once.
type Decoder struct {
	config   hf.Config
	options  Options
	prompt   *pass // many rows
	next     *pass // a row a sequence
	verify   *pass // a row a sequence, and one for each token of a draft; nil: no drafts
	lengths  []int // tokens in the cache
	logits   [][]float32
	chosen   []int // with Greedy or Choices; -1: none
	random   []*rand.Rand
	u        []float64 // random number of each sequence's next token
	all      [][]float32
	verified []verified
	stats    Stats
	cache    cache
	closed   bool

	weights   *Weights // as the graphs have them
	stepBytes int64    // bytes of weights that a run reads
}

// pass is one graph with its attention.
type pass struct {
	graph     *graph
	attention attention
	phase     *Phase
	all       bool  // the logits of all rows are kept
	counts    []int // tokens of each sequence in a run
	first     []int // their first rows
}

// NewDecoder builds the two graphs and the cache. Close the decoder after use.
func (w *Weights) NewDecoder(o Options) (*Decoder, error) {
	if err := errors.Join(o.check(w.config), o.checkWeights(w)); err != nil {
		return nil, err
	}
	o.Chunk = o.chunk()
	o.Capacity, o.Shared = slices.Clone(o.Capacity), slices.Clone(o.Shared)
	batch := len(o.Capacity)
	d := &Decoder{
		config: w.config, options: o,
		lengths: make([]int, batch), logits: make([][]float32, batch), all: make([][]float32, batch), chosen: make([]int, batch), verified: make([]verified, batch),
	}
	for i := range d.chosen {
		d.chosen[i] = -1
		d.random = append(d.random, rand.New(rand.NewPCG(o.Seed, uint64(i))))
		d.u = append(d.u, d.random[i].Float64())
	}
	if err := d.build(w); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// check refuses options that don't fit the model or each other.
func (o *Options) check(c hf.Config) error {
	for i, n := range o.Capacity {
		if n < 1 || n > c.MaxPositions {
			return fmt.Errorf("%w: sequence %d has a capacity of %d tokens, and the model has %d positions", ErrConfig, i, n, c.MaxPositions)
		}
	}
	if err := o.checkShared(); err != nil {
		return err
	}
	if err := o.checkRanks(c); err != nil {
		return err
	}
	switch {
	case len(o.Capacity) == 0:
		return fmt.Errorf("%w: no sequences", ErrConfig)
	case o.ForkTokens < 0 || int64(o.ForkTokens) > 1<<40:
		return fmt.Errorf("%w: forks of %d tokens", ErrConfig, o.ForkTokens)
	case o.ForkTokens > 0 && !o.paged():
		return fmt.Errorf("%w: Gorgonia's own nodes have no cache that could be forked", ErrConfig)
	case o.Chunk < 0:
		return fmt.Errorf("%w: chunks of %d rows", ErrConfig, o.Chunk)
	case o.Attention < Lean || o.Attention > Fused:
		return fmt.Errorf("%w: attention %d", ErrConfig, o.Attention)
	case o.Linear != LeanLinear && o.Linear != StockLinear:
		return fmt.Errorf("%w: linear layers %d", ErrConfig, o.Linear)
	case !o.paged() && o.Cache != tensor.Dtype{} && o.Cache != tensor.Float32:
		return fmt.Errorf("%w: Gorgonia's nodes have a cache of float32 only", ErrConfig)
	case o.Attention == Fused && o.Device != nil:
		return fmt.Errorf("%w: Gorgonia's nodes have no GPU", ErrConfig)
	case o.Mixed && o.Linear != LeanLinear:
		return fmt.Errorf("%w: Gorgonia's linear layers have no mixed precision", ErrConfig)
	case o.Device != nil && o.Linear != LeanLinear:
		return fmt.Errorf("%w: Gorgonia's linear layers have no GPU", ErrConfig)
	case o.Greedy && len(o.Choices) > 0:
		return fmt.Errorf("%w: Greedy and Choices", ErrConfig)
	case len(o.Choices) > 0 && len(o.Choices) != len(o.Capacity):
		return fmt.Errorf("%w: %d choices for %d sequences", ErrConfig, len(o.Choices), len(o.Capacity))
	case slices.ContainsFunc(o.Choices, wrongChoice):
		i := slices.IndexFunc(o.Choices, wrongChoice)
		return fmt.Errorf("%w: Choices[%d] is %+v: a temperature is a finite number of 0 or more, and TopP a number", ErrConfig, i, o.Choices[i])
	case o.Draft < 0 || o.Draft > MostDraft:
		return fmt.Errorf("%w: drafts of %d tokens, outside [0, %d]", ErrConfig, o.Draft, MostDraft)
	case o.Draft > 0 && o.Attention == Fused:
		return fmt.Errorf("%w: drafts without a cache", ErrConfig)
	case o.chooses() && o.AllLogits:
		return fmt.Errorf("%w: logits of all positions, of which tokens are to be chosen", ErrConfig)
	case o.Attention != Lean && o.Schedule != la.StreamK:
		return fmt.Errorf("%w: Gorgonia's nodes have no schedule", ErrConfig)
	case o.Attention != Lean && o.Workers != 0:
		return fmt.Errorf("%w: Gorgonia's nodes have no workers to set", ErrConfig)
	}
	return nil
}

// wrongChoice reports whether a choice is invalid for a sequence.
func wrongChoice(c nn.Choice) bool {
	return !(c.Temperature >= 0) || math.IsInf(c.Temperature, 1) || math.IsNaN(c.TopP)
}

// paged reports whether keys and values are in a leanattention.Cache.
func (o *Options) paged() bool {
	return o.Attention == Lean || o.Attention == Default && o.Device != nil
}

// chooses reports whether tokens are chosen where the logits are.
func (o *Options) chooses() bool { return o.Greedy || len(o.Choices) > 0 }

func (d *Decoder) build(w *Weights) (err error) {
	defer shortage(&err)
	o, batch := &d.options, len(d.lengths)
	if o.Attention == Fused {
		d.cache = newTextCache(w.config, batch, slices.Max(o.Capacity), o.asWritten)
	} else if !o.paged() {
		d.cache = newStockCache(w.config, batch, slices.Max(o.Capacity))
	} else if c, err := newLeanCache(w.config, o); err != nil {
		return err
	} else {
		d.cache = c
		if o.Device != nil {
			d.stats.Device = o.Device.String()
		}
	}
	if o.Linear == StockLinear {
		if w, err = w.widened(); err != nil {
			return err
		}
	}
	if d.prompt, err = d.newPass(w, o.Chunk, o.AllLogits, false, &d.stats.Prefill); err != nil {
		return err
	}
	d.weights, d.stepBytes = w, w.stepBytes()
	if d.next, err = d.newPass(w, batch, false, true, &d.stats.Decode); err != nil || o.Draft == 0 {
		return err
	}
	d.verify, err = d.newPass(w, batch*(1+o.Draft), true, true, &d.stats.Decode)
	return err
}

func (d *Decoder) newPass(w *Weights, rows int, all, often bool, phase *Phase) (*pass, error) {
	a, rows, err := d.cache.newAttention(rows)
	if err != nil {
		return nil, err
	}
	selected := len(d.lengths)
	if all || rows <= selected {
		selected = 0 // all rows
	}
	var there *gpuWeights
	if d.options.Device != nil {
		if there, err = w.onGPU(d.options.Device); err != nil {
			return nil, err
		}
	}
	g, err := w.newGraph(rows, selected, often, &d.options, there, a.node, a.usedRows)
	if err != nil {
		return nil, err
	}
	batch := len(d.lengths)
	return &pass{graph: g, attention: a, phase: phase, all: all, counts: make([]int, batch), first: make([]int, batch)}, nil
}

// Prefill appends prompts[i] to sequence i, in as many passes as needed; an empty prompt leaves a sequence unchanged.
// Afterwards [Decoder.Logits] returns the logits after the prompts. progress, if not nil, is called after each pass
// with the number of tokens done. When ctx is done, Prefill returns its error after the present pass.
func (d *Decoder) Prefill(ctx context.Context, prompts [][]int, progress func(done int)) error {
	if err := d.check(prompts); err != nil {
		return err
	}
	for i := range d.all {
		d.all[i] = d.all[i][:0]
	}
	rest, done, todo := slices.Clone(prompts), 0, 0
	for _, p := range prompts {
		todo += len(p)
	}
	for done < todo {
		if err := ctx.Err(); err != nil {
			return err
		}
		d.share(rest)
		if err := d.run(d.prompt, rest); err != nil {
			return err
		}
		for i, n := range d.prompt.counts {
			rest[i] = rest[i][n:]
			done += n
		}
		if progress != nil {
			progress(done)
		}
	}
	return ctx.Err()
}

// share divides the rows of the prompts' graph among the tokens.
func (d *Decoder) share(tokens [][]int) {
	left := make([]int, len(tokens))
	for i := range tokens {
		left[i] = len(tokens[i])
	}
	d.prompt.attention.take(left, d.prompt.counts)
}

// Mix is one pass of the prompts' graph for sequences at different stages. It appends tokens[i] to sequence i, as
// [Decoder.Step] does, and as much of prompts[i] as rows remain, so that decode does not wait for another sequence's
// long prompt. Mix returns how many tokens each sequence got. -1 and an empty prompt leave a sequence unchanged; no
// sequence may have both.
func (d *Decoder) Mix(tokens []int, prompts [][]int) (taken []int, err error) {
	if len(tokens) != len(prompts) {
		return nil, fmt.Errorf("%w: %d tokens and %d prompts", ErrConfig, len(tokens), len(prompts))
	}
	next, todo := slices.Clone(prompts), 0
	for i, id := range tokens {
		if id != -1 {
			if len(prompts[i]) > 0 {
				return nil, fmt.Errorf("%w: a token and a prompt of %d for sequence %d", ErrConfig, len(prompts[i]), i)
			}
			next[i] = tokens[i : i+1]
		}
		todo += len(next[i])
	}
	if err := d.check(next); err != nil {
		return nil, err
	}
	if todo == 0 {
		return make([]int, len(tokens)), nil
	}
	d.share(next)
	for i, n := range d.prompt.counts {
		if n > 0 && tokens[i] != -1 {
			d.draw(i)
		}
	}
	if err := d.run(d.prompt, next); err != nil {
		return nil, err
	}
	return slices.Clone(d.prompt.counts), nil
}

// Step appends one token to each sequence; -1 leaves a sequence unchanged.
func (d *Decoder) Step(tokens []int) error {
	next, resting := make([][]int, len(tokens)), 0
	for i := range tokens {
		if tokens[i] == -1 {
			resting++
			continue
		}
		next[i] = tokens[i : i+1]
	}
	if err := d.check(next); err != nil || resting == len(tokens) {
		return err
	}
	for i := range next {
		if d.next.counts[i] = len(next[i]); len(next[i]) > 0 {
			d.draw(i)
		}
	}
	return d.run(d.next, next)
}

// draw draws a new random number for a sequence that is continued by a token, which has used the last one.
func (d *Decoder) draw(i int) {
	if v := &d.verified[i]; len(v.spare) > 0 {
		d.u[i], v.spare = v.spare[0], v.spare[1:]
		return
	}
	d.u[i] = d.random[i].Float64()
}

// check checks all inputs of a run, since an id outside a table would fail only in the middle of the run.
func (d *Decoder) check(tokens [][]int) error {
	if d.closed {
		return fmt.Errorf("%w: the decoder is closed", ErrConfig)
	}
	if len(tokens) != len(d.lengths) {
		return fmt.Errorf("%w: tokens for %d sequences of %d", ErrConfig, len(tokens), len(d.lengths))
	}
	for i, ts := range tokens {
		if n := d.lengths[i] + len(ts); n > d.options.Capacity[i] {
			return fmt.Errorf("%w: sequence %d would have %d tokens, and its capacity is %d", ErrConfig, i, n, d.options.Capacity[i])
		}
		for _, id := range ts {
			if id < 0 || id >= d.config.VocabSize {
				return fmt.Errorf("%w: token %d of sequence %d, and the model has tokens 0 to %d", ErrConfig, id, i, d.config.VocabSize-1)
			}
		}
	}
	return nil
}

// run computes the first p.counts[i] of tokens[i] and keeps their keys, values and logits. After an error every
// sequence has its earlier length.
func (d *Decoder) run(p *pass, tokens [][]int) error {
	return d.turn(p, func() error {
		d.fill(p, tokens)
		logits, chosen, err := p.graph.run(d.options.chooses())
		switch {
		case err != nil:
		case p == d.verify:
			d.keepVerified(p, logits, chosen)
		default:
			d.keepLogits(p, logits, chosen)
		}
		return err
	})
}

// turn is a run of a graph by compute: p.counts[i] tokens of sequence i are kept if it succeeds.
func (d *Decoder) turn(p *pass, compute func() error) error {
	began, attentionBefore := time.Now(), p.attention.spent()
	err := p.attention.step(p.counts, p.first, func() error {
		if p.graph.gpu == nil { // on a GPU the work is queued only
			defer p.graph.vm.Reset()
		}
		return compute()
	})
	if err != nil {
		return err
	}
	p.phase.Bytes += d.runBytes(p)
	for i, n := range p.counts {
		if d.lengths[i] += n; n > 0 {
			d.verified[i].rows = 0
		}
		p.phase.Tokens += n
	}
	took := time.Since(began)
	if p.phase.Passes++; p.phase.Passes == 1 {
		p.phase.First = took
	}
	p.phase.Time += took
	p.phase.Attention += p.attention.spent() - attentionBefore
	return nil
}

// Continue is a number of Steps, of which the first appends tokens and each further one the tokens that the step
// before has chosen. Continue returns the tokens that each step chose, as [Decoder.Chosen] would. It needs
// [Options].Greedy or Choices, and takes all sequences. On a GPU the host queues the next step without waiting for a
// token. After an error some steps may have been done: [Decoder.Len] shows which.
func (d *Decoder) Continue(tokens []int, steps int) (chosen [][]int, err error) {
	switch {
	case !d.options.chooses():
		return nil, fmt.Errorf("%w: tokens are chosen with Greedy or Choices only", ErrConfig)
	case steps < 1:
		return nil, fmt.Errorf("%w: %d steps", ErrConfig, steps)
	}
	next := make([][]int, len(tokens))
	for i := range tokens {
		next[i] = tokens[i : i+1]
	}
	if err := d.check(next); err != nil {
		return nil, err
	}
	for i, n := range d.lengths {
		if n+steps > d.options.Capacity[i] {
			return nil, fmt.Errorf("%w: sequence %d would have %d tokens, and its capacity is %d", ErrConfig, i, n+steps, d.options.Capacity[i])
		}
	}
	if d.next.graph.gpu != nil {
		if chosen, err = d.continueGPU(next, steps); err != nil {
			for i := range d.chosen {
				d.chosen[i] = -1
			}
		}
		return chosen, err
	}
	for range steps {
		if err := d.Step(tokens); err != nil {
			return nil, err
		}
		tokens = slices.Clone(d.chosen)
		chosen = append(chosen, tokens)
	}
	return chosen, nil
}

// fill writes the inputs of a run. Unassigned rows compute token 0 at position 0, and are ignored.
func (d *Decoder) fill(p *pass, tokens [][]int) {
	g := p.graph
	clear(g.tokens)
	for row := range g.positions {
		g.positions[row] = hf.PositionOffset
	}
	for i, n := range p.counts {
		copy(g.tokens[p.first[i]:], tokens[i][:n])
		for j := range n {
			g.positions[p.first[i]+j] = d.lengths[i] + j + hf.PositionOffset
		}
		if g.selected != nil {
			g.selected[i] = max(0, p.first[i]+n-1)
		}
	}
	if a, ok := p.attention.(*fusedAttention); ok {
		a.fill(g)
	}
	if g.gpu != nil && len(d.options.Choices) > 0 {
		d.fillChoices(p)
	}
}

// fillChoices writes how a graph chooses the tokens of its rows.
func (d *Decoder) fillChoices(p *pass) {
	g := p.graph.gpu
	for row := range g.choices {
		g.choices[row], g.randoms[row] = nn.Choice{Temperature: -1}, 0 // unassigned
	}
	if p == d.verify {
		d.fillVerified(p)
		return
	}
	for i, n := range p.counts {
		row := i
		if p.graph.selected == nil {
			row = p.first[i] + n - 1
		}
		if n > 0 {
			g.choices[row], g.randoms[row] = d.options.Choices[i], d.u[i]
		}
	}
}

// keepLogits stores the requested part of a run's logits, which no one else holds, or of the tokens chosen from them.
func (d *Decoder) keepLogits(p *pass, logits []float32, chosen []int) {
	width := d.config.VocabSize
	for i, n := range p.counts {
		if n == 0 {
			continue
		}
		if p.all {
			d.all[i] = append(d.all[i], logits[p.first[i]*width:(p.first[i]+n)*width]...)
		}
		last := i
		if p.graph.selected == nil {
			last = p.first[i] + n - 1
		}
		if chosen != nil {
			d.chosen[i] = chosen[last]
		}
		if logits == nil {
			continue
		}
		row := logits[last*width : (last+1)*width : (last+1)*width]
		d.logits[i] = row
		if d.options.chooses() {
			d.chosen[i] = d.choice(i).Choose(row, d.u[i])
		}
	}
}

// choice returns the choice of sequence i.
func (d *Decoder) choice(i int) nn.Choice {
	if d.options.Greedy {
		return nn.Choice{TopP: 1}
	}
	return d.options.Choices[i]
}

// Chosen returns the token after sequence i, with [Options].Greedy or Choices; -1 for a sequence that is empty or was
// truncated, or whose logits have no most likely token.
func (d *Decoder) Chosen(i int) int { return d.chosen[i] }

// Logits returns the model's logits for the token after sequence i, valid until the next call of a method that
// changes the sequence; nil for a sequence that is empty or was truncated.
func (d *Decoder) Logits(i int) []float32 { return d.logits[i] }

// PromptLogits returns the logits of all positions that the last Prefill appended to sequence i, one row of the
// vocabulary after the other, with [Options].AllLogits.
func (d *Decoder) PromptLogits(i int) []float32 { return d.all[i] }

// Chunk returns how many tokens of prompts a pass takes, see [Options].
func (d *Decoder) Chunk() int { return d.options.Chunk }

// Len returns the number of tokens of sequence i.
func (d *Decoder) Len(i int) int { return d.lengths[i] }

// Truncate drops all but the first tokens of sequence i, so that several texts can follow one. The sequence has no
// logits until it is continued.
func (d *Decoder) Truncate(i, tokens int) error {
	switch {
	case d.closed:
		return fmt.Errorf("%w: the decoder is closed", ErrConfig)
	case i < 0 || i >= len(d.lengths):
		return fmt.Errorf("%w: sequence %d of %d", ErrConfig, i, len(d.lengths))
	case tokens < 0 || tokens > d.lengths[i]:
		return fmt.Errorf("%w: %d tokens of sequence %d, which has %d", ErrConfig, tokens, i, d.lengths[i])
	}
	if err := d.cache.truncate(i, tokens); err != nil {
		return err
	}
	d.forget(i, tokens)
	return nil
}

// forget records the length of sequence i, and that its next token is unknown.
func (d *Decoder) forget(i, tokens int) {
	d.lengths[i], d.logits[i], d.chosen[i], d.verified[i].rows = tokens, nil, -1, 0
}

// Stats returns the work done so far.
func (d *Decoder) Stats() Stats { return d.stats }

// Close frees the cache. A second Close does nothing.
func (d *Decoder) Close() error {
	if d.closed {
		return nil
	}
	d.closed = true
	var errs []error
	for _, p := range []*pass{d.prompt, d.next, d.verify} {
		if p != nil {
			errs = append(errs, p.graph.vm.Close())
			if g := p.graph.gpu; g != nil {
				errs = append(errs, g.close())
			}
		}
	}
	if d.cache != nil {
		errs = append(errs, d.cache.Close())
	}
	return errors.Join(errs...)
}
