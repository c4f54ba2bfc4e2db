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

func TestGPURows(t *testing.T) {
	m, d := realDecoder(t)
	testColumnSums(t, m, d, enginetest.OrShort(40, 12))
	testSlopes(t, m, d, enginetest.OrShort(40, 12))
	testNormGradient(t, m, d, enginetest.OrShort(40, 15))
	testMove(t, m, d, enginetest.OrShort(60, 20))
	testRounding(t, m, d, enginetest.OrShort(30, 8))
}

// testRounding: from gradients of 16 bits in heads, the rounded gradients and their sums have the bits that a matrix of float32 with the same
// numbers gives. Where kernels for hundreds of rows take the layers, each layer has its columns of one matrix.
func testRounding(t *testing.T, m *machine, d *Engine, cases int) {
	rng := reftest.Rand(t)
	defer func(least int) { d.leastHopper = least }(d.leastHopper)
	for i := range cases {
		d.leastHopper = enginetest.Pick(rng, 1, leastHopper)
		batch, tokens, dim := enginetest.Pick(rng, 1, 2, 3), enginetest.Pick(rng, 1, 5, 70), enginetest.Pick(rng, 8, 24, 64)
		o := Rounding{RoundedProducts: RoundedProducts{Rows: batch * tokens, In: 8, Outs: []int{dim, 3 * dim, 2 * dim}, Products: attn.BFloat16}, Layer: i % 3}
		n, all := o.Outs[o.Layer], o.all()
		short := m.random(t, rng, attn.BFloat16, o.Rows*n, 1)
		matrix, data := make([]float64, o.Rows*n), make([]byte, 4*o.Rows*n)
		move := Rounding{RoundedProducts: o.RoundedProducts, Layer: o.Layer, Tokens: tokens, Dim: dim}
		for b := range batch {
			for h := range n / dim {
				for at := range tokens * dim {
					matrix[(b*tokens+at/dim)*n+h*dim+at%dim] = short.x[(b*n/dim+h)*tokens*dim+at]
				}
			}
		}
		for at, x := range matrix {
			enginetest.Put(data, at, attn.Float32, x)
		}
		o.X = m.Put(t, data, attn.Float32)
		move.X = short.Memory
		var got [2][][]byte
		for which, r := range []*Rounding{&o, &move} {
			r.DY, r.Sums = m.empty(t, o.Rows*all), m.empty(t, SumParts(o.Rows)*n)
			noError(t, m.Stream.Set(r.DY.Buffer, r.DY.Offset, 0, int64(4*o.Rows*all)))
			noError(t, d.Rounding(m.Stream, r))
			m.Settle(t)
			got[which] = [][]byte{enginetest.Read(t, &r.DY), enginetest.Read(t, &r.Sums)}
		}
		for which, name := range []string{"dy", "sums"} {
			if !bytes.Equal(got[0][which], got[1][which]) {
				t.Fatalf("%d x %d x %d, layer %d of %v: other %s from heads", batch, tokens, dim, o.Layer, o.Outs, name)
			}
		}
		halves := d.inHalves(&o.RoundedProducts)
		for at, want := range matrix {
			v := enginetest.Get(got[1][0], o.Rows*o.before(o.Layer)+at, attn.Float32)
			if halves {
				v = enginetest.Get(got[1][0], at/n*all+o.before(o.Layer)+at%n, attn.BFloat16)
			}
			if v != want {
				t.Fatalf("%d x %d x %d, layer %d of %v: element %d is %v, want %v", batch, tokens, dim, o.Layer, o.Outs, at, v, want)
			}
		}
		for _, x := range []gpu.Memory{o.X, short.Memory, o.DY, move.DY, o.Sums, move.Sums} {
			noError(t, x.Buffer.Close())
		}
	}
}

func testColumnSums(t *testing.T, m *machine, d *Engine, cases int) {
	rng := reftest.Rand(t)
	for i := range cases {
		o := ColumnSums{Rows: enginetest.Pick(rng, 1, 7, 8, 9, 70, 129, 300), N: enginetest.Pick(rng, 1, 31, 32, 33, 100, 128, 130)}
		x, times := m.random(t, rng, attn.Float32, 1+o.Rows*o.N, 1), m.random(t, rng, attn.Float32, o.Rows*o.N, 1)
		o.X, o.Y = x.Memory, m.empty(t, o.N)
		if i%2 == 0 {
			o.Times = times.Memory
		}
		before := i % 3 / 2 // an element, so that x can't be read by four
		o.X.Offset, o.X.Len, x.x = o.X.Offset+4*int64(before), o.Rows*o.N, x.x[before:]
		if n := o.ScratchSize(); n > 0 {
			o.Scratch = m.empty(t, n)
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
		noError(t, d.ColumnSums(m.Stream, &o))
		m.Settle(t)
		if !bytes.Equal(got, enginetest.Read(t, &o.Y)) {
			t.Fatalf("%d x %d: other bits in the second run", o.Rows, o.N)
		}
		for _, x := range []gpu.Memory{x.Memory, times.Memory, o.Y, o.Scratch} {
			if x.Buffer != nil {
				noError(t, x.Buffer.Close())
			}
		}
	}
}

// testSlopes: every activation, far from 0 too, with and without factors, in rows apart, of which the rest stays.
func testSlopes(t *testing.T, m *machine, d *Engine, cases int) {
	rng := reftest.Rand(t)
	for i := range cases {
		o := Slopes{Width: enginetest.Pick(rng, 1, 3, 8, 1500), Activation: attn.Activation(i % attn.Activations)}
		rows, between := enginetest.Pick(rng, 1, 2, 5), enginetest.Pick(rng, 0, 0, 1, 16)
		o.N, o.Step = rows*o.Width, o.Width+between
		all := rows * o.Step
		dy, x, times := m.random(t, rng, attn.Float32, o.N, 1), m.random(t, rng, attn.Float32, all, enginetest.Pick(rng, 1, 4, 1000.)), m.random(t, rng, attn.Float32, all, 1)
		o.DY, o.X, o.DX = dy.Memory, x.Memory, m.empty(t, all)
		before := enginetest.Read(t, &o.DX)
		dtimes := m.empty(t, all)
		if i%2 == 0 {
			o.Times, o.DTimes = times.Memory, dtimes
		}
		noError(t, d.Slopes(m.Stream, &o))
		m.Settle(t)
		dx, df := enginetest.Read(t, &o.DX), enginetest.Read(t, &dtimes)
		for at := range all {
			row, column := at/o.Step, at%o.Step
			if column >= o.Width {
				if !bytes.Equal(dx[4*at:4*at+4], before[4*at:4*at+4]) {
					t.Fatalf("%+v: element %d between rows is written", o, at)
				}
				continue
			}
			g, f := dy.x[row*o.Width+column], 1.0
			if i%2 == 0 {
				f = times.x[at]
				want := g * reftest.Activated(o.Activation, x.x[at])
				if v := enginetest.Get(df, at, attn.Float32); !(math.Abs(v-want) <= 1e-6*math.Abs(g)*(1+math.Abs(x.x[at]))) {
					t.Fatalf("%v of %v: the factor's gradient is %v, want %v", o.Activation, x.x[at], v, want)
				}
			}
			want := g * f * reftest.Slope(o.Activation, x.x[at])
			if v := enginetest.Get(dx, at, attn.Float32); !(math.Abs(v-want) <= 3e-6*math.Abs(g*f)) {
				t.Fatalf("%v of %v: the gradient is %v, want %v", o.Activation, x.x[at], v, want)
			}
		}
		for _, x := range []gpu.Memory{dy.Memory, x.Memory, times.Memory, o.DX, dtimes} {
			noError(t, x.Buffer.Close())
		}
	}
}

// testNormGradient: both norms, rows of any length and magnitude, with and without the gradients of gamma and beta.
func testNormGradient(t *testing.T, m *machine, d *Engine, cases int) {
	rng := reftest.Rand(t)
	for i := range cases {
		o := NormGradient{Rows: enginetest.Pick(rng, 1, 3, 9, 140), N: enginetest.Pick(rng, 1, 5, 64, 255, 256, 257, 1300), Norm: Norm{Eps: 1e-5, RMS: i%2 == 0}}
		o.UnitOffset = i%4 == 0
		all, scale := o.Rows*o.N, math.Ldexp(1, rng.IntN(16)-6)
		x, dy, gamma := m.random(t, rng, attn.Float32, all, scale), m.random(t, rng, attn.Float32, all, 1), m.random(t, rng, attn.Float32, o.N, 1)
		o.X, o.DY, o.DX = x.Memory, dy.Memory, m.empty(t, all)
		if o.UnitOffset || i%3 > 0 {
			o.Gamma = gamma.Memory
		}
		padded := attn.Ceil(o.N, 4) * 4
		sums := m.empty(t, 2*padded)
		if i%5 > 0 {
			o.Sums, o.Scratch = sums, m.empty(t, o.ScratchSize())
		}
		noError(t, d.NormGradient(m.Stream, &o))
		m.Settle(t)
		got, ofSums := enginetest.Read(t, &o.DX), enginetest.Read(t, &sums)
		n := float64(o.N)
		want := [2][2][]float64{} // of gamma and of beta: sums, and sums of magnitudes
		for i := range want {
			want[i] = [2][]float64{make([]float64, o.N), make([]float64, o.N)}
		}
		for row := range o.Rows {
			x, dy := x.x[row*o.N:][:o.N], dy.x[row*o.N:][:o.N]
			mean, variance := moments(x)
			if o.RMS {
				mean, variance = 0, variance+mean*mean
			}
			r := 1 / math.Sqrt(variance+o.Eps)
			g, ofG, ofBoth, most := make([]float64, o.N), 0.0, 0.0, 0.0
			for i, v := range dy {
				switch {
				case o.Gamma.Buffer == nil:
				case o.UnitOffset:
					v *= 1 + gamma.x[i]
				default:
					v *= gamma.x[i]
				}
				g[i] = v
				ofG += v / n
				ofBoth += v * (x[i] - mean) * r / n
				most = max(most, math.Abs(v))
			}
			if o.RMS {
				ofG = 0
			}
			for i := range g {
				xh := (x[i] - mean) * r
				for of, v := range [2]float64{dy[i] * xh, dy[i]} {
					want[of][0][i] += v
					want[of][1][i] += math.Abs(dy[i]) * (1 + math.Abs(xh))
				}
				want := r * (g[i] - ofG - xh*ofBoth)
				if v := enginetest.Get(got, row*o.N+i, attn.Float32); !(math.Abs(v-want) <= 1e-5*r*(1+most)*(1+math.Abs(xh))) {
					t.Fatalf("%+v: row %d, element %d is %v, want %v", o, row, i, v, want)
				}
			}
		}
		for of, name := range [2]string{"gamma", "beta"} {
			for i, sum := range want[of][0] {
				if v := enginetest.Get(ofSums, of*padded+i, attn.Float32); o.Sums.Buffer != nil && !(math.Abs(v-sum) <= 1e-5*want[of][1][i]) {
					t.Fatalf("%+v: element %d of the gradient of %s is %v, want %v", o, i, name, v, sum)
				}
			}
		}
		if o.Sums.Buffer == nil && !bytes.Equal(ofSums, enginetest.Poisoned(sums.Len, attn.Float32)) {
			t.Fatalf("%+v: sums are written", o)
		}
		for _, x := range []gpu.Memory{x.Memory, dy.Memory, gamma.Memory, o.DX, sums, o.Scratch} {
			if x.Buffer != nil {
				noError(t, x.Buffer.Close())
			}
		}
	}
}

// testMove: lattices that can and cannot be read by vectors, of both sizes of elements; what lies between stays.
func testMove(t *testing.T, m *machine, d *Engine, cases int) {
	rng := reftest.Rand(t)
	for i := range cases {
		unit := enginetest.Pick(rng, 1, 4, 8)
		o := Move{Move: attn.Move{N: unit * (1 + rng.IntN(20))}}
		for _, l := range []*attn.Lattice{&o.From, &o.To} {
			l.At = unit * rng.IntN(3)
		}
		step := [2]int{o.N, o.N}
		for axis := 2; axis >= 0; axis-- {
			o.Dims[axis] = enginetest.Pick(rng, 1, 2, 3, 5)
			for k, l := range []*attn.Lattice{&o.From, &o.To} {
				l.Steps[axis] = step[k] + unit*rng.IntN(2)
				step[k] = l.Steps[axis] * o.Dims[axis]
			}
		}
		from, widens := enginetest.Pick(rng, attn.Float32, attn.Float16, attn.BFloat16), i%3 == 0
		to := from
		if widens {
			from, to = enginetest.Pick(rng, attn.Float16, attn.BFloat16), attn.Float32
		}
		x := m.random(t, rng, from, o.Extent(&o.From), 1)
		o.X, o.Y = x.Memory, gpu.Memory{DType: to, Len: o.Extent(&o.To)}
		m.Poison(t, &o.Y)
		want, data, size := enginetest.Read(t, &o.Y), enginetest.Read(t, &o.X), from.Size()
		for a := range o.Dims[0] {
			for b := range o.Dims[1] {
				for c := range o.Dims[2] {
					at := func(l *attn.Lattice) int { return l.At + a*l.Steps[0] + b*l.Steps[1] + c*l.Steps[2] }
					if !widens {
						copy(want[size*at(&o.To):][:size*o.N], data[size*at(&o.From):])
						continue
					}
					for e := range o.N {
						enginetest.Put(want, at(&o.To)+e, to, enginetest.Get(data, at(&o.From)+e, from))
					}
				}
			}
		}
		noError(t, d.Move(m.Stream, &o))
		m.Settle(t)
		if !bytes.Equal(enginetest.Read(t, &o.Y), want) {
			t.Fatalf("case %d, %+v: other elements", i, o)
		}
		noError(t, x.Buffer.Close())
		noError(t, o.Y.Buffer.Close())
	}
}
