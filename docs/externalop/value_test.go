package externalop

import (
	"fmt"
	"reflect"
	"testing"

	"github.com/chewxy/hm"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// halfFloat is an element type that Gorgonia does not know.
type halfFloat uint16

var half = tensor.Dtype{Type: reflect.TypeFor[halfFloat]()}

// remote is a value whose elements Go code must not touch, as if they lay in
// the memory of a GPU.
type remote struct {
	shape    tensor.Shape
	elements []float64 // only ops read these
}

func (r *remote) Shape() tensor.Shape        { return r.shape }
func (r *remote) Size() int                  { return r.shape.TotalSize() }
func (r *remote) Dtype() tensor.Dtype        { return tensor.Float64 }
func (r *remote) Data() any                  { return nil }
func (r *remote) Uintptr() uintptr           { return 0 }
func (r *remote) MemSize() uintptr           { return 0 }
func (r *remote) Format(s fmt.State, _ rune) { fmt.Fprintf(s, "remote %v", r.shape) }

// cloned is a remote value that Read and the lisp machine can copy.
type cloned struct{ remote }

func (c *cloned) Clone() any {
	return &cloned{remote{c.shape.Clone(), append([]float64(nil), c.elements...)}}
}
func (c *cloned) ZeroValue() G.Value {
	return &cloned{remote{c.shape.Clone(), make([]float64, len(c.elements))}}
}

func elementsOf(v G.Value) []float64 {
	switch r := v.(type) {
	case *remote:
		return r.elements
	case *cloned:
		return r.elements
	}
	return nil
}

var (
	upload = newOp("upload", 1, func(in ...G.Value) (G.Value, error) {
		return &remote{in[0].Shape().Clone(), add(in[0].Data().([]float64), 0)}, nil
	})
	remoteOne = newOp("remote plus one", 1, func(in ...G.Value) (G.Value, error) {
		return &remote{in[0].Shape().Clone(), add(elementsOf(in[0]), 1)}, nil
	})
	download = newOp("download", 1, func(in ...G.Value) (G.Value, error) { return vector(elementsOf(in[0])...), nil })
)

// TestValuesMayLiveAnywhere: a value that is no tensor travels from node to
// node, at every run.
func TestValuesMayLiveAnywhere(t *testing.T) {
	g := G.NewGraph()
	x := input(g, "x", 1, 2)
	n := x
	for _, op := range []G.Op{upload, remoteOne, download} {
		n = G.Must(G.ApplyOp(op, n))
	}
	var read G.Value
	G.Read(n, &read)
	m := G.NewTapeMachine(g)
	defer m.Close()
	for i := range 3 {
		if err := G.Let(x, vector(1, float64(i))); err != nil {
			t.Fatal(err)
		}
		again(t, m)
		has(t, "x+1", read, 2, float64(i)+1)
	}
}

// TestLetOfAnyValue: it can be an input, and the machine gives ops the very same.
func TestLetOfAnyValue(t *testing.T) {
	g := G.NewGraph()
	x := G.NewVector(g, tensor.Float64, G.WithShape(2), G.WithName("x"))
	v := &remote{tensor.Shape{2}, []float64{3, 4}}
	var got G.Value
	y := G.Must(G.ApplyOp(newOp("same", 1, func(in ...G.Value) (G.Value, error) {
		got = in[0]
		return vector(0, 0), nil
	}), x))
	if err := G.Let(x, v); err != nil {
		t.Fatal(err)
	}
	run(t, g)
	if got != G.Value(v) {
		t.Errorf("%v got %v", y, got)
	}
}

// TestReadClonesValues: Read and TraceExec need a Clone of a value that is no tensor.
func TestReadClonesValues(t *testing.T) {
	for name, c := range map[string]struct {
		v  G.Value
		ok bool
	}{
		"without Clone": {&remote{tensor.Shape{2}, []float64{3, 4}}, false},
		"with Clone":    {&cloned{remote{tensor.Shape{2}, []float64{3, 4}}}, true},
	} {
		op := newOp(name, 1, func(...G.Value) (G.Value, error) { return c.v, nil })
		g := G.NewGraph()
		y := G.Must(G.ApplyOp(op, input(g, "x", 1, 2)))
		m := G.NewTapeMachine(g, G.TraceExec())
		defer m.Close()
		if err := m.RunAll(); (err == nil) != c.ok {
			t.Errorf("%s, traced: %v", name, err)
		} else if c.ok && (y.Value() == c.v || elementsOf(y.Value())[1] != 4) {
			t.Errorf("%s: traced %v", name, y.Value())
		}

		g = G.NewGraph()
		y = G.Must(G.ApplyOp(op, input(g, "x", 1, 2)))
		var read G.Value
		G.Read(y, &read)
		m = G.NewTapeMachine(g)
		defer m.Close()
		if err := m.RunAll(); (err == nil) != c.ok {
			t.Errorf("%s, read: %v", name, err)
		} else if c.ok && (read == c.v || elementsOf(read)[1] != 4) {
			t.Errorf("%s: read %v", name, read)
		}
	}
}

// TestStockOpsOnOtherValues: Gorgonia's own ops refuse a value that is no tensor.
func TestStockOpsOnOtherValues(t *testing.T) {
	g := G.NewGraph()
	x := G.Must(G.ApplyOp(upload, input(g, "x", 1, 2)))
	G.Must(G.Add(x, x))
	m := G.NewTapeMachine(g)
	defer m.Close()
	if err := m.RunAll(); err == nil {
		t.Error("Add took it")
	}
}

// TestWithValueWantsAType: WithValue asks a value that is no tensor for its Type,
// and panics without; Let does not ask.
func TestWithValueWantsAType(t *testing.T) {
	g := G.NewGraph()
	bind := func(v G.Value) any {
		return panics(func() { G.NewVector(g, tensor.Float64, G.WithShape(2), G.WithName("x"), G.WithValue(v)) })
	}
	v := remote{tensor.Shape{2}, []float64{3, 4}}
	if bind(&v) == nil {
		t.Error("it takes a value without Type")
	}
	if p := bind(&typed{v}); p != nil {
		t.Errorf("of a value with Type it says %v", p)
	}
}

type typed struct{ remote }

func (*typed) Type() hm.Type { return G.TensorType{Dims: 1, Of: tensor.Float64} }

// TestLispMachineWantsZeroValue: the lisp machine makes room for a gradient of
// every input, and so wants Clone and ZeroValue of its value.
func TestLispMachineWantsZeroValue(t *testing.T) {
	for name, c := range map[string]struct {
		v  G.Value
		ok bool
	}{
		"without": {&remote{tensor.Shape{2}, []float64{3, 4}}, false},
		"with":    {&cloned{remote{tensor.Shape{2}, []float64{3, 4}}}, true},
	} {
		t.Run(name, func(t *testing.T) {
			output, err := child(t, func() {
				g := G.NewGraph()
				x := G.NewVector(g, tensor.Float64, G.WithShape(2), G.WithName("x"))
				y := G.Must(G.ApplyOp(download, x))
				err := G.Let(x, c.v)
				if err == nil {
					err = G.NewLispMachine(g, G.ExecuteFwdOnly()).RunAll()
				}
				fmt.Println("download is", y.Value(), err)
			})
			if ok := err == nil && output == "download is [3  4] <nil>\n"; ok != c.ok {
				t.Errorf("%v, %s", err, output)
			}
		})
	}
}
