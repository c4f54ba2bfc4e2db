package layers

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/weight"
)

// rowsWeight is a channel of a layer whose x is quantised by row.
type rowsWeight struct {
	m       *weight.Matrix
	channel int
	b       *float64
}

// quantisedRow is a row of x as numbers times a scale.
type quantisedRow struct {
	bytes []byte
	scale float32
}

func numberOf(f weight.Format, b byte) float64 {
	if f == weight.E4M3 {
		return float64(half.E4M3(b).Float32())
	}
	return float64(int8(b))
}

// product returns a channel's number of a row in float64, the bound of the error of its sums, and, for INT8, the number in float32.
//
// Tensor cores add 32 products of E4M3 and the sum so far with 13 bits below the largest of them.
func (w *rowsWeight) product(x *quantisedRow) (sum, bound float64, exact float32) {
	in := len(x.bytes)
	bytes := unsafe.Slice((*byte)(w.m.At(w.channel*in)), in)
	groups, size := w.m.Groups(in), 0.0
	if w.m.Format == weight.Int8 {
		for k, b := range bytes {
			sum += numberOf(w.m.Format, b) * numberOf(w.m.Format, x.bytes[k])
		}
		exact = float32(int32(sum)) * w.m.Scales[w.channel]
		exact = float32(exact * x.scale)
		sum *= float64(w.m.Scales[w.channel])
		size = math.Abs(sum)
	} else {
		for first := 0; first < in; first += 128 {
			part, lost := 0.0, 0.0
			for k := first; k < min(first+128, in); {
				top := math.Abs(part)
				for end := min(k+32, in); k < end; k++ {
					v := numberOf(w.m.Format, bytes[k]) * numberOf(w.m.Format, x.bytes[k])
					part += v
					top = max(top, math.Abs(v))
				}
				lost += 34 * 0x1p-13 * max(top, math.Abs(part))
			}
			g := 0
			if w.m.Group > 0 {
				g = first / w.m.Group
			}
			scale := float64(w.m.Scales[w.channel*groups+g])
			sum, bound, size = sum+part*scale, bound+lost*math.Abs(scale), size+math.Abs(part*scale)
		}
	}
	scale := float64(x.scale)
	sum, bound = sum*scale, (bound+0x1p-20*size)*scale
	if w.b != nil {
		sum += *w.b
		bound += 0x1p-22 * math.Abs(*w.b)
		exact = float32(exact + float32(*w.b))
	}
	return sum, bound, exact
}

// size returns the sum of the magnitudes of a channel's products.
func (w *rowsWeight) size(x *quantisedRow) (size float64) {
	in := len(x.bytes)
	groups := w.m.Groups(in)
	for k, b := range unsafe.Slice((*byte)(w.m.At(w.channel*in)), in) {
		g := 0
		if w.m.Group > 0 {
			g = k / w.m.Group
		}
		size += math.Abs(numberOf(w.m.Format, b) * numberOf(w.m.Format, x.bytes[k]) * float64(w.m.Scales[w.channel*groups+g]))
	}
	return size * float64(x.scale)
}

// testRows runs random layers that quantise rows of x, against float64 products of the same bytes. INT8 has the bits of float32 arithmetic with
// exact sums, where no activation is an approximation.
func testRows(t *testing.T, m *machine, d *Engine, cases, longest, widest int, someRows ...int) {
	rng := reftest.Rand(t)
	worst := 0.0
	for i := range cases {
		f := []weight.Format{weight.Int8, weight.E4M3}[i%2]
		rows := enginetest.Pick(rng, someRows...)
		in := min(enginetest.Pick(rng, 1, 31, 32, 33, 96, 128, 130, 320, 576, 640, 1000, 2048, 4096, 5120), longest)
		o := Linear{Rows: rows, In: in, Activation: attn.Activation(rng.IntN(attn.Activations)), QuantiseX: true, RoundX: rng.IntN(2) == 0, Early: rng.IntN(2) == 0}
		x := m.random(t, rng, attn.Float32, rows*in, math.Ldexp(1, enginetest.Pick(rng, 0, 0, -40, 40)))
		change := func(at int, v float64) {
			data := enginetest.Read(t, &o.X)
			x.x[at] = v
			enginetest.Put(data, at, attn.Float32, v)
			noError(t, o.X.Buffer.Upload(o.X.Offset, data))
		}
		o.X = x.Memory
		zero, bad := rng.IntN(rows), -1 // a row of zeros, and one with a number that is not finite
		for k := range in {
			x.x[zero*in+k] = 0
		}
		change(zero*in, 0)
		data := enginetest.Read(t, &o.X)
		for k := range in {
			enginetest.Put(data, zero*in+k, attn.Float32, 0)
		}
		noError(t, o.X.Buffer.Upload(o.X.Offset, data))
		change(rng.IntN(len(x.x)), 1e3)
		norm := rng.IntN(4) == 0
		if !norm && rng.IntN(2) == 0 {
			bad = rng.IntN(rows)
			change(bad*in+rng.IntN(in), []float64{math.NaN(), math.Inf(1), math.Inf(-1)}[rng.IntN(3)])
		}
		left := x.x
		if norm {
			gamma := m.random(t, rng, attn.Float32, in, 1)
			o.Norm = &Norm{Gamma: gamma.Memory, Eps: 1e-5, RMS: true}
			left = rmsNormed(x.x, in, gamma.x, nil, false, 1e-5)
		}
		quantised := make([]quantisedRow, rows)
		for r := range quantised {
			narrow := make([]float32, in)
			for k := range narrow {
				narrow[k] = float32(left[r*in+k])
			}
			quantised[r].bytes = make([]byte, in)
			quantised[r].scale = weight.QuantiseRow(f, quantised[r].bytes, narrow)
		}
		gate, halves := rng.IntN(3) == 0, rng.IntN(3) == 0
		outs := make([]int, enginetest.Pick(rng, 1, 1, 2, 3))
		if gate || halves {
			outs = make([]int, 2)
		}
		for j := range outs {
			outs[j] = min(enginetest.Pick(rng, 1, 7, 16, 50, 128, 129, 255, 256, 300, 384, 768), widest)
		}
		if gate {
			outs[1] = outs[0]
			o.Gate, o.Activation = true, attn.Activation(1+rng.IntN(attn.Activations-1))
		}
		var parts [][]rowsWeight // a channel each
		all := outs
		if halves {
			all = []int{outs[0] + outs[1]}
		}
		for _, out := range all {
			w, _ := narrowMatrix(rng, f, out, in, true)
			packed, memory := m.pack(t, &w, in)
			b := m.random(t, rng, attn.Float32, out, 1)
			if rng.IntN(3) == 0 {
				b = matrix{}
			}
			channels := make([]rowsWeight, out)
			for c := range channels {
				channels[c] = rowsWeight{m: &w, channel: c}
				if b.x != nil {
					channels[c].b = &b.x[c]
				}
			}
			if !halves {
				parts = append(parts, channels)
				o.Parts = append(o.Parts, LinearPart{W: memory, B: b.Memory, Out: out, Packed: packed})
				continue
			}
			n := outs[0]
			parts = append(parts, channels[:n], channels[n:])
			up := b.Memory
			if up.Buffer != nil {
				up.Offset, up.Len = up.Offset+int64(4*n), out-n
				b.Memory.Len = n
			}
			o.Parts = append(o.Parts, LinearPart{W: memory, B: b.Memory, Out: n, Packed: packed}, LinearPart{W: memory, B: up, Out: out - n, Packed: packed, First: n})
		}
		for j := range o.Parts {
			o.Parts[j].Y = m.empty(t, rows*o.Parts[j].Out)
		}
		var residual matrix
		if (len(o.Parts) == 1 || o.Gate) && rng.IntN(2) == 0 {
			residual = m.random(t, rng, attn.Float32, rows*outs[0], 1)
			o.Residual = residual.Memory
		}
		n, err := d.Scratch(&o)
		noError(t, err)
		o.Scratch = m.empty(t, n)
		noError(t, d.Linear(m.Stream, &o))
		m.Settle(t)
		if i%3 == 0 {
			testLinearRepeats(t, m, d, &o)
		}
		for j := range parts {
			if o.Gate && j > 0 {
				break
			}
			y := enginetest.Read(t, &o.Parts[j].Y)
			for r := range rows {
				x := &quantised[r]
				for c := range outs[j] {
					got := enginetest.Get(y, r*outs[j]+c, attn.Float32)
					where := func() string {
						return strings.Join([]string{f.String(), o.Activation.String()}, ", ")
					}
					if r == bad {
						if got == got {
							t.Fatalf("case %d, %s: row %d, column %d: %v, want NaN", i, where(), r, c, got)
						}
						continue
					}
					sum, off, exact := parts[j][c].product(x)
					more := func(w *rowsWeight) float64 { // the norm of the GPU is off by some roundings, and so are some numbers by one
						if !norm {
							return 0
						}
						return 0x1p-20 + map[weight.Format]float64{weight.Int8: 0x1p-6, weight.E4M3: 0x1p-3}[f]*w.size(x)
					}
					off += more(&parts[j][c])
					bound := off
					bound = reftest.MostSlope*bound + 0x1p-21*math.Abs(sum)
					want := reftest.Activated(o.Activation, sum)
					if o.Gate {
						up, upOff, _ := parts[1][c].product(x)
						upOff += more(&parts[1][c])
						want, bound = want*up, bound*math.Abs(up)+(math.Abs(want)+bound)*upOff+0x1p-20*math.Abs(want*up)
					}
					if residual.x != nil {
						want += residual.x[r*outs[j]+c]
						bound += 0x1p-22 * (math.Abs(want) + math.Abs(residual.x[r*outs[j]+c]))
					}
					if f == weight.Int8 && !norm && !o.Gate && (o.Activation == attn.NoActivation || o.Activation == attn.ReLU) {
						if o.Activation == attn.ReLU {
							exact = max(exact, 0)
						}
						if residual.x != nil {
							exact = float32(exact + float32(residual.x[r*outs[j]+c]))
						}
						want, bound = float64(exact), 0
					}
					if f == weight.E4M3 && !norm && !o.Gate && bound > 0 && (o.Activation == attn.NoActivation || o.Activation == attn.ReLU) {
						worst = max(worst, math.Abs(got-want)/bound)
					}
					if !(math.Abs(got-want) <= bound) {
						t.Fatalf("case %d, %s, %d x %d x %v, part %d, gate %v, halves %v, norm %v, bias %v, residual %v: row %d, column %d: %v, want %v, bound %v",
							i, where(), rows, in, outs, j, o.Gate, halves, norm, parts[j][c].b != nil, residual.x != nil, r, c, got, want, bound)
					}
				}
			}
		}
		memory := []gpu.Memory{o.X, o.Residual, o.Scratch}
		for j := range o.Parts {
			if p := &o.Parts[j]; p.First == 0 {
				memory = append(memory, p.W, p.B)
			}
			memory = append(memory, o.Parts[j].Y)
		}
		for i := range memory {
			if memory[i].Buffer != nil {
				noError(t, memory[i].Buffer.Close())
			}
		}
	}
	t.Logf("E4M3: the largest error is %.3g of its bound", worst)
}

// testRowsRefuses: what no kernel has is an error that names it.
func testRowsRefuses(t *testing.T, m *machine, d *Engine) {
	rng := rand.New(rand.NewPCG(1, 2))
	w, _ := narrowMatrix(rng, weight.Q8_0, 16, 64, true)
	packed, memory := m.pack(t, &w, 64)
	o := Linear{Rows: 65, In: 64, QuantiseX: true, X: m.empty(t, 65*64), Parts: []LinearPart{{W: memory, Packed: packed, Out: 16, Y: m.empty(t, 65*16)}}}
	says := "w of layer 0 is Q8_0"
	if d.info.Capability != groupCapability {
		says = "want 9.0"
	}
	if err := d.Linear(m.Stream, &o); !errors.Is(err, attn.ErrUnsupported) || !strings.Contains(err.Error(), says) {
		t.Errorf("the error is %v, want %q", err, says)
	}
}

func TestGPUNarrowRows(t *testing.T) {
	m, d := realDecoder(t)
	testRowsRefuses(t, m, d)
	if d.info.Capability != groupCapability {
		t.Skip("there are no kernels")
	}
	testRows(t, m, d, enginetest.OrShort(120, 40), enginetest.OrShort(5120, 1000), 800, manyRowsQuantised...)
	testNarrow(t, m, d, enginetest.OrShort(78, 26), enginetest.OrShort(4096, 600), 800, 129, 200, 257, 300, 513)
}

var manyRowsQuantised = slices.Clone([]int{65, 66, 100, 127, 128, 129, 200, 256, 257, 300, 513})
