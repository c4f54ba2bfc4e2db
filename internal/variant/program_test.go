package variant_test

import (
	"errors"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/variant"
)

func must(t *testing.T, s variant.Source) *variant.Program {
	t.Helper()
	p, err := variant.New(s)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestValues(t *testing.T) {
	at := &variant.At{Score: 1.5, Query: 7, Key: 10, Head: 2, Sequence: 1, Tensors: []variant.Tensor{{Shape: []int{3, 4}, F64: []float64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}}, {Shape: []int{4}, I32: []int32{5, -6, 7, 8}}}}
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
		var tensors []variant.Declared
		var used []variant.Tensor
		if strings.Contains(text, "a[") {
			tensors, used = append(tensors, variant.Declared{"a", 2, false}), at.Tensors[:1]
		}
		if strings.Contains(text, "b[") {
			tensors, used = append(tensors, variant.Declared{"b", 1, true}), at.Tensors[1:]
		}
		p := must(t, variant.Source{Score: text, Params: map[string]float64{"cap": 3}, Tensors: tensors})
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
		_, err := variant.New(variant.Source{Score: text, Tensors: []variant.Declared{{"a", 2, false}}})
		if text == "key > query" {
			_, err = variant.New(variant.Source{Visible: "score", Tensors: nil})
			want = "Visible: score: a float; Visible must be a bool"
		}
		if !errors.Is(err, variant.ErrSource) || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60s: %v, want %q", text, err, want)
		}
	}
	for _, s := range []variant.Source{
		{Params: map[string]float64{"key": 1}}, {Params: map[string]float64{"1x": 1}}, {Params: map[string]float64{"x": math.NaN()}},
		{Tensors: []variant.Declared{{"x", 1, false}}}, {Score: "x[0]+x[1]", Tensors: []variant.Declared{{"x", 1, false}, {"x", 1, false}}},
		{Score: "x[0]", Tensors: []variant.Declared{{"x", 5, false}}}, {Score: "exp[0]", Tensors: []variant.Declared{{"exp", 1, false}}},
	} {
		if _, err := variant.New(s); !errors.Is(err, variant.ErrSource) {
			t.Errorf("%+v: %v", s, err)
		}
	}
}

// TestSame: equal sources are one program, and others are not.
func TestSame(t *testing.T) {
	s := variant.Source{Score: "score*x", Params: map[string]float64{"x": 2, "y": 3}}
	a, b := must(t, s), must(t, variant.Source{Score: "score*x", Params: map[string]float64{"y": 3, "x": 2}})
	s.Params = map[string]float64{"x": 2.5, "y": 3}
	if c := must(t, s); a != b || a == c {
		t.Errorf("%p %p %p", a, b, c)
	}
	if !must(t, variant.Source{Score: "score + 2*key"}).Linear() || a.Linear() || must(t, variant.Source{}).ChangesScores() {
		t.Error("Linear or ChangesScores")
	}
}

// TestRange: a value is within its interval, and Sees never errs.
func TestRange(t *testing.T) {
	rng := rand.New(rand.NewPCG(rand.Uint64(), 1))
	known := 0
	for range 400 {
		s := reftest.RandomVariant(rng, true, 1+rng.IntN(3))
		p, err := variant.New(s)
		if err != nil {
			if strings.Contains(err.Error(), "operations") || strings.Contains(err.Error(), "bytes") {
				continue
			}
			t.Fatalf("%+v: %v", s, err)
		}
		tensors := reftest.RandomTensors(rng, p)
		interval := func() variant.Interval {
			lo := float64(rng.IntN(20))
			return variant.Interval{Lo: lo, Hi: lo + float64(rng.IntN(8))}
		}
		b := &variant.Bounds{Query: interval(), Key: interval(), Head: interval(), Sequence: interval(), Tensors: tensors}
		if rng.IntN(2) == 0 {
			b.Tensors = nil
		}
		if err := p.CheckTensors(tensors, b); err != nil {
			t.Fatalf("%+v: %v", s, err)
		}
		scratch := make([]variant.Interval, len(p.Nodes))
		sees := p.Sees(b, scratch)
		if sees != variant.Sometimes {
			known++
		}
		p.Range(len(p.Nodes)-1, b, scratch)
		in := func(i variant.Interval) int { return int(i.Lo) + rng.IntN(int(i.Hi-i.Lo)+1) }
		for range 20 {
			at := &variant.At{Score: 3 * rng.NormFloat64(), Query: in(b.Query), Key: in(b.Key), Head: in(b.Head), Sequence: in(b.Sequence), Tensors: tensors}
			values := make([]float64, len(p.Nodes))
			p.Values(at, values)
			for i := range p.Nodes {
				if x, r := values[i], scratch[i]; !(x >= r.Lo && x <= r.Hi) && !(x != x && r == variant.Interval{Lo: math.Inf(-1), Hi: math.Inf(1)}) {
					t.Fatalf("%+v: node %d %+v is %v, not in %v; %+v", s, i, p.Nodes[i], x, r, at)
				}
			}
			if saw := p.SeesAt(at); saw && sees == variant.Never || !saw && sees == variant.Always {
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
		p, err := variant.New(reftest.RandomVariant(rng, true, 1+rng.IntN(3)))
		if err != nil {
			continue
		}
		at := &variant.At{Score: 2 * rng.NormFloat64(), Query: 9, Key: rng.IntN(12), Head: rng.IntN(4), Sequence: 1, Tensors: reftest.RandomTensors(rng, p)}
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
		p, err := variant.New(variant.Source{Score: score, Visible: visible, Params: map[string]float64{"n": 3}})
		if err != nil {
			if !errors.Is(err, variant.ErrSource) {
				t.Fatal(err)
			}
			return
		}
		at := &variant.At{Score: 1, Query: 5, Key: 3}
		p.ScoreAt(at)
		p.SlopeAt(at)
		p.SeesAt(at)
		p.Sees(&variant.Bounds{Query: variant.Interval{Lo: 0, Hi: 9}, Key: variant.Interval{Lo: 0, Hi: 9}}, make([]variant.Interval, len(p.Nodes)))
	})
}

// TestWithoutCausal: for keys up to the query, a Program without the condition key <= query has the same values.
func TestWithoutCausal(t *testing.T) {
	rng := rand.New(rand.NewPCG(rand.Uint64(), 4))
	for _, x := range []struct {
		score, visible string
		ok, left       bool // left: something remains
	}{
		{"", "key <= query", true, false}, {"", "query >= key", true, false}, {"score*2", "key <= query", true, true}, {"", "key <= query && query-key < 3", true, true},
		{"where(key <= query && head == 1, 1.5, score)", "key != 2 && (key <= query && head == 1)", true, true}, {"", "query-key < 3", false, true},
		{"", "key <= query || key < 3", false, true}, {"", "query <= key", false, true}, {"", "!(key <= query)", false, true}, {"score*2", "", false, true},
		{"", "key <= query && !(key <= query && head == 1)", true, true},
	} {
		p, err := variant.New(variant.Source{Score: x.score, Visible: x.visible})
		if err != nil {
			t.Fatal(err)
		}
		rest, ok := p.WithoutCausal()
		if ok != x.ok || ok && (rest != nil) != x.left {
			t.Fatalf("%v: %v, %t", p, rest, ok)
		}
		if again, _ := p.WithoutCausal(); again != rest {
			t.Errorf("%v: another Program", p)
		}
		for range 50 {
			at := &variant.At{Score: rng.NormFloat64(), Query: rng.IntN(9), Head: rng.IntN(3)}
			at.Key = rng.IntN(at.Query + 1)
			switch {
			case rest == nil && ok:
				if !p.SeesAt(at) || p.ScoreAt(at) != at.Score {
					t.Fatalf("%v at %+v: %t, %v", p, at, p.SeesAt(at), p.ScoreAt(at))
				}
			case ok:
				if p.SeesAt(at) != rest.SeesAt(at) || p.ScoreAt(at) != rest.ScoreAt(at) {
					t.Fatalf("%v at %+v: %t and %t", p, at, p.SeesAt(at), rest.SeesAt(at))
				}
				if at.Key = at.Query + 1 + rng.IntN(3); p.SeesAt(at) {
					t.Fatalf("%v at %+v: a later key", p, at)
				}
			}
		}
	}
}
