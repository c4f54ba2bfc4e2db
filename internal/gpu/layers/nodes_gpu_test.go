package layers

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
)

func TestGPURMSNorm(t *testing.T) {
	m, d := realDecoder(t)
	testRMSNorm(t, m, d, 60)
}

// testRMSNorm: rows of a warp and of a thread block, x of any magnitude, in place too.
func testRMSNorm(t *testing.T, m *machine, d *Engine, cases int) {
	rng := reftest.Rand(t)
	for i := range cases {
		rows, n := enginetest.Pick(rng, 1, 2, 7, 8, 9, 33), enginetest.Pick(rng, 1, 2, 31, 64, 128, 1023, 1024, 1025, 4096)
		x := m.random(t, rng, attn.Float32, rows*n, math.Ldexp(1, rng.IntN(20)-10))
		gamma, residual := m.random(t, rng, attn.Float32, n, 1), m.random(t, rng, attn.Float32, rows*n, 1)
		o := RMSNorm{Rows: rows, N: n, Eps: 1e-5, UnitOffset: i%3 == 0, X: x.Memory, Gamma: gamma.Memory, Residual: residual.Memory, Y: m.empty(t, rows*n)}
		y := o.Y
		switch i % 4 {
		case 1:
			o.Residual, residual.x = gpu.Memory{}, nil
		case 2:
			o.Y = o.X
		case 3:
			o.Gamma, gamma.x, o.UnitOffset = gpu.Memory{}, nil, false
		}
		noError(t, d.RMSNorm(m.Stream, &o))
		m.Settle(t)
		got := enginetest.Read(t, &o.Y)
		for at, want := range rmsNormed(x.x, n, gamma.x, residual.x, o.UnitOffset, 1e-5) {
			if v := enginetest.Get(got, at, attn.Float32); !(math.Abs(v-want) <= 4e-6*(1+math.Abs(want))) {
				t.Fatalf("%d x %d, element %d: %v, want %v", rows, n, at, v, want)
			}
		}
		for _, x := range []gpu.Memory{x.Memory, gamma.Memory, residual.Memory, y} {
			noError(t, x.Buffer.Close())
		}
	}
}

func TestGPURotary(t *testing.T) {
	m, d := realDecoder(t)
	testRotary(t, m, d, 60)
}

// turnings are those of so many pairs.
func turnings(base float64, pairs int) attn.Turnings {
	w := make([]float64, pairs)
	for i := range w {
		w[i] = math.Pow(base, -float64(i)/float64(pairs))
	}
	return attn.TurningsOf(w)
}

// testRotary: heads of all kinds at positions of any size.
func testRotary(t *testing.T, m *machine, d *Engine, cases int) {
	rng := reftest.Rand(t)
	for i := range cases {
		o := Rotary{Rows: 1 + rng.IntN(9), Heads: 1 + rng.IntN(5)}
		o.HeadDim = enginetest.Pick(rng, 2, 5, 64, 80, 128, 256, 300)
		pairs := min(enginetest.Pick(rng, 1, o.HeadDim/4, o.HeadDim/2, o.HeadDim/2), nodePairs)
		o.Interleaved, o.Factor = i%2 == 0, enginetest.Pick(rng, 1, 1.1386)
		pairs = max(pairs, 1)
		o.Turns = turnings(1e4, pairs)
		width := o.Heads * o.HeadDim
		x := m.random(t, rng, attn.Float32, o.Rows*width, 1)
		o.X, o.Y = x.Memory, m.empty(t, o.Rows*width)
		positions, data := make([]int, o.Rows), make([]byte, 4*o.Rows)
		for r := range positions {
			positions[r] = rng.IntN(enginetest.Pick(rng, 1, 100, 1<<17, math.MaxInt32))
			binary.LittleEndian.PutUint32(data[4*r:], uint32(positions[r]))
		}
		at := m.Put(t, data, attn.Float32)
		o.Positions = gpu.Bytes{Buffer: at.Buffer, Offset: at.Offset}
		noError(t, d.Rotary(m.Stream, &o))
		m.Settle(t)
		got := enginetest.Read(t, &o.Y)
		for at, want := range x.x {
			e := at % o.HeadDim
			if e < 2*pairs {
				pair, second, apart := e%pairs, e >= pairs, pairs
				if o.Interleaved {
					pair, second, apart = e/2, e%2 == 1, 1
				}
				s, c := math.Sincos(o.Turns.Of(pair).Angle(positions[at/width]))
				if second {
					want = o.Factor * (want*c + x.x[at-apart]*s)
				} else {
					want = o.Factor * (want*c - x.x[at+apart]*s)
				}
			}
			if v := enginetest.Get(got, at, attn.Float32); !(math.Abs(v-want) <= 3e-6) {
				t.Fatalf("%d rows of %d heads of %d, %d pairs, interleaved %v, at %v: element %d is %v, want %v",
					o.Rows, o.Heads, o.HeadDim, pairs, o.Interleaved, positions, at, v, want)
			}
		}
		for _, x := range []gpu.Memory{o.X, o.Y, at} {
			noError(t, x.Buffer.Close())
		}
	}
}

func TestGPUElements(t *testing.T) {
	m, d := realDecoder(t)
	testElements(t, m, d, 60)
}

// testElements: vectors that end anywhere, factors and terms that begin again, in place too.
func testElements(t *testing.T, m *machine, d *Engine, cases int) {
	rng := reftest.Rand(t)
	for i := range cases {
		n := enginetest.Pick(rng, 1, 3, 4, 1023, 1024, 1025, 5000)
		o := Elements{N: n, Activation: attn.Activation(i % attn.Activations), Scale: enginetest.Pick(rng, 0, 1, -0.75)}
		x, times, plus := m.random(t, rng, attn.Float32, n, 2), m.random(t, rng, attn.Float32, n, 1), m.random(t, rng, attn.Float32, n, 1)
		o.X, o.Y = x.Memory, m.empty(t, n)
		y := o.Y
		if rng.IntN(3) > 0 {
			o.Times, o.TimesPeriod = times.Memory, enginetest.Pick(rng, 0, 0, 1, (n+3)/4, (n+3)/4*4/2)
			o.TimesPeriod = min(o.TimesPeriod, n)
		}
		if rng.IntN(3) > 0 {
			o.Plus, o.PlusPeriod = plus.Memory, min(enginetest.Pick(rng, 0, 0, 3, 4, 8), n)
		}
		if rng.IntN(3) == 0 {
			o.Y = o.X
		}
		noError(t, d.Elements(m.Stream, &o))
		m.Settle(t)
		got := enginetest.Read(t, &o.Y)
		index := func(at, period int) int {
			if period == 0 {
				return at
			}
			return at % period
		}
		for at, v := range x.x {
			want := reftest.Activated(o.Activation, v)
			if o.Scale != 0 {
				want *= o.Scale
			}
			if o.Times.Buffer != nil {
				want *= times.x[index(at, o.TimesPeriod)]
			}
			if o.Plus.Buffer != nil {
				want += plus.x[index(at, o.PlusPeriod)]
			}
			if got := enginetest.Get(got, at, attn.Float32); !(math.Abs(got-want) <= 2e-6*(1+math.Abs(v)*4+math.Abs(want))) {
				t.Fatalf("%+v: element %d is %v, want %v", o, at, got, want)
			}
		}
		for _, x := range []gpu.Memory{x.Memory, times.Memory, plus.Memory, y} {
			noError(t, x.Buffer.Close())
		}
	}
}

// What is wrong is an error that says what, and nothing is queued.
func testNodesRefuse(t *testing.T, m *machine, d *Engine) {
	rng := reftest.Rand(t)
	x := m.random(t, rng, attn.Float32, 64, 1)
	y := m.empty(t, 64)
	half := m.random(t, rng, attn.Float16, 64, 1)
	square := Linear{Rows: 8, In: 8, X: x.Memory, Parts: []LinearPart{{W: half.Memory, Y: y, Out: 8}}, Residual: y, Activation: attn.SiLU}
	turns := turnings(1e4, nodePairs+1)
	at := gpu.Bytes{Buffer: y.Buffer}
	d.separateGates = true // as where there is no kernel that does both
	defer func() { d.separateGates = false }()
	for name, err := range map[string]error{
		"a layer over its residual":      d.Linear(m.Stream, &square),
		"rms norm of no rows":            d.RMSNorm(m.Stream, &RMSNorm{Rows: 0, N: 4, X: x.Memory, Y: y}),
		"rms norm of too few elements":   d.RMSNorm(m.Stream, &RMSNorm{Rows: 2, N: 64, X: x.Memory, Y: y}),
		"rms norm of float16":            d.RMSNorm(m.Stream, &RMSNorm{Rows: 1, N: 64, X: half.Memory, Y: y}),
		"rms norm, eps":                  d.RMSNorm(m.Stream, &RMSNorm{Rows: 1, N: 64, Eps: -1, X: x.Memory, Y: y}),
		"rotary without pairs":           d.Rotary(m.Stream, &Rotary{Rotary: attn.Rotary{HeadDim: 4}, Rows: 1, Heads: 1, X: x.Memory, Y: y, Positions: at}),
		"rotary of more pairs":           d.Rotary(m.Stream, &Rotary{Rotary: attn.Rotary{HeadDim: 2*nodePairs + 2, Turns: turns}, Rows: 1, Heads: 1, X: x.Memory, Y: y, Positions: at}),
		"rotary without positions":       d.Rotary(m.Stream, &Rotary{Rotary: attn.Rotary{HeadDim: 4, Turns: turns[:16]}, Rows: 1, Heads: 1, X: x.Memory, Y: y}),
		"elements, none":                 d.Elements(m.Stream, &Elements{X: x.Memory, Y: y}),
		"elements, activation":           d.Elements(m.Stream, &Elements{N: 4, Activation: attn.Activations, X: x.Memory, Y: y}),
		"elements, a period":             d.Elements(m.Stream, &Elements{N: 4, TimesPeriod: -1, X: x.Memory, Y: y}),
		"elements, too few factors":      d.Elements(m.Stream, &Elements{N: 64, Times: gpu.Memory{Buffer: y.Buffer, DType: attn.Float32, Len: 4}, X: x.Memory, Y: y}),
		"elements, factors of a float16": d.Elements(m.Stream, &Elements{N: 64, Times: half.Memory, X: x.Memory, Y: y}),
	} {
		if err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// BenchmarkGPUNodes is what nodes take among others in a graph, of the shapes of Llama 3.2 1B and
// Llama 3 8B: microseconds a launch.
func BenchmarkGPUNodes(b *testing.B) {
	m, d := realDecoder(b)
	rng := reftest.Rand(b)
	for _, c := range []struct {
		name                      string
		hidden, inner, heads, dim int
	}{{"1b", 2048, 8192, 32, 64}, {"8b", 4096, 14336, 32, 128}} {
		for _, rows := range []int{1, 16, 512} {
			b.Run(fmt.Sprintf("%s/rows%d", c.name, rows), func(b *testing.B) {
				x, y := m.filled(b, rng, attn.Float32, rows*c.inner, 1), m.empty(b, rows*c.inner)
				up, gamma := m.filled(b, rng, attn.Float32, rows*c.inner, 1), m.filled(b, rng, attn.Float32, c.hidden, 1)
				at := m.Put(b, make([]byte, 4*rows), attn.Float32)
				of := attn.Rotary{HeadDim: c.dim, Factor: 1, Turns: turnings(5e5, c.dim/2)}
				const launches = 100
				for name, queue := range map[string]func() error{
					"rms norm": func() error {
						return d.RMSNorm(m.Stream, &RMSNorm{Rows: rows, N: c.hidden, Eps: 1e-5, X: x, Gamma: gamma, Y: y})
					},
					"norm of heads": func() error {
						return d.RMSNorm(m.Stream, &RMSNorm{Rows: rows * c.heads, N: c.dim, Eps: 1e-5, X: x, Gamma: gamma, Y: y})
					},
					"rotary": func() error {
						return d.Rotary(m.Stream, &Rotary{Rotary: of, Rows: rows, Heads: c.heads, X: x, Y: y, Positions: gpu.Bytes{Buffer: at.Buffer, Offset: at.Offset}})
					},
					"swiglu": func() error {
						return d.Elements(m.Stream, &Elements{N: rows * c.inner, Activation: attn.SiLU, X: x, Times: up, Y: y})
					},
					"add": func() error {
						return d.Elements(m.Stream, &Elements{N: rows * c.hidden, X: x, Plus: up, Y: y})
					},
				} {
					g, err := m.Stream.Capture(func() error {
						for range launches {
							if err := queue(); err != nil {
								return err
							}
						}
						return nil
					})
					noError(b, err)
					took := m.inTurn(b, 15, []*cuda.Graph{g})[0]
					b.ReportMetric(took.Seconds()*1e6/launches, "us/"+strings.ReplaceAll(name, " ", "_"))
					noError(b, g.Close())
				}
				b.ReportMetric(0, "ns/op")
				for _, x := range []gpu.Memory{x, y, up, gamma, at} {
					noError(b, x.Buffer.Close())
				}
			})
		}
	}
}
