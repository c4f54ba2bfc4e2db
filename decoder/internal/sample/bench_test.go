package sample

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// randomLogits returns logits that resemble a model's logits: a few tokens are far more likely than all other tokens.
func randomLogits(n int) []float32 {
	rng := rand.New(rand.NewPCG(1, 1))
	logits := make([]float32, n)
	for i := range logits {
		logits[i] = float32(2.5 * rng.NormFloat64())
		if rng.IntN(1000) == 0 {
			logits[i] += 8
		}
	}
	return logits
}

// BenchmarkNext measures Next with the vocabulary size of Llama 3.
func BenchmarkNext(b *testing.B) {
	random := randomLogits(128256)
	rising, flat := slices.Sorted(slices.Values(random)), make([]float32, len(random))
	text := make([]int, 1000)
	for i := range text {
		text[i] = i * i % len(random)
	}
	for _, c := range []struct {
		name   string
		logits []float32
		config Config
	}{
		{"greedy", random, Config{}},
		{"greedy/penalties", random, Config{RepetitionPenalty: 1.1}},
		{"temperature", random, Config{Temperature: 1}},
		{"top-k=50", random, Config{Temperature: 1, TopK: 50}},
		{"top-k=50/rising", rising, Config{Temperature: 1, TopK: 50}},
		{"top-k=50/flat", flat, Config{Temperature: 1, TopK: 50}},
		{"top-k=50,top-p=0.9", random, Config{Temperature: 0.6, TopK: 50, TopP: 0.9}},
		{"top-p=0.9", random, Config{Temperature: 0.6, TopP: 0.9}},
		{"top-p=0.9/flat", flat, Config{Temperature: 1, TopP: 0.9}},
		{"min-p=0.05", random, Config{Temperature: 1, MinP: 0.05}},
		{"typical=0.9", random, Config{Temperature: 1, TypicalP: 0.9}},
		{"all", random, Config{Temperature: 0.8, TopK: 50, TopP: 0.95, MinP: 0.05, TypicalP: 0.9, RepetitionPenalty: 1.1}},
	} {
		b.Run(c.name, func(b *testing.B) {
			s := mustNew(b, c.config)
			s.Accept(text...)
			b.ReportAllocs()
			for b.Loop() {
				next(b, s, c.logits)
			}
		})
	}
}

func BenchmarkLogProbs(b *testing.B) {
	logits := randomLogits(128256)
	b.ReportAllocs()
	for b.Loop() {
		if _, _, err := LogProbs(logits, 5, 10); err != nil {
			b.Fatal(err)
		}
	}
}
