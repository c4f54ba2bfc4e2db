package leanattention_test

import (
	"bytes"
	"errors"
	"fmt"

	"gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

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
