package leanattention_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	la "gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// stack is layers of attention of 12 heads of 64 on their own keys and values,
// written with Gorgonia's ops.
func (w *writer) stack(layers, queries, keys int, causal bool) *G.Node {
	const heads, dim = 12, 64
	x := w.input("q", heads, queries, dim)
	for i := range layers {
		k, v := w.input(fmt.Sprint("k", i), heads, keys, dim), w.input(fmt.Sprint("v", i), heads, keys, dim)
		s := w.times(w.bmm(x, k, false, true), w.number(1/math.Sqrt(dim)))
		if causal {
			mask := w.constant("mask", causalMask(1, queries, keys, math.Inf(-1)), 1, queries, keys)
			s = w.must(G.BroadcastAdd(s, mask, nil, []byte{0}))
		}
		x = w.bmm(w.softmax(s, 2), v)
	}
	return x
}

// BenchmarkFuse runs graphs as they were written and as Fuse made them, and
// measures Fuse itself on a graph of 48 layers.
func BenchmarkFuse(b *testing.B) {
	for _, c := range []struct {
		name          string
		queries, keys int
		causal        bool
	}{
		{"decode 1024", 1, 1024, false},
		{"prefill 128", 128, 128, true},
		{"prefill 512", 512, 512, true},
	} {
		w := newWriter(b, rand.New(rand.NewPCG(1, 2)), tensor.Float32)
		x := w.stack(1, c.queries, c.keys, c.causal)
		f, err := la.Fuse(x)
		if err != nil || len(f.Matches) != 1 {
			b.Fatal(f, err)
		}
		for name, g := range map[string]*G.ExprGraph{"written": w.g, "fused": f.Graph} {
			b.Run(c.name+"/"+name, func(b *testing.B) {
				vm := G.NewTapeMachine(g)
				defer vm.Close()
				b.ReportAllocs()
				for b.Loop() {
					again(b, vm)
				}
			})
		}
	}
	w := newWriter(b, rand.New(rand.NewPCG(1, 2)), tensor.Float32)
	x := w.stack(48, 8, 8, true)
	b.Run("Fuse", func(b *testing.B) {
		for b.Loop() {
			if f, err := la.Fuse(x); err != nil || len(f.Matches) != 48 {
				b.Fatal(f, err)
			}
		}
	})
}
