package linear

import (
	"math"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/reftest"
)

// TestDotKernels: the kernels in use against the Go kernels, which are within the rounding of two sums of
// so many terms; rows that come in several calls have the bits of one call; and calls whose streams are
// one give each the result.
func TestDotKernels(t *testing.T) {
	rng := reftest.Rand(t)
	k := linearTiers[cpu.InUse()]
	for _, d := range []attn.DType{attn.Float32, attn.Float16, attn.BFloat16} {
		for rows := 1; rows <= k.rows; rows++ {
			for _, n := range []int{0, 1, 2, 5, 8, 15, 16, 17, 31, 32, 33, 47, 63, 64, 95, 127, 128, 129, 256, 300, 513} {
				c := newLinearCase[float32](t, rng, d, rows, n, dotStreams)
				partial := make([]byte, partialBytes)
				a := dotArgs{
					y: unsafe.Pointer(&c.Y[0]), yStep: 4, yRow: 4 * dotStreams,
					w: c.W.Ptr, wStep: n * d.Size(), x: unsafe.Pointer(unsafe.SliceData(c.X)), xRow: 4 * n,
					rows: rows, n: n, ahead: 1 << 20, aheadStep: 64, partial: unsafe.Pointer(&partial[0]),
				}
				k.dot[d][rows](&a)
				got := append([]float32(nil), c.Y...)
				linearGo.dot[d][rows](&a)
				for i, goKernel := range c.Y {
					size := 0.0
					for j, v := range c.w[i%dotStreams] {
						size += math.Abs(v * float64(c.X[i/dotStreams*n+j]))
					}
					if diff := math.Abs(float64(got[i]) - float64(goKernel)); !(diff <= 2*float64(n)*0x1p-24*size) {
						t.Fatalf("%v %v, %d rows of %d: result %d is %v, of the Go kernel %v", cpu.InUse(), d, rows, n, i, got[i], goKernel)
					}
				}

				if parts := n / dotPiece; parts > 1 {
					b := a
					b.unfinished = 1
					for done := 0; done < n; done += b.n {
						b.n = dotPiece * (1 + rng.IntN(2))
						if b.n >= n-done {
							b.n, b.unfinished = n-done, 0
						}
						b.w, b.x = unsafe.Add(a.w, done*d.Size()), unsafe.Add(a.x, 4*done)
						k.dot[d][rows](&b)
						b.more = 1
					}
					for i, v := range c.Y {
						if v != got[i] {
							t.Fatalf("%v %v, %d rows of %d: result %d is %v in parts, %v at once", cpu.InUse(), d, rows, n, i, v, got[i])
						}
					}
				}

				a.wStep, a.yStep = 0, 0
				k.dot[d][rows](&a)
				for r := range rows {
					if v := c.Y[r*dotStreams]; v != got[r*dotStreams] {
						t.Fatalf("%v %v, %d rows of %d: row %d is %v from one stream, %v from the first of four",
							cpu.InUse(), d, rows, n, r, v, got[r*dotStreams])
					}
				}
				c.close()
			}
		}
	}
}

// TestRowKernels: the kernels for one row in use give the bits of the dot kernels, whether streams are neighbouring rows of weights,
// have a part each or are all the same, and change no argument.
func TestRowKernels(t *testing.T) {
	rng := reftest.Rand(t)
	all := linearTiers[cpu.InUse()]
	k := &all.row
	for _, d := range []attn.DType{attn.Float32, attn.Float16, attn.BFloat16} {
		if k.dot[d] == nil {
			continue // the dot kernels compute it
		}
		for _, n := range []int{0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65, 95, 128, 129, 300, 513} {
			rows := 1 + rng.IntN(3)
			out := rows * k.streams
			c := newLinearCase[float32](t, rng, d, 1, n, out)
			want := make([]float32, out)
			for i := range want {
				one := dotArgs{
					y: unsafe.Pointer(&c.Y[i]), w: unsafe.Add(c.W.Ptr, i*n*d.Size()), x: unsafe.Pointer(unsafe.SliceData(c.X)), rows: 1, n: n,
				}
				all.dot[d][1](&one)
				want[i] = c.Y[i]
			}
			check := func(name string, step, row, rows int) {
				t.Helper()
				for i := range c.Y {
					c.Y[i] = float32(math.NaN())
				}
				size := n * d.Size()
				a := rowArgs{
					y: unsafe.Pointer(&c.Y[0]), yRow: 4 * row, yStep: 4 * step, w: c.W.Ptr, wSkip: (row - 1) * size, wStep: step * size,
					x: unsafe.Pointer(unsafe.SliceData(c.X)), n: n, rows: rows, next: rng.IntN(1 << 20), behind: -rng.IntN(1 << 20),
				}
				lines := size / cpu.CacheLine
				a.beyond = rng.IntN(lines + 1)
				a.within = lines - a.beyond
				before := a
				k.dot[d](&a)
				if a != before {
					t.Fatalf("%v %v, %d rows of %d, %s: the arguments were %+v, and are %+v", cpu.InUse(), d, rows, n, name, before, a)
				}
				for i, v := range c.Y {
					if math.Float32bits(v) != math.Float32bits(want[i]) {
						t.Fatalf("%v %v, %d rows of %d, %s: result %d is %v, of the dot kernel %v", cpu.InUse(), d, rows, n, name, i, v, want[i])
					}
				}
			}
			check("side by side", 1, k.streams, rows)
			check("apart", rows, 1, rows)
			check("one stream", 0, 1, out)
			c.close()
		}
	}
}
