package leanattention_test

import (
	"bytes"
	"errors"
	"fmt"
	"log"
	"math"
	"slices"

	"gorgonia.org/leanattention/rewrite"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/rope"

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
		check(G.Let(q, newTensor(row, 1, 1)), G.Let(k, newTensor(row, 1, 1)), G.Let(v, newTensor(row, float32(i), 10)))
		check(step.Run([]leanattention.Append{{Seq: seq, Tokens: 1}}, m.RunAll))
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
func toyModel(cache *leanattention.Cache, rows int, opts ...leanattention.Option) (step *leanattention.Step, run func() error) {
	step, err := cache.NewStep(rows)
	check(err)
	g := G.NewGraph()
	x := G.NewMatrix(g, tensor.Float32, G.WithShape(rows, 2), G.WithName("x"), G.WithInit(G.Ones()))
	_, err = leanattention.CachedAttention(x, x, x, step.Layer(0), append(opts, leanattention.WithCausal())...)
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
	check(step.Run([]leanattention.Append{{Seq: prompt, Tokens: 10}}, run))
	fmt.Println("prompt:", prompt.Len(), "tokens, free pages:", cache.Stats().FreePages)

	a, err := prompt.Fork()
	check(err)
	b, err := prompt.Fork()
	check(err)
	fmt.Println("forked: free pages:", cache.Stats().FreePages)

	check(step.Run([]leanattention.Append{{Seq: a, Tokens: 1}, {Seq: b, Tokens: 2}}, run))
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

// Attention to a long context is attention to its halves, merged: they may have been computed on two machines. The query,
// which is the last token, sees all of both.
func ExampleMerge() {
	half := func(k, v *tensor.Dense) leanattention.State {
		s := leanattention.State{Out: newTensor(tensor.Shape{1, 1, 2}, 0, 0), LSE: newTensor(tensor.Shape{1, 1}, 0)}
		check(leanattention.Attend(leanattention.Args{Q: newTensor(tensor.Shape{1, 1, 2}, 1, -1), K: k, V: v, Out: s.Out, LSE: s.LSE}))
		return s
	}
	first := half(newTensor(tensor.Shape{1, 2, 2}, 1, 0, 2, 1), newTensor(tensor.Shape{1, 2, 2}, 1, 2, 3, 4))
	second := half(newTensor(tensor.Shape{1, 2, 2}, 3, 1, 0, 2), newTensor(tensor.Shape{1, 2, 2}, 5, 6, 7, 8))
	whole := half(newTensor(tensor.Shape{1, 4, 2}, 1, 0, 2, 1, 3, 1, 0, 2), newTensor(tensor.Shape{1, 4, 2}, 1, 2, 3, 4, 5, 6, 7, 8))

	merged := leanattention.State{Out: newTensor(tensor.Shape{1, 1, 2}, 0, 0), LSE: newTensor(tensor.Shape{1, 1}, 0)}
	check(leanattention.Merge(merged, first, second))
	fmt.Printf("%.4f %.4f\n%.4f %.4f\n", merged.Out.Data(), merged.LSE.Data(), whole.Out.Data(), whole.LSE.Data())
	// Output:
	// [3.6113 4.6113] [2.1297]
	// [3.6113 4.6113] [2.1297]
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
	// [1.5]
	// [4]
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

func ExampleLogSumExp() {
	g := G.NewGraph()
	in := func(name string, x ...float64) *G.Node {
		v := tensor.New(tensor.WithShape(1, len(x), 1), tensor.WithBacking(x))
		return G.NodeFromAny(g, v, G.WithName(name))
	}
	q := in("q", 2)
	attend := func(k, v *G.Node) (out, lse *G.Node) {
		out, err := leanattention.Attention(q, k, v)
		check(err)
		lse, err = leanattention.LogSumExp(out)
		check(err)
		return out, lse
	}
	first, lse1 := attend(in("k1", 0, 1), in("v1", 10, 20))
	second, lse2 := attend(in("k2", 2), in("v2", 30))
	all, lse := attend(in("k", 0, 1, 2), in("v", 10, 20, 30))
	check(rewrite.Check(g))

	m := G.NewTapeMachine(g)
	defer m.Close()
	check(m.RunAll())
	number := func(n *G.Node) float64 { return n.Value().Data().([]float64)[0] }
	w1, w2 := math.Exp(number(lse1)), math.Exp(number(lse2))
	fmt.Printf("%.4f %.4f\n", (w1*number(first)+w2*number(second))/(w1+w2), math.Log(w1+w2))
	fmt.Printf("%.4f %.4f\n", number(all), number(lse))
	// Output:
	// 28.5094 4.1429
	// 28.5094 4.1429
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

// The gradients of a cost through attention: one head, one query, two keys.
func ExampleAttention_gradient() {
	g := G.NewGraph()
	node := func(name string, x ...float64) *G.Node {
		v := tensor.New(tensor.WithShape(1, len(x)/2, 2), tensor.WithBacking(x))
		return G.NewTensor(g, G.Float64, 3, G.WithName(name), G.WithShape(v.Shape()...), G.WithValue(v))
	}
	q, k, v := node("q", 0, 0), node("k", 0, 0, 2, 4), node("v", 1, 1, 3, 5)

	out, err := leanattention.Attention(q, k, v, leanattention.WithScale(1))
	if err != nil {
		fmt.Println(err)
		return
	}
	grads, err := G.Grad(G.Must(G.Sum(out)), q, k, v)
	if err != nil {
		fmt.Println(err)
		return
	}
	machine := G.NewTapeMachine(g)
	defer machine.Close()
	if err := machine.RunAll(); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("out", out.Value().Data())
	for i, name := range []string{"dq", "dk", "dv"} {
		fmt.Println(name, grads[i].Value().Data())
	}
	// Output:
	// out [2 3]
	// dq [3 6]
	// dk [0 0 0 0]
	// dv [0.5 0.5 0.5 0.5]
}

// A graph that somebody wrote with Gorgonia's own ops is rewritten; the values
// of its inputs are shared, and what it reads is read.
func Example_fuse() {
	g := G.NewGraph()
	q := G.NodeFromAny(g, newTensor(tensor.Shape{1, 1, 2}, 3, 0), G.WithName("q")) // (heads, queries, d)
	k := G.NodeFromAny(g, newTensor(tensor.Shape{1, 2, 2}, 1, 0, 0, 1), G.WithName("k"))
	v := G.NodeFromAny(g, newTensor(tensor.Shape{1, 2, 2}, 10, 20, 30, 40), G.WithName("v"))
	scores := G.Must(G.BatchedMatMul(q, k, false, true))
	scaled := G.Must(G.HadamardDiv(scores, G.NewConstant(float32(math.Sqrt2))))
	out := G.Must(G.BatchedMatMul(G.Must(G.SoftMax(scaled, 2)), v))
	classes := G.Must(G.SoftMax(out, 2)) // not attention
	var result G.Value
	G.Read(out, &result)

	f, err := rewrite.Fuse(classes)
	check(err)
	fmt.Print(f)

	m := G.NewTapeMachine(f.Graph)
	defer m.Close()
	check(m.RunAll())
	fmt.Printf("%.3f\n", result.Data())
	// Output:
	// 1 fused, 1 left alone
	// fused node 7 (A ××× B): heads 1/1, queries 1, keys 2, scale 0.707107
	// left node 8 (Softmax{2, false}()): its result is a root, not the weights of values: if it is to be attention, multiply values by it
	// [12.141 22.141]
}

// Speculative decoding: a small model proposes some tokens, the large one reads all of
// them in one step, and those behind the first that it would not have chosen are taken
// back.
func ExampleSequence_Truncate() {
	cache, err := leanattention.NewCache(leanattention.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 2, PageSize: 4, Pages: 8})
	check(err)
	step, run := toyModel(cache, 8)
	seq, err := cache.NewSequence()
	check(err)
	read := func(tokens int) {
		check(step.Run([]leanattention.Append{{Seq: seq, Tokens: tokens}}, run))
	}
	read(5) // the prompt

	last, proposed := "a", []string{"b", "c", "x", "e"}
	chosen := []string{"b", "c", "d", "y", "z"} // behind last, and behind each proposed token
	before := seq.Len()
	read(1 + len(proposed)) // last itself is new to the cache, too
	right := 0
	for right < len(proposed) && proposed[right] == chosen[right] {
		right++
	}
	check(seq.Truncate(before + 1 + right))
	fmt.Println(last, proposed[:right], "and then", chosen[right])
	fmt.Println(seq.Len(), "tokens,", cache.Stats().FreePages, "free pages")
	// Output:
	// a [b c] and then d
	// 8 tokens, 6 free pages
}

// Speculative decoding with a tree of guesses: two tokens may come next, and each of them has
// some that may follow it. All are read in one step, and the branch that is right is kept.
func ExampleSequence_Keep() {
	cache, err := leanattention.NewCache(leanattention.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 2, PageSize: 4, Pages: 8})
	check(err)
	step, run := toyModel(cache, 8)
	seq, err := cache.NewSequence()
	check(err)
	check(step.Run([]leanattention.Append{{Seq: seq, Tokens: 5}}, run)) // the prompt

	// 0 is certain; 1 and 2 may follow it, 3 and 4 may follow 2.
	parents := []int{-1, 0, 0, 2, 2}
	before := seq.Len()
	check(step.Run([]leanattention.Append{{Seq: seq, Tokens: len(parents), Parents: parents}}, run))
	fmt.Println(step.Positions()[:5], seq.Len(), "tokens")
	check(seq.Keep(before, []int{0, 2, 4})) // of what the model has chosen behind each
	fmt.Println(seq.Len(), "tokens,", cache.Stats().FreePages, "free pages")
	// Output:
	// [5 6 6 7 7] 10 tokens
	// 8 tokens, 6 free pages
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

// A chat of a model whose layers all have windows goes on for ever in a few pages.
func ExampleCacheConfig_window() {
	const window = 16
	cache, err := leanattention.NewCache(leanattention.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 2, PageSize: 4, Pages: 8, Window: window, SinkTokens: 4})
	check(err)
	step, run := toyModel(cache, 5, leanattention.WithWindow(window), leanattention.WithSinkTokens(4))
	chat, err := cache.NewSequence()
	check(err)
	for range 200 {
		check(step.Run([]leanattention.Append{{Seq: chat, Tokens: 5}}, run))
	}
	fmt.Println(chat)
	fmt.Println(cache.Stats().FreePages, "free pages; the last row was at", step.Positions()[4])
	// Output:
	// sequence of 1000 tokens but for [4, 985) in 5 pages
	// 3 free pages; the last row was at 999
}

// A prompt that was read once is saved, and loaded into a cache of other pages; it might
// be on a GPU.
func ExampleSequence_WriteTo() {
	config := leanattention.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 2, DType: leanattention.Float16, PageSize: 4, Pages: 8}
	cache, err := leanattention.NewCache(config)
	check(err)
	step, run := toyModel(cache, 8)
	prompt, err := cache.NewSequence()
	check(err)
	check(step.Run([]leanattention.Append{{Seq: prompt, Tokens: 5}}, run))

	var file bytes.Buffer
	n, err := prompt.WriteTo(&file)
	check(err)
	fmt.Println(n, "bytes")

	config.PageSize = 16
	other, err := leanattention.NewCache(config)
	check(err)
	loaded, err := other.ReadSequence(&file)
	check(err)
	fmt.Println(loaded.Len(), "tokens")
	// Output:
	// 88 bytes
	// 5 tokens
}

// What is no saved sequence is an error, and the cache is as it was.
func ExampleCache_ReadSequence() {
	cache, err := leanattention.NewCache(leanattention.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 2, Pages: 8})
	check(err)
	_, err = cache.ReadSequence(bytes.NewReader(make([]byte, 100)))
	fmt.Println(errors.Is(err, leanattention.ErrFormat), cache.Stats().FreePages)
	// Output: true 8
}

// A prompt of seven tokens and a text that needs one token more, in steps of four rows.
func ExampleChunks() {
	cache, err := leanattention.NewCache(leanattention.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 2, Pages: 8})
	check(err)
	step, run := toyModel(cache, 4)
	prompt, err := cache.NewSequence()
	check(err)
	text, err := cache.NewSequence()
	check(err)

	todo := []leanattention.Append{{Seq: prompt, Tokens: 7}, {Seq: text, Tokens: 1}}
	for chunk, of := range leanattention.Chunks(step.Tokens(), todo) {
		check(step.Run(chunk, run))
		fmt.Println("positions", step.Positions())
		for i, row := range step.Last() {
			all := todo[of[i]]
			fmt.Printf("  append %d: %d of %d tokens", of[i], all.Seq.Len(), all.Tokens)
			if all.Seq.Len() == all.Tokens {
				fmt.Printf("; row %d has the logits of the next one", row)
			}
			fmt.Println()
		}
	}
	// Output:
	// positions [0 1 2 0]
	//   append 0: 3 of 7 tokens
	//   append 1: 1 of 1 tokens; row 3 has the logits of the next one
	// positions [3 4 5 6]
	//   append 0: 7 of 7 tokens; row 3 has the logits of the next one
}

// Gorgonia's machine hides what went wrong in a node.
func ExampleCause() {
	g := G.NewGraph()
	x := G.NewTensor(g, tensor.Float32, 3, G.WithShape(1, 2, 2), G.WithName("x"), G.WithInit(G.Ones()))
	live := G.NodeFromAny(g, tensor.New(tensor.WithShape(1), tensor.WithBacking([]int{3})), G.WithName("live"))
	_, err := leanattention.Attention(x, x, x, leanattention.WithLengths(live))
	check(err)
	m := G.NewTapeMachine(g)
	defer m.Close()
	err = m.RunAll()
	fmt.Println(errors.Is(err, leanattention.ErrLength), errors.Is(leanattention.Cause(err), leanattention.ErrLength))
	// Output: false true
}

// Graphs are checked once, when they are complete.
func Example_check() {
	g := G.NewGraph()
	x := G.NewTensor(g, tensor.Float32, 3, G.WithShape(1, 2, 2), G.WithName("x"))
	_, err := leanattention.Attention(x, x, x)
	check(err)
	fmt.Println(rewrite.Check(g))
	// Output: <nil>
}

// A cache on a GPU, and a graph whose values are in host memory but for those of
// the attention. It is compiled and not run: machines have none or one.
func Example_device() {
	gpu, err := device.Open(0)
	if err != nil {
		log.Fatal(err) // ErrNoDevice if there is no GPU
	}
	defer gpu.Close()
	cache, err := leanattention.NewCache(leanattention.CacheConfig{Layers: 1, KVHeads: 2, HeadDim: 64, DType: leanattention.Float16, Pages: 16, Device: gpu})
	if err != nil {
		log.Fatal(err)
	}
	defer cache.Close()
	step, err := cache.NewStep(1)
	if err != nil {
		log.Fatal(err)
	}

	g := G.NewGraph()
	in := func(name string, width int) *G.Node {
		x := G.NewMatrix(g, tensor.Float32, G.WithShape(1, width), G.WithName(name), G.WithInit(G.Ones()))
		return G.Must(device.ToGPU(x, gpu)) // or leave x where it is: then out is in host memory too
	}
	out, err := leanattention.CachedAttention(in("q", 4*64), in("k", 2*64), in("v", 2*64), step.Layer(0), leanattention.WithCausal())
	if err != nil {
		log.Fatal(err)
	}
	out = G.Must(device.ToHost(out))

	sequence, err := cache.NewSequence()
	if err != nil {
		log.Fatal(err)
	}
	machine := G.NewTapeMachine(g)
	defer machine.Close()
	for range 3 {
		if err := step.Run([]leanattention.Append{{Seq: sequence, Tokens: 1}}, machine.RunAll); err != nil {
			log.Fatal(err)
		}
		machine.Reset()
	}
	fmt.Println(out.Value().Shape(), sequence.Len(), cache.Config().Device)
}

// A decode step is recorded when it has run once, and from then on queued as one. It is
// compiled here; where there is a GPU, or one of the tests', it runs.
func ExampleGPU_Record() {
	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	gpu, err := device.Open(0)
	check(err)
	defer gpu.Close()
	cache, err := leanattention.NewCache(leanattention.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 64, DType: leanattention.Float16, Pages: 16, Device: gpu})
	check(err)
	defer cache.Close()
	step, err := cache.NewStep(1)
	check(err)
	sequence, err := cache.NewSequence()
	check(err)
	row := func(x float32) *tensor.Dense {
		return tensor.New(tensor.WithShape(1, 64), tensor.WithBacking(slices.Repeat([]float32{x}, 64)))
	}

	input, err := gpu.Upload(row(0))
	check(err)
	g := G.NewGraph()
	x := G.NewMatrix(g, tensor.Float32, G.WithShape(1, 64), G.WithName("x"), G.WithValue(input))
	out, err := leanattention.CachedAttention(x, x, x, step.Layer(0), leanattention.WithCausal())
	check(err)
	machine := G.NewTapeMachine(g)
	defer machine.Close()

	var recording *device.Recording
	defer func() { check(recording.Close()) }()
	for i := range 4 {
		check(input.CopyFrom(row(float32(i)))) // the machine reads it, and so does a replay
		check(step.Run([]leanattention.Append{{Seq: sequence, Tokens: 1}}, func() (err error) {
			run := func() error {
				defer machine.Reset()
				return leanattention.Cause(machine.RunAll())
			}
			if i == 0 {
				return run() // nodes get their memory
			}
			if i == 1 {
				if recording, err = gpu.Record(run); err != nil {
					return err
				}
			}
			return recording.Replay() // Record has not executed the work
		}))
	}
	result, err := out.Value().(*device.Tensor).Download() // what the last replay computed
	check(err)
	fmt.Println(result.Shape(), sequence.Len())
}
