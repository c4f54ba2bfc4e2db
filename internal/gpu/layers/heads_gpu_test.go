package layers

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
)

func TestGPUHeadLinear(t *testing.T) {
	m, d := realDecoder(t)
	testHeadLinear(t, m, d, 60, 128)
}

// testHeadLinear: layers by heads of all types of weights, rows, widths and distances, against float64. What lies between the results stays.
func testHeadLinear(t *testing.T, m *machine, d *Engine, cases, most int) {
	rng := reftest.Rand(t)
	for i := range cases {
		o := HeadLinear{Rows: enginetest.Pick(rng, 1, 2, 8, 9, 17), Heads: 1 + rng.IntN(5), In: 4 * (1 + rng.IntN(most/4)), Out: 1 + rng.IntN(most), Rest: enginetest.Pick(rng, 0, 3, 8)}
		if i%5 == 4 {
			o.In, o.Out = 512+4*rng.IntN(20), 1+rng.IntN(40)
		}
		gap := enginetest.Pick(rng, 0, 5)
		o.XHead, o.YHead = o.In+o.Rest+gap, o.Out+o.Rest+gap
		o.XRow, o.YRow = o.Heads*o.XHead+gap, o.Heads*o.YHead+gap
		kind := enginetest.Pick(rng, gpu.Halves...)
		numbers := func(n int, as attn.DType, spread float64) (gpu.Memory, []float64) {
			x, data := make([]float64, n), make([]byte, n*as.Size())
			for j := range x {
				if x[j] = rng.NormFloat64() * spread; rng.IntN(50) == 0 {
					x[j] *= 100
				}
				enginetest.Put(data, j, as, x[j])
				x[j] = enginetest.Get(data, j, as)
			}
			return m.Put(t, data, as), x
		}
		var x, w []float64
		o.X, x = numbers(o.Rows*o.XRow, attn.Float32, 1)
		o.W, w = numbers(o.Heads*o.Out*o.In, kind, 1/math.Sqrt(float64(o.In)))
		if o.Y = m.empty(t, o.Rows*o.YRow); i%2 == 0 {
			m.Poison(t, &o.Y)
		}
		before := enginetest.Read(t, &o.Y)
		noError(t, d.HeadLinear(m.Stream, &o))
		m.Settle(t)
		y := enginetest.Read(t, &o.Y)
		written := make([]bool, o.Rows*o.YRow)
		for r := range o.Rows {
			for h := range o.Heads {
				from, to := x[r*o.XRow+h*o.XHead:], r*o.YRow+h*o.YHead
				for f := range o.Out + o.Rest {
					want, size := 0.0, 0.0
					if f < o.Out {
						for k := range o.In {
							v := from[k] * w[(h*o.Out+f)*o.In+k]
							want, size = want+v, size+math.Abs(v)
						}
					} else {
						want = from[o.In+f-o.Out]
					}
					if got := enginetest.Get(y, to+f, attn.Float32); !(math.Abs(got-want) <= 3e-6*size) {
						t.Fatalf("%+v with weights of %v: row %d, head %d, feature %d: %v, want %v", o, kind, r, h, f, got, want)
					}
					written[to+f] = true
				}
			}
		}
		for j, is := range written {
			for b := 4 * j; !is && b < 4*j+4; b++ {
				if y[b] != before[b] {
					t.Fatalf("%+v: element %d, which is no result, was written", o, j)
				}
			}
		}
		for _, b := range []gpu.Memory{o.X, o.W, o.Y} {
			noError(t, b.Buffer.Close())
		}
	}
	// What is wrong is refused.
	x := m.empty(t, 64)
	of := HeadLinear{Rows: 1, Heads: 2, In: 4, Out: 4, XRow: 8, XHead: 4, YRow: 8, YHead: 4, X: x, W: x, Y: x}
	of.W.DType = attn.Float16
	for name, change := range map[string]func(o *HeadLinear){
		"no heads":      func(o *HeadLinear) { o.Heads = 0 },
		"odd heads":     func(o *HeadLinear) { o.In = 3 },
		"many rows":     func(o *HeadLinear) { o.Rows = MostHeadRows + 1 },
		"heads overlap": func(o *HeadLinear) { o.YHead = 3 },
		"rows overlap":  func(o *HeadLinear) { o.Rows, o.YRow = 2, 7 },
		"few elements":  func(o *HeadLinear) { o.Out, o.YHead, o.YRow = 9, 9, 18 },
		"weights":       func(o *HeadLinear) { o.W.DType = attn.E4M3 },
	} {
		o := of
		if change(&o); !errors.Is(d.HeadLinear(m.Stream, &o), attn.ErrShape) && !errors.Is(d.HeadLinear(m.Stream, &o), attn.ErrUnsupported) && !errors.Is(d.HeadLinear(m.Stream, &o), attn.ErrDType) {
			t.Errorf("%s is not refused: %v", name, d.HeadLinear(m.Stream, &o))
		}
	}
	noError(t, errors.Join(d.HeadLinear(m.Stream, &of), m.Stream.Synchronize(), x.Buffer.Close()))
}

// BenchmarkGPUHeadLinear is the layers of DeepSeek's latent attention that read keys' and values' weights: four of each in turn. GB/s are of the
// weights, and GB/s/read those of a kernel that only reads as many bytes.
func BenchmarkGPUHeadLinear(b *testing.B) {
	m, d := realDecoder(b)
	rng := rand.New(rand.NewPCG(1, 2))
	const heads, layers, most = 128, 4, 64
	for _, s := range []struct{ in, out, rest int }{{128, 512, 64}, {512, 128, 0}, {256, 128, 0}} {
		x, y := m.filled(b, rng, attn.Float32, most*heads*(s.in+s.rest), 1), m.empty(b, most*heads*(s.out+s.rest))
		sink := m.Put(b, make([]byte, 4096), attn.Float32)
		var ops [layers]HeadLinear
		for i := range ops {
			w := m.filled(b, rng, attn.BFloat16, heads*s.in*s.out, 1/math.Sqrt(float64(s.in)))
			ops[i] = HeadLinear{Heads: heads, In: s.in, Out: s.out, Rest: s.rest, XHead: s.in + s.rest, XRow: heads * (s.in + s.rest), YHead: s.out + s.rest, YRow: heads * (s.out + s.rest), X: x, W: w, Y: y}
		}
		each := func(do func(o *HeadLinear) error) func() error {
			return func() error {
				for i := range ops {
					if err := do(&ops[i]); err != nil {
						return err
					}
				}
				return nil
			}
		}
		read := m.median(b, 11, each(func(o *HeadLinear) error { return m.Ceiling(b, o.W, sink)() })) / layers
		for _, rows := range []int{1, 2, 4, 8, 16, 64} {
			b.Run(fmt.Sprintf("%dx%d/%d", s.in, s.out, rows), func(b *testing.B) {
				took := m.median(b, 15, each(func(o *HeadLinear) error { o.Rows = rows; return d.HeadLinear(m.Stream, o) })) / layers
				bytes := float64(2 * heads * s.in * s.out)
				b.ReportMetric(took.Seconds()*1e6, "us")
				b.ReportMetric(bytes/took.Seconds()/1e9, "GB/s")
				b.ReportMetric(bytes/read.Seconds()/1e9, "GB/s/read")
				b.ReportMetric(0, "ns/op")
			})
		}
		for _, o := range ops {
			noError(b, o.W.Buffer.Close())
		}
		for _, x := range []gpu.Memory{x, y, sink} {
			noError(b, x.Buffer.Close())
		}
	}
}
