package variant

import (
	"errors"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
)

func must(t *testing.T, s Source) *Program {
	t.Helper()
	p, err := New(s)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestValues(t *testing.T) {
	at := &At{Score: 1.5, Query: 7, Key: 10, Head: 2, Sequence: 1, Tensors: []Tensor{{Shape: []int{3, 4}, F64: []float64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}}, {Shape: []int{4}, I32: []int32{5, -6, 7, 8}}}}
	for text, want := range map[string]float64{
		"":                                1.5,
		"score*2 + 1":                     4,
		"-score":                          -1.5,
		"query/2":                         3.5,
		"div(query, 2)":                   3,
		"div(query-key, 2)":               -2,
		"(query-key) % 2":                 1,
		"min(score, 1) + max(key, query)": 11,
		"cap*tanh(score/cap)":             3 * math.Tanh(0.5),
		"a[head][query%4]":                11,
		"b[min(query, 1)] * 2":            -12,
		"where(key > query, -inf, score)": math.Inf(-1),
		"where(key >= query && head != 2 || sequence == 0, 1, 2)": 2,
		"abs(query-key) + abs(-score)":                            4.5,
		"exp(score) + log(score)":                                 math.Exp(1.5) + math.Log(1.5),
		"sqrt(score+0.75)":                                        1.5,
		"sigmoid(score)":                                          1 / (1 + math.Exp(-1.5)),
		"softplus(score)":                                         math.Log1p(math.Exp(1.5)),
		"floor(score) + floor(-score)":                            -1,
		"float(key)/4":                                            2.5,
		"where(!(key < 3), 1.5, 2)":                               1.5,
		"0x10 + 1e1":                                              26,
	} {
		var tensors []Declared
		var used []Tensor
		if strings.Contains(text, "a[") {
			tensors, used = append(tensors, Declared{"a", 2, false}), at.Tensors[:1]
		}
		if strings.Contains(text, "b[") {
			tensors, used = append(tensors, Declared{"b", 1, true}), at.Tensors[1:]
		}
		p := must(t, Source{Score: text, Params: map[string]float64{"cap": 3}, Tensors: tensors})
		here := *at
		here.Tensors = used
		if got := p.ScoreAt(&here); math.Abs(got-want) > 1e-12 && got != want {
			t.Errorf("%s = %v, want %v", text, got, want)
		}
	}
}

func TestRefused(t *testing.T) {
	for text, want := range map[string]string{
		"score +":                     "expected operand",
		"scor":                        "scor: no variable, parameter or tensor of this name",
		"exp(score, 1)":               "2 arguments; exp has 1",
		"f(score)":                    "no function of this name",
		"key > query":                 "no operation",
		"true + 1":                    "no operation of a bool and a int",
		"a[score][1]":                 "an index must be an int",
		"a[1]":                        "1 indices; a has 2 axes",
		"a":                           "a tensor without indices",
		"exp":                         "a function without arguments",
		"key % query":                 "the divisor must be a constant or a parameter above 0",
		"div(key, 0)":                 "the divisor must be",
		"score % 2":                   "both must be ints",
		"func() int { return 1 }()":   "no function",
		"key << 2":                    "no operation <<",
		"\"x\"":                       "no number",
		"where(score, 1, 2)":          "the condition must be a bool",
		"where(key > 1, true, score)": "both must be of one kind",
		"score.x":                     "expressions have numbers",
		"exp(key > 2)":                "where(key > 2, 1, 0) is a number",
		strings.Repeat("(", 100) + "score" + strings.Repeat(")", 100): "nested deeper than 64",
		strings.Repeat("1+", 3000) + "score":                          "4096 are the most",
		"&score":                                                      "no operation &",
	} {
		_, err := New(Source{Score: text, Tensors: []Declared{{"a", 2, false}}})
		if text == "key > query" {
			_, err = New(Source{Visible: "score", Tensors: nil})
			want = "Visible: score: a float; Visible must be a bool"
		}
		if !errors.Is(err, ErrSource) || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60s: %v, want %q", text, err, want)
		}
	}
	for _, s := range []Source{
		{Params: map[string]float64{"key": 1}}, {Params: map[string]float64{"1x": 1}}, {Params: map[string]float64{"x": math.NaN()}},
		{Tensors: []Declared{{"x", 1, false}}}, {Score: "x[0]+x[1]", Tensors: []Declared{{"x", 1, false}, {"x", 1, false}}},
		{Score: "x[0]", Tensors: []Declared{{"x", 5, false}}}, {Score: "exp[0]", Tensors: []Declared{{"exp", 1, false}}},
	} {
		if _, err := New(s); !errors.Is(err, ErrSource) {
			t.Errorf("%+v: %v", s, err)
		}
	}
}

// TestSame: equal sources are one program, and others are not.
func TestSame(t *testing.T) {
	s := Source{Score: "score*x", Params: map[string]float64{"x": 2, "y": 3}}
	a, b := must(t, s), must(t, Source{Score: "score*x", Params: map[string]float64{"y": 3, "x": 2}})
	s.Params = map[string]float64{"x": 2.5, "y": 3}
	if c := must(t, s); a != b || a == c {
		t.Errorf("%p %p %p", a, b, c)
	}
	if !must(t, Source{Score: "score + 2*key"}).Linear() || a.Linear() || must(t, Source{}).ChangesScores() {
		t.Error("Linear or ChangesScores")
	}
}

// random returns a random expression of a kind.
func random(rng *rand.Rand, kind Kind, depth int) string {
	pick := func(all ...string) string { return all[rng.IntN(len(all))] }
	sub := func(k Kind) string { return "(" + random(rng, k, depth-1) + ")" }
	if depth == 0 {
		switch kind {
		case Int:
			return pick("query", "key", "head", "sequence", "3", "17", "n")
		case Bool:
			return pick("true", "key <= query", "head == 1", "query-key < 5")
		}
		return pick("score", "score", "1.5", "x", "0.25", "a[head%3][key%5]")
	}
	switch kind {
	case Int:
		switch rng.IntN(5) {
		case 0:
			return "where(" + sub(Bool) + "," + sub(Int) + "," + sub(Int) + ")"
		case 1:
			return pick("min", "max") + "(" + sub(Int) + "," + sub(Int) + ")"
		case 2:
			return pick("div("+sub(Int)+", 7)", sub(Int)+"%5", "abs("+sub(Int)+")", "-"+sub(Int), "b[max(0, min("+sub(Int)+", 3))]")
		}
		return sub(Int) + pick("+", "-", "*") + sub(Int)
	case Bool:
		switch rng.IntN(4) {
		case 0:
			return "!" + sub(Bool)
		case 1:
			return sub(Bool) + pick("&&", "||") + sub(Bool)
		case 2:
			return sub(Float) + pick("<", ">=") + sub(Float)
		}
		return sub(Int) + pick("<", "<=", ">", ">=", "==", "!=") + sub(Int)
	}
	switch rng.IntN(6) {
	case 0:
		return "where(" + sub(Bool) + "," + sub(Float) + "," + sub(Float) + ")"
	case 1:
		return pick("min", "max") + "(" + sub(Float) + "," + sub(Float) + ")"
	case 2:
		return pick("tanh", "sigmoid", "softplus", "abs", "-") + "(" + random(rng, Float, depth-1) + ")"
	case 3:
		return sub(Int) + "/ 8"
	case 4:
		return "float" + sub(Int) + "*0.125"
	}
	return sub(Float) + pick("+", "-", "*") + sub(Float)
}

func randomSource(rng *rand.Rand, depth int) Source {
	s := Source{
		Score: random(rng, Float, depth), Visible: random(rng, Bool, depth), Params: map[string]float64{"n": float64(rng.IntN(9)), "x": rng.NormFloat64()},
	}
	for _, t := range []Declared{{"a", 2, false}, {"b", 1, true}} {
		if strings.Contains(s.Score+s.Visible, t.Name+"[") {
			s.Tensors = append(s.Tensors, t)
		}
	}
	return s
}

func randomTensors(rng *rand.Rand, p *Program) (all []Tensor) {
	for _, d := range p.Tensors {
		if d.Int {
			all = append(all, Tensor{Shape: []int{4}, I32: []int32{rng.Int32N(9), rng.Int32N(100), -rng.Int32N(5), 1}})
			continue
		}
		t := Tensor{Shape: []int{3, 5}, F64: make([]float64, 15)}
		for i := range t.F64 {
			t.F64[i] = rng.NormFloat64()
		}
		all = append(all, t)
	}
	return all
}

// TestRange: a value is within its interval, and Sees never errs.
func TestRange(t *testing.T) {
	rng := rand.New(rand.NewPCG(rand.Uint64(), 1))
	known := 0
	for range 400 {
		s := randomSource(rng, 1+rng.IntN(3))
		p, err := New(s)
		if err != nil {
			if strings.Contains(err.Error(), "operations") || strings.Contains(err.Error(), "bytes") {
				continue
			}
			t.Fatalf("%+v: %v", s, err)
		}
		tensors := randomTensors(rng, p)
		interval := func() Interval {
			lo := float64(rng.IntN(20))
			return Interval{lo, lo + float64(rng.IntN(8))}
		}
		b := &Bounds{Query: interval(), Key: interval(), Head: interval(), Sequence: interval(), Tensors: tensors}
		if rng.IntN(2) == 0 {
			b.Tensors = nil
		}
		if err := p.CheckTensors(tensors, b); err != nil {
			t.Fatalf("%+v: %v", s, err)
		}
		scratch := make([]Interval, len(p.Nodes))
		sees := p.Sees(b, scratch)
		if sees != Sometimes {
			known++
		}
		p.Range(len(p.Nodes)-1, b, scratch)
		in := func(i Interval) int { return int(i.Lo) + rng.IntN(int(i.Hi-i.Lo)+1) }
		for range 20 {
			at := &At{Score: 3 * rng.NormFloat64(), Query: in(b.Query), Key: in(b.Key), Head: in(b.Head), Sequence: in(b.Sequence), Tensors: tensors}
			values := make([]float64, len(p.Nodes))
			p.Values(at, values)
			for i := range p.Nodes {
				if x, r := values[i], scratch[i]; !(x >= r.Lo && x <= r.Hi) && !(x != x && r == all(Float)) {
					t.Fatalf("%+v: node %d %+v is %v, not in %v; %+v", s, i, p.Nodes[i], x, r, at)
				}
			}
			if saw := p.SeesAt(at); saw && sees == Never || !saw && sees == Always {
				t.Fatalf("%+v: Sees is %d, SeesAt %t", s, sees, saw)
			}
		}
	}
	if known < 20 {
		t.Errorf("Sees knew %d of 400", known)
	}
}

// TestSlope compares derivatives with differences.
func TestSlope(t *testing.T) {
	rng := rand.New(rand.NewPCG(rand.Uint64(), 2))
	compared := 0
	for range 400 {
		p, err := New(randomSource(rng, 1+rng.IntN(3)))
		if err != nil {
			continue
		}
		at := &At{Score: 2 * rng.NormFloat64(), Query: 9, Key: rng.IntN(12), Head: rng.IntN(4), Sequence: 1, Tensors: randomTensors(rng, p)}
		const h = 1e-6
		left, right, mid := *at, *at, p.ScoreAt(at)
		left.Score -= h
		right.Score += h
		before, after := p.ScoreAt(&left), p.ScoreAt(&right)
		if d, e := (mid-before)/h, (after-mid)/h; math.Abs(d-e) > 1e-3*(1+math.Abs(d)) || math.Abs(mid) > 1e6 {
			continue // a kink, or a jump
		}
		compared++
		if got, want := p.SlopeAt(at), (after-before)/(2*h); math.Abs(got-want) > 1e-4*(1+math.Abs(want)) {
			t.Errorf("%v at %+v: slope %v, differences %v", p, at, got, want)
		}
	}
	if compared < 200 {
		t.Errorf("%d compared", compared)
	}
}

func FuzzNew(f *testing.F) {
	f.Add("score + a[head][key%5]", "key <= query")
	f.Add("where(key>query,-inf,score)", "!(div(key, 4) == 1) || true")
	f.Fuzz(func(t *testing.T, score, visible string) {
		p, err := New(Source{Score: score, Visible: visible, Params: map[string]float64{"n": 3}})
		if err != nil {
			if !errors.Is(err, ErrSource) {
				t.Fatal(err)
			}
			return
		}
		at := &At{Score: 1, Query: 5, Key: 3}
		p.ScoreAt(at)
		p.SlopeAt(at)
		p.SeesAt(at)
		p.Sees(&Bounds{Query: Interval{0, 9}, Key: Interval{0, 9}}, make([]Interval, len(p.Nodes)))
	})
}
