package ranks_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/rankstest"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/ranks"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// joinHost is the beginning of a part of a test by a rank without a GPU.
func joinHost(t *testing.T) *ranks.Comm {
	t.Helper()
	world, err := ranks.Environment()
	if err != nil {
		t.Fatal(err)
	}
	comm, err := ranks.Join(t.Context(), nil, world)
	if err != nil {
		t.Fatal(err)
	}
	return comm
}

// onHosts runs a part on so many ranks, without GPUs, and returns what they have written.
func onHosts(t *testing.T, size int) (texts []string) {
	t.Helper()
	for rank, r := range rankstest.RunHost(t, size, nil) {
		if r.Err != nil {
			t.Fatalf("rank %d of %d: %v\n%s", rank, size, r.Err, r.Output)
		}
		texts = append(texts, r.Text)
	}
	return texts
}

// numbers are random elements, the same on every rank.
func numbers(seed uint64, n int) []float64 {
	rng := rand.New(rand.NewPCG(seed, 1))
	x := make([]float64, n)
	for i := range x {
		x[i] = float64(float32(rng.NormFloat64()))
	}
	return x
}

func tensorOf(dtype tensor.Dtype, x []float64, shape ...int) *tensor.Dense {
	if dtype == tensor.Float64 {
		return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))
	}
	y := make([]float32, len(x))
	for i, v := range x {
		y[i] = float32(v)
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(y))
}

func floats(v G.Value) (all []float64) {
	if x, ok := v.Data().([]float64); ok {
		return x
	}
	for _, x := range v.Data().([]float32) {
		all = append(all, float64(x))
	}
	return all
}

func leaf(g *G.ExprGraph, name string, v *tensor.Dense) *G.Node {
	return G.NewTensor(g, v.Dtype(), len(v.Shape()), G.WithShape(v.Shape()...), G.WithName(name), G.WithValue(v))
}

// near checks elements up to rounding.
func near(t *testing.T, what string, got, want []float64, tolerance float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d elements, want %d", what, len(got), len(want))
	}
	for i, w := range want {
		if !(math.Abs(got[i]-w) <= tolerance*(1+math.Abs(w))) {
			t.Fatalf("%s: element %d is %v, want %v", what, i, got[i], w)
		}
	}
}

// runOn runs a graph, and returns the values of nodes.
func runOn(t *testing.T, g *G.ExprGraph, nodes ...*G.Node) (all [][]float64) {
	t.Helper()
	values := make([]G.Value, len(nodes))
	for i, n := range nodes {
		G.Read(n, &values[i])
	}
	m := G.NewTapeMachine(g)
	defer m.Close()
	if err := la.Cause(m.RunAll()); err != nil {
		t.Fatal(err)
	}
	for _, v := range values {
		all = append(all, floats(v))
	}
	return all
}

// TestHostCollectives: sums, broadcasts and merged states of ranks without GPUs.
func TestHostCollectives(t *testing.T) {
	if !rankstest.Child() {
		for size := 1; size <= 3; size++ {
			right(t, size)
		}
		return
	}
	comm := joinHost(t)
	w := comm.World()
	must := func(n *G.Node, err error) *G.Node {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	for round, dtype := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		const rows, heads, dim = 5, 7, 3
		g := G.NewGraph()
		of := func(rank, what, n int) []float64 { return numbers(uint64(100*round+10*what+rank), n) }
		sum := must(nn.AllReduce(leaf(g, "x", tensorOf(dtype, of(w.Rank, 0, 2000), 40, 50)), comm))
		from := w.Size - 1
		copied := must(nn.Broadcast(leaf(g, "b", tensorOf(tensor.Float32, of(w.Rank, 1, 11), 11)), comm, from))
		lses := func(rank int) []float64 {
			x := of(rank, 3, rows*heads)
			for i := range x {
				if (i+rank)%3 == 0 || i == 4 { // ranks without keys, and one row without any
					x[i] = math.Inf(-1)
				}
			}
			return x
		}
		out := leaf(g, "out", tensorOf(dtype, of(w.Rank, 2, rows*heads*dim), rows, heads*dim))
		merged := must(nn.MergeRanks(out, leaf(g, "lse", tensorOf(dtype, lses(w.Rank), rows, heads)), comm))
		got := runOn(t, g, sum, copied, merged)

		want := make([]float64, 2000)
		for rank := range w.Size {
			for i, v := range of(rank, 0, 2000) {
				want[i] += v
			}
		}
		near(t, "sum", got[0], want, 1e-6)
		near(t, "broadcast", got[1], of(from, 1, 11), 0)
		if w.Size == 1 {
			continue // merged is out
		}
		h := G.NewGraph()
		var outs, all []*G.Node
		for rank := range w.Size {
			outs = append(outs, leaf(h, fmt.Sprint("out ", rank), tensorOf(dtype, of(rank, 2, rows*heads*dim), rows*heads, dim)))
			all = append(all, leaf(h, fmt.Sprint("lse ", rank), tensorOf(dtype, lses(rank), rows*heads)))
		}
		one, lse, err := nn.MergeStates(outs, all)
		if err != nil {
			t.Fatal(err)
		}
		whole := runOn(t, h, one, lse)[0]
		a, b := w.Part(heads)
		want = nil
		for row := range rows {
			want = append(want, whole[(row*heads+a)*dim:(row*heads+b)*dim]...)
		}
		near(t, "merged", got[2], want, 0)
	}
	hostRefusals(t, comm)
	if err := comm.Close(); err != nil {
		t.Fatal(err)
	}
	rankstest.Write(t, allRight(w.Size, w.Rank))
}

// allRight is what a rank writes that has found no error.
func allRight(size, rank int) string { return fmt.Sprintf("rank %d of %d is right", rank, size) }

// hostRefusals are what is no work for ranks without GPUs.
func hostRefusals(t *testing.T, comm *ranks.Comm) {
	g := G.NewGraph()
	of := func(name string, dtype tensor.Dtype, shape ...int) *G.Node {
		return G.NewTensor(g, dtype, len(shape), G.WithShape(shape...), G.WithName(fmt.Sprint(name, shape, dtype)))
	}
	out, lse := of("out", tensor.Float32, 2, 12), of("lse", tensor.Float32, 2, 4)
	for _, c := range []struct {
		out, lse *G.Node
		comm     *ranks.Comm
		kind     error
		text     string
	}{
		{nil, lse, comm, la.ErrGraph, "out is nil"},
		{out, nil, comm, la.ErrGraph, "lse is nil"},
		{out, lse, nil, la.ErrState, "ranks.Join"},
		{of("out", tensor.Float64, 2, 12), lse, comm, la.ErrDType, "float"},
		{of("out", tensor.Float32, 3, 12), lse, comm, la.ErrShape, "out has shape (3, 12)"},
		{of("out", tensor.Float32, 2, 13), lse, comm, la.ErrShape, "out has shape (2, 13)"},
		{of("out", tensor.Float32, 2, 2, 3), lse, comm, la.ErrShape, "rank"},
	} {
		if _, err := nn.MergeRanks(c.out, c.lse, c.comm); !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.text) || !strings.Contains(err.Error(), "MergeRanks") {
			t.Errorf("%q: %v", c.text, err)
		}
	}
	if size := comm.World().Size; size > 1 {
		_, err := nn.MergeRanks(of("out", tensor.Float32, 2, 3*(size-1)), of("lse", tensor.Float32, 2, size-1), comm)
		if !errors.Is(err, la.ErrShape) || !strings.Contains(err.Error(), "want a head for each") {
			t.Errorf("fewer heads than ranks: %v", err)
		}
	}
}

// TestHostDiffers: ranks that run different collectives fail, all with an error that names both.
func TestHostDiffers(t *testing.T) {
	if !rankstest.Child() {
		for rank, text := range onHosts(t, 2) {
			if !strings.Contains(text, "AllReduce") || !strings.Contains(text, "2 elements") || !strings.Contains(text, "3 elements") {
				t.Errorf("rank %d: %s", rank, text)
			}
		}
		return
	}
	comm := joinHost(t)
	g := G.NewGraph()
	n := 2 + comm.World().Rank
	y, err := nn.AllReduce(leaf(g, "x", tensorOf(tensor.Float32, make([]float64, n), n)), comm)
	if err != nil {
		t.Fatal(err)
	}
	m := G.NewTapeMachine(g)
	defer m.Close()
	if err = la.Cause(m.RunAll()); !errors.Is(err, la.ErrRank) {
		t.Errorf("%v of %v", err, y)
	}
	rankstest.Write(t, err.Error())
	_ = comm.Close()
}
