package model

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"unsafe"

	la "gorgonia.org/leanattention"

	"gorgonia.org/tensor"
)

var weightTypes = map[string]tensor.Dtype{"f32": tensor.Float32, "f16": la.Float16, "bf16": la.BFloat16}

// stored is a Source that has all weights in one type, and remembers them.
type stored struct {
	random
	dtype tensor.Dtype
	given map[string]*tensor.Dense
}

func (s stored) Tensor(name string, shape ...int) (*tensor.Dense, error) {
	t, err := s.random.Tensor(name, shape...)
	if err == nil {
		memory := make(arena, lines(4*t.Shape().TotalSize()))
		t, err = memory.convert(t, s.dtype)
	}
	s.given[name] = t
	return t, err
}

// TestWeightTypes: matrices stay what they are, in place, or become what is
// asked for, each number the nearest of its type.
func TestWeightTypes(t *testing.T) {
	for from, dtype := range weightTypes {
		for to, want := range map[string]tensor.Dtype{"stored": {}, "f32": tensor.Float32, "f16": la.Float16, "bf16": la.BFloat16} {
			source := stored{random{small(), seeded(t)}, dtype, map[string]*tensor.Dense{}}
			w, err := LoadAs(source, want)
			if err != nil {
				t.Fatal(err)
			}
			matrix := want
			if want == (tensor.Dtype{}) {
				matrix = dtype
			}
			bytes := int64(0)
			for p := range w.config.Weights() {
				got, given, kind := w.tensors[p.Name], source.given[p.Name], matrix
				if len(p.Shape) == 1 {
					kind = tensor.Float32
				}
				if got.Dtype() != kind || !got.Shape().Eq(tensor.Shape(p.Shape)) {
					t.Errorf("%s as %s: %s is %v %v, want %v", from, to, p.Name, got.Dtype(), got.Shape(), kind)
				}
				if kind == dtype && got != given {
					t.Errorf("%s as %s: %s was copied", from, to, p.Name)
				}
				if kind == dtype {
					continue
				}
				unit := map[tensor.Dtype]float64{tensor.Float32: 0, la.Float16: 0x1p-11, la.BFloat16: 0x1p-8}[kind]
				for i := range tensor.Shape(p.Shape).TotalSize() {
					// float16's smallest number is 2^-24.
					if x, y := number(given, i), number(got, i); math.Abs(x-y) > unit*(math.Abs(x)+0x1p-14) {
						t.Fatalf("%s as %s: %s[%d] is %v, stored %v", from, to, p.Name, i, y, x)
					}
				}
			}
			for p := range w.config.Weights() {
				bytes += int64(w.tensors[p.Name].MemSize())
			}
			if w.Bytes() != bytes {
				t.Errorf("%d bytes, want %d", w.Bytes(), bytes)
			}
		}
	}
}

// TestWeightTypesDecode: what is computed is the model with the rounded weights,
// for every form of checkpoint, and where Gorgonia's own nodes need float32.
func TestWeightTypesDecode(t *testing.T) {
	for layout, config := range layouts() {
		if raceDetector && layout != "published" {
			continue // nothing runs at once that others do not run
		}
		for kind, dtype := range weightTypes {
			if dtype == tensor.Float32 {
				continue
			}
			rng := seeded(t)
			w, err := Load(stored{random{config, rng}, dtype, map[string]*tensor.Dense{}})
			if err != nil {
				t.Fatal(err)
			}
			texts := prompts(rng, config.VocabSize, 9, 4)
			for name, way := range attentions {
				d := newDecoder(t, w, Options{Capacity: []int{12, 12}, Chunk: 5, Attention: way.Attention, Linear: way.Linear})
				if err := d.Prefill(context.Background(), texts, nil); err != nil {
					t.Fatal(err)
				}
				long := make([][]int, len(texts))
				copy(long, texts)
				for step := range 3 {
					if err := d.Step([]int{5 + step, 6}); err != nil {
						t.Fatal(err)
					}
					for i := range long {
						long[i] = append(long[i][:len(long[i]):len(long[i])], []int{5 + step, 6}[i])
						closeTo(t, fmt.Sprintf("%s in %s, %s, step %d, sequence %d", layout, kind, name, step, i),
							d.Logits(i), reference{w}.last(long[i]), 1e-4)
					}
				}
			}
		}
	}
}

// TestWeightTypesRefused: what does not fit is not made infinite, and types that
// are none of weights are said.
func TestWeightTypesRefused(t *testing.T) {
	of := func(v float32) Source { return constant{random{small(), seeded(t)}, v} }
	for _, v := range []float32{65536, -1e38} {
		w, err := LoadAs(of(v), la.Float16)
		if w != nil || !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), "decoder.layers.1.fc2.weight") {
			t.Errorf("%v as float16: error %v", v, err)
		}
		if _, err := LoadAs(of(v), la.BFloat16); err != nil {
			t.Errorf("%v as bfloat16: %v", v, err)
		}
	}
	for _, v := range []float32{65504, float32(math.Inf(-1)), float32(math.NaN())} { // what is there stays
		if _, err := LoadAs(of(v), la.Float16); err != nil {
			t.Errorf("%v as float16: %v", v, err)
		}
	}
	silu := random{small(), seeded(t)}
	silu.config.Activation = "silu"
	if w, err := Load(silu); w != nil || !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), `"silu"`) {
		t.Errorf("the activation silu: error %v", err)
	}
	if w, err := LoadAs(of(1), tensor.Int); w != nil || !errors.Is(err, ErrConfig) {
		t.Errorf("as int: error %v", err)
	}
	if w, err := Load(ints{random{small(), seeded(t)}}); w != nil || !errors.Is(err, ErrConfig) {
		t.Errorf("stored as int: error %v", err)
	}
}

type constant struct {
	random
	value float32
}

func (c constant) Tensor(name string, shape ...int) (*tensor.Dense, error) {
	t, err := c.random.Tensor(name, shape...)
	if err == nil && name == "decoder.layers.1.fc2.weight" {
		t.Float32s()[7] = c.value
	}
	return t, err
}

type ints struct{ random }

func (ints) Tensor(_ string, shape ...int) (*tensor.Dense, error) {
	return tensor.New(tensor.WithShape(shape...), tensor.Of(tensor.Int)), nil
}

// TestArena: what is taken lies in order, apart, and aligned for any number.
func TestArena(t *testing.T) {
	sizes, total := []int{1, 31, 32, 33, 1000, 5, 4097, 1}, 0
	for _, n := range sizes {
		total += lines(2*n) + lines(4*n)
	}
	a := make(arena, total)
	var all [][]byte
	for _, n := range sizes {
		short, long := take[la.F16](&a, n), take[float32](&a, n)
		if len(short) != n || cap(short) != n || len(long) != n || cap(long) != n {
			t.Fatalf("%d and %d of %d elements", len(short), len(long), n)
		}
		p, q := unsafe.Pointer(&short[0]), unsafe.Pointer(&long[0])
		if uintptr(p)%64 != 0 || uintptr(q)%64 != 0 {
			t.Errorf("%d elements at %p and %p", n, p, q)
		}
		all = append(all, unsafe.Slice((*byte)(p), 2*n), unsafe.Slice((*byte)(q), 4*n))
	}
	for i, b := range all {
		b[0], b[len(b)-1] = byte(i+1), byte(i+1)
	}
	for i, b := range all {
		if b[0] != byte(i+1) || b[len(b)-1] != byte(i+1) {
			t.Errorf("piece %d overlaps another", i)
		}
	}
	if len(a) != 0 {
		t.Errorf("%d bytes are left", len(a))
	}
}

// What the memory's speed is measured by is what a run reads of the weights.
func TestReadWhole(t *testing.T) {
	for name, c := range layouts() {
		w := load(t, c, seeded(t))
		read := w.readWhole()
		n := int64(0)
		for _, b := range read {
			n += int64(len(b))
		}
		if skipped := w.stepBytes() - n; skipped < 0 || skipped >= int64(8*len(read)) { // up to where words begin
			t.Errorf("%s: %d bytes are read of the weights, a run reads %d", name, n, w.stepBytes())
		}
	}
}

// TestConvertInPieces: tensors of several pieces are converted like small ones, and of the elements that do not fit the first is
// told, whatever threads come upon.
func TestConvertInPieces(t *testing.T) {
	const n = 3*piece + 5
	wide := make([]float32, n)
	for i := range wide {
		wide[i] = float32(i%2000) / 8
	}
	convert := func() (*tensor.Dense, error) {
		memory := make(arena, lines(2*n))
		return memory.convert(tensor.New(tensor.WithShape(1, n), tensor.WithBacking(wide)), la.Float16)
	}
	x, err := convert()
	if err != nil {
		t.Fatal(err)
	}
	for i, v := range x.Data().([]la.F16) {
		if v.Float32() != wide[i] {
			t.Fatalf("element %d is %v, want %v", i, v.Float32(), wide[i])
		}
	}
	wide[piece+3], wide[2*piece], wide[7] = 1e6, -1e6, float32(math.Inf(1))
	if _, err := convert(); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("element %d is 1e+06", piece+3)) {
		t.Errorf("error %v", err)
	}
}

// BenchmarkConvert is weights in other types, ns an element:
//
//	go test -run '^$' -bench Convert ./examples/opt/model
func BenchmarkConvert(b *testing.B) {
	const n = 1 << 24
	source := random{small(), seeded(b)}
	for from, dtype := range weightTypes {
		wide := tensor.New(tensor.WithShape(1, n), tensor.Of(tensor.Float32))
		for i := range wide.Data().([]float32) {
			wide.Data().([]float32)[i] = float32(source.rng.NormFloat64())
		}
		memory := make(arena, 4*n)
		x, err := memory.convert(wide, dtype)
		if err != nil {
			b.Fatal(err)
		}
		for to, want := range weightTypes {
			if from == to {
				continue
			}
			all := make(arena, 4*n)
			b.Run(from+"-"+to, func(b *testing.B) {
				for b.Loop() {
					memory := all
					if _, err := memory.convert(x, want); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/element")
			})
		}
	}
}
