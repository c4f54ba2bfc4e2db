package leanattention_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
	"pgregory.net/rapid"
)

// Steps of sequences with trees and without, of all types and schedules, with the positions that these
// have. What was committed or rolled back is as without trees.
func TestStepTrees(t *testing.T) {
	rng := reftest.Rand(t)
	types := []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16}
	for i := range 24 {
		config := la.CacheConfig{Layers: 2, KVHeads: 1 + rng.IntN(2), HeadDim: 1 + rng.IntN(40), PageSize: 1 + rng.IntN(20), Pages: 500, DType: types[i%3]}
		cache := graphtest.NewCache(t, config)
		opts := []la.Option{la.WithSchedule(graphtest.Schedules[i/3%3]), la.WithTileTokens([]int{0, 1, 16}[rng.IntN(3)]), la.WithWorkers(rng.IntN(4))}
		at := graphtest.Place{}
		if i%5 == 0 {
			at.ScoreMods.SoftCap = 2
		}
		if i%3 == 0 && config.HeadDim > 1 {
			at.Rotary = graphtest.RandomRotary(rng, config.HeadDim) // by depth
		}
		d := graphtest.NewDecoderAt(t, at, cache, 150, config.KVHeads*(1+rng.IntN(3)), at.Queries()[i%2], true, opts...)
		seqs := []*graphtest.Stored{graphtest.NewStored(t, cache), graphtest.NewStored(t, cache), graphtest.NewStored(t, cache)}
		d.Do(t, rng, reftest.Peaked, graphtest.Appended{To: seqs[0], Tokens: 1 + rng.IntN(60)}, graphtest.Appended{To: seqs[1], Tokens: 1 + rng.IntN(9)})
		for range 4 {
			var parts []graphtest.Appended
			for _, s := range seqs {
				p := graphtest.Appended{To: s, Tokens: []int{1, 2, 7, 1 + rng.IntN(20), attn.MaxTree}[rng.IntN(5)]}
				if p.Tokens > 50 && len(parts) > 0 {
					p.Tokens = 5
				}
				if rng.IntN(4) > 0 {
					p.Tree = reftest.RandomTree(rng, p.Tokens)
				}
				parts = append(parts, p)
			}
			before := cache.Stats()
			d.Run(t, d.Set(t, rng, reftest.Peaked, parts...))
			if err := d.Step.Rollback(); err != nil {
				t.Fatal(err)
			}
			if after := cache.Stats(); after != before {
				t.Fatalf("%v after Rollback, before %v", after, before)
			}
			d.Do(t, rng, reftest.Peaked, parts...)
			s := seqs[rng.IntN(3)]
			s.Truncate(t, rng.IntN(s.Seq.Len()+1))
		}
	}
}

// treeGraph runs a graph whose inputs are functions of a token and its position, as those of a model are.
type treeGraph struct {
	*graphtest.Decoder
	seed uint64
}

// run runs a step, and returns what each layer gives of each token.
func (r *treeGraph) run(t *testing.T, appends []la.Append, tokens []int) (out [][][]float64) {
	t.Helper()
	if err := r.Step.Set(appends); err != nil {
		t.Fatal(err)
	}
	positions, rows := r.Step.Positions(), r.Step.Tokens()
	for l := range r.Q {
		for i, n := range []*G.Node{r.Q[l], r.K[l], r.V[l]} {
			width := n.Shape()[1]
			x := make([]float64, rows*width)
			reftest.Poison(x)
			for row, token := range tokens {
				rng := rand.New(rand.NewPCG(r.seed+uint64(token), uint64(positions[row]<<8|l<<4|i)))
				for c := range width {
					x[row*width+c] = rng.NormFloat64()
				}
			}
			graphtest.Let(t, n, graphtest.TensorOf(r.Query, x, rows, width))
		}
	}
	graphtest.Again(t, r.VM)
	for l := range r.OutValues {
		all := graphtest.Floats(t, r.OutValues[l])
		width := len(all) / rows
		var of [][]float64
		for row := range tokens {
			of = append(of, slices.Clone(all[row*width:(row+1)*width]))
		}
		out = append(out, of)
	}
	return out
}

// Branches that are decoded together, as a tree, are what each of them is, decoded as a chain on a fork of the
// sequence; and a step with a tree that was rolled back or truncated leaves nothing.
func TestTreeBranches(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		kv := rapid.IntRange(1, 2).Draw(rt, "KV heads")
		cache := graphtest.NewCache(t, la.CacheConfig{
			Layers: 2, KVHeads: kv, HeadDim: rapid.IntRange(1, 9).Draw(rt, "dim"), Pages: 200, PageSize: rapid.IntRange(1, 9).Draw(rt, "page"),
			DType: rapid.SampledFrom([]tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16}).Draw(rt, "type"),
		})
		defer cache.Close()
		r := treeGraph{graphtest.NewDecoder(t, cache, 80, kv*rapid.IntRange(1, 3).Draw(rt, "group"), tensor.Float32, true, la.WithWorkers(2)), rapid.Uint64().Draw(rt, "seed")}
		defer r.VM.Close()
		commit := func() {
			if err := r.Step.Commit(); err != nil {
				rt.Fatal(err)
			}
		}
		var seqs [3]*la.Sequence // that of the prompt, and forks of it
		var err error
		if seqs[0], err = cache.NewSequence(); err != nil {
			rt.Fatal(err)
		}
		prompt := rapid.IntRange(0, 15).Draw(rt, "prompt")
		if prompt > 0 {
			r.run(t, []la.Append{{Seq: seqs[0], Tokens: prompt}}, make([]int, prompt))
			commit()
		}
		fork := func(i int) {
			if seqs[i], err = seqs[0].Fork(); err != nil {
				rt.Fatal(err)
			}
		}
		fork(1)

		n := rapid.OneOf(rapid.IntRange(1, 9), rapid.IntRange(1, 64)).Draw(rt, "tokens")
		parents, tokens := make([]int, n), make([]int, n)
		for i := range parents {
			parents[i] = rapid.IntRange(-1, i-1).Draw(rt, "parent")
			tokens[i] = rapid.IntRange(1, 1000).Draw(rt, "token")
		}
		got := r.run(t, []la.Append{{Seq: seqs[1], Tokens: n, Parents: parents}}, tokens)
		if rapid.Bool().Draw(rt, "roll back") {
			if err := r.Step.Rollback(); err != nil {
				rt.Fatal(err)
			}
		} else {
			commit()
			if seqs[1].Len() != prompt+n {
				rt.Fatalf("%d tokens, want %d", seqs[1].Len(), prompt+n)
			}
			if err := seqs[1].Truncate(prompt); err != nil {
				rt.Fatal(err)
			}
		}

		for range 3 {
			leaf := rapid.IntRange(0, n-1).Draw(rt, "leaf")
			var branch, ids []int
			for i := leaf; i >= 0; i = parents[i] {
				branch, ids = append([]int{i}, branch...), append([]int{tokens[i]}, ids...)
			}
			on := 1 // the one that the tree was on
			if rapid.Bool().Draw(rt, "another fork") {
				on = 2
				fork(2)
			}
			want := r.run(t, []la.Append{{Seq: seqs[on], Tokens: len(ids)}}, ids)
			if err := r.Step.Rollback(); err != nil {
				rt.Fatal(err)
			}
			for l := range want {
				for depth, i := range branch {
					for c, x := range want[l][depth] {
						if y := got[l][i][c]; !(math.Abs(x-y) <= 1e-4*(1+math.Abs(x))) {
							rt.Fatalf("parents %v: layer %d, token %d, element %d is %v, and %v in the branch %v", parents, l, i, c, y, x, branch)
						}
					}
				}
			}
		}
	})
}

// What Keep leaves of a step with a tree is what the path would be as a chain: the same bits of keys and values, and
// attention to them; forks that share the pages keep all that they had.
func TestKeep(t *testing.T) {
	saved := func(s *la.Sequence) []byte {
		var b bytes.Buffer
		if _, err := s.WriteTo(&b); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	rapid.Check(t, func(rt *rapid.T) {
		ok := func(err error) {
			rt.Helper()
			if err != nil {
				rt.Fatal(err)
			}
		}
		kv := rapid.IntRange(1, 2).Draw(rt, "KV heads")
		cache := graphtest.NewCache(t, la.CacheConfig{
			Layers: 2, KVHeads: kv, HeadDim: rapid.IntRange(1, 9).Draw(rt, "dim"), Pages: 400, PageSize: rapid.SampledFrom([]int{1, 3, 16}).Draw(rt, "page"),
			DType: rapid.SampledFrom([]tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16}).Draw(rt, "type"),
		})
		defer cache.Close()
		r := treeGraph{graphtest.NewDecoder(t, cache, 80, kv*rapid.IntRange(1, 3).Draw(rt, "group"), tensor.Float32, true, la.WithWorkers(2)), rapid.Uint64().Draw(rt, "seed")}
		defer r.VM.Close()
		run := func(s *la.Sequence, parents []int, tokens ...int) [][][]float64 {
			out := r.run(t, []la.Append{{Seq: s, Tokens: len(tokens), Parents: parents}}, tokens)
			ok(r.Step.Commit())
			return out
		}
		seq, err := cache.NewSequence()
		ok(err)
		if n := rapid.IntRange(0, 40).Draw(rt, "prompt"); n > 0 {
			run(seq, nil, make([]int, n)...)
		}
		chain, err := seq.Fork()
		ok(err)
		if rapid.Bool().Draw(rt, "alone") { // the tree's sequence has the prompt's pages for itself
			ok(chain.Release())
			chain, err = cache.NewSequence()
			ok(err)
			if n := seq.Len(); n > 0 {
				run(chain, nil, make([]int, n)...)
			}
		}
		for range rapid.IntRange(1, 3).Draw(rt, "steps") {
			n := rapid.OneOf(rapid.IntRange(1, 9), rapid.IntRange(1, 64)).Draw(rt, "tokens")
			parents, tokens := make([]int, n), make([]int, n)
			for i := range parents {
				parents[i] = rapid.IntRange(-1, i-1).Draw(rt, "parent")
				tokens[i] = rapid.IntRange(1, 1000).Draw(rt, "token")
			}
			from := seq.Len()
			run(seq, parents, tokens...)
			var fork *la.Sequence
			var before []byte
			if rapid.Bool().Draw(rt, "forked") {
				fork, err = seq.Fork()
				ok(err)
				before = saved(fork)
			}
			var path, ids []int
			for i := rapid.IntRange(-1, n-1).Draw(rt, "leaf"); i >= 0; i = parents[i] {
				path, ids = append([]int{i}, path...), append([]int{tokens[i]}, ids...)
			}
			ok(seq.Keep(from, path))
			if len(ids) > 0 {
				run(chain, nil, ids...)
			}
			if seq.Len() != from+len(path) || !bytes.Equal(saved(seq), saved(chain)) {
				rt.Fatalf("parents %v, %d tokens before: not what the path %v is as a chain", parents, from, path)
			}
			if fork != nil {
				if !bytes.Equal(saved(fork), before) {
					rt.Fatalf("parents %v, %d tokens before, path %v: a fork has changed", parents, from, path)
				}
				ok(fork.Release())
			}
			got, want := run(seq, nil, 7), run(chain, nil, 7)
			for l := range want {
				for c, x := range want[l][0] {
					if y := got[l][0][c]; !(math.Abs(x-y) <= 1e-4*(1+math.Abs(x))) {
						rt.Fatalf("behind the path %v of %v: layer %d, element %d is %v, want %v", path, parents, l, c, y, x)
					}
				}
			}
		}
		ok(seq.Release())
		ok(chain.Release())
		if s := cache.Stats(); s.FreePages != cache.Config().Pages {
			rt.Fatalf("pages are kept: %+v", s)
		}
	})
}

// Keep of a sequence that is released, and of none.
func TestKeepReleased(t *testing.T) {
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 2, PageSize: 4, Pages: 3})
	seq, err := cache.NewSequence()
	if err != nil {
		t.Fatal(err)
	}
	if err := seq.Release(); err != nil {
		t.Fatal(err)
	}
	wantError(t, seq.Keep(0, nil), la.ErrClosed, "Keep", "released")
	wantError(t, new(la.Sequence).Keep(0, nil), la.ErrState, "Keep", "not made")
}

// Trees that are none, and layers that can do nothing with one, are refused by name, and the cache is as it was.
func TestBadStepTrees(t *testing.T) {
	rng := reftest.Rand(t)
	config := la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 4, PageSize: 4, Pages: 40}
	for name, c := range map[string]struct {
		tree   []int
		tokens int
		opts   []la.Option
		want   error
		text   string
	}{
		"too short":   {[]int{-1, 0}, 3, nil, la.ErrShape, "append 1: 2 parents of 3 tokens"},
		"empty":       {[]int{}, 3, nil, la.ErrShape, "append 1: 0 parents of 3 tokens"},
		"itself":      {[]int{-1, 1, 0}, 3, nil, la.ErrShape, "append 1: the parent of token 1 is 1, outside [-1, 1)"},
		"later token": {[]int{-1, 2, 0}, 3, nil, la.ErrShape, "append 1: the parent of token 1 is 2, outside [-1, 1)"},
		"below -1":    {[]int{-1, 0, -2}, 3, nil, la.ErrShape, "append 1: the parent of token 2 is -2, outside [-1, 2)"},
		"too many":    {make([]int, 65), 65, nil, la.ErrShape, "64 are the most"},
		"not causal":  {[]int{-1, 0, 0}, 3, []la.Option{}, la.ErrUnsupported, "a tree without a causal mask"},
		"a window":    {[]int{-1, 0, 0}, 3, []la.Option{la.WithCausal(), la.WithWindow(7)}, la.ErrUnsupported, "a tree and a window of 7 keys"},
		"slopes":      {[]int{-1, 0, 0}, 3, []la.Option{la.WithCausal(), la.WithALiBi([]float64{1})}, la.ErrUnsupported, "a tree and slopes of scores (ALiBi)"},
	} {
		cache := graphtest.NewCache(t, config)
		d := graphtest.NewDecoder(t, cache, 100, 1, tensor.Float32, c.opts == nil, c.opts...)
		a, b := graphtest.NewStored(t, cache), graphtest.NewStored(t, cache)
		if c.opts == nil {
			d.Do(t, rng, reftest.Normal, graphtest.Appended{To: a, Tokens: 6}, graphtest.Appended{To: b, Tokens: 3})
		}
		before := cache.Stats()
		wantError(t, d.Step.Set([]la.Append{{Seq: a.Seq, Tokens: 2}, {Seq: b.Seq, Tokens: c.tokens, Parents: c.tree}}), c.want, "Set", c.text)
		if after := cache.Stats(); after != before || d.Step.Positions() != nil {
			t.Errorf("%s: %v, before %v; positions %v", name, after, before, d.Step.Positions())
		}
		if c.opts == nil { // and all goes on
			d.Do(t, rng, reftest.Normal, graphtest.Appended{To: a, Tokens: 2}, graphtest.Appended{To: b, Tokens: 3, Tree: attn.Tree{1, 3, 5}})
			continue
		}

		// A node that is made behind Set refuses it in the run.
		step, err := cache.NewStep(3)
		if err != nil {
			t.Fatal(err)
		}
		if err := step.Set([]la.Append{{Seq: b.Seq, Tokens: 3, Parents: c.tree}}); err != nil {
			t.Fatal(err)
		}
		g := G.NewGraph()
		var in [3]*G.Node
		for i := range in {
			in[i] = graphtest.Input(g, "qkv"[i:i+1], graphtest.TensorOf(tensor.Float32, make([]float64, 12), 3, 4))
		}
		if _, err := la.CachedAttention(in[0], in[1], in[2], step.Layer(0), c.opts...); err != nil {
			t.Fatal(err)
		}
		vm := G.NewTapeMachine(g)
		wantError(t, la.Cause(vm.RunAll()), c.want, "CachedAttention", c.text)
		if err := errors.Join(step.Rollback(), vm.Close()); err != nil {
			t.Error(err)
		}
		if after := cache.Stats(); after != before {
			t.Errorf("%s: %v behind the run, before %v", name, after, before)
		}
	}
}

// The step keeps a tree as it was given.
func TestStepKeepsTree(t *testing.T) {
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 1, Pages: 9})
	step, err := cache.NewStep(5)
	if err != nil {
		t.Fatal(err)
	}
	a, b := graphtest.NewStored(t, cache), graphtest.NewStored(t, cache)
	parents := []int{-1, 0, 0}
	if err := step.Set([]la.Append{{Seq: a.Seq, Tokens: 3, Parents: parents}, {Seq: b.Seq, Tokens: 2, Parents: []int{-1, -1}}}); err != nil {
		t.Fatal(err)
	}
	parents[2] = 1
	if got := step.Positions(); !slices.Equal(got, []int{0, 1, 1, 0, 0}) {
		t.Errorf("positions %v", got)
	}
}

// Chunks never cuts a tree: it waits for a step that takes all of it.
func TestChunksTrees(t *testing.T) {
	tree := func(n int) []int { return reftest.Parents(reftest.RandomTree(reftest.Rand(t), n)) }
	todo := []la.Append{{Tokens: 10}, {Tokens: 4, Parents: tree(4)}, {Tokens: 1}, {Tokens: 5, Parents: tree(5)}}
	var lists, tokens [][]int
	for appends, of := range la.Chunks(6, todo) {
		lists, tokens = append(lists, of), append(tokens, tokensOf(appends))
		for i, a := range appends {
			if len(a.Parents) != len(todo[of[i]].Parents) {
				t.Errorf("append %d has the parents %v", of[i], a.Parents)
			}
		}
	}
	if want := [][]int{{0, 1, 2}, {0, 3}, {0}, {0}}; !slices.EqualFunc(lists, want, slices.Equal) {
		t.Errorf("%v, want %v", lists, want)
	}
	if want := [][]int{{1, 4, 1}, {1, 5}, {6}, {2}}; !slices.EqualFunc(tokens, want, slices.Equal) {
		t.Errorf("%v tokens, want %v", tokens, want)
	}
	n := 0
	for appends := range la.Chunks(3, []la.Append{{Tokens: 4, Parents: tree(4)}}) { // for Set to refuse
		if n++; len(appends) != 1 || appends[0].Tokens != 4 {
			t.Errorf("%v", appends)
		}
	}
	if n != 1 {
		t.Errorf("%d steps", n)
	}
}

// A recording of a step with a tree is for steps with trees and without; one of a step without refuses those that
// have some, and is right again behind them.
func TestGPUTrees(t *testing.T) { testRecordedTrees(t, devicetest.Open(t), 2, true) }

// With a KV head of two GPUs the cache is sharded by context, with two by heads, and with two of four by both.
func TestGPUsTrees(t *testing.T) {
	t.Run("heads", func(t *testing.T) { testRecordedTrees(t, devicetest.OpenSome(t, 2), 2, true) })
	t.Run("context", func(t *testing.T) { testRecordedTrees(t, devicetest.OpenSome(t, 2), 1, true) })
	t.Run("both", func(t *testing.T) { testRecordedTrees(t, devicetest.OpenSome(t, 4), 2, true) })
}

func TestRecordedTrees(t *testing.T) {
	for n := 1; n <= 3; n++ {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			gpu, _ := la.FakeGPUs(t, n)
			testRecordedTrees(t, gpu, 2, false)
		})
	}
}

// testRecordedTrees compares with the reference if replays compute something.
func testRecordedTrees(t *testing.T, gpu *device.GPU, kvHeads int, computes bool) {
	rng := reftest.Rand(t)
	const heads, dim, rows = 4, 64, 7
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: kvHeads, HeadDim: dim, DType: la.Float16, PageSize: 4, Pages: 60, Device: gpu})
	step, err := cache.NewStep(rows)
	if err != nil {
		t.Fatal(err)
	}
	g := G.NewGraph()
	var in [3]*device.Tensor
	var nodes [3]*G.Node
	for i, width := range []int{heads * dim, kvHeads * dim, kvHeads * dim} {
		in[i] = graphtest.Upload(t, gpu, graphtest.TensorOf(tensor.Float32, make([]float64, rows*width), rows, width))
		nodes[i] = G.NewMatrix(g, tensor.Float32, G.WithShape(rows, width), G.WithName("qkv"[i:i+1]), G.WithValue(in[i]))
	}
	node, err := la.CachedAttention(nodes[0], nodes[1], nodes[2], step.Layer(0), la.WithCausal())
	if err != nil {
		t.Fatal(err)
	}
	var out G.Value
	G.Read(node, &out)
	vm := graphtest.NewTapeMachine(g)
	defer vm.Close()
	run := func() error { defer vm.Reset(); return vm.RunAll() }
	seqs := [2]*la.Sequence{}
	for i := range seqs {
		if seqs[i], err = cache.NewSequence(); err != nil {
			t.Fatal(err)
		}
	}
	var kept [2][2][]float64 // keys and values of each sequence

	// One step: the first sequence gets 5 tokens, with a tree or not, and the second one 2.
	turn := func(tree attn.Tree, do func(compute func(run func() error))) {
		t.Helper()
		if err := step.Set([]la.Append{{Seq: seqs[0], Tokens: 5, Parents: reftest.Parents(tree)}, {Seq: seqs[1], Tokens: 2}}); err != nil {
			t.Fatal(err)
		}
		s := reftest.Shape{Heads: heads, KVHeads: kvHeads, Dim: dim, ValueDim: dim, Queries: []int{5, 2}, Mask: attn.Mask{Causal: true, Tree: tree != nil}, Trees: []attn.Tree{tree}}
		fresh := reftest.New(rng, reftest.Shape{Heads: heads, KVHeads: kvHeads, Dim: dim, ValueDim: dim, Queries: []int{5, 2}, Keys: []int{5, 2}}, reftest.Normal, reftest.Float32, reftest.Float16)
		for i, x := range [][]float64{fresh.Q, fresh.K, fresh.V} {
			if err := in[i].CopyFrom(graphtest.TensorOf(tensor.Float32, x, rows, len(x)/rows)); err != nil {
				t.Fatal(err)
			}
		}
		width := kvHeads * dim
		var k, v []float64
		for i, n := range s.Queries {
			for j, x := range [][]float64{fresh.K, fresh.V} {
				kept[i][j] = append(kept[i][j], x[5*i*width:(5*i+n)*width]...)
			}
			k, v = append(k, kept[i][0]...), append(v, kept[i][1]...)
			s.Keys = append(s.Keys, len(kept[i][0])/width)
		}
		c := reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float16)
		c.Q, c.K, c.V = fresh.Q, k, v
		do(func(run func() error) {
			t.Helper()
			if err := run(); err != nil {
				t.Fatal(err)
			}
			if !computes {
				return
			}
			now := graphtest.Floats(t, graphtest.Download(t, out))
			want := c.Reference(graphtest.Place{GPU: gpu, Real: true}.Precision(tensor.Float32, la.Float16))
			if err := want.CompareO(func(seq, pos, h, i int) float64 { return now[((5*seq+pos)*heads+h)*dim+i] }); err != nil {
				t.Fatalf("%v: %v", s, err)
			}
		})
		if err := step.Commit(); err != nil {
			t.Fatal(err)
		}
	}
	record := func() *device.Recording {
		t.Helper()
		rec, err := gpu.Record(run)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { rec.Close() })
		return rec
	}
	type compute = func(run func() error)
	tree := func() attn.Tree {
		for {
			if tree := reftest.RandomTree(rng, 5); !tree.Chain() {
				return tree
			}
		}
	}

	var plain, trees *device.Recording
	turn(nil, func(c compute) { c(run) })
	turn(nil, func(c compute) { plain = record(); c(plain.Replay) })
	for range 2 {
		turn(tree(), func(c compute) {
			wantError(t, plain.Replay(), la.ErrState, "Recording.Replay", "a sequence has a tree, and none had one then")
			c(run)
			if trees == nil {
				trees = record()
			}
			c(trees.Replay)
		})
		turn(nil, func(c compute) { c(plain.Replay); c(trees.Replay); c(run) })
		turn(tree(), func(c compute) { c(trees.Replay) })
		turn(attn.Tree{1, 3, 7, 15, 31}, func(c compute) { c(trees.Replay) })
	}
	if err := cache.Close(); err != nil {
		t.Error(err)
	}
}
