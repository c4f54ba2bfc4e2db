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
	testTrainingRefuses(t, m, d)
}

func TestGPUProducts(t *testing.T) {
	m, d := realDecoder(t)
	if d.info.Capability != groupCapability {
		t.Skip("the GPU has no kernels of hopper.go")
	}
	testProduct(t, m, d, enginetest.OrShort(60, 6), enginetest.OrShort(1500, 500))
	testLayers(t, m, d, layersOf{product: map[hopperLayout]int{}}, enginetest.OrShort(30, 3), enginetest.OrShort(4104, 1000), enginetest.OrShort(1300, 400), manyRows...)
}

// testProduct: sizes that end anywhere in a tile, matrices that begin anywhere, sums over themselves, outliers, and twice the same bits.
func testProduct(t *testing.T, m *machine, d *Engine, cases, most int) {
	rng := reftest.Rand(t)
	defer func(least int) { d.leastHopper = least }(d.leastHopper)
	size := func() int { return enginetest.Pick(rng, 1, 4, 15, 16, 17, 64, 128, 129, 1+rng.IntN(most)) }
	seen := [2]bool{d.info.Capability != groupCapability, d.info.Capability != groupCapability} // the layouts of hopper.go
	for i := range reftest.AtLeast(cases, func() bool { return seen[0] && seen[1] }) {
		d.leastHopper = enginetest.Pick(rng, roundedRows, leastHopper)
		o := Product{M: size(), N: size(), K: size(), Transposed: i%2 == 0, Products: enginetest.Pick(rng, attn.Float32, attn.Float32, attn.Float16, attn.BFloat16, attn.BFloat16)}
		if i%3 > 0 { // rows of a multiple of 16 bytes, of float32 or of 16 bits
			each := 4 * (i % 3)
			o.M, o.N, o.K = attn.Ceil(o.M, each)*each, attn.Ceil(o.N, each)*each, attn.Ceil(o.K, each)*each
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
		scratch, err := d.ProductScratch(&o)
		noError(t, err)
		if (scratch > 0) != o.rounds() {
			t.Fatalf("%+v: scratch of %d", o, scratch)
		}
		if scratch > 0 {
			o.Scratch = m.empty(t, scratch)
		}
		if o.rounds() && d.untransposed(&o) && d.aligned(&o) {
			seen[i%2] = true
		}
		noError(t, d.Product(m.Stream, &o))
		m.Settle(t)
		got := enginetest.Read(t, &o.C)
		for row := range o.M {
			for column := range o.N {
				want, bound, left, top, right := 0.0, 0.0, 0.0, 0.0, 0.0
				for k := range o.K {
					at := row*o.K + k
					if o.Transposed {
						at = k*o.M + row
					}
					p := a.x[before+at] * b.x[k*o.N+column]
					want, bound = want+p, bound+math.Abs(p)
					left, top, right = left+math.Abs(a.x[before+at]), max(top, math.Abs(a.x[before+at])), right+math.Abs(b.x[k*o.N+column])
				}
				lost := 0x1p-18
				switch {
				case !o.rounds():
				case o.Products == attn.BFloat16:
					lost = 2*0x1p-8 + 0x1p-16
				default:
					lost = 2*0x1p-11 + 0x1p-18
				}
				if bound *= lost + float64(o.K)*0x1p-23; o.rounds() && o.Products == attn.Float16 { // numbers below the smallest normal one
					bound += left*0x1p-25 + top*0x1p-33*right
				}
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
		for _, x := range []gpu.Memory{a.Memory, b.Memory, plus.Memory, c, o.Scratch} {
			if x.Buffer != nil {
				noError(t, x.Buffer.Close())
			}
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
	slopes := Slopes{N: 8, Width: 8, Step: 8, DY: x, X: x, DX: y}
	slopes.Step = 4
	wantError(t, "rows that overlap", d.Slopes(m.Stream, &slopes), attn.ErrShape, "8 elements, rows of 8 that begin 4 apart")
	slopes.Step, slopes.Activation = 8, attn.Activations
	wantError(t, "an activation", d.Slopes(m.Stream, &slopes), attn.ErrShape, "the activation")
	slopes.Activation, slopes.X = attn.GELU, half
	wantError(t, "slopes of float16", d.Slopes(m.Stream, &slopes), attn.ErrDType, "x")
	wantError(t, "eps", d.NormGradient(m.Stream, &NormGradient{Rows: 1, N: 64, Norm: Norm{Eps: -1}, X: x, DY: x, DX: y}), attn.ErrShape, "eps")
	wantError(t, "a short dx", d.NormGradient(m.Stream, &NormGradient{Rows: 2, N: 64, X: x, DY: x, DX: y}), attn.ErrShape, "x has 64 elements of 128")
	m.Settle(t)
	for _, v := range []gpu.Memory{x, half, y} {
		noError(t, v.Buffer.Close())
	}
}
