package nn

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/weight"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

var weightTypes = []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16}

// tableTypes are the types of an Embedding's table.
var tableTypes = append(slices.Clone(weightTypes), tensor.Float64)

// stored is a tensor of type dt with the numbers of w, which are rounded to it.
func stored(w []float32, dt tensor.Dtype, shape ...int) *tensor.Dense {
	var backing any = w
	switch dt {
	case la.Float16:
		h := make([]la.F16, len(w))
		half.EncodeFloat16(h, w)
		half.DecodeFloat16(w, h)
		backing = h
	case la.BFloat16:
		h := make([]la.BF16, len(w))
		half.EncodeBFloat16(h, w)
		half.DecodeBFloat16(w, h)
		backing = h
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(backing))
}

// lookup is a graph with one Embedding whose inputs can be filled anew.
type lookup struct {
	vocabulary, width int
	table             []float64 // as gathered from
	ids               []int
	residual          []float64 // nil if absent
	g                 *G.ExprGraph
	nodes             G.Nodes // table, ids, residual; nil if absent
	y                 *G.Node
	result            G.Value
}

func newLookup(t testing.TB, rng *rand.Rand, vocabulary, width, n int, dt tensor.Dtype, residual bool) *lookup {
	t.Helper()
	l := &lookup{vocabulary: vocabulary, width: width, g: G.NewGraph(), nodes: make(G.Nodes, 3), ids: make([]int, n)}
	l.table = make([]float64, vocabulary*width)
	fill(rng, l.table, 0, 1)
	for i := range l.table { // some that are only just there, and some that are not numbers
		switch rng.IntN(50) {
		case 0:
			l.table[i] = math.NaN()
		case 1:
			l.table[i] = math.Inf(1 - 2*rng.IntN(2))
		case 2:
			l.table[i] *= 0x1p-20 // below float16's normal numbers
		}
	}
	table, sum := tensor.New(tensor.WithShape(vocabulary, width), tensor.WithBacking(l.table)), tensor.Float64
	if dt != tensor.Float64 {
		x := floats32(l.table)
		table, sum = stored(x, dt, vocabulary, width), tensor.Float32 // rounds x
		l.table = toFloat64(x)
	}
	l.nodes[0] = G.NewMatrix(l.g, dt, G.WithShape(vocabulary, width), G.WithName("table"), G.WithValue(table))
	l.nodes[1] = G.NewVector(l.g, tensor.Int, G.WithShape(n), G.WithName("ids"),
		G.WithValue(tensor.New(tensor.WithShape(n), tensor.WithBacking(l.ids))))
	if residual {
		l.residual = make([]float64, n*width)
		l.nodes[2] = G.NewMatrix(l.g, sum, G.WithShape(n, width), G.WithName("residual"),
			G.WithValue(tensor.New(tensor.WithShape(n, width), tensor.Of(sum))))
	}
	var err error
	if l.y, err = Embedding(l.nodes[0], l.nodes[1], l.nodes[2]); err != nil {
		t.Fatal(err)
	}
	if !l.y.Shape().Eq(tensor.Shape{n, width}) || l.y.Dtype() != sum {
		t.Fatalf("node of shape %v and type %v", l.y.Shape(), l.y.Dtype())
	}
	G.Read(l.y, &l.result)
	return l
}

func floats32(x []float64) []float32 {
	y := make([]float32, len(x))
	for i, v := range x {
		y[i] = float32(v)
	}
	return y
}

// choose takes other ids, the first and the last row among them, and residuals.
func (l *lookup) choose(rng *rand.Rand) {
	for i := range l.ids {
		l.ids[i] = rng.IntN(l.vocabulary)
	}
	l.ids[rng.IntN(len(l.ids))] = 0
	l.ids[rng.IntN(len(l.ids))] = l.vocabulary - 1
	if l.residual == nil {
		return
	}
	fill(rng, l.residual, 0, 1)
	switch to := l.nodes[2].Value().Data().(type) {
	case []float64:
		copy(to, l.residual)
	case []float32:
		copy(to, floats32(l.residual))
		copy(l.residual, toFloat64(to))
	}
}

// check compares bit for bit: a gathered number is exact, and the sum with a
// residual is the one sum that there is, rounded once.
func (l *lookup) check(t *testing.T, v G.Value) {
	t.Helper()
	y := floatsOf(t, v)
	if len(y) != len(l.ids)*l.width {
		t.Fatalf("%d elements, want %d x %d", len(y), len(l.ids), l.width)
	}
	for i, got := range y {
		want := l.table[l.ids[i/l.width]*l.width+i%l.width]
		if l.residual != nil {
			if want += l.residual[i]; v.Dtype() == tensor.Float32 {
				want = float64(float32(want))
			}
		}
		if math.Float64bits(got) != math.Float64bits(want) && (got == got || want == want) {
			t.Fatalf("%d x %d: y[%d,%d] of id %d is %v, want %v", l.vocabulary, l.width, i/l.width, i%l.width, l.ids[i/l.width], got, want)
		}
	}
}

func TestEmbeddingReference(t *testing.T) {
	rng := seeded(t)
	for _, dt := range tableTypes {
		for _, size := range [][3]int{{1, 1, 1}, {5, 7, 3}, {61, 33, 1}, {61, 32, 130}, {300, 1000, 70}} {
			for _, residual := range []bool{false, true} {
				l := newLookup(t, rng, size[0], size[1], size[2], dt, residual)
				vm := G.NewTapeMachine(l.g)
				for range 3 {
					l.choose(rng)
					if err := vm.RunAll(); err != nil {
						t.Fatal(err)
					}
					l.check(t, l.result)
					vm.Reset()
				}
				vm.Close()
				lisp := G.NewLispMachine(l.g, G.ExecuteFwdOnly())
				if err := lisp.RunAll(); err != nil {
					t.Fatal(err)
				}
				l.check(t, l.y.Value())
				lisp.Close()
			}
		}
	}
}

// TestEmbeddingViews: a table and a residual that are transposes, and ids that
// are a column of a matrix, are read as what they are.
func TestEmbeddingViews(t *testing.T) {
	rng := seeded(t)
	table, residual := make([]float32, 6*10), make([]float32, 4*6)
	fill(rng, table, 0, 1)
	fill(rng, residual, 0, 1)
	turned := tensor.New(tensor.WithShape(6, 10), tensor.WithBacking(table))
	turnedResidual := tensor.New(tensor.WithShape(6, 4), tensor.WithBacking(residual))
	if err := errors.Join(turned.T(), turnedResidual.T()); err != nil {
		t.Fatal(err)
	}
	ids := tensor.New(tensor.WithShape(4, 2), tensor.WithBacking([]int{3, -1, 0, -1, 9, -1, 3, -1}))
	column, err := ids.Slice(nil, tensor.S(0))
	if err != nil {
		t.Fatal(err)
	}
	y, err := opOf(embedding{table: weight.Float32, ids: tensor.Int, residual: true}).Do(turned, column.(*tensor.Dense), turnedResidual)
	if err != nil {
		t.Fatal(err)
	}
	for i, got := range y.Data().([]float32) {
		row, col := i/6, i%6
		if want := table[col*10+[]int{3, 0, 9, 3}[row]] + residual[col*4+row]; got != want {
			t.Fatalf("element %d is %v, want %v", i, got, want)
		}
	}
}

// TestEmbeddingInPlaceNeighbours: nodes that Gorgonia runs in place behind an
// Embedding harm neither its inputs nor a second reader.
func TestEmbeddingInPlaceNeighbours(t *testing.T) {
	rng := seeded(t)
	for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		l := newLookup(t, rng, 9, 5, 4, dt, true)
		var got G.Value
		G.Read(G.Must(G.Add(G.Must(G.Add(l.y, l.y)), l.nodes[2])), &got)
		before, err := G.CloneValue(l.nodes[0].Value())
		if err != nil {
			t.Fatal(err)
		}
		vm := G.NewTapeMachine(l.g)
		defer vm.Close()
		for range 3 {
			l.choose(rng)
			if err := vm.RunAll(); err != nil {
				t.Fatal(err)
			}
			l.check(t, l.result)
			y := floatsOf(t, l.result)
			for i, v := range floatsOf(t, got) {
				want := y[i] + y[i] + l.residual[i]
				if dt == tensor.Float32 {
					want = float64(float32(want))
				}
				if v != want && (v == v || want == want) {
					t.Fatalf("%v: element %d is %v, want %v", dt, i, v, want)
				}
			}
			vm.Reset()
		}
		was := floatsOf(t, before)
		for i, v := range floatsOf(t, l.nodes[0].Value()) {
			if math.Float64bits(v) != math.Float64bits(was[i]) {
				t.Fatalf("%v: the table was written: element %d", dt, i)
			}
		}
	}
}

// TestEmbeddingHash: Gorgonia merges nodes of equal hash and equal children.
func TestEmbeddingHash(t *testing.T) {
	seen := map[uint32]node{}
	for f := range weight.Format(weight.Formats) {
		for _, residual := range []bool{false, true} {
			op := opOf(embedding{table: f, ids: tensor.Int, residual: residual})
			if other, ok := seen[op.Hashcode()]; ok {
				t.Errorf("%v and %v have the same hash", op, other)
			}
			seen[op.Hashcode()] = op
		}
	}
}

func TestEmbeddingWrongArguments(t *testing.T) {
	g, other := G.NewGraph(), G.NewGraph()
	input := func(g *G.ExprGraph, dt tensor.Dtype, shape ...int) *G.Node {
		return G.NewTensor(g, dt, len(shape), G.WithShape(shape...), G.WithName(fmt.Sprint(dt, shape)))
	}
	f32 := tensor.Float32
	table, ids := input(g, f32, 5, 3), input(g, tensor.Int, 2)
	for _, c := range []struct {
		name                 string
		table, ids, residual *G.Node
		want                 error
	}{
		{"nil table", nil, ids, nil, la.ErrGraph},
		{"nil ids", table, nil, nil, la.ErrGraph},
		{"table of rank 1", input(g, f32, 5), ids, nil, la.ErrShape},
		{"table of rank 3", input(g, f32, 5, 3, 1), ids, nil, la.ErrShape},
		{"table of int", input(g, tensor.Int, 5, 3), ids, nil, la.ErrDType},
		{"ids of rank 2", table, input(g, tensor.Int, 2, 1), nil, la.ErrShape},
		{"ids of int64", table, input(g, tensor.Int64, 2), nil, la.ErrDType},
		{"ids of float32", table, input(g, f32, 2), nil, la.ErrDType},
		{"ids of another graph", table, input(other, tensor.Int, 2), nil, la.ErrGraph},
		{"residual of another shape", table, ids, input(g, f32, 3, 2), la.ErrShape},
		{"residual of rank 1", table, ids, input(g, f32, 3), la.ErrShape},
		{"residual of float64", table, ids, input(g, tensor.Float64, 2, 3), la.ErrDType},
		{"residual of float32, table of float64", input(g, tensor.Float64, 5, 3), ids, input(g, f32, 2, 3), la.ErrDType},
		{"residual of 16 bits", input(g, la.Float16, 5, 3), ids, input(g, la.Float16, 2, 3), la.ErrDType},
		{"residual of another graph", table, ids, input(other, f32, 2, 3), la.ErrGraph},
	} {
		nodes := len(g.AllNodes())
		y, err := Embedding(c.table, c.ids, c.residual)
		if y != nil || !errors.Is(err, c.want) {
			t.Errorf("%s: %v and error %v, want %v", c.name, y, err, c.want)
		}
		if got := len(g.AllNodes()); got != nodes {
			t.Errorf("%s: the graph grew from %d to %d nodes", c.name, nodes, got)
		}
	}
}

// TestEmbeddingWrongValues: what Gorgonia does not check when a graph runs.
func TestEmbeddingWrongValues(t *testing.T) {
	value := func(dt tensor.Dtype, s ...int) *tensor.Dense {
		return tensor.New(tensor.Of(dt), tensor.WithShape(s...))
	}
	ids := func(ids ...int) *tensor.Dense {
		return tensor.New(tensor.WithShape(len(ids)), tensor.WithBacking(ids))
	}
	op := opOf(embedding{table: weight.Float16, ids: tensor.Int, residual: true})
	table, residual := value(la.Float16, 5, 3), value(tensor.Float32, 2, 3)
	for _, c := range []struct {
		name string
		in   []G.Value
		want error
	}{
		{"too few", []G.Value{table, ids(0, 1)}, la.ErrGraph},
		{"too many", []G.Value{table, ids(0, 1), residual, residual}, la.ErrGraph},
		{"table of rank 1", []G.Value{value(la.Float16, 5), ids(0, 1), residual}, la.ErrShape},
		{"type of table", []G.Value{value(la.BFloat16, 5, 3), ids(0, 1), residual}, la.ErrDType},
		{"type of ids", []G.Value{table, value(tensor.Int32, 2), residual}, la.ErrDType},
		{"number of ids", []G.Value{table, ids(0, 1, 2), residual}, la.ErrShape},
		{"id below the table", []G.Value{table, ids(0, -1), residual}, la.ErrLength},
		{"id above the table", []G.Value{table, ids(5, 0), residual}, la.ErrLength},
		{"residual", []G.Value{table, ids(0, 1), value(tensor.Float32, 3, 2)}, la.ErrShape},
		{"type of residual", []G.Value{table, ids(0, 1), value(tensor.Float64, 2, 3)}, la.ErrDType},
		{"nil", []G.Value{nil, nil, nil}, la.ErrInternal},
	} {
		if y, err := op.Do(c.in...); y != nil || !errors.Is(err, c.want) {
			t.Errorf("%s: %v and error %v, want %v", c.name, y, err, c.want)
		}
	}

	// A GPU has no float64. What is on the GPU does not matter.
	wide := opOf(embedding{table: weight.Float64, ids: tensor.Int32, residual: true})
	const says = "table of float64 on a GPU, want float32, float16, bfloat16, int8, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, int4_32, int4_64, int4_128 or e4m3: convert table, or keep all inputs in host memory"
	for i := range 3 {
		in := []G.Value{value(tensor.Float64, 5, 3), value(tensor.Int32, 2), value(tensor.Float64, 2, 3)}
		in[i] = onGPU{in[i].(*tensor.Dense)}
		if y, err := wide.Do(in...); y != nil || !errors.Is(err, la.ErrUnsupported) || !strings.Contains(err.Error(), says) {
			t.Errorf("input %d on a GPU: %v and error %v", i, y, err)
		}
	}
	for _, c := range []struct {
		in   []G.Value
		says string
	}{
		{[]G.Value{value(tensor.Float32, 5, 3), value(tensor.Int32, 2), value(tensor.Float64, 2, 3)}, "table is of float32 when run, want float64"},
		{[]G.Value{value(tensor.Float64, 5, 3), value(tensor.Int32, 2), value(tensor.Float32, 2, 3)}, "residual is of float32 when run, want float64"},
	} {
		if y, err := wide.Do(c.in...); y != nil || !errors.Is(err, la.ErrDType) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%v and error %v, want %s", y, err, c.says)
		}
	}

	// The text names what is wrong, and it comes through the machine.
	l := newLookup(t, seeded(t), 5, 3, 4, la.Float16, false)
	copy(l.ids, []int{1, 2, 7, 3})
	vm := G.NewTapeMachine(l.g)
	defer vm.Close()
	const want = "leanattention: nn.Embedding: ids[2] is 7, outside [0, 5): length out of range"
	if err := vm.RunAll(); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("error %v, want %s", err, want)
	}
}

// TestEmbeddingGradient: with a table of 16 bits there is none, and asking says so on both machines.
func TestEmbeddingGradient(t *testing.T) {
	for _, dt := range []tensor.Dtype{la.Float16, la.BFloat16} {
		l := newLookup(t, seeded(t), 4, 3, 2, dt, true)
		if _, err := G.Grad(G.Must(G.Sum(l.y)), l.nodes[2]); err == nil {
			t.Error("gradient of the tape machine: no error")
		}
		if _, err := opOf(embedding{table: format(t, dt)}).SymDiff(nil, nil, nil); !errors.Is(err, la.ErrUnsupported) {
			t.Errorf("SymDiff: %v", err)
		}
	}
}

// Rows of a table that a run has not computed are 0, and what the graph's table does not have is an error as ever.
func TestEmbeddingOfRowsThatAreNotComputed(t *testing.T) {
	cache, err := la.NewCache(la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 1, Pages: 1})
	if err != nil {
		t.Fatal(err)
	}
	step, err := cache.NewStep(4)
	if err != nil {
		t.Fatal(err)
	}
	seq, err := cache.NewSequence()
	if err != nil {
		t.Fatal(err)
	}
	g := G.NewGraph()
	h := G.NewMatrix(g, tensor.Float32, G.WithName("h"), G.WithShape(4, 2), G.WithValue(tensor.New(tensor.WithShape(4, 2), tensor.WithBacking([]float32{1, 2, 3, 4, 5, 6, 7, 8}))))
	ids := []int{1, 0, 3, 2, 1}
	last := G.NewVector(g, tensor.Int, G.WithName("last"), G.WithShape(5), G.WithValue(tensor.New(tensor.WithShape(5), tensor.WithBacking(ids))))
	used, err := step.Rows(h)
	if err != nil {
		t.Fatal(err)
	}
	y, err := Embedding(used, last, nil)
	if err != nil {
		t.Fatal(err)
	}
	machine := G.NewTapeMachine(g)
	defer machine.Close()
	for tokens, want := range [][]float32{2: {3, 4, 1, 2, 0, 0, 0, 0, 3, 4}, 4: {3, 4, 1, 2, 7, 8, 5, 6, 3, 4}} {
		if want == nil {
			continue
		}
		if err := step.Set([]la.Append{{Seq: seq, Tokens: tokens}}); err != nil {
			t.Fatal(err)
		}
		if err := machine.RunAll(); err != nil {
			t.Fatal(err)
		}
		if got := y.Value().Data().([]float32); !slices.Equal(got, want) {
			t.Errorf("%d rows: %v, want %v", tokens, got, want)
		}
		machine.Reset()
		for _, bad := range []int{-1, 4} {
			ids[2] = bad
			if err := la.Cause(machine.RunAll()); !errors.Is(err, la.ErrLength) {
				t.Errorf("row %d of 4, %d of which are computed: %v", bad, tokens, err)
			}
			machine.Reset()
		}
		ids[2] = 3
		if err := step.Rollback(); err != nil {
			t.Fatal(err)
		}
	}
}
