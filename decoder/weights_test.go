package decoder

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"reflect"
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

// failingWeights has all tensors but the last ones.
type failingWeights struct {
	goldenWeights
	left *int
}

func (w failingWeights) Tensor(name string, shape ...int) (*tensor.Dense, error) {
	if *w.left--; *w.left < 0 {
		return nil, ErrMissing
	}
	return w.goldenWeights.Tensor(name, shape...)
}

// TestLoadingFails: an engine whose weights cannot be loaded, or whose cache does not fit, is an error, and frees its memory.
func TestLoadingFails(t *testing.T) {
	m := readGolden(t)[0]
	weights := goldenWeights{goldenModel: &m}
	for _, o := range []Options{{}, {Weights: la.Float16}} {
		for n := range 9 {
			left := n
			if _, err := NewEngine(m.network(t), failingWeights{weights, &left}, o); !errors.Is(err, ErrMissing) {
				t.Errorf("the first %d tensors: %v", n, err)
			}
		}
		o.Tokens = 1 << 30
		if _, err := NewEngine(m.network(t), weights, o); !errors.Is(err, la.ErrOutOfMemory) {
			t.Errorf("a cache of %d tokens: %v", o.Tokens, err)
		}
	}
}

// TestConverted: weights are rounded to nearest, and widened exactly. A finite number that float16 does not have is an error.
func TestConverted(t *testing.T) {
	rng := reftest.Rand(t)
	n := 1 + rng.IntN(300000) // some pieces, of which the last one is shorter
	wide := make([]float32, n)
	for i := range wide {
		wide[i] = float32(rng.NormFloat64() * math.Exp2(float64(rng.IntN(40)-28)))
	}
	of := func(data any) *tensor.Dense { return tensor.New(tensor.WithShape(n), tensor.WithBacking(data)) }
	to := func(x *tensor.Dense, as tensor.Dtype) any {
		t.Helper()
		y, err := converted(x, as)
		if err != nil {
			t.Fatal(err)
		}
		return y.Data()
	}
	f16, bf16 := make([]la.F16, n), make([]la.BF16, n)
	f16Wide, bf16Wide := make([]float32, n), make([]float32, n)
	for i, x := range wide {
		f16[i], bf16[i] = half.FromFloat32(x), half.BFromFloat32(x)
		f16Wide[i], bf16Wide[i] = f16[i].Float32(), bf16[i].Float32()
	}
	if !slices.Equal(to(of(wide), la.Float16).([]la.F16), f16) || !slices.Equal(to(of(wide), la.BFloat16).([]la.BF16), bf16) {
		t.Error("rounding")
	}
	if !slices.Equal(to(of(f16), tensor.Float32).([]float32), f16Wide) || !slices.Equal(to(of(bf16), tensor.Float32).([]float32), bf16Wide) {
		t.Error("widening")
	}
	if !slices.Equal(to(of(f16), la.BFloat16).([]la.BF16), to(of(f16Wide), la.BFloat16).([]la.BF16)) {
		t.Error("from 16 bits to 16 bits")
	}
	wide[n-1] = 70000
	if _, err := converted(of(wide), la.Float16); !errors.Is(err, ErrConfig) {
		t.Errorf("70000 as float16: %v", err)
	}
}

// TestFolderConverts: rows of a folder's weight in another type are those that converted makes of the weight.
func TestFolderConverts(t *testing.T) {
	const rows, columns = 700, 1001
	w := fileTensor{name: "w", shape: []int{rows, columns}, data: make([]float32, rows*columns)}
	for i := range w.data {
		w.data[i] = float32(math.Sin(float64(i)))
	}
	for _, stored := range []string{"float32", "float16", "bfloat16"} {
		w.dtype = stored
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
		for _, as := range []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16} {
			whole, err := f.Tensor("w", rows, columns)
			if err != nil {
				t.Fatal(err)
			}
			if whole, err = converted(whole, as); err != nil {
				t.Fatal(err)
			}
			for _, part := range [][2]int{{0, rows}, {0, 1}, {5, 698}} {
				got, err := folder{f}.rowsAs("w", as, w.shape, part[0], part[1])
				if err != nil || got.Dtype() != as || !slices.Equal(got.Shape(), []int{part[1] - part[0], columns}) {
					t.Fatalf("%s as %v: %v, %v", stored, as, got.Shape(), err)
				}
				want := reflect.ValueOf(whole.Data()).Slice(part[0]*columns, part[1]*columns).Interface()
				if !reflect.DeepEqual(got.Data(), want) {
					t.Errorf("%s as %v: rows %v differ", stored, as, part)
				}
			}
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
	w.dtype, w.data[rows*columns-1] = "float32", 70000
	f, err := hf.OpenFS("embedded", fstest.MapFS{"model.safetensors": {Data: safetensors([]fileTensor{w})}})
	if err == nil {
		err = f.OpenWeights()
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := (folder{f}).rowsAs("w", la.Float16, w.shape, 0, rows); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), "element 700699 is 70000") || !strings.Contains(err.Error(), "weight w") {
		t.Errorf("70000 as float16: %v", err)
	}
}
