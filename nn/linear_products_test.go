package nn

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/devicetest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// TestGPUOpsMixedProducts: layers of float32 with products of 16 bits, and their gradients, in a run, in a second one and in a
// recording. Each element is off by what the rounding of operands allows, and some by more than float32 is.
func TestGPUOpsMixedProducts(t *testing.T) {
	gpu, rng := devicetest.Open(t), seeded(t)
	upload := func(v *tensor.Dense) G.Value {
		d, err := gpu.Upload(v)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	for _, c := range []struct {
		of            tensor.Dtype
		rows, in, out int
		off           float64 // of an operand
	}{{la.BFloat16, 40, 48, 72, 0x1p-8}, {la.Float16, 70, 24, 40, 0x1p-11}, {la.BFloat16, 33, 136, 24, 0x1p-8}} {
		x, w, b := randomInput(rng, "x", c.rows, c.in), randomInput(rng, "w", c.out, c.in), randomInput(rng, "b", c.out)
		dy := randomInput(rng, "dy", c.rows, c.out)
		layers := opCase{name: fmt.Sprint(c), shape: dy.shape, inputs: []opInput{x, w, b}}
		layers.build = func(in []*G.Node) (*G.Node, error) {
			if in[1].Dtype() == tensor.Float64 {
				return Linear(in[0], in[1], in[2])
			}
			return Linear(in[0], in[1], in[2], WithMixedPrecision(c.of))
		}
		want, err := layers.gradientsOf(t, tensor.Float64, &dy, nil, func(run func() error) error { return run() })
		if err != nil {
			t.Fatal(err)
		}
		got, err := layers.gradientsOf(t, tensor.Float32, &dy, upload, func(run func() error) error {
			if err := errors.Join(run(), run()); err != nil {
				return err
			}
			recording, err := gpu.Record(run)
			if err != nil {
				return err
			}
			return errors.Join(recording.Replay(), recording.Close())
		})
		if err != nil {
			t.Fatal(err)
		}
		abs := func(v []float64, at int) float64 { return math.Abs(v[at]) }
		size := func(which, at int) (sum float64) { // of the magnitudes of an element's products
			switch row, column := at/c.in, at%c.in; {
			case which == 0:
				for o := range c.out {
					sum += abs(dy.x, row*c.out+o) * abs(w.x, o*c.in+column)
				}
			default: // of a weight
				for r := range c.rows {
					sum += abs(dy.x, r*c.out+row) * abs(x.x, r*c.in+column)
				}
			}
			return sum
		}
		for which, g := range got[:2] { // not b
			there, err := g.(*device.Tensor).Download()
			if err != nil {
				t.Fatal(err)
			}
			rounded, exact := 0, floatsOf(t, want[which])
			for at, v := range floatsOf(t, there) {
				bound := size(which, at)
				if math.Abs(v-exact[at]) > bound*(2*c.off+0x1p-14) {
					t.Fatalf("%v: gradient %d, element %d: %v, want %v within %v", c, which, at, v, exact[at], bound*2*c.off)
				}
				if math.Abs(v-exact[at]) > bound*0x1p-17 {
					rounded++
				}
			}
			if rounded < len(exact)/4 {
				t.Errorf("%v: gradient %d: %d of %d elements are off by more than float32 is: nothing was rounded", c, which, rounded, len(exact))
			}
		}
		o := layers.graph(t, tensor.Float32, upload)
		m := G.NewTapeMachine(o.g)
		if err := m.RunAll(); err != nil {
			t.Fatal(la.Cause(err))
		}
		there, err := o.y.Value().(*device.Tensor).Download()
		if err != nil {
			t.Fatal(err)
		}
		for at, y := range floatsOf(t, there) {
			sum, size := b.x[at%c.out], abs(b.x, at%c.out)
			for k := range c.in {
				p := x.x[at/c.out*c.in+k] * w.x[at%c.out*c.in+k]
				sum, size = sum+p, size+math.Abs(p)
			}
			if math.Abs(y-sum) > size*(2*c.off+0x1p-14) {
				t.Fatalf("%v: element %d: %v, want %v within %v", c, at, y, sum, size*2*c.off)
			}
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// WithMixedPrecision refuses types that no layer has products of. In host memory a type changes nothing.
func TestMixedProductsOptions(t *testing.T) {
	rng := seeded(t)
	g := G.NewGraph()
	node := func(name string, dtype tensor.Dtype, shape ...int) *G.Node {
		in := randomInput(rng, name, shape...)
		return G.NewTensor(g, tensor.Float32, len(shape), G.WithShape(shape...), G.WithName(name), G.WithValue(in.tensor(dtype, false)))
	}
	x, w := node("x", tensor.Float32, 40, 16), node("w", tensor.Float32, 24, 16)
	elsewhere := G.NewGraph()
	half := G.NewTensor(elsewhere, la.BFloat16, 2, G.WithShape(24, 16), G.WithName("half"))
	for _, c := range []struct {
		w    *G.Node
		opts []Option
		kind error
		text string
	}{
		{w, []Option{WithMixedPrecision(tensor.Float64)}, la.ErrDType, "WithMixedPrecision(float64), want leanattention.BFloat16"},
		{w, []Option{WithMixedPrecision(la.BFloat16, la.BFloat16)}, la.ErrOption, "with 2 types"},
		{half, []Option{WithMixedPrecision(la.BFloat16)}, la.ErrUnsupported, "with w of bfloat16"},
	} {
		x := x
		if c.w == half {
			x = G.NewTensor(elsewhere, tensor.Float32, 2, G.WithShape(40, 16), G.WithName("x"))
		}
		if _, err := Linear(x, c.w, nil, c.opts...); !errors.Is(err, c.kind) || !strings.Contains(fmt.Sprint(err), c.text) {
			t.Errorf("%v, want %s", err, c.text)
		}
	}
	if _, err := HeadLinear(x, node("heads", tensor.Float32, 8, 8), 2, WithMixedPrecision(la.BFloat16)); !errors.Is(err, la.ErrUnsupported) || !strings.Contains(err.Error(), "without a type") {
		t.Errorf("HeadLinear: %v", err)
	}
	plain, mixed := G.Must(Linear(x, w, nil)), G.Must(Linear(x, w, nil, WithMixedPrecision(la.BFloat16)))
	m := G.NewTapeMachine(g)
	defer m.Close()
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
	if p, q := floatsOf(t, plain.Value()), floatsOf(t, mixed.Value()); fmt.Sprint(p) != fmt.Sprint(q) {
		t.Error("the type changes bits in host memory")
	}
}

// TestGPUOpsMixedLoss: a loss and its gradients with products of bfloat16 differ from those without by what rounding allows, and they
// do differ.
func TestGPUOpsMixedLoss(t *testing.T) {
	gpu, rng := devicetest.Open(t), seeded(t)
	const rows, width, size = 50, 32, 77
	x, w, b, dy := randomInput(rng, "x", rows, width), randomInput(rng, "w", size, width), randomInput(rng, "b", size), randomInput(rng, "dy", rows)
	targets := make([]int32, rows)
	for i := range targets {
		targets[i] = int32(rng.IntN(size+1) - 1)
	}
	run := func(opts ...Option) (all [][]float64) {
		g := G.NewGraph()
		in := func(name string, v *tensor.Dense) *G.Node {
			there, err := gpu.Upload(v)
			if err != nil {
				t.Fatal(err)
			}
			return G.NewTensor(g, v.Dtype(), v.Dims(), G.WithShape(v.Shape()...), G.WithName(name), G.WithValue(there))
		}
		wrt := G.Nodes{in("x", x.tensor(tensor.Float32, false)), in("w", w.tensor(tensor.Float32, false)), in("b", b.tensor(tensor.Float32, false))}
		loss := G.Must(CrossEntropy(wrt[0], wrt[1], wrt[2], in("targets", tensor.New(tensor.WithBacking(targets))), opts...))
		nodes, err := G.Backpropagate(G.Nodes{loss}, G.Nodes{in("dy", dy.tensor(tensor.Float32, false))}, wrt)
		if err != nil {
			t.Fatal(err)
		}
		nodes = append(G.Nodes{loss}, nodes...)
		values := make([]G.Value, len(nodes))
		for i := range nodes {
			G.Read(nodes[i], &values[i])
		}
		m := G.NewTapeMachine(g)
		defer m.Close()
		if err := m.RunAll(); err != nil {
			t.Fatal(la.Cause(err))
		}
		for _, v := range values {
			there, err := v.(*device.Tensor).Download()
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, floatsOf(t, there))
		}
		return all
	}
	exact, got := run(), run(WithMixedPrecision(la.BFloat16))
	for i, name := range []string{"the loss", "dx", "dw", "db"} {
		size, off := 0.0, 0.0 // the sums of squares
		for at, v := range exact[i] {
			size, off = size+v*v, off+(got[i][at]-v)*(got[i][at]-v)
		}
		if off = math.Sqrt(off / size); off > 0x1p-6 || off < 0x1p-15 {
			t.Errorf("%s is off by %v of its size", name, off)
		}
	}
	g := G.NewGraph()
	node := func(name string, dtype tensor.Dtype, shape ...int) *G.Node {
		return G.NewTensor(g, dtype, len(shape), G.WithShape(shape...), G.WithName(name))
	}
	for _, c := range []struct {
		dtype tensor.Dtype
		opts  []Option
		kind  error
		text  string
	}{
		{tensor.Float64, []Option{WithMixedPrecision(la.BFloat16)}, la.ErrUnsupported, "with w of float64"},
		{tensor.Float32, []Option{WithMixedPrecision()}, la.ErrUnsupported, "WithMixedPrecision with a type"},
		{tensor.Float32, []Option{WithBatchInvariance()}, la.ErrUnsupported, "option WithBatchInvariance"},
		{tensor.Float32, []Option{WithMixedPrecision(la.Float16), WithMixedPrecision(la.Float16)}, la.ErrOption, "given twice"},
	} {
		if _, err := CrossEntropy(node("x", c.dtype, 3, 8), node("w", c.dtype, 5, 8), nil, node("targets", tensor.Int32, 3), c.opts...); !errors.Is(err, c.kind) || !strings.Contains(fmt.Sprint(err), c.text) {
			t.Errorf("%v, want %s", err, c.text)
		}
	}
}
