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

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/rope"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/devicetest"
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
		Rope json.RawMessage
		W    []float64
		M    float64
	}
	Sinks []sinksLayer
}

type model struct {
	Name             string
	Config           json.RawMessage // its config.json
	Scale, Embedding float64
	Prompts          [][]int
	File             string
	Next             []int
}

func (m *model) config(t testing.TB) Config {
	t.Helper()
	c, err := ReadConfig(m.Config)
	if err != nil {
		t.Fatalf("%s: %v", m.Name, err)
	}
	return c
}

// decoder is the model with matrices, keys and values of a type, closed when the test ends.
func (m *model) decoder(t *testing.T, gpu *device.GPU, dtype tensor.Dtype) *Decoder {
	t.Helper()
	return m.decoderOf(t, Options{Device: gpu, KV: dtype})
}

// decoderOf has 40 rows at most. Matrices are of the type of keys and values.
func (m *model) decoderOf(t *testing.T, o Options) *Decoder {
	t.Helper()
	config, gpu, dtype := m.config(t), o.Device, o.KV
	there := map[string]G.Value{}
	weights := func(name string, shape ...int) (G.Value, error) {
		v := m.parameter(name, config.UnitOffset, shape...)
		if dtype == la.Float16 && len(shape) == 2 {
			short := make([]la.F16, v.Size())
			half.EncodeFloat16(short, v.Data().([]float32))
			v = tensor.New(tensor.WithShape(shape...), tensor.WithBacking(short))
		}
		if gpu == nil {
			return v, nil
		}
		var err error
		switch {
		case there[name] != nil:
		case strings.HasSuffix(name, "_proj.weight") || strings.HasSuffix(name, "_proj.bias"): // of several GPUs each has a part
			there[name], err = gpu.UploadSharded(v, 0)
		default:
			there[name], err = gpu.Upload(v)
		}
		return there[name], err
	}
	if o.Tokens = 400; o.Rows == nil {
		o.Rows = []int{1, 40}
	}
	d, err := New(config, weights, o)
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

// parameter is the value that golden.py gives a parameter; in a model with unit offsets, norms are of 1 more.
func (m *model) parameter(name string, unitOffset bool, shape ...int) *tensor.Dense {
	factor, more := m.Scale, 0.0
	switch {
	case strings.HasSuffix(name, "norm.weight"):
		factor, more = 0.5, 1
		if unitOffset {
			more = 0
		}
	case strings.HasSuffix(name, ".bias"):
		factor = 0.5
	case strings.Contains(name, "embed_tokens"):
		factor = m.Embedding
	}
	data := values(name, tensor.Shape(shape).TotalSize())
	for i, v := range data {
		data[i] = float32(more + factor*float64(v))
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data))
}

// values are golden.py's: of a name, in [-1, 1), with 24 bits each.
func values(name string, n int) []float32 {
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

// Rotary embeddings have transformers' frequencies, which are of float32.
func TestGoldenFrequencies(t *testing.T) {
	for _, c := range readGolden(t).Frequencies {
		config := rope.Config{HeadDim: c.Dim}
		f := parse("", c.Rope)
		if f.rope(&config, 0); f.err != nil {
			t.Fatal(f.err)
		}
		w, m, err := config.Frequencies()
		if err != nil || len(w) != len(c.W) || math.Abs(m-c.M) > 1e-7 {
			t.Fatalf("%s: %d frequencies, m %v, want %d and %v: %v", c.Rope, len(w), m, len(c.W), c.M, err)
		}
		for i := range w {
			if math.Abs(w[i]-c.W[i]) > 1e-6*c.W[i] {
				t.Errorf("%s: pair %d has %v, want %v", c.Rope, i, w[i], c.W[i])
			}
		}
	}
}

// Logits are those of transformers within 1e-4, and greedy texts are the same: prompts alone, together,
// in pieces, and token by token.
func TestGolden(t *testing.T) { testGolden(t, nil, 64, 1e-4) }

func TestGPUGolden(t *testing.T) {
	gpu := devicetest.Open(t)
	next := 64
	if testing.Short() {
		next = 6
	}
	testGolden(t, gpu, next, 1e-4)
}

// On two GPUs, those that have KV heads for both.
func TestGPUsGolden(t *testing.T) {
	gpu := devicetest.OpenSome(t, 2)
	next := 64
	if testing.Short() {
		next = 4
	}
	testGolden(t, gpu, next, 1e-4)
}

func testGolden(t *testing.T, gpu *device.GPU, next int, atol float64) {
	for _, m := range readGolden(t).Models {
		if m.config(t).KVHeads < len(gpu.Members()) {
			continue
		}
		t.Run(m.Name, func(t *testing.T) {
			d := m.decoder(t, gpu, tensor.Float32)
			want := readRows(t, m.File, m.config(t).Vocab)
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

// A chat with Mistral goes on for ever in the pages of a window and of a prompt: here seven times as long as all pages
// together. Read again in pieces, it has the same logits.
func TestChatForever(t *testing.T) {
	models := readGolden(t).Models
	m := models[slices.IndexFunc(models, func(m model) bool { return m.Name == "mistral" })]
	config := m.config(t)
	if config.window() != 10 {
		t.Fatalf("a window of %d", config.window())
	}
	const pages = 5 // two of a window, and three that a prompt of 40 tokens fills
	weights := func(name string, shape ...int) (G.Value, error) { return m.parameter(name, false, shape...), nil }
	d, err := New(config, weights, Options{Rows: []int{1, 40}, Tokens: pages * pageSize, KV: tensor.Float32})
	if err != nil {
		t.Fatal(err)
	}
	chat := newSequence(t, d)
	var ids []int
	var all [][]float32
	read := func(s *la.Sequence, ids ...int) [][]float32 {
		t.Helper()
		rows, err := d.Step(Text{s, ids})
		if err != nil {
			t.Fatal(err)
		}
		for i, row := range rows[0] {
			rows[0][i] = slices.Clone(row)
		}
		return rows[0]
	}
	say := func(tokens ...int) {
		ids, all = append(ids, tokens...), append(all, read(chat, tokens...)...)
	}
	for len(ids) < 7*pages*pageSize {
		say(m.Prompts[0]...)
		for range 30 {
			last := all[len(all)-1]
			say(slices.Index(last, slices.Max(last)))
		}
	}
	if n := chat.Len(); n != len(ids) {
		t.Errorf("%d tokens of %d", n, len(ids))
	}
	if st := d.cache.Stats(); d.cache.Config().Pages-st.FreePages > 2 {
		t.Errorf("%v", d.cache)
	}
	if err := chat.Release(); err != nil {
		t.Fatal(err)
	}
	again := newSequence(t, d)
	for at := 0; at < len(ids); at += 40 {
		for i, row := range read(again, ids[at:min(at+40, len(ids))]...) {
			for j, w := range all[at+i] {
				if !(math.Abs(float64(row[j]-w)) <= 1e-4) {
					t.Fatalf("token %d, logit %d: %v, want %v", at+i, j, row[j], w)
				}
			}
		}
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

// With matrices, keys and values of float16, which have other kernels, a GPU says what the CPU says:
// prompts, and tokens one by one, the third of which is of a recording. In mixed precision it says nearly the same of
// a prompt.
func TestGPUHalf(t *testing.T) {
	gpu := devicetest.Open(t)
	for _, m := range readGolden(t).Models {
		if m.Name == "yarn" {
			continue
		}
		ids := m.Prompts[0]
		var logits [3][][]float32
		for i, at := range []*device.GPU{nil, gpu, gpu} {
			mixed, end := i == 2, len(ids)
			if mixed {
				end -= 4
			}
			d := m.decoderOf(t, Options{Device: at, KV: la.Float16, Mixed: mixed})
			s := newSequence(t, d)
			for from, to := 0, len(ids)-4; from < end; from, to = to, to+1 {
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
				if i >= len(logits[2]) {
					continue
				}
				if got := logits[2][i][j]; !(math.Abs(float64(got-w)) <= 1e-2*(1+math.Abs(float64(w)))) {
					t.Fatalf("%s, token %d, logit %d: %v in mixed precision, %v on the CPU", m.Name, i, j, got, w)
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
