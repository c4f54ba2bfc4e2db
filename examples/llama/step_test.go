package llama

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/rope"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// stepConfig is as small as a model may be whose steps are one launch on a GPU.
func stepConfig(headDim int) Config {
	return Config{
		Vocab: 50, Hidden: 128, Inner: 384, Layers: 2, Heads: 256 / headDim, KVHeads: 128 / headDim, Eps: 1e-5, Gate: nn.SiLU,
		Rotary: rope.Config{HeadDim: headDim, Base: 1e4},
	}
}

// someWeights are random ones, matrices of float16, the same on the host and on each GPU.
func someWeights(gpu *device.GPU, rng *rand.Rand, made map[string]*tensor.Dense) Weights {
	return func(name string, shape ...int) (G.Value, error) {
		w := made[name]
		if w == nil {
			f := make([]float32, tensor.Shape(shape).TotalSize())
			scale := 1 / math.Sqrt(float64(shape[len(shape)-1]))
			for i := range f {
				f[i] = float32(rng.NormFloat64() * scale)
				if len(shape) == 1 {
					f[i] = float32(1 + 0.5*rng.NormFloat64())
				}
			}
			var backing any = f
			if len(shape) > 1 {
				short := make([]la.F16, len(f))
				half.EncodeFloat16(short, f)
				backing = short
			}
			w = tensor.New(tensor.WithShape(shape...), tensor.WithBacking(backing))
			made[name] = w
		}
		if gpu == nil {
			return w, nil
		}
		return gpu.Upload(w)
	}
}

// Steps of one and two texts, which are single launches where the GPU has kernels for that, and of four: of both
// the CPU says the same. The first step of a text is its prompt, the third and those behind it are of a recording.
func TestGPUStep(t *testing.T) {
	gpu := devicetest.Open(t)
	rng := reftest.Rand(t)
	for _, headDim := range []int{64, 128} {
		for _, texts := range []int{1, 2, 4} {
			t.Run(fmt.Sprintf("%d/%d", headDim, texts), func(t *testing.T) {
				c, made, seed := stepConfig(headDim), map[string]*tensor.Dense{}, rng.Uint64()
				var logits [2][][]float32
				for i, at := range []*device.GPU{nil, gpu} {
					d, err := New(c, someWeights(at, rng, made), Options{Rows: []int{texts, 32}, Tokens: texts * 64, KV: la.Float16, Device: at})
					if err != nil {
						t.Fatal(err)
					}
					ids := rand.New(rand.NewPCG(seed, 1))
					var seqs []*la.Sequence
					for range texts {
						seqs = append(seqs, newSequence(t, d))
					}
					for step := range 6 {
						var all []Text
						for j, s := range seqs {
							own := Text{s, []int{ids.IntN(c.Vocab)}}
							for step == 0 && len(own.IDs) < 2+j*3 {
								own.IDs = append(own.IDs, ids.IntN(c.Vocab))
							}
							all = append(all, own)
						}
						rows, err := d.Step(all...)
						if err != nil {
							t.Fatal(err)
						}
						for _, r := range rows {
							logits[i] = append(logits[i], r...)
						}
					}
					if err := d.Close(); err != nil {
						t.Error(err)
					}
				}
				if len(logits[0]) != len(logits[1]) || len(logits[0]) < 6*texts {
					t.Fatalf("%d rows of logits on the CPU, %d on the GPU", len(logits[0]), len(logits[1]))
				}
				for i, row := range logits[0] {
					for j, w := range row {
						if got := logits[1][i][j]; !(math.Abs(float64(got-w)) <= 4e-3*(1+math.Abs(float64(w)))) {
							t.Fatalf("row %d, logit %d: %v on the GPU, %v on the CPU", i, j, got, w)
						}
					}
				}
			})
		}
	}
}
