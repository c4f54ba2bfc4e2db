package nn

import (
	"errors"
	"math"
	"testing"

	la "gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// weighted adds the cost sum(w * y) behind a problem's output.
func weighted(t *testing.T, p *problem[float64], w []float64) *G.Node {
	t.Helper()
	s := p.y.Shape()
	v := tensor.New(tensor.WithShape(s...), tensor.WithBacking(w))
	n := G.NewTensor(p.g, G.Float64, len(s), G.WithShape(s...), G.WithName("w"), G.WithValue(v))
	return G.Must(G.Sum(G.Must(G.HadamardProd(p.y, n))))
}

// cost is the same sum from the reference.
func (p *problem[F]) cost(w []float64, n int, eps float64) float64 {
	sum := 0.0
	for at := 0; at < len(p.x); at += n {
		for i, y := range reference(toFloat64(p.x[at:at+n]), toFloat64(p.gamma), toFloat64(p.beta), eps) {
			sum += w[at+i] * y
		}
	}
	return sum
}

// compare checks got against central differences of the cost in x.
func (p *problem[F]) compare(t *testing.T, name string, got G.Value, x []F, w []float64, n int, eps float64) {
	t.Helper()
	const h = 1e-5
	for i, g := range got.Data().([]float64) {
		old := x[i]
		x[i] = old + h
		up := p.cost(w, n, eps)
		x[i] = old - h
		down := p.cost(w, n, eps)
		x[i] = old
		if want := (up - down) / (2 * h); math.Abs(g-want) > 1e-7*(1+math.Abs(want)) {
			t.Fatalf("d%s[%d] is %v, by differences %v", name, i, g, want)
		}
	}
}

func TestLayerNormGradient(t *testing.T) {
	rng := seeded(t)
	names := [...]string{"x", "gamma", "beta"}
	for _, shape := range []tensor.Shape{{5}, {1, 4}, {3, 6}, {2, 2, 7}} {
		n := shape[len(shape)-1]
		for affine := range 4 {
			w := make([]float64, shape.TotalSize())
			fill(rng, w, 0, 1)

			p := newProblem[float64](t, shape, affine&1 != 0, affine&2 != 0, 1e-3)
			p.fill(rng, 1, 1)
			data := [...][]float64{p.x, p.gamma, p.beta}
			var wrt G.Nodes
			var of []int
			for i, node := range p.nodes {
				if node != nil {
					wrt, of = append(wrt, node), append(of, i)
				}
			}
			grads, err := G.Grad(weighted(t, p, w), wrt...)
			if err != nil {
				t.Fatal(err)
			}
			values := make([]G.Value, len(grads))
			for i, g := range grads {
				G.Read(g, &values[i])
			}
			vm := G.NewTapeMachine(p.g)
			for range 2 {
				if err := vm.RunAll(); err != nil {
					t.Fatal(err)
				}
				for i, v := range values {
					p.compare(t, names[of[i]], v, data[of[i]], w, n, 1e-3)
				}
				vm.Reset()
				p.fill(rng, 1, 1)
			}
			vm.Close()

			p = newProblem[float64](t, shape, affine&1 != 0, affine&2 != 0, 1e-3)
			p.fill(rng, 1, 1)
			data = [...][]float64{p.x, p.gamma, p.beta}
			weighted(t, p, w)
			lisp := G.NewLispMachine(p.g)
			if err := lisp.RunAll(); err != nil {
				t.Fatalf("lisp machine, shape %v: %v", shape, err)
			}
			for i, node := range p.nodes {
				if node == nil {
					continue
				}
				g, err := node.Grad()
				if err != nil {
					t.Fatal(err)
				}
				p.compare(t, names[i], g, data[i], w, n, 1e-3)
			}
			lisp.Close()
		}
	}
}

func TestLayerNormSecondDerivative(t *testing.T) {
	p := newProblem[float64](t, tensor.Shape{2, 3}, true, true, 1e-5)
	grads, err := G.Grad(G.Must(G.Sum(G.Must(G.Square(p.y)))), p.nodes[0])
	if err != nil {
		t.Fatal(err)
	}
	_, err = G.Grad(G.Must(G.Sum(grads[0])), p.nodes[0])
	if err == nil {
		t.Fatal("no error")
	}
	// Gorgonia's error does not unwrap, so the operator is asked too.
	_, err = gradient{d: layerNorm{}}.SymDiff(nil, nil, nil)
	if !errors.Is(err, la.ErrUnsupported) {
		t.Fatal(err)
	}
}
