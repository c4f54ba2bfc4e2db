package linear

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"unsafe"

	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/blas32"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/weight"
)

// BenchmarkLinear is a layer with its weights in memory, not in a cache: copies of them take turns. MB/s is
// weights. Beside it stand the read ceiling for as many bytes as float32 weights have, and gonum. By the number of threads:
//
//	go test -run '^$' -bench 'Linear/.*/rows1/float16' -cpu 1,2,4,8,16,32 ./internal/cpu/linear
func BenchmarkLinear(b *testing.B) {
	const together = 128 << 20 // bytes of all copies of float32 weights
	for _, size := range [][2]int{{768, 768}, {3072, 768}, {768, 3072}, {2048, 2048}, {8192, 2048}, {50272, 768}} {
		out, in := size[0], size[1]
		copies := max(together/(4*out*in), 1)
		w := map[attn.DType]weight.Matrix{}
		for _, d := range []attn.DType{attn.Float32, attn.Float16, attn.BFloat16} {
			w[d] = weight.Matrix{Format: weight.Dense(d), Ptr: cputest.Noise(d, copies*out*in), Len: copies * out * in}
		}
		turn := 0
		next := func(d attn.DType) weight.Matrix {
			turn++
			all := w[d]
			return weight.Matrix{Format: weight.Dense(d), Ptr: all.At(turn % copies * out * in), Len: out * in}
		}
		name := fmt.Sprintf("%dx%d", out, in)
		b.Run(name+"/read", func(b *testing.B) {
			b.SetBytes(int64(4 * out * in))
			for b.Loop() {
				if _, err := cpu.ReadSum(cpu.Default(), unsafe.Slice((*byte)(next(attn.Float32).Ptr), 4*out*in)); err != nil {
					b.Fatal(err)
				}
			}
		})
		for _, rows := range []int{1, 4, 8, 128} {
			x, y, bias := make([]float32, rows*in), make([]float32, rows*out), make([]float32, out)
			for i := range x {
				x[i] = rand.Float32() - 0.5
			}
			for _, d := range []attn.DType{attn.Float32, attn.Float16, attn.BFloat16} {
				b.Run(fmt.Sprintf("%s/rows%d/%v", name, rows, d), func(b *testing.B) {
					b.SetBytes(int64(d.Size() * out * in))
					b.ReportAllocs()
					for b.Loop() {
						o := Operands[float32]{Rows: rows, In: in, Out: out, X: x, W: next(d), Bias: bias, Y: y}
						if err := Run(cpu.Default(), &o); err != nil {
							b.Fatal(err)
						}
					}
				})
			}
			b.Run(fmt.Sprintf("%s/rows%d/gonum", name, rows), func(b *testing.B) {
				matrix := func(rows, cols int, data []float32) blas32.General {
					return blas32.General{Rows: rows, Cols: cols, Stride: cols, Data: data}
				}
				b.SetBytes(int64(4 * out * in))
				for b.Loop() {
					weights := unsafe.Slice((*float32)(next(attn.Float32).Ptr), out*in)
					blas32.Gemm(blas.NoTrans, blas.Trans, 1, matrix(rows, in, x), matrix(out, in, weights), 0, matrix(rows, out, y))
				}
			})
		}
	}
}
