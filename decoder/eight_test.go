package decoder

import (
	"bytes"
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/rope"

	"gorgonia.org/tensor"
)

// wideLatents returns a model of latent attention with latent vectors of 128 elements.
func wideLatents(t *testing.T) goldenModel {
	t.Helper()
	m := latentModels(t)[0]
	rank := regexp.MustCompile(`"kv_lora_rank": *\d+`)
	if !rank.Match(m.Config) {
		t.Fatalf("%s has no rank", m.Name)
	}
	m.Config = rank.ReplaceAll(m.Config, []byte(`"kv_lora_rank": 128`))
	return m
}

// wideHeads returns a small network of some layers whose heads have as many elements as Q4 needs.
func wideHeads(layers, dim int) *transformer {
	t := smallNetwork()
	t.sizes.HeadDim, t.sizes.Layers = dim, layers
	t.rotate(rope.Config{HeadDim: dim})
	return t
}

// TestEightEngine: with a cache of 8 or 4 bits, texts do not depend on chunks, on other texts, on drafts or on a file, where attention does
// not: with batch invariance. Their probabilities are near those of a float32 cache, and not the same.
func TestEightEngine(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	latents := wideLatents(t)
	for _, c := range []struct {
		name  string
		cache tensor.Dtype
		make  func(o Options) *Engine
	}{
		{"e4m3", la.E4M3, func(o Options) *Engine { return smallEngine(t, o) }},
		{"int8", tensor.Int8, func(o Options) *Engine { return smallEngine(t, o) }},
		{"q4", la.Q4, func(o Options) *Engine { return networkEngine(t, wideHeads(1, 32), namedWeights{}, o) }},
		{"q4 between layers of 16 bits", la.Q4, func(o Options) *Engine {
			if o.Cache == la.Q4 {
				o.EdgeLayers = 1
			}
			return networkEngine(t, wideHeads(3, 32), namedWeights{}, o)
		}},
		{"latents", la.E4M3, func(o Options) *Engine { return goldenEngine(t, &latents, o) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := Options{Exact: true, Context: 200, Batch: 4}
			exact := c.make(o)
			tokens := make([]int, 70)
			for i := range tokens {
				tokens[i] = rng.IntN(exact.network.Sizes().Vocab)
			}
			want, err := exact.LogProbs(context.Background(), tokens)
			if err != nil {
				t.Fatal(err)
			}
			var first []int
			for i, chunk := range []int{0, 5, 17} {
				o := o
				o.Cache, o.BatchInvariant, o.Chunk, o.Draft = c.cache, true, chunk, 3*(i%2)
				e := c.make(o)
				got, err := e.LogProbs(context.Background(), tokens)
				if err != nil {
					t.Fatal(err)
				}
				worst := 0.0
				for i, p := range got {
					worst = max(worst, math.Abs(p-want[i]))
				}
				if !(worst > 1e-5 && worst < 1) {
					t.Errorf("probabilities are off by %v", worst)
				}
				other, err := e.Start(context.Background(), Request{Prompt: tokens[3:40], Tokens: 30, Ends: []int{}})
				if err != nil {
					t.Fatal(err)
				}
				text := alone(t, e, Request{Prompt: tokens, Tokens: 20, Draft: o.Draft, Ends: []int{}})
				if _, err := ids(other); err != nil {
					t.Fatal(err)
				}
				if first == nil {
					first = text
				} else if !slices.Equal(text, first) {
					t.Errorf("chunks of %d: %v, want %v", chunk, text, first)
				}
			}
			o.Cache = c.cache // the other form of latent attention would not attend to what the cache stores
			if e := c.make(o); e.prompts != nil {
				t.Error("prompts have keys that are not rounded")
			}
		})
	}
}

// TestEightOptions: what caches of 8 bits cannot do is refused before weights are read.
func TestEightOptions(t *testing.T) {
	latents := wideLatents(t)
	narrow := latentModels(t)[0]
	for _, c := range []struct {
		n    Network
		o    Options
		kind error
		text string
	}{
		{smallNetwork(), Options{Cache: la.Q4}, la.ErrUnsupported, "with Q4 both must be multiples of 32"},
		{wideHeads(1, 32), Options{Cache: la.Q4, EdgeLayers: 1}, la.ErrShape, "EdgeLayers is 1, and Layers 1"},
		{smallNetwork(), Options{Weights: tensor.Uint8}, ErrConfig, "Options.Weights is uint8; known are float32, int8"},
		{smallNetwork(), Options{Cache: tensor.Uint8}, ErrConfig, "Options.Cache is uint8; known are float32, int8, and leanattention.Float16, BFloat16, E4M3 and Q4"},
		{latents.network(t), Options{Cache: tensor.Int8}, la.ErrUnsupported, "DType is int8 with ValuesInKeys"},
		{narrow.network(t), Options{Cache: la.E4M3}, la.ErrUnsupported, "with ValuesInKeys and E4M3; it must be a multiple of 128"},
	} {
		e, err := NewEngine(c.n, noWeights{t}, c.o)
		if e != nil || !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%+v: %v, want %q", c.o, err, c.text)
		}
	}
}

// noWeights are weights that nothing may read.
type noWeights struct{ t *testing.T }

func (n noWeights) Tensor(name string, _ ...int) (*tensor.Dense, error) {
	n.t.Errorf("%s is read", name)
	return nil, errors.New("read")
}

// TestEightSaved: a saved text goes on in an engine with a cache of its type, and in no other.
func TestEightSaved(t *testing.T) {
	o := Options{Exact: true, Context: 100, Cache: la.E4M3}
	e := smallEngine(t, o)
	request := Request{Prompt: []int{1, 2, 3, 4, 5, 6, 7}, Tokens: 12, Ends: []int{}}
	want := alone(t, e, request)
	var file bytes.Buffer
	if _, err := e.Save(&file, request.Prompt); err != nil {
		t.Fatal(err)
	}
	again := smallEngine(t, o)
	if _, err := again.Load(bytes.NewReader(file.Bytes())); err != nil {
		t.Fatal(err)
	}
	if got := alone(t, again, request); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	o.Cache = tensor.Int8
	if _, err := smallEngine(t, o).Load(bytes.NewReader(file.Bytes())); !errors.Is(err, la.ErrDType) {
		t.Error(err)
	}
}
