package leanattention_test

import (
	"math"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/variant"

	"gorgonia.org/tensor"
)

// TestAttendMass: Args.Mass has the sums of weights by LeanTiles, of padded sequences, too.
func TestAttendMass(t *testing.T) {
	rng := reftest.Rand(t)
	const tile = 24
	s := reftest.Shape{Heads: 4, KVHeads: 2, Dim: 16, ValueDim: 8, Queries: []int{5, 5}, Keys: []int{70, 33}}
	s.Causal = true
	c := reftest.New(rng, s, reftest.Peaked, reftest.Float32, reftest.Float32)
	const keys = 70
	dense := func(x []float64, d ...int) *tensor.Dense {
		return tensor.New(tensor.WithShape(d...), tensor.WithBacking(reftest.Convert[float32](x)))
	}
	args := la.Args{
		Q: dense(c.DenseQ(5), 2, 4, 5, 16), K: dense(c.DenseK(keys), 2, 2, keys, 16), V: dense(c.DenseV(keys), 2, 2, keys, 8), Lengths: s.Keys,
		Out: tensor.New(tensor.WithShape(2, 4, 5, 8), tensor.Of(tensor.Float32)), Mass: tensor.New(tensor.WithShape(2, 4, 5, 3), tensor.Of(tensor.Float32)),
	}
	fill := args.Mass.Data().([]float32)
	for i := range fill {
		fill[i] = float32(math.NaN())
	}
	options := []la.Option{la.WithCausal(), la.WithQueriesAtEnd(), la.WithScale(c.Scale)}
	tiled := la.WithTileTokens(tile)
	if err := la.Attend(args, append(options, tiled)...); err != nil {
		t.Fatal(err)
	}
	want, bound, tiles := c.Mass(reftest.Precision{Acc: reftest.Float32}, variant.Source{}, tile)
	if tiles != 3 {
		t.Fatal(tiles)
	}
	for i, x := range fill {
		k, q, h, b := i%3, i/3%5, i/15%4, i/60
		if at := ((b*5+q)*4+h)*3 + k; !(math.Abs(float64(x)-want[at]) <= bound[at]) {
			t.Errorf("mass[%d %d %d %d] is %v, want %v within %v", b, h, q, k, x, want[at], bound[at])
		}
	}
	for _, of := range []struct {
		change func(a *la.Args)
		more   []la.Option
		kind   error
		text   string
	}{
		{nil, nil, la.ErrOption, "WithTileTokens"},
		{nil, []la.Option{la.WithTileTokens(35)}, la.ErrShape, "mass has shape"},
		{nil, []la.Option{tiled, la.WithWindow(9)}, la.ErrUnsupported, "attention mass"},
		{func(a *la.Args) { a.Segments = []la.Segment{{K: a.K, V: a.V}} }, []la.Option{tiled}, la.ErrUnsupported, "1 segments"},
		{func(a *la.Args) { a.Parents = make([][]int, 2) }, []la.Option{tiled}, la.ErrUnsupported, "Parents"},
		{func(a *la.Args) { a.Mass = a.Q }, []la.Option{tiled}, la.ErrShape, "mass"},
	} {
		a := args
		if of.change != nil {
			of.change(&a)
		}
		wantError(t, la.Attend(a, append(options[:len(options):len(options)], of.more...)...), of.kind, "Attend", of.text)
	}
}
