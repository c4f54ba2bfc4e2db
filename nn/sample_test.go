package nn

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	la "gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// probabilities is what Choice says, the long way.
func (c Choice) probabilities(x []float32) []float64 {
	order := make([]int, len(x))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		switch {
		case x[a] > x[b]:
			return -1
		case x[a] < x[b]:
			return 1
		}
		return 0
	})
	p, top := make([]float64, len(x)), float64(x[order[0]])
	k := len(x)
	if c.TopK > 0 {
		k = min(k, c.TopK)
	}
	total := 0.0
	for _, i := range order[:k] {
		p[i] = math.Exp((float64(x[i]) - top) / c.Temperature)
		total += p[i]
	}
	if c.TopP > 0 && c.TopP < 1 {
		sum, n := 0.0, 0
		for ; n < k && (n == 0 || sum < c.TopP*total); n++ {
			sum += p[order[n]]
		}
		for _, i := range order[n:k] {
			p[i] = 0
		}
		total = sum
	}
	for i := range p {
		p[i] /= total
	}
	return p
}

// The tokens come in the order of ids, each for as much of [0, 1) as it is likely.
func TestChoose(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 400 {
		x := make([]float32, 1+rng.IntN(40))
		for i := range x {
			x[i] = float32(rng.IntN(9)) - 4 // equals among them
			if rng.IntN(6) == 0 {
				x[i] = float32(math.Inf(-1))
			}
		}
		x[rng.IntN(len(x))] = float32(rng.NormFloat64())
		c := Choice{Temperature: 0.1 + rng.Float64()*2, TopK: rng.IntN(len(x) + 2), TopP: 0.05 + rng.Float64()*1.1}
		if rng.IntN(4) == 0 { // off
			c.TopP = -float64(rng.IntN(2))
		}
		sum := 0.0
		for i, p := range c.probabilities(x) {
			for _, u := range []float64{sum + 1e-9, sum + p/2, sum + p - 1e-9} {
				if p > 1e-8 && u < 1 {
					if got := c.Choose(x, u); got != i {
						t.Fatalf("%v of %+v, u %v: %d, want %d", x, c, u, got, i)
					}
				}
			}
			sum += p
		}
	}
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	for _, c := range []struct {
		x    []float32
		c    Choice
		u    float64
		want int
	}{
		{[]float32{1, 3, 3}, Choice{TopP: 1}, 0.99, 1},
		{[]float32{1, 3, 2}, Choice{Temperature: -1, TopP: 1}, 0.5, -1},
		{[]float32{1, nan}, Choice{Temperature: 1, TopP: 1}, 0.5, -1},
		{[]float32{1, inf}, Choice{Temperature: 1, TopP: 1}, 0.5, -1},
		{[]float32{-inf, -inf}, Choice{Temperature: 1, TopP: 1}, 0.5, -1},
		{[]float32{-inf, 2, -inf}, Choice{Temperature: 1e-300, TopP: 1}, 0.999, 1},
		{[]float32{2, 2, 1}, Choice{Temperature: 1e-300, TopP: 1}, 0.6, 1},
		{[]float32{0, 0}, Choice{Temperature: 1, TopP: 1}, math.Nextafter(1, 0), 1},
		{[]float32{1, 0}, Choice{Temperature: 1}, 0.9, 1}, // zero is off, for both
		{[]float32{1, 0}, Choice{Temperature: 1, TopP: math.Copysign(0, -1)}, 0.9, 1},
		{[]float32{1, 0, -1}, Choice{Temperature: 1, TopK: 2}, 0.9, 1},
		{[]float32{1, 0}, Choice{Temperature: 1, TopP: math.SmallestNonzeroFloat64}, 0.9, 0},
		{[]float32{1, 3}, Choice{}, 0.01, 1},
		// No temperature is left to chance.
		{[]float32{1, 3}, Choice{Temperature: math.NaN(), TopP: 1}, 0.5, -1},
		{[]float32{1, 3}, Choice{Temperature: math.NaN(), TopK: 1}, 0.5, -1},
		{[]float32{1, 3}, Choice{Temperature: math.Inf(-1), TopP: 1}, 0.5, -1},
		{[]float32{1, -inf, 9, 3e38}, Choice{Temperature: math.Inf(1), TopP: 1}, 0.32, 0},
		{[]float32{1, -inf, 9, 3e38}, Choice{Temperature: math.Inf(1), TopP: 1}, 0.34, 2},
		{[]float32{1, -inf, 9, 3e38}, Choice{Temperature: math.Inf(1), TopP: 1}, 0.67, 3},
		{[]float32{1, 0}, Choice{Temperature: 1, TopP: math.NaN()}, 0.9, 1},
	} {
		if got := c.c.Choose(c.x, c.u); got != c.want {
			t.Errorf("%v of %+v, u %v: %d, want %d", c.x, c.c, c.u, got, c.want)
		}
		if got := sampled(t, c.x, c.c, c.u); got != c.want {
			t.Errorf("a node of %v, %+v, u %v: %d, want %d", c.x, c.c, c.u, got, c.want)
		}
		w := Choices([]Choice{c.c}).Data().([]int32)
		if temperature, p := floatOf(w), floatOf(w[2:]); math.IsInf(temperature, 1) || !(p > 0) {
			t.Errorf("%+v is given to kernels as temperature %v, top-p %v", c.c, temperature, p)
		}
	}
}

// sampled is the token that a node chooses.
func sampled(t *testing.T, x []float32, c Choice, u float64) int {
	t.Helper()
	g := G.NewGraph()
	in := func(name string, v *tensor.Dense) *G.Node {
		return G.NewMatrix(g, v.Dtype(), G.WithShape(v.Shape()...), G.WithName(name), G.WithValue(v))
	}
	y, err := Sample(in("logits", tensor.New(tensor.WithShape(1, len(x)), tensor.WithBacking(x))), in("choices", Choices([]Choice{c})), in("randoms", Randoms([]float64{u})))
	if err != nil {
		t.Fatal(err)
	}
	m := G.NewTapeMachine(g)
	defer m.Close()
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
	return int(y.Value().Data().([]int32)[0])
}

func TestSample(t *testing.T) {
	g := G.NewGraph()
	x := []float32{1, 2, 3, 4, 3, 2, 1, 0, 5, 5, 5, 5}
	choices := []Choice{{TopP: 1}, {Temperature: 1, TopP: 1}, {Temperature: 2, TopK: 2, TopP: 0.9}}
	u := []float64{0.3, 0.7, 0.51}
	in := func(name string, v *tensor.Dense) *G.Node {
		return G.NewMatrix(g, v.Dtype(), G.WithShape(v.Shape()...), G.WithName(name), G.WithValue(v))
	}
	logits := in("logits", tensor.New(tensor.WithShape(3, 4), tensor.WithBacking(x)))
	c, r := in("choices", Choices(choices)), in("randoms", Randoms(u))
	y, err := Sample(logits, c, r)
	if err != nil {
		t.Fatal(err)
	}
	m := G.NewTapeMachine(g)
	defer m.Close()
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
	for i, id := range y.Value().Data().([]int32) {
		if want := choices[i].Choose(x[4*i:4*i+4], u[i]); int(id) != want {
			t.Errorf("row %d: %d, want %d", i, id, want)
		}
	}
	for name, e := range map[string]struct {
		in   [3]*G.Node
		want error
	}{
		"nil":             {[3]*G.Node{logits, nil, r}, la.ErrGraph},
		"types":           {[3]*G.Node{logits, logits, r}, la.ErrDType},
		"rows":            {[3]*G.Node{logits, in("two choices", Choices(choices[:2])), r}, la.ErrShape},
		"changed places":  {[3]*G.Node{logits, r, c}, la.ErrShape},
		"another graph's": {[3]*G.Node{logits, c, G.NewMatrix(G.NewGraph(), tensor.Int32, G.WithShape(3, 2), G.WithName("elsewhere"))}, la.ErrGraph},
	} {
		if _, err := Sample(e.in[0], e.in[1], e.in[2]); !errors.Is(err, e.want) {
			t.Errorf("%s: %v, want %v", name, err, e.want)
		}
	}
}
