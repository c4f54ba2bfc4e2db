package nn

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"gorgonia.org/leanattention/rope"

	"gorgonia.org/leanattention/internal/attn"
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

	corners bool   // the op has no slope at some numbers, as ReLU at 0
	host    bool   // the op has no kernels for GPUs
	refused string // says why the op has no gradients on GPUs
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
	cases = append(cases, gradientsInHost(headCases(rng)...)...)
	cases = append(cases, crossEntropyCases(rng)...)
	cases = append(cases, embeddingCase(rng, true), embeddingCase(rng, false))
	cases = append(cases, elementCases(rng)...)
	cases = append(cases, moveCases(rng)...)
	cases = append(cases, gradientsInHost(append(stateCases(rng), sumPartsCases(rng)...)...)...)
	return append(cases, rotaryCases(rng)...)
}

// gradientsInHost marks cases whose gradients are computed in host memory alone.
func gradientsInHost(cases ...opCase) []opCase {
	for i := range cases {
		cases[i].refused = "gradient: an input is on a GPU, want host memory"
	}
	return cases
}

// onGPUs are the cases that have kernels for GPUs. TestGPUNodesRefuse has the others.
func onGPUs(cases []opCase) []opCase {
	return slices.DeleteFunc(cases, func(c opCase) bool { return c.host })
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
			var opts []Option
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
	for kind := ReLU; kind < activations; kind++ {
		f := kind.function()
		shape := randomShape(rng, 1, 2, 3, 4)
		cases = append(cases, opCase{
			name: kind.String(), shape: shape, corners: kind == ReLU, inputs: []opInput{randomInput(rng, "x", shape...)},
			build: func(in []*G.Node) (*G.Node, error) { return Activate(in[0], kind) },
			want: func(in [][]float64) []float64 {
				y := slices.Clone(in[0])
				for i, v := range y {
					y[i] = reftest.Activated(f, v)
				}
				return y
			},
		})
	}
	for kind := ReLU; kind < activations; kind++ {
		f := kind.function()
		shape := randomShape(rng, 1, 2, 3)
		if kind == SiLU {
			shape = []int{3, 1400}
		}
		cases = append(cases, opCase{
			name: "GLU, " + kind.String(), shape: shape, corners: kind == ReLU, inputs: []opInput{randomInput(rng, "gate", shape...), randomInput(rng, "up", shape...)},
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
	scalings := []rope.Scaling{nil, rope.Linear{Factor: 4}, rope.Llama3{Factor: 8, LowFrequency: 1, HighFrequency: 4, Context: 64}, rope.YaRN{Factor: 4, Context: 256}}
	for i := range 10 {
		config := rope.Config{HeadDim: 1 + rng.IntN(20), Interleaved: i%2 == 0, Scaling: scalings[i%len(scalings)]}
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
					for i := range w {
						a, b := i, i+len(w)
						if config.Interleaved {
							a, b = 2*i, 2*i+1
						}
						// A float64 has too few digits of p w at late positions.
						turns := w[i] / (2 * math.Pi)
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
	for i := range 24 {
		rows, in, out := 1+rng.IntN(5), 4*(1+rng.IntN(6)), 4*(1+rng.IntN(4))
		parts, gate := 1+i%3, i >= 12
		if gate { // of one weight, or of two
			parts, out = 1+i%2, 1+rng.IntN(17)
		}
		bias, residual, norm := rng.IntN(2) == 0, (gate || parts == 1) && rng.IntN(2) == 0, i%4 // 1: LayerNorm, 2: RMSNorm, 3: with 1+gamma
		f, kind := attn.Activation(rng.IntN(attn.Activations)), ReLU+Activation(rng.IntN(int(activations-ReLU)))
		each, both := out, [2]int{0, 1} // rows of a weight; the weights of a gate and of what it is for
		if gate {
			if f = kind.function(); parts == 1 {
				each, both[1] = 2*out, 0
			}
		}
		c := opCase{
			name:  fmt.Sprintf("Linear of %d x %d x %d, %d layers, bias %v, residual %v, norm %d, %v, gate %v", rows, in, out, parts, bias, residual, norm, f, gate),
			shape: tensor.Shape{rows, out}, size: 50, corners: f == attn.ReLU,
		}
		add := func(name string, shape ...int) func(in []*G.Node) *G.Node {
			at := len(c.inputs)
			c.inputs = append(c.inputs, randomInput(rng, name, shape...))
			return func(in []*G.Node) *G.Node { return in[at] }
		}
		add("x", rows, in)
		for j := range parts {
			add(fmt.Sprint("w", j), each, in)
		}
		if bias {
			for j := range parts {
				add(fmt.Sprint("b", j), each)
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
			var opts []Option
			if !gate && f != attn.NoActivation {
				opts = append(opts, WithActivation(Activation(f)))
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
			if gate {
				return GatedLinear(in[0], ws, bs, kind, opts...)
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
			y, err := GLU(ys[0], ys[1], SiLU)
			if parts == 3 && err == nil {
				y, err = RMSNorm(y, nil, ys[2], eps)
			}
			return y, err
		}
		switch {
		case gate && parts == 2 && rows*out%4 != 0: // the gradient has the outputs of the layers without the gate
			c.refused = "kernels need a multiple of 16"
		case !gate && parts > 1: // Gorgonia's sum of gradients
			c.refused = "Expected left value to be Tensor"
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
			if gate {
				y := make([]float64, rows*out)
				for at := range y {
					var sums [2]float64
					for p, w := range both {
						o := at % out
						if p == 1 && parts == 1 {
							o += out
						}
						for k := range in {
							sums[p] += x[at/out*in+k] * all[1+w][o*in+k]
						}
						if bias {
							sums[p] += all[1+parts+w][o]
						}
					}
					y[at] = reftest.Activated(f, sums[0]) * sums[1]
					if residual {
						y[at] += all[1+parts*(1+count(bias))][at]
					}
				}
				return y
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

// headCases are linear layers by heads, also with elements of heads that pass through, and with keys of one x.
func headCases(rng *rand.Rand) (cases []opCase) {
	for i := range 15 {
		rows, heads, in, out, rest := 1+rng.IntN(5), 1+rng.IntN(4), 1+rng.IntN(9), 1+rng.IntN(7), 0
		keys := i%3 == 2
		if i >= 9 { // rows that kernels read
			in = 8 * (1 + rng.IntN(9))
		}
		if i >= 12 { // one row, in place
			rows, out = 1, 4*out
		}
		if i%3 > 0 {
			rest = 1 + rng.IntN(4)
		}
		if i >= 12 && rest > 0 {
			rest = 4
		}
		r := headLinear{name: "HeadLinear", heads: heads, rest: i%3 > 0, keys: keys}
		width, xHead, w := heads*(in+rest), in+rest, []int{heads * out, in}
		if keys {
			width, xHead, w = in+rest, 0, []int{heads * in, out}
		}
		cases = append(cases, opCase{
			name: fmt.Sprintf("HeadLinear of %d rows of %d heads, %d to %d, rest %d, keys %v", rows, heads, in, out, rest, keys), shape: tensor.Shape{rows, heads * (out + rest)}, size: 20, host: keys || in%8 > 0,
			inputs: []opInput{randomInput(rng, "x", rows, width), randomInput(rng, "w", w...)},
			build: func(in []*G.Node) (*G.Node, error) {
				if i%3 == 0 {
					return HeadLinear(in[0], in[1], heads, WithMixedPrecision())
				}
				return newHeadLinear(r, in[0], in[1], nil)
			},
			want: func(all [][]float64) []float64 {
				y := make([]float64, rows*heads*(out+rest))
				for at := range y {
					row, h, o := at/(heads*(out+rest)), at/(out+rest)%heads, at%(out+rest)
					x := all[0][row*width+h*xHead:][:in+rest]
					if o >= out {
						y[at] = x[in+o-out]
						continue
					}
					for j := range in {
						if keys {
							y[at] += x[j] * all[1][(h*in+j)*out+o]
						} else {
							y[at] += x[j] * all[1][(h*out+o)*in+j]
						}
					}
				}
				return y
			},
		})
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

func embeddingCase(rng *rand.Rand, residual bool) opCase {
	rows, of, n := 1+rng.IntN(6), 1+rng.IntN(4), 4*(1+rng.IntN(5))
	ids := make([]int, rows)
	for i := range ids {
		ids[i] = rng.IntN(of)
	}
	inputs := []opInput{randomInput(rng, "table", of, n), {name: "ids", shape: tensor.Shape{rows}, ids: ids}}
	if residual {
		inputs = append(inputs, randomInput(rng, "residual", rows, n))
	}
	return opCase{
		name: fmt.Sprintf("Embedding of %v from %d rows, residual %v", ids, of, residual), shape: tensor.Shape{rows, n}, inputs: inputs,
		build: func(in []*G.Node) (*G.Node, error) {
			if residual {
				return Embedding(in[0], in[1], in[2])
			}
			return Embedding(in[0], in[1], nil)
		},
		want: func(in [][]float64) []float64 {
			y := make([]float64, rows*n)
			for at := range y {
				y[at] = in[0][ids[at/n]*n+at%n]
				if residual {
					y[at] += in[2][at]
				}
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
