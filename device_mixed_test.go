package leanattention_test

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"gorgonia.org/leanattention/rewrite"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Steps of chunks and single tokens on a GPU: kernels for either run beside each other, in a run, in a
// recording whose steps have other lengths, and where values share memory.
func TestGPUMixedSteps(t *testing.T) {
	la.UseEagerEngine(t)
	gpu := devicetest.Open(t)
	for _, how := range []string{"run", "record", "share"} {
		for _, query := range []tensor.Dtype{tensor.Float32, la.Float16} {
			t.Run(fmt.Sprintf("%s %v", how, query), func(t *testing.T) { testMixedSteps(t, gpu, how, query) })
		}
	}
}

func testMixedSteps(t *testing.T, gpu *device.GPU, how string, query tensor.Dtype) {
	const rows, heads, kvHeads, dim = 60, 16, 2, 64
	rng := reftest.Rand(t)
	config := la.CacheConfig{Layers: 2, KVHeads: kvHeads, HeadDim: dim, DType: la.Float16, PageSize: 16, Pages: 100}
	host := graphtest.NewCache(t, config)
	defer closeCache(t, host)
	config.Device = gpu
	cache := graphtest.NewCache(t, config)
	defer closeCache(t, cache)
	widths := [3]int{heads * dim, kvHeads * dim, kvHeads * dim}
	// A graph of two layers, on the GPU and on the CPU.
	type place struct {
		step *la.Step
		in   [3]*G.Node
		out  [2]*G.Node
		vm   G.VM
		seqs [4]*la.Sequence
	}
	build := func(c *la.Cache, input func(g *G.ExprGraph, i int) *G.Node) *place {
		p, err := &place{}, error(nil)
		if p.step, err = c.NewStep(rows); err != nil {
			t.Fatal(err)
		}
		g := G.NewGraph()
		for i := range p.in {
			p.in[i] = input(g, i)
		}
		for l := range p.out {
			if p.out[l], err = la.CachedAttention(p.in[0], p.in[1], p.in[2], p.step.Layer(l), la.WithCausal()); err != nil {
				t.Fatal(err)
			}
		}
		if how == "share" {
			if err := rewrite.ShareMemory(g, p.out[:]...); err != nil {
				t.Fatal(err)
			}
		}
		for i := range p.seqs {
			if p.seqs[i], err = c.NewSequence(); err != nil {
				t.Fatal(err)
			}
		}
		p.vm = G.NewTapeMachine(g)
		return p
	}
	var there [3]*device.Tensor
	at := build(cache, func(g *G.ExprGraph, i int) *G.Node {
		d, err := gpu.NewTensor(query, rows, widths[i])
		if err != nil {
			t.Fatal(err)
		}
		there[i] = d
		return G.NewTensor(g, query, 2, G.WithShape(rows, widths[i]), G.WithName("qkv"[i:i+1]), G.WithValue(d))
	})
	defer at.vm.Close()
	here := build(host, func(g *G.ExprGraph, i int) *G.Node {
		return G.NewTensor(g, tensor.Float32, 2, G.WithShape(rows, widths[i]), G.WithName("qkv"[i:i+1]))
	})
	defer here.vm.Close()
	run := func(p *place) func() error {
		return func() error { defer p.vm.Reset(); return p.vm.RunAll() }
	}
	again := run(at)
	for turn, tokens := range [][4]int{{50, 1, 0, 9}, {48, 1, 1, 1}, {48, 1, 1, 1}, {48, 1, 0, 1}, {48, 0, 1, 1}} {
		for i, n := range widths {
			x := make([]float64, rows*n)
			for j := range x {
				x[j] = reftest.Float16.Round(rng.NormFloat64())
			}
			graphtest.Let(t, here.in[i], graphtest.TensorOf(tensor.Float32, x, rows, n))
			if err := there[i].CopyFrom(graphtest.TensorOf(query, x, rows, n)); err != nil {
				t.Fatal(err)
			}
		}
		for _, p := range []*place{at, here} {
			var appends []la.Append
			for i, n := range tokens {
				if n > 0 {
					appends = append(appends, la.Append{Seq: p.seqs[i], Tokens: n})
				}
			}
			if err := p.step.Set(appends); err != nil {
				t.Fatal(err)
			}
		}
		if how == "record" && turn == 1 {
			rec, err := gpu.Record(again)
			if err != nil {
				t.Fatal(err)
			}
			defer rec.Close()
			again = rec.Replay
		}
		if err := again(); err != nil {
			t.Fatalf("turn %d: %v", turn, la.Cause(err))
		}
		if names := la.KernelsOf(at.step); turn > 0 && gpu.Members()[0].Capability == 90 && (len(names) != 2 || !strings.HasPrefix(names[0], "lean_") || !strings.HasPrefix(names[1], "prefill_")) {
			t.Errorf("turn %d: %v", turn, names)
		}
		if err := run(here)(); err != nil {
			t.Fatal(err)
		}
		for l := range at.out {
			got, want := graphtest.Floats(t, graphtest.Download(t, at.out[l].Value())), graphtest.Floats(t, here.out[l].Value())
			for i, x := range want {
				if d := math.Abs(got[i] - x); !(d <= 2e-3*(1+math.Abs(x))) {
					t.Fatalf("turn %d, layer %d, row %d: %v, the CPU has %v", turn, l, i/widths[0], got[i], x)
				}
			}
		}
		for _, p := range []*place{at, here} {
			if err := p.step.Commit(); err != nil {
				t.Fatal(err)
			}
		}
	}
}
