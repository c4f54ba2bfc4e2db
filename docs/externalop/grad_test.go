package externalop

import (
	"errors"
	"strings"
	"testing"

	G "gorgonia.org/gorgonia"
)

// Gradients: what Grad asks of an op (SDOp), and the lisp machine (ADOp).

// symbolic is a testOp with gradients for Grad.
type symbolic struct {
	*testOp
	wrt  func(inputs int) []bool
	diff func(in G.Nodes, out, grad *G.Node) (G.Nodes, error)
}

func (s *symbolic) DiffWRT(inputs int) []bool { return s.wrt(inputs) }
func (s *symbolic) SymDiff(in G.Nodes, out, grad *G.Node) (G.Nodes, error) {
	return s.diff(in, out, grad)
}

func sumOf(n *G.Node) *G.Node { return G.Must(G.Sum(n)) }

// TestGradPanicsWithoutSDOp: an op on the path that has no DiffWRT ends Grad
// with a panic; beside the path it does not matter.
func TestGradPanicsWithoutSDOp(t *testing.T) {
	g := G.NewGraph()
	x := input(g, "x", 1, 2)
	cost := sumOf(G.Must(G.ApplyOp(plusOne("no gradient"), x)))
	if panics(func() { G.Grad(cost, x) }) == nil {
		t.Error("Grad does not panic")
	}

	g = G.NewGraph()
	x = input(g, "x", 1, 2)
	G.Must(G.ApplyOp(plusOne("no gradient"), x))
	if _, err := G.Grad(sumOf(G.Must(Scale(x, 2))), x); err != nil {
		t.Error(err)
	}
}

// TestGradReturnsTheOpsError: an op that says that it has no gradient is an
// error of Grad.
func TestGradReturnsTheOpsError(t *testing.T) {
	g := G.NewGraph()
	x := input(g, "x", 1, 2)
	op := &symbolic{plusOne("refuses"), allTrue, func(G.Nodes, *G.Node, *G.Node) (G.Nodes, error) {
		return nil, errors.New("no gradient here")
	}}
	if _, err := G.Grad(sumOf(G.Must(G.ApplyOp(op, x))), x); err == nil || !strings.Contains(err.Error(), "no gradient here") {
		t.Errorf("Grad says %v", err)
	}
}

func allTrue(inputs int) []bool {
	wrt := make([]bool, inputs)
	for i := range wrt {
		wrt[i] = true
	}
	return wrt
}

// TestDiffWRTFalse: an input that DiffWRT leaves out needs no gradient: nil will do.
func TestDiffWRTFalse(t *testing.T) {
	g := G.NewGraph()
	x, weights := input(g, "x", 1, 2), input(g, "weights", 3, 4)
	op := &symbolic{newOp("first of two", 2, func(in ...G.Value) (G.Value, error) {
		return vector(in[0].Data().([]float64)...), nil
	}), func(int) []bool { return []bool{true, false} }, func(_ G.Nodes, _, grad *G.Node) (G.Nodes, error) {
		dx, err := Scale(grad, 1)
		return G.Nodes{dx, nil}, err
	}}
	dx, err := G.Grad(sumOf(G.Must(G.ApplyOp(op, x, weights))), x)
	if err != nil {
		t.Fatal(err)
	}
	run(t, g)
	has(t, "dx", dx[0].Value(), 1, 1)
}

// TestDiffWRTFalseDropsSilently: what is left out on one of two paths is missing
// in the sum, without a word. So an op without gradients says true, and refuses.
func TestDiffWRTFalseDropsSilently(t *testing.T) {
	g := G.NewGraph()
	x := input(g, "x", 1, 2)
	silent := &symbolic{plusOne("silent"), func(int) []bool { return []bool{false} }, nil}
	cost := sumOf(G.Must(G.Add(G.Must(Scale(x, 2)), G.Must(G.ApplyOp(silent, x)))))
	dx, err := G.Grad(cost, x)
	if err != nil {
		t.Fatal(err)
	}
	run(t, g)
	has(t, "dx", dx[0].Value(), 2, 2) // the derivative is 3
}

// TestLispMachineSkipsWithoutADOp: on the lisp machine an op without DoDiff has
// the gradient 0, without a word.
func TestLispMachineSkipsWithoutADOp(t *testing.T) {
	g := G.NewGraph()
	x := input(g, "x", 1, 2)
	op := &symbolic{plusOne("SDOp only"), allTrue, nil}
	sumOf(G.Must(G.ApplyOp(op, x)))
	m := G.NewLispMachine(g)
	defer m.Close()
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
	dx, err := x.Grad()
	if err != nil {
		t.Fatal(err)
	}
	has(t, "dx", dx, 0, 0) // the derivative is 1
}

// TestDoDiffAdds: the gradient of an input has what other ops gave it already.
func TestDoDiffAdds(t *testing.T) {
	g := G.NewGraph()
	x := input(g, "x", 1, 2)
	sumOf(G.Must(G.Add(G.Must(Scale(x, 2)), G.Must(Scale(x, 3)))))
	m := G.NewLispMachine(g)
	defer m.Close()
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
	dx, err := x.Grad()
	if err != nil {
		t.Fatal(err)
	}
	has(t, "dx", dx, 5, 5)
}

// TestLispMachineForward: an op needs nothing more for a first run on the lisp
// machine.
func TestLispMachineForward(t *testing.T) {
	g := G.NewGraph()
	y := G.Must(Scale(input(g, "x", 1, 2), 10))
	m := G.NewLispMachine(g, G.ExecuteFwdOnly())
	defer m.Close()
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
	has(t, "y", y.Value(), 10, 20)
}
