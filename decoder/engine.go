package decoder

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/decoder/tokenizer"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/ranks"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Options is the configuration of an [Engine]. The zero value is valid.
type Options struct {
	// Context is the most tokens of a text, prompt and continuation. 0: as many as the network takes, but at most 4096.
	Context int

	// Tokens is the capacity of the cache: tokens of all texts together, at least Context. 0: Context. Texts that
	// begin alike share tokens. When the cache is full, the youngest text waits, and its tokens are computed again later.
	//
	// If every layer has a window, the cache keeps the tokens in the largest window, and some more. Then Tokens may be less than
	// Context: a text takes at most the window, Chunk, Draft and 320 tokens. Later texts share the beginning of a text only while
	// the cache keeps the tokens at the end of that beginning.
	Tokens int

	Batch int // most texts of a step; 0: 16
	// Chunk is the most rows of a step. Longer prompts take several steps. 0 is 2048 on a GPU. On a CPU 0 is 64 rows for each
	// processor, but at least 384 and at most 1024.
	Chunk int

	Draft int // most guesses of a step: see [Request].Draft; 0: none

	// Gap bounds how long texts wait for their next tokens while other texts read their prompts: a step with rows of prompts takes about
	// Gap times as long as a step without, at least 1. Then the number of these rows depends on measured times. 0: Chunk alone bounds
	// the rows. Not with Ranks.
	Gap float64

	// Weights is the element type of matrices: float32, leanattention.Float16, leanattention.BFloat16 or, on the CPU, tensor.Int8 or
	// nn.Int4 (see nn.Rounded). The zero value is the type of the files:
	//
	//   - On the CPU, matrices of a GGUF file in fewer than 16 bits stay as they are, in the mapped file (see nn.Quantised). The file must
	//     not be cut while an engine is open.
	//   - On the CPU, matrices of a folder by GPTQ or AWQ keep their integers, scales and zeros.
	//   - Matrices with an adapter, those that latent attention splits, and on GPUs all of these become float16.
	//
	// Matrices that latent attention splits are never of 8 or 4 bits: with tensor.Int8 and nn.Int4 they have the type of the files.
	Weights tensor.Dtype
	Cache   tensor.Dtype // element type of keys and values, as leanattention.CacheConfig has it; zero value: float32

	// Exact computes products of float32 with weights of 16 bits and fewer in float32. Otherwise linear layers may round their
	// inputs to the weights' type, or to 8 bits for weights of fewer than 16, and attention its queries to the cache's, where that is
	// faster: see nn.WithMixedPrecision.
	Exact bool

	// BatchInvariant gives the attention of a token the same bits whatever else a step computes.
	BatchInvariant bool

	Schedule la.Schedule // of attention
	Workers  int         // of attention; 0: GOMAXPROCS

	// Device is the GPU that computes, and that has the weights and the cache; nil: the CPU. Several GPUs (device.Open) share the
	// weights and the cache. Device must stay open until the engine is closed.
	Device *device.GPU

	// Shard says how several GPUs share the cache. By context, networks with rotary embeddings are not supported.
	Shard la.Shard

	// Ranks are the processes that compute together, each with a part of the weights and of the cache, on Device; nil: this
	// process alone. Ranks must stay open until the engine is closed. Then:
	//
	//   - All ranks make the same engine: the same network, weights and options, except for Device and Progress.
	//   - All ranks call the methods of the engine, and of its texts, in the same order, from one goroutine.
	//   - Steps are computed while the goroutine waits for a text. Start takes no context that may be cancelled.
	Ranks *ranks.Comm

	// TPLA, if not nil, splits the latent vectors of each layer of a network with latent attention, an approximation: see nn.TPLA. The
	// differences of [Engine.LogProbs] are its error. Prompts of 64 rows and more, of texts without cached tokens, are exact; LogProbs
	// has no such prompts. It computes on the CPU in one process, with weights for both forms beside the network's. Save and Load are
	// ErrUnsupported.
	TPLA func(layer int) *nn.TPLA

	// Progress, if not nil, is called with the number of weights that have been loaded, and the number of all.
	Progress func(done, all int)
}

const (
	defaultContext = 4096
	defaultBatch   = 16
	defaultChunk   = 384  // enough rows for products with the weights to be bound by arithmetic on a few cores
	coreChunk      = 64   // rows for each core
	coresChunk     = 1024 // most rows for many cores
	gpuChunk       = 2048
	pageSize       = 64
	mostRows       = 1 << 20
	mostChosen     = 1 << 19 // largest vocabulary from which a GPU chooses: see nn.ArgMax
	mostAhead      = 4       // steps that the host queues together, while it waits for as many: joins and ends wait for both
)

// Stats counts the work of an [Engine].
type Stats struct {
	Steps        int // runs of a graph
	Rows         int // tokens that the steps computed
	MostTexts    int // most texts of a step
	SharedTokens int // tokens of prompts that were not computed, since another text had the same beginning
	Preempted    int // times that a text had to wait again, since the cache was full
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
	sliced    [][]*nn.LatentWeights // of layers, see Options.TPLA: whole latent vectors, and those of each shard
	free      func() error          // the weights on a GPU
	cache     *la.Cache
	graphs    []*graph // by rows
	verify    *graph   // logits of all rows; nil: no drafts
	prompts   *graph   // for texts without cached tokens; nil: the other graphs serve these texts as well
	scores    *graph   // of LogProbs; nil: not needed yet

	mu        sync.Mutex // held while a step computes
	scheduler scheduler
	stats     Stats

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
	e := &Engine{network: n, options: o, model: m, from: from}
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
	e.sliced = make([][]*nn.LatentWeights, sizes.Layers)
	if sizes.Latent > 0 && o.Device != nil && len(o.Device.Members()) > 1 {
		return nil, fmt.Errorf("decoder: Options.Device is %v, and the network has latent attention, which several GPUs do not share: use one GPU: %w", o.Device, ErrUnsupported)
	}
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
	var progress func(done int)
	if o.Progress != nil {
		progress = func(done int) { o.Progress(done, all) }
	}
	world := o.world()
	head, end := world.Part(sizes.KVHeads)
	config := la.CacheConfig{
		Layers: sizes.Layers, KVHeads: end - head, HeadDim: sizes.HeadDim, DType: o.Cache,
		PageSize: pageSize, Pages: (o.Tokens-1)/pageSize + 1, Device: o.Device, Shard: o.Shard,
		ValuesInKeys: sizes.Latent > 0, ValueDim: sizes.Latent,
	}
	if config.Window = sizes.window(); config.Window > 0 {
		config.Rewind = o.rewind()
	}
	if eightBits(o.Cache) { // not each format has them: an error before weights are loaded
		if _, err = config.Bytes(); err != nil {
			return nil, err
		}
	}
	if e.weights, e.free, err = load(n, from, placement{o.Device, world, o.Weights, o.byContext(end - head)}, progress); err != nil {
		return nil, err
	}
	if e.cache, err = la.NewCache(config); err != nil {
		if sizes.Latent > 0 && o.Device != nil {
			err = fmt.Errorf("decoder: latent attention of %d and %d elements on a GPU: use the CPU, or Options.Cache of 16 bits: %w", sizes.Latent, sizes.HeadDim-sizes.Latent, err)
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
	// Batch invariance needs one form of attention, whatever texts a step has. GPUs have one, and PromptAttention takes no cache of 8 bits.
	if sizes.Latent > 0 && o.Device == nil && o.Chunk >= leastExpanded && !o.BatchInvariant && !eightBits(o.Cache) {
		if e.prompts, err = e.newGraph(graphConfig{rows: o.Chunk, appends: o.Batch, prompts: true}); err != nil {
			return nil, err
		}
	}
	e.scheduler = scheduler{runner: e, vocab: sizes.Vocab, batch: o.Batch, page: pageSize, most: o.textTokens(&sizes), pace: pace{most: o.Gap}, now: time.Now, stats: &e.stats}
	return e, nil
}

// fill checks the options, and fills their defaults in.
func (o *Options) fill(s *Sizes) error {
	most := s.Context
	if most == 0 {
		most = mostRows
	}
	if o.Context == 0 {
		o.Context = min(most, defaultContext)
	}
	if o.Batch == 0 {
		o.Batch = defaultBatch
	}
	if o.Chunk == 0 {
		if o.Chunk = max(defaultChunk, min(coreChunk*runtime.GOMAXPROCS(0), coresChunk)); o.Device != nil {
			o.Chunk = gpuChunk
		}
		o.Chunk = max(min(o.Chunk, max(o.Tokens, o.Context)), o.Batch)
	}
	if o.Tokens == 0 {
		o.Tokens = o.Context
	}
	for _, x := range []struct {
		name          string
		n, least, top int
	}{
		{"Context", o.Context, 1, most}, {"Tokens", o.Tokens, o.textTokens(s), 1 << 30}, {"Batch", o.Batch, 1, mostRows},
		{"Chunk", o.Chunk, o.Batch, mostRows}, {"Draft", o.Draft, 0, 1 << 10}, {"Workers", o.Workers, 0, 1 << 20},
	} {
		if x.n < x.least || x.n > x.top {
			return fmt.Errorf("decoder: Options.%s is %d, not in [%d, %d]: %w", x.name, x.n, x.least, x.top, ErrConfig)
		}
	}
	if g := o.Gap; g != 0 && !(g >= 1 && g <= 1e6) {
		return fmt.Errorf("decoder: Options.Gap is %v, neither 0 nor in [1, 1e6]: %w", g, ErrConfig)
	} else if g != 0 && o.Ranks != nil {
		return fmt.Errorf("decoder: Options.Gap is %v with Ranks, each of which measures other times: %w", g, ErrConfig)
	}
	types := []tensor.Dtype{{}, tensor.Float32, la.Float16, la.BFloat16}
	switch t := o.Weights; {
	case slices.Contains(types, t):
	case !roundedTo(t):
		return fmt.Errorf("decoder: Options.Weights is %v; known are float32, int8, nn.Int4, leanattention.Float16 and leanattention.BFloat16: %w", t, ErrConfig)
	case o.Device != nil:
		return fmt.Errorf("decoder: Options.Weights is %v, and Options.Device is %v: weights of 8 and 4 bits are on the CPU alone; use leanattention.Float16 or BFloat16: %w", t, o.Device, ErrUnsupported)
	}
	switch t := o.Cache; {
	case slices.Contains(types, t):
	case !eightBits(t):
		return fmt.Errorf("decoder: Options.Cache is %v; known are float32, int8, and leanattention.Float16, BFloat16 and E4M3: %w", t, ErrConfig)
	case o.Device != nil:
		return fmt.Errorf("decoder: Options.Cache is %v, and Options.Device is %v: caches of 8 bits are on the CPU alone; use leanattention.Float16 or BFloat16: %w", t, o.Device, ErrUnsupported)
	}
	if o.several() && o.Device == nil {
		return fmt.Errorf("decoder: Options.Ranks are %d processes, and Options.Device is nil: ranks compute on GPUs: %w", o.Ranks.World().Size, ErrUnsupported)
	}
	return nil
}

// eightBits reports whether a cache of a type has scales.
func eightBits(t tensor.Dtype) bool { return t == la.E4M3 || t == tensor.Int8 }

// rewind returns how many of the last tokens of a text can be dropped, if the cache keeps the tokens in a window.
func (o *Options) rewind() int { return pageSize + o.Draft }

// textTokens returns the most tokens of a text that the cache has.
func (o *Options) textTokens(s *Sizes) int {
	if w := s.window(); w > 0 && w < o.Context {
		// Between two steps a text has two partly filled pages. In a step it has the pages of its new tokens, too.
		return min(o.Context, w+o.rewind()+2*pageSize+o.Chunk+2*pageSize)
	}
	return o.Context
}

// byContext reports whether several GPUs share the pages of a cache with a number of KV heads.
func (o *Options) byContext(heads int) bool {
	return o.Device != nil && len(o.Device.Members()) > 1 && (o.Shard == la.ShardContext || o.Shard == la.ShardAuto && heads%len(o.Device.Members()) != 0)
}

// world returns which of the processes this process is.
func (o *Options) world() ranks.World {
	if o.Ranks == nil {
		return ranks.World{Size: 1}
	}
	return o.Ranks.World()
}

// several reports whether several processes compute.
func (o *Options) several() bool { return o.world().Size > 1 }

// graphs returns the graphs, those of fewer rows first: for steps of one token of each text, and for steps with prompts. In host
// memory a graph computes the rows of a step alone. On a GPU a recording computes all its rows.
func (o *Options) graphs() (all []graphConfig) {
	add := func(rows int) {
		all = append(all, graphConfig{rows: rows, appends: rows, all: true, recorded: o.Device != nil})
	}
	if o.Device != nil {
		for n := 1; n < o.Batch; n *= 2 {
			add(n)
		}
	}
	add(o.Batch)
	if o.Chunk > 1 {
		all = append(all, graphConfig{rows: o.Chunk, appends: o.Batch})
	}
	return all
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
	q := &e.queue
	q.Lock()
	defer q.Unlock()
	switch {
	case q.closed:
		return nil, fmt.Errorf("decoder: Start: engine: %w", ErrClosed)
	case q.err != nil:
		return nil, q.err
	}
	q.joined = append(q.joined, texts...)
	if e.options.several() {
		for _, t := range texts {
			t.compute = func() { e.step() }
		}
		return texts, nil
	}
	if !q.running && len(texts) > 0 {
		q.running = true
		e.work.Add(1)
		go e.loop()
	}
	return texts, nil
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
	t := &Text{ctx: ctx, tokens: slices.Clone(prompt), prompt: len(r.Prompt), context: o.Context + 1, most: r.Tokens, shift: r.Shift, keep: r.Keep, ends: e.ends, decoder: silent{}, stop: newStopper(r.Stop)}
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
			if need <= e.freePages() || len(e.scheduler.retained) == 0 {
				break
			}
			e.scheduler.evict(0)
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
