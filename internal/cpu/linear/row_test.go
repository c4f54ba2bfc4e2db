package linear

import (
	"math"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/weight"
)

// withRowKernel has layers of one row computed by dot until the test ends.
func withRowKernel(t *testing.T, k rowKernels, dot func(*rowArgs)) {
	was := linearTiers[cpu.InUse()]
	own := *was
	own.row = k
	for _, d := range []attn.DType{attn.Float32, attn.Float16, attn.BFloat16} {
		own.row.dot[d] = dot
	}
	linearTiers[cpu.InUse()] = &own
	t.Cleanup(func() { linearTiers[cpu.InUse()] = was })
}

// rowLayouts are the ways through weights that there are.
var rowLayouts = []rowKernels{{streams: 8, ahead: 1024, unit: 64 << 10}, {streams: 4, side: math.MaxInt, ahead: 2560, unit: 256 << 10}, {streams: 4, unit: 1}}

// TestRowPieces: threads compute each feature of each layer once, however many they are and whoever is held up.
func TestRowPieces(t *testing.T) {
	rng := reftest.Rand(t)
	cputest.SetProcs(t, 4)
	w := make([]float32, 1<<17)
	for _, k := range rowLayouts {
		withRowKernel(t, k, func(a *rowArgs) {
			for r := range a.rows {
				for s := range k.streams {
					if s > 0 && a.yStep == 0 {
						break
					}
					*(*float32)(unsafe.Add(a.y, r*a.yRow+s*a.yStep)) += 1
				}
				if uintptr(a.w)/cpu.CacheLine%5 == 0 {
					runtime.Gosched()
				}
			}
		})
		for i := range 40 {
			in := 1 + rng.IntN(300)
			var all []Operands[float32]
			for range 1 + rng.IntN(3) {
				out := rng.IntN(len(w) / in)
				if rng.IntN(4) == 0 {
					out = rng.IntN(min(40, out+1))
				}
				o := Operands[float32]{Rows: 1, In: in, Out: out, X: w[:in], W: weight.Matrix{Format: weight.Float32, Ptr: unsafe.Pointer(&w[0]), Len: len(w)}, Y: make([]float32, out)}
				if len(all) == 1 && i%4 == 0 { // the second waits for the first
					o.Out, o.Y, o.Times = all[0].Out, make([]float32, all[0].Out), all[0].Y
				}
				all = append(all, o)
			}
			runtime.GOMAXPROCS(1 + rng.IntN(4))
			if err := RunAll(cpu.Default(), all); err != nil {
				t.Fatal(err)
			}
			for j, o := range all {
				for f, v := range o.Y {
					if v != 1 {
						t.Fatalf("%+v, %d of %d layers, %d x %d: feature %d was computed %v times", k, j, len(all), o.Out, in, f, v)
					}
				}
			}
		}
	}
}

// TestRowAhead: a thread asks for each cache line of weights once before it reads it, but for the first ones, and for none that it
// does not read.
func TestRowAhead(t *testing.T) {
	cputest.SetProcs(t, 1)
	for _, k := range rowLayouts[:2] {
		for _, in := range []int{128, 512, 1024} {
			type line struct{ asked, read bool }
			lines := map[uintptr]*line{}
			of := func(p uintptr) *line {
				if lines[p] == nil {
					lines[p] = new(line)
				}
				return lines[p]
			}
			unasked, twice := 0, 0
			withRowKernel(t, k, func(a *rowArgs) {
				for r := range a.rows {
					for i := range a.within + a.beyond {
						for s := range k.streams {
							w := uintptr(a.w) + uintptr(r*(2*in+a.wSkip)+s*a.wStep)
							l, ahead := of(w+uintptr(cpu.CacheLine*i)), w+uintptr(cpu.CacheLine*(i+a.beyond))
							if !l.asked {
								unasked++
							}
							l.read = true
							if i >= a.within && r < a.rows-1 {
								ahead += uintptr(a.next)
							} else if i >= a.within {
								ahead += uintptr(a.behind)
							}
							if l := of(ahead); l.asked {
								twice++
							} else {
								l.asked = true
							}
						}
					}
				}
			})
			w := make([]uint16, 1024*in)
			o := Operands[float32]{Rows: 1, In: in, Out: 512, X: make([]float32, in), W: weight.Matrix{Format: weight.BFloat16, Ptr: unsafe.Pointer(&w[0]), Len: 512 * in}, Y: make([]float32, 512)}
			other := o
			other.W, other.Out, other.Y = weight.Matrix{Format: weight.BFloat16, Ptr: unsafe.Pointer(&w[512*in]), Len: 512 * in}, 512, make([]float32, 512)
			if err := RunAll(cpu.Default(), []Operands[float32]{o, other}); err != nil {
				t.Fatal(err)
			}
			for p, l := range lines {
				if !l.read {
					t.Fatalf("%+v, rows of %d: the line at %d was asked for, and not read", k, in, p)
				}
			}
			first := k.streams * min(k.ahead/cpu.CacheLine, 2*in/cpu.CacheLine)
			if unasked != first || twice > first || len(lines) != 1024*2*in/cpu.CacheLine {
				t.Errorf("%+v, rows of %d: %d lines, of which %d were not asked for and %d twice; want %d and %d", k, in, len(lines), unasked, twice, first, first)
			}
		}
	}
}

// TestRowPrefetch: a thread that waits for the next layer of one row asks for the weights that it is to read there, as they followed
// the last time, and for none that are others'.
func TestRowPrefetch(t *testing.T) {
	cputest.SetProcs(t, 2)
	var e cpu.Engine
	defer e.Close()
	var mu sync.Mutex
	asked := map[uintptr]bool{}
	k := rowKernels{streams: 8, ahead: 1024, unit: 64 << 10, fetch: func(p uintptr, n int) {
		mu.Lock()
		defer mu.Unlock()
		asked[p] = true
		if n != cpu.PrefetchBytes {
			t.Errorf("%d bytes at a time", n)
		}
	}}
	for _, idle := range []int{3 * cpu.PrefetchBytes, 1 << 30} { // some of a range, and all of it
		k.idle = idle
		testRowPrefetch(t, &e, k, &mu, asked)
	}
}

func testRowPrefetch(t *testing.T, e *cpu.Engine, k rowKernels, mu *sync.Mutex, asked map[uintptr]bool) {
	const half = 32 * 2048 * 4 // bytes that the helper reads of a layer
	bytes := min(k.idle, half)
	var layers []Operands[float32]
	for range 3 {
		w := make([]float32, 64*2048)
		layers = append(layers, Operands[float32]{
			Rows: 1, In: 2048, Out: 64, X: make([]float32, 2048), W: weight.Matrix{Format: weight.Float32, Ptr: unsafe.Pointer(&w[0]), Len: len(w)}, Y: make([]float32, 64),
		})
	}
	wait := func(d time.Duration) {
		for until := time.Now().Add(d); time.Now().Before(until); {
			runtime.Gosched()
		}
	}
	withRowKernel(t, k, func(*rowArgs) { wait(10 * time.Microsecond) })
	// The helper may sleep or come late, so that the caller does what it was to do: then it asks for nothing.
	for try := 0; ; try++ {
		all := 0
		for i := range layers {
			mu.Lock()
			clear(asked)
			mu.Unlock()
			if err := Run(e, &layers[i]); err != nil {
				t.Fatal(err)
			}
			wait(100 * time.Microsecond)
			mu.Lock()
			parts := 0
			for p := range asked {
				from := slices.IndexFunc(layers, func(l Operands[float32]) bool {
					begins := uintptr(l.W.Ptr) + half
					return p >= begins && p < begins+uintptr(bytes) && (p-begins)%cpu.PrefetchBytes == 0
				})
				if from < 0 {
					t.Errorf("behind layer %d %#x was asked for", i, p)
				}
				if from == (i+1)%len(layers) {
					parts++
				}
			}
			if parts == bytes/cpu.PrefetchBytes {
				all++
			}
			mu.Unlock()
		}
		if all == len(layers) {
			return
		}
		if try == 1000 {
			t.Fatalf("%d of %d layers were asked for in time", all, len(layers))
		}
	}
}

// TestRowScratch: calls whose number of threads falls and rises use the same scratch.
func TestRowScratch(t *testing.T) {
	cputest.SetProcs(t, 4)
	withRowKernel(t, rowLayouts[0], func(*rowArgs) {})
	e := new(cpu.Engine)
	defer e.Close()
	w := make([]float32, 1<<20)
	for range 50 {
		for _, out := range []int{1, len(w) / 64} {
			o := &Operands[float32]{Rows: 1, In: 64, Out: out, X: w[:64], W: weight.Matrix{Format: weight.Float32, Ptr: unsafe.Pointer(&w[0]), Len: 64 * out}, Y: make([]float32, out)}
			if err := Run(e, o); err != nil {
				t.Fatal(err)
			}
		}
	}
	l := cpu.Own[kept](e).runs.Get()
	if n := len(l.row.args); n > 4 {
		t.Errorf("%d scratches of at most 4 threads", n)
	}
}
