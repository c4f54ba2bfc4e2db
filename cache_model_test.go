package leanattention

import (
	"bytes"
	"errors"
	"flag"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/reftest"

	"gorgonia.org/tensor"
	"pgregory.net/rapid"
)

// cacheModel is a cache beside what it ought to be: for each sequence the rows
// of its tokens. Pages are modelled by identity, without counts: a page is held
// if some sequence or open step points to it.
type cacheModel struct {
	cache     *Cache
	other     *Sequence // of another cache
	rng       *rand.Rand
	sequences []*modelSequence
	steps     []*modelStep
	closed    bool
	pageOf    map[*modelPage]int32
	actions   *int
}

type modelPage struct{ _ int }

type modelSequence struct {
	real     *Sequence
	tokens   []*testToken
	pages    []*modelPage // of all tokens; nil: given back
	gone     [2]int       // the tokens that were given back, from and to
	most     int          // how many tokens it has had since it was empty
	step     *modelStep   // that it is in
	released bool
}

// there are the pages that are not given back.
func there(pages []*modelPage) (list []*modelPage) {
	for _, p := range pages {
		if p != nil {
			list = append(list, p)
		}
	}
	return list
}

// sees says whether the cache keeps token j for a query at a position behind it.
func (m *cacheModel) sees(position, j int) bool {
	c := &m.cache.config
	return c.Window == 0 || position-j < c.Window || j < c.SinkTokens
}

// giveBack drops the tokens that no query will see, from the one that comes first if the sequence is rewound.
func (m *cacheModel) giveBack(s *modelSequence) {
	s.most = max(s.most, len(s.tokens))
	for j := range s.tokens {
		if !m.sees(max(len(s.tokens)-m.cache.config.Rewind, j), j) {
			if s.gone == [2]int{} {
				s.gone[0] = j
			}
			s.gone[1] = max(s.gone[1], j+1)
		}
	}
	size := m.cache.config.PageSize
	for i := range s.pages {
		if i*size >= s.gone[0] && (i+1)*size <= s.gone[1] {
			s.pages[i] = nil
		}
	}
}

type modelStep struct {
	*stepGraph
	open    bool
	parts   []modelPart
	lastRun map[int]bool // the layers that the last run completed
}

// modelPart is what an open step has for a sequence.
type modelPart struct {
	*modelSequence
	fresh []*testToken
	tree  attn.Tree
	after []*modelPage // the sequence's pages once the step is committed
}

func (s *modelStep) fresh() []*testToken {
	var all []*testToken
	for _, p := range s.parts {
		all = append(all, p.fresh...)
	}
	return all
}

// modelPlace is where the cache of a model is: the zero value is the host.
type modelPlace struct {
	gpu  *device.GPU
	real bool // it has kernels for some head dims only, and tensor cores round its numbers
}

// members is how many GPUs there are: each has a KV head or a page at least.
func (at modelPlace) members() int {
	if at.gpu == nil {
		return 1
	}
	return len(at.gpu.Internal().Members)
}

// config is a cache's there.
func (at modelPlace) config(c CacheConfig) CacheConfig {
	c.Device = at.gpu
	if at.real {
		c.HeadDim, c.ValueDim = 64, 64
	}
	return c
}

func newCacheModel(t *rapid.T, at modelPlace, actions *int) *cacheModel {
	shard, leastHeads := ShardHeads, at.members()
	if at.members() > 1 {
		if shard = rapid.SampledFrom([]Shard{ShardAuto, ShardContext, ShardHeads}).Draw(t, "shard"); shard != ShardHeads {
			leastHeads = 1
		}
	}
	config := CacheConfig{
		Layers:   rapid.IntRange(1, 3).Draw(t, "layers"),
		KVHeads:  rapid.IntRange(leastHeads, at.members()+1).Draw(t, "KV heads"),
		HeadDim:  rapid.IntRange(1, 5).Draw(t, "head dim"),
		ValueDim: rapid.IntRange(1, 4).Draw(t, "value dim"),
		PageSize: rapid.IntRange(1, 5).Draw(t, "page size"),
		Pages:    rapid.IntRange(max(2, at.members()), 24).Draw(t, "pages"),
		DType:    rapid.SampledFrom([]tensor.Dtype{tensor.Float32, Float16, BFloat16}).Draw(t, "dtype"),
		Device:   at.gpu,
		Shard:    shard,
	}
	if shard == ShardHeads && rapid.Bool().Draw(t, "windows") {
		config.Window = rapid.IntRange(1, 12).Draw(t, "window")
		config.Rewind = rapid.IntRange(0, 5).Draw(t, "rewind")
		config.SinkTokens = rapid.IntRange(0, 7).Draw(t, "sink tokens")
	}
	if at.real {
		config.HeadDim = rapid.SampledFrom([]int{64, 80, 96}).Draw(t, "head dim of a GPU")
		config.ValueDim = config.HeadDim
	}
	queries := []tensor.Dtype{tensor.Float32, tensor.Float64}
	if at.gpu != nil {
		queries = queries[:1]
	}
	c, err := NewCache(config)
	noError(t, err)
	elsewhere, err := NewCache(CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 1, Pages: 1})
	noError(t, err)
	other, err := elsewhere.NewSequence()
	noError(t, err)
	m := &cacheModel{
		cache: c, other: other, actions: actions, pageOf: make(map[*modelPage]int32),
		rng: rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "values"), 0)),
	}
	for range rapid.IntRange(1, 3).Draw(t, "steps") {
		var opts []Option
		if rapid.Bool().Draw(t, "causal") {
			opts = append(opts, WithCausal())
		}
		if config.Window > 0 {
			opts = append(opts, WithWindow(rapid.IntRange(1, config.Window).Draw(t, "window of a step")), WithSinkTokens(config.SinkTokens))
		}
		opts = append(opts,
			WithWorkers(rapid.IntRange(0, 4).Draw(t, "workers")),
			WithTileTokens(rapid.IntRange(0, 4).Draw(t, "tile tokens")),
			WithSchedule(rapid.SampledFrom([]Schedule{StreamK, PerHead, FixedSplit(2)}).Draw(t, "schedule")))
		m.steps = append(m.steps, &modelStep{stepGraph: newStepGraph(t, c,
			rapid.IntRange(1, 8).Draw(t, "rows"),
			config.KVHeads*rapid.IntRange(1, 3).Draw(t, "group"),
			rapid.SampledFrom(queries).Draw(t, "query dtype"), opts...)})
		last := m.steps[len(m.steps)-1]
		last.there = at.gpu != nil && rapid.Bool().Draw(t, "operands on the GPU")
		last.columns = last.there && rapid.Bool().Draw(t, "columns of them on each")
		last.cores = at.real
	}
	m.poison()
	return m
}

func (m *cacheModel) close() {
	for _, s := range m.steps {
		s.close()
	}
}

// expect checks an error against the sentinels of everything that is wrong with
// a call; with none of them it must succeed.
func expect(t *rapid.T, err error, wrong ...error) (ok bool) {
	t.Helper()
	if len(wrong) == 0 {
		if err != nil {
			t.Fatalf("must succeed: %v", err)
		}
		return true
	}
	for _, w := range wrong {
		if errors.Is(err, w) {
			return false
		}
	}
	t.Fatalf("error %v, want one of %v", err, wrong)
	return false
}

// wrong is what hinders a change of s.
func (s *modelSequence) wrong() (errs []error) {
	if s.released {
		errs = append(errs, ErrClosed)
	}
	if s.step != nil {
		errs = append(errs, ErrState)
	}
	return errs
}

func (m *cacheModel) pick(t *rapid.T) *modelSequence {
	if len(m.sequences) == 0 {
		t.Skip("no sequence")
	}
	return m.sequences[rapid.IntRange(0, len(m.sequences)-1).Draw(t, "sequence")]
}

func (m *cacheModel) pickStep(t *rapid.T) *modelStep {
	return m.steps[rapid.IntRange(0, len(m.steps)-1).Draw(t, "step")]
}

func (m *cacheModel) add(t *rapid.T, s *modelSequence) {
	m.sequences = append(m.sequences, s)
	for i, old := range m.sequences { // a few released ones stay, to be misused
		if old.released && len(m.sequences) > 8 {
			m.sequences = slices.Delete(m.sequences, i, i+1)
			return
		}
	}
}

func (m *cacheModel) NewSequence(t *rapid.T) {
	if live := m.live(); len(live) >= 6 {
		t.Skip("enough sequences")
	}
	s, err := m.cache.NewSequence()
	expect(t, err)
	m.add(t, &modelSequence{real: s})
}

func (m *cacheModel) Fork(t *rapid.T) {
	s := m.pick(t)
	if live := m.live(); len(live) >= 7 {
		t.Skip("enough sequences")
	}
	f, err := s.real.Fork()
	if expect(t, err, s.wrong()...) {
		m.add(t, &modelSequence{real: f, tokens: slices.Clone(s.tokens), pages: slices.Clone(s.pages), gone: s.gone, most: s.most})
	}
}

func (m *cacheModel) Truncate(t *rapid.T) {
	s := m.pick(t)
	n := rapid.IntRange(-1, len(s.tokens)+1).Draw(t, "tokens")
	wrong := s.wrong()
	if n < 0 || n > len(s.tokens) {
		wrong = append(wrong, ErrLength)
	}
	for j := s.gone[0]; n > s.gone[0] && j < min(s.gone[1], n+1); j++ {
		if m.sees(n, j) {
			wrong = append(wrong, ErrLength)
			if n >= s.most-m.cache.config.Rewind && n <= len(s.tokens) {
				t.Fatalf("%d tokens of %d, and it had %d: token %d should be there", n, len(s.tokens), s.most, j)
			}
			break
		}
	}
	if expect(t, s.real.Truncate(n), wrong...) {
		s.tokens = s.tokens[:n:n]
		s.pages = s.pages[:m.pagesFor(n):m.pagesFor(n)]
		if n <= s.gone[0] {
			s.gone, s.most = [2]int{}, n
		}
	}
}

// Keep keeps some of a sequence's last tokens: a path of a tree is one, but so is any other.
func (m *cacheModel) Keep(t *rapid.T) {
	s := m.pick(t)
	have := len(s.tokens)
	from := rapid.IntRange(max(have-9, -1), have+1).Draw(t, "from")
	wrong := s.wrong()
	var path []int
	for i := range max(have-from, 0) {
		if rapid.Bool().Draw(t, "kept") {
			path = append(path, i)
		}
	}
	if from < 0 || from > have {
		wrong = append(wrong, ErrLength)
	}
	if rapid.IntRange(0, 9).Draw(t, "a mistake") == 0 {
		path = append(path, rapid.IntRange(-1, max(have-from, 0)).Draw(t, "anything"))
		if last := path[len(path)-1]; last < 0 || last >= have-from {
			wrong = append(wrong, ErrLength)
		} else if len(path) > 1 && last <= path[len(path)-2] {
			wrong = append(wrong, ErrShape)
		}
	}
	n, size := from+len(path), m.cache.config.PageSize
	for j := s.gone[0]; n > s.gone[0] && j < min(s.gone[1], n+1); j++ {
		if m.sees(n, j) {
			wrong = append(wrong, ErrLength)
		}
	}
	for i, at := range path {
		for _, j := range []int{from + i, from + at} {
			if at != i && j >= s.gone[0] && j < s.gone[1] {
				wrong = append(wrong, ErrLength)
			}
		}
	}
	pages := slices.Clone(s.pages)
	if len(wrong) == 0 {
		holders, free := m.holders(), m.cache.config.Pages-len(m.held())
		for i, at := range path {
			if p := &pages[(from+i)/size]; at != i && holders[*p] > 1 {
				*p = new(modelPage)
				free--
			}
		}
		if free < 0 {
			wrong = append(wrong, ErrCacheFull)
		}
	}
	if !expect(t, s.real.Keep(from, path), wrong...) {
		return
	}
	tokens := s.tokens[:from:from]
	for _, at := range path {
		tokens = append(tokens, s.tokens[from+at])
	}
	s.tokens, s.pages = tokens, pages[:m.pagesFor(n):m.pagesFor(n)]
	if n <= s.gone[0] {
		s.gone, s.most = [2]int{}, n
	}
}

func (m *cacheModel) Release(t *rapid.T) {
	s := m.pick(t)
	if rapid.IntRange(0, 3).Draw(t, "keep") != 0 {
		t.Skip("sequences are to grow")
	}
	if expect(t, s.real.Release(), s.wrong()...) {
		s.released, s.tokens, s.pages, s.gone = true, nil, nil, [2]int{}
	}
}

// Save saves a sequence, whole, and loads it as another one.
func (m *cacheModel) Save(t *rapid.T) {
	s := m.pick(t)
	if live := m.live(); len(live) >= 7 {
		t.Skip("enough sequences")
	}
	var b bytes.Buffer
	_, err := s.real.WriteTo(&b)
	if !expect(t, err, s.wrong()...) {
		return
	}
	var wrong []error
	need := len(there(s.pages))
	if need > m.cache.config.Pages-len(m.held()) {
		wrong = append(wrong, ErrCacheFull)
	}
	loaded, err := m.cache.ReadSequence(&b)
	if !expect(t, err, wrong...) {
		return
	}
	fresh := &modelSequence{real: loaded, tokens: slices.Clone(s.tokens), pages: slices.Clone(s.pages), gone: s.gone, most: s.most}
	for i, p := range fresh.pages {
		if p != nil {
			fresh.pages[i] = new(modelPage)
		}
	}
	m.add(t, fresh)
}

// drawTree is a tree of so many tokens.
func drawTree(t *rapid.T, tokens int) attn.Tree {
	parents := make([]int, tokens)
	for i := range parents {
		parents[i] = rapid.IntRange(-1, i-1).Draw(t, "parent")
	}
	tree, err := attn.TreeOf(parents)
	noError(t, err)
	return tree
}

// Set makes a step of sequences that can be in one, with counts that fit its rows.
func (m *cacheModel) Set(t *rapid.T) {
	if s := m.pickStep(t); !s.open {
		m.setIdle(t, s)
	}
}

func (m *cacheModel) setIdle(t *rapid.T, s *modelStep) { m.set(t, s, m.drawIdle(t, s), nil) }

func (m *cacheModel) drawIdle(t *rapid.T, s *modelStep) (parts []modelPart) {
	var idle []*modelSequence
	for _, q := range m.live() {
		if q.step == nil {
			idle = append(idle, q)
		}
	}
	if len(idle) == 0 {
		t.Skip("nothing to set")
	}
	left := s.step.tokens
	for _, i := range rapid.Permutation(indexes(len(idle))).Draw(t, "order") {
		if left == 0 || len(parts) > 0 && rapid.IntRange(0, 3).Draw(t, "stop") == 0 {
			break
		}
		n := rapid.IntRange(1, left).Draw(t, "tokens")
		left -= n
		p := modelPart{modelSequence: idle[i], fresh: newTestTokens(n, m.cache.config.Layers)}
		if s.mask.Causal && s.mask.Window == 0 && rapid.Bool().Draw(t, "a tree") {
			p.tree = drawTree(t, n)
		}
		parts = append(parts, p)
	}
	return parts
}

// SetAnything makes mistakes as well.
func (m *cacheModel) SetAnything(t *rapid.T) {
	s := m.pickStep(t)
	parts, wrong := m.drawAnything(t, s)
	m.set(t, s, parts, wrong)
}

func (m *cacheModel) drawAnything(t *rapid.T, s *modelStep) (parts []modelPart, wrong []error) {
	rows := 0
	if s.open {
		wrong = append(wrong, ErrState)
	}
	for range rapid.IntRange(0, 3).Draw(t, "appends") {
		n := rapid.IntRange(-1, s.step.tokens+1).Draw(t, "tokens")
		p := modelPart{fresh: newTestTokens(max(n, 0), m.cache.config.Layers)}
		if n < 1 || n > s.step.tokens-rows {
			wrong = append(wrong, ErrLength)
		}
		rows += n
		if rapid.IntRange(0, 3).Draw(t, "a tree") == 0 {
			p.tree = drawTree(t, max(n, 0))
			if !s.mask.Causal || s.mask.Window > 0 {
				wrong = append(wrong, ErrUnsupported)
			}
			if rapid.IntRange(0, 3).Draw(t, "a bad one") == 0 {
				p.tree = append(p.tree, 1<<63)
				wrong = append(wrong, ErrShape)
			}
		}
		switch which := rapid.IntRange(-2, len(m.sequences)-1).Draw(t, "which"); which {
		case -2:
			wrong = append(wrong, ErrState) // no sequence
		case -1:
			p.modelSequence = &modelSequence{real: m.other}
			wrong = append(wrong, ErrState)
		default:
			p.modelSequence = m.sequences[which]
			wrong = append(wrong, p.wrong()...)
		}
		for _, q := range parts {
			if q.modelSequence == p.modelSequence {
				wrong = append(wrong, ErrState)
			}
		}
		parts = append(parts, p)
	}
	return parts, wrong
}

func (m *cacheModel) set(t *rapid.T, s *modelStep, parts []modelPart, wrong []error) {
	appends, wrong := m.plan(t, parts, wrong)
	if expect(t, s.step.Set(appends), wrong...) {
		m.opened(s, parts)
	}
}

func (m *cacheModel) opened(s *modelStep, parts []modelPart) {
	s.open, s.parts, s.lastRun = true, parts, make(map[int]bool)
	for _, p := range parts {
		p.step = s
	}
}

// plan says which pages parts will have, and what Set says.
func (m *cacheModel) plan(t *rapid.T, parts []modelPart, wrong []error) (appends []Append, _ []error) {
	for _, p := range parts {
		a := Append{Tokens: len(p.fresh), Parents: reftest.Parents(p.tree)}
		if p.modelSequence != nil {
			a.Seq = p.real
		}
		appends = append(appends, a)
	}
	if wrong != nil {
		_, _ = m.cache.Need(appends) // it changes nothing, whatever is wrong
	} else {
		free, need := m.cache.config.Pages-len(m.held()), 0
		among := make(map[*modelPage]int) // the pages of these sequences, and how many of them have each
		for _, p := range parts {
			for _, page := range there(p.pages) {
				among[page]++
			}
		}
		least := len(among) // if all other sequences are released
		for i := range parts {
			p := &parts[i]
			p.after = slices.Clone(p.pages)
			if last := len(p.pages) - 1; len(p.tokens)%m.cache.config.PageSize != 0 && m.holders()[p.pages[last]] > 1 {
				if among[p.pages[last]] == 1 {
					least--
				}
				p.after = p.after[:last]
			}
			for len(p.after) < m.pagesFor(len(p.tokens)+len(p.fresh)) { // pages are numbered from the first token on
				p.after = append(p.after, new(modelPage))
				need++
			}
		}
		switch least += need; {
		case need > free && least > m.cache.config.Pages:
			wrong = append(wrong, ErrLength)
		case need > free:
			wrong = append(wrong, ErrCacheFull)
		}
		if n, err := m.cache.Need(appends); !errors.Is(err, ErrLength) && n != need || errors.Is(err, ErrLength) != (len(wrong) > 0 && wrong[0] == ErrLength) {
			t.Fatalf("%d pages are needed, error %v; want %d, %v", n, err, need, wrong)
		}
	}
	return appends, wrong
}

// The cache does what a map of sequences to rows does, whatever is done to it
// and in whatever order; and its pages are shared as they should be.
func TestCacheAgainstModel(t *testing.T) {
	SharePrefixes(t)
	testCacheAgainstModel(t, modelPlace{}, 12, 10_000)
}

func testCacheAgainstModel(t *testing.T, at modelPlace, rounds, least int) {
	actions := 0
	rapid.Check(t, func(rt *rapid.T) {
		m := newCacheModel(rt, at, &actions)
		defer m.close()
		for range rounds {
			rt.Repeat(rapid.StateMachineActions(m))
		}
		m.checkClosed(rt)
	})
	t.Logf("%d actions", actions)
	asked := false
	flag.Visit(func(f *flag.Flag) {
		asked = asked || f.Name == "rapid.checks" || f.Name == "rapid.steps" || f.Name == "rapid.failfile"
	})
	if actions < least && !t.Failed() && !asked && !testing.Short() {
		t.Errorf("only %d actions", actions)
	}
}
