package main

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/examples/opt/tiny"
	"gorgonia.org/leanattention/nn"
)

// The texts depend neither on the number of rows of a step, nor on other texts in the step.
func TestSteps(t *testing.T) {
	of := opened(t)
	prompts := [][]int{{2, 300, 301, 302, 303, 304, 305}, {2, 700}, {2, 900, 901, 902}}
	generate := func(rows int, prompts ...[]int) [][]int {
		d, err := newModel(of, rows, len(prompts), 256)
		if err != nil {
			t.Fatal(err)
		}
		ids, err := d.generate(prompts, 8, -1, nn.Choice{}, 0)
		if err != nil {
			t.Fatal(err)
		}
		if s := d.cache.Stats(); s.Sequences != 0 || s.FreePages != d.cache.Config().Pages {
			t.Errorf("generate keeps %+v", s)
		}
		if err := d.close(); err != nil {
			t.Fatal(err)
		}
		return ids
	}
	want := generate(16, prompts...)
	for _, rows := range []int{1, 3} {
		if got := generate(rows, prompts...); !slices.EqualFunc(got, want, slices.Equal) {
			t.Errorf("%d rows: %v, want %v", rows, got, want)
		}
	}
	for i, p := range prompts {
		if got := generate(4, p); !slices.Equal(got[0], want[i]) {
			t.Errorf("alone: %v, want %v", got[0], want[i])
		}
	}
}

// A step computes the rows of its sequences, and the logits of as many texts as it has, however many rows the graph has
// and whatever earlier steps have left in its inputs.
func TestRowsThatAreComputed(t *testing.T) {
	const graphRows, most = 64, 8
	d := open(t, graphRows, most)
	computed := func() (rows int) {
		for _, n := range d.next.Graph().AllNodes() {
			if n.Op() != nil && n.Dims() == 2 { // Linears has all its outputs in one vector, whose parts are nodes
				rows = max(rows, n.Value().Shape()[0])
			}
		}
		return rows
	}
	var all, seqs []la.Append
	for range most {
		seq, err := d.cache.NewSequence()
		if err != nil {
			t.Fatal(err)
		}
		all, seqs = append(all, la.Append{Seq: seq, Tokens: graphRows / most}), append(seqs, la.Append{Seq: seq, Tokens: 1})
	}
	random := rand.New(rand.NewPCG(1, 2))
	for _, x := range []struct {
		appends []la.Append
		rows    int
	}{{all, graphRows}, {seqs[2:3], 1}, {seqs[:2], 2}, {[]la.Append{{Seq: seqs[5].Seq, Tokens: 9}, seqs[1]}, 10}, {seqs, most}, {seqs[7:], 1}} {
		next, err := d.run(x.appends, make([]int, x.rows), nn.Choice{}, random)
		if err != nil {
			t.Fatal(err)
		}
		if got := computed(); got != x.rows || len(next) != len(x.appends) || d.next.Value().Shape()[0] != len(x.appends) {
			t.Errorf("%d rows of %d sequences: %d rows are computed, tokens of %v", x.rows, len(x.appends), got, d.next.Value().Shape())
		}
	}
}

// opened is the small model.
func opened(t testing.TB) *decoder.Model {
	t.Helper()
	of, err := decoder.OpenFS("tiny", tiny.Files)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { of.Close() })
	return of
}

// open is a graph of the small model.
func open(t testing.TB, rows, sequences int) *model {
	t.Helper()
	d, err := newModel(opened(t), rows, sequences, 2048)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// A step of one token takes the same time in a graph of one row and in graphs of many rows and sequences. The rounds take
// turns, and times is their medians' ratio to the graph of one row.
func BenchmarkStep(b *testing.B) {
	graphs := []struct{ rows, sequences int }{{1, 1}, {64, 1}, {64, 64}}
	decoders, appends := make([]*model, len(graphs)), make([][]la.Append, len(graphs))
	for i, g := range graphs {
		decoders[i] = open(b, g.rows, g.sequences)
		seq, err := decoders[i].cache.NewSequence()
		if err != nil {
			b.Fatal(err)
		}
		appends[i] = []la.Append{{Seq: seq, Tokens: 1}}
	}
	random := rand.New(rand.NewPCG(1, 2))
	times := make([][]float64, len(graphs))
	for b.Loop() {
		for i, d := range decoders {
			began := time.Now()
			if _, err := d.run(appends[i], []int{2}, nn.Choice{}, random); err != nil {
				b.Fatal(err)
			}
			times[i] = append(times[i], time.Since(began).Seconds())
			if appends[i][0].Seq.Len() == 100 {
				if err := appends[i][0].Seq.Truncate(0); err != nil {
					b.Fatal(err)
				}
			}
		}
	}
	median := func(x []float64) float64 { slices.Sort(x); return x[len(x)/2] }
	one := median(times[0])
	for i, g := range graphs {
		m := median(times[i])
		b.ReportMetric(m*1e3, fmt.Sprintf("ms/%dx%d", g.rows, g.sequences))
		b.ReportMetric(m/one, fmt.Sprintf("times/%dx%d", g.rows, g.sequences))
	}
}

// What cannot be is an error, and no panic.
func TestErrors(t *testing.T) {
	of := opened(t)
	if _, err := newModel(of, 0, 1, 64); err == nil {
		t.Error("a decoder of no rows")
	}
	d, err := newModel(of, 2, 1, 16)
	if err != nil {
		t.Fatal(err)
	}
	defer d.close()
	for name, prompts := range map[string][][]int{
		"two prompts": {{2}, {2}}, "an unknown token": {{1 << 20}}, "a long prompt": {make([]int, 100)}, "an empty one": {{}},
	} {
		if _, err := d.generate(prompts, 2, -1, nn.Choice{}, 0); err == nil {
			t.Errorf("%s: no error", name)
		} else {
			t.Log(err)
		}
		if s := d.cache.Stats(); s.Sequences != 0 || s.FreePages != d.cache.Config().Pages {
			t.Errorf("%s: %+v is left", name, s)
		}
	}
}
