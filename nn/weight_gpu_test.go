package nn

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/devicetest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// TestGPUOpsQuantised: on a GPU, all ops that take weights of fewer than 16 bits compute with the numbers that the blocks mean, in a recording
// too, also beside weights of 16 bits.
func TestGPUOpsQuantised(t *testing.T) {
	gpu, rng := devicetest.Open(t), seeded(t)
	for _, f := range quantisedFormats() {
		rows, columns := 8, max(64, f.Block())
		w, decoded := quantised(t, rng, f, rows, columns)
		on, free, err := gpu.UploadWeight(w)
		if err != nil {
			t.Fatal(err)
		}
		x := randomRows(rng, 3, columns)
		bias, gamma, half := randomRows(rng, 1, rows), randomRows(rng, 1, columns), randomRows(rng, 4, columns)
		for _, v := range []*tensor.Dense{bias, gamma} {
			if err := v.Reshape(v.Shape()[1]); err != nil {
				t.Fatal(err)
			}
		}
		want := layersOfPlace(t, nil, x, decoded, bias, gamma, half)
		got := layersOfPlace(t, gpu, x, on, bias, gamma, half)
		for i, y := range want {
			for j, v := range y {
				// Each product of x, below 4, in two parts of 16 bits, which lose 2^-22 of x, and their sums, whose terms may cancel each other.
				of := decoded
				if i == 5 {
					of = half
				}
				terms := 0.0
				for _, w := range of.Float32s()[j%of.Shape()[0]*columns:][:columns] {
					terms += math.Abs(float64(w))
				}
				size := math.Abs(float64(v))
				if off := math.Abs(float64(v - got[i][j])); !(off <= 1e-4*(1+size)+1e-6*terms*(1+math.Sqrt(size))) || i == 3 && off > 1e-6*size {
					t.Fatalf("%v: element %d of output %d is %v, want %v", f, j, i, got[i][j], v)
				}
			}
		}
		if got := fmt.Sprint(on); !strings.Contains(got, f.String()) {
			t.Errorf("%v is printed as %q", f, got)
		}
		g := G.NewGraph()
		head, err := HeadLinear(G.NodeFromAny(g, x, G.WithName("x")), weightNode(g, on), 1)
		if err != nil {
			t.Fatal(err)
		}
		vm := G.NewTapeMachine(g)
		if err := la.Cause(vm.RunAll()); !errors.Is(err, la.ErrUnsupported) || !strings.Contains(err.Error(), f.String()) {
			t.Errorf("heads of %v, %v: %v", f, head, err)
		}
		vm.Close()
		if err := free(); err != nil {
			t.Fatal(err)
		}
		if err := free(); !errors.Is(err, la.ErrClosed) {
			t.Errorf("freed twice: %v", err)
		}
	}
	if _, _, err := gpu.UploadWeight(nil); !errors.Is(err, la.ErrUnsupported) {
		t.Errorf("no weight: %v", err)
	}
}

func randomRows(rng *rand.Rand, rows, columns int) *tensor.Dense {
	x := make([]float32, rows*columns)
	for i := range x {
		x[i] = float32(rng.NormFloat64())
	}
	return tensor.New(tensor.WithShape(rows, columns), tensor.WithBacking(x))
}

// layersOfPlace builds ops that take a weight, runs them on a GPU, or in host memory if it is nil, and on a GPU runs them again in a
// recording, which must have the same bits.
func layersOfPlace(t *testing.T, gpu *device.GPU, x *tensor.Dense, w G.Value, bias, gamma, other *tensor.Dense) (all [][]float32) {
	t.Helper()
	g := G.NewGraph()
	node := func(v *tensor.Dense, name string) *G.Node {
		if gpu == nil {
			return G.NodeFromAny(g, v, G.WithName(name))
		}
		there, err := gpu.Upload(v)
		if err != nil {
			t.Fatal(err)
		}
		return G.NewTensor(g, v.Dtype(), v.Dims(), G.WithShape(v.Shape()...), G.WithName(name), G.WithValue(there))
	}
	nx, nw, nb, ng, no := node(x, "x"), weightNode(g, w), node(bias, "b"), node(gamma, "gamma"), node(other, "other")
	ids := node(tensor.New(tensor.WithBacking([]int32{3, 0, 3})), "ids")
	ys := []*G.Node{
		G.Must(Linear(nx, nw, nb, WithActivation(GELU), WithRMSNorm(ng, 1e-5))), G.Must(GatedLinear(nx, []*G.Node{nw}, []*G.Node{nb}, SiLU)),
		G.Must(GatedLinear(nx, []*G.Node{nw, nw}, nil, SiLU)), G.Must(Embedding(nw, ids, nil)),
	}
	several, err := Linears(nx, []*G.Node{nw, no, nw}, nil)
	if err != nil {
		t.Fatal(err)
	}
	ys = append(ys, several...)
	ys = append(ys, G.Must(Linear(nx, nw, nil, WithResidual(ys[0]))))
	vm := G.NewTapeMachine(g)
	defer vm.Close()
	read := func() (all [][]float32) {
		for _, y := range ys {
			v := y.Value()
			if gpu != nil {
				if v, err = v.(*device.Tensor).Download(); err != nil {
					t.Fatal(err)
				}
			}
			all = append(all, append([]float32(nil), v.Data().([]float32)...))
		}
		return all
	}
	if err := la.Cause(vm.RunAll()); err != nil {
		t.Fatal(err)
	}
	if all = read(); gpu == nil {
		return all
	}
	vm.Reset()
	recording, err := gpu.Record(vm.RunAll)
	if err != nil {
		t.Fatal(err)
	}
	if err := recording.Replay(); err != nil {
		t.Fatal(err)
	}
	for i, y := range read() {
		for j, v := range y {
			if v != all[i][j] {
				t.Fatalf("element %d of output %d of a recording is %v, and was %v", j, i, v, all[i][j])
			}
		}
	}
	if err := recording.Close(); err != nil {
		t.Fatal(err)
	}
	return all
}
