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
	"gorgonia.org/leanattention/internal/gputest"
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
		cases = append(cases,
			opCase{
				name: fmt.Sprintf("output of %d states of %v", n, shape), inputs: inputs, shape: shape, size: 8,
				build: func(in []*G.Node) (*G.Node, error) { return MergeStates(in[:n], in[n:]) },
				want: func(in [][]float64) []float64 {
					y := make([]float64, len(in[0]))
					for i := range y {
						w, _ := shares(in[n:], i/dim)
						for k, w := range w {
							y[i] += w * in[k][i]
						}
					}
					return y
				},
			},
			opCase{
				name: fmt.Sprintf("log-sum-exp of %d states of %v", n, shape), inputs: inputs[n:], shape: rows, size: 8,
				build: func(in []*G.Node) (*G.Node, error) { return MergeLSE(in...) },
				want: func(in [][]float64) []float64 {
					y := make([]float64, len(in[0]))
					for i := range y {
						_, y[i] = shares(in, i)
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
			out, err := la.Attention(nodes[0], k, v, append(opts, la.WithLSE(&lse))...)
			if err != nil {
				t.Fatal(err)
			}
			return out, lse
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
			if out, err = MergeStates([]*G.Node{o1, o2, o3}, []*G.Node{l1, l2, l3}); err != nil {
				t.Fatal(err)
			}
			if lse, err = MergeLSE(l1, l2, l3); err != nil {
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

// Attend of parts of the keys, merged, is Attend of all, in any order and nesting; slices give the same bits as tensors.
func TestMerge(t *testing.T) {
	rng := reftest.Rand(t)
	for range 30 {
		heads, queries, keys, dim := 1+rng.IntN(3), 1+rng.IntN(4), 1+rng.IntN(50), 1+rng.IntN(40)
		random := func(shape ...int) *tensor.Dense {
			x := make([]float32, tensor.Shape(shape).TotalSize())
			for i := range x {
				x[i] = float32(rng.NormFloat64())
			}
			return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))
		}
		state := func() la.State {
			s := la.State{Out: random(heads, queries, dim), LSE: random(heads, queries)}
			reftest.Poison(s.Out.Data().([]float32))
			reftest.Poison(s.LSE.Data().([]float32))
			return s
		}
		q, k, v := random(heads, queries, dim), random(heads, keys, dim), random(heads, keys, dim)
		attend := func(from, to int) la.State {
			s := state()
			part := func(x *tensor.Dense) G.Value { // a view, of other strides
				y, err := x.Slice(nil, G.S(from, to), G.S(0, dim))
				if err != nil {
					t.Fatal(err)
				}
				d := y.Materialize().(*tensor.Dense)
				if err := d.Reshape(heads, to-from, dim); err != nil {
					t.Fatal(err)
				}
				return d
			}
			if err := la.Attend(la.Args{Q: q, K: part(k), V: part(v), Out: s.Out, LSE: s.LSE}); err != nil {
				t.Fatal(err)
			}
			return s
		}
		var parts []la.State
		for from := 0; from < keys; {
			to := from + 1 + rng.IntN(keys-from)
			parts = append(parts, attend(from, to))
			from = to
		}
		rng.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
		whole, flat, nested := attend(0, keys), state(), parts[0]
		if err := la.Merge(flat, parts...); err != nil {
			t.Fatal(err)
		}
		for _, p := range parts[1:] {
			to := state()
			if err := la.Merge(to, nested, p); err != nil {
				t.Fatal(err)
			}
			nested = to
		}
		for i, s := range []la.State{flat, nested} {
			for j, x := range [][2]G.Value{{s.Out, whole.Out}, {s.LSE, whole.LSE}} {
				got, want := x[0].Data().([]float32), x[1].Data().([]float32)
				for n := range want {
					if !(math.Abs(float64(got[n]-want[n])) <= 1e-5*(1+math.Abs(float64(want[n])))) {
						t.Fatalf("%d, %d: number %d is %v, want %v", i, j, n, got[n], want[n])
					}
				}
			}
		}
		var outs, lses [][]float32
		for _, p := range parts {
			outs, lses = append(outs, p.Out.Data().([]float32)), append(lses, p.LSE.Data().([]float32))
		}
		out, lse := make([]float32, heads*queries*dim), make([]float32, heads*queries)
		if err := la.MergeSlices(out, lse, dim, outs, lses); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(out, flat.Out.Data().([]float32)) || !slices.Equal(lse, flat.LSE.Data().([]float32)) {
			t.Fatal("slices give other bits")
		}
	}
}

// States on a GPU merge there, also more than a launch takes, and in a recording.
func TestGPUOpsMergeThere(t *testing.T) {
	gpu := gputest.Open(t)
	rng := reftest.Rand(t)
	there := func(x *tensor.Dense) *la.DeviceTensor {
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
		var host, device []la.State
		for range n {
			s := draw()
			host, device = append(host, s), append(device, up(s))
		}
		if err := la.Merge(want, host...); err != nil {
			t.Fatal(err)
		}
		check := func(what string) {
			t.Helper()
			for _, x := range [][2]G.Value{{got.Out, want.Out}, {got.LSE, want.LSE}} {
				d, err := x[0].(*la.DeviceTensor).Download()
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
		if err := la.Merge(got, device...); err != nil {
			t.Fatal(err)
		}
		check("at once")
		recording, err := gpu.Record(func() error { return la.Merge(got, device...) })
		if err != nil {
			t.Fatal(err)
		}
		host[0] = draw()
		for _, x := range [][2]G.Value{{device[0].Out, host[0].Out}, {device[0].LSE, host[0].LSE}} {
			if err := x[0].(*la.DeviceTensor).CopyFrom(x[1].(*tensor.Dense)); err != nil {
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
			"a state in host memory": la.Merge(got, host...), "dst in host memory": la.Merge(want, device...),
			"dst among the states": la.Merge(got, got), "one tensor": la.Merge(la.State{Out: got.Out, LSE: device[0].LSE}, device...),
		} {
			if !errors.Is(err, la.ErrUnsupported) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if err := la.Merge(la.State{Out: got.LSE, LSE: got.Out}, device...); !errors.Is(err, la.ErrShape) {
			t.Errorf("turned round: %v", err)
		}
	}
}

// Results that share memory with a state, or with each other, wholly or by a single element, are refused, as slices
// and as tensors, and nothing is written. Neighbours in memory are no overlap.
func testMergeOverlaps[F float](t *testing.T) {
	const rows, dim = 2, 3
	names := []string{"out", "lse", "outs[0]", "outs[1]", "lses[0]", "lses[1]"}
	length := func(i int) int { return rows * []int{dim, 1, dim, dim, 1, 1}[i] }
	for to := range 2 {
		for with := range names {
			for _, by := range []int{0, 1, length(with)} { // elements that are shared
				if with == to {
					continue
				}
				memory := make([]F, 100)
				var all [6][]F
				for i := range all {
					all[i] = make([]F, length(i))
				}
				const at = 50
				all[to] = memory[at : at+length(to)]
				all[with] = memory[at-length(with)+by : at+by]
				dst := func(i, last int) *tensor.Dense {
					return tensor.New(tensor.WithShape([]int{rows, last}[:1+last/dim]...), tensor.WithBacking(all[i]))
				}
				errs := map[string]error{
					"MergeSlices": la.MergeSlices(all[0], all[1], dim, all[2:4], all[4:]),
					"Merge": la.Merge(la.State{Out: dst(0, dim), LSE: dst(1, 1)},
						la.State{Out: dst(2, dim), LSE: dst(4, 1)}, la.State{Out: dst(3, dim), LSE: dst(5, 1)}),
				}
				for op, err := range errs {
					if by == 0 && err != nil {
						t.Errorf("%s: %s behind %s: %v", op, names[to], names[with], err)
					}
					if by > 0 && (!errors.Is(err, la.ErrUnsupported) || !strings.Contains(err.Error(), "share")) {
						t.Errorf("%s: %d elements of %s in %s: %v", op, by, names[with], names[to], err)
					}
				}
				if by > 0 && slices.ContainsFunc(memory, func(x F) bool { return x != 0 }) {
					t.Errorf("%d elements of %s in %s: something was written", by, names[with], names[to])
				}
			}
		}
	}
	out, lse := []F{1, 2, 3}, []F{0}
	if err := la.MergeSlices(out, lse, 3, [][]F{{1, 2, 3}, out}, [][]F{{0}, {0}}); !errors.Is(err, la.ErrUnsupported) || !slices.Equal(out, []F{1, 2, 3}) {
		t.Errorf("into the second state: %v, %v", out, err)
	}
}

func TestMergeErrors(t *testing.T) {
	of := func(dtype tensor.Dtype, shape ...int) *tensor.Dense {
		return tensor.New(tensor.Of(dtype), tensor.WithShape(shape...))
	}
	f, d := tensor.Float32, tensor.Float64
	good := func() la.State { return la.State{Out: of(f, 2, 3, 4), LSE: of(f, 2, 3)} }
	shared := good()
	turned := la.State{Out: of(f, 4, 3, 2), LSE: of(f, 2, 3)}
	if err := turned.Out.(*tensor.Dense).T(2, 1, 0); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		err  error
		want error
		says string
	}{
		"no states":              {la.Merge(good()), la.ErrShape, "no states"},
		"nil":                    {la.Merge(good(), la.State{}), la.ErrShape, "state 0"},
		"no log-sum-exp":         {la.Merge(la.State{Out: of(f, 2, 3)}, good()), la.ErrShape, "dst.LSE is nil"},
		"another width":          {la.Merge(good(), la.State{Out: of(f, 2, 3, 5), LSE: of(f, 2, 3)}), la.ErrShape, "(2, 3, 5)"},
		"other rows":             {la.Merge(good(), good(), la.State{Out: of(f, 2, 2, 4), LSE: of(f, 2, 2)}), la.ErrShape, "state 1"},
		"rows that do not match": {la.Merge(good(), la.State{Out: of(f, 2, 3, 4), LSE: of(f, 3, 2)}), la.ErrShape, "(3, 2)"},
		"another rank":           {la.Merge(la.State{Out: of(f, 1, 3, 4), LSE: of(f, 1, 3)}, la.State{Out: of(f, 3, 4), LSE: of(f, 3)}), la.ErrShape, "(3, 4)"},
		"a vector":               {la.Merge(la.State{Out: of(f, 2), LSE: of(f, 2)}, good()), la.ErrShape, "dst.Out has shape (2)"},
		"integers":               {la.Merge(good(), la.State{Out: of(tensor.Int, 2, 3, 4), LSE: of(tensor.Int, 2, 3)}), la.ErrDType, "int"},
		"another type":           {la.Merge(good(), la.State{Out: of(d, 2, 3, 4), LSE: of(d, 2, 3)}), la.ErrDType, "float64"},
		"two types":              {la.Merge(la.State{Out: of(f, 2, 3, 4), LSE: of(d, 2, 3)}, good()), la.ErrDType, "dst.LSE"},
		"shared memory":          {la.Merge(shared, shared), la.ErrUnsupported, "shares memory"},
		"a turned result":        {la.Merge(turned, good()), la.ErrUnsupported, "row-major"},
		"slices":                 {la.MergeSlices(make([]float32, 4), make([]float32, 2), 2, [][]float32{make([]float32, 4)}, nil), la.ErrShape, "1 output"},
		"rows of slices":         {la.MergeSlices(make([]float32, 4), make([]float32, 2), 2, [][]float32{make([]float32, 4)}, [][]float32{make([]float32, 3)}), la.ErrShape, "state 0"},
	} {
		if !errors.Is(c.err, c.want) || !strings.Contains(c.err.Error(), c.says) {
			t.Errorf("%s: %v, want %v, and %q", name, c.err, c.want, c.says)
		}
	}
	testMergeOverlaps[float32](t)
	testMergeOverlaps[float64](t)
	g := G.NewGraph()
	node := func(shape ...int) *G.Node {
		return G.NewTensor(g, f, len(shape), G.WithShape(shape...), G.WithName(strings.Repeat("x", len(shape))))
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
		if _, err := MergeStates(c.outs, c.lses); !errors.Is(err, c.want) {
			t.Errorf("nodes, %s: %v, want %v", name, err, c.want)
		}
	}
	if _, err := MergeLSE(); !errors.Is(err, la.ErrGraph) {
		t.Errorf("no log-sum-exps: %v", err)
	}
}
