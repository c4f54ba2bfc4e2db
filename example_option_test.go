package leanattention_test

import (
	"fmt"
	"math"

	la "gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// attended runs one head's attention to four keys that are all alike, with the values
// 1, 2, 3 and 4: what a query sees counts the same, and the output is its mean.
func attended(queries int, opts ...la.Option) any {
	g := G.NewGraph()
	in := func(name string, x ...float32) *G.Node {
		return G.NodeFromAny(g, newTensor(tensor.Shape{1, len(x), 1}, x...), G.WithName(name))
	}
	out, err := la.Attention(in("q", make([]float32, queries)...), in("k", 1, 1, 1, 1), in("v", 1, 2, 3, 4), opts...)
	check(err)
	m := G.NewTapeMachine(g)
	defer m.Close()
	check(m.RunAll())
	return out.Value().Data()
}

// Each query sees the keys up to its own position.
func ExampleWithCausal() {
	fmt.Println(attended(4))
	fmt.Println(attended(4, la.WithCausal()))
	fmt.Println(attended(2, la.WithCausal())) // the last two positions
	// Output:
	// [2.5 2.5 2.5 2.5]
	// [1 1.5 2 2.5]
	// [2 2.5]
}

// Each query sees two keys: its own position's and the one before.
func ExampleWithWindow() {
	fmt.Println(attended(4, la.WithCausal(), la.WithWindow(2)))
	fmt.Println(attended(1, la.WithCausal(), la.WithWindow(2)))
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

	out, err := la.Attention(q, k, v, la.WithBias(bias))
	check(err)
	m := G.NewTapeMachine(g)
	defer m.Close()
	check(m.RunAll())
	fmt.Printf("%.2f\n", out.Value().Data())
	// Output: [1.50 3.75]
}

// The nearer of two equal keys counts more: exp(1/2 * distance) times as much.
func ExampleWithALiBi() {
	fmt.Printf("%.3f\n", attended(1, la.WithCausal(), la.WithWindow(2), la.WithALiBi([]float64{0})))
	fmt.Printf("%.3f\n", attended(1, la.WithCausal(), la.WithWindow(2), la.WithALiBi([]float64{0.5})))
	// Output:
	// [3.500]
	// [3.622]
}

// A score of 100 becomes 10 * tanh(10), which is 10.
func ExampleWithSoftCap() {
	out, lse := newTensor(tensor.Shape{1, 1, 1}, 0), newTensor(tensor.Shape{1, 1}, 0)
	args := la.Args{
		Q: newTensor(tensor.Shape{1, 1, 1}, 100), K: newTensor(tensor.Shape{1, 1, 1}, 1), V: newTensor(tensor.Shape{1, 1, 1}, 7),
		Out: out, LSE: lse,
	}
	check(la.Attend(args))
	fmt.Println(lse.Data())
	check(la.Attend(args, la.WithSoftCap(10)))
	fmt.Println(lse.Data())
	// Output:
	// [100]
	// [10]
}

// Attention to two halves of the keys, merged by their log-sum-exps, is attention to
// all of them.
func ExampleWithLSE() {
	g := G.NewGraph()
	in := func(name string, x ...float64) *G.Node {
		v := tensor.New(tensor.WithShape(1, len(x), 1), tensor.WithBacking(x))
		return G.NodeFromAny(g, v, G.WithName(name))
	}
	q := in("q", 2)
	attend := func(k, v *G.Node) (out, lse *G.Node) {
		out, err := la.Attention(q, k, v, la.WithLSE(&lse))
		check(err)
		return out, lse
	}
	first, lse1 := attend(in("k1", 0, 1), in("v1", 10, 20))
	second, lse2 := attend(in("k2", 2), in("v2", 30))
	all, lse := attend(in("k", 0, 1, 2), in("v", 10, 20, 30))
	check(la.CheckGraph(g))

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
	for _, s := range []la.Schedule{la.StreamK, la.FixedSplit(2), la.PerHead} {
		fmt.Println(attended(1, la.WithSchedule(s), la.WithWorkers(3), la.WithTileTokens(1)))
	}
	// Output:
	// [2.5]
	// [2.5]
	// [2.5]
}
