package reftest

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"

	"gorgonia.org/leanattention/internal/variant"
)

// varied applies the shape's variant to a score with the error bound off. The results are those of [Shape.Score].
func (s Shape) varied(seq, pos, head, j int, score, off, u float64) (y, yOff, derivative, derivativeOff float64) {
	p := s.Variant
	at := &variant.At{Score: score, Query: s.Keys[seq] - s.Queries[seq] + pos, Key: j, Head: head, Sequence: seq, Tensors: s.Tensors}
	if !p.SeesAt(at) {
		return math.Inf(-1), 0, 0, 0
	}
	values, errors := make([]float64, len(p.Nodes)), make([]float64, len(p.Nodes))
	for i := range p.Nodes {
		values[i] = p.ValueAt(i, at)
		if errors[i] = errorOf(p, i, values, errors, off, u); errors[i] != errors[i] { // Inf - Inf, or 0 Inf
			errors[i] = math.Inf(1)
		}
	}
	return values[p.Score], errors[p.Score] + 4*u*math.Abs(values[p.Score]), values[p.Slope], errors[p.Slope]
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
	case variant.Tanh, variant.Softplus:
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
