package nn

import (
	"fmt"
	"math"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// TestGPUOpsRounded: gradients of layers with products of 16 bits, of one layer and several, behind norms and before activations, with few
// and with hundreds of rows, are those of float64 but for the rounding of operands, the same bits in a second run and in a recording. Those
// of biases are as exact as float32.
func TestGPUOpsRounded(t *testing.T) {
	gpu, rng := devicetest.Open(t), reftest.Rand(t)
	for i, c := range []struct {
		rows, in int
		outs     []int
		norm     string
		bias     bool
		f        Activation
		apart    bool // the activation is a node
	}{
		{150, 24, []int{136}, "", true, 0, false}, {141, 16, []int{136, 144}, "layer", true, 0, false}, {515, 8, []int{136}, "layer", true, GELUTanh, true},
		{133, 24, []int{136}, "rms", true, SiLU, false}, {40, 24, []int{16, 8, 24}, "layer", true, 0, false}, {150, 12, []int{20}, "rms", true, GELU, true},
	} {
		data := map[string][]float64{}
		run := func(dtype tensor.Dtype, where func(*tensor.Dense) G.Value, opts []Option, record bool) (all []map[string]G.Value) {
			g := G.NewGraph()
			var wrt G.Nodes
			input := func(name string, shape ...int) *G.Node {
				size := tensor.Shape(shape).TotalSize()
				for len(data[name]) < size {
					data[name] = append(data[name], float64(float32(rng.NormFloat64())))
				}
				in := opInput{name: name, shape: shape, x: data[name]}
				n := G.NewTensor(g, dtype, len(shape), G.WithShape(shape...), G.WithName(name), G.WithValue(where(in.tensor(dtype, false))))
				if name[0] != 'd' {
					wrt = append(wrt, n)
				}
				return n
			}
			x := input("x", c.rows, c.in)
			switch c.norm {
			case "layer":
				opts = append(opts, WithNorm(input("gamma", c.in), input("beta", c.in), 1e-5))
			case "rms":
				opts = append(opts, WithRMSNorm(input("gamma", c.in), 1e-5))
			}
			var ws, bs, dys G.Nodes
			for k, out := range c.outs {
				ws = append(ws, input(fmt.Sprint("w", k), out, c.in))
				if c.bias {
					bs = append(bs, input(fmt.Sprint("b", k), out))
				}
				dys = append(dys, input(fmt.Sprint("dy", k), c.rows, out))
			}
			var ys G.Nodes
			var err error
			if len(c.outs) > 1 {
				ys, err = Linears(x, ws, bs, opts...)
			} else {
				if c.f != 0 && !c.apart {
					opts = append(opts, WithActivation(c.f))
				}
				ys = make(G.Nodes, 1)
				ys[0], err = Linear(x, ws[0], append(bs, nil)[0], opts...)
			}
			noErrors(t, err)
			if c.apart {
				ys[0] = G.Must(Activate(ys[0], c.f))
			}
			grads, err := Backpropagate(ys, dys, wrt)
			noErrors(t, err)
			m := G.NewTapeMachine(g)
			run := func() error { m.Reset(); return la.Cause(m.RunAll()) }
			read := func() {
				values := map[string]G.Value{}
				for k, n := range wrt {
					values[n.Name()] = grads[k].Value()
					if d, ok := values[n.Name()].(*device.Tensor); ok {
						there, err := d.Download()
						noErrors(t, err)
						values[n.Name()] = there
					}
				}
				all = append(all, values)
			}
			noErrors(t, run())
			read()
			if record {
				recording, err := gpu.Record(run)
				noErrors(t, err, recording.Replay())
				read()
				noErrors(t, recording.Close())
			}
			noErrors(t, m.Close())
			return all
		}
		upload := func(x *tensor.Dense) G.Value {
			d, err := gpu.Upload(x)
			noErrors(t, err)
			return d
		}
		mixed, host := []Option{WithMixedPrecision(la.BFloat16)}, func(x *tensor.Dense) G.Value { return x }
		want, here := run(tensor.Float64, host, nil, false)[0], run(tensor.Float32, host, mixed, false)[0]
		got := run(tensor.Float32, upload, mixed, true)
		for name := range want {
			exact, rounded, second, here := floatsOf(t, want[name]), floatsOf(t, got[0][name]), floatsOf(t, got[1][name]), floatsOf(t, here[name])
			off, offHere, size := 0.0, 0.0, 0.0
			for k, x := range exact {
				if rounded[k] != second[k] {
					t.Fatalf("case %d, %s: element %d is %v, and then %v", i, name, k, rounded[k], second[k])
				}
				off, offHere, size = off+(rounded[k]-x)*(rounded[k]-x), offHere+(here[k]-x)*(here[k]-x), size+x*x
			}
			off, offHere = math.Sqrt(off/size), math.Sqrt(offHere/size)
			most, least := 0.01, 0x1p-16
			if name == "gamma" || name == "beta" { // sums of few elements, which may cancel
				most = 0.05
			}
			if name[0] == 'b' && name != "beta" { // before activations, what is rounded shows
				least = 0
				if c.f == 0 {
					most = 1e-5
				}
			}
			if c.in%8 != 0 || c.rows < 129 { // nothing needs to be rounded
				least = 0
			}
			if !(off <= most && off >= least) {
				t.Errorf("case %d: the gradient of %s is off by %v of its size", i, name, off)
			}
			if !(offHere <= 1e-5) {
				t.Errorf("case %d: in host memory the gradient of %s is off by %v of its size", i, name, offHere)
			}
		}
	}
}

// TestGPUOpsRoundedHeads: gradients through layers whose outputs are converted and split into heads are those of float64, where kernels for
// hundreds of rows round the gradients of all layers as one operand, and where there are no such kernels.
func TestGPUOpsRoundedHeads(t *testing.T) {
	gpu, rng := devicetest.Open(t), reftest.Rand(t)
	for _, c := range []struct{ batch, tokens, in, heads, dim int }{{2, 80, 24, 9, 16}, {3, 5, 16, 2, 8}} {
		rows, out := c.batch*c.tokens, c.heads*c.dim
		data := map[string]opInput{}
		run := func(dtype tensor.Dtype, where func(*tensor.Dense) G.Value, mixed bool) (all []G.Value) {
			g := G.NewGraph()
			var wrt G.Nodes
			input := func(name string, shape ...int) *G.Node {
				if _, ok := data[name]; !ok {
					in := randomInput(rng, name, shape...)
					for i, x := range in.x { // bfloat16
						in.x[i] = float64(math.Float32frombits(math.Float32bits(float32(x)) &^ 0xffff))
					}
					data[name] = in
				}
				in := data[name]
				n := G.NewTensor(g, dtype, len(shape), G.WithShape(shape...), G.WithName(name), G.WithValue(where(in.tensor(dtype, false))))
				if name[0] != 'd' {
					wrt = append(wrt, n)
				}
				return n
			}
			opts := []Option{WithNorm(input("gamma", c.in), input("beta", c.in), 1e-5)}
			if mixed {
				opts = append(opts, WithMixedPrecision(la.BFloat16))
			}
			x := input("x", rows, c.in)
			var ws, bs, dys G.Nodes
			for k := range 3 {
				ws, bs = append(ws, input(fmt.Sprint("w", k), out, c.in)), append(bs, input(fmt.Sprint("b", k), out))
				dy := input(fmt.Sprint("dy", k), c.batch, c.heads, c.tokens, c.dim)
				if mixed {
					dy = G.Must(Convert(dy, la.BFloat16))
				}
				dys = append(dys, dy)
			}
			ys, err := Linears(x, ws, bs, opts...)
			noErrors(t, err)
			for k, y := range ys {
				if mixed {
					y = G.Must(Convert(y, la.BFloat16))
				}
				ys[k] = G.Must(SplitHeads(G.Must(Reshape(y, c.batch, c.tokens, out)), c.heads))
			}
			grads, err := Backpropagate(ys, dys, wrt)
			noErrors(t, err)
			joined := 0
			for _, n := range g.AllNodes() {
				if r, ok := nodeRule[roundedDY](n); ok && r.heads {
					joined++
				}
			}
			if mixed != (joined == 1) {
				t.Errorf("%d nodes round gradients of heads", joined)
			}
			return gradientsOfRun(t, grads)
		}
		want := run(tensor.Float64, func(v *tensor.Dense) G.Value { return v }, false)
		for _, there := range []bool{true, false} { // in host memory, too
			where := uploads(t, gpu)
			if !there {
				where = func(v *tensor.Dense) G.Value { return v }
			}
			for i, v := range run(tensor.Float32, where, true) {
				if there {
					v = downloaded(t, v)
				}
				got, want, most := floatsOf(t, v), floatsOf(t, want[i]), 0.0
				for _, w := range want {
					most = max(most, math.Abs(w))
				}
				for j, w := range want {
					if !(math.Abs(got[j]-w) <= 0.04*most) {
						t.Fatalf("%+v, on a GPU %t: gradient %d[%d] is %v, want %v of up to %v", c, there, i, j, got[j], w, most)
					}
				}
			}
		}
	}
}
