package nn

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unsafe"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/operand"
	"gorgonia.org/leanattention/internal/weight"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// quantised returns a random weight of a format, and the same numbers as float32.
func quantised(t *testing.T, rng *rand.Rand, f weight.Format, rows, columns int) (w G.Value, decoded *tensor.Dense) {
	t.Helper()
	wide := make([]float32, rows*columns)
	var err error
	if f == weight.Int8 {
		for i := range wide {
			wide[i] = float32(rng.NormFloat64())
		}
		if w, err = Rounded(tensor.Int8, rows, columns, func(dst []float32, from, to int) error {
			if copy(dst, wide[from*columns:to*columns]) != len(dst) {
				return errors.New("other rows are wanted")
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		of := w.(*operand.Weight)
		scales := of.Scales.Data().([]float32)
		for i, q := range of.Elements.Data().([]uint8) {
			got := scales[i/columns] * float32(int8(q))
			if math.Abs(float64(got-wide[i])) > float64(scales[i/columns])*0.501 {
				t.Fatalf("element %d became %v, and was %v", i, got, wide[i])
			}
			wide[i] = got
		}
	} else if f == weight.E4M3 {
		q := Quantised{Format: f.String(), Rows: rows, Columns: columns, Data: make([]byte, len(wide)), Group: 128 * rng.IntN(2)}
		m := weight.Matrix{Group: q.Group}
		for i := range q.Data {
			if q.Data[i] = byte(rng.Uint32()); q.Data[i]&0x7f == 0x7f {
				q.Data[i]--
			}
		}
		for range rows * m.Groups(columns) {
			q.Scales = append(q.Scales, float32(rng.NormFloat64()/100))
		}
		if w, err = q.Value(); err != nil {
			t.Fatal(err)
		}
		if m, err = w.(*operand.Weight).Host("test", "w"); err != nil {
			t.Fatal(err)
		}
		for r := range rows {
			m.Row(wide[r*columns:][:columns], r, nil)
		}
	} else if f.Block() == 1 {
		for i := range wide {
			wide[i] = float32(rng.NormFloat64())
		}
	} else {
		data := make([]byte, f.Size(rows*columns))
		for i := range data {
			if data[i] = byte(rng.Uint32()); i%2 == 1 {
				data[i] &= 0x3b // scales are less than 1
			}
		}
		if strings.HasPrefix(f.String(), "int4") {
			for at := 0; at < len(data); at += f.Bytes() {
				data[at+1] &= 0x3b
				data[at+2] %= weight.MaxInt4Zero + 1
			}
		}
		weight.Decode(f, wide, unsafe.Pointer(&data[0]))
		if w, err = (Quantised{Format: f.String(), Rows: rows, Columns: columns, Data: data}).Value(); err != nil {
			t.Fatal(err)
		}
	}
	return w, tensor.New(tensor.WithShape(rows, columns), tensor.WithBacking(wide))
}

func quantisedFormats() (all []weight.Format) {
	for f := range weight.Format(weight.Formats) {
		if f.HasScales() || f.Block() > 1 {
			all = append(all, f)
		}
	}
	return all
}

// layersOfWeight builds one of each op that takes a weight, and runs them.
func layersOfWeight(t *testing.T, x *tensor.Dense, w G.Value, opts ...Option) (all [][]float32) {
	t.Helper()
	g := G.NewGraph()
	nx, nw := G.NodeFromAny(g, x, G.WithName("x")), weightNode(g, w)
	ids := G.NodeFromAny(g, tensor.New(tensor.WithBacking([]int{3, 0, 3})), G.WithName("ids"))
	gate := func(ws ...*G.Node) *G.Node { return G.Must(GatedLinear(nx, ws, nil, SiLU, opts...)) }
	ys := []*G.Node{G.Must(Linear(nx, nw, nil, opts...)), gate(nw), gate(nw, nw), G.Must(Embedding(nw, ids, nil)), G.Must(HeadLinear(nx, nw, 1, opts...))}
	several, err := Linears(nx, []*G.Node{nw, nw}, nil, opts...)
	if err != nil {
		t.Fatal(err)
	}
	ys = append(ys, several...)
	vm := G.NewTapeMachine(g)
	defer vm.Close()
	if err := vm.RunAll(); err != nil {
		t.Fatalf("weights of %v: %v", w.(interface{ Dtype() tensor.Dtype }).Dtype(), err)
	}
	for _, y := range ys {
		all = append(all, slices.Clone(dense.Elements[float32](y.Value().(*tensor.Dense))))
	}
	return all
}

func weightNode(g *G.ExprGraph, w G.Value) *G.Node {
	return G.NewTensor(g, w.(interface{ Dtype() tensor.Dtype }).Dtype(), 2, G.WithShape(w.Shape()...), G.WithName("w"), G.WithValue(w))
}

// TestQuantisedWeights: all ops that take weights compute with the numbers that the blocks mean, and in mixed precision with an x of 8
// bits.
func TestQuantisedWeights(t *testing.T) {
	rng := seeded(t)
	for _, f := range quantisedFormats() {
		rows, columns := 6, 2*max(128, f.Block())
		w, decoded := quantised(t, rng, f, rows, columns)
		x := tensor.New(tensor.WithShape(5, columns), tensor.Of(tensor.Float32))
		for i := range x.Data().([]float32) {
			x.Data().([]float32)[i] = float32(rng.NormFloat64())
		}
		want := layersOfWeight(t, x, decoded)
		for i, y := range layersOfWeight(t, x, w) {
			for j, v := range y {
				// INT8's scale multiplies a sum of products, here each product.
				if f != weight.Int8 && v != want[i][j] || math.Abs(float64(v-want[i][j])) > 1e-4*(1+math.Abs(float64(want[i][j]))) {
					t.Fatalf("%v: element %d of output %d is %v, want %v", f, j, i, v, want[i][j])
				}
			}
		}
		mixed := layersOfWeight(t, x, w, WithMixedPrecision())
		for i, y := range mixed {
			if i == 1 || i == 2 { // gated units: those of both halves of the first output, and of the whole output twice
				for j, v := range y {
					n := rows / (3 - i)
					gate, up := mixed[0][j/n*rows+j%n], mixed[0][j/n*rows+rows-n+j%n]
					if want := float64(gate) / (1 + math.Exp(-float64(gate))) * float64(up); math.Abs(float64(v)-want) > 1e-4*(1+math.Abs(want)) {
						t.Fatalf("%v in mixed precision: element %d of output %d is %v, want %v", f, j, i, v, want)
					}
				}
				continue
			}
			off, size := 0.0, 0.0
			for j, v := range y {
				off, size = off+math.Abs(float64(v-want[i][j])), size+math.Abs(float64(want[i][j]))
			}
			if exact := i == 3 || f == weight.E4M3; off > 0.2*size || exact != (off == 0) {
				t.Errorf("%v in mixed precision: output %d is off by %v of %v", f, i, off, size)
			}
		}
	}
}

// TestOrderOfColumns: a weight whose columns have an order has the results of the same columns in order.
func TestOrderOfColumns(t *testing.T) {
	rng := seeded(t)
	for _, f := range quantisedFormats() {
		if f.Block() == 1 {
			continue
		}
		rows, columns := 6, 2*f.Block()
		w, decoded := quantised(t, rng, f, rows, columns)
		order := make([]int32, columns)
		moved := make([]float32, rows*columns)
		for i, column := range rng.Perm(columns) {
			order[i] = int32(column)
			for r := range rows {
				moved[r*columns+column] = decoded.Float32s()[r*columns+i]
			}
		}
		q := w.(*operand.Weight)
		ordered, err := Quantised{Format: f.String(), Rows: rows, Columns: columns, Data: q.Elements.Data().([]byte), Order: order}.Value()
		if err != nil {
			t.Fatal(err)
		}
		x := tensor.New(tensor.WithShape(5, columns), tensor.Of(tensor.Float32))
		for i := range x.Float32s() {
			x.Float32s()[i] = float32(rng.NormFloat64())
		}
		want := layersOfWeight(t, x, tensor.New(tensor.WithShape(rows, columns), tensor.WithBacking(moved)))
		for i, y := range layersOfWeight(t, x, ordered) {
			size := 1.0
			for _, v := range want[i] {
				size = max(size, math.Abs(float64(v)))
			}
			for j, v := range y {
				if math.Abs(float64(v-want[i][j])) > 1e-4*size {
					t.Fatalf("%v: element %d of output %d is %v, want %v", f, j, i, v, want[i][j])
				}
			}
		}
	}
}

// TestWeightsOfSeveralFormats: layers of one x have weights of several formats if one of these is for CPUs alone. Each output is as with
// one format.
func TestWeightsOfSeveralFormats(t *testing.T) {
	rng := seeded(t)
	x := tensor.New(tensor.WithShape(3, 64), tensor.Of(tensor.Float32))
	for i := range x.Data().([]float32) {
		x.Data().([]float32)[i] = float32(rng.NormFloat64())
	}
	g := G.NewGraph()
	nx := G.NodeFromAny(g, x, G.WithName("x"))
	var ws []*G.Node
	for i, f := range []weight.Format{weight.Q4_0, weight.Int8, weight.Float32} {
		w, decoded := quantised(t, rng, f, 5, 64)
		if f == weight.Float32 {
			w = decoded
		}
		ws = append(ws, G.NewTensor(g, w.(interface{ Dtype() tensor.Dtype }).Dtype(), 2, G.WithShape(5, 64), G.WithName(fmt.Sprint("w", i)), G.WithValue(w)))
	}
	for _, opts := range [][]Option{nil, {WithMixedPrecision()}} {
		ys, err := Linears(nx, ws, nil, opts...)
		if err != nil {
			t.Fatal(err)
		}
		gate := G.Must(GatedLinear(nx, ws[1:], nil, SiLU, opts...))
		var alone []*G.Node
		for _, w := range ws {
			alone = append(alone, G.Must(Linear(nx, w, nil, opts...)))
		}
		gated := G.Must(G.HadamardProd(G.Must(Activate(alone[1], SiLU)), alone[2]))
		vm := G.NewTapeMachine(g)
		if err := errors.Join(vm.RunAll(), vm.Close()); err != nil {
			t.Fatal(err)
		}
		for i, y := range append(ys, gate) {
			want := append(alone, gated)[i].Value().(*tensor.Dense).Float32s()
			for j, v := range y.Value().(*tensor.Dense).Float32s() {
				if math.Abs(float64(v-want[j])) > 1e-6*(1+math.Abs(float64(want[j]))) {
					t.Fatalf("element %d of output %d is %v, want %v", j, i, v, want[j])
				}
			}
		}
		later := linear{x: tensor.Float32, w: weight.Float32, rest: [mostLayers - 1]weight.Format{weight.Q4_0}, parts: 2, joined: true}
		if _, err := opOf(later).SymDiff(nil, nil, nil); !errors.Is(err, la.ErrUnsupported) {
			t.Errorf("a gradient: %v", err)
		}
	}
	f16 := G.NewMatrix(g, la.Float16, G.WithShape(5, 64), G.WithName("f16"))
	if _, err := Linears(nx, []*G.Node{ws[2], f16}, nil); !errors.Is(err, la.ErrDType) {
		t.Errorf("float32 and float16: %v", err)
	}
}

// TestQuantisedRefused: a gradient, a GPU and x of float64 are errors that name the format.
func TestQuantisedRefused(t *testing.T) {
	rng := seeded(t)
	for _, f := range quantisedFormats() {
		w, _ := quantised(t, rng, f, 4, 2*max(32, f.Block()))
		g := G.NewGraph()
		node := weightNode(g, w)
		x := G.NewMatrix(g, tensor.Float64, G.WithShape(2, w.Shape()[1]), G.WithName("x"))
		if _, err := Linear(x, node, nil); !errors.Is(err, la.ErrDType) {
			t.Errorf("%v with x of float64: %v", f, err)
		}
		for name, err := range map[string]error{
			"a layer's gradient": func() error {
				_, err := opOf(linear{parts: 1, x: tensor.Float32, w: f}).SymDiff(nil, nil, nil)
				return err
			}(),
			"a table's gradient": func() error { _, err := opOf(embedding{table: f}).SymDiff(nil, nil, nil); return err }(),
			"a GPU":              (&argument{name: "w", weights: true, dtype: operand.WeightType(f)}).checkGPU("Linear"),
		} {
			if !errors.Is(err, la.ErrUnsupported) || !strings.Contains(err.Error(), f.String()) {
				t.Errorf("%v, %s: %v", f, name, err)
			}
		}
		if got := fmt.Sprint(w); !strings.Contains(got, f.String()) {
			t.Errorf("%v is printed as %q", f, got)
		}
	}
}

// TestQuantisedWrong: wrong calls are errors of their kinds.
func TestQuantisedWrong(t *testing.T) {
	for name, c := range map[string]struct {
		format        string
		bytes         int
		rows, columns int
		want          error
	}{
		"Q3_K":            {"Q3_K", 110, 1, 256, la.ErrUnsupported},
		"not in blocks":   {"float32", 128, 1, 32, la.ErrUnsupported},
		"short":           {"Q4_0", 35, 2, 32, la.ErrShape},
		"long":            {"Q4_0", 37, 2, 32, la.ErrShape},
		"part of a block": {"Q8_0", 34, 1, 33, la.ErrShape},
		"no rows":         {"Q8_0", 0, 0, 32, la.ErrShape},
		"less than none":  {"Q8_0", 34, -1, -32, la.ErrShape},
		"too many":        {"Q8_0", 0, math.MaxInt / 16, 32 * 1024, la.ErrShape},
	} {
		if w, err := (Quantised{Format: c.format, Rows: c.rows, Columns: c.columns, Data: make([]byte, c.bytes)}).Value(); w != nil || !errors.Is(err, c.want) {
			t.Errorf("%s: %v, %v", name, w, err)
		}
	}
	if w, err := (Quantised{Format: "int4_32", Rows: 1, Columns: 64, Data: append(make([]byte, 21), make([]byte, 17)...)}).Value(); w == nil || err != nil {
		t.Errorf("zeros of 0: %v", err)
	}
	high := make([]byte, 4*19)
	high[3*19+2] = 17
	order := []int32{1, 0}
	for name, c := range map[string]struct {
		q    Quantised
		want error
		text string
	}{
		"zero":            {Quantised{Format: "int4_32", Rows: 2, Columns: 64, Data: high}, la.ErrOption, "block 1 of row 1 has the zero 17, want at most 16"},
		"short order":     {Quantised{Format: "Q4_0", Rows: 1, Columns: 32, Data: make([]byte, 18), Order: order}, la.ErrShape, "Order has 2 columns, want 32"},
		"twice in order":  {Quantised{Format: "Q4_0", Rows: 1, Columns: 32, Data: make([]byte, 18), Order: make([]int32, 32)}, la.ErrOption, "Order[1] is 0"},
		"NaN":             {Quantised{Format: "e4m3", Rows: 2, Columns: 3, Data: []byte{0, 1, 2, 3, 0xff, 0x7f}, Scales: make([]float32, 2)}, la.ErrOption, "element 1 of row 1 is NaN"},
		"infinite":        {Quantised{Format: "e4m3", Rows: 1, Columns: 1, Data: []byte{0}, Scales: []float32{1e36}}, la.ErrOption, "Scales[0] is 1e+36"},
		"no scale":        {Quantised{Format: "e4m3", Rows: 2, Columns: 1, Data: []byte{0, 0}, Scales: []float32{1}}, la.ErrShape, "1 Scales, want 2"},
		"few scales":      {Quantised{Format: "e4m3", Rows: 1, Columns: 129, Group: 128, Data: make([]byte, 129), Scales: []float32{1}}, la.ErrShape, "1 Scales, want 2"},
		"odd group":       {Quantised{Format: "e4m3", Rows: 1, Columns: 64, Group: 64, Data: make([]byte, 64), Scales: []float32{1}}, la.ErrUnsupported, "Group is 64"},
		"ordered e4m3":    {Quantised{Format: "e4m3", Rows: 1, Columns: 2, Data: []byte{0, 0}, Scales: []float32{1}, Order: order}, la.ErrUnsupported, "an Order of columns of e4m3"},
		"scaled blocks":   {Quantised{Format: "Q4_0", Rows: 1, Columns: 32, Data: make([]byte, 18), Scales: []float32{1}}, la.ErrUnsupported, "1 Scales and a Group of 0 of Q4_0"},
		"behind the last": {Quantised{Format: "Q4_0", Rows: 1, Columns: 32, Data: make([]byte, 18), Order: slices.Repeat([]int32{32}, 32)}, la.ErrOption, "Order[0] is 32"},
	} {
		if w, err := c.q.Value(); w != nil || !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v, %v", name, w, err)
		}
	}
	for _, to := range []tensor.Dtype{tensor.Int8, la.E4M3, Int4} {
		roundedWrong(t, to)
	}
	if w, err := Rounded(tensor.Uint8, 2, 64, nil); w != nil || !errors.Is(err, la.ErrUnsupported) {
		t.Errorf("bytes: %v, %v", w, err)
	}
	if w, err := Rounded(Int4, 2, 63, nil); w != nil || !errors.Is(err, la.ErrShape) {
		t.Errorf("part of a group: %v, %v", w, err)
	}
}

func roundedWrong(t *testing.T, to tensor.Dtype) {
	read := func(dst []float32, from, to int) error { return nil }
	for _, shape := range [][2]int{{0, 64}, {64, 0}, {-1, -64}, {math.MaxInt, 64}} {
		if w, err := Rounded(to, shape[0], shape[1], read); w != nil || !errors.Is(err, la.ErrShape) {
			t.Errorf("%v of %v: %v, %v", to, shape, w, err)
		}
	}
	own := errors.New("no file")
	if w, err := Rounded(to, 2, 64, func([]float32, int, int) error { return own }); w != nil || !errors.Is(err, own) {
		t.Errorf("%v of rows that cannot be read: %v, %v", to, w, err)
	}
	if w, err := Rounded(to, 2, 64, func(dst []float32, _, _ int) error { dst[65] = float32(math.NaN()); return nil }); w != nil || !errors.Is(err, la.ErrOption) || !strings.Contains(err.Error(), "row 1") {
		t.Errorf("%v of NaN: %v, %v", to, w, err)
	}
}
