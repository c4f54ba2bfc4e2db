package linear

import (
	"errors"
	"math"
	"strings"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/weight"
)

// TestDigits: digits are those of the numbers, and so small that float32 has their sums.
func TestDigits(t *testing.T) {
	for _, in := range []int{1, 1040, 1041, 16512, 16513, 44035, 44036, weight.MostQuantised} {
		base, n := digits(weight.Int8, in)
		r := quantisedRun{o: &Operands[float32]{In: 1, W: weight.Matrix{Format: weight.Int8}}, base: base, n: n, rows: 1}
		r.x.Grow(4 * n)
		for v := -127; v <= 127; v++ {
			x := float32(v) * 3
			r.o.X, r.scales = []float32{x, 127 * 3}, make([]float32, 1)
			r.o.In = 2
			r.x.Grow(8 * n)
			r.quantise(0, make([]byte, 2))
			got := 0
			for digit := n - 1; digit >= 0; digit-- {
				d := int(r.floats(&r.x, digit, 2)[0])
				if got = got*base + d; max(d, -d)*127*in > 1<<24 {
					t.Fatalf("rows of %d elements: digit %d of %d is %d: sums exceed 2^24", in, digit, v, d)
				}
			}
			if n == 1 {
				got = int(r.floats(&r.x, 0, 2)[0])
			}
			if got != v {
				t.Fatalf("rows of %d elements: the digits of %d are those of %d", in, v, got)
			}
		}
	}
}

// TestQuantised: INT8 has the bits of float32 arithmetic with exact sums, and E4M3 is near float64. Fewer rows are not quantised.
func TestQuantised(t *testing.T) {
	rng := reftest.Rand(t)
	e := &cpu.Engine{}
	defer e.Close()
	for i, c := range []struct{ rows, in, out int }{{65, 33, 7}, {66, 1500, 40}, {513, 64, 70}, {65, 17000, 3}, {100, 300, 130}} {
		for _, f := range []weight.Format{weight.Int8, weight.E4M3} {
			random := func(n int) []float32 {
				x := make([]float32, n)
				for k := range x {
					x[k] = float32(rng.NormFloat64())
				}
				return x
			}
			data, scales := make([]byte, c.out*c.in), random(c.out)
			for k := range data {
				if data[k] = byte(rng.Uint32()); half.E4M3(data[k]).IsNaN() {
					data[k] = 0x7e
				}
				if f == weight.Int8 && data[k] == 0x80 {
					data[k] = 0x81
				}
			}
			o := Operands[float32]{Rows: c.rows, In: c.in, Out: c.out, XRow: c.in + 3, YRow: c.out + 5, QuantiseX: true, RoundX: i%2 == 0}
			o.W = weight.Matrix{Format: f, Ptr: unsafe.Pointer(unsafe.SliceData(data)), Len: len(data), Scales: scales}
			o.X, o.Y = random(c.rows*o.XRow), random(c.rows*o.YRow)
			clear(o.X[2*o.XRow:][:c.in])
			o.X[3*o.XRow] = float32(math.Inf(1))
			if o.Activation = attn.ReLU; i%2 == 0 {
				o.Bias, o.Times, o.Residual, o.Activation = random(c.out), random(c.rows*c.out), random(c.rows*c.out), attn.NoActivation
			}
			before := append([]float32(nil), o.Y...)
			if err := Run(e, &o); err != nil {
				t.Fatal(err)
			}
			bytes := make([]byte, c.in)
			for row := range c.rows {
				scale := weight.QuantiseRow(f, bytes, o.X[row*o.XRow:][:c.in])
				for col := range c.out {
					sum, size := 0.0, 0.0
					for k, b := range bytes {
						v := float64(int8(b)) * float64(int8(data[col*c.in+k]))
						if f == weight.E4M3 {
							v = float64(half.E4M3(b).Float32()) * float64(half.E4M3(data[col*c.in+k]).Float32())
						}
						sum, size = sum+v, size+math.Abs(v)
					}
					y := float32(float32(sum) * scales[col])
					y = float32(y * scale)
					at := row*c.out + col
					if o.Bias != nil {
						y += o.Bias[col]
					}
					if o.Activation == attn.ReLU {
						y = max(y, 0)
					}
					if o.Times != nil {
						y = float32(float32(y*o.Times[at]) + o.Residual[at])
					}
					bound := 0.0
					if f == weight.E4M3 {
						bound = (size*0x1p-20*math.Abs(float64(scales[col])*float64(scale)) + 0x1p-20) * 4
					}
					if got := o.Y[row*o.YRow+col]; row == 3 && got == got || row != 3 && !(math.Abs(float64(got)-float64(y)) <= bound) {
						t.Fatalf("%v, %+v: row %d, column %d: %v, want %v", f, c, row, col, got, y)
					}
				}
				for k := o.Out; k < o.YRow && row+1 < c.rows; k++ {
					if o.Y[row*o.YRow+k] != before[row*o.YRow+k] {
						t.Fatalf("%v, %+v: a number between rows of y has changed", f, c)
					}
				}
			}
			few, plain := o, o
			few.Rows, plain.Rows, plain.QuantiseX = weight.LeastQuantisedRows-1, weight.LeastQuantisedRows-1, false
			few.Y, plain.Y = random(len(o.Y)), random(len(o.Y))
			if err := errors.Join(Run(e, &few), Run(e, &plain)); err != nil {
				t.Fatal(err)
			}
			for row := range few.Rows {
				for col := range c.out {
					if a, b := few.Y[row*o.YRow+col], plain.Y[row*o.YRow+col]; a != b && (a == a || b == b) {
						t.Fatalf("%v, %+v: of fewer rows, row %d, column %d is %v, without the option %v", f, c, row, col, a, b)
					}
				}
			}
		}
	}
	for _, c := range []struct {
		f    weight.Format
		in   int
		says string
	}{{weight.Q8_0, 32, "want int8 or e4m3"}, {weight.Int8, weight.MostQuantised + 1, "want at most 65536"}} {
		data := make([]byte, c.f.Size(c.in))
		o := Operands[float32]{Rows: 1, In: c.in, Out: 1, QuantiseX: true, X: make([]float32, c.in), Y: make([]float32, 1)}
		o.W = weight.Matrix{Format: c.f, Ptr: unsafe.Pointer(unsafe.SliceData(data)), Len: c.in, Scales: make([]float32, 1)}
		if err := Run(e, &o); !errors.Is(err, attn.ErrUnsupported) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%v, %d elements: %v, want %q", c.f, c.in, err, c.says)
		}
	}
}
