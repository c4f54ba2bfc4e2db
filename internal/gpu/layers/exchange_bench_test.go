package layers

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
)

// BenchmarkGPUsExchange replays recorded exchanges of two, four and eight GPUs, and as many launches that do nothing.
func BenchmarkGPUsExchange(b *testing.B) {
	for _, members := range []int{2, 4, 8} {
		b.Run(fmt.Sprintf("GPUs=%d", members), func(b *testing.B) {
			r := exchangeOf(b, enginetest.RealGroup(b, members), 0)
			for _, kib := range []int{8, 16, 64, 128, 256, 320, 448, 512, 1 << 10, 2 << 10, 32 << 10} {
				r.benchmarks(b, kib)
			}
		})
	}
}

// benchmarks are of all operations whose operands have so many bytes.
func (r *exchangeGPUs) benchmarks(b *testing.B, kib int) {
	const rounds, dim = 64, 128
	n, members := kib<<10/4, len(r.devs)
	heads := n / (dim + 1) / members * members
	o, g := &AllReduce{Rows: 1, N: n}, &AllGather{Rows: 1, Columns: make([]int, members)}
	s := &PartStates{Rows: 1, Heads: heads, Dim: dim, Places: members}
	held := make([][]gpu.Memory, members)
	for m := range r.devs {
		g.Columns[m] = n / members
		o.X = append(o.X, r.put(b, m, make([]float32, n)))
		o.Y = append(o.Y, r.put(b, m, make([]float32, n)))
		s.LSE = append(s.LSE, r.put(b, m, make([]float32, heads)))
		held[m] = []gpu.Memory{o.X[m], o.Y[m], s.LSE[m]}
	}
	g.Y = o.Y
	part := func(l []gpu.Memory, elements int) (parts []gpu.Memory) {
		for _, m := range l {
			m.Len = elements
			parts = append(parts, m)
		}
		return parts
	}
	g.X, s.Out, s.Y = part(o.X, n/members), part(o.X, heads*dim), part(o.Y, heads*dim)
	columns, own := *o, *s // each member gets its columns, or its heads
	columns.Scatter, own.Scatter = true, true
	for _, c := range []struct {
		name  string
		queue func(m int) error
	}{
		{"all-reduce", func(m int) error { return r.engines[m].AllReduce(r.devs[m].Stream, r.x, o, m) }},
		{"all-gather", func(m int) error { return r.engines[m].AllGather(r.devs[m].Stream, r.x, g, m) }},
		{"merge", func(m int) error { return r.x.MergeParts(r.devs[m].Stream, s, m) }},
		{"reduce-scatter", func(m int) error { return r.engines[m].AllReduce(r.devs[m].Stream, r.x, &columns, m) }},
		{"merge-scatter", func(m int) error { return r.x.MergeParts(r.devs[m].Stream, &own, m) }},
	} {
		for _, way := range []string{"words", "in place"} {
			r.x.few = fewFloats{}
			if way == "words" {
				if r.x.few = allFew(exchangeFew / 4); n > exchangeFew/4 {
					continue
				}
			}
			b.Run(fmt.Sprintf("%s/%s/KiB=%d", c.name, way, kib), func(b *testing.B) { r.benchmark(b, rounds, c.queue) })
		}
	}
	b.Run(fmt.Sprintf("nothing/KiB=%d", kib), func(b *testing.B) {
		r.benchmark(b, rounds, func(m int) error {
			d := r.engines[m]
			p := allReduceParams{}
			return launchExchange(d, r.devs[m].Stream, r.x, r.x.kernels[m].nothing, d.exchangeGrid(r.x, n/4), &p, nil)
		})
	})
	closing(b, held)()
}

// benchmark replays a recording of so many rounds.
func (r *exchangeGPUs) benchmark(b *testing.B, rounds int, queue func(member int) error) {
	graph, err := r.capture(func(m int) error {
		for range rounds {
			if err := queue(m); err != nil {
				return err
			}
		}
		return nil
	})
	noError(b, err)
	s := r.devs[0].Stream
	begin, err := r.devs[0].Dev.NewEvent(true)
	noError(b, err)
	end, err := r.devs[0].Dev.NewEvent(true)
	noError(b, err)
	var times []float64
	for range 25 {
		noError(b, s.Record(begin))
		noError(b, s.Launch(graph))
		noError(b, s.Record(end))
		noError(b, s.Synchronize())
		took, err := end.Since(begin)
		noError(b, err)
		times = append(times, float64(took.Nanoseconds())/1e3/float64(rounds))
	}
	slices.Sort(times)
	b.ReportMetric(times[len(times)/2], "us/round")
	b.ReportMetric(times[0], "us/round-least")
	b.ReportMetric(0, "ns/op")
	noError(b, r.x.Failed())
	noError(b, graph.Close())
}

// BenchmarkGPUsChoice replays recorded choices of tokens of OPT's logits, of which two GPUs have a half each: the most likely one,
// and a drawn one, which each GPU chooses of all logits; beside it the gathering of these alone.
func BenchmarkGPUsChoice(b *testing.B) {
	const rounds, vocab = 64, 50272
	r := exchangeOf(b, enginetest.RealGroup(b, 2), 0)
	for _, rows := range []int{1, 4, 16} {
		rng := rand.New(rand.NewPCG(1, 2))
		best := &AllArgMax{Rows: rows, Columns: []int{vocab / 2, vocab / 2}}
		all := &AllGather{Rows: rows, Columns: best.Columns}
		settings, numbers := slices.Repeat([]Setting{{Temperature: 1, TopP: 0.95, TopK: 50}}, rows), slices.Repeat([]float64{0.5}, rows)
		var samplers [2]*Sampler
		var drawn [2]Samples
		var held [2][]gpu.Memory
		for m := range r.devs {
			x := make([]float32, rows*vocab/2)
			randoms(rng, x, 3)
			raw := func(data []byte) gpu.Bytes {
				of := r.devs[m].Put(b, data, attn.Float32)
				held[m] = append(held[m], of)
				return gpu.Bytes{Buffer: of.Buffer, Offset: of.Offset}
			}
			best.X = append(best.X, r.put(b, m, x))
			all.Y = append(all.Y, r.put(b, m, make([]float32, rows*vocab)))
			held[m] = append(held[m], best.X[m], all.Y[m])
			best.IDs = append(best.IDs, raw(make([]byte, 4*rows)))
			var err error
			samplers[m], err = NewSampler(r.devs[m].Dev)
			noError(b, err)
			drawn[m] = Samples{Logits: all.Y[m], Rows: rows, Vocab: vocab, Stride: vocab, Settings: raw(SettingBytes(settings)), Random: raw(gpu.BytesOf(numbers)), IDs: best.IDs[m]}
		}
		all.X = best.X
		gather := func(m int) error { return r.engines[m].AllGather(r.devs[m].Stream, r.x, all, m) }
		for name, queue := range map[string]func(m int) error{
			"greedy": func(m int) error { return r.engines[m].AllArgMax(r.devs[m].Stream, r.x, best, m) },
			"gather": gather,
			"drawn":  func(m int) error { return errors.Join(gather(m), samplers[m].Run(r.devs[m].Stream, &drawn[m])) },
		} {
			b.Run(fmt.Sprintf("%s/rows=%d", name, rows), func(b *testing.B) { r.benchmark(b, rounds, queue) })
		}
		closing(b, held[:])()
	}
}
