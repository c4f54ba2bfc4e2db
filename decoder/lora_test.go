package decoder

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io/fs"
	"iter"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/decoder/internal/hf"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/nn"

	"gorgonia.org/tensor"
)

// goldenAdapter is an adapter that peft made: see testdata/lora.py.
type goldenAdapter struct {
	Name    string
	Model   string
	Config  json.RawMessage
	Tensors []fileTensor
	File    string
	Folder  bool
}

// fileTensor is a tensor of a safetensors file.
type fileTensor struct {
	name  string
	shape []int
	dtype string // float32, float16 or bfloat16
	data  []float32
}

func (x *fileTensor) UnmarshalJSON(data []byte) error {
	return json.Unmarshal(data, &[]any{&x.name, &x.shape, &x.dtype})
}

func readAdapters(t testing.TB) (all []goldenAdapter) {
	t.Helper()
	data, err := os.ReadFile("testdata/lora.json")
	var golden struct{ Cases []goldenAdapter }
	if err == nil {
		err = json.Unmarshal(data, &golden)
	}
	if err != nil || len(golden.Cases) < 6 {
		t.Fatal(len(golden.Cases), err)
	}
	for _, c := range golden.Cases {
		for i := range c.Tensors {
			x := &c.Tensors[i]
			x.data = goldenValues(x.name, tensor.Shape(x.shape).TotalSize())
			for j := range x.data {
				x.data[j] /= 4
			}
		}
	}
	return golden.Cases
}

// safetensors returns a file.
func safetensors(all []fileTensor) []byte {
	header, data := map[string]any{}, []byte(nil)
	for _, x := range all {
		begin := len(data)
		var dtype string
		for _, v := range x.data {
			switch x.dtype {
			case "float16":
				dtype, data = "F16", binary.LittleEndian.AppendUint16(data, uint16(half.FromFloat32(v)))
			case "bfloat16":
				dtype, data = "BF16", binary.LittleEndian.AppendUint16(data, uint16(half.BFromFloat32(v)))
			default:
				dtype, data = "F32", binary.LittleEndian.AppendUint32(data, math.Float32bits(v))
			}
		}
		header[x.name] = map[string]any{"dtype": dtype, "shape": x.shape, "data_offsets": [2]int{begin, len(data)}}
	}
	text, err := json.Marshal(header)
	if err != nil {
		panic(err)
	}
	return slices.Concat(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text, data)
}

// files returns the folder of an adapter.
func (c *goldenAdapter) files() fstest.MapFS {
	return fstest.MapFS{adapterFile: {Data: c.Config}, "adapter_model.safetensors": {Data: safetensors(c.Tensors)}}
}

// goldenSource is the files of a golden model.
type goldenSource struct{ goldenWeights }

func (s goldenSource) rowsAs(name string, as tensor.Dtype, shape []int, from, to int) (*tensor.Dense, error) {
	t, err := s.Tensor(name, shape...)
	if err != nil {
		return nil, err
	}
	w := Weight{Name: name, Shape: slices.Clone(shape), From: Rows{name, from, shape[0]}}
	w.Shape[0] = to - from
	if t, err = part(s.goldenWeights, &w, as, 0, to-from); err != nil || as == (tensor.Dtype{}) {
		return t, err
	}
	return converted(t, as)
}

func (s goldenSource) float32s(dst []float32, name string, shape []int, from, to int) error {
	t, err := s.rowsAs(name, tensor.Float32, shape, from, to)
	if err == nil {
		copy(dst, t.Float32s())
	}
	return err
}

func (s goldenSource) blocks(string, []int, int, int) (*nn.Quantised, error) { return nil, nil }
func (s goldenSource) blockRow(string) int                                   { return 0 }
func (goldenSource) loaded()                                                 {}
func (s goldenSource) hold() (func() error, error)                           { return func() error { return nil }, nil }

func (s goldenSource) stored(string) tensor.Dtype { return tensor.Float32 }

func (s goldenSource) Check(iter.Seq[hf.Weight], ...string) error { return nil }

func (s goldenSource) Close() error { return nil }

// goldenModelOf returns a golden model as an open model.
func goldenModelOf(t testing.TB, name string) *Model {
	t.Helper()
	all := readGolden(t)
	i := slices.IndexFunc(all, func(m goldenModel) bool { return m.Name == name })
	if i < 0 {
		t.Fatal(name)
	}
	g := &all[i]
	n := g.network(t)
	return &Model{network: n, file: "config.json", config: g.Config, files: goldenSource{goldenWeights{g, n.(*transformer).norm == unitRMSNorm, tensor.Dtype{}}}}
}

// checkAdapted compares the logits of an adapted model with those of peft: of the model's engine, and of one of its weights.
func checkAdapted(t *testing.T, m *Model, file string) {
	t.Helper()
	o := Options{Context: 256, Draft: 40, Exact: true}
	e, err := m.Engine(o)
	checkAdaptedEngine(t, e, err, file)
	e, err = NewEngine(m.network, m.Weights(), o)
	checkAdaptedEngine(t, e, err, file)
}

func checkAdaptedEngine(t *testing.T, e *Engine, err error, file string) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	vocab := e.network.Sizes().Vocab
	want := readRows(t, file, vocab)
	var appends []la.Append
	prompts := readGolden(t)[0].Prompts
	for _, ids := range prompts {
		s, err := e.newSequence()
		if err != nil {
			t.Fatal(err)
		}
		appends = append(appends, la.Append{Seq: s, Tokens: len(ids)})
	}
	r, err := e.run(appends, slices.Concat(prompts...), true, true, nil)
	if err != nil {
		t.Fatal(err)
	}
	worst := 0.0
	for i, row := range want {
		for j, w := range row {
			worst = max(worst, math.Abs(float64(r.logits[i*vocab+j]-w)))
		}
	}
	if !(worst <= 1e-4) || len(want) != len(slices.Concat(prompts...)) {
		t.Errorf("logits differ by %v", worst)
	}
	for _, a := range appends {
		if err := a.Seq.Release(); err != nil {
			t.Error(err)
		}
	}
}

// TestLoRAGolden: models with adapters have peft's logits within 1e-4, from folders with tensors of any type, and from the files
// that peft wrote.
func TestLoRAGolden(t *testing.T) {
	for _, c := range readAdapters(t) {
		t.Run(c.Name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.CopyFS(dir, c.files()); err != nil {
				t.Fatal(err)
			}
			dirs := []string{dir}
			if c.Folder {
				dirs = append(dirs, "testdata/lora", "testdata/lora/torch")
			}
			for _, dir := range dirs {
				m := goldenModelOf(t, c.Model)
				if err := m.Adapt(dir); err != nil {
					t.Fatal(err)
				}
				checkAdapted(t, m, c.File)
				if err := m.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// TestLoRASum: two adapters of half the scale are one, and adapters of later calls do not change engines of before.
func TestLoRASum(t *testing.T) {
	c := readAdapters(t)[0]
	var config map[string]any
	if err := json.Unmarshal(c.Config, &config); err != nil {
		t.Fatal(err)
	}
	config["lora_alpha"], config["alpha_pattern"] = config["lora_alpha"].(float64)/2, map[string]any{"k_proj": 2.5, "^model.layers.0.mlp.down_proj": 0.75}
	data, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	c.Config = data
	m := goldenModelOf(t, c.Model)
	for i := range 2 {
		if i == 1 {
			before := m.weights()
			defer func() {
				for name, d := range before.(merged).deltas {
					if len(d) != 1 {
						t.Errorf("weights of before have %d deltas of %s", len(d), name)
					}
				}
			}()
		}
		adaptFS(t, m, c.files())
	}
	checkAdapted(t, m, c.File)
}

// adaptFS adds an adapter that is valid.
func adaptFS(t testing.TB, m *Model, files fs.FS) {
	t.Helper()
	f, err := hf.OpenFS("adapter", files)
	if err == nil {
		err = m.adapt(f)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// shippedAdapter returns an adapter of the shipped model, and its deltas in float64.
func shippedAdapter(t testing.TB, m *Model) (files fstest.MapFS, deltas map[string][]float64) {
	t.Helper()
	deltas = map[string][]float64{}
	var all []fileTensor
	const rank, alpha = 3, 2.0
	rng := rand.New(rand.NewPCG(1, 2))
	for w := range m.network.Weights() {
		if !strings.HasSuffix(w.Name, "fc1.weight") && !strings.HasSuffix(w.Name, "q_proj.weight") {
			continue
		}
		module := "base_model.model.model." + strings.TrimSuffix(w.Name, ".weight")
		a := fileTensor{name: module + ".lora_A.weight", shape: []int{rank, w.Shape[1]}, data: make([]float32, rank*w.Shape[1])}
		b := fileTensor{name: module + ".lora_B.weight", shape: []int{w.Shape[0], rank}, data: make([]float32, rank*w.Shape[0])}
		for _, x := range []fileTensor{a, b} {
			for i := range x.data {
				x.data[i] = float32(rng.NormFloat64() / 4)
			}
		}
		d := make([]float64, w.Shape[0]*w.Shape[1])
		for i := range w.Shape[0] {
			for j := range w.Shape[1] {
				for k := range rank {
					d[i*w.Shape[1]+j] += alpha / rank * float64(b.data[i*rank+k]) * float64(a.data[k*w.Shape[1]+j])
				}
			}
		}
		deltas[w.Name] = d
		all = append(all, a, b)
	}
	return fstest.MapFS{
		adapterFile:                 {Data: []byte(`{"peft_type": "LORA", "r": 3, "lora_alpha": 2, "target_modules": ["fc1", "q_proj"]}`)},
		"adapter_model.safetensors": {Data: safetensors(all)},
	}, deltas
}

// TestLoRABeside: an adapter beside the weights is merged, and each sum is rounded once, to any type.
func TestLoRABeside(t *testing.T) {
	shipped := shippedFiles(t)
	plain, err := OpenFS("plain", shipped)
	if err != nil {
		t.Fatal(err)
	}
	files, deltas := shippedAdapter(t, plain)
	if len(deltas) < 2 {
		t.Fatal(len(deltas))
	}
	maps.Copy(files, shipped)
	adapted, err := OpenFS("adapted", files)
	if err != nil {
		t.Fatal(err)
	}
	from := adapted.weights()
	for w := range plain.network.Weights() {
		for _, as := range []tensor.Dtype{{}, tensor.Float32, la.Float16, la.BFloat16} {
			before, err := part(plain.files, &w, tensor.Float32, 0, w.Shape[0])
			if err != nil {
				t.Fatal(err)
			}
			after, err := part(from, &w, as, 0, w.Shape[0])
			if err != nil {
				t.Fatal(err)
			}
			if want := as; want == (tensor.Dtype{}) {
				if as = plain.files.stored(w.Name); after.Dtype() != as {
					t.Fatalf("%s is %v, stored as %v", w.Name, after.Dtype(), as)
				}
			}
			rounded := func(x float64) float32 {
				switch as {
				case la.Float16:
					return half.FromFloat32(float32(x)).Float32()
				case la.BFloat16:
					return half.BFromFloat32(float32(x)).Float32()
				}
				return float32(x)
			}
			got, err := converted(after, tensor.Float32)
			if err != nil {
				t.Fatal(err)
			}
			d, other := deltas[w.Name], 0
			for i, x := range before.Float32s() {
				want := float64(x)
				if d != nil {
					want += d[i]
				}
				// The sum in float32 may be on the other side of a tie.
				if g := got.Float32s()[i]; g != rounded(want) {
					if other++; !(math.Abs(float64(g-rounded(want))) <= math.Abs(want)*map[tensor.Dtype]float64{tensor.Float32: 1e-6, la.Float16: 1e-3, la.BFloat16: 8e-3}[as]+1e-7) {
						t.Fatalf("%s as %v: element %d is %v, want %v", w.Name, as, i, g, want)
					}
				}
			}
			if n := len(got.Float32s()); as != tensor.Float32 && other > n/100 || d == nil && other > 0 {
				t.Errorf("%s as %v: %d of %d elements differ", w.Name, as, other, n)
			}
		}
	}
	text := func(m *Model) string {
		e, err := m.Engine(Options{Context: 40})
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		x, err := e.Start(context.Background(), Request{Prompt: []int{5, 3, 8}, Tokens: 20})
		if err != nil {
			t.Fatal(err)
		}
		s, err := x.Wait()
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	a, err := plain.Checksums()
	if err != nil {
		t.Fatal(err)
	}
	b, err := adapted.Checksums()
	if err != nil {
		t.Fatal(err)
	}
	other := 0
	for i := range a {
		if a[i] != b[i] {
			other++
		}
	}
	if other != len(deltas) {
		t.Errorf("%d of %d checksums differ, with %d adapted weights", other, len(a), len(deltas))
	}
	if a, b := text(plain), text(adapted); a == b || a == "" {
		t.Errorf("the text is %q with and without the adapter", a)
	}
	if err := errors.Join(plain.Close(), adapted.Close()); err != nil {
		t.Error(err)
	}
}

// TestLoRARounds: a sum that the stored type does not have makes the weight float32, unless a type is asked for.
func TestLoRARounds(t *testing.T) {
	g := goldenModelOf(t, "llama3")
	s := g.files.(goldenSource)
	s.as = la.Float16
	const name = "layers.0.mlp.up_proj.weight"
	rows := func(x float32, columns int) func(from, to int) ([]float32, error) {
		return func(from, to int) ([]float32, error) { return slices.Repeat([]float32{x}, (to-from)*columns), nil }
	}
	m := merged{storedAs{s, la.Float16}, map[string][]delta{name: {{scale: 1, rank: 1, a: rows(300, 64), b: rows(300, 1)}}}}
	x, err := m.Tensor(name, 96, 64)
	if err != nil || x.Dtype() != tensor.Float32 || math.Abs(float64(x.Float32s()[5])-90000) > 1 {
		t.Errorf("%v, %v", x.Dtype(), err)
	}
	if _, err := m.rowsAs(name, la.Float16, []int{96, 64}, 3, 5); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), name) {
		t.Errorf("90000 as float16: %v", err)
	}
	if x, err = m.rowsAs(name, la.BFloat16, []int{96, 64}, 3, 5); err != nil || !slices.Equal(x.Shape(), []int{2, 64}) {
		t.Errorf("%v, %v", x.Shape(), err)
	}
}

// TestLoRABlocks: a large weight is merged in several pieces, whichever rows are asked for.
func TestLoRABlocks(t *testing.T) {
	const rows, columns, rank = 1100, 1003, 2
	name := "w"
	w := fileTensor{name: name, shape: []int{rows, columns}, dtype: "bfloat16", data: make([]float32, rows*columns)}
	for i := range w.data {
		w.data[i] = float32(i%255) / 4
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "model.safetensors"), safetensors([]fileTensor{w}), 0o666); err != nil {
		t.Fatal(err)
	}
	f, err := hf.Open(dir)
	if err == nil {
		err = f.OpenWeights()
	}
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	a := func(k, j int) float32 { return float32(k + j%5) }
	b := func(i, k int) float32 { return float32(i%7 - k) }
	const scale = 0.5
	d := delta{scale: scale, rank: rank,
		a: func(from, to int) (s []float32, err error) {
			for k := from; k < to; k++ {
				for j := range columns {
					s = append(s, a(k, j))
				}
			}
			return s, nil
		},
		b: func(from, to int) (s []float32, err error) {
			for i := from; i < to; i++ {
				s = append(s, b(i, 0), b(i, 1))
			}
			return s, nil
		},
	}
	m := merged{folder{f}, map[string][]delta{name: {d}}}
	for _, part := range [][2]int{{0, rows}, {3, 1090}, {1099, rows}, {500, 501}} {
		for _, as := range []tensor.Dtype{{}, tensor.Float32, la.Float16} {
			got, err := m.rowsAs(name, as, w.shape, part[0], part[1])
			if err != nil {
				t.Fatal(err)
			}
			if as == (tensor.Dtype{}) {
				as = la.BFloat16
			}
			wide, err := converted(got, tensor.Float32)
			if err != nil || got.Dtype() != as || !slices.Equal(got.Shape(), []int{part[1] - part[0], columns}) {
				t.Fatalf("%v, %v, error %v", got.Dtype(), got.Shape(), err)
			}
			for i, g := range wide.Float32s() {
				row, j := part[0]+i/columns, i%columns
				want := w.data[row*columns+j] + scale*(b(row, 0)*a(0, j)+b(row, 1)*a(1, j))
				switch as {
				case la.Float16:
					want = half.FromFloat32(want).Float32()
				case la.BFloat16:
					want = half.BFromFloat32(want).Float32()
				}
				if g != want {
					t.Fatalf("rows %v as %v: element %d is %v, want %v", part, as, i, g, want)
				}
			}
		}
	}
}

type storedAs struct {
	source
	dtype tensor.Dtype
}

func (s storedAs) stored(string) tensor.Dtype { return s.dtype }
