package decoder

import (
	"context"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/devicetest"

	"gorgonia.org/tensor"
)

// BenchmarkStep is a step of one token after 512 others: of the shipped model, and of a model of OPT-125m's shape with weights of
// float16. MB/s counts the weights.
//
//	go test -run '^$' -bench Step ./decoder
func BenchmarkStep(b *testing.B) { benchmarkStep(b, Options{Exact: true}) }

// BenchmarkGPUStep is the same on a GPU.
func BenchmarkGPUStep(b *testing.B) {
	benchmarkStep(b, Options{Device: devicetest.Open(b), Exact: true, Weights: la.Float16, Cache: la.Float16})
}

func benchmarkStep(b *testing.B, o Options) {
	o.Context, o.Batch = 1024, 1
	b.Run("shipped", func(b *testing.B) {
		m := openCheckpoint(b, "../tiny")
		benchmarkEngine(b, modelEngine(b, m, o))
	})
	b.Run("125m", func(b *testing.B) {
		n, err := ReadNetwork([]byte(`{"model_type":"opt"}`), 0)
		if err != nil {
			b.Fatal(err)
		}
		o := o
		o.Weights = la.Float16
		e, err := NewEngine(n, fanWeights{}, o)
		if err != nil {
			b.Fatal(err)
		}
		defer e.Close()
		benchmarkEngine(b, e)
	})
}

func benchmarkEngine(b *testing.B, e *Engine) {
	const before = 512
	s, err := e.newSequence()
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := s.Release(); err != nil {
			b.Error(err)
		}
	}()
	prompt := make([]int, before)
	for i := range prompt {
		prompt[i] = 7 * i % e.network.Sizes().Vocab
	}
	read := func() {
		for s.Len() < before {
			n := min(before-s.Len(), e.rows(false))
			if _, err := e.run([]la.Append{{Seq: s, Tokens: n}}, prompt[s.Len():s.Len()+n], false, false, nil); err != nil {
				b.Fatal(err)
			}
		}
	}
	read()
	bytes := int64(0)
	for w := range tensors(e.network) {
		size := int64(2)
		if len(w.Shape) == 1 {
			size = 4
		}
		bytes += size * int64(tensor.Shape(w.Shape).TotalSize())
	}
	b.SetBytes(bytes)
	b.ReportAllocs()
	for b.Loop() {
		if s.Len() == e.options.Context {
			b.StopTimer()
			if err := s.Truncate(0); err != nil {
				b.Fatal(err)
			}
			read()
			b.StartTimer()
		}
		if _, err := e.run([]la.Append{{Seq: s, Tokens: 1}}, []int{3}, false, false, nil); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkGPUTexts is a token of each of 16 texts of a model of OPT-125m's shape: the most likely one, one that the GPU draws, and
// one that the host draws, since GPUs have no MinP.
//
//	go test -run '^$' -bench GPUTexts -benchtime 200x ./decoder
func BenchmarkGPUTexts(b *testing.B) {
	n, err := ReadNetwork([]byte(`{"model_type":"opt"}`), 0)
	if err != nil {
		b.Fatal(err)
	}
	const texts = 16
	e, err := NewEngine(n, fanWeights{}, Options{Device: devicetest.Open(b), Exact: true, Weights: la.Float16, Cache: la.Float16, Batch: texts, Context: 2048, Tokens: texts * 2048})
	if err != nil {
		b.Fatal(err)
	}
	defer e.Close()
	for _, c := range []struct {
		name     string
		sampling Sampling
	}{
		{"most likely", Sampling{}}, {"drawn", Sampling{Temperature: 0.8, TopK: 50, TopP: 0.95}}, {"drawn by the host", Sampling{Temperature: 0.8, TopK: 50, TopP: 0.95, MinP: 1e-9}},
	} {
		b.Run(c.name, func(b *testing.B) {
			for range 2 { // the first time makes recordings
				var requests []Request
				for i := range texts {
					c.sampling.Seed = uint64(i)
					requests = append(requests, Request{Prompt: []int{2, 100 + i}, Tokens: min(b.N+1, 2000), Ends: []int{}, Sampling: c.sampling})
				}
				b.ResetTimer()
				all, err := e.StartAll(context.Background(), requests...)
				if err != nil {
					b.Fatal(err)
				}
				for _, text := range all {
					if _, err := text.Wait(); err != nil {
						b.Fatal(err)
					}
				}
			}
		})
	}
}

// BenchmarkConvert is weights in other types, ns an element.
func BenchmarkConvert(b *testing.B) {
	const n = 1 << 24
	wide := tensor.New(tensor.WithShape(1, n), tensor.WithBacking(goldenValues("x", n)))
	for _, from := range []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16} {
		x, err := converted(wide, from)
		if err != nil {
			b.Fatal(err)
		}
		for _, to := range []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16} {
			if from == to {
				continue
			}
			b.Run(from.String()+"-"+to.String(), func(b *testing.B) {
				for b.Loop() {
					if _, err := converted(x, to); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/element")
			})
		}
	}
}
