package stock

import (
	"slices"
	"testing"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// SetDeriv does what Gorgonia's Backpropagate does: Deriv, DerivOf, Grad and a machine that binds dual values have the gradient.
func TestSetDeriv(t *testing.T) {
	g := G.NewGraph()
	x := G.NewVector(g, tensor.Float64, G.WithShape(2), G.WithName("x"), G.WithValue(tensor.New(tensor.WithBacking([]float64{3, 4}))))
	y := G.NewVector(g, tensor.Float64, G.WithShape(2), G.WithName("y"), G.WithValue(tensor.New(tensor.WithBacking([]float64{5, 6}))))
	d := G.Must(G.HadamardProd(x, y))
	SetDeriv(x, d)
	SetDeriv(y, d)
	if x.Deriv() != d || y.Deriv() != d || !slices.Equal(d.DerivOf(), G.Nodes{x, y}) {
		t.Fatalf("gradients %v and %v, of %v", x.Deriv(), y.Deriv(), d.DerivOf())
	}
	m := G.NewTapeMachine(g, G.BindDualValues(x))
	defer m.Close()
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
	for _, n := range []*G.Node{x, y} {
		v, err := n.Grad()
		if err != nil || !slices.Equal(v.Data().([]float64), []float64{15, 24}) {
			t.Errorf("the gradient of %v is %v, %v", n, v, err)
		}
	}
}
