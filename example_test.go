package leanattention_test

import (
	"errors"
	"fmt"
	"log"
	"math"

	"gorgonia.org/leanattention/rewrite"

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
