package decoder

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/decoder/internal/hf"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"

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

// checkAdapted compares the logits of an adapted model with those of peft.
func checkAdapted(t *testing.T, m *Model, file string) {
	t.Helper()
	e, err := m.Engine(Options{Context: 256, Draft: 40, Exact: true})
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
	r, err := e.run(appends, slices.Concat(prompts...), true, true)
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
				dirs = append(dirs, "testdata/lora")
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

// TestLoRARefused: an adapter that would be applied in part, or wrongly, is an error that names the cause.
func TestLoRARefused(t *testing.T) {
	golden := readAdapters(t)
	good := golden[len(golden)-1]
	m := goldenModelOf(t, good.Model)
	with := func(field string, value any) func(*goldenAdapter) {
		return func(a *goldenAdapter) {
			var config map[string]any
			if err := json.Unmarshal(a.Config, &config); err != nil {
				t.Fatal(err)
			}
			config[field] = value
			if value == "absent" {
				delete(config, field)
			}
			data, err := json.Marshal(config)
			if err != nil {
				t.Fatal(err)
			}
			a.Config = data
		}
	}
	renamed := func(i int, from, to string) func(*goldenAdapter) {
		return func(a *goldenAdapter) {
			if !strings.Contains(a.Tensors[i].name, from) {
				t.Fatal(a.Tensors[i].name)
			}
			a.Tensors[i].name = strings.Replace(a.Tensors[i].name, from, to, 1)
		}
	}
	reshaped := func(i int, shape ...int) func(*goldenAdapter) {
		return func(a *goldenAdapter) {
			a.Tensors[i].shape, a.Tensors[i].data = shape, make([]float32, tensor.Shape(shape).TotalSize())
		}
	}
	extra := func(name string, shape ...int) func(*goldenAdapter) {
		return func(a *goldenAdapter) {
			a.Tensors = append(a.Tensors, fileTensor{name: "base_model.model." + name, shape: shape, data: make([]float32, tensor.Shape(shape).TotalSize())})
		}
	}
	object := map[string]any{"x": 1}
	expressions := func(n int) map[string]any {
		all := map[string]any{}
		for i := range n {
			all[fmt.Sprintf("%d(%s)", i, strings.Repeat("x", 1000))] = 1
		}
		return all
	}
	for _, c := range []struct {
		change func(*goldenAdapter)
		kind   error
		words  []string
	}{
		{with("use_dora", true), ErrUnsupported, []string{"use_dora", "merge_and_unload"}},
		{with("bias", "lora_only"), ErrUnsupported, []string{"bias", "lora_only"}},
		{with("bias", "all"), ErrUnsupported, []string{"bias"}},
		{with("modules_to_save", []string{"lm_head"}), ErrUnsupported, []string{"modules_to_save"}},
		{with("peft_type", "IA3"), ErrUnsupported, []string{"peft_type", "IA3"}},
		{with("peft_type", "ADALORA"), ErrUnsupported, []string{"peft_type"}},
		{with("peft_type", "absent"), ErrMissing, []string{"peft_type"}},
		{with("lora_bias", true), ErrUnsupported, []string{"lora_bias"}},
		{with("megatron_config", object), ErrUnsupported, []string{"megatron_config"}},
		{with("trainable_token_indices", []int{1}), ErrUnsupported, []string{"trainable_token_indices"}},
		{with("init_lora_weights", "pissa"), ErrUnsupported, []string{"init_lora_weights", "pissa"}},
		{with("init_lora_weights", "pissa_niter_16"), ErrUnsupported, []string{"init_lora_weights"}},
		{with("init_lora_weights", "olora"), ErrUnsupported, []string{"init_lora_weights"}},
		{with("loftq_config", object), ErrUnsupported, []string{"loftq_config"}},
		{with("corda_config", object), ErrUnsupported, []string{"corda_config"}},
		{with("layer_replication", [][]int{{0, 1}}), ErrUnsupported, []string{"layer_replication"}},
		{with("alora_invocation_tokens", []int{3}), ErrUnsupported, []string{"alora_invocation_tokens"}},
		{with("target_parameters", []string{"x"}), ErrUnsupported, []string{"target_parameters"}},
		{with("use_qalora", true), ErrUnsupported, []string{"use_qalora"}},
		{with("task_type", "SEQ_CLS"), ErrUnsupported, []string{"task_type"}},
		{with("use_wonder", true), ErrUnsupported, []string{"use_wonder", "not known"}},
		{with("use_wonder", false), ErrUnsupported, []string{"use_wonder", "not known"}},
		{with("r", 0), ErrFormat, []string{"r is 0"}},
		{with("r", 4), ErrFormat, []string{"rank 2 in the tensors", "4 by r"}},
		{with("r", "absent"), ErrMissing, []string{": r: "}},
		{with("lora_alpha", "absent"), ErrMissing, []string{"lora_alpha"}},
		{with("lora_alpha", "x"), ErrFormat, []string{"lora_alpha"}},
		{with("lora_alpha", 1e300), ErrFormat, []string{"scale"}},
		{with("use_rslora", 1), ErrFormat, []string{"use_rslora"}},
		{with("fan_in_fan_out", 1), ErrFormat, []string{"fan_in_fan_out"}},
		{with("rank_pattern", map[string]any{"up_proj": 3}), ErrFormat, []string{"up_proj", "rank_pattern"}},
		{with("rank_pattern", map[string]any{"up_proj": 1.5}), ErrFormat, []string{"rank_pattern"}},
		{with("rank_pattern", map[string]any{"(": 1}), ErrUnsupported, []string{"rank_pattern", "list the modules"}},
		{with("rank_pattern", map[string]any{")|(": 1}), ErrUnsupported, []string{"rank_pattern"}},
		{with("rank_pattern", expressions(600)), ErrUnsupported, []string{"rank_pattern has more than 524288 bytes of regular expressions"}},
		{func(a *goldenAdapter) {
			*a = golden[0]
			with("rank_pattern", expressions(300))(a)
		}, ErrUnsupported, []string{"regular expressions of", "15 modules"}},
		{with("alpha_pattern", []int{1}), ErrFormat, []string{"alpha_pattern"}},
		{with("alpha_pattern", map[string]any{"x": "y"}), ErrFormat, []string{"alpha_pattern"}},
		{with("target_modules", "absent"), ErrMissing, []string{"target_modules"}},
		{with("target_modules", []string{"v_proj"}), ErrFormat, []string{"up_proj", "target_modules"}},
		{with("target_modules", "(?<=x)v_proj"), ErrUnsupported, []string{"target_modules", "regular expression"}},
		{with("target_modules", strings.Repeat("x", 2000)), ErrUnsupported, []string{"target_modules", "2000 bytes"}},
		{with("target_modules", "q{2}"), ErrUnsupported, []string{"target_modules", "q{2}"}},
		{with("target_modules", `\pL`), ErrUnsupported, []string{"target_modules"}},
		{with("target_modules", 3), ErrFormat, []string{"target_modules"}},
		{with("exclude_modules", []string{"up_proj"}), ErrFormat, []string{"up_proj", "exclude_modules"}},
		{with("layers_to_transform", 0), ErrFormat, []string{"layers_to_transform"}},
		{with("layers_to_transform", []int{0, 2}), ErrFormat, []string{"layers_to_transform"}},
		{with("layers_to_transform", "x"), ErrFormat, []string{"layers_to_transform"}},
		{func(a *goldenAdapter) { a.Config = []byte("{") }, ErrFormat, []string{"JSON"}},
		{func(a *goldenAdapter) { a.Config = []byte("null") }, ErrFormat, []string{"JSON"}},
		{func(a *goldenAdapter) { a.Config = nil }, ErrFormat, []string{"JSON"}},
		{func(a *goldenAdapter) { a.Tensors = nil }, ErrFormat, []string{"without tensors"}},
		{func(a *goldenAdapter) { a.Tensors = a.Tensors[1:] }, ErrMissing, []string{"up_proj.lora_B", "no partner"}},
		{func(a *goldenAdapter) { a.Tensors = a.Tensors[:3] }, ErrMissing, []string{"v_proj.lora_A", "no partner"}},
		{renamed(0, "layers.1", "layers.9"), ErrUnsupported, []string{"layers.9.mlp.up_proj.lora_A"}},
		{renamed(0, "up_proj", "experts"), ErrUnsupported, []string{"experts.lora_A"}},
		{renamed(0, "lora_A.", "lora_A.default."), ErrUnsupported, []string{"lora_A.default"}},
		{renamed(0, "base_model.model.", ""), ErrUnsupported, []string{`"layers.1.mlp.up_proj.lora_A.weight"`}},
		{reshaped(0, 2, 65), ErrFormat, []string{"up_proj.lora_A", "[2 65]", "(r, 64)"}},
		{reshaped(0, 3, 64), ErrFormat, []string{"[3 64]"}},
		{reshaped(0, 64, 2), ErrFormat, []string{"[64 2]"}},
		{reshaped(0, 128), ErrFormat, []string{"[128]"}},
		{reshaped(1, 97, 2), ErrFormat, []string{"[97 2]"}},
		{extra("model.embed_tokens.lora_embedding_A", 2, 64), ErrUnsupported, []string{"lora_embedding_A"}},
		{extra("model.embed_tokens.lora_A.weight", 2, 64), ErrUnsupported, []string{"embed_tokens.lora_A"}},
		{extra("model.norm.weight", 64), ErrUnsupported, []string{"model.norm.weight"}},
		{extra("model.layers.1.mlp.up_proj.lora_magnitude_vector", 96), ErrUnsupported, []string{"lora_magnitude_vector"}},
		{extra("model.layers.1.mlp.up_proj.lora_B.bias", 96), ErrUnsupported, []string{"lora_B.bias"}},
		{extra("model.layers.1.mlp.up_proj.base_layer.weight", 96, 64), ErrUnsupported, []string{"base_layer"}},
	} {
		a := good
		a.Tensors = slices.Clone(good.Tensors)
		c.change(&a)
		f, err := hf.OpenFS("adapter", a.files())
		if err != nil {
			t.Fatal(err)
		}
		err = fileError(m.adapt(f))
		if !errors.Is(err, c.kind) || m.deltas != nil || m.adapters != nil {
			t.Errorf("%v: %v, want %v", c.words, err, c.kind)
			continue
		}
		for _, w := range append(c.words, "adapter", "decoder: ") {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%v says nothing of %q", err, w)
			}
		}
	}
	// A tied head has no matrix of its own.
	tied := goldenModelOf(t, "qwen2")
	f, err := hf.OpenFS("adapter", (&goldenAdapter{Config: []byte(`{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["lm_head"]}`), Tensors: []fileTensor{
		{name: "base_model.model.lm_head.lora_A.weight", shape: []int{1, 64}, data: make([]float32, 64)},
		{name: "base_model.model.lm_head.lora_B.weight", shape: []int{64, 1}, data: make([]float32, 64)},
	}}).files())
	if err != nil {
		t.Fatal(err)
	}
	if err := tied.adapt(f); !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "tie_word_embeddings") {
		t.Errorf("a tied head: %v", err)
	}
	// Numbers are looked at when they are merged.
	bad := good
	bad.Tensors = slices.Clone(good.Tensors)
	bad.Tensors[0].data = slices.Repeat([]float32{float32(math.NaN())}, 128)
	adaptFS(t, m, bad.files())
	if _, err := m.Engine(Options{}); !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), "up_proj.lora_A") {
		t.Errorf("NaN: %v", err)
	}
}

// TestLoRAFields: fields without effect are no errors.
func TestLoRAFields(t *testing.T) {
	const start = `{"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": `
	for _, c := range []struct {
		config string
		yes    []string // targeted
		no     []string
	}{
		{`["q_proj"], "peft_version": "0.99", "revision": "main", "inference_mode": true, "wondrous": null, "init_lora_weights": "eva", "eva_config": {"rho": 2}, "modules_to_save": [], "loftq_config": { }}`,
			[]string{"q_proj", "model.layers.0.self_attn.q_proj"}, []string{"model.xq_proj", "q_proj.x"}},
		{`"all-linear"}`, []string{"model.layers.0.fc1"}, []string{"lm_head"}},
		{`".*q"}`, []string{"a.q", "q"}, []string{"a.qx"}},
		{`"a|b"}`, []string{"a", "b"}, []string{"ax", "xb"}},
		{`["q", "model.layers.3.k"], "layers_to_transform": [1, 2]}`, []string{"model.layers.1.q", "model.layers.2.mlp.4.q", "model.layers.3.k"}, []string{"model.layers.3.q", "layers.q", "1.q"}},
		{`["q"], "layers_to_transform": 2, "layers_pattern": "layers"}`, []string{"model.layers.2.q"}, []string{"model.layers.1.q"}},
		{`["q"], "layers_to_transform": []}`, []string{"model.layers.2.q"}, nil},
		{`".*q", "exclude_modules": "x.*"}`, []string{"a.q"}, []string{"x.q"}},
	} {
		a, err := readAdapterConfig(adapterFile, []byte(start+c.config))
		if err != nil {
			t.Errorf("%s: %v", c.config, err)
			continue
		}
		for want, names := range map[bool][]string{true: c.yes, false: c.no} {
			for _, name := range names {
				if a.targeted(name) != want {
					t.Errorf("%s: %s is targeted: %v", c.config, name, !want)
				}
			}
		}
	}
	a, err := readAdapterConfig(adapterFile, []byte(start+`["q"], "rank_pattern": {"b.q": 8, "q": 4, "a.*": 16}, "alpha_pattern": {"^c.q": 0.5}, "use_rslora": true}`))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		module string
		rank   int
		scale  float64
	}{{"x.b.q", 8, 3 / math.Sqrt(8)}, {"a.q", 4, 1.5}, {"a.k", 16, 0.75}, {"c.q", 4, 0.25}, {"x.c.q", 4, 1.5}, {"k", 2, 3 / math.Sqrt(2)}, {"bxq", 8, 3 / math.Sqrt(8)}, {"xb.q", 4, 1.5}} {
		if s, err := a.scale(c.module, c.rank); err != nil || math.Abs(s-c.scale) > 1e-12 {
			t.Errorf("%s: %v, %v, want %v", c.module, s, err, c.scale)
		}
		if _, err := a.scale(c.module, c.rank+1); !errors.Is(err, ErrFormat) {
			t.Errorf("%s with another rank: %v", c.module, err)
		}
	}
}

// mutated is one damaged adapter: an error, or deltas that can be added.
func mutated(t testing.TB, m *Model, config, tensors []byte) {
	t.Helper()
	f, err := hf.OpenFS("adapter", fstest.MapFS{adapterFile: {Data: config}, "adapter_model.safetensors": {Data: tensors}})
	if err != nil {
		t.Fatal(err)
	}
	x := *m
	if err := x.adapt(f); err != nil {
		if text := err.Error(); len(text) > 4000 || !strings.HasPrefix(text, "decoder: ") {
			t.Fatalf("%d bytes: %.300q", len(text), text)
		}
		return
	}
	for w := range tensors2D(&x) {
		_, _ = x.weights().Tensor(w.Name, w.Shape...)
	}
	if err := x.Close(); err != nil {
		t.Error(err)
	}
}

// tensors2D yields the tensors with deltas.
func tensors2D(m *Model) iter.Seq[hf.Weight] {
	return func(yield func(hf.Weight) bool) {
		for w := range tensors(m.network) {
			if m.deltas[w.Name] != nil && !yield(w) {
				return
			}
		}
	}
}

// TestLoRADamaged: 2,000 damaged adapters are no panics.
func TestLoRADamaged(t *testing.T) {
	m := goldenModelOf(t, "granite")
	files := [2][]byte{}
	for i, name := range []string{adapterFile, "adapter_model.safetensors"} {
		var err error
		if files[i], err = os.ReadFile(filepath.Join("testdata/lora", name)); err != nil {
			t.Fatal(err)
		}
	}
	rng := reftest.Rand(t)
	for range 2000 {
		bad := [2][]byte{slices.Clone(files[0]), slices.Clone(files[1])}
		i := rng.IntN(2)
		for range 1 + rng.IntN(3) {
			n := len(bad[i])
			if i == 1 && rng.IntN(4) > 0 {
				n = min(n, 700) // the header
			}
			if n == 0 {
				break
			}
			switch at := rng.IntN(n); rng.IntN(4) {
			case 0:
				bad[i][at] ^= 1 << rng.IntN(8)
			case 1:
				bad[i] = slices.Delete(bad[i], at, min(at+1+rng.IntN(20), len(bad[i])))
			case 2:
				bad[i] = slices.Insert(bad[i], at, bad[i][rng.IntN(n)])
			default:
				bad[i] = bad[i][:max(1, at)]
			}
		}
		mutated(t, m, bad[0], bad[1])
	}
}

func FuzzLoRA(f *testing.F) {
	m := goldenModelOf(f, "granite")
	for _, c := range readAdapters(f) {
		f.Add([]byte(c.Config), safetensors(c.Tensors))
	}
	f.Add([]byte(`{"peft_type":"LORA","r":1,"lora_alpha":1,"target_modules":".*","rank_pattern":{"(a|b)*":2}}`), safetensors(nil))
	f.Fuzz(func(t *testing.T, config, tensors []byte) { mutated(t, m, config, tensors) })
}

// TestLoRABounds: the memory and the time for a hostile configuration are in proportion to the file.
func TestLoRABounds(t *testing.T) {
	var many strings.Builder
	for i := range 1 << 16 {
		fmt.Fprintf(&many, `"m%d.(a|b)*c{1,50}":2,`, i)
	}
	entries := strings.TrimSuffix(many.String(), ",")
	const start = `{"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": `
	for _, config := range []string{
		start + `["a"], "rank_pattern": {` + entries + "}}",
		start + `["a"], "alpha_pattern": {"` + strings.Repeat("((a{1,9}){1,9}){1,9}", 40) + `": 1}}`,
		start + `["` + strings.Repeat(`a","`, 1<<16) + `"]}`,
		start + `"` + strings.Repeat("(", 1000) + `"}`,
		start + strings.Repeat("[", 1<<16) + "}",
	} {
		var err error
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err = readAdapterConfig(adapterFile, []byte(config))
		runtime.ReadMemStats(&after)
		n := after.TotalAlloc - before.TotalAlloc
		if err != nil && len(err.Error()) > 3000 || n > uint64(200*len(config))+256<<20 {
			t.Errorf("%.60s: %d bytes allocated for %d: %.300v", config, n, len(config), err)
		}
	}
}
