package cpu

import (
	"math"
	"strings"
	"testing"
	"time"
	"unsafe"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
	"gorgonia.org/leanattention/cmd/leanbench/measure/measuretest"

	la "gorgonia.org/leanattention"
	"gorgonia.org/tensor"
)

// numbers is a tensor's elements.
func numbers(t *testing.T, x *tensor.Dense) (y []float64) {
	t.Helper()
	switch data := x.Data().(type) {
	case []float32:
		for _, f := range data {
			y = append(y, float64(f))
		}
	case []la.F16:
		for _, f := range data {
			y = append(y, float64(f.Float32()))
		}
	case []la.BF16:
		for _, f := range data {
			y = append(y, float64(f.Float32()))
		}
	default:
		t.Fatalf("elements are %T", data)
	}
	return y
}

func TestArena(t *testing.T) {
	rng := measuretest.Rand(t)
	for _, s := range measure.Storages {
		shape := decodeShape{heads: 6, kvHeads: 3, keys: 40, dim: 16, storage: s}
		if want := 2 * 3 * 40 * 16 * s.Size; shape.bytes() != want {
			t.Errorf("%v has %d bytes, want %d", shape, shape.bytes(), want)
		}
		a := measure.NewArena(s, 5*shape.bytes()+8, rng)
		if n := len(carve(a, shape, 2)); n != 2 {
			t.Errorf("%v: %d sets of at most 2", shape, n)
		}
		sets := carve(a, shape, math.MaxInt)
		if len(sets) != 5 {
			t.Fatalf("%v: %d sets in the memory of 5", shape, len(sets))
		}
		end := uintptr(0)
		for i, set := range sets {
			begin := uintptr(unsafe.Pointer(&set.bytes[0]))
			if begin < end || set.k.Uintptr() != begin || set.v.Uintptr() != begin+uintptr(len(set.bytes)/2) || len(set.bytes) != shape.bytes() {
				t.Errorf("%v: set %d of %d bytes at %#x, k at %#x, v at %#x, the one before ends at %#x",
					shape, i, len(set.bytes), begin, set.k.Uintptr(), set.v.Uintptr(), end)
			}
			end = begin + uintptr(len(set.bytes))
			for _, x := range []*tensor.Dense{set.k, set.v} {
				if x.Dtype() != s.Dtype || !x.Shape().Eq(tensor.Shape{3, 40, 16}) {
					t.Errorf("%v: %v of shape %v", shape, x.Dtype(), x.Shape())
				}
				// Uniform in (-1, 1): mean 0, mean square 1/3.
				var sum, squares float64
				all := numbers(t, x)
				for _, f := range all {
					if !(math.Abs(f) <= 1) || f == 0 {
						t.Fatalf("%v: number %v", shape, f)
					}
					sum, squares = sum+f, squares+f*f
				}
				n := float64(len(all))
				if mean, square := sum/n, squares/n; math.Abs(mean) > 0.1 || math.Abs(square-1./3) > 0.06 {
					t.Errorf("%v: mean %v, mean square %v", shape, mean, square)
				}
			}
		}
	}
}

// TestAttenders: all compute the same, step for step as the operands rotate.
func TestAttenders(t *testing.T) {
	rng := measuretest.Rand(t)
	for _, s := range measure.Storages {
		shape := decodeShape{heads: 4, kvHeads: 2, keys: 70, dim: 8, storage: s}
		sets, q := carve(measure.NewArena(s, 3*shape.bytes(), rng), shape, 3), newQuery(shape, rng)
		inNode, err := leanNode(shape, q, sets)
		if err != nil {
			t.Fatal(err)
		}
		all := []attender{attend(shape, q, sets), inNode}
		if s == measure.StoreF32 {
			stock, err := stockNode(shape, q, sets)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, stock)
		}
		var outs [][]float32
		for i := range 7 {
			if err := agree(all); err != nil {
				t.Errorf("%v, step %d: %v", shape, i, err)
			}
			outs = append(outs, append([]float32(nil), all[0].out()...))
		}
		same := func(a, b []float32) bool { return a[0] == b[0] && a[len(a)-1] == b[len(b)-1] }
		if !same(outs[0], outs[3]) || !same(outs[0], outs[6]) || same(outs[0], outs[1]) || same(outs[1], outs[2]) {
			t.Errorf("%v: the steps do not take 3 sets of operands in turn", shape)
		}
		sum := ceiling(sets)
		if d, err := sum.Run(4); err != nil || d <= 0 {
			t.Errorf("%v: the sum took %v (%v)", shape, d, err)
		}
	}
}

func TestAgree(t *testing.T) {
	giving := func(name string, out ...float32) attender {
		return attender{measure.Contender{Name: name, Run: func(int) (time.Duration, error) { return 1, nil }}, func() []float32 { return out }}
	}
	if err := agree([]attender{giving("a", 1, 2), giving("b", 1, 2.00005)}); err != nil {
		t.Error(err)
	}
	for _, wrong := range []float32{2.001, float32(math.NaN()), float32(math.Inf(1))} {
		err := agree([]attender{giving("a", 1, 2), giving("b", 1, 2), giving("c", 1, wrong)})
		if err == nil || !strings.Contains(err.Error(), `from "c" and 2 from "a"`) {
			t.Errorf("2 and %v: %v", wrong, err)
		}
	}
}
