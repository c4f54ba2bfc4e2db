package nn

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gputest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// An opCase is an op with inputs, and what it computes in float64.
type opCase struct {
	name   string
	inputs []opInput
	build  func(in []*G.Node) (*G.Node, error)
	want   func(in [][]float64) []float64
	shape  tensor.Shape
	size   float64 // of which results are off by some units in the last place; 0: 1
	off    float64 // that they may be off by besides
	short  bool    // in float32 alone

	corners bool // it has no slope here and there, as ReLU at 0
}

// opInput is numbers, or indices.
type opInput struct {
	name  string
	shape tensor.Shape
	x     []float64
	ids   []int
}

func randomInput(rng *rand.Rand, name string, shape ...int) opInput {
	x := make([]float64, tensor.Shape(shape).TotalSize())
	for i := range x {
		x[i] = float64(float32(rng.NormFloat64()))
	}
	return opInput{name: name, shape: shape, x: x}
}

func randomShape(rng *rand.Rand, ranks ...int) []int {
	shape := make([]int, ranks[rng.IntN(len(ranks))])
	for i := range shape {
		shape[i] = 1 + rng.IntN(7)
	}
	return shape
}

// opCases are all ops of this package that have a rule, with fresh inputs.
func opCases(rng *rand.Rand) (cases []opCase) {
	cases = append(cases, rmsNormCases(rng)...)
	cases = append(cases, activationCases(rng)...)
	cases = append(cases, linearCases(rng)...)
	cases = append(cases, embeddingCase(rng))
	cases = append(cases, elementCases(rng)...)
	cases = append(cases, moveCases(rng)...)
	return append(cases, rotaryCases(rng)...)
}

func rmsNormCases(rng *rand.Rand) (cases []opCase) {
	for i := range 12 {
		shape := randomShape(rng, 1, 2, 3)
		last := len(shape) - 1
		if i%3 == 0 {
			shape[last] = []int{1, 31, 64, 129, 1100}[rng.IntN(5)]
		}
		gamma, residual, offset, heads := i%2 == 0, rng.IntN(2) == 0, rng.IntN(2) == 0, i%4 == 2
		n := shape[last]
		if heads {
			shape[last] *= 1 + rng.IntN(3)
			residual = false
		}
		offset = offset && gamma
		c := opCase{name: fmt.Sprintf("RMSNorm of %v, gamma %v, 1+gamma %v, residual %v, heads %v", shape, gamma, offset, residual, heads), shape: shape}
		c.inputs = append(c.inputs, randomInput(rng, "x", shape...))
		if gamma {
			c.inputs = append(c.inputs, randomInput(rng, "gamma", n))
		}
		if residual {
			c.inputs = append(c.inputs, randomInput(rng, "residual", shape...))
		}
		const eps = 1e-3
		c.build = func(in []*G.Node) (*G.Node, error) {
			var g, r *G.Node
			var opts []NormOption
			if gamma {
				g = in[1]
			}
			if residual {
				r = in[len(in)-1]
			}
			if offset {
				opts = append(opts, WithUnitOffset())
			}
			if heads {
				return QKNorm(in[0], g, eps, opts...)
			}
			return RMSNorm(in[0], g, r, eps, opts...)
		}
		c.want = func(in [][]float64) []float64 {
			x := in[0]
			y := make([]float64, len(x))
			for at := 0; at < len(x); at += n {
				squares := 0.0
				for _, v := range x[at : at+n] {
					squares += v * v
				}
				for j, v := range x[at : at+n] {
					y[at+j] = v / math.Sqrt(squares/float64(n)+eps)
					if offset {
						y[at+j] *= 1 + in[1][j]
					} else if gamma {
						y[at+j] *= in[1][j]
					}
					if residual {
						y[at+j] += in[len(in)-1][at+j]
					}
				}
			}
			return y
		}
		cases = append(cases, c)
	}
	return cases
}

func activationCases(rng *rand.Rand) (cases []opCase) {
	nodes := map[attn.Activation]func(*G.Node) (*G.Node, error){attn.GELU: GELU, attn.GELUTanh: GELUTanh, attn.SiLU: SiLU}
	for f, build := range nodes {
		shape := randomShape(rng, 1, 2, 3, 4)
		cases = append(cases, opCase{
			name: f.String(), shape: shape, inputs: []opInput{randomInput(rng, "x", shape...)},
			build: func(in []*G.Node) (*G.Node, error) { return build(in[0]) },
			want: func(in [][]float64) []float64 {
				y := slices.Clone(in[0])
				for i, v := range y {
					y[i] = reftest.Activated(f, v)
				}
				return y
			},
		})
	}
	for kind := range Gate(gates) {
		f := map[Gate]attn.Activation{SwiGLU: attn.SiLU, GeGLU: attn.GELU, GeGLUTanh: attn.GELUTanh, ReGLU: attn.ReLU}[kind]
		shape := randomShape(rng, 1, 2, 3)
		if kind == SwiGLU {
			shape = []int{3, 1400}
		}
		cases = append(cases, opCase{
			name: kind.String(), shape: shape, corners: kind == ReGLU, inputs: []opInput{randomInput(rng, "gate", shape...), randomInput(rng, "up", shape...)},
			build: func(in []*G.Node) (*G.Node, error) { return GLU(in[0], in[1], kind) },
			want: func(in [][]float64) []float64 {
				y := slices.Clone(in[0])
				for i, v := range y {
					y[i] = reftest.Activated(f, v) * in[1][i]
				}
				return y
			},
		})
	}
	return cases
}

func rotaryCases(rng *rand.Rand) (cases []opCase) {
	scalings := []la.RotaryScaling{nil, la.LinearScaling{Factor: 4}, la.Llama3Scaling{Factor: 8, LowFrequency: 1, HighFrequency: 4, Context: 64}, la.YaRNScaling{Factor: 4, Context: 256}}
	for i := range 10 {
		config := la.RotaryConfig{HeadDim: 1 + rng.IntN(20), Interleaved: i%2 == 0, Scaling: scalings[i%len(scalings)]}
		config.Dim = 2 * rng.IntN(config.HeadDim/2+1)
		if config.HeadDim%2 == 1 && config.Dim == 0 {
			config.HeadDim++
		}
		if i%3 == 0 {
			config.Base = 1 + 1e6*rng.Float64()
		}
		rows, heads := 1+rng.IntN(5), 1+rng.IntN(4)
		shape := []int{rows, heads * config.HeadDim}
		if rng.IntN(2) == 0 {
			shape = []int{rows, heads, config.HeadDim}
		}
		positions := make([]int, rows)
		for j := range positions {
			positions[j] = rng.IntN([]int{10, 1000, 1 << 20, math.MaxInt32}[rng.IntN(4)])
		}
		cases = append(cases, opCase{
			name: fmt.Sprintf("Rotary of %v at %v, %+v", shape, positions, config), shape: shape,
			inputs: []opInput{randomInput(rng, "x", shape...), {name: "positions", shape: tensor.Shape{rows}, ids: positions}},
			build:  func(in []*G.Node) (*G.Node, error) { return Rotary(in[0], in[1], config) },
			want: func(in [][]float64) []float64 {
				w, m, err := config.Frequencies()
				if err != nil {
					panic(err)
				}
				y := slices.Clone(in[0])
				for at := 0; at < len(y); at += config.HeadDim {
					p := in[1][at/(heads*config.HeadDim)]
					for i, w := range w {
						a, b := i, i+config.RotatedDim()/2
						if config.Interleaved {
							a, b = 2*i, 2*i+1
						}
						// A float64 has too few digits of p w at late positions.
						turns := w / (2 * math.Pi)
						whole := math.FMA(p, turns, -math.Round(p*turns))
						s, c := math.Sincos(2 * math.Pi * whole)
						x, z := in[0][at+a], in[0][at+b]
						y[at+a], y[at+b] = m*(x*c-z*s), m*(z*c+x*s)
					}
				}
				return y
			},
			size: 4, off: float64(slices.Max(positions)) * 0x1p-58, // of elements of up to 5, or so
		})
	}
	return cases
}

// linearCases are layers with all that a layer may have, one or several of one input.
func linearCases(rng *rand.Rand) (cases []opCase) {
	for i := range 12 {
		rows, in, out := 1+rng.IntN(5), 4*(1+rng.IntN(6)), 4*(1+rng.IntN(4))
		parts := 1 + i%3
		bias, residual, norm := rng.IntN(2) == 0, parts == 1 && rng.IntN(2) == 0, i%4 // 1: LayerNorm, 2: RMSNorm, 3: with 1+gamma
		f := attn.Activation(rng.IntN(attn.Activations))
		c := opCase{
			name:  fmt.Sprintf("Linear of %d x %d x %d, %d layers, bias %v, residual %v, norm %d, %v", rows, in, out, parts, bias, residual, norm, f),
			shape: tensor.Shape{rows, out}, size: 50, corners: f == attn.ReLU,
		}
		add := func(name string, shape ...int) func(in []*G.Node) *G.Node {
			at := len(c.inputs)
			c.inputs = append(c.inputs, randomInput(rng, name, shape...))
			return func(in []*G.Node) *G.Node { return in[at] }
		}
		add("x", rows, in)
		for j := range parts {
			add(fmt.Sprint("w", j), out, in)
		}
		if bias {
			for j := range parts {
				add(fmt.Sprint("b", j), out)
			}
		}
		var r, gamma, beta func(in []*G.Node) *G.Node
		if residual {
			r = add("residual", rows, out)
		}
		if norm > 0 {
			gamma = add("gamma", in)
		}
		if norm == 1 {
			beta = add("beta", in)
		}
		const eps = 1e-2
		c.build = func(in []*G.Node) (*G.Node, error) {
			var opts []LinearOption
			switch f {
			case attn.ReLU:
				opts = append(opts, WithReLU())
			case attn.GELU:
				opts = append(opts, WithGELU())
			case attn.GELUTanh:
				opts = append(opts, WithGELUTanh())
			case attn.SiLU:
				opts = append(opts, WithSiLU())
			}
			switch norm {
			case 1:
				opts = append(opts, WithNorm(gamma(in), beta(in), eps))
			case 2:
				opts = append(opts, WithRMSNorm(gamma(in), eps))
			case 3:
				opts = append(opts, WithRMSNorm(gamma(in), eps, WithUnitOffset()))
			}
			if residual {
				opts = append(opts, WithResidual(r(in)))
			}
			ws, bs := in[1:1+parts], []*G.Node(nil)
			if bias {
				bs = in[1+parts : 1+2*parts]
			}
			if parts == 1 {
				var b *G.Node
				if bias {
					b = bs[0]
				}
				return Linear(in[0], ws[0], b, opts...)
			}
			ys, err := Linears(in[0], ws, bs, opts...)
			if err != nil {
				return nil, err
			}
			y, err := GLU(ys[0], ys[1], SwiGLU)
			if parts == 3 && err == nil {
				y, err = RMSNorm(y, nil, ys[2], eps)
			}
			return y, err
		}
		c.want = func(all [][]float64) []float64 {
			x := slices.Clone(all[0])
			last := len(all) - 1
			for at := 0; at < len(x) && norm > 0; at += in {
				row := x[at : at+in]
				if norm == 1 {
					copy(row, reference(row, all[last-1], all[last], eps))
					continue
				}
				rms64(row, eps)
				for j := range row {
					if norm == 3 {
						row[j] *= 1 + all[last][j]
					} else {
						row[j] *= all[last][j]
					}
				}
			}
			var ys [3][]float64
			for p := range parts {
				ys[p] = make([]float64, rows*out)
				for at := range ys[p] {
					sum := 0.0
					for k := range in {
						sum += x[at/out*in+k] * all[1+p][at%out*in+k]
					}
					if bias {
						sum += all[1+parts+p][at%out]
					}
					ys[p][at] = reftest.Activated(f, sum)
					if residual {
						ys[p][at] += all[1+parts*(1+count(bias))][at]
					}
				}
			}
			if parts == 1 {
				return ys[0]
			}
			for at := range ys[0] {
				ys[0][at] = reftest.Activated(attn.SiLU, ys[0][at]) * ys[1][at]
			}
			if parts == 3 {
				for at := 0; at < len(ys[0]); at += out {
					rms64(ys[0][at:at+out], eps)
				}
				for at := range ys[0] {
					ys[0][at] += ys[2][at]
				}
			}
			return ys[0]
		}
		cases = append(cases, c)
	}
	return cases
}

func rms64(x []float64, eps float64) {
	sum := 0.0
	for _, v := range x {
		sum += v * v
	}
	for i := range x {
		x[i] /= math.Sqrt(sum/float64(len(x)) + eps)
	}
}

func embeddingCase(rng *rand.Rand) opCase {
	rows, of, n := 1+rng.IntN(6), 1+rng.IntN(4), 4*(1+rng.IntN(5))
	ids := make([]int, rows)
	for i := range ids {
		ids[i] = rng.IntN(of)
	}
	return opCase{
		name: fmt.Sprintf("Embedding of %v from %d rows", ids, of), shape: tensor.Shape{rows, n}, short: true,
		inputs: []opInput{randomInput(rng, "table", of, n), {name: "ids", shape: tensor.Shape{rows}, ids: ids}, randomInput(rng, "residual", rows, n)},
		build:  func(in []*G.Node) (*G.Node, error) { return Embedding(in[0], in[1], in[2]) },
		want: func(in [][]float64) []float64 {
			y := slices.Clone(in[2])
			for at := range y {
				y[at] += in[0][ids[at/n]*n+at%n]
			}
			return y
		},
	}
}

func elementCases(rng *rand.Rand) (cases []opCase) {
	for i := range 8 {
		shape := randomShape(rng, 1, 2, 3)
		other, times := shape, i%2 == 0
		if i%4 >= 2 {
			other = shape[len(shape)-1:]
		}
		build := map[bool]func(a, b *G.Node) (*G.Node, error){false: Add, true: Mul}[times]
		cases = append(cases, opCase{
			name: fmt.Sprintf("of %v and %v, product %v", shape, other, times), shape: shape,
			inputs: []opInput{randomInput(rng, "a", shape...), randomInput(rng, "b", other...)},
			build:  func(in []*G.Node) (*G.Node, error) { return build(in[0], in[1]) },
			want: func(in [][]float64) []float64 {
				y := slices.Clone(in[0])
				for j := range y {
					if v := in[1][j%len(in[1])]; times {
						y[j] *= v
					} else {
						y[j] += v
					}
				}
				return y
			},
		})
	}
	shape := randomShape(rng, 1, 2, 3)
	return append(cases, opCase{
		name: fmt.Sprintf("Scale of %v", shape), shape: shape, inputs: []opInput{randomInput(rng, "x", shape...)},
		build: func(in []*G.Node) (*G.Node, error) { return Scale(in[0], -2.5) },
		want: func(in [][]float64) []float64 {
			y := slices.Clone(in[0])
			for i := range y {
				y[i] *= -2.5
			}
			return y
		},
	})
}

// index is where an element of a tensor of a shape is in memory.
func index(s tensor.Shape, at ...int) (i int) {
	for axis, d := range s {
		i = i*d + at[axis]
	}
	return i
}

// each calls f for each place of a tensor of a shape.
func each(s tensor.Shape, f func(at []int)) {
	at := make([]int, len(s))
	for range s.TotalSize() {
		f(at)
		for axis := len(s) - 1; axis >= 0; axis-- {
			if at[axis]++; at[axis] < s[axis] {
				break
			}
			at[axis] = 0
		}
	}
}

func moveCases(rng *rand.Rand) (cases []opCase) {
	for range 4 {
		whole := tensor.Shape(randomShape(rng, 1, 2, 3, 4))
		axis := rng.IntN(len(whole))
		from := rng.IntN(whole[axis])
		to := from + 1 + rng.IntN(whole[axis]-from)
		part := whole.Clone()
		part[axis] = to - from
		cases = append(cases, opCase{
			name: fmt.Sprintf("Slice of %v, [%d, %d) of axis %d", whole, from, to, axis), shape: part,
			inputs: []opInput{randomInput(rng, "x", whole...)},
			build:  func(in []*G.Node) (*G.Node, error) { return Slice(in[0], axis, from, to) },
			want: func(in [][]float64) []float64 {
				y := make([]float64, part.TotalSize())
				each(part, func(at []int) {
					there := slices.Clone(at)
					there[axis] += from
					y[index(part, at...)] = in[0][index(whole, there...)]
				})
				return y
			},
		})

		count := 1 + rng.IntN(3)
		all, pieces := part.Clone(), make([]tensor.Shape, count)
		all[axis] = 0
		var inputs []opInput
		for i := range pieces {
			pieces[i] = part.Clone()
			pieces[i][axis] = 1 + rng.IntN(3)
			all[axis] += pieces[i][axis]
			inputs = append(inputs, randomInput(rng, fmt.Sprint("x", i), pieces[i]...))
		}
		cases = append(cases, opCase{
			name: fmt.Sprintf("Concat of %v along %d", pieces, axis), shape: all, inputs: inputs,
			build: func(in []*G.Node) (*G.Node, error) { return Concat(axis, in...) },
			want: func(in [][]float64) []float64 {
				y := make([]float64, all.TotalSize())
				each(all, func(at []int) {
					there, of := slices.Clone(at), 0
					for ; there[axis] >= pieces[of][axis]; of++ {
						there[axis] -= pieces[of][axis]
					}
					y[index(all, at...)] = in[of][index(pieces[of], there...)]
				})
				return y
			},
		})

		b, n, heads, d := 1+rng.IntN(3), 1+rng.IntN(5), 1+rng.IntN(4), 1+rng.IntN(6)
		merged, split := tensor.Shape{b, n, heads * d}, tensor.Shape{b, heads, n, d}
		cases = append(cases, opCase{
			name: fmt.Sprintf("SplitHeads of %v", merged), shape: split, inputs: []opInput{randomInput(rng, "x", merged...)},
			build: func(in []*G.Node) (*G.Node, error) { return SplitHeads(in[0], heads) },
			want: func(in [][]float64) []float64 {
				y := make([]float64, split.TotalSize())
				each(split, func(at []int) { y[index(split, at...)] = in[0][index(merged, at[0], at[2], at[1]*d+at[3])] })
				return y
			},
		}, opCase{
			name: fmt.Sprintf("MergeHeads of %v", split), shape: merged, inputs: []opInput{randomInput(rng, "x", split...)},
			build: func(in []*G.Node) (*G.Node, error) { return MergeHeads(in[0]) },
			want: func(in [][]float64) []float64 {
				y := make([]float64, merged.TotalSize())
				each(merged, func(at []int) { y[index(merged, at...)] = in[0][index(split, at[0], at[2]/d, at[1], at[2]%d)] })
				return y
			},
		}, opCase{
			name: fmt.Sprintf("Reshape of %v", split), shape: tensor.Shape{b * heads, n * d}, inputs: []opInput{randomInput(rng, "x", split...)},
			build: func(in []*G.Node) (*G.Node, error) { return Reshape(in[0], b*heads, n*d) },
			want:  func(in [][]float64) []float64 { return in[0] },
		})
	}
	return cases
}

// opGraph is the graph of a case, with inputs of float32 or float64.
type opGraph struct {
	g  *G.ExprGraph
	in []*G.Node
	y  *G.Node
}

// graph makes it; where says where an input's value is.
func (c *opCase) graph(t *testing.T, dtype tensor.Dtype, where func(*tensor.Dense) G.Value) *opGraph {
	t.Helper()
	o := &opGraph{g: G.NewGraph()}
	for _, in := range c.inputs {
		v := in.tensor(dtype, where != nil)
		var value G.Value = v
		if where != nil {
			value = where(v)
		}
		o.in = append(o.in, G.NewTensor(o.g, v.Dtype(), len(in.shape), G.WithShape(in.shape...), G.WithName(in.name), G.WithValue(value)))
	}
	y, err := c.build(o.in)
	if err != nil {
		t.Fatalf("%s: %v", c.name, err)
	}
	o.y = y
	if !slices.Equal(o.y.Shape(), c.shape) || o.y.Dtype() != dtype {
		t.Fatalf("%s: a node of shape %v and type %v, want %v and %v", c.name, o.y.Shape(), o.y.Dtype(), c.shape, dtype)
	}
	return o
}

func (in *opInput) tensor(dtype tensor.Dtype, short bool) *tensor.Dense {
	var data any
	switch {
	case in.ids != nil && short:
		ids := make([]int32, len(in.ids))
		for i, x := range in.ids {
			ids[i] = int32(x)
		}
		data = ids
	case in.ids != nil:
		data = in.ids
	case dtype == tensor.Float32:
		x := make([]float32, len(in.x))
		for i, v := range in.x {
			x[i] = float32(v)
		}
		data = x
	default:
		data = in.x
	}
	return tensor.New(tensor.WithShape(in.shape...), tensor.WithBacking(data))
}

// numbers is the inputs as the reference takes them.
func (c *opCase) numbers() [][]float64 {
	all := make([][]float64, len(c.inputs))
	for i, in := range c.inputs {
		all[i] = in.x
		for _, id := range in.ids {
			all[i] = append(all[i], float64(id))
		}
	}
	return all
}

func floatsOf(t *testing.T, v G.Value) []float64 {
	t.Helper()
	switch x := v.Data().(type) {
	case []float32:
		return toFloat64(x)
	case []float64:
		return x
	}
	t.Fatalf("a value of %T", v.Data())
	return nil
}

func (c *opCase) compare(t *testing.T, what string, got, want []float64, unit float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s, %s: %d elements, want %d", c.name, what, len(got), len(want))
	}
	size := max(c.size, 1)
	for i, w := range want {
		if !(math.Abs(got[i]-w) <= unit*size*(1+math.Abs(w))+c.off) {
			t.Fatalf("%s, %s: element %d is %v, want %v", c.name, what, i, got[i], w)
		}
	}
}

// Each op is its formula, in both types and on both machines, and again with other inputs.
func TestOps(t *testing.T) {
	rng := seeded(t)
	for range 5 {
		for _, c := range opCases(rng) {
			for dtype, unit := range map[tensor.Dtype]float64{tensor.Float32: 1e-6, tensor.Float64: 1e-14} {
				if c.short && dtype == tensor.Float64 {
					continue
				}
				o := c.graph(t, dtype, nil)
				vm := G.NewTapeMachine(o.g)
				for run := range 2 {
					if err := vm.RunAll(); err != nil {
						t.Fatalf("%s: %v", c.name, err)
					}
					c.compare(t, fmt.Sprintf("%v, run %d", dtype, run), floatsOf(t, o.y.Value()), c.want(c.numbers()), unit)
					vm.Reset()
					for i, in := range c.inputs {
						if in.ids == nil {
							c.inputs[i].x = randomInput(rng, "", in.shape...).x
							if err := G.Let(o.in[i], c.inputs[i].tensor(dtype, false)); err != nil {
								t.Fatal(err)
							}
						}
					}
				}
				vm.Close()
				o = c.graph(t, dtype, nil)
				lisp := G.NewLispMachine(o.g, G.ExecuteFwdOnly())
				if err := lisp.RunAll(); err != nil {
					t.Fatalf("%s: %v", c.name, err)
				}
				c.compare(t, "lisp machine", floatsOf(t, o.y.Value()), c.want(c.numbers()), unit)
				lisp.Close()
			}
		}
	}
}

// Gradients are central differences of the reference, in float64 on both machines; in float32
// they are those of float64.
func TestOpGradients(t *testing.T) {
	rng := seeded(t)
	for _, c := range opCases(rng) {
		if c.shape.TotalSize() > 300 {
			continue
		}
		weights := randomInput(rng, "weights", c.shape...)
		cost := func(o *opGraph, dtype tensor.Dtype) *G.Node {
			v := weights.tensor(dtype, false)
			w := G.NewTensor(o.g, dtype, len(c.shape), G.WithShape(c.shape...), G.WithName("weights"), G.WithValue(v))
			return G.Must(G.Sum(G.Must(G.HadamardProd(o.y, w))))
		}
		numbers := c.numbers()
		sum := func() (s float64) {
			for i, y := range c.want(numbers) {
				s += weights.x[i] * y
			}
			return s
		}
		differences := func(i int, got []float64) []float64 {
			const h = 1e-5
			d, middle := make([]float64, len(numbers[i])), sum()
			for j, old := range numbers[i] {
				numbers[i][j] = old + h
				up := sum()
				numbers[i][j] = old - h
				down := sum()
				numbers[i][j] = old
				d[j] = (up - down) / (2 * h)
				if c.corners && math.Abs(up+down-2*middle) > 1e-7 { // there is no slope
					d[j] = got[j]
				}
			}
			return d
		}
		for dtype, unit := range map[tensor.Dtype]float64{tensor.Float64: 1e-7, tensor.Float32: 1e-4} {
			if c.short && dtype == tensor.Float64 {
				continue
			}
			o := c.graph(t, dtype, nil)
			var wrt G.Nodes
			var of []int
			for i, in := range c.inputs {
				if in.ids == nil {
					wrt, of = append(wrt, o.in[i]), append(of, i)
				}
			}
			grads, err := G.Grad(cost(o, dtype), wrt...)
			if err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
			values := make([]G.Value, len(grads))
			for i := range grads {
				G.Read(grads[i], &values[i])
			}
			vm := G.NewTapeMachine(o.g)
			if err := vm.RunAll(); err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
			for i, v := range values {
				got := floatsOf(t, v)
				c.compare(t, fmt.Sprintf("tape, %v, d%s", dtype, c.inputs[of[i]].name), got, differences(of[i], got), unit*float64(1+c.shape.TotalSize()/10))
			}
			vm.Close()
			if _, err := G.Grad(G.Must(G.Sum(grads[0])), wrt[0]); err == nil || !strings.Contains(err.Error(), "second derivative") {
				t.Errorf("%s: second derivative: %v", c.name, err)
			}

			o = c.graph(t, dtype, nil)
			cost(o, dtype)
			lisp := G.NewLispMachine(o.g)
			if err := lisp.RunAll(); err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
			for _, i := range of {
				v, err := o.in[i].Grad()
				if err != nil {
					t.Fatal(err)
				}
				got := floatsOf(t, v)
				c.compare(t, fmt.Sprintf("lisp, %v, d%s", dtype, c.inputs[i].name), got, differences(i, got), unit*float64(1+c.shape.TotalSize()/10))
			}
			lisp.Close()
		}
	}
}

// Each op gives on a GPU what it gives by its formula, and in a recording; inputs in different
// places are an error.
func TestGPUOps(t *testing.T) {
	gpu, rng := gputest.Open(t), seeded(t)
	upload := func(v *tensor.Dense) G.Value {
		d, err := gpu.Upload(v)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	for _, c := range opCases(rng) {
		o := c.graph(t, tensor.Float32, upload)
		vm := G.NewTapeMachine(o.g)
		check := func(what string) {
			t.Helper()
			d, ok := o.y.Value().(*la.DeviceTensor)
			if !ok {
				t.Fatalf("%s, %s: a %T", c.name, what, o.y.Value())
			}
			v, err := d.Download()
			if err != nil {
				t.Fatal(err)
			}
			c.compare(t, what, floatsOf(t, v), c.want(c.numbers()), 4e-6)
		}
		if err := la.Cause(vm.RunAll()); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		check("run")
		vm.Reset()
		recording, err := gpu.Record(vm.RunAll)
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		for i, in := range c.inputs {
			if in.ids == nil {
				c.inputs[i].x = randomInput(rng, "", in.shape...).x
				if err := o.in[i].Value().(*la.DeviceTensor).CopyFrom(c.inputs[i].tensor(tensor.Float32, true)); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := recording.Replay(); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		check("replay")
		if err := recording.Close(); err != nil {
			t.Fatal(err)
		}
		vm.Close()

		if len(c.inputs) > 1 {
			n := 0
			o = c.graph(t, tensor.Float32, func(v *tensor.Dense) G.Value {
				if n++; n > 1 {
					return v
				}
				return upload(v)
			})
			vm = G.NewTapeMachine(o.g)
			if err := la.Cause(vm.RunAll()); !errors.Is(err, la.ErrUnsupported) {
				t.Errorf("%s, x on the GPU and the rest in host memory: %v", c.name, err)
			}
			vm.Close()
		}
	}
}

// What is wrong is an error of the right kind that names the op, and no node.
func TestOpsWrongUse(t *testing.T) {
	g, h := G.NewGraph(), G.NewGraph()
	names := 0
	in := func(g *G.ExprGraph, dtype tensor.Dtype, shape ...int) *G.Node {
		names++
		return G.NewTensor(g, dtype, len(shape), G.WithShape(shape...), G.WithName(fmt.Sprint("input ", names)))
	}
	f32, f64, ids := tensor.Float32, tensor.Float64, tensor.Int
	x, scalar, other := in(g, f32, 2, 8), G.NewScalar(g, f32, G.WithName("scalar")), in(h, f32, 2, 8)
	rope := la.RotaryConfig{HeadDim: 4}
	for name, c := range map[string]struct {
		build func() (*G.Node, error)
		want  error
		says  string
	}{
		"RMSNorm of nil":          {func() (*G.Node, error) { return RMSNorm(nil, nil, nil, 1e-5) }, la.ErrGraph, "RMSNorm"},
		"RMSNorm of a scalar":     {func() (*G.Node, error) { return RMSNorm(scalar, nil, nil, 1e-5) }, la.ErrShape, "RMSNorm"},
		"RMSNorm of ids":          {func() (*G.Node, error) { return RMSNorm(in(g, ids, 2, 8), nil, nil, 1e-5) }, la.ErrDType, "RMSNorm"},
		"RMSNorm, gamma's length": {func() (*G.Node, error) { return RMSNorm(x, in(g, f32, 4), nil, 1e-5) }, la.ErrShape, "gamma"},
		"RMSNorm, gamma's type":   {func() (*G.Node, error) { return RMSNorm(x, in(g, f64, 8), nil, 1e-5) }, la.ErrDType, "gamma"},
		"RMSNorm, gamma's graph":  {func() (*G.Node, error) { return RMSNorm(x, in(h, f32, 8), nil, 1e-5) }, la.ErrGraph, "gamma"},
		"RMSNorm, residual":       {func() (*G.Node, error) { return RMSNorm(x, nil, in(g, f32, 2, 4), 1e-5) }, la.ErrShape, "residual"},
		"RMSNorm, eps":            {func() (*G.Node, error) { return RMSNorm(x, nil, nil, -1) }, la.ErrOption, "eps"},
		"RMSNorm, offset of none": {func() (*G.Node, error) { return RMSNorm(x, nil, nil, 0, WithUnitOffset()) }, la.ErrUnsupported, "WithUnitOffset"},
		"QKNorm without gamma":    {func() (*G.Node, error) { return QKNorm(x, nil, 1e-5) }, la.ErrGraph, "gamma"},
		"QKNorm of other heads":   {func() (*G.Node, error) { return QKNorm(x, in(g, f32, 3), 1e-5) }, la.ErrShape, "QKNorm"},
		"Linear, eps":             {func() (*G.Node, error) { return Linear(x, in(g, f32, 3, 8), nil, WithRMSNorm(nil, -1)) }, la.ErrOption, "eps"},
		"Linear, offset of none": {func() (*G.Node, error) {
			return Linear(x, in(g, f32, 3, 8), nil, WithRMSNorm(nil, 0, WithUnitOffset()))
		}, la.ErrUnsupported, "WithUnitOffset"},
		"SiLU of nil":               {func() (*G.Node, error) { return SiLU(nil) }, la.ErrGraph, "SiLU"},
		"GELUTanh of ids":           {func() (*G.Node, error) { return GELUTanh(in(g, ids, 2)) }, la.ErrDType, "GELUTanh"},
		"GLU without up":            {func() (*G.Node, error) { return GLU(x, nil, SwiGLU) }, la.ErrGraph, "up"},
		"GLU, shapes":               {func() (*G.Node, error) { return GLU(x, in(g, f32, 2, 4), SwiGLU) }, la.ErrShape, "up"},
		"GLU, graphs":               {func() (*G.Node, error) { return GLU(x, other, SwiGLU) }, la.ErrGraph, "up"},
		"GLU of another kind":       {func() (*G.Node, error) { return GLU(x, x, Gate(gates)) }, la.ErrOption, "Gate(4)"},
		"Rotary without positions":  {func() (*G.Node, error) { return Rotary(x, nil, rope) }, la.ErrGraph, "positions"},
		"Rotary, positions' length": {func() (*G.Node, error) { return Rotary(x, in(g, ids, 3), rope) }, la.ErrShape, "positions"},
		"Rotary, positions' type":   {func() (*G.Node, error) { return Rotary(x, in(g, f32, 2), rope) }, la.ErrDType, "positions"},
		"Rotary of other heads":     {func() (*G.Node, error) { return Rotary(x, in(g, ids, 2), la.RotaryConfig{HeadDim: 6}) }, la.ErrShape, "x"},
		"Rotary of a vector":        {func() (*G.Node, error) { return Rotary(in(g, f32, 8), in(g, ids, 8), rope) }, la.ErrShape, "rank"},
		"Rotary, config":            {func() (*G.Node, error) { return Rotary(x, in(g, ids, 2), la.RotaryConfig{HeadDim: 4, Base: -1}) }, la.ErrOption, "Base"},
		"Add of nil":                {func() (*G.Node, error) { return Add(x, nil) }, la.ErrGraph, "Add"},
		"Add, shapes":               {func() (*G.Node, error) { return Add(x, in(g, f32, 8, 2)) }, la.ErrShape, "Add"},
		"Add, a row":                {func() (*G.Node, error) { return Add(x, in(g, f32, 2)) }, la.ErrShape, "Add"},
		"Mul, types":                {func() (*G.Node, error) { return Mul(x, in(g, f64, 2, 8)) }, la.ErrDType, "Mul"},
		"Scale by 0":                {func() (*G.Node, error) { return Scale(x, 0) }, la.ErrOption, "factor"},
		"Scale by NaN":              {func() (*G.Node, error) { return Scale(x, math.NaN()) }, la.ErrOption, "factor"},
		"Slice, axis":               {func() (*G.Node, error) { return Slice(x, 2, 0, 1) }, la.ErrShape, "axis 2"},
		"Slice, a negative axis":    {func() (*G.Node, error) { return Slice(x, -1, 0, 1) }, la.ErrShape, "axis -1"},
		"Slice, empty":              {func() (*G.Node, error) { return Slice(x, 0, 1, 1) }, la.ErrShape, "[1, 1)"},
		"Slice, too far":            {func() (*G.Node, error) { return Slice(x, 0, 1, 3) }, la.ErrShape, "[1, 3)"},
		"Concat of nothing":         {func() (*G.Node, error) { return Concat(0) }, la.ErrGraph, "Concat"},
		"Concat, ranks":             {func() (*G.Node, error) { return Concat(0, x, in(g, f32, 8)) }, la.ErrShape, "x[1]"},
		"Concat, shapes":            {func() (*G.Node, error) { return Concat(0, x, in(g, f32, 2, 4)) }, la.ErrShape, "x[1]"},
		"Concat, axis":              {func() (*G.Node, error) { return Concat(2, x, x) }, la.ErrShape, "axis 2"},
		"SplitHeads of a matrix":    {func() (*G.Node, error) { return SplitHeads(x, 2) }, la.ErrShape, "rank 3"},
		"SplitHeads, heads":         {func() (*G.Node, error) { return SplitHeads(in(g, f32, 1, 2, 8), 3) }, la.ErrShape, "3 heads"},
		"MergeHeads of a matrix":    {func() (*G.Node, error) { return MergeHeads(x) }, la.ErrShape, "rank 4"},
		"Reshape, size":             {func() (*G.Node, error) { return Reshape(x, 3, 5) }, la.ErrShape, "Reshape"},
		"Reshape, an empty axis":    {func() (*G.Node, error) { return Reshape(x, 16, 1, 0) }, la.ErrShape, "Reshape"},
		"Reshape to a scalar":       {func() (*G.Node, error) { return Reshape(x) }, la.ErrShape, "scalar"},
	} {
		y, err := c.build()
		if y != nil || !errors.Is(err, c.want) || err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, error %v, want %v that says %q", name, y, err, c.want, c.says)
		}
	}
}

// Nodes of other parameters are other nodes.
func TestOpsHashes(t *testing.T) {
	g := G.NewGraph()
	x := G.NewMatrix(g, tensor.Float32, G.WithShape(4, 8), G.WithName("x"))
	at := G.NewVector(g, tensor.Int, G.WithShape(4), G.WithName("positions"))
	gamma := G.NewVector(g, tensor.Float32, G.WithShape(8), G.WithName("gamma"))
	seen := map[int64]int{}
	for i, build := range []func() (*G.Node, error){
		func() (*G.Node, error) { return RMSNorm(x, gamma, nil, 1e-5) },
		func() (*G.Node, error) { return RMSNorm(x, gamma, nil, 1e-6) },
		func() (*G.Node, error) { return RMSNorm(x, gamma, nil, 1e-5, WithUnitOffset()) },
		func() (*G.Node, error) { return QKNorm(x, gamma, 1e-5) },
		func() (*G.Node, error) { return SiLU(x) },
		func() (*G.Node, error) { return GELU(x) },
		func() (*G.Node, error) { return GELUTanh(x) },
		func() (*G.Node, error) { return GLU(x, x, SwiGLU) },
		func() (*G.Node, error) { return GLU(x, x, GeGLU) },
		func() (*G.Node, error) { return Rotary(x, at, la.RotaryConfig{HeadDim: 8}) },
		func() (*G.Node, error) { return Rotary(x, at, la.RotaryConfig{HeadDim: 4}) },
		func() (*G.Node, error) { return Rotary(x, at, la.RotaryConfig{HeadDim: 8, Dim: 4}) },
		func() (*G.Node, error) { return Rotary(x, at, la.RotaryConfig{HeadDim: 8, Base: 500}) },
		func() (*G.Node, error) { return Rotary(x, at, la.RotaryConfig{HeadDim: 8, Interleaved: true}) },
		func() (*G.Node, error) {
			return Rotary(x, at, la.RotaryConfig{HeadDim: 8, Scaling: la.LinearScaling{Factor: 2}})
		},
		func() (*G.Node, error) {
			return Rotary(x, at, la.RotaryConfig{HeadDim: 8, Scaling: la.LinearScaling{Factor: 3}})
		},
		func() (*G.Node, error) {
			return Rotary(x, at, la.RotaryConfig{HeadDim: 8, Scaling: la.YaRNScaling{Factor: 2, Context: 9}})
		},
		func() (*G.Node, error) { return Add(x, x) },
		func() (*G.Node, error) { return Mul(x, x) },
		func() (*G.Node, error) { return Scale(x, 2) },
		func() (*G.Node, error) { return Scale(x, 3) },
		func() (*G.Node, error) { return Slice(x, 0, 0, 2) },
		func() (*G.Node, error) { return Slice(x, 0, 1, 3) },
		func() (*G.Node, error) { return Slice(x, 1, 0, 2) },
		func() (*G.Node, error) { return Concat(0, x, x) },
		func() (*G.Node, error) { return Concat(1, x, x) },
		func() (*G.Node, error) { return Reshape(x, 8, 4) },
		func() (*G.Node, error) { return Reshape(x, 32) },
		func() (*G.Node, error) { return Linear(x, x, nil) },
		func() (*G.Node, error) { return Linear(x, x, nil, WithSiLU()) },
		func() (*G.Node, error) { return Linear(x, x, nil, WithGELUTanh()) },
		func() (*G.Node, error) { return Linear(x, x, nil, WithNorm(gamma, nil, 1e-5)) },
		func() (*G.Node, error) { return Linear(x, x, nil, WithRMSNorm(gamma, 1e-5)) },
		func() (*G.Node, error) { return Linear(x, x, nil, WithRMSNorm(gamma, 1e-5, WithUnitOffset())) },
	} {
		n, err := build()
		if err != nil {
			t.Fatal(i, err)
		}
		if j, ok := seen[n.ID()]; ok {
			t.Errorf("node %d is node %d: %v", i, j, n)
		}
		seen[n.ID()] = i
	}
}
