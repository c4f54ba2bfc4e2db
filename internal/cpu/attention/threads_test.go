package attention

import (
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
)

// Plans, layers and rows use as many threads as pay, and a requested number of workers is kept.
func TestWorthIsAsked(t *testing.T) {
	defer goleak.VerifyNone(t)
	cputest.SetProcs(t, 32)
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
	want := cpu.ThreadsFor(cpu.WorkOf(4*n, n))
	if want < 2 || want > 31 {
		t.Fatalf("%d threads: the case says nothing", want)
	}
	if p := build(16, 0); p.threads != want || p.Workers() > want {
		t.Errorf("%d threads, %d workers, want %d", p.threads, p.Workers(), want)
	}
	if p := build(16, 9); p.threads != want || p.Workers() != 9 {
		t.Errorf("%d threads, %d workers of 9 that were asked for", p.threads, p.Workers())
	}
	var e cpu.Engine
	defer e.Close()
	for _, rows := range []int{1, 16, 515} {
		ran := make([]atomic.Int32, rows)
		cpu.Each(&e, rows, 777, func(row int) { ran[row].Add(1) })
		for i := range ran {
			if ran[i].Load() != 1 {
				t.Errorf("row %d of %d ran %d times", i, rows, ran[i].Load())
			}
		}
		most := min(cpu.ThreadsFor(float64(rows)*777*cpu.ElementNanos), rows) - 1
		if helpers, _ := e.Helpers(); helpers > max(most, 0) {
			t.Errorf("%d rows: %d helpers", rows, helpers)
		}
	}
	for _, rows := range []int{1, 515} {
		func() {
			defer func() {
				if r := recover(); fmt.Sprint(r) != "row 0" {
					t.Errorf("a panic in a row came out as %v", r)
				}
			}()
			cpu.Each(&e, rows, 777, func(row int) {
				if row == 0 {
					panic("row 0")
				}
			})
		}()
	}
}

// The number of threads that run a plan changes no bit. Scratch is per thread, for any number of workers.
func TestThreadsChangeNoBits(t *testing.T) {
	c := benchmark{dtype: attn.Float32, seqs: 3, heads: 4, kvHeads: 2, queries: 1, keys: 700, dim: 32, page: 16, workers: 13}
	g, seqs, o := setUp[float32](c)
	var p Plan
	if err := p.Build(g, seqs); err != nil {
		t.Fatal(err)
	}
	var want []float32
	for _, procs := range []int{1, 2, 3, 8} {
		cputest.SetProcs(t, procs)
		for _, threads := range []int{1, 2, 5, 13} {
			p.threads = threads
			clear(o.Out)
			var e cpu.Engine
			defer e.Close()
			if err := Run(&e, &p, o); err != nil {
				t.Fatal(err)
			}
			if want == nil {
				want = slices.Clone(o.Out)
			} else if !slices.Equal(want, o.Out) {
				t.Errorf("%d of %d threads: other bits than one", threads, runtime.GOMAXPROCS(0))
			}
			if ws := cpu.Own[spares[float32]](&e).runs.Get(); len(ws.threads) != threads || len(ws.arrived) != p.Workers() {
				t.Errorf("%d threads, %d workers: scratch for %d, counters for %d", threads, p.Workers(), len(ws.threads), len(ws.arrived))
			}
		}
	}
}
