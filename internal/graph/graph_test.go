package graph

import (
	"fmt"
	"hash"
	"strings"
	"testing"

	"github.com/chewxy/hm"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// identity is the identity on matrices, or an op that says it returns a matrix and
// infers a vector, at which Gorgonia panics.
type identity struct {
	Plain
	name  string
	wrong bool
}

func (op identity) Arity() int { return 1 }
func (op identity) Type() hm.Type {
	m := G.TensorType{Dims: 2, Of: hm.TypeVariable('a')}
	return hm.NewFnType(m, m)
}
func (op identity) InferShape(in ...G.DimSizer) (tensor.Shape, error) {
	if op.wrong {
		return tensor.Shape{1}, nil
	}
	return in[0].(tensor.Shape).Clone(), nil
}
func (op identity) Do(in ...G.Value) (G.Value, error) { return in[0], nil }
func (op identity) WriteHash(h hash.Hash)             { fmt.Fprint(h, op.name) }
func (op identity) Hashcode() uint32                  { return Hashcode(op) }
func (op identity) String() string                    { return op.name }

func TestApply(t *testing.T) {
	g := G.NewGraph()
	x := G.NewMatrix(g, tensor.Float32, G.WithShape(2, 3), G.WithName("x"))
	a, err := Apply(identity{name: "a"}, x)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := Apply(identity{name: "a"}, x); err != nil || again != a {
		t.Errorf("an equal op on the same input is another node: %v, %v", again, err)
	}
	if b, err := Apply(identity{name: "b"}, x); err != nil || b == a {
		t.Errorf("an op with another hash is the same node: %v, %v", b, err)
	}
	if n, err := Apply(identity{name: "c", wrong: true}, x); err == nil || n != nil {
		t.Errorf("Gorgonia's panic came out as node %v and error %v", n, err)
	}
	if _, err := Apply(identity{name: "d"}, x, x); err == nil || !strings.Contains(err.Error(), "d") {
		t.Errorf("too many inputs: %v", err)
	}
}

func TestPlain(t *testing.T) {
	var p Plain
	if p.ReturnsPtr() || p.CallsExtern() || p.OverwritesInput() != -1 {
		t.Error("a plain op allows what would overwrite its inputs or keep its output")
	}
}

// pair is an op of two matrices.
type pair struct{ identity }

func (pair) Arity() int { return 2 }
func (op pair) Type() hm.Type {
	m := G.TensorType{Dims: 2, Of: hm.TypeVariable('a')}
	return hm.NewFnType(m, m, m)
}
func (pair) OperandName(i int) string { return [...]string{"left", "right"}[i] }

// An input without a name is no two operands. Everything else may be.
func TestApplyDistinct(t *testing.T) {
	g := G.NewGraph()
	op := pair{identity{name: "pair"}}
	input := func(name string) *G.Node {
		return G.NewMatrix(g, tensor.Float32, G.WithShape(2, 3), G.WithName(name))
	}
	n, err := Apply(op, input(""), input(""))
	if err == nil || n != nil || !strings.Contains(err.Error(), "left and right are one node") || !strings.Contains(err.Error(), "(2, 3)") {
		t.Errorf("two inputs without names: %v, %v", n, err)
	}
	if len(g.AllNodes()) != 1 {
		t.Errorf("%d nodes, want the input alone", len(g.AllNodes()))
	}
	same, err := Apply(op, input(""), input("x"))
	if err != nil {
		t.Fatal(err)
	}
	for what, n := range map[string]*G.Node{"a named input": input("x"), "an op's output": same, "a constant": g.AddNode(G.NewConstant(tensor.New(tensor.WithShape(2, 3), tensor.Of(tensor.Float32))))} {
		if _, err := Apply(op, n, n); err != nil {
			t.Errorf("%s as both operands: %v", what, err)
		}
	}
	name := func(i int) string { return fmt.Sprint("x", i) }
	none := input("")
	if err := Distinct(name, input("x"), none, input("x"), none, none); err == nil || !strings.Contains(err.Error(), "x1, x3 and x4 are one node") {
		t.Errorf("%v", err)
	}
}
