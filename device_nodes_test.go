package leanattention_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"

	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/rewrite"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// deviceRelay is x -> device.ToGPU -> ToHost.
type deviceRelay struct {
	x, there, back *G.Node
	out            G.Value
}

func newDeviceRelay(t testing.TB, g *G.ExprGraph, gpu *device.GPU, dt tensor.Dtype, shape ...int) *deviceRelay {
	t.Helper()
	r := &deviceRelay{x: G.NewTensor(g, dt, len(shape), G.WithShape(shape...), G.WithName(fmt.Sprint("x", dt, shape)))}
	var err error
	if r.there, err = device.ToGPU(r.x, gpu); err != nil {
		t.Fatal(err)
	}
	if r.back, err = device.ToHost(r.there); err != nil {
		t.Fatal(err)
	}
	return r
}

func testDeviceNodes(t *testing.T, gpu *device.GPU) {
	rng := reftest.Rand(t)
	for turn, dt := range deviceTypes {
		g := G.NewGraph()
		r := newDeviceRelay(t, g, gpu, dt, 3, 4)
		var opts []G.VMOpt
		if turn%2 == 0 {
			opts = append(opts, G.TraceExec()) // nodes keep copies
		}
		var kept G.Value
		G.Read(r.back, &r.out)
		G.Read(r.there, &kept)
		if err := rewrite.Check(g); err != nil {
			t.Fatal(err)
		}
		vm := G.NewTapeMachine(g, opts...)
		var last *tensor.Dense
		for range 5 {
			x := randomTensor(rng, dt, 3, 4)
			graphtest.Let(t, r.x, x)
			graphtest.Again(t, vm)
			if err := errors.Join(sameElements(r.out.(*tensor.Dense), x), sameElements(graphtest.Download(t, kept), x), sameElements(graphtest.Download(t, r.there.Value()), x)); err != nil {
				t.Fatalf("%v: %v", dt, err)
			}
			last = x
		}
		vm.Close()

		// Once on the lisp machine, whose roots are on the host.
		if dt != tensor.Float32 {
			continue // it wants gradients of everything
		}
		g = G.NewGraph()
		r = newDeviceRelay(t, g, gpu, dt, 3, 4)
		graphtest.Let(t, r.x, last)
		lisp := G.NewLispMachine(g, G.ExecuteFwdOnly())
		if err := lisp.RunAll(); err != nil {
			t.Fatal(err)
		}
		if err := sameElements(r.back.Value().(*tensor.Dense), last); err != nil {
			t.Fatalf("lisp machine: %v", err)
		}
		lisp.Close()

		// A root that is on the GPU is an error, not the end of the process.
		g = G.NewGraph()
		x := graphtest.Input(g, "x", last)
		if _, err := device.ToGPU(x, gpu); err != nil {
			t.Fatal(err)
		}
		lisp = G.NewLispMachine(g, G.ExecuteFwdOnly())
		if err := lisp.RunAll(); err == nil {
			t.Error("the lisp machine has a root on a GPU and no error")
		}
		lisp.Close()
	}
}

// testDeviceNodeValues: a node's old value is refused when it has run again, a
// copy is not, and clones of a graph get an error rather than each other's.
func testDeviceNodeValues(t *testing.T, gpu *device.GPU) {
	rng := reftest.Rand(t)
	g := G.NewGraph()
	r := newDeviceRelay(t, g, gpu, tensor.Float32, 8)
	vm := G.NewTapeMachine(g)
	defer vm.Close()
	first := randomTensor(rng, tensor.Float32, 8)
	graphtest.Let(t, r.x, first)
	graphtest.Again(t, vm)
	old := r.there.Value().(*device.Tensor)
	copied, err := old.Clone()
	if err != nil {
		t.Fatal(err)
	}
	graphtest.Let(t, r.x, randomTensor(rng, tensor.Float32, 8))
	graphtest.Again(t, vm)
	if _, err := old.Download(); !errors.Is(err, la.ErrState) || !strings.Contains(err.Error(), "run again") {
		t.Errorf("the old value: %v", err)
	}
	if err := sameElements(graphtest.Download(t, copied.(G.Value)), first); err != nil {
		t.Errorf("its copy: %v", err)
	}
	if err := old.Free(); !errors.Is(err, la.ErrState) {
		t.Errorf("Free of the old value: %v", err)
	}
	// Freed, the value's memory is not the node's any more.
	if err := r.there.Value().(*device.Tensor).Free(); err != nil {
		t.Error(err)
	}
	last := randomTensor(rng, tensor.Float32, 8)
	graphtest.Let(t, r.x, last)
	graphtest.Again(t, vm)
	if err := sameElements(r.back.Value().(*tensor.Dense), last); err != nil {
		t.Error(err)
	}

	there := nodeOf(g.Clone().(*G.ExprGraph), r.there).Value()
	if err := sameElements(graphtest.Download(t, there), last); err != nil {
		t.Errorf("the value in a clone of the graph: %v", err)
	}
}

func testDeviceNodeErrors(t *testing.T, gpu *device.GPU) {
	g := G.NewGraph()
	scalar := G.NewScalar(g, tensor.Float32, G.WithName("s"))
	f64 := G.NewMatrix(g, tensor.Float64, G.WithShape(2, 2), G.WithName("f64"))
	x := G.NewMatrix(g, tensor.Float32, G.WithShape(2, 2), G.WithName("x"))
	for _, c := range []struct {
		name string
		err  error
		want error
	}{
		{"nil node", second(device.ToGPU(nil, gpu)), la.ErrGraph},
		{"nil node", second(device.ToHost(nil)), la.ErrGraph},
		{"nil GPU", second(device.ToGPU(x, nil)), la.ErrState},
		{"zero GPU", second(device.ToGPU(x, new(device.GPU))), la.ErrState},
		{"scalar", second(device.ToGPU(scalar, gpu)), la.ErrShape},
		{"float64", second(device.ToGPU(f64, gpu)), la.ErrDType},
		{"float64", second(device.ToHost(f64)), la.ErrDType},
	} {
		if !errors.Is(c.err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, c.err, c.want)
		}
	}
	there, err := device.ToGPU(x, gpu)
	if err != nil {
		t.Fatal(err)
	}
	if same, err := device.ToGPU(x, gpu); err != nil || same.ID() != there.ID() {
		t.Errorf("the same copy twice is not one node: %v", err)
	}
	again, err := device.Open(gpu.Members()[0].Ordinal)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if elsewhere, err := device.ToGPU(x, again); err != nil || elsewhere.ID() == there.ID() {
		t.Errorf("a copy to another GPU is the same node: %v", err)
	}
	if _, err := G.Grad(G.Must(G.Sum(there)), x); err == nil || !strings.Contains(err.Error(), "gradient of a copy") {
		t.Errorf("gradient: %v", err)
	}
	run := func(op G.Op, in ...G.Value) error { return second(op.Do(in...)) }
	host := randomTensor(rand.New(rand.NewPCG(1, 2)), tensor.Float32, 2, 2)
	on := graphtest.Upload(t, gpu, host)
	back, err := device.ToHost(x)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		err  error
		want error
		text string
	}{
		{"on the GPU already", run(there.Op(), on), la.ErrUnsupported, gpu.String()},
		{"on the host already", run(back.Op(), host), la.ErrUnsupported, "host memory"},
		{"other shape", run(there.Op(), randomTensor(rand.New(rand.NewPCG(1, 2)), tensor.Float32, 4)), la.ErrShape, "(4)"},
		{"other type", run(back.Op(), graphtest.Upload(t, gpu, randomTensor(rand.New(rand.NewPCG(1, 2)), la.Float16, 2, 2))), la.ErrDType, ""},
		{"no input", run(there.Op()), la.ErrShape, ""},
		{"nil input", run(there.Op(), nil), la.ErrShape, ""},
	} {
		if !errors.Is(c.err, c.want) || !strings.Contains(c.err.Error(), c.text) {
			t.Errorf("%s: %v, want %v", c.name, c.err, c.want)
		}
	}
}

// testDeviceShared: a value is overwritten when its readers have run, but those that stay; the
// memory does not depend on how many nodes there are.
func testDeviceShared(t *testing.T, gpu *device.GPU) {
	const rows, width = 64, 256
	// run is layers of which each reads the value before it twice, as parts and as a residual. Each run has a GPU value of its own: buffers
	// that earlier work has left would count less.
	run := func(layers int, share bool) (nodes []*G.Node, out *tensor.Dense, grown int64) {
		gpu, err := device.Open(gpu.Members()[0].Ordinal)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := gpu.Close(); err != nil {
				t.Error(err)
			}
		})
		used := func() int64 {
			runtime.GC()
			m, err := gpu.Memory()
			if err != nil {
				t.Fatal(err)
			}
			return m.Used
		}
		up := func(n ...int) *device.Tensor {
			x := tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(n...))
			for i := range x.Float32s() {
				x.Float32s()[i] = float32(i%13-6) / 64
			}
			return graphtest.Upload(t, gpu, x)
		}
		weight, gamma, x := up(width, width), up(width), up(rows, width)
		g := G.NewGraph()
		in := func(name string, d *device.Tensor) *G.Node {
			return G.NewTensor(g, tensor.Float32, len(d.Shape()), G.WithShape(d.Shape()...), G.WithName(name), G.WithValue(d))
		}
		w, h, norm := in("w", weight), in("x", x), in("gamma", gamma)
		for range layers {
			parts, err := nn.Linears(h, []*G.Node{w, w}, nil, nn.WithNorm(norm, nil, 1e-5))
			if err != nil {
				t.Fatal(err)
			}
			sum := only(t)(nn.Linear(parts[0], w, nil, nn.WithResidual(parts[1])))
			h = only(t)(nn.Linear(sum, w, nil, nn.WithResidual(h)))
			nodes = append(nodes, h)
		}
		if share {
			if err := rewrite.ShareMemory(g, nodes[1]); err != nil {
				t.Fatal(err)
			}
		}
		before := used()
		vm := G.NewTapeMachine(g)
		defer vm.Close()
		graphtest.Again(t, vm)
		graphtest.Again(t, vm) // what stays is there from the beginning now
		grown = used() - before
		graphtest.Again(t, vm)
		if again := used() - before; again != grown {
			t.Errorf("%d layers: %d bytes taken, and after another run %d", layers, grown, again)
		}
		if share {
			rec, err := gpu.Record(vm.RunAll)
			if err == nil {
				err = errors.Join(rec.Replay(), rec.Close())
			}
			if err != nil {
				t.Errorf("a recording: %v", err)
			}
			graphtest.Again(t, vm)
		}
		return nodes, graphtest.Download(t, h.Value()), grown
	}
	nodes, got, few := run(12, true)
	_, want, all := run(12, false)
	if err := sameElements(got, want); err != nil {
		t.Errorf("with shared memory: %v", err)
	}
	if _, err := nodes[0].Value().(*device.Tensor).Download(); !errors.Is(err, la.ErrState) {
		t.Errorf("a value whose readers have run: %v", err)
	}
	if _, err := nodes[1].Value().(*device.Tensor).Download(); err != nil {
		t.Errorf("a value that is kept: %v", err)
	}
	if _, _, more := run(24, true); more > few || few > all/2 {
		t.Errorf("12 layers take %d bytes, with shared memory %d, and 24 layers %d", all, few, more)
	}
	g := G.NewGraph()
	for name, err := range map[string]error{"no graph": rewrite.ShareMemory(nil), "no node": rewrite.ShareMemory(g, nil), "another graph's": rewrite.ShareMemory(g, nodes[0])} {
		if !errors.Is(err, la.ErrGraph) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// only is a value without an error.
func only(t testing.TB) func(*G.Node, error) *G.Node {
	return func(n *G.Node, err error) *G.Node {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
}
