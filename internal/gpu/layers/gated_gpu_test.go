package layers

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// BenchmarkGPUGates is the gated units of decode steps of models of Llama's shape, one layer behind the
// other: as one launch, and with a launch for gate and up and one for the gate. `share` is the part of
// the read ceiling, which us/ceiling is the time of for as many bytes. All are launched in turn.
func BenchmarkGPUGates(b *testing.B) {
	m, d := realDecoder(b)
	rng := rand.New(rand.NewPCG(1, 2))
	defer func() { d.separateGates = false }()
	for _, s := range []struct {
		name           string
		layers, h, out int
	}{{"Llama-3.2-1B", 16, 2048, 8192}, {"Llama-3-8B", 8, 4096, 14336}} {
		const most = 512
		weights := m.filled(b, rng, attn.Float16, s.layers*2*s.h*s.out, 1/math.Sqrt(float64(s.h)))
		x, y, scratch := m.filled(b, rng, attn.Float32, most*s.h, 1), m.empty(b, most*s.out), m.empty(b, most*(2*s.out+s.h+1))
		for _, rows := range []int{1, 2, 4, 16, 64, most} {
			b.Run(fmt.Sprintf("%s/rows%d", s.name, rows), func(b *testing.B) {
				names, graphs := []string{"fused", "apart", "ceiling"}, make([]*cuda.Graph, 3)
				for i := range names[:2] {
					d.separateGates = i == 1
					g, err := m.Stream.Capture(func() error {
						for layer := range s.layers {
							o := Linear{Rows: rows, In: s.h, X: x, Gate: true, Activation: attn.SiLU, Early: true, Scratch: scratch}
							for part := range 2 {
								at := int64((2*layer + part) * s.h * s.out)
								o.Parts = append(o.Parts, LinearPart{W: gpu.Memory{Buffer: weights.Buffer, Offset: weights.Offset + 2*at, DType: attn.Float16, Len: s.h * s.out}, Out: s.out})
							}
							o.Parts[0].Y = y
							if err := d.Linear(m.Stream, &o); err != nil {
								return err
							}
						}
						return nil
					})
					noError(b, err)
					graphs[i] = g
				}
				g, err := m.Stream.Capture(m.Ceiling(b, weights, y))
				noError(b, err)
				graphs[2] = g
				times := m.inTurn(b, 15, graphs)
				for i, name := range names {
					each := times[i].Seconds() / float64(s.layers)
					b.ReportMetric(each*1e6, "us/"+name)
					b.ReportMetric(times[2].Seconds()/times[i].Seconds(), "share/"+name)
					noError(b, graphs[i].Close())
				}
				b.ReportMetric(0, "ns/op")
			})
		}
		for _, x := range []gpu.Memory{weights, x, y, scratch} {
			noError(b, x.Buffer.Close())
		}
	}
}
