package model

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

func seeded(t testing.TB) *rand.Rand {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

func small() hf.Config {
	return hf.Config{
		ModelType: "opt", VocabSize: 61, HiddenSize: 32, WordEmbedProjDim: 32, FFNDim: 48, Layers: 2, Heads: 4, MaxPositions: 40,
		DoLayerNormBefore: true, EnableBias: true, LayerNormElementwiseAffine: true, TieWordEmbeddings: true,
		Activation: "relu", BOS: 2, EOS: 2, Pad: 1,
	}
}

// layouts is every form that an OPT checkpoint can have.
func layouts() map[string]hf.Config {
	m := map[string]hf.Config{}
	for name, change := range map[string]func(c *hf.Config){
		"published":     func(c *hf.Config) {},
		"350m":          func(c *hf.Config) { c.DoLayerNormBefore, c.WordEmbedProjDim = false, 20 },
		"no biases":     func(c *hf.Config) { c.EnableBias = false },
		"plain norms":   func(c *hf.Config) { c.LayerNormElementwiseAffine = false },
		"separate head": func(c *hf.Config) { c.TieWordEmbeddings = false },
		"no last norm":  func(c *hf.Config) { c.RemoveFinalLayerNorm = true },
		"one head":      func(c *hf.Config) { c.Heads, c.Layers = 1, 1 },
		"gelu":          func(c *hf.Config) { c.Activation = "gelu" },
		"350m, gelu":    func(c *hf.Config) { c.DoLayerNormBefore, c.WordEmbedProjDim, c.Activation = false, 20, "gelu" },
		"galactica": func(c *hf.Config) {
			c.Activation, c.EnableBias, c.LayerNormElementwiseAffine = "gelu", false, false
		},
		"head dim 80": func(c *hf.Config) { c.HiddenSize, c.WordEmbedProjDim, c.Heads, c.Layers = 160, 160, 2, 1 },
	} {
		c := small()
		change(&c)
		m[name] = c
	}
	return m
}

func load(t testing.TB, c hf.Config, rng *rand.Rand) *Weights {
	t.Helper()
	w, err := Load(random{c, rng})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func newDecoder(t testing.TB, w *Weights, o Options) *Decoder {
	t.Helper()
	d, err := w.NewDecoder(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(d.Close(), d.Close()); err != nil {
			t.Error(err)
		}
	})
	return d
}

func prompts(rng *rand.Rand, vocab int, lengths ...int) [][]int {
	ps := make([][]int, len(lengths))
	for i, n := range lengths {
		for range n {
			ps[i] = append(ps[i], rng.IntN(vocab))
		}
	}
	return ps
}

// closeTo checks a row of logits, which are about 1.5 here.
func closeTo(t *testing.T, what string, got []float32, want []float64, bound float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d logits, want %d", what, len(got), len(want))
	}
	for i := range want {
		if diff := math.Abs(float64(got[i]) - want[i]); !(diff <= bound) {
			t.Fatalf("%s: logit %d is %v, want %v (off by %.2g)", what, i, got[i], want[i], diff)
		}
	}
}

// attentions are the ways to make a graph: all of the one kind, all of the
// other, and a mixture.
var attentions = map[string]struct {
	Attention Attention
	Linear    Linear
}{"lean": {Lean, LeanLinear}, "default": {Default, StockLinear}, "fused": {Fused, LeanLinear}, "lean beside stock linear layers": {Lean, StockLinear}}

// TestDecoder follows a ragged batch through prompts in chunks and single
// steps, in which sequences rest, and compares every row of logits with the
// reference, which knows neither chunks nor caches.
func TestDecoder(t *testing.T) {
	for layout, config := range layouts() {
		for name, kind := range attentions {
			t.Run(layout+"/"+name, func(t *testing.T) {
				rng := seeded(t)
				w := load(t, config, rng)
				ref := reference{w}
				chunks := []int{0, 1, 5, 64}
				rng.Shuffle(len(chunks), func(i, j int) { chunks[i], chunks[j] = chunks[j], chunks[i] })
				for _, chunk := range chunks[:reftest.Cases(t, 2, len(chunks))] {
					whole, want := prompts(rng, config.VocabSize, 17, 9, 12), make([]matrix, 3)
					for i, text := range whole {
						want[i] = ref.logits(text)
					}
					texts := [][]int{whole[0][:9], whole[1][:1], whole[2][:4]}
					d := newDecoder(t, w, Options{Capacity: []int{17, 9, 12}, Chunk: chunk, Attention: kind.Attention, Linear: kind.Linear, AllLogits: true})
					seen := 0
					if err := d.Prefill(context.Background(), texts, func(done int) { seen = done }); err != nil {
						t.Fatal(err)
					}
					if seen != 14 {
						t.Errorf("progress came to %d of 14 tokens", seen)
					}
					for i, text := range texts {
						got := d.PromptLogits(i)
						if len(got) != len(text)*config.VocabSize {
							t.Fatalf("chunk %d: %d logits for %d tokens", chunk, len(got), len(text))
						}
						for j, row := range want[i][:len(text)] {
							closeTo(t, fmt.Sprintf("chunk %d, prompt %d, position %d", chunk, i, j), got[j*len(row):(j+1)*len(row)], row, 1e-4)
						}
						closeTo(t, "last position", d.Logits(i), want[i][len(text)-1], 1e-4)
					}
					for step := range 8 {
						next := make([]int, len(texts))
						for i, text := range texts {
							next[i] = whole[i][len(text)]
							if (step+i)%3 == 0 && step > 0 {
								next[i] = -1
								continue
							}
							texts[i] = whole[i][:len(text)+1]
						}
						if err := d.Step(next); err != nil {
							t.Fatal(err)
						}
						for i, text := range texts {
							if d.Len(i) != len(text) {
								t.Fatalf("sequence %d has %d tokens, want %d", i, d.Len(i), len(text))
							}
							// Those of a sequence that rests are still there.
							closeTo(t, fmt.Sprintf("step %d, sequence %d", step, i), d.Logits(i), want[i][len(text)-1], 1e-4)
						}
					}
				}
			})
		}
	}
}

// TestPrefillAgain: a prompt may follow what was decoded, and prompts of very
// different lengths share a pass.
func TestPrefillAgain(t *testing.T) {
	for name, kind := range attentions {
		t.Run(name, func(t *testing.T) {
			rng := seeded(t)
			w := load(t, small(), rng)
			d := newDecoder(t, w, Options{Capacity: []int{40, 40, 5}, Chunk: 8, Attention: kind.Attention, Linear: kind.Linear})
			texts := make([][]int, 3)
			for _, lengths := range [][]int{{3, 20, 0}, {1, 0, 0}, {0, 0, 0}, {30, 1, 2}} {
				more := prompts(rng, 61, lengths...)
				if err := d.Prefill(context.Background(), more, nil); err != nil {
					t.Fatal(err)
				}
				for i := range texts {
					texts[i] = append(texts[i], more[i]...)
					if len(texts[i]) == 0 {
						if d.Logits(i) != nil {
							t.Error("an empty sequence has logits")
						}
						continue
					}
					closeTo(t, name, d.Logits(i), reference{w}.last(texts[i]), 1e-4)
				}
			}
			s := d.Stats()
			if s.Prefill.Tokens != 57 || s.Decode.Tokens != 0 || s.Prefill.Passes < 4 ||
				s.Prefill.Attention <= 0 || s.Prefill.Attention >= s.Prefill.Time || s.Decode.Time != 0 {
				t.Errorf("statistics %+v", s)
			}
		})
	}
}

// TestMix has sequences that read prompts beside others that decode, in chunks
// that not all have room in, and compares the logits with the reference.
func TestMix(t *testing.T) {
	for name, kind := range attentions {
		t.Run(name, func(t *testing.T) {
			rng := seeded(t)
			w := load(t, small(), rng)
			ref := reference{w}
			for _, chunk := range []int{1, 2, 7, 64} {
				d := newDecoder(t, w, Options{Capacity: []int{40, 40, 40}, Chunk: chunk, Attention: kind.Attention, Linear: kind.Linear})
				texts, rest := make([][]int, 3), prompts(rng, 61, 2, 17, 0)
				steps := 0
				for pass := 0; pass < 60 && (len(rest[0])+len(rest[1])+len(rest[2]) > 0 || pass < 12); pass++ {
					if pass == 3 {
						rest[2] = prompts(rng, 61, 9)[0]
					}
					tokens := []int{-1, -1, -1}
					for i := range tokens {
						if len(rest[i]) == 0 && len(texts[i]) > 0 && len(texts[i]) < 38 && rng.IntN(4) > 0 {
							tokens[i] = rng.IntN(61)
						}
					}
					taken, err := d.Mix(tokens, rest)
					if err != nil {
						t.Fatal(err)
					}
					reading := false
					for i, n := range taken {
						switch {
						case tokens[i] != -1:
							if n > 1 || n == 0 && chunk > 3 {
								t.Fatalf("chunk %d: %d of a token of sequence %d", chunk, n, i)
							}
							if n == 0 {
								continue
							}
							texts[i] = append(texts[i], tokens[i])
							steps++
						case n > 0:
							texts[i] = append(texts[i], rest[i][:n]...)
							rest[i], reading = rest[i][n:], true
						}
						if d.Len(i) != len(texts[i]) {
							t.Fatalf("sequence %d has %d tokens, want %d", i, d.Len(i), len(texts[i]))
						}
						if n > 0 {
							closeTo(t, fmt.Sprintf("chunk %d, pass %d, sequence %d", chunk, pass, i), d.Logits(i), ref.last(texts[i]), 1e-4)
						}
					}
					if chunk > 3 && len(rest[1]) > 0 && !reading {
						t.Fatalf("chunk %d: a pass that reads nothing of %d tokens", chunk, len(rest[1]))
					}
				}
				if len(rest[1]) > 0 || steps < 3 {
					t.Errorf("chunk %d: %d tokens not read, %d decoded", chunk, len(rest[1]), steps)
				}
				// Where rows are few, who finds none waits.
				if kind.Attention == Lean && chunk < 3 && len(texts[2]) > 0 {
					if taken, err := d.Mix([]int{1, 2, 3}, make([][]int, 3)); err != nil || taken[0]+taken[1]+taken[2] != chunk {
						t.Errorf("%d rows for three tokens: %v, %v", chunk, taken, err)
					}
				}
				taken, err := d.Mix([]int{-1, -1, -1}, make([][]int, 3))
				if err != nil || !slices.Equal(taken, []int{0, 0, 0}) {
					t.Errorf("nothing to do: %v, %v", taken, err)
				}
				for what, bad := range map[string]struct {
					tokens  []int
					prompts [][]int
				}{
					"both":             {[]int{1, -1, -1}, [][]int{{2}, nil, nil}},
					"a token too many": {[]int{-1, -1, 61}, make([][]int, 3)},
					"few tokens":       {[]int{1}, make([][]int, 3)},
					"few prompts":      {[]int{1, -1, -1}, make([][]int, 1)},
					"a full sequence":  {[]int{-1, -1, -1}, [][]int{make([]int, 41), nil, nil}},
				} {
					before := []int{d.Len(0), d.Len(1), d.Len(2)}
					if _, err := d.Mix(bad.tokens, bad.prompts); !errors.Is(err, ErrConfig) {
						t.Errorf("%s: %v", what, err)
					}
					if now := []int{d.Len(0), d.Len(1), d.Len(2)}; !slices.Equal(now, before) {
						t.Errorf("%s: %v tokens, %v before", what, now, before)
					}
				}
			}
		})
	}
}

// TestMixChooses: a sequence that decodes beside a prompt is continued with the
// random numbers that it would have had alone.
func TestMixChooses(t *testing.T) {
	rng := seeded(t)
	w := load(t, small(), rng)
	texts := prompts(rng, 61, 3, 20)
	choice := nn.Choice{Temperature: 1.5, TopP: 1}
	options := Options{Capacity: []int{30, 30}, Chunk: 6, Choices: []nn.Choice{choice, choice}, Seed: 9}
	follow := func(mixed bool) (got [2][]int) {
		d := newDecoder(t, w, options)
		rest := slices.Clone(texts)
		if !mixed {
			if err := d.Prefill(context.Background(), rest, nil); err != nil {
				t.Fatal(err)
			}
			rest = make([][]int, 2)
		}
		for len(got[0]) < 9 || len(got[1]) < 9 {
			next := []int{-1, -1}
			for i := range next {
				if len(rest[i]) == 0 && d.Len(i) > 0 && len(got[i]) < 9 {
					next[i] = d.Chosen(i)
					got[i] = append(got[i], next[i])
				}
			}
			if len(rest[0])+len(rest[1]) == 0 {
				if err := d.Step(next); err != nil {
					t.Fatal(err)
				}
				continue
			}
			taken, err := d.Mix(next, rest)
			if err != nil {
				t.Fatal(err)
			}
			for i := range rest {
				if len(rest[i]) > 0 {
					rest[i] = rest[i][taken[i]:]
				}
			}
		}
		return got
	}
	alone, mixed := follow(false), follow(true)
	for i := range alone {
		if !slices.Equal(alone[i], mixed[i]) {
			t.Errorf("sequence %d: %v beside a prompt, %v alone", i, mixed[i], alone[i])
		}
	}
}

// TestTruncate: what was cut off is not seen any more, by either graph.
func TestTruncate(t *testing.T) {
	for name, kind := range attentions {
		t.Run(name, func(t *testing.T) {
			rng := seeded(t)
			w := load(t, small(), rng)
			d := newDecoder(t, w, Options{Capacity: []int{40, 40}, Chunk: 8, Attention: kind.Attention, Linear: kind.Linear})
			texts := prompts(rng, 61, 12, 5)
			if err := d.Prefill(context.Background(), texts, nil); err != nil {
				t.Fatal(err)
			}
			for round := range 6 {
				if err := d.Step([]int{7, 8}); err != nil { // so that its graph has seen the length
					t.Fatal(err)
				}
				texts[0], texts[1] = texts[0][:11-2*round], append(texts[1], 8)
				if err := d.Truncate(0, len(texts[0])); err != nil || d.Logits(0) != nil {
					t.Fatal(err)
				}
				texts[0] = append(texts[0], 9)
				if round%2 == 0 {
					texts[1] = append(texts[1], 9)
					if err := d.Step([]int{9, 9}); err != nil {
						t.Fatal(err)
					}
				} else if err := d.Prefill(context.Background(), [][]int{{9}, nil}, nil); err != nil {
					t.Fatal(err)
				}
				for i := range texts {
					closeTo(t, fmt.Sprintf("round %d, sequence %d", round, i), d.Logits(i), reference{w}.last(texts[i]), 1e-4)
				}
			}
			for _, wrong := range [][2]int{{-1, 0}, {2, 0}, {0, -1}, {0, d.Len(0) + 1}} {
				if err := d.Truncate(wrong[0], wrong[1]); !errors.Is(err, ErrConfig) {
					t.Errorf("Truncate%v: error %v", wrong, err)
				}
			}
			d.Close()
			if err := d.Truncate(0, 0); !errors.Is(err, ErrConfig) {
				t.Errorf("after Close: error %v", err)
			}
		})
	}
}

// TestHalfCache: the cache's type is honoured: its rounding is seen, and is all
// that is seen.
func TestHalfCache(t *testing.T) {
	rng := seeded(t)
	w := load(t, small(), rng)
	text := prompts(rng, 61, 30)
	want := reference{w}.logits(text[0])[29]
	for _, c := range []struct {
		dtype    tensor.Dtype
		low, top float64
	}{{tensor.Float32, 0, 1e-5}, {la.Float16, 1e-6, 1e-2}, {la.BFloat16, 1e-4, 1e-1}} {
		d := newDecoder(t, w, Options{Capacity: []int{30}, Cache: c.dtype, Workers: 2})
		if err := d.Prefill(context.Background(), text, nil); err != nil {
			t.Fatal(err)
		}
		worst := 0.0
		for i, v := range d.Logits(0) {
			worst = max(worst, math.Abs(float64(v)-want[i]))
		}
		if !(worst >= c.low && worst <= c.top) {
			t.Errorf("%v: off by %.3g, want between %g and %g", c.dtype, worst, c.low, c.top)
		}
	}
}

// TestSequencesApart: NaN in one sequence of a pass stays there.
func TestSequencesApart(t *testing.T) {
	for name, kind := range attentions {
		t.Run(name, func(t *testing.T) {
			rng := seeded(t)
			w := load(t, small(), rng)
			texts := prompts(rng, 60, 7, 7)
			// Token 60 is poison: its embedding is NaN.
			row := w.tensors["decoder.embed_tokens.weight"].Float32s()[60*32 : 61*32]
			for i := range row {
				row[i] = float32(math.NaN())
			}
			texts[1][3] = 60
			d := newDecoder(t, w, Options{Capacity: []int{9, 9}, Chunk: 6, Attention: kind.Attention, Linear: kind.Linear})
			if err := d.Prefill(context.Background(), texts, nil); err != nil {
				t.Fatal(err)
			}
			if err := d.Step([]int{5, 5}); err != nil {
				t.Fatal(err)
			}
			for i := range 60 { // the tied head's row 60 is NaN for all
				if v := d.Logits(0)[i]; v != v {
					t.Fatalf("NaN reached logit %d of the other sequence", i)
				}
				if v := d.Logits(1)[i]; v == v {
					t.Fatalf("logit %d of the poisoned sequence is %v", i, v)
				}
			}
		})
	}
}

func TestCancel(t *testing.T) {
	for name, kind := range attentions {
		t.Run(name, func(t *testing.T) {
			rng := seeded(t)
			w := load(t, small(), rng)
			text := prompts(rng, 61, 20)
			d := newDecoder(t, w, Options{Capacity: []int{20}, Chunk: 4, Attention: kind.Attention, Linear: kind.Linear})
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			err := d.Prefill(ctx, text, func(done int) {
				if done >= 8 {
					cancel()
				}
			})
			if !errors.Is(err, context.Canceled) || d.Len(0) != 8 {
				t.Fatalf("error %v after %d tokens", err, d.Len(0))
			}
			// What is there is sound, and can be continued.
			if err := d.Prefill(context.Background(), [][]int{text[0][8:]}, nil); err != nil {
				t.Fatal(err)
			}
			closeTo(t, "continued", d.Logits(0), reference{w}.logits(text[0])[19], 1e-4)
		})
	}
}

func TestWrongUse(t *testing.T) {
	rng := seeded(t)
	w := load(t, small(), rng)
	for name, o := range map[string]Options{
		"no sequences":      {},
		"no capacity":       {Capacity: []int{0}},
		"too much capacity": {Capacity: []int{3, 41}},
		"negative chunk":    {Capacity: []int{3}, Chunk: -1},
		"attention":         {Capacity: []int{3}, Attention: 3},
		"default in f16":    {Capacity: []int{3}, Attention: Default, Cache: la.Float16},
		"fused's GPU":       {Capacity: []int{3}, Attention: Fused, Device: new(device.GPU)},
		"default's way":     {Capacity: []int{3}, Attention: Default, Device: new(device.GPU), Schedule: la.PerHead},
		"default's workers": {Capacity: []int{3}, Attention: Default, Workers: 2},
		"a NaN":             {Capacity: []int{3}, Choices: []nn.Choice{{Temperature: math.NaN(), TopP: 1}}},
		"infinite":          {Capacity: []int{3}, Choices: []nn.Choice{{Temperature: math.Inf(1), TopP: 1}}},
		"cold":              {Capacity: []int{3, 3}, Choices: []nn.Choice{{TopP: 1}, {Temperature: -1, TopP: 1}}},
		"top-p NaN":         {Capacity: []int{3}, Choices: []nn.Choice{{Temperature: 1, TopP: math.NaN()}}},
	} {
		if d, err := w.NewDecoder(o); d != nil || !errors.Is(err, ErrConfig) {
			t.Errorf("%s: error %v", name, err)
		}
	}
	if d, err := w.NewDecoder(Options{Capacity: []int{3}, Workers: -1}); d != nil || !errors.Is(err, la.ErrOption) {
		t.Errorf("negative workers: error %v", err)
	}
	if d, err := w.NewDecoder(Options{Capacity: []int{3}, Device: new(device.GPU)}); d != nil || !errors.Is(err, la.ErrState) {
		t.Errorf("a GPU that is none: error %v", err)
	}
	if d, err := w.NewDecoder(Options{Capacity: []int{3}, Cache: tensor.Int}); d != nil || !errors.Is(err, la.ErrDType) {
		t.Errorf("cache of ints: error %v", err)
	}
	for name, kind := range attentions {
		d := newDecoder(t, w, Options{Capacity: []int{3, 2}, Attention: kind.Attention, Linear: kind.Linear})
		for _, p := range [][][]int{{{1}}, {{1, 2, 3, 4}, {1}}, {{1}, {1, 2, 3}}, {{61}, {1}}, {{1}, {-1}}, nil} {
			if err := d.Prefill(context.Background(), p, nil); !errors.Is(err, ErrConfig) {
				t.Errorf("%s: prompts %v: error %v", name, p, err)
			}
		}
		if err := d.Prefill(context.Background(), [][]int{{1, 2, 3}, {1}}, nil); err != nil {
			t.Fatal(err)
		}
		for _, next := range [][]int{{1, 1}, {-1, 61}, {-1, -2}, {-1}, {}} {
			if err := d.Step(next); !errors.Is(err, ErrConfig) {
				t.Errorf("%s: step %v: error %v", name, next, err)
			}
		}
		if err := d.Step([]int{-1, -1}); err != nil {
			t.Error(err)
		}
		if !slices.Equal(d.lengths, []int{3, 1}) {
			t.Errorf("%s: lengths %v", name, d.lengths)
		}
		d.Close()
		if err := d.Step([]int{-1, 1}); !errors.Is(err, ErrConfig) {
			t.Errorf("%s: step after Close: error %v", name, err)
		}
	}
}

// TestMissingWeight: an error of the source comes through.
func TestMissingWeight(t *testing.T) {
	if w, err := Load(failing{random{small(), seeded(t)}}); w != nil || !errors.Is(err, hf.ErrMissing) {
		t.Fatalf("error %v", err)
	}
}

type failing struct{ random }

func (f failing) Tensor(name string, shape ...int) (*tensor.Dense, error) {
	if name == "decoder.layers.1.fc2.bias" {
		return nil, hf.ErrMissing
	}
	return f.random.Tensor(name, shape...)
}

// failingMachine is a machine whose only op fails: a token is outside of its table.
func failingMachine(t *testing.T) G.VM {
	t.Helper()
	g := G.NewGraph()
	table := G.NewMatrix(g, tensor.Float32, G.WithName("table"), G.WithValue(tensor.New(tensor.WithShape(2, 4), tensor.Of(tensor.Float32))))
	ids := G.NewVector(g, tensor.Int, G.WithName("ids"), G.WithValue(tensor.New(tensor.WithShape(1), tensor.WithBacking([]int{7}))))
	if _, err := nn.Embedding(table, ids, nil); err != nil {
		t.Fatal(err)
	}
	m := G.NewTapeMachine(g)
	t.Cleanup(func() { m.Close() })
	return m
}

// An error of an op is what a caller gets, of a run on a GPU as on the CPU, and the sequences are as before.
func TestMachineErrors(t *testing.T) {
	rng := seeded(t)
	d := newDecoder(t, load(t, small(), rng), Options{Capacity: []int{9}})
	text := prompts(rng, 61, 3)
	if err := d.Prefill(context.Background(), text, nil); err != nil {
		t.Fatal(err)
	}
	machines := []*graph{d.prompt.graph, d.next.graph}
	for _, g := range machines {
		vm := g.vm
		g.vm = failingMachine(t)
		defer func() { g.vm = vm }()
	}
	onGPU := &graph{vm: failingMachine(t)}
	recorded := (&gpuGraph{often: true}).keep(onGPU, onGPU.machine())
	for what, err := range map[string]error{
		"Prefill": d.Prefill(context.Background(), text, nil), "Step": d.Step([]int{1}),
		"on a GPU": (&gpuGraph{}).compute(onGPU, false), "the first run": (&gpuGraph{often: true}).compute(onGPU, false), "recorded": recorded,
	} {
		if !errors.Is(err, la.ErrLength) || !strings.HasPrefix(err.Error(), "leanattention: nn.Embedding: ids[0] is 7") || d.Len(0) != 3 {
			t.Errorf("%s: %v, %d tokens", what, err, d.Len(0))
		}
	}
}
