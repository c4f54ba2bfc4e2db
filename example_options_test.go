package leanattention_test

import (
	"fmt"
	"math"

	"gorgonia.org/leanattention/rope"

	"gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// A graph that is built for a capacity of four keys attends to as many as are
// live.
func ExampleWithLengths() {
	g := G.NewGraph()
	q := G.NodeFromAny(g, newTensor(tensor.Shape{1, 1, 1}, 0), G.WithName("q"))
	k := G.NodeFromAny(g, newTensor(tensor.Shape{1, 4, 1}, 1, 1, 1, 1), G.WithName("k"))
	v := G.NodeFromAny(g, newTensor(tensor.Shape{1, 4, 1}, 1, 2, 3, 4), G.WithName("v"))
	live := G.NewVector(g, tensor.Int, G.WithShape(1), G.WithName("live"))

	out, err := leanattention.Attention(q, k, v, leanattention.WithLengths(live))
	check(err)

	m := G.NewTapeMachine(g)
	defer m.Close()
	for n := 1; n <= 4; n++ {
		check(G.Let(live, tensor.New(tensor.WithShape(1), tensor.WithBacking([]int{n}))), m.RunAll())
		fmt.Println(n, out.Value().Data())
		m.Reset()
	}
	// Output:
	// 1 [1]
	// 2 [1.5]
	// 3 [2]
	// 4 [2.5]
}

// attended runs one head's attention to four keys that are all alike, with the values
// 1, 2, 3 and 4: what a query sees counts the same, and the output is its mean.
func attended(queries int, opts ...leanattention.Option) any {
	g := G.NewGraph()
	in := func(name string, x ...float32) *G.Node {
		return G.NodeFromAny(g, newTensor(tensor.Shape{1, len(x), 1}, x...), G.WithName(name))
	}
	out, err := leanattention.Attention(in("q", make([]float32, queries)...), in("k", 1, 1, 1, 1), in("v", 1, 2, 3, 4), opts...)
	check(err)
	m := G.NewTapeMachine(g)
	defer m.Close()
	check(m.RunAll())
	return out.Value().Data()
}

// Each query sees the keys up to its own position.
func ExampleWithCausal() {
	fmt.Println(attended(4))
	fmt.Println(attended(4, leanattention.WithCausal()))
	fmt.Println(attended(2, leanattention.WithCausal())) // the last two positions
	// Output:
	// [2.5 2.5 2.5 2.5]
	// [1 1.5 2 2.5]
	// [2 2.5]
}

// Each query sees two keys: its own position's and the one before.
func ExampleWithWindow() {
	fmt.Println(attended(4, leanattention.WithCausal(), leanattention.WithWindow(2)))
	fmt.Println(attended(1, leanattention.WithCausal(), leanattention.WithWindow(2)))
	// Output:
	// [1 1.5 2.5 3.5]
	// [3.5]
}

// Numbers that are added to the scores. -Inf hides a key, and log 2 counts it twice.
func ExampleWithBias() {
	g := G.NewGraph()
	in := func(name string, shape tensor.Shape, x ...float32) *G.Node {
		return G.NodeFromAny(g, newTensor(shape, x...), G.WithName(name))
	}
	q := in("q", tensor.Shape{1, 2, 1}, 0, 0) // (heads, queries, d)
	k, v := in("k", tensor.Shape{1, 3, 1}, 1, 1, 1), in("v", tensor.Shape{1, 3, 1}, 1, 2, 6)
	hidden, twice := float32(math.Inf(-1)), float32(math.Ln2)
	bias := in("bias", tensor.Shape{1, 2, 3}, // (heads, queries, keys)
		0, 0, hidden,
		0, 0, twice)

	out, err := leanattention.Attention(q, k, v, leanattention.WithBias(bias))
	check(err)
	m := G.NewTapeMachine(g)
	defer m.Close()
	check(m.RunAll())
	fmt.Printf("%.2f\n", out.Value().Data())
	// Output: [1.50 3.75]
}

// A sink that is as large as the score of the only key takes half of the weight.
func ExampleWithSinks() {
	g := G.NewGraph()
	in := func(name string, shape tensor.Shape, x ...float32) *G.Node {
		return G.NodeFromAny(g, newTensor(shape, x...), G.WithName(name))
	}
	q, k, v := in("q", tensor.Shape{2, 1, 1}, 3, 3), in("k", tensor.Shape{1, 1, 1}, 1), in("v", tensor.Shape{1, 1, 1}, 8)
	sinks := in("sinks", tensor.Shape{2}, 3, float32(math.Inf(-1))) // (heads)

	out, err := leanattention.Attention(q, k, v, leanattention.WithSinks(sinks))
	check(err)
	m := G.NewTapeMachine(g)
	defer m.Close()
	check(m.RunAll())
	fmt.Printf("%.2f\n", out.Value().Data())
	// Output: [4.00 8.00]
}

// The nearer of two equal keys counts more: exp(1/2 * distance) times as much.
func ExampleWithALiBi() {
	fmt.Printf("%.3f\n", attended(1, leanattention.WithCausal(), leanattention.WithWindow(2), leanattention.WithALiBi([]float64{0})))
	fmt.Printf("%.3f\n", attended(1, leanattention.WithCausal(), leanattention.WithWindow(2), leanattention.WithALiBi([]float64{0.5})))
	// Output:
	// [3.500]
	// [3.622]
}

// The mean of 1, 2, 3 and 4, where each is dropped with probability 1/2, and counts twice if it is not: of
// seed 3 the 2 is. A seed of 0 drops none.
func ExampleWithDropout() {
	g := G.NewGraph()
	in := func(name string, x ...float32) *G.Node {
		return G.NodeFromAny(g, newTensor(tensor.Shape{1, len(x), 1}, x...), G.WithName(name))
	}
	seed := G.NewScalar(g, tensor.Int, G.WithName("seed"))
	out, err := leanattention.Attention(in("q", 0), in("k", 1, 1, 1, 1), in("v", 1, 2, 3, 4), leanattention.WithDropout(0.5, seed))
	check(err)
	m := G.NewTapeMachine(g)
	defer m.Close()
	for _, step := range []int{2, 3, 0} {
		check(G.Let(seed, step))
		check(m.RunAll())
		fmt.Println(out.Value().Data())
		m.Reset()
	}
	// Output:
	// [4.5]
	// [0.5]
	// [2.5]
}

// A score of 100 becomes 10 * tanh(10), which is 10.
func ExampleWithSoftCap() {
	out, lse := newTensor(tensor.Shape{1, 1, 1}, 0), newTensor(tensor.Shape{1, 1}, 0)
	args := leanattention.Args{
		Q: newTensor(tensor.Shape{1, 1, 1}, 100), K: newTensor(tensor.Shape{1, 1, 1}, 1), V: newTensor(tensor.Shape{1, 1, 1}, 7),
		Out: out, LSE: lse,
	}
	check(leanattention.Attend(args))
	fmt.Println(lse.Data())
	check(leanattention.Attend(args, leanattention.WithSoftCap(10)))
	fmt.Println(lse.Data())
	// Output:
	// [100]
	// [10]
}

// Attention to two halves of the keys, merged by their log-sum-exps, is attention to
// all of them.
func ExampleWithVariant() {
	// Two documents in one sequence: a token sees the earlier tokens of its own document.
	q := tensor.New(tensor.WithShape(1, 4, 1), tensor.WithBacking([]float32{0, 0, 0, 0}))
	v := tensor.New(tensor.WithShape(1, 4, 1), tensor.WithBacking([]float32{1, 3, 10, 20}))
	out := tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(1, 4, 1))
	doc := tensor.New(tensor.WithShape(4), tensor.WithBacking([]int{0, 0, 1, 1}))
	err := leanattention.Attend(leanattention.Args{Q: q, K: q, V: v, Out: out, Tensors: map[string]G.Value{"doc": doc}},
		leanattention.WithVariant(leanattention.Variant{Visible: "key <= query && doc[key] == doc[query]"}))
	fmt.Println(out.Data(), err)
	// Output: [1 2 10 15] <nil>
}

// Each worker gets the same number of LeanTiles, or each head a worker. It is the same
// attention.
func ExampleWithSchedule() {
	for _, s := range []leanattention.Schedule{leanattention.StreamK, leanattention.FixedSplit(2), leanattention.PerHead} {
		fmt.Println(attended(1, leanattention.WithSchedule(s), leanattention.WithWorkers(3), leanattention.WithTileTokens(1)))
	}
	// Output:
	// [2.5]
	// [2.5]
	// [2.5]
}

// Queries and keys are turned by the positions of their tokens: q and k are the same for all tokens here, and so each
// weighs the others by their distance alone.
func ExampleWithRotary() {
	cache, err := leanattention.NewCache(leanattention.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 2, ValueDim: 1, Pages: 1})
	check(err)
	step, err := cache.NewStep(4)
	check(err)
	g := G.NewGraph()
	qk := G.NewMatrix(g, tensor.Float32, G.WithShape(4, 2), G.WithName("q and k"), G.WithInit(G.Ones()))
	v := G.NewMatrix(g, tensor.Float32, G.WithName("v"), G.WithValue(newTensor(tensor.Shape{4, 1}, 1, 0, 0, 0))) // the weight of token 0
	out, err := leanattention.CachedAttention(qk, qk, v, step.Layer(0), leanattention.WithCausal(),
		leanattention.WithRotary(rope.Config{}))
	check(err)

	text, err := cache.NewSequence()
	check(err)
	check(step.Run([]leanattention.Append{{Seq: text, Tokens: 4}}, G.NewTapeMachine(g).RunAll))
	fmt.Printf("%.3f\n", out.Value().Data())
	// Output:
	// [1.000 0.343 0.081 0.035]
}
