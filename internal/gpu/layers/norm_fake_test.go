//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package layers

import (
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
)

// A norm of x, of either kind, is a part of the launches of a layer without a norm. The norm is a launch of its own, before the others, where
// a GEMV has too little shared memory for the norm, and on GPUs without GEMMs.
func TestNormLaunches(t *testing.T) {
	for _, f := range enginetest.Fakes {
		t.Run(f.Name, func(t *testing.T) {
			m, lib, d := fakeDecoder(t, f.Capability, max(f.SMs, 8), f.Shared)
			gatedArguments(lib.State())
			rng := rand.New(rand.NewPCG(9, uint64(f.Capability)))
			const most, out = 300, 72
			x, gamma, y := m.memory(t, attn.Float32, most*4096), m.memory(t, attn.Float32, 4096), m.memory(t, attn.Float32, most*out)
			scratch, ws := m.memory(t, attn.Float32, 512*4097), [...]gpu.Memory{m.memory(t, attn.Float16, out*4096), m.memory(t, attn.Float32, out*4096)}
			within := 0 // launches that have the norm within
			for range 60 {
				w := enginetest.Pick(rng, ws[0], ws[0], ws[1])
				o := Linear{Rows: enginetest.Pick(rng, 1, 2, 3, 16, 17, 64, 150, most), In: enginetest.Pick(rng, 64, 520, 2048, 4096), X: x, RoundX: rng.IntN(2) == 0, Scratch: scratch}
				for range 1 + rng.IntN(2) {
					o.Parts = append(o.Parts, LinearPart{W: w, Y: y, Out: out})
				}
				if o.Gate = len(o.Parts) == 2 && rng.IntN(2) == 0; o.Gate {
					o.Activation = attn.SiLU
				}
				kernels := func(norm Norm) (names []string) {
					o.Norm = &norm
					lib.Forget()
					noError(t, d.Linear(m.Stream, &o))
					for _, name := range regexp.MustCompile(`kernel (\w+)`).FindAllStringSubmatch(lib.Log(), -1) {
						if name[1] == "decoder_norm" || name[1] == "node_rms_norm" {
							name[1] = "norm"
						}
						names = append(names, name[1])
					}
					if names[0] == "norm" {
						return names
					}
					for _, l := range enginetest.Launches(lib.Log()) {
						kind, offset, arg := norm.kind(), norm.offset(), unsafe.Pointer(&l.Arg[0])
						switch {
						case strings.HasPrefix(l.Kernel, "matrix_operands_"):
							kind, offset = (*operandParams)(arg).norm, (*operandParams)(arg).offset
						case strings.HasSuffix(l.Kernel, "_64_rounded"): // the norm is a part of the operands
							continue
						case strings.Contains(l.Kernel, "batch_"):
							kind, offset = (*skinnyParams)(arg).norm, (*skinnyParams)(arg).offset
						case strings.Contains(l.Kernel, "linear_"):
							kind, offset = (*linearParams)(arg).norm, (*linearParams)(arg).offset
						default:
							continue
						}
						if within++; kind != norm.kind() || offset != norm.offset() {
							t.Fatalf("%s: norm %d, offset %v, want %+v", l.Kernel, kind, offset, norm)
						}
					}
					return names
				}
				layer, rms := kernels(Norm{Gamma: gamma, Eps: 1e-5}), kernels(Norm{Gamma: gamma, Eps: 1e-5, RMS: true, UnitOffset: true})
				if !slices.Equal(layer, rms) {
					t.Fatalf("%d rows of %d: a layer norm is in %q, one by the root mean square in %q", o.Rows, o.In, layer, rms)
				}
			}
			if within == 0 {
				t.Error("no launch has a norm")
			}
			for _, x := range []gpu.Memory{x, gamma, y, scratch, ws[0], ws[1]} {
				noError(t, x.Buffer.Close())
			}
		})
	}
}
