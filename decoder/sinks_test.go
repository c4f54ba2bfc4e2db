package decoder

import (
	"encoding/json"
	"fmt"
	"iter"
	"math"
	"os"
	"strings"
	"testing"

	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/rope"

	la "gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// sinksLayer is a layer of attention with sinks, as gpt-oss has them, with the results of transformers: see testdata/sinks.py. As
// a Network, its hidden states are those of the layer, and its logits are the output.
type sinksLayer struct {
	Name    string
	Width   int             `json:"hidden_size"`
	Heads   int             `json:"num_attention_heads"`
	KVHeads int             `json:"num_key_value_heads"`
	Dim     int             `json:"head_dim"`
	Rope    json.RawMessage `json:"rope_parameters"`
	Window  int             `json:"sliding_window"`
	Prompt  int
	Steps   int
	Scale   float64
	File    string

	rotary rope.Config
}

func (l *sinksLayer) Sizes() Sizes {
	return Sizes{Vocab: l.Width, Layers: 1, KVHeads: l.KVHeads, HeadDim: l.Dim, Windows: []int{l.Window}}
}

func (l *sinksLayer) Weights() iter.Seq[Weight] {
	return func(yield func(Weight) bool) {
		q, kv := l.Heads*l.Dim, l.KVHeads*l.Dim
		for _, w := range []Weight{
			{Name: "hidden_states", Shape: []int{l.Prompt + l.Steps, l.Width}}, {Name: "sinks", Shape: []int{l.Heads}},
			{Name: "q_proj.weight", Shape: []int{q, l.Width}}, {Name: "q_proj.bias", Shape: []int{q}},
			{Name: "k_proj.weight", Shape: []int{kv, l.Width}}, {Name: "k_proj.bias", Shape: []int{kv}},
			{Name: "v_proj.weight", Shape: []int{kv, l.Width}}, {Name: "v_proj.bias", Shape: []int{kv}},
			{Name: "o_proj.weight", Shape: []int{l.Width, q}}, {Name: "o_proj.bias", Shape: []int{l.Width}},
		} {
			if !yield(w) {
				return
			}
		}
	}
}

// Tensor returns the value that sinks.py gives a parameter, or the layer's input.
func (l *sinksLayer) Tensor(name string, shape ...int) (*tensor.Dense, error) {
	factor := l.Scale
	switch {
	case name == "hidden_states":
		factor = 1
	case name == "sinks":
		factor = 4
	case strings.HasSuffix(name, ".bias"):
		factor = 0.5
	}
	data := goldenValues(name, tensor.Shape(shape).TotalSize())
	for i, v := range data {
		data[i] = float32(factor * float64(v))
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data)), nil
}

func (l *sinksLayer) Hidden(b *Builder, tokens *G.Node) *G.Node {
	table := b.Weight("hidden_states")
	h := b.Node(func() (*G.Node, error) { return nn.Embedding(table, tokens, nil) })
	var qkv []*G.Node
	for _, name := range []string{"q_proj", "k_proj", "v_proj"} {
		w, bias := b.Weight(name+".weight"), b.Weight(name+".bias")
		qkv = append(qkv, b.Node(func() (*G.Node, error) { return nn.Linear(h, w, bias, b.Linear()...) }))
	}
	return b.Attend(0, qkv[0], qkv[1], qkv[2], la.WithRotary(l.rotary), la.WithSinks(b.Weight("sinks")))
}

func (l *sinksLayer) Logits(b *Builder, h *G.Node) *G.Node {
	return b.Partial(h, b.Weight("o_proj.weight"), b.Weight("o_proj.bias"), nil)
}

// TestGoldenSinks: a Network with the attention of gpt-oss has the results of transformers, of a prompt and of tokens one by one.
// The rest of that model, a mixture of experts, is not known.
func TestGoldenSinks(t *testing.T) {
	data, err := os.ReadFile("testdata/sinks.json")
	var layers []*sinksLayer
	if err == nil {
		err = json.Unmarshal(data, &layers)
	}
	if err != nil || len(layers) != 2 {
		t.Fatal(len(layers), err)
	}
	for _, l := range layers {
		t.Run(l.Name, func(t *testing.T) {
			c := parseConfig("config.json", "", []byte(fmt.Sprintf(`{"max_position_embeddings":4096,"rope_parameters":%s}`, l.Rope)))
			if l.rotary = c.rotary(l.Dim); c.Err() != nil {
				t.Fatal(c.Err())
			}
			e, err := NewEngine(l, l, Options{Context: l.Prompt + l.Steps, Batch: 1, Draft: l.Prompt, Exact: true})
			if err != nil {
				t.Fatal(err)
			}
			defer e.Close()
			s, err := e.newSequence()
			if err != nil {
				t.Fatal(err)
			}
			want := readRows(t, l.File, l.Width)
			if len(want) != l.Prompt+l.Steps {
				t.Fatalf("%d rows", len(want))
			}
			for done := 0; done < len(want); done = s.Len() {
				var tokens []int
				for n := max(1, l.Prompt-done); len(tokens) < n; {
					tokens = append(tokens, done+len(tokens))
				}
				r, err := e.run([]la.Append{{Seq: s, Tokens: len(tokens)}}, tokens, true, true, nil)
				if err != nil {
					t.Fatal(err)
				}
				for row := range tokens {
					for j, x := range want[done+row] {
						if got := r.logits[row*l.Width+j]; !(math.Abs(float64(got-x)) <= 1e-4) {
							t.Fatalf("token %d, element %d: %v, want %v", done+row, j, got, x)
						}
					}
				}
			}
			if err := s.Release(); err != nil {
				t.Error(err)
			}
		})
	}
}
