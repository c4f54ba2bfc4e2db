package decoder

import (
	"context"
	"embed"
	"encoding/binary"
	"encoding/json"
	"hash/fnv"
	"math"
	"slices"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/devicetest"

	"gorgonia.org/tensor"
)

//go:embed testdata/golden.json testdata/*.f32
var testdata embed.FS

// goldenModel is a tiny random model with the results of transformers: see testdata/golden.py.
type goldenModel struct {
	Name             string
	Config           json.RawMessage // its config.json
	Scale, Embedding float64
	Prompts          [][]int
	File             string // logits of every token of the prompts
	Next             []int  // the greedy continuation of the first prompt: 200 tokens
}

func readGolden(t testing.TB) (models []goldenModel) {
	t.Helper()
	data, err := testdata.ReadFile("testdata/golden.json")
	var golden struct{ Models []goldenModel }
	if err == nil {
		err = json.Unmarshal(data, &golden)
	}
	if err != nil {
		t.Fatal(err)
	}
	return golden.Models
}

// goldenOn returns the models that a GPU computes, or all models for nil: GPUs have no kernels for such narrow latent vectors.
func goldenOn(t testing.TB, gpu *device.GPU) []goldenModel {
	return slices.DeleteFunc(readGolden(t), func(m goldenModel) bool { return gpu != nil && m.latent(t) })
}

func (m *goldenModel) network(t testing.TB) Network {
	t.Helper()
	n, _, err := readNetwork("config.json", m.Config, 256)
	if err != nil {
		t.Fatalf("%s: %v", m.Name, err)
	}
	return n
}

// goldenWeights has the values that golden.py gives parameters.
type goldenWeights struct {
	*goldenModel
	unit bool // norms are of 1 + weight
	as   tensor.Dtype
}

func (w goldenWeights) Tensor(name string, shape ...int) (*tensor.Dense, error) {
	if !strings.HasPrefix(name, "lm_head.") {
		name = "model." + name
	}
	factor, more := w.Scale, 0.0
	switch {
	case strings.HasSuffix(name, "norm.weight"):
		factor, more = 0.5, 1
		if w.unit {
			more = 0
		}
	case strings.HasSuffix(name, ".bias"):
		factor = 0.5
	case strings.Contains(name, "embed_"):
		factor = w.Embedding
	}
	data := goldenValues(name, tensor.Shape(shape).TotalSize())
	for i, v := range data {
		data[i] = float32(more + factor*float64(v))
	}
	t := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data))
	if w.as == (tensor.Dtype{}) || len(shape) == 1 {
		return t, nil
	}
	return converted(t, w.as)
}

// goldenValues are golden.py's: of a name, in [-1, 1), with 24 bits each.
func goldenValues(name string, n int) []float32 {
	h := fnv.New64a()
	h.Write([]byte(name))
	data := make([]float32, n)
	for i := range data {
		z := h.Sum64() + uint64(i) + 0x9e3779b97f4a7c15
		z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>27) * 0x94d049bb133111eb
		z ^= z >> 31
		data[i] = float32(float64(z>>40)/(1<<23) - 1)
	}
	return data
}

// goldenEngine returns an engine of a model, closed when the test ends.
func goldenEngine(t testing.TB, m *goldenModel, o Options) *Engine {
	t.Helper()
	n := m.network(t)
	return networkEngine(t, n, goldenWeights{m, n.(*transformer).norm == unitRMSNorm, tensor.Dtype{}}, o)
}

func readRows(t testing.TB, file string, width int) (rows [][]float32) {
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

// TestGolden: logits are those of transformers within 1e-4, and greedy texts are the same: prompts alone, together, in
// pieces, as guesses, and token by token.
func TestGolden(t *testing.T) { testGolden(t, Options{}, 1e-4) }

func testGolden(t *testing.T, o Options, atol float64) {
	for _, m := range goldenOn(t, o.Device) {
		t.Run(m.Name, func(t *testing.T) {
			o := o
			o.Batch, o.Draft, o.Context = 4, 40, 256
			e := goldenEngine(t, &m, o)
			vocab := e.network.Sizes().Vocab
			want := readRows(t, m.File, vocab)
			sequence := func() *la.Sequence {
				s, err := e.newSequence()
				if err != nil {
					t.Fatal(err)
				}
				return s
			}
			check := func(what string, appends []la.Append, tokens []int, want [][]float32) {
				t.Helper()
				r, err := e.run(appends, tokens, true, true, nil)
				if err != nil {
					t.Fatal(err)
				}
				for i, row := range want {
					for j, w := range row {
						if got := r.logits[i*vocab+j]; !(math.Abs(float64(got-w)) <= atol) {
							t.Fatalf("%s: row %d, logit %d: %v, want %v", what, i, j, got, w)
						}
					}
				}
			}
			var appends []la.Append
			for _, ids := range m.Prompts {
				appends = append(appends, la.Append{Seq: sequence(), Tokens: len(ids)})
			}
			check("together", appends, slices.Concat(m.Prompts...), want)
			ids, s := m.Prompts[0], sequence()
			cuts := []int{0, 7, 8, len(ids) - 1, len(ids)}
			for i, to := range cuts[1:] {
				check("in pieces", []la.Append{{Seq: s, Tokens: to - cuts[i]}}, ids[cuts[i]:to], want[cuts[i]:to])
			}

			for _, a := range append(appends, la.Append{Seq: s}) {
				if err := a.Seq.Release(); err != nil {
					t.Fatal(err)
				}
			}

			// The whole text alone, and its beginning beside others and with guesses.
			most, drafts, besides := 64, []int{0, 5}, []int{0, 3}
			if o.Device != nil && testing.Short() { // an emulated GPU is slow
				most, drafts, besides = 4, []int{0}, []int{1}
			}
			for _, draft := range drafts {
				for _, beside := range besides {
					next := m.Next
					if draft > 0 || beside > 0 {
						next = next[:most]
					}
					var texts []*Text
					for i := range 1 + beside {
						prompt := ids
						if i > 0 {
							prompt = m.Prompts[i%len(m.Prompts)]
						}
						text, err := e.Start(context.Background(), Request{Prompt: prompt, Tokens: len(next), Draft: draft})
						if err != nil {
							t.Fatal(err)
						}
						texts = append(texts, text)
					}
					var said []int
					for token, err := range texts[0].Tokens() {
						if err != nil {
							t.Fatal(err)
						}
						said = append(said, token.ID)
					}
					if !slices.Equal(said, next) {
						t.Errorf("with %d guesses, beside %d texts: continued with %v, want %v", draft, beside, said, next)
					}
					for _, text := range texts {
						if _, err := text.Wait(); err != nil || text.Reason() != Length {
							t.Errorf("ended by %q: %v", text.Reason(), err)
						}
					}
				}
			}
			if st := e.Stats(); st.Accepted == 0 && st.Guessed > 100 || st.SharedTokens == 0 && len(besides) > 1 {
				t.Errorf("%+v", st)
			}
		})
	}
}

// TestGPUGolden: the same on a GPU.
func TestGPUGolden(t *testing.T) { testGolden(t, Options{Device: devicetest.Open(t)}, 1e-4) }
