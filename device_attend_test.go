package leanattention_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	"strings"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/tensor"
)

// deviceElements are the element types of queries and of keys, in turns.
func deviceElements(turn int) (query, kv tensor.Dtype) {
	types := []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16}
	return types[turn/3%3], types[turn%3]
}

// testDeviceAttend: every acceptance case on tensors of a GPU.
func testDeviceAttend(t *testing.T, at graphtest.Place) {
	rng := reftest.Rand(t)
	most := 3_000_000
	if at.Real {
		most = 20_000_000
	}
	if reftest.RaceEnabled {
		most = 300_000
	}
	turn := 0
	for _, c := range acceptanceCases() {
		if !at.HasKernel(c.shape) || work(c.shape) > most {
			continue
		}
		for i, in := range reftest.AllInputs {
			if turn++; !reftest.Every(t) && i != turn/2%len(reftest.AllInputs) && !at.Real {
				continue
			}
			x := graphtest.Spec{Inputs: in, Capacity: c.capacity}
			x.QueryType, x.KVType = deviceElements(turn)
			schedule := at.Schedule(turn)
			opts := append([]la.Option{la.WithSchedule(schedule)}, c.opts...)
			name := fmt.Sprintf("%s %v %v %v %v", c.name, in, x.QueryType, x.KVType, schedule)
			t.Run(name, func(t *testing.T) {
				p := graphtest.NewProblem(rng, c.shape, x)
				out, lse := p.AttendThere(t, at.GPU, opts...)
				p.Check(t, p.ReferenceThere(at), out, lse)
			})
		}
	}
	if turn < 100 {
		t.Errorf("only %d cases", turn)
	}
}

// testDeviceAttendRandom meets what no list has: groups of 1 to 16, lengths from
// 0 on, several queries.
func testDeviceAttendRandom(t *testing.T, at graphtest.Place, n int) {
	rng := reftest.Rand(t)
	dims := []int{64, 80, 96, 128, 256}
	for turn := range n {
		s := reftest.RandomShape(rng)
		s.Queries = graphtest.Repeated(len(s.Keys), max(s.Queries[0], 1))
		if at.Real {
			s.Dim = dims[rng.IntN(5)]
			s.ValueDim = s.Dim
			s.Heads = s.KVHeads * (1 + rng.IntN(16))
		}
		x := graphtest.Spec{Inputs: reftest.AllInputs[rng.IntN(4)], Capacity: max(slices.Max(s.Keys)+rng.IntN(3), 1)}
		x.QueryType, x.KVType = deviceElements(turn)
		if turn%3 == 0 {
			graphtest.PadQueries(rng, &s, &x)
		}
		p := graphtest.NewProblem(rng, s, x)
		out, lse := p.AttendThere(t, at.GPU, la.WithTileTokens(rng.IntN(3)*64), la.WithWorkers(rng.IntN(9)), la.WithSchedule(at.Schedule(turn)))
		if err := p.Compare(t, p.ReferenceThere(at), out, lse); err != nil {
			t.Fatalf("%v %v %v %v: %v", s, x.Inputs, x.QueryType, x.KVType, err)
		}
	}
}

// testDeviceAttendRepeats: the same bits every time, and those of a graph of
// nodes on the GPU.
func testDeviceAttendRepeats(t *testing.T, at graphtest.Place, repeats int) {
	rng := reftest.Rand(t)
	for turn, kv := range []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16} {
		p := graphtest.NewProblem(rng, causal(dense(8, 2, 64, 64, 2, 700, 0, 100, 3001)), graphtest.Spec{Inputs: reftest.Peaked, KVType: kv})
		opts := []la.Option{la.WithSchedule(graphtest.Schedules[turn%3])}
		first, firstLSE := p.AttendThere(t, at.GPU, opts...)
		a := p.ArgsThere(t, at.GPU)
		for range repeats {
			if err := la.Attend(a, append(p.AttendOptions(), opts...)...); err != nil {
				t.Fatal(err)
			}
		}
		for _, x := range [][2]G.Value{{graphtest.Download(t, a.Out), first}, {graphtest.Download(t, a.LSE), firstLSE}} {
			if !slices.Equal(graphtest.Bits(t, x[0]), graphtest.Bits(t, x[1])) {
				t.Fatalf("%v: other bits after %d repeats", kv, repeats)
			}
		}
		if out, lse := attentionNodes(t, at.GPU, p, opts...); !slices.Equal(graphtest.Bits(t, out), graphtest.Bits(t, first)) || !slices.Equal(graphtest.Bits(t, lse), graphtest.Bits(t, firstLSE)) {
			t.Fatalf("%v: other bits from a graph", kv)
		}
	}
}

// attentionNodes is p in a graph, between nodes that copy; it runs three times.
func attentionNodes(t testing.TB, gpu *device.GPU, p *graphtest.Problem, opts ...la.Option) (out, lse G.Value) {
	t.Helper()
	g := p.Graph()
	there := func(n *G.Node) *G.Node {
		return graphtest.Move(t, n, func(n *G.Node) (*G.Node, error) { return device.ToGPU(n, gpu) })
	}
	opts = append(append(p.Options(), g.LengthOptions(p)...), opts...)
	var err error
	if g.Out, err = la.Attention(there(g.Q), there(g.K), there(g.V), opts...); err != nil {
		t.Fatal(err)
	}
	g.LSE = graphtest.Move(t, graphtest.LogSumExp(t, g.Out), device.ToHost)
	g.Out = graphtest.Move(t, g.Out, device.ToHost)
	g.Read(t)
	vm := G.NewTapeMachine(g.G)
	defer vm.Close()
	for range 3 {
		graphtest.Again(t, vm)
	}
	return g.OutValue, g.LSEValue
}

// testDeviceRecurrence: a node's value is its own input in the next run, with no
// copy between, and the bits are those of Attend on tensors apart.
func testDeviceRecurrence(t *testing.T, at graphtest.Place) {
	rng := reftest.Rand(t)
	p := graphtest.NewProblem(rng, dense(4, 2, 64, 64, 3, 40, 90), graphtest.Spec{Capacity: 90})
	g := G.NewGraph()
	node := func(name string, x tensor.Tensor) *G.Node {
		d := graphtest.Upload(t, at.GPU, x)
		return G.NewTensor(g, d.Dtype(), len(d.Shape()), G.WithShape(d.Shape()...), G.WithName(name), G.WithValue(d))
	}
	q, k, v := node("q", p.InQ), node("k", p.InK), node("v", p.InV)
	out, err := la.Attention(q, k, v, la.WithLengths(graphtest.Input(g, "lengths", graphtest.LengthsOf(tensor.Int, p.Keys))))
	if err != nil {
		t.Fatal(err)
	}
	vm := G.NewTapeMachine(g)
	defer vm.Close()
	a := p.ArgsThere(t, at.GPU)
	a.LSE = nil
	var used int64
	for turn := range 9 {
		graphtest.Again(t, vm)
		if err := la.Attend(a); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(graphtest.Bits(t, graphtest.Download(t, out.Value())), graphtest.Bits(t, graphtest.Download(t, a.Out))) {
			t.Fatalf("turn %d: other bits", turn)
		}
		graphtest.Let(t, q, out.Value())
		a.Q, a.Out = a.Out, a.Q
		m, err := at.GPU.Memory()
		if err != nil {
			t.Fatal(err)
		}
		if turn == 2 {
			used = m.Used
		} else if turn > 2 && m.Used != used {
			t.Fatalf("%d bytes in use in turn %d, %d before", m.Used, turn, used)
		}
	}
}

// nodeOf is the node of a clone that stands for n.
func nodeOf(clone *G.ExprGraph, n *G.Node) *G.Node {
	all := clone.AllNodes()
	return all[slices.IndexFunc(all, func(c *G.Node) bool { return c.ID() == n.ID() })]
}

// testDeviceClones: clones of a graph share their ops, and so the memory of their
// values. Run at the same time, each gets its own result or is told.
func testDeviceClones(t *testing.T, gpu *device.GPU) {
	rng := reftest.Rand(t)
	g := G.NewGraph()
	r := newDeviceRelay(t, g, gpu, tensor.Float32, 64, 64)
	graphtest.Let(t, r.x, randomTensor(rng, tensor.Float32, 64, 64))
	var wg sync.WaitGroup
	var right, told atomic.Int32
	for range 4 {
		clone := g.Clone().(*G.ExprGraph)
		x, back := nodeOf(clone, r.x), nodeOf(clone, r.back)
		rng := rand.New(rand.NewPCG(rng.Uint64(), 0))
		wg.Go(func() {
			vm := G.NewTapeMachine(clone)
			defer vm.Close()
			for range 200 {
				in := randomTensor(rng, tensor.Float32, 64, 64)
				graphtest.Let(t, x, in)
				err := la.Cause(vm.RunAll())
				switch {
				case errors.Is(err, la.ErrState):
					told.Add(1)
				case err != nil:
					t.Error(err)
				default:
					right.Add(1)
					if err := sameElements(back.Value().(*tensor.Dense), in); err != nil {
						t.Error(err)
					}
				}
				vm.Reset()
			}
		})
	}
	wg.Wait()
	t.Logf("%d runs were right, %d were told", right.Load(), told.Load())
	if right.Load() == 0 {
		t.Error("no run came to its end")
	}
}

// testDeviceAttendErrors: what Attend and Attention refuse, before anything is
// written.
func testDeviceAttendErrors(t *testing.T, gpu, other *device.GPU) {
	rng := rand.New(rand.NewPCG(1, 2))
	p := graphtest.NewProblem(rng, dense(4, 2, 64, 64, 1, 9, 5), graphtest.Spec{})
	onOther := func(x tensor.Tensor) *device.Tensor { return graphtest.Upload(t, other, x) }
	small := func(dt tensor.Dtype, shape ...int) *device.Tensor {
		d, err := gpu.NewTensor(dt, shape...)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	freed := small(tensor.Float32, 2, 4, 1, 64)
	if err := freed.Free(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		set   func(*la.Args)
		want  error
		texts []string
	}{
		{"k on the host", func(a *la.Args) { a.K = p.InK }, la.ErrUnsupported, []string{"q is on " + gpu.String(), "k in host memory"}},
		{"q on the host", func(a *la.Args) { a.Q = p.InQ }, la.ErrUnsupported, []string{"q is in host memory", "k on " + gpu.String()}},
		{"out on the host", func(a *la.Args) { a.Out, _ = p.Results() }, la.ErrUnsupported, []string{"out in host memory"}},
		{"v on another GPU", func(a *la.Args) { a.V = onOther(p.InV) }, la.ErrUnsupported, []string{"q is on " + gpu.String(), "v on " + other.String()}},
		{"nil k", func(a *la.Args) { a.K = nil }, la.ErrShape, []string{"k is nil"}},
		{"nil tensor", func(a *la.Args) { a.K = (*device.Tensor)(nil) }, la.ErrState, []string{"k was not made by a GPU"}},
		{"zero tensor", func(a *la.Args) { a.Out = new(device.Tensor) }, la.ErrState, []string{"out was not made by a GPU"}},
		{"out is q", func(a *la.Args) { a.Out = a.Q }, la.ErrUnsupported, []string{"q and out are one tensor"}},
		{"out is half", func(a *la.Args) { a.Out = small(la.Float16, 2, 4, 1, 64) }, la.ErrDType, []string{"out is Float16"}},
		{"lse is half", func(a *la.Args) { a.LSE = small(la.Float16, 2, 4, 1) }, la.ErrDType, []string{"lse is Float16"}},
		{"shape of out", func(a *la.Args) { a.Out = small(tensor.Float32, 4, 2, 1, 64) }, la.ErrShape, []string{"out has shape (4, 2, 1, 64); it must be (2, 4, 1, 64)"}},
		{"shape of lse", func(a *la.Args) { a.LSE = small(tensor.Float32, 2, 4, 1, 1) }, la.ErrShape, []string{"lse has shape"}},
		{"int q", func(a *la.Args) { a.Q = small(tensor.Int32, 2, 4, 1, 64) }, la.ErrDType, []string{"q is int32"}},
		{"int k", func(a *la.Args) { a.K = small(tensor.Int32, 2, 2, 9, 64) }, la.ErrDType, []string{"k is int32"}},
		{"k unlike v", func(a *la.Args) { a.K = small(la.Float16, 2, 2, 9, 64) }, la.ErrDType, []string{"k is Float16"}},
		{"freed q", func(a *la.Args) { a.Q = freed }, la.ErrClosed, []string{"q was freed"}},
		{"lengths", func(a *la.Args) { a.Lengths = []int{1, 10} }, la.ErrLength, []string{"lengths[1] is 10"}},
		{"head dim", func(a *la.Args) {
			a.Q, a.K, a.V, a.Out = small(tensor.Float32, 2, 4, 1, 13), small(tensor.Float32, 2, 2, 9, 13), small(tensor.Float32, 2, 2, 9, 13), small(tensor.Float32, 2, 4, 1, 13)
		}, la.ErrUnsupported, []string{"on " + gpu.String(), "13"}},
	} {
		a := p.ArgsThere(t, gpu)
		out, lse := a.Out, a.LSE
		c.set(&a)
		wantError(t, la.Attend(a), c.want, "Attend", c.texts...)
		if !graphtest.AllNaN(t, graphtest.Download(t, out)) || !graphtest.AllNaN(t, graphtest.Download(t, lse)) {
			t.Errorf("%s: something was written before the error", c.name)
		}
	}

	{ // Lengths that look like those of a padded batch.
		rows := graphtest.NewProblem(reftest.Rand(t), causal(dense(4, 2, 64, 64, 4, 9, 3)), graphtest.Spec{})
		a := rows.ArgsThere(t, gpu)
		wantError(t, la.Attend(a, la.WithCausal()), la.ErrLength, "Attend", "sequence 1 has 3 keys and 4 queries", "(Args.QueryLengths)", "(WithQueriesAtEnd)")
		a.QueryLengths = []int{4, 5}
		wantError(t, la.Attend(a, la.WithCausal()), la.ErrLength, "Attend", "query lengths[1] is 5, outside [0, 4]")
		if !graphtest.AllNaN(t, graphtest.Download(t, a.Out)) || !graphtest.AllNaN(t, graphtest.Download(t, a.LSE)) {
			t.Error("lengths: something was written before the error")
		}
		g := rows.Graph()
		n, err := la.Attention(g.Q, g.K, g.V, la.WithCausal(), la.WithLengths(graphtest.Input(g.G, "lengths", graphtest.LengthsOf(tensor.Int, rows.Keys))))
		if err != nil {
			t.Fatal(err)
		}
		_, err = n.Op().Do(a.Q, a.K, a.V, graphtest.LengthsOf(tensor.Int, rows.Keys))
		wantError(t, err, la.ErrLength, "Attention", "sequence 1 has 3 keys and 4 queries", "(WithQueryLengths)", "(WithQueriesAtEnd)")
	}

	{ // A bias in host memory, or on the GPU alone.
		a := p.ArgsThere(t, gpu)
		shape := p.Dims(1, 1, p.Capacity)
		shape[0] = 1
		numbers := graphtest.TensorOf(tensor.Float32, make([]float64, p.Capacity), shape...)
		g := p.Graph()
		n, err := la.Attention(g.Q, g.K, g.V, la.WithBias(graphtest.Input(g.G, "bias", numbers)))
		if err != nil {
			t.Fatal(err)
		}
		a.Bias = numbers
		wantError(t, la.Attend(a), la.ErrUnsupported, "Attend", gpu.String(), "bias in host memory")
		_, err = n.Op().Do(a.Q, a.K, a.V, numbers)
		wantError(t, err, la.ErrUnsupported, "Attention", gpu.String(), "bias in host memory")
		short := graphtest.TensorOf(tensor.Float32, make([]float64, 3), 1, 1, 1, 3)
		a.Bias = graphtest.Upload(t, gpu, short)
		wantError(t, la.Attend(a), la.ErrShape, "Attend", "bias has shape (1, 1, 1, 3)")
		if _, err = n.Op().Do(a.Q, a.K, a.V, a.Bias); !errors.Is(err, la.ErrShape) {
			t.Errorf("Attention with a short bias: %v", err)
		}
		a.Bias = a.Out
		wantError(t, la.Attend(a), la.ErrShape, "Attend", "bias has shape")
		if !graphtest.AllNaN(t, graphtest.Download(t, a.Out)) {
			t.Error("a bias: something was written before the error")
		}
	}
	{ // Sinks in host memory, on the GPU alone, or in a result.
		a := p.ArgsThere(t, gpu)
		numbers := graphtest.SinksOf(tensor.Float32, make([]float64, 4))
		g := p.Graph()
		n, err := la.Attention(g.Q, g.K, g.V, la.WithSinks(graphtest.Input(g.G, "sinks", numbers)))
		if err != nil {
			t.Fatal(err)
		}
		a.Sinks = numbers
		wantError(t, la.Attend(a), la.ErrUnsupported, "Attend", gpu.String(), "sinks in host memory")
		_, err = n.Op().Do(a.Q, a.K, a.V, numbers)
		wantError(t, err, la.ErrUnsupported, "Attention", gpu.String(), "sinks in host memory")
		_, err = n.Op().Do(p.InQ, p.InK, p.InV, graphtest.Upload(t, gpu, numbers))
		wantError(t, err, la.ErrUnsupported, "Attention", "sinks is on "+gpu.String())
		a.Sinks = graphtest.Upload(t, gpu, graphtest.SinksOf(tensor.Float32, make([]float64, 3)))
		wantError(t, la.Attend(a), la.ErrShape, "Attend", "sinks has shape (3)")
		if _, err = n.Op().Do(a.Q, a.K, a.V, a.Sinks); !errors.Is(err, la.ErrShape) {
			t.Errorf("Attention with few sinks: %v", err)
		}
		a.Sinks = graphtest.Upload(t, gpu, graphtest.TensorOf(la.Float16, make([]float64, 4), 4))
		wantError(t, la.Attend(a), la.ErrDType, "Attend", "sinks is Float16; for a q of float32 it must be float32")
		gone := graphtest.Upload(t, gpu, numbers)
		if err := gone.Free(); err != nil {
			t.Fatal(err)
		}
		a.Sinks = gone
		wantError(t, la.Attend(a), la.ErrClosed, "Attend", "sinks was freed")
		if !graphtest.AllNaN(t, graphtest.Download(t, a.Out)) {
			t.Error("sinks: something was written before the error")
		}
	}
	wantError(t, la.Attend(p.ArgsThere(t, gpu), la.WithALiBi([]float64{1})), la.ErrShape, "Attend", "1 slope for 4 query heads")

	// The values of a graph's nodes.
	g := p.Graph()
	n, err := la.Attention(g.Q, g.K, g.V)
	if err != nil {
		t.Fatal(err)
	}
	q, k, v := graphtest.Upload(t, gpu, p.InQ), graphtest.Upload(t, gpu, p.InK), graphtest.Upload(t, gpu, p.InV)
	for _, c := range []struct {
		in    []G.Value
		want  error
		texts []string
	}{
		{[]G.Value{q, p.InK, p.InV}, la.ErrUnsupported, []string{"q is on " + gpu.String(), "k in host memory"}},
		{[]G.Value{p.InQ, p.InK, v}, la.ErrUnsupported, []string{"q is in host memory", "v on " + gpu.String()}},
		{[]G.Value{q, k, onOther(p.InV)}, la.ErrUnsupported, []string{gpu.String(), other.String()}},
		{[]G.Value{k, k, v}, la.ErrShape, []string{"not what the graph was built for"}},
	} {
		_, err := n.Op().Do(c.in...)
		wantError(t, err, c.want, "Attention", c.texts...)
	}
	if _, err := n.Op().Do(q, k, v); err != nil {
		t.Error(err)
	}
}

// testDeviceHugeScores: a score may be any finite number, with and without partials.
func testDeviceHugeScores(t *testing.T, at graphtest.Place) {
	rng := reftest.Rand(t)
	const dim = 64
	turn := 0
	for _, kv := range []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16} {
		for _, some := range [][]float64{{-0.95}, {0.95}, {-0.95, -0.8}, {0.8, 0.95}, {0.9, -0.9, 0}, {-0.9, 0}, {-0.5, -0.9}} {
			for _, n := range []int{1, 2, 33, 900} {
				turn++
				s := &scored{query: tensor.Float32, kv: kv, dim: dim, q: 1, scale: 1}
				if kv == la.Float16 {
					s.q = 0x1p112
				}
				for range n {
					k := graphtest.Format(kv).Round(some[rng.IntN(len(some))] * math.MaxFloat32 / s.q)
					s.scores, s.values = append(s.scores, k*s.q), append(s.values, float64(1+rng.IntN(8)))
				}
				s.q = math.Copysign(s.q, float64(turn%2)-0.5)
				a := s.args()
				there := la.Args{
					Q: graphtest.Upload(t, at.GPU, a.Q.(*tensor.Dense)), K: graphtest.Upload(t, at.GPU, a.K.(*tensor.Dense)), V: graphtest.Upload(t, at.GPU, a.V.(*tensor.Dense)),
					Out: graphtest.Upload(t, at.GPU, a.Out.(*tensor.Dense)), LSE: graphtest.Upload(t, at.GPU, a.LSE.(*tensor.Dense)),
				}
				schedule := at.Schedule(turn)
				if err := la.Attend(there, la.WithScale(1), la.WithSchedule(schedule), la.WithWorkers(turn%5)); err != nil {
					t.Fatal(err)
				}
				out, lse := first(graphtest.Download(t, there.Out)), first(graphtest.Download(t, there.LSE))
				wantOut, wantLSE := s.want()
				if !(math.Abs(out-wantOut) <= 1e-3*wantOut) || !(math.Abs(lse-wantLSE) <= 1e-6*math.Abs(wantLSE)+1e-3) {
					t.Errorf("%v, %d keys of %v, %v: %v and %v, want %v and %v", kv, n, some, schedule, out, lse, wantOut, wantLSE)
				}
			}
		}
	}
}

func TestDeviceAttend(t *testing.T) {
	random := reftest.Cases(t, 12, 60)
	if reftest.RaceEnabled {
		random = 10
	}
	for name, test := range map[string]func(*testing.T, graphtest.Place){
		"Cases":      testDeviceAttend,
		"Random":     func(t *testing.T, at graphtest.Place) { testDeviceAttendRandom(t, at, random) },
		"Recurrence": testDeviceRecurrence,
		"Repeats":    func(t *testing.T, at graphtest.Place) { testDeviceAttendRepeats(t, at, 3) },
		"HugeScores": testDeviceHugeScores,
	} {
		t.Run(name, func(t *testing.T) {
			gpu, _ := la.FakeGPU(t)
			test(t, graphtest.Place{GPU: gpu})
		})
	}
	t.Run("Errors", func(t *testing.T) {
		gpu, _ := la.FakeGPU(t)
		for _, ordinal := range []int{0, 1} {
			other, err := device.Open(ordinal)
			if err != nil {
				t.Fatal(err)
			}
			testDeviceAttendErrors(t, gpu, other)
			if err := other.Close(); err != nil {
				t.Error(err)
			}
		}
	})
}

// TestGPUPadded: a batch that is padded at its right, of sequences for the kernels for many rows and for few, and of none.
func TestGPUPadded(t *testing.T) {
	at, rng := graphtest.Place{GPU: devicetest.Open(t), Real: true}, reftest.Rand(t)
	plain := causal(dense(4, 2, 64, 64, 70, 70, 33, 40, 0, 5))
	for i, s := range []reftest.Shape{plain, plain, graphtest.WithScoreMods(plain, 9, 0), withSinks(plain, 0, 1, 2, 3), plain} {
		opts := [][]la.Option{nil, {la.WithMixedPrecision()}, nil, nil, {la.WithSchedule(la.Unfused)}}[i]
		x := graphtest.Spec{Rows: 70}
		x.QueryType, x.KVType = deviceElements(i)
		s.Queries = []int{70, 33, 0, 7, 12}
		p := graphtest.NewProblem(rng, s, x)
		out, lse := p.AttendThere(t, at.GPU, opts...)
		if err := p.Compare(t, p.ReferenceThere(at), out, lse); err != nil {
			t.Errorf("case %d, %v %v %v: %v", i, s, x.QueryType, x.KVType, err)
		}
	}
}

// Attend makes its schedule on the host, so a recording can't contain Attend.
func TestGPUAttendRecorded(t *testing.T) {
	gpu := devicetest.Open(t)
	x := func() G.Value {
		return graphtest.Upload(t, gpu, graphtest.TensorOf(tensor.Float32, make([]float64, 2*3*64), 1, 2, 3, 64))
	}
	args := la.Args{Out: x(), Q: x(), K: x(), V: x()}
	if err := la.Attend(args); err != nil {
		t.Fatal(err)
	}
	_, err := gpu.Record(func() error { return la.Attend(args) })
	if !errors.Is(err, la.ErrUnsupported) || errors.Is(err, la.ErrInternal) || !strings.Contains(fmt.Sprint(err), "Attend: attention in a recording: that on a cache can be recorded, and that of a node on one GPU without lengths") {
		t.Error(err)
	}
}
