package leanattention_test

import (
	"slices"
	"testing"

	"gorgonia.org/leanattention/rewrite"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// testGPTOSS is the attention of gpt-oss: sinks in every layer, and a window in every second one; prompts in chunks, and
// tokens behind them.
func testGPTOSS(t *testing.T, at graphtest.Place, heads, kvHeads, window, prompt, rows int) {
	rng := reftest.Rand(t)
	full := reftest.RandomSinks(rng, reftest.Shape{Heads: heads, Mask: attn.Mask{Causal: true}})
	windowed := reftest.RandomSinks(rng, full)
	windowed.Window = window
	at.Layers = []reftest.Shape{windowed, full}
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 2, KVHeads: kvHeads, HeadDim: 64, DType: la.BFloat16, PageSize: 16, Pages: 2*(prompt/16+2) + 8, Device: at.GPU})
	la.PoisonFree(cache)
	read := graphtest.NewDecoderAt(t, at, cache, rows, heads, tensor.Float32, true)
	seqs := []*graphtest.Stored{graphtest.NewStored(t, cache), graphtest.NewStored(t, cache)}
	for chunk, of := range la.Chunks(rows, []la.Append{{Seq: seqs[0].Seq, Tokens: prompt}, {Seq: seqs[1].Seq, Tokens: window / 2}}) {
		var appended []graphtest.Appended
		for i, a := range chunk {
			appended = append(appended, graphtest.Appended{To: seqs[of[i]], Tokens: a.Tokens})
		}
		read.Do(t, rng, reftest.Normal, appended...)
	}
	decode := graphtest.NewDecoderAt(t, at, cache, 3, heads, tensor.Float32, true) // a row is nobody's
	for range 3 {
		decode.Do(t, rng, reftest.Peaked, graphtest.Appended{To: seqs[1], Tokens: 1}, graphtest.Appended{To: seqs[0], Tokens: 1})
	}
	closeCache(t, cache)
}

func TestGPTOSS(t *testing.T) { testGPTOSS(t, graphtest.Place{}, 64, 8, 128, 200, 90) }

func TestGPUGPTOSS(t *testing.T) {
	gpu := devicetest.Open(t)
	for _, there := range []bool{false, true} {
		testGPTOSS(t, graphtest.Place{GPU: gpu, Real: true, There: there}, 16, 2, 24, 50, 30)
	}
}

// TestGPUSinksComputed: sinks that a node makes on the GPU, in a graph whose nodes share memory.
func TestGPUSinksComputed(t *testing.T) {
	gpu := devicetest.Open(t)
	rng := reftest.Rand(t)
	s := reftest.Shape{Heads: 4, KVHeads: 2, Dim: 64, ValueDim: 64, Queries: []int{3}, Keys: []int{3}, Mask: attn.Mask{Causal: true}}
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 2, HeadDim: 64, PageSize: 4, Pages: 3, Device: gpu})
	step, err := cache.NewStep(3)
	if err != nil {
		t.Fatal(err)
	}
	g := G.NewGraph()
	there := func(n *G.Node) *G.Node {
		return graphtest.Move(t, n, func(n *G.Node) (*G.Node, error) { return device.ToGPU(n, gpu) })
	}
	q, k, v, half := f32(3, 256).node(g, "q"), f32(3, 128).node(g, "k"), f32(3, 128).node(g, "v"), f32(1, 4).node(g, "half")
	sinks, err := nn.Scale(there(half), 2)
	if err != nil {
		t.Fatal(err)
	}
	if sinks, err = nn.Reshape(sinks, 4); err != nil {
		t.Fatal(err)
	}
	out, err := la.CachedAttention(there(q), there(k), there(v), step.Layer(0), la.WithCausal(), la.WithSinks(sinks))
	if err != nil {
		t.Fatal(err)
	}
	var result G.Value
	G.Read(graphtest.Move(t, out, device.ToHost), &result)
	if err := rewrite.ShareMemory(g); err != nil {
		t.Fatal(err)
	}
	vm := graphtest.NewTapeMachine(g)
	defer vm.Close()
	for range 3 {
		s = reftest.RandomSinks(rng, s)
		c := reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32)
		halves := slices.Clone(s.Sinks)
		for i := range halves {
			halves[i] /= 2
		}
		for _, x := range []struct {
			n     *G.Node
			of    []float64
			shape []int
		}{{q, c.Q, []int{3, 256}}, {k, c.K, []int{3, 128}}, {v, c.V, []int{3, 128}}, {half, halves, []int{1, 4}}} {
			graphtest.Let(t, x.n, graphtest.TensorOf(tensor.Float32, x.of, x.shape...))
		}
		if err := step.Set([]la.Append{{Seq: graphtest.NewStored(t, cache).Seq, Tokens: 3}}); err != nil {
			t.Fatal(err)
		}
		graphtest.Again(t, vm)
		got := graphtest.Floats(t, result)
		want := c.Reference(graphtest.Place{GPU: gpu, Real: true}.Precision(tensor.Float32, tensor.Float32))
		if err := want.CompareO(func(_, pos, h, i int) float64 { return got[(pos*4+h)*64+i] }); err != nil {
			t.Errorf("%v: %v", s, err)
		}
		if err := step.Rollback(); err != nil {
			t.Fatal(err)
		}
	}
	closeCache(t, cache)
}
