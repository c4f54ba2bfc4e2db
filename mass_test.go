package leanattention_test

import (
	"math"
	"slices"
	"testing"

	G "gorgonia.org/gorgonia"
	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/kvstore"
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

// TestMass: the nodes of Attention and of CachedAttention, beside log-sum-exps and entropies, and of sequences that share pages.
func TestMass(t *testing.T) {
	defer func(n int) { kvstore.PrefixBytes = n }(kvstore.PrefixBytes)
	kvstore.PrefixBytes = 1 // sharing pays for an engine
	rng := reftest.Rand(t)
	const heads, dim, shared, rows, tile, places = 4, 16, 32, 40, 8, 6
	s := reftest.Shape{Heads: heads, KVHeads: 2, Dim: dim, ValueDim: dim, Queries: []int{5, 3}, Keys: []int{shared + 5, shared + 3}}
	s.Causal = true
	c := reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32)
	const row = 2 * dim // of keys
	for _, x := range [][]float64{c.K, c.V} {
		copy(x[(shared+5)*row:], x[:shared*row])
	}
	precision := reftest.Precision{Acc: reftest.Float32}
	want, bound, tiles := c.Mass(precision, variant.Source{}, tile)
	entropy, entropyBound := c.Entropy(precision)
	dense := func(x []float64, d ...int) *tensor.Dense {
		return tensor.New(tensor.WithShape(d...), tensor.WithBacking(reftest.Convert[float32](x)))
	}
	g := G.NewGraph()
	input := func(name string, v *tensor.Dense) *G.Node {
		return G.NewTensor(g, v.Dtype(), v.Dims(), G.WithShape(v.Shape()...), G.WithName(name), G.WithValue(v))
	}
	options := []la.Option{la.WithCausal(), la.WithScale(c.Scale), la.WithTileTokens(tile)}
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 2, HeadDim: dim, DType: tensor.Float32, PageSize: tile, Pages: 16})
	defer closeCache(t, cache)
	step, err := cache.NewStep(rows)
	if err != nil {
		t.Fatal(err)
	}
	in := [3]*tensor.Dense{}
	for i, width := range []int{heads * dim, row, row} {
		in[i] = dense(make([]float64, rows*width), rows, width)
	}
	cached, err := la.CachedAttention(input("q", in[0]), input("k", in[1]), input("v", in[2]), step.Layer(0), options...)
	if err != nil {
		t.Fatal(err)
	}
	padded, err := la.Attention(input("q2", dense(c.DenseQ(5), 2, heads, 5, dim)), input("k2", dense(c.DenseK(40), 2, 2, 40, dim)), input("v2", dense(c.DenseV(40), 2, 2, 40, dim)),
		append(options, la.WithLengths(input("lengths", tensor.New(tensor.WithBacking([]int{s.Keys[0], s.Keys[1]})))), la.WithQueryLengths(input("queries", tensor.New(tensor.WithBacking([]int{5, 3})))))...)
	if err != nil {
		t.Fatal(err)
	}
	var masses, entropies [2]G.Value
	for i, n := range []*G.Node{cached, padded} {
		mass, err := la.Mass(n, places)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := la.Mass(n, places); err != nil || again != mass {
			t.Errorf("a second call: %v, %v", again, err)
		}
		_, err = la.Mass(n, places+1)
		wantError(t, err, la.ErrOption, "Mass", "7 places, and a node for 6 is there")
		G.Read(mass, &masses[i])
		G.Read(refused(la.Entropy(n)), &entropies[i])
	}
	vm := G.NewTapeMachine(g)
	defer vm.Close()
	run := func(appends ...la.Append) error {
		defer vm.Reset()
		return step.Run(appends, func() error { return la.Cause(vm.RunAll()) })
	}
	a := refused(cache.NewSequence())
	copy(in[1].Data().([]float32), reftest.Convert[float32](c.K[:shared*row]))
	copy(in[2].Data().([]float32), reftest.Convert[float32](c.V[:shared*row]))
	if err := run(la.Append{Seq: a, Tokens: shared}); err != nil {
		t.Fatal(err)
	}
	b := refused(a.Fork())
	copy(in[0].Data().([]float32), reftest.Convert[float32](c.Q))
	for i, x := range [][]float64{c.K, c.V} {
		fresh := append(slices.Clone(x[shared*row:(shared+5)*row]), x[(2*shared+5)*row:]...)
		copy(in[1+i].Data().([]float32), reftest.Convert[float32](fresh))
	}
	if err := run(la.Append{Seq: a, Tokens: 5}, la.Append{Seq: b, Tokens: 3}); err != nil {
		t.Fatal(err)
	}
	for i, x := range masses[0].Data().([]float32) {
		k, r := i%places, i/places
		y, off := 0., 0.
		if r < 8*heads && k < tiles {
			y, off = want[r*tiles+k], bound[r*tiles+k]
		}
		if !(math.Abs(float64(x)-y) <= off) {
			t.Errorf("CachedAttention: mass %d of row %d, head %d is %v, want %v within %v", k, r/heads, r%heads, x, y, off)
		}
	}
	for i, x := range masses[1].Data().([]float32) {
		k, q, h, seq := i%places, i/places%5, i/places/5%heads, i/places/5/heads
		y, off := 0., 0.
		if r := ((seq*5+q)*heads + h); q < s.Queries[seq] && k < tiles {
			y, off = want[r*tiles+k], bound[r*tiles+k]
		}
		if !(math.Abs(float64(x)-y) <= off) {
			t.Errorf("Attention: mass %d of sequence %d, query %d, head %d is %v, want %v within %v", k, seq, q, h, x, y, off)
		}
	}
	for i, x := range entropies[0].Data().([]float32)[:8*heads] {
		if !(math.Abs(float64(x)-entropy[i]) <= entropyBound[i]) {
			t.Errorf("entropy %d is %v, want %v within %v", i, x, entropy[i], entropyBound[i])
		}
	}

	if err := run(la.Append{Seq: a, Tokens: rows}); err == nil {
		t.Error("a sequence of more LeanTiles than places")
	} else {
		wantError(t, err, la.ErrShape, "CachedAttention", "append 0 is to a sequence of 77 tokens, which have 10 LeanTiles, and attention mass has places for 6")
	}
	if err := run(la.Append{Seq: a, Tokens: 2, Parents: []int{-1, -1}}); err == nil {
		t.Error("a tree")
	} else {
		wantError(t, err, la.ErrUnsupported, "CachedAttention", "attention mass of a step with trees")
	}
	plain := refused(la.Attention(input("q3", dense(c.DenseQ(5), 2, heads, 5, dim)), input("k3", dense(c.DenseK(40), 2, 2, 40, dim)), input("v3", dense(c.DenseV(40), 2, 2, 40, dim)), la.WithTileTokens(16)))
	for _, x := range []struct {
		of     *G.Node
		places int
		kind   error
		text   string
	}{
		{g.Inputs()[0], 1, la.ErrGraph, "it must be the node of Attention"},
		{nil, 1, la.ErrGraph, "out is nil"},
		{plain, 0, la.ErrOption, "0 places"},
		{plain, 2, la.ErrOption, "the 40 keys have 3"},
		{refused(la.Attention(input("q4", dense(c.DenseQ(5), 2, heads, 5, dim)), input("k4", dense(c.DenseK(40), 2, 2, 40, dim)), input("v4", dense(c.DenseV(40), 2, 2, 40, dim)))), 9, la.ErrOption, "WithTileTokens"},
		{refused(la.Attention(input("q5", dense(c.DenseQ(5), 2, heads, 5, dim)), input("k5", dense(c.DenseK(40), 2, 2, 40, dim)), input("v5", dense(c.DenseV(40), 2, 2, 40, dim)), la.WithCausal(), la.WithWindow(9), la.WithTileTokens(16))), 9, la.ErrUnsupported, "attention mass: a window of 9 keys"},
	} {
		_, err := la.Mass(x.of, x.places)
		wantError(t, err, x.kind, "Mass", x.text)
	}
}
