package linear

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/weight"
)

// linearCase is a linear layer with its operands in guarded memory: see guarded.
type linearCase[F cpu.Real] struct {
	Operands[F]
	dtype     attn.DType  // of W
	w         [][]float64 // as the layer sees them
	free      []func()
	cancelled float64 // size of terms that the kernels add and w has not
}

func newLinearCase[F cpu.Real](t testing.TB, rng *rand.Rand, d attn.DType, rows, in, out int) *linearCase[F] {
	c := &linearCase[F]{}
	c.Rows, c.In, c.Out = rows, in, out
	c.dtype = d
	slice := func(n int) []F {
		mem, free := cputest.Guarded(t, n*int(unsafe.Sizeof(F(0))))
		c.free = append(c.free, free)
		s := unsafe.Slice((*F)(mem), n)
		for i := range s {
			s[i] = F(rng.NormFloat64())
		}
		return s
	}
	c.X, c.Y = slice(rows*in), slice(rows*out)
	mem, free := cputest.Guarded(t, out*in*d.Size())
	c.free = append(c.free, free)
	c.W = weight.Matrix{Format: weight.Dense(d), Ptr: mem, Len: out * in}
	for o := range out {
		row := make([]float64, in)
		for i := range row {
			row[i] = cputest.Rounded(rng.NormFloat64(), d)
			cputest.Store(c.W.Ptr, c.dtype, o*in+i, []float32{float32(row[i])})
			row[i] = cputest.Load(c.W.Ptr, c.dtype, o*in+i)
		}
		c.w = append(c.w, row)
	}
	if rng.IntN(2) == 0 {
		c.Bias = slice(out)
	}
	if rng.IntN(2) == 0 {
		c.Residual = slice(rows * out)
	}
	if rng.IntN(3) == 0 {
		c.Times = slice(rows * out)
	}
	c.Activation = attn.Activation(rng.IntN(attn.Activations))
	return c
}

func (c *linearCase[F]) close() {
	for _, f := range c.free {
		f()
	}
}

// run computes the layer into poisoned memory.
func (c *linearCase[F]) run(t testing.TB, e *cpu.Engine) {
	t.Helper()
	for i := range c.Y {
		c.Y[i] = F(math.NaN())
	}
	if err := Run(e, &c.Operands); err != nil {
		t.Fatal(err)
	}
}

// check compares y with the sums in float64. The bound is that of a sum of so many terms in any order.
func (c *linearCase[F]) check(t testing.TB) {
	t.Helper()
	unit := math.Ldexp(1, -24)
	if unsafe.Sizeof(F(0)) == 8 {
		unit = math.Ldexp(1, -53) * 4 // the reference has it too
	}
	for r := range c.Rows {
		for o, w := range c.w {
			sum, size := 0.0, c.cancelled
			add := func(v float64) { sum, size = sum+v, size+math.Abs(v) }
			for i, v := range w {
				add(float64(c.X[r*c.In+i]) * v)
			}
			if c.Bias != nil {
				add(float64(c.Bias[o]))
			}
			own := 0.0 // what the activation is off by
			if c.Activation > attn.ReLU {
				own, size = 4*unit*math.Abs(sum), reftest.MostSlope*size
			}
			sum = reftest.Activated(c.Activation, sum)
			if c.Times != nil {
				times := float64(c.Times[r*c.Out+o])
				sum, size, own = sum*times, size*math.Abs(times), own*math.Abs(times)
			}
			if c.Residual != nil {
				add(float64(c.Residual[r*c.Out+o]))
			}
			got := float64(c.Y[r*c.Out+o])
			bound := unit*float64(c.In+3)*size + own
			if math.IsNaN(sum) != math.IsNaN(got) || math.Abs(got-sum) > bound {
				t.Fatalf("%v %v, %d x %d x %d: y[%d,%d] is %v, want %v +- %.3g",
					cpu.InUse(), c.dtype, c.Rows, c.In, c.Out, r, o, got, sum, bound)
			}
		}
	}
}

func TestLinear(t *testing.T) {
	rng := reftest.Rand(t)
	for _, d := range []attn.DType{attn.Float32, attn.Float16, attn.BFloat16} {
		for _, rows := range []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 64, 100} {
			for _, in := range []int{1, 3, 7, 31, 32, 33, 63, 65} {
				c := newLinearCase[float32](t, rng, d, rows, in, []int{1, 3, 7, 63, 65}[rng.IntN(5)])
				c.run(t, cpu.Default())
				c.check(t)
				c.close()
			}
		}
		for _, size := range [][3]int{ // rows, in, out: several tiles, blocks and pieces; one short of them, and one more
			{1, 768, 257}, {2, 769, 1030}, {5, 767, 40}, {7, 1537, 17}, {129, 769, 9}, {140, 20, 300}, {18, 7000, 5},
		} {
			c := newLinearCase[float32](t, rng, d, size[0], size[1], size[2])
			c.run(t, cpu.Default())
			c.check(t)
			c.close()
		}
	}
	for range 20 {
		c := newLinearCase[float64](t, rng, attn.Float64, 1+rng.IntN(140), 1+rng.IntN(300), 1+rng.IntN(40))
		c.run(t, cpu.Default())
		c.check(t)
		c.close()
	}
}

// TestLinearEmpty: no rows and no features are nothing to do; no elements are sums of 0.
func TestLinearEmpty(t *testing.T) {
	bias := []float32{3, -4}
	y := []float32{7, 7}
	w := weight.Matrix{Format: weight.Float16}
	for _, o := range []Operands[float32]{
		{Rows: 0, In: 3, Out: 2, W: weight.Matrix{Format: weight.Float16, Ptr: unsafe.Pointer(&make([]uint16, 6)[0]), Len: 6}, Y: y},
		{Rows: 2, In: 3, Out: 0, W: w, X: make([]float32, 6), Y: y},
	} {
		if err := Run(cpu.Default(), &o); err != nil || y[0] != 7 || y[1] != 7 {
			t.Errorf("%d x %d x %d: %v, error %v", o.Rows, o.In, o.Out, y, err)
		}
	}
	o := Operands[float32]{Rows: 1, Out: 2, W: w, Bias: bias, Y: y, Activation: attn.ReLU}
	if err := Run(cpu.Default(), &o); err != nil || y[0] != 3 || y[1] != 0 {
		t.Errorf("no elements: %v, error %v", y, err)
	}
}

// TestLinearRowsAlone: a row has the same bits whatever the other rows are and however many, as long as they are
// few, and on any number of threads. Many have TestLinearManyAlone.
func TestLinearRowsAlone(t *testing.T) {
	rng := reftest.Rand(t)
	for _, d := range []attn.DType{attn.Float32, attn.Float16, attn.BFloat16} {
		for _, in := range []int{40, 129, 900, 1600} {
			few := 133
			for k := linearTiers[cpu.InUse()].tiles; k != nil && in >= tileIn; k = k.Fewer {
				few = min(few, k.Ways[d].FromRows-1)
			}
			c := newLinearCase[float32](t, rng, d, few, in, 70)
			c.run(t, cpu.Default())
			all := append([]float32(nil), c.Y...)
			for _, rows := range []int{1, 2, 3, 4, 5, 7, few} {
				one := c.Operands
				first := rng.IntN(few + 1 - rows)
				one.Rows, one.X = rows, c.X[first*in:]
				if one.Residual != nil {
					one.Residual = c.Residual[first*70:]
				}
				if one.Times != nil {
					one.Times = c.Times[first*70:]
				}
				one.Y = make([]float32, rows*70)
				if err := Run(cpu.Default(), &one); err != nil {
					t.Fatal(err)
				}
				for i, v := range one.Y {
					if v != all[first*70+i] {
						t.Fatalf("%v %v, %d elements: row %d has %v among %d rows and %v among %d",
							cpu.InUse(), d, in, first+i/70, v, rows, all[first*70+i], few)
					}
				}
			}
			procs := runtime.GOMAXPROCS(1)
			c.run(t, cpu.Default())
			runtime.GOMAXPROCS(procs)
			for i, v := range c.Y {
				if v != all[i] {
					t.Fatalf("%v %v: element %d is %v on one thread, %v on %d", cpu.InUse(), d, i, v, all[i], procs)
				}
			}
			c.close()
		}
	}
}

// TestLinearAnyRows: with AnyRows, a row has the bits that it has alone, among as many rows as there are.
func TestLinearAnyRows(t *testing.T) {
	rng := reftest.Rand(t)
	const rows, out = 300, 45
	for f := range weight.Format(weight.Formats) {
		in := 256 * (1 + rng.IntN(3))
		var c *linearCase[float32]
		for _, d := range []attn.DType{attn.Float32, attn.Float16, attn.BFloat16} {
			if weight.Dense(d) == f {
				c = newLinearCase[float32](t, rng, d, rows, in, out)
			}
		}
		if slices.Contains(blockFormats(), f) {
			c, _ = newBlockCase(t, rng, f, rows, in, out)
		}
		if c == nil {
			continue
		}
		c.AnyRows, c.RoundX, c.Residual, c.Times = true, rng.IntN(2) == 0, nil, nil
		c.run(t, cpu.Default())
		for _, n := range []int{1, 2, 7, 40, 131} {
			at := rng.IntN(rows + 1 - n)
			some := c.Operands
			some.Rows, some.X, some.Y = n, c.X[at*in:], make([]float32, n*out)
			if err := Run(cpu.Default(), &some); err != nil {
				t.Fatal(err)
			}
			for i, v := range some.Y {
				if math.Float32bits(v) != math.Float32bits(c.Y[at*out+i]) {
					t.Fatalf("%v %v, %d elements: row %d has %v among %d rows and %v among %d", cpu.InUse(), f, in, at+i/out, v, n, c.Y[at*out+i], rows)
				}
			}
		}
		c.close()
	}
}

// TestLinearNaN: NaN and infinities in x and w reach the sums that they are part of, and no other.
func TestLinearNaN(t *testing.T) {
	rng := reftest.Rand(t)
	for _, d := range []attn.DType{attn.Float32, attn.Float16, attn.BFloat16} {
		for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
			for range 10 {
				c := newLinearCase[float32](t, rng, d, 1+rng.IntN(6), 1+rng.IntN(80), 1+rng.IntN(12))
				row, i := rng.IntN(c.Rows), rng.IntN(c.In)
				c.X[row*c.In+i] = float32(bad)
				c.run(t, cpu.Default())
				for at, v := range c.Y {
					w, r := c.w[at%c.Out], float64(0)
					for k, x := range c.X[at/c.Out*c.In:][:c.In] {
						r += float64(x) * w[k]
					}
					if c.Bias != nil {
						r += float64(c.Bias[at%c.Out])
					}
					r = reftest.Activated(c.Activation, r)
					if c.Times != nil {
						r *= float64(c.Times[at])
					}
					if c.Residual != nil {
						r += float64(c.Residual[at])
					}
					if at/c.Out == row && !math.IsNaN(r) && !math.IsInf(r, 0) {
						continue // behind ReLU
					}
					if f := float64(v); math.IsNaN(r) != math.IsNaN(f) || math.IsInf(r, 0) && f != r {
						t.Fatalf("%v %v, %v in row %d: element %d is %v, want %v", cpu.InUse(), d, bad, row, at, v, r)
					}
				}
				cputest.Store(c.W.Ptr, c.dtype, i, []float32{float32(bad)}) // of output feature 0
				c.X[row*c.In+i] = 1
				c.Activation, c.Times, c.Residual = attn.NoActivation, nil, nil
				c.run(t, cpu.Default())
				for at, v := range c.Y {
					if f := float64(v); (math.IsNaN(f) || math.IsInf(f, 0)) != (at%c.Out == 0) {
						t.Fatalf("%v %v, %v in feature 0: element %d is %v", cpu.InUse(), d, bad, at, v)
					}
				}
				c.close()
			}
		}
	}
}

// TestLinearScales: a layer's sums are multiplied by its rows' scales, in front of the bias, by each way to compute them.
func TestLinearScales(t *testing.T) {
	rng := reftest.Rand(t)
	for _, d := range []attn.DType{attn.Float32, attn.Float16, attn.BFloat16} {
		for _, rows := range []int{1, 5, 150} {
			c := newLinearCase[float32](t, rng, d, rows, 96, 40+rng.IntN(60))
			c.W.Scales = make([]float32, c.Out)
			for o := range c.W.Scales {
				c.W.Scales[o] = float32(math.Exp2(float64(rng.IntN(6) - 3)))
				for i := range c.w[o] {
					c.w[o][i] *= float64(c.W.Scales[o])
				}
			}
			c.run(t, cpu.Default())
			c.check(t)
			c.close()
		}
	}
}

func TestLinearErrors(t *testing.T) {
	w := func(d attn.DType, n int) weight.Matrix {
		return weight.Matrix{Format: weight.Dense(d), Ptr: unsafe.Pointer(&make([]float64, n)[0]), Len: n}
	}
	good := Operands[float32]{Rows: 2, In: 3, Out: 4, X: make([]float32, 6), W: w(attn.Float16, 12), Y: []float32{7, 7, 7, 7, 7, 7, 7, 7}}
	for _, c := range []struct {
		name string
		with func(o *Operands[float32])
		want error
	}{
		{"negative rows", func(o *Operands[float32]) { o.Rows = -1 }, attn.ErrShape},
		{"activation", func(o *Operands[float32]) { o.Activation = attn.Activations }, attn.ErrShape},
		{"negative in", func(o *Operands[float32]) { o.In = -1 }, attn.ErrShape},
		{"negative out", func(o *Operands[float32]) { o.Out = -1 }, attn.ErrShape},
		{"short x", func(o *Operands[float32]) { o.X = o.X[:5] }, attn.ErrShape},
		{"short w", func(o *Operands[float32]) { o.W.Len = 11 }, attn.ErrShape},
		{"short y", func(o *Operands[float32]) { o.Y = o.Y[:7] }, attn.ErrShape},
		{"short bias", func(o *Operands[float32]) { o.Bias = make([]float32, 3) }, attn.ErrShape},
		{"empty bias", func(o *Operands[float32]) { o.Bias = []float32{} }, attn.ErrShape},
		{"short residual", func(o *Operands[float32]) { o.Residual = make([]float32, 7) }, attn.ErrShape},
		{"short factors", func(o *Operands[float32]) { o.Times = make([]float32, 7) }, attn.ErrShape},
		{"sizes beyond an int", func(o *Operands[float32]) { o.Rows, o.In = math.MaxInt/2, math.MaxInt/2 }, attn.ErrShape},
		{"crooked w", func(o *Operands[float32]) { o.W.Ptr = unsafe.Add(o.W.Ptr, 1) }, attn.ErrShape},
		{"float64 w", func(o *Operands[float32]) { o.W = w(attn.Float64, 12) }, attn.ErrDType},
		{"few scales", func(o *Operands[float32]) { o.W.Scales = make([]float32, 3) }, attn.ErrShape},
		{"w of no type", func(o *Operands[float32]) { o.W.Format = 99 }, attn.ErrDType},
	} {
		o := good
		c.with(&o)
		if err := Run(cpu.Default(), &o); !errors.Is(err, c.want) {
			t.Errorf("%s: error %v, want %v", c.name, err, c.want)
		}
		for i, v := range good.Y {
			if v != 7 {
				t.Fatalf("%s: element %d was written", c.name, i)
			}
		}
	}
	wide := Operands[float64]{Rows: 1, In: 1, Out: 1, X: make([]float64, 1), W: w(attn.Float32, 1), Y: make([]float64, 1)}
	if err := Run(cpu.Default(), &wide); !errors.Is(err, attn.ErrDType) {
		t.Errorf("float64 x and float32 w: error %v", err)
	}
	wide.W = w(attn.Float64, 1)
	wide.W.Scales = []float32{1}
	if err := Run(cpu.Default(), &wide); !errors.Is(err, attn.ErrUnsupported) {
		t.Errorf("scales of float64 weights: error %v", err)
	}
	defer cpu.ForceTier("sse")()
	if err := Run(cpu.Default(), &good); !errors.Is(err, attn.ErrTier) {
		t.Errorf("kernels of an unknown tier: error %v", err)
	}
	if _, err := cpu.ReadSum(cpu.Default(), nil); !errors.Is(err, attn.ErrTier) {
		t.Errorf("kernels of an unknown tier: error %v", err)
	}
}

// TestLinearNamedFloat: types whose underlying type is a float are computed with its kernels.
func TestLinearNamedFloat(t *testing.T) {
	type mine float32
	w := []float32{1, 2, 3, 4}
	o := Operands[mine]{Rows: 1, In: 2, Out: 2, X: []mine{10, 100}, W: weight.Matrix{Format: weight.Float32, Ptr: unsafe.Pointer(&w[0]), Len: 4}, Y: make([]mine, 2)}
	if err := Run(cpu.Default(), &o); err != nil || o.Y[0] != 210 || o.Y[1] != 430 {
		t.Errorf("%v, error %v", o.Y, err)
	}
}

func TestLinearConcurrently(t *testing.T) {
	rng := reftest.Rand(t)
	var e cpu.Engine
	defer e.Close()
	done := make(chan string)
	cases := make([]*linearCase[float32], 4)
	for i := range cases {
		cases[i] = newLinearCase[float32](t, rng, attn.Float16, 1+i*3, 200, 400)
		cases[i].run(t, &e)
	}
	for _, c := range cases {
		go func() {
			want := append([]float32(nil), c.Y...)
			for range 50 {
				clear(c.Y)
				if err := Run(&e, &c.Operands); err != nil {
					done <- err.Error()
					return
				}
				for i, v := range c.Y {
					if v != want[i] {
						done <- fmt.Sprintf("%d rows: element %d is %v, want %v", c.Rows, i, v, want[i])
						return
					}
				}
			}
			done <- ""
		}()
	}
	for range cases {
		if s := <-done; s != "" {
			t.Error(s)
		}
	}
	for _, c := range cases {
		c.check(t)
		c.close()
	}
}

// TestLinearRows: rows of x and y that are apart give the bits of dense rows, for layers of parts of the same rows together, and
// nothing else is written.
func TestLinearRows(t *testing.T) {
	rng := reftest.Rand(t)
	cputest.SetProcs(t, 3)
	for i := range 24 {
		rows, in, out, heads := 1+rng.IntN(9), 1+rng.IntN(200), 1+rng.IntN(90), 1+rng.IntN(5)
		switch i % 4 {
		case 0:
			rows = 1
		case 1: // tiles
			rows, in = 100+rng.IntN(90), 64+rng.IntN(100)
		}
		d := []attn.DType{attn.Float32, attn.Float16, attn.BFloat16}[rng.IntN(3)]
		inRow, outRow := in+rng.IntN(3), out+rng.IntN(3)
		x, y := make([]float32, rows*heads*inRow), make([]float32, rows*heads*outRow)
		for j := range x {
			x[j] = float32(rng.NormFloat64())
		}
		var all []Operands[float32]
		var cases []*linearCase[float32]
		written := make([]bool, len(y))
		for h := range heads {
			c := newLinearCase[float32](t, rng, d, rows, in, out)
			defer c.close()
			o := c.Operands
			o.X, o.Y, o.XRow, o.YRow = x[h*inRow:], y[h*outRow:], heads*inRow, heads*outRow
			o.X, o.Y = o.X[:(rows-1)*o.XRow+in], o.Y[:(rows-1)*o.YRow+out]
			for r := range rows {
				copy(c.X[r*in:][:in], o.X[r*o.XRow:])
				for j := range out {
					written[r*o.YRow+h*outRow+j] = true
				}
			}
			c.run(t, cpu.Default())
			cases, all = append(cases, c), append(all, o)
		}
		for j := range y {
			y[j] = 12345
		}
		if err := RunAll(cpu.Default(), all); err != nil {
			t.Fatal(err)
		}
		for h, c := range cases {
			for j, want := range c.Y {
				if got := all[h].Y[j/out*all[h].YRow+j%out]; math.Float32bits(got) != math.Float32bits(want) {
					t.Fatalf("%v, %v, %d x %d x %d: head %d of %d, element %d: %v, dense %v", cpu.InUse(), d, rows, in, out, h, heads, j, got, want)
				}
			}
		}
		for j, v := range y {
			if !written[j] && v != 12345 {
				t.Fatalf("%d x %d x %d, %d heads: element %d is %v, which no layer has", rows, in, out, heads, j, v)
			}
		}
		short := all[0]
		short.XRow = in - 1
		if in > 1 {
			if err := Run(cpu.Default(), &short); !errors.Is(err, attn.ErrShape) {
				t.Errorf("rows of x that overlap: %v", err)
			}
		}
		short = all[0]
		if short.Y = short.Y[:len(short.Y)-1]; !errors.Is(Run(cpu.Default(), &short), attn.ErrShape) {
			t.Error("a short output")
		}
	}
}

func TestLinearDoesNotAllocate(t *testing.T) {
	if reftest.RaceEnabled {
		t.Skip("the race detector allocates")
	}
	rng := reftest.Rand(t)
	var e cpu.Engine
	defer e.Close()
	for _, rows := range []int{1, 9, 130} {
		c := newLinearCase[float32](t, rng, attn.BFloat16, rows, 500, 300)
		if n := testing.AllocsPerRun(20, func() { c.run(t, &e) }); n > 0 {
			t.Errorf("%d rows: %v allocations", rows, n)
		}
		c.close()
	}
	words := make([]byte, 1<<20)
	if n := testing.AllocsPerRun(20, func() { cpu.ReadSum(&e, words) }); n > 0 {
		t.Errorf("ReadSum: %v allocations", n)
	}
}

// TestLinears: layers of the same x together have the bits that each has alone, with what some before them make, on
// any number of threads; few rows take one fork.
func TestLinears(t *testing.T) {
	rng := reftest.Rand(t)
	cputest.SetProcs(t, 3)
	for i := range 12 {
		rows, in := 1+rng.IntN(20), 1+rng.IntN(300)
		if i == 2 || i == 9 { // many rows, of three layers, gated and not, and of two
			rows, in = 100+rng.IntN(160), 64+rng.IntN(40)
		}
		d := []attn.DType{attn.Float32, attn.Float16, attn.BFloat16}[rng.IntN(3)]
		n, gated := 1+i%4, i%3 == 0
		var cases []*linearCase[float32]
		var all []Operands[float32]
		for i := range n {
			c := newLinearCase[float32](t, rng, d, rows, in, rng.IntN(400))
			if gated && i == 1 {
				c.close()
				c = newLinearCase[float32](t, rng, d, rows, in, cases[0].Out)
				c.Times = cases[0].Y
			}
			if i > 0 && rng.IntN(8) > 0 {
				c.X = cases[0].X
			}
			cases, all = append(cases, c), append(all, c.Operands)
		}
		want := make([][]float32, n)
		for i, c := range cases {
			c.run(t, cpu.Default())
			want[i] = slices.Clone(c.Y)
		}
		for _, procs := range []int{1, 2, 3} {
			runtime.GOMAXPROCS(procs)
			for _, c := range cases {
				for i := range c.Y {
					c.Y[i] = float32(math.NaN())
				}
			}
			if err := RunAll(cpu.Default(), all); err != nil {
				t.Fatal(err)
			}
			for i, c := range cases {
				for j, v := range c.Y {
					if math.Float32bits(v) != math.Float32bits(want[i][j]) {
						t.Fatalf("%v, %v, %d rows of %d, %d threads: layer %d of %d, element %d: %v, alone %v", cpu.InUse(), d, rows, in, procs, i, n, j, v, want[i][j])
					}
				}
			}
		}
		for _, c := range cases {
			c.close()
		}
	}

	var e cpu.Engine
	defer e.Close()
	q := newLinearCase[float32](t, rng, attn.Float32, 1, 512, 512)
	defer q.close()
	forks := func(layers ...Operands[float32]) uint32 {
		t.Helper()
		turns := func() uint32 { // 0: the only helper was idle for long, and has left
			_, jobs := e.Helpers()
			return jobs
		}
		var before, after uint32
		for try := 0; before == 0 && try < 100; try++ {
			if err := Run(&e, &q.Operands); err != nil {
				t.Fatal(err)
			}
			before = turns()
			if err := RunAll(&e, layers); err != nil {
				t.Fatal(err)
			}
			if after = turns(); after <= before {
				before = 0
			}
		}
		return after - before
	}
	runtime.GOMAXPROCS(2)
	k, v, gate := q.Operands, q.Operands, q.Operands
	k.Y, v.Y, gate.Y = make([]float32, 512), make([]float32, 512), make([]float32, 512)
	gate.Times = q.Y
	if n := forks(q.Operands, k, v); n != 1 {
		t.Errorf("query, key and value: %d forks", n)
	}
	if n := forks(q.Operands, gate); n != 1 {
		t.Errorf("a gate: %d forks", n)
	}
	other := k
	other.X = slices.Clone(k.X)
	if n := forks(q.Operands, other); n != 1 {
		t.Errorf("another x: %d forks", n)
	}

	bad := k
	bad.Bias = bad.Y[:3]
	q.Y[0] = 12345
	if err := RunAll(&e, []Operands[float32]{q.Operands, bad}); !errors.Is(err, attn.ErrShape) || q.Y[0] != 12345 {
		t.Errorf("a short bias: error %v, and the first layer begins with %v", err, q.Y[0])
	}
	if err := RunAll[float32](&e, nil); err != nil {
		t.Errorf("no layers: %v", err)
	}
}
