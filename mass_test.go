package leanattention_test

import (
	"fmt"
	"math"
	"slices"
	"testing"

	G "gorgonia.org/gorgonia"
	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/devicetest"
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

// massPlace is where a test of Mass computes, and the test's sizes.
type massPlace struct {
	gpu          *device.GPU // nil: in host memory
	there        bool        // q, k and v are on the GPU
	kv           tensor.Dtype
	dim, shared  int // elements of a head, and tokens that two sequences share
	tile, places int
}

func (w massPlace) format() reftest.Format {
	if w.kv == la.Float16 {
		return reftest.Float16
	}
	return reftest.Float32
}

// TestMass: the nodes of Attention and of CachedAttention, beside log-sum-exps and entropies, and of sequences that share pages.
func TestMass(t *testing.T) {
	testMass(t, massPlace{kv: tensor.Float32, dim: 16, shared: 32, tile: 8, places: 6})
}

// TestGPUMass is TestMass on a GPU, with operands in host memory and on the GPU, also recorded.
func TestGPUMass(t *testing.T) {
	gpu := devicetest.Open(t)
	for i, kv := range []tensor.Dtype{la.Float16, tensor.Float32} {
		testMass(t, massPlace{gpu: gpu, there: i == 0, kv: kv, dim: 64, shared: 96, tile: 64, places: 3})
	}
}

func testMass(t *testing.T, w massPlace) {
	defer func(n int) { kvstore.PrefixBytes = n }(kvstore.PrefixBytes)
	kvstore.PrefixBytes = 1 // sharing pays for an engine
	rng := reftest.Rand(t)
	const heads = 4
	dim, shared, rows, tile, places := w.dim, w.shared, w.shared+8, w.tile, w.places
	s := reftest.Shape{Heads: heads, KVHeads: 2, Dim: dim, ValueDim: dim, Queries: []int{5, 3}, Keys: []int{shared + 5, shared + 3}}
	s.Causal = true
	c := reftest.New(rng, s, reftest.Normal, reftest.Float32, w.format())
	row := 2 * dim // of keys
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
	input := func(name string, v G.Value) *G.Node {
		return G.NewTensor(g, v.Dtype(), len(v.Shape()), G.WithShape(v.Shape()...), G.WithName(name), G.WithValue(v))
	}
	host := func(n *G.Node) *G.Node { // of a node of attention on a GPU
		if w.there {
			n = refused(device.ToHost(n))
		}
		return n
	}
	options := []la.Option{la.WithCausal(), la.WithScale(c.Scale), la.WithTileTokens(tile)}
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 2, HeadDim: dim, DType: w.kv, PageSize: 8, Pages: 32, Device: w.gpu})
	defer closeCache(t, cache)
	step, err := cache.NewStep(rows)
	if err != nil {
		t.Fatal(err)
	}
	in, values := [3]*tensor.Dense{}, [3]G.Value{}
	for i, width := range []int{heads * dim, row, row} {
		in[i] = dense(make([]float64, rows*width), rows, width)
		if values[i] = in[i]; w.there {
			values[i] = graphtest.Upload(t, w.gpu, in[i])
		}
	}
	cached, err := la.CachedAttention(input("q", values[0]), input("k", values[1]), input("v", values[2]), step.Layer(0), options...)
	if err != nil {
		t.Fatal(err)
	}
	ofKV := func(x []float64, d ...int) G.Value {
		of := graphtest.TensorOf(w.kv, x, d...)
		if w.there {
			return graphtest.Upload(t, w.gpu, of)
		}
		return of
	}
	ofQ := func() G.Value {
		q := dense(c.DenseQ(5), 2, heads, 5, dim)
		if w.there {
			return graphtest.Upload(t, w.gpu, q)
		}
		return q
	}
	nodes := []*G.Node{cached}
	if w.gpu == nil || w.there {
		keys := shared + 5
		padded, err := la.Attention(input("q2", ofQ()), input("k2", ofKV(c.DenseK(keys), 2, 2, keys, dim)), input("v2", ofKV(c.DenseV(keys), 2, 2, keys, dim)),
			append(options, la.WithLengths(input("lengths", tensor.New(tensor.WithBacking([]int{s.Keys[0], s.Keys[1]})))), la.WithQueryLengths(input("queries", tensor.New(tensor.WithBacking([]int{5, 3})))))...)
		if err != nil {
			t.Fatal(err)
		}
		nodes = append(nodes, padded)
	}
	var massesOf, entropiesOf [2]G.Value
	for i, n := range nodes {
		mass, err := la.Mass(n, places)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := la.Mass(n, places); err != nil || again != mass {
			t.Errorf("a second call: %v, %v", again, err)
		}
		_, err = la.Mass(n, places+1)
		wantError(t, err, la.ErrOption, "Mass", fmt.Sprintf("%d places, and a node for %d is there", places+1, places))
		G.Read(host(mass), &massesOf[i])
		G.Read(host(refused(la.Entropy(n))), &entropiesOf[i])
	}
	vm := G.NewTapeMachine(g)
	defer vm.Close()
	let := func() {
		for i, v := range values {
			if d, ok := v.(*device.Tensor); ok {
				if err := d.CopyFrom(in[i]); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	run := func(appends ...la.Append) error {
		defer vm.Reset()
		let()
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
	for i, x := range massesOf[0].Data().([]float32) {
		k, r := i%places, i/places
		y, off := 0., 0.
		if r < 8*heads && k < tiles {
			y, off = want[r*tiles+k], bound[r*tiles+k]
		}
		if !(math.Abs(float64(x)-y) <= off) {
			t.Errorf("CachedAttention: mass %d of row %d, head %d is %v, want %v within %v", k, r/heads, r%heads, x, y, off)
		}
	}
	for i, x := range entropiesOf[0].Data().([]float32)[:8*heads] {
		if !(math.Abs(float64(x)-entropy[i]) <= entropyBound[i]) {
			t.Errorf("entropy %d is %v, want %v within %v", i, x, entropy[i], entropyBound[i])
		}
	}
	if len(nodes) > 1 {
		for i, x := range massesOf[1].Data().([]float32) {
			k, q, h, seq := i%places, i/places%5, i/places/5%heads, i/places/5/heads
			y, off := 0., 0.
			if r := ((seq*5+q)*heads + h); q < s.Queries[seq] && k < tiles {
				y, off = want[r*tiles+k], bound[r*tiles+k]
			}
			if !(math.Abs(float64(x)-y) <= off) {
				t.Errorf("Attention: mass %d of sequence %d, query %d, head %d is %v, want %v within %v", k, seq, q, h, x, y, off)
			}
		}
		for i, x := range entropiesOf[1].Data().([]float32) {
			q, h, seq := i%5, i/5%heads, i/5/heads
			y, off := 0., 0.
			if r := (seq*5+q)*heads + h; q < s.Queries[seq] {
				y, off = entropy[r], entropyBound[r]
			}
			if !(math.Abs(float64(x)-y) <= off) {
				t.Errorf("Attention: entropy of sequence %d, query %d, head %d is %v, want %v within %v", seq, q, h, x, y, off)
			}
		}
	}
	if w.gpu != nil {
		wantError(t, second(la.Mass(refused(la.CachedAttention(input("q6", values[0]), input("k6", values[1]), input("v6", values[2]), refused(cache.NewStep(rows)).Layer(0), la.WithTileTokens(96))), 9)), la.ErrUnsupported, "Mass", "LeanTiles of 96 keys, on a GPU: they have a multiple of 64")
		return
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

// TestGPUAttendMass: Args.Entropy and Args.Mass on a GPU, and what is refused there.
func TestGPUAttendMass(t *testing.T) {
	gpu, rng := devicetest.Open(t), reftest.Rand(t)
	const tile, keys, places = 64, 130, 3
	s := reftest.Shape{Heads: 4, KVHeads: 2, Dim: 64, ValueDim: 64, Queries: []int{5, 5}, Keys: []int{keys, 70}}
	s.Causal = true
	c := reftest.New(rng, s, reftest.Peaked, reftest.Float32, reftest.BFloat16)
	of := func(dtype tensor.Dtype, x []float64, shape ...int) *device.Tensor {
		return graphtest.Upload(t, gpu, graphtest.TensorOf(dtype, x, shape...))
	}
	empty := func(n int, shape ...int) *device.Tensor { return of(tensor.Float32, make([]float64, n), shape...) }
	args := la.Args{
		Q: of(tensor.Float32, c.DenseQ(5), 2, 4, 5, 64), K: of(la.BFloat16, c.DenseK(keys), 2, 2, keys, 64), V: of(la.BFloat16, c.DenseV(keys), 2, 2, keys, 64), Lengths: s.Keys,
		Out: empty(2*4*5*64, 2, 4, 5, 64), Entropy: empty(40, 2, 4, 5), Mass: empty(40*places, 2, 4, 5, places),
	}
	options := []la.Option{la.WithCausal(), la.WithQueriesAtEnd(), la.WithScale(c.Scale)}
	tiled := la.WithTileTokens(tile)
	if err := la.Attend(args, append(options, tiled)...); err != nil {
		t.Fatal(err)
	}
	precision := reftest.Precision{Acc: reftest.Float32, Query: 0x1p-16}
	want, bound, _ := c.Mass(precision, variant.Source{}, tile)
	entropy, entropyBound := c.Entropy(precision)
	for i, x := range refused(args.Mass.(*device.Tensor).Download()).Data().([]float32) {
		k, q, h, b := i%places, i/places%5, i/places/5%4, i/places/20
		if at := ((b*5+q)*4+h)*places + k; !(math.Abs(float64(x)-want[at]) <= bound[at]) {
			t.Errorf("mass[%d %d %d %d] is %v, want %v within %v", b, h, q, k, x, want[at], bound[at])
		}
	}
	for i, x := range refused(args.Entropy.(*device.Tensor).Download()).Data().([]float32) {
		if at := (i/20*5+i%5)*4 + i/5%4; !(math.Abs(float64(x)-entropy[at]) <= entropyBound[at]) {
			t.Errorf("entropy %d is %v, want %v within %v", i, x, entropy[at], entropyBound[at])
		}
	}
	for _, x := range []struct {
		change func(a *la.Args)
		more   la.Option
		kind   error
		text   string
	}{
		{nil, la.WithTileTokens(50), la.ErrUnsupported, "on a GPU they have a multiple of 64"},
		{nil, la.WithWorkers(1), la.ErrOption, "WithTileTokens"},
		{func(a *la.Args) { a.Mass = a.Entropy }, tiled, la.ErrShape, "mass has shape"},
		{func(a *la.Args) { a.Entropy = of(la.BFloat16, make([]float64, 40), 2, 4, 5) }, tiled, la.ErrDType, "entropy is BFloat16"},
		{func(a *la.Args) { a.Mass = tensor.New(tensor.WithShape(2, 4, 5, places), tensor.Of(tensor.Float32)) }, tiled, la.ErrUnsupported, "mass in host memory"},
		{func(a *la.Args) { a.LSE = a.Entropy }, tiled, la.ErrUnsupported, "entropy shares memory"},
		{func(a *la.Args) { a.Parents = make([][]int, 2) }, tiled, la.ErrUnsupported, "Parents"},
	} {
		a := args
		if x.change != nil {
			x.change(&a)
		}
		wantError(t, la.Attend(a, append(options[:3:3], x.more)...), x.kind, "Attend", x.text)
	}
}

// TestGPUMassRecorded: replays of a step have the entropies and masses of runs.
func TestGPUMassRecorded(t *testing.T) {
	gpu, rng := devicetest.Open(t), reftest.Rand(t)
	const heads, dim, tile, places = 2, 64, 64, 3
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: dim, DType: la.Float16, PageSize: 16, Pages: 12, Device: gpu})
	defer closeCache(t, cache)
	step := refused(cache.NewStep(1))
	g := G.NewGraph()
	var there [3]*device.Tensor
	var nodes [3]*G.Node
	random := func(i int) *tensor.Dense {
		x := make([]float64, []int{heads * dim, dim, dim}[i])
		for j := range x {
			x[j] = rng.NormFloat64()
		}
		return graphtest.TensorOf(tensor.Float32, x, 1, len(x))
	}
	for i := range there {
		x := random(i)
		there[i] = graphtest.Upload(t, gpu, x)
		nodes[i] = G.NewTensor(g, tensor.Float32, 2, G.WithShape(x.Shape()...), G.WithName("qkv"[i:i+1]), G.WithValue(there[i]))
	}
	out := refused(la.CachedAttention(nodes[0], nodes[1], nodes[2], step.Layer(0), la.WithCausal(), la.WithTileTokens(tile)))
	results := []*G.Node{refused(la.Mass(out, places)), refused(la.Entropy(out))}
	vm := G.NewTapeMachine(g)
	defer vm.Close()
	run := func() error { return la.Cause(vm.RunAll()) }
	seq := refused(cache.NewSequence())
	fresh := func() {
		for i, d := range there {
			if err := d.CopyFrom(random(i)); err != nil {
				t.Fatal(err)
			}
		}
	}
	read := func() (all []float32) {
		for _, n := range results {
			all = append(all, refused(n.Value().(*device.Tensor).Download()).Data().([]float32)...)
		}
		return all
	}
	var recording *device.Recording
	for i := range 70 {
		fresh()
		if err := step.Set([]la.Append{{Seq: seq, Tokens: 1}}); err != nil {
			t.Fatal(err)
		}
		switch i {
		default:
			if err := run(); err != nil {
				t.Fatal(err)
			}
			vm.Reset()
		case 62:
			recording = refused(gpu.Record(run))
			vm.Reset()
			fallthrough
		case 63, 64, 69:
			if err := recording.Replay(); err != nil {
				t.Fatal(err)
			}
			replayed := read()
			if err := run(); err != nil {
				t.Fatal(err)
			}
			if again := read(); !slices.Equal(again, replayed) {
				t.Fatalf("token %d: a run has %v, the replay before had %v", i, again, replayed)
			}
			vm.Reset()
			if sum := replayed[0] + replayed[1] + replayed[2]; !(math.Abs(float64(sum)-1) < 1e-5) {
				t.Fatalf("token %d: masses have the sum %v", i, sum)
			}
		}
		if err := step.Commit(); err != nil {
			t.Fatal(err)
		}
	}
	if err := recording.Close(); err != nil {
		t.Fatal(err)
	}
}
