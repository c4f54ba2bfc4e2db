package main

import (
	"fmt"
	"log"
	"strings"

	"gorgonia.org/leanattention/rewrite"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/examples/opt/tiny"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// The first steps of docs/decoder.md, each by itself.

func check(errs ...error) {
	for _, err := range errs {
		if err != nil {
			log.Fatal(err)
		}
	}
}

// matrix is a tensor of n columns.
func matrix(n int, x ...float32) *tensor.Dense {
	return tensor.New(tensor.WithShape(len(x)/n, n), tensor.WithBacking(x))
}

// A graph with one node that computes.
func Example_graph() {
	g := G.NewGraph()
	x := G.NewMatrix(g, tensor.Float32, G.WithName("x"), G.WithShape(1, 2))
	w := G.NewMatrix(g, tensor.Float32, G.WithName("w"), G.WithShape(3, 2), G.WithValue(matrix(2, 1, 0, 0, 1, 1, 1)))
	y, err := nn.Linear(x, w, nil)
	check(err)

	machine := G.NewTapeMachine(g)
	defer machine.Close()
	for i := range 2 {
		check(G.Let(x, matrix(2, 10, float32(i))))
		check(machine.RunAll())
		fmt.Println(y.Value().Data())
		machine.Reset()
	}
	// Output:
	// [10 0 10]
	// [10 1 11]
}

// Tokens become rows.
func Example_embedding() {
	ids := []int{2, 0}
	g := G.NewGraph()
	tokens := G.NewVector(g, tensor.Int, G.WithName("tokens"), G.WithShape(2), G.WithValue(tensor.New(tensor.WithShape(2), tensor.WithBacking(ids))))
	table := G.NewMatrix(g, tensor.Float32, G.WithName("table"), G.WithShape(3, 2), G.WithValue(matrix(2, 0, 0.5, 1, 1.5, 2, 2.5)))
	h, err := nn.Embedding(table, tokens, nil)
	check(err)

	machine := G.NewTapeMachine(g)
	defer machine.Close()
	check(machine.RunAll())
	fmt.Println(h.Value().Data())
	machine.Reset()

	ids[0] = 1 // the input is this memory
	check(machine.RunAll())
	fmt.Println(h.Value().Data())
	// Output:
	// [2 2.5 0 0.5]
	// [1 1.5 0 0.5]
}

// Attention to all tokens so far. The graph takes up to three rows at a time.
func Example_cache() {
	cache, err := la.NewCache(la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 2, PageSize: 4, Pages: 8})
	check(err)
	step, err := cache.NewStep(3)
	check(err)

	g := G.NewGraph()
	h := G.NewMatrix(g, tensor.Float32, G.WithName("h"), G.WithShape(3, 2))
	out, err := la.CachedAttention(h, h, h, step.Layer(0), la.WithCausal()) // q, k and v are one here
	check(err, rewrite.Check(g))
	machine := G.NewTapeMachine(g)
	defer machine.Close()

	seq, err := cache.NewSequence()
	check(err)
	run := func(tokens int, rows *tensor.Dense) {
		check(step.Run([]la.Append{{Seq: seq, Tokens: tokens}}, func() error {
			check(G.Let(h, rows))
			defer machine.Reset()
			return la.Cause(machine.RunAll())
		}))
		fmt.Printf("positions %v, last row %v: %.2f\n", step.Positions(), step.Last(), out.Value().Data())
	}
	run(3, matrix(2, 0, 0, 0, 2, 0, 4)) // a prompt of three tokens
	run(1, matrix(2, 0, 0, 9, 9, 9, 9)) // one more token; two rows are unassigned
	fmt.Println(seq.Len(), "tokens in the cache")
	// Output:
	// positions [0 1 2], last row [2]: [0.00 0.00 0.00 1.89 0.00 3.99]
	// positions [3 0 0], last row [0]: [0.00 1.50 0.00 0.00 0.00 0.00]
	// 4 tokens in the cache
}

// A question, and the most likely answer.
func Example_answer() {
	prompt := "The key of Mira is in the green box. Question: Where does Mira keep her key? Answer:"
	texts, err := write(tiny.Files, []string{prompt}, 20, nn.Choice{}, 0)
	check(err)
	answer, _, _ := strings.Cut(texts[0], "\n")
	fmt.Println(answer)
	// Output: The key of Mira is in the green box.
}

// Texts that are chosen by chance, together. A seed makes them again.
func Example_batch() {
	prompts := []string{"Once upon a time", "The miller", "Once upon a time"}
	texts, err := write(tiny.Files, prompts, 12, nn.Choice{Temperature: 0.8, TopK: 50}, 1)
	check(err)
	for i, t := range texts {
		fmt.Println(prompts[i] + t)
	}
	// Output:
	// Once upon a time there was a little boy who wanted to wait for somebody.
	// The miller did not go home, because the door was open. The
	// Once upon a time a shepherd walked into the forest. Not far away lived a
}
