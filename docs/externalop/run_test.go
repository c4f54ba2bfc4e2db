package externalop

import (
	"fmt"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/chewxy/hm"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// What the tape machine does with an op when the graph runs.

// TestDoHasAGoroutineOfItsOwn: the caller of RunAll is not on Do's stack.
func TestDoHasAGoroutineOfItsOwn(t *testing.T) {
	var stack string
	op := newOp("stack", 1, func(in ...G.Value) (G.Value, error) {
		stack = string(debug.Stack())
		return in[0], nil
	})
	g := G.NewGraph()
	G.Must(G.ApplyOp(op, input(g, "x", 1, 2)))
	run(t, g)
	if !strings.Contains(stack, "tapeMachine).runall") || strings.Contains(stack, "externalop.run(") {
		t.Errorf("Do ran on the caller's goroutine:\n%s", stack)
	}
}

// TestPanicInDoEndsTheProcess: nobody can recover from it, not even RunAll's caller.
func TestPanicInDoEndsTheProcess(t *testing.T) {
	output, err := child(t, func() {
		g := G.NewGraph()
		G.Must(G.ApplyOp(newOp("panics", 1, func(...G.Value) (G.Value, error) { panic("in Do") }), input(g, "x", 1, 2)))
		m := G.NewTapeMachine(g)
		fmt.Println("recovered:", panics(func() { m.RunAll() }))
	})
	if err == nil || strings.Contains(output, "recovered:") || !strings.Contains(output, "panic: in Do") {
		t.Errorf("the process ended with %v:\n%s", err, output)
	}
}

// TestRecoverInDo: an op that recovers gives RunAll an error.
func TestRecoverInDo(t *testing.T) {
	op := newOp("recovers", 1, func(...G.Value) (v G.Value, err error) {
		defer recoverTo(&err)
		panic("in Do")
	})
	g := G.NewGraph()
	G.Must(G.ApplyOp(op, input(g, "x", 1, 2)))
	m := G.NewTapeMachine(g)
	defer m.Close()
	if err := m.RunAll(); err == nil || !strings.Contains(err.Error(), "in Do") {
		t.Errorf("RunAll says %v", err)
	}
}

// TestResultIsNotChecked: a value of another shape and type than was inferred
// goes through.
func TestResultIsNotChecked(t *testing.T) {
	op := newOp("another shape", 1, func(...G.Value) (G.Value, error) {
		return tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(7)), nil
	})
	g := G.NewGraph()
	y := G.Must(G.ApplyOp(op, input(g, "x", 1, 2)))
	run(t, g)
	if v := y.Value(); v.Shape().TotalSize() != 7 || v.Dtype() != tensor.Float32 {
		t.Errorf("the node has a value of %v %v", v.Dtype(), v.Shape())
	}
}

// TestLet: Let binds the value itself, checks its shape and element type, and
// refuses nodes that are no inputs.
func TestLet(t *testing.T) {
	g := G.NewGraph()
	x := input(g, "x", 1, 2)
	y := G.Must(Scale(x, 1))
	v := vector(3, 4)
	if err := G.Let(x, v); err != nil || x.Value() != G.Value(v) {
		t.Errorf("the value is %v, %v", x.Value(), err)
	}
	for name, wrong := range map[string]*tensor.Dense{
		"shape": vector(1, 2, 3), "type": tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(2)),
	} {
		if G.Let(x, wrong) == nil {
			t.Errorf("another %s passes", name)
		}
	}
	if G.Let(y, v) == nil {
		t.Error("an inner node takes a value")
	}
}

// TestResetIsNeeded: a second run without Reset computes nothing, and says nothing.
func TestResetIsNeeded(t *testing.T) {
	runs := 0
	op := newOp("counts", 1, func(in ...G.Value) (G.Value, error) {
		runs++
		return vector(1, 2), nil
	})
	g := G.NewGraph()
	G.Must(G.ApplyOp(op, input(g, "x", 1, 2)))
	m := G.NewTapeMachine(g)
	defer m.Close()
	for _, want := range []int{1, 1} {
		if err := m.RunAll(); err != nil || runs != want {
			t.Errorf("%d runs, %v; want %d", runs, err, want)
		}
	}
	m.Reset()
	if again(t, m); runs != 2 {
		t.Errorf("%d runs after Reset", runs)
	}
}

// TestKeptMemoryIsOverwritten: an op that returns memory that it keeps finds it
// changed by the node behind it.
func TestKeptMemoryIsOverwritten(t *testing.T) {
	kept := vector(1, 2)
	op := newOp("keeps", 1, func(...G.Value) (G.Value, error) { return kept, nil })
	g := G.NewGraph()
	x := input(g, "x", 0, 0)
	sum := G.Must(G.Add(G.Must(G.ApplyOp(op, x)), G.NewConstant(100.0)))
	m := G.NewTapeMachine(g)
	defer m.Close()
	again(t, m)
	has(t, "the first sum", sum.Value(), 101, 102)
	has(t, "what the op kept", kept, 101, 102)
	again(t, m)
	has(t, "the second sum", sum.Value(), 201, 202)
	has(t, "the input", x.Value(), 0, 0)
}

// TestInputsAreNotOverwritten: Add leaves an input of the graph as it is, and a
// value that another node still needs.
func TestInputsAreNotOverwritten(t *testing.T) {
	g := G.NewGraph()
	x := input(g, "x", 1, 2)
	y := G.Must(G.ApplyOp(plusOne("y"), x))
	var late G.Value
	G.Must(G.Add(x, G.NewConstant(100.0)))
	G.Must(G.Add(y, G.NewConstant(100.0)))
	G.Read(G.Must(G.ApplyOp(plusOne("late"), y)), &late)
	run(t, g)
	has(t, "x", x.Value(), 1, 2)
	has(t, "what reads y later", late, 3, 4)
}

// TestNodeValueMayBeOverwritten: Value of an inner node is what the machine left
// there; Read copies in time.
func TestNodeValueMayBeOverwritten(t *testing.T) {
	g := G.NewGraph()
	y := G.Must(G.ApplyOp(plusOne("y"), input(g, "x", 1, 2)))
	G.Must(G.Add(y, G.NewConstant(100.0)))
	run(t, g)
	has(t, "Value", y.Value(), 102, 103)

	var read G.Value
	G.Read(y, &read)
	run(t, g)
	has(t, "Read", read, 2, 3)
}

// TestOverwritesInput: an op that changes an inner value in place changes it for
// other readers too, whatever it declares.
func TestOverwritesInput(t *testing.T) {
	inPlace := newOp("in place", 1, func(in ...G.Value) (G.Value, error) {
		x := in[0].(*tensor.Dense)
		for i := range x.Float64s() {
			x.Float64s()[i]++
		}
		return x, nil
	})
	inPlace.over, inPlace.pointer = 0, true
	g := G.NewGraph()
	a := G.Must(G.ApplyOp(plusOne("a"), input(g, "x", 1, 2)))
	G.Must(G.ApplyOp(inPlace, a))
	reader := G.Must(G.ApplyOp(plusOne("reader"), a))
	run(t, g)
	has(t, "a+1", reader.Value(), 4, 5) // 3, 4 if nobody had written
}

type preallocOp struct {
	*testOp
	given []G.Value
}

func (r *preallocOp) UsePreallocDo(to G.Value, in ...G.Value) (G.Value, error) {
	r.given = append(r.given, to)
	copy(to.(*tensor.Dense).Float64s(), in[0].Data().([]float64))
	return to, nil
}

// TestPrealloc: UsePreallocDo is called if CallsExtern and ReturnsPtr are true,
// with a new tensor at each run.
func TestPrealloc(t *testing.T) {
	for _, extern := range []bool{false, true} {
		for _, pointer := range []bool{false, true} {
			do := 0
			op := &preallocOp{testOp: newOp("prealloc", 1, func(...G.Value) (G.Value, error) {
				do++
				return vector(1, 2), nil
			})}
			op.extern, op.pointer = extern, pointer
			g := G.NewGraph()
			G.Must(G.ApplyOp(op, input(g, "x", 1, 2)))
			m := G.NewTapeMachine(g)
			for range 3 {
				again(t, m)
			}
			if err := m.Close(); err != nil {
				t.Error(err)
			}
			want := 0
			if extern && pointer {
				want = 3
			}
			if len(op.given) != want || do != 3-want {
				t.Errorf("CallsExtern %v, ReturnsPtr %v: UsePreallocDo %d times, Do %d", extern, pointer, len(op.given), do)
			}
			for i, v := range op.given {
				for _, other := range op.given[:i] {
					if v == other {
						t.Error("memory of an earlier run is given again")
					}
				}
			}
		}
	}
}

// TestClonesShareOps: a clone of a graph has values of its own and the same ops:
// what an op keeps between runs is the clone's too.
func TestClonesShareOps(t *testing.T) {
	g := G.NewGraph()
	x := input(g, "x", 1, 2)
	y := G.Must(G.ApplyOp(plusOne("y"), x))
	clone := g.Clone().(*G.ExprGraph)
	x2, y2 := clone.Node(x.ID()).(*G.Node), clone.Node(y.ID()).(*G.Node)
	if y2 == y || y2.Op() != y.Op() {
		t.Error("the clone has an op of its own")
	}
	if x2.Value() == x.Value() {
		t.Error("the clone has the same value of x")
	}
}

// TestOpaqueElementTypes: a type that Gorgonia does not know goes through
// inputs, nodes and Read; only arithmetic refuses it.
func TestOpaqueElementTypes(t *testing.T) {
	g := G.NewGraph()
	k := G.NewVector(g, half, G.WithShape(2), G.WithName("k"), G.WithValue(tensor.New(tensor.WithShape(2), tensor.WithBacking([]halfFloat{1, 2}))))
	widen := newOp("widen", 1, func(in ...G.Value) (G.Value, error) {
		y := vector(0, 0)
		for i, x := range in[0].Data().([]halfFloat) {
			y.Float64s()[i] = float64(x)
		}
		return y, nil
	})
	widen.typ = func() hm.Type {
		return hm.NewFnType(G.TensorType{Dims: 1, Of: half}, G.TensorType{Dims: 1, Of: tensor.Float64})
	}
	var read, wide G.Value
	G.Read(k, &read)
	G.Read(G.Must(G.ApplyOp(widen, k)), &wide)
	run(t, g)
	has(t, "k, widened", wide, 1, 2)
	if x := read.Data().([]halfFloat); x[0] != 1 || x[1] != 2 {
		t.Errorf("k is read as %v", x)
	}

	var sum *G.Node
	err := error(nil)
	if p := panics(func() { sum, err = G.Add(k, k) }); p == nil && err == nil {
		m := G.NewTapeMachine(sum.Graph())
		defer m.Close()
		if m.RunAll() == nil {
			t.Errorf("k + k is %v", sum.Value())
		}
	}
}

// TestNodeAllocations: a node that does nothing costs the tape machine some
// allocations at each run, whatever its op does.
func TestNodeAllocations(t *testing.T) {
	allocations := func(nodes int) float64 {
		g := G.NewGraph()
		n := input(g, "x", 1, 2)
		for i := range nodes {
			n = G.Must(G.ApplyOp(newOp(fmt.Sprint("nothing ", i), 1, func(in ...G.Value) (G.Value, error) { return in[0], nil }), n))
		}
		m := G.NewTapeMachine(g)
		defer m.Close()
		again(t, m)
		return testing.AllocsPerRun(20, func() { again(t, m) })
	}
	each := (allocations(110) - allocations(10)) / 100
	t.Logf("%.2f allocations a node", each)
	if each < 1 || each > 8 {
		t.Errorf("%.2f allocations a node, want some few", each)
	}
}

// BenchmarkNodes is the time of nodes that do nothing.
func BenchmarkNodes(b *testing.B) {
	for _, nodes := range []int{1, 10, 100, 1000} {
		b.Run(fmt.Sprint(nodes), func(b *testing.B) {
			g := G.NewGraph()
			n := input(g, "x", 1, 2)
			for i := range nodes {
				n = G.Must(G.ApplyOp(newOp(fmt.Sprint("nothing ", i), 1, func(in ...G.Value) (G.Value, error) { return in[0], nil }), n))
			}
			m := G.NewTapeMachine(g)
			defer m.Close()
			b.ReportAllocs()
			for b.Loop() {
				if err := m.RunAll(); err != nil {
					b.Fatal(err)
				}
				m.Reset()
			}
		})
	}
}
