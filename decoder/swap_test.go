package decoder

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/devicetest"

	"gorgonia.org/tensor"
)

// tokensOf returns n tokens, which differ for each seed.
func tokensOf(n, seed int) (ids []int) {
	rng := rand.New(rand.NewPCG(uint64(seed), 0))
	for range n {
		ids = append(ids, rng.IntN(13))
	}
	return ids
}

// recorder is a constraint that notes whose tokens are chosen. Token 12 is none of them.
type recorder struct {
	text  int
	order *[]int
}

func (recorder) Allowed() []uint64 { return []uint64{1<<12 - 1} }

func (r recorder) Accept(int) { *r.order = append(*r.order, r.text) }

// TestPriority: of texts that start together, the most urgent one comes first, and takes pages from others, which go on with the same text.
func TestPriority(t *testing.T) {
	for _, dir := range []string{"", t.TempDir()} {
		o := Options{Context: 400, Tokens: 400, Batch: 1, Exact: true, Swap: dir}
		e := smallEngine(t, o)
		var requests []Request
		var order []int
		for i, priority := range []int{3, 0, -2, 0, 3} {
			requests = append(requests, Request{Prompt: tokensOf(20, i), Tokens: 2, Ends: []int{12}, Priority: priority, Constraint: recorder{i, &order}})
		}
		texts, err := e.StartAll(context.Background(), requests...)
		if err != nil {
			t.Fatal(err)
		}
		for _, text := range texts {
			if _, err := text.Wait(); err != nil {
				t.Fatal(err)
			}
		}
		if want := []int{2, 2, 1, 1, 3, 3, 0, 0, 4, 4}; !slices.Equal(order, want) {
			t.Errorf("tokens of texts %v, want %v", order, want)
		}

		o.Batch = 4
		e = smallEngine(t, o)
		order = nil
		slow := Request{Prompt: tokensOf(150, 7), Tokens: 220, Ends: []int{12}, Priority: 1, Constraint: recorder{0, &order}}
		first := addText(t, e, context.Background(), slow)
		for len(first.out) == 0 {
			e.scheduler.step()
		}
		urgent := Request{Prompt: tokensOf(250, 8), Tokens: 100, Ends: []int{12}, Constraint: recorder{1, &order}}
		second := addText(t, e, context.Background(), urgent)
		for !e.scheduler.idle() {
			e.scheduler.step()
		}
		fast, err := ids(second)
		rest, e2 := ids(first)
		if err = errors.Join(err, e2); err != nil {
			t.Fatal(err)
		}
		if st := e.Stats(); order[len(order)-1] != 0 || st.Preempted == 0 || (st.Resumed > 0) != (dir != "") {
			t.Errorf("with folder %q: %+v, tokens of texts %v", dir, st, order)
		}
		reference := smallEngine(t, Options{Context: 400, Exact: true})
		if want := alone(t, reference, urgent); !slices.Equal(fast, want) {
			t.Errorf("the urgent text: %v, want %v", fast, want)
		}
		if want := alone(t, reference, slow); !slices.Equal(rest, want) {
			t.Errorf("the other text: %v, want %v", rest, want)
		}
	}
}

// addText adds a text to an engine whose steps the test computes.
func addText(t *testing.T, e *Engine, ctx context.Context, r Request) *Text {
	t.Helper()
	text, err := e.newText(ctx, r)
	if err != nil {
		t.Fatal(err)
	}
	e.scheduler.add(text)
	return text
}

// lateContext is a context whose deadline comes when the test says so.
type lateContext struct {
	context.Context
	late *bool
}

func (c lateContext) Err() error {
	if *c.late {
		return context.DeadlineExceeded
	}
	return nil
}

// TestLate: a deadline ends a text that waits, and one that is computed.
func TestLate(t *testing.T) {
	e := smallEngine(t, Options{Context: 400, Batch: 1})
	ctx := lateContext{context.Background(), new(bool)}
	forever := Request{Prompt: []int{1, 2}, Ends: []int{}, Shift: true}
	first, second := addText(t, e, ctx, forever), addText(t, e, ctx, forever)
	for len(first.out) < 5 {
		e.scheduler.step()
	}
	*ctx.late = true
	e.scheduler.step()
	for i, text := range []*Text{first, second} {
		if got, err := ids(text); err != nil || text.Reason() != Late || len(got) != 5-5*i {
			t.Errorf("text %d: %d tokens, %q, %v", i, len(got), text.Reason(), err)
		}
	}
	past, cancel := context.WithDeadline(context.Background(), time.Now().Add(-time.Second))
	defer cancel()
	steps := e.Stats().Steps
	text, err := e.Start(past, forever)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := ids(text); err != nil || len(got) > 0 || text.Reason() != Late || e.Stats().Steps != steps {
		t.Errorf("%v, %q, %v", got, text.Reason(), err)
	}
}

// TestSwapFolder: an engine removes the files of a process that has ended, and no other files. Wrong options are errors.
func TestSwapFolder(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "folder")
	for _, name := range []string{"leanattention-123.swap", "leanattention-x.swap", "other.swap", "leanattention-1.swap.txt"} {
		if err := errors.Join(os.MkdirAll(dir, 0o777), os.WriteFile(filepath.Join(dir, name), []byte("old"), 0o666)); err != nil {
			t.Fatal(err)
		}
	}
	smallEngine(t, Options{Swap: dir})
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != 2 || files[0].Name() != "leanattention-1.swap.txt" {
		t.Errorf("%v, %v", files, err)
	}
	for want, o := range map[string]Options{
		"SwapBytes is -1":      {Swap: dir, SwapBytes: -1},
		"Swap names no folder": {SwapBytes: 5},
		"Options.Swap: ":       {Swap: filepath.Join(dir, "other.swap")},
	} {
		if _, err := NewEngine(smallNetwork(), namedWeights{}, o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v", o, err)
		}
	}
}

// TestPin: pinned tokens stay in the cache, whatever else it has to hold. Of other sequences, that whose last use is longest ago goes first.
func TestPin(t *testing.T) {
	e := smallEngine(t, Options{Context: 256, Tokens: 768, Batch: 2, Exact: true})
	shared := func(seed int) int {
		t.Helper()
		text, err := e.Start(context.Background(), Request{Prompt: append(tokensOf(100, seed), 3, 4, 5), Tokens: 4, Ends: []int{}})
		if err == nil {
			_, err = text.Wait()
		}
		if err != nil {
			t.Fatal(err)
		}
		return text.Shared()
	}
	if err := e.Pin(context.Background(), tokensOf(100, 1)); err != nil {
		t.Fatal(err)
	}
	want := alone(t, smallEngine(t, Options{Context: 256, Exact: true}), Request{Prompt: append(tokensOf(100, 1), 7), Tokens: 20, Ends: []int{}})
	for i := range 80 {
		if n := shared(2 + i); n != 0 {
			t.Fatalf("text %d shares %d tokens", i, n)
		}
		if i%20 == 0 {
			if n := shared(1); n < 100 {
				t.Errorf("behind text %d: %d tokens are shared", i, n)
			}
		}
	}
	if got := alone(t, e, Request{Prompt: append(tokensOf(100, 1), 7), Tokens: 20, Ends: []int{}}); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	for seed := 301; seed < 304; seed++ {
		shared(seed)
	}
	shared(301)
	e.work.Wait()
	e.mu.Lock()
	for range 2 { // 302 and 303, behind those before
		for p := range slices.Values(slices.Clone(e.scheduler.retained)) {
			if s := &e.scheduler; !p.pinned && common(p.tokens, tokensOf(100, 301)) < 100 {
				s.makeFree(s.runner.freePages()+1, nil)
			}
		}
	}
	e.mu.Unlock()
	if n := shared(302); n != 0 {
		t.Errorf("the older text shares %d tokens", n)
	}
	if n := shared(301); n < 100 {
		t.Errorf("the text that was used last shares %d tokens", n)
	}

	done, cancel := context.WithCancel(context.Background())
	cancel()
	for i := range 5 {
		if err := e.Pin(done, tokensOf(300-i, 9)[:250]); !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled: %v", err)
		}
	}
	for want, tokens := range map[error][]int{ErrTooLong: tokensOf(257, 1), ErrConfig: tokensOf(15, 1)} {
		if err := e.Pin(context.Background(), tokens); !errors.Is(err, want) {
			t.Errorf("%d tokens: %v", len(tokens), err)
		}
	}
	if err := errors.Join(e.Pin(context.Background(), tokensOf(256, 11)), e.Pin(context.Background(), tokensOf(129, 12))); err == nil || !strings.Contains(err.Error(), "make Tokens larger") {
		t.Errorf("too many tokens: %v", err)
	}
	if got := alone(t, e, Request{Prompt: tokensOf(250, 13), Ends: []int{}}); len(got) != 7 {
		t.Errorf("a whole context beside pinned tokens: %v", got)
	}
	if err := pagesLost(e); err != nil {
		t.Error(err)
	}
}

// TestSwapTypes: texts that go on from files have the same tokens, none of which is computed twice, for caches of each type.
func TestSwapTypes(t *testing.T) {
	testSwapTypes(t, 70, 150, 32, Options{Context: 300, Tokens: 320}, tensor.Float32, la.Float16, la.BFloat16, la.E4M3, tensor.Int8, la.Q4, tensor.Dtype{})
}

func TestGPUSwap(t *testing.T) {
	testSwapTypes(t, 38, 30, 64, Options{Context: 80, Tokens: 128, Device: devicetest.Open(t)}, la.Float16)
}

// testSwapTypes continues three texts. The zero type stands for a cache of the last tokens alone.
func testSwapTypes(t *testing.T, prompt, tokens, dim int, o Options, caches ...tensor.Dtype) {
	for _, cache := range caches {
		o := o
		o.Batch, o.BatchInvariant, o.Cache = 3, true, cache
		network := func() Network { return wideHeads(1, dim) }
		if cache == (tensor.Dtype{}) {
			network = func() Network { return windowNetwork() }
			o.Context, o.Tokens, o.Chunk, o.BatchInvariant = 1000, 20+64+30+4*64, 30, false
		}
		var requests []Request
		for i := range 3 {
			requests = append(requests, Request{Prompt: tokensOf(prompt+i, i), Tokens: tokens, Ends: []int{}, Sampling: Sampling{Temperature: 1, Seed: uint64(i)}})
		}
		reference := networkEngine(t, network(), namedWeights{}, o)
		o.Swap = t.TempDir()
		e := networkEngine(t, network(), namedWeights{}, o)
		texts, err := e.StartAll(context.Background(), requests...)
		if err != nil {
			t.Fatal(err)
		}
		for i, text := range texts {
			got, err := ids(text)
			if want := alone(t, reference, requests[i]); err != nil || !slices.Equal(got, want) {
				t.Errorf("%v: text %d is %v, %v, want %v", cache, i, got, err, want)
			}
		}
		if st := e.Stats(); st.Resumed == 0 || st.Rows != 3*prompt+3+3*(tokens-1) { // no token is computed twice
			t.Errorf("%v: %+v", cache, st)
		}
	}
}
