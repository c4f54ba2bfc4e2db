package nn

import (
	"errors"
	"math"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/weight"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// rowsLayers runs layers of x with two weights of 8 bits, on a GPU, or in host memory if it is nil.
func rowsLayers(t *testing.T, gpu *device.GPU, x, bias, gamma, residual *tensor.Dense, ws []G.Value, opts ...Option) (all [][]float32, err error) {
	t.Helper()
	g := G.NewGraph()
	node := func(v *tensor.Dense, name string) *G.Node {
		if gpu == nil {
			return G.NodeFromAny(g, v, G.WithName(name))
		}
		there, err := gpu.Upload(v)
		if err != nil {
			t.Fatal(err)
		}
		return G.NewTensor(g, v.Dtype(), v.Dims(), G.WithShape(v.Shape()...), G.WithName(name), G.WithValue(there))
	}
	nx, nb, ng, nr := node(x, "x"), node(bias, "b"), node(gamma, "gamma"), node(residual, "residual")
	var nw []*G.Node
	for i, w := range ws {
		nw = append(nw, G.NewTensor(g, w.Dtype(), 2, G.WithShape(w.Shape()...), G.WithName(string(rune('u'+i))), G.WithValue(w)))
	}
	with := func(more ...Option) []Option { return append(more, opts...) }
	ys := []*G.Node{
		G.Must(Linear(nx, nw[0], nb, with(WithResidual(nr))...)), G.Must(Linear(nx, nw[1], nil, with(WithActivation(ReLU))...)),
		G.Must(GatedLinear(nx, nw, nil, SiLU, with()...)), G.Must(Linear(nx, nw[0], nb, with(WithActivation(GELU), WithRMSNorm(ng, 1e-5))...)),
		G.Must(Linear(G.Must(RMSNorm(nx, ng, nil, 1e-5)), nw[0], nb, with(WithActivation(GELU))...)),
	}
	several, err := Linears(nx, nw, nil, with()...)
	if err != nil {
		t.Fatal(err)
	}
	ys = append(ys, several...)
	vm := G.NewTapeMachine(g)
	defer vm.Close()
	if err := la.Cause(vm.RunAll()); err != nil {
		return nil, err
	}
	for _, y := range ys {
		v := y.Value()
		if gpu != nil {
			if v, err = v.(*device.Tensor).Download(); err != nil {
				t.Fatal(err)
			}
		}
		all = append(all, append([]float32(nil), v.Data().([]float32)...))
	}
	return all, nil
}

// testQuantisedRows: from 65 rows on, a layer with the option gives the outputs that a layer without the option gives for a quantised x. For
// fewer rows, both layers give the same outputs. A GPU has the bits of the CPU for INT8, where no output is an approximation.
func testQuantisedRows(t *testing.T, gpu *device.GPU) {
	rng := seeded(t)
	const in, out = 72, 40
	for _, to := range []tensor.Dtype{tensor.Int8, la.E4M3} {
		for _, rows := range []int{weight.LeastQuantisedRows - 1, weight.LeastQuantisedRows + 5} {
			x, bias, gamma, residual := randomRows(rng, rows, in), randomRows(rng, 1, out), randomRows(rng, 1, in), randomRows(rng, rows, out)
			for _, v := range []*tensor.Dense{bias, gamma} {
				if err := v.Reshape(v.Shape()[1]); err != nil {
					t.Fatal(err)
				}
			}
			var ws, there []G.Value
			for range 2 {
				of := randomRows(rng, out, in).Data().([]float32)
				w, err := Rounded(to, out, in, func(dst []float32, from, to int) error {
					copy(dst, of[from*in:to*in])
					return nil
				})
				if err != nil {
					t.Fatal(err)
				}
				ws = append(ws, w)
				if gpu == nil {
					continue
				}
				on, free, err := gpu.UploadWeight(w)
				if err != nil {
					t.Fatal(err)
				}
				defer free()
				there = append(there, on)
			}
			got, err := rowsLayers(t, nil, x, bias, gamma, residual, ws, WithQuantisedRows())
			if err != nil {
				t.Fatal(err)
			}
			if gpu != nil {
				onGPU, err := rowsLayers(t, gpu, x, bias, gamma, residual, there, WithQuantisedRows())
				if gpu.Members()[0].Capability != 90 {
					if !errors.Is(err, la.ErrUnsupported) || !strings.Contains(err.Error(), "want 9.0") {
						t.Errorf("on a GPU without kernels: %v", err)
					}
					continue
				}
				if err != nil {
					t.Fatal(err)
				}
				for i, y := range got {
					for j, v := range y {
						off, normed, limit := math.Abs(float64(v-onGPU[i][j])), i == 3 || i == 4, 2e-3
						if to == la.E4M3 && i == 2 { // a product of two sums, of which tensor cores keep 14 bits
							limit = 5e-3
						}
						if exact := to == tensor.Int8 && rows >= weight.LeastQuantisedRows && i != 2 && !normed; exact && off != 0 || !(off <= limit*(4+math.Abs(float64(v)))) && !normed || !(off <= 0.1*(4+math.Abs(float64(v)))) {
							t.Fatalf("%v, %d rows: element %d of output %d is %v on a GPU, want %v", to, rows, j, i, onGPU[i][j], v)
						}
					}
				}
				continue
			}
			before := x.Clone().(*tensor.Dense)
			if rows >= weight.LeastQuantisedRows {
				data, f := before.Data().([]float32), weight.Int8
				if to == la.E4M3 {
					f = weight.E4M3
				}
				for row := range rows {
					quantiseTo(f, data[row*in:][:in])
				}
			}
			want, err := rowsLayers(t, nil, before, bias, gamma, residual, ws)
			if err != nil {
				t.Fatal(err)
			}
			want[3] = got[4] // the norm is quantised, not x
			for i, y := range want {
				if i == 4 && rows >= weight.LeastQuantisedRows {
					continue
				}
				for j, v := range y {
					if off := math.Abs(float64(v - got[i][j])); i == 3 && off != 0 || !(off <= 1e-4*(4+math.Abs(float64(v)))) || rows < weight.LeastQuantisedRows && off != 0 {
						t.Fatalf("%v, %d rows: element %d of output %d is %v, want %v", to, rows, j, i, got[i][j], v)
					}
				}
			}
		}
	}
}

// quantiseTo rounds a row to numbers of a format times a scale.
func quantiseTo(f weight.Format, x []float32) {
	bytes := make([]byte, len(x))
	scale := weight.QuantiseRow(f, bytes, x)
	for k, b := range bytes {
		if x[k] = float32(int8(b)) * scale; f == weight.E4M3 {
			x[k] = half.E4M3(b).Float32() * scale
		}
	}
}

func TestQuantisedRows(t *testing.T) {
	testQuantisedRows(t, nil)
	g := G.NewGraph()
	x := G.NewMatrix(g, tensor.Float32, G.WithShape(70, 32), G.WithName("x"))
	node := func(f string) *G.Node {
		w, err := Quantised{Format: f, Rows: 4, Columns: 32, Data: make([]byte, 4*34)}.Value()
		if err != nil {
			t.Fatal(err)
		}
		return weightNode(g, w)
	}
	dense := G.NewMatrix(g, tensor.Float32, G.WithShape(4, 32), G.WithName("dense"))
	w, err := Rounded(tensor.Int8, 4, 32, func([]float32, int, int) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	narrow := weightNode(g, w)
	for _, c := range []struct {
		ws   []*G.Node
		opts []Option
		says string
	}{
		{[]*G.Node{node("Q8_0")}, nil, "w of Q8_0, want int8 or e4m3"},
		{[]*G.Node{dense}, nil, "w of float32"},
		{[]*G.Node{narrow, dense}, nil, "w of float32"},
		{[]*G.Node{narrow}, []Option{WithBatchInvariance()}, "WithBatchInvariance"},
	} {
		if _, err := Linears(x, c.ws, nil, append(c.opts, WithQuantisedRows())...); !errors.Is(err, la.ErrUnsupported) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%v, want %q", err, c.says)
		}
	}
}

func TestGPUOpsQuantisedRows(t *testing.T) { testQuantisedRows(t, devicetest.Open(t)) }

// TestGPUsQuantisedRows: several GPUs that share a weight by output features have the bits of the CPU; by input features, each GPU quantises its
// columns of x.
func TestGPUsQuantisedRows(t *testing.T) {
	const members, rows, in, out = 2, 70, 64, 48
	gpus, rng := devicetest.OpenSome(t, members), seeded(t)
	x, of := randomRows(rng, rows, in), randomRows(rng, out, in).Data().([]float32)
	w, err := Rounded(tensor.Int8, out, in, func(dst []float32, from, to int) error {
		copy(dst, of[from*in:to*in])
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	layer := func(x, w G.Value, opts ...Option) ([]float32, error) {
		g := G.NewGraph()
		node := func(v G.Value, name string) *G.Node {
			return G.NewTensor(g, v.(interface{ Dtype() tensor.Dtype }).Dtype(), 2, G.WithShape(v.Shape()...), G.WithName(name), G.WithValue(v))
		}
		y := G.Must(Linear(node(x, "x"), node(w, "w"), nil, opts...))
		vm := G.NewTapeMachine(g)
		defer vm.Close()
		if err := la.Cause(vm.RunAll()); err != nil {
			return nil, err
		}
		return read(t, []*G.Node{y})[0], nil
	}
	columns := x.Clone().(*tensor.Dense)
	for i, data := 0, columns.Data().([]float32); i < rows*members; i++ {
		quantiseTo(weight.Int8, data[i*in/members:][:in/members])
	}
	for axis, c := range []struct {
		x     *tensor.Dense
		opts  []Option
		bound float64
	}{{x, []Option{WithQuantisedRows()}, 0}, {columns, nil, 1e-4}} {
		want, err := layer(c.x, w, c.opts...)
		if err != nil {
			t.Fatal(err)
		}
		there, err := gpus.UploadReplicated(x)
		if err != nil {
			t.Fatal(err)
		}
		shards, free, err := gpus.UploadWeightSharded(w, axis)
		if err != nil {
			t.Fatal(err)
		}
		got, err := layer(there, shards, WithQuantisedRows())
		if gpus.Members()[0].Capability != 90 {
			if !errors.Is(err, la.ErrUnsupported) || !strings.Contains(err.Error(), "want 9.0") {
				t.Errorf("on GPUs without kernels: %v", err)
			}
		} else if err != nil {
			t.Fatal(err)
		}
		for i, v := range got {
			if off := math.Abs(float64(v - want[i])); !(off <= c.bound*(4+math.Abs(float64(v)))) {
				t.Fatalf("w sharded on axis %d: element %d is %v, want %v", axis, i, v, want[i])
			}
		}
		if err := free(); err != nil {
			t.Fatal(err)
		}
	}
}
