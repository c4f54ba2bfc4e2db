//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package decoder

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/nn"

	la "gorgonia.org/leanattention"

	"gorgonia.org/tensor"
)

// fakeGPU opens GPUs of compute capability 9.0 whose kernels compute nothing.
func fakeGPU(t *testing.T, n int) (*fakedriver.Library, *device.GPU) {
	t.Helper()
	lib := fakedriver.System(t)
	s := lib.State()
	s.Devices, s.Total, s.Major, s.Minor, s.SMs, s.Shared = int32(n), 1<<30, 9, 0, 132, 232448
	s.Argument("", 8) // of all kernels: none reads its arguments
	ordinals := make([]int, n)
	for i := range ordinals {
		ordinals[i] = i
	}
	there, err := device.Open(ordinals...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := there.Close(); err != nil {
			t.Error(err)
		}
	})
	return lib, there
}

// fakeImages has all kernels loaded from an image without code.
func fakeImages(t *testing.T) {
	real := gpu.Image
	t.Cleanup(func() { gpu.Image = real })
	gpu.Image = func(string, int) ([]byte, error) { return []byte("image"), nil }
}

// launchesEngine returns an engine of a network with steps of some texts, and the steps of one token of each text.
func launchesEngine(t *testing.T, n Network, texts int, o Options) (e *Engine, step func()) {
	t.Helper()
	o.Batch, o.Chunk, o.Context, o.Tokens = texts, texts, 64, 64*texts+64
	if o.Weights == (tensor.Dtype{}) {
		o.Weights = la.Float16
	}
	if o.Cache == (tensor.Dtype{}) {
		o.Cache = la.Float16
	}
	e, err := NewEngine(n, namedWeights{}, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	var appends []la.Append
	for range texts {
		s, err := e.newSequence()
		if err != nil {
			t.Fatal(err)
		}
		appends = append(appends, la.Append{Seq: s, Tokens: 1})
	}
	return e, func() {
		t.Helper()
		if _, err := e.run(appends, make([]int, texts), false, false, nil); err != nil {
			t.Fatal(err)
		}
	}
}

// ownKernels returns the kernels of a log, except copies that were queued until the step.
func ownKernels(log string) []string {
	return slices.DeleteFunc(fakedriver.Kernels(log), func(k string) bool { return k == "copy_pieces" })
}

// TestStepLaunches lists the launches of a recorded step on compute capability 9.0. One or two texts are one launch. More texts
// are six launches a layer: q, k and v with the norm before, rotary embedding and append, attention, its projection, gate and up
// with their norm, down. One more launch chooses the tokens, except in a step of one launch.
func TestStepLaunches(t *testing.T) {
	if !fakedriver.OwnProcess(t, 8) {
		return
	}
	fakeImages(t)
	layer := []string{"batch_f16", "append_rotated", "lean_f16", "batch_f16", "gated_batch_f16", "batch_f16"}
	several := slices.Concat([]string{"decoder_gather"}, layer, layer, []string{"batch_f16", "sample_greedy"})
	for _, c := range []struct {
		texts int
		want  []string // as names begin
	}{{1, []string{"megakernel_llama_f16_64"}}, {2, []string{"megakernel_llama_f16_64"}}, {4, several}, {16, several}} {
		for _, mixed := range []bool{false, true} {
			t.Run(fmt.Sprint(c.texts, mixed), func(t *testing.T) {
				lib, there := fakeGPU(t, 1)
				_, run := launchesEngine(t, stepNetwork(t, 64), c.texts, Options{Device: there, Exact: !mixed})
				for step := range 4 {
					lib.Forget()
					run()
					kernels := ownKernels(lib.Log())
					switch {
					case step == 1 && !slices.EqualFunc(kernels, c.want, strings.HasPrefix):
						t.Errorf("a recorded step is %q, want %q", kernels, c.want)
					case step > 1 && (len(kernels) > 0 || strings.Count(lib.Log(), "cuGraphLaunch") != 1):
						t.Errorf("a step that is replayed: %q, %d graphs", kernels, strings.Count(lib.Log(), "cuGraphLaunch"))
					}
				}
			})
		}
	}
}

// TestGPUsStepLaunches counts the launches of a recorded step on two GPUs. One or two texts are one launch on each GPU, which
// adds partial sums within. Of more texts, each GPU adds partial sums twice a layer. There is one fork and one join, wherever the
// layers are. One launch more of each GPU chooses the tokens.
func TestGPUsStepLaunches(t *testing.T) {
	if !fakedriver.OwnProcess(t, 5) {
		return
	}
	fakeImages(t)
	const layers = 3
	const config = `{"model_type":"opt","vocab_size":96,"hidden_size":256,"word_embed_proj_dim":256,"ffn_dim":512,"num_hidden_layers":3,
		"num_attention_heads":4,"max_position_embeddings":64,"do_layer_norm_before":true,"activation_function":"relu"}`
	for _, c := range []struct {
		texts, megakernels, sums int
		shard                    la.Shard
		gathers, merges          int
	}{
		{1, 2, 0, la.ShardAuto, 0, 0}, {2, 2, 0, la.ShardHeads, 0, 0}, {5, 0, 2 * 2 * layers, la.ShardAuto, 0, 0},
		{5, 0, 2 * 2 * layers, la.ShardContext, 2 * layers, 2 * layers}, {1, 2 * layers, 0, la.ShardContext, 2 * layers, 2 * layers},
	} {
		t.Run(fmt.Sprint(c.texts, c.shard), func(t *testing.T) {
			lib, there := fakeGPU(t, 2)
			n, err := ReadNetwork([]byte(config), 64)
			if err != nil {
				t.Fatal(err)
			}
			_, run := launchesEngine(t, n, c.texts, Options{Device: there, Shard: c.shard, Exact: true})
			for step := range 4 {
				lib.Forget()
				run()
				log := lib.Log()
				kernels := fakedriver.Kernels(log)
				count := func(prefix string) (n int) {
					for _, k := range kernels {
						if strings.HasPrefix(k, prefix) {
							n++
						}
					}
					return n
				}
				megakernels, sums := count("megakernel_"), count("exchange_all_reduce")
				switch {
				case step == 1 && (megakernels != c.megakernels || sums != c.sums || count("exchange_all_gather") != c.gathers || count("exchange_merge_states") != c.merges ||
					count("exchange_all_arg_max") != 2 || strings.Count(log, "cuStreamWaitEvent") != 2):
					t.Errorf("a recorded step is %q, with %d waits", kernels, strings.Count(log, "cuStreamWaitEvent"))
				case step == 1 && megakernels > 0 && c.merges == 0 && len(kernels) > megakernels+6:
					t.Errorf("a recorded step is %q", kernels)
				case step > 1 && (megakernels+sums > 0 || strings.Count(log, "cuGraphLaunch") != 1):
					t.Errorf("a step that is replayed: %q, %d graphs", kernels, strings.Count(log, "cuGraphLaunch"))
				}
			}
		})
	}
}

// TestDeviceMemory: weights that are larger than the memory of the GPUs are an error with both numbers, before any is loaded.
func TestDeviceMemory(t *testing.T) {
	if !fakedriver.OwnProcess(t, 2) {
		return
	}
	lib, gpus := fakeGPU(t, 2)
	m := openCheckpoint(t, "../tiny")
	all, _, err := weightBytes(m.Network(), tensor.Dtype{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, each := range map[string]int64{"less": all/2 - 1, "enough": all / 2} {
		t.Run(name, func(t *testing.T) {
			lib.State().Total = each
			_, err := m.Engine(Options{Device: gpus})
			short := errors.Is(err, la.ErrOutOfMemory) && strings.Contains(err.Error(), fmt.Sprintf("at least %d bytes, and %d of %d bytes of GPU 0", all, 2*each, 2*each))
			if short != (name == "less") {
				t.Errorf("%d bytes of %d: %v", 2*each, all, err)
			}
		})
	}
}

// TestFewBitsStepLaunches lists the launches of a recorded step with weights of 8 and 4 bits on compute capability 9.0. Steps of one or two
// texts with keys and values of 16 bits are one launch of each GPU, as with weights of 16 bits, behind the gather of the embeddings. With keys
// and values of 8 bits, the linear layers between two layers' attention are one launch. Of more texts, each matrix is a launch.
func TestFewBitsStepLaunches(t *testing.T) {
	if !fakedriver.OwnProcess(t, 6) {
		return
	}
	fakeImages(t)
	const config = `{"model_type":"llama","vocab_size":50,"hidden_size":128,"intermediate_size":512,"num_hidden_layers":2,
		"num_attention_heads":4,"num_key_value_heads":2,"head_dim":64,"rms_norm_eps":1e-5,"rope_theta":10000}`
	const one, single, linear = "megakernel_packed_llama_f16_64", "narrow_hopper_integers_int4_8", "narrow_hopper_integers_int4_16"
	several := []string{"narrow_gather", "node_rms_norm"}
	for range 2 {
		several = append(several, linear, linear, linear, "append_rotated", "lean_f16_64_paged", linear, "node_rms_norm", linear, linear, "node_elements", linear, "node_rms_norm")
	}
	for _, c := range []struct {
		gpus, texts int
		weights, kv tensor.Dtype
		want        []string
	}{
		{1, 1, tensor.Int8, la.Float16, []string{"narrow_gather", one}},
		{1, 2, nn.Int4, la.BFloat16, []string{"narrow_gather", "megakernel_packed_llama_bf16_64"}},
		{1, 1, la.E4M3, la.Float16, []string{"narrow_gather", one}},
		{2, 2, nn.Int4, la.Float16, []string{"narrow_gather", "narrow_gather", one, "exchange_all_arg_max", one, "exchange_all_arg_max"}},
		{1, 1, nn.Int4, la.E4M3, []string{"narrow_gather", "node_rms_norm", single, single, single, "append_narrow", "narrow_e4m3_64", one, "append_narrow", "narrow_e4m3_64", one}},
		{1, 4, nn.Int4, la.Float16, append(several, linear, "sample_greedy")},
	} {
		t.Run(fmt.Sprint(c.gpus, c.texts, c.weights, c.kv), func(t *testing.T) {
			n, err := ReadNetwork([]byte(config), 64)
			if err != nil {
				t.Fatal(err)
			}
			lib, there := fakeGPU(t, c.gpus)
			_, run := launchesEngine(t, n, c.texts, Options{Device: there, Weights: c.weights, Cache: c.kv})
			run()
			lib.Forget()
			run()
			if kernels := ownKernels(lib.Log()); !slices.Equal(kernels, c.want) {
				t.Errorf("a recorded step is %q, want %q", kernels, c.want)
			}
		})
	}
}
