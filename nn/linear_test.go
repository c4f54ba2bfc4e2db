package nn

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/chewxy/hm"
	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/weight"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// layer is a graph with one Linear whose inputs can be filled anew.
type layer struct {
	rows, in, out  int
	activation     attn.Activation
	x, b, residual []float32
	w              []float32 // as computed with
	g              *G.ExprGraph
	nodes          G.Nodes // x, w, b, residual; absent ones nil
	y              *G.Node
	result         G.Value
}

func newLayer(t testing.TB, rng *rand.Rand, rows, in, out int, dt tensor.Dtype, bias, residual bool, activation attn.Activation) *layer {
	t.Helper()
	l := &layer{rows: rows, in: in, out: out, activation: activation, g: G.NewGraph(), nodes: make(G.Nodes, 4)}
	input := func(name string, shape ...int) (*G.Node, []float32) {
		data := make([]float32, tensor.Shape(shape).TotalSize())
		fill(rng, data, 0, 1)
		v := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data))
		return G.NewTensor(l.g, G.Float32, len(shape), G.WithShape(shape...), G.WithName(name), G.WithValue(v)), data
	}
	var opts []Option
	l.nodes[0], l.x = input("x", rows, in)
	l.w = make([]float32, out*in)
	fill(rng, l.w, 0, 1)
	l.nodes[1] = G.NewMatrix(l.g, dt, G.WithShape(out, in), G.WithName("w"), G.WithValue(stored(l.w, dt, out, in)))
	if bias {
		l.nodes[2], l.b = input("b", out)
	}
	if residual {
		l.nodes[3], l.residual = input("residual", rows, out)
		opts = append(opts, WithResidual(l.nodes[3]))
	}
	switch activation {
	case attn.ReLU:
		opts = append(opts, WithActivation(ReLU))
	case attn.GELU:
		opts = append(opts, WithActivation(GELU))
	}
	var err error
	if l.y, err = Linear(l.nodes[0], l.nodes[1], l.nodes[2], opts...); err != nil {
		t.Fatal(err)
	}
	if !l.y.Shape().Eq(tensor.Shape{rows, out}) || l.y.Dtype() != tensor.Float32 {
		t.Fatalf("node of shape %v and type %v", l.y.Shape(), l.y.Dtype())
	}
	G.Read(l.y, &l.result)
	return l
}

// check compares y with a float64 reference; the bound is that of sums in
// float32 of so many terms.
func (l *layer) check(t *testing.T, y []float32) {
	t.Helper()
	for r := range l.rows {
		for o := range l.out {
			sum, size := 0.0, 0.0
			for i := range l.in {
				p := float64(l.x[r*l.in+i]) * float64(l.w[o*l.in+i])
				sum, size = sum+p, size+math.Abs(p)
			}
			if l.b != nil {
				sum, size = sum+float64(l.b[o]), size+math.Abs(float64(l.b[o]))
			}
			own := 0.0 // what the activation is off by
			switch l.activation {
			case attn.ReLU:
				sum = max(sum, 0)
			case attn.GELU:
				own = 0x1p-22 * math.Abs(sum)
				sum, size = reftest.GELU(sum), 1.13*size
			}
			if l.residual != nil {
				v := float64(l.residual[r*l.out+o])
				sum, size = sum+v, size+math.Abs(v)
			}
			bound := float64(l.in+3)*0x1p-24*size + own
			if d := math.Abs(float64(y[r*l.out+o]) - sum); !(d <= bound) {
				t.Fatalf("%d x %d x %d: y[%d,%d] is %v, want %v, off by %.3g > %.3g",
					l.rows, l.in, l.out, r, o, y[r*l.out+o], sum, d, bound)
			}
		}
	}
}

func TestLinearReference(t *testing.T) {
	rng := seeded(t)
	for _, dt := range []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16} {
		for i, size := range [][3]int{{1, 1, 1}, {1, 7, 5}, {2, 64, 33}, {3, 65, 129}, {5, 100, 7}, {9, 33, 40}, {130, 17, 21}, {100, 130, 19}} {
			for variant := range 12 {
				l := newLayer(t, rng, size[0], size[1], size[2], dt, variant&1 != 0, variant&2 != 0, attn.Activation(variant/4))
				vm := G.NewTapeMachine(l.g)
				for range 2 {
					if err := vm.RunAll(); err != nil {
						t.Fatal(err)
					}
					l.check(t, l.result.Data().([]float32))
					vm.Reset()
					fill(rng, l.x, 0, 1)
				}
				vm.Close()
				if i == variant {
					lisp := G.NewLispMachine(l.g, G.ExecuteFwdOnly())
					if err := lisp.RunAll(); err != nil {
						t.Fatal(err)
					}
					l.check(t, l.y.Value().Data().([]float32))
					lisp.Close()
				}
			}
		}
	}
}

// TestLinearFloat64: the slow way.
// TestLinearMixed: with mixed precision, a layer of many rows gives what x as it is or x rounded gives; and memory of
// many megabytes, which is not cleared, is written to the end.
func TestLinearMixed(t *testing.T) {
	rng := seeded(t)
	for _, dt := range []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16} {
		const rows, in, out = 130, 70, 600 // the output has more than 256 KB
		l := newLayer(t, rng, rows, in, out, dt, true, false, attn.NoActivation)
		mixed := G.Must(Linear(l.nodes[0], l.nodes[1], l.nodes[2], WithMixedPrecision()))
		var result G.Value
		G.Read(mixed, &result)
		run := func() (plain, mixed []float32) {
			vm := G.NewTapeMachine(l.g)
			defer vm.Close()
			if err := vm.RunAll(); err != nil {
				t.Fatal(err)
			}
			return l.result.Data().([]float32), result.Data().([]float32)
		}
		exact, got := run()
		l.check(t, exact)
		if slices.Equal(got, exact) {
			continue // float32, and where nothing is won
		}
		if dt == la.BFloat16 {
			for i, v := range l.x {
				l.x[i] = half.BFromFloat32(v).Float32()
			}
			if rounded, _ := run(); !slices.Equal(got, rounded) {
				t.Error("neither x nor x rounded to bfloat16 has these results")
			}
			continue
		}
		for i, v := range got {
			size := 1.0
			for k := range in {
				size += math.Abs(float64(l.x[i/out*in+k]) * float64(l.w[i%out*in+k]))
			}
			if d := math.Abs(float64(v - exact[i])); dt != la.Float16 || !(d <= 0x1p-11*size) {
				t.Fatalf("%v: y[%d] is %v, of x as it is %v", dt, i, v, exact[i])
			}
		}
	}
}

func TestLinearFloat64(t *testing.T) {
	rng := seeded(t)
	x, w, b := make([]float64, 3*50), make([]float64, 7*50), make([]float64, 7)
	fill(rng, x, 0, 1)
	fill(rng, w, 0, 1)
	fill(rng, b, 0, 1)
	for activation, f := range map[attn.Activation]func(float64) float64{
		attn.NoActivation: func(v float64) float64 { return v },
		attn.ReLU:         func(v float64) float64 { return max(v, 0) },
		attn.GELU:         reftest.GELU,
	} {
		op := opOf(linear{parts: 1, x: tensor.Float64, w: weight.Float64, bias: true, activation: activation})
		y, err := op.Do(tensor.New(tensor.WithShape(3, 50), tensor.WithBacking(x)),
			tensor.New(tensor.WithShape(7, 50), tensor.WithBacking(w)), tensor.New(tensor.WithShape(7), tensor.WithBacking(b)))
		if err != nil {
			t.Fatal(err)
		}
		for i, got := range y.Data().([]float64) {
			want := b[i%7]
			for k := range 50 {
				want += x[i/7*50+k] * w[i%7*50+k]
			}
			if want = f(want); math.Abs(got-want) > 1e-12 {
				t.Fatalf("%v: element %d is %v, want %v", activation, i, got, want)
			}
		}
	}
}

// TestLinearViews: a transposed w is read as what it is.
func TestLinearViews(t *testing.T) {
	rng := seeded(t)
	l := newLayer(t, rng, 2, 6, 10, tensor.Float32, false, false, attn.NoActivation)
	turned := make([]float32, 60)
	for o := range 10 {
		for i := range 6 {
			turned[i*10+o] = l.w[o*6+i]
		}
	}
	w := tensor.New(tensor.WithShape(6, 10), tensor.WithBacking(turned))
	if err := w.T(); err != nil {
		t.Fatal(err)
	}
	op := opOf(linear{parts: 1, x: tensor.Float32, w: weight.Float32})
	y, err := op.Do(tensor.New(tensor.WithShape(2, 6), tensor.WithBacking(l.x)), w)
	if err != nil {
		t.Fatal(err)
	}
	l.check(t, y.Data().([]float32))
}

// TestLinearNaN: NaN passes the activation, and stays in its row.
func TestLinearNaN(t *testing.T) {
	rng := seeded(t)
	for i, dt := range []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16, tensor.Float32, la.Float16, la.BFloat16} {
		l := newLayer(t, rng, 3, 40, 24, dt, true, false, []attn.Activation{attn.ReLU, attn.GELU}[i/3])
		l.x[40+17] = float32(math.NaN())
		vm := G.NewTapeMachine(l.g)
		if err := vm.RunAll(); err != nil {
			t.Fatal(err)
		}
		for i, v := range l.result.Data().([]float32) {
			if (v != v) != (i/24 == 1) {
				t.Fatalf("%v: element %d is %v", dt, i, v)
			}
		}
		vm.Close()
	}
}

// TestLinearInPlaceNeighbours: nodes that Gorgonia runs in place behind a
// Linear harm neither its inputs nor a second reader.
func TestLinearInPlaceNeighbours(t *testing.T) {
	rng := seeded(t)
	l := newLayer(t, rng, 2, 5, 5, tensor.Float32, true, true, attn.NoActivation)
	doubled := G.Must(G.Add(l.y, l.y))
	var got G.Value
	G.Read(G.Must(G.Add(doubled, l.nodes[3])), &got)
	vm := G.NewTapeMachine(l.g)
	defer vm.Close()
	for range 3 {
		fill(rng, l.residual, 0, 1)
		if err := vm.RunAll(); err != nil {
			t.Fatal(err)
		}
		y := l.result.Data().([]float32)
		l.check(t, y)
		for i, v := range got.Data().([]float32) {
			if want := 2*y[i] + l.residual[i]; v != want {
				t.Fatalf("element %d is %v, want %v", i, v, want)
			}
		}
		vm.Reset()
	}
}

// TestLinearHash: Gorgonia merges nodes of equal hash and equal children, so
// every parameter has to be in it.
func TestLinearHash(t *testing.T) {
	seen := map[uint32]node{}
	for w := range weight.Format(weight.Formats) {
		for v := range 12 {
			op := opOf(linear{parts: 1, x: operand.SumType(w), w: w, bias: v&1 != 0, residual: v&2 != 0, activation: attn.Activation(v / 4)})
			if other, ok := seen[op.Hashcode()]; ok {
				t.Errorf("%v and %v have the same hash", op, other)
			}
			seen[op.Hashcode()] = op
		}
	}

	// In one graph, with equal inputs, the activation alone tells layers apart.
	l := newLayer(t, seeded(t), 2, 9, 11, tensor.Float32, true, false, attn.NoActivation)
	var rectified G.Value
	G.Read(G.Must(Linear(l.nodes[0], l.nodes[1], l.nodes[2], WithActivation(ReLU))), &rectified)
	var smooth G.Value
	G.Read(G.Must(Linear(l.nodes[0], l.nodes[1], l.nodes[2], WithActivation(GELU))), &smooth)
	vm := G.NewTapeMachine(l.g)
	defer vm.Close()
	if err := vm.RunAll(); err != nil {
		t.Fatal(err)
	}
	l.check(t, l.result.Data().([]float32))
	for i, v := range l.result.Data().([]float32) {
		if got := rectified.Data().([]float32)[i]; got != max(v, 0) {
			t.Fatalf("element %d is %v without and %v with ReLU", i, v, got)
		}
		if got := float64(smooth.Data().([]float32)[i]); math.Abs(got-reftest.GELU(float64(v))) > 1e-6*math.Abs(float64(v)) {
			t.Fatalf("element %d is %v without and %v with GELU", i, v, got)
		}
	}
}

func TestLinearWrongArguments(t *testing.T) {
	g, other := G.NewGraph(), G.NewGraph()
	input := func(g *G.ExprGraph, dt tensor.Dtype, shape ...int) *G.Node {
		return G.NewTensor(g, dt, len(shape), G.WithShape(shape...), G.WithName(fmt.Sprint(dt, shape)))
	}
	f32 := tensor.Float32
	x, w, b := input(g, f32, 2, 3), input(g, f32, 5, 3), input(g, f32, 5)
	for _, c := range []struct {
		name    string
		x, w, b *G.Node
		opts    []Option
		want    error
	}{
		{"nil x", nil, w, b, nil, la.ErrGraph},
		{"nil w", x, nil, b, nil, la.ErrGraph},
		{"x of rank 1", b, w, nil, nil, la.ErrShape},
		{"w of rank 1", x, b, nil, nil, la.ErrShape},
		{"w of another width", x, input(g, f32, 5, 4), b, nil, la.ErrShape},
		{"short b", x, w, input(g, f32, 4), nil, la.ErrShape},
		{"b of rank 2", x, w, input(g, f32, 1, 5), nil, la.ErrShape},
		{"residual", x, w, b, []Option{WithResidual(input(g, f32, 5, 2))}, la.ErrShape},
		{"residual of float64", x, w, b, []Option{WithResidual(input(g, tensor.Float64, 2, 5))}, la.ErrDType},
		{"residual of another graph", x, w, b, []Option{WithResidual(input(other, f32, 2, 5))}, la.ErrGraph},
		{"x of float16", input(g, la.Float16, 2, 3), w, b, nil, la.ErrDType},
		{"x of float64", input(g, tensor.Float64, 2, 3), w, b, nil, la.ErrDType},
		{"w of float64", x, input(g, tensor.Float64, 5, 3), b, nil, la.ErrDType},
		{"w of int", x, input(g, tensor.Int, 5, 3), b, nil, la.ErrDType},
		{"b of float16", x, w, input(g, la.Float16, 5), nil, la.ErrDType},
		{"w of another graph", x, input(other, f32, 5, 3), b, nil, la.ErrGraph},
	} {
		nodes := len(g.AllNodes())
		y, err := Linear(c.x, c.w, c.b, c.opts...)
		if y != nil || !errors.Is(err, c.want) {
			t.Errorf("%s: %v and error %v, want %v", c.name, y, err, c.want)
		}
		if got := len(g.AllNodes()); got != nodes {
			t.Errorf("%s: the graph grew from %d to %d nodes", c.name, nodes, got)
		}
	}
}

// TestLinearWrongValues: what Gorgonia does not check when a graph runs.
func TestLinearWrongValues(t *testing.T) {
	value := func(dt tensor.Dtype, s ...int) *tensor.Dense {
		return tensor.New(tensor.Of(dt), tensor.WithShape(s...))
	}
	f32 := func(s ...int) *tensor.Dense { return value(tensor.Float32, s...) }
	op := opOf(linear{parts: 1, x: tensor.Float32, w: weight.Float16, bias: true, residual: true})
	w := value(la.Float16, 5, 3)
	for _, c := range []struct {
		name string
		in   []G.Value
		want error
	}{
		{"too few", []G.Value{f32(2, 3), w, f32(5)}, la.ErrGraph},
		{"too many", []G.Value{f32(2, 3), w, f32(5), f32(2, 5), f32(2, 5)}, la.ErrGraph},
		{"width of x", []G.Value{f32(2, 4), w, f32(5), f32(2, 5)}, la.ErrShape},
		{"rank of x", []G.Value{f32(3), w, f32(5), f32(2, 5)}, la.ErrShape},
		{"b", []G.Value{f32(2, 3), w, f32(4), f32(2, 5)}, la.ErrShape},
		{"residual", []G.Value{f32(2, 3), w, f32(5), f32(1, 5)}, la.ErrShape},
		{"type of w", []G.Value{f32(2, 3), f32(5, 3), f32(5), f32(2, 5)}, la.ErrDType},
		{"type of x", []G.Value{value(tensor.Float64, 2, 3), w, f32(5), f32(2, 5)}, la.ErrDType},
		{"nil", []G.Value{nil, nil, nil, nil}, la.ErrInternal},
	} {
		if y, err := op.Do(c.in...); y != nil || !errors.Is(err, c.want) {
			t.Errorf("%s: %v and error %v, want %v", c.name, y, err, c.want)
		}
	}
}

// TestLinearGradient: with weights of 16 bits there is none, and asking says so on both machines.
func TestLinearGradient(t *testing.T) {
	for _, dt := range []tensor.Dtype{la.Float16, la.BFloat16} {
		l := newLayer(t, seeded(t), 2, 3, 4, dt, true, false, attn.NoActivation)
		if _, err := G.Grad(G.Must(G.Sum(l.y)), l.nodes[0]); err == nil {
			t.Error("gradient of the tape machine: no error")
		}
		// Gorgonia's error does not unwrap, so the operator is asked too.
		if _, err := opOf(linear{parts: 1, x: tensor.Float32, w: format(t, dt)}).SymDiff(nil, nil, nil); !errors.Is(err, la.ErrUnsupported) {
			t.Errorf("SymDiff: %v", err)
		}
		l = newLayer(t, seeded(t), 2, 3, 4, dt, true, false, attn.NoActivation)
		G.Must(G.Sum(l.y))
		lisp := G.NewLispMachine(l.g)
		if err := lisp.RunAll(); err == nil {
			t.Error("gradient of the lisp machine: no error")
		}
		lisp.Close()
	}
}

// The type of every op is its inputs' types and its result's.
func TestTypes(t *testing.T) {
	for _, c := range opCases(seeded(t)) {
		for _, dtype := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
			y := c.graph(t, dtype, nil).y
			want := make([]hm.Type, 0, len(c.inputs)+1)
			children := y.Graph().From(y.ID())
			for children.Next() {
				want = append(want, children.Node().(*G.Node).Type())
			}
			want = append(want, y.Type())
			if got := y.Op().Type(); !got.Eq(hm.NewFnType(want...)) {
				t.Errorf("%s, %v: the op is a %v, its nodes are %v", c.name, dtype, got, want)
			}
		}
	}
}

// Each op that a gradient is made of may fail, and its error is the gradient's.
func TestGradientFails(t *testing.T) {
	value := func(shape ...int) G.Value {
		return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(make([]float32, tensor.Shape(shape).TotalSize())))
	}
	x, w, b, gamma, dy := value(2, 4), value(6, 4), value(6), value(4), value(2, 6)
	for name, c := range map[string]struct {
		op linear
		in []G.Value
		dy G.Value
	}{
		"plain":       {linear{bias: true}, []G.Value{x, w, b}, dy},
		"activation":  {linear{bias: true, activation: attn.GELU}, []G.Value{x, w, b}, dy},
		"gate":        {linear{activation: attn.ReLU, gate: true}, []G.Value{x, w}, value(2, 3)},
		"layer norm":  {linear{activation: attn.ReLU, norm: true, gamma: true, beta: true}, []G.Value{x, w, gamma, gamma}, dy},
		"RMSNorm":     {linear{activation: attn.ReLU, norm: true, gamma: true, rms: true}, []G.Value{x, w, gamma}, dy},
		"no function": {linear{norm: true}, []G.Value{x, w}, dy},
	} {
		c.op.x, c.op.w, c.op.parts = tensor.Float32, weight.Float32, 1
		failed := errors.New("the step that fails")
		for n := 1; ; n++ {
			steps := 0
			grads, err := linearGradients(func(op G.Op, in ...G.Value) (G.Value, error) {
				if steps++; steps == n {
					return nil, failed
				}
				if steps > n {
					t.Errorf("%s: %v is computed behind step %d, which failed", name, op, n)
				}
				return atOnce(op, in...)
			}, c.op, c.in, c.dy)
			if steps < n {
				if err != nil || len(grads) != len(c.in) || n == 1 {
					t.Errorf("%s: %d gradients, want %d; %d steps, error %v", name, len(grads), len(c.in), steps, err)
				}
				break
			}
			if !errors.Is(err, failed) || grads != nil {
				t.Errorf("%s: step %d fails, the gradients are %v and the error %v", name, n, grads, err)
			}
		}
	}
}

// TestGateTypes: the gate of both halves has the rank that its type says, whatever the rank of its input.
func TestGateTypes(t *testing.T) {
	for in, r := range map[string]gateOfBoth{"matrix": {dtype: tensor.Float32, width: 3}, "vector": {dtype: tensor.Float32, width: 3, joined: true}} {
		shape := tensor.Shape{2, 6}
		if r.joined {
			shape = tensor.Shape{12}
		}
		args := r.arguments()
		y, err := r.shape([]tensor.Shape{shape})
		if err != nil || args[0].rank != len(shape) || args[1].rank != len(y) {
			t.Errorf("%s: ranks %d and %d of shapes %v and %v, %v", in, args[0].rank, args[1].rank, shape, y, err)
		}
	}
}

// opOf is the op of a rule.
func opOf(r rule) node { return node{newOperator(r), new(ongpu.Node)} }

// format is what an element type stands for.
func format(t *testing.T, d tensor.Dtype) weight.Format {
	f, ok := operand.WeightFormat(d)
	if !ok {
		t.Fatalf("%v stands for no format", d)
	}
	return f
}

// onGPU is a value that says that it is on a GPU.
type onGPU struct{ *tensor.Dense }

func (onGPU) Internal() *ongpu.Tensor { return new(ongpu.Tensor) }

// A weight as a value of its format has the results of its elements, in a graph and its gradients.
func TestWeightValues(t *testing.T) {
	rng := seeded(t)
	for f := range weight.Format(weight.Formats) {
		if f.HasScales() || f.Block() > 1 { // see weight_test.go
			continue
		}
		sum := operand.SumType(f)
		random := func(dt tensor.Dtype, shape ...int) *tensor.Dense {
			v := tensor.New(tensor.Of(dt), tensor.WithShape(shape...))
			bits := dense.Backing[byte](v)
			for i := range bits {
				bits[i] = byte(rng.IntN(256))
				if size := int(dt.Size()); i%size == size-1 {
					bits[i] = 0x3c // about 1, in each type
				}
			}
			return v
		}
		x, table, ids := random(sum, 3, 8), random(operand.WeightType(f), 6, 8), tensor.New(tensor.WithBacking([]int32{5, 0, 5}))
		var want [][]byte
		for _, wrapped := range []bool{false, true} {
			g := G.NewGraph()
			input := func(name string, v *tensor.Dense, isWeight bool) *G.Node {
				n := G.NewTensor(g, v.Dtype(), v.Dims(), G.WithShape(v.Shape()...), G.WithName(name))
				var of G.Value = v
				if isWeight && wrapped {
					of = &operand.Weight{Of: f, Elements: v}
				}
				if err := G.Let(n, of); err != nil {
					t.Fatal(err)
				}
				return n
			}
			nx, w, i := input("x", x, false), input("w", table, true), input("ids", ids, false)
			ys := []*G.Node{G.Must(Linear(nx, w, nil)), G.Must(GatedLinear(nx, []*G.Node{w}, nil, SiLU)), G.Must(GatedLinear(nx, []*G.Node{w, w}, nil, GELU)), G.Must(Embedding(w, i, nil))}
			several, err := Linears(nx, []*G.Node{w, w}, nil)
			if err != nil {
				t.Fatal(err)
			}
			ys = append(ys, several...)
			if f == weight.Float32 || f == weight.Float64 {
				grads, err := G.Grad(G.Must(G.Sum(ys[0])), nx)
				if err != nil {
					t.Fatal(err)
				}
				ys = append(ys, grads...)
			}
			vm := G.NewTapeMachine(g)
			defer vm.Close()
			if err := vm.RunAll(); err != nil {
				t.Fatalf("%v, as a value %v: %v", f, wrapped, err)
			}
			for i, y := range ys {
				v := y.Value().(*tensor.Dense)
				got := bytes.Clone(dense.Backing[byte](v))
				if !wrapped {
					want = append(want, got)
				} else if !bytes.Equal(got, want[i]) {
					t.Errorf("%v: output %d of a value differs from that of its elements", f, i)
				}
			}
		}
	}
	bad := &operand.Weight{Of: weight.Float16, Elements: tensor.New(tensor.Of(la.Float16), tensor.WithShape(2, 4)), Scales: tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(2))}
	op := opOf(linear{parts: 1, x: tensor.Float32, w: weight.Float16})
	if y, err := op.Do(tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(1, 4)), bad); y != nil || !errors.Is(err, la.ErrUnsupported) {
		t.Errorf("scales of float16: %v and error %v", y, err)
	}
}
