package linear

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/weight"
)

// BenchmarkBlocksMany is prompts: layers of OPT-1.3b with a rounded x, in turn with bfloat16 in mixed precision.
func BenchmarkBlocksMany(b *testing.B) {
	noise := cputest.Noise(attn.Float16, 32<<20)
	for _, size := range [][2]int{{2048, 2048}, {8192, 2048}, {2048, 8192}} {
		out, in := size[0], size[1]
		for _, rows := range []int{16, 32, 48, 64, 128, 401, 1024} {
			x, y, scales := make([]float32, rows*in), make([]float32, rows*out), make([]float32, out)
			for i := range x {
				x[i] = rand.Float32() - 0.5
			}
			var all []*cputest.Contender
			for _, f := range []weight.Format{weight.BFloat16, weight.Int8, weight.Q8_0, weight.Q4_1, weight.Q6_K} {
				o := Operands[float32]{Rows: rows, In: in, Out: out, X: x, Y: y, RoundX: true, W: weight.Matrix{Format: f, Len: in * out, Ptr: noise}}
				if f.HasScales() {
					o.W.Scales = scales
				}
				for _, strips := range []bool{false, true} {
					k := linearTiers[cpu.InUse()].blocks.strips
					if strips && (k.rows == 0 || !isBlocks(f)) {
						continue
					}
					from := map[bool]int{true: 1}[strips] // 0: never
					all = append(all, &cputest.Contender{Name: fmt.Sprint(f, map[bool]string{true: ", strips"}[strips]), Work: float64(rows) * float64(out) * float64(in), Run: func() {
						defer withStrips(from, k)()
						if err := Run(cpu.Default(), &o); err != nil {
							b.Fatal(err)
						}
					}})
				}
			}
			b.Run(fmt.Sprintf("%dx%d/rows%d", out, in, rows), func(b *testing.B) { cputest.Compete(b, "G products/s", all) })
		}
	}
}

// BenchmarkBlocksToken is a token: the layers of a block of OPT-1.3b, one row, whose weights come from memory, in turn with the read
// ceiling.
func BenchmarkBlocksToken(b *testing.B) {
	const memory, most = 1 << 30, 8192
	bytes := cputest.Noise(attn.Float16, memory/2)
	x, y, scales := make([]float32, most), make([]float32, most), make([]float32, most)
	for i := range x {
		x[i] = rand.Float32() - 0.5
	}
	at := 0
	next := func(n int) unsafe.Pointer {
		if at+n > memory {
			at = 0
		}
		at += (n + 63) / 64 * 64
		return unsafe.Add(bytes, at-(n+63)/64*64)
	}
	sizes := [][2]int{{2048, 2048}, {2048, 2048}, {2048, 2048}, {2048, 2048}, {8192, 2048}, {2048, 8192}} // the first three together
	const weights = 4*2048*2048 + 2*8192*2048
	all := []*cputest.Contender{{Name: "read", Work: weights, Run: func() {
		if _, err := cpu.ReadSum(cpu.Default(), unsafe.Slice((*byte)(next(weights)), weights)); err != nil {
			b.Fatal(err)
		}
	}}}
	for _, f := range []weight.Format{weight.BFloat16, weight.Int8, weight.Q8_0, weight.Q4_1, weight.Q6_K} {
		var layers []Operands[float32]
		for _, size := range sizes {
			o := Operands[float32]{Rows: 1, In: size[1], Out: size[0], X: x, Y: y, RoundX: true, W: weight.Matrix{Format: f, Len: size[0] * size[1]}}
			if len(layers) < 3 {
				o.Y = make([]float32, most)
			}
			if f.HasScales() {
				o.W.Scales = scales
			}
			layers = append(layers, o)
		}
		all = append(all, &cputest.Contender{Name: f.String(), Work: float64(f.Size(weights)), Run: func() {
			for i := range layers {
				layers[i].W.Ptr = next(f.Size(layers[i].W.Len))
			}
			for _, part := range [][2]int{{0, 3}, {3, 4}, {4, 5}, {5, 6}} {
				if err := RunAll(cpu.Default(), layers[part[0]:part[1]]); err != nil {
					b.Fatal(err)
				}
			}
		}})
	}
	cputest.Compete(b, "GB/s", all)
}
