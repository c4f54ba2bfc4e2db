package leanattention_test

import (
	"fmt"
	"log"

	"gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// check keeps the examples short.
func check(errs ...error) {
	for _, err := range errs {
		if err != nil {
			log.Fatal(err)
		}
	}
}

// newTensor makes a float32 tensor.
func newTensor(shape tensor.Shape, x ...float32) *tensor.Dense {
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))
}

func ExampleAttention() {
	g := G.NewGraph()
	q := G.NodeFromAny(g, newTensor(tensor.Shape{1, 1, 2}, 3, 0), G.WithName("q")) // (heads, queries, d)
	k := G.NodeFromAny(g, newTensor(tensor.Shape{1, 2, 2}, 1, 0, 0, 1), G.WithName("k"))
	v := G.NodeFromAny(g, newTensor(tensor.Shape{1, 2, 2}, 10, 20, 30, 40), G.WithName("v"))

	out, err := leanattention.Attention(q, k, v)
	check(err)

	m := G.NewTapeMachine(g)
	defer m.Close()
	check(m.RunAll())
	fmt.Printf("%.3f\n", out.Value().Data())
	// Output: [12.141 22.141]
}

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

// The graph of a decoder is built once and run for every token. The keys of
// this one are all alike, so each token gets the mean of the values so far.
func ExampleCachedAttention() {
	cache, err := leanattention.NewCache(leanattention.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 2, Pages: 8})
	check(err)
	seq, err := cache.NewSequence()
	check(err)
	step, err := cache.NewStep(1) // a run takes one token
	check(err)

	g := G.NewGraph()
	q := G.NewMatrix(g, tensor.Float32, G.WithShape(1, 2), G.WithName("q"))
	k := G.NewMatrix(g, tensor.Float32, G.WithShape(1, 2), G.WithName("k"))
	v := G.NewMatrix(g, tensor.Float32, G.WithShape(1, 2), G.WithName("v"))
	out, err := leanattention.CachedAttention(q, k, v, step.Layer(0), leanattention.WithCausal())
	check(err)

	m := G.NewTapeMachine(g)
	defer m.Close()
	row := tensor.Shape{1, 2}
	for i := range 4 {
		check(step.Set([]leanattention.Append{{Seq: seq, Tokens: 1}}))
		check(G.Let(q, newTensor(row, 1, 1)), G.Let(k, newTensor(row, 1, 1)), G.Let(v, newTensor(row, float32(i), 10)))
		check(m.RunAll(), step.Commit())
		fmt.Println(seq.Len(), out.Value().Data())
		m.Reset()
	}
	// Output:
	// 1 [0 10]
	// 2 [0.5 10]
	// 3 [1 10]
	// 4 [1.5 10]
}

// toyModel builds a graph with a single attention layer and the given number of
// token rows; run runs it.
func toyModel(cache *leanattention.Cache, rows int) (step *leanattention.Step, run func() error) {
	step, err := cache.NewStep(rows)
	check(err)
	g := G.NewGraph()
	x := G.NewMatrix(g, tensor.Float32, G.WithShape(rows, 2), G.WithName("x"), G.WithInit(G.Ones()))
	_, err = leanattention.CachedAttention(x, x, x, step.Layer(0), leanattention.WithCausal())
	check(err)
	return step, func() error {
		m := G.NewTapeMachine(g)
		defer m.Close()
		return m.RunAll()
	}
}

// Two continuations of one prompt share its pages; only what they add, and the
// page that the prompt has filled in part, is their own.
func ExampleSequence_Fork() {
	cache, err := leanattention.NewCache(leanattention.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 2, PageSize: 4, Pages: 16})
	check(err)
	step, run := toyModel(cache, 10)

	prompt, err := cache.NewSequence()
	check(err)
	check(step.Set([]leanattention.Append{{Seq: prompt, Tokens: 10}}), run(), step.Commit())
	fmt.Println("prompt:", prompt.Len(), "tokens, free pages:", cache.Stats().FreePages)

	a, err := prompt.Fork()
	check(err)
	b, err := prompt.Fork()
	check(err)
	fmt.Println("forked: free pages:", cache.Stats().FreePages)

	check(step.Set([]leanattention.Append{{Seq: a, Tokens: 1}, {Seq: b, Tokens: 2}}), run(), step.Commit())
	fmt.Println("continued:", a.Len(), b.Len(), prompt.Len(), "free pages:", cache.Stats().FreePages)
	// Output:
	// prompt: 10 tokens, free pages: 13
	// forked: free pages: 13
	// continued: 11 12 10 free pages: 11
}

// Two sequences, of which the first has one live key and the second three, and
// two query heads that share one KV head.
func ExampleAttend() {
	out, lse := newTensor(tensor.Shape{2, 2, 1, 1}, 0, 0, 0, 0), newTensor(tensor.Shape{2, 2, 1}, 0, 0, 0, 0)
	check(leanattention.Attend(leanattention.Args{
		Q:       newTensor(tensor.Shape{2, 2, 1, 1}, 0, 0, 0, 1),       // (batch, heads, queries, d)
		K:       newTensor(tensor.Shape{2, 1, 3, 1}, 1, 1, 1, 1, 1, 9), // (batch, KV heads, keys, d)
		V:       newTensor(tensor.Shape{2, 1, 3, 1}, 5, 6, 7, 5, 6, 7),
		Out:     out,
		LSE:     lse,
		Lengths: []int{1, 3},
	}))
	fmt.Printf("%.3f\n%.3f\n", out.Data(), lse.Data())
	// Output:
	// [5.000 5.000 6.000 6.999]
	// [0.000 0.000 1.099 9.001]
}

// Default is what the operator replaces: the same call, made of stock ops.
func ExampleDefault() {
	for name, attention := range map[string]func(q, k, v *G.Node, opts ...leanattention.Option) (*G.Node, error){
		"stock": leanattention.Default,
		"lean ": leanattention.Attention,
	} {
		g := G.NewGraph()
		q := G.NodeFromAny(g, newTensor(tensor.Shape{1, 2, 1}, 1, 2), G.WithName("q"))
		k := G.NodeFromAny(g, newTensor(tensor.Shape{1, 3, 1}, 1, 2, 3), G.WithName("k"))
		v := G.NodeFromAny(g, newTensor(tensor.Shape{1, 3, 1}, 1, 2, 3), G.WithName("v"))
		out, err := attention(q, k, v, leanattention.WithScale(0.5), leanattention.WithCausal())
		check(err)
		m := G.NewTapeMachine(g)
		check(m.RunAll(), m.Close())
		fmt.Printf("%s %.3f\n", name, out.Value().Data())
	}
	// Unordered output:
	// stock [1.622 2.575]
	// lean  [1.622 2.575]
}
