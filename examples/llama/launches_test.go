//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package llama

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/gpu"

	"gorgonia.org/tensor"
)

// The launches of a recorded step: on compute capability 9.0 one of one and two texts, and of more six a layer:
// q, k and v with the norm ahead, rotary embedding and append, attention, its projection, gate and up with their norm,
// down. A greedy one has one more, unless it is one.
func TestStepLaunches(t *testing.T) {
	if !fakedriver.OwnProcess(t, 8) {
		return
	}
	real := gpu.Image
	defer func() { gpu.Image = real }()
	gpu.Image = func(string, int) ([]byte, error) { return []byte("image"), nil }
	layer := []string{"batch_f16", "lean_append_turned", "lean_f16", "batch_f16", "gated_batch_f16", "batch_f16"}
	for _, c := range []struct {
		texts int
		want  []string // as names begin
	}{
		{1, []string{"chain_llama_f16_64"}},
		{2, []string{"chain_llama_f16_64"}},
		{4, slices.Concat([]string{"decoder_gather"}, layer, layer, []string{"batch_f16"})},
		{16, slices.Concat([]string{"decoder_gather"}, layer, layer, []string{"batch_f16"})},
	} {
		for _, greedy := range []bool{false, true} {
			if greedy && c.texts > 2 {
				c.want = append(c.want, "sample_greedy")
			}
			t.Run(fmt.Sprint(c.texts, greedy), func(t *testing.T) {
				lib := fakedriver.System(t)
				s := lib.State()
				s.Total, s.Major, s.Minor, s.SMs, s.Shared = 1<<30, 9, 0, 132, 232448
				s.Argument("", 8) // of all kernels: nobody looks at the rest
				there, err := device.Open(0)
				if err != nil {
					t.Fatal(err)
				}
				made := map[string]*tensor.Dense{}
				d, err := New(stepConfig(64), someWeights(there, rand.New(rand.NewPCG(1, 2)), made), Options{Rows: []int{c.texts}, Tokens: c.texts * 64, KV: la.Float16, Device: there, Greedy: greedy})
				if err != nil {
					t.Fatal(err)
				}
				var all []Text
				for range c.texts {
					all = append(all, Text{newSequence(t, d), []int{1}})
				}
				for step := range 3 {
					lib.Forget()
					if _, err := d.run(all); err != nil { // nothing computes
						t.Fatal(err)
					}
					var kernels []string
					for _, k := range fakedriver.Kernels(lib.Log()) {
						if k != "copy_pieces" { // of what is put off until then
							kernels = append(kernels, k)
						}
					}
					switch {
					case step == 1 && !slices.EqualFunc(kernels, c.want, strings.HasPrefix):
						t.Errorf("a recorded step is %q, want %q", kernels, c.want)
					case step == 2 && (len(kernels) > 0 || strings.Count(lib.Log(), "cuGraphLaunch") != 1):
						t.Errorf("a step that is replayed: %q, %d graphs", kernels, strings.Count(lib.Log(), "cuGraphLaunch"))
					}
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
}
