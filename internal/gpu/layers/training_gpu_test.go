package layers

import (
	"bytes"
	"math"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
)

func TestGPUTraining(t *testing.T) {
	m, d := realDecoder(t)
	testProduct(t, m, d, 60, 400)
	testColumnSums(t, m, d, 40)
	testTrainingRefuses(t, m, d)
}

// testProduct: sizes that end anywhere in a tile, matrices that begin anywhere, sums over themselves, outliers, and twice the same bits.
func testProduct(t *testing.T, m *machine, d *Engine, cases, most int) {
	rng := reftest.Rand(t)
	size := func() int { return enginetest.Pick(rng, 1, 4, 15, 16, 17, 64, 128, 129, 1+rng.IntN(most)) }
	for i := range cases {
		o := Product{M: size(), N: size(), K: size(), Transposed: i%2 == 0}
		if i%3 > 0 { // rows of a multiple of 16 bytes
			o.M, o.N, o.K = attn.Ceil(o.M, 4)*4, attn.Ceil(o.N, 4)*4, attn.Ceil(o.K, 4)*4
		}
		before := enginetest.Pick(rng, 0, 0, 3)
		a := m.random(t, rng, attn.Float32, before+o.M*o.K, math.Ldexp(1, rng.IntN(40)-20))
		b, plus := m.random(t, rng, attn.Float32, o.K*o.N, 1), m.random(t, rng, attn.Float32, o.M*o.N, 1)
		o.A, o.B, o.C = a.Memory, b.Memory, m.empty(t, o.M*o.N)
		o.A.Offset, o.A.Len = o.A.Offset+int64(before)*4, o.M*o.K
		c := o.C
		switch i % 5 {
		case 1:
			o.Plus = plus.Memory
		case 2:
			o.Plus, o.C = plus.Memory, plus.Memory
		}
		noError(t, d.Product(m.Stream, &o))
		m.Settle(t)
		got := enginetest.Read(t, &o.C)
		for row := range o.M {
			for column := range o.N {
				want, bound := 0.0, 0.0
				for k := range o.K {
					at := row*o.K + k
					if o.Transposed {
						at = k*o.M + row
					}
					p := a.x[before+at] * b.x[k*o.N+column]
					want, bound = want+p, bound+math.Abs(p)
				}
				bound *= 0x1p-18 + float64(o.K)*0x1p-23
				if o.Plus.Buffer != nil {
					want += plus.x[row*o.N+column]
					bound += math.Abs(want) * 0x1p-23
				}
				if v := enginetest.Get(got, row*o.N+column, attn.Float32); !(math.Abs(v-want) <= bound+0x1p-120) {
					t.Fatalf("%d x %d x %d, transposed %v: (%d, %d) is %v, want %v within %v", o.M, o.N, o.K, o.Transposed, row, column, v, want, bound)
				}
			}
		}
		if o.C.Buffer != plus.Buffer {
			noError(t, d.Product(m.Stream, &o))
			m.Settle(t)
			if !bytes.Equal(got, enginetest.Read(t, &o.C)) {
				t.Fatalf("%d x %d x %d: other bits in the second run", o.M, o.N, o.K)
			}
		}
		for _, x := range []gpu.Memory{a.Memory, b.Memory, plus.Memory, c} {
			noError(t, x.Buffer.Close())
		}
	}
}

func testColumnSums(t *testing.T, m *machine, d *Engine, cases int) {
	rng := reftest.Rand(t)
	for i := range cases {
		o := ColumnSums{Rows: enginetest.Pick(rng, 1, 7, 8, 9, 70), N: enginetest.Pick(rng, 1, 31, 32, 33, 100)}
		x, times := m.random(t, rng, attn.Float32, o.Rows*o.N, 1), m.random(t, rng, attn.Float32, o.Rows*o.N, 1)
		o.X, o.Y = x.Memory, m.empty(t, o.N)
		if i%2 == 0 {
			o.Times = times.Memory
		}
		noError(t, d.ColumnSums(m.Stream, &o))
		m.Settle(t)
		got := enginetest.Read(t, &o.Y)
		for column := range o.N {
			want, bound := 0.0, 0.0
			for row := range o.Rows {
				v := x.x[row*o.N+column]
				if i%2 == 0 {
					v *= times.x[row*o.N+column]
				}
				want, bound = want+v, bound+math.Abs(v)
			}
			if v := enginetest.Get(got, column, attn.Float32); !(math.Abs(v-want) <= bound*float64(o.Rows)*0x1p-24) {
				t.Fatalf("%d x %d: column %d is %v, want %v", o.Rows, o.N, column, v, want)
			}
		}
		for _, x := range []gpu.Memory{x.Memory, times.Memory, o.Y} {
			noError(t, x.Buffer.Close())
		}
	}
}

func testTrainingRefuses(t *testing.T, m *machine, d *Engine) {
	rng := reftest.Rand(t)
	x, half, y := m.random(t, rng, attn.Float32, 64, 1).Memory, m.random(t, rng, attn.Float16, 64, 1).Memory, m.empty(t, 64)
	wantError(t, "no rows", d.Product(m.Stream, &Product{M: 0, N: 8, K: 8, A: x, B: x, C: y}), attn.ErrShape, "0 x 8 sums")
	wantError(t, "a short b", d.Product(m.Stream, &Product{M: 8, N: 9, K: 8, A: x, B: x, C: y}), attn.ErrShape, "b")
	wantError(t, "float16", d.Product(m.Stream, &Product{M: 8, N: 8, K: 8, A: half, B: x, C: y}), attn.ErrDType, "a")
	wantError(t, "a short sum", d.Product(m.Stream, &Product{M: 8, N: 8, K: 8, A: x, B: x, C: y, Plus: gpu.Memory{Buffer: x.Buffer, DType: attn.Float32, Len: 4}}), attn.ErrShape, "plus")
	wantError(t, "no columns", d.ColumnSums(m.Stream, &ColumnSums{Rows: 8, X: x, Y: y}), attn.ErrShape, "8 rows of 0")
	wantError(t, "short factors", d.ColumnSums(m.Stream, &ColumnSums{Rows: 8, N: 8, X: x, Y: y, Times: gpu.Memory{Buffer: x.Buffer, DType: attn.Float32, Len: 4}}), attn.ErrShape, "the factors")
	m.Settle(t)
	for _, v := range []gpu.Memory{x, half, y} {
		noError(t, v.Buffer.Close())
	}
}
