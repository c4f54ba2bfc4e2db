package decoder

import (
	"bytes"
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/nn"

	"gorgonia.org/tensor"
)

// halfWeights are weights whose latent vectors have no second half.
type halfWeights struct {
	Weights
	latent int
}

func (w halfWeights) Tensor(name string, shape ...int) (*tensor.Dense, error) {
	t, err := w.Weights.Tensor(name, shape...)
	if err != nil || !strings.Contains(name, latentDown) {
		return t, err
	}
	t = t.Clone().(*tensor.Dense)
	x, row := t.Data().([]float32), t.Shape().TotalSize()/t.Shape()[0]
	clear(x[w.latent/2*row : w.latent*row])
	return t, nil
}

// TestTPLAExact: if latent vectors have no second half, and eigenvectors say so, texts and probabilities are those without TPLA, with
// prompts in both forms, in chunks, in batches, and with guesses.
func TestTPLAExact(t *testing.T) {
	expandFrom(t, 8)
	rng := rand.New(rand.NewPCG(1, 2))
	for _, m := range latentModels(t) {
		n := m.network(t)
		sizes, weights := n.Sizes(), goldenWeights{&m, false, tensor.Dtype{}}
		of := make([]*nn.TPLA, sizes.Layers)
		for i := range of {
			const tokens = 60
			x := make([]float32, tokens*sizes.HeadDim)
			for i := range x {
				if k := i % sizes.HeadDim; k < sizes.Latent/2 || k >= sizes.Latent {
					x[i] = float32(rng.NormFloat64())
				}
			}
			of[i] = &nn.TPLA{PCA: true, Latents: tensor.New(tensor.WithShape(tokens, sizes.HeadDim), tensor.WithBacking(x))}
		}
		exact := networkEngine(t, n, halfWeights{weights, sizes.Latent}, Options{Exact: true})
		tokens := make([]int, 40)
		for i := range tokens {
			tokens[i] = rng.IntN(sizes.Vocab)
		}
		want, err := exact.LogProbs(context.Background(), tokens)
		if err != nil {
			t.Fatal(err)
		}
		text := alone(t, exact, Request{Prompt: tokens, Tokens: 20, Ends: []int{}})
		for _, o := range []Options{{}, {Chunk: 5, Batch: 3}, {Draft: 3}, {BatchInvariant: true}} {
			o.Exact, o.TPLA = true, func(layer int) *nn.TPLA { return of[layer] }
			e := networkEngine(t, n, halfWeights{weights, sizes.Latent}, o)
			got, err := e.LogProbs(context.Background(), tokens)
			if err != nil {
				t.Fatal(err)
			}
			for i, p := range got {
				if !(math.Abs(p-want[i]) < 1e-3) {
					t.Fatalf("%s: the logarithm of token %d's probability is %v, want %v", m.Name, i+1, p, want[i])
				}
			}
			other, err := e.Start(context.Background(), Request{Prompt: tokens[3:30], Tokens: 9, Ends: []int{}})
			if err != nil {
				t.Fatal(err)
			}
			if got := alone(t, e, Request{Prompt: tokens, Tokens: 20, Draft: o.Draft, Ends: []int{}}); !slices.Equal(got, text) {
				t.Errorf("%s, %+v: %v, want %v", m.Name, o.Chunk, got, text)
			}
			if _, err := ids(other); err != nil {
				t.Fatal(err)
			}
			if (e.prompts == nil) != o.BatchInvariant && o.Chunk != 5 {
				t.Errorf("prompts by the whole weights: %v", e.prompts != nil)
			}
		}
	}
}

// TestTPLAError: by Hadamard's matrix probabilities differ from those without TPLA, but are near; the first token of a text, which sees
// itself alone, has the norm's error alone; and prompts by the whole weights are exact.
func TestTPLAError(t *testing.T) {
	expandFrom(t, 8)
	rng := rand.New(rand.NewPCG(5, 6))
	for _, m := range latentModels(t)[:2] {
		c := m.changed(t, map[string]any{"kv_lora_rank": 32})
		tokens := make([]int, 40)
		for i := range tokens {
			tokens[i] = rng.IntN(c.network(t).Sizes().Vocab)
		}
		of := func(layer int) *nn.TPLA { return &nn.TPLA{Seed: uint64(layer)} }
		exact, e := goldenEngine(t, c, Options{Exact: true}), goldenEngine(t, c, Options{Exact: true, TPLA: of})
		want, err := exact.LogProbs(context.Background(), tokens)
		if err != nil {
			t.Fatal(err)
		}
		got, err := e.LogProbs(context.Background(), tokens)
		if err != nil {
			t.Fatal(err)
		}
		worst, sum := 0.0, 0.0
		for i, p := range got {
			worst, sum = max(worst, math.Abs(p-want[i])), sum+(want[i]-p)/float64(len(got))
		}
		t.Logf("%s: worst %.4f, mean loss %.4f", m.Name, worst, sum)
		if !(worst > 1e-4 && worst < 20) {
			t.Errorf("%s: logarithms of probabilities are off by %v", m.Name, worst)
		}
		// The first token behind a prompt is that of exact attention.
		if a, b := alone(t, e, Request{Prompt: tokens, Tokens: 1, Ends: []int{}}), alone(t, exact, Request{Prompt: tokens, Tokens: 1, Ends: []int{}}); !slices.Equal(a, b) {
			t.Errorf("%s: %v behind a prompt, want %v", m.Name, a, b)
		}
		for _, cache := range []tensor.Dtype{la.Float16, la.BFloat16} {
			alone(t, goldenEngine(t, c, Options{Cache: cache, Weights: cache, TPLA: of}), Request{Prompt: tokens, Tokens: 3, Ends: []int{}})
		}
		if _, err := e.Save(new(bytes.Buffer), tokens); !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "Options.TPLA") {
			t.Errorf("Save: %v", err)
		}
	}
}

// TestTPLAOptions: what TPLA cannot do is refused.
func TestTPLAOptions(t *testing.T) {
	m := latentModels(t)[0]
	wide := m.changed(t, map[string]any{"kv_lora_rank": 32})
	two := func(int) *nn.TPLA { return new(nn.TPLA) }
	for _, c := range []struct {
		n    Network
		w    Weights
		o    Options
		kind error
		text string
	}{
		{smallNetwork(), nil, Options{TPLA: two}, ErrUnsupported, "no latent attention"},
		{wide.network(t), nil, Options{TPLA: two, Cache: la.E4M3}, ErrUnsupported, "Options.Cache is E4M3"},
		{wide.network(t), nil, Options{TPLA: func(int) *nn.TPLA { return nil }}, ErrConfig, "layer 0 has none"},
		{wide.network(t), nil, Options{TPLA: func(int) *nn.TPLA { return &nn.TPLA{Shards: 3} }}, ErrConfig, "layer 0 has 3 shards of latent vectors of 32"},
		{wide.network(t), nil, Options{TPLA: func(i int) *nn.TPLA { return &nn.TPLA{Shards: 2 << min(i, 1)} }}, ErrConfig, "layer 1 has 4 shards"},
		{m.network(t), goldenWeights{&m, false, tensor.Dtype{}}, Options{TPLA: two}, la.ErrUnsupported, "Hadamard matrix of 24 elements"},
	} {
		if e, err := NewEngine(c.n, c.w, c.o); !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%q: %v, %v", c.text, e, err)
		}
	}
}

// TestGPUTPLA: on a GPU, steps with parts of latent vectors are those of the CPU.
func TestGPUTPLA(t *testing.T) {
	gpu := devicetest.Open(t)
	for i, m := range latentModels(t)[:3] {
		c := m.changed(t, map[string]any{"kv_lora_rank": 32})
		o := Options{Device: gpu, Exact: true, Cache: []tensor.Dtype{{}, la.Float16, la.BFloat16}[i], TPLA: func(layer int) *nn.TPLA { return &nn.TPLA{Seed: uint64(layer)} }}
		t.Run(m.Name, func(t *testing.T) {
			stepsAgainstCPU(t, func(o Options) (*Engine, error) {
				return NewEngine(c.network(t), goldenWeights{c, false, tensor.Dtype{}}, o)
			}, o, 3, 3, []float64{1e-4, 1e-2, 1e-1}[i])
		})
	}
}

// TestGPUsTPLA: several GPUs of one process share no latent vectors.
func TestGPUsTPLA(t *testing.T) {
	m := latentModels(t)[0]
	testLatentRefused(t, devicetest.OpenSome(t, 2), m.network(t), ErrUnsupported, "use one GPU, or Ranks with a GPU each", Options{TPLA: func(int) *nn.TPLA { return new(nn.TPLA) }})
}
