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

// twin is the identity on matrices, or an op that says it returns a matrix and
// infers a vector, at which Gorgonia panics.
type twin struct {
	Plain
	name  string
	wrong bool
}

func (op twin) Arity() int { return 1 }
func (op twin) Type() hm.Type {
	m := G.TensorType{Dims: 2, Of: hm.TypeVariable('a')}
	return hm.NewFnType(m, m)
}
func (op twin) InferShape(in ...G.DimSizer) (tensor.Shape, error) {
	if op.wrong {
		return tensor.Shape{1}, nil
	}
	return in[0].(tensor.Shape).Clone(), nil
}
func (op twin) Do(in ...G.Value) (G.Value, error) { return in[0], nil }
func (op twin) WriteHash(h hash.Hash)             { fmt.Fprint(h, op.name) }
func (op twin) Hashcode() uint32                  { return Hashcode(op) }
func (op twin) String() string                    { return op.name }

func TestApply(t *testing.T) {
	g := G.NewGraph()
	x := G.NewMatrix(g, tensor.Float32, G.WithShape(2, 3), G.WithName("x"))
	a, err := Apply(twin{name: "a"}, x)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := Apply(twin{name: "a"}, x); err != nil || again != a {
		t.Errorf("an equal op on the same input is another node: %v, %v", again, err)
	}
	if b, err := Apply(twin{name: "b"}, x); err != nil || b == a {
		t.Errorf("an op with another hash is the same node: %v, %v", b, err)
	}
	if n, err := Apply(twin{name: "c", wrong: true}, x); err == nil || n != nil {
		t.Errorf("Gorgonia's panic came out as node %v and error %v", n, err)
	}
	if _, err := Apply(twin{name: "d"}, x, x); err == nil || !strings.Contains(err.Error(), "d") {
		t.Errorf("too many inputs: %v", err)
	}
}

func TestPlain(t *testing.T) {
	var p Plain
	if p.ReturnsPtr() || p.CallsExtern() || p.OverwritesInput() != -1 {
		t.Error("a plain op allows what would overwrite its inputs or keep its output")
	}
}
