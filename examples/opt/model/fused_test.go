package model

import (
	"context"
	"fmt"
	"testing"

	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/examples/opt/tiny"
)

// TestFused: the graph as it was written and the rewritten one have the same
// logits.
func TestFused(t *testing.T) {
	rng := seeded(t)
	w := load(t, small(), rng)
	for _, linear := range []Linear{LeanLinear, StockLinear} {
		texts := prompts(rng, 61, 11, 4)
		var rows [2][][]float32
		for i, asWritten := range []bool{true, false} {
			d := newDecoder(t, w, Options{Capacity: []int{13, 9}, Attention: Fused, Linear: linear, asWritten: asWritten})
			keep := func() {
				for s := range texts {
					rows[i] = append(rows[i], d.Logits(s))
				}
			}
			if err := d.Prefill(context.Background(), texts, nil); err != nil {
				t.Fatal(err)
			}
			keep()
			for _, next := range [][]int{{1, 2}, {3, -1}} {
				if err := d.Step(next); err != nil {
					t.Fatal(err)
				}
				keep()
			}
			if s := d.Stats(); s.Prefill.Passes != 1 || s.Decode.Passes != 2 || s.Decode.Attention <= 0 {
				t.Errorf("statistics %+v", s)
			}
		}
		for i, row := range rows[0] {
			want := make([]float64, len(row))
			for j, x := range row {
				want[j] = float64(x)
			}
			closeTo(t, fmt.Sprintf("row %d", i), rows[1][i], want, 1e-5)
		}
	}
}

// BenchmarkFused is a pass over texts without a cache, by the graph as it was
// written with Gorgonia's nodes and by the rewritten one.
func BenchmarkFused(b *testing.B) {
	for _, m := range []struct {
		name   string
		tokens int
		load   func() (Source, error)
	}{
		{"shipped 256", 256, func() (Source, error) { return hf.OpenFS("shipped", tiny.Files) }},
		{"shipped 1024", 1024, func() (Source, error) { return hf.OpenFS("shipped", tiny.Files) }},
	} {
		source, err := m.load()
		if err != nil {
			b.Fatal(err)
		}
		w, err := Load(source)
		if err != nil {
			b.Fatal(err)
		}
		text := make([]int, m.tokens)
		for i := range text {
			text[i] = 7 * i % w.Config().VocabSize
		}
		for _, asWritten := range []bool{true, false} {
			b.Run(fmt.Sprintf("%s/written %v", m.name, asWritten), func(b *testing.B) {
				d, err := w.NewDecoder(Options{Capacity: []int{m.tokens}, Attention: Fused, asWritten: asWritten})
				if err != nil {
					b.Fatal(err)
				}
				defer d.Close()
				for b.Loop() {
					if err := d.Prefill(context.Background(), [][]int{text}, nil); err != nil {
						b.Fatal(err)
					}
					if err := d.Truncate(0, 0); err != nil {
						b.Fatal(err)
					}
				}
				s := d.Stats().Prefill
				b.ReportMetric(100*s.Attention.Seconds()/s.Time.Seconds(), "%attention")
			})
		}
	}
}
