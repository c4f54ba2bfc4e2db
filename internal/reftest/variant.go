package reftest

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/variant"
)

// variedScore is a score that the shape's variant has changed: the values of the program's nodes, and their error bounds.
type variedScore struct {
	*variant.Program
	hidden         bool
	values, errors []float64
	tensors        []variant.Tensor
}

// varied applies the shape's variant to a score with the error bound off.
func (s Shape) varied(seq, pos, head, j int, score, off, u float64) variedScore {
	p := s.Variant
	at := &variant.At{Score: score, Query: s.Keys[seq] - s.Queries[seq] + pos, Key: j, Head: head, Sequence: seq, Tensors: s.Tensors}
	values, errors, seen := VariantAt(p, at, off, u)
	if !seen {
		return variedScore{hidden: true}
	}
	errors[p.Score] += 4 * u * math.Abs(values[p.Score])
	return variedScore{p, false, values, errors, s.Tensors}
}

// VariantAt computes the values of a program's nodes, and error bounds for an implementation with the unit roundoff u whose score has the error
// bound off, if the query sees the key.
func VariantAt(p *variant.Program, at *variant.At, off, u float64) (values, errors []float64, seen bool) {
	both := make([]float64, 2*len(p.Nodes))
	values, errors = both[:len(p.Nodes)], both[len(p.Nodes):]
	p.Values(at, values)
	if p.Visible >= 0 && values[p.Visible] == 0 {
		return values, errors, false
	}
	for i := range p.Nodes {
		if errors[i] = errorOf(p, i, values, errors, off, u); errors[i] != errors[i] { // Inf - Inf, or 0 Inf
			errors[i] = math.Inf(1)
		}
	}
	return values, errors, true
}

// partial returns the index of the element of partial derivative k, in its tensor, and the derivative with its error bound.
func (v *variedScore) partial(k int) (tensor, at int, by, byErr float64) {
	p := v.Partials[k]
	n := &v.Nodes[p.Element]
	for axis, arg := range n.Arguments(v.Program) {
		at = at*v.tensors[n.Tensor].Shape[axis] + int(v.values[arg])
	}
	return n.Tensor, at, v.values[p.By], v.errors[p.By]
}

// errorOf bounds the error of a node's value, from the errors of its arguments. A condition has the truth of the exact values.
func errorOf(p *variant.Program, i int, values, errors []float64, off, u float64) float64 {
	n, y := &p.Nodes[i], math.Abs(values[i])
	if n.Op == variant.Score {
		return off + 2*u*y
	}
	if n.Kind != variant.Float || n.Op == variant.Element {
		return 0
	}
	var x, e [4]float64
	for k, arg := range n.Arguments(p) {
		x[k], e[k] = math.Abs(values[arg]), errors[arg]
	}
	rounded := 4 * u * y
	switch n.Op {
	case variant.Add, variant.Subtract:
		return e[0] + e[1] + rounded
	case variant.Multiply:
		return x[0]*e[1] + x[1]*e[0] + e[0]*e[1] + rounded
	case variant.Divide:
		if x[1] <= e[1] {
			return math.Inf(1)
		}
		return (e[0]+y*e[1])/(x[1]-e[1]) + rounded
	case variant.Min, variant.Max:
		return max(e[0], e[1])
	case variant.Negate, variant.Abs:
		return e[0]
	case variant.Exp:
		return math.Exp(values[n.Args[0]]+e[0]) - y + rounded
	case variant.Log:
		if x[0] <= e[0] {
			return math.Inf(1)
		}
		return e[0]/(x[0]-e[0]) + rounded + u
	case variant.Sqrt:
		return math.Sqrt(e[0]) + rounded
	case variant.Tanh: // within 2^-21 in vectors of float32
		return e[0] + rounded + 8*u
	case variant.Softplus:
		return e[0] + rounded + 4*u
	case variant.Sigmoid:
		return e[0]*y + e[0]*e[0] + rounded + u*1e-3
	case variant.Where:
		if values[n.Args[0]] != 0 {
			return e[1]
		}
		return e[2]
	}
	return rounded // of a number
}

// galleryEntry is a variant by its name. Its tensors are table, with a row for each head, and doc, with the number of
// a document for each token of each sequence.
type galleryEntry struct {
	Name string
	variant.Source
}

// Gallery are variants that people use.
var Gallery = []galleryEntry{
	{"soft cap", variant.Source{Score: "cap*tanh(score/cap)"}},
	{"ALiBi", variant.Source{Score: "score + slope[head]*(key-query)"}},
	{"relative bias table, as in T5", variant.Source{Score: "score + table[head][min(abs(query-key), 31)]"}},
	{"documents", variant.Source{Visible: "doc[sequence][max(query, 0)] == doc[sequence][key]"}},
	{"prefix language model", variant.Source{Visible: "key <= query || key < n"}},
	{"dilated", variant.Source{Visible: "key <= query && (query-key) % 3 == 0"}},
	{"blocks", variant.Source{Visible: "key <= query && (div(key, 64) % 3 == 0 || div(key, 64) == div(query, 64))"}},
	{"local and global", variant.Source{Visible: "abs(query-key) < n || key < 4 || head == 0"}},
	{"decay by distance", variant.Source{Score: "score - log(1 + rate*abs(query-key))"}},
	{"sigmoid attention", variant.Source{Score: "-softplus(-(score - offset))", Unnormalised: true}},
	{"heads that see nothing", variant.Source{Score: "score*0.5", Visible: "head % 2 == 1 && key < query"}},
	{"exponentials of everything", variant.Source{Score: "where(key > query, -abs(score), sigmoid(score) + max(score, -2)) - sqrt(float(key)+1)/8 + exp(-abs(score))", Visible: "key != 5"}},
}

// Varied returns the shape with a variant of the gallery.
func (s Shape) Varied(rng *rand.Rand, i int) Shape {
	source := Gallery[i].Source
	source.Params = map[string]float64{"cap": 3, "n": float64(rng.IntN(40)), "rate": 0.125, "offset": 4.5}
	text := source.Score + source.Visible
	numbers := func(shape ...int) variant.Tensor {
		t := variant.Tensor{Shape: shape}
		n := 1
		for _, size := range shape {
			n *= size
		}
		for range n {
			t.F64 = append(t.F64, float64(float32(rng.NormFloat64()*0.5)))
		}
		return t
	}
	s.Tensors = nil
	if strings.Contains(text, "doc[") {
		t := variant.Tensor{Shape: []int{len(s.Keys), max(1, slices.Max(s.Keys))}}
		for range t.Shape[0] {
			for j, doc := 0, int32(0); j < t.Shape[1]; j++ {
				if rng.IntN(20) == 0 {
					doc += 1 + rng.Int32N(3)
				}
				t.I32 = append(t.I32, doc)
			}
		}
		source.Tensors, s.Tensors = append(source.Tensors, variant.Declared{Name: "doc", Rank: 2, Int: true}), append(s.Tensors, t)
	}
	if strings.Contains(text, "slope[") {
		source.Tensors, s.Tensors = append(source.Tensors, variant.Declared{Name: "slope", Rank: 1}), append(s.Tensors, numbers(s.Heads))
	}
	if strings.Contains(text, "table[") {
		source.Tensors, s.Tensors = append(source.Tensors, variant.Declared{Name: "table", Rank: 2}), append(s.Tensors, numbers(s.Heads, 32))
	}
	p, err := variant.New(source)
	if err != nil {
		panic(err)
	}
	s.Variant = p
	return s
}

// BuiltIns are built-in masks and changes of scores, each as a variant too. A tensor is slope, of the heads.
var BuiltIns = []struct {
	Name string
	attn.Mask
	SoftCap float64
	Slopes  bool
	variant.Source
}{
	{"causal", attn.Mask{Causal: true}, 0, false, variant.Source{Visible: "key <= query"}},
	{"window", attn.Mask{Causal: true, Window: 33}, 0, false, variant.Source{Visible: "key <= query && query-key < 33"}},
	{"sink tokens", attn.Mask{Causal: true, Window: 20, SinkTokens: 4}, 0, false, variant.Source{Visible: "key <= query && (query-key < 20 || key < 4)"}},
	{"ALiBi", attn.Mask{}, 0, true, variant.Source{Score: "score + slope[head]*(key-query)", Tensors: []variant.Declared{{Name: "slope", Rank: 1}}}},
	{"soft cap", attn.Mask{}, 2, false, variant.Source{Score: "2*tanh(score/2)"}},
	{"all", attn.Mask{Causal: true, Window: 70}, 3, true, variant.Source{
		Score: "3*tanh(score/3) + slope[head]*(key-query)", Visible: "key <= query && query-key < 70", Tensors: []variant.Declared{{Name: "slope", Rank: 1}},
	}},
}

// BuiltIn returns the shape with a built-in mask or change of scores, and the shape with the variant in its place.
func (s Shape) BuiltIn(rng *rand.Rand, i int) (builtIn, varied Shape) {
	b := &BuiltIns[i]
	builtIn, varied = s, s
	builtIn.Mask, builtIn.SoftCap = b.Mask, b.SoftCap
	if b.Slopes {
		slope := variant.Tensor{Shape: []int{s.Heads}}
		for range s.Heads {
			x := math.Exp2(-float64(1 + rng.IntN(8))) // exact in any type
			slope.F64, builtIn.Slopes = append(slope.F64, x), append(builtIn.Slopes, x)
		}
		varied.Tensors = []variant.Tensor{slope}
	}
	p, err := variant.New(b.Source)
	if err != nil {
		panic(err)
	}
	varied.Variant = p
	return builtIn, varied
}

// expressionOf returns a random expression of a kind. With compare, conditions may be of floats, and floats may become ints.
func expressionOf(rng *rand.Rand, kind variant.Kind, depth int, compare bool) string {
	pick := func(all ...string) string { return all[rng.IntN(len(all))] }
	sub := func(k variant.Kind) string { return "(" + expressionOf(rng, k, depth-1, compare) + ")" }
	if depth == 0 {
		switch kind {
		case variant.Int:
			return pick("query", "key", "head", "sequence", "3", "17", "n")
		case variant.Bool:
			return pick("true", "key <= query", "head == 1", "query-key < 5")
		}
		return pick("score", "score", "1.5", "x", "0.25", "a[head%3][key%5]")
	}
	switch kind {
	case variant.Int:
		switch rng.IntN(5) {
		case 0:
			return "where(" + sub(variant.Bool) + "," + sub(variant.Int) + "," + sub(variant.Int) + ")"
		case 1:
			return pick("min", "max") + "(" + sub(variant.Int) + "," + sub(variant.Int) + ")"
		case 2:
			return pick("div("+sub(variant.Int)+", 7)", sub(variant.Int)+"%5", "abs("+sub(variant.Int)+")", "-"+sub(variant.Int), "b[max(0, min("+sub(variant.Int)+", 3))]")
		}
		return sub(variant.Int) + pick("+", "-", "*") + sub(variant.Int)
	case variant.Bool:
		switch rng.IntN(4) {
		case 0:
			return "!" + sub(variant.Bool)
		case 1:
			return sub(variant.Bool) + pick("&&", "||") + sub(variant.Bool)
		case 2:
			if compare {
				return sub(variant.Float) + pick("<", ">=") + sub(variant.Float)
			}
		}
		return sub(variant.Int) + pick("<", "<=", ">", ">=", "==", "!=") + sub(variant.Int)
	}
	switch rng.IntN(6) {
	case 0:
		return "where(" + sub(variant.Bool) + "," + sub(variant.Float) + "," + sub(variant.Float) + ")"
	case 1:
		return pick("min", "max") + "(" + sub(variant.Float) + "," + sub(variant.Float) + ")"
	case 2:
		return pick("tanh", "sigmoid", "softplus", "abs", "-") + "(" + expressionOf(rng, variant.Float, depth-1, compare) + ")"
	case 3:
		return sub(variant.Int) + "/ 8"
	case 4:
		return "float" + sub(variant.Int) + "*0.125"
	}
	return sub(variant.Float) + pick("+", "-", "*") + sub(variant.Float)
}

// RandomVariant returns a random source, with expressions of a depth. With compare, conditions may be of floats.
func RandomVariant(rng *rand.Rand, compare bool, depth int) variant.Source {
	s := variant.Source{
		Score: expressionOf(rng, variant.Float, depth, compare), Visible: expressionOf(rng, variant.Bool, depth, compare), Params: map[string]float64{"n": float64(rng.IntN(9)), "x": rng.NormFloat64()},
	}
	for _, t := range []variant.Declared{{Name: "a", Rank: 2}, {Name: "b", Rank: 1, Int: true}} {
		if strings.Contains(s.Score+s.Visible, t.Name+"[") {
			s.Tensors = append(s.Tensors, t)
		}
	}
	return s
}

// RandomTensors returns the tensors of a random source.
func RandomTensors(rng *rand.Rand, p *variant.Program) (all []variant.Tensor) {
	for _, d := range p.Tensors {
		if d.Int {
			all = append(all, variant.Tensor{Shape: []int{4}, I32: []int32{rng.Int32N(9), rng.Int32N(100), -rng.Int32N(5), 1}})
			continue
		}
		t := variant.Tensor{Shape: []int{3, 5}, F64: make([]float64, 15)}
		for i := range t.F64 {
			t.F64[i] = float64(float32(rng.NormFloat64()))
		}
		all = append(all, t)
	}
	return all
}
