package leanattention_test

import (
	"fmt"
	"math"

	"gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// A graph that somebody wrote with Gorgonia's own ops is rewritten; the values
// of its inputs are shared, and what it reads is read.
func ExampleFuse() {
	g := G.NewGraph()
	q := G.NodeFromAny(g, newTensor(tensor.Shape{1, 1, 2}, 3, 0), G.WithName("q")) // (heads, queries, d)
	k := G.NodeFromAny(g, newTensor(tensor.Shape{1, 2, 2}, 1, 0, 0, 1), G.WithName("k"))
	v := G.NodeFromAny(g, newTensor(tensor.Shape{1, 2, 2}, 10, 20, 30, 40), G.WithName("v"))
	scores := G.Must(G.BatchedMatMul(q, k, false, true))
	scaled := G.Must(G.HadamardDiv(scores, G.NewConstant(float32(math.Sqrt2))))
	out := G.Must(G.BatchedMatMul(G.Must(G.SoftMax(scaled, 2)), v))
	dropped := G.Must(G.Dropout(G.Must(G.SoftMax(out, 2)), 0.5)) // not attention
	var result G.Value
	G.Read(out, &result)

	f, err := leanattention.Fuse(dropped)
	check(err)
	fmt.Print(f)

	m := G.NewTapeMachine(f.Graph)
	defer m.Close()
	check(m.RunAll())
	fmt.Printf("%.3f\n", result.Data())
	// Output:
	// 1 fused, 1 left alone
	// fused node 7 (A ××× B): heads 1/1, queries 1, keys 2, scale 0.707107
	// left node 8 (Softmax{2, false}()): its result goes into node 9 (Dropout{training=true}()), not into a product with values: for inference give it probability 0, or make a machine with EvalMode before Fuse
	// [12.141 22.141]
}
