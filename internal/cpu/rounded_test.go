package cpu

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"
)

// TestRounded: the kernels in use round as package half does, to the bits, NaN too, and write nothing else.
func TestRounded(t *testing.T) {
	rng := reftest.Rand(t)
	v := &vectorTiers[inUse]
	for _, f := range []struct {
		name   string
		kernel func(dst *uint16, src *float32, n int)
		one    func(float32) uint16
		widen  func(uint16) float32
	}{
		{"float16", v.toFloat16, func(x float32) uint16 { return uint16(half.FromFloat32(x)) }, func(h uint16) float32 { return half.Float16(h).Float32() }},
		{"bfloat16", v.toBFloat16, func(x float32) uint16 { return uint16(half.BFromFloat32(x)) }, func(h uint16) float32 { return half.BFloat16(h).Float32() }},
	} {
		// All numbers, and what lies beside them and in the middle between two, and anything.
		var all []float32
		for h := range 1 << 16 {
			x, next := f.widen(uint16(h)), f.widen(uint16(h+1))
			bits := math.Float32bits(x)
			middle := bits + (math.Float32bits(next)-bits)/2
			for _, b := range []uint32{bits, bits + 1, middle - 1, middle, middle + 1, rng.Uint32()} {
				all = append(all, math.Float32frombits(b))
			}
		}
		for _, nan := range []uint32{0x7f800001, 0xff800001, 0x7fc00000, 0x7fffffff, 0xffffffff, 0x7f802000} {
			all = append(all, math.Float32frombits(nan))
		}
		got := make([]uint16, len(all))
		f.kernel(&got[0], &all[0], len(all))
		for i, x := range all {
			if want := f.one(x); got[i] != want {
				t.Fatalf("%v, %s: %v (%#08x) is %#04x, want %#04x", inUse, f.name, x, math.Float32bits(x), got[i], want)
			}
		}
		for n := range 70 {
			mem, free := guarded(t, 2*n)
			mem2, free2 := guarded(t, 4*n)
			dst, src := unsafe.Slice((*uint16)(mem), n), unsafe.Slice((*float32)(mem2), n)
			for i := range src {
				src[i], dst[i] = all[rng.IntN(len(all))], 0xffff
			}
			f.kernel((*uint16)(mem), (*float32)(mem2), n)
			for i, x := range src {
				if want := f.one(x); dst[i] != want {
					t.Fatalf("%v, %s, %d of %d: %v is %#04x, want %#04x", inUse, f.name, i, n, x, dst[i], want)
				}
			}
			free()
			free2()
		}
	}
}

// BenchmarkAppend stores the keys of a chunk of a prompt.
func BenchmarkAppend(b *testing.B) {
	for _, d := range []attn.DType{attn.Float32, attn.Float16, attn.BFloat16} {
		for _, procs := range []int{1, runtime.GOMAXPROCS(0)} {
			b.Run(fmt.Sprintf("%v/threads=%d", d, procs), func(b *testing.B) {
				defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(procs))
				const rows, heads, dim, page = 512, 32, 64, 16
				g := attn.Problem{KVHeads: heads, PageTokens: page}
				at := attn.PageStrides{Page: heads * page * dim, Head: page * dim, Row: dim}
				dst := noise(d, 4*rows*heads*dim)
				src := make([]float32, rows*heads*dim)
				for i := range src {
					src[i] = rand.Float32() - 0.5
				}
				seqs := make([][]attn.Sequence, 4) // more than a cache holds
				for i := range seqs {
					q := attn.Sequence{Queries: rows, Keys: rows}
					for _, p := range rand.Perm(rows / page) {
						q.Pages = append(q.Pages, int32(i*rows/page+p))
					}
					seqs[i] = []attn.Sequence{q}
				}
				var e Engine
				defer e.Close()
				i := 0
				for b.Loop() {
					if err := Append(&e, &g, seqs[i%4], dst, at, dim, src, attn.Strides{Row: heads * dim, Head: dim}); err != nil {
						b.Fatal(err)
					}
					i++
				}
				b.ReportMetric(b.Elapsed().Seconds()/float64(b.N)/float64(len(src))*1e9, "ns/element")
			})
		}
	}
}
