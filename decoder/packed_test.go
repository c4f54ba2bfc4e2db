package decoder

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
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
	"gorgonia.org/leanattention/decoder/tokenizer"

	"gorgonia.org/tensor"
)

const packedDir = "testdata/quantised"

// storedTensor is a tensor of a safetensors file.
type storedTensor struct {
	DType string `json:"dtype"`
	Shape []int  `json:"shape"`
	At    [2]int `json:"data_offsets"`
	data  []byte
}

// packedFiles are the files of a folder of testdata, whose tensors and configuration a test may change.
type packedFiles struct {
	tensors map[string]*storedTensor
	config  map[string]any
}

func readPacked(t testing.TB, name string) *packedFiles {
	t.Helper()
	f := &packedFiles{tensors: map[string]*storedTensor{}}
	data, err := os.ReadFile(filepath.Join(packedDir, name, "model.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	n := int(binary.LittleEndian.Uint64(data))
	if err := json.Unmarshal(data[8:][:n], &f.tensors); err != nil {
		t.Fatal(err)
	}
	for _, x := range f.tensors {
		x.data = slices.Clone(data[8+n:][x.At[0]:x.At[1]])
	}
	text, err := os.ReadFile(filepath.Join(packedDir, name, "config.json"))
	if err == nil {
		err = json.Unmarshal(text, &f.config)
	}
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// quantization returns quantization_config.
func (f *packedFiles) quantization() map[string]any {
	return f.config["quantization_config"].(map[string]any)
}

// open opens the model without a tokenizer.
func (f *packedFiles) open(t testing.TB) (*Model, error) {
	t.Helper()
	var data []byte
	for _, name := range slices.Sorted(maps.Keys(f.tensors)) {
		x := f.tensors[name]
		x.At = [2]int{len(data), len(data) + len(x.data)}
		data = append(data, x.data...)
	}
	header, err := json.Marshal(f.tensors)
	if err != nil {
		t.Fatal(err)
	}
	config, err := json.Marshal(f.config)
	if err != nil {
		t.Fatal(err)
	}
	file := append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...)
	in, err := hf.OpenFS("folder", fstest.MapFS{"config.json": {Data: config}, "model.safetensors": {Data: append(file, data...)}})
	if err != nil {
		t.Fatal(err)
	}
	m, err := open(folder{in}, func() (*tokenizer.Tokenizer, error) { return nil, nil })
	if err == nil {
		t.Cleanup(func() {
			if err := m.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	return m, err
}

// TestPackedGolden: matrices have the numbers that AutoGPTQ and AutoAWQ have packed: see testdata/quantised.py.
func TestPackedGolden(t *testing.T) {
	var golden map[string]map[string]string
	data, err := os.ReadFile(filepath.Join(packedDir, "golden.json"))
	if err == nil {
		err = json.Unmarshal(data, &golden)
	}
	if err != nil || len(golden) < 10 {
		t.Fatal(len(golden), err)
	}
	rng := rand.New(rand.NewPCG(5, 6))
	tokens := make([]int, 40)
	for i := range tokens {
		tokens[i] = rng.IntN(64)
	}
	for name, matrices := range golden {
		t.Run(name, func(t *testing.T) {
			m, err := readPacked(t, name).open(t)
			if err != nil {
				t.Fatal(err)
			}
			shapes := map[string][]int{}
			for w := range m.network.Weights() {
				shapes[w.Name] = w.Shape
			}
			for name, want := range matrices {
				shape := shapes[name]
				all := make([]float32, shape[0]*shape[1])
				if err := m.files.float32s(all, name, shape, 0, shape[0]); err != nil {
					t.Fatal(err)
				}
				var bytes []byte
				for _, x := range all {
					bytes = binary.LittleEndian.AppendUint32(bytes, math.Float32bits(x+0)) // no -0
				}
				if sum := sha256.Sum256(bytes); hex.EncodeToString(sum[:]) != want {
					t.Errorf("%s has other numbers", name)
				}
				from := rng.IntN(shape[0])
				to := from + 1 + rng.IntN(shape[0]-from)
				some := make([]float32, (to-from)*shape[1])
				if err := m.files.float32s(some, name, shape, from, to); err != nil || !slices.Equal(some, all[from*shape[1]:to*shape[1]]) {
					t.Errorf("rows [%d, %d) of %s are others: %v", from, to, name, err)
				}
			}
			const adapted = "layers.0.mlp.up_proj.weight"
			up := shapes[adapted]
			plain := make([]float32, up[0]*up[1])
			if err := m.files.float32s(plain, adapted, up, 0, up[0]); err != nil {
				t.Fatal(err)
			}
			own, err := m.Weights().Tensor(adapted, up...)
			if err != nil {
				t.Fatal(err)
			}
			for i, x := range own.Data().([]la.F16) {
				if math.Abs(float64(x.Float32()-plain[i])) > 0x1p-11*math.Abs(float64(plain[i]))+0x1p-24 {
					t.Fatalf("element %d of a graph's own weight is %v, want %v", i, x.Float32(), plain[i])
				}
			}
			want, _ := continued(t, m, Options{Exact: true, Weights: tensor.Float32}, tokens)
			e, err := m.Engine(Options{Exact: true})
			if err != nil {
				t.Fatal(err)
			}
			for name := range matrices {
				if of := fmt.Sprint(e.weights[name]); !strings.Contains(of, "int4") && !strings.Contains(of, "Q8_0") && !strings.Contains(of, "e4m3") {
					t.Errorf("%s is %s", name, of)
				}
			}
			p, _ := continuedBy(t, e, tokens)
			if err := e.Close(); err != nil {
				t.Error(err)
			}
			half, _ := continued(t, m, Options{Exact: true, Weights: la.Float16}, tokens)
			mixed, _ := continued(t, m, Options{}, tokens)
			for i := range want {
				// An order of columns is one of sums.
				if ordered := strings.Contains("gptq_order gptq_row gptq_8", name); p[i] != want[i] && !(ordered && math.Abs(p[i]-want[i]) < 1e-3) {
					t.Fatalf("log-probability %d is %v, of float32 weights %v", i, p[i], want[i])
				}
			}
			off := func(p []float64) float64 {
				off, size := 0.0, 0.0
				for i := range p {
					off, size = off+math.Abs(p[i]-want[i]), size+math.Abs(want[i])
				}
				return off / size
			}
			if off := off(half); off == 0 || off > 0.02 {
				t.Errorf("float16 weights are off by %v", off)
			}
			if off := off(mixed); off > 0.2 || off == 0 && !strings.HasPrefix(name, "fp8") {
				t.Errorf("mixed precision is off by %v", off)
			}
		})
	}
}

// TestPackedAdapted: a quantised matrix with an adapter is one of float16, and the others stay.
func TestPackedAdapted(t *testing.T) {
	const adapted = "layers.0.mlp.up_proj.weight"
	for _, name := range []string{"gptq_order", "awq", "fp8_tensor"} {
		m, err := readPacked(t, name).open(t)
		if err != nil {
			t.Fatal(err)
		}
		shape := []int{m.network.(*transformer).inner, m.network.(*transformer).width}
		plain := make([]float32, shape[0]*shape[1])
		if err := m.files.float32s(plain, adapted, shape, 0, shape[0]); err != nil {
			t.Fatal(err)
		}
		ones := func(n int) func(int, int) ([]float32, error) {
			return func(from, to int) ([]float32, error) { return slices.Repeat([]float32{1}, (to-from)*n), nil }
		}
		m.addDeltas(map[string]delta{adapted: {scale: 0.5, rank: 1, a: ones(shape[1]), b: ones(1)}}, func() error { return nil })
		e, err := m.Engine(Options{})
		if err != nil {
			t.Fatal(err)
		}
		got, ok := e.weights[adapted].(*tensor.Dense)
		if !ok || got.Dtype() != la.Float16 {
			t.Fatalf("%s: the adapted matrix is %v", name, e.weights[adapted])
		}
		for i, x := range got.Data().([]la.F16) {
			if want := float64(plain[i]) + 0.5; math.Abs(float64(x.Float32())-want) > 0x1p-10*math.Abs(want)+0x1p-12 {
				t.Fatalf("%s: element %d is %v, want %v", name, i, x.Float32(), want)
			}
		}
		if of := fmt.Sprint(e.weights["layers.0.mlp.gate_proj.weight"]); !strings.HasPrefix(of, "weights of ") {
			t.Errorf("%s: the other matrix is %s", name, of)
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestPackedMemory: the memory check knows the size of the matrices as they are loaded.
func TestPackedMemory(t *testing.T) {
	for name, row := range map[string]int{"gptq_sym": 64 / 32 * 19, "gptq_v2": 64 / 64 * 35, "gptq_row": 67, "gptq_8": 64 / 32 * 34, "awq_128": 67, "fp8_block": 136 + 8, "fp8_tensor": 64 + 4} {
		m, err := readPacked(t, name).open(t)
		if err != nil {
			t.Fatal(err)
		}
		if got := m.files.blockRow("layers.0.self_attn.q_proj.weight"); got != row {
			t.Errorf("%s: rows of %d bytes, want %d", name, got, row)
		}
		q, err := m.files.(*packed).blocks("layers.0.self_attn.q_proj.weight", []int{m.network.(*transformer).width, m.network.(*transformer).width}, 0, 2)
		if err != nil || len(q.Data)+4*len(q.Scales) != 2*row {
			t.Errorf("%s: %v, %v", name, q, err)
		}
		if m.files.blockRow("embed_tokens.weight") != 0 {
			t.Errorf("%s: the embedding is in blocks", name)
		}
	}
}

// TestPackedRefused: each field of quantization_config is known, or is refused with its value and a way out; tensors that contradict
// the configuration are refused by name.
func TestPackedRefused(t *testing.T) {
	const q, qweight = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj.qweight"
	set := func(key string, value any) func(*packedFiles) {
		return func(f *packedFiles) { f.quantization()[key] = value }
	}
	weights := func(key string, value any) func(*packedFiles) {
		return func(f *packedFiles) {
			group := f.quantization()["config_groups"].(map[string]any)["group_0"].(map[string]any)
			group["weights"].(map[string]any)[key] = value
		}
	}
	word := func(name string, at int, value uint32) func(*packedFiles) {
		return func(f *packedFiles) { binary.LittleEndian.PutUint32(f.tensors[name].data[4*at:], value) }
	}
	scale := func(bits uint16) func(*packedFiles) {
		return func(f *packedFiles) { binary.LittleEndian.PutUint16(f.tensors[q+".scales"].data, bits) }
	}
	for _, c := range []struct {
		name   string
		change func(*packedFiles)
		kind   error
		text   string
	}{
		{"gptq_sym", set("bits", 3), ErrUnsupported, "quantization_config.bits is 3; known are [4 8]"},
		{"gptq_sym", set("bits", nil), ErrMissing, "quantization_config.bits"},
		{"gptq_sym", set("bits", "4"), ErrFormat, "quantization_config.bits"},
		{"gptq_sym", set("group_size", 16), ErrUnsupported, "group_size is 16"},
		{"gptq_sym", set("group_size", 0), ErrUnsupported, "group_size is 0"},
		{"gptq_sym", set("group_size", -2), ErrUnsupported, "group_size is -2"},
		{"gptq_sym", set("group_size", nil), ErrMissing, "group_size"},
		{"gptq_sym", set("checkpoint_format", "marlin"), ErrUnsupported, "checkpoint_format"},
		{"gptq_sym", set("format", "bitblas"), ErrUnsupported, "format"},
		{"gptq_sym", set("pack_dtype", "int16"), ErrUnsupported, "pack_dtype"},
		{"gptq_sym", set("dynamic", map[string]any{"-:lm_head": map[string]any{}}), ErrUnsupported, "dynamic has rules for 1"},
		{"gptq_sym", set("is_marlin_format", true), ErrUnsupported, "is_marlin_format"},
		{"gptq_sym", set("rotation", "hadamard"), ErrUnsupported, "rotation"},
		{"gptq_sym", set("new_field", 1), ErrUnsupported, `"new_field" is "1"`},
		{"gptq_sym", set("quant_method", "exl2"), ErrUnsupported, `quant_method is "exl2"`},
		{"gptq_sym", set("quant_method", nil), ErrMissing, "quant_method"},
		{"gptq_8", set("sym", false), ErrUnsupported, "sym is false and bits is 8"},
		{"awq", set("bits", 8), ErrUnsupported, "bits is 8; known are [4]"},
		{"awq", set("version", "gemv"), ErrUnsupported, `version is "gemv"; known is gemm`},
		{"awq", set("zero_point", false), ErrUnsupported, "zero_point"},
		{"awq", set("group_size", 64), ErrFormat, "shape"},
		{"gptq_sym", set("group_size", 64), ErrFormat, "shape"},
		{"gptq_sym", set("bits", 8), ErrFormat, "shape"},
		{"gptq_sym", word(q+".qzeros", 0, 0x77777778), ErrFormat, "the zero of group 0 of row 0 is 9, and sym is true"},
		{"gptq_order", word(q+".qzeros", 0, 0x777777f7), ErrUnsupported, "qzeros has 15 for group 0 of row 1, which programs read as 0 or as 16"},
		{"gptq_sym", word(q+".g_idx", 0, 1), ErrFormat, "desc_act is false"},
		{"gptq_order", word(q+".g_idx", 5, 2), ErrFormat, "g_idx[5] is 2, not in [0, 2)"},
		{"gptq_order", word(q+".g_idx", 5, math.MaxUint32), ErrFormat, "g_idx[5] is -1"},
		{"gptq_order", func(f *packedFiles) { clear(f.tensors[q+".g_idx"].data[:4*33]) }, ErrUnsupported, "groups of other sizes"},
		{"gptq_order", func(f *packedFiles) { delete(f.tensors, q+".g_idx") }, ErrMissing, "g_idx"},
		{"gptq_sym", func(f *packedFiles) { delete(f.tensors, q+".scales") }, ErrMissing, "scales"},
		{"gptq_sym", func(f *packedFiles) { delete(f.tensors, qweight) }, ErrMissing, "q_proj.weight"},
		{"gptq_sym", func(f *packedFiles) { f.tensors[qweight].DType = "F32" }, ErrUnsupported, "not I32 or U32"},
		{"gptq_sym", func(f *packedFiles) {
			f.tensors[q+".weight"] = &storedTensor{DType: "F16", Shape: []int{64, 64}, data: make([]byte, 2*64*64)}
		}, ErrUnsupported, "q_proj.weight"},
		{"gptq_sym", func(f *packedFiles) { f.tensors[q+".bias"].data[7] = 0x3c }, ErrUnsupported, "bias[3] is 1, and the model has no bias"},
		{"gptq_sym", scale(0x7c00), ErrUnsupported, "scales[0][0] is +Inf"},
		{"gptq_sym", scale(0x7e00), ErrUnsupported, "scales[0][0] is NaN"},
		{"gptq_sym", func(f *packedFiles) {
			s := f.tensors[q+".scales"]
			s.DType, s.data = "BF16", slices.Repeat([]byte{1, 0x2d}, len(s.data)/2) // 7e-12
		}, ErrUnsupported, "which is no finite float16"},
		{"fp8_block", set("weight_block_size", []int{64, 128}), ErrUnsupported, "weight_block_size is [64 128]; known is [128 128]"},
		{"fp8_block", set("fmt", "e5m2"), ErrUnsupported, "fmt"},
		{"fp8_block", set("activation_scheme", "none"), ErrUnsupported, "activation_scheme"},
		{"fp8_block", set("scale_fmt", "e8m0"), ErrUnsupported, "scale_fmt"},
		{"fp8_block", set("new_field", 1), ErrUnsupported, `"new_field" is "1"`},
		{"fp8_tensor", set("kv_cache_scheme", "fp8"), ErrUnsupported, "kv_cache_scheme"},
		{"fp8_channel", set("format", "int-quantized"), ErrUnsupported, "quantization_config.format"},
		{"fp8_channel", set("config_groups", map[string]any{}), ErrUnsupported, "config_groups has 0 groups"},
		{"fp8_channel", set("sparsity_config", map[string]any{"format": "sparse-24-bitmask"}), ErrUnsupported, "sparsity_config"},
		{"fp8_channel", weights("num_bits", 4), ErrUnsupported, "quantization_config.config_groups.group_0.weights.num_bits is 4; known are [8]"},
		{"fp8_channel", weights("type", "int"), ErrUnsupported, "weights.type"},
		{"fp8_channel", weights("strategy", "group"), ErrUnsupported, "weights.strategy"},
		{"fp8_channel", weights("symmetric", false), ErrUnsupported, "weights.symmetric"},
		{"fp8_channel", weights("other", 1), ErrUnsupported, "other"},
		{"fp8_channel", weights("strategy", "tensor"), ErrFormat, "shape"},
		{"fp8_tensor", set("weight_block_size", []int{128, 128}), ErrMissing, "q_proj.weight_scale_inv"},
		{"fp8_tensor", func(f *packedFiles) { f.tensors[q+".weight"].data[65] = 0xff }, ErrFormat, "weight[1][1] is NaN"},
		{"fp8_tensor", func(f *packedFiles) { copy(f.tensors[q+".weight_scale"].data, []byte{0, 0, 0x80, 0x7f}) }, ErrUnsupported, "weight_scale[0] is +Inf"},
		{"fp8_tensor", func(f *packedFiles) { delete(f.tensors, q+".weight_scale") }, ErrMissing, "q_proj.weight_scale"},
		{"fp8_tensor", func(f *packedFiles) { delete(f.config, "quantization_config") }, ErrUnsupported, "F8_E4M3, not F32, F16 or BF16"},
		{"fp8_tensor", func(f *packedFiles) {
			f.tensors[q+".k_scale"] = &storedTensor{DType: "F32", Shape: []int{}, data: make([]byte, 4)}
		}, ErrUnsupported, "k_scale"},
		{"gptq_sym", func(f *packedFiles) {
			for name := range f.tensors {
				if module, ok := strings.CutSuffix(name, ".qweight"); ok {
					shape := []int{f.tensors[name].Shape[1], f.tensors[name].Shape[0] * 8}
					for _, part := range []string{".qweight", ".qzeros", ".scales", ".g_idx", ".bias"} {
						delete(f.tensors, module+part)
					}
					f.tensors[module+".weight"] = &storedTensor{DType: "F16", Shape: shape, data: make([]byte, 2*shape[0]*shape[1])}
				}
			}
		}, ErrFormat, "no matrix of the folder is quantised"},
	} {
		f := readPacked(t, c.name)
		c.change(f)
		m, err := f.open(t)
		if err == nil {
			_, err = m.Engine(Options{})
		}
		if !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v, want %q", c.name, err, c.text)
		} else if strings.HasPrefix(c.text, "quant") && c.kind == ErrUnsupported && !strings.Contains(err.Error(), wayOut) {
			t.Errorf("%s: %v, without a way out", c.name, err)
		}
	}
	f := readPacked(t, "gptq_sym") // scales of bfloat16 that float16 has
	for name, x := range f.tensors {
		if strings.HasSuffix(name, ".scales") {
			x.DType, x.data = "BF16", slices.Repeat([]byte{0x81, 0x3c}, len(x.data)/2)
		}
	}
	m, err := f.open(t)
	if err != nil {
		t.Fatal(err)
	}
	e, err := m.Engine(Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}

// FuzzQuantization: any quantization_config, and any numbers in the tensors, are read or refused.
func FuzzQuantization(f *testing.F) {
	names := []string{"gptq_sym", "gptq_order", "gptq_v2", "gptq_8", "awq", "fp8_block", "fp8_tensor", "fp8_channel"}
	for i, name := range names {
		text, err := json.Marshal(readPacked(f, name).quantization())
		if err != nil {
			f.Fatal(err)
		}
		f.Add(byte(i), text, []byte{1, 2, 3}, uint16(0))
	}
	f.Fuzz(func(t *testing.T, which byte, config, data []byte, at uint16) {
		files := readPacked(t, names[int(which)%len(names)])
		var how any
		if json.Unmarshal(config, &how) != nil {
			return
		}
		files.config["quantization_config"] = how
		names := slices.Sorted(maps.Keys(files.tensors))
		if x := files.tensors[names[int(at)%len(names)]].data; len(x) > 0 {
			copy(x[int(at)%len(x):], data)
		}
		m, err := files.open(t)
		if err != nil {
			return
		}
		for name, of := range m.network.(*transformer).weightShapes() {
			if len(of) == 2 {
				_ = m.files.float32s(make([]float32, of[0]*of[1]), name, of, 0, of[0])
			}
		}
	})
}

// weightShapes returns the shapes of the weights.
func (t *transformer) weightShapes() map[string][]int {
	all := map[string][]int{}
	for w := range t.Weights() {
		all[w.Name] = w.Shape
	}
	return all
}
