package nn

import (
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/rope"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/norm"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// opGraph is the graph of a case, with inputs of float32 or float64.
type opGraph struct {
	g  *G.ExprGraph
	in []*G.Node
	y  *G.Node
}

// graph makes it; where says where an input's value is.
func (c *opCase) graph(t *testing.T, dtype tensor.Dtype, where func(*tensor.Dense) G.Value) *opGraph {
	t.Helper()
	o := &opGraph{g: G.NewGraph()}
	for _, in := range c.inputs {
		v := in.tensor(dtype, where != nil)
		var value G.Value = v
		if where != nil {
			value = where(v)
		}
		o.in = append(o.in, G.NewTensor(o.g, v.Dtype(), len(in.shape), G.WithShape(in.shape...), G.WithName(in.name), G.WithValue(value)))
	}
	y, err := c.build(o.in)
	if err != nil {
		t.Fatalf("%s: %v", c.name, err)
	}
	o.y = y
	if !slices.Equal(o.y.Shape(), c.shape) || o.y.Dtype() != dtype {
		t.Fatalf("%s: a node of shape %v and type %v, want %v and %v", c.name, o.y.Shape(), o.y.Dtype(), c.shape, dtype)
	}
	return o
}

func (in *opInput) tensor(dtype tensor.Dtype, short bool) *tensor.Dense {
	var data any
	switch {
	case in.ids != nil && short:
		ids := make([]int32, len(in.ids))
		for i, x := range in.ids {
			ids[i] = int32(x)
		}
		data = ids
	case in.ids != nil:
		data = in.ids
	case dtype == tensor.Float32:
		x := make([]float32, len(in.x))
		for i, v := range in.x {
			x[i] = float32(v)
		}
		data = x
	default:
		data = in.x
	}
	return tensor.New(tensor.WithShape(in.shape...), tensor.WithBacking(data))
}

// numbers is the inputs as the reference takes them.
func (c *opCase) numbers() [][]float64 {
	all := make([][]float64, len(c.inputs))
	for i, in := range c.inputs {
		all[i] = in.x
		for _, id := range in.ids {
			all[i] = append(all[i], float64(id))
		}
	}
	return all
}

func floatsOf(t *testing.T, v G.Value) []float64 {
	t.Helper()
	switch x := v.Data().(type) {
	case []float32:
		return toFloat64(x)
	case []float64:
		return x
	}
	t.Fatalf("a value of %T", v.Data())
	return nil
}

func (c *opCase) compare(t *testing.T, what string, got, want []float64, unit float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s, %s: %d elements, want %d", c.name, what, len(got), len(want))
	}
	size := max(c.size, 1)
	for i, w := range want {
		if !(math.Abs(got[i]-w) <= unit*size*(1+math.Abs(w))+c.off) {
			t.Fatalf("%s, %s: element %d is %v, want %v", c.name, what, i, got[i], w)
		}
	}
}

// Each op is its formula, in both types and on both machines, and again with other inputs.
func TestOps(t *testing.T) {
	rng := seeded(t)
	for range 5 {
		for _, c := range opCases(rng) {
			for dtype, unit := range map[tensor.Dtype]float64{tensor.Float32: 1e-6, tensor.Float64: 1e-14} {
				o := c.graph(t, dtype, nil)
				vm := G.NewTapeMachine(o.g)
				for run := range 2 {
					if err := vm.RunAll(); err != nil {
						t.Fatalf("%s: %v", c.name, err)
					}
					c.compare(t, fmt.Sprintf("%v, run %d", dtype, run), floatsOf(t, o.y.Value()), c.want(c.numbers()), unit)
					vm.Reset()
					for i, in := range c.inputs {
						if in.ids == nil {
							c.inputs[i].x = randomInput(rng, "", in.shape...).x
							if err := G.Let(o.in[i], c.inputs[i].tensor(dtype, false)); err != nil {
								t.Fatal(err)
							}
						}
					}
				}
				vm.Close()
				o = c.graph(t, dtype, nil)
				lisp := G.NewLispMachine(o.g, G.ExecuteFwdOnly())
				if err := lisp.RunAll(); err != nil {
					t.Fatalf("%s: %v", c.name, err)
				}
				c.compare(t, "lisp machine", floatsOf(t, o.y.Value()), c.want(c.numbers()), unit)
				lisp.Close()
			}
		}
	}
}

// Gradients are central differences of the reference, in float64 on both machines; in float32
// they are those of float64.
func TestOpGradients(t *testing.T) {
	rng := seeded(t)
	for _, c := range opCases(rng) {
		if c.shape.TotalSize() > 300 {
			continue
		}
		weights := randomInput(rng, "weights", c.shape...)
		cost := func(o *opGraph, dtype tensor.Dtype) *G.Node {
			v := weights.tensor(dtype, false)
			w := G.NewTensor(o.g, dtype, len(c.shape), G.WithShape(c.shape...), G.WithName("weights"), G.WithValue(v))
			return G.Must(G.Sum(G.Must(G.HadamardProd(o.y, w))))
		}
		numbers := c.numbers()
		sum := func() (s float64) {
			for i, y := range c.want(numbers) {
				s += weights.x[i] * y
			}
			return s
		}
		differences := func(i int, got []float64) []float64 {
			const h = 1e-5
			d, middle := make([]float64, len(numbers[i])), sum()
			for j, old := range numbers[i] {
				if n := len(d); !reftest.Every(t) && rng.IntN(n) >= 24 { // some, others in every run
					d[j] = got[j]
					continue
				}
				numbers[i][j] = old + h
				up := sum()
				numbers[i][j] = old - h
				down := sum()
				numbers[i][j] = old
				d[j] = (up - down) / (2 * h)
				if c.corners && math.Abs(up+down-2*middle) > 1e-7 { // there is no slope
					d[j] = got[j]
				}
			}
			return d
		}
		for dtype, unit := range map[tensor.Dtype]float64{tensor.Float64: 1e-7, tensor.Float32: 1e-4} {
			o := c.graph(t, dtype, nil)
			var wrt G.Nodes
			var of []int
			for i, in := range c.inputs {
				if in.ids == nil {
					wrt, of = append(wrt, o.in[i]), append(of, i)
				}
			}
			grads, err := G.Grad(cost(o, dtype), wrt...)
			if err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
			values := make([]G.Value, len(grads))
			for i := range grads {
				G.Read(grads[i], &values[i])
			}
			vm := G.NewTapeMachine(o.g)
			if err := vm.RunAll(); err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
			for i, v := range values {
				got := floatsOf(t, v)
				c.compare(t, fmt.Sprintf("tape, %v, d%s", dtype, c.inputs[of[i]].name), got, differences(of[i], got), unit*float64(1+c.shape.TotalSize()/10))
			}
			vm.Close()
			// Where a gradient does not depend on x, as that of a Reshape, Gorgonia refuses itself.
			if _, err := G.Grad(G.Must(G.Sum(grads[0])), wrt[0]); err == nil || !strings.Contains(err.Error(), "second derivative") && !strings.Contains(err.Error(), "Non Differentiable") {
				t.Errorf("%s: second derivative: %v", c.name, err)
			}

			o = c.graph(t, dtype, nil)
			cost(o, dtype)
			lisp := G.NewLispMachine(o.g)
			if err := lisp.RunAll(); err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
			for _, i := range of {
				v, err := o.in[i].Grad()
				if err != nil {
					t.Fatal(err)
				}
				got := floatsOf(t, v)
				c.compare(t, fmt.Sprintf("lisp, %v, d%s", dtype, c.inputs[i].name), got, differences(i, got), unit*float64(1+c.shape.TotalSize()/10))
			}
			lisp.Close()
		}
	}
}

// Each op gives on a GPU what it gives by its formula, and in a recording, or is refused; inputs in different
// places are an error.
func TestGPUOps(t *testing.T) {
	gpu, rng := devicetest.Open(t), seeded(t)
	upload := func(v *tensor.Dense) G.Value {
		d, err := gpu.Upload(v)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	for _, c := range onGPUs(opCases(rng)) {
		o := c.graph(t, tensor.Float32, upload)
		vm := G.NewTapeMachine(o.g)
		check := func(what string) {
			t.Helper()
			d, ok := o.y.Value().(*device.Tensor)
			if !ok {
				t.Fatalf("%s, %s: a %T", c.name, what, o.y.Value())
			}
			v, err := d.Download()
			if err != nil {
				t.Fatal(err)
			}
			c.compare(t, what, floatsOf(t, v), c.want(c.numbers()), 4e-6)
		}
		err := la.Cause(vm.RunAll())
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		check("run")
		vm.Reset()
		recording, err := gpu.Record(vm.RunAll)
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		for i, in := range c.inputs {
			if in.ids == nil {
				c.inputs[i].x = randomInput(rng, "", in.shape...).x
				if err := o.in[i].Value().(*device.Tensor).CopyFrom(c.inputs[i].tensor(tensor.Float32, true)); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := recording.Replay(); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		check("replay")
		if err := recording.Close(); err != nil {
			t.Fatal(err)
		}
		vm.Close()

		if len(c.inputs) > 1 {
			n := 0
			o = c.graph(t, tensor.Float32, func(v *tensor.Dense) G.Value {
				if n++; n > 1 {
					return v
				}
				return upload(v)
			})
			vm = G.NewTapeMachine(o.g)
			if err := la.Cause(vm.RunAll()); !errors.Is(err, la.ErrUnsupported) {
				t.Errorf("%s, x on the GPU and the rest in host memory: %v", c.name, err)
			}
			vm.Close()
		}
	}
}

// What is wrong is an error of the right kind that names the op, and no node.
func TestOpsWrongUse(t *testing.T) {
	g, h := G.NewGraph(), G.NewGraph()
	names := 0
	in := func(g *G.ExprGraph, dtype tensor.Dtype, shape ...int) *G.Node {
		names++
		return G.NewTensor(g, dtype, len(shape), G.WithShape(shape...), G.WithName(fmt.Sprint("input ", names)))
	}
	f32, f64, ids := tensor.Float32, tensor.Float64, tensor.Int
	x, scalar, other := in(g, f32, 2, 8), G.NewScalar(g, f32, G.WithName("scalar")), in(h, f32, 2, 8)
	rotary := rope.Config{HeadDim: 4}
	nodes := func(n ...*G.Node) []*G.Node { return n }
	for name, c := range map[string]struct {
		build func() (*G.Node, error)
		want  error
		says  string
	}{
		"RMSNorm of nil":          {func() (*G.Node, error) { return RMSNorm(nil, nil, nil, 1e-5) }, la.ErrGraph, "RMSNorm"},
		"RMSNorm of a scalar":     {func() (*G.Node, error) { return RMSNorm(scalar, nil, nil, 1e-5) }, la.ErrShape, "RMSNorm"},
		"RMSNorm of ids":          {func() (*G.Node, error) { return RMSNorm(in(g, ids, 2, 8), nil, nil, 1e-5) }, la.ErrDType, "RMSNorm"},
		"RMSNorm, gamma's length": {func() (*G.Node, error) { return RMSNorm(x, in(g, f32, 4), nil, 1e-5) }, la.ErrShape, "gamma"},
		"RMSNorm, gamma's type":   {func() (*G.Node, error) { return RMSNorm(x, in(g, f64, 8), nil, 1e-5) }, la.ErrDType, "gamma"},
		"RMSNorm, gamma's graph":  {func() (*G.Node, error) { return RMSNorm(x, in(h, f32, 8), nil, 1e-5) }, la.ErrGraph, "gamma"},
		"RMSNorm, residual":       {func() (*G.Node, error) { return RMSNorm(x, nil, in(g, f32, 2, 4), 1e-5) }, la.ErrShape, "residual"},
		"RMSNorm, eps":            {func() (*G.Node, error) { return RMSNorm(x, nil, nil, -1) }, la.ErrOption, "eps"},
		"RMSNorm, offset of none": {func() (*G.Node, error) { return RMSNorm(x, nil, nil, 0, WithUnitOffset()) }, la.ErrUnsupported, "WithUnitOffset"},
		"QKNorm without gamma":    {func() (*G.Node, error) { return QKNorm(x, nil, 1e-5) }, la.ErrGraph, "gamma"},
		"QKNorm of other heads":   {func() (*G.Node, error) { return QKNorm(x, in(g, f32, 3), 1e-5) }, la.ErrShape, "QKNorm"},
		"Linear, eps":             {func() (*G.Node, error) { return Linear(x, in(g, f32, 3, 8), nil, WithRMSNorm(nil, -1)) }, la.ErrOption, "eps"},
		"Linear, offset of none": {func() (*G.Node, error) {
			return Linear(x, in(g, f32, 3, 8), nil, WithRMSNorm(nil, 0, WithUnitOffset()))
		}, la.ErrUnsupported, "WithUnitOffset"},
		"SiLU of nil":              {func() (*G.Node, error) { return Activate(nil, SiLU) }, la.ErrGraph, "x is nil"},
		"GELUTanh of ids":          {func() (*G.Node, error) { return Activate(in(g, ids, 2), GELUTanh) }, la.ErrDType, "Activate"},
		"GLU without gate":         {func() (*G.Node, error) { return GLU(nil, x, SiLU) }, la.ErrGraph, "gate is nil"},
		"GLU of ids":               {func() (*G.Node, error) { return GLU(in(g, ids, 2, 8), in(g, ids, 2, 8), SiLU) }, la.ErrDType, "want float32"},
		"GLU without up":           {func() (*G.Node, error) { return GLU(x, nil, SiLU) }, la.ErrGraph, "up"},
		"GLU, shapes":              {func() (*G.Node, error) { return GLU(x, in(g, f32, 2, 4), SiLU) }, la.ErrShape, "up"},
		"GLU, graphs":              {func() (*G.Node, error) { return GLU(x, other, SiLU) }, la.ErrGraph, "up"},
		"Activate of no function":  {func() (*G.Node, error) { return Activate(x, 0) }, la.ErrOption, "Activation(0)"},
		"Linear of no function":    {func() (*G.Node, error) { return Linear(x, in(g, f32, 3, 8), nil, WithActivation(0)) }, la.ErrOption, "Activation(0)"},
		"GLU of another kind":      {func() (*G.Node, error) { return GLU(x, x, activations) }, la.ErrOption, "Activation(5)"},
		"GatedLinear of nil":       {func() (*G.Node, error) { return GatedLinear(nil, nodes(in(g, f32, 6, 8)), nil, SiLU) }, la.ErrGraph, "GatedLinear"},
		"GatedLinear, no weight":   {func() (*G.Node, error) { return GatedLinear(x, nil, nil, SiLU) }, la.ErrGraph, "GatedLinear"},
		"GatedLinear, one of nil":  {func() (*G.Node, error) { return GatedLinear(x, nodes(in(g, f32, 6, 8), nil), nil, SiLU) }, la.ErrGraph, "GatedLinear"},
		"GatedLinear, an odd half": {func() (*G.Node, error) { return GatedLinear(x, nodes(in(g, f32, 5, 8)), nil, SiLU) }, la.ErrShape, "(5, 8)"},
		"GatedLinear, two widths":  {func() (*G.Node, error) { return GatedLinear(x, nodes(in(g, f32, 5, 8), in(g, f32, 6, 8)), nil, SiLU) }, la.ErrShape, "(6, 8)"},
		"GatedLinear, columns":     {func() (*G.Node, error) { return GatedLinear(x, nodes(in(g, f32, 6, 7)), nil, SiLU) }, la.ErrShape, "(6, 7)"},
		"GatedLinear, types": {func() (*G.Node, error) {
			return GatedLinear(x, nodes(in(g, f32, 6, 8), in(g, la.Float16, 6, 8)), nil, SiLU)
		}, la.ErrDType, "w[1]"},
		"GatedLinear, graphs": {func() (*G.Node, error) { return GatedLinear(x, nodes(in(h, f32, 6, 8)), nil, SiLU) }, la.ErrGraph, "w"},
		"GatedLinear, three":  {func() (*G.Node, error) { w := in(g, f32, 6, 8); return GatedLinear(x, nodes(w, w, w), nil, SiLU) }, la.ErrUnsupported, "3 weights"},
		"GatedLinear, biases": {func() (*G.Node, error) {
			return GatedLinear(x, nodes(in(g, f32, 6, 8)), nodes(in(g, f32, 3), in(g, f32, 3)), SiLU)
		}, la.ErrShape, "2 biases"},
		"GatedLinear, half a bias": {func() (*G.Node, error) { return GatedLinear(x, nodes(in(g, f32, 6, 8)), nodes(in(g, f32, 3)), SiLU) }, la.ErrShape, "b"},
		"GatedLinear, kind":        {func() (*G.Node, error) { return GatedLinear(x, nodes(in(g, f32, 6, 8)), nil, activations) }, la.ErrOption, "Activation(5)"},
		"GatedLinear, activation": {func() (*G.Node, error) {
			return GatedLinear(x, nodes(in(g, f32, 6, 8)), nil, SiLU, WithActivation(ReLU))
		}, la.ErrUnsupported, "WithActivation(ReLU)"},
		"GatedLinear, residual": {func() (*G.Node, error) {
			return GatedLinear(x, nodes(in(g, f32, 6, 8)), nil, SiLU, WithResidual(in(g, f32, 2, 6)))
		}, la.ErrShape, "residual"},
		"Rotary without positions":  {func() (*G.Node, error) { return Rotary(x, nil, rotary) }, la.ErrGraph, "positions"},
		"Rotary, positions' length": {func() (*G.Node, error) { return Rotary(x, in(g, ids, 3), rotary) }, la.ErrShape, "positions"},
		"Rotary, positions' type":   {func() (*G.Node, error) { return Rotary(x, in(g, f32, 2), rotary) }, la.ErrDType, "positions"},
		"Rotary of other heads":     {func() (*G.Node, error) { return Rotary(x, in(g, ids, 2), rope.Config{HeadDim: 6}) }, la.ErrShape, "x"},
		"Rotary of a vector":        {func() (*G.Node, error) { return Rotary(in(g, f32, 8), in(g, ids, 8), rotary) }, la.ErrShape, "rank"},
		"Rotary, config":            {func() (*G.Node, error) { return Rotary(x, in(g, ids, 2), rope.Config{HeadDim: 4, Base: -1}) }, la.ErrOption, "Base"},
		"Add of nil":                {func() (*G.Node, error) { return Add(x, nil) }, la.ErrGraph, "Add"},
		"Add, shapes":               {func() (*G.Node, error) { return Add(x, in(g, f32, 8, 2)) }, la.ErrShape, "Add"},
		"Add, a row":                {func() (*G.Node, error) { return Add(x, in(g, f32, 2)) }, la.ErrShape, "Add"},
		"Mul, types":                {func() (*G.Node, error) { return Mul(x, in(g, f64, 2, 8)) }, la.ErrDType, "Mul"},
		"Scale by 0":                {func() (*G.Node, error) { return Scale(x, 0) }, la.ErrOption, "factor"},
		"Scale by NaN":              {func() (*G.Node, error) { return Scale(x, math.NaN()) }, la.ErrOption, "factor"},
		"Slice, axis":               {func() (*G.Node, error) { return Slice(x, 2, 0, 1) }, la.ErrShape, "axis 2"},
		"Slice, a negative axis":    {func() (*G.Node, error) { return Slice(x, -1, 0, 1) }, la.ErrShape, "axis -1"},
		"Slice, a negative start":   {func() (*G.Node, error) { return Slice(x, 0, -1, 1) }, la.ErrShape, "[-1, 1)"},
		"Slice, empty":              {func() (*G.Node, error) { return Slice(x, 0, 1, 1) }, la.ErrShape, "[1, 1)"},
		"Slice, too far":            {func() (*G.Node, error) { return Slice(x, 0, 1, 3) }, la.ErrShape, "[1, 3)"},
		"Concat of nothing":         {func() (*G.Node, error) { return Concat(0) }, la.ErrGraph, "Concat"},
		"Concat, ranks":             {func() (*G.Node, error) { return Concat(0, x, in(g, f32, 8)) }, la.ErrShape, "x[1]"},
		"Concat, shapes":            {func() (*G.Node, error) { return Concat(0, x, in(g, f32, 2, 4)) }, la.ErrShape, "x[1]"},
		"Concat, axis":              {func() (*G.Node, error) { return Concat(2, x, x) }, la.ErrShape, "axis 2"},
		"SplitHeads of a matrix":    {func() (*G.Node, error) { return SplitHeads(x, 2) }, la.ErrShape, "rank 3"},
		"SplitHeads, heads":         {func() (*G.Node, error) { return SplitHeads(in(g, f32, 1, 2, 8), 3) }, la.ErrShape, "3 heads"},
		"MergeHeads of a matrix":    {func() (*G.Node, error) { return MergeHeads(x) }, la.ErrShape, "rank 4"},
		"Reshape, size":             {func() (*G.Node, error) { return Reshape(x, 3, 5) }, la.ErrShape, "Reshape"},
		"Reshape, an empty axis":    {func() (*G.Node, error) { return Reshape(x, 16, 1, 0) }, la.ErrShape, "Reshape"},
		"Reshape to a scalar":       {func() (*G.Node, error) { return Reshape(x) }, la.ErrShape, "scalar"},
	} {
		y, err := c.build()
		if y != nil || !errors.Is(err, c.want) || err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, error %v, want %v that says %q", name, y, err, c.want, c.says)
		}
	}
}

// Nodes of other parameters are other nodes.
func TestOpsHashes(t *testing.T) {
	g := G.NewGraph()
	x := G.NewMatrix(g, tensor.Float32, G.WithShape(4, 8), G.WithName("x"))
	at := G.NewVector(g, tensor.Int, G.WithShape(4), G.WithName("positions"))
	gamma := G.NewVector(g, tensor.Float32, G.WithShape(8), G.WithName("gamma"))
	w := G.NewMatrix(g, tensor.Float32, G.WithShape(6, 8), G.WithName("w"))
	seen := map[int64]int{}
	for i, build := range []func() (*G.Node, error){
		func() (*G.Node, error) { return RMSNorm(x, gamma, nil, 1e-5) },
		func() (*G.Node, error) { return RMSNorm(x, gamma, nil, 1e-6) },
		func() (*G.Node, error) { return RMSNorm(x, gamma, nil, 1e-5, WithUnitOffset()) },
		func() (*G.Node, error) { return QKNorm(x, gamma, 1e-5) },
		func() (*G.Node, error) { return Activate(x, SiLU) },
		func() (*G.Node, error) { return Activate(x, GELU) },
		func() (*G.Node, error) { return Activate(x, GELUTanh) },
		func() (*G.Node, error) { return GLU(x, x, SiLU) },
		func() (*G.Node, error) { return GLU(x, x, GELU) },
		func() (*G.Node, error) { return Linear(x, w, nil) },
		func() (*G.Node, error) { return Linear(x, w, nil, WithActivation(SiLU)) },
		func() (*G.Node, error) { return GatedLinear(x, []*G.Node{w}, nil, SiLU) },
		func() (*G.Node, error) { return GatedLinear(x, []*G.Node{w}, nil, GELU) },
		func() (*G.Node, error) { return GatedLinear(x, []*G.Node{w, w}, nil, GELU) },
		func() (*G.Node, error) { return Rotary(x, at, rope.Config{HeadDim: 8}) },
		func() (*G.Node, error) { return Rotary(x, at, rope.Config{HeadDim: 4}) },
		func() (*G.Node, error) { return Rotary(x, at, rope.Config{HeadDim: 8, Dim: 4}) },
		func() (*G.Node, error) { return Rotary(x, at, rope.Config{HeadDim: 8, Base: 500}) },
		func() (*G.Node, error) { return Rotary(x, at, rope.Config{HeadDim: 8, Interleaved: true}) },
		func() (*G.Node, error) {
			return Rotary(x, at, rope.Config{HeadDim: 8, Scaling: rope.Linear{Factor: 2}})
		},
		func() (*G.Node, error) {
			return Rotary(x, at, rope.Config{HeadDim: 8, Scaling: rope.Linear{Factor: 3}})
		},
		func() (*G.Node, error) {
			return Rotary(x, at, rope.Config{HeadDim: 8, Scaling: rope.YaRN{Factor: 2, Context: 9}})
		},
		func() (*G.Node, error) { return Add(x, x) },
		func() (*G.Node, error) { return Mul(x, x) },
		func() (*G.Node, error) { return Scale(x, 2) },
		func() (*G.Node, error) { return Scale(x, 3) },
		func() (*G.Node, error) { return Slice(x, 0, 0, 2) },
		func() (*G.Node, error) { return Slice(x, 0, 1, 3) },
		func() (*G.Node, error) { return Slice(x, 1, 0, 2) },
		func() (*G.Node, error) { return Concat(0, x, x) },
		func() (*G.Node, error) { return Concat(1, x, x) },
		func() (*G.Node, error) { return Reshape(x, 8, 4) },
		func() (*G.Node, error) { return Reshape(x, 32) },
		func() (*G.Node, error) { return Linear(x, x, nil) },
		func() (*G.Node, error) { return Linear(x, x, nil, WithActivation(SiLU)) },
		func() (*G.Node, error) { return Linear(x, x, nil, WithActivation(GELUTanh)) },
		func() (*G.Node, error) { return Linear(x, x, nil, WithNorm(gamma, nil, 1e-5)) },
		func() (*G.Node, error) { return Linear(x, x, nil, WithRMSNorm(gamma, 1e-5)) },
		func() (*G.Node, error) { return Linear(x, x, nil, WithRMSNorm(gamma, 1e-5, WithUnitOffset())) },
	} {
		n, err := build()
		if err != nil {
			t.Fatal(i, err)
		}
		if j, ok := seen[n.ID()]; ok {
			t.Errorf("node %d is node %d: %v", i, j, n)
		}
		seen[n.ID()] = i
	}
}

// rowLayers are layers whose rows are each by themselves, on x of 64 columns; the first of them not on a GPU, where the kernels of linear
// layers follow from the number of rows.
var rowLayers = []struct {
	name  string
	build func(x *G.Node, input func(name string, shape ...int) *G.Node, ids *G.Node) (*G.Node, error)
}{
	{"Linear", func(x *G.Node, input func(string, ...int) *G.Node, _ *G.Node) (*G.Node, error) {
		return Linear(x, input("w", 64, 64), input("b", 64), WithActivation(GELU))
	}},
	{"RMSNorm", func(x *G.Node, input func(string, ...int) *G.Node, _ *G.Node) (*G.Node, error) {
		return RMSNorm(x, input("gamma", 64), nil, 1e-5)
	}},
	{"LayerNorm", func(x *G.Node, input func(string, ...int) *G.Node, _ *G.Node) (*G.Node, error) {
		return LayerNorm(x, input("gamma", 64), input("beta", 64), 1e-5)
	}},
	{"SiLU", func(x *G.Node, _ func(string, ...int) *G.Node, _ *G.Node) (*G.Node, error) { return Activate(x, SiLU) }},
	{"Rotary", func(x *G.Node, _ func(string, ...int) *G.Node, ids *G.Node) (*G.Node, error) {
		return Rotary(x, ids, rope.Config{HeadDim: 32, Base: 10000})
	}},
	{"Embedding", func(x *G.Node, input func(string, ...int) *G.Node, ids *G.Node) (*G.Node, error) {
		return Embedding(input("table", 50, 64), ids, x)
	}},
}

// testRowLayers: a row has the bits that it has alone.
func testRowLayers(t *testing.T, where func(*tensor.Dense) G.Value, first int) {
	rng := seeded(t)
	const rows = 31
	all := randomInput(rng, "x", rows, 64)
	ids := make([]int, rows)
	for i := range ids {
		ids[i] = rng.IntN(50)
	}
	for _, layer := range rowLayers[first:] {
		drawn := map[string]opInput{}
		run := func(from, to int) []float64 {
			c := opCase{name: layer.name, shape: tensor.Shape{to - from, 64}, inputs: []opInput{
				{name: "x", shape: tensor.Shape{to - from, 64}, x: all.x[from*64 : to*64]},
				{name: "ids", shape: tensor.Shape{to - from}, ids: ids[from:to]},
			}}
			c.build = func(in []*G.Node) (*G.Node, error) {
				return layer.build(in[0], func(name string, shape ...int) *G.Node {
					if _, ok := drawn[name]; !ok {
						drawn[name] = randomInput(rng, name, shape...)
					}
					of := drawn[name]
					v := G.Value(of.tensor(tensor.Float32, false))
					if where != nil {
						v = where(v.(*tensor.Dense))
					}
					return G.NewTensor(in[0].Graph(), tensor.Float32, len(shape), G.WithShape(shape...), G.WithName(name), G.WithValue(v))
				}, in[1])
			}
			o := c.graph(t, tensor.Float32, where)
			vm := G.NewTapeMachine(o.g)
			defer vm.Close()
			if err := vm.RunAll(); err != nil {
				t.Fatalf("%s: %v", layer.name, err)
			}
			y := o.y.Value()
			if d, ok := y.(*device.Tensor); ok {
				host, err := d.Download()
				if err != nil {
					t.Fatal(err)
				}
				y = host
			}
			return floatsOf(t, y)
		}
		want := run(0, rows)
		const width = 64
		for _, size := range []int{1, 2, 7} {
			for from := 0; from < rows; from += size {
				to := min(from+size, rows)
				if got := run(from, to); !slices.Equal(got, want[from*width:to*width]) {
					t.Errorf("%s: rows [%d, %d) have other bits than in %d rows", layer.name, from, to, rows)
				}
			}
		}
	}
}

func TestRowsAlone(t *testing.T) { testRowLayers(t, nil, 0) }

func TestGPURowsAlone(t *testing.T) {
	gpu := devicetest.Open(t)
	testRowLayers(t, func(v *tensor.Dense) G.Value {
		d, err := gpu.Upload(v)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}, 1)
}

// normalise writes the layer norm of one row.
func normalise[F float](y, x, gamma, beta []F, eps float64) {
	norm := norm.Norm[F]{N: len(x), Gamma: gamma, Beta: beta, Eps: eps}
	norm.Rows(cpu.Default(), y, x)
}

// TestScratch: nobody sees what a node's scratch had before, and two nodes at once have their own.
func TestScratch(t *testing.T) {
	t.Run("float32", testScratch[float32])
	t.Run("float64", testScratch[float64])
}

func testScratch[F float](t *testing.T) {
	rng := reftest.Rand(t)
	of := func(shape ...int) *tensor.Dense {
		x := make([]F, tensor.Shape(shape).TotalSize())
		fill(rng, x, 0, 1)
		return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))
	}
	g := G.NewGraph()
	node := func(name string, v *tensor.Dense) *G.Node {
		return G.NewTensor(g, v.Dtype(), v.Dims(), G.WithShape(v.Shape()...), G.WithName(name), G.WithValue(v))
	}
	const rows, in, out = 5, 33, 21
	x, gate, up := node("x", of(rows, in)), node("gate", of(out, in)), node("up", of(out, in))
	y, err := GatedLinear(x, []*G.Node{gate, up}, nil, SiLU, WithNorm(node("gamma", of(in)), node("beta", of(in)), 1e-5))
	if err != nil {
		t.Fatal(err)
	}
	vm := G.NewTapeMachine(g)
	defer vm.Close()
	var want []F
	for run, n := range []int{0, 1, rows * in, 3 * rows * in} {
		var all [4]*[]F // more than a node takes
		for i := range all {
			all[i] = scratch[F](n)
			for j := range *all[i] {
				(*all[i])[j] = F(i)
			}
		}
		for i, s := range all {
			for _, v := range *s {
				if v != F(i) {
					t.Fatalf("two have the same scratch of %d elements", n)
				}
			}
			for j := range *s {
				(*s)[j] = F(math.NaN())
			}
			giveBack(s)
		}
		if err := vm.RunAll(); err != nil {
			t.Fatal(err)
		}
		got := y.Value().Data().([]F)
		if run == 0 {
			want = slices.Clone(got)
		}
		if !slices.Equal(got, want) {
			t.Fatalf("run %d: %v, first %v", run, got, want)
		}
		vm.Reset()
	}
}

// BenchmarkNorms has the norms of a chunk of a prompt on one thread: ns an element, with a new output in each run.
func BenchmarkNorms(b *testing.B) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	for _, dtype := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		for _, shape := range []tensor.Shape{{8, 2048}, {512, 2048}} {
			x := tensor.New(tensor.Of(dtype), tensor.WithShape(shape...), tensor.WithBacking(tensor.Random(dtype, shape.TotalSize())))
			v := tensor.New(tensor.Of(dtype), tensor.WithShape(shape[1]), tensor.WithBacking(tensor.Random(dtype, shape[1])))
			run := func(name string, f func() (G.Value, error)) {
				b.Run(fmt.Sprintf("%s/%v/rows=%d", name, dtype, shape[0]), func(b *testing.B) {
					for b.Loop() {
						if _, err := f(); err != nil {
							b.Fatal(err)
						}
					}
					b.ReportMetric(b.Elapsed().Seconds()/float64(b.N*shape.TotalSize())*1e9, "ns/element")
				})
			}
			layer := opOf(layerNorm{rank: 2, dtype: dtype, eps: 1e-5, gamma: true, beta: true})
			run("LayerNorm", func() (G.Value, error) { return layer.Do(x, v, v) })
			rms := rmsNorm{rank: 2, dtype: dtype, eps: 1e-5, gamma: true}
			run("RMSNorm", func() (G.Value, error) { return rms.compute([]G.Value{x, v}, shape) })
		}
	}
}

// Outputs and gradients that the limits of a process do not leave are ErrOutOfMemory. Go would end the process, so another one
// does that.
func TestMemoryLimit(t *testing.T) {
	if runtime.GOOS != "linux" || math.MaxInt == math.MaxInt32 || reftest.RaceEnabled {
		t.Skip("the limits are those of Linux with addresses of 64 bits, of which the race detector takes terabytes")
	}
	const child, n = "LEANATTENTION_TEST_LIMIT", 40_000
	if os.Getenv(child) == "" {
		c := exec.Command("sh", "-c", `ulimit -v 7000000 && exec "$0" -test.run '^TestMemoryLimit$' -test.v`, os.Args[0])
		c.Env = append(os.Environ(), child+"=1")
		if out, err := c.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS") {
			t.Errorf("%v\n%.3000s", err, out)
		}
		return
	}
	g := G.NewGraph()
	input := func(name string, of tensor.Dtype, shape ...int) *G.Node {
		return G.NewTensor(g, of, len(shape), G.WithShape(shape...), G.WithName(name), G.WithValue(tensor.New(tensor.Of(of), tensor.WithShape(shape...))))
	}
	x, w, ids := input("x", tensor.Float32, n, 1), input("w", tensor.Float32, n, 1), input("ids", tensor.Int, n)
	table := input("table", tensor.Float32, 1, n)
	for name, add := range map[string]func() (*G.Node, error){
		"Linear":    func() (*G.Node, error) { return Linear(x, w, nil) },
		"Embedding": func() (*G.Node, error) { return Embedding(table, ids, nil) },
	} {
		y, err := add()
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		m := G.NewTapeMachine(g.SubgraphRoots(y))
		if err := la.Cause(m.RunAll()); !errors.Is(err, la.ErrOutOfMemory) || !strings.Contains(err.Error(), "(ulimit ") || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
		m.Close()
	}
}
