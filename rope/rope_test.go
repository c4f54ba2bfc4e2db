package rope_test

import (
	"errors"
	"fmt"
	"math"
	"testing"

	"gorgonia.org/leanattention/rope"

	la "gorgonia.org/leanattention"
	"pgregory.net/rapid"
)

// Each scaling leaves fast pairs as they are and divides slow ones by its factor, and none makes
// one faster.
func TestRotaryFrequencies(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := rope.Config{HeadDim: rapid.IntRange(2, 256).Draw(t, "head dim"), Base: rapid.Float64Range(2, 1e7).Draw(t, "base")}
		c.Dim = 2 * rapid.IntRange(1, c.HeadDim/2).Draw(t, "pairs")
		plain, m, err := c.Frequencies()
		if err != nil || m != 1 || len(plain) != c.Dim/2 || plain[0] != 1 {
			t.Fatalf("%+v: %v, %v, %v", c, plain, m, err)
		}
		for i, w := range plain {
			if want := math.Exp(-2 * float64(i) / float64(c.Dim) * math.Log(c.Base)); math.Abs(w-want) > 1e-12*want {
				t.Fatalf("%+v: pair %d has %v, want %v", c, i, w, want)
			}
		}
		factor, context := rapid.Float64Range(1, 64).Draw(t, "factor"), rapid.IntRange(64, 1<<17).Draw(t, "context")
		for _, scaling := range []rope.Scaling{
			rope.Linear{Factor: factor},
			rope.Llama3{Factor: factor, LowFrequency: 1, HighFrequency: 4, Context: context},
			rope.YaRN{Factor: factor, Context: context, NoTruncate: rapid.Bool().Draw(t, "no truncate")},
		} {
			c.Scaling = scaling
			w, m, err := c.Frequencies()
			if err != nil || m < 1 {
				t.Fatalf("%+v: m %v, %v", c, m, err)
			}
			for i := range w {
				if !(w[i] <= plain[i]*(1+1e-12) && w[i] >= plain[i]/factor*(1-1e-12)) {
					t.Fatalf("%+v: pair %d has %v of %v", c, i, w[i], plain[i])
				}
				turns := plain[i] * float64(context) / (2 * math.Pi)
				if s, ok := scaling.(rope.Llama3); ok && (turns >= 4 && w[i] != plain[i] || turns <= 1 && w[i] != plain[i]/factor) {
					t.Fatalf("%+v: pair %d, of %v turns, has %v of %v", s, i, turns, w[i], plain[i])
				}
			}
		}
	})
}

// A factor of 1 changes nothing.
func TestRotaryFactorOne(t *testing.T) {
	c := rope.Config{HeadDim: 64}
	plain, _, _ := c.Frequencies()
	for _, c.Scaling = range []rope.Scaling{rope.Linear{Factor: 1}, rope.Llama3{Factor: 1, LowFrequency: 1, HighFrequency: 4, Context: 8192}, rope.YaRN{Factor: 1, Context: 2048}} {
		w, m, err := c.Frequencies()
		for i := range plain {
			if err != nil || m != 1 || math.Abs(w[i]-plain[i]) > 1e-15 {
				t.Errorf("%+v: pair %d has %v, want %v, m %v: %v", c.Scaling, i, w[i], plain[i], m, err)
			}
		}
	}
}

func TestRotaryWrongUse(t *testing.T) {
	inf, nan := math.Inf(1), math.NaN()
	for _, c := range []struct {
		config rope.Config
		want   error
	}{
		{rope.Config{}, la.ErrShape},
		{rope.Config{HeadDim: 7}, la.ErrShape},
		{rope.Config{HeadDim: 8, Dim: 10}, la.ErrShape},
		{rope.Config{HeadDim: 8, Dim: 3}, la.ErrShape},
		{rope.Config{HeadDim: 8, Dim: -2}, la.ErrShape},
		{rope.Config{HeadDim: 8, Base: -1}, la.ErrOption},
		{rope.Config{HeadDim: 8, Base: 1}, la.ErrOption},
		{rope.Config{HeadDim: 8, Base: nan}, la.ErrOption},
		{rope.Config{HeadDim: 8, Base: inf}, la.ErrOption},
		{rope.Config{HeadDim: 8, Scaling: rope.Linear{}}, la.ErrOption},
		{rope.Config{HeadDim: 8, Scaling: rope.Linear{Factor: nan}}, la.ErrOption},
		{rope.Config{HeadDim: 8, Scaling: rope.Llama3{Factor: 8, LowFrequency: 4, HighFrequency: 1, Context: 8192}}, la.ErrOption},
		{rope.Config{HeadDim: 8, Scaling: rope.Llama3{Factor: 0.5, LowFrequency: 1, HighFrequency: 4, Context: 8192}}, la.ErrOption},
		{rope.Config{HeadDim: 8, Scaling: rope.Llama3{Factor: 8, LowFrequency: 1, HighFrequency: 4, Context: 0}}, la.ErrOption},
		{rope.Config{HeadDim: 8, Scaling: rope.YaRN{}}, la.ErrOption},
		{rope.Config{HeadDim: 8, Scaling: rope.YaRN{Factor: 2}}, la.ErrOption},
		{rope.Config{HeadDim: 8, Scaling: rope.YaRN{Factor: 2, Context: 10, BetaFast: 1, BetaSlow: 2}}, la.ErrOption},
		{rope.Config{HeadDim: 8, Scaling: rope.YaRN{Factor: 2, Context: 10, Attention: -1}}, la.ErrOption},
		{rope.Config{HeadDim: 8, Scaling: rope.YaRN{Factor: 2, Context: 10, MScale: nan}}, la.ErrOption},
	} {
		if w, _, err := c.config.Frequencies(); !errors.Is(err, c.want) || w != nil {
			t.Errorf("%+v: %v, error %v, want %v", c.config, w, err, c.want)
		}
	}
}

func ExampleConfig() {
	// As config.json of Llama 3.2 has it.
	config := rope.Config{HeadDim: 64, Base: 500000, Scaling: rope.Llama3{Factor: 32, LowFrequency: 1, HighFrequency: 4, Context: 8192}}
	w, m, err := config.Frequencies()
	if err != nil {
		panic(err)
	}
	fmt.Printf("%d pairs, the first turns by %.3g a position, the last by %.3g; m %v\n", len(w), w[0], w[len(w)-1], m)
	// Output: 32 pairs, the first turns by 1 a position, the last by 9.42e-08; m 1
}
