package leanattention_test

import (
	"slices"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// costGradients is the gradients of a cost, the root's product with other numbers,
// by all of wrt.
func costGradients(t *testing.T, root *G.Node, target *tensor.Dense, wrt []*G.Node) [][]float64 {
	t.Helper()
	cost := G.Must(G.Sum(G.Must(G.HadamardProd(root, input(root.Graph(), "target", target)))))
	grads, err := G.Grad(cost, wrt...)
	if err != nil {
		t.Fatal(err)
	}
	return outputs(t, root.Graph(), read(grads...))
}

// TestFuseThenGrad: a graph that was rewritten has the gradients that it had
// before, for every input that it needs.
func TestFuseThenGrad(t *testing.T) {
	rng := reftest.Rand(t)
	for _, d := range slices.Concat(decoders, biasedAttention) {
		t.Run(d.name, func(t *testing.T) {
			if d.noGrad != "" {
				t.Skip(d.noGrad)
			}
			w := newWriter(t, rng, tensor.Float64)
			root := d.write(w)[0]
			if root.IsScalar() {
				t.Skip("its root is a sum already")
			}
			f, err := la.Fuse(root)
			if err != nil {
				t.Fatal(err)
			}
			var before, after []*G.Node
			for _, n := range w.g.Inputs() {
				if f.Node(n) != nil {
					before, after = append(before, n), append(after, f.Node(n))
				}
			}
			target := w.random(root.Shape()...)
			got := costGradients(t, f.Roots[0], target, after)
			want := costGradients(t, root, target, before)
			for i := range want {
				if err := near(got[i], want[i], w.dtype); err != nil {
					t.Errorf("gradient of %v: %v", before[i], err)
				}
			}
		})
	}
}
