package llama

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/reftest"

	"gorgonia.org/tensor"
)

// A greedy decoder chooses what transformers choose, of two texts in a graph of three rows, and goes on from what it
// chose in several calls.
func TestGreedy(t *testing.T) { testGreedy(t, nil, 20, "") }

func TestGPUGoldenGreedy(t *testing.T) { testGreedy(t, devicetest.Open(t), 6, "llama3") }

func TestGPUsGoldenGreedy(t *testing.T) { testGreedy(t, devicetest.OpenSome(t, 2), 6, "mistral") }

// testGreedy has the model of a name, or all of them, write so many tokens.
func testGreedy(t *testing.T, gpu *device.GPU, next int, name string) {
	for _, m := range readGolden(t).Models {
		if name != "" && name != m.Name {
			continue
		}
		t.Run(m.Name, func(t *testing.T) {
			d := m.decoderOf(t, Options{Device: gpu, KV: tensor.Float32, Greedy: true, Rows: []int{3, 40}})
			var said [2][]int
			var seqs []*la.Sequence
			for i := range said {
				ids := m.Prompts[i]
				seqs = append(seqs, newSequence(t, d))
				tokens, err := d.Next(Text{seqs[i], ids})
				if err != nil {
					t.Fatal(err)
				}
				if len(tokens) != 1 || len(tokens[0]) != len(ids) {
					t.Fatalf("tokens %v behind %d", tokens, len(ids))
				}
				said[i] = tokens[0][len(ids)-1:]
			}
			for _, steps := range []int{1, 3, next - 5} {
				last := len(said[0]) - 1
				all, err := d.Continue(seqs, []int{said[0][last], said[1][last]}, steps)
				if err != nil || len(all) != steps {
					t.Fatalf("%d of %d steps: %v", len(all), steps, err)
				}
				for _, tokens := range all {
					said[0], said[1] = append(said[0], tokens[0]), append(said[1], tokens[1])
				}
			}
			if want := m.Next[:next]; !slices.Equal(said[0], want) {
				t.Errorf("continued with %v, want %v", said[0], want)
			}
			// The other text alone says the same.
			again := newSequence(t, d)
			ids := slices.Concat(m.Prompts[1], said[1])[:len(m.Prompts[1])+5]
			tokens, err := d.Next(Text{again, ids})
			if err != nil {
				t.Fatal(err)
			}
			if got := tokens[0][len(m.Prompts[1])-1:]; !slices.Equal(got, said[1][:6]) {
				t.Errorf("continued with %v, and at once %v", said[1][:6], got)
			}
			for i, s := range seqs {
				if n := len(m.Prompts[i]) + next - 1; s.Len() != n {
					t.Errorf("text %d has %d tokens, want %d", i, s.Len(), n)
				}
			}
		})
	}
}

// Logits that are NaN choose nothing, which is an error and no token.
func TestChosen(t *testing.T) {
	if ids, err := chosen([]int32{3, 0}); err != nil || !slices.Equal(ids, []int{3, 0}) {
		t.Errorf("%v, %v", ids, err)
	}
	if ids, err := chosen([]int32{3, -1}); err == nil {
		t.Errorf("%v without an error", ids)
	}
}

// What a decoder does not do it refuses, and a sequence stays as it was.
func TestGreedyRefuses(t *testing.T) {
	m := readGolden(t).Models[0]
	plain, greedy := m.decoder(t, nil, tensor.Float32), m.decoderOf(t, Options{KV: tensor.Float32, Greedy: true})
	for _, d := range []*Decoder{plain, greedy} {
		s := newSequence(t, d)
		one, two := []*la.Sequence{s}, []*la.Sequence{s, s}
		for what, err := range map[string]error{
			"greedy": func() (err error) {
				if d == plain {
					_, err = d.Next(Text{s, []int{1}})
				} else {
					_, err = d.Step(Text{s, []int{1}})
				}
				return err
			}(),
			"no sequences": func() error { _, err := d.Continue(nil, nil, 1); return err }(),
			"tokens":       func() error { _, err := d.Continue(two, []int{1}, 1); return err }(),
			"steps":        func() error { _, err := d.Continue(one, []int{1}, 0); return err }(),
			"twice":        func() error { _, err := d.Continue(two, []int{1, 2}, 1); return err }(),
		} {
			if err == nil {
				t.Errorf("%s: no error", what)
			} else if d == plain && !errors.Is(err, la.ErrOption) {
				t.Errorf("%s of a decoder that is not greedy: %v", what, err)
			}
		}
		if s.Len() != 0 {
			t.Errorf("%d tokens", s.Len())
		}
	}
}

// What no decoder can be made of, or a step of, is an error that names the field.
func TestNewRefuses(t *testing.T) {
	rng := reftest.Rand(t)
	weights := someWeights(nil, rng, map[string]*tensor.Dense{})
	for want, change := range map[string]func(*Config, *Options){
		"":                               func(*Config, *Options) {},
		"Options.Rows is empty":          func(_ *Config, o *Options) { o.Rows = nil },
		"Options.Rows[1] is 0":           func(_ *Config, o *Options) { o.Rows = []int{4, 0} },
		"Options.Rows[0] is -1":          func(_ *Config, o *Options) { o.Rows = []int{-1} },
		"Options.Tokens is 0":            func(_ *Config, o *Options) { o.Tokens = 0 },
		"Options.Tokens is -5":           func(_ *Config, o *Options) { o.Tokens = -5 },
		"Config.Vocab is 0":              func(c *Config, _ *Options) { c.Vocab = 0 },
		"Config.Hidden is 0":             func(c *Config, _ *Options) { c.Hidden = 0 },
		"Config.Inner is -1":             func(c *Config, _ *Options) { c.Inner = -1 },
		"Config.Layers is 0":             func(c *Config, _ *Options) { c.Layers = 0 },
		"Config.Heads is 0":              func(c *Config, _ *Options) { c.Heads = 0 },
		"Config.KVHeads is 0":            func(c *Config, _ *Options) { c.KVHeads = 0 },
		"Config.Rotary.HeadDim is 0":     func(c *Config, _ *Options) { c.Rotary.HeadDim = 0 },
		"Config.Heads is 8, no multiple": func(c *Config, _ *Options) { c.Heads, c.KVHeads = 8, 3 },
		"Config.Windows is of 1 layer":   func(c *Config, _ *Options) { c.Windows = []int{4} },
		"Config.Windows[1] is -4":        func(c *Config, _ *Options) { c.Windows = []int{4, -4} },
		"Config.QueryScalar is NaN":      func(c *Config, _ *Options) { c.QueryScalar = math.NaN() },
		"Config.ScoreCap is -1":          func(c *Config, _ *Options) { c.ScoreCap = -1 },
		"Config.LogitCap is +Inf":        func(c *Config, _ *Options) { c.LogitCap = math.Inf(1) },
		"eps":                            func(c *Config, _ *Options) { c.Eps = math.NaN() },
		"DType is int32":                 func(_ *Config, o *Options) { o.KV = tensor.Int32 },
	} {
		c, o := stepConfig(64), Options{Rows: []int{4}, Tokens: 40}
		change(&c, &o)
		d, err := New(c, weights, o)
		if want == "" {
			if err != nil {
				t.Fatal(err)
			}
			s := newSequence(t, d)
			if _, err := d.Step(Text{s, []int{1, 2, 3, 4, 5}}); !errors.Is(err, la.ErrShape) || !strings.Contains(err.Error(), "5 tokens, and the largest graph of Options.Rows has 4 rows") {
				t.Error(err)
			}
			if err := d.Close(); err != nil {
				t.Error(err)
			}
			continue
		}
		if d != nil || err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
	if d, err := New(stepConfig(64), nil, Options{Rows: []int{4}, Tokens: 40}); d != nil || !errors.Is(err, la.ErrOption) || !strings.Contains(err.Error(), "weights is nil") {
		t.Error(err)
	}
}

// An error of an op is what a step gives back, and the text is as before.
func TestStepErrors(t *testing.T) {
	d, err := New(stepConfig(64), someWeights(nil, reftest.Rand(t), map[string]*tensor.Dense{}), Options{Rows: []int{4}, Tokens: 40})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	s := newSequence(t, d)
	for _, ids := range [][]int{{50}, {1, -1}} { // the vocabulary is of 50
		_, err := d.Step(Text{s, ids})
		if !errors.Is(err, la.ErrLength) || !strings.HasPrefix(err.Error(), "leanattention: nn.Embedding: ids[") || s.Len() != 0 {
			t.Errorf("%v: %v, %d tokens", ids, err, s.Len())
		}
	}
}
