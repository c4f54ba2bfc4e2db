package ranks_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/rankstest"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/ranks"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// trained returns the weights of a small model after some steps, each of two runs of some of a batch's rows, of which each rank has a
// part. On the last rank, a gradient of the second step is infinite at first.
func trained(t *testing.T, comm *ranks.Comm, gpu *device.GPU, solver func(rows int) G.Solver) (all []float32) {
	t.Helper()
	const rows, width, words, runs = 12, 8, 5, 2 // rows of all ranks, in a run
	w := ranks.World{Size: 1}
	if comm != nil {
		w = comm.World()
	}
	from, to := w.Part(rows)
	g, rng := G.NewGraph(), rand.New(rand.NewPCG(5, 6)) // the same on all ranks
	random := func(shape ...int) *tensor.Dense {
		x := make([]float32, tensor.Shape(shape).TotalSize())
		for i := range x {
			x[i] = float32(rng.NormFloat64())
		}
		return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))
	}
	must := func(n *G.Node, err error) *G.Node {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	data := func(name string, v *tensor.Dense) *G.Node {
		n := leaf(g, name, v)
		if gpu != nil {
			n = must(device.ToGPU(n, gpu))
		}
		return n
	}
	var weights G.Nodes
	weight := func(name string, shape ...int) *G.Node {
		var v G.Value = random(shape...)
		if gpu != nil {
			there, err := gpu.Upload(v.(*tensor.Dense))
			if err != nil {
				t.Fatal(err)
			}
			v = there
		}
		n := G.NewTensor(g, tensor.Float32, len(shape), G.WithShape(shape...), G.WithName(name), G.WithValue(v))
		weights = append(weights, n)
		return n
	}
	x, targets, scale := random(to-from, width), tensor.New(tensor.WithShape(to-from), tensor.Of(tensor.Int32)), random(to-from)
	rng = rand.New(rand.NewPCG(7, 8))
	h := must(nn.Linear(data("x", x), weight("up", width, width), weight("bias", width), nn.WithActivation(nn.GELU)))
	loss := must(nn.CrossEntropy(h, weight("letters", words, width), nil, data("targets", targets)))
	if _, err := nn.Backpropagate(G.Nodes{loss}, G.Nodes{data("scale", scale)}, weights); err != nil {
		t.Fatal(err)
	}
	var opts []G.VMOpt
	if gpu == nil {
		opts = append(opts, G.BindDualValues(weights...))
	}
	vm := G.NewTapeMachine(g, opts...)
	defer vm.Close()
	s := solver(rows * runs)
	for step := range 4 {
		now := 1.0
		switch s := s.(type) {
		case *nn.AdamW:
			now = s.Scale
		case *nn.SGD:
			now = s.Scale
		}
		for run := range runs {
			batch := random(rows, width)
			copy(x.Data().([]float32), batch.Data().([]float32)[from*width:to*width])
			for i := range rows {
				word := rng.IntN(words)
				if i >= from && i < to {
					targets.Data().([]int32)[i-from], scale.Data().([]float32)[i-from] = int32(word), float32(now)
				}
			}
			if step == 1 && run == 0 && w.Rank == w.Size-1 {
				scale.Data().([]float32)[0] = float32(math.Inf(1))
			}
			vm.Reset()
			err := la.Cause(vm.RunAll())
			if model := G.NodesToValueGrads(weights); err != nil {
			} else if run < runs-1 {
				err = s.(interface {
					Accumulate([]G.ValueGrad) error
				}).Accumulate(model)
			} else {
				err = s.Step(model)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, n := range weights {
		v := n.Value()
		if d, ok := v.(*device.Tensor); ok {
			there, err := d.Download()
			if err != nil {
				t.Fatal(err)
			}
			v = there
		}
		all = append(all, v.Data().([]float32)...)
	}
	return all
}

// trainedTexts are the weights that two solvers make, twice. Without ranks there is one.
func trainedTexts(t *testing.T, comm *ranks.Comm, gpu *device.GPU) string {
	t.Helper()
	var texts [2]strings.Builder
	for i := range texts {
		for _, solver := range []func(int) G.Solver{
			func(rows int) G.Solver {
				return &nn.AdamW{Rate: 0.01, Beta1: 0.9, Beta2: 0.99, Epsilon: 1e-3, Clip: 0.5, Rows: rows, Scale: 256, Grow: 50, Ranks: comm}
			},
			func(rows int) G.Solver {
				return &nn.SGD{Rate: 0.1, Rows: rows, Scale: 256, Grow: 50, Ranks: comm}
			},
		} {
			for _, x := range trained(t, comm, gpu, solver) {
				fmt.Fprintln(&texts[i], x)
			}
		}
	}
	if texts[0].String() != texts[1].String() {
		t.Error("two trainings with the same seed differ")
	}
	return texts[0].String()
}

// alikeTrained checks that all ranks have the same bits, which are those of one process up to rounding.
func alikeTrained(t *testing.T, all ...string) {
	t.Helper()
	one := trainedTexts(t, nil, nil)
	var want []float64
	for line := range strings.Lines(one) {
		var x float64
		fmt.Sscan(line, &x)
		want = append(want, x)
	}
	if len(want) != 2*(8*8+8+5*8) {
		t.Fatalf("%d numbers", len(want))
	}
	for rank, text := range all {
		if text != all[0] {
			t.Errorf("ranks 0 and %d of %d differ", rank, len(all))
		}
		var got []float64
		for line := range strings.Lines(text) {
			var x float64
			fmt.Sscan(line, &x)
			got = append(got, x)
		}
		near(t, fmt.Sprintf("rank %d of %d", rank, len(all)), got, want, 1e-4)
	}
}

// Ranks in host memory that train together have the weights of one rank with the whole batch.
func TestHostTrains(t *testing.T) {
	if !rankstest.Child() {
		for size := 1; size <= 3; size++ {
			alikeTrained(t, onHosts(t, size)...)
		}
		return
	}
	comm := joinHost(t)
	text := trainedTexts(t, comm, nil)
	if err := (&nn.SGD{Ranks: new(ranks.Comm)}).Step(nil); !errors.Is(err, la.ErrState) || !strings.Contains(fmt.Sprint(err), "ranks.Join") {
		t.Errorf("a communicator that is not joined: %v", err)
	}
	if err := comm.Close(); err != nil {
		t.Fatal(err)
	}
	rankstest.Write(t, text)
}
