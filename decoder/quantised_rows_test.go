package decoder

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/nn"

	"gorgonia.org/tensor"
)

// quantisedTexts returns the shipped model, texts of its own, and a function that returns the mean of -log p of a text's tokens.
func quantisedTexts(t *testing.T) (m *Model, ids []int, surprise func(o Options, ids []int) float64) {
	m = openCheckpoint(t, "../tiny")
	for _, c := range readShippedGolden(t).Greedy {
		ids = append(append(ids, c.IDs...), c.Next...)
	}
	if len(ids) < 100 {
		t.Fatalf("%d tokens", len(ids))
	}
	return m, ids, func(o Options, ids []int) (sum float64) {
		o.Batch = 128
		p, err := modelEngine(t, m, o).LogProbs(context.Background(), ids)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range p {
			sum -= p
		}
		return sum / float64(len(p))
	}
}

// TestQuantisedRows: with rows that are quantised, the shipped model predicts texts of its own nearly as well, and not equally well. Short texts
// have the same bits as without.
func TestQuantisedRows(t *testing.T) {
	m, ids, surprise := quantisedTexts(t)
	for _, c := range []struct {
		weights tensor.Dtype
		most    float64
	}{{tensor.Int8, 0.01}, {la.E4M3, 0.05}} {
		o := Options{Weights: c.weights}
		quantised := o
		quantised.QuantisedRows = true
		want := surprise(o, ids)
		if off := math.Abs(surprise(quantised, ids) - want); off == 0 || off > c.most {
			t.Errorf("weights of %v: the mean of -log p is off by %v of %v", c.weights, off, want)
		}
		if want, got := surprise(o, ids[:40]), surprise(quantised, ids[:40]); got != want {
			t.Errorf("weights of %v: the mean of -log p of a short text is %v, want %v", c.weights, got, want)
		}
	}
	for _, c := range []struct {
		o    Options
		says string
	}{
		{Options{}, "no linear layer has weights of int8"}, {Options{Weights: nn.Int4}, "no linear layer has weights of int8"},
		{Options{Weights: tensor.Int8, Exact: true}, "Options.Exact"}, {Options{Weights: tensor.Int8, BatchInvariant: true}, "Options.BatchInvariant"},
	} {
		c.o.QuantisedRows = true
		if e, err := m.Engine(c.o); !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%v, want %q", err, c.says)
			if err == nil {
				e.Close()
			}
		}
	}
}

// TestGPUQuantisedRows: a GPU of compute capability 9.0 predicts texts as well as the CPU, and another one refuses.
func TestGPUQuantisedRows(t *testing.T) {
	gpu := devicetest.Open(t)
	m, ids, surprise := quantisedTexts(t)
	for _, w := range []tensor.Dtype{tensor.Int8, la.E4M3} {
		o := Options{Weights: w, Cache: la.Float16, QuantisedRows: true}
		want := surprise(o, ids)
		if o.Device = gpu; gpu.Members()[0].Capability != 90 {
			if _, err := m.Engine(o); !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "want 9.0") {
				t.Errorf("%v", err)
			}
			return
		}
		if got := surprise(o, ids); !(math.Abs(got-want) <= 0.005) {
			t.Errorf("weights of %v: the mean of -log p is %v on a GPU, want %v", w, got, want)
		}
	}
}
