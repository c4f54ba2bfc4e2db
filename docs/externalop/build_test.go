package externalop

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/chewxy/hm"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// What Gorgonia does with an op's answers when the graph is built.

// TestTypeIsTakenApart: a type that the op keeps is empty after its first use.
func TestTypeIsTakenApart(t *testing.T) {
	kept := hm.NewFnType(vectors(), vectors())
	op := newOp("kept type", 1, nil)
	op.typ = func() hm.Type { return kept }
	before := fmt.Sprint(kept)
	if _, err := G.ApplyOp(op, input(G.NewGraph(), "x", 1, 2)); err != nil {
		t.Fatal(err)
	}
	if after := fmt.Sprint(kept); after == before {
		t.Errorf("the type is still %v: ops may keep theirs", after)
	}
}

// TestTypeMixesElementTypes: one signature can have variables and fixed types,
// and a wrong element type is an error.
func TestTypeMixesElementTypes(t *testing.T) {
	g := G.NewGraph()
	x, f := input(g, "x", 1, 2), G.NewVector(g, tensor.Float32, G.WithShape(2), G.WithName("f"))
	integers := map[tensor.Dtype]*G.Node{}
	for _, of := range []tensor.Dtype{tensor.Int, tensor.Int32, tensor.Int64} {
		integers[of] = G.NewVector(g, of, G.WithShape(2), G.WithName(of.String()))
	}
	op := newOp("variable", 2, nil)
	op.typ = func() hm.Type {
		return hm.NewFnType(vectors(), G.TensorType{Dims: 1, Of: hm.TypeVariable('n')}, vectors())
	}
	for of, n := range integers {
		for _, first := range []*G.Node{x, f} {
			y, err := G.ApplyOp(op, first, n)
			if err != nil || y.Dtype() != first.Dtype() {
				t.Errorf("%v and %v: %v, %v", first.Dtype(), of, y, err)
			}
		}
	}
	fixed := newOp("int", 2, nil)
	fixed.typ = func() hm.Type {
		return hm.NewFnType(vectors(), G.TensorType{Dims: 1, Of: tensor.Int}, vectors())
	}
	if _, err := G.ApplyOp(fixed, x, integers[tensor.Int]); err != nil {
		t.Error(err)
	}
	if _, err := G.ApplyOp(fixed, x, integers[tensor.Int32]); err == nil {
		t.Error("int32 passes for int")
	}
}

// TestRankOfInputIsNotChecked: a matrix passes where the type says vector.
func TestRankOfInputIsNotChecked(t *testing.T) {
	g := G.NewGraph()
	matrix := G.NewMatrix(g, tensor.Float64, G.WithShape(2, 3), G.WithName("m"))
	op := newOp("vector", 1, nil)
	op.shape = func([]tensor.Shape) (tensor.Shape, error) { return tensor.Shape{2}, nil }
	if y, err := G.ApplyOp(op, matrix); err != nil || y == nil {
		t.Errorf("Gorgonia refuses the rank: %v", err)
	}
}

// TestRankOfResultPanics: InferShape must return as many dimensions as the type
// says. (In this repository graph.Apply turns the panic into an error: TestApply
// of internal/graph.)
func TestRankOfResultPanics(t *testing.T) {
	g := G.NewGraph()
	op := newOp("vector or matrix", 1, nil)
	op.shape = func([]tensor.Shape) (tensor.Shape, error) { return tensor.Shape{2, 3}, nil }
	x := input(g, "x", 1, 2)
	if panics(func() { G.ApplyOp(op, x) }) == nil {
		t.Error("ApplyOp takes a vector of shape (2, 3)")
	}
}

// TestArity: the number of inputs is checked.
func TestArity(t *testing.T) {
	g := G.NewGraph()
	x := input(g, "x", 1, 2)
	for n := range 4 {
		children := make([]*G.Node, n)
		for i := range children {
			children[i] = x
		}
		op := newOp(fmt.Sprint("two of ", n), 2, nil)
		_, err := G.ApplyOp(op, children...)
		if (err == nil) != (n == 2) {
			t.Errorf("%d inputs for an op of two: %v", n, err)
		}
	}
}

// TestVariadicArity: with -1 nobody counts the inputs. The type must list just as
// many: more are an error, fewer a panic.
func TestVariadicArity(t *testing.T) {
	g := G.NewGraph()
	x := input(g, "x", 1, 2)
	apply := func(n int) error {
		_, err := G.ApplyOp(variadic{newOp("variadic", 2, nil)}, []*G.Node{x, x, x}[:n]...)
		return err
	}
	if err := apply(2); err != nil {
		t.Error(err)
	}
	if apply(3) == nil {
		t.Error("three inputs where the type lists two")
	}
	if panics(func() { apply(1) }) == nil {
		t.Error("one input where the type lists two is no panic")
	}
}

type variadic struct{ *testOp }

func (variadic) Arity() int { return -1 }

// TestScalarInputs: in a type a scalar is its element type alone, and a node's
// value is no tensor.
func TestScalarInputs(t *testing.T) {
	g := G.NewGraph()
	n := G.NewScalar(g, tensor.Int, G.WithName("n"), G.WithValue(7))
	op := newOp("scalar", 2, func(in ...G.Value) (G.Value, error) {
		if v, ok := in[1].(*G.I); !ok || *v != 7 {
			return nil, fmt.Errorf("got %T", in[1])
		}
		return vector(1, 2), nil
	})
	of := func(scalar hm.Type) func() hm.Type {
		return func() hm.Type { return hm.NewFnType(vectors(), scalar, vectors()) }
	}
	op.typ = of(G.TensorType{Dims: 0, Of: tensor.Int})
	x := input(g, "x", 1, 2)
	if _, err := G.ApplyOp(op, x, n); err == nil {
		t.Error("a tensor type of no dimensions will do")
	}
	op.typ = of(tensor.Int)
	if _, err := G.ApplyOp(op, x, n); err != nil {
		t.Fatal(err)
	}
	run(t, g)
}

// TestInferShapeError: an error of InferShape comes out of ApplyOp, and the
// graph has no new node.
func TestInferShapeError(t *testing.T) {
	g := G.NewGraph()
	x := input(g, "x", 1, 2)
	op := newOp("odd", 1, nil)
	op.shape = func([]tensor.Shape) (tensor.Shape, error) { return nil, errors.New("size is odd") }
	before := len(g.AllNodes())
	if _, err := G.ApplyOp(op, x); err == nil || !strings.Contains(err.Error(), "size is odd") {
		t.Errorf("ApplyOp says %v", err)
	}
	if n := len(g.AllNodes()); n != before {
		t.Errorf("the graph has %d nodes, and had %d", n, before)
	}
}

// scaleWithoutHash is an op whose hash lacks its factor.
func scaleWithoutHash(factor float64) *testOp {
	return newOp("scale", 1, func(in ...G.Value) (G.Value, error) {
		y := vector(in[0].Data().([]float64)...)
		for i := range y.Float64s() {
			y.Float64s()[i] *= factor
		}
		return y, nil
	})
}

// TestEqualHashesMerge: a parameter that is not in the hash is lost: the second
// op is dropped and its node is the first one.
func TestEqualHashesMerge(t *testing.T) {
	g := G.NewGraph()
	x := input(g, "x", 1, 2)
	double, triple := G.Must(G.ApplyOp(scaleWithoutHash(2), x)), G.Must(G.ApplyOp(scaleWithoutHash(3), x))
	if double != triple {
		t.Fatal("two nodes")
	}
	run(t, g)
	has(t, "3x", triple.Value(), 2, 4)

	a, b := G.Must(Scale(x, 2)), G.Must(Scale(x, 3))
	if again := G.Must(Scale(x, 2)); a == b || a != again {
		t.Error("hashes with the factor: other factors are one node, or equal ones two")
	}
}

// TestKeptNodeHasTheFirstOp: with equal hashes the state of the second op is
// never used. Ask the node for its op, not the op that was offered.
func TestKeptNodeHasTheFirstOp(t *testing.T) {
	g := G.NewGraph()
	x := input(g, "x", 1, 2)
	first, second := plusOne("same"), plusOne("same")
	a, b := G.Must(G.ApplyOp(first, x)), G.Must(G.ApplyOp(second, x))
	if a != b || a.Op() != G.Op(first) || b.Op() == G.Op(second) {
		t.Error("the second op is in the graph")
	}
}

// TestUnnamedInputsMerge: inputs are told apart by type, shape and name.
func TestUnnamedInputsMerge(t *testing.T) {
	g := G.NewGraph()
	unnamed := func() *G.Node { return G.NewVector(g, tensor.Float64, G.WithShape(2)) }
	if unnamed() != unnamed() {
		t.Error("inputs without names are two nodes")
	}
	if input(g, "a", 1, 2) == input(g, "b", 1, 2) {
		t.Error("inputs with names of their own are one node")
	}
	if input(g, "c", 1, 2) != input(g, "c", 3, 4) {
		t.Error("inputs of one name are two nodes")
	}
}

// TestOrderIsByEdges: without an edge between them nodes run in the order in
// which they were made; an edge is the only way to say otherwise.
func TestOrderIsByEdges(t *testing.T) {
	var order []string
	traced := func(name string, inputs int) *testOp {
		return newOp(name, inputs, func(in ...G.Value) (G.Value, error) {
			order = append(order, name)
			return vector(in[0].Data().([]float64)...), nil
		})
	}
	g := G.NewGraph()
	x := input(g, "x", 1, 2)
	G.Must(G.ApplyOp(traced("reads early", 1), x))
	token := G.Must(G.ApplyOp(traced("appends", 1), x))
	G.Must(G.ApplyOp(traced("reads late", 2), x, token))
	run(t, g)
	if got := strings.Join(order, ", "); got != "reads early, appends, reads late" {
		t.Error(got)
	}
}
