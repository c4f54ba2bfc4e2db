package cpu

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/gonum"
	"gorgonia.org/leanattention/internal/attn"
)

// contender is something to measure beside others.
type contender struct {
	name string
	work float64 // of a run: bytes, or operations
	run  func()
	best time.Duration
}

// compete runs the contenders in turn until the benchmark has had its time, and prints the best rate of
// each in units of 1e9, and as a share of the first's. In turn and the best: so
// what else the machine does meanwhile falls out of the comparison, as far as it can.
func compete(b *testing.B, unit string, contenders []*contender) {
	for b.Loop() {
		for _, c := range contenders {
			begin := time.Now()
			c.run()
			if d := time.Since(begin); c.best == 0 || d < c.best {
				c.best = d
			}
		}
	}
	fmt.Printf("\n%s\n", b.Name())
	first := 0.0
	for i, c := range contenders {
		rate := c.work / c.best.Seconds() / 1e9
		if i == 0 {
			first = rate
		}
		fmt.Printf("%-28s %7.1f %s  %4.0f%%\n", c.name, rate, unit, 100*rate/first) // a log would be cut short
	}
	b.ReportMetric(0, "ns/op") // of all together: nothing to look at
}

// with returns run with the kernels of a tier.
func with(t tier, run func() error) func() {
	return func() {
		defer forceTier(t)()
		if err := run(); err != nil {
			panic(err)
		}
	}
}

// decode returns a step of one query over all that fits into mem, keys first, by so many workers, each on a thread; 0: as many
// as it is worth.
func decode(e *Engine, mem []byte, d attn.DType, heads, kvHeads, dim, workers int) func() error {
	keys := len(mem) / (2 * kvHeads * dim * d.Size())
	n := kvHeads * keys * dim
	at := attn.PageStrides{Page: n, Head: keys * dim, Row: dim}
	g := attn.Problem{
		Heads: heads, KVHeads: kvHeads, Dim: dim, ValueDim: dim, KV: d,
		Query: attn.Strides{Row: heads * dim, Head: dim}, Out: attn.Strides{Row: heads * dim, Head: dim},
		Key: at, Value: at, PageTokens: keys, Scale: 0.125, Workers: workers,
	}
	o := &Operands[float32]{
		Q: make([]float32, heads*dim), Out: make([]float32, heads*dim),
		K: Buffer{d, unsafe.Pointer(&mem[0]), n}, V: Buffer{d, unsafe.Pointer(&mem[n*d.Size()]), n},
	}
	for i := range o.Q {
		o.Q[i] = rand.Float32() - 0.5
	}
	p := new(Plan)
	if err := p.Build(g, []attn.Sequence{{Queries: 1, Keys: keys, Pages: []int32{0}}}); err != nil {
		panic(err)
	}
	if workers > 0 {
		p.threads = workers
	}
	return func() error { return Run(e, p, o) }
}

// BenchmarkCeiling compares decoding with reading the same bytes and only summing them:
//
//	go test -run '^$' -bench Ceiling -benchtime 20x ./internal/cpu
func BenchmarkCeiling(b *testing.B) {
	for _, size := range []int{256 << 20, 12 * 1024 * 64 * 4 * 2} { // from memory; in cache
		for _, d := range []attn.DType{attn.Float32, attn.Float16, attn.BFloat16} {
			buf := noise(d, size/d.Size())
			mem := unsafe.Slice((*byte)(buf.Ptr), size)
			for _, workers := range []int{1, 2, 4, 8, 16, 32} {
				if workers > max(2, runtime.NumCPU()) {
					break
				}
				b.Run(fmt.Sprintf("%dMB/%v/%dworkers", size>>20, d, workers), func(b *testing.B) {
					defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(workers))
					var e Engine
					defer e.Close()
					list := []*contender{{name: "sum", work: float64(size), run: with(bestTier(), func() error {
						_, err := ReadSum(&e, mem)
						return err
					})}}
					for _, c := range []struct{ heads, kvHeads, dim int }{
						{12, 12, 64}, {12, 12, 128}, {32, 8, 64}, {32, 8, 128}, {64, 8, 64}, {64, 8, 128},
					} {
						step := decode(&e, mem, d, c.heads, c.kvHeads, c.dim, workers)
						chosen := decode(&e, mem, d, c.heads, c.kvHeads, c.dim, 0)
						list = append(list, &contender{
							name: fmt.Sprintf("%d/%d heads of %d, chosen", c.heads, c.kvHeads, c.dim),
							work: float64(size), run: with(bestTier(), chosen),
						})
						for t := range bestTier() + 1 {
							if t == tierGo && c.heads > 12 || workers > 2 && t < bestTier() {
								continue // slow, and known to be
							}
							list = append(list, &contender{
								name: fmt.Sprintf("%d/%d heads of %d, %v", c.heads, c.kvHeads, c.dim, t),
								work: float64(size), run: with(t, step),
							})
						}
					}
					compete(b, "GB/s", list)
				})
			}
		}
	}
}

// BenchmarkWorkers is a small step in cache by the number of workers, each on a thread: where more of them make it
// slower, and what is chosen.
//
//	go test -run '^$' -bench 'BenchmarkWorkers' -benchtime 100x ./internal/cpu
func BenchmarkWorkers(b *testing.B) {
	for _, keys := range []int{32, 128, 256, 1024, 4096} {
		size := 12 * keys * 64 * 4 * 2
		buf := noise(attn.Float32, size/4)
		mem := unsafe.Slice((*byte)(buf.Ptr), size)
		b.Run(fmt.Sprintf("12x%dx64", keys), func(b *testing.B) {
			var e Engine
			defer e.Close()
			var list []*contender
			for _, workers := range []int{0, 1, 2, 4, 6, 8, 12, 16, 24, 32} {
				if workers > runtime.NumCPU() {
					break
				}
				step := decode(&e, mem, attn.Float32, 12, 12, 64, workers)
				name := fmt.Sprintf("%d workers", workers)
				if workers == 0 {
					n := 2 * 12 * float64(keys) * 64
					name = fmt.Sprintf("chosen: %d threads", threadsFor(workOf(4*n, n)))
				}
				list = append(list, &contender{name: name, work: float64(size), run: func() {
					for range 20 { // so that helpers are awake
						if err := step(); err != nil {
							panic(err)
						}
					}
				}})
				list[len(list)-1].work *= 20
			}
			compete(b, "GB/s", list)
		})
	}
}

// BenchmarkMatrix compares causal prefill, softmax included, with the product of the same matrices by
// gonum, which computes nothing else.
func BenchmarkMatrix(b *testing.B) {
	const n, heads = 1024, 12
	for _, dim := range []int{64, 128} {
		b.Run(fmt.Sprintf("d%d", dim), func(b *testing.B) {
			q, k, s := make([]float32, n*dim), make([]float32, n*dim), make([]float32, n*n)
			for _, x := range [][]float32{q, k} {
				for i := range x {
					x[i] = rand.Float32() - 0.5
				}
			}
			var blas1 gonum.Implementation
			list := []*contender{
				{name: "gonum, queries x keys", work: 2 * n * n * float64(dim), run: func() {
					blas1.Sgemm(blas.NoTrans, blas.Trans, n, n, dim, 1, q, dim, k, dim, 0, s, n)
				}},
				{name: "gonum, weights x values", work: 2 * n * n * float64(dim), run: func() {
					blas1.Sgemm(blas.NoTrans, blas.NoTrans, n, dim, n, 1, s, n, k, dim, 0, q, dim)
				}},
			}
			var e Engine
			defer e.Close()
			for _, d := range []attn.DType{attn.Float32, attn.Float16, attn.BFloat16} {
				kv := noise(d, heads*n*dim)
				at := attn.PageStrides{Page: heads * n * dim, Head: n * dim, Row: dim}
				g := attn.Problem{
					Heads: heads, KVHeads: heads, Dim: dim, ValueDim: dim, KV: d,
					Query: attn.Strides{Row: heads * dim, Head: dim}, Out: attn.Strides{Row: heads * dim, Head: dim},
					Key: at, Value: at, PageTokens: n, Scale: 0.125, Mask: attn.Mask{Causal: true},
				}
				o := &Operands[float32]{Q: make([]float32, n*heads*dim), Out: make([]float32, n*heads*dim), K: kv, V: kv}
				for i := range o.Q {
					o.Q[i] = rand.Float32() - 0.5
				}
				p := new(Plan)
				if err := p.Build(g, []attn.Sequence{{Queries: n, Keys: n, Pages: []int32{0}}}); err != nil {
					b.Fatal(err)
				}
				for t := range bestTier() + 1 {
					list = append(list, &contender{
						name: fmt.Sprintf("%v, %v", d, t),
						work: float64(heads) * n * (n + 1) / 2 * 4 * float64(dim),
						run:  with(t, func() error { return Run(&e, p, o) }),
					})
				}
			}
			compete(b, "Gop/s", list)
		})
	}
}
