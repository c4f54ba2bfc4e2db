package leanattention_test

import (
	"slices"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/cuda/nvrtc"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/variant"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// TestGPUGradientsVariant: gradients of attention with a variant on a GPU, of q, k, v and of a tensor beside one of ints, in two runs of a
// graph with the same bits; and what is refused.
func TestGPUGradientsVariant(t *testing.T) {
	gpu := devicetest.Open(t)
	nvrtc.ForTest(t)
	rng := reftest.Rand(t)
	build := func(dtype tensor.Dtype, v la.Variant) (p *graphtest.Problem, vm G.VM, grads []G.Value, dO []float64) {
		shape := causal(dense(4, 2, 64, 64, 33, 50, 50))
		table, bucket := make([]float64, 4*8), make([]int32, 50)
		for i := range table {
			table[i] = graphtest.Format(dtype).Round(rng.NormFloat64())
		}
		for i := range bucket {
			bucket[i] = int32(min(i, 7))
		}
		shape.Tensors = []variant.Tensor{{Shape: []int{50}, I32: bucket}, {Shape: []int{4, 8}, F64: table}}
		var err error
		shape.Variant, err = variant.New(variant.Source{Score: v.Score, Visible: v.Visible, Unnormalised: v.Unnormalised, Tensors: []variant.Declared{{Name: "bucket", Rank: 1, Int: true}, {Name: "table", Rank: 2}}})
		if err != nil {
			t.Fatal(err)
		}
		p = graphtest.NewProblem(rng, shape, graphtest.Spec{QueryType: dtype})
		g := p.Graph()
		ints := G.NewTensor(g.G, tensor.Int32, 1, G.WithShape(50), G.WithName("bucket"))
		floats := G.NewTensor(g.G, dtype, 2, G.WithShape(4, 8), G.WithName("table"))
		v.Tensors = map[string]*G.Node{"bucket": ints, "table": floats}
		out, err := la.Attention(g.Q, g.K, g.V, append(append(g.Options(p), g.LengthOptions(p)...), la.WithVariant(v))...)
		if err != nil {
			t.Fatal(err)
		}
		d := G.NewTensor(g.G, dtype, 4, G.WithShape(out.Shape()...), G.WithName("d"))
		nodes, err := G.Backpropagate(G.Nodes{out}, G.Nodes{d}, G.Nodes{g.Q, g.K, g.V, floats})
		if err != nil {
			t.Fatal(err)
		}
		grads = make([]G.Value, len(nodes))
		for i, n := range nodes {
			G.Read(n, &grads[i])
		}
		dO = make([]float64, p.Heads*64*(33+33))
		for i := range dO {
			dO[i] = graphtest.Format(dtype).Round(rng.NormFloat64())
		}
		for _, x := range []struct {
			n *G.Node
			x *tensor.Dense
		}{
			{g.Q, p.InQ}, {g.K, p.InK}, {g.V, p.InV}, {d, denseRows(p, dtype, dO, 64, p.Heads, p.Rows, 64)},
			{ints, tensor.New(tensor.WithShape(50), tensor.WithBacking(bucket))}, {floats, graphtest.TensorOf(dtype, table, 4, 8)},
		} {
			graphtest.Let(t, x.n, graphtest.Upload(t, gpu, x.x))
		}
		if g.Lengths != nil {
			graphtest.Let(t, g.Lengths, graphtest.LengthsOf(tensor.Int, p.Keys))
		}
		if g.QueryLengths != nil {
			graphtest.Let(t, g.QueryLengths, graphtest.LengthsOf(tensor.Int32, p.Queries))
		}
		return p, G.NewTapeMachine(g.G), grads, dO
	}
	const score = "2*tanh(score/2) + table[head][max(0, min(bucket[min(abs(query-key), 49)], 7))]"
	cases := []struct {
		dtype tensor.Dtype
		v     la.Variant
	}{
		{la.Float16, la.Variant{Score: score, Visible: "(query-key) % 3 != 1"}},
		{la.BFloat16, la.Variant{Score: score, Visible: "(query-key) % 3 != 1"}},
		{la.Float16, la.Variant{Score: "-softplus(-(" + score + "))", Unnormalised: true}},
	}
	rng.Shuffle(len(cases), func(i, j int) { cases[i], cases[j] = cases[j], cases[i] })
	for _, x := range cases[:reftest.Cases(t, 1, len(cases))] {
		dtype := x.dtype
		p, vm, grads, dO := build(dtype, x.v)
		precision := reftest.Precision{Acc: reftest.Float32, P: graphtest.Format(dtype), Out: graphtest.Format(dtype)}
		want := p.Backward(precision, p.Reference(precision), dO, nil)
		var bits [][]uint64
		for again := range 2 {
			graphtest.Again(t, vm)
			for j, x := range grads {
				if got := graphtest.Bits(t, graphtest.Download(t, x)); again == 0 {
					bits = append(bits, got)
				} else if !slices.Equal(got, bits[j]) {
					t.Fatalf("%v: gradient %d has other bits in the second run", dtype, j)
				}
			}
		}
		for j, x := range []struct {
			want, bound []float64
			heads, rows int
		}{{want.DQ, want.DQBound, p.Heads, 33}, {want.DK, want.DKBound, p.KVHeads, 50}, {want.DV, want.DVBound, p.KVHeads, 50}, {want.DTensors[1], want.DTensorsBound[1], 0, 0}} {
			got := graphtest.Floats(t, graphtest.Download(t, grads[j]))
			if x.heads > 0 {
				other := make([]float64, 0, len(got))
				for i := range got { // by token and head, as the reference
					seq, row, head, c := i/(x.rows*x.heads*64), i/(x.heads*64)%x.rows, i/64%x.heads, i%64
					other = append(other, got[((seq*x.heads+head)*x.rows+row)*64+c])
				}
				got = other
			}
			if err := reftest.Compare(got, x.want, x.bound, 1, 1, len(got)); err != nil {
				t.Errorf("%v: gradient %d: %v", dtype, j, err)
			}
		}
		if err := vm.Close(); err != nil {
			t.Fatal(err)
		}
	}
	for _, x := range []struct {
		dtype tensor.Dtype
		v     la.Variant
		text  string
	}{
		{tensor.Float32, la.Variant{Score: score}, "gradients of float32 on GPUs: a variant"},
		{la.Float16, la.Variant{Score: score, Unnormalised: true}, "in float16: intervals do not show that Score is at most 0"},
	} {
		_, vm, _, _ := build(x.dtype, x.v)
		wantError(t, la.Cause(vm.RunAll()), la.ErrUnsupported, "Attention", x.text)
		if err := vm.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
