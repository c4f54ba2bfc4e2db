package nn

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/devicetest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// gradientsOf runs the graph of a case with the gradients of its inputs, given that of the result, and returns values of the
// gradients.
func (c *opCase) gradientsOf(t *testing.T, dtype tensor.Dtype, dy *opInput, where func(*tensor.Dense) G.Value, vm func(run func() error) error) ([]G.Value, error) {
	t.Helper()
	o := c.graph(t, dtype, where)
	var value G.Value = dy.tensor(dtype, false)
	if where != nil {
		value = where(dy.tensor(dtype, false))
	}
	d := G.NewTensor(o.g, dtype, len(c.shape), G.WithShape(c.shape...), G.WithName("dy"), G.WithValue(value))
	var wrt G.Nodes
	for i, in := range c.inputs {
		if in.ids == nil {
			wrt = append(wrt, o.in[i])
		}
	}
	grads, err := G.Backpropagate(G.Nodes{o.y}, G.Nodes{d}, wrt)
	if err != nil {
		t.Fatalf("%s: %v", c.name, err)
	}
	values := make([]G.Value, len(grads))
	for i := range grads {
		G.Read(grads[i], &values[i])
	}
	m := G.NewTapeMachine(o.g)
	defer m.Close()
	return values, la.Cause(vm(func() error { m.Reset(); return m.RunAll() }))
}

// Gradients on a GPU are those of float64 in host memory, in a run, in a second one, and in a recording. Ops without kernels refuse.
func TestGPUOpsGradients(t *testing.T) {
	gpu, rng := devicetest.Open(t), seeded(t)
	upload := func(v *tensor.Dense) G.Value {
		d, err := gpu.Upload(v)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	for _, c := range onGPUs(opCases(rng)) {
		dy := randomInput(rng, "dy", c.shape...)
		want, err := c.gradientsOf(t, tensor.Float64, &dy, nil, func(run func() error) error { return run() })
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		got, err := c.gradientsOf(t, tensor.Float32, &dy, upload, func(run func() error) error {
			if err := errors.Join(run(), run()); err != nil {
				return err
			}
			recording, err := gpu.Record(run)
			if err != nil {
				return err
			}
			return errors.Join(recording.Replay(), recording.Close())
		})
		if c.refused != "" {
			own := strings.Contains(c.refused, "Expected left value")
			if !own && !errors.Is(err, la.ErrUnsupported) || !strings.Contains(fmt.Sprint(err), c.refused) {
				t.Errorf("%s: %v, want %s", c.name, err, c.refused)
			}
			continue
		}
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		for i := range want {
			there, err := got[i].(*device.Tensor).Download()
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(there.Shape(), want[i].Shape()) {
				t.Fatalf("%s: gradient %d has shape %v, want %v", c.name, i, there.Shape(), want[i].Shape())
			}
			c.compare(t, fmt.Sprint("gradient ", i), floatsOf(t, there), floatsOf(t, want[i]), 4e-6)
		}
	}
}

// Gorgonia can't add gradients that are on a GPU. Three gradients of a value are added as the package's documentation says, and
// are those of Gorgonia's own sum in host memory.
func TestGPUOpsSums(t *testing.T) {
	gpu, rng := devicetest.Open(t), seeded(t)
	const rows, width = 5, 12
	inputs := []opInput{randomInput(rng, "x", rows, width), randomInput(rng, "w0", width, width), randomInput(rng, "w1", width, width), randomInput(rng, "w2", width, width), randomInput(rng, "dy", rows, width)}
	grads := func(dtype tensor.Dtype, where func(*tensor.Dense) G.Value, backward func(in []*G.Node, h *G.Node) ([]*G.Node, error)) (values []G.Value, err error) {
		g := G.NewGraph()
		var in []*G.Node
		for i := range inputs {
			in = append(in, G.NewTensor(g, dtype, 2, G.WithShape(inputs[i].shape...), G.WithName(inputs[i].name), G.WithValue(where(inputs[i].tensor(dtype, false)))))
		}
		h, err := Linear(in[0], in[1], nil)
		if err != nil {
			return nil, err
		}
		nodes, err := backward(in, h)
		if err != nil {
			return nil, err
		}
		values = make([]G.Value, len(nodes))
		for i, n := range nodes {
			G.Read(n, &values[i])
		}
		m := G.NewTapeMachine(g)
		defer m.Close()
		return values, la.Cause(m.RunAll())
	}
	must := func(n *G.Node, err error) *G.Node {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	// y = h + r w1^T + r w2^T, where r is h. Gradients: of x, w0, w1 and w2.
	own := func(in []*G.Node, h *G.Node) ([]*G.Node, error) {
		y := must(Add(must(Add(h, must(Linear(h, in[2], nil)))), must(Linear(h, in[3], nil))))
		return G.Backpropagate(G.Nodes{y}, G.Nodes{in[4]}, G.Nodes(in[:4]))
	}
	apart := func(in []*G.Node, h *G.Node) ([]*G.Node, error) {
		r, dh, dws := must(Reshape(h, rows, width)), in[4], G.Nodes{}
		for _, w := range in[2:4] {
			of, err := G.Backpropagate(G.Nodes{must(Linear(r, w, nil))}, G.Nodes{in[4]}, G.Nodes{r, w})
			if err != nil {
				return nil, err
			}
			dh, dws = must(Add(dh, of[0])), append(dws, of[1])
		}
		rest, err := G.Backpropagate(G.Nodes{h}, G.Nodes{dh}, G.Nodes{in[0], in[1]})
		return append(rest, dws...), err
	}
	upload := func(v *tensor.Dense) G.Value {
		d, err := gpu.Upload(v)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	want, err := grads(tensor.Float64, func(v *tensor.Dense) G.Value { return v }, own)
	if err != nil {
		t.Fatal(err)
	}
	got, err := grads(tensor.Float32, upload, apart)
	if err != nil {
		t.Fatal(err)
	}
	for i := range want {
		there, err := got[i].(*device.Tensor).Download()
		if err != nil {
			t.Fatal(err)
		}
		c := opCase{name: "sum", size: 100}
		c.compare(t, fmt.Sprint("gradient ", i), floatsOf(t, there), floatsOf(t, want[i]), 4e-6)
	}
	c := elementCases(rng)[0]
	o := c.graph(t, tensor.Float32, upload)
	if err := o.y.Op().(G.ADOp).DoDiff(G.ExecutionContext{}, o.in, o.y); !errors.Is(err, la.ErrUnsupported) || !strings.Contains(fmt.Sprint(err), "use a tape machine") {
		t.Errorf("gradients of the lisp machine: %v", err)
	}
	if _, err := grads(tensor.Float32, upload, own); err == nil {
		t.Error("Gorgonia adds gradients on a GPU: the documentation may say less")
	}
}

// A loss on a GPU has rows that do not count, NaN for a target outside of the vocabulary, and refuses targets that are no int32. Its bits,
// and those of an embedding's gradient, are the same in a second run, and the embedding's those of host memory.
func TestGPUOpsLoss(t *testing.T) {
	gpu, rng := devicetest.Open(t), seeded(t)
	upload := func(v *tensor.Dense) G.Value {
		d, err := gpu.Upload(v)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	const rows, width, size = 40, 12, 9
	table, w, dy := randomInput(rng, "table", 5, width), randomInput(rng, "w", size, width), randomInput(rng, "dy", rows)
	ids, targets := make([]int32, rows), make([]int32, rows)
	for i := range ids {
		ids[i], targets[i] = int32(rng.IntN(4)), int32(rng.IntN(size))
	}
	targets[3], targets[7] = -1, size
	of := func(x any) *tensor.Dense { return tensor.New(tensor.WithShape(rows), tensor.WithBacking(x)) }
	// run returns the loss, the gradients of embedded rows, w and table, and that of the table for the gradient dx of the rows.
	run := func(targets *tensor.Dense, where func(*tensor.Dense) G.Value, dx *tensor.Dense) (values []G.Value, err error) {
		g := G.NewGraph()
		in := func(name string, v *tensor.Dense) *G.Node {
			return G.NewTensor(g, v.Dtype(), v.Dims(), G.WithShape(v.Shape()...), G.WithName(name), G.WithValue(where(v)))
		}
		e := in("table", table.tensor(tensor.Float32, false))
		x, err := Embedding(e, in("ids", of(ids)), nil)
		if err != nil {
			return nil, err
		}
		var nodes G.Nodes
		if dx != nil {
			if nodes, err = G.Backpropagate(G.Nodes{x}, G.Nodes{in("dx", dx)}, G.Nodes{e}); err != nil {
				return nil, err
			}
		} else {
			weights := in("w", w.tensor(tensor.Float32, false))
			loss, err := CrossEntropy(x, weights, nil, in("targets", targets))
			if err != nil {
				return nil, err
			}
			if nodes, err = G.Backpropagate(G.Nodes{loss}, G.Nodes{in("dy", dy.tensor(tensor.Float32, false))}, G.Nodes{x, weights, e}); err != nil {
				return nil, err
			}
			nodes = append(G.Nodes{loss}, nodes...)
		}
		values = make([]G.Value, len(nodes))
		for i := range nodes {
			G.Read(nodes[i], &values[i])
		}
		m := G.NewTapeMachine(g)
		defer m.Close()
		if err := la.Cause(m.RunAll()); err != nil {
			return nil, err
		}
		for i, v := range values {
			if d, ok := v.(*device.Tensor); ok {
				if values[i], err = d.Download(); err != nil {
					return nil, err
				}
			}
		}
		return values, nil
	}
	bits := func(v G.Value) (b []uint32) {
		for _, x := range v.Data().([]float32) {
			b = append(b, math.Float32bits(x))
		}
		return b
	}
	same := func(a, b G.Value) bool { return slices.Equal(bits(a), bits(b)) }
	got, err := run(of(targets), upload, nil)
	if err != nil {
		t.Fatal(err)
	}
	loss, dx := got[0].Data().([]float32), got[1].Data().([]float32)
	for r, l := range loss {
		outside := slices.ContainsFunc(dx[r*width:(r+1)*width], func(x float32) bool { return x != x })
		if isNaN := r == 7; (l != l) != isNaN || outside != isNaN || r == 3 && (l != 0 || slices.Max(dx[r*width:(r+1)*width]) != 0) {
			t.Errorf("row %d, target %d: loss %v, dx %v", r, targets[r], l, dx[r*width:(r+1)*width])
		}
	}
	again, err := run(of(targets), upload, nil)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.EqualFunc(got, again, same) {
		t.Error("other bits in the second run")
	}
	wide := randomInput(rng, "dx", rows, width)
	there, err := run(nil, upload, wide.tensor(tensor.Float32, false))
	if err != nil {
		t.Fatal(err)
	}
	here, err := run(nil, func(v *tensor.Dense) G.Value { return v }, wide.tensor(tensor.Float32, false))
	if err != nil {
		t.Fatal(err)
	}
	if !same(here[0], there[0]) {
		t.Errorf("the table's gradient is %v, want %v", there[0], here[0])
	}
	if _, err := run(of(make([]int, rows)), func(v *tensor.Dense) G.Value {
		if v.Dtype() == tensor.Int { // a GPU's memory has no int
			return v
		}
		return upload(v)
	}, nil); !errors.Is(err, la.ErrUnsupported) || !strings.Contains(fmt.Sprint(err), "targets of int on a GPU, want int32") {
		t.Errorf("targets that are int: %v", err)
	}
}
