package nn

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/stock"
	"gorgonia.org/leanattention/rewrite"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// deep is a graph of blocks with attention with dropout, weights that all blocks share, and Gorgonia's own nodes.
type deep struct {
	graph    *G.ExprGraph
	y, dy    *G.Node
	wrt      G.Nodes
	weights  []G.Nodes // of each block
	between  []G.Nodes // nodes of each block
	computed G.Nodes   // values of blocks
}

const deepBlocks, deepRows, deepWidth = 3, 6, 8

// deepInputs returns random numbers for the inputs of a deep graph.
func deepInputs(t *testing.T) func(name string, shape ...int) opInput {
	rng, seen := reftest.Rand(t), map[string]opInput{}
	return func(name string, shape ...int) opInput {
		if _, ok := seen[name]; !ok {
			in := randomInput(rng, name, shape...)
			for i := range in.x {
				in.x[i] = in.x[i]*0.3 + map[bool]float64{true: 1}[name[0] == 'n']
			}
			seen[name] = in
		}
		return seen[name]
	}
}

func newDeep(t *testing.T, dtype tensor.Dtype, numbers func(string, ...int) opInput, recompute, stock bool) *deep {
	d := &deep{graph: G.NewGraph()}
	must := func(n *G.Node, err error) *G.Node {
		t.Helper()
		noErrors(t, err)
		return n
	}
	input := func(name string, shape ...int) *G.Node {
		return G.NewTensor(d.graph, dtype, len(shape), G.WithShape(shape...), G.WithName(name), G.WithValue(values(t, numbers(name, shape...), dtype, false)))
	}
	weight := func(name string, shape ...int) *G.Node {
		n := input(name, shape...)
		d.wrt = append(d.wrt, n)
		return n
	}
	const rows, width = deepRows, deepWidth
	shared := weight("shared", width, width)
	x := weight("x", rows, width)
	for i := range deepBlocks {
		named := func(name string) string { return fmt.Sprint(name, i) }
		from, first := x, len(d.wrt)
		seed := G.NewScalar(d.graph, tensor.Int, G.WithName(named("seed")))
		noErrors(t, G.Let(seed, 5+i))
		qkv, err := Linears(x, G.Nodes{weight(named("q"), width, width), weight(named("k"), width, width), shared}, nil, WithRMSNorm(weight(named("norm"), width), 1e-5))
		noErrors(t, err)
		for k, n := range qkv {
			qkv[k] = must(SplitHeads(must(Reshape(n, 2, rows/2, width)), 2))
		}
		a := must(MergeHeads(must(la.Attention(qkv[0], qkv[1], qkv[2], la.WithCausal(), la.WithDropout(0.4, seed)))))
		h := must(Linear(must(Reshape(a, rows, width)), weight(named("output"), width, width), nil, WithResidual(x)))
		if stock {
			h = must(G.Tanh(must(G.Add(h, x)))) // ops that may overwrite their inputs
		}
		if down, bias := weight(named("down"), width, width), weight(named("bias"), width); i == 1 {
			x = must(Linear(h, down, bias, WithResidual(h)))
		} else {
			x = must(Add(must(Linear(h, down, bias, WithActivation(GELU))), h))
		}
		if recompute {
			d.between = append(d.between, must2(newBlock("", from, x)).nodes)
			x = must(Recompute(from, x))
			d.computed = append(d.computed, x)
		}
		d.weights = append(d.weights, d.wrt[first:])
	}
	d.y, d.dy = x, input("dy", rows, width)
	return d
}

func must2[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// run returns the values of y and of nodes.
func (d *deep) run(t *testing.T, nodes G.Nodes) [][]float64 {
	t.Helper()
	m := G.NewTapeMachine(d.graph)
	defer m.Close()
	var got [][]float64
	for range 2 {
		m.Reset()
		noErrors(t, la.Cause(m.RunAll()))
		got = nil
		for _, n := range append(G.Nodes{d.y}, nodes...) {
			got = append(got, slices.Clone(floatsOf(t, n.Value())))
		}
	}
	return got
}

// TestRecompute: y and all gradients have the bits of a graph that keeps its values, with and without shared memory, by nn's and by
// Gorgonia's Backpropagate.
func TestRecompute(t *testing.T) {
	numbers := deepInputs(t)
	for _, dtype := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		var want [][]float64
		for _, way := range []string{"kept", "recomputed", "shared memory", "Gorgonia's"} {
			d := newDeep(t, dtype, numbers, way != "kept", true)
			var grads G.Nodes
			var err error
			if way == "Gorgonia's" {
				grads, err = G.Backpropagate(G.Nodes{d.y}, G.Nodes{d.dy}, d.wrt)
			} else {
				grads, err = Backpropagate(G.Nodes{d.y}, G.Nodes{d.dy}, d.wrt)
			}
			noErrors(t, err, rewrite.Check(d.graph))
			if way == "shared memory" {
				noErrors(t, rewrite.ShareMemory(d.graph, append(grads, d.y)...))
			}
			got := d.run(t, grads)
			if way == "kept" {
				want = got
			}
			for i := range want {
				if way == "Gorgonia's" { // adds in another order
					c := opCase{name: "gradients", size: 1000}
					c.compare(t, fmt.Sprint(dtype, " result ", i), got[i], want[i], map[bool]float64{true: 1e-12, false: 1e-4}[dtype == tensor.Float64])
				} else if !slices.Equal(got[i], want[i]) {
					t.Errorf("%v, %s: result %d is %v, want %v", dtype, way, i, got[i][:3], want[i][:3])
				}
			}
			if way == "kept" && dtype == tensor.Float64 {
				d.checkGradients(t, got[1:])
			}
		}
	}
}

// checkGradients compares gradients with differences of sum(y dy).
func (d *deep) checkGradients(t *testing.T, grads [][]float64) {
	t.Helper()
	const step = 1e-6
	at := func() (sum float64) {
		y := d.run(t, nil)[0]
		for i, g := range floatsOf(t, d.dy.Value()) {
			sum += y[i] * g
		}
		return sum
	}
	for i, w := range d.wrt {
		x := w.Value().Data().([]float64)
		j := i % len(x)
		before := x[j]
		x[j] = before + step
		more := at()
		x[j] = before - step
		less := at()
		x[j] = before
		if want := (more - less) / (2 * step); !(math.Abs(grads[i][j]-want) <= 1e-6*(1+math.Abs(want))) {
			t.Errorf("gradient %d of %v is %v, want %v", j, w, grads[i][j], want)
		}
	}
}

// TestRecomputeOrder: only nodes of a block read its values from the forward pass, and a block is computed again behind all gradients of the
// next block.
func TestRecomputeOrder(t *testing.T) {
	d := newDeep(t, tensor.Float32, deepInputs(t), true, false)
	forward := map[*G.Node]bool{}
	for _, n := range d.graph.AllNodes() {
		forward[n] = true
	}
	_, err := Backpropagate(G.Nodes{d.y}, G.Nodes{d.dy}, d.wrt)
	noErrors(t, err, rewrite.ShareMemory(d.graph))
	sorted, err := G.Sort(d.graph)
	noErrors(t, err)
	slices.Reverse(sorted)
	at, attention := map[*G.Node]int{}, 0
	var again []int // where each block is computed again, the first one first
	for i, n := range sorted {
		at[n] = i
		if strings.HasPrefix(fmt.Sprint(n.Op()), "LeanAttention{") {
			attention++
		}
		for _, c := range stock.ChildrenOf(n) {
			for k, nodes := range d.between {
				if slices.Contains(nodes, c) && !slices.Contains(nodes, n) && n != d.computed[k] {
					t.Errorf("%v reads %v of block %d", n, c, k)
				}
			}
		}
		if r, ok := nodeRule[*ordered](n); ok && len(r.args) == 3 && !forward[n] {
			again = append([]int{i}, again...)
		}
	}
	if attention != 2*deepBlocks || len(again) != deepBlocks {
		t.Fatalf("%d nodes of attention, and %d blocks begin again", attention, len(again))
	}
	for k, weights := range d.weights[1:] {
		for _, w := range weights {
			if at[w.Deriv()] > again[k] {
				t.Errorf("block %d is computed again before the gradient of %v", k, w)
			}
		}
	}
	for k, nodes := range d.between {
		for i, n := range nodes { // nothing reads the last value
			if o, ok := n.Op().(ongpu.Op); ok && o.OnGPU().Reads == 0 && (k < deepBlocks-1 || i < len(nodes)-1) {
				t.Errorf("%v of block %d stays", n, k)
			}
		}
	}
}

func TestRecomputeRefuses(t *testing.T) {
	matrix := func(g *G.ExprGraph, name string) *G.Node {
		return G.NewMatrix(g, tensor.Float32, G.WithShape(6, 8), G.WithName(name), G.WithValue(tensor.New(tensor.WithShape(6, 8), tensor.Of(tensor.Float32))))
	}
	g, other := G.NewGraph(), G.NewGraph()
	x, z := matrix(g, "x"), matrix(g, "z")
	sum := G.Must(G.Sum(x))
	heads := G.Must(SplitHeads(G.Must(Reshape(x, 1, 6, 8)), 2))
	out := G.Must(la.Attention(heads, heads, heads))
	for _, c := range []struct {
		what string
		x, y *G.Node
		is   error
		says string
	}{
		{"no x", nil, x, la.ErrGraph, "x or y is nil"},
		{"no y", x, nil, la.ErrGraph, "x or y is nil"},
		{"another graph", x, matrix(other, "y"), la.ErrGraph, "another graph"},
		{"x", x, x, la.ErrGraph, "does not depend on x"},
		{"another input", x, z, la.ErrGraph, "does not depend on x"},
		{"a reader of another input", x, G.Must(Activate(z, GELU)), la.ErrGraph, "does not depend on x"},
		{"a scalar", x, sum, la.ErrShape, "want no scalar"},
		{"dropout of Gorgonia", x, G.Must(G.Dropout(x, 0.5)), la.ErrUnsupported, "the block has"},
		{"a log-sum-exp", x, must2(la.LogSumExp(out)), la.ErrUnsupported, "the block has"},
	} {
		if y, err := Recompute(c.x, c.y); y != nil || !errors.Is(err, c.is) || !strings.Contains(fmt.Sprint(err), c.says) {
			t.Errorf("%s: %v, %v, want %s", c.what, y, err, c.says)
		}
	}
	y := G.Must(Recompute(x, G.Must(Activate(x, GELU))))
	cost := G.Must(G.Sum(y))
	lisp := G.NewLispMachine(g.SubgraphRoots(cost))
	defer lisp.Close()
	if err := la.Cause(lisp.RunAll()); !errors.Is(err, la.ErrUnsupported) || !strings.Contains(fmt.Sprint(err), "use a tape machine") {
		t.Errorf("the lisp machine: %v", err)
	}
	between := G.Must(Activate(x, SiLU))
	y = G.Must(Recompute(x, G.Must(Activate(between, GELU))))
	if _, err := Backpropagate(G.Nodes{y}, G.Nodes{z}, G.Nodes{between}); !errors.Is(err, la.ErrGraph) {
		t.Errorf("the gradient of a node of a block: %v", err)
	}
}

// TestGPUOpsRecompute: on a GPU, gradients of a block with dropout have the bits of a graph that keeps its values.
func TestGPUOpsRecompute(t *testing.T) {
	gpu, numbers := devicetest.Open(t), deepInputs(t)
	run := func(recompute, share bool) (all []G.Value) {
		const rows, width = 12, 32
		g := G.NewGraph()
		input := func(name string, shape ...int) *G.Node {
			in := numbers(name, shape...)
			return G.NewTensor(g, tensor.Float32, len(shape), G.WithShape(shape...), G.WithName(name), G.WithValue(uploads(t, gpu)(values(t, in, tensor.Float32, false))))
		}
		x, seed := input("x", rows, width), G.NewScalar(g, tensor.Int, G.WithName("seed"))
		noErrors(t, G.Let(seed, 3))
		wrt, y := G.Nodes{x}, x
		for i := range 2 {
			from, qkv := y, make(G.Nodes, 3)
			for k := range qkv {
				w := input(fmt.Sprint("w", i, k), width, width)
				wrt = append(wrt, w)
				qkv[k] = G.Must(SplitHeads(G.Must(Reshape(G.Must(Convert(G.Must(Linear(y, w, nil)), la.BFloat16)), 2, rows/2, width)), 1))
			}
			h := G.Must(MergeHeads(G.Must(la.Attention(qkv[0], qkv[1], qkv[2], la.WithCausal(), la.WithDropout(0.5, seed)))))
			h = G.Must(Convert(G.Must(Reshape(h, rows, width)), tensor.Float32))
			if y = G.Must(Add(h, y)); recompute {
				y = G.Must(Recompute(from, y))
			}
		}
		grads, err := Backpropagate(G.Nodes{y}, G.Nodes{input("dy", rows, width)}, wrt)
		noErrors(t, err)
		if share {
			noErrors(t, rewrite.ShareMemory(g, append(grads, y)...))
		}
		m := G.NewTapeMachine(g)
		defer m.Close()
		for range 2 {
			m.Reset()
			noErrors(t, la.Cause(m.RunAll()))
		}
		for _, n := range append(grads, y) {
			all = append(all, downloaded(t, n.Value()))
		}
		return all
	}
	want := run(false, false)
	for _, share := range []bool{false, true} {
		for i, got := range run(true, share) {
			if !slices.Equal(floatsOf(t, got), floatsOf(t, want[i])) {
				t.Errorf("result %d, memory shared %t: %v, want %v", i, share, got, want[i])
			}
		}
	}
}
