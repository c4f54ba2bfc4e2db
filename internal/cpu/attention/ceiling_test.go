package attention

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"unsafe"

	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/gonum"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
)

// with returns run with a tier's kernels.
func with(t cpu.Tier, run func() error) func() {
	return func() {
		defer cpu.ForceTier(t.String())()
		if err := run(); err != nil {
			panic(err)
		}
	}
}

// decode returns a step of one query over as many keys as fit into mem, with keys before values. workers is the number
// of workers and threads; 0: the engine's choice.
func decode(e *cpu.Engine, mem []byte, d attn.DType, heads, kvHeads, dim, workers int) func() error {
	keys := len(mem) / (2 * kvHeads * dim * d.Size())
	n := kvHeads * keys * dim
	at := attn.PageStrides{Page: n, Head: keys * dim, Row: dim}
	g := attn.Problem{
		Heads: heads, KVHeads: kvHeads, Dim: dim, ValueDim: dim, Pages: attn.Separate(d, dim, dim, at, at),
		Query: attn.Strides{Row: heads * dim, Head: dim}, Out: attn.Strides{Row: heads * dim, Head: dim},
		PageTokens: keys, Scale: 0.125, Workers: workers,
	}
	o := &Operands[float32]{
		Q: make([]float32, heads*dim), Out: make([]float32, heads*dim),
		Pages: attn.InPlanes(cpu.Buffer{DType: d, Ptr: unsafe.Pointer(&mem[0]), Len: n}, cpu.Buffer{DType: d, Ptr: unsafe.Pointer(&mem[n*d.Size()]), Len: n}),
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

// BenchmarkCeiling compares decoding with reading and summing the same bytes:
//
//	go test -run '^$' -bench Ceiling -benchtime 20x ./internal/cpu/attention
func BenchmarkCeiling(b *testing.B) {
	for _, size := range []int{256 << 20, 12 * 1024 * 64 * 4 * 2} { // from memory; in cache
		for _, d := range []attn.DType{attn.Float32, attn.Float16, attn.BFloat16} {
			buf := cpu.Buffer{DType: d, Ptr: cputest.Noise(d, size/d.Size()), Len: size / d.Size()}
			mem := unsafe.Slice((*byte)(buf.Ptr), size)
			for _, workers := range []int{1, 2, 4, 8, 16, 32} {
				if workers > max(2, runtime.NumCPU()) {
					break
				}
				b.Run(fmt.Sprintf("%dMB/%v/%dworkers", size>>20, d, workers), func(b *testing.B) {
					defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(workers))
					var e cpu.Engine
					defer e.Close()
					list := []*cputest.Contender{{Name: "sum", Work: float64(size), Run: with(cpu.BestTier(), func() error {
						_, err := cpu.ReadSum(&e, mem)
						return err
					})}}
					for _, c := range []struct{ heads, kvHeads, dim int }{
						{12, 12, 64}, {12, 12, 128}, {32, 8, 64}, {32, 8, 128}, {64, 8, 64}, {64, 8, 128},
					} {
						step := decode(&e, mem, d, c.heads, c.kvHeads, c.dim, workers)
						chosen := decode(&e, mem, d, c.heads, c.kvHeads, c.dim, 0)
						list = append(list, &cputest.Contender{
							Name: fmt.Sprintf("%d/%d heads of %d, chosen", c.heads, c.kvHeads, c.dim),
							Work: float64(size), Run: with(cpu.BestTier(), chosen),
						})
						for t := range cpu.BestTier() + 1 {
							if t == cpu.TierGo && c.heads > 12 || workers > 2 && t < cpu.BestTier() {
								continue // known to be slow
							}
							list = append(list, &cputest.Contender{
								Name: fmt.Sprintf("%d/%d heads of %d, %v", c.heads, c.kvHeads, c.dim, t),
								Work: float64(size), Run: with(t, step),
							})
						}
					}
					cputest.Compete(b, "GB/s", list)
				})
			}
		}
	}
}

// BenchmarkWorkers measures a small step in cache by the number of workers and threads, to show where more workers are
// slower, and the engine's choice.
//
//	go test -run '^$' -bench 'BenchmarkWorkers' -benchtime 100x ./internal/cpu/attention
func BenchmarkWorkers(b *testing.B) {
	for _, keys := range []int{32, 128, 256, 1024, 4096} {
		size := 12 * keys * 64 * 4 * 2
		buf := cpu.Buffer{DType: attn.Float32, Ptr: cputest.Noise(attn.Float32, size/4), Len: size / 4}
		mem := unsafe.Slice((*byte)(buf.Ptr), size)
		b.Run(fmt.Sprintf("12x%dx64", keys), func(b *testing.B) {
			var e cpu.Engine
			defer e.Close()
			var list []*cputest.Contender
			for _, workers := range []int{0, 1, 2, 4, 6, 8, 12, 16, 24, 32} {
				if workers > runtime.NumCPU() {
					break
				}
				step := decode(&e, mem, attn.Float32, 12, 12, 64, workers)
				name := fmt.Sprintf("%d workers", workers)
				if workers == 0 {
					n := 2 * 12 * float64(keys) * 64
					name = fmt.Sprintf("chosen: %d threads", cpu.ThreadsFor(cpu.WorkOf(4*n, n)))
				}
				list = append(list, &cputest.Contender{Name: name, Work: float64(size), Run: func() {
					for range 20 { // to wake the pool's threads
						if err := step(); err != nil {
							panic(err)
						}
					}
				}})
				list[len(list)-1].Work *= 20
			}
			cputest.Compete(b, "GB/s", list)
		})
	}
}

// BenchmarkMatrix compares causal prefill, including softmax, with gonum's product of the same matrices.
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
			list := []*cputest.Contender{
				{Name: "gonum, queries x keys", Work: 2 * n * n * float64(dim), Run: func() {
					blas1.Sgemm(blas.NoTrans, blas.Trans, n, n, dim, 1, q, dim, k, dim, 0, s, n)
				}},
				{Name: "gonum, weights x values", Work: 2 * n * n * float64(dim), Run: func() {
					blas1.Sgemm(blas.NoTrans, blas.NoTrans, n, dim, n, 1, s, n, k, dim, 0, q, dim)
				}},
			}
			var e cpu.Engine
			defer e.Close()
			for _, d := range []attn.DType{attn.Float32, attn.Float16, attn.BFloat16} {
				kv := cpu.Buffer{DType: d, Ptr: cputest.Noise(d, heads*n*dim), Len: heads * n * dim}
				at := attn.PageStrides{Page: heads * n * dim, Head: n * dim, Row: dim}
				g := attn.Problem{
					Heads: heads, KVHeads: heads, Dim: dim, ValueDim: dim, Pages: attn.Separate(d, dim, dim, at, at),
					Query: attn.Strides{Row: heads * dim, Head: dim}, Out: attn.Strides{Row: heads * dim, Head: dim},
					PageTokens: n, Scale: 0.125, Mask: attn.Mask{Causal: true},
				}
				o := &Operands[float32]{Q: make([]float32, n*heads*dim), Out: make([]float32, n*heads*dim), Pages: attn.InPlanes(kv, kv)}
				for i := range o.Q {
					o.Q[i] = rand.Float32() - 0.5
				}
				p := new(Plan)
				if err := p.Build(g, []attn.Sequence{{Queries: n, Keys: n, Pages: []int32{0}}}); err != nil {
					b.Fatal(err)
				}
				for t := range cpu.BestTier() + 1 {
					list = append(list, &cputest.Contender{
						Name: fmt.Sprintf("%v, %v", d, t),
						Work: float64(heads) * n * (n + 1) / 2 * 4 * float64(dim),
						Run:  with(t, func() error { return Run(&e, p, o) }),
					})
				}
			}
			cputest.Compete(b, "Gop/s", list)
		})
	}
}
