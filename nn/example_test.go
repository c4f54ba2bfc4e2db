package nn_test

import (
	"fmt"
	"log"
	"math"
	"math/rand/v2"

	"gorgonia.org/leanattention/rope"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/nn"

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

// input is a float32 node of n columns, or a vector for n = 0.
func input(g *G.ExprGraph, name string, n int, x ...float32) *G.Node {
	shape := tensor.Shape{len(x)}
	if n > 0 {
		shape = tensor.Shape{len(x) / n, n}
	}
	t := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))
	return G.NewTensor(g, t.Dtype(), len(shape), G.WithName(name), G.WithShape(shape...), G.WithValue(t))
}

// ids is a node of token ids.
func ids(g *G.ExprGraph, name string, x ...int) *G.Node {
	return G.NewVector(g, tensor.Int, G.WithName(name), G.WithShape(len(x)), G.WithValue(tensor.New(tensor.WithShape(len(x)), tensor.WithBacking(x))))
}

// run runs a graph once.
func run(g *G.ExprGraph) {
	machine := G.NewTapeMachine(g)
	check(machine.RunAll(), machine.Close())
}

// The rows of two tokens, each added to the row of its position.
func ExampleEmbedding() {
	g := G.NewGraph()
	table := input(g, "table", 2, 0, 0, 1, 10, 2, 20)
	positions := input(g, "positions", 2, 0.5, 0, 0.25, 0)

	at, err := nn.Embedding(positions, ids(g, "position", 0, 1), nil)
	check(err)
	y, err := nn.Embedding(table, ids(g, "token", 2, 1), at)
	check(err)

	run(g)
	fmt.Println(y.Value().Data())
	// Output: [2.5 20 1.25 10]
}

// Each row has mean 0 and variance 1, and then beta is added.
func ExampleLayerNorm() {
	g := G.NewGraph()
	x := input(g, "x", 4, 1, 1, 3, 3, 10, 10, 10, 50)
	gamma, beta := input(g, "gamma", 0, 1, 1, 1, 1), input(g, "beta", 0, 0, 0, 0, 100)
	y, err := nn.LayerNorm(x, gamma, beta, 1e-5)
	check(err)

	run(g)
	fmt.Printf("%.2f\n", y.Value().Data())
	// Output: [-1.00 -1.00 1.00 101.00 -0.58 -0.58 -0.58 101.73]
}

// The weights are (out, in).
func ExampleLinear() {
	g := G.NewGraph()
	x := input(g, "x", 2, 1, 2)
	w := input(g, "w", 2, 1, 0, 0, 1, -1, -1)
	b := input(g, "b", 0, 10, 20, 0)
	y, err := nn.Linear(x, w, b)
	check(err)
	up, err := nn.Linear(x, w, nil, nn.WithActivation(nn.ReLU)) // -3 becomes 0
	check(err)

	run(g)
	fmt.Println(y.Value().Data(), up.Value().Data())
	// Output: [11 22 -3] [1 2 0]
}

// The feed-forward half of a decoder layer: x + down(relu(up(norm(x)))).
func ExampleLinear_residual() {
	g := G.NewGraph()
	x := input(g, "x", 2, 3, 5)
	gamma, beta := input(g, "gamma", 0, 1, 1), input(g, "beta", 0, 0, 0)
	up := input(g, "up", 2, 1, 0, 0, 1, 2, 2)
	down := input(g, "down", 3, 1, 1, 1, 0, 2, 0)

	h, err := nn.Linear(x, up, nil, nn.WithNorm(gamma, beta, 1e-5), nn.WithActivation(nn.ReLU))
	check(err)
	y, err := nn.Linear(h, down, nil, nn.WithResidual(x))
	check(err)

	run(g)
	fmt.Printf("%.2f\n", y.Value().Data())
	// Output: [4.00 7.00]
}

// Queries, keys and values are three layers of one input.
func ExampleLinears() {
	g := G.NewGraph()
	x := input(g, "x", 2, 1, 2)
	ws := []*G.Node{input(g, "q", 2, 1, 0, 0, 1), input(g, "k", 2, 1, 1), input(g, "v", 2, 2, 0)}
	qkv, err := nn.Linears(x, ws, nil)
	check(err)

	run(g)
	for _, y := range qkv {
		fmt.Println(y.Value().Data())
	}
	// Output:
	// [1 2]
	// [3]
	// [2]
}

// Each row's most likely token: greedy decoding.
func ExampleArgMax() {
	g := G.NewGraph()
	logits := input(g, "logits", 3, 0.5, 2, -1, 7, 1, 7)
	token, err := nn.ArgMax(logits)
	check(err)

	run(g)
	fmt.Println(token.Value().Data())
	// Output: [1 0]
}

// A batch whose rows are sampled, each in a way of its own. Choices and random
// numbers are inputs of the graph: they may change from run to run.
func ExampleSample() {
	g := G.NewGraph()
	const rows = 4
	logits := input(g, "logits", 3, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2)
	node := func(name string, t *tensor.Dense) *G.Node {
		return G.NewMatrix(g, t.Dtype(), G.WithName(name), G.WithShape(t.Shape()...), G.WithValue(t))
	}
	choices := node("choices", nn.Choices([]nn.Choice{
		{},                          // the most likely token
		{Temperature: 1},            // by the model's probabilities
		{Temperature: 1.5, TopK: 2}, // of the two most likely ones
		{Temperature: -1},           // a row that belongs to nobody
	}))
	randoms := node("randoms", nn.Randoms(make([]float64, rows)))
	token, err := nn.Sample(logits, choices, randoms)
	check(err)

	machine := G.NewTapeMachine(g)
	defer machine.Close()
	random := rand.New(rand.NewPCG(1, 2)) // the same seed, the same tokens
	counts := make([]map[int32]int, rows)
	for range 1000 {
		u := make([]float64, rows)
		for i := range u {
			u[i] = random.Float64()
		}
		check(G.Let(randoms, nn.Randoms(u)), machine.RunAll())
		for i, id := range token.Value().Data().([]int32) {
			if counts[i] == nil {
				counts[i] = make(map[int32]int)
			}
			counts[i][id]++
		}
		machine.Reset()
	}
	for _, c := range counts {
		fmt.Println(c)
	}
	// Output:
	// map[2:1000]
	// map[0:84 1:247 2:669]
	// map[1:329 2:671]
	// map[-1:1000]
}

// A choice without a graph.
func ExampleChoice() {
	logits := []float32{0, 1, 2} // probabilities 0.09, 0.24 and 0.67
	for _, c := range []nn.Choice{{}, {Temperature: 1}, {Temperature: 1, TopK: 1}, {Temperature: 1, TopP: 0.9}} {
		fmt.Println(c.Choose(logits, 0.05), c.Choose(logits, 0.2), c.Choose(logits, 0.9))
	}
	// Output:
	// 2 2 2
	// 0 1 2
	// 2 2 2
	// 1 1 2
}

// Each row is divided by its root mean square, which is 5/sqrt(2) and 1 here.
func ExampleRMSNorm() {
	g := G.NewGraph()
	x := input(g, "x", 2, 3, 4, -1, 1)
	y, err := nn.RMSNorm(x, input(g, "gamma", 0, 1, 2), nil, 0)
	check(err)

	run(g)
	fmt.Printf("%.3f\n", y.Value().Data())
	// Output: [0.849 2.263 -1.000 2.000]
}

// Two heads of two elements, of tokens at positions 0 and 1: the second row is turned by a radian.
func ExampleRotary() {
	g := G.NewGraph()
	q := input(g, "q", 4, 1, 0, 0, 1, 1, 0, 0, 1)
	y, err := nn.Rotary(q, ids(g, "positions", 0, 1), rope.Config{HeadDim: 2})
	check(err)

	run(g)
	fmt.Printf("%.3f\n", y.Value().Data())
	// Output: [1.000 0.000 0.000 1.000 0.540 0.841 -0.841 0.540]
}

// The feed-forward network of Llama: two layers of one input, one of which gates the other.
func ExampleGLU() {
	g := G.NewGraph()
	x := input(g, "x", 2, 1, 2)
	gate, up := input(g, "gate", 2, 1, 0, 0, -1), input(g, "up", 2, 0, 1, 1, 1)
	both, err := nn.Linears(x, []*G.Node{gate, up}, nil)
	check(err)
	y, err := nn.GLU(both[0], both[1], nn.SiLU)
	check(err)

	run(g)
	fmt.Printf("%.3f x 2 and %.3f x 3\n", 1/(1+math.Exp(-1)), -2/(1+math.Exp(2)))
	fmt.Printf("%.3f\n", y.Value().Data())
	// Output:
	// 0.731 x 2 and -0.238 x 3
	// [1.462 -0.715]
}

// The same as one node.
func ExampleGatedLinear() {
	g := G.NewGraph()
	x := input(g, "x", 2, 1, 2)
	gate, up := input(g, "gate", 2, 1, 0, 0, -1), input(g, "up", 2, 0, 1, 1, 1)
	y, err := nn.GatedLinear(x, []*G.Node{gate, up}, nil, nn.SiLU)
	check(err)

	run(g)
	fmt.Printf("%.3f\n", y.Value().Data())
	// Output: [1.462 -0.715]
}

// Queries, keys and values of one projection are its columns.
func ExampleSlice() {
	g := G.NewGraph()
	qkv := input(g, "qkv", 6, 1, 2, 3, 4, 5, 6, 10, 20, 30, 40, 50, 60)
	k, err := nn.Slice(qkv, 1, 2, 4)
	check(err)

	run(g)
	fmt.Println(k.Value().Data())
	// Output: [3 4 30 40]
}

// Rows in any order: the last one of each of two texts of three and one tokens, say.
func ExampleEmbedding_rows() {
	g := G.NewGraph()
	h := input(g, "h", 2, 1, 2, 3, 4, 5, 6, 7, 8)
	last, err := nn.Embedding(h, ids(g, "last", 2, 3), nil)
	check(err)

	run(g)
	fmt.Println(last.Value().Data())
	// Output: [5 6 7 8]
}

// Each of two heads has a matrix of its own.
func ExampleHeadLinear() {
	g := G.NewGraph()
	x := input(g, "x", 4, 1, 2, 3, 4)
	w := input(g, "w", 2, 1, 1, 1, -1)
	y, err := nn.HeadLinear(x, w, 2)
	check(err)

	run(g)
	fmt.Println(y.Value().Data())
	// Output: [3 -1]
}

// A step of three tokens with the weights of a checkpoint, kv_b_proj among them: the cache has 4 + 2 numbers a token for both heads.
func ExampleMLA() {
	const heads, nope, rotated, latent, value, width = 2, 3, 2, 4, 3, 5
	cache, err := la.NewCache(la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: latent + rotated, ValueDim: latent, ValuesInKeys: true, Pages: 1})
	check(err)
	step, err := cache.NewStep(3)
	check(err)
	g := G.NewGraph()
	ones := func(name string, columns, n int) *G.Node {
		x := make([]float32, n)
		for i := range x {
			x[i] = 1
		}
		return input(g, name, columns, x...)
	}
	weights := func(name string, rows, columns int) *G.Node { return ones(name, columns, rows*columns) }
	kvUp := tensor.New(tensor.WithShape(heads*(nope+value), latent), tensor.Of(tensor.Float32))
	key, up, err := nn.SplitKVUp(kvUp, heads, nope)
	check(err)
	m := nn.MLA{
		Heads: heads, Eps: 1e-6, Query: weights("q_proj", heads*(nope+rotated), width),
		Down: weights("kv_a_proj_with_mqa", latent+rotated, width), Norm: ones("kv_a_layernorm", 0, latent),
		Key: input(g, "key", nope, key.Data().([]float32)...), Value: input(g, "value", latent, up.Data().([]float32)...),
	}
	y, err := m.Absorbed(ones("x", width, 3*width), func(q, k *G.Node) (*G.Node, error) {
		return la.CachedAttention(q, k, nil, step.Layer(0), la.WithCausal(), la.WithScale(1/math.Sqrt(nope+rotated)),
			la.WithRotary(rope.Config{Dim: rotated, Last: true}))
	})
	check(err)

	s, err := cache.NewSequence()
	check(err)
	check(step.Run([]la.Append{{Seq: s, Tokens: 3}}, func() error { run(g); return nil }))
	fmt.Println(y.Value().Shape(), s.Len())
	// Output: (3, 6) 3
}

// A table and a matrix learn which token follows each of three. The same graph computes on a GPU if the values of its inputs are copies
// there (device.GPU.Upload), ids of int32, and the machine has no BindDualValues.
func ExampleBackpropagate() {
	g := G.NewGraph()
	table, w := input(g, "table", 4, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0), input(g, "w", 4, make([]float32, 12)...)
	x, err := nn.Embedding(table, ids(g, "token", 0, 1, 2), nil)
	check(err)
	y, err := nn.Activate(x, nn.GELU)
	check(err)
	y, err = nn.Add(y, x) // x has two readers
	check(err)
	loss, err := nn.CrossEntropy(y, w, nil, ids(g, "next", 1, 2, 0))
	check(err)
	weights := G.Nodes{table, w}
	_, err = nn.Backpropagate(G.Nodes{loss}, G.Nodes{input(g, "gradient of the sum", 0, 1, 1, 1)}, weights)
	check(err)

	machine := G.NewTapeMachine(g, G.BindDualValues(weights...))
	defer machine.Close()
	solver := &nn.AdamW{Rate: 0.05, Beta1: 0.9, Beta2: 0.999, Epsilon: 1e-8, Decay: 0.01, Clip: 1}
	for i := range 11 {
		check(machine.RunAll())
		if i%5 == 0 {
			fmt.Printf("step %d: %.2f\n", i, loss.Value().Data())
		}
		check(solver.Step(G.NodesToValueGrads(weights)))
		machine.Reset()
	}
	// Output:
	// step 0: [1.10 1.10 1.10]
	// step 5: [0.47 0.47 0.47]
	// step 10: [0.08 0.08 0.08]
}
