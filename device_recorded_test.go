package leanattention_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/emulated/system"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Attention of nodes without lengths, and its gradients, in a recording: replays with other numbers have the bits of the machine, also when
// other attention runs between them. Lengths and dropout are refused.
func TestGPUGradientsRecorded(t *testing.T) {
	gpu, rng := devicetest.Open(t), reftest.Rand(t)
	type input struct {
		nodes [2]*G.Node // of the recorded graph, and of the other one
		there [2]*device.Tensor
		of    *tensor.Dense
	}
	for i, p := range []*graphtest.Problem{
		graphtest.NewProblem(rng, causal(dense(2, 1, 64, 64, 70, 70)), graphtest.Spec{QueryType: la.BFloat16}),
		graphtest.NewProblem(rng, dense(2, 2, 64, 64, 1, 150), graphtest.Spec{QueryType: la.Float16}),
		graphtest.NewProblem(rng, withSinks(graphtest.Biased(rng, dense(2, 1, 64, 64, 9, 37), 1, 2, 9), 0, 1), graphtest.Spec{QueryType: la.BFloat16}),
	} {
		graphs := [2]*gradientsThere{newGradientsThere(t, p, false), newGradientsThere(t, p, false)}
		if graphs[0].Lengths != nil {
			t.Fatalf("case %d has lengths", i)
		}
		var vms [2]G.VM
		for j, g := range graphs {
			G.Read(g.Out, &g.OutValue)
			vms[j] = G.NewTapeMachine(g.G)
			defer vms[j].Close()
		}
		random := func() *tensor.Dense {
			x := make([]float64, p.Heads*p.Rows*p.ValueDim)
			for k := range x {
				x[k] = rng.NormFloat64()
			}
			return graphtest.TensorOf(p.QueryType, x, graphs[0].d.Shape()...)
		}
		a, b := graphs[0], graphs[1]
		all := []*input{
			{nodes: [2]*G.Node{a.Q, b.Q}, of: p.InQ}, {nodes: [2]*G.Node{a.K, b.K}, of: p.InK}, {nodes: [2]*G.Node{a.V, b.V}, of: p.InV},
			{nodes: [2]*G.Node{a.d, b.d}, of: random()}, {nodes: [2]*G.Node{a.BiasNode, b.BiasNode}, of: p.InBias}, {nodes: [2]*G.Node{a.SinksNode, b.SinksNode}, of: p.InSinks},
		}
		for _, x := range all {
			for j, n := range x.nodes {
				if n != nil {
					x.there[j] = graphtest.Upload(t, gpu, x.of)
					graphtest.Let(t, n, x.there[j])
				}
			}
		}
		graphtest.Again(t, vms[0])
		vms[0].Reset()
		recording, err := gpu.Record(func() error { return la.Cause(vms[0].RunAll()) })
		if err != nil {
			t.Fatalf("case %d: %v", i, err)
		}
		for replay := range 3 {
			p = p.Another(rng)
			for k, of := range []*tensor.Dense{p.InQ, p.InK, p.InV, random(), p.InBias, p.InSinks} {
				for _, d := range all[k].there {
					if d != nil {
						if err := d.CopyFrom(of); err != nil {
							t.Fatal(err)
						}
					}
				}
			}
			if replay == 1 { // the other graph first
				graphtest.Again(t, vms[1])
			}
			if err := recording.Replay(); err != nil {
				t.Fatalf("case %d: %v", i, err)
			}
			if replay != 1 {
				graphtest.Again(t, vms[1])
			}
			for j, got := range append(slices.Clone(a.grads), a.OutValue) {
				want := append(slices.Clone(b.grads), b.OutValue)[j]
				if !slices.Equal(graphtest.Bits(t, graphtest.Download(t, got)), graphtest.Bits(t, graphtest.Download(t, want))) {
					t.Errorf("case %d, replay %d: value %d has other bits than the machine's", i, replay, j)
				}
			}
		}
		if err := recording.Close(); err != nil {
			t.Error(err)
		}
	}
	dropped := dense(2, 1, 64, 64, 9, 20)
	dropped.Dropout, dropped.Seed = .3, 5
	for _, c := range []struct {
		p    *graphtest.Problem
		text string
	}{
		{graphtest.NewProblem(rng, dense(2, 1, 64, 64, 9, 20, 17), graphtest.Spec{QueryType: la.Float16}), "on one GPU without lengths"},
		{graphtest.NewProblem(rng, dropped, graphtest.Spec{QueryType: la.Float16}), "attention with lengths or dropout in a recording"},
	} {
		g := newGradientsThere(t, c.p, false)
		for n, x := range map[*G.Node]*tensor.Dense{g.Q: c.p.InQ, g.K: c.p.InK, g.V: c.p.InV, g.d: graphtest.TensorOf(la.Float16, make([]float64, g.d.Shape().TotalSize()), g.d.Shape()...)} {
			graphtest.Let(t, n, graphtest.Upload(t, gpu, x))
		}
		if g.Lengths != nil {
			graphtest.Let(t, g.Lengths, graphtest.LengthsOf(tensor.Int, c.p.Keys))
		}
		if g.QueryLengths != nil {
			graphtest.Let(t, g.QueryLengths, graphtest.LengthsOf(tensor.Int32, c.p.Queries))
		}
		if g.Seed != nil {
			if err := G.Let(g.Seed, c.p.Shape.Seed); err != nil {
				t.Fatal(err)
			}
		}
		vm := G.NewTapeMachine(g.G)
		defer vm.Close()
		graphtest.Again(t, vm)
		vm.Reset()
		if _, err := gpu.Record(func() error { return la.Cause(vm.RunAll()) }); !errors.Is(err, la.ErrUnsupported) || !strings.Contains(fmt.Sprint(err), c.text) {
			t.Errorf("%v: %v", c.p.Shape, err)
		}
	}
}

// Each call of the driver fails once while attention and its gradients are recorded: then there is no recording, and the next one is right.
func TestGPUGradientsRecordedFaults(t *testing.T) {
	lib := system.Failing(t)
	gpu, rng := devicetest.Open(t), reftest.Rand(t)
	p := graphtest.NewProblem(rng, causal(dense(1, 1, 64, 64, 5, 9)), graphtest.Spec{QueryType: la.Float16})
	g := newGradientsThere(t, p, false)
	for _, x := range []struct {
		n *G.Node
		x *tensor.Dense
	}{{g.Q, p.InQ}, {g.K, p.InK}, {g.V, p.InV}, {g.d, graphtest.TensorOf(la.Float16, slices.Repeat([]float64{1}, 5*64), 1, 1, 5, 64)}} {
		graphtest.Let(t, x.n, graphtest.Upload(t, gpu, x.x))
	}
	vm := G.NewTapeMachine(g.G)
	defer vm.Close()
	bits := func() (all [][]uint64) {
		for _, x := range g.grads {
			all = append(all, graphtest.Bits(t, graphtest.Download(t, x)))
		}
		return all
	}
	graphtest.Again(t, vm)
	want, failed, stride := bits(), 0, int64(5)
	if reftest.Every(t) {
		stride = 1
	}
	for call := int64(1); ; call += stride {
		at := lib.State().Calls + call
		lib.State().FailAt, lib.State().FailWith = at, 2
		vm.Reset()
		recording, err := gpu.Record(func() error { return la.Cause(vm.RunAll()) })
		lib.State().FailAt = 0
		if err == nil {
			if err := errors.Join(recording.Replay(), recording.Close()); err != nil {
				t.Fatal(err)
			}
		} else if failed++; recording != nil {
			t.Fatalf("call %d, %s: a recording and %v", call, lib.State().Failed(), err)
		} else {
			graphtest.Again(t, vm)
		}
		for i, got := range bits() {
			if !slices.Equal(got, want[i]) {
				t.Fatalf("behind call %d, %s: other gradients; %v", call, lib.State().Failed(), err)
			}
		}
		if err == nil && lib.State().Calls < at {
			break
		}
	}
	if failed < 5 {
		t.Errorf("%d calls failed", failed)
	}
}
