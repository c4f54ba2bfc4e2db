package leanattention

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"

	"gorgonia.org/leanattention/internal/kvstore"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/internal/ongpu"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/memory"
	"gorgonia.org/leanattention/internal/nocopy"
	"gorgonia.org/leanattention/internal/pages"

	"gorgonia.org/tensor"
)

// CacheConfig is the shape of a [Cache].
type CacheConfig struct {
	Layers   int // attention layers of the model
	KVHeads  int // key and value heads of a layer
	HeadDim  int // d, elements of a key
	ValueDim int // dv, elements of a value; 0: HeadDim

	// ValuesInKeys says that a value is the first ValueDim elements of its key, as in multi-head latent attention (DeepSeek-V2,
	// arXiv:2405.04434): keys are latent vectors with a rotated part behind ([rope.Config].Last). The cache then stores keys alone,
	// and nodes have no v. CPUs take all widths. GPUs take multiples of 8, HeadDim up to 576 and ValueDim up to 512, and all masks and
	// changes of scores.
	ValuesInKeys bool

	// DType is the element type that keys and values are stored in: tensor.Float32 (also the zero value), [Float16], [BFloat16],
	// [E4M3], tensor.Int8 or [Q4]. E4M3 and int8 have Scales. A row of a key or a value is rounded once, when it is
	// appended. What it is rounded to depends neither on chunks nor on other sequences. Infinities become the largest
	// numbers. With ScalesByToken, a row with NaN is NaN in all its elements; with Q4, 32 neighbours are.
	//
	//   - With Q4, HeadDim and ValueDim are multiples of 32. GPUs take HeadDim 64 (with a PageSize of multiples of 4) and 128 (with an even
	//     PageSize), those of 9.0 also 256.
	//   - With E4M3 and int8, and without ValuesInKeys, GPUs take HeadDim 64 (with an even PageSize) and 128, those of 9.0 also 256.
	//   - With these and Q4, GPUs take neither [WithBatchInvariance], [WithVariant], EdgeLayers nor [ShardContext]. Prompts go through
	//     decode kernels.
	DType tensor.Dtype

	// Scales says which elements of E4M3 or int8 share a scale. KeyScales and ValueScales are for ScalesByHead, from a checkpoint for
	// example: the scales of all KV heads, layer after layer; nil: 1.
	Scales                 Scales
	KeyScales, ValueScales []float32

	// EdgeLayers, with a DType of 8 or 4 bits, is the number of first layers, and of last layers, that store keys and values as
	// [BFloat16], on CPUs. In some models these layers lose most by rounding.
	EdgeLayers int

	PageSize int // tokens of a page; 0: 64
	Pages    int // pages that all sequences share

	// Window, if not 0, is the most keys that a layer sees: each node on the cache has [WithWindow] of at most Window.
	// [Step.Commit] then frees the pages whose tokens no later query sees. Between two steps a sequence of any length has at
	// most
	//
	//	(Window + Rewind) / PageSize + 2
	//
	// pages, and the pages of SinkTokens. During a step it also has the pages of its new tokens. [Sequence.Truncate] says what
	// remains possible after pages were freed.
	Window int

	// SinkTokens is the number of first tokens of a sequence that stay in the cache beside those of the Window. Each node on
	// the cache then has [WithSinkTokens] of the same number, and not [WithALiBi].
	SinkTokens int

	// Rewind is the number of last tokens that [Sequence.Truncate] can remove after a Commit, on a cache with a Window. The cache
	// keeps that many more tokens. Speculative decoding needs a Rewind of the number of its guesses. [Sequence.Rewind] is the number
	// for one sequence.
	Rewind int

	// Device is the GPU that stores the keys and values, and on which layers compute; nil: host memory, and the CPU. Several
	// GPUs ([device.Open]) share the keys and values: see Shard. On a GPU, HeadDim and ValueDim are multiples of 8 up to 256.
	// Under the tag cuda, Device may also be MachineGPU().
	Device *device.GPU

	// Shard says how several GPUs share the keys and values. It has no effect with one GPU or none.
	Shard Shard
}

// Shard says how several GPUs ([device.Open]) share the keys and values of a cache.
//
// By heads (tensor parallelism), each GPU has some KV heads of all tokens, and attends with their query heads.
//
// By context (sequence parallelism), each GPU has some pages of each sequence, with all KV heads. Page i of N GPUs is on GPU
// i mod N, and the pages of a sequence are on the GPUs in turn. Each GPU attends to its pages, and sends the state of each row
// and head, the output O_i and the log-sum-exp LSE_i, to the first GPU. The first GPU merges the states in the order of the
// GPUs:
//
//	LSE = ln sum e^LSE_i,   O = sum e^(LSE_i - LSE) O_i
//
// Facts about sharding by context:
//
//   - One sequence may be larger than the memory of one GPU. A single KV head keeps all GPUs busy.
//   - Traffic: rows * H * (dv+1) * 4 bytes for each GPU and layer, whatever the lengths.
//   - If a sequence has several new tokens, the first GPU attends to the new tokens among themselves. That is one more state.
//   - Layers take [WithCausal], [WithScale], [WithSoftCap], [WithSinks], [WithRotary], trees, schedules and [WithMixedPrecision].
//     Other masks and changes of scores, [WithBatchInvariance] and a Window of the cache are [ErrUnsupported].
type Shard uint8

const (
	// ShardAuto shards by heads as far as the number of KV heads divides, and by context for the rest. N GPUs are
	// gcd(KVHeads, N) groups with the same number of KV heads, and the GPUs of a group share the pages. So ShardAuto is
	// ShardHeads if KVHeads is a multiple of N, and ShardContext for one KV head. With a Window it is ShardHeads.
	ShardAuto Shard = iota

	// ShardHeads shards by heads, in order and as evenly as possible. Fewer KV heads than GPUs are [ErrUnsupported], except with
	// ValuesInKeys, if the number of GPUs is a multiple: then several GPUs have all keys of a head, and each has some of the query heads.
	ShardHeads

	// ShardContext shards by context. Fewer pages than GPUs are [ErrUnsupported].
	ShardContext
)

// String returns the name of the constant.
func (s Shard) String() string {
	if names := [...]string{"ShardAuto", "ShardHeads", "ShardContext"}; int(s) < len(names) {
		return names[s]
	}
	return fmt.Sprintf("Shard(%d)", uint8(s))
}

const defaultPageSize = 64

// Cache stores the keys and values of all layers of a model, for many sequences. It is not a tensor, and no node's value: a
// graph refers to a cache through a [Step].
//
// The memory is divided into pages of PageSize tokens. A page number means the same slots in every layer. In a layer, a page is
//
//	keys   (KVHeads, PageSize, HeadDim)
//	values (KVHeads, PageSize, ValueDim), unless ValuesInKeys is set
//
// so the keys of one head are contiguous. NewCache allocates all memory, as [CacheConfig.Bytes] says.
//
// The methods of Cache, [Sequence] and [Step] are safe for concurrent use. A Cache must not be copied: a copy is [ErrState]
// wherever it is used.
type Cache struct {
	mark   nocopy.Mark
	config CacheConfig
	id     uint64

	// running is held for reading while a layer computes and for writing by
	// Close, which so waits for it.
	running sync.RWMutex
	closed  bool // written with running and mu held
	store   kvstore.Store
	bytes   int64 // of all pages

	mu        sync.Mutex
	pool      *pages.Pool        // who holds which page: sequences, open steps, and calls that read
	holders   map[*Sequence]bool // that may hold pages; false: of a call of WriteTo or ReadSequence, and in no other count
	open      map[*Step]bool     // steps that are set
	sequences int
	tokens    int
	checks    uint64 // counts the lists of appends that were looked at
}

// ids makes caches and steps distinguishable in the hashes of ops.
var ids atomic.Uint64

// NewCache allocates a cache. [Cache.Close] frees the memory. Host memory is also freed when nothing refers to the cache, and
// memory of a GPU when the GPU is closed.
//
// A cache that does not fit is [ErrOutOfMemory], on the host and on a GPU. The system provides the host's pages when they are
// first written, so NewCache compares the memory of a full cache with the memory that is free at the call:
//
//   - Linux: available memory, and the limits of cgroups, ulimit -v, ulimit -d and vm.overcommit_memory=2
//   - macOS: all memory of the machine
//   - Windows: memory that can be committed
//   - other systems: no check
//
// Memory that other caches have not written yet counts as free.
//
// Errors:
//
//   - [ErrShape], [ErrDType], [ErrOutOfMemory]; [ErrOption] for an unknown Shard
//   - on a GPU: [ErrUnsupported] without a kernel, or if several GPUs can't share the cache; [ErrState], [ErrClosed]
func NewCache(config CacheConfig) (cache *Cache, err error) {
	const op = "NewCache"
	l, err := config.layout(op)
	if err != nil {
		return nil, err
	}
	config = l.config
	need := l.bookkeeping()
	if config.Device == nil {
		need += l.bytes
	}
	full := func(why any) error {
		return errs.Errorf(op, ErrOutOfMemory, "%d bytes for %s: %v", need, l.config.text(), why)
	}
	if err := memory.Check(need, l.largest); err != nil {
		return nil, full(err)
	}
	defer func() {
		if r := recover(); r != nil { // make refuses what no address space holds
			cache, err = nil, full(r)
		}
	}()
	c := &Cache{config: config, id: ids.Add(1), bytes: l.bytes, holders: make(map[*Sequence]bool), open: make(map[*Step]bool)}
	c.mark.Set()
	if config.Device == nil {
		c.store = kvstore.NewHost(&l.store)
	} else if c.store, err = placePages(op, c, &l); err != nil {
		return nil, err
	}
	c.pool = pages.NewSharded(config.Pages, config.PageSize, c.store.Shards())
	return c, nil
}

// Bytes returns the memory of the keys and values of a cache with this configuration:
//
//	Layers * Pages * KVHeads * PageSize * (HeadDim + ValueDim) * bytes of a number: 18/32 with Q4
//
// With ValuesInKeys, HeadDim stands in place of the sum. Scales of 8-bit elements are further bytes. EdgeLayers have 2 bytes a number.
// Bytes allocates nothing, and does not check free memory or the kernels of a GPU. Errors: [ErrShape], [ErrDType], [ErrOption].
func (c CacheConfig) Bytes() (int64, error) {
	l, err := c.layout("CacheConfig.Bytes")
	return l.bytes, err
}

// cacheLayout is what NewCache derives from a configuration.
type cacheLayout struct {
	config  CacheConfig    // with its defaults filled in
	store   kvstore.Config // what a store of pages needs to know
	bytes   int64
	largest int64 // bytes of the largest value in host memory
}

// least returns the problem of attention on a layer of DType with the fewest query heads. The real number is not known yet.
func (l *cacheLayout) least() attn.Problem {
	c := &l.config
	return geometryOf(&kvstore.Rows{Heads: l.store.LeastHeads()}, c, &config{mask: attn.Mask{Window: c.Window, SinkTokens: c.SinkTokens}}, c.EdgeLayers)
}

// bookkeeping returns the bytes of page tables.
func (l *cacheLayout) bookkeeping() int64 { return 8*int64(l.config.Pages) + 64*int64(l.config.Layers) }

// layout checks a configuration, and fills in its defaults.
func (c CacheConfig) layout(op string) (l cacheLayout, err error) {
	if c.ValueDim == 0 {
		c.ValueDim = c.HeadDim
	}
	if c.PageSize == 0 {
		c.PageSize = defaultPageSize
	}
	if c.DType == (tensor.Dtype{}) {
		c.DType = tensor.Float32
	}
	c.KeyScales, c.ValueScales = slices.Clone(c.KeyScales), slices.Clone(c.ValueScales)
	for _, f := range [...]struct {
		name string
		n    int
	}{
		{"Layers", c.Layers}, {"KVHeads", c.KVHeads}, {"HeadDim", c.HeadDim},
		{"ValueDim", c.ValueDim}, {"PageSize", c.PageSize}, {"Pages", c.Pages},
	} {
		if f.n < 1 || f.n > math.MaxInt32 {
			return l, errs.Errorf(op, ErrShape, "%s is %d, outside [1, %d]", f.name, f.n, math.MaxInt32)
		}
	}
	if c.ValuesInKeys && c.ValueDim > c.HeadDim {
		return l, errs.Errorf(op, ErrShape, "ValueDim is %d, and with ValuesInKeys at most HeadDim, %d", c.ValueDim, c.HeadDim)
	}
	if err := c.checkWindow(op); err != nil {
		return l, err
	}
	if c.Shard > ShardContext {
		return l, errs.Errorf(op, ErrOption, "Shard is %v, none of ShardAuto, ShardHeads and ShardContext", c.Shard)
	}
	if err := c.checkScales(op); err != nil {
		return l, err
	}
	format, ok := c.format(c.EdgeLayers)
	if !ok {
		return l, errs.Errorf(op, ErrDType, "DType is %v; it must be float32, Float16, BFloat16, E4M3, int8 or Q4", c.DType)
	}
	l.config, l.store = c, kvstore.Config{Layers: c.Layers, KVHeads: c.KVHeads, PageSize: c.PageSize, Pages: c.Pages, Format: format, EdgeLayers: c.EdgeLayers,
		KeyScales: c.KeyScales, ValueScales: c.ValueScales,
		Window: c.Window, SinkTokens: c.SinkTokens, Device: c.Device.Internal(), Shard: kvstore.Sharding(c.Shard)}
	if c.EdgeLayers > 0 {
		l.store.Edge, _ = c.format(0)
	}
	all, largest := l.store.Bytes()
	if uint64(all) > math.MaxInt-min(8*uint64(c.Pages), math.MaxInt) {
		return l, errs.Errorf(op, ErrShape, "%s: more bytes than an address has", c.text())
	}
	if l.bytes, l.largest = int64(all), int64(largest); c.Device != nil {
		l.largest = 8 * int64(c.Pages)
	}
	return l, nil
}

// maxWindow is the most tokens of each setting of a window, so that the sum of three is an int.
const maxWindow = 1 << 29

// checkWindow checks the settings of a window.
func (c *CacheConfig) checkWindow(op string) error {
	for _, f := range [...]struct {
		name string
		n    int
	}{{"Window", c.Window}, {"SinkTokens", c.SinkTokens}, {"Rewind", c.Rewind}} {
		if f.n < 0 || f.n > maxWindow {
			return errs.Errorf(op, ErrShape, "%s is %d, outside [0, %d]", f.name, f.n, maxWindow)
		}
	}
	if c.Window == 0 && c.Rewind+c.SinkTokens > 0 {
		return errs.Errorf(op, ErrShape, "Window is 0, SinkTokens %d, Rewind %d: without a window all tokens are kept", c.SinkTokens, c.Rewind)
	}
	return nil
}

// behind returns the tokens that the cache may drop from a sequence of tokens tokens: no later query sees them, even after Truncate
// removed Rewind tokens.
func (c *CacheConfig) behind(tokens int) (g pages.Gap) {
	if c.Window > 0 {
		g = pages.Gap{First: c.SinkTokens, End: max(tokens-c.Rewind-c.Window+1, 0)}
	}
	return g
}

// made returns an error unless c is from NewCache, and not a copy.
func (c *Cache) made(op string) error {
	const what, by = "cache", "NewCache"
	if c == nil {
		return errs.Unmade(op, what, by)
	}
	return errs.Original(op, &c.mark, what, by)
}

// Config returns the configuration, with its defaults filled in.
func (c *Cache) Config() CacheConfig {
	if c.made("") != nil {
		return CacheConfig{}
	}
	config := c.config
	config.KeyScales, config.ValueScales = slices.Clone(config.KeyScales), slices.Clone(config.ValueScales)
	return config
}

// CacheStats is the result of [Cache.Stats]. [Cache.Config] has the number of all pages and the device.
type CacheStats struct {
	FreePages int // no sequence has them
	Shared    int // pages of more than one sequence
	Sequences int // not released
	Tokens    int // committed, of all sequences; a shared token counts for each, and a token that a window released counts, too
}

// Stats counts pages, sequences and tokens. The pages of an open step, and those that [Cache.ReadSequence] fills, are not
// free. A running [Sequence.WriteTo] counts as a further holder of the sequence's pages.
func (c *Cache) Stats() CacheStats {
	if c.made("") != nil {
		return CacheStats{}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return CacheStats{FreePages: c.pool.Free(), Shared: c.pool.Shared(), Sequences: c.sequences, Tokens: c.tokens}
}

// Close waits for running layers, and frees the memory. Every later use of the cache, of its sequences and of its steps is
// [ErrClosed]. During [GPU.Record] of the cache's GPU, Close is [ErrState] and does nothing.
func (c *Cache) Close() error {
	if err := c.made("Close"); err != nil {
		return err
	}
	c.running.Lock()
	defer c.running.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return errs.Errorf("Close", ErrClosed, "cache")
	}
	if g := c.config.Device.Internal(); g != nil && g.Group != nil && g.Group.Recording() {
		return ongpu.WithinRecord("Close", g)
	}
	c.closed = true
	if err := c.store.Close(); err != nil {
		return ongpu.Error("Close", err)
	}
	return nil
}

// Sequence is the tokens of one context, in order, whose keys and values are in a cache. Tokens of a step become part of a
// Sequence with [Step.Commit]. A Sequence must not be copied: a copy is [ErrState] wherever it is used.
type Sequence struct {
	mark     nocopy.Mark
	cache    *Cache
	table    pages.Table // of the committed tokens
	step     *Step       // the open step that it is part of, if any
	released bool

	// seen is the last of the cache's checks that met the sequence, as append seenAt.
	seen   uint64
	seenAt int
}

// NewSequence returns an empty sequence. [Sequence.Release] frees its pages; garbage collection does not. Errors: [ErrClosed].
func (c *Cache) NewSequence() (*Sequence, error) {
	if err := c.made("NewSequence"); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, errs.Errorf("NewSequence", ErrClosed, "cache")
	}
	s := c.newSequence(pages.Table{})
	c.count(s)
	return s, nil
}

// newSequence returns a sequence with its own page table, which no statistic counts yet. The caller holds mu.
func (c *Cache) newSequence(table pages.Table) *Sequence {
	s := &Sequence{cache: c, table: table}
	s.mark.Set()
	c.holders[s] = false
	return s
}

// count adds s to the statistics. The caller holds mu.
func (c *Cache) count(s *Sequence) {
	c.holders[s] = true
	c.sequences++
	c.tokens += s.table.Tokens
}

// Len returns the number of committed tokens, including those whose pages were freed ([CacheConfig].Window). It is 0 for a
// released sequence.
func (s *Sequence) Len() int {
	if s.made("") != nil {
		return 0
	}
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	return s.table.Tokens
}

const makesSequences = "NewSequence, Fork or ReadSequence"

// made returns an error unless s is from NewSequence, Fork or ReadSequence, and not a copy.
func (s *Sequence) made(op string) error {
	if s == nil {
		return errs.Unmade(op, "sequence", makesSequences)
	}
	return errs.Original(op, &s.mark, "sequence", makesSequences)
}

// usable returns an error if s must not change now. The caller holds the mu of the cache.
func (s *Sequence) usable(op string) error {
	switch {
	case s.cache.closed:
		return errs.Errorf(op, ErrClosed, "cache")
	case s.released:
		return errs.Errorf(op, ErrClosed, "sequence was released")
	case s.step != nil:
		return errs.Errorf(op, ErrState, "sequence is part of an open step: commit or roll back first")
	}
	return nil
}

// Fork returns a sequence of the same tokens. The two sequences share pages. An append to a shared page first copies the page.
//
// Errors: [ErrState] while the sequence is in an open step; [ErrClosed].
func (s *Sequence) Fork() (*Sequence, error) {
	if err := s.made("Fork"); err != nil {
		return nil, err
	}
	c := s.cache
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := s.usable("Fork"); err != nil {
		return nil, err
	}
	table, err := c.pool.Clone(&s.table)
	if err != nil {
		return nil, pagesError("Fork", err)
	}
	fork := c.newSequence(table)
	c.count(fork)
	return fork, nil
}

// Rewind returns how many of the last tokens [Sequence.Truncate] can remove. Without freed pages that is all of them. After the
// cache freed pages of the sequence ([CacheConfig].Window) it is
//
//   - at least CacheConfig.Rewind after each [Step.Commit]
//   - less the tokens that Truncate and [Sequence.Keep] have removed since
//   - any number from 0 on after [Cache.ReadSequence], if the saving cache had a lower Rewind
//
// Each committed token adds 1, up to CacheConfig.Rewind. Rewind of a released sequence is 0.
func (s *Sequence) Rewind() int {
	if s.made("") != nil {
		return 0
	}
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	return s.table.Tokens - s.least()
}

// least returns the fewest tokens, from the end of the gap on, that Truncate can keep. The caller holds mu.
func (s *Sequence) least() int {
	if gap := s.table.Gap; gap.End > 0 {
		return gap.End + s.cache.config.Window - 1
	}
	return 0
}

// Truncate keeps the first n tokens, 0 <= n <= Len, and frees the pages of the others. On a cache with a window, Truncate can
// remove the last [Sequence.Rewind] tokens, or all tokens, or all but the [CacheConfig].SinkTokens. Any other n is [ErrLength],
// because the next token would see keys that were freed.
//
// Errors: [ErrLength]; [ErrState] while the sequence is in an open step; [ErrClosed].
func (s *Sequence) Truncate(n int) error {
	if err := s.made("Truncate"); err != nil {
		return err
	}
	c := s.cache
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := s.usable("Truncate"); err != nil {
		return err
	}
	if n < 0 || n > s.table.Tokens {
		return errs.Errorf("Truncate", ErrLength, "%d tokens of a sequence of %d", n, s.table.Tokens)
	}
	if err := s.reaches("Truncate", n); err != nil {
		return err
	}
	return c.cut("Truncate", s, n)
}

// reaches returns an error if tokens after the first n would see dropped tokens. The caller holds mu.
func (s *Sequence) reaches(op string, n int) error {
	config := &s.cache.config
	if gap := s.table.Gap; n > gap.First && n < s.least() {
		return errs.Errorf(op, ErrLength, "%d tokens of a sequence of %d: a window of %d keys would see tokens of [%d, %d), which were given back: keep %d tokens or more (Sequence.Rewind is %d), or %d or fewer and append the others anew",
			n, s.table.Tokens, config.Window, gap.First, gap.End, s.least(), s.table.Tokens-s.least(), gap.First)
	}
	return nil
}

// Keep keeps the first from tokens, and of the later tokens only those of path. The elements of path count from token from.
// Keep moves the keys and values of the path, so that they become tokens from, from+1 and so on. The sequence then has
// from+len(path) tokens.
//
// Keep serves a step with a tree of guesses ([Append.Parents]) of which one branch was right. from is Len before the step, and path is
// the branch: each of its tokens is an ancestor of the next. The sequence is then the same as after an append of the branch alone.
//
//	from := seq.Len()
//	err = step.Set([]leanattention.Append{{Seq: seq, Tokens: len(parents), Parents: parents}})
//	...
//	err = step.Commit()
//	err = seq.Keep(from, []int{0, 2, 5})
//
// Shared pages are not written: the sequence gets copies of the pages to which tokens move. On a cache with a window the
// limits of [Sequence.Truncate] apply, and tokens that were freed can't move.
//
// Errors, before any change:
//
//   - [ErrLength]; [ErrShape] for a path that does not increase; [ErrUnsupported] for a move with [ScalesByPage]
//   - [ErrCacheFull] for too few free pages for copies
//   - [ErrState] while the sequence is in an open step; [ErrClosed]
func (s *Sequence) Keep(from int, path []int) error {
	const op = "Keep"
	if err := s.made(op); err != nil {
		return err
	}
	c := s.cache
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := s.usable(op); err != nil {
		return err
	}
	have := s.table.Tokens
	if from < 0 || from > have {
		return errs.Errorf(op, ErrLength, "from token %d of a sequence of %d", from, have)
	}
	still := 0 // tokens of the path that stay where they are
	for i, at := range path {
		if at < 0 || at >= have-from {
			return errs.Errorf(op, ErrLength, "path[%d] is %d, outside [0, %d): the sequence has %d tokens, %d of them from token %d on", i, at, have-from, have, have-from, from)
		}
		if i > 0 && at <= path[i-1] {
			return errs.Errorf(op, ErrShape, "path[%d] is %d, behind %d: a path increases", i, at, path[i-1])
		}
		if at == i {
			still++
		}
	}
	n := from + len(path)
	if err := s.reaches(op, n); err != nil {
		return err
	}
	if still < len(path) {
		if err := c.move(op, s, from, path, still); err != nil {
			return err
		}
	}
	return c.cut(op, s, n)
}

// move moves the tokens of a path, from number still on; the tokens before stay. The caller holds mu.
func (c *Cache) move(op string, s *Sequence, from int, path []int, still int) error {
	gap := s.table.Gap
	if c.config.scales() == attn.ScalesByPage {
		return errs.Errorf(op, ErrUnsupported, "path moves token %d, on a cache with ScalesByPage: its pages have different scales", from+path[still])
	}
	for i, at := range path[still:] {
		for _, token := range [...]int{from + still + i, from + at} {
			if token >= gap.First && token < gap.End {
				return errs.Errorf(op, ErrLength, "token %d would become token %d, and those of [%d, %d) were given back", from+at, from+still+i, gap.First, gap.End)
			}
		}
	}
	owned, err := c.pool.Own(&s.table, from+still, from+len(path))
	switch {
	case errors.Is(err, pages.ErrFull):
		return errs.Errorf(op, ErrCacheFull, "tokens [%d, %d) are in pages that others hold: %v", from+still, from+len(path), err)
	case err != nil:
		return pagesError(op, err)
	}
	copies := make([]kvstore.Copy, len(owned))
	for i, o := range owned {
		copies[i] = kvstore.Copy{To: o.Page, From: o.Was}
	}
	moves := make([]kvstore.Move, 0, len(path)-still)
	for i, at := range path[still:] {
		var m kvstore.Move
		m.To.Page, m.To.Slot = c.pool.Place(&s.table, from+still+i)
		m.From.Page, m.From.Slot = c.pool.Place(&s.table, from+at)
		moves = append(moves, m)
	}
	if err = c.store.CopyPages(op, copies); err == nil {
		err = c.store.MoveSlots(op, moves)
	}
	if err == nil {
		return nil
	}
	if e := c.pool.Disown(&s.table, owned); e != nil {
		err = errors.Join(err, pagesError(op, e))
	}
	return err
}

// Release frees all pages. Every later use of the sequence is an error.
func (s *Sequence) Release() error {
	if err := s.made("Release"); err != nil {
		return err
	}
	c := s.cache
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := s.usable("Release"); err != nil {
		return err
	}
	if err := c.cut("Release", s, 0); err != nil {
		return err
	}
	s.released = true
	delete(c.holders, s)
	c.sequences--
	return nil
}

// cut shortens s to n tokens. The caller holds mu.
func (c *Cache) cut(op string, s *Sequence, n int) error {
	was := s.table.Tokens
	if err := c.pool.Truncate(&s.table, n); err != nil {
		return pagesError(op, err)
	}
	c.tokens -= was - n
	return nil
}
