package llama

import (
	"encoding/json"
	"math"
	"testing"

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

// A sink of a query head is a score that no key has: the weight that it takes is of no value.
//
//	o_i = sum over j of exp(s_ij) v_j / (exp(sink) + sum over j of exp(s_ij))
//
// This package does not build such layers. Until attention has an option for sinks, its output is multiplied by
// 1/(1+exp(sink-lse)) here, which is the same: so the golden files are right, and an option has
// a test to come into.
func TestGoldenSinks(t *testing.T) {
	for _, l := range readGolden(t).Sinks {
		t.Run(l.Name, func(t *testing.T) {
			rotary := la.RotaryConfig{HeadDim: l.Dim}
			f := parse("", l.Rope)
			if f.rope(&rotary, 0); f.err != nil {
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
			positions := make([]int, l.Prompt)
			b := &builder{c: Config{Hidden: l.Hidden}, g: g, step: step, weights: func(name string, shape ...int) (G.Value, error) {
				return l.parameter(name, shape...), nil
			}}
			qkv := b.linears(input(g, "hidden_states", hidden), true, nn.LinearOption{},
				layer{"q_proj", l.Heads * l.Dim}, layer{"k_proj", l.KVHeads * l.Dim}, layer{"v_proj", l.KVHeads * l.Dim})
			at := input(g, "positions", tensor.New(tensor.WithShape(l.Prompt), tensor.WithBacking(positions)))
			for i := range 2 {
				qkv[i] = b.do(func() (*G.Node, error) { return nn.Rotary(qkv[i], at, rotary) })
			}
			var lse *G.Node
			opts := []la.Option{la.WithCausal(), la.WithLSE(&lse)}
			if l.Window > 0 {
				opts = append(opts, la.WithWindow(l.Window))
			}
			out := b.do(func() (*G.Node, error) { return la.CachedAttention(qkv[0], qkv[1], qkv[2], step.Layer(0), opts...) })
			if b.err != nil {
				t.Fatal(b.err)
			}
			m := G.NewTapeMachine(g)
			defer m.Close()

			sinks := l.parameter("sinks", l.Heads).Data().([]float32)
			w := l.parameter("o_proj.weight", l.Hidden, l.Heads*l.Dim).Data().([]float32)
			bias := l.parameter("o_proj.bias", l.Hidden).Data().([]float32)
			read := l.parameter("hidden_states", l.Prompt+l.Steps, l.Hidden).Data().([]float32)
			want := readRows(t, l.File, l.Hidden)
			for done := 0; done < len(want); {
				n := 1
				if done == 0 {
					n = l.Prompt
				}
				copy(hidden.Data().([]float32), read[done*l.Hidden:(done+n)*l.Hidden])
				if err := step.Set([]la.Append{{Seq: seq, Tokens: n}}); err != nil {
					t.Fatal(err)
				}
				copy(positions, step.Positions())
				if err := m.RunAll(); err != nil {
					t.Fatal(err)
				}
				o, sums := out.Value().Data().([]float32), lse.Value().Data().([]float32)
				m.Reset()
				if err := step.Commit(); err != nil {
					t.Fatal(err)
				}
				for row := range n {
					for j, w64 := range want[done+row] {
						got := float64(bias[j])
						for c := range l.Heads * l.Dim {
							h := c / l.Dim
							share := 1 / (1 + math.Exp(float64(sinks[h]-sums[row*l.Heads+h])))
							got += float64(w[j*l.Heads*l.Dim+c]) * share * float64(o[row*l.Heads*l.Dim+c])
						}
						if !(math.Abs(got-float64(w64)) <= 1e-4) {
							t.Fatalf("token %d, element %d: %v, want %v", done+row, j, got, w64)
						}
					}
				}
				done += n
			}
		})
	}
}
