package decoder

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"gorgonia.org/leanattention/examples/opt/tiny"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/rope"

	la "gorgonia.org/leanattention"

	"gorgonia.org/tensor"

	"gorgonia.org/leanattention/decoder/tokenizer"
)

// smallNetwork is a network whose steps take some microseconds.
func smallNetwork() *transformer {
	t := &transformer{
		sizes: Sizes{Vocab: 13, Context: 4096, Layers: 1, KVHeads: 1, HeadDim: 8}, names: llamaNames,
		width: 8, embedding: 8, inner: 8, heads: 1, eps: 1e-5, preNorms: true, gated: true, activation: nn.SiLU, tied: true,
	}
	t.rotate(rope.Config{HeadDim: 8})
	return t
}

// namedWeights has random numbers that depend on the name.
type namedWeights struct{}

func (namedWeights) Tensor(name string, shape ...int) (*tensor.Dense, error) {
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(goldenValues(name, tensor.Shape(shape).TotalSize()))), nil
}

func smallEngine(t testing.TB, o Options) *Engine {
	t.Helper()
	return networkEngine(t, smallNetwork(), namedWeights{}, o)
}

// networkEngine returns an engine that is closed when the test ends.
func networkEngine(t testing.TB, n Network, from Weights, o Options) *Engine {
	t.Helper()
	e, err := NewEngine(n, from, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

// ids returns the tokens of a text when it has ended.
func ids(t *Text) (all []int, err error) {
	for token, err := range t.Tokens() {
		if err != nil {
			return all, err
		}
		if token.ID >= 0 {
			all = append(all, token.ID)
		}
	}
	return all, nil
}

// alone returns the continuation of a prompt without other texts.
func alone(t testing.TB, e *Engine, r Request) []int {
	t.Helper()
	text, err := e.Start(context.Background(), r)
	if err != nil {
		t.Fatal(err)
	}
	all, err := ids(text)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// pagesLost returns the pages that are neither free nor of a retained sequence, once the engine is idle.
func pagesLost(e *Engine) error {
	e.work.Wait()
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.scheduler.idle() {
		return errors.New("texts are left")
	}
	for len(e.scheduler.retained) > 0 {
		e.scheduler.evict(0)
	}
	if st := e.cache.Stats(); st.FreePages != e.cache.Config().Pages || st.Sequences != 0 {
		return fmt.Errorf("%+v of %d pages", st, e.cache.Config().Pages)
	}
	return nil
}

// TestConversations: 16 conversations with the shipped model, in a cache for a quarter of their tokens, have the texts that
// they have alone.
func TestConversations(t *testing.T) {
	m, err := OpenFS("the shipped model", tiny.Files)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	const context_, turns = 256, 3
	conversations := reftest.Cases(t, 8, 16)
	run := func(o Options, together bool) [][]int {
		o.Context, o.Exact = context_, true
		e, err := m.Engine(o)
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		all := make([][]int, conversations)
		talk := func(i int) {
			text := encode(t, m, fmt.Sprintf("Once upon a time there was a king with %d daughters.", i%5+2), false)
			for turn := range turns {
				text = append(text, encode(t, m, []string{" Then", " But", " At last"}[(i+turn)%3], true)...)
				said, err := e.Start(context.Background(), Request{Prompt: text, Tokens: 45, Ends: []int{}, Draft: i % 3 * min(o.Draft, 2)})
				if err != nil {
					t.Error(err)
					return
				}
				more, err := ids(said)
				if err != nil {
					t.Error(err)
				}
				text = append(text, more...)
			}
			all[i] = text
		}
		var wait sync.WaitGroup
		for i := range conversations {
			if !together {
				talk(i)
				continue
			}
			wait.Add(1)
			go func() { defer wait.Done(); talk(i) }()
		}
		wait.Wait()
		if err := pagesLost(e); err != nil {
			t.Error(err)
		}
		if st := e.stats; together && (st.Preempted == 0 || st.SharedTokens == 0 || st.MostTexts < 4) {
			t.Errorf("%+v", st)
		}
		return all
	}
	want := run(Options{Batch: 1, Tokens: context_}, false)
	got := run(Options{Batch: conversations, Tokens: conversations * context_ / 4, Chunk: 40, Draft: 4}, true)
	for i := range want {
		if !slices.Equal(got[i], want[i]) {
			t.Errorf("conversation %d: %q, want %q", i, m.Tokenizer().Decode(got[i]), m.Tokenizer().Decode(want[i]))
		}
	}
}

// faultyRunner fails now and then. In place of a GPU it chooses tokens and computes steps ahead.
type faultyRunner struct {
	runner
	rng    *rand.Rand
	calls  *int   // calls of ahead
	chosen *[]int // by the last step of ahead
}

// newFaultyRunner counts calls of ahead; nil: the host chooses.
func newFaultyRunner(r runner, rng *rand.Rand, calls *int) faultyRunner {
	return faultyRunner{r, rng, calls, new([]int)}
}

var errFault = errors.New("a fault")

func (f faultyRunner) run(appends []la.Append, tokens []int, all, logits bool, draws []draw) (r results, err error) {
	if f.rng.IntN(400) == 0 {
		return r, errFault
	}
	if r, err = f.runner.run(appends, tokens, all, true, nil); err != nil || f.calls == nil {
		return r, err
	}
	const vocab = 13
	r.drawn = draws != nil
	for row := range len(r.logits) / vocab {
		var d draw
		if r.drawn {
			d = draws[row]
		}
		r.chosen = append(r.chosen, d.Choose(r.logits[row*vocab:(row+1)*vocab], d.random))
	}
	if !logits {
		r.logits = nil
	}
	return r, nil
}

func (f faultyRunner) readSequence(r io.Reader) (*la.Sequence, error) {
	switch f.rng.IntN(8) {
	case 0:
		return nil, errFault
	case 1:
		r = io.LimitReader(r, f.rng.Int64N(5000))
	}
	return f.runner.readSequence(r)
}

func (f faultyRunner) draws() bool { return f.calls != nil }

func (f faultyRunner) mostAhead() int {
	if f.calls == nil {
		return 0
	}
	return 5
}

func (f faultyRunner) ahead(appends []la.Append, tokens []int, steps int, draws []draw) (func() ([]int, error), error) {
	*f.calls++
	if tokens == nil {
		tokens = *f.chosen
	}
	var chosen []int
	for i := range steps {
		var own []draw
		if draws != nil {
			own = draws[i*len(appends) : (i+1)*len(appends)]
		}
		r, err := f.run(appends, tokens, false, false, own)
		if err != nil {
			return nil, err
		}
		tokens = r.chosen[:len(appends)]
		chosen = append(chosen, tokens...)
	}
	*f.chosen = tokens
	var err error
	if f.rng.IntN(400) == 0 {
		err = errFault
	}
	waited := false
	return func() ([]int, error) {
		if waited {
			panic("wait is called twice")
		}
		waited = true
		return chosen, err
	}, nil
}

// TestJoinsAndLeaves: texts of random lengths join and leave, are cancelled, share beginnings and fail. No page is lost, and
// texts that end have the tokens that they have alone.
func TestJoinsAndLeaves(t *testing.T) {
	t.Run("the host chooses", func(t *testing.T) { testJoinsAndLeaves(t, nil, "") })
	t.Run("files", func(t *testing.T) {
		dir := t.TempDir()
		testJoinsAndLeaves(t, nil, dir)
		if files, err := os.ReadDir(dir); err != nil || len(files) > 0 {
			t.Errorf("%v, %v", files, err)
		}
	})
	t.Run("steps ahead", func(t *testing.T) {
		ahead := 0
		if testJoinsAndLeaves(t, &ahead, ""); ahead < 100 {
			t.Errorf("%d times", ahead)
		}
	})
}

func testJoinsAndLeaves(t *testing.T, ahead *int, swap string) {
	rng := reftest.Rand(t)
	texts := reftest.Cases(t, 400, 17000) // together 10^5 joins and leaves
	reference := smallEngine(t, Options{Context: 400, Exact: true})
	o := Options{Context: 400, Tokens: 400, Batch: 6, Chunk: 30, Draft: 6, Exact: true, Swap: swap}
	if swap != "" {
		o.SwapBytes = 40000 // of about three texts
	}
	e := smallEngine(t, o)
	e.scheduler.runner = newFaultyRunner(e, rand.New(rand.NewPCG(rng.Uint64(), 2)), ahead)

	var beginnings [][]int
	random := func(n int) (ids []int) {
		for range n {
			ids = append(ids, rng.IntN(13))
		}
		return ids
	}
	for range 5 {
		beginnings = append(beginnings, random(rng.IntN(150)))
	}
	type running struct {
		text   *Text
		r      Request
		cancel context.CancelCauseFunc
	}
	var all []running
	faults, cancelled, compared := 0, 0, 0
	check := func(x running) {
		got, err := ids(x.text)
		x.cancel(nil)
		switch {
		case errors.Is(err, errFault):
			faults++
			return
		case err != nil:
			t.Fatal(err)
		case x.text.Reason() == Cancelled:
			cancelled++
		}
		if rng.IntN(10) > 0 {
			return
		}
		compared++
		r := x.r
		r.Draft = 0
		want := alone(t, reference, r)
		if x.text.Reason() == Cancelled {
			want = want[:min(len(got), len(want))]
		}
		if !slices.Equal(got, want) {
			t.Fatalf("a prompt of %d tokens, %+v: continued with %v, want %v", len(x.r.Prompt), x.r, got, want)
		}
	}
	missing := func() bool {
		st := e.Stats()
		return faults == 0 || cancelled == 0 || compared == 0 || st.Preempted == 0 || st.SharedTokens == 0 || st.Accepted == 0 || swap != "" && (st.Resumed == 0 || st.Resumed == st.Preempted)
	}
	for range reftest.AtLeast(texts, func() bool { return !missing() }) {
		r := Request{Prompt: append(slices.Clone(beginnings[rng.IntN(5)]), random(1+rng.IntN(20))...), Tokens: rng.IntN(60), Draft: rng.IntN(7), Ends: []int{}, Priority: rng.IntN(3) - 1}
		if rng.IntN(20) > 0 {
			r.Tokens++ // not 0: the whole context
		}
		if rng.IntN(3) == 0 {
			r.Ends = append(r.Ends, rng.IntN(13))
		}
		switch rng.IntN(6) {
		case 0:
			r.Sampling = Sampling{Temperature: 1, TopK: rng.IntN(14), TopP: 0.9, Seed: rng.Uint64()}
		case 1:
			r.Sampling = Sampling{Temperature: 0.7, Seed: rng.Uint64()}
		case 2:
			r.Sampling = Sampling{Temperature: 0.7, MinP: 0.1, RepetitionPenalty: 1.1, Seed: rng.Uint64()} // by the host
		}
		most := 20
		if ahead != nil { // without guesses, and with texts that do not wait
			if most = 4; rng.IntN(12) > 0 {
				r.Draft = 0
			}
		}
		ctx, cancel := context.WithCancelCause(context.Background())
		text, err := e.Start(ctx, r)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, running{text, r, cancel})
		if rng.IntN(8) == 0 {
			all[rng.IntN(len(all))].cancel(errFault)
		}
		for len(all) > most {
			i := rng.IntN(len(all))
			check(all[i])
			all = slices.Delete(all, i, i+1)
		}
	}
	for _, x := range all {
		check(x)
	}
	if err := pagesLost(e); err != nil {
		t.Error(err)
	}
	if s := e.scheduler.swap; s != nil && s.used != 0 {
		t.Errorf("%d bytes of files are left", s.used)
	}
	t.Logf("%d texts failed, %d were cancelled, %d were compared; %+v", faults, cancelled, compared, e.Stats())
	if missing() {
		t.Error("a kind is missing")
	}
}

// TestStepsAhead: a text is as many steps ahead as it has chosen tokens, also after it dropped tokens.
func TestStepsAhead(t *testing.T) {
	e := smallEngine(t, Options{Context: 400, Exact: true})
	calls := 0
	e.scheduler.runner = newFaultyRunner(e, rand.New(rand.NewPCG(1, 2)), &calls)
	seq, err := e.newSequence()
	if err != nil {
		t.Fatal(err)
	}
	defer seq.Release()
	for _, dropped := range []int{0, 60, 90} {
		for added, want := range []int{1, 1, 2, 3, 4, 5, 5, 5} {
			text := &Text{tokens: make([]int, 100-dropped+added), prompt: 100, dropped: dropped, limit: 400, sampler: &sampler{choice: &nn.Choice{}}, seq: seq}
			if got := e.scheduler.stepsAhead([]work{{text, 1}}); got != want {
				t.Errorf("%d tokens dropped, %d chosen: %d steps, want %d", dropped, added, got, want)
			}
			for before, want := range map[int]int{1: min(added+1, 5), 2: min(added+2, 5), 297: 3 - added, 299: 1 - added, 400: 0} {
				text.limit = 100 - dropped + 300
				e.scheduler.queued = &queued{steps: before}
				if got := e.scheduler.stepsAhead([]work{{text, 1}}); got != max(want, 0) {
					t.Errorf("%d tokens dropped, %d chosen, %d queued: %d steps, want %d", dropped, added, before, got, want)
				}
				e.scheduler.queued = nil
			}
		}
	}
}

// TestSmallSteps: prompts that are read one to six tokens at a time have the same texts.
func TestSmallSteps(t *testing.T) {
	prompt := []int{1, 5, 2, 8, 3, 1, 12, 4, 0, 7, 9}
	want := alone(t, smallEngine(t, Options{Context: 60, Exact: true}), Request{Prompt: prompt, Tokens: 20, Ends: []int{}})
	for _, o := range []Options{{Batch: 1, Chunk: 1}, {Batch: 1, Chunk: 2}, {Batch: 4, Chunk: 4}, {Batch: 5, Chunk: 6, Draft: 2}} {
		o.Context, o.Exact = 60, true
		e := smallEngine(t, o)
		var texts []*Text
		for range 3 {
			text, err := e.Start(context.Background(), Request{Prompt: prompt, Tokens: 20, Ends: []int{}, Draft: o.Draft})
			if err != nil {
				t.Fatal(err)
			}
			texts = append(texts, text)
		}
		for _, text := range texts {
			if got, err := ids(text); err != nil || !slices.Equal(got, want) {
				t.Errorf("%+v: %v, %v, want %v", o, got, err, want)
			}
		}
	}
}

// TestStartAll: texts that start together join at one step. A wrong request among them starts none.
func TestStartAll(t *testing.T) {
	e := smallEngine(t, Options{Context: 60, Tokens: 400, Batch: 5, Exact: true})
	requests := []Request{{Prompt: []int{1, 2}, Tokens: 9, Ends: []int{}}, {Prompt: []int{3}, Tokens: 9, Ends: []int{}}, {Prompt: []int{4, 5, 6}, Tokens: 9, Ends: []int{}}}
	texts, err := e.StartAll(context.Background(), requests...)
	if err != nil || len(texts) != 3 {
		t.Fatal(err)
	}
	for i, text := range texts {
		got, err := ids(text)
		if want := alone(t, smallEngine(t, Options{Context: 60, Exact: true}), requests[i]); err != nil || !slices.Equal(got, want) {
			t.Errorf("text %d: %v, %v, want %v", i, got, err, want)
		}
	}
	if st := e.Stats(); st.Steps != 9 || st.MostTexts != 3 {
		t.Errorf("%+v", st)
	}
	_, err = e.StartAll(context.Background(), requests[0], Request{})
	if !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), "request 2 of 2: ") || e.Stats().Steps != 9 {
		t.Errorf("%v, %+v", err, e.Stats())
	}
	if texts, err := e.StartAll(context.Background()); err != nil || len(texts) > 0 {
		t.Errorf("no requests: %v, %v", texts, err)
	}
}

// encode returns the ids of a text, with the tokens around it unless it is bare.
func encode(t testing.TB, m *Model, text string, bare bool) []int {
	ids, err := m.Tokenizer().Encode(text, tokenizer.Options{Bare: bare})
	if err != nil {
		t.Error(err)
	}
	return ids
}
