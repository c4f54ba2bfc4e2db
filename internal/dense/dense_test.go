package dense

import (
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"gorgonia.org/tensor"
)

// counting is a tensor of 0, 1, 2, ... in row-major order.
func counting(shape ...int) *tensor.Dense {
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(tensor.Range(tensor.Float32, 0, tensor.Shape(shape).TotalSize())))
}

func TestElements(t *testing.T) {
	transposed := counting(2, 3)
	if err := transposed.T(); err != nil {
		t.Fatal(err)
	}
	columns, err := counting(3, 4).Slice(nil, tensor.S(1, 3))
	if err != nil {
		t.Fatal(err)
	}
	rows, err := counting(3, 2).Slice(tensor.S(1, 3))
	if err != nil {
		t.Fatal(err)
	}
	permuted := counting(2, 2, 3)
	if err := permuted.T(2, 0, 1); err != nil {
		t.Fatal(err)
	}
	columnMajor := tensor.New(tensor.WithShape(2, 3), tensor.AsFortran([]float32{0, 1, 2, 3, 4, 5}))
	for _, c := range []struct {
		name    string
		t       *tensor.Dense
		inPlace bool
		want    []float32
	}{
		{"plain", counting(2, 3), true, []float32{0, 1, 2, 3, 4, 5}},
		{"one element", counting(1, 1), true, []float32{0}},
		{"lazy transpose", transposed, false, []float32{0, 3, 1, 4, 2, 5}},
		{"slice of columns", columns.(*tensor.Dense), false, []float32{1, 2, 5, 6, 9, 10}},
		{"slice of rows", rows.(*tensor.Dense), true, []float32{2, 3, 4, 5}},
		{"axes permuted", permuted, false, []float32{0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11}},
		{"column-major", columnMajor, false, []float32{0, 1, 2, 3, 4, 5}},
	} {
		if got := Elements[float32](c.t); !slices.Equal(got, c.want) {
			t.Errorf("%s: elements %v, want %v", c.name, got, c.want)
		}
		if got := RowMajor(c.t); got != c.inPlace {
			t.Errorf("%s: row-major %t, want %t", c.name, got, c.inPlace)
		}
	}
}

func TestElementsAreTheTensorsOwn(t *testing.T) {
	x := counting(2, 3)
	Backing[float32](x)[4] = 40
	if got := Elements[float32](x)[4]; got != 40 {
		t.Errorf("element 4 is %v after it was set to 40", got)
	}
	if n := testing.AllocsPerRun(100, func() { _ = Elements[float32](x) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestUnwritten: large and small tensors have memory of their own, all of it, whatever pages it lies on.
func TestUnwritten(t *testing.T) {
	for _, shape := range []tensor.Shape{{3, 5}, {1 << 16}, {1<<16 - 1}, {1000, 2049}} {
		x, elements := Unwritten[float32](tensor.Float32, shape)
		if x.Dtype() != tensor.Float32 || !slices.Equal(x.Shape(), shape) || len(elements) != shape.TotalSize() || &elements[0] != &Backing[float32](x)[0] {
			t.Fatalf("%v: %v of shape %v, %d elements", shape, x.Dtype(), x.Shape(), len(elements))
		}
		for i := range elements {
			elements[i] = float32(i)
		}
		LargePages(Backing[byte](x)[1:]) // a hint behind the writing, and an odd address
		for i, v := range x.Data().([]float32) {
			if v != float32(i) {
				t.Fatalf("%v: element %d is %v", shape, i, v)
			}
		}
	}
	LargePages(nil)
}

// TestRecycle: memory that was given back is given to one tensor alone, and there is enough of it, whatever the sizes and
// whoever asks at the same time.
func TestRecycle(t *testing.T) {
	var wait sync.WaitGroup
	var again atomic.Int64
	for w := range 4 {
		wait.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(w), 1))
			type held struct {
				tensor *tensor.Dense
				x      []float32
				mark   float32
			}
			var all []held
			before := make(map[*float32]bool)
			for i := range 300 {
				n := 1<<16 + rng.IntN(3)*(1<<14) + rng.IntN(3)
				d, x := Unwritten[float32](tensor.Float32, tensor.Shape{n})
				if len(x) != n || len(Backing[float32](d)) != n {
					t.Errorf("%d elements of %d", len(x), n)
				}
				if before[&x[0]] {
					again.Add(1)
				}
				before[&x[0]] = true
				mark := float32(w*1000 + i)
				for j := range x {
					x[j] = mark
				}
				all = append(all, held{d, x, mark})
				if len(all) < 4 {
					continue
				}
				one := rng.IntN(len(all))
				if h := all[one]; h.x[0] != h.mark || h.x[len(h.x)/2] != h.mark || h.x[len(h.x)-1] != h.mark {
					t.Errorf("%v, %v, %v in memory of %v", h.x[0], h.x[len(h.x)/2], h.x[len(h.x)-1], h.mark)
				}
				Recycle(all[one].tensor)
				all = slices.Delete(all, one, one+1)
			}
		})
	}
	wait.Wait()
	if again.Load() == 0 {
		t.Error("no memory was used again")
	}
	for bytes := 16; bytes < min(1<<40, math.MaxInt/9); bytes = bytes*9/8 + 1 {
		if b := bin(bytes); b < bin(bytes-1) || b < 0 || b >= len(recycled) {
			t.Errorf("%d bytes are in bin %d", bytes, b)
		}
	}
}
