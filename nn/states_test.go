package nn

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

func stateCases(rng *rand.Rand) (cases []opCase) {
	for _, n := range []int{1, 2, 3, 33} { // 33: two launches on a GPU
		shape := randomShape(rng, 2, 3, 4)
		if n > 3 {
			shape = []int{1, 2}
		}
		dim := shape[len(shape)-1]
		rows := shape[:len(shape)-1]
		var inputs []opInput
		for i := range 2 * n {
			if i < n {
				inputs = append(inputs, randomInput(rng, fmt.Sprintf("outs[%d]", i), shape...))
			} else {
				inputs = append(inputs, randomInput(rng, fmt.Sprintf("lses[%d]", i-n), rows...))
			}
		}
		shares := func(in [][]float64, row int) (w []float64, lse float64) {
			sum := 0.0
			for _, x := range in {
				sum += math.Exp(x[row])
			}
			for _, x := range in {
				w = append(w, math.Exp(x[row])/sum)
			}
			return w, math.Log(sum)
		}
		size, count := tensor.Shape(shape).TotalSize(), tensor.Shape(rows).TotalSize()
		cases = append(cases, opCase{ // both results are used: the lisp machine refuses a root that is no scalar
			name: fmt.Sprintf("%d states of %v", n, shape), inputs: inputs, shape: []int{size + count}, size: 8,
			build: func(in []*G.Node) (*G.Node, error) {
				out, lse, err := MergeStates(in[:n], in[n:])
				if err != nil {
					return nil, err
				}
				if out, err = Reshape(out, size); err != nil {
					return nil, err
				}
				if lse, err = Reshape(lse, count); err != nil {
					return nil, err
				}
				return Concat(0, out, lse)
			},
			want: func(in [][]float64) []float64 {
				y := make([]float64, size+count)
				for i := range size {
					w, _ := shares(in[n:], i/dim)
					for k, w := range w {
						y[i] += w * in[k][i]
					}
				}
				for i := range count {
					_, y[size+i] = shares(in[n:], i)
				}
				return y
			},
		})
	}
	return cases
}

// Attention to all keys is that to two parts of them, merged; so are its gradients. The first part has no key for
// some sequences.
func TestMergeStatesOfAttention(t *testing.T) {
	rng := reftest.Rand(t)
	const batch, heads, kvHeads, queries, keys, cut, dim = 2, 4, 2, 5, 33, 12, 8
	random := func(shape ...int) *tensor.Dense {
		x := make([]float64, tensor.Shape(shape).TotalSize())
		for i := range x {
			x[i] = rng.NormFloat64()
		}
		return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))
	}
	q, k, v := random(batch, heads, queries, dim), random(batch, kvHeads, keys, dim), random(batch, kvHeads, keys, dim)
	wo, wl := random(batch, heads, queries, dim), random(batch, heads, queries)
	run := func(parts bool) (values []float64) {
		g := G.NewGraph()
		in := func(name string, x *tensor.Dense) *G.Node {
			return G.NewTensor(g, tensor.Float64, x.Dims(), G.WithShape(x.Shape()...), G.WithName(name), G.WithValue(x.Clone().(*tensor.Dense)))
		}
		nodes := []*G.Node{in("q", q), in("k", k), in("v", v)}
		attend := func(k, v *G.Node, opts ...la.Option) (out, lse *G.Node) {
			out, err := la.Attention(nodes[0], k, v, opts...)
			if err != nil {
				t.Fatal(err)
			}
			return out, graphtest.LogSumExp(t, out)
		}
		var out, lse *G.Node
		if !parts {
			out, lse = attend(nodes[1], nodes[2], la.WithCausal())
		} else {
			part := func(x *G.Node, from, to int) *G.Node {
				y, err := Slice(x, 2, from, to)
				if err != nil {
					t.Fatal(err)
				}
				return y
			}
			// The queries are the last ones of all keys: they see all of the first part.
			o1, l1 := attend(part(nodes[1], 0, cut), part(nodes[2], 0, cut))
			o2, l2 := attend(part(nodes[1], cut, keys), part(nodes[2], cut, keys), la.WithCausal())
			none := G.NewVector(g, tensor.Int, G.WithShape(batch), G.WithName("none"), G.WithValue(tensor.New(tensor.WithShape(batch), tensor.WithBacking([]int{0, 0}))))
			o3, l3 := attend(nodes[1], nodes[2], la.WithLengths(none))
			var err error
			if out, lse, err = MergeStates([]*G.Node{o1, o2, o3}, []*G.Node{l1, l2, l3}); err != nil {
				t.Fatal(err)
			}
		}
		cost := G.Must(G.Add(G.Must(G.Sum(G.Must(G.HadamardProd(out, in("wo", wo))))), G.Must(G.Sum(G.Must(G.HadamardProd(lse, in("wl", wl)))))))
		grads, err := G.Grad(cost, nodes...)
		if err != nil {
			t.Fatal(err)
		}
		read := append([]*G.Node{out, lse}, grads...)
		got := make([]G.Value, len(read))
		for i, n := range read {
			G.Read(n, &got[i])
		}
		m := G.NewTapeMachine(g)
		defer m.Close()
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		for _, v := range got {
			values = append(values, v.Data().([]float64)...)
		}
		return values
	}
	whole, merged := run(false), run(true)
	if len(whole) != len(merged) {
		t.Fatalf("%d numbers and %d", len(whole), len(merged))
	}
	for i, x := range whole {
		if !(math.Abs(merged[i]-x) <= 1e-12*(1+math.Abs(x))) {
			t.Fatalf("number %d: %v, want %v", i, merged[i], x)
		}
	}
}

// States on a GPU merge there, also more than a launch takes, and in a recording.
func TestGPUOpsMergeThere(t *testing.T) {
	gpu := devicetest.Open(t)
	rng := reftest.Rand(t)
	there := func(x *tensor.Dense) *device.Tensor {
		d, err := gpu.Upload(x)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	for _, n := range []int{1, 2, 32, 33, 70} {
		draw := func() (s la.State) {
			out, lse := make([]float32, 2*3*8), make([]float32, 2*3)
			for i := range out {
				out[i] = float32(rng.NormFloat64())
			}
			for i := range lse {
				if lse[i] = float32(rng.NormFloat64() * 3); rng.IntN(4) == 0 {
					lse[i] = float32(math.Inf(-1))
				}
			}
			return la.State{Out: tensor.New(tensor.WithShape(2, 3, 8), tensor.WithBacking(out)), LSE: tensor.New(tensor.WithShape(2, 3), tensor.WithBacking(lse))}
		}
		up := func(s la.State) la.State {
			return la.State{Out: there(s.Out.(*tensor.Dense)), LSE: there(s.LSE.(*tensor.Dense))}
		}
		want := draw()
		got := up(want)
		var host, moved []la.State
		for range n {
			s := draw()
			host, moved = append(host, s), append(moved, up(s))
		}
		if err := la.Merge(want, host...); err != nil {
			t.Fatal(err)
		}
		check := func(what string) {
			t.Helper()
			for _, x := range [][2]G.Value{{got.Out, want.Out}, {got.LSE, want.LSE}} {
				d, err := x[0].(*device.Tensor).Download()
				if err != nil {
					t.Fatal(err)
				}
				y := x[1].Data().([]float32)
				for i, v := range d.Data().([]float32) {
					if !(math.Abs(float64(v-y[i])) <= 1e-5*(1+math.Abs(float64(y[i]))) || v == y[i]) {
						t.Fatalf("%s, %d states, number %d: %v, want %v", what, n, i, v, y[i])
					}
				}
			}
		}
		if err := la.Merge(got, moved...); err != nil {
			t.Fatal(err)
		}
		check("at once")
		recording, err := gpu.Record(func() error { return la.Merge(got, moved...) })
		if err != nil {
			t.Fatal(err)
		}
		host[0] = draw()
		for _, x := range [][2]G.Value{{moved[0].Out, host[0].Out}, {moved[0].LSE, host[0].LSE}} {
			if err := x[0].(*device.Tensor).CopyFrom(x[1].(*tensor.Dense)); err != nil {
				t.Fatal(err)
			}
		}
		if err := la.Merge(want, host...); err != nil {
			t.Fatal(err)
		}
		if err := recording.Replay(); err != nil {
			t.Fatal(err)
		}
		check("a replay")
		if err := recording.Close(); err != nil {
			t.Fatal(err)
		}
		for name, err := range map[string]error{
			"a state in host memory": la.Merge(got, host...), "dst in host memory": la.Merge(want, moved...),
			"dst among the states": la.Merge(got, got), "one tensor": la.Merge(la.State{Out: got.Out, LSE: moved[0].LSE}, moved...),
		} {
			if !errors.Is(err, la.ErrUnsupported) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if err := la.Merge(la.State{Out: got.LSE, LSE: got.Out}, moved...); !errors.Is(err, la.ErrShape) {
			t.Errorf("turned round: %v", err)
		}
	}
}

func TestMergeNodeErrors(t *testing.T) {
	g := G.NewGraph()
	node := func(shape ...int) *G.Node {
		return G.NewTensor(g, tensor.Float32, len(shape), G.WithShape(shape...), G.WithName(strings.Repeat("x", len(shape))))
	}
	for name, c := range map[string]struct {
		outs, lses []*G.Node
		want       error
	}{
		"none":              {nil, nil, la.ErrGraph},
		"one without":       {[]*G.Node{node(2, 3)}, nil, la.ErrGraph},
		"nil":               {[]*G.Node{nil}, []*G.Node{nil}, la.ErrGraph},
		"a vector":          {[]*G.Node{node(2)}, []*G.Node{node(2)}, la.ErrShape},
		"rows do not match": {[]*G.Node{node(2, 3)}, []*G.Node{node(3)}, la.ErrShape},
	} {
		if _, _, err := MergeStates(c.outs, c.lses); !errors.Is(err, c.want) {
			t.Errorf("nodes, %s: %v, want %v", name, err, c.want)
		}
	}
}

// first is the first of two nodes.
func first(x, _ *G.Node, err error) (*G.Node, error) { return x, err }

// The vector of a merge says how many rows it has, whatever the shape: a run may have fewer than the graph.
func TestMergedParts(t *testing.T) {
	for each := range 5 {
		for dim := 1; dim < 7; dim++ {
			r := mergedPart{kind: kind{3, tensor.Float32}, rest: tensor.Shape{each + 1, dim}}
			seen := map[int]bool{}
			for n := 1; n < 12; n++ {
				rows := n * (each + 1)
				size := lseAt(rows*dim) + rows
				seen[size] = true
				if got, ok := r.first(size); !ok || got != n {
					t.Fatalf("%v: a vector of %d elements has %d, %v, want %d", r.rest, size, got, ok, n)
				}
				if at := r.from(tensor.Shape{size}); at != 0 {
					t.Fatalf("%v: the output is at %d", r.rest, at)
				}
			}
			for n := range 12 {
				if _, ok := r.first(n); ok && !seen[n] {
					t.Fatalf("%v: a vector of %d elements is one", r.rest, n)
				}
			}
		}
	}
}

// TestMergeStatesGradientsOfEmptyStates: what lies in the output of a state that has seen no key reaches no gradient. Such a
// state has a log-sum-exp of -Inf, and its output may be NaN.
func TestMergeStatesGradientsOfEmptyStates(t *testing.T) {
	inf, nan := math.Inf(-1), math.NaN()
	for empty := range 3 {
		g := G.NewGraph()
		var outs, lses []*G.Node
		for i := range 3 {
			out, lse := []float64{1 + float64(i), 2, 3, -float64(i)}, []float64{0.5, 0.25 * float64(i)}
			if i == empty {
				out, lse = []float64{nan, nan, 3, 4}, []float64{inf, 1}
			}
			outs = append(outs, G.NewMatrix(g, tensor.Float64, G.WithShape(2, 2), G.WithName(fmt.Sprint("out", i)), G.WithValue(tensor.New(tensor.WithShape(2, 2), tensor.WithBacking(out)))))
			lses = append(lses, G.NewVector(g, tensor.Float64, G.WithShape(2), G.WithName(fmt.Sprint("lse", i)), G.WithValue(tensor.New(tensor.WithShape(2), tensor.WithBacking(lse)))))
		}
		y := G.Must(first(MergeStates(outs, lses)))
		inputs := append(outs, lses...)
		grads, err := G.Grad(G.Must(G.Sum(G.Must(G.Square(y)))), inputs...)
		if err != nil {
			t.Fatal(err)
		}
		values := make([]G.Value, len(grads))
		for i, n := range grads {
			G.Read(n, &values[i])
		}
		vm := G.NewTapeMachine(g)
		if err := vm.RunAll(); err != nil {
			t.Fatal(err)
		}
		for i, v := range values {
			for j, x := range v.Data().([]float64) {
				if math.IsNaN(x) || math.IsInf(x, 0) {
					t.Errorf("state %d is empty: gradient %d has %v at %d", empty, i, x, j)
				}
			}
		}
		if err := vm.Close(); err != nil {
			t.Error(err)
		}
	}
}
