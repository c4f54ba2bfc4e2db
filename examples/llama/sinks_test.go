package llama

import (
	"encoding/json"
	"math"
	"testing"

	"gorgonia.org/leanattention/rope"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// sinksLayer is a layer of attention with sinks, as gpt-oss has them, and what transformers makes of it.
type sinksLayer struct {
	Name    string
	Hidden  int             `json:"hidden_size"`
	Heads   int             `json:"num_attention_heads"`
	KVHeads int             `json:"num_key_value_heads"`
	Dim     int             `json:"head_dim"`
	Rope    json.RawMessage `json:"rope_parameters"`
	Window  int             `json:"sliding_window"`
	Prompt  int
	Steps   int
	Scale   float64
	File    string
}

// parameter is the value that golden.py gives a parameter, or what the layer reads.
func (l *sinksLayer) parameter(name string, shape ...int) *tensor.Dense {
	factor := l.Scale
	switch name {
	case "hidden_states":
		factor = 1
	case "sinks":
		factor = 4
	case "q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias":
		factor = 0.5
	}
	data := values(name, tensor.Shape(shape).TotalSize())
	for i, v := range data {
		data[i] = float32(factor * float64(v))
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data))
}

// The attention of gpt-oss. The rest of the model, a mixture of experts, is not built.
func TestGoldenSinks(t *testing.T) {
	for _, l := range readGolden(t).Sinks {
		t.Run(l.Name, func(t *testing.T) {
			c := Config{Hidden: l.Hidden, Heads: l.Heads, KVHeads: l.KVHeads, Rotary: rope.Config{HeadDim: l.Dim}, Bias: true, Sinks: true, Windows: []int{l.Window}}
			f := parse("", l.Rope)
			if f.rope(&c.Rotary, 0); f.err != nil {
				t.Fatal(f.err)
			}
			cache, err := la.NewCache(la.CacheConfig{Layers: 1, KVHeads: l.KVHeads, HeadDim: l.Dim, DType: tensor.Float32, Pages: 8})
			if err != nil {
				t.Fatal(err)
			}
			defer cache.Close()
			seq, err := cache.NewSequence()
			if err != nil {
				t.Fatal(err)
			}
			step, err := cache.NewStep(l.Prompt)
			if err != nil {
				t.Fatal(err)
			}

			g := G.NewGraph()
			hidden := tensor.New(tensor.WithShape(l.Prompt, l.Hidden), tensor.Of(tensor.Float32))
			b := &builder{c: c, g: g, step: step, weights: func(name string, shape ...int) (G.Value, error) {
				return l.parameter(name, shape...), nil
			}}
			out := b.attention(0, "", nn.Option{}, input(g, "hidden_states", hidden))
			w, bias := b.weight("o_proj.weight", l.Hidden, l.Heads*l.Dim), b.weight("o_proj.bias", l.Hidden)
			out = b.do(func() (*G.Node, error) { return nn.Linear(out, w, bias) })
			if b.err != nil {
				t.Fatal(b.err)
			}
			m := G.NewTapeMachine(g)
			defer m.Close()

			read := l.parameter("hidden_states", l.Prompt+l.Steps, l.Hidden).Data().([]float32)
			want := readRows(t, l.File, l.Hidden)
			for done := 0; done < len(want); {
				n := 1
				if done == 0 {
					n = l.Prompt
				}
				copy(hidden.Data().([]float32), read[done*l.Hidden:(done+n)*l.Hidden])
				if err := step.Run([]la.Append{{Seq: seq, Tokens: n}}, m.RunAll); err != nil {
					t.Fatal(err)
				}
				y := out.Value().Data().([]float32)
				m.Reset()
				for row := range n {
					for j, x := range want[done+row] {
						if got := y[row*l.Hidden+j]; !(math.Abs(float64(got-x)) <= 1e-4) {
							t.Fatalf("token %d, element %d: %v, want %v", done+row, j, got, x)
						}
					}
				}
				done += n
			}
		})
	}
}
