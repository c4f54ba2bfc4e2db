package layers

import (
	"math/rand/v2"
	"testing"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// BenchmarkGPUCopies is what copies add to each run of a graph that they come before: as
// a decode step has them, with a schedule of some size and its event, or of one size.
func BenchmarkGPUCopies(b *testing.B) {
	m := realGPU(b)
	sampler, err := NewSampler(m.Dev)
	noError(b, err)
	rng := rand.New(rand.NewPCG(1, 2))
	logits := make([][]float32, 16)
	for i := range logits {
		logits[i] = make([]float32, 50272)
		for j := range logits[i] {
			logits[i][j] = float32(rng.NormFloat64())
		}
	}
	work := m.newSamples(b, logits, nil, nil, 0)
	there, err := m.Dev.NewBuffer(1 << 20)
	noError(b, err)
	h, err := m.Dev.NewHost(1 << 20)
	noError(b, err)
	var marks [2]*cuda.Event
	for i := range marks {
		marks[i], err = m.Dev.NewEvent(false)
		noError(b, err)
	}
	step := func(plan int) func(*cuda.Stream) error {
		return func(s *cuda.Stream) error {
			for _, f := range []func() error{
				func() error { return s.Copy(there, 0, there, 4096, 64) },
				func() error { return s.Upload(there, 512<<10, h, 0, plan) },
				func() error { return s.Record(marks[0]) },
				func() error { return s.Copy(there, 8192, there, 4096, 64) },
				func() error { return s.Upload(there, 12288, h, 512<<10, 64) },
				func() error { return s.Record(marks[1]) },
			} {
				if err := f(); err != nil {
					return err
				}
			}
			return nil
		}
	}
	equal := func(copies, bytes int) func(*cuda.Stream) error {
		return func(s *cuda.Stream) error {
			for i := range copies {
				if err := s.Upload(there, int64(i*bytes), h, i*bytes, bytes); err != nil {
					return err
				}
			}
			return nil
		}
	}
	for _, c := range []struct {
		name   string
		copies func(*cuda.Stream) error
	}{
		{"none", func(*cuda.Stream) error { return nil }},
		{"step_4KB", step(4 << 10)}, {"step_16KB", step(16 << 10)}, {"step_32KB", step(32 << 10)}, {"step_64KB", step(64 << 10)},
		{"1x64", equal(1, 64)}, {"2x64", equal(2, 64)}, {"4x64", equal(4, 64)}, {"8x64", equal(8, 64)},
		{"2x16KB", equal(2, 16<<10)}, {"2x64KB", equal(2, 64<<10)}, {"4x64KB", equal(4, 64<<10)}, {"8x64KB", equal(8, 64<<10)},
	} {
		for _, together := range []bool{false, true} {
			name := map[bool]string{false: "one_by_one", true: "together"}[together]
			b.Run(c.name+"/"+name, func(b *testing.B) {
				s, err := m.Dev.NewStream()
				noError(b, err)
				if together {
					noError(b, gpu.PutOffCopies(s))
				}
				graph, err := s.Capture(func() error {
					for range 8 { // longer than the host takes for a step
						if err := sampler.Run(s, &work.Samples); err != nil {
							return err
						}
					}
					return nil
				})
				noError(b, err)
				const steps = 100
				run := func() {
					for range steps {
						noError(b, c.copies(s))
						noError(b, s.Launch(graph))
					}
					noError(b, s.Synchronize())
				}
				run()
				for b.Loop() {
					run()
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/1000/float64(steps*b.N), "us/step")
				noError(b, graph.Close())
				noError(b, s.Close())
			})
		}
	}
}
