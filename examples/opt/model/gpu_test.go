package model

import (
	"context"
	"errors"
	"math"
	"runtime"
	"slices"
	"testing"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"

	"gorgonia.org/tensor"
)

// The golden logits hold on a GPU, in float32 and within a bound in 16 bits. The
// models whose heads have sizes that no kernel has are left out.
func TestGPUGoldenLogits(t *testing.T) { testGPULogits(t, devicetest.Open(t)) }

func testGPULogits(t *testing.T, gpu *device.GPU) {
	for _, c := range readGolden(t).Logits {
		for _, kind := range []struct {
			name           string
			weights, cache tensor.Dtype
			bound          float64
			mixed          bool
		}{
			{"f32", tensor.Float32, tensor.Float32, 1e-4, false}, {"f16", la.Float16, la.Float16, 0.02, false}, {"bf16", la.BFloat16, la.BFloat16, 0.3, false},
			{"f16 mixed", la.Float16, la.Float16, 0.05, true}, {"bf16 mixed", la.BFloat16, la.BFloat16, 0.5, true},
		} {
			w := openModel(t, c.Model, kind.weights)
			if dim := w.Config().HeadDim(); dim != 64 && dim != 80 || w.Config().Heads < len(gpu.Members()) {
				continue
			}
			chunks := []int{0, c.Chunk, 7}
			if kind.mixed {
				chunks = []int{512, 48} // where it makes a difference: of hundreds of rows, and of a batch's
			}
			for _, chunk := range slices.Compact(chunks) {
				t.Run(c.Name+"/"+kind.name, func(t *testing.T) {
					worst := c.worst(t, w, Options{Chunk: chunk, Device: gpu, Cache: kind.cache, Mixed: kind.mixed})
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
func TestGPUGoldenGreedy(t *testing.T) { testGPUGreedy(t, devicetest.Open(t)) }

func testGPUGreedy(t *testing.T, gpu *device.GPU) {
	for _, kind := range []struct {
		weights, cache tensor.Dtype
		attention      Attention
		mixed          bool
	}{
		{tensor.Float32, tensor.Float32, Lean, false}, {la.Float16, la.Float16, Lean, false}, {la.Float16, la.Float16, Lean, true},
		{tensor.Float32, tensor.Float32, Default, false}, {la.Float16, la.Float16, Default, false},
	} {
		w := openModel(t, "../tiny", kind.weights)
		cases := readGolden(t).Greedy
		batches := [][]int{{0}, nil}
		for i := range cases {
			batches[1] = append(batches[1], i)
		}
		for _, batch := range batches {
			for _, chosen := range []bool{false, true} {
				o := Options{Device: gpu, Cache: kind.cache, Greedy: chosen, Attention: kind.attention, Mixed: kind.mixed}
				var prompts [][]int
				n := len(cases[batch[0]].Next)
				if testing.Short() {
					n = 4
				}
				for _, i := range batch {
					prompts = append(prompts, cases[i].IDs)
					o.Capacity = append(o.Capacity, len(cases[i].IDs)+n)
				}
				d := newDecoder(t, w, o)
				var got [][]int
				if chosen {
					got = choose(t, d, prompts, n)
				} else {
					got = greedy(t, d, prompts, n)
				}
				for j, i := range batch {
					if want := cases[i].Next[:n]; !slices.Equal(got[j], want) {
						t.Errorf("%v, attention %d, mixed %v, chosen on the GPU %v, case %d in a batch of %d: %v, want %v", kind.weights, kind.attention, kind.mixed, chosen, i, len(batch), got[j], want)
					}
				}
			}
		}
	}
}

// The tokens of a model of OPT's architecture that is not OPT, in float32 and in float16:
// of launches for each layer, and of a step in one launch, which takes 16-bit weights.
func TestGPUGoldenTokens(t *testing.T) {
	gpu := devicetest.Open(t)
	for _, kind := range []tensor.Dtype{tensor.Float32, la.Float16} {
		for _, chosen := range []bool{false, true} {
			testTokens(t, kind, Options{Device: gpu, Cache: kind, Greedy: chosen})
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

// Batches of all sizes that there are kernels for have the CPU's logits, step after
// step: some steps are recorded, some replayed.
func TestGPUBatches(t *testing.T) {
	gpu, w := devicetest.Open(t), openModel(t, "../tiny", la.Float16)
	testGPUBatches(t, gpu, w, 2, 6, 16)
	testGPUBatchesOf(t, gpu, w, true, 0.03, 17)
}

func testGPUBatches(t *testing.T, gpu *device.GPU, w *Weights, sizes ...int) {
	testGPUBatchesOf(t, gpu, w, false, 0.003, sizes...)
}

// testGPUBatchesOf is testGPUBatches, perhaps in mixed precision. The difference of a row's logits is at most
// bound times as long as the CPU's row. A bound of single logits would be one of the largest of 10^5 random
// errors, which here and there is ten times what they usually are.
func testGPUBatchesOf(t *testing.T, gpu *device.GPU, w *Weights, mixed bool, bound float64, sizes ...int) {
	rng := reftest.Rand(t)
	for _, rows := range sizes {
		lengths := make([]int, rows)
		for i := range lengths {
			lengths[i] = 1 + rng.IntN(4)
		}
		ids := prompts(rng, w.Config().VocabSize, lengths...)
		o := Options{Cache: la.Float16}
		for range ids {
			o.Capacity = append(o.Capacity, 16)
		}
		there := o
		there.Device, there.Mixed = gpu, mixed
		here, d := newDecoder(t, w, o), newDecoder(t, w, there)
		for _, d := range []*Decoder{here, d} {
			if err := d.Prefill(context.Background(), ids, nil); err != nil {
				t.Fatal(err)
			}
		}
		for step := range 4 {
			next := make([]int, rows)
			for i := range next {
				want, got := here.Logits(i), d.Logits(i)
				var length, diff float64
				for j, x := range want {
					length = math.Hypot(length, float64(x))
					diff = math.Hypot(diff, float64(got[j])-float64(x))
				}
				if !(diff <= bound*length) {
					t.Fatalf("%d sequences, step %d: the logits of sequence %d differ from the CPU's by %v, which are %v long", rows, step, i, diff, length)
				}
				next[i] = rng.IntN(len(want))
			}
			if err := errors.Join(here.Step(next), d.Step(next)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// Decoders come and go, sequences rest and are cut, and the GPU's memory is as
// it was.
func TestGPUDecoder(t *testing.T) {
	gpu := devicetest.Open(t)
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
	gpu := devicetest.Open(t)
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

// Choices by chance: one temperature is greedy, the others depend on the seed
// alone, whether the steps are waited for or not.
func TestGPUChoices(t *testing.T) { testChoices(t, Options{Device: devicetest.Open(t)}) }
func TestChoices(t *testing.T)    { testChoices(t, Options{}) }

func testChoices(t *testing.T, o Options) {
	w := openModel(t, "../tiny", tensor.Float32)
	c := readGolden(t).Greedy[0]
	const n = 40
	o.Capacity = slices.Repeat([]int{len(c.IDs) + n + 1}, 3)
	o.Choices = []nn.Choice{{TopP: 1}, {Temperature: 1, TopP: 1}, {Temperature: 0.8, TopK: 20, TopP: 0.9}}
	text := func(seed uint64, ahead bool) (out [3][]int) {
		o.Seed = seed
		d := newDecoder(t, w, o)
		if err := d.Prefill(context.Background(), [][]int{c.IDs, c.IDs, c.IDs}, nil); err != nil {
			t.Fatal(err)
		}
		next := []int{d.Chosen(0), d.Chosen(1), d.Chosen(2)}
		add := func(now []int) {
			for i, id := range now {
				if id < 0 {
					t.Fatalf("sequence %d: no token", i)
				}
				out[i] = append(out[i], id)
			}
		}
		add(next)
		for len(out[0]) < n {
			if ahead {
				chosen, err := d.Continue(next, min(7, n-len(out[0])))
				if err != nil {
					t.Fatal(err)
				}
				for _, now := range chosen {
					add(now)
				}
				next = chosen[len(chosen)-1]
				continue
			}
			if err := d.Step(next); err != nil {
				t.Fatal(err)
			}
			next = []int{d.Chosen(0), d.Chosen(1), d.Chosen(2)}
			add(next)
		}
		return out
	}
	first, again, other := text(1, false), text(1, true), text(2, false)
	for i := range first {
		if !slices.Equal(first[i], again[i]) {
			t.Errorf("sequence %d: %v, and some steps ahead %v", i, first[i], again[i])
		}
		if same := slices.Equal(first[i], other[i]); same != (i == 0) {
			t.Errorf("sequence %d: the same text by another seed: %v", i, same)
		}
	}
	if !slices.Equal(first[0], c.Next[:n]) {
		t.Errorf("greedy: %v, want %v", first[0], c.Next[:n])
	}
	if slices.Equal(first[1], first[2]) {
		t.Error("two sequences have one text")
	}
	o.Choices = o.Choices[:2]
	if _, err := w.NewDecoder(o); !errors.Is(err, ErrConfig) {
		t.Errorf("two choices for three sequences: %v", err)
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
