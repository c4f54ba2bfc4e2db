package model

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/ranks"

	"gorgonia.org/tensor"
)

// Models on several GPUs.

// headed is a small model of so many heads that a GPU has kernels for.
func headed(t *testing.T, heads int, tied bool) *Weights {
	t.Helper()
	return headedOf(t, heads, small().FFNDim, tied)
}

// headedOf is headed of so many inner features.
func headedOf(t *testing.T, heads, inner int, tied bool) *Weights {
	t.Helper()
	rng := reftest.Rand(t)
	c := small()
	c.FFNDim = inner
	c.HiddenSize, c.WordEmbedProjDim, c.Heads, c.Layers, c.TieWordEmbeddings = 64*heads, 64*heads, heads, 1, tied
	w, err := LoadAs(random{c, rng}, la.Float16)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// Batches, prompts in chunks and steps on two GPUs and more have the CPU's logits; heads and features need not be
// dealt out evenly.
func TestGPUsBatches(t *testing.T) {
	for members := 2; members <= 4; members++ {
		t.Run(fmt.Sprint(members), func(t *testing.T) {
			gpu := devicetest.OpenSome(t, members)
			testGPUBatches(t, gpu, headed(t, members, true), 1, 5)
			if members == 2 {
				testGPUBatches(t, gpu, headed(t, 1, true), 1, 5)       // by context
				testGPUBatches(t, gpu, headedOf(t, 1, 64, true), 1, 5) // apart
			}
			if !testing.Short() {
				testGPUBatches(t, gpu, headed(t, members+1, false), 1, 3, 9, 17)
				testGPUBatches(t, gpu, openModel(t, "../tiny", la.Float16), 1, 2, 6, 16)
			}
		})
	}
}

func TestGPUsGoldenLogits(t *testing.T) { testGPULogits(t, devicetest.OpenSome(t, 2)) }
func TestGPUsGoldenGreedy(t *testing.T) { testGPUGreedy(t, devicetest.OpenSome(t, 2)) }
func TestGPUsContinue(t *testing.T)     { testContinue(t, Options{Device: devicetest.OpenSome(t, 2)}) }
func TestGPUsChoices(t *testing.T)      { testChoices(t, Options{Device: devicetest.OpenSome(t, 2)}) }
func TestGPUsVerify(t *testing.T)       { testVerify(t, Options{Device: devicetest.OpenSome(t, 2)}) }

func TestGPUsForkAndSave(t *testing.T) {
	gpu := devicetest.OpenSome(t, 2)
	testFork(t, Options{Device: gpu})
	testSaved(t, Options{Chunk: 8, Device: gpu}, Options{Chunk: 8})
	testSaved(t, Options{Chunk: 8}, Options{Chunk: 8, Device: gpu})
}

// The golden texts, on two to four GPUs in every way of sharding: on three the features of this model can't be dealt out evenly.
func TestGPUsGoldenTexts(t *testing.T) {
	cases := readGolden(t).Greedy
	kinds := []tensor.Dtype{la.Float16, tensor.Float32}
	shards := []la.Shard{la.ShardContext, la.ShardHeads, la.ShardAuto}
	n := len(cases[0].Next)
	if testing.Short() { // by heads there are TestGPUsBatches
		n, cases, kinds, shards = 3, cases[:1], kinds[:1], shards[:1]
	}
	for members := 2; members <= 4; members++ {
		t.Run(fmt.Sprint(members), func(t *testing.T) {
			gpu := devicetest.OpenSome(t, members)
			for _, shard := range shards {
				for _, kind := range kinds {
					w := openModel(t, "../tiny", kind)
					o := Options{Device: gpu, Cache: kind, Shard: shard, Greedy: true}
					var prompts [][]int
					for _, c := range cases {
						prompts = append(prompts, c.IDs)
						o.Capacity = append(o.Capacity, len(c.IDs)+n)
					}
					for i, got := range choose(t, newDecoder(t, w, o), prompts, n) {
						if want := cases[i].Next[:n]; !slices.Equal(got, want) {
							t.Errorf("%v, %v, case %d: %v, want %v", shard, kind, i, got, want)
						}
					}
				}
			}
		})
	}
}

// The same bits come out again.
func TestGPUsRepeat(t *testing.T) {
	gpu := devicetest.OpenSome(t, 3)
	w := headed(t, 3, true)
	for _, shard := range []la.Shard{la.ShardHeads, la.ShardContext} {
		testRepeat(t, gpu, w, shard)
	}
}

func testRepeat(t *testing.T, gpu *device.GPU, w *Weights, shard la.Shard) {
	var first [][]float32
	for range 2 {
		d := newDecoder(t, w, Options{Capacity: []int{20, 20}, Device: gpu, Cache: la.Float16, Shard: shard, Chunk: 8})
		if err := d.Prefill(context.Background(), [][]int{{5, 6, 7, 8, 9, 10, 11, 12, 13}, {14}}, nil); err != nil {
			t.Fatal(err)
		}
		var logits [][]float32
		for i := range 4 {
			logits = append(logits, slices.Clone(d.Logits(0)), slices.Clone(d.Logits(1)))
			if err := d.Step([]int{15 + i, 20 + i}); err != nil {
				t.Fatal(err)
			}
		}
		for i := range first {
			if !slices.Equal(first[i], logits[i]) {
				t.Errorf("%v, step %d, sequence %d: other logits", shard, i/2, i%2)
			}
		}
		first = logits
	}
}

// Each GPU has its part of the weights, and of them alone; what does not fit on it is an error that names it.
func TestGPUsMemory(t *testing.T) {
	for _, tied := range []bool{false, true} {
		t.Run(fmt.Sprintf("tied %v", tied), func(t *testing.T) { testGPUsMemory(t, devicetest.OpenSome(t, 2), headed(t, 2, tied), tied) })
	}
	t.Run("evenly", func(t *testing.T) {
		w := openModel(t, "../tiny", la.Float16)
		if !evenly(&w.config, w.world, 2) {
			t.Error("the model is not dealt out evenly")
		}
		testGPUsMemory(t, devicetest.OpenSome(t, 2), w, w.config.TieWordEmbeddings)
	})
	gpu := devicetest.OpenSome(t, 2)
	err := checkFree(gpu, func(i int) (int64, string) { return int64(i) << 60, "it all" })
	if !errors.Is(err, la.ErrOutOfMemory) || !strings.Contains(err.Error(), "it all on GPU 1 (Fake 1), which has") && !strings.Contains(err.Error(), "it all on GPU 1 (NVIDIA") {
		t.Errorf("%v", err)
	}
}

func testGPUsMemory(t *testing.T, gpu *device.GPU, w *Weights, tied bool) {
	g, err := w.onGPU(gpu)
	if err != nil {
		t.Fatal(err)
	}
	all := w.Bytes()
	for i := range 2 {
		m, err := gpu.Memory(i)
		if err != nil {
			t.Fatal(err)
		}
		// Buffers are up to a quarter larger, and 256 bytes at least.
		most := w.bytesOn(i, 2)*5/4 + int64(len(g.tensors))*256
		if m.Used > most || m.Used < w.bytesOn(i, 2) {
			t.Errorf("GPU %d: %d bytes used, %d are its own, of %d that the model has", i, m.Used, w.bytesOn(i, 2), all)
		}
	}
	// Evenly both have the tables, norms and biases, and halves of the rest. The table is dealt out as the head, too.
	twice := int64(0)
	for name, x := range w.tensors {
		if placementOf(&w.config, w.world, name, 2) == onAll {
			twice += int64(x.MemSize())
		}
		if tied && name == tokenTable {
			twice += int64(x.MemSize())
		}
	}
	if sum := w.bytesOn(0, 2) + w.bytesOn(1, 2); sum != all+twice {
		t.Errorf("%d bytes in all, the model has %d and %d of it twice", sum, all, twice)
	}
}

// Features are dealt out evenly on all ranks, or on none.
func TestEvenly(t *testing.T) {
	for _, c := range []struct {
		heads, dim, inner, ranks, gpus int
		want                           bool
	}{
		{32, 128, 16384, 0, 8, true},
		{32, 128, 16384, 2, 4, true},
		{32, 128, 16384, 2, 9, false},
		{6, 64, 1024, 4, 4, true},  // of one and of two heads
		{6, 64, 1024, 4, 8, false}, // a half of one's features is no block
		{3, 64, 48, 1, 3, true},
		{4, 64, 96, 2, 3, false}, // the heads
		{6, 64, 96, 2, 3, true},
		{6, 64, 112, 2, 3, false}, // 48 and 64 inner features
	} {
		config := hf.Config{Heads: c.heads, HiddenSize: c.heads * c.dim, FFNDim: c.inner}
		if got := evenly(&config, ranks.World{Size: c.ranks, Rank: max(c.ranks-1, 0)}, c.gpus); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}
