package decoder

import (
	"context"
	"errors"
	"math"
	"runtime"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/ranks"

	la "gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// TestOptions: an option out of range is an error that names the option, its value and the range.
func TestOptions(t *testing.T) {
	for _, c := range []struct {
		o    Options
		kind error
		want string
	}{
		{Options{Context: -1}, ErrConfig, "Options.Context is -1, not in [1, 4096]"},
		{Options{Context: 4097}, ErrConfig, "Options.Context is 4097, not in [1, 4096]"},
		{Options{Context: 100, Tokens: 99}, ErrConfig, "Options.Tokens is 99, not in [100,"},
		{Options{Tokens: -1}, ErrConfig, "Options.Tokens is -1"},
		{Options{Tokens: 1<<30 + 1}, ErrConfig, "Options.Tokens is 1073741825"},
		{Options{Batch: -1}, ErrConfig, "Options.Batch is -1"},
		{Options{Chunk: -1}, ErrConfig, "Options.Chunk is -1"},
		{Options{Batch: 8, Chunk: 7}, ErrConfig, "Options.Chunk is 7, not in [8,"},
		{Options{Chunk: 1<<20 + 1}, ErrConfig, "Options.Chunk is 1048577"},
		{Options{Draft: -1}, ErrConfig, "Options.Draft is -1"},
		{Options{Draft: 1025}, ErrConfig, "Options.Draft is 1025, not in [0, 1024]"},
		{Options{Gap: 0.5}, ErrConfig, "Options.Gap is 0.5"}, {Options{Gap: math.NaN()}, ErrConfig, "Options.Gap is NaN"},
		{Options{Gap: 2, Ranks: new(ranks.Comm)}, ErrConfig, "Options.Gap is 2 with Ranks"},
		{Options{Workers: -1}, ErrConfig, "Options.Workers is -1"},
		{Options{Weights: tensor.Float64}, ErrConfig, "Options.Weights is float64; known are float32"},
		{Options{Cache: tensor.Int}, ErrConfig, "Options.Cache is int; known are float32"},
		{Options{Schedule: la.FixedSplit(-1)}, la.ErrOption, "-1"},
		{Options{Device: new(device.GPU)}, la.ErrState, ""},
	} {
		e, err := NewEngine(smallNetwork(), namedWeights{}, c.o)
		if e != nil || !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v, want %v with %q", c.o, err, c.kind, c.want)
		}
	}
	for _, c := range []struct {
		change func(s *Sizes)
		want   string
	}{
		{func(s *Sizes) { s.Vocab = 0 }, "Sizes.Vocab is 0"}, {func(s *Sizes) { s.Layers = 0 }, "Sizes.Layers is 0"},
		{func(s *Sizes) { s.KVHeads = -1 }, "Sizes.KVHeads is -1"}, {func(s *Sizes) { s.HeadDim = 0 }, "Sizes.HeadDim is 0"},
		{func(s *Sizes) { s.Context = -1 }, "Sizes.Context is -1"}, {func(s *Sizes) { s.Layers = 1 << 13 }, "Sizes.Layers is 8192"},
		{func(s *Sizes) { s.Windows = []int{4, 4} }, "Sizes.Windows has 2 of 1 layers"}, {func(s *Sizes) { s.Windows = []int{-4} }, "Sizes.Windows[0] is -4"},
		{func(s *Sizes) { s.LogitCap = math.NaN() }, "Sizes.LogitCap is NaN"}, {func(s *Sizes) { s.LogitCap = -1 }, "Sizes.LogitCap is -1"},
	} {
		n := smallNetwork()
		c.change(&n.sizes)
		if e, err := NewEngine(n, namedWeights{}, Options{}); e != nil || !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %q", err, c.want)
		}
	}
}

// TestRequests: a request out of range is an error that names the field and its value, and the engine goes on.
func TestRequests(t *testing.T) {
	e := smallEngine(t, Options{Context: 20, Draft: 3, Exact: true})
	for _, c := range []struct {
		r    Request
		kind error
		want string
	}{
		{Request{}, ErrConfig, "the prompt has no tokens"},
		{Request{Prompt: make([]int, 21)}, ErrTooLong, "the prompt has 21 tokens, and Options.Context is 20"},
		{Request{Prompt: []int{1, 13}}, ErrConfig, "Prompt[1] is 13, not in [0, 13)"},
		{Request{Prompt: []int{-1}}, ErrConfig, "Prompt[0] is -1"},
		{Request{Prompt: []int{1}, Ends: []int{2, 13}}, ErrConfig, "Ends[1] is 13"},
		{Request{Prompt: []int{1}, Ends: []int{-1}}, ErrConfig, "Ends[0] is -1"},
		{Request{Prompt: []int{1}, Tokens: -1}, ErrConfig, "Tokens is -1"},
		{Request{Prompt: []int{1}, Draft: -1}, ErrConfig, "Draft is -1"},
		{Request{Prompt: []int{1}, Draft: 4}, ErrConfig, "Draft is 4, not in [0, 3] of Options.Draft"},
		{Request{Prompt: []int{1}, LogProbs: -1}, ErrConfig, "LogProbs is -1"},
		{Request{Prompt: []int{1}, LogProbs: 14}, ErrConfig, "LogProbs is 14, not in [0, 13]"},
		{Request{Prompt: []int{1}, Keep: -1}, ErrConfig, "Keep is -1"},
		{Request{Prompt: []int{1}, Keep: 20}, ErrConfig, "Keep is 20"},
		{Request{Prompt: []int{1}, Stop: []string{"a"}}, ErrConfig, "no tokenizer"},
	} {
		text, err := e.Start(context.Background(), c.r)
		if text != nil || !errors.Is(err, c.kind) || !strings.HasPrefix(err.Error(), "decoder: Request: ") || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v, want %v with %q", c.r, err, c.kind, c.want)
		}
	}
	for what, tokens := range map[string][]int{"LogProbs: tokens[1] is 13": {1, 13}, "LogProbs: tokens[0] is -1": {-1}, "LogProbs: 21 tokens, and Options.Context is 20": make([]int, 21)} {
		if p, err := e.LogProbs(context.Background(), tokens); p != nil || err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%v, want %s", err, what)
		}
	}
	if st := e.Stats(); st != (Stats{FreeTokens: st.FreeTokens}) {
		t.Errorf("%+v", st)
	}
	// A prompt may fill the context: one token follows.
	text := start(t, e, Request{Prompt: make([]int, 20), Ends: []int{}})
	if got, err := ids(text); len(got) != 1 || err != nil || text.Reason() != Full {
		t.Errorf("%v, %q, %v", got, text.Reason(), err)
	}
}

// TestClosed: Close ends texts, and later calls are ErrClosed.
func TestClosed(t *testing.T) {
	e, err := NewEngine(smallNetwork(), namedWeights{}, Options{Context: 20})
	if err != nil {
		t.Fatal(err)
	}
	text := start(t, e, Request{Prompt: []int{1}, Ends: []int{}, Shift: true}) // without an end
	for range text.Tokens() {
		break
	}
	if err := errors.Join(e.Close(), e.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := text.Wait(); !errors.Is(err, ErrClosed) || !errors.Is(text.Err(), ErrClosed) || text.Reason() != "" {
		t.Errorf("%v, %q", err, text.Reason())
	}
	_, started := e.Start(context.Background(), Request{Prompt: []int{1}})
	_, scored := e.LogProbs(context.Background(), []int{1, 2})
	if !errors.Is(started, ErrClosed) || !errors.Is(scored, ErrClosed) {
		t.Errorf("%v, %v", started, scored)
	}
}

// failingMachine is a machine whose only op fails: a token is outside of its table.
type failingMachine struct {
	G.VM
	close func() error
}

func (m failingMachine) Close() error { return m.close() }

func newFailingMachine(t *testing.T) failingMachine {
	t.Helper()
	g := G.NewGraph()
	table := input(g, "table", tensor.New(tensor.WithShape(2, 4), tensor.Of(tensor.Float32)))
	if _, err := nn.Embedding(table, input(g, "ids", tensor.New(tensor.WithShape(1), tensor.WithBacking([]int{7}))), nil); err != nil {
		t.Fatal(err)
	}
	m := G.NewTapeMachine(g)
	return failingMachine{m, m.Close}
}

// TestOpErrors: an error of an op ends the texts of the step, as the op says it, without the machine's instructions. The sequences
// are as before, and the engine goes on.
func TestOpErrors(t *testing.T) {
	e := smallEngine(t, Options{Context: 40, Draft: 4, Exact: true})
	want := alone(t, e, Request{Prompt: []int{1, 2, 3}, Tokens: 9, Ends: []int{}})
	s, err := e.newSequence()
	if err != nil {
		t.Fatal(err)
	}
	for _, all := range []bool{false, true} {
		for _, tokens := range [][]int{{13}, {1, -1}} { // of a vocabulary of 13
			_, err := e.run([]la.Append{{Seq: s, Tokens: len(tokens)}}, tokens, all, true, nil)
			if !errors.Is(err, la.ErrLength) || !strings.HasPrefix(err.Error(), "leanattention: nn.Embedding: ids[") || s.Len() != 0 {
				t.Errorf("%v: %v, %d tokens", tokens, err, s.Len())
			}
		}
	}
	if err := s.Release(); err != nil {
		t.Error(err)
	}
	for _, g := range append(slices.Clone(e.graphs), e.verify) {
		failing := newFailingMachine(t)
		vm := g.vm
		g.vm = failing
		var texts []*Text
		for range 2 {
			texts = append(texts, start(t, e, Request{Prompt: []int{1, 2, 3}, Tokens: 30, Draft: 4, Ends: []int{}}))
		}
		failed := 0
		for _, text := range texts {
			if _, err := text.Wait(); err != nil {
				if failed++; !errors.Is(err, la.ErrLength) || !strings.HasPrefix(err.Error(), "leanattention: nn.Embedding: ids[0] is 7") || strings.Contains(err.Error(), "PC") {
					t.Error(err)
				}
			}
		}
		if failed == 0 {
			t.Errorf("a graph of %d rows was not used", g.step.Tokens())
		}
		e.work.Wait()
		g.vm = vm
		if err := failing.Close(); err != nil {
			t.Error(err)
		}
		if got := alone(t, e, Request{Prompt: []int{1, 2, 3}, Tokens: 9, Ends: []int{}}); !slices.Equal(got, want) {
			t.Errorf("after the error: %v, want %v", got, want)
		}
		if err := pagesLost(e); err != nil {
			t.Error(err)
		}
	}
}

// poisoned has namedWeights, except that the embedding of a token is NaN.
type poisoned struct {
	namedWeights
	token int
}

func (p poisoned) Tensor(name string, shape ...int) (*tensor.Dense, error) {
	x, err := p.namedWeights.Tensor(name, shape...)
	if strings.HasPrefix(name, "embed_tokens") {
		row := x.Data().([]float32)[p.token*shape[1] : (p.token+1)*shape[1]]
		for i := range row {
			row[i] = float32(math.NaN())
		}
	}
	return x, err
}

// TestTextsApart: NaN in one text stays there. That text ends with ErrLogits, and the texts beside it have the tokens that they have
// alone.
func TestTextsApart(t *testing.T) {
	const poison = 12
	n := smallNetwork()
	n.tied = false
	for _, draft := range []int{0, 3} {
		o := Options{Context: 60, Tokens: 400, Batch: 4, Chunk: 6, Draft: 3, Exact: true}
		reference, err := NewEngine(n, namedWeights{}, o)
		if err != nil {
			t.Fatal(err)
		}
		defer reference.Close()
		e, err := NewEngine(n, poisoned{token: poison}, o)
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		never := Sampling{Forbidden: []int{poison}}
		sound := Request{Prompt: []int{1, 2, 3, 4, 5, 6, 7}, Tokens: 20, Ends: []int{}, Draft: draft, Sampling: never}
		bad := sound
		bad.Prompt = []int{3, 1, 4, poison, 1, 5, 9}
		texts, err := e.StartAll(context.Background(), sound, bad, sound)
		if err != nil {
			t.Fatal(err)
		}
		want := alone(t, reference, sound)
		for i, text := range texts {
			got, err := ids(text)
			switch {
			case i == 1 && (!errors.Is(err, ErrLogits) || !strings.Contains(err.Error(), "after token 7") || len(got) > 0):
				t.Errorf("the text with NaN: %v, %v", got, err)
			case i != 1 && (err != nil || !slices.Equal(got, want)):
				t.Errorf("beside NaN: %v, %v, want %v", got, err, want)
			}
		}
		if err := pagesLost(e); err != nil {
			t.Error(err)
		}
	}
}

// TestTypes: the types of weights and of the cache are those that the options say: their rounding changes probabilities, and by no
// more than it explains.
func TestTypes(t *testing.T) {
	rng := reftest.Rand(t)
	tokens := randomTokens(rng, 60)
	probabilities := func(o Options) []float64 {
		t.Helper()
		o.Context = 100
		p, err := smallEngine(t, o).LogProbs(context.Background(), tokens)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	want := probabilities(Options{Exact: true})
	for _, c := range []struct {
		o         Options
		low, high float64
	}{
		{Options{Exact: true, Cache: tensor.Float32, Weights: tensor.Float32}, 0, 1e-6},
		{Options{Exact: true, Chunk: 16, BatchInvariant: true}, 0, 1e-4},
		{Options{Exact: true, Cache: la.Float16}, 1e-7, 1e-2}, {Options{Exact: true, Cache: la.BFloat16}, 1e-5, 1e-1},
		{Options{Exact: true, Weights: la.Float16}, 1e-6, 3e-2}, {Options{Exact: true, Weights: la.BFloat16}, 1e-5, 3e-1},
	} {
		worst := 0.0
		for i, p := range probabilities(c.o) {
			worst = max(worst, math.Abs(p-want[i]))
		}
		if !(worst >= c.low && worst <= c.high) {
			t.Errorf("%+v: off by %.3g, want between %g and %g", c.o, worst, c.low, c.high)
		}
	}
}

// otherTensors has tensors of another type or shape for one name.
type otherTensors struct {
	namedWeights
	name string
	as   *tensor.Dense
}

func (o otherTensors) Tensor(name string, shape ...int) (*tensor.Dense, error) {
	if name == o.name {
		return o.as, nil
	}
	return o.namedWeights.Tensor(name, shape...)
}

// TestWeightsRefused: no tensor, or a tensor of a type that no weight has, or of another shape, is an error that names the weight.
func TestWeightsRefused(t *testing.T) {
	const name = "layers.0.mlp.down_proj.weight"
	for what, x := range map[string]*tensor.Dense{
		"ints":          tensor.New(tensor.WithShape(8, 8), tensor.Of(tensor.Int)),
		"another shape": tensor.New(tensor.WithShape(8, 9), tensor.Of(tensor.Float32)),
		"none":          nil,
	} {
		for _, as := range []tensor.Dtype{{}, tensor.Float32, la.Float16} {
			if e, err := NewEngine(smallNetwork(), otherTensors{name: name, as: x}, Options{Context: 20, Weights: as}); e != nil || err == nil || !strings.Contains(err.Error(), name) {
				t.Errorf("%s, as %v: %v", what, as, err)
			}
		}
	}
}

// TestDefaultChunk: more processors compute more rows in a step by default.
func TestDefaultChunk(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	for processors, want := range map[int]int{1: 384, 6: 384, 8: 512, 16: 1024, 64: 1024} {
		runtime.GOMAXPROCS(processors)
		if got := smallEngine(t, Options{Context: 4000, Batch: 2}).Options().Chunk; got != want {
			t.Errorf("%d processors: %d rows, want %d", processors, got, want)
		}
		if got := smallEngine(t, Options{Context: 100, Batch: 2}).Options().Chunk; got != 100 {
			t.Errorf("%d processors, a context of 100: %d rows", processors, got)
		}
	}
}
