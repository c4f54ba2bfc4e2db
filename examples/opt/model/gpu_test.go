package model

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"testing"

	la "gorgonia.org/leanattention"

	"gorgonia.org/tensor"
)

func openGPU(t *testing.T) *la.GPU {
	t.Helper()
	gpu, err := la.OpenGPU(0)
	if errors.Is(err, la.ErrNoDriver) || errors.Is(err, la.ErrNoDevice) || errors.Is(err, la.ErrDriverTooOld) {
		t.Skipf("no GPU: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := gpu.Close(); err != nil {
			t.Error(err)
		}
	})
	return gpu
}

// The golden logits hold on a GPU, in float32 and within a bound in 16 bits. The
// models whose heads have sizes that no kernel has are left out.
func TestGPUGoldenLogits(t *testing.T) {
	gpu := openGPU(t)
	for _, c := range readGolden(t).Logits {
		for _, kind := range []struct {
			name           string
			weights, cache tensor.Dtype
			bound          float64
		}{
			{"f32", tensor.Float32, tensor.Float32, 1e-4}, {"f16", la.Float16, la.Float16, 0.02}, {"bf16", la.BFloat16, la.BFloat16, 0.3},
		} {
			w := openModel(t, c.Model, kind.weights)
			if dim := w.Config().HeadDim(); dim != 64 && dim != 80 {
				continue
			}
			for _, chunk := range slices.Compact([]int{0, c.Chunk, 7}) {
				t.Run(c.Name+"/"+kind.name, func(t *testing.T) {
					worst := c.worst(t, w, Options{Chunk: chunk, Device: gpu, Cache: kind.cache})
					t.Logf("at most %.1e off", worst)
					if !(worst <= kind.bound) {
						t.Errorf("a logit is off by %.1e, more than %v", worst, kind.bound)
					}
				})
			}
		}
	}
}

// Greedy texts are the golden ones, alone and in a batch, by the logits and by
// the tokens that the GPU chooses, in float32 and in float16.
func TestGPUGoldenGreedy(t *testing.T) {
	gpu := openGPU(t)
	for _, kind := range []struct{ weights, cache tensor.Dtype }{{tensor.Float32, tensor.Float32}, {la.Float16, la.Float16}} {
		w := openModel(t, "../tiny", kind.weights)
		cases := readGolden(t).Greedy
		batches := [][]int{{0}, nil}
		for i := range cases {
			batches[1] = append(batches[1], i)
		}
		for _, batch := range batches {
			for _, chosen := range []bool{false, true} {
				o := Options{Device: gpu, Cache: kind.cache, Greedy: chosen}
				var prompts [][]int
				for _, i := range batch {
					prompts = append(prompts, cases[i].IDs)
					o.Capacity = append(o.Capacity, len(cases[i].IDs)+len(cases[i].Next))
				}
				d := newDecoder(t, w, o)
				n := len(cases[batch[0]].Next)
				var got [][]int
				if chosen {
					got = choose(t, d, prompts, n)
				} else {
					got = greedy(t, d, prompts, n)
				}
				for j, i := range batch {
					if want := cases[i].Next; !slices.Equal(got[j], want) {
						t.Errorf("%v, chosen on the GPU %v, case %d in a batch of %d: %v..., want %v...", kind.weights, chosen, i, len(batch), got[j][:10], want[:10])
					}
				}
			}
		}
	}
}

// choose is greedy with the tokens that the decoder chooses.
func choose(t *testing.T, d *Decoder, prompts [][]int, n int) [][]int {
	t.Helper()
	if err := d.Prefill(context.Background(), prompts, nil); err != nil {
		t.Fatal(err)
	}
	out, next := make([][]int, len(prompts)), make([]int, len(prompts))
	for {
		for i := range next {
			next[i] = d.Chosen(i)
			out[i] = append(out[i], next[i])
		}
		if len(out[0]) == n {
			return out
		}
		if err := d.Step(next); err != nil {
			t.Fatal(err)
		}
	}
}

// Decoders come and go, sequences rest and are cut, and the GPU's memory is as
// it was.
func TestGPUDecoder(t *testing.T) {
	gpu := openGPU(t)
	w := openModel(t, "../tiny", la.Float16)
	used := func() int64 {
		runtime.GC() // a step's schedule goes when it is garbage
		runtime.GC()
		m, err := gpu.Memory()
		if err != nil {
			t.Fatal(err)
		}
		return m.Used
	}
	var after int64
	for i := range 3 {
		d, err := w.NewDecoder(Options{Capacity: []int{200, 200, 200}, Device: gpu, Cache: la.Float16, Greedy: true})
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Prefill(context.Background(), [][]int{{5, 6, 7}, nil, {8}}, nil); err != nil {
			t.Fatal(err)
		}
		for step := range 150 {
			next := []int{d.Chosen(0), -1, d.Chosen(2)}
			if step%7 == 3 {
				next[0] = -1
			}
			if err := d.Step(next); err != nil {
				t.Fatal(err)
			}
			if step == 70 {
				if err := d.Truncate(2, 1); err != nil {
					t.Fatal(err)
				}
				if err := d.Prefill(context.Background(), [][]int{nil, {9, 10}, {11}}, nil); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
		if i == 1 {
			after = used()
		}
	}
	if now := used(); now > after+after/10 {
		t.Errorf("%d bytes used after a third decoder, %d after the second", now, after)
	}
}

// Steps that nobody waits for give the golden texts too, in pieces of any size.
func TestGPUContinue(t *testing.T) {
	gpu := openGPU(t)
	testContinue(t, Options{Device: gpu})
}

func TestContinue(t *testing.T) { testContinue(t, Options{}) }

func testContinue(t *testing.T, o Options) {
	w := openModel(t, "../tiny", tensor.Float32)
	var prompts, want [][]int
	o.Greedy = true
	for _, c := range readGolden(t).Greedy {
		prompts, want = append(prompts, c.IDs), append(want, c.Next)
		o.Capacity = append(o.Capacity, len(c.IDs)+len(c.Next))
	}
	d := newDecoder(t, w, o)
	if err := d.Prefill(context.Background(), prompts, nil); err != nil {
		t.Fatal(err)
	}
	next, got := make([]int, len(prompts)), make([][]int, len(prompts))
	for i := range next {
		next[i] = d.Chosen(i)
		got[i] = append(got[i], next[i])
	}
	for n := 1; len(got[0]) < len(want[0]); n = n*2 + 1 {
		chosen, err := d.Continue(next, min(n, len(want[0])-len(got[0])))
		if err != nil {
			t.Fatal(err)
		}
		for _, now := range chosen {
			for i, id := range now {
				got[i] = append(got[i], id)
			}
		}
		next = chosen[len(chosen)-1]
	}
	for i := range got {
		if !slices.Equal(got[i], want[i]) {
			t.Errorf("case %d: %v, want %v", i, got[i], want[i])
		}
	}
	if _, err := d.Continue(next, 100); !errors.Is(err, ErrConfig) {
		t.Errorf("more than the capacity: %v", err)
	}
	if _, err := d.Continue(next[:1], 1); !errors.Is(err, ErrConfig) {
		t.Errorf("one token: %v", err)
	}
	if _, err := d.Continue(next, 0); !errors.Is(err, ErrConfig) {
		t.Errorf("no steps: %v", err)
	}
}

// On the CPU, Greedy is the most likely token by the logits.
func TestChosen(t *testing.T) {
	w := openModel(t, "../tiny", tensor.Float32)
	c := readGolden(t).Greedy[0]
	d := newDecoder(t, w, Options{Capacity: []int{len(c.IDs) + len(c.Next)}, Greedy: true})
	if got := choose(t, d, [][]int{c.IDs}, len(c.Next)); !slices.Equal(got[0], c.Next) {
		t.Errorf("%v, want %v", got[0], c.Next)
	}
}
