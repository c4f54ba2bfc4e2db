package llama

import (
	"embed"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"math"
	"slices"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/gputest"
	"gorgonia.org/leanattention/internal/half"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

//go:embed testdata/golden.json testdata/*.f32
var testdata embed.FS

type golden struct {
	Models      []model
	Frequencies []struct {
		Dim  int
		Rope rope
		W    []float64
		M    float64
	}
}

type model struct {
	Name   string
	Config struct {
		Vocab, Hidden, Inner, Layers, Heads, KV, Dim int
		Eps                                          float64
		Rope                                         rope
		Bias, Tied                                   bool
		QKNorm                                       bool `json:"qk_norm"`
	}
	Scale   float64
	Prompts [][]int
	File    string
	Next    []int
}

// decoder is the model with matrices, keys and values of a type, closed when the test ends.
func (m *model) decoder(t *testing.T, gpu *la.GPU, dtype tensor.Dtype) *Decoder {
	t.Helper()
	c := m.Config
	config := Config{
		Vocab: c.Vocab, Hidden: c.Hidden, Inner: c.Inner, Layers: c.Layers, Heads: c.Heads, KVHeads: c.KV,
		Eps: c.Eps, Rotary: c.Rope.config(t, c.Dim), Bias: c.Bias, QKNorm: c.QKNorm, Tied: c.Tied,
	}
	there := map[string]G.Value{}
	weights := func(name string, shape ...int) (G.Value, error) {
		v := parameter(name, m.Scale, c.Tied, shape...)
		if dtype == la.Float16 && len(shape) == 2 {
			short := make([]la.F16, v.Size())
			half.EncodeFloat16(short, v.Data().([]float32))
			v = tensor.New(tensor.WithShape(shape...), tensor.WithBacking(short))
		}
		if gpu == nil {
			return v, nil
		}
		var err error
		if there[name] == nil {
			there[name], err = gpu.Upload(v)
		}
		return there[name], err
	}
	d, err := New(config, weights, Options{Rows: []int{1, 40}, Tokens: 400, KV: dtype, Device: gpu})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func newSequence(t *testing.T, d *Decoder) *la.Sequence {
	t.Helper()
	s, err := d.NewSequence()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// rope is rope_parameters of a config.json.
type rope struct {
	Type         string  `json:"rope_type"`
	Theta        float64 `json:"rope_theta"`
	Factor       float64 `json:"factor"`
	Low          float64 `json:"low_freq_factor"`
	High         float64 `json:"high_freq_factor"`
	Context      int     `json:"original_max_position_embeddings"`
	BetaFast     float64 `json:"beta_fast"`
	BetaSlow     float64 `json:"beta_slow"`
	Truncate     *bool   `json:"truncate"`
	MScale       float64 `json:"mscale"`
	MScaleAllDim float64 `json:"mscale_all_dim"`
	Attention    float64 `json:"attention_factor"`
}

func (r *rope) config(t testing.TB, headDim int) la.RotaryConfig {
	c := la.RotaryConfig{HeadDim: headDim, Base: r.Theta}
	switch r.Type {
	case "default":
	case "linear":
		c.Scaling = la.LinearScaling{Factor: r.Factor}
	case "llama3":
		c.Scaling = la.Llama3Scaling{Factor: r.Factor, LowFrequency: r.Low, HighFrequency: r.High, Context: r.Context}
	case "yarn":
		c.Scaling = la.YaRNScaling{
			Factor: r.Factor, Context: r.Context, BetaFast: r.BetaFast, BetaSlow: r.BetaSlow,
			Attention: r.Attention, MScale: r.MScale, MScaleAllDim: r.MScaleAllDim, NoTruncate: r.Truncate != nil && !*r.Truncate,
		}
	default:
		t.Fatalf("rope_type %q", r.Type)
	}
	return c
}

func readGolden(t testing.TB) (g golden) {
	data, err := testdata.ReadFile("testdata/golden.json")
	if err == nil {
		err = json.Unmarshal(data, &g)
	}
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// parameter is the value that golden.py gives a parameter.
func parameter(name string, scale float64, tied bool, shape ...int) *tensor.Dense {
	h := fnv.New64a()
	h.Write([]byte(name))
	data := make([]float32, tensor.Shape(shape).TotalSize())
	for i := range data {
		z := h.Sum64() + uint64(i) + 0x9e3779b97f4a7c15
		z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>27) * 0x94d049bb133111eb
		z ^= z >> 31
		v := float64(z>>40)/(1<<23) - 1
		switch {
		case strings.HasSuffix(name, "norm.weight"):
			v = 1 + v/2
		case strings.HasSuffix(name, ".bias"):
			v /= 2
		case tied || !strings.Contains(name, "embed_tokens"):
			v *= scale
		}
		data[i] = float32(v)
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data))
}

// Rotary embeddings have transformers' frequencies, which are of float32.
func TestGoldenFrequencies(t *testing.T) {
	for _, c := range readGolden(t).Frequencies {
		w, m, err := c.Rope.config(t, c.Dim).Frequencies()
		if err != nil || len(w) != len(c.W) || math.Abs(m-c.M) > 1e-7 {
			t.Fatalf("%+v: %d frequencies, m %v, want %d and %v: %v", c.Rope, len(w), m, len(c.W), c.M, err)
		}
		for i := range w {
			if math.Abs(w[i]-c.W[i]) > 1e-6*c.W[i] {
				t.Errorf("%+v: pair %d has %v, want %v", c.Rope, i, w[i], c.W[i])
			}
		}
	}
}

// Logits are those of transformers within 1e-4, and greedy texts are the same: prompts alone, together,
// in pieces, and token by token.
func TestGolden(t *testing.T) { testGolden(t, nil, 64, 1e-4) }

func TestGPUGolden(t *testing.T) {
	gpu := gputest.Open(t)
	next := 64
	if testing.Short() {
		next = 6
	}
	testGolden(t, gpu, next, 1e-4)
}

func testGolden(t *testing.T, gpu *la.GPU, next int, atol float64) {
	for _, m := range readGolden(t).Models {
		t.Run(m.Name, func(t *testing.T) {
			d := m.decoder(t, gpu, tensor.Float32)
			want := readRows(t, m.File, m.Config.Vocab)
			check := func(what string, got [][]float32, want [][]float32) {
				t.Helper()
				for i := range want {
					for j, w := range want[i] {
						if !(math.Abs(float64(got[i][j]-w)) <= atol) {
							t.Fatalf("%s: token %d, logit %d: %v, want %v", what, i, j, got[i][j], w)
						}
					}
				}
			}
			step := func(texts ...Text) [][][]float32 {
				t.Helper()
				logits, err := d.Step(texts...)
				if err != nil {
					t.Fatal(err)
				}
				return logits
			}
			sequence := func() *la.Sequence { return newSequence(t, d) }

			// All prompts in one step.
			var ragged []Text
			for _, ids := range m.Prompts {
				ragged = append(ragged, Text{sequence(), ids})
			}
			at := 0
			for i, rows := range step(ragged...) {
				check(fmt.Sprint("ragged ", i), rows, want[at:at+len(rows)])
				at += len(rows)
			}

			// The first one alone, in pieces, the last of which is a single token.
			ids := m.Prompts[0]
			whole, pieces := sequence(), sequence()
			rows := step(Text{whole, ids})[0]
			check("single", rows, want[:len(ids)])
			cuts := []int{0, 7, 8, len(ids) - 1, len(ids)}
			for i := range cuts[1:] {
				check("chunked", step(Text{pieces, ids[cuts[i]:cuts[i+1]]})[0], want[cuts[i]:cuts[i+1]])
			}

			// Greedily on, together with another text, then alone.
			var said []int
			last := rows[len(rows)-1]
			for len(said) < next {
				token := slices.Index(last, slices.Max(last))
				if said = append(said, token); len(said) > 2 {
					last = step(Text{whole, []int{token}})[0][0]
				} else {
					last = step(Text{ragged[2].Seq, []int{1}}, Text{whole, []int{token}})[1][0]
				}
			}
			if !slices.Equal(said, m.Next[:next]) {
				t.Errorf("continued with %v, want %v", said, m.Next[:next])
			}
		})
	}
}

// With matrices, keys and values of float16, which have other kernels, a GPU says what the CPU says:
// prompts, and tokens one by one, the third of which is of a recording.
func TestGPUHalf(t *testing.T) {
	gpu := gputest.Open(t)
	for _, m := range readGolden(t).Models {
		if m.Name == "yarn" {
			continue
		}
		ids := m.Prompts[0]
		var logits [2][][]float32
		for i, at := range []*la.GPU{nil, gpu} {
			d := m.decoder(t, at, la.Float16)
			s := newSequence(t, d)
			for from, to := 0, len(ids)-4; from < len(ids); from, to = to, to+1 {
				rows, err := d.Step(Text{s, ids[from:to]})
				if err != nil {
					t.Fatal(err)
				}
				logits[i] = append(logits[i], rows[0]...)
			}
		}
		for i, row := range logits[0] {
			for j, w := range row {
				if got := logits[1][i][j]; !(math.Abs(float64(got-w)) <= 2e-3*(1+math.Abs(float64(w)))) {
					t.Fatalf("%s, token %d, logit %d: %v on the GPU, %v on the CPU", m.Name, i, j, got, w)
				}
			}
		}
	}
}

func readRows(t *testing.T, file string, width int) (rows [][]float32) {
	t.Helper()
	data, err := testdata.ReadFile("testdata/" + file)
	if err != nil {
		t.Fatal(err)
	}
	for len(data) > 0 {
		row := make([]float32, width)
		for i := range row {
			row[i] = math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:]))
		}
		rows, data = append(rows, row), data[4*width:]
	}
	return rows
}
