package model

import (
	"fmt"
	"math"
	"math/rand/v2"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/internal/reftest"

	"gorgonia.org/tensor"
)

// random is a Source of random weights, large enough for logits and attention
// that are far from flat.
type random struct {
	config hf.Config
	rng    *rand.Rand
}

func (r random) Config() hf.Config { return r.config }

func (r random) Tensor(name string, shape ...int) (*tensor.Dense, error) {
	data := make([]float32, tensor.Shape(shape).TotalSize())
	scale, offset := 1.5/math.Sqrt(float64(shape[len(shape)-1])), 0.0
	if len(shape) == 1 {
		scale = 0.3
		if len(name) > 17 && name[len(name)-17:] == "layer_norm.weight" {
			offset = 1
		}
	}
	for i := range data {
		data[i] = float32(offset + scale*r.rng.NormFloat64())
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data)), nil
}

// reference is OPT's decoder in float64, written for one sequence without a
// cache, straight from the formulas.
type reference struct{ w *Weights }

type matrix [][]float64

func (r reference) table(name string, row int) []float64 {
	t, ok := r.w.tensors[name]
	if !ok {
		panic("no weight " + name)
	}
	n := t.Shape()[1]
	out := make([]float64, n)
	switch data := t.Data().(type) {
	case []float32:
		for i, x := range data[row*n : (row+1)*n] {
			out[i] = float64(x)
		}
	case []la.F16:
		for i, x := range data[row*n : (row+1)*n] {
			out[i] = float64(x.Float32())
		}
	case []la.BF16:
		for i, x := range data[row*n : (row+1)*n] {
			out[i] = float64(x.Float32())
		}
	default:
		panic("weights of " + t.Dtype().String())
	}
	return out
}

// number is element i of a tensor of weights.
func number(t *tensor.Dense, i int) float64 {
	switch data := t.Data().(type) {
	case []float32:
		return float64(data[i])
	case []la.F16:
		return float64(data[i].Float32())
	case []la.BF16:
		return float64(data[i].Float32())
	}
	panic("weights of " + t.Dtype().String())
}

func (r reference) linear(x matrix, name string) matrix {
	w := r.w.tensors[name+".weight"]
	bias := r.w.tensors[name+".bias"]
	y := make(matrix, len(x))
	for i := range y {
		y[i] = make([]float64, w.Shape()[0])
	}
	for o := range w.Shape()[0] {
		row := r.table(name+".weight", o)
		add := 0.0
		if bias != nil {
			add = float64(bias.Float32s()[o])
		}
		for i, from := range x {
			sum := 0.0
			for j, v := range row {
				sum += v * from[j]
			}
			y[i][o] = sum + add
		}
	}
	return y
}

func (r reference) norm(x matrix, name string) matrix {
	y := make(matrix, len(x))
	for i, row := range x {
		mean, variance, n := 0.0, 0.0, float64(len(row))
		for _, v := range row {
			mean += v / n
		}
		for _, v := range row {
			variance += (v - mean) * (v - mean) / n
		}
		y[i] = make([]float64, len(row))
		for j, v := range row {
			y[i][j] = (v - mean) / math.Sqrt(variance+1e-5)
			if g := r.w.tensors[name+".weight"]; g != nil {
				y[i][j] = y[i][j]*float64(g.Float32s()[j]) + float64(r.w.tensors[name+".bias"].Float32s()[j])
			}
		}
	}
	return y
}

func plus(a, b matrix) matrix {
	y := make(matrix, len(a))
	for i := range a {
		y[i] = make([]float64, len(a[i]))
		for j := range a[i] {
			y[i][j] = a[i][j] + b[i][j]
		}
	}
	return y
}

func (r reference) attention(q, k, v matrix) matrix {
	c := r.w.config
	d, out := c.HeadDim(), make(matrix, len(q))
	for i := range q {
		out[i] = make([]float64, c.HiddenSize)
		for h := 0; h < c.HiddenSize; h += d {
			p, most, sum := make([]float64, i+1), math.Inf(-1), 0.0
			for j := range p {
				for e := range d {
					p[j] += q[i][h+e] * k[j][h+e]
				}
				p[j] /= math.Sqrt(float64(d))
				most = max(most, p[j])
			}
			for j := range p {
				p[j] = math.Exp(p[j] - most)
				sum += p[j]
			}
			for j := range p {
				for e := range d {
					out[i][h+e] += p[j] / sum * v[j][h+e]
				}
			}
		}
	}
	return out
}

// logits of every position.
func (r reference) logits(tokens []int) matrix { return r.head(r.states(tokens)) }

// last is the logits of the last position.
func (r reference) last(tokens []int) []float64 {
	return r.head(r.states(tokens)[len(tokens)-1:])[0]
}

// states are what the head makes logits of.
func (r reference) states(tokens []int) matrix {
	c := r.w.config
	x := make(matrix, len(tokens))
	for i, id := range tokens {
		x[i] = r.table("decoder.embed_tokens.weight", id)
	}
	if c.WordEmbedProjDim != c.HiddenSize {
		x = r.linear(x, "decoder.project_in")
	}
	for i := range x {
		for j, p := range r.table("decoder.embed_positions.weight", i+2) {
			x[i][j] += p
		}
	}
	for l := range c.Layers {
		name := fmt.Sprintf("decoder.layers.%d.", l)
		h := x
		if c.DoLayerNormBefore {
			h = r.norm(h, name+"self_attn_layer_norm")
		}
		h = r.attention(r.linear(h, name+"self_attn.q_proj"), r.linear(h, name+"self_attn.k_proj"), r.linear(h, name+"self_attn.v_proj"))
		x = plus(x, r.linear(h, name+"self_attn.out_proj"))
		if !c.DoLayerNormBefore {
			x = r.norm(x, name+"self_attn_layer_norm")
		}
		h = x
		if c.DoLayerNormBefore {
			h = r.norm(h, name+"final_layer_norm")
		}
		h = r.linear(h, name+"fc1")
		for i := range h {
			for j := range h[i] {
				if c.Activation == "gelu" {
					h[i][j] = reftest.GELU(h[i][j])
				} else {
					h[i][j] = max(0, h[i][j])
				}
			}
		}
		x = plus(x, r.linear(h, name+"fc2"))
		if !c.DoLayerNormBefore {
			x = r.norm(x, name+"final_layer_norm")
		}
	}
	if c.DoLayerNormBefore && !c.RemoveFinalLayerNorm {
		x = r.norm(x, "decoder.final_layer_norm")
	}
	if c.WordEmbedProjDim != c.HiddenSize {
		x = r.linear(x, "decoder.project_out")
	}
	return x
}

func (r reference) head(x matrix) matrix {
	if r.w.config.TieWordEmbeddings {
		r.w.tensors["head.weight"] = r.w.tensors["decoder.embed_tokens.weight"]
		defer delete(r.w.tensors, "head.weight")
		return r.linear(x, "head")
	}
	return r.linear(x, "lm_head")
}
