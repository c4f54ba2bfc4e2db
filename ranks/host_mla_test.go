package ranks_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/rankstest"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/ranks"
	"gorgonia.org/leanattention/rope"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Sizes of an MLA, odd ones. Kernels need others: see TestContext.
var mlaWidth, mlaHeads, mlaNope, mlaRope, mlaLatent, mlaValue = 7, 5, 6, 4, 8, 3

const mlaTokens = 3 // of a page

// mla is a process's attention to latent vectors: its cache, a graph for rows of it, and the sequences.
type mla struct {
	*testing.T
	x    *G.Node
	m    *nn.MLA
	step *la.Step
	seqs []*la.Sequence
	lse  *G.Node
	out  *G.Node
	vm   G.VM
	read G.Value
	gpu  *device.GPU // nil: host memory
}

// put returns a value where a computes.
func (a *mla) put(v *tensor.Dense) G.Value {
	if a.gpu == nil {
		return v
	}
	d, err := a.gpu.Upload(v)
	if err != nil {
		a.Fatal(err)
	}
	return d
}

// leaf returns an input there.
func (a *mla) leaf(g *G.ExprGraph, name string, v *tensor.Dense) *G.Node {
	return G.NewTensor(g, v.Dtype(), len(v.Shape()), G.WithShape(v.Shape()...), G.WithName(name), G.WithValue(a.put(v)))
}

// newMLA makes the graph of rows whose latent weights are w, up to what finish makes of the attention. gpu may be nil.
func newMLA(t *testing.T, gpu *device.GPU, w *nn.LatentWeights, rows int, finish func(m *mla, out *G.Node) (*G.Node, error)) *mla {
	t.Helper()
	latent, g := w.Norm.Shape()[0], G.NewGraph()
	a := &mla{T: t, gpu: gpu}
	cache, err := la.NewCache(la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: latent + mlaRope, ValueDim: latent, ValuesInKeys: true, PageSize: mlaTokens, Pages: 200, Device: gpu})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cache.Close() })
	if a.step, err = cache.NewStep(rows); err != nil {
		t.Fatal(err)
	}
	for range rows {
		seq, err := cache.NewSequence()
		if err != nil {
			t.Fatal(err)
		}
		a.seqs = append(a.seqs, seq)
	}
	query := tensorOf(tensor.Float32, numbers(2, mlaHeads*(mlaNope+mlaRope)*mlaWidth), mlaHeads*(mlaNope+mlaRope), mlaWidth)
	a.x = a.leaf(g, "x", tensorOf(tensor.Float32, make([]float64, rows*mlaWidth), rows, mlaWidth))
	a.m = &nn.MLA{Heads: mlaHeads, Eps: 1e-6, Query: a.leaf(g, "query", query), Down: a.leaf(g, "down", w.Down), Norm: a.leaf(g, "norm", w.Norm), Key: a.leaf(g, "key", w.Key), Value: a.leaf(g, "value", w.Value)}
	out, err := a.m.Absorbed(a.x, func(q, k *G.Node) (*G.Node, error) {
		out, err := la.CachedAttention(q, k, nil, a.step.Layer(0), la.WithCausal(), la.WithScale(1/math.Sqrt(float64(mlaNope+mlaRope))),
			la.WithRotary(rope.Config{HeadDim: latent + mlaRope, Dim: mlaRope, Last: true}))
		if err == nil {
			a.lse, err = la.LogSumExp(out)
		}
		return out, err
	})
	if err == nil {
		a.out, err = finish(a, out)
	}
	if err != nil {
		t.Fatal(err)
	}
	if gpu == nil {
		G.Read(a.out, &a.read)
	}
	a.vm = G.NewTapeMachine(g)
	t.Cleanup(func() { _ = a.vm.Close() })
	return a
}

// do runs a step with these rows of x, and returns the result.
func (a *mla) do(appends []la.Append, x []float64) []float64 {
	a.Helper()
	rows := a.x.Shape()[0]
	if err := G.Let(a.x, a.put(tensorOf(tensor.Float32, append(slices.Clone(x), make([]float64, rows*mlaWidth-len(x))...), rows, mlaWidth))); err != nil {
		a.Fatal(err)
	}
	if err := a.step.Run(appends, func() error {
		defer a.vm.Reset()
		return la.Cause(a.vm.RunAll())
	}); err != nil {
		a.Fatal(err)
	}
	if a.gpu == nil {
		return slices.Clone(floats(a.read))
	}
	y, err := a.out.Value().(*device.Tensor).Download()
	if err != nil {
		a.Fatal(err)
	}
	return floats(y)
}

// latentWeights are those of one layer, the same on every rank.
func latentWeights(t *testing.T) *nn.LatentWeights {
	t.Helper()
	of := func(seed uint64, shape ...int) *tensor.Dense {
		return tensorOf(tensor.Float32, numbers(seed, tensor.Shape(shape).TotalSize()), shape...)
	}
	key, value, err := nn.SplitKVUp(of(3, mlaHeads*(mlaNope+mlaValue), mlaLatent), mlaHeads, mlaNope)
	if err != nil {
		t.Fatal(err)
	}
	return &nn.LatentWeights{Heads: mlaHeads, Down: of(4, mlaLatent+mlaRope, mlaWidth), Norm: of(5, mlaLatent), Key: key, Value: value}
}

// TestHostTPLA: two ranks with half of the latent vectors each sum to what one process has of both halves, with one sum.
func TestHostTPLA(t *testing.T) {
	if !rankstest.Child() {
		right(t, 2)
		return
	}
	comm := joinHost(t)
	_, shards, err := (&nn.TPLA{Seed: 5}).Slice(latentWeights(t))
	if err != nil {
		t.Fatal(err)
	}
	const rows = 3
	sum := newMLA(t, nil, shards[comm.World().Rank], rows, func(m *mla, out *G.Node) (*G.Node, error) { return nn.AllReduce(out, comm) })
	var each []*mla
	for _, w := range shards {
		each = append(each, newMLA(t, nil, w, rows, func(m *mla, out *G.Node) (*G.Node, error) { return out, nil }))
	}
	of := func(m *mla, tokens int) []la.Append {
		return []la.Append{{Seq: m.seqs[0], Tokens: 1}, {Seq: m.seqs[1], Tokens: tokens}}
	}
	for round := range 12 {
		tokens := 1 + round%2
		x := numbers(uint64(100+round), (1+tokens)*mlaWidth)
		got, want := sum.do(of(sum, tokens), x), make([]float64, rows*mlaHeads*mlaValue)
		for _, m := range each {
			for i, v := range m.do(of(m, tokens), x) {
				want[i] += v
			}
		}
		near(t, "sum", got, want, 1e-6)
	}
	if err := comm.Close(); err != nil {
		t.Fatal(err)
	}
	rankstest.Write(t, allRight(comm.World().Size, comm.World().Rank))
}

// right runs a part on so many ranks, which must find no error.
func right(t *testing.T, size int) {
	t.Helper()
	for rank, text := range onHosts(t, size) {
		if text != allRight(size, rank) {
			t.Errorf("rank %d of %d has written %q", rank, size, text)
		}
	}
}

// TestHostContext: ranks that have some pages of the context each, all heads, and the values' weights before the exchange, make what one
// process makes, each for its own heads; and the sum of the ranks' output projections is that of one process. Contexts are ragged: at first
// all but one rank have no token, and some sequences stay shorter than a page.
func TestHostContext(t *testing.T) {
	if !rankstest.Child() {
		right(t, 2)
		right(t, 3)
		return
	}
	comm := joinHost(t)
	testContext(t, comm, nil, 60, 1e-5)
	if err := comm.Close(); err != nil {
		t.Fatal(err)
	}
	rankstest.Write(t, allRight(comm.World().Size, comm.World().Rank))
}

// testContext compares the ranks' parts of the context, on their GPUs if there are some, with all of it in host memory.
func testContext(t *testing.T, comm *ranks.Comm, gpu *device.GPU, rounds int, tolerance float64) {
	world, w := comm.World(), latentWeights(t)
	const rows = 4
	from, to := world.Part(mlaHeads)
	project := tensorOf(tensor.Float32, numbers(6, mlaWidth*mlaHeads*mlaValue), mlaWidth, mlaHeads*mlaValue)
	own, err := project.Slice(nil, G.S(from*mlaValue, to*mlaValue))
	if err != nil {
		t.Fatal(err)
	}
	part := newMLA(t, gpu, w, rows, func(m *mla, out *G.Node) (*G.Node, error) {
		y, err := nn.MergeRanks(out, m.lse, comm)
		if err != nil {
			return nil, err
		}
		if s := y.Shape(); !s.Eq(tensor.Shape{rows, (to - from) * mlaValue}) {
			t.Errorf("merged heads have shape %v", s)
		}
		if y, err = nn.Linear(y, m.leaf(m.x.Graph(), "project", own.Materialize().(*tensor.Dense)), nil); err != nil {
			return nil, err
		}
		return nn.AllReduce(y, comm)
	})
	whole := newMLA(t, nil, w, rows, func(m *mla, out *G.Node) (*G.Node, error) {
		return nn.Linear(out, leaf(m.x.Graph(), "project", project), nil)
	})
	rng := rand.New(rand.NewPCG(9, 9)) // the same on all ranks
	lengths := make([]int, rows)
	for round := range rounds {
		var mine, all []la.Append
		for i := range rows {
			if rng.IntN(1+i*i) > 0 { // the last sequence is the shortest
				continue
			}
			a := la.Append{Seq: part.seqs[i], Tokens: 1, Positions: []int{lengths[i]}}
			a.QueryOnly = lengths[i]/mlaTokens%world.Size != world.Rank
			mine, all = append(mine, a), append(all, la.Append{Seq: whole.seqs[i], Tokens: 1})
			lengths[i]++
		}
		x := numbers(uint64(1000+round), len(all)*mlaWidth)
		near(t, fmt.Sprint("round ", round), part.do(mine, x)[:len(all)*mlaWidth], whole.do(all, x)[:len(all)*mlaWidth], tolerance)
	}
	stored := 0
	for _, s := range part.seqs {
		stored += s.Len()
	}
	if lengths[0] < rounds*5/6 || lengths[3] > rounds/2 || stored >= lengths[0]+lengths[1]+lengths[2]+lengths[3] {
		t.Errorf("lengths %v, %d stored", lengths, stored)
	}
}
