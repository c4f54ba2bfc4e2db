package gpu

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/reftest"
)

func TestGPUCopies(t *testing.T) { testCopies(t, realGPU(t), orShort(500, 50), 64<<10) }
func TestGPUCopiesBefore(t *testing.T) {
	testCopiesBefore(t, realGPU(t), orShort(300, 30), options{work: 1e6, longest: 3000})
}

// testCopies: copies that a kernel makes are those that were asked for, and no other
// byte is written. A graph makes them before anything else, and those of one launch alone.
func testCopies(t *testing.T, m *machine, rounds, most int) {
	rng := reftest.Rand(t)
	if _, err := Image(copiesUnit, m.dev.Info().Capability); err != nil {
		t.Fatal(err) // all would pass without the kernel
	}
	s, err := m.dev.NewStream()
	noError(t, err)
	noError(t, PutOffCopies(s))
	size := 4 * most
	b, err := m.dev.NewBuffer(int64(size))
	noError(t, err)
	h, err := m.dev.NewHost(size)
	noError(t, err)
	e, err := m.dev.NewEvent(false)
	noError(t, err)
	want := make([]byte, size)
	for i := range want {
		want[i] = byte(rng.Uint32())
	}
	noError(t, b.Upload(0, want))
	got := make([]byte, size)
	const seen = 1024 // bytes that the graph looks at
	sight, err := m.dev.NewBuffer(seen)
	noError(t, err)
	graph, err := s.Capture(func() error { return s.Copy(sight, 0, b, 0, seen) })
	noError(t, err)
	for round := range rounds {
		for i := range h.Bytes() {
			h.Bytes()[i] = byte(rng.Uint32())
		}
		all := ""
		for range 2 + rng.IntN(9) {
			align := pick(rng, 4, 4, 8, 16, 16, 16, 256)
			n := 4 * (1 + rng.IntN(pick(rng, 5, 64, most/4)))
			if rng.IntN(2) == 0 {
				n = pick(rng, 4, 16, 4080, 4092, 4096, 4100, 4112, 8192, most)
			}
			place := func() int { return rng.IntN((size-n)/align+1) * align }
			to, from := place(), place()
			if rng.IntN(3) == 0 {
				from += 4 * rng.IntN(min(4, (size-n-from)/4+1)) // another alignment
			}
			if rng.IntN(2) == 0 {
				noError(t, s.Upload(b, int64(to), h, from, n))
				copy(want[to:][:n], h.Bytes()[from:])
			} else if to+n <= from || from+n <= to {
				noError(t, s.Copy(b, int64(to), b, int64(from), int64(n)))
				copy(want[to:][:n], want[from:][:n])
			}
			all += fmt.Sprintf(" %d:%d:%d", to, from, n)
		}
		noError(t, s.Record(e))
		if rng.IntN(2) == 0 {
			noError(t, s.Launch(graph))
			noError(t, e.Synchronize())
			noError(t, sight.Download(got[:seen], 0))
			if !bytes.Equal(got[:seen], want[:seen]) {
				t.Fatalf("round %d: copies to, from, bytes%s: the graph has seen others", round, all)
			}
			for i := range h.Bytes() {
				h.Bytes()[i] = byte(rng.Uint32())
			}
			noError(t, s.Launch(graph))
			noError(t, s.Synchronize())
		}
		noError(t, e.Synchronize())
		noError(t, b.Download(got, 0))
		if !bytes.Equal(got, want) {
			t.Fatalf("round %d: copies to, from, bytes%s: other bytes", round, all)
		}
	}
	for _, x := range []interface{ Close() error }{graph, s, b, sight, h, e} {
		noError(t, x.Close())
	}
}

// testCopiesBefore: a plan that comes up together with something else is there when
// launches that overlap begin.
func testCopiesBefore(t *testing.T, m *machine, n int, o options) {
	rng := reftest.Rand(t)
	noError(t, PutOffCopies(m.stream))
	other, err := m.dev.NewBuffer(512)
	noError(t, err)
	plan := m.engine.NewPlan()
	for i := range n {
		o.kv, o.dense = pick(rng, attn.Float16, attn.BFloat16, attn.Float32), rng.IntN(3) == 0
		in := pick(rng, reftest.AllInputs...)
		p := m.newProblem(t, rng, in, o)
		p.randomSchedule()
		noError(t, plan.Build(p.geometry, p.seqs, p.rows))
		plan.spoil(t)
		noError(t, plan.memory.table.Set(0, 0xff, plan.memory.table.Len()))
		noError(t, m.stream.Copy(other, 0, other, 256, 64))
		noError(t, plan.Upload(m.stream))
		m.queue(t, plan, p)
		m.settle(t)
		p.check(t)
		if t.Failed() {
			t.Fatalf("case %d, %v inputs: %v", i, in, p)
		}
		p.close(t)
	}
	noError(t, plan.Close())
	noError(t, other.Close())
}

// BenchmarkGPUCopies is what copies add to each run of a graph that they come before: as
// a decode step has them, with a schedule of some size and its event, or of one size.
func BenchmarkGPUCopies(b *testing.B) {
	m := realGPU(b)
	sampler, err := NewSampler(m.dev)
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
	there, err := m.dev.NewBuffer(1 << 20)
	noError(b, err)
	h, err := m.dev.NewHost(1 << 20)
	noError(b, err)
	var marks [2]*cuda.Event
	for i := range marks {
		marks[i], err = m.dev.NewEvent(false)
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
				s, err := m.dev.NewStream()
				noError(b, err)
				if together {
					noError(b, PutOffCopies(s))
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
