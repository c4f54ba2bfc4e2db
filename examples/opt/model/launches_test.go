//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package model

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"
)

// The launches of a recorded step on two GPUs: one or two texts are one launch on each, which sum within it; of more,
// each GPU sums twice a layer. There is one fork and one join, wherever the layers are. Tokens are chosen in one launch more of
// each GPU, or drawn in two.
func TestGPUsStepLaunches(t *testing.T) {
	if !fakedriver.OwnProcess(t, 6) {
		return
	}
	real := gpu.Image
	defer func() { gpu.Image = real }()
	gpu.Image = func(string, int) ([]byte, error) { return []byte("image"), nil }
	const layers = 3
	for _, c := range []struct {
		texts, chains, sums int
		drawn               bool
		shard               la.Shard
		gathers, merges     int
	}{
		{1, 2, 0, false, la.ShardAuto, 0, 0}, {2, 2, 0, false, la.ShardHeads, 0, 0}, {5, 0, 2 * 2 * layers, false, la.ShardAuto, 0, 0}, {2, 2, 0, true, la.ShardAuto, 2, 0},
		{5, 0, 2 * 2 * layers, false, la.ShardContext, 2 * layers, 2 * layers}, {1, 2 * layers, 0, false, la.ShardContext, 2 * layers, 2 * layers},
	} {
		t.Run(fmt.Sprint(c.texts, c.drawn, c.shard), func(t *testing.T) {
			lib := fakedriver.System(t)
			s := lib.State()
			s.Devices, s.Total, s.Major, s.Minor, s.SMs, s.Shared = 2, 1<<30, 9, 0, 132, 232448
			s.Argument("", 8) // of all kernels: nobody looks at the rest
			there, err := device.Open(0, 1)
			if err != nil {
				t.Fatal(err)
			}
			config := small()
			config.HiddenSize, config.WordEmbedProjDim, config.Heads, config.Layers, config.FFNDim, config.VocabSize = 256, 256, 4, layers, 512, 96
			w, err := LoadAs(random{config, reftest.Rand(t)}, la.Float16)
			if err != nil {
				t.Fatal(err)
			}
			o := Options{Device: there, Cache: la.Float16, Shard: c.shard, Greedy: !c.drawn, Chunk: 8}
			var prompts [][]int
			next := make([]int, c.texts)
			for range c.texts {
				o.Capacity, prompts = append(o.Capacity, 12), append(prompts, []int{5, 6})
				if c.drawn {
					o.Choices = append(o.Choices, nn.Choice{Temperature: 1, TopP: 0.9})
				}
			}
			d, err := w.NewDecoder(o)
			if err != nil {
				t.Fatal(err)
			}
			if err := d.Prefill(context.Background(), prompts, nil); err != nil {
				t.Fatal(err)
			}
			for step := range 4 {
				lib.Forget()
				if err := d.Step(next); err != nil {
					t.Fatal(err)
				}
				log := lib.Log()
				kernels := fakedriver.Kernels(log)
				chains, sums, gathers, merges, chosen := 0, 0, 0, 0, []string{}
				for _, k := range kernels {
					switch {
					case strings.HasPrefix(k, "exchange_all_gather"):
						gathers++
					case strings.HasPrefix(k, "exchange_merge_states"):
						merges++
						chosen = nil // what is behind the layers
					case strings.HasPrefix(k, "exchange_all_reduce"):
						chosen = nil
					}
					switch {
					case k == "exchange_all_arg_max", strings.HasPrefix(k, "exchange_all_gather"), strings.HasPrefix(k, "sample_"), k == "node_move":
						chosen = append(chosen, k)
					}
					if strings.HasPrefix(k, "chain_") {
						chains++
					}
					if strings.HasPrefix(k, "exchange_all_reduce") {
						sums++
					}
				}
				want := []string{"exchange_all_arg_max", "exchange_all_arg_max"}
				if c.drawn { // the second GPU's first
					want = []string{"exchange_all_gather_few", "sample_random", "exchange_all_gather_few", "sample_random"}
				}
				switch {
				case step == 1 && !slices.Equal(chosen, want):
					t.Errorf("a recorded step is %q", kernels)
				case step == 1 && (chains != c.chains || sums != c.sums || gathers != c.gathers || merges != c.merges || strings.Count(log, "cuStreamWaitEvent") != 2):
					t.Errorf("a recorded step is %q, with %d waits", kernels, strings.Count(log, "cuStreamWaitEvent"))
				case step == 1 && chains > 0 && c.merges == 0 && len(kernels) > chains+6:
					t.Errorf("a recorded step is %q", kernels)
				case step > 1 && (chains+sums > 0 || strings.Count(log, "cuGraphLaunch") != 1):
					t.Errorf("a step that is replayed: %q, %d graphs", kernels, strings.Count(log, "cuGraphLaunch"))
				}
			}
			// What is measured is sums alone.
			lib.Forget()
			x, err := d.MeasureExchange()
			if err != nil || x.Sums != 2*layers || x.Bytes != 4*c.texts*config.HiddenSize || x.Time < 0 {
				t.Errorf("%+v, %v", x, err)
			}
			kernels := slices.DeleteFunc(fakedriver.Kernels(lib.Log()), func(k string) bool { return k == "copy_pieces" })
			if slices.ContainsFunc(kernels, func(k string) bool { return k != "exchange_all_reduce_few" }) || len(kernels) != 2*(1+8+24) {
				t.Errorf("the exchange is measured by %q", kernels)
			}
			if err := d.Close(); err != nil {
				t.Error(err)
			}
			if err := there.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}
