package attention

import (
	"fmt"
	"gorgonia.org/leanattention/internal/cpu"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/reftest"
)

// TestLatentShapes: keys of 576 elements whose first 512 are the values, in shapes of the tests of FlashInfer
// (test_deepseek_mla) and of FlashMLA (test_flash_mla_dense_decoding). Keys beyond lengths are NaN.
func TestLatentShapes(t *testing.T) {
	rng := reftest.Rand(t)
	most := cputest.Cases(t, 10_000_000, 100_000_000) // products of a case
	run := func(turn, heads, kvHeads, page, queries int, keys []int, in reftest.Inputs) {
		s := reftest.Shape{Heads: heads, KVHeads: kvHeads, Dim: 576, ValueDim: 512, Keys: keys, Queries: slices.Repeat([]int{queries}, len(keys))}
		s.Causal = turn%2 == 0
		cost := 0
		for _, n := range keys {
			cost += n * queries * heads * (s.Dim + s.ValueDim)
		}
		if cost > most {
			return
		}
		l := layout{dtype: []attn.DType{attn.Float16, attn.BFloat16, attn.Float32}[turn%3], page: page, kind: inKeys}
		if err := verify[float32](rng, s, in, l, randomPolicy(rng), 1+turn%3, 0); err != nil {
			t.Fatal(err)
		}
	}
	turn := 0
	for i, keys := range [][]int{{0, 17, 514}, {1, 33, 2743}, {3, 79, 8736}, {11, 114, 8736}} {
		for _, queries := range []int{1, 3, 9, 17} {
			run(turn, []int{16, 64}[(i+turn)%2], 1, 1, queries, slices.Repeat(keys, []int{1, 3, 5, 7}[turn%4]), reftest.Normal)
			turn++
		}
	}
	for i, keys := range []int{17, 33, 75, 197} {
		for _, queries := range []int{3, 7, 17} {
			run(turn, 16, 1, []int{16, 32}[i%2], queries, slices.Repeat([]int{keys}, 1+turn%7), reftest.Peaked)
			turn++
		}
	}
	for _, x := range []struct{ n, queries, keys, heads, kvHeads int }{
		{1, 1, 20, 1, 1}, {2, 2, 140, 3, 1}, {6, 4, 4096, 9, 3}, {6, 4, 140, 63, 3}, {2, 4, 140, 126, 2}, {64, 1, 20, 64, 8}, {1, 4, 140, 128, 8}, {2, 1, 140, 126, 1},
	} {
		keys := slices.Repeat([]int{x.keys}, x.n)
		for i := range keys[1:] {
			keys[1+i] = max(0, x.keys*(i*37%21-4)/10)
		}
		run(turn, x.heads, x.kvHeads, 64, x.queries, keys, reftest.Normal)
		turn++
	}
}

// BenchmarkLatent decodes over keys of 576 elements whose first 512 are the values, beside reading the same bytes:
//
//	go test -run '^$' -bench Latent ./internal/cpu/attention
func BenchmarkLatent(b *testing.B) {
	for _, d := range []attn.DType{attn.Float32, attn.Float16, attn.BFloat16} {
		for _, heads := range []int{16, 64, 128} {
			b.Run(fmt.Sprintf("%v/%d heads", d, heads), func(b *testing.B) {
				const dim, values, keys, page = 576, 512, 32768, 64
				size := keys * dim * d.Size()
				buf := cpu.Buffer{DType: d, Ptr: cputest.Noise(d, keys*dim), Len: keys * dim}
				at := attn.PageStrides{Page: page * dim, Head: page * dim, Row: dim}
				g := attn.Problem{
					Heads: heads, KVHeads: 1, Dim: dim, ValueDim: values, Pages: attn.Format{Planes: [attn.MostPlanes]attn.Plane{{DType: d, Dim: dim, At: at}}, KeyPlanes: 1, Value: attn.Columns{Dim: values}},
					Query: attn.Strides{Row: heads * dim, Head: dim}, Out: attn.Strides{Row: heads * values, Head: values},
					PageTokens: page, Scale: 0.05, Mixed: d != attn.Float32,
				}
				o := &Operands[float32]{Q: make([]float32, heads*dim), Out: make([]float32, heads*values), Pages: attn.InPlanes(buf)}
				for i := range o.Q {
					o.Q[i] = rand.Float32() - 0.5
				}
				seq := attn.Sequence{Queries: 1, Keys: keys}
				for i := range keys / page {
					seq.Pages = append(seq.Pages, int32(i))
				}
				var e cpu.Engine
				defer e.Close()
				p := new(Plan)
				if err := p.Build(g, []attn.Sequence{seq}); err != nil {
					b.Fatal(err)
				}
				mem := unsafe.Slice((*byte)(buf.Ptr), size)
				cputest.Compete(b, "GB/s", []*cputest.Contender{
					{Name: "sum", Work: float64(size), Run: func() { cpu.ReadSum(&e, mem) }},
					{Name: "latent", Work: float64(size), Run: func() {
						if err := Run(&e, p, o); err != nil {
							panic(err)
						}
					}},
					{Name: "Gop", Work: 2 * float64(heads) * keys * (dim + values), Run: func() {
						if err := Run(&e, p, o); err != nil {
							panic(err)
						}
					}},
				})
			})
		}
	}
}
