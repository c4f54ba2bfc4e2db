package leanattention_test

import (
	"bytes"
	"errors"
	"fmt"

	la "gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Speculative decoding: a small model proposes some tokens, the large one reads all of
// them in one step, and those behind the first that it would not have chosen are taken
// back.
func ExampleSequence_Truncate() {
	cache, err := la.NewCache(la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 2, PageSize: 4, Pages: 8})
	check(err)
	step, run := toyModel(cache, 8)
	seq, err := cache.NewSequence()
	check(err)
	read := func(tokens int) {
		check(step.Set([]la.Append{{Seq: seq, Tokens: tokens}}), run(), step.Commit())
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

// A prompt that was read once is saved, and loaded into a cache of other pages; it might
// be on a GPU.
func ExampleSequence_WriteTo() {
	config := la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 2, DType: la.Float16, PageSize: 4, Pages: 8}
	cache, err := la.NewCache(config)
	check(err)
	step, run := toyModel(cache, 8)
	prompt, err := cache.NewSequence()
	check(err)
	check(step.Set([]la.Append{{Seq: prompt, Tokens: 5}}), run(), step.Commit())

	var file bytes.Buffer
	n, err := prompt.WriteTo(&file)
	check(err)
	fmt.Println(n, "bytes")

	config.PageSize = 16
	other, err := la.NewCache(config)
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
	cache, err := la.NewCache(la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 2, Pages: 8})
	check(err)
	_, err = cache.ReadSequence(bytes.NewReader(make([]byte, 100)))
	fmt.Println(errors.Is(err, la.ErrFormat), cache.Stats().FreePages)
	// Output: true 8
}

// A prompt of seven tokens and a text that needs one token more, in steps of four rows.
func ExampleChunks() {
	cache, err := la.NewCache(la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 2, Pages: 8})
	check(err)
	step, run := toyModel(cache, 4)
	prompt, err := cache.NewSequence()
	check(err)
	text, err := cache.NewSequence()
	check(err)

	todo := []la.Append{{Seq: prompt, Tokens: 7}, {Seq: text, Tokens: 1}}
	for appends, parts := range la.Chunks(step.Tokens(), todo) {
		check(step.Set(appends), run(), step.Commit())
		fmt.Println("positions", step.Positions())
		for i, row := range step.Last() {
			p := parts[i]
			fmt.Printf("  append %d: tokens %d to %d", p.Of, p.From, p.To)
			if p.To == todo[p.Of].Tokens {
				fmt.Printf("; row %d has the logits of the next one", row)
			}
			fmt.Println()
		}
	}
	// Output:
	// positions [0 1 2 0]
	//   append 0: tokens 0 to 3
	//   append 1: tokens 0 to 1; row 3 has the logits of the next one
	// positions [3 4 5 6]
	//   append 0: tokens 3 to 7; row 3 has the logits of the next one
}

// Gorgonia's machine hides what went wrong in a node.
func ExampleCause() {
	g := G.NewGraph()
	x := G.NewTensor(g, tensor.Float32, 3, G.WithShape(1, 2, 2), G.WithName("x"), G.WithInit(G.Ones()))
	live := G.NodeFromAny(g, tensor.New(tensor.WithShape(1), tensor.WithBacking([]int{3})), G.WithName("live"))
	_, err := la.Attention(x, x, x, la.WithLengths(live))
	check(err)
	m := G.NewTapeMachine(g)
	defer m.Close()
	err = m.RunAll()
	fmt.Println(errors.Is(err, la.ErrLength), errors.Is(la.Cause(err), la.ErrLength))
	// Output: false true
}

// Graphs are checked once, when they are complete.
func ExampleCheckGraph() {
	g := G.NewGraph()
	x := G.NewTensor(g, tensor.Float32, 3, G.WithShape(1, 2, 2), G.WithName("x"))
	_, err := la.Attention(x, x, x)
	check(err)
	fmt.Println(la.CheckGraph(g))
	// Output: <nil>
}
