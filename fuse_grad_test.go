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

// costSlopes is the same by differences of the cost, which the graph as it was
// written has without gradients.
func costSlopes(t *testing.T, root *G.Node, target *tensor.Dense, wrt []*G.Node) (all [][]float64) {
	t.Helper()
	const h = 1e-5
	var out G.Value
	G.Read(root, &out)
	vm := G.NewTapeMachine(root.Graph())
	defer vm.Close()
	cost := func() (sum float64) {
		again(t, vm)
		for i, x := range floats(t, out) {
			sum += x * target.Float64s()[i]
		}
		return sum
	}
	for _, n := range wrt {
		value := n.Value()
		x := slices.Clone(floats(t, value))
		slope := make([]float64, len(x))
		for i := range x {
			for _, step := range []float64{h, -h} {
				y := slices.Clone(x)
				y[i] += step
				if n.IsScalar() {
					let(t, n, G.NewF64(y[0]))
				} else {
					let(t, n, tensorOf(tensor.Float64, y, n.Shape()...))
				}
				slope[i] += cost() / (2 * step)
			}
		}
		let(t, n, value)
		all = append(all, slope)
	}
	return all
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
			fuseThenGrad(t, w, d.write(w)[0], 1e-12, costGradients)
		})
	}
}

// TestFuseFormsThenGrad: so have graphs as people write them, of which Gorgonia does
// not have all gradients right.
func TestFuseFormsThenGrad(t *testing.T) {
	rng := reftest.Rand(t)
	for _, c := range allForms() {
		t.Run(c.name, func(t *testing.T) {
			w := newWriter(t, rng, tensor.Float64)
			fuseThenGrad(t, w, c.write(w)[0], 1e-6, costSlopes)
		})
	}
}

func fuseThenGrad(t *testing.T, w *writer, root *G.Node, unit float64, truth func(t *testing.T, root *G.Node, target *tensor.Dense, wrt []*G.Node) [][]float64) {
	t.Helper()
	if root.IsScalar() {
		t.Skip("its root is a sum already")
	}
	f, err := la.Fuse(root)
	if err != nil {
		t.Fatal(err)
	}
	var before, after []*G.Node
	for _, n := range w.g.Inputs() {
		if f.Node(n) != nil && w.make[n.Name()] == nil { // a mask of 0 and much has no slope to speak of
			before, after = append(before, n), append(after, f.Node(n))
		}
	}
	target := w.random(root.Shape()...)
	want := truth(t, root, target, before)
	got := costGradients(t, f.Roots[0], target, after)
	for i := range want {
		if err := within(got[i], want[i], unit); err != nil {
			t.Errorf("gradient of %v: %v", before[i], err)
		}
	}
}
