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
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/weight"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// TestGPUsQuantised: several GPUs share weights of 8 and fewer bits by output features and by input features, and gather from a table that
// each of them has, with inputs on all GPUs and on the first alone. A recording has the same bits.
func TestGPUsQuantised(t *testing.T) {
	formats := quantisedFormats()
	if !reftest.Every(t) { // kernels of one kind, and of the other
		formats = []weight.Format{weight.Int4_32, weight.Q6_K}
	}
	for i, f := range formats {
		for _, rows := range []int{1, 5} {
			for _, everywhere := range []bool{false, true} {
				if reftest.Every(t) || everywhere == (rows == 5) {
					t.Run(fmt.Sprintf("%v/%d/%v", f, rows, everywhere), func(t *testing.T) { testGPUsQuantised(t, f, 2+i%2, rows, everywhere) })
				}
			}
		}
	}
}

// testGPUsQuantised tests a format with inputs on all GPUs if everywhere is set, and else on the first.
func testGPUsQuantised(t *testing.T, f weight.Format, members, rows int, everywhere bool) {
	gpus, rng := devicetest.OpenSome(t, members), seeded(t)
	width, out := max(f.Block(), 32), 9
	if f == weight.E4M3 {
		width = 128
	}
	inner := members * width
	first, firstDecoded := quantised(t, rng, f, inner, width)
	second, secondDecoded := quantised(t, rng, f, out, inner)
	x, bias, residual := randomRows(rng, rows, width), randomRows(rng, 1, inner), randomRows(rng, rows, out)
	if err := bias.Reshape(inner); err != nil {
		t.Fatal(err)
	}
	ids := tensor.New(tensor.WithBacking([]int32{2, 0, int32(inner - 1)}))
	g := G.NewGraph()
	here := quantisedLayers(t, g, x, firstDecoded, firstDecoded, secondDecoded, bias, residual, ids, everywhere)
	want := outputsOf(t, G.NewTapeMachine(g), here)
	upload := func(v *tensor.Dense) G.Value {
		to := gpus.Upload
		if everywhere {
			to = gpus.UploadReplicated
		}
		d, err := to(v)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	var frees []func() error
	on := func(v G.Value, free func() error, err error) G.Value {
		if err != nil {
			t.Fatalf("%v on %d GPUs: %v", f, members, err)
		}
		frees = append(frees, free)
		return v
	}
	table, byColumns := on(gpus.UploadWeight(first)), G.Value(nil)
	if everywhere {
		table, byColumns = on(gpus.UploadWeightReplicated(first)), on(gpus.UploadWeightSharded(second, 1))
	}
	g = G.NewGraph()
	there := quantisedLayers(t, g, upload(x), on(gpus.UploadWeightSharded(first, 0)), table, byColumns, upload(bias), upload(residual), upload(ids), everywhere)
	vm := G.NewTapeMachine(g)
	got := outputsOf(t, vm, there)
	for k := range want {
		most := 1.0 // a gate multiplies sums that may cancel
		for _, v := range want[k] {
			most = max(most, math.Abs(float64(v)))
		}
		for j, v := range want[k] {
			if off := math.Abs(float64(v - got[k][j])); !(off <= 1e-4*most) {
				t.Fatalf("%v, %d GPUs, %d rows, everywhere %v: element %d of output %d is %v, want %v", f, members, rows, everywhere, j, k, got[k][j], v)
			}
		}
	}
	vm.Reset()
	recording, err := gpus.Record(vm.RunAll)
	if err != nil {
		t.Fatal(err)
	}
	if err := recording.Replay(); err != nil {
		t.Fatal(err)
	}
	for k, y := range read(t, there) {
		if !slices.Equal(y, got[k]) {
			t.Errorf("%v: output %d of a recording is %v, and was %v", f, k, y, got[k])
		}
	}
	err = errors.Join(recording.Close(), vm.Close())
	for _, free := range frees {
		err = errors.Join(err, free())
	}
	if err != nil {
		t.Fatal(err)
	}
}

// quantisedLayers builds layers by output features, the sum of a layer by input features if there is one, and rows and products of a table.
func quantisedLayers(t *testing.T, g *G.ExprGraph, x, byRows, table, byColumns, bias, residual, ids G.Value, sums bool) (ys []*G.Node) {
	t.Helper()
	node := func(v G.Value, name string) *G.Node {
		return G.NewTensor(g, v.(interface{ Dtype() tensor.Dtype }).Dtype(), v.Shape().Dims(), G.WithShape(v.Shape()...), G.WithName(name), G.WithValue(v))
	}
	nx, nw, nb := node(x, "x"), node(byRows, "w"), node(bias, "b")
	hidden := G.Must(Linear(nx, nw, nb, WithActivation(GELU)))
	gate := G.Must(GatedLinear(nx, []*G.Node{nw, nw}, nil, SiLU))
	several, err := Linears(nx, []*G.Node{nw, nw}, nil)
	if err != nil {
		t.Fatal(err)
	}
	nt := node(table, "table")
	ys = append(several, hidden, gate, G.Must(Embedding(nt, node(ids, "ids"), nil)), G.Must(Linear(nx, nt, nil)))
	if sums {
		nv := node(byColumns, "v")
		ys = append(ys, G.Must(Linear(hidden, nv, nil, WithResidual(node(residual, "r")))), G.Must(Linear(gate, nv, nil)))
	}
	return ys
}

// outputsOf runs a graph.
func outputsOf(t *testing.T, vm G.VM, ys []*G.Node) [][]float32 {
	t.Helper()
	if err := la.Cause(vm.RunAll()); err != nil {
		t.Fatal(err)
	}
	return read(t, ys)
}

// read returns the values of nodes.
func read(t *testing.T, ys []*G.Node) (all [][]float32) {
	t.Helper()
	for _, y := range ys {
		v := y.Value()
		if d, ok := v.(*device.Tensor); ok {
			here, err := d.Download()
			if err != nil {
				t.Fatal(err)
			}
			v = here
		}
		all = append(all, slices.Clone(v.Data().([]float32)))
	}
	return all
}

// TestGPUsRefuseQuantised: columns that do not divide into whole blocks and groups are refused by name, and so are an order of columns and
// axes that a matrix lacks.
func TestGPUsRefuseQuantised(t *testing.T) {
	gpus, rng := devicetest.OpenSome(t, 2), seeded(t)
	order := make([]int32, 64)
	for i := range order {
		order[i] = int32(63 - i)
	}
	ordered, err := Quantised{Format: "Q8_0", Rows: 4, Columns: 64, Data: make([]byte, 4*2*34), Order: order}.Value()
	if err != nil {
		t.Fatal(err)
	}
	grouped, err := Quantised{Format: "e4m3", Rows: 2, Columns: 384, Data: make([]byte, 2*384), Scales: make([]float32, 6), Group: 128}.Value()
	if err != nil {
		t.Fatal(err)
	}
	of := func(f weight.Format, rows, columns int) G.Value {
		w, _ := quantised(t, rng, f, rows, columns)
		return w
	}
	for _, c := range []struct {
		w    G.Value
		axis int
		kind error
		text string
	}{
		{of(weight.Q4_K, 4, 256), 1, la.ErrUnsupported, "columns [0, 128) of Q4_K, want blocks of 256"},
		{of(weight.Q4_0, 4, 96), 1, la.ErrUnsupported, "columns [0, 48) of Q4_0, want blocks of 32"},
		{ordered, 1, la.ErrUnsupported, "in an order of columns"},
		{grouped, 1, la.ErrUnsupported, "want groups of 128"},
		{of(weight.Int8, 1, 64), 0, la.ErrShape, "axis 0"},
		{of(weight.Int8, 4, 64), 2, la.ErrShape, "axis 2"},
		{of(weight.Int8, 4, 64), -1, la.ErrShape, "axis -1"},
		{nil, 0, la.ErrUnsupported, "w is a <nil>"},
	} {
		_, _, err := gpus.UploadWeightSharded(c.w, c.axis)
		if !errors.Is(err, c.kind) || !strings.Contains(fmt.Sprint(err), c.text) || !strings.Contains(err.Error(), "UploadWeightSharded") {
			t.Errorf("axis %d: %v, want %v with %q", c.axis, err, c.kind, c.text)
		}
	}
	w, free, err := gpus.UploadWeightSharded(ordered, 0)
	if err != nil {
		t.Fatal(err)
	}
	g := G.NewGraph()
	x, err := gpus.Upload(randomRows(rng, 1, 64))
	if err != nil {
		t.Fatal(err)
	}
	y := G.Must(GatedLinear(G.NewMatrix(g, tensor.Float32, G.WithShape(1, 64), G.WithName("x"), G.WithValue(x)), []*G.Node{weightNode(g, w)}, nil, SiLU))
	vm := G.NewTapeMachine(g)
	defer vm.Close()
	if err := la.Cause(vm.RunAll()); !errors.Is(err, la.ErrUnsupported) || !strings.Contains(err.Error(), "pass two weights") {
		t.Errorf("both halves of a gate, %v: %v", y, err)
	}
	if err := errors.Join(free(), x.Free()); err != nil {
		t.Fatal(err)
	}
}
