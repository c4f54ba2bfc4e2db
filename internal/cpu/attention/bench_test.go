package attention

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/variant"
)

// benchmark is a step over dense caches: all sequences have the same number of queries and keys.
type benchmark struct {
	dtype                             attn.DType
	seqs, heads, kvHeads              int
	queries, keys, dim, page, workers int
	dropout                           float64
	mixed                             bool
}

// run measures Run with queries of float32, or of float64 on keys and values of float64. MB/s counts the bytes of keys
// and values once for a whole group.
func (c benchmark) run(b *testing.B) {
	if c.dtype == attn.Float64 {
		runBenchmark[float64](b, c)
	} else {
		runBenchmark[float32](b, c)
	}
}

func runBenchmark[F cpu.Real](b *testing.B, c benchmark) {
	g, seqs, o := setUp[F](c)
	var p Plan
	if err := p.Build(g, seqs); err != nil {
		b.Fatal(err)
	}
	var e cpu.Engine
	defer e.Close()
	b.SetBytes(int64(2 * c.seqs * c.kvHeads * c.keys * c.dim * c.dtype.Size()))
	b.ReportAllocs()
	for b.Loop() {
		if err := Run(&e, &p, o); err != nil {
			b.Fatal(err)
		}
	}
}

// setUp returns the operands of a step.
func setUp[F cpu.Real](c benchmark) (attn.Problem, []attn.Sequence, *Operands[F]) {
	if c.page == 0 {
		c.page = c.keys
	}
	perSeq := (c.keys + c.page - 1) / c.page
	row := c.dim / c.dtype.Columns()
	at := attn.PageStrides{Page: c.kvHeads * c.page * row, Head: c.page * row, Row: row}
	g := attn.Problem{
		Heads: c.heads, KVHeads: c.kvHeads, Dim: c.dim, ValueDim: c.dim, Pages: attn.Separate(c.dtype, c.dim, c.dim, at, at),
		Query: attn.Strides{Row: c.heads * c.dim, Head: c.dim}, Out: attn.Strides{Row: c.heads * c.dim, Head: c.dim},
		PageTokens: c.page,
		Scale:      0.125, Mask: attn.Mask{Causal: true}, Workers: c.workers,
		Score: attn.Score{Dropout: c.dropout}, Mixed: c.mixed,
	}
	g.Pages.Planes[0].Mixed = c.dtype == attn.Q4
	pages := rand.Perm(c.seqs * perSeq)
	seqs := make([]attn.Sequence, c.seqs)
	for i := range seqs {
		seqs[i] = attn.Sequence{Row: i * c.queries, Queries: c.queries, Keys: c.keys}
		for _, p := range pages[i*perSeq : (i+1)*perSeq] {
			seqs[i].Pages = append(seqs[i].Pages, int32(p))
		}
	}
	o := Operands[F]{
		Q:     make([]F, c.seqs*c.queries*c.heads*c.dim),
		Out:   make([]F, c.seqs*c.queries*c.heads*c.dim),
		Pages: attn.InPlanes(cpu.Buffer{DType: c.dtype, Ptr: cputest.Noise(c.dtype, len(pages)*at.Page), Len: len(pages) * at.Page}, cpu.Buffer{DType: c.dtype, Ptr: cputest.Noise(c.dtype, len(pages)*at.Page), Len: len(pages) * at.Page}),

		Seed: 1,
	}
	for i := range o.Q {
		o.Q[i] = F(rand.Float32() - 0.5)
	}
	return g, seqs, &o
}

func BenchmarkRun(b *testing.B) {
	for _, d := range []attn.DType{attn.Float32, attn.Float16, attn.BFloat16, attn.Float64} {
		for _, keys := range []int{128, 1024, 8192, 65536} {
			for _, dim := range []int{64, 128} {
				b.Run(fmt.Sprintf("%v/n%d/d%d", d, keys, dim), func(b *testing.B) {
					benchmark{dtype: d, seqs: 1, heads: 12, kvHeads: 12, queries: 1, keys: keys, dim: dim}.run(b)
				})
			}
		}
	}
}

func BenchmarkRunShapes(b *testing.B) {
	for name, c := range map[string]benchmark{
		"gqa4/float32":    {dtype: attn.Float32, seqs: 1, heads: 32, kvHeads: 8, queries: 1, keys: 8192, dim: 128},
		"gqa4/float16":    {dtype: attn.Float16, seqs: 1, heads: 32, kvHeads: 8, queries: 1, keys: 8192, dim: 128},
		"page16/float32":  {dtype: attn.Float32, seqs: 8, heads: 12, kvHeads: 12, queries: 1, keys: 1000, dim: 64, page: 16},
		"page1/float32":   {dtype: attn.Float32, seqs: 8, heads: 12, kvHeads: 12, queries: 1, keys: 1000, dim: 64, page: 1},
		"page128/float32": {dtype: attn.Float32, seqs: 8, heads: 12, kvHeads: 12, queries: 1, keys: 1000, dim: 64, page: 128},
	} {
		b.Run(name, c.run)
	}
}

// Prefill reads little and computes much: the metric is products a second, 4*Dim operations for each query and visible
// key.
func BenchmarkPrefill(b *testing.B) {
	for _, d := range []attn.DType{attn.Float32, attn.Float16, attn.Float64} {
		for _, dim := range []int{64, 128} {
			b.Run(fmt.Sprintf("%v/d%d", d, dim), func(b *testing.B) {
				const n, heads = 1024, 12
				benchmark{dtype: d, seqs: 1, heads: heads, kvHeads: heads, queries: n, keys: n, dim: dim}.run(b)
				ops := float64(heads) * n * (n + 1) / 2 * 4 * float64(dim)
				b.ReportMetric(ops*float64(b.N)/b.Elapsed().Seconds()/1e9, "Gop/s")
			})
		}
	}
}

// BenchmarkInvariant runs steps with and without batch invariance, alternating. It reports the ratio of their times:
// the median, and that of the minima, which counts on a shared machine.
func BenchmarkInvariant(b *testing.B) {
	for _, d := range []attn.DType{attn.Float32, attn.Float16, attn.BFloat16} {
		for _, heads := range [][3]int{{8, 8, 128}, {32, 8, 128}, {64, 8, 128}, {12, 12, 64}} {
			for _, of := range [][4]int{{1, 1, 1024}, {1, 1, 16384}, {1, 1, 65536}, {8, 1, 1024}, {8, 1, 16384}, {1, 4, 16384}, {1, 512, 4096}} {
				c := benchmark{dtype: d, seqs: of[0], heads: heads[0], kvHeads: heads[1], queries: of[1], keys: of[2], dim: heads[2], page: 16}
				b.Run(fmt.Sprintf("%v/heads=%d,%d,%d/batch=%d/queries=%d/keys=%d", d, heads[0], heads[1], heads[2], of[0], of[1], of[2]), c.compareInvariant)
			}
		}
	}
}

func (c benchmark) compareInvariant(b *testing.B) {
	g, seqs, o := setUp[float32](c)
	var e cpu.Engine
	defer e.Close()
	plans := make([]Plan, 2)
	for i := range plans {
		g.Invariant = i == 1
		if err := plans[i].Build(g, seqs); err != nil {
			b.Fatal(err)
		}
	}
	turn := func(i int) float64 {
		began, n := time.Now(), 0
		for ; n == 0 || time.Since(began) < 50*time.Millisecond; n++ {
			if err := Run(&e, &plans[i], o); err != nil {
				b.Fatal(err)
			}
		}
		return time.Since(began).Seconds() / float64(n)
	}
	var ratios []float64
	best := [2]float64{math.Inf(1), math.Inf(1)}
	for b.Loop() {
		plain, invariant := turn(0), turn(1)
		ratios = append(ratios, invariant/plain)
		best = [2]float64{min(best[0], plain), min(best[1], invariant)}
	}
	slices.Sort(ratios)
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(ratios[len(ratios)/2], "times")
	b.ReportMetric(best[1]/best[0], "best-times")
	b.ReportMetric(1e6*best[0], "us")
}

// BenchmarkDropout measures a prompt, and a decode step, with and without dropout.
func BenchmarkDropout(b *testing.B) {
	for _, d := range []attn.DType{attn.Float32, attn.Float64, attn.BFloat16} {
		for _, queries := range []int{1, 1024} {
			for _, p := range []float64{0, 0.1, 0.5} {
				c := benchmark{dtype: d, seqs: 1, heads: 12, kvHeads: 12, queries: queries, keys: 1024, dim: 64, dropout: p}
				b.Run(fmt.Sprintf("%v/queries=%d/dropout=%v", d, queries, p), c.run)
			}
		}
	}
}

// BenchmarkKernel measures a kernel on a tile in cache.
func BenchmarkKernel(b *testing.B) {
	for _, d := range []attn.DType{attn.Float32, attn.Float16, attn.BFloat16} {
		for _, rows := range []int{1, 2, 4, 8, 16, 64} {
			b.Run(fmt.Sprintf("%v/rows%d", d, rows), func(b *testing.B) {
				const dim = 64
				keys := keysOfCall(rows)
				k, v := cpu.Buffer{DType: d, Ptr: cputest.Noise(d, keys*dim), Len: keys * dim}, cpu.Buffer{DType: d, Ptr: cputest.Noise(d, keys*dim), Len: keys * dim}
				f := func(n int) unsafe.Pointer {
					return cpu.Buffer{DType: attn.Float32, Ptr: cputest.Noise(attn.Float32, n), Len: n}.Ptr
				}
				t := tile{
					Rows: rows, Count: keys, Dim: dim, ValueDim: dim,
					Q: f(rows * dim), O: f(rows * dim), M: f(rows), L: f(rows),
					KStep: dim * d.Size(), VStep: dim * d.Size(),
					Scores: f(rows * keys), Wide: f(wideOf(dim, dim)),
				}
				t.K, t.V, t.Run = make([]Streams, 1), make([]Streams, 1), keys
				for i := range t.K[0] {
					t.K[0][i], t.V[0][i] = k.At(i*keys/4*dim), v.At(i*keys/4*dim)
				}
				run := kernelFor[float32](d)
				b.SetBytes(int64(2 * keys * dim * d.Size()))
				for b.Loop() {
					run(&t)
				}
				b.ReportMetric(float64(rows*keys*dim*4)*float64(b.N)/b.Elapsed().Seconds()/1e9, "Gop/s")
			})
		}
	}
}

// BenchmarkPrompt measures attention of causal prompts. GF/s counts the products of visible keys.
func BenchmarkPrompt(b *testing.B) {
	for _, d := range []attn.DType{attn.Float32, attn.Float16, attn.BFloat16} {
		for _, c := range []benchmark{
			{seqs: 1, heads: 12, kvHeads: 12, queries: 2048, keys: 2048, dim: 64},
			{seqs: 1, heads: 32, kvHeads: 32, queries: 2048, keys: 2048, dim: 128},
			{seqs: 1, heads: 32, kvHeads: 8, queries: 2048, keys: 2048, dim: 128, page: 16},
		} {
			for _, mixed := range []bool{false, true} {
				if c.dtype, c.mixed = d, mixed; mixed && d == attn.Float32 {
					continue
				}
				b.Run(fmt.Sprintf("%v/%d:%dx%dx%d/page=%d/mixed=%v", d, c.heads, c.kvHeads, c.keys, c.dim, c.page, mixed), func(b *testing.B) {
					c.run(b)
					b.ReportMetric(2*float64(c.heads*c.queries*(c.queries+1)*c.dim)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GF/s")
				})
			}
		}
	}
}

// BenchmarkVariants compares variants with plain attention, and with the built-in changes of scores that they are.
func BenchmarkVariants(b *testing.B) {
	slopes := make([]float64, 12)
	table := variant.Tensor{Shape: []int{12, 32}, F32: make([]float32, 12*32)}
	slope := variant.Tensor{Shape: []int{12}, F32: make([]float32, 12)}
	doc := variant.Tensor{Shape: []int{8192}, I32: make([]int32, 8192)}
	for i := range slopes {
		slopes[i], slope.F32[i] = 0.25, 0.25
	}
	for i := range doc.I32 {
		doc.I32[i] = int32(i / 1000)
	}
	for _, c := range []struct {
		name          string
		queries, keys int
		dim           int
	}{{"decode/d64", 1, 8192, 64}, {"decode/d128", 1, 8192, 128}, {"prompt/d64", 512, 512, 64}, {"prompt/d128", 512, 512, 128}} {
		b.Run(c.name, func(b *testing.B) {
			var e cpu.Engine
			defer e.Close()
			var all []*cputest.Contender
			add := func(name string, change func(*attn.Problem, *Operands[float32])) {
				g, seqs, o := setUp[float32](benchmark{dtype: attn.Float32, seqs: 1, heads: 12, kvHeads: 12, queries: c.queries, keys: c.keys, dim: c.dim})
				change(&g, o)
				var p Plan
				if err := p.Build(g, seqs); err != nil {
					b.Fatal(err)
				}
				pairs := float64(c.queries) * (float64(c.keys) - float64(c.queries-1)/2) * 12
				all = append(all, &cputest.Contender{Name: name, Work: pairs, Run: func() {
					if err := Run(&e, &p, o); err != nil {
						b.Fatal(err)
					}
				}})
			}
			vary := func(score, visible string, tensors ...any) {
				s := variant.Source{Score: score, Visible: visible, Params: map[string]float64{"cap": 30}}
				var values []variant.Tensor
				for i := 0; i < len(tensors); i += 2 {
					t := tensors[i+1].(variant.Tensor)
					s.Tensors, values = append(s.Tensors, variant.Declared{Name: tensors[i].(string), Rank: len(t.Shape), Int: t.Int()}), append(values, t)
				}
				program, err := variant.New(s)
				if err != nil {
					b.Fatal(err)
				}
				add(score+" "+visible, func(g *attn.Problem, o *Operands[float32]) { g.Variant, o.Tensors = program, values })
			}
			add("plain", func(*attn.Problem, *Operands[float32]) {})
			add("ALiBi", func(g *attn.Problem, _ *Operands[float32]) { g.Slopes = attn.NewSlopes(slopes) })
			vary("score + slope[head]*(key-query)", "", "slope", slope)
			add("soft cap", func(g *attn.Problem, _ *Operands[float32]) { g.Cap = 30 })
			vary("cap*tanh(score/cap)", "")
			vary("score*0.5", "")
			vary("score + table[head][min(abs(query-key), 31)]", "", "table", table)
			vary("", "key <= query")
			add("window", func(g *attn.Problem, _ *Operands[float32]) { g.Window = 200 })
			vary("", "key <= query && query-key < 200")
			vary("", "(query-key) % 4 == 0")
			vary("", "doc[key] == doc[query]", "doc", doc)
			cputest.Compete(b, "Gscores/s", all)
		})
	}
}

// BenchmarkMass compares attention with and without attention mass, alternating, on one thread: the ratio of the minima, which counts on a
// shared machine.
func BenchmarkMass(b *testing.B) {
	for _, c := range []struct{ queries, keys, dim, tile int }{
		{1, 32768, 64, 256}, {1, 32768, 128, 256}, {1, 32768, 128, 64}, {1, 32768, 64, 1024}, {1, 32768, 128, 512}, {1, 32768, 128, 1024}, {1, 1024, 64, 256}, {1, 1024, 128, 64}, {256, 256, 64, 64}, {512, 512, 128, 256},
	} {
		b.Run(fmt.Sprintf("queries=%d/keys=%d/d%d/tile=%d", c.queries, c.keys, c.dim, c.tile), func(b *testing.B) {
			var e cpu.Engine
			defer e.Close()
			best := [2]float64{math.Inf(1), math.Inf(1)}
			var plans [2]Plan
			var of [2]*Operands[float32]
			for i := range plans {
				g, seqs, o := setUp[float32](benchmark{dtype: attn.Float32, seqs: 1, heads: 1, kvHeads: 1, queries: c.queries, keys: c.keys, dim: c.dim, workers: 1})
				if g.LSE = (attn.Strides{Row: 1, Head: 1}); i == 1 {
					g.TileTokens, o.Tiles = c.tile, attn.Ceil(c.keys, c.tile)
					o.Mass = make([]float32, c.queries*o.Tiles)
				}
				of[i] = o
				if err := plans[i].Build(g, seqs); err != nil {
					b.Fatal(err)
				}
			}
			for b.Loop() {
				for range 50 {
					for i := range plans {
						began := time.Now()
						if err := Run(&e, &plans[i], of[i]); err != nil {
							b.Fatal(err)
						}
						best[i] = min(best[i], time.Since(began).Seconds())
					}
				}
			}
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(best[1]/best[0], "best-times")
			b.ReportMetric(1e6*best[0], "us")
		})
	}
}
