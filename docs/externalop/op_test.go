package externalop

import (
	"fmt"
	"hash"
	"hash/fnv"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/chewxy/hm"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// testOp is an op of which a test can set every answer. Without more it takes and
// returns float64 vectors of one size, and is told apart by its name.
type testOp struct {
	name    string
	inputs  int
	do      func(in ...G.Value) (G.Value, error)
	typ     func() hm.Type
	shape   func(in []tensor.Shape) (tensor.Shape, error)
	pointer bool
	extern  bool
	over    int
}

func newOp(name string, inputs int, do func(in ...G.Value) (G.Value, error)) *testOp {
	return &testOp{name: name, inputs: inputs, do: do, over: -1}
}

func (r *testOp) Arity() int { return r.inputs }

func (r *testOp) Type() hm.Type {
	if r.typ != nil {
		return r.typ()
	}
	var of []hm.Type
	for range r.inputs + 1 {
		of = append(of, vectors())
	}
	return hm.NewFnType(of...)
}

func (r *testOp) InferShape(in ...G.DimSizer) (tensor.Shape, error) {
	shapes, err := G.DimSizersToShapes(in)
	if err != nil {
		return nil, err
	}
	if r.shape != nil {
		return r.shape(shapes)
	}
	return shapes[0].Clone(), nil
}

func (r *testOp) Do(in ...G.Value) (G.Value, error) { return r.do(in...) }
func (r *testOp) ReturnsPtr() bool                  { return r.pointer }
func (r *testOp) CallsExtern() bool                 { return r.extern }
func (r *testOp) OverwritesInput() int              { return r.over }
func (r *testOp) WriteHash(h hash.Hash)             { fmt.Fprint(h, r.name) }
func (r *testOp) String() string                    { return r.name }
func (r *testOp) Hashcode() uint32 {
	h := fnv.New32a()
	r.WriteHash(h)
	return h.Sum32()
}

func vectors() hm.Type { return G.TensorType{Dims: 1, Of: hm.TypeVariable('a')} }

// plusOne is an op that adds 1 and keeps the rules.
func plusOne(name string) *testOp {
	return newOp(name, 1, func(in ...G.Value) (G.Value, error) {
		return vector(add(in[0].Data().([]float64), 1)...), nil
	})
}

func add(x []float64, c float64) []float64 {
	y := slices.Clone(x)
	for i := range y {
		y[i] += c
	}
	return y
}

func vector(x ...float64) *tensor.Dense {
	return tensor.New(tensor.WithShape(len(x)), tensor.WithBacking(slices.Clone(x)))
}

func input(g *G.ExprGraph, name string, x ...float64) *G.Node {
	return G.NewVector(g, tensor.Float64, G.WithShape(len(x)), G.WithName(name), G.WithValue(vector(x...)))
}

// run runs the graph once on a tape machine.
func run(t *testing.T, g *G.ExprGraph) {
	t.Helper()
	m := G.NewTapeMachine(g)
	defer m.Close()
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
}

func again(t *testing.T, m G.VM) {
	t.Helper()
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
	m.Reset()
}

// has checks the elements of a value.
func has(t *testing.T, what string, v G.Value, want ...float64) {
	t.Helper()
	if got := v.Data().([]float64); !slices.Equal(got, want) {
		t.Errorf("%s is %v, want %v", what, got, want)
	}
}

// panics is what f panics with, nil if it does not.
func panics(f func()) (r any) {
	defer func() { r = recover() }()
	f()
	return nil
}

// child runs f in a process of its own, and returns what that printed and how it
// ended.
func child(t *testing.T, f func()) (output string, err error) {
	t.Helper()
	const variable = "EXTERNALOP_CHILD"
	if os.Getenv(variable) == t.Name() {
		f()
		os.Exit(0)
	}
	c := exec.Command(os.Args[0], "-test.run", "^"+strings.ReplaceAll(t.Name(), "/", "$/^")+"$")
	c.Env = append(os.Environ(), variable+"="+t.Name())
	text, err := c.CombinedOutput()
	return string(text), err
}
