package linear

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/cpu/matmul"
	"gorgonia.org/leanattention/internal/weight"
)

// peakTask computes tiles from what stays in the first-level cache, over and over: what multiply-adds reach.
type peakTask struct {
	t    *matmul.Set
	runs int
}

const peakDepth = 128

func (p peakTask) Work(int, int) {
	x, w, y := make([]float32, p.t.Rows*peakDepth), make([]float32, p.t.Outs*peakDepth), make([]float32, tileEdge)
	a := matmul.Args{Y: unsafe.Pointer(&y[0]), YRow: 4 * p.t.Outs, X: unsafe.Pointer(&x[0]), XRow: 4 * peakDepth,
		W: unsafe.Pointer(&w[0]), N: peakDepth, Rows: p.t.Rows}
	for range p.runs {
		p.t.Ways[attn.Float32].Mul[p.t.Rows](&a)
	}
}

// BenchmarkTiles compares layers of many rows with what the kernels for float32 do in the first-level cache, and
// with the kernels for few rows:
//
//	go test -run '^$' -bench Tiles -benchtime 20x ./internal/cpu/linear
func BenchmarkTiles(b *testing.B) {
	for _, threads := range []int{1, 2, 8, 16} {
		if threads > runtime.NumCPU() {
			break
		}
		for _, size := range [][3]int{
			{128, 768, 768}, {401, 768, 3072}, {401, 3072, 768}, {401, 2048, 2048}, {401, 2048, 8192}, {401, 8192, 2048}, {2000, 2048, 2048},
		} {
			rows, in, out := size[0], size[1], size[2]
			b.Run(fmt.Sprintf("%dthreads/%dx%dx%d", threads, rows, in, out), func(b *testing.B) {
				defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(threads))
				var e cpu.Engine
				defer e.Close()
				cputest.Compete(b, "Gop/s", manyRows(&e, threads, rows, in, out, true))
			})
		}
	}
}

// BenchmarkFewRows is where rows become many.
func BenchmarkFewRows(b *testing.B) {
	for _, rows := range []int{4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96} {
		for _, size := range [][2]int{{768, 768}, {2048, 2048}, {2048, 8192}} {
			b.Run(fmt.Sprintf("%dx%dx%d", rows, size[0], size[1]), func(b *testing.B) {
				cputest.Compete(b, "Gop/s", manyRows(cpu.Default(), 0, rows, size[0], size[1], false))
			})
		}
	}
}

// manyRows is a layer in every type of weights, in tiles and with the kernels for few rows.
func manyRows(e *cpu.Engine, threads, rows, in, out int, peak bool) (list []*cputest.Contender) {
	work := 2 * float64(rows) * float64(in) * float64(out)
	tiles := linearTiers[cpu.InUse()].tiles
	if f := linearTiers[floatTier()].tiles; peak && f != nil {
		runs := int(work/(2*float64(f.Rows*f.Outs*peakDepth*threads))) + 1
		list = append(list, &cputest.Contender{
			Name: "multiply-adds in cache", Work: 2 * float64(f.Rows*f.Outs*peakDepth*threads) * float64(runs),
			Run: func() { e.Run(peakTask{f, runs}, threads) },
		})
	}
	x, y := make([]float32, rows*in), make([]float32, rows*out)
	for i := range x {
		x[i] = rand.Float32() - 0.5
	}
	for _, d := range []attn.DType{attn.Float32, attn.Float16, attn.BFloat16} {
		w := weight.Matrix{Format: weight.Dense(d), Ptr: cputest.Noise(d, in*out), Len: in * out}
		for _, way := range []string{"few", "tiles", "tiles, x rounded"} {
			if way != "few" && tiles == nil || way == "tiles, x rounded" && tiles.Rounded[d] == nil {
				continue
			}
			o := Operands[float32]{Rows: rows, In: in, Out: out, X: x, W: w, Y: y, RoundX: way == "tiles, x rounded"}
			list = append(list, &cputest.Contender{Name: fmt.Sprintf("%v, %s", d, way), Work: work, Run: func() {
				if tiles != nil {
					from := 8
					if way == "few" {
						from = math.MaxInt
					}
					defer setFromRows(tiles, from)()
				}
				if err := Run(e, &o); err != nil {
					panic(err)
				}
			}})
		}
	}
	return list
}

// floatTier is the best tier whose tiles are of float32.
func floatTier() cpu.Tier {
	t := cpu.InUse()
	for t > cpu.TierGo && (linearTiers[t].tiles == nil || linearTiers[t].tiles.Ways[attn.Float32].Split != nil) {
		t--
	}
	return t
}
