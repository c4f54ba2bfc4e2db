package decoder

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/decoder/tokenizer"

	G "gorgonia.org/gorgonia"
)

// Stats counts the work of an [Engine].
type Stats struct {
	Steps        int // runs of a graph
	Rows         int // tokens that the steps computed
	MostTexts    int // most texts of a step
	SharedTokens int // tokens of prompts that were not computed, since another text had the same beginning
	Preempted    int // times that a text had to wait again, since the cache was full
	Resumed      int // times that such a text had its keys and values from a file: see Options.Swap
	Shifted      int // times that a text dropped tokens, since its context was full
	Guessed      int // guesses that were computed
	Accepted     int // guesses that were right

	// The state at the time of the call.
	Live       int // texts that are computed
	Waiting    int // texts that wait for the batch or for the cache
	FreeTokens int // free capacity of the cache: neither live texts nor ended texts that are kept for sharing have it
}

// Engine continues texts with a network. Texts join and leave at any step. An Engine's methods may be called by several
// goroutines.
type Engine struct {
	network   Network
	options   Options
	tokenizer *tokenizer.Tokenizer // nil: none
	ends      []int
	weights   map[string]G.Value
	sliced    [][]*slicedWeights // of layers, see Options.TPLA: whole latent vectors, and those of each shard
	free      func() error       // the weights on a GPU
	cache     *la.Cache
	graphs    []*graph // by rows
	verify    *graph   // logits of all rows; nil: no drafts
	prompts   *graph   // for texts without cached tokens; nil: the other graphs serve these texts as well
	scores    *graph   // of LogProbs; nil: not needed yet

	mu        sync.Locker // held while a step computes or weights are loaded; engines of a GPU share one, since copies of one engine fail while another records
	scheduler scheduler
	stats     Stats
	pinned    int // pages of Pin

	// Of Save and Load:
	model       *Model // nil: made by NewEngine
	from        Weights
	name        string // "": the fingerprint is not known yet
	fingerprint [sha256.Size]byte

	queue struct { // state that other goroutines may change while a step computes
		sync.Mutex
		joined  []*Text
		running bool
		closed  bool
		err     error // of a failed engine
	}
	work sync.WaitGroup
}

// NewEngine makes an engine of a network and its weights. Close the engine after use. The weights must stay valid until then.
func NewEngine(n Network, from Weights, o Options) (*Engine, error) {
	return newEngine(n, from, nil, o)
}

// newEngine is NewEngine for the network of a model, which may be nil.
func newEngine(n Network, from Weights, m *Model, o Options) (_ *Engine, err error) {
	e := &Engine{network: n, options: o, model: m, from: from, mu: new(sync.Mutex)}
	if m != nil {
		e.tokenizer, e.ends = m.tokenizer, m.texts.ends
	}
	sizes := n.Sizes()
	if err := sizes.check(); err != nil {
		return nil, err
	}
	if err := e.options.fill(&sizes); err != nil {
		return nil, err
	}
	if _, sizes, err = e.options.shards(sizes); err != nil {
		return nil, err
	}
	e.sliced = make([][]*slicedWeights, sizes.Layers)
	if o.Device != nil && !o.several() {
		e.mu = &o.Device.Internal().Engines
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	defer func() {
		if err != nil {
			err = errors.Join(err, e.close())
		}
	}()
	o = e.options
	all := 0
	for range n.Weights() {
		all++
	}
	progress := func(done int) {
		e.mu.Unlock()
		defer e.mu.Lock()
		if o.Progress != nil {
			o.Progress(done, all)
		}
	}
	world := o.world()
	head, end := world.Part(sizes.KVHeads)
	if sizes.Latent > 0 { // each process has all latent vectors
		head, end = 0, sizes.KVHeads
	}
	config := la.CacheConfig{
		Layers: sizes.Layers, KVHeads: end - head, HeadDim: sizes.HeadDim, DType: o.Cache,
		PageSize: pageSize, Pages: (o.Tokens-1)/pageSize + 1, Device: o.Device, Shard: o.Shard,
		ValuesInKeys: sizes.Latent > 0, ValueDim: sizes.Latent, EdgeLayers: o.EdgeLayers,
	}
	if config.Window = sizes.window(); config.Window > 0 {
		config.Rewind = o.rewind()
	}
	if fewBits(o.Cache) || o.EdgeLayers != 0 { // not each format has them: an error before weights are loaded
		if _, err = config.Bytes(); err != nil {
			return nil, err
		}
	}
	if e.weights, e.free, err = load(n, from, placement{o.Device, world, o.Weights, o.byContext(end - head), o.TPLA != nil}, progress); err != nil {
		return nil, err
	}
	if e.cache, err = la.NewCache(config); err != nil {
		if sizes.Latent > 0 && o.Device != nil {
			err = fmt.Errorf("decoder: latent attention of %d and %d elements on a GPU: use the CPU: %w", sizes.Latent, sizes.HeadDim-sizes.Latent, err)
		}
		return nil, err
	}
	for _, c := range o.graphs() {
		g, err := e.newGraph(c)
		if err != nil {
			return nil, err
		}
		e.graphs = append(e.graphs, g)
	}
	if o.Draft > 0 {
		if e.verify, err = e.newGraph(graphConfig{rows: o.Batch + o.Draft, appends: o.Batch, all: true}); err != nil {
			return nil, err
		}
	}
	// Batch invariance needs one form of attention, whatever texts a step has. GPUs have one, and PromptAttention takes no cache of fewer than 16 bits.
	if sizes.Latent > 0 && o.Device == nil && o.Chunk >= leastExpanded && !o.BatchInvariant && !fewBits(o.Cache) {
		if e.prompts, err = e.newGraph(graphConfig{rows: o.Chunk, appends: o.Batch, prompts: true}); err != nil {
			return nil, err
		}
	}
	saved, err := openSwap(o.Swap, o.SwapBytes)
	if err != nil {
		return nil, err
	}
	e.scheduler = scheduler{runner: e, swap: saved, vocab: sizes.Vocab, batch: o.Batch, page: pageSize, most: o.textTokens(&sizes), pace: pace{most: o.Gap}, now: time.Now, sleep: sleep, joined: e.joined, stats: &e.stats}
	if !o.several() { // each rank would measure other times
		e.scheduler.together = aheadTime
	}
	return e, nil
}

// The engine is the scheduler's runner.

func (e *Engine) rows(all bool) int {
	if !all {
		return e.options.Chunk
	}
	if e.verify == nil {
		return 0
	}
	return e.verify.step.Tokens()
}

func (e *Engine) run(appends []la.Append, tokens []int, all, logits bool, draws []draw) (results, error) {
	g := e.verify
	if !all {
		if g = e.graphOf(len(appends), len(tokens)); e.prompts != nil && len(tokens) >= leastExpanded && begin(appends) {
			g = e.prompts
		}
	}
	return e.runGraph(g, appends, tokens, logits, draws)
}

// leastExpanded is the least rows of a step for which the keys and values of all heads of latent attention are made: fewer rows take less
// time with latent vectors. Tests set this variable.
var leastExpanded = 64

// begin reports whether no text of a step has cached tokens.
func begin(appends []la.Append) bool {
	return !slices.ContainsFunc(appends, func(a la.Append) bool { return a.Seq.Len() > 0 })
}

// graphOf returns the smallest graph for a step of some texts with some rows together.
func (e *Engine) graphOf(texts, rows int) *graph {
	return e.graphs[slices.IndexFunc(e.graphs, func(g *graph) bool {
		return rows <= g.step.Tokens() && (!g.all || rows == texts)
	})]
}

func (e *Engine) runGraph(g *graph, appends []la.Append, tokens []int, logits bool, draws []draw) (r results, err error) {
	if r, err = g.run(appends, tokens, logits, draws); err != nil {
		return r, e.failed(err)
	}
	if limit := e.network.Sizes().LogitCap; limit > 0 {
		capLogits(r.logits, limit)
	}
	return r, nil
}

func (e *Engine) mostAhead() int {
	if e.graphs[0].chosen == nil {
		return 0
	}
	return mostAhead
}

func (e *Engine) draws() bool { return e.graphs[0].drawer != nil }

func (e *Engine) ahead(appends []la.Append, tokens []int, steps int, draws []draw) (func() ([]int, error), error) {
	wait, err := e.graphOf(len(appends), len(appends)).ahead(appends, tokens, steps, draws)
	if err != nil {
		return nil, e.failed(err)
	}
	return func() ([]int, error) {
		chosen, err := wait()
		return chosen, e.failed(err)
	}, nil
}

// failed tells the other ranks of an error, so that they do not wait for this one.
func (e *Engine) failed(err error) error {
	if err != nil && e.options.several() {
		e.options.Ranks.Fail(err)
	}
	return err
}

func (e *Engine) newSequence() (*la.Sequence, error) { return e.cache.NewSequence() }

func (e *Engine) readSequence(r io.Reader) (*la.Sequence, error) { return e.cache.ReadSequence(r) }

func (e *Engine) need(appends []la.Append) (int, error) { return e.cache.Need(appends) }

func (e *Engine) freePages() int { return e.cache.Stats().FreePages }

// Start begins to continue a text. The text ends early when ctx is done. Close of the engine ends all texts.
func (e *Engine) Start(ctx context.Context, r Request) (*Text, error) {
	texts, err := e.StartAll(ctx, r)
	if err != nil {
		return nil, err
	}
	return texts[0], nil
}

// StartAll is [Engine.Start] for several texts, which join at the same step. After an error, no text has started.
func (e *Engine) StartAll(ctx context.Context, all ...Request) (texts []*Text, err error) {
	for i, r := range all {
		t, err := e.newText(ctx, r)
		if err != nil && len(all) > 1 {
			err = fmt.Errorf("request %d of %d: %w", i+1, len(all), err)
		}
		if err != nil {
			return nil, err
		}
		texts = append(texts, t)
	}
	if err := e.join(texts...); err != nil {
		return nil, err
	}
	return texts, nil
}

// join lets texts join at the next step.
func (e *Engine) join(texts ...*Text) error {
	q := &e.queue
	q.Lock()
	defer q.Unlock()
	switch {
	case q.closed:
		return fmt.Errorf("decoder: Start: engine: %w", ErrClosed)
	case q.err != nil:
		return q.err
	}
	q.joined = append(q.joined, texts...)
	if e.options.several() {
		for _, t := range texts {
			t.compute = func() { e.step() }
		}
		return nil
	}
	if !q.running && len(texts) > 0 {
		q.running = true
		e.work.Add(1)
		go e.loop()
	}
	return nil
}

// newText checks a request.
func (e *Engine) newText(ctx context.Context, r Request) (*Text, error) {
	o, vocab := &e.options, e.network.Sizes().Vocab
	fail := requestError
	switch {
	case len(r.Prompt) == 0:
		return nil, fail(ErrConfig, "the prompt has no tokens: nothing comes before what is to follow")
	case len(r.Prompt) > o.Context && !r.Cut:
		return nil, fail(ErrTooLong, "the prompt has %d tokens, and Options.Context is %d", len(r.Prompt), o.Context)
	case r.Tokens < 0:
		return nil, fail(ErrConfig, "Tokens is %d", r.Tokens)
	case r.Draft < 0 || r.Draft > o.Draft:
		return nil, fail(ErrConfig, "Draft is %d, not in [0, %d] of Options.Draft", r.Draft, o.Draft)
	case r.LogProbs < 0 || r.LogProbs > vocab:
		return nil, fail(ErrConfig, "LogProbs is %d, not in [0, %d]", r.LogProbs, vocab)
	case o.several() && ctx.Done() != nil:
		return nil, fail(ErrUnsupported, "the context can be cancelled, and %d ranks would not stop at the same step: use context.Background()", o.Ranks.World().Size)
	case len(r.Stop) > 0 && e.tokenizer == nil:
		return nil, fail(ErrConfig, "Stop has texts, and the engine has no tokenizer")
	case r.Special && e.tokenizer == nil:
		return nil, fail(ErrConfig, "Special is set, and the engine has no tokenizer")
	case slices.Contains(r.Stop, ""):
		return nil, fail(ErrConfig, "Stop has an empty text")
	}
	if err := r.checkKeep(o.Context); err != nil {
		return nil, err
	}
	for i, ids := range [][]int{r.Prompt, r.Ends} {
		for j, id := range ids {
			if id < 0 || id >= vocab {
				return nil, fail(ErrConfig, "%s[%d] is %d, not in [0, %d)", []string{"Prompt", "Ends"}[i], j, id, vocab)
			}
		}
	}
	prompt := r.cut(o.Context)
	// The last token of a text is not read.
	t := &Text{ctx: ctx, priority: r.Priority, tokens: slices.Clone(prompt), prompt: len(r.Prompt), context: o.Context + 1, most: r.Tokens, shift: r.Shift, keep: r.Keep, ends: e.ends, decoder: silent{}, stop: newStopper(r.Stop)}
	t.more = sync.NewCond(&t.mu)
	t.dropped = len(r.Prompt) - len(prompt)
	t.setLimit()
	if r.Ends != nil {
		t.ends = slices.Clone(r.Ends)
	}
	if e.tokenizer != nil {
		pieces := e.tokenizer.NewDecoder()
		pieces.Special = r.Special
		t.tokenizer, t.decoder, t.special = e.tokenizer, pieces, r.Special
	}
	if r.Constraint != nil && len(t.ends) == 0 {
		return nil, fail(ErrConfig, "Constraint is set, and no token ends the text: Ends is empty")
	}
	t.mostGuesses, t.nextGuesses = r.Draft, r.Draft
	var err error
	if t.sampler, err = newSampler(&r, vocab, prompt, e.scheduler.runner.draws()); err != nil {
		return nil, err
	}
	return t, nil
}

// requestError is the error of a field of a [Request].
func requestError(kind error, format string, args ...any) error {
	return fmt.Errorf("decoder: Request: %s: %w", fmt.Sprintf(format, args...), kind)
}

// loop computes steps until no text needs one.
func (e *Engine) loop() {
	defer e.work.Done()
	for e.step() {
	}
}

// step computes one step, and reports whether more are needed.
func (e *Engine) step() (more bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	q := &e.queue
	q.Lock()
	for _, t := range q.joined {
		e.scheduler.add(t)
	}
	q.joined = nil
	closed := q.closed
	q.Unlock()
	if closed {
		e.scheduler.fail(fmt.Errorf("decoder: engine: %w", ErrClosed))
	} else {
		e.scheduler.step()
	}
	q.Lock()
	defer q.Unlock()
	if e.scheduler.idle() && len(q.joined) == 0 {
		q.running = false
		return false
	}
	return true
}

// joined reports whether texts join at the next step.
func (e *Engine) joined() bool {
	e.queue.Lock()
	defer e.queue.Unlock()
	return len(e.queue.joined) > 0
}

// Stats returns the work done so far, and the state of the engine.
func (e *Engine) Stats() Stats {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := e.stats
	s.Live, s.Waiting, s.FreeTokens = len(e.scheduler.live), len(e.scheduler.waiting), e.freePages()*pageSize
	return s
}

// Options returns the options, with their defaults filled in.
func (e *Engine) Options() Options { return e.options }

// Close ends all texts with [ErrClosed], and frees all memory. A second Close does nothing.
func (e *Engine) Close() error {
	e.queue.Lock()
	closed := e.queue.closed
	e.queue.closed = true
	e.queue.Unlock()
	if closed {
		return nil
	}
	e.work.Wait()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.scheduler.close(fmt.Errorf("decoder: engine: %w", ErrClosed))
	return e.close()
}

func (e *Engine) close() error {
	var errs []error
	for _, g := range append(e.graphs, e.verify, e.scores, e.prompts) {
		if g != nil {
			errs = append(errs, g.close())
		}
	}
	if e.cache != nil {
		errs = append(errs, e.cache.Close())
	}
	if e.free != nil {
		errs = append(errs, e.free())
	}
	return errors.Join(errs...)
}

// mostScored is the rows of the graph of [Engine.LogProbs]: with a large vocabulary logits take more memory than all else.
const mostScored = 128

// LogProbs returns the natural logarithm of the probability of each token but the first, after the tokens before it. Texts that
// were started wait until LogProbs returns. If the cache is too full, the error is ErrCacheFull of package leanattention.
func (e *Engine) LogProbs(ctx context.Context, tokens []int) (p []float64, err error) {
	vocab := e.network.Sizes().Vocab
	if len(tokens) > e.options.Context {
		return nil, fmt.Errorf("decoder: LogProbs: %d tokens, and Options.Context is %d: %w", len(tokens), e.options.Context, ErrTooLong)
	}
	if e.options.several() && ctx.Done() != nil {
		return nil, fmt.Errorf("decoder: LogProbs: the context can be cancelled, and %d ranks would not stop at the same step: use context.Background(): %w", e.options.Ranks.World().Size, ErrUnsupported)
	}
	for i, id := range tokens {
		if id < 0 || id >= vocab {
			return nil, fmt.Errorf("decoder: LogProbs: tokens[%d] is %d, not in [0, %d): %w", i, id, vocab, ErrConfig)
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.queue.Lock()
	closed := e.queue.closed
	e.queue.Unlock()
	if closed {
		return nil, fmt.Errorf("decoder: LogProbs: engine: %w", ErrClosed)
	}
	if e.scores == nil {
		if e.scores, err = e.newGraph(graphConfig{rows: min(mostScored, e.options.Context), appends: 1, all: true}); err != nil {
			return nil, err
		}
	}
	s, err := e.cache.NewSequence()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.Release()) }()
	for from := 0; from < len(tokens)-1; {
		if err := context.Cause(ctx); err != nil {
			return nil, err
		}
		n := min(e.scores.step.Tokens(), len(tokens)-1-from)
		appends := []la.Append{{Seq: s, Tokens: n}}
		for {
			need, err := e.cache.Need(appends)
			if err != nil {
				return nil, err
			}
			if need <= e.freePages() || !e.scheduler.evictOldest(nil) {
				break
			}
		}
		r, err := e.runGraph(e.scores, appends, tokens[from:from+n], true, nil)
		if err != nil {
			return nil, err
		}
		for i := range n {
			x, _, err := likelihood(r.logits[i*vocab:(i+1)*vocab], tokens[from+i+1], 0)
			if err != nil {
				return nil, fmt.Errorf("decoder: LogProbs: after token %d: %w", from+i+1, err)
			}
			p = append(p, x)
		}
		from += n
	}
	return p, nil
}
