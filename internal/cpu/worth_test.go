package cpu

import (
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"
	"gorgonia.org/leanattention/internal/attn"
)

// TestThreadsFor says how many threads and shares of attention what is worth, of 2, 8, 16 and 32.
func TestThreadsFor(t *testing.T) {
	defer forceTier(bestTier())()
	if inUse == tierGo {
		t.Skip("the numbers are those of assembly")
	}
	attention := func(heads, keys, dim, size int) float64 {
		n := 2 * float64(heads) * float64(keys) * float64(dim)
		return workOf(n*float64(size), n)
	}
	linear := func(rows, in, out, size int) float64 {
		n := float64(in) * float64(out)
		return workOf(n*float64(size), n*float64(rows))
	}
	norm := func(rows, n int) float64 { return float64(rows) * float64(n) * vectorTiers[inUse].normNanos }
	stored := func(rows, n int) float64 { return float64(rows) * float64(n) * vectorTiers[inUse].appendNanos }
	for _, c := range []struct {
		name    string
		work    float64
		threads [4]int
		shares  [4]int
	}{
		{"a norm of 768 elements", norm(1, 768), [4]int{1, 1, 1, 1}, [4]int{1, 1, 1, 1}},
		{"a norm of 16 rows of 2048", norm(16, 2048), [4]int{2, 7, 7, 7}, [4]int{1, 1, 1, 1}},
		{"a norm of 515 rows of 777", norm(515, 777), [4]int{2, 8, 16, 25}, [4]int{1, 1, 1, 1}},
		{"an activation of 16 rows of 8192", 16 * 8192 * elementNanos, [4]int{2, 8, 16, 29}, [4]int{2, 1, 1, 1}},
		{"keys and values of a token, 2048 each", stored(1, 4096), [4]int{1, 1, 1, 1}, [4]int{1, 1, 1, 1}},
		{"keys and values of 500 tokens, 2048 each", stored(500, 4096), [4]int{2, 8, 16, 32}, [4]int{4, 2, 1, 1}},
		{"12 heads x 16 x 64, float32", attention(12, 16, 64, 4), [4]int{2, 4, 4, 4}, [4]int{1, 1, 1, 1}},
		{"12 heads x 128 x 64, float32", attention(12, 128, 64, 4), [4]int{2, 8, 12, 12}, [4]int{1, 1, 1, 1}},
		{"12 heads x 1024 x 64, float32", attention(12, 1024, 64, 4), [4]int{2, 8, 16, 32}, [4]int{3, 1, 1, 1}},
		{"12 heads x 1024 x 64, float16", attention(12, 1024, 64, 2), [4]int{2, 8, 16, 25}, [4]int{1, 1, 1, 1}},
		{"32 heads x 8192 x 128, float16", attention(32, 8192, 128, 2), [4]int{2, 8, 16, 32}, [4]int{4, 4, 4, 4}},
		{"a layer of 768 x 768, float16", linear(1, 768, 768, 2), [4]int{2, 8, 15, 15}, [4]int{1, 1, 1, 1}},
		{"a layer of 2048 x 2048, float16", linear(1, 2048, 2048, 2), [4]int{2, 8, 16, 32}, [4]int{4, 1, 1, 1}},
		{"a layer of 64 x 64, float32", linear(1, 64, 64, 4), [4]int{1, 1, 1, 1}, [4]int{1, 1, 1, 1}},
	} {
		for i, procs := range []int{2, 8, 16, 32} {
			n := threadsOf(c.work, procs)
			if n != c.threads[i] {
				t.Errorf("%s: %d threads of %d, want %d", c.name, n, procs, c.threads[i])
			}
			if s := sharesFor(c.work, n, shareNanos); s != c.shares[i] {
				t.Errorf("%s: %d shares a thread of %d, want %d", c.name, s, procs, c.shares[i])
			}
		}
	}
	if n := threadsOf(math.Inf(1), 1); n != 1 {
		t.Errorf("%d threads of one", n)
	}
	for work := 1.0; work < 1e9; work *= 1.1 { // more work, or more threads, are never worth fewer
		for procs := 1; procs <= 64; procs++ {
			n := threadsOf(work, procs)
			if n < 1 || n > procs || n > threadsOf(1.1*work, procs) || n > threadsOf(work, procs+1) {
				t.Fatalf("%v ns: %d threads of %d", work, n, procs)
			}
		}
	}
}

// Plans, layers and rows take as many threads as they are worth, and a given number of workers is kept.
func TestWorthIsAsked(t *testing.T) {
	defer goleak.VerifyNone(t)
	setProcs(t, 32)
	build := func(keys, workers int) *Plan {
		c := benchmark{dtype: attn.Float32, seqs: 1, heads: 12, kvHeads: 12, queries: 1, keys: keys, dim: 64, workers: workers}
		g, seqs, _ := setUp[float32](c)
		p := new(Plan)
		if err := p.Build(g, seqs); err != nil {
			t.Fatal(err)
		}
		return p
	}
	n := 2.0 * 12 * 16 * 64
	want := threadsFor(workOf(4*n, n))
	if want < 2 || want > 31 {
		t.Fatalf("%d threads: the case says nothing", want)
	}
	if p := build(16, 0); p.threads != want || p.Workers() > want {
		t.Errorf("%d threads, %d workers, want %d", p.threads, p.Workers(), want)
	}
	if p := build(16, 9); p.threads != want || p.Workers() != 9 {
		t.Errorf("%d threads, %d workers of 9 that were asked for", p.threads, p.Workers())
	}
	var e Engine
	defer e.Close()
	for _, rows := range []int{1, 16, 515} {
		ran := make([]atomic.Int32, rows)
		Each(&e, rows, 777, func(row int) { ran[row].Add(1) })
		for i := range ran {
			if ran[i].Load() != 1 {
				t.Errorf("row %d of %d ran %d times", i, rows, ran[i].Load())
			}
		}
		if most := min(threadsFor(float64(rows)*777*elementNanos), rows) - 1; helpersOf(&e.pool) > max(most, 0) {
			t.Errorf("%d rows: %d helpers", rows, helpersOf(&e.pool))
		}
	}
	for _, rows := range []int{1, 515} {
		func() {
			defer func() {
				if r := recover(); fmt.Sprint(r) != "row 0" {
					t.Errorf("a panic in a row came out as %v", r)
				}
			}()
			Each(&e, rows, 777, func(row int) {
				if row == 0 {
					panic("row 0")
				}
			})
		}()
	}
}

// How many threads carry out a plan changes no bit, and scratch is theirs, however many workers there are.
func TestThreadsChangeNoBits(t *testing.T) {
	c := benchmark{dtype: attn.Float32, seqs: 3, heads: 4, kvHeads: 2, queries: 1, keys: 700, dim: 32, page: 16, workers: 13}
	g, seqs, o := setUp[float32](c)
	var p Plan
	if err := p.Build(g, seqs); err != nil {
		t.Fatal(err)
	}
	var want []float32
	for _, procs := range []int{1, 2, 3, 8} {
		setProcs(t, procs)
		for _, threads := range []int{1, 2, 5, 13} {
			p.threads = threads
			clear(o.Out)
			var e Engine
			defer e.Close()
			if err := Run(&e, &p, o); err != nil {
				t.Fatal(err)
			}
			if want == nil {
				want = slices.Clone(o.Out)
			} else if !slices.Equal(want, o.Out) {
				t.Errorf("%d of %d threads: other bits than one", threads, runtime.GOMAXPROCS(0))
			}
			if ws := e.f32.get(); len(ws.threads) != threads || len(ws.arrived) != p.Workers() {
				t.Errorf("%d threads, %d workers: scratch for %d, counters for %d", threads, p.Workers(), len(ws.threads), len(ws.arrived))
			}
		}
	}
}
